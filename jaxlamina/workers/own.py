"""A chunk's attention over itself as a partial. Knows arrays only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import partial_attention


def causal_partial(q: jax.Array, k: jax.Array, v: jax.Array, **scoring: Any) -> tuple[jax.Array, jax.Array]:
    """q `[B, T, N, H]`, k and v `[B, T, K, H]` -> (out `[B, T, N, H]`, lse `[B, T, N]`)."""
    b, t = q.shape[:2]
    table = jnp.arange(b * t, dtype=jnp.int32).reshape(b, t)
    at = jnp.broadcast_to(jnp.arange(t), (b, t))
    flat = [x.reshape(-1, *x.shape[2:]) for x in (k, v)]
    out, lse = partial_attention(q, *flat, table, jnp.full(b, t), q_positions=at, **scoring)
    return out.astype(jnp.float32), lse
