"""Curves of a `Reproduction` and of a `Sweep` drawn, with what the axes are and where the numbers are from.
Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import fill

from jaxlamina.console.figures import BLUE, COLOURS, INK, YELLOW, figure, plain
from jaxlamina.errors import UserError
from jaxlamina.planner.comparison import Axes, Reproduction
from jaxlamina.planner.sweeps import Sweep


def draw(found: Reproduction, name: str, path: Path) -> None:
    """Writes the figure: ours, by formula. The paper's own curves are not in it. ``UserError`` where there is
    nothing to draw, and where the file cannot be written."""
    if found.axes is None:
        raise UserError(f"--figure: {name} is numbers alone, without a curve of ours")
    try:
        _write(found, found.axes, name, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _write(found: Reproduction, scales: Axes, name: str, path: Path) -> None:
    from matplotlib.ticker import FuncFormatter

    with figure(path, 6.4, 4.2) as drawn:
        axes = drawn.subplots()
        for i, curve in enumerate(found.curves):
            style = "-" if i % 2 == 0 else "--"  # one that lies over another one shows both
            axes.plot(curve.x, curve.y, style, color=COLOURS[i % len(COLOURS)], lw=1.5, label=curve.label)
        numbers = FuncFormatter(lambda value, _: f"{value:,g}")
        axes.set_xlabel(scales.x)
        axes.set_ylabel(scales.y)
        if scales.log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(numbers)
        if scales.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(numbers)
            axes.yaxis.set_minor_formatter(numbers)
        plain(axes, "both", ("top", "right"))
        axes.legend(frameon=False, fontsize=8)
        drawn.suptitle(
            f"{found.title}\n{name}: ours, by formula; not the paper's curves", fontsize=9, color=INK
        )


def draw_sweep(found: Sweep, title: str, source: str, path: Path) -> None:
    """Writes both ways' curves over the variable, with borders between them, and where the question stands.
    ``UserError`` where the file cannot be written."""
    try:
        _write_sweep(found, title, source, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _write_sweep(found: Sweep, title: str, source: str, path: Path) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    with figure(path, 6.4, 4.2) as drawn:
        axes = drawn.subplots()
        x = [point.x for point in found.points]
        for (label, scores), colour, style in zip(_ways(found), COLOURS, _STYLES, strict=False):
            axes.plot(x, scores, style, color=colour, lw=2, label=label)
        pays = [(p.split or 0.0) > (p.whole or 0.0) for p in found.points]
        if found.log_x:
            axes.set_xscale("log")
        top = 1.15 * max(max(p.split or 0.0, p.whole or 0.0) for p in found.points)
        axes.set_ylim(0, top)
        axes.set_xlim(x[0], x[-1])
        for begin, end in _runs(found, x, pays):
            axes.axvspan(begin, end, color=BLUE, alpha=0.08, lw=0, label="splitting is better")
        for border in found.borders:
            axes.axvline(border, color=INK, lw=0.8, ls=":")
            axes.annotate(
                f"{_short(border)}", (border, top), (3, -3), textcoords="offset points", va="top", fontsize=8
            )
        if found.now is not None and x[0] <= found.now <= x[-1]:
            axes.axvline(found.now, color=YELLOW, lw=1.5)
            words = f"asked: {_short(found.now)}"
            left = {"textcoords": "offset points", "rotation": 90, "ha": "right"}
            axes.annotate(words, (found.now, 0), (-2, 6), fontsize=8, **left)
        axes.set_xlabel(found.label.replace("$", r"\$"))
        axes.set_ylabel(f"{found.unit}, best plan")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        if found.log_x:
            few = x[-1] / x[0] < 50
            axes.xaxis.set_minor_locator(LogLocator(subs=(2, 3, 5) if few else (2, 5)))
            axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        plain(axes, "both", ("top", "right"))
        handles, labels = axes.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        axes.legend(once.values(), once.keys(), frameon=False, fontsize=8)
        drawn.suptitle(title, fontsize=9, color=INK)
        drawn.supxlabel(wrapped(source, 125), fontsize=6.5, color=INK)


def wrapped(source: str, width: int) -> str:
    """A line under a figure, in several, without what matplotlib would take for formulas."""
    return fill(source, width).replace("$", r"\$")


_STYLES = ("-", "--", "--", ":")


def _ways(found: Sweep) -> Iterator[tuple[str, list[float]]]:
    """Each way's name and scores over the variable; a gap where it has no plan."""
    nan = float("nan")
    yield "split", [nan if p.split is None else p.split for p in found.points]
    names = dict.fromkeys(name for p in found.points for name in p.by_device)
    for name in names:
        yield f"unsplit, {name}", [p.by_device.get(name, nan) for p in found.points]
    if len(names) > 1 and any(
        (p.whole or 0.0) > max(p.by_device.values(), default=0.0) for p in found.points
    ):
        yield "unsplit, all devices", [nan if p.whole is None else p.whole for p in found.points]


def _runs(found: Sweep, x: list[float], pays: list[bool]) -> list[tuple[float, float]]:
    """Where splitting is better, from border to border."""
    edges = [x[0], *found.borders, x[-1]]
    spans = list(pairwise(edges))
    return [span for i, span in enumerate(spans) if (i % 2 == 0) == pays[0]]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
