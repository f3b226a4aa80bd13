"""KV pools: float arrays, or int8 with scales, and how rows are turned into int8 and back.

Two int8 forms. `QuantizedPool` keeps a scale for each slot and KV head, taken from the row as it is stored.
`ChannelQuantizedPool` keeps one for each channel, calibrated beforehand and fixed, and perhaps a zero point
(ALISA, section V.B). Knows arrays only: nothing of attention, nor of who owns a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, overload

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import BFloat16, Float, Float32, Int8, Int32, Shaped

_STEPS = 127  # int8 values lie in -127 .. 127, symmetric about 0
_SMALLEST_SCALE = 2.0**-126  # devices take anything smaller for 0


class QuantizedPool(NamedTuple):
    """int8 keys or values, with a scale a slot and KV head: an element is values * scales."""

    values: Int8[Array, "S K H"]
    scales: BFloat16[Array, "S K"]


class ChannelQuantizedPool(NamedTuple):
    """int8 keys or values, with a fixed scale a channel: an element is values * scales, + zeros if there are
    any.

    No kernel knows zeros: softmax does not change when a constant is added to all keys, and one added to all
    values is added to the result, so `pallas_kernels.attention` sees to them outside.
    """

    values: Int8[Array, "S K H"]
    scales: Float32[Array, "K H"]
    zeros: Float32[Array, "K H"] | None = None  # what a channel's 0 stands for


Pool: TypeAlias = Float[Array, "S K H"] | QuantizedPool | ChannelQuantizedPool
Like: TypeAlias = Array | jax.ShapeDtypeStruct
PoolLike: TypeAlias = Pool | Shaped[jax.ShapeDtypeStruct, "S K H"]  # of its values alone


def make_pool(
    n_slots: int,
    n_kv_heads: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    channel_scales: Float[Array, "K H"] | None = None,
    channel_zeros: Float[Array, "K H"] | None = None,
    zeros_of: Callable[[tuple[int, ...], Any], Array] = jnp.zeros,
) -> Pool:
    """An empty pool `[S, K, H]` for the keys, or the values, of one layer, its arrays by ``zeros_of``.

    dtype int8 makes a `QuantizedPool`, or with channel_scales `[K, H]` (float32, > 0) a
    `ChannelQuantizedPool`, with channel_zeros `[K, H]` too if they are given. Raises ValueError for scales or
    zeros of another shape or beside another dtype.
    """
    shape = (n_slots, n_kv_heads, head_dim)
    if channel_scales is None:
        empty = zeros_of(shape, dtype)
        if jnp.dtype(dtype) != jnp.int8:
            return empty
        return QuantizedPool(empty, zeros_of(shape[:2], jnp.bfloat16))
    if jnp.dtype(dtype) != jnp.int8:
        raise ValueError(f"channel_scales belong to int8 pools: {dtype=} must be int8, or leave them out")
    scales = jnp.array(channel_scales, jnp.float32)
    zeros = None if channel_zeros is None else jnp.array(channel_zeros, jnp.float32)
    for name, x in (("channel_scales", scales), ("channel_zeros", zeros)):
        if x is not None and x.shape != shape[1:]:
            raise ValueError(f"{x.shape=} of {name} must be [KV heads, head dim] = {shape[1:]}")
    return ChannelQuantizedPool(zeros_of(shape, jnp.int8), scales, zeros)


@overload
def values_of(pool: Pool) -> Shaped[Array, "S K H"]: ...


@overload
def values_of(pool: PoolLike) -> Shaped[Like, "S K H"]: ...


def values_of(pool: PoolLike) -> Shaped[Like, "S K H"]:
    """The pool's big array, whatever the dtype it is stored in."""
    return pool.values if isinstance(pool, QuantizedPool | ChannelQuantizedPool) else pool


def is_quantized(pool: Pool) -> bool:
    """Whether the pool holds int8 and scales."""
    return isinstance(pool, QuantizedPool | ChannelQuantizedPool)


def zeros_of(pool: Pool) -> Float32[Array, "K H"] | None:
    """The zero points of a pool that has some."""
    return pool.zeros if isinstance(pool, ChannelQuantizedPool) else None


def with_zeros(pool: Pool, zeros: Float32[Array, "K H"] | None) -> Pool:
    """The same int8 values with these zero points, or none: with none they are what kernels take."""
    return pool._replace(zeros=zeros) if isinstance(pool, ChannelQuantizedPool) else pool


def scales_up(absmax: Float32[Array, "*n"]) -> BFloat16[Array, "*n"]:
    """Scales, float32 absmax / 127 rounded **up**: the largest value must not need a step 128.

    0 gives 0; inf and NaN stay what they are, so that an overflow reads back as one.
    """
    # Rows this small that are not 0 lose precision, not their sign or their finiteness.
    scale = jnp.where(absmax > 0, jnp.maximum(absmax / _STEPS, _SMALLEST_SCALE), absmax)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    up = jax.lax.bitcast_convert_type((bits + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(scale), up, scale).astype(jnp.bfloat16)


def quantise(rows: Float[Array, "*n K H"]) -> tuple[Int8[Array, "*n K H"], BFloat16[Array, "*n K"]]:
    """Rows as (values, scales).

    An element is off by at most half a scale, which is at most absmax / 127 * (1 + 2**-7).
    """
    rows = rows.astype(jnp.float32)
    scales = scales_up(jnp.max(jnp.abs(rows), axis=-1))
    by = scales.astype(jnp.float32)[..., None]
    return jnp.round(rows / jnp.where(by == 0, 1.0, by)).astype(jnp.int8), scales


def quantise_channels(
    rows: Float[Array, "*n K H"],
    scales: Float32[Array, "K H"],
    zeros: Float32[Array, "K H"] | None = None,
) -> Int8[Array, "*n K H"]:
    """Rows by fixed scales about zeros (None: 0); what lies outside +-127 scales of them saturates."""
    steps = jnp.round(_less(rows, zeros) / jnp.where(scales == 0, 1.0, scales))
    return jnp.clip(steps, -_STEPS, _STEPS).astype(jnp.int8)


def channel_scales_of(
    rows: Float[Array, "*n K H"], zeros: Float32[Array, "K H"] | None = None
) -> Float32[Array, "K H"]:
    """Scales from calibration rows: each channel's farthest from zeros takes the last step.

    A channel that is constant gets scale 1, as it has none of its own. With `channel_zeros_of` the rows as
    zeros it is eq. 7's (max - min) / (2**b - 1), but that -128 is not used. Source: ALISA section V.B
    (channel-wise INT8 of KV tensors).
    """
    absmax = jnp.max(jnp.abs(_less(rows, zeros)), axis=tuple(range(rows.ndim - 2)))
    return jnp.where(absmax > 0, absmax / _STEPS, 1.0)


def channel_zeros_of(rows: Float[Array, "*n K H"]) -> Float32[Array, "K H"]:
    """Zero points from calibration rows: the middle of each channel's range.

    In units of the rows, where eq. 7 rounds it to a whole step: it is kept apart, so nothing is gained by
    rounding. Source: ALISA section V.B, equation 7.
    """
    rows, over = rows.astype(jnp.float32), tuple(range(rows.ndim - 2))
    return (jnp.max(rows, axis=over) + jnp.min(rows, axis=over)) / 2


def _less(rows: Float[Array, "*n K H"], zeros: Float32[Array, "K H"] | None) -> Float32[Array, "*n K H"]:
    rows = rows.astype(jnp.float32)
    return rows if zeros is None else rows - zeros


def store(pool: Pool, rows: Float[Array, "M K H"], slots: Int32[Array, " M"]) -> Pool:
    """The pool with rows at slots, in the pool's own form; a slot outside 0 .. S-1 is dropped."""
    if isinstance(pool, QuantizedPool):
        values, scales = quantise(rows)
        return QuantizedPool(_written(pool.values, values, slots), _written(pool.scales, scales, slots))
    if isinstance(pool, ChannelQuantizedPool):
        values = quantise_channels(rows, pool.scales, pool.zeros)
        return pool._replace(values=_written(pool.values, values, slots))
    return _written(pool, rows, slots)


def _written(array: Array, new: Array, slots: Int32[Array, " M"]) -> Array:
    return array.at[slots].set(new.astype(array.dtype), mode="drop", wrap_negative_indices=False)


def dequantise(pool: Pool) -> Float[Array, "S K H"]:
    """The pool's elements as float32 (a float pool's as they are)."""
    if isinstance(pool, QuantizedPool):
        return pool.values.astype(jnp.float32) * pool.scales.astype(jnp.float32)[..., None]
    if isinstance(pool, ChannelQuantizedPool):
        elements = pool.values.astype(jnp.float32) * pool.scales
        return elements if pool.zeros is None else elements + pool.zeros
    return pool
