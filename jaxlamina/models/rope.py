"""Rotary positions: frequencies as numpy constants, cosine and sine from positions, and the rotation itself.

Sources: RoFormer (arXiv 2104.09864); linear and dynamic NTK scaling (arXiv 2306.15595 and the community's NTK
work); YaRN (arXiv 2309.00071); Llama 3.1's frequency bands; LongRoPE (arXiv 2402.13753). Angles are plain
elementwise arithmetic on the positions (no table look-up, no matrix product), so that whoever slices the
model can recompute them in every slice rather than carry them. Knows nothing of models, layers or attention.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.models.rope_config import RopeConfig
from pallas_kernels import cpu


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angle per position of each pair of turned dimensions: float32 [R/2], and the factor on cosine and sine.

    R is H, or the part of it that `partial_rotary_factor` names. For `dynamic` these hold up to
    `max_position_embeddings` tokens, for `longrope` up to the original length; `rotary_tables` goes beyond.
    """
    periods = _periods(rope.theta, rope.rotary_dim(head_dim))
    plain = np.float32(1.0) / periods
    if rope.rope_type in ("default", "dynamic"):
        return plain, 1.0
    if rope.rope_type == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "longrope":
        return _stretched(rope.short_factor, periods), longrope_attention_factor(rope)
    assert rope.rope_type == "yarn", rope.rope_type
    return _yarn(rope, periods), yarn_attention_factor(rope)


def _exponents(head_dim: int) -> np.ndarray:
    return np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)


def _periods(theta: float, head_dim: int) -> np.ndarray:
    # The power in float64, rounded once: numpy's float32 power is off by a unit in the last place here and
    # there, which at position 100,000 is an angle off by a hundredth.
    return np.power(np.float64(theta), _exponents(head_dim).astype(np.float64)).astype(np.float32)


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Short wavelengths stay, long ones are stretched by `factor`, those between are blended."""
    assert rope.low_freq_factor is not None and rope.high_freq_factor is not None
    original = rope.original_max_position_embeddings
    assert original is not None
    wavelengths = np.float32(2 * math.pi) / plain
    turns = np.float32(original) / wavelengths  # within the original length
    blend = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return ((1 - blend) * plain / rope.factor + blend * plain).astype(np.float32)


def _yarn(rope: RopeConfig, periods: np.ndarray) -> np.ndarray:
    """Dimensions that turn often within the original length stay, slow ones are interpolated (YaRN §3.2)."""
    original, head_dim = rope.original_max_position_embeddings, 2 * len(periods)
    assert original is not None

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, 0.0, 1.0)
    interpolated = np.float32(1.0) / (np.float32(rope.factor) * periods)
    return (interpolated * (1 - keep) + (np.float32(1.0) / periods) * keep).astype(np.float32)


def yarn_attention_factor(rope: RopeConfig) -> float:
    """The factor on cosine and sine that stands for YaRN's attention temperature (§3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _stretched(factors: tuple[float, ...], periods: np.ndarray) -> np.ndarray:
    return np.float32(1.0) / (np.array(factors, np.float32) * periods)


def longrope_attention_factor(rope: RopeConfig) -> float:
    """The factor on cosine and sine of LongRoPE (§4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    original = rope.original_max_position_embeddings
    assert original is not None
    return math.sqrt(1 + math.log(rope.factor) / math.log(original)) if rope.factor > 1 else 1.0


def rotary_tables(
    rope: RopeConfig, head_dim: int, positions: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every angle: positions [B, T] int32 -> two [B, T, 1, R/2] of `dtype`.

    Angles are float32. `dynamic` and `longrope` take a row's length to be its largest position + 1, row by
    row: unlike transformers, no row's frequencies depend on the others' lengths or on earlier calls.
    """
    frequencies, factor = inverse_frequencies(rope, head_dim)
    at = positions.astype(jnp.float32)[:, :, None, None]
    if rope.rope_type == "dynamic":
        angles = at / _dynamic_periods(rope, rope.rotary_dim(head_dim), positions)
    elif rope.rope_type == "longrope":
        long = _stretched(rope.long_factor, _periods(rope.theta, rope.rotary_dim(head_dim)))
        assert rope.original_max_position_embeddings is not None
        is_long = jnp.max(positions, axis=1) >= rope.original_max_position_embeddings
        angles = at * jnp.where(is_long[:, None, None, None], long, frequencies)
    else:
        angles = at * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if factor != 1.0:
        cos, sin = cos * np.float32(factor), sin * np.float32(factor)
    return cos.astype(dtype), sin.astype(dtype)


def _dynamic_periods(rope: RopeConfig, head_dim: int, positions: jax.Array) -> jax.Array:
    """theta grows with the row's length past the trained one: float32 [B, 1, 1, H/2]."""
    trained = rope.max_position_embeddings
    length = jnp.maximum(jnp.max(positions, axis=1) + 1, trained).astype(jnp.float32)
    stretch = rope.factor * length / trained - (rope.factor - 1)
    theta = rope.theta * jnp.power(stretch, np.float32(head_dim / (head_dim - 2)))
    return jnp.power(theta[:, None, None, None], _exponents(head_dim))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn each pair (i, i + R/2) of x [B, T, heads, H] by its angle; cos, sin [B, T, 1, R/2]. What lies
    beyond the first R dimensions stays."""
    is_native = x.dtype == jnp.float32 and cpu.serves(jax.default_backend())
    return _natively_rotated(x, cos, sin) if is_native else _rotated(x, cos, sin)


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    rest = [x[..., 2 * half :]] if 2 * half < x.shape[-1] else []
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *rest], axis=-1)


@jax.custom_jvp
def _natively_rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As `_rotated`. On a CPU XLA joins halves element by element, and works out their angles' cosines and
    sines again wherever they are read."""
    rows = math.prod(x.shape[:-2])
    tables = (y.reshape(rows, -1) for y in (cos, sin))
    return cpu.rotate(x.reshape(rows, *x.shape[-2:]), *tables).reshape(x.shape)


@_natively_rotated.defjvp
def _of_derivatives(given: Any, derivatives: Any) -> Any:
    return _natively_rotated(*given), jax.jvp(_rotated, given, derivatives)[1]
