"""The same question with one variable gone through: what splitting gives, what no splitting gives, and where
the border lies.

Pure; `jaxlamina.planner.figures` draws it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxlamina.errors import UserError
from jaxlamina.planner.question import Question
from jaxlamina.planner.search import search_all


class SweepPoint(NamedTuple):
    """``split`` and ``whole``: scores of the best plans, None where there is none. ``by_device``: the best
    unsplit plan's on each kind of device alone."""

    x: float
    split: float | None
    whole: float | None
    by_device: dict[str, float]


@dataclass(frozen=True)
class Sweep:
    """``now``: where the question itself stands, None where it has no such value. ``unit``: of scores."""

    variable: str
    label: str
    unit: str
    points: tuple[SweepPoint, ...]
    now: float | None
    log_x: bool = True

    @property
    def borders(self) -> tuple[float, ...]:
        """Values at which the better way changes: on a straight line between two points, as they are drawn;
        in the middle where one of them has one way alone."""
        found = []
        for one, other in zip(self.points, self.points[1:], strict=False):
            gains = _gain(one), _gain(other)
            if (gains[0] > 0) == (gains[1] > 0):
                continue
            share = gains[0] / (gains[0] - gains[1]) if all(map(math.isfinite, gains)) else 0.5
            a, b = (math.log(x.x) if self.log_x else x.x for x in (one, other))
            between = a + share * (b - a)
            found.append(math.exp(between) if self.log_x else between)
        return tuple(found)


def _gain(point: SweepPoint) -> float:
    """By splitting, of the score; infinite where there is one way alone."""
    if point.split is None or point.whole is None:
        return math.inf if point.whole is None and point.split is not None else -math.inf
    return point.split - point.whole


class _Variable(NamedTuple):
    label: Callable[[Question], str]
    values: Callable[[Question], Sequence[float]]
    put: Callable[[Question, float], Question]
    now: Callable[[Question], float | None]


def _spread(low: float, high: float, n: int = 33) -> list[float]:
    return [low * (high / low) ** (i / (n - 1)) for i in range(n)]


def _price(question: Question) -> float | None:
    return None if question.memory is None else question.memory.usd_h


def _prices(question: Question) -> list[float]:
    if question.compute.usd_h is None or not question.is_priced:
        raise UserError("--what-if price needs a budget and prices")
    if question.memory is not None and question.memory.name == question.compute.name:
        raise UserError("--what-if price is of a memory device that is not the compute device")
    return _spread(question.compute.usd_h / 16, 1.25 * question.compute.usd_h)


_NAMED = {
    "price": _Variable(
        lambda q: f"price of {_memory(q)}, $ an hour ({q.compute.name}: ${q.compute.usd_h:.2f})",
        _prices, Question.at_memory_price, _price,
    ),
    "link": _Variable(
        lambda q: f"link between the pools, GB/s one way ({1e6 * q.link.fixed_s:.1f} µs a message)",
        lambda q: _spread(0.5, 500),
        lambda q, x: replace(q, link=q.link._replace(bytes_s=1e9 * x)),
        lambda q: q.link.bytes_s / 1e9,
    ),
    "context": _Variable(
        lambda q: "mean context of a live request, tokens",
        lambda q: _spread(128, 65536),
        lambda q, x: replace(q, workload=q.workload.at_context(x)),
        lambda q: q.workload.context,
    ),
    "batch": _Variable(
        lambda q: "requests at once",
        lambda q: sorted({round(x) for x in _spread(1, 2048)}),
        lambda q, x: replace(q, most_requests=round(x)),
        lambda q: q.most_requests,
    ),
    "ratio": _Variable(
        lambda q: "attention workers for each model worker",
        lambda q: [0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, *range(4, 9), 10, 12, 16],
        lambda q, x: replace(q, ratio=x),
        lambda q: q.ratio,
    ),
}  # fmt: skip
VARIABLES = tuple(_NAMED)
_SLO = _Variable(
    lambda q: "TPOT, 99th percentile, ms at most",
    lambda q: _spread(5, 500, 41),
    lambda q, x: replace(q, slo_s=x / 1e3),
    lambda q: None if q.slo_s is None else 1e3 * q.slo_s,
)


def _memory(question: Question) -> str:
    assert question.memory is not None
    return question.memory.name


def sweep(question: Question, variable: str) -> Sweep:
    """``UserError`` for an unknown variable, for one that this question does not have, and where there is no
    plan at any value."""
    if variable not in _NAMED:
        raise UserError(f"--what-if {variable!r} must be one of {', '.join(VARIABLES)}")
    if question.memory is None:
        raise UserError("--what-if is about two pools: name two kinds of device")
    return _sweep(question, variable, _NAMED[variable])


def pareto(question: Question) -> Sweep:
    """Tokens for the money (or a second) by the latency that is asked for: the frontier of each way."""
    return _sweep(question, "tpot", _SLO)


def _sweep(question: Question, name: str, variable: _Variable) -> Sweep:
    points, values = [], variable.values(question)
    questions = [variable.put(question, x) for x in values]
    for x, asked, found in zip(values, questions, search_all(questions), strict=True):
        if not isinstance(found, UserError):
            split = found.split_score if found.split else None
            best = found.whole_by_device
            alone = {d.name: best[d.name].score(asked) for d in question.devices if d.name in best}
            points.append(SweepPoint(float(x), split, found.whole_score if found.whole else None, alone))
    if name == "ratio":  # beyond the last one that money or devices allow there is nothing to see
        most = max((point.x for point in points if point.split is not None), default=0.0)
        points = [point for point in points if point.x <= most]
    if not points:
        raise UserError(f"no value of {name} leaves a plan: {_why(question)}")
    unit = "tokens for a dollar" if question.is_priced else "tokens a second"
    log_x = name != "ratio"
    return Sweep(name, variable.label(question), unit, tuple(points), variable.now(question), log_x)


def _why(question: Question) -> str:
    [found] = search_all([question])
    return str(found) if isinstance(found, UserError) else "all its values are beyond the limits"
