"""Round trips and bandwidth against size, drawn as Lamina 2025, Figure 13: two panels, both axes logarithmic.

Knows a report of `exchange_bench`. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxlamina.bench.exchange_bench import ExchangeReport, size_text
from jaxlamina.errors import UserError

# Okabe and Ito's: told apart by all eyes, and in print.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_INK, _FAINT = "#333333", "#dddddd"


def check(path: Path) -> None:
    """Raises `UserError` before anything is measured if ``path`` could not be drawn."""
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UserError(f"--figure {str(path)!r} must end in .svg, .png or .pdf")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--figure {str(path)!r}: there is no such folder; make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--figure needs matplotlib: pip install matplotlib") from None


def draw(report: ExchangeReport, title: str, path: Path) -> None:
    """Writes the figure. Shaded: the lowest and highest of the rounds."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "jaxlamina", "text.color": _INK}):
        figure = Figure(figsize=(8.6, 3.9), layout="constrained")
        figure.suptitle(title, fontsize=9)
        times, rates = figure.subplots(1, 2)
        for i, label in enumerate(report.devices):
            points = [p for p in report.points if p.peer == label]
            sizes = [p.size_bytes for p in points]
            color = _COLORS[i % len(_COLORS)]
            low, high = ([f(p.rounds_us) for p in points] for f in (min, max))
            line = {"color": color, "ms": 3.5, "lw": 1.4, "label": label}
            times.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
            times.plot(sizes, [p.round_trip_us for p in points], "o-", **line)
            slow, fast = ([2e-3 * n / us for n, us in zip(sizes, side, strict=True)] for side in (high, low))
            rates.fill_between(sizes, slow, fast, color=color, alpha=0.15, linewidth=0)
            rates.plot(sizes, [p.bytes_per_s / 1e9 for p in points], "o-", **line)
        limit = report.limit_bytes_per_s / 1e9
        rates.axhline(limit, color=_INK, lw=0.8, ls=(0, (4, 3)))
        rates.annotate(
            f"{report.limit}: {limit:,.0f} GB/s",
            (0.02, limit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
        )
        _axes(times, report, "round trip, µs")
        _axes(rates, report, "one way, GB/s")
        rates.set_ylim(top=2.2 * max(limit, *(p.bytes_per_s / 1e9 for p in report.points)))
        times.legend(frameon=False, loc="upper left")
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def _axes(axes: Any, report: ExchangeReport, name: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    sizes = sorted({p.size_bytes for p in report.points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_text(n).replace(" ", "\n") for n in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.set_title(name, loc="left", fontsize=9)
    axes.set_xlabel("size of the tensor")
    axes.grid(True, which="major", color=_FAINT, lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
