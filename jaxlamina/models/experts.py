"""Mixture of experts: a router picks a few of a layer's MLPs for each token (Mixtral, Qwen3-MoE).

Knows arrays; knows nothing of configurations' files or of slicing. All of it stays inside one slice. No shape
depends on the data: tokens are sorted by expert, and how many each expert has is a value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlamina.models.config import ModelConfig
from jaxlamina.models.layers import Linear, Make, activated
from pallas_kernels import exact

# On a CPU up to this many rows per expert go one by one: XLA reads a matrix for one row where it lies, and
# copies it out of its stack for more. Beyond it, blocks of rows pay the copy back. docs/findings.md has the
# figures.
_ONE_BY_ONE = 4
_BLOCK_ROWS = 32


class Experts(nnx.Module):
    """E gated MLPs, D -> F -> D: `gate_proj` and `up_proj` [E, F, D], `down_proj` [E, D, F]."""

    def __init__(self, config: ModelConfig, *, make: Make) -> None:
        e, d, f = config.n_experts, config.hidden_size, config.expert_size
        self.act = config.hidden_act
        self.gate_proj = nnx.Param(make("matrix", (e, f, d)))
        self.up_proj = nnx.Param(make("matrix", (e, f, d)))
        self.down_proj = nnx.Param(make("matrix", (e, d, f)))

    def __call__(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """rows [M, D] sorted by expert, sizes [E] rows of each -> [M, D]."""
        weights = self.gate_proj[...], self.up_proj[...], self.down_proj[...]
        if jax.default_backend() == "cpu":
            return _in_blocks(rows, sizes, *weights, act=self.act)
        gate, up, down = weights
        hidden = activated(self.act, _ragged(rows, gate, sizes)) * _ragged(rows, up, sizes)
        return _ragged(hidden, down, sizes)


class SparseMLP(nnx.Module):
    """Router `gate` [E, D] and `experts`: the sum of each token's `experts_per_token` likeliest experts'
    results, weighted by their probabilities."""

    def __init__(self, config: ModelConfig, *, make: Make) -> None:
        self.n_experts, self.per_token = config.n_experts, config.experts_per_token
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.n_experts, bias=False, make=make)
        self.experts = Experts(config, make=make)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]; a token's result depends on no other token."""
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.route(flat)
        experts = chosen.reshape(-1)
        order = jnp.argsort(experts)
        sizes = jnp.sum(experts[:, None] == jnp.arange(self.n_experts), axis=0, dtype=jnp.int32)
        rows = self.experts(jnp.take(flat, order // self.per_token, axis=0, mode="clip"), sizes)
        found = jnp.take(rows, jnp.argsort(order), axis=0, mode="clip").reshape(*chosen.shape, -1)
        return jnp.sum(found * shares[:, :, None], axis=1).astype(x.dtype).reshape(x.shape)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[M, D] -> shares float32 [M, k] and numbers [M, k] of the k likeliest experts."""
        shares, chosen = jax.lax.top_k(jax.nn.softmax(self.gate(x).astype(jnp.float32)), self.per_token)
        if self.norm_topk_prob:
            shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        return shares, chosen


def _ragged(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """rows [M, in] sorted by expert, weights [E, out, in], sizes [E] -> [M, out]."""
    return jax.lax.ragged_dot_general(
        rows,
        weights,
        sizes,
        jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0]),
        precision=exact(weights.dtype),
    )


def _in_blocks(
    rows: jax.Array,
    sizes: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    act: str,
) -> jax.Array:
    """The same three products, block by block of one expert's rows: as many blocks as there are.

    A block that ends in another expert's rows writes there what that expert's own block overwrites.
    """
    n_rows, block = len(rows), 1 if len(rows) <= _ONE_BY_ONE * len(sizes) else _BLOCK_ROWS
    blocks = (sizes + block - 1) // block
    block_ends, row_ends = jnp.cumsum(blocks), jnp.cumsum(sizes)
    padded = jnp.pad(rows, ((0, block - 1), (0, 0)))

    def product(x: jax.Array, weights: jax.Array, expert: jax.Array) -> jax.Array:
        w = jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        return jnp.matmul(x, w.T, precision=exact(w.dtype))

    def one(i: jax.Array, found: jax.Array) -> jax.Array:
        expert = jnp.sum(block_ends <= i)
        within = i - (block_ends[expert] - blocks[expert])
        start = row_ends[expert] - sizes[expert] + within * block
        x = jax.lax.dynamic_slice_in_dim(padded, start, block)
        hidden = activated(act, product(x, gate, expert)) * product(x, up, expert)
        return jax.lax.dynamic_update_slice_in_dim(found, product(hidden, down, expert), start, 0)

    return jax.lax.fori_loop(0, block_ends[-1], one, jnp.zeros_like(padded))[:n_rows]
