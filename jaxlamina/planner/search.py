"""Which pools, and how they are used, decode a workload best for the money or with the devices at hand: every
plan that the runtime can run, priced by `jaxlamina.planner.costs` in the steady state.

**Method.** All requests that fit are live at all times, as in the paper's evaluation (Lamina 2025, §6).
The batch is the largest whose KV fits at the workload's mean context, and whose step is within the SLO; or
a smaller one that fills the products' tiles, where that gives more tokens. A step takes what `step_cost`
says at the mean context; that is TPOT's median. TPOT's 99th percentile is of a step at the stored tokens
that one step in a hundred exceeds, at most what memory holds. Prompts are left out unless
`Question.with_prefill` says otherwise, as the paper leaves them out of both systems. Then a request's prompt
takes its time of model workers between steps, or of prefill workers beside them.

Pure; knows no device at hand, no file and no terminal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias, TypeVar

from jaxlamina.errors import UserError
from jaxlamina.planner.candidates import (
    SHARE_OF_MEMORY,
    copies_of,
    instance_usd_h,
    most_copies,
    prefill_workers,
    split_setups,
    whole_setups,
    why_nothing_fits,
)
from jaxlamina.planner.costs import Deployment, StepCost, kv_slots, pool_slots, step_costs
from jaxlamina.planner.failures import FailureRate
from jaxlamina.planner.question import Question
from jaxlamina.planner.workload import Workload

SIGMAS_P99 = 2.326  # of a normal distribution, its 99th percentile

_T = TypeVar("_T")
_Step: TypeAlias = tuple[Deployment, int, float]
_Pricing: TypeAlias = Generator[_Step, StepCost, _T]
"""What asks for the cost of one step after the other, so that many go on at once (`_priced`)."""


@dataclass(frozen=True)
class PoolPlan:
    """``copies`` instances of ``setup``, each with ``n_rows`` requests at a time and ``n_prefill`` prefill
    workers. ``tokens_s`` and ``usd_h`` are of all copies; ``cost`` is of a step at the mean context, without
    prompts."""

    setup: Deployment
    copies: int
    n_prefill: int
    n_rows: int
    n_slots: int
    cost: StepCost
    tpot_p50_s: float
    tpot_p99_s: float
    tokens_s: float
    usd_h: float | None
    available: float = 1.0  # share of time in which an instance writes

    @property
    def tokens_per_usd(self) -> float | None:
        return None if self.usd_h is None else 3600 * self.tokens_s / self.usd_h

    @property
    def model_idle(self) -> float:
        """Share of a step in which model workers neither run slices nor attend."""
        return max(0.0, 1 - self.cost.model_busy_s / self.cost.step_s)

    @property
    def attention_idle(self) -> float:
        return max(0.0, 1 - self.cost.attention_busy_s / self.cost.step_s)

    def score(self, question: Question) -> float:
        """What is most for the best plan."""
        by_money = self.tokens_per_usd if question.is_priced else None
        return self.tokens_s if by_money is None else by_money


@dataclass(frozen=True)
class FoundPlans:
    """Plans, the best first. ``whole``: unsplit, of each kind of device its best one first."""

    question: Question
    split: tuple[PoolPlan, ...]
    whole: tuple[PoolPlan, ...]

    @property
    def best_whole(self) -> tuple[PoolPlan, ...]:
        """What splitting is compared with: the best unsplit plan; where the devices are at hand, one on each
        kind of them, since all of them are."""
        return self.whole[:1] if self.question.is_priced else tuple(self.whole_by_device.values())

    @property
    def whole_by_device(self) -> dict[str, PoolPlan]:
        """The best unsplit plan on each kind of device alone, by its name; the best one first."""
        best: dict[str, PoolPlan] = {}
        for plan in self.whole:
            best.setdefault(plan.setup.compute.hardware.name, plan)
        return best

    @property
    def whole_score(self) -> float:
        return sum(plan.score(self.question) for plan in self.best_whole)

    @property
    def split_score(self) -> float:
        return self.split[0].score(self.question) if self.split else 0.0

    @property
    def gain(self) -> float:
        """The best split plan over what is best unsplit; 0 without a split plan."""
        if not self.split:
            return 0.0
        return self.split_score / self.whole_score if self.whole else math.inf


def search(question: Question) -> FoundPlans:
    """All plans within the money or the devices, the memory and the SLO. ``UserError`` where there is none,
    with the least that it would take."""
    [found] = search_all([question])
    if isinstance(found, UserError):
        raise found
    return found


def search_all(questions: Sequence[Question]) -> list[FoundPlans | UserError]:
    """`search` of each question, or its error. All at once takes a tenth of the time. A batch is looked for
    once, however many questions differ in prices and limits alone."""
    setups = [(*whole_setups(question), *split_setups(question)) for question in questions]
    known = [_known(q.workload, q.slo_s, q.with_prefill, q.failures) for q in questions]
    cases = [list(_cases(*asked)) for asked in zip(questions, setups, strict=True)]
    new: dict[tuple[int, _Case], tuple[_Known, _Pricing[tuple[_Batch, ...]]]] = {}
    for question, its, batches in zip(questions, cases, known, strict=True):
        for case, _ in its:
            if case not in batches and (place := (id(batches), case)) not in new:
                new[place] = batches, _batches(question, *case)
    priced = _priced([pricing for _, pricing in new.values()])
    for ((_, case), (batches, _)), found in zip(new.items(), priced, strict=True):
        batches[case] = found
    return [_found(*asked) for asked in zip(questions, setups, cases, known, strict=True)]


class _Case(NamedTuple):
    """``most``: requests at once, as memory and `Question.most_requests` have it."""

    setup: Deployment
    n_prefill: int
    most: int


class _Batch(NamedTuple):
    """Of a plan, what is the same at all prices."""

    n_rows: int
    cost: StepCost
    tpot_p50_s: float
    tpot_p99_s: float
    available: float


_Known: TypeAlias = dict[_Case, "tuple[_Batch, ...] | UserError"]


@lru_cache(4)
def _known(
    workload: Workload, slo_s: float | None, with_prefill: bool, failures: FailureRate | None
) -> _Known:
    """Batches of earlier searches for the same load: prices are looked for by dozens of searches."""
    return {}


def _cases(question: Question, setups: Iterable[Deployment]) -> Iterator[tuple[_Case, int]]:
    """With how many copies there are of each."""
    for setup in setups:
        for n_prefill in prefill_workers(question, setup):
            for copies in copies_of(question, setup, n_prefill):
                yield _Case(setup, n_prefill, _most_rows(question, setup, copies)), copies


def _most_rows(question: Question, setup: Deployment, copies: int) -> int:
    most = int(slots(setup) / question.workload.context)
    return most if question.most_requests is None else min(most, question.most_requests // copies)


def _found(
    question: Question, setups: Sequence[Deployment], cases: Sequence[tuple[_Case, int]], known: _Known
) -> FoundPlans | UserError:
    if not setups:
        return UserError(why_nothing_fits(question))
    plans, errors = [], list[UserError]()
    for case, copies in cases:
        batches = known[case]
        if isinstance(batches, UserError):  # so many devices fail too often: fewer may do
            errors.append(batches)
        elif batches:
            plans.append(_best_batch(question, case, copies, batches))
    if not plans:
        return errors[0] if errors else UserError(_why_too_slow(question, setups))
    # Of equals the cheaper one, then the one of fewer devices and the simpler one.
    plans.sort(
        key=lambda p: (-p.score(question), p.usd_h or 0, p.setup.n_model + p.setup.n_attention,
                       p.setup.n_batches, p.setup.local_share)
    )  # fmt: skip
    split = tuple(plan for plan in plans if plan.setup.is_split)
    return FoundPlans(question, split, tuple(plan for plan in plans if not plan.setup.is_split))


def evaluate(question: Question, setup: Deployment, copies: int, n_prefill: int = 0) -> PoolPlan | None:
    """The plan with the largest batch that fits memory and SLO, or with a smaller one that gives more tokens;
    None where not one request for each staggered batch does."""
    case = _Case(setup, n_prefill, _most_rows(question, setup, copies))
    batches = _alone(_batches(question, *case))
    return _best_batch(question, case, copies, batches) if batches else None


def _best_batch(question: Question, case: _Case, copies: int, batches: Sequence[_Batch]) -> PoolPlan:
    setup, n_prefill, _ = case
    usd_h = instance_usd_h(question, setup, n_prefill)
    plans = [_plan_of(setup, copies, n_prefill, usd_h, batch) for batch in batches]
    return max(plans, key=lambda plan: (plan.score(question), -plan.n_rows)) if len(plans) > 1 else plans[0]


def _plan_of(setup: Deployment, copies: int, n_prefill: int, usd_h: float | None, batch: _Batch) -> PoolPlan:
    return PoolPlan(
        setup, copies, n_prefill, batch.n_rows, slots(setup), batch.cost, batch.tpot_p50_s, batch.tpot_p99_s,
        batch.available * copies * batch.n_rows / batch.tpot_p50_s,
        None if usd_h is None else copies * usd_h, batch.available,
    )  # fmt: skip


def _priced(pricings: Iterable[_Pricing[_T]]) -> list[_T | UserError]:
    """What each of them comes to, or the error that ends it. They go on together: each round the steps that
    all of them ask for next are priced at once."""
    found: dict[int, _T | UserError] = {}
    going = dict(enumerate(pricings))
    costs: dict[_Step, StepCost] = {}
    asked: dict[int, _Step] = {}
    while going:
        before, asked = asked, {}
        for i, one in going.items():
            try:
                asked[i] = one.send(costs[before[i]]) if before else next(one)
            except StopIteration as end:
                found[i] = end.value
            except UserError as error:
                found[i] = error
        going = {i: going[i] for i in asked}
        new = [step for step in dict.fromkeys(asked.values()) if step not in costs]
        costs |= dict(zip(new, step_costs(new), strict=True))
    return [found[i] for i in range(len(found))]


def _alone(pricing: _Pricing[_T]) -> _T:
    [found] = _priced([pricing])
    if isinstance(found, UserError):
        raise found
    return found


def _batches(
    question: Question, setup: Deployment, n_prefill: int, most: int
) -> _Pricing[tuple[_Batch, ...]]:
    """The largest batch within memory and SLO, and smaller ones that fill tiles."""
    least = setup.n_batches
    if most < least:
        return ()

    def is_in_time(n_rows: int) -> _Pricing[bool]:
        slo_s = question.slo_s
        if slo_s is None or _prompts_s(question, setup, n_prefill, n_rows) > slo_s:
            return slo_s is None
        return (yield from _tpot_p99_s(question, setup, n_prefill, n_rows)) <= slo_s

    low, high = least, most
    if (yield from is_in_time(most)):
        low = most
    elif not (yield from is_in_time(least)):
        return ()
    while high - low > 1:  # the first is within the SLO, the second is not
        middle = (low + high) // 2
        low, high = (middle, high) if (yield from is_in_time(middle)) else (low, middle)
    n_parts = setup.n_batches if setup.has_pool else setup.n_replicas  # whose products are apart
    fuller = (n_parts * n for n in setup.compute.fuller_rows(math.ceil(low / n_parts)))
    batches = []
    for n_rows in (low, *(n for n in fuller if least <= n < low)):
        batches.append((yield from _batch(question, setup, n_prefill, n_rows)))
    return tuple(batches)


@lru_cache(1 << 14)
def slots(setup: Deployment) -> int:
    """Tokens whose KV fits, of which model workers keep their share: as many as the fuller pool allows."""
    n, x = kv_slots(setup, SHARE_OF_MEMORY), setup.local_share
    if not setup.is_split or x == 0:
        return n
    of_model, of_pool = pool_slots(setup, SHARE_OF_MEMORY)
    return min(n, int(int(of_model) / x), int(int(of_pool) / (1 - x)))


def least_link_bytes_s(question: Question, plan: PoolPlan, share: float = 0.95) -> float:
    """Bytes a second between the pools from which on a split plan gives ``share`` of its tokens with the same
    batch, and meets the SLO. The time of an empty message stays as it is."""
    link = plan.setup.link
    assert link is not None, "an unsplit plan has no link"

    def holds(bytes_s: float) -> bool:
        setup = replace(plan.setup, link=link._replace(bytes_s=bytes_s))
        batch = _alone(_batch(question, setup, plan.n_prefill, plan.n_rows))
        other = _plan_of(setup, plan.copies, plan.n_prefill, plan.usd_h, batch)
        in_time = question.slo_s is None or other.tpot_p99_s <= question.slo_s
        return in_time and other.tokens_s >= share * plan.tokens_s

    high = link.bytes_s
    low = high / 2
    while holds(low) and low > 1:
        low, high = low / 2, low
    return border(holds, low, high, 20)


def border(holds: Callable[[float], bool], low: float, high: float, n_halvings: int = 16) -> float:
    """Between ``low``, which does not hold, and ``high``, which does, about where it begins to."""
    for _ in range(n_halvings):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _batch(question: Question, setup: Deployment, n_prefill: int, n_rows: int) -> _Pricing[_Batch]:
    cost = yield setup, n_rows, question.workload.context
    step_s = _with_prompts_s(question, setup, n_prefill, n_rows, cost.step_s)
    slow_s = yield from _tpot_p99_s(question, setup, n_prefill, n_rows)
    available, rate = 1.0, question.failures
    if rate is not None:
        available = rate.available(setup, n_prefill, n_rows * question.workload.context)
    return _Batch(n_rows, cost, step_s, slow_s, available)


def _tpot_p99_s(question: Question, setup: Deployment, n_prefill: int, n_rows: int) -> _Pricing[float]:
    workload = question.workload
    most = min(slots(setup), workload.stored_tokens(n_rows, SIGMAS_P99))
    cost = yield setup, n_rows, max(most / n_rows, workload.context)
    return _with_prompts_s(question, setup, n_prefill, n_rows, cost.step_s)


def _with_prompts_s(
    question: Question, setup: Deployment, n_prefill: int, n_rows: int, step_s: float
) -> float:
    """A step and its share of prompts: between steps, or beside them by prefill workers."""
    prompts_s = _prompts_s(question, setup, n_prefill, n_rows)
    return max(step_s, prompts_s) if n_prefill else step_s + prompts_s


def _prompts_s(question: Question, setup: Deployment, n_prefill: int, n_rows: int) -> float:
    """Of a step, on each prefill worker, or on each replica without any."""
    if not question.with_prefill:
        return 0.0
    prompt_s = question.prompt_s(setup, 1 if n_prefill else setup.tensor_parallel)
    return prompt_s * n_rows / question.workload.n_output / (n_prefill or setup.n_replicas)


def _why_too_slow(question: Question, setups: Sequence[Deployment]) -> str:
    """The least TPOT there is, of one request for each staggered batch; or that no request fits."""
    fits = [
        setup
        for setup in setups
        if slots(setup) >= setup.n_batches * question.workload.context and most_copies(question, setup)
    ]
    if not fits:
        return (
            f"no plan has room for one request of {question.workload.context:,.0f} tokens beside the "
            f"weights: take a larger budget, more devices or devices with more memory"
        )
    if question.slo_s is None:
        return f"at most {question.most_requests} at once is too little for every plan: take more requests"
    lone = replace(question, slo_s=None, failures=None)
    least: PoolPlan | None = None
    priced = _priced([_batch(lone, setup, 0, setup.n_batches) for setup in fits])
    for setup, batch in zip(fits, priced, strict=True):
        if not isinstance(batch, UserError) and (least is None or batch.tpot_p99_s < least.tpot_p99_s):
            least = _plan_of(setup, 1, 0, None, batch)
    assert least is not None, "without failures nothing ends a pricing"
    return (
        f"no plan meets tpot={1e3 * question.slo_s:g} ms: the least is {1e3 * least.tpot_p99_s:.1f} ms, by "
        f"{describe(least)} with {least.n_rows} request{'s' if least.n_rows > 1 else ''} at a time"
    )


def describe(plan: PoolPlan) -> str:
    """A plan in words: "2 × NVIDIA H100 + 4 × NVIDIA H20, split" or "4 × NVIDIA H100 unsplit"."""
    setup, times = plan.setup, f"{plan.copies} times " if plan.copies > 1 else ""
    if setup.memory is None:
        return f"{times}{setup.n_model} × {setup.compute.hardware.name} unsplit"
    prefill = f" + {plan.n_prefill} for prompts" if plan.n_prefill else ""
    model = f"{setup.n_model} × {setup.compute.hardware.name}"
    pool = f"{setup.n_attention} × {setup.memory.hardware.name}"
    return f"{times}{model} + {pool}{prefill}, split"
