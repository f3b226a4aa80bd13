"""The memory pool's side: KV of every layer in token-granular slots, append, and the attention operator.

Holds KV and nothing else. It sees q, k and v arrive and sends attention output back; it knows no weight, no
token and no request, only rows of slot numbers that the scheduler's allocator dealt out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.workers.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.programs import Programs
from pallas_kernels import append, decode_attention, make_pool, partial_attention
from splitter import AttentionSite


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention is like: heads, and how scores are made. Equal specs share their programs."""

    n_kv_heads: int
    head_dim: int
    dtype: np.dtype
    scale: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, site: AttentionSite) -> AttentionSpec:
        """``UserError`` for an operator other than ``splitter.attention``: its mask is not known here."""
        if site.scale is None:
            raise UserError(
                f"attention {site.index} ({site.name}) is a {site.kind}; this runtime runs splitter.attention "
                "operators: call that in the model"
            )
        _, _, n_kv_heads, head_dim = site.k.shape
        dtype = np.dtype(site.k.dtype)
        return cls(n_kv_heads, head_dim, dtype, site.scale, site.window, site.softcap)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's K and V in this layer."""
        return 2 * self.n_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def scoring(self) -> dict[str, Any]:
        """The keyword arguments that the attention functions of ``pallas_kernels`` take."""
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap}


def make_pools(
    specs: Sequence[AttentionSpec], n_slots: int, device: jax.Device
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Empty K and V pools ``[S, K, H]``, one of each a layer, on ``device``."""
    with jax.default_device(device):
        k, v = ([make_pool(n_slots, s.n_kv_heads, s.head_dim, s.dtype) for s in specs] for _ in range(2))
    return k, v


class AttentionWorker:
    """KV pools of all layers on one device. ``begin_*`` once a step, then ``attend`` or ``append`` a layer."""

    def __init__(
        self, specs: Sequence[AttentionSpec], n_slots: int, device: jax.Device, programs: Programs
    ) -> None:
        self.specs = tuple(specs)
        self.n_slots = n_slots
        self.device = device
        self.k_pools, self.v_pools = make_pools(specs, n_slots, device)
        self._programs = programs
        attends = {spec: self._jit_attend(spec) for spec in dict.fromkeys(specs)}
        self._attends = [attends[spec] for spec in specs]
        stored = {spec: self._jit_attend_stored(spec) for spec in attends}
        self._attends_stored = [stored[spec] for spec in specs]
        self._append = jax.jit(self._traced_append, donate_argnums=(0, 1))
        self._step: tuple[jax.Array, ...] = ()

    def begin_decode(self, batch: DecodeBatch) -> None:
        """Takes in the step's slot table, lengths and new slots: one transfer for all layers."""
        self._step = tuple(jax.device_put((batch.slot_table, batch.lengths, batch.new_slots), self.device))

    def attend(self, i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Layer i: stores the new tokens' k, v ``[B, 1, K, H]`` and attends q ``[B, 1, N, H]`` over all tokens."""
        self.k_pools[i], self.v_pools[i], out = self._attends[i](
            self.k_pools[i], self.v_pools[i], q, k, v, *self._step
        )
        return out

    def begin_prefill(self, batch: PrefillBatch) -> None:
        """Takes in where the prompts' KV will go, and where that of their earlier tokens is."""
        arrays = batch.slots.reshape(-1), batch.slot_table, batch.lengths
        self._step = tuple(jax.device_put(arrays, self.device))

    def append(self, i: int, k: jax.Array, v: jax.Array) -> None:
        """Layer i: stores a prefill's k, v ``[B, T, K, H]``; padding is dropped."""
        self.k_pools[i], self.v_pools[i] = self._append(self.k_pools[i], self.v_pools[i], k, v, self._step[0])

    def attend_stored(self, i: int, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Layer i: a prefill's q ``[B, T, N, H]`` over the rows' earlier tokens.

        Returns float32 (out ``[B, T, N, H]``, lse ``[B, T, N]``), to be combined with the chunk's own.
        """
        return self._attends_stored[i](q, self.k_pools[i], self.v_pools[i], *self._step[1:])

    def _jit_attend(self, spec: AttentionSpec) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
        def attend(
            k_pool: jax.Array,
            v_pool: jax.Array,
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            slot_table: jax.Array,
            lengths: jax.Array,
            new_slots: jax.Array,
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            self._programs.compiled(f"attend, batch {q.shape[0]}, context {slot_table.shape[1]}")
            return decode_attention(q, k, v, k_pool, v_pool, slot_table, lengths, new_slots, **spec.scoring)

        return jax.jit(attend, donate_argnums=(0, 1))

    def _jit_attend_stored(self, spec: AttentionSpec) -> Callable[..., tuple[jax.Array, jax.Array]]:
        def attend_stored(
            q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, slot_table: jax.Array, lengths: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            shape = f"batch {q.shape[0]} × {q.shape[1]}, context {slot_table.shape[1]}"
            self._programs.compiled(f"attend stored tokens, {shape}")
            out, lse = partial_attention(q, k_pool, v_pool, slot_table, lengths, **spec.scoring)
            return out.astype(jax.numpy.float32), lse

        return jax.jit(attend_stored)

    def _traced_append(
        self, k_pool: jax.Array, v_pool: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        self._programs.compiled(f"append, {slots.shape[0]} tokens")
        return append(k_pool, v_pool, k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]), slots)
