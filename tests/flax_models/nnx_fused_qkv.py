"""GPT-NeoX-like attention in NNX: one projection gives q, k and v, which are split head by head after the
reshape. The mask is a tril of booleans, refused scores are the dtype's minimum, and the softmax is in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB_SIZE = 113
MAX_LEN = 128


def rotate_half(x: jax.Array) -> jax.Array:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return jnp.concatenate((-x2, x1), axis=-1)


def rotary_tables(position_ids: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    inv_freq = 1.0 / (10_000 ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim))
    freqs = jnp.einsum("bt,f->btf", position_ids.astype(jnp.float32), inv_freq)
    emb = jnp.concatenate((freqs, freqs), axis=-1)[:, None]  # [B, 1, T, dim]
    return jnp.cos(emb), jnp.sin(emb)


class FusedSelfAttention(nnx.Module):
    def __init__(self, hidden_size: int, n_heads: int, rngs: nnx.Rngs):
        self.n_heads = n_heads
        self.head_size = hidden_size // n_heads
        self.qkv = nnx.Linear(hidden_size, 3 * hidden_size, rngs=rngs)
        self.proj = nnx.Linear(hidden_size, hidden_size, rngs=rngs)

    def __call__(self, hidden: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        bsz, seq, width = hidden.shape
        qkv = self.qkv(hidden).reshape(bsz, seq, self.n_heads, 3 * self.head_size)
        qkv = qkv.transpose(0, 2, 1, 3)  # [B, N, T, 3H]
        q, k, v = jnp.split(qkv, 3, axis=-1)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        att = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) / jnp.sqrt(self.head_size)
        causal = jnp.tril(jnp.ones((seq, seq), dtype=jnp.bool_))
        att = jnp.where(causal, att, jnp.finfo(att.dtype).min)
        att = jax.nn.softmax(att.astype(jnp.float32), axis=-1).astype(v.dtype)
        out = jnp.matmul(att, v)
        out = out.transpose(0, 2, 1, 3).reshape(bsz, seq, width)
        return self.proj(out)


class NeoXBlock(nnx.Module):
    def __init__(self, hidden_size: int, n_heads: int, rngs: nnx.Rngs):
        self.ln_1 = nnx.LayerNorm(hidden_size, rngs=rngs)
        self.attention = FusedSelfAttention(hidden_size, n_heads, rngs)
        self.ln_2 = nnx.LayerNorm(hidden_size, rngs=rngs)
        self.fc_in = nnx.Linear(hidden_size, 4 * hidden_size, rngs=rngs)
        self.fc_out = nnx.Linear(4 * hidden_size, hidden_size, rngs=rngs)

    def __call__(self, hidden: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        hidden = hidden + self.attention(self.ln_1(hidden), cos, sin)
        return hidden + self.fc_out(jax.nn.gelu(self.fc_in(self.ln_2(hidden)), approximate=False))


class NeoX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, hidden_size: int = 64, n_heads: int = 4, n_layers: int = 2):
        self.head_size = hidden_size // n_heads
        self.wte = nnx.Embed(
            VOCAB_SIZE, hidden_size, embedding_init=jax.nn.initializers.normal(0.5), rngs=rngs
        )
        self.layers = nnx.List([NeoXBlock(hidden_size, n_heads, rngs) for _ in range(n_layers)])
        self.ln_f = nnx.LayerNorm(hidden_size, rngs=rngs)
        self.embed_out = nnx.Linear(hidden_size, VOCAB_SIZE, use_bias=False, rngs=rngs)

    def __call__(self, input_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        hidden = self.wte(input_ids)
        cos, sin = rotary_tables(position_ids, self.head_size)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.embed_out(self.ln_f(hidden))


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params): params is a plain dict of arrays."""
    model = NeoX(nnx.Rngs(params=seed))
    graphdef, state = nnx.split(model, nnx.Param)

    def fn(params: dict[str, Any], tokens: jax.Array, positions: jax.Array) -> jax.Array:
        filled = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graphdef, filled)(tokens, positions)

    return fn, nnx.to_pure_dict(state)
