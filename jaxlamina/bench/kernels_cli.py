"""`jaxlamina bench kernels`: its options, and how its results look."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from jaxlamina.bench.flags import AsJson, Rounds, option
from jaxlamina.bench.report import Columns, Part, left_out, progress, table, tell
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.bench.kernels_bench import KernelCase, Result

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def kernels_command(
    case: Annotated[
        str, option("Cases, separated by commas: mha, gqa, long, ragged; demo, long, ragged on a CPU.")
    ] = "all",
    peers: Annotated[
        str, option("Peers, separated by commas; auto: all there are; on a CPU native and XLA.")
    ] = "auto",
    rounds: Rounds = 5,
    seed: Annotated[
        int | None,
        option("Of inputs and shuffled slots; default: another every run.", min=0, max=2**32 - 1),
    ] = None,
    tune: Annotated[
        bool, option("Try every tuning of the Hopper kernel and write the best to its table.", "--tune")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time partial attention over shuffled token slots, beside other kernels; check it against float64
    first."""
    os.environ.setdefault(_PREALLOCATE, "false")  # another library needs memory of the same GPU
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxlamina.bench import kernel_peers, kernels_bench, machine
    from jaxlamina.kv.measure import measure as measure_kv

    small = jax.default_backend() == "cpu"
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    known = kernels_bench.cases(small, seed)
    chosen = [known[name] for name in _chosen("--case", case, "all", list(known), list(known))]
    auto = [name for name in kernel_peers.PEERS if small == name.startswith(("native", "xla"))]
    names = _chosen("--peers", peers, "auto", auto, list(kernel_peers.PEERS))
    where = machine.describe(("flashinfer-python", "torch", "numpy"))
    dtype = jnp.float32 if small else jnp.bfloat16
    with progress() as on_progress:
        if tune:
            _tune(chosen, jnp.bfloat16, seed, on_progress)
        results, missing, limit = kernels_bench.measure(
            chosen, names, n_rounds=rounds, seed=seed, dtype=dtype, on_progress=on_progress
        )
        on_progress("KV manager")
        kv = measure_kv()
    record = {
        "accelerator": jax.devices()[0].device_kind,
        "seed": seed,
        "read_bytes_per_s": limit,
        "results": [r.to_dict() for r in results],
        "left_out": missing,
        "kv": asdict(kv),
    }
    tell("kernels", record, where, _parts(record, chosen, results), as_json=as_json)


def _chosen(option: str, text: str, everything: str, default: list[str], known: list[str]) -> list[str]:
    if text == everything:
        return default
    # a name may hold a comma ("cudnn, contiguous"): the longest known name that the text begins with is taken
    names, rest = [], text.strip()
    while rest:
        fitting = [n for n in known if rest == n or rest.startswith((n + ",", n + " ,"))]
        if not fitting:
            raise UserError(f"{option} {text!r}: {rest.split(',')[0]!r} must be one of: {'; '.join(known)}")
        name = max(fitting, key=len)
        names.append(name)
        rest = rest[len(name) :].lstrip(" ,")
    return list(dict.fromkeys(names))


def _tune(chosen: list[KernelCase], dtype: Any, seed: int, on_progress: Callable[[str], object]) -> None:
    from jaxlamina.bench import kernels_tune
    from pallas_kernels.gpu import tunings

    found = dict(tunings.table())
    for c in chosen:
        found |= kernels_tune.tune(c, dtype, seed, on_progress)
    tunings.write(found)
    tunings.table.cache_clear()


def _parts(record: dict[str, Any], cases: Sequence[KernelCase], results: Sequence[Result]) -> Iterator[Part]:
    yield record["accelerator"]
    for case in cases:
        mine = [r for r in results if r.case == case.name]
        if mine:
            yield table(mine, _columns(mine[0]), str(case))
    yield f"one long array is read at {record['read_bytes_per_s'] / 1e12:.3f} TB/s in this run"
    yield from left_out(record["left_out"])
    kv = record["kv"]
    yield (
        f"KV manager, {kv['n_slots']:,} slots: {kv['slot_operations_per_s'] / 1e6:.0f} M slot operations/s; "
        f"a decode step of 256 requests {kv['decode_step_us']:.0f} µs; prefix of 1,000 tokens found in "
        f"{kv['prefix_match_us']:.0f} µs"
    )


def _columns(ours: Result) -> Columns:
    return (
        ("kernel", lambda r: r.peer, "<"),
        ("µs", lambda r: r.time_us, ".1f"),
        ("TB/s", lambda r: r.bytes_per_s / 1e12, ".3f"),
        ("% of read", lambda r: r.of_limit, ".1%"),
        ("time / ours", lambda r: None if r is ours else 1 / ours.ratio[r.peer], ".3f"),
        ("error", lambda r: r.error, ".1e"),
    )
