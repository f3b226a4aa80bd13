"""The KV of all layers on one device: storage, and moving whole tokens within it, out to the host and back.

Knows slots, layers and dtypes. Nothing of attention, requests or who owns a slot; the host's slots are dealt
out by the caller too.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int, Int32, Int64, Shaped, UInt8, UInt64

from jaxlamina.errors import UserError
from jaxlamina.kv.kept import NOTHING_LOST, KeptWanted, Lost
from jaxlamina.process.cuda_driver import CudaDriver, CudaError
from jaxlamina.process.host_memory import is_full
from jaxlamina.workers.capacity import EXPLICIT_FRACTION, is_accelerator
from jaxlamina.workers.kept_kv import FRACTION, KeptKV, MappedAhead
from jaxlamina.workers.pinned_pieces import Pins
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from jaxlamina.workers.staging import Landing, Staging, memory_of
from pallas_kernels import ChannelQuantizedPool, Pool, QuantizedPool, cpu, make_pool

# A move is made in pieces of at most _MOST slots, each padded to one of these sizes, which a program serves.
# Few, since they are there before a first request.
_SIZES = (16, 64, 256)
_MOST = max(_SIZES)
# Pieces of kept KV in host memory at once: so many threads read some (each 5 GB/s on the host of an H100),
# while others are copied to the device.
_N_READERS = min(8, os.cpu_count() or 1)
_N_READ = _N_READERS + 2
# Pieces that the device copies by itself, which takes less time than the call of a program of 256 rows.
_N_LANDINGS, _LANDING_BYTES = 3, 2**27

_log = logging.getLogger("uvicorn.error")

Slots = Sequence[int] | np.ndarray
Pools = tuple[list[Pool], list[Pool]]  # keys and values of each layer
# Of each pool, in the order of `_by_layer`, what it keeps a slot.
Rows = list[tuple[Shaped[jax.Array | np.ndarray, "M ..."], ...]]


class KVPools:
    """K and V pools ``[S, K, H]`` of each layer, and a store of ``n_host_slots`` tokens in host memory.

    The pools are plain attributes: whoever runs a program that takes them donated puts the new ones back.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        n_slots: int,
        device: jax.Device,
        *,
        channel_scales: Sequence[ChannelScales] | None = None,
        n_host_slots: int = 0,
        sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        """``sharding``: of each pool, where several devices share them out."""
        self.n_slots = n_slots
        self.device = device
        self.k, self.v = _empty(specs, n_slots, device, channel_scales, sharding)
        self.host = HostStore(n_host_slots, device, sharding)
        self._of_kept: KeptKV | None = None
        self._ahead: MappedAhead | None = None
        self._pins: Pins | None = None
        self._staging: Staging | None = None
        self._put_of: list[jax.Array | None] = [None] * _N_READ  # of each, ready once it may be written to
        self._copy = jax.jit(_copied, donate_argnums=0)
        self._put = jax.jit(_with_rows, donate_argnums=0)
        self._take = jax.jit(_rows_at)
        self._take_packed = jax.jit(_packed_at)
        self._put_packed = jax.jit(_with_packed, donate_argnums=0)
        # A copy for each of all layers' arrays takes an accelerator's host longer than their bytes. On a CPU
        # they are where they are wanted, and XLA would pack them slowly.
        self._packs = is_accelerator(device)

    def copy_slots(self, src: Int[np.ndarray, " n"], dst: Int[np.ndarray, " n"]) -> None:
        """Slot ``src[i]``'s KV of all layers also into ``dst[i]``; no slot may be in both."""
        for piece in pieces(len(src)):
            at = padded(src[piece], 0), padded(dst[piece], self.n_slots)
            self.k, self.v = self._copy((self.k, self.v), *at)

    def take(self, slots: Int[np.ndarray, " n"]) -> Rows:
        """All layers' KV of ``slots`` (at most a piece of `pieces`), padded; a copy on the device."""
        return self._take((self.k, self.v), padded(slots, 0))

    def put(self, slots: Int[np.ndarray, " M"], rows: Rows) -> None:
        """Stores ``rows`` at ``slots``; a slot ≥ S is dropped."""
        self.k, self.v = self._put((self.k, self.v), rows, np.asarray(slots, np.int32))

    def move_out(self, slots: Int[np.ndarray, " n"], host_slots: Int[np.ndarray, " n"]) -> None:
        """Copies the KV of ``slots`` to ``host_slots``; the caller may use the slots for others from then
        on."""
        self.host.check(host_slots)
        for piece in pieces(len(slots)):
            packs, which = self._packs_moves, slots[piece]
            self.host.put(host_slots[piece], [tuple(self._parts_at(which))] if packs else self.take(which))

    def move_in(self, host_slots: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        """Brings ``host_slots`` back into ``slots``; the host's slots are empty then."""
        self.host.check(host_slots)
        for which, at, rows in self.host.pop(host_slots):
            to = np.full(len(rows[0][0]), self.n_slots, np.int32)
            to[at] = slots[which]
            if self._packs_moves:
                self._put_rows_packed(to, rows[0][0])
            else:
                self.put(to, rows)

    def forget_host(self, host_slots: Int[np.ndarray, " n"]) -> None:
        """The host slots hold nothing any more."""
        self.host.forget(host_slots)

    def take_rows(self, slots: Int[np.ndarray, " n"], *, host: bool) -> list[Shaped[np.ndarray, "n ..."]]:
        """The KV of ``slots``, or of host slots, which hold nothing then: layer by layer what its keys' pool
        keeps, then its values'."""
        if host:
            found = [(which, at, self._not_packed(rows)) for which, at, rows in self.host.pop(slots)]
        else:
            parts = [np.arange(piece.start, piece.stop) for piece in pieces(len(slots))]
            found = [(part, np.arange(len(part)), self.take(slots[part])) for part in parts]
        order = np.argsort(np.concatenate([which for which, _, _ in found]))
        flat = [[np.asarray(x)[at] for of_pool in rows for x in of_pool] for _, at, rows in found]
        return [np.concatenate(blocks)[order] for blocks in zip(*flat, strict=True)]

    def put_rows(self, slots: Int[np.ndarray, " n"], rows: Sequence[Shaped[np.ndarray, "n ..."]]) -> None:
        """Stores what another worker's `take_rows` gave."""
        to = padded(slots, self.n_slots)
        flat = [np.pad(x, [(0, len(to) - len(slots))] + [(0, 0)] * (x.ndim - 1)) for x in rows]
        self.put(to, self._per_pool(flat))

    def open_kept(self, name: str, wanted: KeptWanted) -> UInt64[np.ndarray, " places"]:
        """Begins to keep KV in host memory, or goes on with what an earlier process kept as ``name``: the
        marks of its places. What moves it is compiled. With ``ahead`` what is kept stays what it was."""
        row_bytes = self.row_bytes
        path = None if wanted.folder is None else Path(wanted.folder, f"{name}.kv")
        if wanted.ahead:
            if path is not None and self._ahead is None:
                self._pins = self._new_pins()
                if self._pins is not None:
                    self._put_bytes(np.empty(0, np.int64), self._new_landing(1).arrays[0])
                self._ahead = MappedAhead(path, row_bytes, wanted.identity, self._pins)
            return self.kept.marks
        most, fraction = self.n_slots, FRACTION
        if wanted.n_places is not None:
            most, fraction = wanted.n_places, EXPLICIT_FRACTION
        if self._of_kept is not None:
            self._of_kept.close()
        else:
            with ThreadPoolExecutor(1, "pinned memory") as beside:  # which takes its time
                staged = beside.submit(self._staged) if self._packs else None
                for size in _SIZES:
                    self._parts_at(np.zeros(size, np.int64))
                    self.put_bytes(np.full(size, self.n_slots), np.zeros((size, row_bytes), np.uint8))
            if staged is not None:
                staged.result()
                self._put_of[0] = self._put_staged(np.full(1, self.n_slots), 0)
        ahead, self._ahead = self._ahead, None
        self._of_kept = KeptKV(path, row_bytes, wanted.identity, most, wanted.n_sharing, ahead, fraction)
        self._of_kept.end_with(self)
        return self._of_kept.marks

    def _new_pins(self) -> Pins | None:
        """None where no device copies kept KV by itself."""
        if self._packs and self.host.pinned is not None:
            with suppress(OSError, CudaError):  # another maker's GPU, say
                return CudaDriver(self.device)
        return None

    @property
    def _packs_moves(self) -> bool:
        """Whether what goes to the host store is packed, too: not what several devices share out."""
        return self._packs and not self.host.is_shared_out

    @property
    def row_bytes(self) -> int:
        """Of a token's KV, in all layers."""
        return sum(x.nbytes // len(x) for x in self._arrays())

    @property
    def kept(self) -> KeptKV:
        assert self._of_kept is not None, "open_kept comes first"
        return self._of_kept

    @property
    def n_behind(self) -> int:
        """As of `KeptKV`; 0 where nothing is kept."""
        return 0 if self._of_kept is None else self._of_kept.n_behind

    def keep(
        self, slots: Int[np.ndarray, " n"], places: Int[np.ndarray, " n"], marks: UInt64[np.ndarray, " n"]
    ) -> None:
        """Copies the KV of ``slots`` to ``places``, while others run; the caller may use the slots for others
        from then on."""
        for piece in pieces(len(slots)):
            rows = partial(_rows_of, *self._on_the_way(slots[piece]), len(places[piece]))
            self.kept.later(places[piece], marks[piece], rows)

    def _on_the_way(self, slots: Int[np.ndarray, " n"]) -> tuple[list[jax.Array], _AsRows]:
        """All layers' KV of ``slots``, that is being copied to the host, and what waits for a part of it."""
        parts = self._parts_at(slots)
        if self._packs and self.host.pinned is not None:
            # The device copies by itself, to memory that JAX uses again: no page is touched for the first
            # time, and the host copies once.
            with _where_pinned_memory_is_left():
                return jax.device_put(parts, self.host.pinned), _pinned_rows
        for part in parts:
            part.copy_to_host_async()
        return parts, np.asarray

    def take_lost(self, places: Int[np.ndarray, " n"]) -> Lost:
        """As of `KVWorker`."""
        if self._of_kept is None:
            return NOTHING_LOST
        self._of_kept.wait_for(places)
        return self._of_kept.take_lost()

    def bring(self, places: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        """Copies what is kept at ``places`` into ``slots``, once that is written; it stays kept."""
        self.kept.wait_for(places)
        is_pinned = self.kept.is_pinned(places)
        self._bring_by_device(places[is_pinned], slots[is_pinned])
        self._bring_by_host(places[~is_pinned], slots[~is_pinned])

    def _bring_by_device(self, places: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        """From where it is kept, a piece while a program stores the one before."""
        if not len(slots):
            return
        landing = self._new_landing(_N_LANDINGS)
        todo = list(pieces(len(slots), len(landing.arrays[0])))
        stored: list[jax.Array | None] = [None] * _N_LANDINGS  # of each, ready once it may be written to

        def begin(i: int) -> None:
            which = i % _N_LANDINGS
            jax.block_until_ready(stored[which])
            landing.begin(which, self.kept.parts(places[todo[i]]))

        begin(0)
        for i, piece in enumerate(todo):
            which = i % _N_LANDINGS
            landing.wait()
            if i + 1 < len(todo):
                begin(i + 1)
            stored[which] = self._put_bytes(slots[piece], landing.arrays[which])

    def _new_landing(self, n: int) -> Landing:
        assert self._pins is not None
        dtype = _packed_dtype(self._arrays())
        n_rows = max(_MOST, 1 << (_LANDING_BYTES // self.row_bytes).bit_length() - 1)
        shape = n_rows, self.row_bytes // dtype.itemsize
        return Landing(self._pins, n, shape, dtype, self.host.on_device)

    def _bring_by_host(self, places: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        """Pieces are read into a few arrays that are used again and again, while others are copied to the
        device."""
        staging = self._staged()
        todo = list(pieces(len(slots)))

        def read(i: int) -> int:
            which = i % _N_READ
            jax.block_until_ready(self._put_of[which])
            self.kept.read(places[todo[i]], staging.arrays[which])
            return which

        with ThreadPoolExecutor(_N_READERS, "kept KV reader") as readers:
            reads = deque(readers.submit(read, i) for i in range(min(_N_READ, len(todo))))
            for i, piece in enumerate(todo):
                which = reads.popleft().result()
                self._put_of[which] = self._put_staged(slots[piece], which)
                if i + _N_READ < len(todo):
                    reads.append(readers.submit(read, i + _N_READ))

    def _staged(self) -> Staging:
        """Made once."""
        if self._staging is None and self._packs:
            with _where_pinned_memory_is_left():
                self._staging = self._new_staging(self.host.pinned)
        if self._staging is None:
            self._staging = self._new_staging(None)
        return self._staging

    def _new_staging(self, pinned: jax.sharding.Sharding | None) -> Staging:
        dtype = _packed_dtype(self._arrays())
        return Staging(_N_READ, _MOST, self.row_bytes, dtype, pinned=pinned, device=self.host.on_device)

    def _put_staged(self, slots: Int[np.ndarray, " n"], which: int) -> jax.Array | None:
        staging, n = self._staged(), _width(len(slots))
        rows = staging.on_device(which, n) if self._packs else staging.arrays[which][:n]
        return self._put_bytes(slots, rows)

    def kept_rows(self, places: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n row_bytes"]:
        """What is kept at ``places``."""
        return self.kept.rows_at(places)

    def put_bytes(self, slots: Int[np.ndarray, " n"], rows: UInt8[np.ndarray, "n row_bytes"]) -> None:
        """Stores what another worker's `kept_rows` gave (at most a piece of `pieces`)."""
        self._put_bytes(slots, np.pad(rows, [(0, _width(len(slots)) - len(slots)), (0, 0)]))

    def _put_bytes(
        self, slots: Int[np.ndarray, " n"], rows: Shaped[np.ndarray, "width _"] | jax.Array
    ) -> jax.Array | None:
        """Stores the first of ``rows``, as many as a program exists for; on the device they are packed.
        Their memory may be written to again once the number is ready; None: at once."""
        to = padded(slots, self.n_slots, len(rows))
        if self._packs:
            if not isinstance(rows, jax.Array):
                rows = rows.view(_packed_dtype(self._arrays()))
                if not self.host.is_shared_out:  # a program for arrays of the host would be another one
                    rows = jax.device_put(rows, self.host.on_device)
            return self._put_rows_packed(to, rows)
        assert isinstance(rows, np.ndarray)
        self.put(to, self._parts_of(rows))
        return None

    def _put_rows_packed(
        self, to: Int32[np.ndarray, " width"], packed: Shaped[jax.Array | np.ndarray, "width _"]
    ) -> jax.Array:
        (self.k, self.v), done = self._put_packed((self.k, self.v), packed, to)
        return done

    def _parts_of(self, rows: UInt8[np.ndarray, "width row_bytes"]) -> Rows:
        """What whole tokens' rows are, pool by pool."""
        parts, at = [], 0
        for x in self._arrays():
            bits = rows[:, at : at + x.nbytes // len(x)].copy()
            parts.append(bits.view(x.dtype).reshape(len(rows), *x.shape[1:]))
            at += bits.shape[1]
        return self._per_pool(parts)

    def _not_packed(self, rows: Rows) -> Rows:
        """Of what was moved out."""
        if not self._packs_moves:
            return rows
        packed = np.ascontiguousarray(rows[0][0])
        return self._parts_of(packed.view(np.uint8).reshape(len(packed), -1))

    def _per_pool(self, flat: Sequence[Shaped[np.ndarray, "M ..."]]) -> Rows:
        """What is in the order of `_arrays`, pool by pool."""
        n = len(flat) // (2 * len(self.k))
        return [tuple(flat[i : i + n]) for i in range(0, len(flat), n)]

    def _parts_at(self, slots: Int[np.ndarray, " n"]) -> list[jax.Array]:
        """All layers' KV of ``slots`` (at most a piece of `pieces`), padded, in what is copied at once."""
        to = padded(slots, 0)
        take = self._take_packed if self._packs else self._take
        return jax.tree.leaves(take((self.k, self.v), to))

    def _arrays(self) -> list[jax.Array]:
        """What a token's KV is in, in the order of its parts."""
        return [x for pool in _by_layer((self.k, self.v)) for x in _kept(pool)]


_AsRows = Callable[[jax.Array], np.ndarray]


@contextmanager
def _where_pinned_memory_is_left() -> Iterator[None]:
    """Else the block ends early, and other memory has to do."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_full(error):
            raise
        _log.debug("no pinned memory is left for kept KV: %s", error)


def _rows_of(parts: Sequence[jax.Array], as_rows: _AsRows, n: int) -> list[Shaped[np.ndarray, "n ..."]]:
    return [as_rows(part)[:n] for part in parts]


def _pinned_rows(x: jax.Array) -> UInt8[np.ndarray, "M row_bytes"]:
    """Not as `np.asarray`, which copies what an accelerator has in the host's memory."""
    return memory_of(jax.block_until_ready(x)).reshape(len(x), -1)


class HostStore:
    """KV of tokens in host memory, by host slot: pinned where the platform has that, else numpy.

    What was moved out together is kept as one block of rows, which is copied by the device's own engine. Rows
    that have gone leave a gap; blocks with gaps are put together again once the gaps are as much as the rest.
    """

    def __init__(
        self, n_slots: int, device: jax.Device, sharding: jax.sharding.Sharding | None = None
    ) -> None:
        """``sharding``: of pools that several devices share out."""
        self.n_slots, self.is_shared_out = n_slots, sharding is not None
        at = partial(jax.sharding.SingleDeviceSharding, device)
        kinds = {memory.kind for memory in device.addressable_memories()}
        can_pin = "pinned_host" in kinds
        self._rows_to = (sharding or at()).with_memory_kind("pinned_host") if can_pin else None
        # Of a token's KV in one row, whose heads several devices do not share out so.
        self.pinned = None if sharding else self._rows_to
        # Named in full: `device_put` to a plain device does not see that pinned memory is elsewhere.
        self.on_device = sharding or at(memory_kind=device.default_memory().kind)
        self._block_of = np.full(n_slots, -1, np.int64)
        self._row_of = np.zeros(n_slots, np.int64)
        self._blocks: dict[int, Rows] = {}
        self._next = 0

    @property
    def n_held(self) -> int:
        """Tokens that are in the store."""
        return int((self._block_of >= 0).sum())

    @property
    def n_rows(self) -> int:
        """Rows of memory that it takes, gaps and padding included."""
        return sum(len(rows[0][0]) for rows in self._blocks.values())

    def check(self, host_slots: Int[np.ndarray, " n"]) -> None:
        """``UserError`` without a store, ``ValueError`` for slots that it has not."""
        if not self.n_slots:
            raise UserError("there are no host KV slots: give host_kv_slots (n_host_slots of an executor)")
        if len(host_slots) and not (0 <= host_slots.min() and host_slots.max() < self.n_slots):
            raise ValueError(f"host slots {host_slots} must be within 0 … {self.n_slots - 1}")

    def put(self, host_slots: Int[np.ndarray, " n"], rows: Rows) -> None:
        """Keeps the first ``len(host_slots)`` of ``rows`` (on the device); what those slots held is
        dropped."""
        self.forget(host_slots)
        self._add(host_slots, self._to_host(rows))
        if self.n_rows > 2 * self.n_slots + _MOST:
            self._close_gaps()

    def pop(
        self, host_slots: Int[np.ndarray, " n"]
    ) -> Iterator[tuple[Int[np.ndarray, " m"], Int[np.ndarray, " m"], Rows]]:
        """Takes tokens out, a block at a time: (which of ``host_slots``, at which rows, the rows on the
        device)."""
        blocks = self._block_of[host_slots]
        if (blocks < 0).any():
            raise ValueError(f"host slots {host_slots[blocks < 0]} hold nothing")
        found = []
        for block in np.unique(blocks):
            which = np.flatnonzero(blocks == block)
            rows = jax.device_put(self._blocks[int(block)], self.on_device)
            found.append((which, self._row_of[host_slots[which]], rows))
        self.forget(host_slots)
        yield from found

    def _to_host(self, rows: Rows) -> Rows:
        return jax.device_get(rows) if self._rows_to is None else jax.device_put(rows, self._rows_to)

    def _add(self, host_slots: Int[np.ndarray, " n"], rows: Rows) -> None:
        self._blocks[self._next] = rows
        self._block_of[host_slots] = self._next
        self._row_of[host_slots] = np.arange(len(host_slots))
        self._next += 1

    def forget(self, host_slots: Int[np.ndarray, " n"]) -> None:
        self._block_of[host_slots] = -1
        alive = set(np.unique(self._block_of).tolist())
        self._blocks = {block: rows for block, rows in self._blocks.items() if block in alive}

    def _close_gaps(self) -> None:
        """Blocks that are less than half full become one."""
        counts = {b: int((self._block_of == b).sum()) for b in self._blocks}
        sparse = [b for b, rows in self._blocks.items() if 2 * counts[b] <= len(rows[0][0])]
        if not sparse:
            return
        kept = [np.flatnonzero(self._block_of == b) for b in sparse]
        parts = [
            jax.tree.map(lambda x, at=self._row_of[slots]: np.asarray(x)[at], self._blocks[b])
            for b, slots in zip(sparse, kept, strict=True)
        ]
        host_slots = np.concatenate(kept)
        rows = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
        self.forget(host_slots)
        for piece in pieces(len(host_slots)):
            slots = host_slots[piece]
            gap = _width(len(slots)) - len(slots)
            block = jax.tree.map(
                lambda x, p=piece, n=gap: np.pad(x[p], [(0, n)] + [(0, 0)] * (x.ndim - 1)), rows
            )
            self._add(slots, self._to_host(block))


def pieces(n: int, most: int = _MOST) -> Iterator[slice]:
    """``n`` slots in goes of at most as many as one program moves."""
    return (slice(first, min(first + most, n)) for first in range(0, n, most))


def padded(slots: Int[np.ndarray, " n"], fill: int, width: int | None = None) -> Int32[np.ndarray, " width"]:
    """``slots`` up to ``width`` or the next size that a program exists for, with ``fill``."""
    out = np.full(width or _width(len(slots)), fill, np.int32)
    out[: len(slots)] = slots
    return out


def move_sizes(n: int) -> list[int]:
    """The sizes of programs that move up to ``n`` slots."""
    return [size for size in _SIZES if size <= _width(min(n, _MOST))]


def _width(n: int) -> int:
    return next(size for size in _SIZES if n <= size)


def _empty(
    specs: Sequence[AttentionSpec],
    n_slots: int,
    device: jax.Device,
    channel_scales: Sequence[ChannelScales] | None,
    sharding: jax.sharding.Sharding | None,
) -> Pools:
    scales = channel_scales or [ChannelScales(None, None)] * len(specs)
    zeros_of = cpu.zeros if sharding is None and cpu.serves(device.platform) else jnp.zeros
    # One program an array: outside of one it takes a CPU nearly twice as long (3 GB: 2.3 s and 1.3 s).
    make = partial(make_pool, zeros_of=zeros_of)
    made_by = jax.jit(make, static_argnums=(0, 1, 2, 3), out_shardings=sharding)

    def pool(spec: AttentionSpec, scales: jax.Array | None, zeros: jax.Array | None) -> Pool:
        sizes = n_slots, spec.n_kv_heads, spec.head_dim
        return made_by(*sizes, spec.kv_dtype, channel_scales=scales, channel_zeros=zeros)

    with jax.default_device(device):
        made = [
            (pool(spec, of.k, of.k_zeros), pool(spec, of.v, of.v_zeros))
            for spec, of in zip(specs, scales, strict=True)
        ]
    k, v = zip(*(made if sharding else jax.device_put(made, device)), strict=True)
    return list(k), list(v)


def _kept(pool: Pool) -> tuple[Shaped[jax.Array, "S ..."], ...]:
    """The arrays in which a pool keeps something a slot: its scales too, unless they are fixed."""
    if isinstance(pool, QuantizedPool):
        return tuple(pool)
    return (pool.values,) if isinstance(pool, ChannelQuantizedPool) else (pool,)


def _with(pool: Pool, kept: tuple[Shaped[jax.Array, "S ..."], ...]) -> Pool:
    if isinstance(pool, QuantizedPool):
        return QuantizedPool(*kept)
    return pool._replace(values=kept[0]) if isinstance(pool, ChannelQuantizedPool) else kept[0]


def _by_layer(pools: Pools) -> list[Pool]:
    """Each layer's keys, then its values: so that a token's row is cut where layers are, by whoever has some
    of them."""
    return [pool for layer in zip(*pools, strict=True) for pool in layer]


def _rows_at(pools: Pools, slots: Int32[jax.Array, " n"]) -> Rows:
    return [tuple(_row_at(x, slots) for x in _kept(pool)) for pool in _by_layer(pools)]


@jax.jit  # so that it is traced once for all layers
def _row_at(x: jax.Array, slots: Int32[jax.Array, " n"]) -> jax.Array:
    return x.at[slots].get(mode="clip")


def _with_rows(pools: Pools, rows: Rows, slots: Int32[jax.Array, " M"]) -> Pools:
    new = [
        _with(pool, tuple(_stored(x, r, slots) for x, r in zip(_kept(pool), of_pool, strict=True)))
        for pool, of_pool in zip(_by_layer(pools), rows, strict=True)
    ]
    return new[::2], new[1::2]


@jax.jit  # as `_row_at`
def _stored(x: jax.Array, rows: jax.Array | np.ndarray, slots: Int32[jax.Array, " M"]) -> jax.Array:
    """``rows`` at ``slots``. Two-byte floats go as their bits: else XLA on a CPU makes float32 of all of the
    pool, and back (40 ms for 0.03)."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return x.at[slots].set(rows, mode="drop")
    bits = lax.bitcast_convert_type(x, jnp.uint16)
    bits = bits.at[slots].set(lax.bitcast_convert_type(rows, jnp.uint16), mode="drop")
    return lax.bitcast_convert_type(bits, x.dtype)


def _packed_dtype(arrays: Sequence[jax.Array]) -> np.dtype:
    """The arrays' own, or bytes where they have several."""
    own = {np.dtype(x.dtype) for x in arrays}
    return own.pop() if len(own) == 1 else np.dtype(np.uint8)


def _packed_at(pools: Pools, slots: Int32[jax.Array, " n"]) -> Shaped[jax.Array, "n row"]:
    """All of a token's KV as one row."""
    rows = [jnp.asarray(x) for of_pool in _rows_at(pools, slots) for x in of_pool]
    if _packed_dtype(rows) == np.uint8:
        rows = [lax.bitcast_convert_type(x, jnp.uint8) for x in rows]
    return jnp.concatenate([x.reshape(len(slots), -1) for x in rows], axis=1)


def _with_packed(
    pools: Pools, packed: Shaped[jax.Array, "n row"], slots: Int32[jax.Array, " n"]
) -> tuple[Pools, Int32[jax.Array, ""]]:
    """And a number that is ready once ``packed`` is not read any more. ``packed`` itself is no sign of that:
    on a CPU it may be the host's own array, whatever `device_put` is asked for (JAX 0.10.2)."""
    found: Rows = []
    at = 0
    for pool in _by_layer(pools):
        of_pool = []
        for x in _kept(pool):
            size = () if x.dtype.itemsize == packed.dtype.itemsize else (x.dtype.itemsize,)
            shape = len(slots), *x.shape[1:], *size
            n = int(np.prod(shape[1:]))
            own = lax.slice_in_dim(packed, at, at + n, axis=1)
            of_pool.append(lax.bitcast_convert_type(lax.reshape(own, shape), x.dtype))
            at += n
        found.append(tuple(of_pool))
    return _with_rows(pools, found, slots), slots.sum(dtype=jnp.int32)


def _copied(pools: Pools, src: Int32[jax.Array, " n"], dst: Int32[jax.Array, " n"]) -> Pools:
    return _with_rows(pools, _rows_at(pools, src), dst)


def as_slots(slots: Slots) -> Int64[np.ndarray, " n"]:
    """Slots as a flat array."""
    return np.asarray(slots, np.int64).reshape(-1)
