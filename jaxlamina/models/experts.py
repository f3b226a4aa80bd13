"""Mixture of experts: a router picks a few of a layer's MLPs for each token (Mixtral, Qwen3-MoE).

Knows arrays; knows nothing of configurations' files or of slicing. All of it stays inside one slice, and no
shape depends on the data.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlamina.models.config import ModelConfig
from jaxlamina.models.layers import Linear, Make, activated
from pallas_kernels import exact

# Rows of a CPU's blocks: the first that is no less than rows per expert, else the last. docs/findings.md has
# the figures.
_BLOCK_ROWS = (1, 8, 32)


class Experts(nnx.Module):
    """E gated MLPs, D -> F -> D: `gate_proj` and `up_proj` [E, F, D], `down_proj` [E, D, F]."""

    def __init__(self, config: ModelConfig, *, make: Make) -> None:
        e, d, f = config.n_experts, config.hidden_size, config.expert_size
        self.act = config.hidden_act
        self.gate_proj = nnx.Param(make("matrix", (e, f, d)))
        self.up_proj = nnx.Param(make("matrix", (e, f, d)))
        self.down_proj = nnx.Param(make("matrix", (e, d, f)))

    def __call__(self, x: jax.Array, shares: jax.Array, chosen: jax.Array) -> jax.Array:
        """x [M, D], shares float32 and numbers [M, k] of the experts chosen for each row -> [M, D]."""
        return (self.only_chosen if jax.default_backend() == "cpu" else self.every)(x, shares, chosen)

    def every(self, x: jax.Array, shares: jax.Array, chosen: jax.Array) -> jax.Array:
        """Every expert computes every row, those that were not chosen for a share of 0.

        That is E / k times the work, in products so large that an accelerator is faster at them than at
        sorted rows.
        """
        gate, up, down = self.gate_proj[...], self.up_proj[...], self.down_proj[...]
        precision = exact(gate.dtype)
        of_expert = jnp.sum(jax.nn.one_hot(chosen, len(gate)) * shares[:, :, None], axis=1)  # [M, E]
        hidden = activated(self.act, jnp.einsum("md,efd->emf", x, gate, precision=precision))
        hidden = hidden * jnp.einsum("md,efd->emf", x, up, precision=precision)
        hidden = (hidden * of_expert.T[:, :, None]).astype(x.dtype)
        return jnp.einsum("emf,edf->md", hidden, down, precision=precision)

    def only_chosen(self, x: jax.Array, shares: jax.Array, chosen: jax.Array) -> jax.Array:
        """Only chosen experts compute, and their rows alone, which are sorted by expert."""
        experts = chosen.reshape(-1)
        order = jnp.argsort(experts)
        rows = jnp.take(x, order // chosen.shape[1], axis=0, mode="clip")
        rows = self._in_blocks(rows, jnp.bincount(experts, length=self.gate_proj.shape[0]))
        found = jnp.take(rows, jnp.argsort(order), axis=0, mode="clip").reshape(*chosen.shape, -1)
        return jnp.sum(found * shares[:, :, None], axis=1).astype(x.dtype)

    def _in_blocks(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """rows [M, D] sorted by expert, sizes [E] rows of each -> [M, D].

        A loop over blocks of one expert's rows, as many as there are. A block that ends among the next
        expert's rows writes there what that expert's own block overwrites. XLA's CPU code reads a matrix for
        one row where it lies in its stack, and copies it out for more; so few rows go one by one.
        """
        block = next((n for n in _BLOCK_ROWS if len(rows) <= n * len(sizes)), _BLOCK_ROWS[-1])
        blocks = (sizes + block - 1) // block
        block_ends, row_ends = jnp.cumsum(blocks), jnp.cumsum(sizes)
        padded = jnp.pad(rows, ((0, block - 1), (0, 0)))

        def product(x: jax.Array, weights: nnx.Param, expert: jax.Array) -> jax.Array:
            w = jax.lax.dynamic_index_in_dim(weights[...], expert, keepdims=False)
            return jnp.matmul(x, w.T, precision=exact(w.dtype))

        def one(i: jax.Array, found: jax.Array) -> jax.Array:
            expert = jnp.sum(block_ends <= i)
            within = i - (block_ends[expert] - blocks[expert])
            start = row_ends[expert] - sizes[expert] + within * block
            x = jax.lax.dynamic_slice_in_dim(padded, start, block)
            hidden = activated(self.act, product(x, self.gate_proj, expert))
            y = product(hidden * product(x, self.up_proj, expert), self.down_proj, expert)
            return jax.lax.dynamic_update_slice_in_dim(found, y, start, 0)

        return jax.lax.fori_loop(0, block_ends[-1], one, jnp.zeros_like(padded))[: len(rows)]


class SparseMLP(nnx.Module):
    """Router `gate` [E, D] and `experts`: the sum of each token's `experts_per_token` likeliest experts'
    results, weighted by their probabilities."""

    def __init__(self, config: ModelConfig, *, make: Make) -> None:
        self.per_token = config.experts_per_token
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.n_experts, bias=False, make=make)
        self.experts = Experts(config, make=make)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]; a token's result depends on no other token."""
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = jax.lax.top_k(jax.nn.softmax(self.gate(flat).astype(jnp.float32)), self.per_token)
        if self.norm_topk_prob:
            shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        return self.experts(flat, shares, chosen).reshape(x.shape)
