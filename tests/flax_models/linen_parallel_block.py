"""GPT-J-like decoder in Linen: attention and MLP are computed from one LayerNorm and added together; rotary
embedding of the first 8 of 16 dimensions of a head only, in pairs (0, 1), (2, 3) and so on; an output head
with bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

VOCAB_SIZE = 89
MAX_LEN = 128


def create_sinusoidal_positions(num_pos: int, dim: int) -> np.ndarray:
    inv_freq = 1.0 / (10_000 ** (np.arange(0, dim, 2) / dim))
    angles = np.einsum("i,j->ij", np.arange(num_pos), inv_freq).astype("float32")
    return np.concatenate((np.sin(angles), np.cos(angles)), axis=1)


def rotate_every_two(x: jax.Array) -> jax.Array:
    rotated = jnp.stack((-x[..., 1::2], x[..., ::2]), axis=-1)
    return rotated.reshape(x.shape)


def apply_rotary(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    sin = sin[:, :, None, :].repeat(2, axis=3)
    cos = cos[:, :, None, :].repeat(2, axis=3)
    return x * cos + rotate_every_two(x) * sin


class JAttention(nn.Module):
    n_head: int
    rotary_dim: int

    def setup(self) -> None:
        self.embed_positions = create_sinusoidal_positions(MAX_LEN, self.rotary_dim)

    @nn.compact
    def __call__(self, hidden: jax.Array, position_ids: jax.Array) -> jax.Array:
        d = hidden.shape[-1]
        split = (*hidden.shape[:2], self.n_head, d // self.n_head)
        query = nn.Dense(d, use_bias=False, name="q_proj")(hidden).reshape(split)
        key = nn.Dense(d, use_bias=False, name="k_proj")(hidden).reshape(split)
        value = nn.Dense(d, use_bias=False, name="v_proj")(hidden).reshape(split)

        sincos = jnp.take(jnp.asarray(self.embed_positions), position_ids, axis=0)
        sin, cos = jnp.split(sincos, 2, axis=-1)
        r = self.rotary_dim
        key = jnp.concatenate([apply_rotary(key[..., :r], sin, cos), key[..., r:]], axis=-1)
        query = jnp.concatenate([apply_rotary(query[..., :r], sin, cos), query[..., r:]], axis=-1)

        causal_mask = nn.make_causal_mask(position_ids, dtype="bool")
        bias = jax.lax.select(
            jnp.broadcast_to(causal_mask, (hidden.shape[0], 1, *causal_mask.shape[2:])),
            jnp.full((hidden.shape[0], 1, *causal_mask.shape[2:]), 0.0),
            jnp.full((hidden.shape[0], 1, *causal_mask.shape[2:]), jnp.finfo(jnp.float32).min),
        )
        weights = nn.dot_product_attention_weights(query, key, bias=bias, deterministic=True)
        out = jnp.einsum("...hqk,...khd->...qhd", weights, value)
        return nn.Dense(d, use_bias=False, name="out_proj")(out.reshape(hidden.shape))


class JBlock(nn.Module):
    n_head: int

    @nn.compact
    def __call__(self, hidden: jax.Array, position_ids: jax.Array) -> jax.Array:
        residual = hidden
        hidden = nn.LayerNorm(epsilon=1e-5, name="ln_1")(hidden)
        attn = JAttention(self.n_head, rotary_dim=8, name="attn")(hidden, position_ids)
        ff = nn.gelu(nn.Dense(4 * hidden.shape[-1], name="fc_in")(hidden))
        ff = nn.Dense(hidden.shape[-1], name="fc_out")(ff)
        return attn + ff + residual


class JForCausalLM(nn.Module):
    n_embd: int = 64
    n_head: int = 4
    n_layer: int = 3

    @nn.compact
    def __call__(self, input_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        wte = nn.Embed(VOCAB_SIZE, self.n_embd, embedding_init=nn.initializers.normal(stddev=0.8), name="wte")
        hidden = wte(input_ids)
        for i in range(self.n_layer):
            hidden = JBlock(self.n_head, name=f"h_{i}")(hidden, position_ids)
        hidden = nn.LayerNorm(epsilon=1e-5, name="ln_f")(hidden)
        bias = nn.initializers.normal(0.1)
        return nn.Dense(VOCAB_SIZE, bias_init=bias, name="lm_head")(hidden)


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params)."""
    module = JForCausalLM()
    ids = jnp.ones((2, 3), dtype="i4")
    params = jax.jit(module.init)(jax.random.PRNGKey(seed), ids, jnp.broadcast_to(jnp.arange(3), (2, 3)))[
        "params"
    ]

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return module.apply({"params": params}, tokens, positions)

    return fn, params
