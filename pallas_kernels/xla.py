"""Partial attention in plain XLA: the backend for CPUs, and for what no kernel of the platform's own serves.

Gathers a block of every request's tokens, takes two products over it, and goes on to the next block until the
longest request ends: what a program does depends on how many tokens there are, not on how many there is room
for. Knows arrays only; who picks this backend is `dispatch`.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32, Shaped

from pallas_kernels.precision import exact
from pallas_kernels.quantized import (
    ChannelQuantizedPool,
    Like,
    Pool,
    PoolLike,
    QuantizedPool,
    is_quantized,
    values_of,
)

# Up to this many KV heads, one product with a block-diagonal q (all heads of a token at once, the others'
# zeros included) beats K small products over strided heads; measured on a 2-core CPU at K = 3. With more
# heads the products with zeros cost more than the strides.
_BLOCK_DIAGONAL_HEADS = 4

Partial: TypeAlias = tuple[Float32[Array, "*n H"], Float32[Array, "*n"]]  # (out, lse)

# A block's gathered keys stay in a core's cache between gather and product.
_BLOCK_BYTES = 2 << 20
_BLOCK_TOKENS = 16, 256  # of a request in a block, at least and at most


def supports(q: Float[Like, "B Tq N H"], k_pool: PoolLike, *, return_mass: bool = False) -> str | None:
    """None: every case is supported."""
    return None


def capped(scores: Float32[Array, "*n"], softcap: float | None) -> Float32[Array, "*n"]:
    """softcap * tanh(scores / softcap), or the scores as they are."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def scores_of(
    q: Float[Array, "B T N H"], k: Float[Array, "B C K H"], scale: float, softcap: float | None
) -> Float32[Array, "B K G T C"]:
    """Scores of each query with each key."""
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


def weigh(weights: Float32[Array, "B K G T C"], v: Float[Array, "B C K H"]) -> Float32[Array, "B T N H"]:
    """The sum of v by weights, normalised or not."""
    b, kv, g, t, _ = weights.shape
    out = jnp.einsum(
        "BKGTC,BCKH->BTKGH",
        weights.astype(v.dtype),
        v,
        precision=exact(v.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(b, t, kv * g, v.shape[-1])


def softmax_parts(
    scores: Float32[Array, "*n"], axis: int
) -> tuple[Float32[Array, "*n"], Float32[Array, " ..."], Float32[Array, " ..."]]:
    """Unnormalised weights, their sum and the maximum they were taken from, along one axis."""
    # Neither the output nor the lse depends on which maximum was taken, so its derivative is left out.
    top = jax.lax.stop_gradient(jnp.max(scores, axis=axis, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(scores - top)
    return weights, jnp.sum(weights, axis=axis, keepdims=True), top


def normalised(
    out: Float32[Array, "*n H"], total: Float32[Array, "*n"], top: Float32[Array, "*n"]
) -> tuple[Float32[Array, "*n H"], Float32[Array, "*n"]]:
    """(out, lse) from the weighed values and their weights' sum; 0 and -inf over nothing."""
    nothing = total == 0
    out = jnp.where(nothing[..., None], 0.0, out / jnp.where(nothing, 1.0, total)[..., None])
    return out, jnp.log(total) + top


def _precision(q: Array, k: Array) -> jax.lax.Precision | None:
    return exact(jnp.promote_types(q.dtype, k.dtype))


def _gather(pool: Shaped[Array, " S *row"], slot_table: Int32[Array, "B C"]) -> Shaped[Array, "B C *row"]:
    """The pool's rows at slots. Out-of-range slots read a real slot, never NaN.

    Gathered as rows of K * H: on a CPU one long copy a token is four times as fast as K short ones.
    """
    rows = pool.reshape(pool.shape[0], -1).at[slot_table].get(mode="clip", wrap_negative_indices=False)
    return rows.reshape(*slot_table.shape, *pool.shape[1:])


def _attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    seen: Bool[Array, "B T C"],
    scale: float,
    softcap: float | None,
    k_scales: Float32[Array, "B C K"] | None = None,
    v_scales: Float32[Array, "B C K"] | None = None,
) -> tuple[Float32[Array, "B T N H"], Float32[Array, "B T N"], Float32[Array, "B C"]]:
    """q over gathered k and v; scales multiply rows of those. (out, lse, mass): out 0, lse -inf and no mass
    where a query sees nothing.
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


def _block_tokens(batch: int, row_bytes: int) -> int:
    """How many tokens of each request a block has: a power of two, so that blocks are alike for every
    context."""
    least, most = _BLOCK_TOKENS
    fits = max(1, _BLOCK_BYTES // (batch * row_bytes))
    return max(least, min(most, 1 << (fits.bit_length() - 1)))


def visible(
    slots: int,
    lengths: Int32[Array, " B"] | None,
    q_positions: Int32[Array, "B Tq"],
    window: int | None,
    first: Int32[Array, ""] | int = 0,
) -> Bool[Array, "B Tq C"]:
    """Whether a query at its position sees the token at each of `slots` positions from `first` on."""
    at = first + jnp.arange(slots)
    seen = at <= q_positions[:, :, None]
    if lengths is not None:
        seen &= at < lengths[:, None, None]
    return seen if window is None else seen & (at > q_positions[:, :, None] - window)


def partial_attention(
    q: Float[Array, "B Tq N H"],
    k_pool: Pool,
    v_pool: Pool,
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    q_positions: Int32[Array, "B Tq"] | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    return_mass: bool = False,
    interpret: bool = False,
) -> tuple[Float32[Array, "B ..."], ...]:
    """As `pallas_kernels.partial_attention`. There is nothing to interpret: the flag is every backend's."""
    del interpret
    b, t, n, h = q.shape
    c = slot_table.shape[1]
    if q_positions is None:
        q_positions = lengths[:, None] + jnp.arange(t)
    if is_quantized(k_pool) or is_quantized(v_pool):
        q = q.astype(jnp.float32)
    group_of = n // values_of(k_pool).shape[1]
    if isinstance(k_pool, ChannelQuantizedPool):
        q = q * jnp.repeat(k_pool.scales, group_of, axis=0)
    itemsize = 4 if is_quantized(k_pool) else values_of(k_pool).dtype.itemsize
    # The mass of an entry is known once all have been seen.
    block = c if return_mass else min(c, _block_tokens(b, values_of(k_pool)[0].size * itemsize))

    def gathered(pool: Pool, table: Array) -> tuple[Array, Array | None]:
        rows = _gather(values_of(pool), table)
        scales = _gather(pool.scales, table).astype(jnp.float32) if isinstance(pool, QuantizedPool) else None
        return rows.astype(jnp.float32) if is_quantized(pool) else rows, scales

    def attend(first: Array | int, table: Array) -> tuple[Array, Array, Array]:
        """Over the block of tokens `table` `[B, block]`, which begins at position `first`."""
        # Entries past a row's end read the row's own first slot: another request's values (an overflowed
        # one's inf or NaN above all, which a weight of 0 does not silence) must not reach this row.
        table = jnp.where(first + jnp.arange(block) < lengths[:, None], table, slot_table[:, :1])
        seen = visible(block, lengths, q_positions, window, first)
        (k, k_scales), (v, v_scales) = gathered(k_pool, table), gathered(v_pool, table)
        return _attend(q, k, v, seen, scale, softcap, k_scales, v_scales)

    mass: tuple[Array, ...] = ()
    if block == c:
        out, lse, *rest = attend(0, slot_table)
        mass = tuple(rest) if return_mass else ()
    else:
        padded = jnp.pad(slot_table, ((0, 0), (0, -c % block)))

        def add(i: Array, found: Partial) -> Partial:
            first = i * block
            table = jax.lax.dynamic_slice_in_dim(padded, first, block, axis=1)
            return _merged(found, attend(first, table)[:2])

        begin = 0 if window is None else jnp.maximum(0, jnp.min(q_positions) - window + 1) // block
        nothing = jnp.zeros((b, t, n, h), jnp.float32), jnp.full((b, t, n), -jnp.inf, jnp.float32)
        out, lse = jax.lax.fori_loop(begin, -(-jnp.max(lengths) // block), add, nothing)
    if isinstance(v_pool, ChannelQuantizedPool):
        out = out * jnp.repeat(v_pool.scales, group_of, axis=0)
    return out, lse, *mass


def _merged(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of tokens, from each one's (out, lse)."""
    top = jnp.maximum(a[1], b[1])
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight_a, weight_b = jnp.exp(a[1] - top), jnp.exp(b[1] - top)
    total = weight_a + weight_b
    share = 1 / jnp.where(total == 0, 1.0, total)
    out = (weight_a * share)[..., None] * a[0] + (weight_b * share)[..., None] * b[0]
    return out, jnp.log(total) + top
