"""Round trips and bandwidth against size, drawn as Lamina 2025, Figure 13: two panels, both axes logarithmic.

Knows a report of `exchange_bench`. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxlamina.bench.exchange_bench import ExchangeReport, size_text
from jaxlamina.console.figures import COLOURS, INK, figure, plain


def draw(report: ExchangeReport, title: str, path: Path) -> None:
    """Writes the figure. Shaded: the lowest and highest of the rounds."""
    with figure(path, 8.6, 3.9) as drawn:
        drawn.suptitle(title, fontsize=9)
        times, rates = drawn.subplots(1, 2)
        for i, label in enumerate(report.devices):
            points = [p for p in report.points if p.peer == label]
            sizes = [p.size_bytes for p in points]
            color = COLOURS[i % len(COLOURS)]
            low, high = ([f(p.rounds_us) for p in points] for f in (min, max))
            line = {"color": color, "ms": 3.5, "lw": 1.4, "label": label}
            times.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
            times.plot(sizes, [p.round_trip_us for p in points], "o-", **line)
            slow, fast = ([2e-3 * n / us for n, us in zip(sizes, side, strict=True)] for side in (high, low))
            rates.fill_between(sizes, slow, fast, color=color, alpha=0.15, linewidth=0)
            rates.plot(sizes, [p.bytes_per_s / 1e9 for p in points], "o-", **line)
        limit = report.limit_bytes_per_s / 1e9
        rates.axhline(limit, color=INK, lw=0.8, ls=(0, (4, 3)))
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
    plain(axes, "both", ("top", "right", "left", "bottom"))
