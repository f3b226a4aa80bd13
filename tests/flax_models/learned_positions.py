"""GPT-2 in Linen, close to how the PyTorch one is often ported: learned positions by an arange made inside,
the causal mask a stored [1, 1, MAX_LEN, MAX_LEN] buffer that is sliced to T, one qkv projection, output
head tied to the embedding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

VOCAB_SIZE = 111
MAX_LEN = 128


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    block_size: int = MAX_LEN
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48
    dropout: float = 0.1


class CausalSelfAttention(nn.Module):
    config: GPTConfig

    def setup(self) -> None:
        c = self.config
        self.c_attn = nn.Dense(3 * c.n_embd)
        self.c_proj = nn.Dense(c.n_embd)
        self.attn_dropout = nn.Dropout(c.dropout)
        self.bias = np.tril(np.ones((c.block_size, c.block_size), np.float32)).reshape(
            1, 1, c.block_size, c.block_size
        )

    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        B, T, C = x.shape
        q, k, v = jnp.split(self.c_attn(x), 3, axis=2)
        k = k.reshape(B, T, self.config.n_head, C // self.config.n_head).swapaxes(1, 2)
        q = q.reshape(B, T, self.config.n_head, C // self.config.n_head).swapaxes(1, 2)
        v = v.reshape(B, T, self.config.n_head, C // self.config.n_head).swapaxes(1, 2)
        att = (q @ k.swapaxes(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        att = jnp.where(self.bias[:, :, :T, :T] == 0, float("-inf"), att)
        att = nn.softmax(att, axis=-1)
        att = self.attn_dropout(att, deterministic=deterministic)
        y = att @ v
        y = y.swapaxes(1, 2).reshape(B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        x = nn.Dense(4 * self.config.n_embd, name="c_fc")(x)
        x = nn.gelu(x, approximate=True)
        x = nn.Dense(self.config.n_embd, name="c_proj")(x)
        return nn.Dropout(self.config.dropout)(x, deterministic=deterministic)


class Block(nn.Module):
    config: GPTConfig

    def setup(self) -> None:
        self.ln_1 = nn.LayerNorm()
        self.attn = CausalSelfAttention(self.config)
        self.ln_2 = nn.LayerNorm()
        self.mlp = MLP(self.config)

    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        x = x + self.attn(self.ln_1(x), deterministic)
        return x + self.mlp(self.ln_2(x), deterministic)


class GPT(nn.Module):
    config: GPTConfig

    def setup(self) -> None:
        c = self.config
        self.wte = nn.Embed(c.vocab_size, c.n_embd, embedding_init=nn.initializers.normal(c.n_embd**-0.5))
        self.wpe = nn.Embed(c.block_size, c.n_embd, embedding_init=nn.initializers.normal(c.n_embd**-0.5))
        self.h = [Block(c) for _ in range(c.n_layer)]
        self.ln_f = nn.LayerNorm()

    def __call__(self, idx: jax.Array, deterministic: bool = True) -> jax.Array:
        T = idx.shape[1]
        assert T <= self.config.block_size, "the sequence is longer than the table of positions"
        pos = jnp.arange(0, T)[None]
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x, deterministic)
        return self.wte.attend(self.ln_f(x))


def build(seed: int = 0) -> tuple[Callable[..., jax.Array], Any]:
    """Returns (fn, params); fn does not read its positions."""
    model = GPT(GPTConfig())
    params = jax.jit(model.init)(jax.random.PRNGKey(seed), jnp.zeros((1, 1), jnp.int32))["params"]

    def fn(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        del positions
        return model.apply({"params": params}, tokens)

    return fn, params
