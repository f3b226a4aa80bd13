"""Whether a slice's q is made of the attention output before it: what keeps exchanges in one order without
more ties."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from splitter import attention, split, trace

D = 8
SHAPES = {name: jax.ShapeDtypeStruct((D, D), jnp.float32) for name in ("q1", "q2", "k", "v", "o")}
X = jax.ShapeDtypeStruct((2, 1, D), jnp.float32)


def heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], 2, D // 2)


def attend(params: dict[str, jax.Array], q: str, x: jax.Array) -> jax.Array:
    out = attention(heads(x @ params[q]), heads(x @ params["k"]), heads(x @ params["v"]))
    return out.reshape(x.shape) @ params["o"]


def one_after_another(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = x + attend(params, "q1", x)
    return x + attend(params, "q2", x)


def side_by_side(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + attend(params, "q1", x) + attend(params, "q2", x)


def test_q_of_the_next_layer_needs_the_last_answer() -> None:
    parts = split(trace(one_after_another, SHAPES, X))
    assert parts.slices[1].program.q_needs(-1)


def test_q_of_an_attention_beside_it_does_not() -> None:
    parts = split(trace(side_by_side, SHAPES, X))
    assert not parts.slices[1].program.q_needs(-1)
