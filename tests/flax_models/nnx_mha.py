"""NNX's own MultiHeadAttention with a mask from nnx.make_causal_mask and decode=False, sinusoidal encodings
of the given positions after the embedding, sublayers applied by one helper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB_SIZE = 94
MAX_LEN = 128


def sinusoids(positions: jax.Array, channels: int) -> jax.Array:
    scaled = positions[..., None] * jnp.exp(-9.21 * jnp.arange(channels // 2) / (channels // 2 - 1))
    return jnp.concatenate([jnp.sin(scaled), jnp.cos(scaled)], axis=-1)


class FeedForward(nnx.Module):
    def __init__(self, features: int, rngs: nnx.Rngs):
        self.lin1 = nnx.Linear(features, 4 * features, rngs=rngs)
        self.lin2 = nnx.Linear(4 * features, features, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.lin2(self.drop(nnx.gelu(self.lin1(x))))


class TransformerBlock(nnx.Module):
    def __init__(self, features: int, num_heads: int, rngs: nnx.Rngs):
        self.mha = nnx.MultiHeadAttention(
            num_heads=num_heads,
            in_features=features,
            qkv_features=features,
            out_features=features,
            dropout_rate=0.1,
            decode=False,
            rngs=rngs,
        )
        self.ff = FeedForward(features, rngs)
        self.norm_mha = nnx.LayerNorm(features, use_bias=False, rngs=rngs)
        self.norm_ff = nnx.LayerNorm(features, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.mha(self.norm_mha(x), mask=mask, decode=False)
        return x + self.ff(self.norm_ff(x))


class MiniGPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, features: int = 64, num_heads: int = 4, num_blocks: int = 2):
        self.features = features
        self.token_embedding = nnx.Embed(
            VOCAB_SIZE, features, embedding_init=nnx.initializers.normal(1.0), rngs=rngs
        )
        self.blocks = nnx.List([TransformerBlock(features, num_heads, rngs) for _ in range(num_blocks)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.output = nnx.Linear(features, VOCAB_SIZE, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.token_embedding(tokens) + sinusoids(positions, self.features)
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.output(self.norm(x))


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params); dropout's random state stays with fn."""
    model = MiniGPT(nnx.Rngs(seed))
    model.eval()
    graphdef, params, others = nnx.split(model, nnx.Param, ...)

    def fn(params: nnx.State, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params, others)(tokens, positions)

    return fn, params
