"""Unsplit execution, to compare with: one program a step, weights and KV on one device.

Same kernels, same KV slots, same batches as split execution; what differs is that nothing is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxlamina.workers.attention_worker import AttentionSpec, make_pools
from jaxlamina.workers.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.model_worker import ModelFn, Params, trace_step
from jaxlamina.workers.own import causal_partial
from jaxlamina.workers.programs import Programs
from pallas_kernels import append, causal_attention, combine, decode_attention, partial_attention
from splitter import SplitReport, split


class UnsplitExecutor:
    """Runs whole steps as single jitted calls; interface as ``LocalExecutor``."""

    def __init__(
        self,
        model: ModelFn,
        params: Params,
        *,
        n_slots: Callable[[tuple[AttentionSpec, ...], jax.Device], int] | int,
        device: jax.Device,
    ) -> None:
        self.programs = Programs()
        self.device = device
        self.params = jax.device_put(dict(params), device)
        self._model = model
        one_row = split(trace_step(model, self.params, 1, 1))
        self.report: SplitReport = one_row.report()
        self.specs = tuple(AttentionSpec.of(site) for site in one_row.sites)
        self.n_slots = n_slots if isinstance(n_slots, int) else n_slots(self.specs, device)
        self.k_pools, self.v_pools = make_pools(self.specs, self.n_slots, device)
        self._decode = jax.jit(self._traced_decode, donate_argnums=(1, 2))
        self._prefill = jax.jit(self._traced_prefill, donate_argnums=(1, 2))

    def decode(self, batch: DecodeBatch) -> jax.Array:
        """One token more for each row: logits ``[B, V]`` float32."""
        self.k_pools, self.v_pools, logits = self._decode(self.params, self.k_pools, self.v_pools, *batch)
        return logits

    def prefill(self, batch: PrefillBatch) -> jax.Array:
        """Prompts or what follows stored tokens, KV stored: logits ``[B, V]`` after each row's last token."""
        self.k_pools, self.v_pools, logits = self._prefill(self.params, self.k_pools, self.v_pools, *batch)
        return logits

    def _traced_decode(
        self,
        params: Params,
        k_pools: list[jax.Array],
        v_pools: list[jax.Array],
        tokens: jax.Array,
        positions: jax.Array,
        slot_table: jax.Array,
        lengths: jax.Array,
        new_slots: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        self.programs.compiled(f"whole step, batch {len(tokens)}, context {slot_table.shape[1]}")
        k_pools, v_pools = list(k_pools), list(v_pools)

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            k_pools[i], v_pools[i], out = decode_attention(
                q, k, v, k_pools[i], v_pools[i], slot_table, lengths, new_slots, **self.specs[i].scoring
            )
            return out

        traced = trace_step(self._model, self.params, *tokens.shape)
        logits = traced.eval(params, tokens, positions, attend=attend)
        return k_pools, v_pools, logits[:, -1]

    def _traced_prefill(
        self,
        params: Params,
        k_pools: list[jax.Array],
        v_pools: list[jax.Array],
        tokens: jax.Array,
        positions: jax.Array,
        logits_at: jax.Array,
        slots: jax.Array,
        slot_table: jax.Array,
        lengths: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        context = slot_table.shape[1]
        after = f" after {context}" if context else ""
        self.programs.compiled(f"whole prefill {tokens.shape[0]} × {tokens.shape[1]} tokens{after}")
        k_pools, v_pools = list(k_pools), list(v_pools)

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            k_pools[i], v_pools[i] = append(
                k_pools[i],
                v_pools[i],
                k.reshape(-1, *k.shape[2:]),
                v.reshape(-1, *v.shape[2:]),
                slots.reshape(-1),
            )
            scoring = self.specs[i].scoring
            if not context:
                return causal_attention(q, k, v, **scoring)
            own = causal_partial(q, k, v, **scoring)
            stored = partial_attention(q, k_pools[i], v_pools[i], slot_table, lengths, **scoring)
            return combine(*zip(own, stored, strict=True))[0].astype(q.dtype)

        traced = trace_step(self._model, self.params, *tokens.shape)
        logits = traced.eval(params, tokens, positions, logits_at, attend=attend)
        return k_pools, v_pools, logits[:, -1]
