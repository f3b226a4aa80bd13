"""Plain JAX, written for one sequence and one head: jax.vmap adds the heads and then the batch. Every block
is under jax.checkpoint, and the functions are compiled by jax.jit where they are defined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

VOCAB_SIZE = 92
MAX_LEN = 128
N_HEAD, D_HEAD, D_MODEL, N_LAYER = 4, 12, 48, 2


class Head(NamedTuple):
    """Weights of all heads: the first axis is mapped over."""

    wq: jax.Array
    wk: jax.Array
    wv: jax.Array
    wo: jax.Array


class Layer(NamedTuple):
    heads: Head
    w_up: jax.Array
    w_down: jax.Array


class Model(NamedTuple):
    embedding: jax.Array
    layers: tuple[Layer, ...]
    readout: jax.Array


def normalize(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def turn(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotary embedding of one vector at one position."""
    even, odd = x[0::2], x[1::2]
    angle = position / 10_000.0 ** (jnp.arange(x.shape[0] // 2) / (x.shape[0] // 2))
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([even * c - odd * s, even * s + odd * c], axis=1).ravel()


@jax.jit
def one_head(head: Head, x: jax.Array, positions: jax.Array) -> jax.Array:
    """[T, D] -> [T, D]: what one head adds for one sequence."""
    q = jax.vmap(turn)(x @ head.wq, positions)
    k = jax.vmap(turn)(x @ head.wk, positions)
    v = x @ head.wv
    scores = jnp.dot(q, k.T) / jnp.sqrt(D_HEAD)
    scores = jnp.where(jnp.tri(x.shape[0], dtype=bool), scores, -jnp.inf)
    return jnp.dot(jax.nn.softmax(scores, axis=1), v) @ head.wo


def attend(heads: Head, x: jax.Array, positions: jax.Array) -> jax.Array:
    return jax.vmap(one_head, in_axes=(0, None, None))(heads, x, positions).sum(axis=0)


@partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
@jax.jit
def block(layer: Layer, x: jax.Array, positions: jax.Array) -> jax.Array:
    x = x + attend(layer.heads, normalize(x), positions)
    return x + jax.nn.swish(normalize(x) @ layer.w_up) @ layer.w_down


@jax.jit
def one_sequence(model: Model, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    x = model.embedding[tokens]
    for layer in model.layers:
        x = block(layer, x, positions)
    return normalize(x) @ model.readout


@jax.jit
def forward(model: Model, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    return jax.vmap(one_sequence, in_axes=(None, 0, 0))(model, tokens, positions)


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params)."""
    keys = iter(jax.random.split(jax.random.key(seed), 6 * N_LAYER + 2))

    def weight(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    def layer() -> Layer:
        inward = [weight(N_HEAD, D_MODEL, D_HEAD, fan_in=D_MODEL) for _ in range(3)]
        heads = Head(*inward, weight(N_HEAD, D_HEAD, D_MODEL, fan_in=N_HEAD * D_HEAD))
        return Layer(heads, weight(D_MODEL, 128, fan_in=D_MODEL), weight(128, D_MODEL, fan_in=128))

    embedding = weight(VOCAB_SIZE, D_MODEL, fan_in=1)
    layers = tuple(layer() for _ in range(N_LAYER))
    return forward, Model(embedding, layers, weight(D_MODEL, VOCAB_SIZE, fan_in=D_MODEL))
