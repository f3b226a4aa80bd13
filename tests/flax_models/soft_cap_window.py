"""Gemma-2-like decoder in NNX: scores capped by tanh, even layers see the last 7 tokens only, odd layers
all of them, norms before and after each block whose scale is 1 + w, logits capped, too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB_SIZE = 107
MAX_LEN = 128
WINDOW = 7
ATTN_CAP = 5.0
LOGIT_CAP = 8.0


class AttentionType(enum.Enum):
    GLOBAL = 1
    LOCAL_SLIDING = 2


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    return jnp.tanh(x / cap) * cap


class RMSNorm(nnx.Module):
    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (dim,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(var + 1e-6) * (1 + self.scale)


def apply_rope(inputs: jax.Array, positions: jax.Array) -> jax.Array:
    dim = inputs.shape[-1]
    timescale = 10_000 ** (2 * jnp.arange(0, dim // 2) / dim)
    sinusoid = (positions[..., jnp.newaxis] / timescale)[..., jnp.newaxis, :]
    sin, cos = jnp.sin(sinusoid), jnp.cos(sinusoid)
    first, second = jnp.split(inputs, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, kind: AttentionType, dim: int, heads: int, kv: int, head_dim: int, *, rngs: nnx.Rngs):
        self.kind, self.kv, self.head_dim = kind, kv, head_dim
        self.q_einsum = nnx.Einsum("BTD,NDH->BTNH", (heads, dim, head_dim), rngs=rngs)
        self.kv_einsum = nnx.Einsum("BSD,CKDH->CBSKH", (2, kv, dim, head_dim), rngs=rngs)
        self.o_einsum = nnx.Einsum("BTNH,NHD->BTD", (heads, head_dim, dim), rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        q = apply_rope(self.q_einsum(x), positions) * 3.0 * self.head_dim**-0.5
        k, v = self.kv_einsum(x)
        k = apply_rope(k, positions)
        b, t, n, h = q.shape
        q = q.reshape(b, t, self.kv, n // self.kv, h)
        scores = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(b, t, n, -1)
        scores = soft_cap(scores, ATTN_CAP)
        if self.kind is AttentionType.LOCAL_SLIDING:
            ones = jnp.ones_like(mask)
            mask = mask * jnp.triu(ones, 1 - WINDOW) * jnp.tril(ones, WINDOW - 1)
        scores = jnp.where(mask[:, :, None, :], scores, -2.3819763e38)
        probs = jax.nn.softmax(scores, axis=-1).astype(k.dtype)
        probs = probs.reshape(b, t, self.kv, n // self.kv, -1)
        return self.o_einsum(jnp.einsum("BTKGS,BSKH->BTKGH", probs, v).reshape(b, t, n, h))


class Block(nnx.Module):
    def __init__(self, kind: AttentionType, dim: int, *, rngs: nnx.Rngs):
        self.pre_attn, self.post_attn = RMSNorm(dim, rngs=rngs), RMSNorm(dim, rngs=rngs)
        self.attn = Attention(kind, dim, 4, 2, 16, rngs=rngs)
        self.pre_ffw, self.post_ffw = RMSNorm(dim, rngs=rngs), RMSNorm(dim, rngs=rngs)
        self.gating = nnx.Einsum("btd,cdf->cbtf", (2, dim, 96), rngs=rngs)
        self.linear = nnx.Linear(96, dim, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.post_attn(self.attn(self.pre_attn(x), positions, mask))
        gate, up = self.gating(self.pre_ffw(x))
        return x + self.post_ffw(self.linear(jax.nn.gelu(gate) * up))


class Transformer(nnx.Module):
    def __init__(self, *, dim: int = 48, num_layers: int = 3, rngs: nnx.Rngs):
        self.table = nnx.Param(nnx.initializers.normal(dim**-0.5)(rngs.params(), (VOCAB_SIZE, dim)))
        kinds = [AttentionType.GLOBAL if i % 2 else AttentionType.LOCAL_SLIDING for i in range(num_layers)]
        self.blocks = nnx.List([Block(kind, dim, rngs=rngs) for kind in kinds])
        self.final_norm = RMSNorm(dim, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.table[...][tokens] * jnp.sqrt(self.table.shape[-1])
        mask = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), dtype=jnp.bool_))[None]
        for block in self.blocks:
            x = block(x, positions, mask)
        return soft_cap(self.final_norm(x) @ self.table[...].T, LOGIT_CAP)


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params)."""
    graphdef, params = nnx.split(Transformer(rngs=nnx.Rngs(seed)))

    def fn(params: nnx.State, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(tokens, positions)

    return fn, params
