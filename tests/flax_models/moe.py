"""Mixtral-like mixture of experts in NNX: a softmax router, the best 2 of 4. The first layer runs every
expert on every token and combines by one-hot weights; the second one sorts tokens by expert for ragged_dot;
the third gathers weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB_SIZE = 105
MAX_LEN = 128
E, TOP_K, D, F = 4, 2, 32, 48
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    inv = 1e4 ** -(jnp.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    angle = jnp.einsum("bt,h->bth", positions.astype(jnp.float32), inv)[:, :, None]
    a, b = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.q = nnx.Linear(D, HEADS * HEAD_DIM, use_bias=False, rngs=rngs)
        self.kv = nnx.Linear(D, 2 * KV_HEADS * HEAD_DIM, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(HEADS * HEAD_DIM, D, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        b, t, _ = x.shape
        q = rope(self.q(x).reshape(b, t, HEADS, HEAD_DIM), positions)
        k, v = jnp.split(self.kv(x), 2, axis=-1)
        k = rope(k.reshape(b, t, KV_HEADS, HEAD_DIM), positions)
        v = v.reshape(b, t, KV_HEADS, HEAD_DIM)
        shape = (b, t, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        k = jnp.broadcast_to(k[..., None, :], shape).reshape(b, t, HEADS, HEAD_DIM)
        v = jnp.broadcast_to(v[..., None, :], shape).reshape(b, t, HEADS, HEAD_DIM)
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k) / jnp.sqrt(HEAD_DIM)
        mask = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :]
        probs = nnx.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
        return self.o(jnp.einsum("bnqk,bknh->bqnh", probs, v).reshape(b, t, -1))


class MoE(nnx.Module):
    def __init__(self, how: str, rngs: nnx.Rngs):
        self.how = how
        self.router = nnx.Linear(D, E, use_bias=False, rngs=rngs)
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        self.w_in = nnx.Param(init(rngs.params(), (E, D, F)))
        self.w_gate = nnx.Param(init(rngs.params(), (E, D, F)))
        self.w_out = nnx.Param(init(rngs.params(), (E, F, D)))

    def __call__(self, x: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(self.router(x), axis=-1), TOP_K)
        weights = weights / weights.sum(-1, keepdims=True)
        return getattr(self, self.how)(x, weights, chosen)

    def dense(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        h = jnp.einsum("btd,edf->btef", x, self.w_in[...])
        h = h * nnx.silu(jnp.einsum("btd,edf->btef", x, self.w_gate[...]))
        y = jnp.einsum("btef,efd->bted", h, self.w_out[...])
        combine = jnp.einsum("btk,btke->bte", weights, jax.nn.one_hot(chosen, E))
        return jnp.einsum("bted,bte->btd", y, combine)

    def ragged(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat)
        rows = x.reshape(-1, D)[order // TOP_K]
        sizes = jnp.bincount(flat, length=E).astype(jnp.int32)
        h = jax.lax.ragged_dot(rows, self.w_in[...], sizes)
        h = h * nnx.silu(jax.lax.ragged_dot(rows, self.w_gate[...], sizes))
        y = jax.lax.ragged_dot(h, self.w_out[...], sizes) * weights.reshape(-1)[order, None]
        return jnp.zeros_like(x).reshape(-1, D).at[order // TOP_K].add(y).reshape(x.shape)

    def gathered(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        h = jnp.einsum("btd,btkdf->btkf", x, self.w_in[...][chosen])
        h = h * nnx.silu(jnp.einsum("btd,btkdf->btkf", x, self.w_gate[...][chosen]))
        return jnp.einsum("btkf,btkfd,btk->btd", h, self.w_out[...][chosen], weights)


class MixtureLM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB_SIZE, D, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        hows = ("dense", "ragged", "gathered")
        self.attns = nnx.List([Attention(rngs) for _ in hows])
        self.moes = nnx.List([MoE(how, rngs) for how in hows])
        self.norms = nnx.List([nnx.RMSNorm(D, rngs=rngs) for _ in range(2 * len(hows) + 1)])
        self.head = nnx.Linear(D, VOCAB_SIZE, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for i, (attn, moe) in enumerate(zip(self.attns, self.moes, strict=True)):
            x = x + attn(self.norms[2 * i](x), positions)
            x = x + moe(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params)."""
    graphdef, params = nnx.split(MixtureLM(nnx.Rngs(seed)))

    def fn(params: nnx.State, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(tokens, positions)

    return fn, params
