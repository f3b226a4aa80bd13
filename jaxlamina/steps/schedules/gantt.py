"""A schedule drawn as Lamina 2025, Figure 8: a row a replica or stage and one for the attention pool, a
colour a batch; lighter where a replica attends to the KV that it keeps.

Knows a finished `Schedule` and nothing of how it came about. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jaxlamina.console.figures import check_figure
from jaxlamina.errors import UserError
from jaxlamina.steps.schedules.staggered import AttentionRun, LocalRun, Schedule, SliceRun

_Run: TypeAlias = SliceRun | AttentionRun | LocalRun

# Okabe and Ito's, with the ink that is read on each: told apart by all eyes, and in print.
_COLORS = (
    ("#0072B2", "white"),
    ("#E69F00", "black"),
    ("#009E73", "white"),
    ("#CC79A7", "black"),
    ("#56B4E9", "black"),
    ("#D55E00", "white"),
    ("#F0E442", "black"),
    ("#666666", "white"),
)
_INK, _IDLE, _EXCHANGE = "#333333", "#ececec", "#222222"
_LIGHTER = 0.72  # of white in the colour of what a replica attends to itself
_BAR = 0.76  # of a row's height
_LETTER_IN, _MARGIN_IN = 0.07, 0.05  # of a label, inches


def check(schedule: Schedule, path: Path) -> None:
    """Raises `UserError` if ``path`` could not be drawn, or the schedule has more batches than there are
    colours."""
    check_figure(path, "--gantt")
    if schedule.n_batches > len(_COLORS):
        raise UserError(f"--gantt draws up to {len(_COLORS)} batches, not {schedule.n_batches}")


def draw(schedule: Schedule, title: str, path: Path) -> None:
    """Writes the figure, times in ms. A letter is a batch, a number a slice or a layer; grey is waiting. With
    all KV on the replicas there is no row of the pool."""
    import matplotlib
    from matplotlib.figure import Figure

    pool = [schedule.attention] if schedule.has_pool else []
    rows: list[tuple[SliceRun | AttentionRun, ...]] = [*schedule.replicas, *pool]
    end_ms = 1e3 * max(run.end_s for row in rows for run in row)
    n_slots = schedule.n_steps * (schedule.n_layers + 1) * schedule.n_batches / schedule.n_replicas
    width = min(16.0, max(8.6, 1.8 + 0.30 * n_slots))
    # Letters as text: a fifth of the size of drawn ones, and they can be searched.
    style: Any = {"font.size": 9, "svg.hashsalt": "jaxlamina", "svg.fonttype": "none", "text.color": _INK}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, 1.35 + 0.46 * len(rows)), layout="constrained", facecolor="white")
        axes = figure.subplots()
        axes.set_xlim(0, 1.002 * end_ms)  # room for the last outline
        inch_a_ms = (width - 1.3) / end_ms
        for y, row in enumerate(rows):
            axes.broken_barh([(0, end_ms)], (y - _BAR / 2, _BAR), facecolor=_IDLE, linewidth=0)
            for batch, (color, ink) in enumerate(_COLORS[: schedule.n_batches]):
                runs = [run for run in row if run.batch == batch]
                for head in (False, True):
                    _bars(axes, y, [r for r in runs if _is_head(schedule, r) == head], color, head)
                for run in runs:
                    _label(axes, y, run, _is_head(schedule, run), ink, inch_a_ms)
        for own in schedule.local:
            color, _ = _COLORS[own.batch]
            _bars(axes, own.replica, [own], color, is_own=True)
            _label(axes, own.replica, own, False, _INK, inch_a_ms)
        for run in schedule.replicas[0]:
            if (run.batch, run.slice) == (0, 0):
                axes.axvline(1e3 * run.start_s, color=_INK, lw=0.9, ls=(0, (3, 2)), zorder=1)
        _exchanges(axes, schedule)
        _legend(axes, schedule)
        names = [f"{schedule.kind} {r}" for r in range(schedule.n_replicas)]
        axes.set_yticks(range(len(rows)), [*names, *(["attention pool"] if pool else [])])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_xlabel("ms")
        axes.tick_params(length=0, colors=_INK)
        for side in axes.spines.values():
            side.set_visible(False)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def _is_head(schedule: Schedule, run: SliceRun | AttentionRun) -> bool:
    return isinstance(run, SliceRun) and run.slice == schedule.n_layers


def _bars(
    axes: Any, y: int, runs: Sequence[_Run], color: str, head: bool = False, is_own: bool = False
) -> None:
    spans = [(1e3 * run.start_s, 1e3 * (run.end_s - run.start_s)) for run in runs]
    look = {"edgecolor": "black", "linewidth": 1.4} if head else {"edgecolor": "white", "linewidth": 0.7}
    face = _lighter(color) if is_own else color
    axes.broken_barh(spans, (y - _BAR / 2, _BAR), facecolor=face, zorder=3 if head else 2, **look)


def _lighter(color: str) -> str:
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 * _LIGHTER + (1 - _LIGHTER) * part):02x}" for part in parts)


def _label(axes: Any, y: int, run: _Run, head: bool, ink: str, inch_a_ms: float) -> None:
    number = run.slice if isinstance(run, SliceRun) else run.layer
    span_in = 1e3 * (run.end_s - run.start_s) * inch_a_ms
    letter = chr(ord("A") + run.batch)
    texts = [f"{letter} head"] * head + [f"{letter}{number}", f"{number}"]
    text = next((t for t in texts if len(t) * _LETTER_IN + _MARGIN_IN < span_in), "")
    if text:
        middle_ms = 5e2 * (run.start_s + run.end_s)
        axes.text(middle_ms, y, text, ha="center", va="center_baseline", fontsize=7.5, color=ink, zorder=4)


def _exchanges(axes: Any, schedule: Schedule) -> None:
    """Both ends of each exchange, if it takes time."""
    for e in schedule.exchanges if schedule.durations.t_exchange_s else ():
        for y in (e.replica, schedule.n_replicas):
            span = (1e3 * e.start_s, 1e3 * (e.end_s - e.start_s))
            axes.broken_barh([span], (y - _BAR / 2, _BAR), facecolor=_EXCHANGE, linewidth=0, zorder=3)


def _legend(axes: Any, schedule: Schedule) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=color, label=f"{'' if i else 'batch '}{chr(ord('A') + i)}")
        for i, (color, _) in enumerate(_COLORS[: schedule.n_batches])
    ]
    handles.append(Patch(facecolor="white", edgecolor="black", linewidth=1.4, label="last slice (LM head)"))
    if schedule.local:
        light = _lighter(_COLORS[0][0])
        handles.append(Patch(facecolor=light, edgecolor="white", label="attention, kept here"))
    if schedule.durations.t_exchange_s and schedule.exchanges:
        handles.append(Patch(facecolor=_EXCHANGE, label="exchange"))
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    handles.append(Line2D([], [], color=_INK, lw=0.9, ls=(0, (3, 2)), label="a step begins"))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        handlelength=1.5,
        columnspacing=1.2,
        borderaxespad=0.2,
    )
