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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from jaxlamina.errors import UserError
from jaxlamina.models.config import ModelConfig
from jaxlamina.planner import roofline
from jaxlamina.planner.costs import (
    Deployment,
    LinkTerms,
    StepCost,
    Terms,
    kv_slots,
    pool_slots,
    prefill_s,
    step_cost,
)
from jaxlamina.planner.failures import FailureRate
from jaxlamina.planner.hardware import GIB
from jaxlamina.planner.workload import Workload

SIGMAS_P99 = 2.326  # of a normal distribution, its 99th percentile
SHARE_OF_MEMORY = 0.9
_MOST_SHARDS = 8  # devices of one host, between which products are summed
_MOST_COPIES = 8
_POOLS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32)  # attention workers of one instance
_SHARES = tuple(n / 20 for n in range(1, 20))
_PREFILL_WORKERS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Device:
    """A kind of device, what one costs (None: not known), and what joins two of them in a host (None: not
    known, so that they cannot share out a model). ``origin``: where the terms are from."""

    terms: Terms
    usd_h: float | None = None
    in_host: LinkTerms | None = None
    origin: str = ""

    @property
    def name(self) -> str:
        return self.terms.hardware.name


@dataclass(frozen=True)
class Question:
    """What is asked for. ``budget_usd_h``: at most so much, and the best is the most tokens for the money.
    ``counts``: at most so many devices, by name; without a budget the best is the most tokens a second.

    ``most_requests``: never more at once, over all copies. ``ratio``: only plans with so many attention
    workers for each model worker. ``memory`` None: there is nothing to split onto.
    ``failures``: tokens are those of the time in which instances write.
    """

    config: ModelConfig
    workload: Workload
    compute: Device
    memory: Device | None
    link: LinkTerms
    budget_usd_h: float | None = None
    counts: Mapping[str, int] | None = None
    slo_s: float | None = None
    most_requests: int | None = None
    with_prefill: bool = False
    ratio: float | None = None
    failures: FailureRate | None = None

    def __post_init__(self) -> None:
        if self.budget_usd_h is None and self.counts is None:
            raise UserError("say what there is: a budget, or devices")
        if self.budget_usd_h is not None:
            for device in self.devices:
                if device.usd_h is None:
                    raise UserError(f"{device.name}: its price is not known, which a budget needs")

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        memory = [] if self.memory is None or self.memory.name == self.compute.name else [self.memory]
        return (self.compute, *memory)

    def at_memory_price(self, usd_h: float) -> Question:
        """The same with another price of a memory device."""
        assert self.memory is not None
        return replace(self, memory=replace(self.memory, usd_h=usd_h))

    @property
    def is_priced(self) -> bool:
        """Whether the best is by money."""
        return self.budget_usd_h is not None

    def prompt_s(self, setup: Deployment, n_shards: int) -> float:
        """A prompt's mean time on so many of the setup's compute devices."""
        key = setup.compute.hardware.name, n_shards
        if key not in self._prompts_s:
            alone = unsplit(self.config, setup.compute, setup.model_link, n_shards)
            times_s = [prefill_s(alone, max(1, round(n))) for n in self.workload.prompts]
            self._prompts_s[key] = sum(times_s) / len(times_s)
        return self._prompts_s[key]

    @cached_property
    def _prompts_s(self) -> dict[tuple[str, int], float]:
        return {}

    @cached_property
    def weight_bytes(self) -> float:
        return roofline.ELEMENT_BYTES * roofline.n_params(self.config)


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
    setups = [*_whole(question), *split_setups(question)]
    if not setups:
        raise UserError(why_nothing_fits(question))
    plans = [
        plan
        for setup in setups
        for n_prefill in _prefill_workers(question, setup)
        for copies in _copies(question, setup, n_prefill)
        if (plan := evaluate(question, setup, copies, n_prefill)) is not None
    ]
    if not plans:
        raise UserError(_why_too_slow(question, setups))
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
    n_slots = slots(setup)
    most = int(n_slots / question.workload.context)
    if question.most_requests is not None:
        most = min(most, question.most_requests // copies)
    least = setup.n_batches
    if most < least:
        return None

    def is_in_time(n_rows: int) -> bool:
        slo_s = question.slo_s
        return slo_s is None or _tpot_p99_s(question, setup, n_prefill, n_rows, n_slots) <= slo_s

    low, high = least, most
    if is_in_time(most):
        low = most
    elif not is_in_time(least):
        return None
    while high - low > 1:  # the first is within the SLO, the second is not
        middle = (low + high) // 2
        low, high = (middle, high) if is_in_time(middle) else (low, middle)
    n_parts = setup.n_batches if setup.has_pool else setup.n_replicas  # whose products are apart
    fuller = (n_parts * n for n in setup.compute.fuller_rows(math.ceil(low / n_parts)))
    plans = [
        _plan(question, setup, copies, n_prefill, n_rows, n_slots)
        for n_rows in (low, *(n for n in fuller if least <= n < low))
    ]
    return max(plans, key=lambda plan: (plan.score(question), -plan.n_rows))


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
        other = _plan(question, setup, plan.copies, plan.n_prefill, plan.n_rows, plan.n_slots)
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


def _plan(
    question: Question, setup: Deployment, copies: int, n_prefill: int, n_rows: int, n_slots: int
) -> PoolPlan:
    cost = step_cost(setup, n_rows, question.workload.context)
    step_s = _with_prompts_s(question, setup, n_prefill, n_rows, cost.step_s)
    slow_s = _tpot_p99_s(question, setup, n_prefill, n_rows, n_slots)
    usd_h = instance_usd_h(question, setup, n_prefill)
    available, rate = 1.0, question.failures
    if rate is not None:
        available = rate.available(setup, n_prefill, n_rows * question.workload.context)
    return PoolPlan(
        setup, copies, n_prefill, n_rows, n_slots, cost, step_s, slow_s,
        available * copies * n_rows / step_s, None if usd_h is None else copies * usd_h, available,
    )  # fmt: skip


def _tpot_p99_s(question: Question, setup: Deployment, n_prefill: int, n_rows: int, n_slots: int) -> float:
    workload = question.workload
    most = min(n_slots, workload.stored_tokens(n_rows, SIGMAS_P99))
    step_s = step_cost(setup, n_rows, max(most / n_rows, workload.context)).step_s
    return _with_prompts_s(question, setup, n_prefill, n_rows, step_s)


def _with_prompts_s(
    question: Question, setup: Deployment, n_prefill: int, n_rows: int, step_s: float
) -> float:
    """A step and its share of prompts: between steps, or beside them by prefill workers."""
    if not question.with_prefill:
        return step_s
    prompt_s = question.prompt_s(setup, 1 if n_prefill else setup.tensor_parallel)
    prompts_s = prompt_s * n_rows / question.workload.n_output  # of a step, on one device or replica
    return max(step_s, prompts_s / n_prefill) if n_prefill else step_s + prompts_s / setup.n_replicas


def instance_usd_h(question: Question, setup: Deployment, n_prefill: int = 0) -> float | None:
    prices = {device.name: device.usd_h for device in question.devices}
    total = 0.0
    for name, n in _uses(setup, n_prefill).items():
        price = prices[name]
        if price is None:
            return None
        total += n * price
    return total


def _uses(setup: Deployment, n_prefill: int) -> dict[str, int]:
    """Devices of one instance, by name."""
    used = {setup.compute.hardware.name: setup.n_model + n_prefill}
    if setup.memory is not None:
        name = setup.memory.hardware.name
        used[name] = used.get(name, 0) + setup.n_attention
    return used


def most_copies(question: Question, setup: Deployment, n_prefill: int = 0) -> int:
    """Instances within the money and the devices."""
    limits = []
    if question.budget_usd_h is not None:
        usd_h = instance_usd_h(question, setup, n_prefill)
        assert usd_h is not None, "Question has seen to it"
        limits.append(int(question.budget_usd_h / usd_h + 1e-9))
    if question.counts is not None:
        limits += [question.counts.get(name, 0) // n for name, n in _uses(setup, n_prefill).items()]
    return min(limits)


def _copies(question: Question, setup: Deployment, n_prefill: int) -> tuple[int, ...]:
    most = most_copies(question, setup, n_prefill)
    if not most:
        return ()
    # As many as there can be, unless a limited number of requests may not fill them.
    return (most,) if question.most_requests is None else tuple(range(1, min(most, 64) + 1))


def _prefill_workers(question: Question, setup: Deployment) -> tuple[int, ...]:
    has_own_heads = setup.local_share > 0 and setup.layout.by_heads  # of which a prefill worker sends none
    can = question.with_prefill and setup.is_split and not has_own_heads
    can = can and _fits(question, question.compute, 1)
    return (0, *_PREFILL_WORKERS) if can else (0,)


def _fits(question: Question, device: Device, n_shards: int) -> bool:
    """Whether a copy of the weights does on so many devices, with room for a request's KV or a step."""
    memory = SHARE_OF_MEMORY * n_shards * device.terms.hardware.memory_gib * GIB
    return memory > question.weight_bytes


def _shards(question: Question, device: Device) -> Iterator[int]:
    """Over how many devices a copy of the weights may be shared out: those that heads divide by, and over
    several only where it is known what joins them."""
    for n in range(1, (1 if device.in_host is None else _MOST_SHARDS) + 1):
        if question.config.num_key_value_heads % n == 0 and _fits(question, device, n):
            yield n


def unsplit(config: ModelConfig, terms: Terms, in_host: LinkTerms | None, n_shards: int = 1) -> Deployment:
    """A model whose weights so many devices of a host share out."""
    return Deployment(config, terms, n_model=n_shards, tensor_parallel=n_shards, model_link=in_host)


def split_over(question: Question, a: int, b: int, n_shards: int) -> Deployment:
    """All attention on ``b`` attention workers, by heads where these divide; one batch."""
    assert question.memory is not None
    return Deployment(
        question.config, question.compute.terms, question.memory.terms, question.link,
        a, b, n_shards, "heads" if question.config.num_key_value_heads % b == 0 else "tokens",
        model_link=question.compute.in_host,
    )  # fmt: skip


def _whole(question: Question) -> Iterator[Deployment]:
    for device in question.devices:
        for n in _shards(question, device):
            setup = unsplit(question.config, device.terms, device.in_host, n)
            if most_copies(question, setup):
                yield setup


def split_setups(question: Question) -> Iterator[Deployment]:
    """As `jaxlamina.job.cluster` takes them: copies of the model or shards of one, and a share of the KV on
    one model worker, or on the shards of one, by heads. There in one batch: staggered ones took up to twice
    what they are predicted to take (docs/findings.md)."""
    if question.memory is None:
        return
    pools = [
        (a, n) for n in _shards(question, question.compute) for a in {n, *(range(1, 9) if n == 1 else ())}
    ]
    for a, n_shards in pools:
        for b in _POOLS:
            if question.ratio is not None and not math.isclose(b, question.ratio * a):
                continue
            base = split_over(question, a, b, n_shards)
            if not most_copies(question, base):
                break
            yield from staggered(base)
            if a == 1:
                for x in _SHARES:
                    yield from staggered(replace(base, partition="tokens", local_share=x))
            elif n_shards > 1:
                for x in _shares_by_heads(question.config.num_key_value_heads, a, b):
                    yield replace(base, partition="heads", local_share=x)


def _shares_by_heads(n_kv_heads: int, n_shards: int, n_workers: int) -> Iterator[float]:
    """Those between 0 and 1 that leave each shard, and each attention worker, an equal number of heads."""
    for n in range(n_shards, n_kv_heads, n_shards):
        if (n_kv_heads - n) % n_workers == 0:
            yield n / n_kv_heads


def staggered(base: Deployment) -> Iterator[Deployment]:
    """1 … r + 2 staggered batches over r copies: rotating with one more than copies, else as many on each."""
    r = base.n_replicas
    for n in range(r, r + 3):
        if n == r + 1 or n % r == 0:
            yield replace(base, n_batches=n, mode="rotational" if n == r + 1 else "fixed")


def why_nothing_fits(question: Question) -> str:
    """What one copy of the weights needs at least."""
    gb = question.weight_bytes / 1e9
    needs = []
    for device in question.devices:
        n = next(iter(_shards(question, device)), None)
        if n is None and device.in_host is None:
            needs.append(f"{device.name} with a known link between them (chip_link_gb_s)")
        elif n is None:
            needs.append(f"more than {_MOST_SHARDS} × {device.name}")
        elif device.usd_h is None:
            needs.append(f"{n} × {device.name}")
        else:
            needs.append(f"{n} × {device.name}, ${n * device.usd_h:.2f} an hour")
    there = []
    if question.budget_usd_h is not None:
        there.append(f"${question.budget_usd_h:g} an hour")
    if question.counts is not None:
        there.append(", ".join(f"{n} × {name}" for name, n in question.counts.items()))
    return (
        f"{' and '.join(there)}: not enough for one copy of the weights, {gb:.0f} GB; it takes at least "
        f"{', or '.join(needs)}"
    )


def _why_too_slow(question: Question, setups: list[Deployment]) -> str:
    """The least TPOT there is, of one request for each staggered batch; or that no request fits."""
    lone = replace(question, slo_s=None)
    least: PoolPlan | None = None
    for setup in setups:
        n_slots = slots(setup)
        if n_slots < setup.n_batches * question.workload.context or not most_copies(question, setup):
            continue
        plan = _plan(lone, setup, 1, 0, setup.n_batches, n_slots)
        if least is None or plan.tpot_p99_s < least.tpot_p99_s:
            least = plan
    if least is None:
        return (
            f"no plan has room for one request of {question.workload.context:,.0f} tokens beside the "
            f"weights: take a larger budget, more devices or devices with more memory"
        )
    if question.slo_s is None:
        return f"at most {question.most_requests} at once is too little for every plan: take more requests"
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
