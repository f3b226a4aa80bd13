"""`jaxlamina bench recovery`: its options, and how its results look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Annotated, Any, Literal

import typer

from jaxlamina.bench.flags import AsJson, option
from jaxlamina.bench.lists import named
from jaxlamina.bench.report import Columns, Part, dim, progress, table, tell, warning
from jaxlamina.cli import model_options
from jaxlamina.errors import UserError

WHOM = ("server", "model", "attention", "prefill")

COLUMNS: Columns = (
    ("whom", lambda s: s["whom"], "<"),
    ("what ended the job", lambda s: s["cause"], "<"),
    ("noticed\ns", lambda s: s["noticed_s"], ".2f"),
    ("job\nready s", lambda s: s["ready_s"], ".2f"),
    ("next token s\nmedian", lambda s: s["median_s"], ".2f"),
    ("last", lambda s: s["last_s"], ".2f"),
    ("KV brought\nMB", lambda s: s["brought_bytes"] / 1e6, ".1f"),
    ("in s", lambda s: s["brought_s"], ".3f"),
    ("tokens\nrecomputed", lambda s: s["n_recomputed"], ".0f"),
    ("of", lambda s: s["n_tokens"], ".0f"),
    ("next spare\ns", lambda s: s["spare_s"], ".1f"),
)


def recovery_command(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="serve …, or launch … -- serve …. Default: serve."),
    ] = None,
    strike: Annotated[
        Literal["kill", "stop", "spin"], option("SIGKILL, SIGSTOP, or a main thread that spins for ever.")
    ] = "kill",
    whom: Annotated[
        str,
        option(
            f"Of {', '.join(WHOM)}: rank 0, or the last worker of a kind; several in turn: model,prefill."
        ),
    ] = "server",
    times: Annotated[
        int | None, option("Faults, one after another. Default: two of each in --whom.", min=1)
    ] = None,
    streams: Annotated[int, option("Requests at once.", min=1)] = 8,
    input_len: model_options.InputLen = 250,
    output_len: model_options.OutputLen = 200,
    written: Annotated[int, option("Tokens that each stream has when the fault comes.", min=1)] = 60,
    standing_by: Annotated[
        float,
        option("Seconds that a spare has stood by when streams begin: it compiles on meanwhile.", min=0),
    ] = 0.0,
    deadline: Annotated[float, option("Seconds for whatever is waited for.", min=1)] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Time what clients of a supervised server notice when one of its processes dies or is stuck.

    Streams go on all the while: until the fault is noticed, a job is ready, kept KV is back, and each has its
    next token.
    """
    from jaxlamina.bench import machine, recovery_bench
    from jaxlamina.bench.loads import Size

    words = list(command or ["serve"])
    struck = named("--whom", whom, WHOM)
    if not struck:
        raise UserError(f"--whom {whom!r} names nobody; give one or more of {', '.join(WHOM)}")
    load = recovery_bench.RecoveryLoad(streams, Size(input_len, output_len), written)
    line = recovery_bench.supervised_command(words)
    where = machine.describe(["aiohttp"])
    with progress() as on_progress:
        found, failed = recovery_bench.measure(
            line,
            load,
            fault=strike,
            whom=struck,
            times=times or 2 * len(struck),
            deadline_s=deadline,
            standing_by_s=standing_by,
            on_progress=on_progress,
        )
    rows = [asdict(one) | {"median_s": one.median_s, "last_s": one.last_s} for one in found]
    middle = _medians(rows) if len(struck) == 1 else None  # of different processes there is no middle
    record: dict[str, Any] = {
        "command": words,
        "strike": strike,
        "whom": struck,
        "streams": asdict(load),
        "standing_by_s": standing_by,
        "faults": rows,
        "failed": failed,
    }
    shown = [*rows, middle | {"whom": "", "cause": "median"}] if middle and len(rows) > 1 else rows
    note = (
        f"Seconds after the fault ({strike}). {streams} streams of {input_len} prompt tokens had "
        f"written {written} tokens or more. Brought: kept KV, and how long hosts were at it."
    )
    starts = [
        dim(f"{i}. start of the new job, s: {_phases(row['start_s'])}") for i, row in enumerate(rows, 1)
    ]
    said = [dim(f"{i}. the job said: {row['said']}") for i, row in enumerate(rows, 1) if row["said"]]
    parts: list[Part] = [
        table(shown, COLUMNS),
        dim(note),
        *said,
        *starts,
        *([warning(failed)] if failed else []),
    ]
    tell("recovery", record | {"median": middle}, where, parts, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _phases(start_s: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} {s:.2f}" for phase, s in start_s.items())


def _medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each number."""
    found: dict[str, Any] = {}
    for name in rows[0].keys() - {"whom", "cause", "said", "next_s", "start_s"}:
        values = [row[name] for row in rows if row[name] is not None]
        found[name] = median(values) if values else None
    return found
