"""One layer's attention of prompts over KV slots of the same device, as unsplit steps and prefill workers at
their own pace compute it. Knows arrays; no model and no request."""

from __future__ import annotations

import jax
from jaxtyping import Float, Int32

from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import Pool, append, causal_attention, causal_partial, combine, partial_attention


def prompt_attention(
    spec: AttentionSpec,
    q: Float[jax.Array, "B T N H"],
    k: Float[jax.Array, "B T K H"],
    v: Float[jax.Array, "B T K H"],
    k_pool: Pool,
    v_pool: Pool,
    slots: Int32[jax.Array, "B T"],
    slot_table: Int32[jax.Array, "B C"],
    lengths: Int32[jax.Array, " B"],
) -> tuple[Pool, Pool, Float[jax.Array, "B T N H"]]:
    """One layer of prompts, or of what follows stored tokens: the pools with their tokens, and the
    attention."""
    new_k, new_v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    k_pool, v_pool = append(k_pool, v_pool, new_k, new_v, slots.reshape(-1))
    if not slot_table.shape[1]:
        return k_pool, v_pool, causal_attention(q, k, v, **spec.scoring)
    own = causal_partial(q, k, v, **spec.scoring)
    stored = partial_attention(q, k_pool, v_pool, slot_table, lengths, **spec.scoring)
    return k_pool, v_pool, combine(*zip(own, stored, strict=True))[0].astype(q.dtype)
