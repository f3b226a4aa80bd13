"""One attention worker: KV of every layer in token-granular slots, append, and the attention operator.

Holds KV and nothing else. It sees q, k and v arrive and sends attention output back; it knows no weight, no
token and no request, only rows of slot numbers that the scheduler's allocator dealt out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.kv_pools import KVPools, Slots, as_slots
from jaxlamina.workers.programs import Programs
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from jaxlamina.workers.workspace import LargestStep, ints, pool_shapes, program_bytes
from pallas_kernels import Pool, append, decode_attention, partial_attention

Partial = tuple[jax.Array, jax.Array]  # out float32 [B, T, N, H], lse float32 [B, T, N]


class AttentionWorker:
    """KV pools of all layers on one device. ``begin_*`` once a step, then ``attend`` or ``append`` a layer.

    By itself it is the whole memory pool (an `AttentionPool` of one); `attention_pool` puts several together.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        n_slots: int,
        device: jax.Device,
        programs: Programs,
        *,
        channel_scales: Sequence[ChannelScales] | None = None,
        n_host_slots: int = 0,
    ) -> None:
        self.specs = tuple(specs)
        self.n_slots = n_slots
        self.device = device
        self.kv = KVPools(specs, n_slots, device, channel_scales=channel_scales, n_host_slots=n_host_slots)
        # Taken now: a step gives the pools away, and another thread may ask meanwhile.
        self._pools_like = [jax.tree.map(_like, pools) for pools in zip(self.kv.k, self.kv.v, strict=True)]
        distinct = dict.fromkeys(self.specs)
        attends = {spec: jit_attend(spec, device, programs) for spec in distinct}
        stored = {spec: jit_attend_stored(spec, device, programs) for spec in distinct}
        # A layer's programs: `attend`, `attend_stored`, `append`.
        self.attends = [attends[spec] for spec in self.specs]
        self.attends_stored = [stored[spec] for spec in self.specs]
        self.stores = jit_append(programs)
        self._table: tuple[jax.Array, ...] = ()  # slot table [B, C], lengths [B]
        self._new_slots: Any = None
        self._q_positions: dict[int, jax.Array] = {}

    @property
    def workers(self) -> tuple[AttentionWorker, ...]:
        return (self,)

    def pools_like(self, i: int) -> tuple[Any, Any]:
        """The shapes of layer i's pools, which programs that are only lowered are given."""
        return self._pools_like[i]

    def begin_decode(self, batch: DecodeBatch) -> None:
        """Takes in the step's slot table, lengths and new slots: one transfer for all layers."""
        self.begin(batch.slot_table, batch.lengths, batch.new_slots)

    def begin_prefill(self, batch: PrefillBatch) -> None:
        """Takes in where the prompts' KV will go, and where that of their earlier tokens is."""
        self.begin(batch.slot_table, batch.lengths, batch.slots.reshape(-1))

    def begin(
        self,
        slot_table: np.ndarray,
        lengths: np.ndarray,
        new_slots: np.ndarray,
        q_positions: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """A step's inputs: slot_table ``[B, C]``, lengths ``[B]``, new_slots ``[M]``.

        ``q_positions``: window → ``[B, T]``, for tables that do not hold the token at position c in column c.
        """
        arrays = slot_table, lengths, new_slots, dict(q_positions or {})
        *table, self._new_slots, self._q_positions = jax.device_put(arrays, self.device)
        self._table = tuple(table)

    def send_q(self, q: jax.Array) -> jax.Array:
        """q on this worker's device."""
        return jax.device_put(q, self.device)

    def send_kv(self, x: jax.Array) -> jax.Array:
        """k or v on this worker's device."""
        return jax.device_put(x, self.device)

    def attend(self, i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Layer i: stores the new tokens' k, v ``[B, 1, K, H]`` and attends q ``[B, 1, N, H]`` over all tokens."""
        kv = self.kv
        kv.k[i], kv.v[i], out = self.attends[i](kv.k[i], kv.v[i], q, k, v, *self._table, self._new_slots)
        return out

    def append(self, i: int, k: jax.Array, v: jax.Array) -> None:
        """Layer i: stores k, v ``[..., K, H]``, as many tokens as new slots; padding is dropped."""
        kv = self.kv
        kv.k[i], kv.v[i] = self.stores(kv.k[i], kv.v[i], k, v, self._new_slots)

    def attend_stored(self, i: int, q: jax.Array) -> Partial:
        """Layer i: q ``[B, T, N, H]`` over the rows' earlier tokens.

        Returns float32 (out ``[B, T, N, H]``, lse ``[B, T, N]``), to be combined with the new tokens' own.
        """
        window = self.specs[i].window
        q_positions = None if window is None else self._q_positions.get(window)
        return self.attends_stored[i](q, self.kv.k[i], self.kv.v[i], *self._table, q_positions)

    def copy_slots(self, src: Slots, dst: Slots) -> None:
        """Slot ``src[i]``'s KV of all layers also into ``dst[i]``; no slot may be in both."""
        self.kv.copy_slots(as_slots(src), as_slots(dst))

    def move_out(self, slots: Slots, host_slots: Slots) -> None:
        """Copies the KV of ``slots`` into the host's ``host_slots``."""
        self.kv.move_out(as_slots(slots), as_slots(host_slots))

    def move_in(self, host_slots: Slots, slots: Slots) -> None:
        """Brings the host's ``host_slots`` back into ``slots``, and empties them."""
        self.kv.move_in(as_slots(host_slots), as_slots(slots))

    def release(self, slots: Slots) -> None:
        """``slots`` are free now: nothing to do where a slot has one place for ever."""


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def jit_attend(
    spec: AttentionSpec, device: jax.Device, programs: Programs
) -> Callable[..., tuple[Pool, Pool, jax.Array]]:
    """A decode step's attention, pools donated: ``(k_pool, v_pool, q, k, v, slot_table, lengths, new_slots)``."""

    def attend(
        k_pool: Pool,
        v_pool: Pool,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        slot_table: jax.Array,
        lengths: jax.Array,
        new_slots: jax.Array,
    ) -> tuple[Pool, Pool, jax.Array]:
        programs.compiled(f"attend, batch {q.shape[0]}, context {slot_table.shape[1]}")
        with jax.default_device(device):  # kernels are picked by it
            return decode_attention(q, k, v, k_pool, v_pool, slot_table, lengths, new_slots, **spec.scoring)

    return jax.jit(attend, donate_argnums=(0, 1))


def jit_attend_stored(spec: AttentionSpec, device: jax.Device, programs: Programs) -> Callable[..., Partial]:
    """A partial over stored tokens: ``(q, k_pool, v_pool, slot_table, lengths, q_positions or None)``."""

    def attend_stored(
        q: jax.Array,
        k_pool: Pool,
        v_pool: Pool,
        slot_table: jax.Array,
        lengths: jax.Array,
        q_positions: jax.Array | None,
    ) -> Partial:
        shape = f"batch {q.shape[0]} × {q.shape[1]}, context {slot_table.shape[1]}"
        programs.compiled(f"attend stored tokens, {shape}")
        with jax.default_device(device):
            out, lse = partial_attention(
                q, k_pool, v_pool, slot_table, lengths, q_positions=q_positions, **spec.scoring
            )
        return out, lse

    return jax.jit(attend_stored)


def jit_append(programs: Programs) -> Callable[..., tuple[Pool, Pool]]:
    """Stores ``(k_pool, v_pool, k, v, slots [M])``, pools donated; k and v ``[..., K, H]`` hold M tokens."""

    def store(k_pool: Pool, v_pool: Pool, k: jax.Array, v: jax.Array, slots: jax.Array) -> tuple[Pool, Pool]:
        programs.compiled(f"append, {slots.shape[0]} tokens")
        return append(k_pool, v_pool, k.reshape(-1, *k.shape[-2:]), v.reshape(-1, *v.shape[-2:]), slots)

    return jax.jit(store, donate_argnums=(0, 1))


def attention_workspace_bytes(
    specs: Sequence[AttentionSpec], n_query_heads: Sequence[int], device: jax.Device, largest: LargestStep
) -> int:
    """What a layer's attention of the largest step takes beside KV, its q, k, v and results counted."""
    b, c, t = largest.batch, largest.context, largest.prompt
    found = []
    for spec, n in dict.fromkeys(zip(specs, n_query_heads, strict=True)):
        pool, head = pool_shapes(spec), spec.head_dim
        q, k = ((b, 1, heads, head) for heads in (n, spec.n_kv_heads))
        qkv = [jax.ShapeDtypeStruct(shape, spec.dtype) for shape in (q, k, k)]
        decode = program_bytes(
            jit_attend(spec, device, Programs()), pool, pool, *qkv, ints(b, c), ints(b), ints(b)
        )
        found.append(decode + sum(x.size for x in qkv) * spec.dtype.itemsize)
        kv = jax.ShapeDtypeStruct((1, t, spec.n_kv_heads, head), spec.dtype)
        stored = program_bytes(jit_append(Programs()), pool, pool, kv, kv, ints(t))
        found.append(stored + 2 * kv.size * spec.dtype.itemsize)
        half = -(-t // 2)  # of a prompt whose first half is stored: there are never more scores than that
        chunk = jax.ShapeDtypeStruct((1, half, n, head), spec.dtype)
        function = jit_attend_stored(spec, device, Programs())
        needs = program_bytes(function, chunk, pool, pool, ints(1, half), ints(1), None)
        found.append(needs + chunk.size * spec.dtype.itemsize)
    return max(found)
