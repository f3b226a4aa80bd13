"""`jaxlamina bench step`: options in, a table and one last line of JSON out. Knows how results look."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jaxlamina.console.tables import print_table
from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config


def step_command(
    config: Annotated[
        str, typer.Option(help="A model shape: a name in configs/models, or a config.json.")
    ] = "llama-3-8b",
    case: Annotated[
        str, typer.Option(help="Requests x stored tokens, separated by commas, such as 64x4096.")
    ] = "16x2048,64x4096,160x4096",
    dtype: Annotated[str, typer.Option(help="Weights and KV: bfloat16 or float32.")] = "bfloat16",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the shape has.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, in which the ways take turns.")] = 5,
    unsplit: Annotated[
        bool, typer.Option("--unsplit/--no-unsplit", help="Also one program on one device, to compare with.")
    ] = True,
    local: Annotated[
        bool, typer.Option("--local", help="Also slice by slice from Python, on the same one device.")
    ] = False,
    staggered: Annotated[
        str, typer.Option(help="Also split into so many staggered batches: numbers, separated by commas.")
    ] = "",
    mini_batches: Annotated[
        str,
        typer.Option(help="Also with each layer's messages in so many parts: numbers, separated by commas."),
    ] = "",
    prefill: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Also with so many tokens of another prompt, in the decode step, in a step after it, or on a prefill worker "
            "meanwhile where the job has one.",
        ),
    ] = None,
    devices: Annotated[
        int,
        typer.Option(
            min=1,
            help="Also unsplit over so many devices of this process, by requests and by weights; without ranks.",
        ),
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Only the line of JSON on stdout, no tables.")
    ] = False,
) -> None:
    """Time a decode step, unsplit and split over ranks: `jaxlamina launch --dop 1,1 -- bench step`."""
    shape = model_config(config)
    import jax

    from jaxlamina import ranks
    from jaxlamina.bench import machine, split_bench, step_bench
    from jaxlamina.ranks.layout import partition_of
    from jaxlamina.run.make import DTYPES

    if dtype not in DTYPES:
        raise UserError(f"{dtype=} must be one of {', '.join(DTYPES)}")
    cases, n_batches = step_bench.cases_of(case), step_bench.numbers_of(staggered)
    n_parts = step_bench.numbers_of(mini_batches, "--mini-batches")
    if layers is not None:
        shape = split_bench.with_layers(shape, layers)
    group = ranks.current()
    if group is None and not (unsplit or local):
        raise UserError("nothing is left to be timed: start ranks with `jaxlamina launch … -- bench step`")
    if devices > 1 and (group is not None or not unsplit or devices > len(jax.local_devices())):
        raise UserError(
            f"--devices {devices} is of one process with so many devices ({len(jax.local_devices())} here), unsplit and "
            "without ranks"
        )
    console = Console(stderr=True)
    here = machine.describe(["mpi4jax", "mpi4py"])
    device = group.device if group is not None else jax.local_devices()[0]
    failed: list[str] = []
    with console.status("starting") as status:
        results, limit = step_bench.measure(
            shape,
            cases,
            group=group,
            dtype=DTYPES[dtype],
            n_rounds=rounds,
            unsplit=unsplit,
            local=local,
            staggered=n_batches,
            mini_batches=n_parts,
            prefill=prefill or 0,
            n_devices=devices,
            device=device,
            on_progress=status.update,
            on_failure=failed.append,
        )
    job = (
        "one device"
        if group is None
        else f"{group.description}, {partition_of(group.cluster, [shape.num_key_value_heads])}"
    )
    record = {
        "bench": "step",
        "model": config,
        "n_layers": shape.num_hidden_layers,
        "dtype": dtype,
        "job": job,
        "accelerator": device.device_kind,
        "read_bytes_per_s": limit,
        "results": [r.to_dict() for r in results],
        "failed": failed,
        **asdict(here),
    }
    if not as_json:
        out = Console(highlight=False)
        out.print(f"{device.device_kind}; {here.line()}", soft_wrap=True)
        out.print(
            f"{config}, {shape.num_hidden_layers} layers, {dtype}; {job}; read at {limit / 1e12:.3f} TB/s"
        )
        print_table(out, _table([r for r in results if not r.n_prompt_tokens], shape.num_hidden_layers))
        if prefill is not None:
            print_table(out, _prefill_table([r for r in results if r.n_prompt_tokens]))
        for line in failed:
            out.print(f"failed, and left out: {line}", style="yellow", markup=False, soft_wrap=True)
    print(json.dumps(record))
    if failed:
        raise typer.Exit(1)


def _prefill_table(results: list) -> Table:
    """Steps with prompt tokens, beside the same way's decode step by itself."""
    names = "case", "way", "stored before", "ms", "/ decode step", "prompt tokens/s", "one by one, ms"
    table = _empty_table(*names, "difference")
    for r in results:
        table.add_row(
            r.case, r.way, f"{r.n_stored_tokens}", f"{r.ms:.2f}", f"{r.ratio_to_decode:.3f}",
            f"{r.prompt_tokens_per_s:.0f}", f"{statistics.median(r.alone_ms):.2f}", f"{r.max_difference:.1e}",
        )  # fmt: skip
    return table


def _empty_table(*names: str) -> Table:
    table = Table(box=box.SIMPLE)
    for name in names:
        is_words = name in ("case", "way")
        table.add_column(name, justify="left" if is_words else "right", min_width=None if is_words else 7)
    return table


def _table(results: list, n_layers: int) -> Table:
    names = "case", "way", "ms", "of floor", "/ first", "/ pools' floor", "µs a layer more", "one by one, ms"
    table = _empty_table(*names, "compiled in s", "difference")
    firsts: dict[str, list[float]] = {}
    for r in results:
        first = firsts.setdefault(r.case, r.ahead_ms)
        ratio = statistics.median(a / b for a, b in zip(r.ahead_ms, first, strict=True))
        ms = statistics.median(r.ahead_ms)
        table.add_row(
            r.case, r.way, f"{ms:.2f}", f"{r.floor_ms / ms:.0%}", f"{ratio:.3f}",
            "" if r.pools_floor_ms is None else f"{ms / r.pools_floor_ms:.2f}",
            f"{(ms - statistics.median(first)) / n_layers * 1e3:.0f}",
            f"{statistics.median(r.alone_ms):.2f}", f"{r.prepare_s:.1f}",
            "" if r.max_difference is None else f"{r.max_difference:.1e}",
        )  # fmt: skip
    return table
