"""Whether to split, and if not, why: by asking again with one thing changed.

If a free link would make splitting better, the link is the reason. If no limit on requests or latency would,
the batch is too small. If another price of memory devices would, their price is. If nothing of this would,
unsplit devices lack neither memory nor bandwidth that a second pool would bring: the dead zone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from jaxlamina.errors import UserError
from jaxlamina.planner.costs import LinkTerms, step_cost
from jaxlamina.planner.question import Question
from jaxlamina.planner.search import FoundPlans, PoolPlan, border, describe, search_all

Reason = Literal["split", "one device", "equal devices", "link", "batch too small", "prices", "dead zone"]
LEAST_GAIN = 1.02  # a smaller one is within what these formulas cannot tell
_AT_ONCE = 12  # prices that are searched together


@dataclass(frozen=True)
class Verdict:
    """``line``: the whole answer in one line."""

    splits: bool
    reason: Reason
    line: str


def verdict(found: FoundPlans) -> Verdict:
    question = found.question
    if found.gain >= LEAST_GAIN:
        return Verdict(True, "split", f"split: {describe(found.split[0])}, {_beside(found)}")
    reason, why = _why_not(found)
    return Verdict(False, reason, f"don't split ({reason}): {why}{_instead(found, question)}")


def _beside(found: FoundPlans) -> str:
    if not found.whole:
        return "since no unsplit plan is within these limits"
    unit = "for the money" if found.question.is_priced else "a second"
    return f"{100 * (found.gain - 1):.0f} % more tokens {unit} than {_all(found.best_whole)}"


def _all(plans: tuple[PoolPlan, ...]) -> str:
    return " beside ".join(describe(plan) for plan in plans)


def _instead(found: FoundPlans, question: Question) -> str:
    unit = "of the tokens for the money" if question.is_priced else "of the tokens a second"
    if not found.split:
        return f"; take {_all(found.best_whole)}"
    return (
        f"; take {_all(found.best_whole)}, of which the best split plan has {100 * found.gain:.0f} % {unit}"
    )


def _why_not(found: FoundPlans) -> tuple[Reason, str]:
    question = found.question
    one = question.memory is None or (
        question.counts is not None and question.budget_usd_h is None and sum(question.counts.values()) == 1
    )
    if one:
        return "one device", "there is nothing to split onto"
    assert question.memory is not None
    if question.memory.name == question.compute.name:
        why = (
            f"both pools would be {question.compute.name}, so money buys the same arithmetic and bandwidth "
            "on either side, and splitting adds messages"
        )
        return "equal devices", why
    if _gain(replace(question, link=LinkTerms(0.0, math.inf))) >= LEAST_GAIN:
        return "link", _why_link(question)
    if question.slo_s is not None or question.most_requests is not None:
        free = replace(question, slo_s=None, most_requests=None)
        if (gain := _gain(free)) >= LEAST_GAIN:
            limits = [] if question.slo_s is None else [f"tpot={1e3 * question.slo_s:g} ms"]
            limits += [] if question.most_requests is None else [f"at most {question.most_requests} at once"]
            return "batch too small", (
                f"{' and '.join(limits)} keep the batch small; without, splitting would give "
                f"{100 * (gain - 1):.0f} % more"
            )
    if question.is_priced and (price := break_even_usd_h(question)) is not None:
        why = (
            f"at ${question.memory.usd_h:.2f} an hour {question.memory.name} is too dear beside "
            f"{question.compute.name} at ${question.compute.usd_h:.2f}; splitting pays from ${price:.2f} down"
        )
        return "prices", why
    return "dead zone", _why_dead(found)


def _why_link(question: Question) -> str:
    def pays(gb_s: float) -> bool:
        return _gain(replace(question, link=question.link._replace(bytes_s=gb_s * 1e9))) >= LEAST_GAIN

    now = question.link.bytes_s / 1e9
    if pays(1e6):
        return f"the link has {now:.0f} GB/s, and splitting pays from {border(pays, now, 1e6):.0f} GB/s on"

    def pays_us(us: float) -> bool:
        return _gain(replace(question, link=question.link._replace(fixed_s=us / 1e6))) >= LEAST_GAIN

    us = 1e6 * question.link.fixed_s
    if pays_us(1e-3):
        least = border(pays_us, us, 1e-3)
        return f"an empty message takes {us:.0f} µs, and splitting pays from {least:.1f} µs down"
    return f"it would pay with more than {now:.0f} GB/s and less than {us:.0f} µs a message"


def break_even_usd_h(question: Question) -> float | None:
    """The highest price of a memory device, below its own, from which down splitting pays; None if at none.
    Further down it may not pay again, as the memory device alone may be best. A range of prices that is
    narrower than a twentieth may be missed."""
    memory, compute = question.memory, question.compute
    assert memory is not None and memory.usd_h is not None and compute.usd_h is not None

    def pays(usd_h: float) -> bool:
        return _gain(question.at_memory_price(usd_h)) >= LEAST_GAIN

    prices = [memory.usd_h]
    while prices[-1] > compute.usd_h / 100:
        prices.append(0.95 * prices[-1])
    steps = list(pairwise(prices))
    for i in range(0, len(steps), _AT_ONCE):
        some = steps[i : i + _AT_ONCE]
        gains = _gains([question.at_memory_price(usd_h) for _, usd_h in some])
        for (before, usd_h), gain in zip(some, gains, strict=True):
            if gain >= LEAST_GAIN:
                return border(pays, before, usd_h)
    return None


def _why_dead(found: FoundPlans) -> str:
    question = found.question
    assert question.memory is not None
    if not found.split:
        return "no split plan is within these limits"
    best = found.best_whole[0]
    cost, who = best.cost, best.setup.compute.hardware.name
    attention_s = cost.model_busy_s - _slices_s(best)
    share = 100 * attention_s / cost.step_s
    if who == question.memory.name and who != question.compute.name:
        return (
            f"{who} alone has the cheap memory and bandwidth, and at {best.n_rows:,} requests its arithmetic "
            f"still suffices"
        )
    return (
        f"memory is not short: {who} alone holds {best.n_rows:,} requests, and attention, which is all that "
        f"a second pool could take over, is {share:.0f} % of a step"
    )


def _slices_s(plan: PoolPlan) -> float:
    return step_cost(plan.setup, plan.n_rows, 0).model_busy_s


def _gain(question: Question) -> float:
    return _gains([question])[0]


def _gains(questions: Sequence[Question]) -> list[float]:
    """0 where there is no plan."""
    return [0.0 if isinstance(found, UserError) else found.gain for found in search_all(questions)]
