"""`jaxlamina bench split`: its options, and how its results look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from jaxlamina.bench.flags import AsJson, option
from jaxlamina.bench.lists import whole_numbers
from jaxlamina.bench.report import Columns, Part, dim, progress, table, tell, verdict
from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config

if TYPE_CHECKING:
    from jaxlamina.bench.split_bench import SplitTimes

COLUMNS: Columns = (
    ("layers", lambda t: t.n_layers, ""),
    ("parameters", lambda t: _counted(t.n_params), ""),
    ("equations", lambda t: t.n_eqns, ""),
    ("trace s", lambda t: t.trace_s, ".2f"),
    ("split s", lambda t: t.split_s, ".2f"),
    ("slices", lambda t: t.n_slices, ""),
    ("programs", lambda t: t.n_programs, ""),
    ("compile s", lambda t: t.compile_s, ".2f"),
)
EACH: Columns = (("each s", lambda t: t.every_slice_s, ".1f"),)


def split_command(
    config: Annotated[
        str, option("A model shape: a name in configs/models, or a config.json or .toml.")
    ] = "llama-2-70b",
    layers: Annotated[str, option("Layer counts, separated by commas.")] = "8,32,80",
    batch: Annotated[int, option("Requests in the decode step that is split.", min=1)] = 8,
    dtype: Annotated[str, option("Weights: bfloat16 or float32.")] = "bfloat16",
    every_slice: Annotated[
        bool, option("Also compile every slice on its own: what sharing saves. Slow.", "--every-slice")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time tracing, splitting and compiling of a model shape, by number of layers. No weights are
    allocated."""
    shape = model_config(config)
    from jaxlamina.bench import machine, split_bench

    counts = whole_numbers("--layers", layers)
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"--dtype {dtype!r} must be bfloat16 or float32")
    where = machine.describe()
    with progress() as on_progress:
        found = split_bench.measure(
            shape, counts, batch_size=batch, dtype=dtype, every_slice=every_slice, on_progress=on_progress
        )
    limits = {"split_s": split_bench.SPLIT_LIMIT_S, "n_programs": split_bench.PROGRAMS_LIMIT}
    record = {"config": config, "batch": batch, "dtype": dtype, "limits": limits}
    title = f"{config}, decode step of {batch} requests, {dtype}, abstract weights"
    results = [times.to_dict() for times in found]
    tell("split", {**record, "results": results}, where, _parts(title, found, limits), as_json=as_json)


def _counted(n: int) -> str:
    for one, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= one:
            return f"{n / one:.1f} {unit}"
    return str(n)


def _parts(title: str, found: Sequence[SplitTimes], limits: dict[str, float]) -> Iterator[Part]:
    is_each = any(t.every_slice_s is not None for t in found)
    yield table(found, (*COLUMNS, *EACH) if is_each else COLUMNS, title)
    for t in found:
        programs = ", ".join(f"{name} {seconds:.2f} s" for name, _, seconds in t.programs)
        yield dim(f"compiled at {t.n_layers} layers: {programs}")
    first, last = (of(found, key=lambda t: t.n_layers) for of in (min, max))
    yield (
        f"context at a cut: {'–'.join(f'{n:,}' for n in dict.fromkeys(last.context_bytes))} B; exchanged "
        f"with the memory pool: {last.exchanged_bytes_per_token:,.0f} B a token at {last.n_layers} layers"
    )
    yield (
        f"at {last.n_layers} layers: split in {last.split_s:.2f} s (limit {limits['split_s']:g} s: "
        f"{verdict(last.split_s <= limits['split_s'])}), {last.n_programs} programs (limit "
        f"{limits['n_programs']}: {verdict(last.n_programs <= limits['n_programs'])})"
    )
    if first is not last:
        ratio = last.compile_s / first.compile_s
        yield f"compile time at {last.n_layers} over {first.n_layers} layers: {ratio:.2f} (1 is flat)"
