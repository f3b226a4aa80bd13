"""Which pools a question's money, devices and memory allow, as far as the runtime has them: all setups that a
search prices, and how many of each there can be.

Pure; knows no time of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from jaxlamina.planner.costs import Deployment
from jaxlamina.planner.hardware import GIB
from jaxlamina.planner.question import MOST_IN_HOST, Device, Question, unsplit
from jaxlamina.planner.roofline import shared_out_evenly

SHARE_OF_MEMORY = 0.9
_POOLS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32)  # attention workers of one instance
_SHARES = tuple(n / 20 for n in range(1, 20))
_PREFILL_WORKERS = (1, 2, 3, 4, 6, 8)


def _fits(question: Question, device: Device, n_shards: int) -> bool:
    """Whether a copy of the weights does on so many devices, with room for a request's KV or a step."""
    memory = SHARE_OF_MEMORY * n_shards * device.terms.hardware.memory_gib * GIB
    return memory > question.weight_bytes


def _shards(question: Question, device: Device) -> Iterator[int]:
    """Over how many devices a copy of the weights may be shared out: those that its sizes divide by, and
    over several only where it is known what joins them."""
    for n in range(1, (1 if device.in_host is None else MOST_IN_HOST) + 1):
        if shared_out_evenly(question.config, n) and _fits(question, device, n):
            yield n


def split_over(question: Question, a: int, b: int, n_shards: int) -> Deployment:
    """All attention on ``b`` attention workers, by heads where these divide; one batch."""
    assert question.memory is not None
    return Deployment(
        question.config, question.compute.terms, question.memory.terms, question.link,
        a, b, n_shards, "heads" if question.config.num_key_value_heads % b == 0 else "tokens",
        model_link=question.compute.in_host,
    )  # fmt: skip


def whole_setups(question: Question) -> Iterator[Deployment]:
    for device in question.devices:
        for n in _shards(question, device):
            setup = unsplit(question.config, device.terms, device.sums(question.as_run), n)
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
            yield from _ways(base)


@lru_cache(1 << 11)
def _ways(base: Deployment) -> tuple[Deployment, ...]:
    """Of the same pools. The same objects for all searches, which know them again quickly then."""
    found = [*staggered(base)]
    if base.n_model == 1:
        for x in _SHARES:
            found += staggered(replace(base, partition="tokens", local_share=x))
    elif base.tensor_parallel > 1:
        for x in _shares_by_heads(base.config.num_key_value_heads, base.n_model, base.n_attention):
            found.append(replace(base, partition="heads", local_share=x))
    return tuple(found)


def _shares_by_heads(n_kv_heads: int, n_shards: int, n_workers: int) -> Iterator[float]:
    """Those between 0 and 1 that leave each shard as many heads, and each attention worker one at least."""
    for n in range(n_shards, n_kv_heads, n_shards):
        if n_kv_heads - n >= n_workers:
            yield n / n_kv_heads


def staggered(base: Deployment) -> Iterator[Deployment]:
    """1 … r + 2 staggered batches over r copies: rotating with one more than copies, else as many on each."""
    r = base.n_replicas
    for n in range(r, r + 3):
        if n == r + 1 or n % r == 0:
            yield replace(base, n_batches=n, mode="rotational" if n == r + 1 else "fixed")


class _Instance(NamedTuple):
    usd_h: float | None
    most_copies: int


def instance_usd_h(question: Question, setup: Deployment, n_prefill: int = 0) -> float | None:
    return _instance(question, setup, n_prefill).usd_h


def most_copies(question: Question, setup: Deployment, n_prefill: int = 0) -> int:
    """Instances within the money and the devices."""
    return _instance(question, setup, n_prefill).most_copies


def _instance(question: Question, setup: Deployment, n_prefill: int) -> _Instance:
    """Reckoned once for all setups on the same devices."""
    memory = None if setup.memory is None else setup.memory.hardware.name
    key = setup.compute.hardware.name, setup.n_model + n_prefill, memory, setup.n_attention
    if key not in question.instances:
        used = {key[0]: key[1]}
        if memory is not None:
            used[memory] = used.get(memory, 0) + setup.n_attention
        question.instances[key] = _instance_of(question, used)
    found: _Instance = question.instances[key]
    return found


def _instance_of(question: Question, used: Mapping[str, int]) -> _Instance:
    """``used``: devices by name."""
    prices = {device.name: device.usd_h for device in question.devices}
    usd_h: float | None = 0.0
    for name, n in used.items():
        price = prices[name]
        usd_h = None if price is None or usd_h is None else usd_h + n * price
    limits = []
    if question.budget_usd_h is not None:
        assert usd_h is not None, "Question has seen to it"
        limits.append(int(question.budget_usd_h / usd_h + 1e-9))
    if question.counts is not None:
        limits += [question.counts.get(name, 0) // n for name, n in used.items()]
    return _Instance(usd_h, min(limits))


def copies_of(question: Question, setup: Deployment, n_prefill: int) -> tuple[int, ...]:
    most = most_copies(question, setup, n_prefill)
    if not most:
        return ()
    # As many as there can be, unless a limited number of requests may not fill them.
    fewer = () if question.most_requests is None else range(1, min(most, 65))
    return (*fewer, most)


def prefill_workers(question: Question, setup: Deployment) -> tuple[int, ...]:
    has_own_heads = setup.local_share > 0 and setup.layout.by_heads  # of which a prefill worker sends none
    can = question.with_prefill and setup.is_split and not has_own_heads
    can = can and _fits(question, question.compute, 1)
    return (0, *_PREFILL_WORKERS) if can else (0,)


def why_nothing_fits(question: Question) -> str:
    """What one copy of the weights needs at least."""
    gb = question.weight_bytes / 1e9
    needs = []
    for device in question.devices:
        n = next(iter(_shards(question, device)), None)
        if n is None and device.in_host is None:
            needs.append(f"{device.name} with a known link between them (chip_link_gb_s)")
        elif n is None:
            needs.append(f"more than {MOST_IN_HOST} × {device.name}")
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
