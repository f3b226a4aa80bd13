"""What the attention functions mean, in float64 numpy, one query at a time.

Written to be checked by eye, not to be fast: every function loops over requests and queries, picks the tokens
a query sees as a plain list, and does a plain softmax over it. The fast versions in
`pallas_kernels` are tested against these. Knows nothing of JAX's functions, of batching tricks or of padding
beyond the rules stated here. An int8 pool means the numbers that it reads back as.

Rules shared by all: query head n reads KV head n // G with G = N / K. A query at position p sees keys at
positions max(0, p - window + 1) .. p. Scores are q.k * scale, then softcap * tanh(score / softcap) if a cap
is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import Array
from jaxtyping import Float, Float64, Integer
from numpy.typing import ArrayLike, NDArray

from pallas_kernels.quantized import ChannelQuantizedPool, Pool, QuantizedPool

F64 = NDArray[np.float64]
Arrays = Array | np.ndarray


def _f64(x: ArrayLike) -> F64:
    return np.asarray(x).astype(np.float64)


def dequantise(pool: ArrayLike | Pool) -> Float64[np.ndarray, "S K H"]:
    """A pool's elements, whichever form it is kept in."""
    if isinstance(pool, QuantizedPool):
        with np.errstate(invalid="ignore"):  # a row that overflowed has an infinite scale
            return _f64(pool.values) * _f64(pool.scales)[..., None]
    if isinstance(pool, ChannelQuantizedPool):
        return _f64(pool.values) * _f64(pool.scales) + _zeros(pool)
    return _f64(pool)


def _zeros(pool: ChannelQuantizedPool) -> F64:
    return _f64(0 if pool.zeros is None else pool.zeros)


def quantise(
    rows: Float[Arrays, "M K H"],
) -> tuple[Float64[np.ndarray, "M K H"], Float64[np.ndarray, "M K"]]:
    """Rows as int8 values and their scales: the least bfloat16 >= absmax / 127; 0 for a 0 row."""
    rows = _f64(rows)
    exact = np.abs(rows).max(-1) / 127
    # A bfloat16 has 8 bits of fraction, the leading one included: scales of [2**e, 2**(e + 1)) are 2**(e - 7)
    # apart.
    step = 2.0 ** (np.floor(np.log2(np.where(exact > 0, exact, 1.0))) - 7)
    scales = np.ceil(exact / step) * step
    return np.rint(rows / np.where(scales == 0, 1.0, scales)[..., None]), scales


def quantise_channels(
    rows: Float[Arrays, "M K H"], scales: Float[Arrays, "K H"]
) -> Float64[np.ndarray, "M K H"]:
    """Rows as int8 values by fixed scales, saturating at +-127."""
    return np.clip(np.rint(_f64(rows) / _f64(scales)), -127, 127)


def attend_one(
    q: Float64[np.ndarray, "N H"],
    keys: Float64[np.ndarray, "C K H"],
    values: Float64[np.ndarray, "C K H"],
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Float64[np.ndarray, "N H"], Float64[np.ndarray, " N"]]:
    """One query over exactly the tokens given: (out, lse).

    Over no tokens at all, out is 0 and lse is -inf.
    """
    n_heads, head_dim = q.shape
    group = n_heads // keys.shape[1]
    out = np.zeros((n_heads, head_dim))
    probabilities, lse = probabilities_one(q, keys, scale=scale, softcap=softcap)
    for n in range(n_heads):
        out[n] = probabilities[n] @ values[:, n // group]
    return out, lse


def probabilities_one(
    q: Float64[np.ndarray, "N H"], keys: Float64[np.ndarray, "C K H"], *, scale: float, softcap: float | None
) -> tuple[Float64[np.ndarray, "N C"], Float64[np.ndarray, " N"]]:
    """One query over keys: (each key's softmax probability, lse)."""
    n_heads = q.shape[0]
    group = n_heads // keys.shape[1]
    probabilities = np.zeros((n_heads, keys.shape[0]))
    lse = np.full((n_heads,), -np.inf)
    if keys.shape[0] == 0:
        return probabilities, lse
    for n in range(n_heads):
        scores = keys[:, n // group] @ q[n] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        top = scores.max()
        weights = np.exp(scores - top)
        probabilities[n] = weights / weights.sum()
        lse[n] = top + np.log(weights.sum())
    return probabilities, lse


def causal_partial(
    q: Float[Arrays, "B T N H"],
    k: Float[Arrays, "B T K H"],
    v: Float[Arrays, "B T K H"],
    lengths: ArrayLike | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Float64[np.ndarray, "B T N H"], Float64[np.ndarray, "B T N"]]:
    """(out, lse): each query attends over itself and what precedes it in the chunk, of row b's first
    lengths[b] tokens. Rows of queries past them mean nothing.
    """
    q, k, v = _f64(q), _f64(k), _f64(v)
    out, lse = np.zeros_like(q), np.full(q.shape[:3], -np.inf)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            first = 0 if window is None else max(0, t - window + 1)
            end = t + 1 if lengths is None else min(t + 1, int(np.asarray(lengths)[b]))
            out[b, t], lse[b, t] = attend_one(
                q[b, t], k[b, first:end], v[b, first:end], scale=scale, softcap=softcap
            )
    return out, lse


def causal_attention(
    q: Float[Arrays, "B T N H"],
    k: Float[Arrays, "B T K H"],
    v: Float[Arrays, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float64[np.ndarray, "B T N H"]:
    """Each query over itself and what precedes it."""
    return causal_partial(q, k, v, scale=scale, window=window, softcap=softcap)[0]


def append(
    k_pool: ArrayLike | Pool,
    v_pool: ArrayLike | Pool,
    k_new: Float[Arrays, "M K H"],
    v_new: Float[Arrays, "M K H"],
    slots: ArrayLike,
) -> tuple[Float64[np.ndarray, "S K H"], Float64[np.ndarray, "S K H"]]:
    """The elements of the pools with token m of k_new, v_new at slots[m].

    A slot outside 0..S-1 is dropped. What an int8 pool stores is what can be read back from it.
    """

    def stored(pool: ArrayLike | Pool, new: ArrayLike) -> F64:
        out, rows = dequantise(pool).copy(), _f64(new)
        if isinstance(pool, QuantizedPool):
            steps, scales = quantise(rows)
            rows = steps * scales[..., None]
        elif isinstance(pool, ChannelQuantizedPool):
            rows = quantise_channels(rows - _zeros(pool), pool.scales) * _f64(pool.scales) + _zeros(pool)
        for m, slot in enumerate(np.asarray(slots)):
            if 0 <= slot < out.shape[0]:
                out[slot] = rows[m]
        return out

    return stored(k_pool, k_new), stored(v_pool, v_new)


def _seen(at: int, length: int, window: int | None) -> range:
    """The stored positions that a query at position `at` sees, of `length` stored ones."""
    return range(0 if window is None else max(0, at - window + 1), min(length, at + 1))


def _positions(q: F64, lengths: ArrayLike, q_positions: ArrayLike | None) -> Integer[np.ndarray, "B Tq"]:
    if q_positions is None:
        return np.asarray(lengths)[:, None] + np.arange(q.shape[1])
    return np.asarray(q_positions)


def partial_attention(
    q: Float[Arrays, "B Tq N H"],
    k_pool: ArrayLike | Pool,
    v_pool: ArrayLike | Pool,
    slot_table: ArrayLike,
    lengths: ArrayLike,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_positions: ArrayLike | None = None,
) -> tuple[Float64[np.ndarray, "B Tq N H"], Float64[np.ndarray, "B Tq N"]]:
    """Attention of q over the first lengths[b] slots of each row of slot_table `[B, C]`: (out, lse).

    Entry c of a row is the token at position c. Queries are at q_positions `[B, Tq]`, or follow the stored
    tokens (lengths[b] + t) when that is None.
    """
    q, k, v = _f64(q), dequantise(k_pool), dequantise(v_pool)
    table, at = np.asarray(slot_table), _positions(q, lengths, q_positions)
    out, lse = np.zeros_like(q), np.full(q.shape[:3], -np.inf)
    for b, length in enumerate(np.asarray(lengths)):
        for t in range(q.shape[1]):
            seen = [int(table[b, c]) for c in _seen(int(at[b, t]), int(length), window)]
            out[b, t], lse[b, t] = attend_one(q[b, t], k[seen], v[seen], scale=scale, softcap=softcap)
    return out, lse


def attention_mass(
    q: Float[Arrays, "B Tq N H"],
    k_pool: ArrayLike | Pool,
    slot_table: ArrayLike,
    lengths: ArrayLike,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_positions: ArrayLike | None = None,
) -> Float64[np.ndarray, "B C"]:
    """The probability that `partial_attention` gives each entry of slot_table `[B, C]`, summed over heads
    and queries; 0 past lengths."""
    q, k = _f64(q), dequantise(k_pool)
    table, at = np.asarray(slot_table), _positions(q, lengths, q_positions)
    mass = np.zeros(table.shape)
    for b, length in enumerate(np.asarray(lengths)):
        for t in range(q.shape[1]):
            seen = list(_seen(int(at[b, t]), int(length), window))
            probabilities, _ = probabilities_one(q[b, t], k[table[b, seen]], scale=scale, softcap=softcap)
            mass[b, seen] += probabilities.sum(0)
    return mass


def combine(
    outs: Sequence[Float[Arrays, "*n H"]], lses: Sequence[Float[Arrays, "*n"]]
) -> tuple[Float64[np.ndarray, "*n H"], Float64[np.ndarray, "*n"]]:
    """Attention over the union of disjoint token sets, from each set's (out, lse)."""
    out = np.zeros_like(_f64(outs[0]))
    lse = np.full(out.shape[:-1], -np.inf)
    for index in np.ndindex(lse.shape):
        parts = [(_f64(o)[index], float(_f64(m)[index])) for o, m in zip(outs, lses, strict=True)]
        parts = [(o, m) for o, m in parts if m != -np.inf]
        if parts:
            top = max(m for _, m in parts)
            mass = sum(np.exp(m - top) for _, m in parts)
            out[index] = sum(o * np.exp(m - top) for o, m in parts) / mass
            lse[index] = top + np.log(mass)
    return out, lse


def decode_attention(
    q: Float[Arrays, "B 1 N H"],
    k_new: Float[Arrays, "B 1 K H"],
    v_new: Float[Arrays, "B 1 K H"],
    k_pool: ArrayLike | Pool,
    v_pool: ArrayLike | Pool,
    slot_table: ArrayLike,
    lengths: ArrayLike,
    new_slots: ArrayLike,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Float64[np.ndarray, "S K H"], Float64[np.ndarray, "S K H"], Float64[np.ndarray, "B 1 N H"]]:
    """One new token a request: attends over the lengths[b] earlier tokens and itself, and is stored at
    new_slots[b].

    Returns (each pool's elements, out); the new token is attended as it came.
    """
    q, k_one, v_one = _f64(q), _f64(k_new), _f64(v_new)
    k_old, v_old = dequantise(k_pool), dequantise(v_pool)
    out = np.zeros_like(q)
    for b in range(q.shape[0]):
        length = int(np.asarray(lengths)[b])
        first = 0 if window is None else max(0, length - window + 1)
        seen = np.asarray(slot_table)[b, first:length]
        keys = np.concatenate([k_old[seen], k_one[b]])
        values = np.concatenate([v_old[seen], v_one[b]])
        out[b, 0], _ = attend_one(q[b, 0], keys, values, scale=scale, softcap=softcap)
    k_out, v_out = append(k_pool, v_pool, k_one[:, 0], v_one[:, 0], new_slots)
    return k_out, v_out, out
