"""`jaxlamina schedule`: how decode steps are scheduled over model workers and the attention pool, and what
waits for what.

Knows how a schedule's figures look; `jaxlamina.steps.schedules` makes, checks and draws it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.steps.schedules import Bubbles, Schedule

# The start leaves its mark on the first steps' times only.
_STEPS_UNTIL_STEADY = 5


def schedule(
    batches: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=32,
            help="Batches in flight: 3, with --local-share 2; 1 with --mode none; two a stage with stages.",
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, max=256, help="Attention operators of the model.")] = 8,
    mode: Annotated[str, typer.Option(help="rotational, fixed, stages or none.")] = "rotational",
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Model replicas with --mode fixed, if not batches - 1; stages, if not 2."),
    ] = None,
    slice_ms: Annotated[float, typer.Option(help="A slice.")] = 1.0,
    attention_ms: Annotated[float, typer.Option(help="One batch's attention in one layer.")] = 0.5,
    first_ms: Annotated[float | None, typer.Option(help="The first slice, if not as any other.")] = None,
    head_ms: Annotated[
        float | None, typer.Option(help="The last slice with the LM head, if not as any other.")
    ] = None,
    exchange_ms: Annotated[float, typer.Option(help="An exchange of a replica and the pool.")] = 0.0,
    local_share: Annotated[
        float,
        typer.Option(
            "--local-share", help="Share of attention that model workers compute themselves, from 0 to 1."
        ),
    ] = 0.0,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Decode steps in the figure.")] = 2,
    gantt: Annotated[
        Path | None, typer.Option(help="Draw the schedule into this file (.svg, .png, .pdf).")
    ] = None,
) -> None:
    """Schedule decode steps of several batches over model replicas or stages, and report (and draw) who waits
    how long."""
    from jaxlamina.steps.schedules import Durations, balanced, bubbles, check, make_schedule

    def made_of(n_steps: int) -> Schedule:
        options: dict[str, Any] = {"n_replicas": replicas, "local_share": local_share}
        if mode == "stages":
            times_s = [durations.of_slice(k, layers) for k in range(layers + 1)]
            options["stages"] = balanced(times_s, n_stages)
        made = make_schedule(mode, n_batches, layers, durations, n_steps=n_steps, **options)
        check(made)
        return made

    n_stages = replicas or 2
    usual = {"none": 1, "stages": 2 * n_stages}.get(mode, 2 if local_share else 3)
    n_batches = usual if batches is None else batches
    _check_times(slice=slice_ms, attention=attention_ms, first=first_ms, head=head_ms, exchange=exchange_ms)
    durations = Durations(
        t_slice_s=slice_ms / 1e3,
        t_attention_s=attention_ms / 1e3,
        t_first_slice_s=None if first_ms is None else first_ms / 1e3,
        t_last_slice_s=None if head_ms is None else head_ms / 1e3,
        t_exchange_s=exchange_ms / 1e3,
    )
    try:
        drawn = made_of(steps)
    except ValueError as error:
        raise UserError(str(error)) from None
    places = _count(drawn.n_replicas, "stage" if mode == "stages" else "model replica")
    title = f"{mode}: {_count(n_batches, 'batch', 'batches')} over {places}"
    if local_share:
        title += f", {100 * local_share:g} % of attention on {_whose(drawn)}"
    if gantt is not None:
        from jaxlamina.steps.schedules import gantt as figure

        figure.check(drawn, gantt)
    _show(title, drawn, bubbles(made_of(_STEPS_UNTIL_STEADY)))
    if gantt is not None:
        from rich.console import Console

        what = f"{title}, {_count(layers, 'layer')}, {_count(steps, 'decode step')}"
        try:
            figure.draw(drawn, what, gantt)
        except OSError as error:
            raise UserError(f"cannot write {gantt}: {error.strerror}") from None
        Console(stderr=True).print(f"wrote {gantt}", highlight=False, markup=False, soft_wrap=True)


def _check_times(**times_ms: float | None) -> None:
    """In the options' own words and units; `Durations` would name its fields."""
    for name, value in times_ms.items():
        least = "at least 0" if name == "exchange" else "above 0"
        right = value is None or (0 <= value < float("inf") and (value > 0 or name == "exchange"))
        if not right:
            raise UserError(f"--{name}-ms {value:g} must be a finite time {least}")


def _whose(schedule: Schedule) -> str:
    return f"the {schedule.kind}" if schedule.n_replicas == 1 else f"{schedule.kind}s"


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _show(title: str, schedule: Schedule, waits: Bubbles) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from jaxlamina.console.tables import print_table

    out: Any = Console()
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("busy", "exchanging", "idle", "of it within a step", "at its ends"):
        table.add_column(name, justify="right")
    rows = [(f"{schedule.kind} {r}", shares) for r, shares in enumerate(waits.replicas)]
    for name, s in (*rows, ("attention pool", waits.attention)):
        shares = (s.busy, s.exchange, s.idle_within + s.idle_boundary, s.idle_within, s.idle_boundary)
        table.add_row(name, *(f"{100 * share:.1f} %" for share in shares))
    print_table(out, table)
    rate = schedule.n_batches / waits.step_s
    note = (
        "idle within a step: between its first and its last work; at its ends: before the first and "
        "after the last"
    )
    out.print(note, style="dim", highlight=False, soft_wrap=True)
    line = f"a decode step every {1e3 * waits.step_s:,.3f} ms, {rate:,.1f} batch steps a second"
    out.print(line, markup=False, highlight=False, soft_wrap=True)
