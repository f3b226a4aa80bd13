"""How the next token is chosen: one jitted function for a whole batch.

Knows logits `[B, V]` and per-request numbers; nothing of models, KV or scheduling. There is no sort over
the vocabulary: top-k and top-p are thresholds, found exactly by bisection over the bits of a float32.
A request draws from a key made of its own seed and the position alone, so its tokens do not depend on
what else is in the batch, and a step can be run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.process.compile_ahead import ProgramAhead
from jaxlamina.sampling import adjustments
from jaxlamina.sampling.adjustments import NO_TOKEN, NOT_ADJUSTED, Adjusted, Adjustments, power_of_4
from jaxlamina.sampling.params import MAX_LOGPROBS, SamplingParams

_LANES = 64  # floats side by side in a reduction
_MOST_DRAWN = 2**24  # logits that are drawn from at once: 128 rows of 128,256 tokens


class Sampled(NamedTuple):
    """One step's choice. Device arrays; those of logprobs are None unless they were asked for."""

    tokens: jax.Array  # [B] int32
    logprobs: jax.Array | None = None  # [B] float32, of the chosen token
    ranks: jax.Array | None = None  # [B] int32, 1 is the likeliest
    top_tokens: jax.Array | None = None  # [B, n_top] int32, likeliest first
    top_logprobs: jax.Array | None = None  # [B, n_top] float32
    column: jax.Array | None = (
        None  # [B, 1] int32: the tokens of a draw, as the next decode step takes them in
    )


class Knobs(NamedTuple):
    """What each of B rows draws by, as arrays."""

    temperature: Any  # [B] float32, 0: greedy
    top_k: Any  # [B] int32, V or more: all
    top_p: Any  # [B] float32
    min_p: Any  # [B] float32
    seeds: Any  # [B, 2] uint32: low and high word
    positions: Any  # [B] int32: the position the chosen token will have

    @classmethod
    def of(cls, rows: Sequence[Row], size: int) -> Knobs:
        """Those of ``rows``, padded with greedy ones to ``size``."""
        params = [row.params for row in rows]
        seeds = np.zeros((size, 2), np.uint32)
        seeds[: len(rows)] = [(row.seed & 0xFFFFFFFF, row.seed >> 32) for row in rows]
        return cls(
            temperature=_column([0 if p.greedy else p.temperature for p in params], size, 0, np.float32),
            top_k=_column([p.top_k if p.top_k > 0 else NO_TOKEN for p in params], size, NO_TOKEN, np.int32),
            top_p=_column([p.top_p for p in params], size, 1, np.float32),
            min_p=_column([p.min_p for p in params], size, 0, np.float32),
            seeds=seeds,
            positions=_column([row.position for row in rows], size, 0, np.int32),
        )


class Row(NamedTuple):
    """One request's part of a batch."""

    params: SamplingParams
    seed: int  # what it draws by, 0 … 2**64 - 1
    position: int  # the one the chosen token will have
    adjusted: Adjusted = NOT_ADJUSTED


class SamplingBatch(NamedTuple):
    """B requests as arrays, and what of the sampler they need (static)."""

    knobs: Knobs | None  # None: all are greedy
    adjustments: Adjustments
    filters: bool  # some row that draws has top_k, top_p or min_p
    n_top: int | None  # logprobs of so many tokens, None: no logprobs at all

    @classmethod
    def build(cls, rows: Sequence[Row], size: int, newest: Any = None) -> SamplingBatch:
        """``rows``, padded with greedy ones to ``size``; ``newest`` [size, 1] int32 as `adjustments.build`
        has it."""
        params = [row.params for row in rows]
        return cls(
            None if all(p.greedy for p in params) else Knobs.of(rows, size),
            adjustments.build([row.adjusted for row in rows], size, newest),
            filters=any(p.filters and not p.greedy for p in params),
            n_top=_logprobs_width([p.needed_logprobs for p in params]),
        )


def _column(values: Sequence[float], size: int, fill: float, dtype: Any) -> np.ndarray:
    """``values``, one a row, and ``fill`` for the rows after them. Many times faster than row by row."""
    column = np.full(size, fill, dtype)
    column[: len(values)] = values
    return column


# How many likeliest tokens are reported: three programs at most, and five is what people ask for.
LOGPROBS_WIDTHS = (0, 5, MAX_LOGPROBS)


def _logprobs_width(asked: Sequence[int | None]) -> int | None:
    """Of `LOGPROBS_WIDTHS` what does for the widest request; None if nobody asks."""
    widest = max((n for n in asked if n is not None), default=None)
    return None if widest is None else next(size for size in LOGPROBS_WIDTHS if widest <= size)


class Sampler:
    """Chooses tokens for a batch; counts its programs.

    What is done to logits, the choice, and what is reported of it are programs of their own: as many as there
    are kinds of each, and not as many as there are mixes.
    """

    def __init__(self) -> None:
        self._adjust = {stage: ProgramAhead(stage) for stage in adjustments.STAGES}
        self._choose = ProgramAhead(choose, static=["filters"])
        self._report = ProgramAhead(report, static=["n_top"])
        self._top = ProgramAhead(likeliest, static=["n"])

    @property
    def n_programs(self) -> int:
        every = *self._adjust.values(), self._choose, self._report, self._top
        return sum(each.n_programs for each in every)

    def __call__(self, logits: jax.Array, batch: SamplingBatch) -> Sampled:
        """``logits`` [B, V] float32 → ``Sampled`` on the same device. Errors of shape are jax's."""
        adjusted = logits
        for stage, arrays in adjustments.stages(batch.adjustments):
            adjusted = self._adjust[stage](adjusted, *arrays)
        tokens, column = self._choose(adjusted, batch.knobs, filters=batch.filters)
        sampled = Sampled(tokens) if batch.n_top is None else self.report(logits, tokens, batch.n_top)
        return sampled._replace(column=column)

    def report(self, logits: jax.Array, tokens: Any, n_top: int) -> Sampled:
        """Of ``tokens`` [B] int32, drawn or given, what ``logits`` float32 of B rows, [B, V] or [1, B, V],
        say; of ``n_top`` likeliest tokens a row, or a few more."""
        return self._report(logits, tokens, n_top=_logprobs_width([n_top]))

    def likeliest(self, logits: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """``logits`` [B, V] float32 → the ``n`` or some more likeliest tokens of each row [B, n'] int32,
        likeliest first, and their log-probabilities [B, n'] float32."""
        return self._top(logits, n=min(logits.shape[1], power_of_4(n)))


def choose(logits: jax.Array, knobs: Knobs | None, *, filters: bool) -> tuple[jax.Array, jax.Array]:
    """One token a row of ``logits`` [B, V] float32, which may be adjusted: int32, as [B] and as [B, 1], the
    likeliest without ``knobs``; ``filters`` as of ``SamplingBatch``."""
    tokens = _argmax(logits)
    if knobs is not None:
        drawn = _drawn(logits, knobs, filters=filters)
        tokens = jnp.where(knobs.temperature > 0, drawn, tokens)
    return tokens, tokens[:, None]


def _argmax(logits: jax.Array) -> jax.Array:
    """The first of the largest of each row of ``logits`` [B, V]: int32 [B]."""
    n_rows, n = logits.shape
    if n % _LANES or jax.default_backend() != "cpu":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # XLA's own goes element by element on a CPU; along lanes side by side it takes vectors.
    lanes = logits.reshape(n_rows, n // _LANES, _LANES)
    top = jax.lax.optimization_barrier(lanes.max(1)).max(-1)
    at = jnp.arange(n, dtype=jnp.int32).reshape(n // _LANES, _LANES)
    # not `==`: where there are NaNs, one is the largest
    first = jnp.where(lanes < top[:, None, None], n, at).min(1)
    return jax.lax.optimization_barrier(first).min(-1)


def _drawn(logits: jax.Array, knobs: Knobs, *, filters: bool) -> jax.Array:
    """One token a row, drawn: int32 [B]. Block by block, as it takes a multiple of the logits' memory; the
    last block may have rows of the one before, whose tokens are the same again."""
    n_rows, n_tokens = logits.shape
    n = min(n_rows, max(1, _MOST_DRAWN // n_tokens))
    if n == n_rows:
        return _drawn_at_once(logits, knobs, filters=filters)

    def block(i: jax.Array, tokens: jax.Array) -> jax.Array:
        at = jnp.minimum(i * n, n_rows - n)
        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, n), (logits, knobs))
        found = _drawn_at_once(*part, filters=filters)
        return jax.lax.dynamic_update_slice_in_dim(tokens, found, at, 0)

    return jax.lax.fori_loop(0, -(-n_rows // n), block, jnp.zeros(n_rows, jnp.int32))


def _drawn_at_once(logits: jax.Array, knobs: Knobs, *, filters: bool) -> jax.Array:
    scaled = logits / jnp.where(knobs.temperature > 0, knobs.temperature, 1.0)[:, None]
    if filters:
        scaled = filter_logits(scaled, knobs.top_k, knobs.top_p, knobs.min_p)
    return _by_weight(_weights_of(scaled), jax.vmap(_two_shares)(knobs.seeds, knobs.positions))


def _weights_of(logits: jax.Array) -> jax.Array:
    """Of ``logits`` [B, V] float32 what is in proportion to their tokens' probabilities; of the likeliest 1,
    infinite or not."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits == top, 1.0, jnp.exp(logits - top))


def _two_shares(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Two numbers of 0 … 1, float32 [2]: the seed's and the position's alone."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), seed[1]), position)
    return jax.random.uniform(key, (2,), jnp.float32)


def _by_weight(weights: jax.Array, shares: jax.Array) -> jax.Array:
    """One token a row, as often as its part of ``weights`` [B, V] float32, at least 0: int32 [B], by
    ``shares`` [B, 2]. First one of some lanes that tokens lie in by turns, then one of its tokens: two short
    running sums in place of a long one, and two numbers of 24 bits. (A random number for every token, as the
    Gumbel maximum takes, is twenty times the work on a CPU.)"""
    n_rows, n = weights.shape
    lanes = jnp.pad(weights, ((0, 0), (0, -n % _LANES))).reshape(n_rows, -1, _LANES)
    lane = _passed(jax.lax.optimization_barrier(lanes.sum(1)), shares[:, 0])
    of_lane = jnp.take_along_axis(lanes, lane[:, None, None], axis=2)[:, :, 0]
    return _passed(of_lane, shares[:, 1]) * _LANES + lane


def _passed(parts: jax.Array, share: jax.Array) -> jax.Array:
    """Of each row of ``parts`` [B, n] float32 the first above 0 with which their running sum is past
    ``share`` [B] of all: int32 [B]. The last one above 0 where rounding leaves none."""
    so_far, at = jnp.cumsum(parts, axis=-1), jnp.arange(parts.shape[1], dtype=jnp.int32)
    is_past = (so_far > share[:, None] * so_far[:, -1:]) & (parts > 0)
    first = jnp.where(is_past, at, parts.shape[1]).min(-1)
    return jnp.minimum(first, jnp.where(parts > 0, at, 0).max(-1))


def report(logits: jax.Array, tokens: jax.Array, *, n_top: int) -> Sampled:
    """Log-probabilities and ranks of ``tokens`` [B] int32, and the ``n_top`` likeliest: the model's own, so
    ``logits`` [B, V] or [1, B, V] float32 are those before anything is done to them."""
    logits = logits.reshape(-1, logits.shape[-1])
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top_logits, top_tokens = jax.lax.top_k(logits, n_top)
    return Sampled(
        tokens,
        (chosen - total)[:, 0],
        1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32),
        top_tokens.astype(jnp.int32),
        top_logits - total,
    )


def likeliest(logits: jax.Array, *, n: int) -> tuple[jax.Array, jax.Array]:
    """The ``n`` likeliest tokens a row of ``logits`` [B, V] float32, and their log-probabilities."""
    logprobs, tokens = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), n)
    return tokens.astype(jnp.int32), logprobs


def filter_logits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """``logits`` [B, V] with -inf for every token left out: by min_p, then top_k, then top_p (as vLLM).

    A row that filters nothing (top_k ≥ V, top_p 1, min_p 0) comes back as it is, bit for bit.
    """
    weights = _weights_of(logits)
    weights = jnp.where(weights >= min_p[:, None], weights, 0.0)
    k = top_k[:, None]
    kth = _largest_threshold(
        k < logits.shape[1], lambda t: jnp.sum(weights >= t, axis=-1, keepdims=True) >= k, weights
    )
    weights = jnp.where(weights >= kth, weights, 0.0)
    mass = jnp.sum(weights, axis=-1, keepdims=True) * top_p[:, None]
    nucleus = _largest_threshold(
        top_p[:, None] < 1,
        lambda t: jnp.sum(jnp.where(weights >= t, weights, 0.0), axis=-1, keepdims=True) >= mass,
        weights,
    )
    # Weights may underflow to 0 without being left out.
    keeps_unlikeliest = (min_p[:, None] <= 0) & (kth <= 0)
    keep = (weights >= nucleus) & ((weights > 0) | keeps_unlikeliest)
    return jnp.where(keep, logits, -jnp.inf)


def _largest_threshold(
    asked: jax.Array, holds: Callable[[jax.Array], jax.Array], weights: jax.Array
) -> jax.Array:
    """The largest float32 t in [0, 1] a row for which ``holds(t)`` [B, 1], true at 0 and then falling; 0 for
    rows that are not ``asked`` [B, 1] for.

    Non-negative floats are ordered as their bits are as integers, so 30 halvings of the bits' range
    find the float exactly, at one pass over the vocabulary each.
    """
    none = jnp.zeros((weights.shape[0], 1), jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds at low, not at high
        middle = low + (high - low) // 2
        yes = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

    def find() -> jax.Array:
        after_1 = jnp.full_like(none, 0x3F800001)
        return jax.lax.fori_loop(0, 30, halve, (none, after_1))[0]

    # A GPU's host would wait for the device to say which.
    found = jax.lax.cond(jnp.any(asked), find, lambda: none) if jax.default_backend() == "cpu" else find()
    return jnp.where(asked, jax.lax.bitcast_convert_type(found, jnp.float32), 0.0)
