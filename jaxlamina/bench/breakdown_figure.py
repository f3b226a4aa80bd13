"""Where a step's time goes, drawn as Lamina 2025, Figure 12: stacked bars, of both pools and each way.

The paper's bars are sums of workers' times, which may exceed a step; here each bar is one pool's step, with
what it idles. Knows breakdowns. Needs matplotlib.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlamina.bench.breakdown_bench import Breakdown
from jaxlamina.console.figures import BLUE, INK, ORANGE, YELLOW, figure, plain
from jaxlamina.transports.scopes import KINDS, Kind

_COLOURS: dict[Kind, str] = {
    "model": BLUE,
    "attention": ORANGE,
    "exchange": YELLOW,
    "other": "#999999",
    "bubble": "#ffffff",
}
_BAR = 0.8  # of a bar's place
_TITLE_PER_INCH = 15  # characters of 8 points


def draw(found: Sequence[Breakdown], title: str, path: Path) -> None:
    """Writes the figure: a panel a case, a pair of bars a way."""
    from matplotlib.patches import Patch

    by_case: dict[str, list[Breakdown]] = {}
    for x in found:
        by_case.setdefault(str(x.case), []).append(x)
    n_bars = max(len(of_case) for of_case in by_case.values()) * len(found[0].timeline.pools)
    width = max(5.0, 1.6 + len(by_case) * (0.5 + 0.55 * n_bars))
    with figure(path, width, 4.0) as drawn:
        drawn.suptitle(textwrap.fill(title, int(_TITLE_PER_INCH * width)), fontsize=8)
        panels = drawn.subplots(1, len(by_case), squeeze=False)[0]
        for axes, (case, of_case) in zip(panels, by_case.items(), strict=True):
            _panel(axes, of_case)
            axes.set_title(case, loc="left", fontsize=9)
        panels[0].set_ylabel("ms a step")
        kinds = [
            kind
            for kind in KINDS
            if any(x.timeline.ms(x.timeline.ranks_of(pool))[kind] for x in found for pool in x.timeline.pools)
        ]
        handles = [Patch(facecolor=_COLOURS[kind], edgecolor=INK, lw=0.5, label=kind) for kind in kinds]
        _legend(drawn, handles)


def _legend(drawn: Any, handles: Sequence[Any]) -> None:
    """Below the panels, in as few rows as the figure is wide enough for."""
    for ncols in range(len(handles), 0, -1):
        legend = drawn.legend(handles=handles, loc="outside lower center", ncols=ncols, frameon=False)
        if ncols == 1 or legend.get_window_extent().width <= drawn.bbox.width:
            return
        legend.remove()


def _panel(axes: Any, of_case: Sequence[Breakdown]) -> None:
    names, apart = [], len(of_case[0].timeline.pools) + 0.4
    for i, x in enumerate(of_case):
        for j, pool in enumerate(x.timeline.pools):
            at, bottom = i * apart + j, 0.0
            ms = x.timeline.ms(x.timeline.ranks_of(pool))
            for kind in KINDS:
                axes.bar(at, ms[kind], _BAR, bottom, color=_COLOURS[kind], edgecolor=INK, linewidth=0.5)
                bottom += ms[kind]
            names.append((at, pool))
        axes.annotate(x.way, (i * apart + 0.5, x.timeline.step_ms), xytext=(0, 3), ha="center",
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.set_xticks([at for at, _ in names], [pool for _, pool in names])
    axes.set_ylim(0, 1.1 * max(x.timeline.step_ms for x in of_case))
    plain(axes, "y", ("top", "right", "left"))
