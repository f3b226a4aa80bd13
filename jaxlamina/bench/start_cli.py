"""`jaxlamina bench start`: options in, a table and one last line of JSON out. Knows how results look."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jaxlamina.bench.server_options import Streams
from jaxlamina.cli import model_options
from jaxlamina.console.tables import print_table, print_where

if TYPE_CHECKING:
    from jaxlamina.bench.start_bench import Gaps, Start


def start_command(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="serve …, or launch … -- serve …. Default: serve."),
    ] = None,
    streams: Streams = 2,
    input_len: model_options.InputLen = 16,
    output_len: model_options.OutputLen = 128,
    behind: Annotated[
        float, typer.Option(min=0.1, help="Seconds at most of streams while programs are compiled.")
    ] = 120.0,
    after: Annotated[float, typer.Option(min=0.1, help="Seconds of streams after that.")] = 10.0,
    rounds: Annotated[
        int, typer.Option(min=1, help="Starts without programs on disk, each with one after it.")
    ] = 1,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds for a first answer.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON on stdout.")] = False,
) -> None:
    """Time a server's start: from its command to its first answer, without compiled programs on disk and with them.

    Streams go on while the other programs are compiled behind, and after that.
    """
    from jaxlamina.bench import machine, start_bench
    from jaxlamina.bench.loads import Size

    words = list(command or ["serve"])
    load = start_bench.StartLoad(streams, Size(input_len, output_len), behind, after)
    line = start_bench.command_of(words)
    where = machine.describe(["aiohttp"])
    with Console(stderr=True).status("starting") as status:
        starts = start_bench.measure(
            line, load, n_rounds=rounds, deadline_s=deadline, on_progress=status.update
        )
    if not as_json:
        out = Console()
        print_where(out, where)
        print_table(out, _table(starts))
        out.print(
            f"Seconds from the command. ITL: time between pieces of text, {streams} at once of {output_len} tokens each, while "
            "other programs were compiled, and after.",
            style="dim",
            soft_wrap=True,
        )
    record = {
        "bench": "start",
        "command": words,
        "load": asdict(load),
        "starts": [asdict(start) for start in starts],
        **where.to_dict(),
    }
    print(json.dumps(record))


def _table(starts: list[Start]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("programs on disk", no_wrap=True)
    for name in ("first answer s", "all compiled s", "programs", "ITL p50 / p99 ms, meanwhile", "after"):
        table.add_column(name, justify="right")
    for start in starts:
        table.add_row(
            {"empty": "none", "full": "those of the start before"}[start.cache],
            f"{start.first_answer_s:.1f}",
            "not by then" if start.all_s is None else f"{start.all_s:.1f}",
            "" if start.n_programs is None else str(start.n_programs),
            _told(start.behind),
            _told(start.after),
        )
    return table


def _told(gaps: Gaps | None) -> str:
    return "" if gaps is None else f"{gaps.p50_ms:.1f} / {gaps.p99_ms:.1f}"
