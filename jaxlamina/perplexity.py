"""Perplexity by teacher-forced decode: every token goes through both workers, one step at a time.

Knows token windows and an executor; no scheduler, no sampler. Slower than a prefill would be, and that is the
point: it measures the path that serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.buckets import Buckets
from jaxlamina.engine import Executor
from jaxlamina.errors import UserError
from jaxlamina.kv import OutOfSlots, SlotAllocator
from jaxlamina.workers.batch import DecodeBatch


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp of the mean negative log-probability of ``n_scored_tokens`` tokens."""

    value: float
    n_scored_tokens: int


def windows_of(tokens: Sequence[int], n_windows: int, window_tokens: int) -> np.ndarray:
    """The first windows of a text ``[n_windows, window_tokens]`` int32, one after the other, nothing left out."""
    needed = n_windows * window_tokens
    if len(tokens) < needed:
        raise UserError(
            f"{n_windows} windows of {window_tokens} tokens need {needed} tokens, the text has {len(tokens)}"
        )
    return np.asarray(tokens[:needed], np.int32).reshape(n_windows, window_tokens)


def perplexity(
    executor: Executor,
    windows: np.ndarray,
    *,
    buckets: Buckets | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity over ``windows`` ``[B, T]`` int32, all as one batch, each from an empty context.

    The first token of a window is not scored. ``executor`` must have no request running: its slots are used
    from 0 on. ``on_step(done, total)`` reports progress. ``UserError`` if B × (T-1) slots do not fit.
    """
    n_rows, n_tokens = windows.shape
    if n_tokens < 2:
        raise UserError(f"a window of {n_tokens} tokens has none to score: give windows of 2 or more")
    buckets = buckets or Buckets.default(n_rows, n_tokens)
    try:
        dealt = SlotAllocator(executor.n_slots).allocate(n_rows * (n_tokens - 1))
    except OutOfSlots as error:
        raise UserError(f"{n_rows} windows of {n_tokens} tokens: {error}: give more kv_slots") from None
    slots = np.asarray(dealt, np.int32).reshape(n_tokens - 1, n_rows).T  # a step's new slots side by side
    scores = []
    for t in range(n_tokens - 1):
        batch = DecodeBatch.build(windows[:, t], list(slots[:, : t + 1]), buckets, executor.n_slots)
        scores.append(_logprobs(executor.decode(batch)[:n_rows], windows[:, t + 1]))
        if on_step is not None:
            on_step(t + 1, n_tokens - 1)
    total = float(np.sum(np.asarray(jax.device_get(scores), np.float64)))
    n_scored = n_rows * (n_tokens - 1)
    return Perplexity(math.exp(-total / n_scored), n_scored)


@jax.jit
def _logprobs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probability of ``targets`` ``[B]`` under ``logits`` ``[B, V]`` float32."""
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
