"""Partial attention in plain XLA: the backend for CPUs, and for what no kernel of the platform's own serves.

Gathers each request's rows and takes two products over them. Knows arrays only; who picks this backend is
`dispatch`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.precision import exact
from pallas_kernels.quantized import ChannelQuantizedPool, Pool, QuantizedPool, is_quantized, values_of

# Up to this many KV heads, one product with a block-diagonal q (all heads of a token at once, the others' zeros
# included) beats K small products over strided heads; measured on a 2-core CPU at K = 3. With more heads the
# products with zeros cost more than the strides.
_BLOCK_DIAGONAL_HEADS = 4

# Rows of a batch are taken in groups whose gathered keys stay in a core's cache between gather and product.
_GROUP_BYTES = 2 << 20


def supports(q: Any, k_pool: Pool, *, return_mass: bool = False) -> str | None:
    """None: every case is supported."""
    return None


def capped(scores: Array, softcap: float | None) -> Array:
    """softcap * tanh(scores / softcap), or the scores as they are."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def scores_of(q: Array, k: Array, scale: float, softcap: float | None) -> Array:
    """q `[B, T, N, H]`, k `[B, C, K, H]` -> float32 scores `[B, K, G, T, C]`."""
    return capped(_products(q, k) * scale, softcap)


def _products(q: Array, k: Array) -> Array:
    b, t, n, h = q.shape
    return jnp.einsum(
        "BTKGH,BCKH->BKGTC",
        q.reshape(b, t, k.shape[2], n // k.shape[2], h),
        k,
        precision=_precision(q, k),
        preferred_element_type=jnp.float32,
    )


def weigh(weights: Array, v: Array) -> Array:
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


def softmax_parts(scores: Array, axis: int) -> tuple[Array, Array, Array]:
    """Unnormalised weights, their sum and the maximum they were taken from, along one axis."""
    # Neither the output nor the lse depends on which maximum was taken, so its derivative is left out.
    top = jax.lax.stop_gradient(jnp.max(scores, axis=axis, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(scores - top)
    return weights, jnp.sum(weights, axis=axis, keepdims=True), top


def normalised(out: Array, total: Array, top: Array) -> tuple[Array, Array]:
    """(out `[..., H]`, lse `[...]`) from the weighed values and their weights' sum; 0 and -inf over nothing."""
    nothing = total == 0
    out = jnp.where(nothing[..., None], 0.0, out / jnp.where(nothing, 1.0, total)[..., None])
    return out, jnp.log(total) + top


def _precision(q: Array, k: Array) -> jax.lax.Precision | None:
    return exact(jnp.promote_types(q.dtype, k.dtype))


def _gather(pool: Array, slot_table: Array) -> Array:
    """`[S, ...]` at slot_table `[B, C]` -> `[B, C, ...]`. Out-of-range slots read a real slot, never NaN.

    Gathered as rows of K * H: on a CPU one long copy a token is four times as fast as K short ones.
    """
    rows = pool.reshape(pool.shape[0], -1).at[slot_table].get(mode="clip", wrap_negative_indices=False)
    return rows.reshape(*slot_table.shape, *pool.shape[1:])


def _attend(
    q: Array,
    k: Array,
    v: Array,
    seen: Array,
    scale: float,
    softcap: float | None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
) -> tuple[Array, Array, Array]:
    """q `[B, T, N, H]` over gathered k, v `[B, C, K, H]` where seen `[B, T, C]`; scales `[B, C, K]` multiply rows.

    Returns (out `[B, T, N, H]` float32, lse `[B, T, N]`, mass `[B, C]`); out 0, lse -inf and no mass where a
    query sees nothing.
    """
    if k.shape[2] <= _BLOCK_DIAGONAL_HEADS:
        return _attend_block_diagonal(q, k, v, seen, scale, softcap, k_scales, v_scales)
    b, t, n, _ = q.shape
    products = _products(q, k)
    if k_scales is not None:
        products *= jnp.moveaxis(k_scales, 1, 2)[:, :, None, None]
    scores = jnp.where(seen[:, None, None], capped(products * scale, softcap), -jnp.inf)  # [B, K, G, T, C]
    weights, total, top = softmax_parts(scores, axis=-1)
    mass = jnp.sum(weights / jnp.where(total == 0, 1.0, total), axis=(1, 2, 3))
    if v_scales is not None:
        weights *= jnp.moveaxis(v_scales, 1, 2)[:, :, None, None]
    out = weigh(weights, v)
    total, top = (jnp.moveaxis(x.reshape(b, n, t), 1, 2) for x in (total, top))
    return *normalised(out, total, top), mass


def _attend_block_diagonal(
    q: Array,
    k: Array,
    v: Array,
    seen: Array,
    scale: float,
    softcap: float | None,
    k_scales: Array | None,
    v_scales: Array | None,
) -> tuple[Array, Array, Array]:
    """As `_attend`, by one product over all heads of a token."""
    b, t, n, h = q.shape
    c, kv = k.shape[1:3]
    eye = jnp.eye(kv, dtype=q.dtype)
    spread = jnp.einsum(
        "BTKGH,KJ->BTKGJH", q.reshape(b, t, kv, n // kv, h), eye, precision=exact(q.dtype)
    ).reshape(b, t * n, kv * h)
    scores = jnp.einsum(
        "BCX,BMX->BCM",
        k.reshape(b, c, kv * h),
        spread,
        precision=_precision(q, k),
        preferred_element_type=jnp.float32,
    ).reshape(b, c, t, n)
    if k_scales is not None:
        scores *= jnp.repeat(k_scales, n // kv, axis=-1)[:, :, None]
    scores = capped(scores * scale, softcap)
    scores = jnp.where(jnp.moveaxis(seen, 1, 2)[..., None], scores, -jnp.inf)  # [B, C, T, N]
    weights, total, top = softmax_parts(scores, axis=1)
    mass = jnp.sum(weights / jnp.where(total == 0, 1.0, total), axis=(2, 3))
    if v_scales is not None:
        weights *= jnp.repeat(v_scales, n // kv, axis=-1)[:, :, None]
    out = jnp.einsum(
        "BCM,BCX->BMX",
        weights.reshape(b, c, t * n).astype(v.dtype),
        v.reshape(b, c, kv * h),
        precision=exact(v.dtype),
        preferred_element_type=jnp.float32,
    )
    out = jnp.einsum("BTKGKH->BTKGH", out.reshape(b, t, kv, n // kv, kv, h)).reshape(b, t, n, h)
    return *normalised(out, total.reshape(b, t, n), top.reshape(b, t, n)), mass


def _group_size(batch: int, row_bytes: int) -> int:
    """The largest divisor of the batch size whose rows fit the cache; at least one row."""
    fits = [d for d in range(1, batch + 1) if batch % d == 0 and d * row_bytes <= _GROUP_BYTES]
    return max(fits, default=1)


def visible(slots: int, lengths: Array | None, q_positions: Array, window: int | None) -> Array:
    """`[B, Tq, C]`: whether a query at its position sees the token at each of the first `slots` positions."""
    at = jnp.arange(slots)
    seen = at <= q_positions[:, :, None]
    if lengths is not None:
        seen &= at < lengths[:, None, None]
    return seen if window is None else seen & (at > q_positions[:, :, None] - window)


def partial_attention(
    q: Array,
    k_pool: Pool,
    v_pool: Pool,
    slot_table: Array,
    lengths: Array,
    q_positions: Array | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    return_mass: bool = False,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """As `pallas_kernels.partial_attention`. There is nothing to interpret: the flag is every backend's."""
    del interpret
    b, t = q.shape[:2]
    c = slot_table.shape[1]
    # Entries past a row's end read the row's own first slot: another request's values (an overflowed one's
    # inf or NaN above all, which a weight of 0 does not silence) must not reach this row.
    table = jnp.where(jnp.arange(c) < lengths[:, None], slot_table, slot_table[:, :1])
    if q_positions is None:
        q_positions = lengths[:, None] + jnp.arange(t)
    seen = visible(c, lengths, q_positions, window)
    if is_quantized(k_pool) or is_quantized(v_pool):
        q = q.astype(jnp.float32)
    group_of = q.shape[2] // values_of(k_pool).shape[1]
    if isinstance(k_pool, ChannelQuantizedPool):
        q = q * jnp.repeat(k_pool.scales, group_of, axis=0)

    def gathered(pool: Pool, table: Array) -> tuple[Array, Array | None]:
        rows = _gather(values_of(pool), table)
        scales = _gather(pool.scales, table).astype(jnp.float32) if isinstance(pool, QuantizedPool) else None
        return rows.astype(jnp.float32) if is_quantized(pool) else rows, scales

    def attend(args: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        q, table, seen = args
        (k, k_scales), (v, v_scales) = gathered(k_pool, table), gathered(v_pool, table)
        out, lse, mass = _attend(q, k, v, seen, scale, softcap, k_scales, v_scales)
        return (out, lse, mass) if return_mass else (out, lse)

    itemsize = 4 if is_quantized(k_pool) else values_of(k_pool).dtype.itemsize
    group = _group_size(b, c * values_of(k_pool)[0].size * itemsize)
    args = (q, table, seen)
    if group == b:
        results = attend(args)
    else:
        grouped = [x.reshape(b // group, group, *x.shape[1:]) for x in args]
        results = tuple(x.reshape(b, *x.shape[2:]) for x in jax.lax.map(attend, tuple(grouped)))
    out, lse, *mass = results
    if isinstance(v_pool, ChannelQuantizedPool):
        out = out * jnp.repeat(v_pool.scales, group_of, axis=0)
    return out, lse, *mass
