"""`jaxlamina bench kernels`: options in, a table and one last line of JSON out. Knows how results look."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jaxlamina.console.tables import print_table, print_where
from jaxlamina.errors import UserError

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def kernels_command(
    case: Annotated[
        str, typer.Option(help="Cases, separated by commas: mha, gqa, long, ragged; demo, ragged on a CPU.")
    ] = "all",
    peers: Annotated[
        str, typer.Option(help="Peers, separated by commas; auto: all there are, plain XLA on a CPU alone.")
    ] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, in which peers take turns.")] = 5,
    seed: Annotated[
        int | None, typer.Option(help="Of inputs and shuffled slots; default: another every run.")
    ] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Try every tuning of the Hopper kernel and write the best to its table."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Only the line of JSON on stdout, no tables.")
    ] = False,
) -> None:
    """Time partial attention over shuffled token slots, beside other kernels; check it against float64 first."""
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
    auto = [name for name in kernel_peers.PEERS if small == name.startswith("xla")]
    names = _chosen("--peers", peers, "auto", auto, list(kernel_peers.PEERS))
    where = machine.describe(("flashinfer-python", "torch", "numpy"))
    device = jax.devices()[0].device_kind
    console = Console(stderr=True)
    with console.status("starting") as status:
        if tune:
            _tune(chosen, jnp.bfloat16, seed, status.update)
        results, left_out, limit = kernels_bench.measure(
            chosen,
            names,
            n_rounds=rounds,
            seed=seed,
            dtype=jnp.float32 if small else jnp.bfloat16,
            on_progress=status.update,
        )
        status.update("KV manager")
        kv = measure_kv()
    record = {
        "bench": "kernels",
        "accelerator": device,
        "seed": seed,
        "read_bytes_per_s": limit,
        "results": [r.to_dict() for r in results],
        "left_out": left_out,
        "kv": asdict(kv),
        **where.to_dict(),
    }
    if not as_json:
        _show(Console(), record, known, results, where)
    print(json.dumps(record))


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


def _tune(chosen: list[Any], dtype: Any, seed: int, on_progress: Any) -> None:
    from jaxlamina.bench import kernels_tune
    from pallas_kernels.gpu import tunings

    found = dict(tunings.table())
    for c in chosen:
        found |= kernels_tune.tune(c, dtype, seed, on_progress)
    tunings.write(found)
    tunings.table.cache_clear()


def _show(
    out: Console, record: dict[str, Any], known: dict[str, Any], results: list[Any], where: Any
) -> None:
    print_where(out, where, f"{record['accelerator']}; ")
    for name in dict.fromkeys(r.case for r in results):
        case, mine = known[name], [r for r in results if r.case == name]
        lengths = case.lengths
        context = (
            f"{lengths[0]}"
            if len(set(lengths)) == 1
            else f"{min(lengths)}–{max(lengths)}, {sum(lengths)} in all"
        )
        table = Table(
            title=f"{name}: B {len(lengths)}, N {case.N}, K {case.K}, H {case.H}, tokens {context}",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        table.add_column("kernel", no_wrap=True)
        for title in ("µs", "TB/s", "% of read", "time / ours", "error"):
            table.add_column(title, justify="right", no_wrap=True)
        for r in mine:
            table.add_row(
                r.peer,
                f"{r.time_us:.1f}",
                f"{r.bytes_per_s / 1e12:.3f}",
                f"{r.of_limit:.1%}",
                "–" if r is mine[0] else f"{1 / mine[0].ratio[r.peer]:.3f}",
                "–" if r.error is None else f"{r.error:.1e}",
            )
        print_table(out, table)
    out.print(f"one long array is read at {record['read_bytes_per_s'] / 1e12:.3f} TB/s in this run")
    for what, why in record["left_out"].items():
        out.print(f"left out: {what}: {why}", style="yellow", soft_wrap=True)
    kv = record["kv"]
    out.print(
        f"KV manager, {kv['n_slots']:,} slots: {kv['slot_operations_per_s'] / 1e6:.0f} M slot operations/s; a decode "
        f"step of 256 requests {kv['decode_step_us']:.0f} µs; prefix of 1,000 tokens found in "
        f"{kv['prefix_match_us']:.0f} µs",
        soft_wrap=True,
    )
