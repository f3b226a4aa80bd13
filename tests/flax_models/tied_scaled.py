"""After "Attention Is All You Need", decoder only, in Linen: embeddings scaled by sqrt(D) and shared with
the output, sinusoidal encodings added to them, positions counted inside by a cumsum of ones, norms after
the residual sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

VOCAB_SIZE = 99
MAX_LEN = 128


def positional_encoding(positions: jax.Array, d_model: int) -> jax.Array:
    """sin at even dimensions, cos at odd ones: [B, T] -> [B, T, D]."""
    i = jnp.arange(d_model)
    rates = jnp.power(10_000.0, -(i // 2 * 2) / d_model)
    angles = positions[:, :, None].astype(jnp.float32) * rates
    return jnp.where(i % 2 == 0, jnp.sin(angles), jnp.cos(angles))


class MultiHead(nn.Module):
    h: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        d_k = x.shape[-1] // self.h

        def heads(name: str) -> jax.Array:
            # The heads go into the batch: [B * h, T, d_k].
            y = nn.Dense(x.shape[-1], name=name)(x)
            y = y.reshape(*x.shape[:2], self.h, d_k).transpose(0, 2, 1, 3)
            return y.reshape(-1, x.shape[1], d_k)

        q, k, v = heads("W_Q"), heads("W_K"), heads("W_V")
        energy = jax.lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,))))
        energy = energy * jax.lax.rsqrt(float(d_k))
        energy = jnp.where(mask, energy, jnp.full_like(energy, -1e10))
        attention = jax.nn.softmax(energy, axis=2)
        y = jax.lax.dot_general(attention, v, (((2,), (1,)), ((0,), (0,))))
        y = y.reshape(x.shape[0], self.h, x.shape[1], d_k).transpose(0, 2, 1, 3).reshape(x.shape)
        return nn.Dense(x.shape[-1], name="W_O")(y)


class DecoderLayer(nn.Module):
    h: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(x + MultiHead(self.h)(x, mask))
        y = nn.Dense(x.shape[-1])(nn.relu(nn.Dense(2 * x.shape[-1])(x)))
        return nn.LayerNorm()(x + y)


class Decoder(nn.Module):
    d_model: int = 32
    h: int = 4
    n: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = self.param(
            "embedding", nn.initializers.normal(self.d_model**-0.5), (VOCAB_SIZE, self.d_model)
        )
        positions = jnp.cumsum(jnp.ones_like(tokens), axis=1) - 1
        x = jnp.take(embedding, tokens, axis=0) * self.d_model**0.5
        x = x + positional_encoding(positions, self.d_model)
        steps = jnp.arange(tokens.shape[1])
        mask = steps[None, :] <= steps[:, None]
        for _ in range(self.n):
            x = DecoderLayer(self.h)(x, mask)
        return jnp.dot(x, embedding.T)


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params); fn does not read its positions."""
    model = Decoder()
    params = jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        del positions
        return model.apply(params, tokens)

    return fn, params
