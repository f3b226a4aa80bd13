"""Attention in plain XLA over a pool of token-granular KV slots.

A slot holds one token's key or value for all K heads of one layer. Which request owns which slot is the
caller's affair: a request comes in as a row of slot numbers, entry c being its token at position c. These
functions know arrays only; they are pure and traceable, and the caller jits them (donating the pools where
they are written). `pallas_kernels.reference` says in float64 what each one means.

Softmax is computed in float32 whatever the storage dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.precision import exact

# Rows of queries scored at a time in `causal_attention`, so that a long prompt needs T * _Q_BLOCK scores a
# head at once and not T * T.
_Q_BLOCK = 512


def make_pool(n_slots: int, n_kv_heads: int, head_dim: int, dtype: jnp.dtype | type = jnp.float32) -> Array:
    """An empty pool `[S, K, H]` for the keys, or the values, of one layer."""
    return jnp.zeros((n_slots, n_kv_heads, head_dim), dtype)


def _check_heads(q: Array, k: Array, v: Array) -> None:
    if k.shape != v.shape:
        raise ValueError(f"{k.shape=} must equal {v.shape=}")
    if q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"{q.shape=} must have the head dim of {k.shape=} and a multiple of its heads"
            " (both are [..., heads, head dim])"
        )


def _scores(q: Array, k: Array, scale: float, softcap: float | None) -> Array:
    """q `[B, T, N, H]`, k `[B, C, K, H]` -> float32 scores `[B, K, G, T, C]`."""
    b, t, n, h = q.shape
    grouped = q.reshape(b, t, k.shape[2], n // k.shape[2], h)
    scores = (
        jnp.einsum(
            "BTKGH,BCKH->BKGTC", grouped, k, precision=exact(k.dtype), preferred_element_type=jnp.float32
        )
        * scale
    )
    return _capped(scores, softcap)


def _capped(scores: Array, softcap: float | None) -> Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _weigh(weights: Array, v: Array) -> Array:
    """Unnormalised weights `[B, K, G, T, C]` over v `[B, C, K, H]` -> float32 `[B, T, N, H]`."""
    b, kv, g, t, _ = weights.shape
    out = jnp.einsum(
        "BKGTC,BCKH->BTKGH",
        weights.astype(v.dtype),
        v,
        precision=exact(v.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(b, t, kv * g, v.shape[-1])


def causal_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Array:
    """Causal self-attention of whole prompts: query t sees keys max(0, t - window + 1) .. t.

    q `[B, T, N, H]`, k and v `[B, T, K, H]` -> `[B, T, N, H]` in q's dtype. Right-padded prompts need no
    mask: pads come after every real token and only pads see them. Raises ValueError where heads or head dims
    do not fit.
    """
    _check_heads(q, k, v)
    t = q.shape[1]

    def block(q_block: Array, first: Array | int) -> Array:
        scores = _scores(q_block, k, scale, softcap)
        # Pad queries of the last block stand at the last token: with a window they might see nothing, and NaN in
        # rows that are cut off would still be NaN in a gradient.
        q_at = jnp.minimum(first + jnp.arange(q_block.shape[1]), t - 1)[:, None]
        k_at = jnp.arange(t)[None, :]
        seen = k_at <= q_at
        if window is not None:
            seen &= k_at > q_at - window
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return _weigh(weights, v).astype(q.dtype)

    if t <= _Q_BLOCK:
        return block(q, 0)
    n_blocks = math.ceil(t / _Q_BLOCK)
    padded = jnp.pad(q, ((0, 0), (0, n_blocks * _Q_BLOCK - t), (0, 0), (0, 0)))
    blocks = jnp.moveaxis(padded.reshape(q.shape[0], n_blocks, _Q_BLOCK, *q.shape[2:]), 1, 0)
    out = jax.lax.map(lambda args: block(*args), (blocks, jnp.arange(n_blocks) * _Q_BLOCK))
    return jnp.moveaxis(out, 0, 1).reshape(padded.shape)[:, :t]


def append(k_pool: Array, v_pool: Array, k_new: Array, v_new: Array, slots: Array) -> tuple[Array, Array]:
    """Stores token m of k_new, v_new `[M, K, H]` at slots[m] of the pools `[S, K, H]`.

    slots `[M]` int32; a slot >= S is dropped (padding). In place when the caller's jit donates the pools.
    """

    def write(pool: Array, new: Array) -> Array:
        return pool.at[slots].set(new.astype(pool.dtype), mode="drop", wrap_negative_indices=False)

    return write(k_pool, k_new), write(v_pool, v_new)


def _gather(pool: Array, slot_table: Array) -> Array:
    """Pool `[S, K, H]` at slot_table `[B, C]` -> `[B, C, K, H]`. Out-of-range slots read a real slot, never NaN.

    Gathered as rows of K * H: on a CPU one long copy a token is four times as fast as K short ones.
    """
    rows = pool.reshape(pool.shape[0], -1).at[slot_table].get(mode="clip", wrap_negative_indices=False)
    return rows.reshape(*slot_table.shape, *pool.shape[1:])


# Up to this many KV heads, one product with a block-diagonal q (all heads of a token at once, the others' zeros
# included) beats K small products over strided heads; measured on a 2-core CPU at K = 3. With more heads the
# products with zeros cost more than the strides.
_BLOCK_DIAGONAL_HEADS = 4

# Rows of a batch are taken in groups whose gathered keys stay in a core's cache between gather and product.
_GROUP_BYTES = 2 << 20


def _attend_stored(
    q: Array, k: Array, v: Array, seen: Array, scale: float, softcap: float | None
) -> tuple[Array, Array]:
    """q `[B, T, N, H]` over gathered k, v `[B, C, K, H]` where seen `[B, T, C]`.

    Returns (out `[B, T, N, H]` float32, lse `[B, T, N]`); out 0 and lse -inf where a query sees nothing.
    """
    b, t, n, h = q.shape
    c, kv = k.shape[1:3]
    if kv <= _BLOCK_DIAGONAL_HEADS:
        eye = jnp.eye(kv, dtype=q.dtype)
        spread = jnp.einsum(
            "BTKGH,KJ->BTKGJH", q.reshape(b, t, kv, n // kv, h), eye, precision=exact(q.dtype)
        ).reshape(b, t * n, kv * h)
        scores = jnp.einsum(
            "BCX,BMX->BCM",
            k.reshape(b, c, kv * h),
            spread,
            precision=exact(k.dtype),
            preferred_element_type=jnp.float32,
        ).reshape(b, c, t, n)
        scores = _capped(scores * scale, softcap)
        scores = jnp.where(jnp.moveaxis(seen, 1, 2)[..., None], scores, -jnp.inf)  # [B, C, T, N]
        weights, mass, top = _softmax_parts(scores, axis=1)
        out = jnp.einsum(
            "BCM,BCX->BMX",
            weights.reshape(b, c, t * n).astype(v.dtype),
            v.reshape(b, c, kv * h),
            precision=exact(v.dtype),
            preferred_element_type=jnp.float32,
        )
        out = jnp.einsum("BTKGKH->BTKGH", out.reshape(b, t, kv, n // kv, kv, h)).reshape(b, t, n, h)
    else:
        scores = jnp.where(seen[:, None, None], _scores(q, k, scale, softcap), -jnp.inf)  # [B, K, G, T, C]
        weights, mass, top = _softmax_parts(scores, axis=-1)
        out = _weigh(weights, v)
        mass, top = (jnp.moveaxis(x.reshape(b, n, t), 1, 2) for x in (mass, top))
    mass, top = mass.reshape(b, t, n), top.reshape(b, t, n)
    nothing = mass == 0
    out = jnp.where(nothing[..., None], 0.0, out / jnp.where(nothing, 1.0, mass)[..., None])
    return out, jnp.log(mass) + top


def _softmax_parts(scores: Array, axis: int) -> tuple[Array, Array, Array]:
    """Unnormalised weights, their sum and the maximum they were taken from, along one axis."""
    top = jnp.max(scores, axis=axis, keepdims=True, initial=-jnp.inf)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(scores - top)
    return weights, jnp.sum(weights, axis=axis, keepdims=True), top


def _group_size(batch: int, row_bytes: int) -> int:
    """The largest divisor of the batch size whose rows fit the cache; at least one row."""
    fits = [d for d in range(1, batch + 1) if batch % d == 0 and d * row_bytes <= _GROUP_BYTES]
    return max(fits, default=1)


def partial_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    slot_table: Array,
    lengths: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_positions: Array | None = None,
) -> tuple[Array, Array]:
    """Attention of a few queries a request over that request's stored tokens only, to be combined by lse.

    q `[B, Tq, N, H]`; pools `[S, K, H]`; slot_table `[B, C]` int32, of which row b's first lengths[b] entries
    are read; lengths `[B]` int32. Queries are at q_positions `[B, Tq]`, or follow the stored tokens
    (lengths[b] + t) when that is None; a query sees stored positions max(0, p - window + 1) .. p.
    Returns (out `[B, Tq, N, H]` in q's dtype, lse `[B, Tq, N]` float32); a query that sees nothing: out 0,
    lse -inf.
    Source: Lamina 2025 section 4.2 (attention over previous and new tokens apart, merged by their softmax
    mass).
    """
    _check_heads(q, k_pool, v_pool)
    b, t = q.shape[:2]
    at = jnp.arange(slot_table.shape[1])
    # Entries past a row's end read the row's own first slot: another request's values (an overflowed one's
    # inf or NaN above all, which a weight of 0 does not silence) must not reach this row.
    table = jnp.where(at < lengths[:, None], slot_table, slot_table[:, :1])
    if q_positions is None:
        q_positions = lengths[:, None] + jnp.arange(t)
    seen = (at < lengths[:, None, None]) & (at <= q_positions[:, :, None])
    if window is not None:
        seen &= at > q_positions[:, :, None] - window

    def attend(args: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        q, table, seen = args
        return _attend_stored(q, _gather(k_pool, table), _gather(v_pool, table), seen, scale, softcap)

    group = _group_size(b, slot_table.shape[1] * k_pool.shape[1] * k_pool.shape[2] * k_pool.dtype.itemsize)
    args = (q, table, seen)
    if group == b:
        out, lse = attend(args)
    else:
        grouped = [x.reshape(b // group, group, *x.shape[1:]) for x in args]
        out, lse = (x.reshape(b, *x.shape[2:]) for x in jax.lax.map(attend, tuple(grouped)))
    return out.astype(q.dtype), lse


def combine(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Attention over the union of disjoint token sets from each set's partial (out `[..., H]`, lse `[...]`).

    Returns the same pair for the union, so partials combine in any order and number. An empty partial has lse
    -inf and weighs nothing; where all are empty, out is 0 and lse -inf. Raises ValueError for no partials at
    all.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"{len(outs)=} must be at least 1 and equal {len(lses)=}")
    stacked = jnp.stack([lse.astype(jnp.float32) for lse in lses])
    top = jnp.max(stacked, axis=0)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(stacked - top)
    mass = jnp.sum(weights, axis=0)
    shares = weights / jnp.where(mass == 0, 1.0, mass)
    out = sum(share[..., None] * part.astype(jnp.float32) for share, part in zip(shares, outs, strict=True))
    return jnp.asarray(out).astype(outs[0].dtype), jnp.log(mass) + top


def decode_attention(
    q: Array,
    k_new: Array,
    v_new: Array,
    k_pool: Array,
    v_pool: Array,
    slot_table: Array,
    lengths: Array,
    new_slots: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array, Array]:
    """One decode step of one layer: stores each request's new token and attends over its earlier tokens and
    it.

    q `[B, 1, N, H]`; k_new, v_new `[B, 1, K, H]`; pools `[S, K, H]`; slot_table `[B, C]` int32 with lengths
    `[B]` int32 earlier tokens (the new one not counted, nor looked for in the table); new_slots `[B]` int32,
    >= S for a padding row, which is not stored. Returns (k_pool, v_pool, out `[B, 1, N, H]` in q's dtype).
    Jit it with both pools donated and the append is in place.
    """
    _check_heads(q, k_new, v_new)
    # The gather reads the pools *after* the append: reading them before would keep two versions alive and
    # cost a copy.
    k_pool, v_pool = append(k_pool, v_pool, k_new[:, 0], v_new[:, 0], new_slots)
    earlier = partial_attention(
        q, k_pool, v_pool, slot_table, lengths, scale=scale, window=window, softcap=softcap
    )
    scores = _scores(q, k_new, scale, softcap)  # [B, K, G, 1, 1]
    own_lse = scores.reshape(q.shape[0], 1, q.shape[2])
    own_out = _weigh(jnp.ones_like(scores), v_new)
    out, _ = combine([earlier[0].astype(jnp.float32), own_out], [earlier[1], own_lse])
    return k_pool, v_pool, out.astype(q.dtype)
