"""Qwen-3-like decoder in Linen with weights and activations in bfloat16: queries and keys are normalized
head by head before rotary embedding; heads are moved before time for attention; scores and softmax are in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

VOCAB_SIZE = 109
MAX_LEN = 128
BF16 = jnp.bfloat16


class Norm(nn.Module):
    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), BF16)
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + self.eps)
        return weight * x32.astype(x.dtype)


def dense(features: int | tuple[int, ...], name: str, axis: int | tuple[int, ...] = -1) -> nn.DenseGeneral:
    return nn.DenseGeneral(features, axis=axis, use_bias=False, dtype=BF16, param_dtype=BF16, name=name)


def rotary(x: jax.Array, position_ids: jax.Array, theta: float = 1e6) -> jax.Array:
    """x: [B, N, T, H]"""
    dim = x.shape[-1]
    inv_freq = 1.0 / (theta ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim))
    freqs = position_ids[:, None, :, None].astype(jnp.float32) * inv_freq
    emb = jnp.concatenate([freqs, freqs], axis=-1)
    cos, sin = jnp.cos(emb).astype(x.dtype), jnp.sin(emb).astype(x.dtype)
    half = jnp.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], axis=-1)
    return x * cos + half * sin


class Attention(nn.Module):
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, position_ids: jax.Array) -> jax.Array:
        q = Norm(name="q_norm")(dense((self.heads, self.head_dim), "q_proj")(x)).transpose(0, 2, 1, 3)
        k = Norm(name="k_norm")(dense((self.kv_heads, self.head_dim), "k_proj")(x)).transpose(0, 2, 1, 3)
        v = dense((self.kv_heads, self.head_dim), "v_proj")(x).transpose(0, 2, 1, 3)
        q, k = rotary(q, position_ids), rotary(k, position_ids)
        b, n, t, h = q.shape
        q = q.reshape(b, self.kv_heads, n // self.kv_heads, t, h)
        scores = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
        mask = jnp.triu(jnp.full((t, t), jnp.finfo(jnp.float32).min), k=1)
        probs = jax.nn.softmax((scores + mask).astype(jnp.float32), axis=-1).astype(BF16)
        out = jnp.einsum("bkgts,bksh->bkgth", probs, v).reshape(b, n, t, h).transpose(0, 2, 1, 3)
        return dense(x.shape[-1], "o_proj", axis=(-2, -1))(out)


class DecoderLayer(nn.Module):
    intermediate: int = 96

    @nn.compact
    def __call__(self, x: jax.Array, position_ids: jax.Array) -> jax.Array:
        x = x + Attention(name="self_attn")(Norm(name="input_layernorm")(x), position_ids)
        h = Norm(name="post_attention_layernorm")(x)
        gated = nn.silu(dense(self.intermediate, "gate_proj")(h)) * dense(self.intermediate, "up_proj")(h)
        return x + dense(x.shape[-1], "down_proj")(gated)


class CausalLM(nn.Module):
    hidden: int = 48
    layers: int = 2

    @nn.compact
    def __call__(self, input_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        init = nn.initializers.normal(1.0)
        x = nn.Embed(VOCAB_SIZE, self.hidden, embedding_init=init, dtype=BF16, param_dtype=BF16)(input_ids)
        for i in range(self.layers):
            x = DecoderLayer(name=f"layers_{i}")(x, position_ids)
        return dense(VOCAB_SIZE, "lm_head")(Norm(name="norm")(x)).astype(jnp.float32)


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params); params are in bfloat16."""
    model = CausalLM()
    ids = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(seed), ids, ids)["params"]

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return model.apply({"params": params}, tokens, positions)

    return fn, params
