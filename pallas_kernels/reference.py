"""What the attention functions mean, in float64 numpy, one query at a time.

Written to be checked by eye, not to be fast: every function loops over requests and queries, picks the tokens
a query sees as a plain list, and does a plain softmax over it. The fast versions in
`pallas_kernels.attention` are tested against these. Knows nothing of JAX, of batching tricks or of padding
beyond the rules stated here.

Rules shared by all: query head n reads KV head n // G with G = N / K. A query at position p sees keys at
positions max(0, p - window + 1) .. p. Scores are q.k * scale, then softcap * tanh(score / softcap) if a cap
is given.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]


def _f64(x: ArrayLike) -> F64:
    return np.asarray(x).astype(np.float64)


def attend_one(q: F64, keys: F64, values: F64, *, scale: float, softcap: float | None) -> tuple[F64, F64]:
    """One query `[N, H]` over exactly the tokens given, keys and values `[C, K, H]`.

    Returns (out `[N, H]`, lse `[N]`); over no tokens at all, out is 0 and lse is -inf.
    """
    n_heads, head_dim = q.shape
    group = n_heads // keys.shape[1]
    out = np.zeros((n_heads, head_dim))
    lse = np.full((n_heads,), -np.inf)
    if keys.shape[0] == 0:
        return out, lse
    for n in range(n_heads):
        scores = keys[:, n // group] @ q[n] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        top = scores.max()
        weights = np.exp(scores - top)
        out[n] = weights @ values[:, n // group] / weights.sum()
        lse[n] = top + np.log(weights.sum())
    return out, lse


def causal_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> F64:
    """q `[B, T, N, H]`, k and v `[B, T, K, H]` -> `[B, T, N, H]`: each query over itself and what precedes
    it."""
    q, k, v = _f64(q), _f64(k), _f64(v)
    out = np.zeros_like(q)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            first = 0 if window is None else max(0, t - window + 1)
            out[b, t], _ = attend_one(
                q[b, t], k[b, first : t + 1], v[b, first : t + 1], scale=scale, softcap=softcap
            )
    return out


def append(
    k_pool: ArrayLike, v_pool: ArrayLike, k_new: ArrayLike, v_new: ArrayLike, slots: ArrayLike
) -> tuple[F64, F64]:
    """Pools `[S, K, H]` with token m of k_new, v_new `[M, K, H]` at slots[m]; a slot outside 0..S-1 is
    dropped."""
    k_out, v_out = _f64(k_pool).copy(), _f64(v_pool).copy()
    k_rows, v_rows = _f64(k_new), _f64(v_new)
    for m, slot in enumerate(np.asarray(slots)):
        if 0 <= slot < k_out.shape[0]:
            k_out[slot], v_out[slot] = k_rows[m], v_rows[m]
    return k_out, v_out


def partial_attention(
    q: ArrayLike,
    k_pool: ArrayLike,
    v_pool: ArrayLike,
    slot_table: ArrayLike,
    lengths: ArrayLike,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_positions: ArrayLike | None = None,
) -> tuple[F64, F64]:
    """Attention of q `[B, Tq, N, H]` over the first lengths[b] slots of each row of slot_table `[B, C]`.

    Entry c of a row is the token at position c. Queries are at q_positions `[B, Tq]`, or follow the stored
    tokens (lengths[b] + t) when that is None. Returns (out `[B, Tq, N, H]`, lse `[B, Tq, N]`).
    """
    q, k_pool, v_pool = _f64(q), _f64(k_pool), _f64(v_pool)
    table, length_of = np.asarray(slot_table), np.asarray(lengths)
    out = np.zeros_like(q)
    lse = np.full(q.shape[:3], -np.inf)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            at = int(length_of[b]) + t if q_positions is None else int(np.asarray(q_positions)[b, t])
            first = 0 if window is None else max(0, at - window + 1)
            seen = [int(table[b, c]) for c in range(first, min(int(length_of[b]), at + 1))]
            out[b, t], lse[b, t] = attend_one(
                q[b, t], k_pool[seen], v_pool[seen], scale=scale, softcap=softcap
            )
    return out, lse


def combine(outs: list[ArrayLike], lses: list[ArrayLike]) -> tuple[F64, F64]:
    """Attention over the union of disjoint token sets, from each set's (out `[..., H]`, lse `[...]`)."""
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
    q: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    k_pool: ArrayLike,
    v_pool: ArrayLike,
    slot_table: ArrayLike,
    lengths: ArrayLike,
    new_slots: ArrayLike,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[F64, F64, F64]:
    """One new token a request: attends over the lengths[b] earlier tokens and itself, and is stored at
    new_slots[b].

    Returns (k_pool, v_pool, out `[B, 1, N, H]`).
    """
    q, k_one, v_one = _f64(q), _f64(k_new), _f64(v_new)
    k_old, v_old = _f64(k_pool), _f64(v_pool)
    out = np.zeros_like(q)
    for b in range(q.shape[0]):
        length = int(np.asarray(lengths)[b])
        first = 0 if window is None else max(0, length - window + 1)
        seen = np.asarray(slot_table)[b, first:length]
        keys = np.concatenate([k_old[seen], k_one[b]])
        values = np.concatenate([v_old[seen], v_one[b]])
        out[b, 0], _ = attend_one(q[b, 0], keys, values, scale=scale, softcap=softcap)
    k_out, v_out = append(k_old, v_old, k_one[:, 0], v_one[:, 0], new_slots)
    return k_out, v_out, out
