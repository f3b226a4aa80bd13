"""The reference Llama carried over to Linen: rotary embedding is a product of complex numbers, with a table
of MAX_LEN rows that numpy makes beforehand and the model slices to T; the mask is a triu of -inf, made only
when T > 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

VOCAB_SIZE = 96
MAX_LEN = 128


def precompute_freqs_cis(dim: int, end: int, theta: float = 10_000.0) -> np.ndarray:
    freqs = 1.0 / (theta ** (np.arange(0, dim, 2)[: dim // 2] / dim))
    angles = np.outer(np.arange(end), freqs)
    return (np.cos(angles) + 1j * np.sin(angles)).astype(np.complex64)


def apply_rotary_emb(xq: jax.Array, xk: jax.Array, freqs_cis: jax.Array) -> tuple[jax.Array, jax.Array]:
    def turned(x: jax.Array) -> jax.Array:
        pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
        z = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * freqs_cis[None, :, None, :]
        return jnp.stack((jnp.real(z), jnp.imag(z)), axis=-1).reshape(x.shape).astype(x.dtype)

    return turned(xq), turned(xk)


def repeat_kv(x: jax.Array, n_rep: int) -> jax.Array:
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    x = jnp.broadcast_to(x[:, :, :, None, :], (bs, slen, n_kv_heads, n_rep, head_dim))
    return x.reshape(bs, slen, n_kv_heads * n_rep, head_dim)


class Attention(nn.Module):
    n_heads: int
    n_kv_heads: int
    head_dim: int

    @nn.compact
    def __call__(self, x: jax.Array, freqs_cis: jax.Array, mask: jax.Array | None) -> jax.Array:
        bsz, seqlen, dim = x.shape
        xq = nn.Dense(self.n_heads * self.head_dim, use_bias=False, name="wq")(x)
        xk = nn.Dense(self.n_kv_heads * self.head_dim, use_bias=False, name="wk")(x)
        xv = nn.Dense(self.n_kv_heads * self.head_dim, use_bias=False, name="wv")(x)
        xq = xq.reshape(bsz, seqlen, self.n_heads, self.head_dim)
        xk = xk.reshape(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = xv.reshape(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        keys = repeat_kv(xk, self.n_heads // self.n_kv_heads).transpose(0, 2, 1, 3)
        values = repeat_kv(xv, self.n_heads // self.n_kv_heads).transpose(0, 2, 1, 3)
        xq = xq.transpose(0, 2, 1, 3)
        scores = jnp.matmul(xq, keys.transpose(0, 1, 3, 2)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(xq.dtype)
        output = jnp.matmul(scores, values).transpose(0, 2, 1, 3).reshape(bsz, seqlen, -1)
        return nn.Dense(dim, use_bias=False, name="wo")(output)


class FeedForward(nn.Module):
    hidden_dim: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        w1 = nn.Dense(self.hidden_dim, use_bias=False, name="w1")
        w3 = nn.Dense(self.hidden_dim, use_bias=False, name="w3")
        return nn.Dense(x.shape[-1], use_bias=False, name="w2")(jax.nn.silu(w1(x)) * w3(x))


class Transformer(nn.Module):
    dim: int = 64
    n_layers: int = 2
    n_heads: int = 8
    n_kv_heads: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        _, seqlen = tokens.shape
        head_dim = self.dim // self.n_heads
        h = nn.Embed(VOCAB_SIZE, self.dim, embedding_init=nn.initializers.normal(1.0))(tokens)
        freqs_cis = jnp.asarray(precompute_freqs_cis(head_dim, MAX_LEN))[:seqlen]
        mask = None
        if seqlen > 1:
            mask = jnp.triu(jnp.full((1, 1, seqlen, seqlen), float("-inf")), k=1)
        for i in range(self.n_layers):
            attention = Attention(self.n_heads, self.n_kv_heads, head_dim, name=f"attention_{i}")
            h = h + attention(nn.RMSNorm(name=f"attention_norm_{i}")(h), freqs_cis, mask)
            h = h + FeedForward(160, name=f"feed_forward_{i}")(nn.RMSNorm(name=f"ffn_norm_{i}")(h))
        h = nn.RMSNorm(name="norm")(h)
        return nn.Dense(VOCAB_SIZE, use_bias=False, name="output")(h).astype(jnp.float32)


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params); fn does not read its positions."""
    model = Transformer()
    params = jax.jit(model.init)(jax.random.PRNGKey(seed), jnp.zeros((1, 2), jnp.int32))

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        del positions
        return model.apply(params, tokens)

    return fn, params
