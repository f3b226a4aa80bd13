"""Draws the pictures of when-to-split.md and writes the tables of equal cost into reproduce.md: `make
pictures`, or `python docs/when_to_split.py`.

``map``: where splitting is best, by context and by the price of memory devices. ``link`` and ``batch``: what
`jaxlamina plan --what-if` draws. All is calculated by `jaxlamina.planner`; nothing is measured here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from jaxlamina.console.figures import BLUE, COLOURS, INK, figure
from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config
from jaxlamina.planner import equal_cost, figures, inputs, sweeps
from jaxlamina.planner.question import Question
from jaxlamina.planner.reasons import LEAST_GAIN
from jaxlamina.planner.search import describe, search

IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "docs" / "reproduce.md"
BEGIN, END = "<!-- begin: python docs/when_to_split.py -->", "<!-- end -->"
BUDGET, SLO_S = 90.0, 0.1  # a host of eight H100
NOTE = inputs.terms_note(inputs.device("h100"), inputs.device("h20"))
SOURCE = (
    f"Calculated (jaxlamina plan): H100 at $11.06 an hour, ${BUDGET:g} an hour at most, TPOT p99 at "
    f"most 100 ms; without prompts; 45.7 GB/s, 16.5 µs a message (Lamina 2025, §6.3); {NOTE}."
)


def question(model: str) -> Question:
    devices = inputs.device("h100"), inputs.device("h20")
    work = inputs.workload("azure-conversation")
    return Question(model_config(model), work, *devices, equal_cost.FHBN, budget_usd_h=BUDGET, slo_s=SLO_S)


# --- pictures ---
CONTEXTS = [128 * 2 ** (i / 4) for i in range(37)]  # up to 65,536
RATIOS = [0.05 * 1.11**i for i in range(31)]  # up to 1.14
ZONES = ("H100 unsplit", "split", "H20 unsplit")


def zone(asked: Question, context: float, ratio: float) -> int | None:
    """Which of ZONES has most tokens for the money; None where no plan is within budget and SLO."""
    assert asked.memory is not None and asked.compute.usd_h is not None
    memory = replace(asked.memory, usd_h=ratio * asked.compute.usd_h)
    try:
        found = search(replace(asked, memory=memory, workload=asked.workload.at_context(context)))
    except UserError:
        return None
    if found.gain >= LEAST_GAIN:
        return 1
    return 0 if found.whole[0].setup.compute.hardware.name == asked.compute.name else 2


def draw_map(path: Path) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    models = {
        "LLaMA3-70B (8 queries share a KV head)": "llama-3-70b",
        "LLaMA-65B (each query has its own)": "llama-65b",
    }
    with figure(path, 8.6, 4.3) as drawn:
        for axes, (title, model) in zip(drawn.subplots(1, 2, sharey=True), models.items(), strict=True):
            asked = question(model)
            # By context first: a step takes as long at every price, and is remembered.
            of_contexts = [[zone(asked, context, ratio) for ratio in RATIOS] for context in CONTEXTS]
            zones = list(zip(*of_contexts, strict=True))
            for k, colour in enumerate((COLOURS[1], BLUE, COLOURS[2])):
                of_zone = [[1.0 if found == k else 0.0 for found in row] for row in zones]
                axes.contourf(CONTEXTS, RATIOS, of_zone, levels=[0.5, 1.5], colors=[colour], alpha=0.45)
                places = [
                    (CONTEXTS[i], RATIOS[j])
                    for j, row in enumerate(zones)
                    for i, found in enumerate(row)
                    if found == k
                ]
                if len(places) > 40:
                    axes.text(*_middle(places), ZONES[k], ha="center", va="center", fontsize=9, weight="bold")
            axes.axhline(equal_cost.H20_OVER_H100, color=INK, lw=0.8, ls=":")
            axes.text(140, equal_cost.H20_OVER_H100, "the paper's prices", fontsize=7, va="bottom")
            for name in ("azure-conversation", "azure-code", "kimi-conversation"):
                context = inputs.workload(name).context
                axes.axvline(context, color=INK, lw=0.6, ls=":")
                axes.text(context, RATIOS[0] * 1.05, name, rotation=90, fontsize=7, va="bottom", ha="right")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("mean context of a live request, tokens")
            axes.xaxis.set_major_locator(FixedLocator([200, 1000, 5000, 20000, 60000]))
            axes.yaxis.set_major_locator(FixedLocator([0.05, 0.1, 0.2, 0.4, 0.8]))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_locator(NullLocator())
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.set_title(title, fontsize=9, color=INK)
        drawn.axes[0].set_ylabel("price of an H20 over that of an H100")
        drawn.suptitle("Most tokens for the money, by context and price", fontsize=10, color=INK)
        drawn.supxlabel(figures.wrapped(SOURCE, 170), fontsize=6.5, color=INK)


def _middle(places: list[tuple[float, float]]) -> tuple[float, float]:
    """One of the places, in the middle of those of them that have the middle height."""
    heights = sorted({y for _, y in places})
    y = sorted(y for _, y in places)[len(places) // 2]
    row = sorted(x for x, at in places if at == y)
    assert y in heights
    return row[len(row) // 2], y


def draw_sweep(path: Path, variable: str, title: str) -> None:
    figures.draw_sweep(sweeps.sweep(question("llama-3-8b"), variable), title, SOURCE, path)


# --- tables ---
def tables() -> str:
    return "\n".join([*_equal_cost(), "", *_beyond()])


def _equal_cost() -> Iterator[str]:
    yield (
        "| model | trace | batch, split | unsplit | gain | of it by the batch | at the same batch "
        "| attending on both pools | gain by data sheets |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for model in equal_cost.MODELS:
        for trace in equal_cost.TRACES:
            one, sheet = (equal_cost.equal_cost(model, trace, is_roofline) for is_roofline in (False, True))
            yield (
                f"| {model} | {trace} | {one.split.n_rows:,} | {one.whole.n_rows:,} | {_percent(one.gain)} "
                f"| × {one.by_batch:.2f} | × {one.at_same_batch:.2f} | {_percent(one.by_both)} "
                f"| {_percent(sheet.gain)} |"
            )


def _percent(factor: float) -> str:
    return f"{100 * (factor - 1):+.1f} %"


def _beyond() -> Iterator[str]:
    yield "| pools and prices | model | best split plan | best unsplit plan | split over unsplit | verdict |"
    yield "|---|---|---|---|---:|---|"
    for one in equal_cost.answers():
        found = one.found
        split = describe(found.split[0]).removesuffix(", split") if found.split else "–"
        whole = describe(found.best_whole[0]).removesuffix(" unsplit")
        yield (
            f"| {one.case.name} | {one.model} | {split} | {whole} | {_percent(found.gain)} "
            f"| {one.said.reason} |"
        )


def with_tables(page: str) -> str:
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}"


def main() -> None:
    draw_map(IMAGES / "when-to-split-map.svg")
    draw_sweep(
        IMAGES / "when-to-split-link.svg", "link", "How fast the link must be: LLaMA3-8B, Azure conversation"
    )
    draw_sweep(
        IMAGES / "when-to-split-batch.svg",
        "batch",
        "How many requests it takes: LLaMA3-8B, Azure conversation",
    )
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
