"""Layers of NNX made by nnx.vmap, so that every weight has a leading axis of layers, and run by nnx.scan.
Keys and values are repeated with jnp.repeat to the number of query heads; heads come before time: [B, N, T,
H].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB_SIZE = 103
MAX_LEN = 128
N_LAYERS = 3
N_HEADS = 6
N_KV = 2
HEAD_DIM = 8
D_MODEL = 48


def rope(x: jax.Array, pos: jax.Array) -> jax.Array:
    """x: [B, N, T, H], pos: [B, T]"""
    d = x.shape[-1]
    theta = 1.0 / 10_000 ** (jnp.arange(0, d, 2) / d)
    ang = pos[:, None, :, None] * theta
    ang = jnp.tile(ang, 2)
    flipped = jnp.roll(x, d // 2, axis=-1) * jnp.where(jnp.arange(d) < d // 2, -1.0, 1.0)
    return x * jnp.cos(ang) + flipped * jnp.sin(ang)


class TransformerLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attn_norm = nnx.RMSNorm(D_MODEL, rngs=rngs)
        self.q = nnx.Linear(D_MODEL, N_HEADS * HEAD_DIM, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(D_MODEL, N_KV * HEAD_DIM, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(D_MODEL, N_KV * HEAD_DIM, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(N_HEADS * HEAD_DIM, D_MODEL, use_bias=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(D_MODEL, rngs=rngs)
        self.w1 = nnx.Linear(D_MODEL, 2 * D_MODEL, rngs=rngs)
        self.w2 = nnx.Linear(2 * D_MODEL, D_MODEL, rngs=rngs)

    def attention(self, x: jax.Array, pos: jax.Array) -> jax.Array:
        b, t, _ = x.shape
        q = self.q(x).reshape(b, t, N_HEADS, HEAD_DIM).transpose(0, 2, 1, 3)
        k = self.k(x).reshape(b, t, N_KV, HEAD_DIM).transpose(0, 2, 1, 3)
        v = self.v(x).reshape(b, t, N_KV, HEAD_DIM).transpose(0, 2, 1, 3)
        q, k = rope(q, pos), rope(k, pos)
        k = jnp.repeat(k, N_HEADS // N_KV, axis=1)
        v = jnp.repeat(v, N_HEADS // N_KV, axis=1)
        s = q @ k.mT / HEAD_DIM**0.5
        rows = jax.lax.broadcasted_iota(jnp.int32, (t, t), 0)
        cols = jax.lax.broadcasted_iota(jnp.int32, (t, t), 1)
        s = s + jnp.where(cols <= rows, 0.0, -1e30)
        y = jax.nn.softmax(s) @ v
        return self.o(y.transpose(0, 2, 1, 3).reshape(b, t, -1))

    def __call__(self, x: jax.Array, pos: jax.Array) -> jax.Array:
        x = x + self.attention(self.attn_norm(x), pos)
        return x + self.w2(nnx.relu(self.w1(self.mlp_norm(x))) ** 2)


class ScannedTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=N_LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_layers(rngs: nnx.Rngs) -> TransformerLayer:
            return TransformerLayer(rngs)

        self.embed = nnx.Embed(VOCAB_SIZE, D_MODEL, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.layers = make_layers(rngs)
        self.norm = nnx.RMSNorm(D_MODEL, rngs=rngs)
        self.unembed = nnx.Linear(D_MODEL, VOCAB_SIZE, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, layer: TransformerLayer) -> jax.Array:
            return layer(x, positions)

        x = forward(self.embed(tokens), self.layers)
        return self.unembed(self.norm(x))


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params)."""
    graphdef, params, rest = nnx.split(ScannedTransformer(nnx.Rngs(seed)), nnx.Param, ...)

    def fn(params: nnx.State, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params, rest)
        return model(tokens, positions)

    return fn, params
