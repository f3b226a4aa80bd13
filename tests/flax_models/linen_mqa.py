"""Multi-query attention in Flax Linen, after the first Gemma: weights are [D, N, H] tensors for einsum, one
shared key-value head without an axis of its own, GELU feed-forward, queries scaled before the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

VOCAB_SIZE = 97
MAX_LEN = 128
K_MASK = -2.3819763e38


class Einsum(nn.Module):
    """A parameter `w` of a given shape and an einsum with it; `fan_in` sets its size."""

    shape: tuple[int, ...]
    fan_in: int

    @nn.compact
    def __call__(self, eqn: str, x: jax.Array) -> jax.Array:
        w = self.param("w", nn.initializers.normal(self.fan_in**-0.5), self.shape)
        return jnp.einsum(eqn, x, w)


def rotate(x: jax.Array, positions: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary embedding of [B, T, N, H] or, without an axis of heads, [B, T, H]."""
    width = x.shape[-1]
    timescale = base ** (2 * jnp.arange(width // 2) / width)
    radians = positions[..., None] / timescale
    if x.ndim == 4:
        radians = radians[:, :, None, :]
    sin, cos = jnp.sin(radians), jnp.cos(radians)
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


class MultiQueryAttention(nn.Module):
    num_heads: int
    head_dim: int

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        features = x.shape[-1]
        query = Einsum((features, self.num_heads, self.head_dim), features, name="q_einsum")(
            "BTD,DNH->BTNH", x
        )
        kv = Einsum((2, features, self.head_dim), features, name="kv_einsum")("BSD,CDH->CBSH", x)
        key, value = kv
        query = rotate(query, positions) * self.head_dim**-0.5
        key = rotate(key, positions)
        scores = jnp.einsum("BTNH,BSH->BTNS", query, key)
        scores = jnp.where(mask[:, :, None, :], scores, K_MASK)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        encoded = jnp.einsum("BTNS,BSH->BTNH", weights, value)
        width = self.num_heads * self.head_dim
        out = Einsum((self.num_heads, self.head_dim, features), width, name="attn_vec_einsum")
        return out("BTNH,NHD->BTD", encoded)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + MultiQueryAttention(4, 16)(nn.RMSNorm()(x), positions, mask)
        h = nn.Dense(4 * x.shape[-1], name="up")(nn.RMSNorm()(x))
        return x + nn.Dense(x.shape[-1], name="down")(nn.gelu(h, approximate=True))


class Decoder(nn.Module):
    features: int = 48
    num_layers: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB_SIZE, self.features, embedding_init=nn.initializers.normal(1.0))(tokens)
        length = tokens.shape[1]
        mask = jnp.tril(jnp.ones((length, length), dtype=bool))[None]
        for i in range(self.num_layers):
            x = Layer(name=f"layer_{i}")(x, positions, mask)
        return nn.Dense(VOCAB_SIZE, use_bias=False, name="head")(nn.RMSNorm(name="final")(x))


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params)."""
    model = Decoder()
    sample = jnp.zeros((1, 4), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(seed), sample, sample)
    return model.apply, variables
