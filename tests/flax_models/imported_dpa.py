"""Attention is jax.nn's own, imported by name, with is_causal=True and fewer key-value heads than query
heads. The rest is NNX with LinearGeneral projections and a squared-ReLU feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import dot_product_attention

VOCAB_SIZE = 128
MAX_LEN = 128


def rotary(x: jax.Array, positions: jax.Array, max_wavelength: float = 500_000.0) -> jax.Array:
    fraction = jnp.arange(0, x.shape[-1], 2) / x.shape[-1]
    phase = positions[:, :, None, None] * max_wavelength**-fraction
    lo, hi = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [lo * jnp.cos(phase) - hi * jnp.sin(phase), hi * jnp.cos(phase) + lo * jnp.sin(phase)], -1
    )


class GQA(nnx.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs):
        self.to_q = nnx.LinearGeneral(dim, (heads, head_dim), use_bias=False, rngs=rngs)
        self.to_kv = nnx.LinearGeneral(dim, (2, kv_heads, head_dim), use_bias=False, rngs=rngs)
        self.to_out = nnx.LinearGeneral((heads, head_dim), dim, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        q = rotary(self.to_q(x), positions)
        kv = self.to_kv(x)
        k, v = rotary(kv[..., 0, :, :], positions), kv[..., 1, :, :]
        return self.to_out(dot_product_attention(q, k, v, is_causal=True))


class Decoder(nnx.Module):
    def __init__(self, *, dim: int = 64, depth: int = 2, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCAB_SIZE, dim, embedding_init=nnx.initializers.normal(0.7), rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(dim, rngs=rngs) for _ in range(2 * depth + 1)])
        self.attns = nnx.List([GQA(dim, 8, 2, 8, rngs=rngs) for _ in range(depth)])
        self.mlps = nnx.List(
            [
                nnx.Sequential(
                    nnx.Linear(dim, 3 * dim, rngs=rngs),
                    lambda h: jnp.square(jax.nn.relu(h)),
                    nnx.Linear(3 * dim, dim, rngs=rngs),
                )
                for _ in range(depth)
            ]
        )
        self.head = nnx.Linear(dim, VOCAB_SIZE, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        for i, (attn, mlp) in enumerate(zip(self.attns, self.mlps, strict=True)):
            x += attn(self.norms[2 * i](x), positions)
            x += mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x)).astype(jnp.float32)


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params); fn is compiled."""
    model = Decoder(rngs=nnx.Rngs(seed))
    graphdef, params = nnx.split(model)

    @jax.jit
    def fn(params: nnx.State, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return nnx.call((graphdef, params))(tokens, positions)[0]

    return fn, params
