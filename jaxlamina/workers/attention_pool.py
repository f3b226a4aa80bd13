"""The memory pool: one interface over one or several attention workers, whatever each of them keeps.

Knows how to cut q, k and v for the workers and to put their partials together. Which token is where is for
`jaxlamina.workers.partition` to say; arithmetic is the kernels'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.attention_worker import AttentionWorker, Partial
from jaxlamina.workers.kv_pools import Slots, as_slots, pieces
from jaxlamina.workers.partition import (
    Placement,
    RowsPlan,
    checked_partition,
    place_new,
    place_stored,
    plan_rows,
)
from jaxlamina.workers.programs import Programs
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from pallas_kernels import causal_partial, combine


class AttentionPool(Protocol):
    """All KV of S slots, by layer. A step: ``begin_*`` once, then per layer ``send_*`` and what follows.

    ``send_q`` and ``send_kv`` take the model's arrays ``[B, T, heads, H]``; what they return is for ``attend``
    and the others alone. Results are arrays ``[B, T, N, H]`` on any device.
    """

    specs: tuple[AttentionSpec, ...]
    n_slots: int

    @property
    def workers(self) -> tuple[AttentionWorker, ...]: ...

    def begin_decode(self, batch: DecodeBatch) -> None: ...

    def begin_prefill(self, batch: PrefillBatch) -> None: ...

    def send_q(self, q: jax.Array) -> Any: ...

    def send_kv(self, x: jax.Array) -> Any: ...

    def attend(self, i: int, q: Any, k: Any, v: Any) -> jax.Array: ...

    def append(self, i: int, k: Any, v: Any) -> None: ...

    def attend_stored(self, i: int, q: Any) -> Partial: ...

    def copy_slots(self, src: Slots, dst: Slots) -> None: ...

    def move_out(self, slots: Slots, host_slots: Slots) -> None: ...

    def move_in(self, host_slots: Slots, slots: Slots) -> None: ...

    def release(self, slots: Slots) -> None: ...


def attention_pool(
    specs: Sequence[AttentionSpec],
    n_slots: int,
    devices: Sequence[jax.Device],
    programs: Programs,
    *,
    model_device: jax.Device,
    partition: str = "heads",
    token_block: int = 16,
    channel_scales: Sequence[ChannelScales] | None = None,
    n_host_slots: int = 0,
) -> AttentionPool:
    """A pool of ``n_slots`` tokens over a worker for each of ``devices`` (which may repeat).

    ``token_block``: how many positions in a row stay together where tokens are divided. ``UserError`` for a
    partition that cannot be.
    """
    checked_partition(partition, len(devices), [spec.n_kv_heads for spec in specs])
    if len(devices) == 1:
        return AttentionWorker(
            specs, n_slots, devices[0], programs, channel_scales=channel_scales, n_host_slots=n_host_slots
        )
    if partition == "heads":
        return HeadsPool(specs, n_slots, devices, programs, model_device, channel_scales, n_host_slots)
    block = token_block if partition == "tokens" else None
    return PlacedPool(specs, n_slots, devices, programs, model_device, channel_scales, n_host_slots, block)


class HeadsPool:
    """Worker w of b holds KV heads w * K/b … (w+1) * K/b of every token: all workers do the same, side by side."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        n_slots: int,
        devices: Sequence[jax.Device],
        programs: Programs,
        model_device: jax.Device,
        channel_scales: Sequence[ChannelScales] | None,
        n_host_slots: int,
    ) -> None:
        self.specs = tuple(specs)
        self.n_slots = n_slots
        self._model_device = model_device
        b = len(devices)
        own_specs = [replace(spec, n_kv_heads=spec.n_kv_heads // b) for spec in specs]
        self._workers = tuple(
            AttentionWorker(
                own_specs,
                n_slots,
                device,
                programs,
                channel_scales=_scales_of(w, b, channel_scales),
                n_host_slots=n_host_slots,
            )
            for w, device in enumerate(devices)
        )
        self._split = jax.jit(lambda x: jnp.split(x, b, axis=2))
        self._join = jax.jit(lambda xs: jnp.concatenate(xs, axis=2))

    @property
    def workers(self) -> tuple[AttentionWorker, ...]:
        return self._workers

    def begin_decode(self, batch: DecodeBatch) -> None:
        for worker in self._workers:
            worker.begin_decode(batch)

    def begin_prefill(self, batch: PrefillBatch) -> None:
        for worker in self._workers:
            worker.begin_prefill(batch)

    def send_q(self, q: jax.Array) -> list[jax.Array]:
        return [w.send_q(part) for w, part in zip(self._workers, self._split(q), strict=True)]

    send_kv = send_q

    def attend(self, i: int, q: list[jax.Array], k: list[jax.Array], v: list[jax.Array]) -> jax.Array:
        outs = [w.attend(i, *qkv) for w, *qkv in zip(self._workers, q, k, v, strict=True)]
        return self._join(jax.device_put(outs, self._model_device))

    def append(self, i: int, k: list[jax.Array], v: list[jax.Array]) -> None:
        for worker, *kv in zip(self._workers, k, v, strict=True):
            worker.append(i, *kv)

    def attend_stored(self, i: int, q: list[jax.Array]) -> Partial:
        parts = [w.attend_stored(i, part) for w, part in zip(self._workers, q, strict=True)]
        outs, lses = zip(*jax.device_put(parts, self._model_device), strict=True)
        return self._join(outs), self._join(lses)

    def copy_slots(self, src: Slots, dst: Slots) -> None:
        for worker in self._workers:
            worker.copy_slots(src, dst)

    def move_out(self, slots: Slots, host_slots: Slots) -> None:
        for worker in self._workers:
            worker.move_out(slots, host_slots)

    def move_in(self, host_slots: Slots, slots: Slots) -> None:
        for worker in self._workers:
            worker.move_in(host_slots, slots)

    def release(self, slots: Slots) -> None:
        """Nothing to do: a slot is the same on every worker."""


class Sent(NamedTuple):
    """An array of the model worker's, and the parts of it that workers got."""

    whole: jax.Array
    parts: list[jax.Array | None]


class PlacedPool:
    """Each token on one worker, by request or by position; workers return partials that are combined by lse.

    A new token's attention over itself is the model worker's, so no worker waits for a token that another keeps.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        n_slots: int,
        devices: Sequence[jax.Device],
        programs: Programs,
        model_device: jax.Device,
        channel_scales: Sequence[ChannelScales] | None,
        n_host_slots: int,
        token_block: int | None,
    ) -> None:
        self.specs = tuple(specs)
        self.n_slots = n_slots
        self._model_device = model_device
        self._token_block = token_block  # None: by request
        b = len(devices)
        share = -(-n_slots // b)
        self._workers = tuple(
            AttentionWorker(
                specs, share, device, programs, channel_scales=channel_scales, n_host_slots=n_host_slots
            )
            for device in devices
        )
        self.placement = Placement(n_slots, [share] * b)
        self._host_worker = np.full(n_host_slots, -1, np.int32)
        self._windows = sorted({spec.window for spec in specs if spec.window is not None})
        self._plans: list[RowsPlan] = []
        self._indices: list[tuple[jax.Array, ...]] = []  # rows, spread, new: on the model's device
        self._pick_rows = jax.jit(lambda x, rows: x[rows])
        self._pick_tokens = jax.jit(lambda x, new: x.reshape(-1, *x.shape[2:])[new])
        self._spread = jax.jit(spread_rows)
        self._nothing = jax.jit(_nothing)
        self._join = jax.jit(combine)
        finish = {spec: _jit_finish(spec, model_device) for spec in dict.fromkeys(specs)}
        self._finish = [finish[spec] for spec in specs]

    @property
    def workers(self) -> tuple[AttentionWorker, ...]:
        return self._workers

    def begin_decode(self, batch: DecodeBatch) -> None:
        self._begin(batch.slot_table, batch.lengths, batch.positions, batch.new_slots[:, None])

    def begin_prefill(self, batch: PrefillBatch) -> None:
        self._begin(batch.slot_table, batch.lengths, batch.positions, batch.slots)

    def send_q(self, q: jax.Array) -> Sent:
        parts = [
            w.send_q(self._pick_rows(q, at[0])) if plan.has_rows else None
            for w, plan, at in zip(self._workers, self._plans, self._indices, strict=True)
        ]
        return Sent(q, parts)

    def send_kv(self, x: jax.Array) -> Sent:
        parts = [
            w.send_kv(self._pick_tokens(x, at[2])) if plan.has_new else None
            for w, plan, at in zip(self._workers, self._plans, self._indices, strict=True)
        ]
        return Sent(x, parts)

    def attend(self, i: int, q: Sent, k: Sent, v: Sent) -> jax.Array:
        self.append(i, k, v)
        return self._finish[i](q.whole, k.whole, v.whole, self._partials(i, q))

    def append(self, i: int, k: Sent, v: Sent) -> None:
        for worker, k_part, v_part in zip(self._workers, k.parts, v.parts, strict=True):
            if k_part is not None and v_part is not None:
                worker.append(i, k_part, v_part)

    def attend_stored(self, i: int, q: Sent) -> Partial:
        return self._join(*zip(*self._partials(i, q), strict=True))

    def copy_slots(self, src: Slots, dst: Slots) -> None:
        """As a worker's; a copy goes beside its original where there is room, else to another worker."""
        src, dst = as_slots(src), as_slots(dst)
        self.placement.place(dst, self._placed(src))
        from_, to = self.placement.worker[src], self.placement.worker[dst]
        local = self.placement.local
        for w, worker in enumerate(self._workers):
            stays = (from_ == w) & (to == w)
            worker.copy_slots(local[src[stays]], local[dst[stays]])
            for u, other in enumerate(self._workers):
                goes = np.flatnonzero((from_ == w) & (to == u)) if u != w else np.zeros(0, np.int64)
                for piece in pieces(len(goes)):
                    rows = jax.device_put(worker.kv.take(local[src[goes[piece]]]), other.device)
                    other.kv.put(_at(local[dst[goes[piece]]], rows), rows)

    def move_out(self, slots: Slots, host_slots: Slots) -> None:
        """As a worker's; each worker keeps its tokens' KV in a host store of its own."""
        slots, host_slots = as_slots(slots), as_slots(host_slots)
        self._workers[0].kv.host.check(host_slots)
        owners = self._placed(slots)
        for w, worker in enumerate(self._workers):
            mine = owners == w
            worker.kv.host.forget(host_slots[~mine])
            worker.move_out(self.placement.local[slots[mine]], host_slots[mine])
        self._host_worker[host_slots] = owners

    def move_in(self, host_slots: Slots, slots: Slots) -> None:
        """As a worker's; tokens come back to the worker they were on where there is room."""
        host_slots, slots = as_slots(host_slots), as_slots(slots)
        self._workers[0].kv.host.check(host_slots)
        from_ = self._host_worker[host_slots]
        if (from_ < 0).any():
            raise ValueError(f"host slots {host_slots[from_ < 0]} hold nothing")
        self.placement.place(slots, from_)
        to, local = self.placement.worker[slots], self.placement.local[slots]
        for w, worker in enumerate(self._workers):
            mine = np.flatnonzero(from_ == w)
            for which, at, rows in worker.kv.host.pop(host_slots[mine]):
                for u, other in enumerate(self._workers):
                    goes = to[mine[which]] == u
                    if goes.any():
                        there = jax.device_put(rows, other.device)
                        other.kv.put(_at(local[mine[which[goes]]], there, at[goes]), there)
        self._host_worker[host_slots] = -1

    def release(self, slots: Slots) -> None:
        """``slots`` are nobody's now: their places are free for others, which keeps the workers balanced."""
        self.placement.release(as_slots(slots))

    def assume_stored(self, batch: DecodeBatch | PrefillBatch) -> None:
        """As `jaxlamina.workers.partition.place_stored` has it."""
        place_stored(self.placement, self._token_block, batch.slot_table, batch.lengths)

    def _begin(
        self, slot_table: np.ndarray, lengths: np.ndarray, positions: np.ndarray, new_slots: np.ndarray
    ) -> None:
        """new_slots ``[B, T]``, S for none."""
        place_new(self.placement, self._token_block, slot_table, lengths, positions, new_slots)
        self._plans = plan_rows(self.placement, slot_table, lengths, positions, new_slots, self._windows)
        for worker, plan in zip(self._workers, self._plans, strict=True):
            worker.begin(plan.slot_table, plan.lengths, plan.new_slots, plan.q_positions)
        self._indices = [
            jax.device_put((plan.rows, plan.spread, plan.new), self._model_device) for plan in self._plans
        ]

    def _partials(self, i: int, q: Sent) -> list[Partial]:
        """Each worker's partial for all rows ``[B, T, ...]``, on the model's device; empty for rows it has not."""
        found = []
        for worker, part, at in zip(self._workers, q.parts, self._indices, strict=True):
            if part is not None:
                there = worker.attend_stored(i, part)
                found.append(self._spread(*jax.device_put(there, self._model_device), at[1]))
            else:
                found.append(self._nothing(q.whole))
        return found

    def _placed(self, slots: np.ndarray) -> np.ndarray:
        owners = self.placement.worker[slots]
        if (owners < 0).any():
            raise ValueError(f"slots {slots[owners < 0][:8]} are read but hold nothing")
        return owners


def _scales_of(w: int, b: int, scales: Sequence[ChannelScales] | None) -> list[ChannelScales] | None:
    """Worker w's rows of each layer's ``[K, H]``."""
    if scales is None:
        return None
    return [ChannelScales(*(None if x is None else jnp.split(x, b)[w] for x in layer)) for layer in scales]


def _at(slots: np.ndarray, rows: Any, where: np.ndarray | None = None) -> np.ndarray:
    """Slots for all of padded ``rows``: ``slots`` at rows ``where`` (the first ones), a dropped one elsewhere."""
    out = np.full(len(rows[0][0]), np.iinfo(np.int32).max, np.int32)
    out[np.arange(len(slots)) if where is None else where] = slots
    return out


def _nothing(q: jax.Array) -> Partial:
    return jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)


def spread_rows(out: jax.Array, lse: jax.Array, spread: jax.Array) -> Partial:
    """A worker's rows ``[R, ...]`` as the batch's ``[B, ...]``: empty partials for rows that it has not."""
    return (
        out.at[spread].get(mode="fill", fill_value=0.0),
        lse.at[spread].get(mode="fill", fill_value=-jnp.inf),
    )


def _jit_finish(spec: AttentionSpec, device: jax.Device) -> Any:
    def finish(q: jax.Array, k: jax.Array, v: jax.Array, partials: list[Partial]) -> jax.Array:
        with jax.default_device(device):  # kernels are picked by it
            own = causal_partial(q, k, v, **spec.scoring)
        return combine(*zip(own, *partials, strict=True))[0].astype(q.dtype)

    return jax.jit(finish)
