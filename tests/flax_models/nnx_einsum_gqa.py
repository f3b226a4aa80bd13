"""A Llama-like decoder in Flax NNX: grouped-query attention by one einsum over (kv head, group), half-split
rotary embedding from given positions, SwiGLU, pre-RMSNorm. Query heads are kept as [B, T, K, G, H] all the
way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB_SIZE = 101
MAX_LEN = 128


@dataclasses.dataclass(frozen=True)
class Config:
    embed_dim: int = 48
    num_layers: int = 3
    num_kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 8
    hidden_dim: int = 80
    rope_theta: float = 10_000.0


def apply_rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates the first half of the last axis against the second one; x is [B, T, ..., H]."""
    half = x.shape[-1] // 2
    freqs = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None] * freqs
    angles = angles.reshape(*angles.shape[:2], *(1,) * (x.ndim - 3), half)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(cfg.embed_dim**-0.5)
        d, k, g, h = cfg.embed_dim, cfg.num_kv_heads, cfg.group_size, cfg.head_dim
        self.cfg = cfg
        self.wq = nnx.Param(init(rngs.params(), (d, k, g, h)))
        self.wk = nnx.Param(init(rngs.params(), (d, k, h)))
        self.wv = nnx.Param(init(rngs.params(), (d, k, h)))
        self.wo = nnx.Param(init(rngs.params(), (k, g, h, d)))

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        cfg = self.cfg
        q = apply_rope(jnp.einsum("btd,dkgh->btkgh", x, self.wq[...]), positions, cfg.rope_theta)
        k = apply_rope(jnp.einsum("bsd,dkh->bskh", x, self.wk[...]), positions, cfg.rope_theta)
        v = jnp.einsum("bsd,dkh->bskh", x, self.wv[...])
        logits = jnp.einsum("btkgh,bskh->bkgts", q, k) * cfg.head_dim**-0.5
        allowed = positions[:, :, None] >= positions[:, None, :]
        logits = jnp.where(allowed[:, None, None], logits, -jnp.inf)
        probs = jax.nn.softmax(logits, axis=-1)
        out = jnp.einsum("bkgts,bskh->btkgh", probs, v)
        return jnp.einsum("btkgh,kghd->btd", out, self.wo[...])


class Block(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(cfg.embed_dim, rngs=rngs)
        self.attn = Attention(cfg, rngs=rngs)
        self.norm2 = nnx.RMSNorm(cfg.embed_dim, rngs=rngs)
        self.gate = nnx.Linear(cfg.embed_dim, cfg.hidden_dim, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(cfg.embed_dim, cfg.hidden_dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(cfg.hidden_dim, cfg.embed_dim, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x), positions)
        h = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class LanguageModel(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(
            VOCAB_SIZE, cfg.embed_dim, embedding_init=nnx.initializers.normal(1.0), rngs=rngs
        )
        self.blocks = nnx.List([Block(cfg, rngs=rngs) for _ in range(cfg.num_layers)])
        self.final_norm = nnx.RMSNorm(cfg.embed_dim, rngs=rngs)
        self.lm_head = nnx.Linear(cfg.embed_dim, VOCAB_SIZE, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.lm_head(self.final_norm(x))


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params)."""
    graphdef, params = nnx.split(LanguageModel(Config(), rngs=nnx.Rngs(seed)))

    def fn(params: nnx.State, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(tokens, positions)

    return fn, params
