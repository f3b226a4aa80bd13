"""`jaxlamina bench start`: its options, and how its results look."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from jaxlamina.bench.flags import AsJson, Streams, option
from jaxlamina.bench.report import Columns, dim, progress, table, tell
from jaxlamina.cli import model_options

if TYPE_CHECKING:
    from jaxlamina.bench.start_bench import Gaps


def _told(gaps: Gaps | None) -> str | None:
    return f"{gaps.p50_ms:.1f} / {gaps.p99_ms:.1f}" if gaps else None


COLUMNS: Columns = (
    ("programs\non disk", lambda s: {"empty": "none", "full": "those of the start before"}[s.cache], "<"),
    ("first\nanswer s", lambda s: s.first_answer_s, ".1f"),
    ("all\ncompiled s", lambda s: "not by then" if s.all_s is None else f"{s.all_s:.1f}", ""),
    ("programs", lambda s: s.n_programs, ""),
    ("ITL p50 / p99\nms, meanwhile", lambda s: _told(s.behind), ""),
    ("after", lambda s: _told(s.after), ""),
)


def start_command(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="serve …, or launch … -- serve …. Default: serve."),
    ] = None,
    streams: Streams = 2,
    input_len: model_options.InputLen = 16,
    output_len: model_options.OutputLen = 128,
    behind: Annotated[
        float, option("Seconds at most of streams while programs are compiled.", min=0.1)
    ] = 120.0,
    after: Annotated[float, option("Seconds of streams after that.", min=0.1)] = 10.0,
    rounds: Annotated[int, option("Starts without programs on disk, each with one after it.", min=1)] = 1,
    deadline: Annotated[float, option("Seconds for a first answer.", min=1)] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Time a server's start: from its command to its first answer, without compiled programs on disk and with
    them.

    Streams go on while the other programs are compiled behind, and after that.
    """
    from jaxlamina.bench import machine, start_bench
    from jaxlamina.bench.loads import Size

    words = list(command or ["serve"])
    load = start_bench.StartLoad(streams, Size(input_len, output_len), behind, after)
    line = start_bench.command_of(words)
    where = machine.describe(["aiohttp"])
    with progress() as on_progress:
        starts = start_bench.measure(
            line, load, n_rounds=rounds, deadline_s=deadline, on_progress=on_progress
        )
    record = {"command": words, "load": asdict(load), "starts": [asdict(start) for start in starts]}
    note = (
        f"Seconds from the command. ITL: time between pieces of text, {streams} at once of {output_len} "
        "tokens each, while other programs were compiled, and after."
    )
    tell("start", record, where, [table(starts, COLUMNS), dim(note)], as_json=as_json)
