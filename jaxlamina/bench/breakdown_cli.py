"""`jaxlamina bench breakdown`: options in; a table, a timeline, a figure and one last line of JSON out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jaxlamina.console.tables import print_table
from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config

if TYPE_CHECKING:
    from jaxlamina.bench.breakdown_bench import Breakdown


def breakdown_command(
    config: Annotated[
        str, typer.Option(help="A model shape: a name in configs/models, or a config.json.")
    ] = "llama-3-8b",
    case: Annotated[
        str, typer.Option(help="Requests x stored tokens, separated by commas, such as 64x4096.")
    ] = "16x4096,64x4096,160x4096",
    dtype: Annotated[str, typer.Option(help="Weights and KV: bfloat16 or float32.")] = "bfloat16",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the shape has.")] = None,
    staggered: Annotated[
        str, typer.Option(help="Also as so many staggered batches: numbers, separated by commas.")
    ] = "",
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps recorded of each case and way.")] = 8,
    timeline: Annotated[
        Path | None, typer.Option(help="Write all ranks' spans for Perfetto: a .json or .json.gz.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the table as stacked bars: a .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Only the line of JSON on stdout, no table.")
    ] = False,
) -> None:
    """Record where a step's time goes on each rank: `jaxlamina launch --dop 1,1 -- bench breakdown --staggered 2`."""
    shape = model_config(config)
    from jaxlamina import ranks
    from jaxlamina.bench import breakdown_bench, breakdown_figure, machine, split_bench, step_bench
    from jaxlamina.profiling import perfetto
    from jaxlamina.ranks.layout import partition_of
    from jaxlamina.run.make import DTYPES

    if dtype not in DTYPES:
        raise UserError(f"{dtype=} must be one of {', '.join(DTYPES)}")
    cases, n_batches = step_bench.cases_of(case), step_bench.numbers_of(staggered)
    _check_files(timeline, figure)
    if layers is not None:
        shape = split_bench.with_layers(shape, layers)
    group = ranks.current()
    if group is None:
        raise UserError(
            "there are no ranks to record: start them with `jaxlamina launch … -- bench breakdown`"
        )
    here = machine.describe(["mpi4jax", "mpi4py"])
    with Console(stderr=True).status("starting") as status:
        options = {"group": group, "dtype": DTYPES[dtype], "n_steps": steps, "staggered": n_batches}
        found = breakdown_bench.measure(shape, cases, **options, on_progress=status.update)
    job = f"{group.description}, {partition_of(group.cluster, [shape.num_key_value_heads])}"
    accelerator = group.device.device_kind
    title = f"{config}, {shape.num_hidden_layers} layers, {dtype}; {job}; {accelerator}"
    if timeline is not None:
        perfetto.write({str(x): x.timeline for x in found}, timeline)
    if figure is not None:
        breakdown_figure.draw(found, f"{title}, {here.line()}", figure)
    if not as_json:
        out = Console(highlight=False)
        out.print(here.line(), soft_wrap=True)
        out.print(title, soft_wrap=True)
        _show(out, found)
    what = {"model": config, "n_layers": shape.num_hidden_layers, "dtype": dtype, "job": job}
    results = [x.to_dict() for x in found]
    print(
        json.dumps(
            {"bench": "breakdown", **what, "accelerator": accelerator, "results": results, **asdict(here)}
        )
    )


def _show(out: Console, found: list[Breakdown]) -> None:
    from jaxlamina.profiling.timeline import POOLS

    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in (
        "case",
        "way",
        "pool",
        "ms a step",
        "its work",
        "exchange",
        "other",
        "bubble",
        "untraced ms",
    ):
        table.add_column(name, justify="left" if name in ("case", "way", "pool") else "right", no_wrap=True)
    for i, x in enumerate(found):
        if i and found[i - 1].case != x.case:
            table.add_section()
        for pool in POOLS:
            ranks = x.timeline.ranks_of(pool)
            ms, shares = x.timeline.ms(ranks), x.timeline.shares(ranks)
            cells = [f"{ms[kind]:.2f} {shares[kind]:4.0%}" for kind in (pool, "exchange", "other", "bubble")]
            first = pool == POOLS[0]
            table.add_row(
                str(x.case) if first else "", x.way if first else "", f"{pool} × {len(ranks)}",
                f"{x.timeline.step_ms:.2f}" if first else "", *cells, f"{x.untraced_ms:.2f}" if first else "",
            )  # fmt: skip
    print_table(out, table)
    out.print(
        "ms a step and share of it, a pool's ranks' mean. bubble: its devices idle, or in an exchange whose other end has "
        "not come. other: operators of no slice, layer or exchange. untraced: without the profiler, with the time "
        "between steps.",
        style="dim",
    )
    alone = sum(x.timeline.n_unmatched for x in found)
    if alone:
        out.print(
            f"{alone} exchanges were found on one end only: their waiting counts as exchange", style="yellow"
        )


def _check_files(timeline: Path | None, figure: Path | None) -> None:
    from jaxlamina.bench import exchange_figure
    from jaxlamina.profiling import perfetto

    if figure is not None:
        exchange_figure.check(figure)
    if timeline is not None:
        perfetto.check(timeline, "--timeline")
