"""How figures of numbers are drawn and written. Knows matplotlib; nothing of what is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxlamina.console.outputs import check_output
from jaxlamina.errors import UserError

# Okabe and Ito's: told apart by all eyes, and in print.
COLOURS = BLUE, ORANGE, _, _, YELLOW, _ = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, _FAINT = "#333333", "#dddddd"


def check_figure(path: Path | None, option: str = "--figure") -> None:
    """``UserError``, before anything else is done, if ``path``, of ``option``, could not be drawn. None:
    nothing is to be."""
    if path is None:
        return
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UserError(f"{option} {str(path)!r} must end in .svg, .png or .pdf")
    check_output(path, option)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(f"{option} needs matplotlib: pip install matplotlib") from None


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yields matplotlib's figure, of inches, and writes it afterwards."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "jaxlamina", "text.color": INK}):
        drawn = Figure(figsize=(width, height), layout="constrained")
        yield drawn
        drawn.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def plain(axes: Any, grid: str, without: Sequence[str]) -> None:
    """Axes without ticks and some sides of their frame, over faint lines; ``grid``: "y" or "both"."""
    axes.grid(True, axis=grid, which="major", color=_FAINT, lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelsize=8)
    axes.spines[list(without)].set_visible(False)
