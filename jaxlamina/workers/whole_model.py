"""A whole model over KV slots of the same device, as unsplit steps and prefill workers at their own pace run
it: each layer's attention in the pools, and a prompt's logits. Knows arrays; no slot's owner and no
request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Float, Int32

from jaxlamina.workers.model_worker import Like, ModelFn, Params, trace_step
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.streamed import Filled
from pallas_kernels import Pool, append, causal_attention, causal_partial, combine, partial_attention

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


def attend_in_pools(
    kernel_of: Callable[[AttentionSpec], Callable[..., Any]],
    specs: Sequence[AttentionSpec],
    k_pools: list[Pool],
    v_pools: list[Pool],
    *given: Any,
) -> Attend:
    """Attention of each layer by ``kernel_of`` its spec, which takes ``q, k, v, k_pool, v_pool, *given`` and
    gives both pools with the new tokens, which take the old ones' place in the lists, and the output."""
    # jitted, so that equal layers' attention is traced and lowered once
    kernels = {spec: jax.jit(kernel_of(spec)) for spec in dict.fromkeys(specs)}

    def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layer = kernels[specs[i]]
        k_pools[i], v_pools[i], out = layer(q, k, v, k_pools[i], v_pools[i], *given)
        return out

    return attend


def prompt_logits(
    model: ModelFn,
    like: Mapping[str, Like],
    device: jax.Device,
    attend: Attend,
    params: Params,
    tokens: Int32[jax.Array, "B T"],
    positions: Int32[jax.Array, "B T"],
    logits_at: Int32[jax.Array, " B"],
    *,
    of_all: bool,
) -> Float[jax.Array, "B ... V"]:
    """The model's logits at ``logits_at``, or ``of_all`` tokens. ``device``: by which kernels are picked."""
    traced = trace_step(model, like, *tokens.shape, of_all=of_all)
    inputs = (tokens, positions) if of_all else (tokens, positions, logits_at)
    with jax.default_device(device):
        logits = traced.eval(params, *inputs, attend=attend)
    return logits if of_all else logits[:, -1]


def filled(*args: Any) -> Filled | None:
    """Of a program of prompts, by its arguments: parameters, pools, tokens, positions, logits_at, …"""
    tokens, _, logits_at = args[3:6]
    return Filled.of(tokens, logits_at)


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
