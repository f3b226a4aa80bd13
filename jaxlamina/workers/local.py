"""Split execution in one process: the loop over slices, and what crosses between the two workers.

Knows one model worker and one attention worker, and which device each is on. Only q, k, v go over and only
attention output comes back. With both on one device a slice is one call; on two, q is sent before k and v
are computed (Lamina 2025, §4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlamina.workers.attention_worker import AttentionSpec, AttentionWorker
from jaxlamina.workers.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.model_worker import (
    BoundModel,
    Context,
    ModelFn,
    ModelWorker,
    Params,
    Partial,
    PrefillSlice,
    combined,
)
from jaxlamina.workers.programs import Programs
from splitter import SplitReport


class LocalExecutor:
    """Runs steps slice by slice over a model worker and an attention worker.

    ``q_first``: send q before k and v are computed, at one call more a layer; by default where the workers are
    on different devices.
    """

    def __init__(
        self,
        model: ModelFn,
        params: Params,
        *,
        n_slots: Callable[[tuple[AttentionSpec, ...], jax.Device], int] | int,
        model_device: jax.Device,
        attention_device: jax.Device,
        q_first: bool | None = None,
    ) -> None:
        self.programs = Programs()
        self.model = ModelWorker(model, params, model_device, self.programs)
        one_row = self.model.split(1)
        self.report: SplitReport = one_row.report()
        specs = tuple(AttentionSpec.of(site) for site in one_row.sites)
        self.n_slots = n_slots if isinstance(n_slots, int) else n_slots(specs, attention_device)
        self.attention = AttentionWorker(specs, self.n_slots, attention_device, self.programs)
        self.q_first = model_device != attention_device if q_first is None else q_first
        self._apart = model_device != attention_device
        self._zero_after = jax.jit(zero_after)
        self._combined = jax.jit(combined, static_argnums=1)

    @property
    def device(self) -> jax.Device:
        """Where logits are."""
        return self.model.device

    def decode(self, batch: DecodeBatch) -> jax.Array:
        """One token more for each row: logits ``[B, V]`` float32."""
        model, attention = self.model.decode(len(batch.tokens)), self.attention
        context = model.first_context(*jax.device_put((batch.tokens, batch.positions), self.device))
        attention.begin_decode(batch)
        out = None
        for i, part in enumerate(model.slices):
            if self.q_first:
                q, rest = part.q_part(part.weights, context, out)
                q, tie = self._send_q(q)
                k, v, context = part.kv_part(part.weights, rest, tie)
            else:
                q, k, v, context = part.whole(part.weights, context, out)
                q = self._to_attention(q)
            out = self._to_model(attention.attend(i, q, self._to_attention(k), self._to_attention(v)))
        return model.final(model.final_weights, context, out)

    def prefill(self, batch: PrefillBatch) -> jax.Array:
        """Prompts or what follows stored tokens, KV stored: logits ``[B, V]`` after each row's last token."""
        model = self.model.prefill(*batch.tokens.shape)
        inputs = jax.device_put((batch.tokens, batch.positions, batch.logits_at), self.device)
        context = model.first_context(*inputs)
        self.attention.begin_prefill(batch)
        if batch.has_earlier:
            out, context = self._after_stored(model, context)
        else:
            out, context = self._from_first(model, context)
        return model.final(model.final_weights, context, out)

    def _from_first(
        self, model: BoundModel[PrefillSlice], context: Context
    ) -> tuple[jax.Array | None, Context]:
        """The slices over whole prompts: their attention needs nothing that is stored."""
        out = None
        for i, part in enumerate(model.slices):
            out, k, v, context = part.whole(part.weights, context, out)
            self.attention.append(i, self._to_attention(k), self._to_attention(v))
        return out, context

    def _after_stored(
        self, model: BoundModel[PrefillSlice], context: Context
    ) -> tuple[jax.Array | None, Context]:
        """The slices over the rest of prompts: each layer's attention is its own partial and the stored tokens'."""
        partials: tuple[Partial, ...] = ()
        for i, part in enumerate(model.slices):
            q, own, k, v, context = part.chunk(part.weights, context, partials)
            stored = self.attention.attend_stored(i, self._to_attention(q))
            self.attention.append(i, self._to_attention(k), self._to_attention(v))
            partials = own, self._to_model(stored)
        return self._combined(partials, self.attention.specs[-1]), context

    def _send_q(self, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """q at the attention worker, and the tie for k and v: a scalar that is there only once q is."""
        return self._to_attention(q), self._zero_after(q)

    def _to_attention(self, x: jax.Array) -> jax.Array:
        return jax.device_put(x, self.attention.device) if self._apart else x

    def _to_model(self, x: Any) -> Any:
        return jax.device_put(x, self.model.device) if self._apart else x


def zero_after(q: jax.Array) -> jax.Array:
    """A float32 0 that depends on ``q``, whatever is in it (NaN × 0 would be NaN)."""
    return jnp.where(jnp.isnan(q.reshape(-1)[0]), 0.0, 0.0).astype(jnp.float32)
