"""How fast the KV policy is: functions that return numbers, from Python and as the scheduler calls it.

Each takes the best of many repeats, since what is measured is this code and not what else the machine was
doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxlamina.kv.allocator import SlotAllocator
from jaxlamina.kv.prefix import PrefixCache
from jaxlamina.kv.slot_list import SlotList, append_each

N_SLOTS = 1 << 19  # 64 GiB of LLaMA-3-8B's KV in bfloat16


@dataclass(frozen=True)
class KvCosts:
    """What the KV policy costs, for ``n_slots`` slots."""

    n_slots: int
    slot_operations_per_s: float  # allocate, fork, free, free of 1,024 slots at a time
    decode_step_us: float  # all allocation work of one decode step of 256 requests
    prefix_match_us: float  # a prompt of 1,000 tokens, all of them found, among 1,000 other prompts
    prefix_insert_us: float  # the same prompt, none of it found
    prefix_evict_us: float  # 256 slots off a full cache


def measure(n_slots: int = N_SLOTS, *, repeats: int = 200) -> KvCosts:
    """All of the figures, within a few seconds."""
    return KvCosts(
        n_slots,
        measure_slot_operations_per_s(n_slots, repeats=repeats),
        measure_decode_step_us(n_slots, repeats=repeats),
        *measure_prefix_us(n_slots, repeats=repeats),
    )


def measure_slot_operations_per_s(
    n_slots: int = N_SLOTS, *, at_a_time: int = 1024, repeats: int = 200
) -> float:
    """Slots allocated, forked and freed (twice) a second, ``at_a_time`` a call, at random over the pool."""
    slots = _shuffled(n_slots)

    def cycle() -> None:
        taken = slots.allocate(at_a_time)
        slots.fork(taken)
        slots.free(taken)
        slots.free(taken)

    return 4 * at_a_time / _best_s(cycle, repeats)


def measure_decode_step_us(n_slots: int = N_SLOTS, *, n_requests: int = 256, repeats: int = 200) -> float:
    """One slot more for each of ``n_requests`` running requests, and for 2 of them a new request in their
    place.

    256 requests of 128 tokens of answer change twice a step. The two newcomers have prompts of 1,000 tokens.
    """
    slots = _shuffled(n_slots)
    rows = [SlotList(slots.allocate(1000)) for _ in range(n_requests)]

    def step() -> None:
        for row in rows[:2]:
            slots.free(row.view())
            row.clear()
            row.extend(slots.allocate(1000))
        append_each(rows, slots.allocate(n_requests))

    return 1e6 * _best_s(step, repeats)


def measure_prefix_us(
    n_slots: int = N_SLOTS, *, n_tokens: int = 1000, repeats: int = 200
) -> tuple[float, float, float]:
    """(match, insert, evict of 256) in µs, with 1,000 prompts of ``n_tokens`` in the cache, or as many as fit
    half the pool."""
    rng = np.random.default_rng(0)
    slots = _shuffled(n_slots)
    cache = PrefixCache(slots)
    n_prompts = min(1000, n_slots // (2 * n_tokens))
    # The first 100 tokens are shared by all, as a system prompt is.
    prompts = rng.integers(0, 32_000, (n_prompts, n_tokens), np.int32)
    prompts[:, :100] = prompts[0, :100]

    def insert(tokens: list[int]) -> None:
        own = slots.allocate(len(tokens))
        cache.insert(tokens, own)
        slots.free(own)

    for prompt in prompts:
        insert(prompt.tolist())
    asked = prompts[n_prompts // 2].tolist()
    match_s = _best_s(lambda: slots.free(cache.match(asked)), repeats)
    fresh = iter(rng.integers(32_000, 64_000, (repeats, n_tokens), np.int32).tolist())
    insert_s = _best_s(lambda: insert(next(fresh)), min(repeats, (slots.n_free - n_tokens) // n_tokens))
    evict_s = _best_s(lambda: cache.evict(256), min(repeats, cache.n_cached // 256 - 1))
    return 1e6 * match_s, 1e6 * insert_s, 1e6 * evict_s


def _shuffled(n_slots: int) -> SlotAllocator:
    """An allocator that deals at random over its pool, as one does that has run for a while."""
    slots = SlotAllocator(n_slots)
    slots.free(np.random.default_rng(0).permutation(slots.allocate(n_slots)))
    return slots


def _best_s(call: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(max(1, repeats)):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best
