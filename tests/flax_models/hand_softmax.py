"""A transformer of plain functions over a dict of arrays, with every softmax written out. The first layer
divides exponentials by their sum, the second one subtracts the log of the sum; keys carry the scale; the
mask is -1e9, added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

VOCAB_SIZE = 91
MAX_LEN = 128
WIDTH, HEADS, DIM, LAYERS = 40, 5, 8, 2

Params = dict[str, Any]


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    mu = x.mean(-1, keepdims=True)
    var = ((x - mu) ** 2).mean(-1, keepdims=True)
    return (x - mu) / jnp.sqrt(var + 1e-6) * p["g"] + p["b"]


def softmax_by_division(s: jax.Array) -> jax.Array:
    e = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    return e / jnp.sum(e, axis=-1, keepdims=True)


def softmax_by_logsumexp(s: jax.Array) -> jax.Array:
    m = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    lse = m + jnp.log(jnp.sum(jnp.exp(s - m), axis=-1, keepdims=True))
    return jnp.exp(s - lse)


def rope(x: jax.Array, pos: jax.Array) -> jax.Array:
    # x: heads, batch, time, dim
    f = jnp.exp(-math.log(10_000) * jnp.arange(DIM // 2) / (DIM // 2))
    a = pos[None, :, :, None] * f
    u, w = x[..., : DIM // 2], x[..., DIM // 2 :]
    return jnp.concatenate([u * jnp.cos(a) - w * jnp.sin(a), u * jnp.sin(a) + w * jnp.cos(a)], axis=-1)


def attention(
    p: Params, x: jax.Array, pos: jax.Array, softmax: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    t = x.shape[1]
    q = rope(jnp.einsum("btd,dnh->nbth", x, p["q"]), pos)
    k = rope(jnp.einsum("btd,dnh->nbth", x, p["k"]), pos) * (1 / math.sqrt(DIM))
    v = jnp.einsum("btd,dnh->nbth", x, p["v"])
    s = jnp.einsum("nbqh,nbkh->nbqk", q, k)
    s = s + (1.0 - jnp.tril(jnp.ones((t, t)))) * -1e9
    return jnp.einsum("nbth,nhd->btd", jnp.einsum("nbqk,nbkh->nbqh", softmax(s), v), p["o"])


def mlp(p: Params, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) @ p["out"]["w"] + p["out"]["b"]


def forward(params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    for i, p in enumerate(params["layers"]):
        softmax = softmax_by_division if i % 2 == 0 else softmax_by_logsumexp
        x = x + attention(p["attn"], layer_norm(p["ln1"], x), positions, softmax)
        x = x + mlp(p["mlp"], layer_norm(p["ln2"], x))
    return layer_norm(params["ln"], x) @ params["unembed"]


def init(key: jax.Array) -> Params:
    keys = iter(jax.random.split(key, 64))

    def dense(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(fan_in)

    def norm() -> Params:
        return {"g": 1 + 0.1 * jax.random.normal(next(keys), (WIDTH,)), "b": jnp.zeros(WIDTH)}

    def layer() -> Params:
        attn = {name: dense(WIDTH, HEADS, DIM, fan_in=WIDTH) for name in "qkv"}
        attn["o"] = dense(HEADS, DIM, WIDTH, fan_in=HEADS * DIM)
        inner = {"w": dense(WIDTH, 96, fan_in=WIDTH), "b": dense(96, fan_in=96)}
        outer = {"w": dense(96, WIDTH, fan_in=96), "b": dense(WIDTH, fan_in=WIDTH)}
        return {"attn": attn, "mlp": {"in": inner, "out": outer}, "ln1": norm(), "ln2": norm()}

    return {
        "embed": dense(VOCAB_SIZE, WIDTH, fan_in=1),
        "layers": [layer() for _ in range(LAYERS)],
        "ln": norm(),
        "unembed": dense(WIDTH, VOCAB_SIZE, fan_in=WIDTH),
    }


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params)."""
    return forward, init(jax.random.key(seed))
