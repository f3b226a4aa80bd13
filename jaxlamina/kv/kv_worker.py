"""One worker's KV as the book of the pool (`jaxlamina.kv.pool_book`) has it moved: by the worker's own slots.

``KVWorker`` is what a worker can be told, here or in another process; ``LayersApart`` is one of several that
have a part of the layers each. Knows slots, host slots and places; not what KV looks like, no device, and not
which token is in a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, UInt8, UInt64

from jaxlamina.kv.kept import KeptWanted, Lost


@runtime_checkable
class KVWorker(Protocol):
    """One worker's KV by its own slots: what moves it. In this process (`jaxlamina.workers.kv_pools.KVPools`)
    or in another."""

    def copy_slots(self, src: Int[np.ndarray, " n"], dst: Int[np.ndarray, " n"]) -> None: ...

    def move_out(self, slots: Int[np.ndarray, " n"], host_slots: Int[np.ndarray, " n"]) -> None: ...

    def move_in(self, host_slots: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None: ...

    def forget_host(self, host_slots: Int[np.ndarray, " n"]) -> None:
        """The host slots hold nothing any more."""

    def take_rows(self, slots: Int[np.ndarray, " n"], *, host: bool) -> Sequence[Any]:
        """The KV of slots, or of host slots, which hold nothing then: arrays with a row a slot, as many of
        each layer, in the order of layers."""

    def put_rows(self, slots: Int[np.ndarray, " n"], rows: Sequence[Any]) -> None:
        """Stores what another worker's `take_rows` gave."""

    def open_kept(self, name: str, wanted: KeptWanted) -> UInt64[np.ndarray, " places"]:
        """Begins to keep KV in host memory, or goes on with what is there as ``name``: what its places are
        known by, 0 for those with nothing."""

    @property
    def n_behind(self) -> int:
        """Tokens that are to be kept and are not written yet."""

    def take_lost(self, places: Int[np.ndarray, " n"]) -> Lost:
        """What was to be kept and there was no memory for, as far as that is known and was not asked before.
        Waits until it is known of ``places``."""

    def keep(
        self, slots: Int[np.ndarray, " n"], places: Int[np.ndarray, " n"], marks: UInt64[np.ndarray, " n"]
    ) -> None:
        """Keeps the KV of slots at places, to be known by marks."""

    def bring(self, places: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        """Copies what is kept at places into slots."""

    def kept_rows(self, places: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n row_bytes"]:
        """What is kept at places: all of a token's KV in a row, layer by layer."""

    def put_bytes(self, slots: Int[np.ndarray, " n"], rows: UInt8[np.ndarray, "n row_bytes"]) -> None:
        """Stores what another worker's `kept_rows` gave."""


class LayersApart:
    """A `KVWorker` of several that have the same slots, each of some layers in a row: stages of a pipeline.
    ``n_layers``, ``row_bytes``: of each, its layers and a token's KV in them."""

    def __init__(
        self, workers: Sequence[KVWorker], n_layers: Sequence[int], row_bytes: Sequence[int]
    ) -> None:
        self._workers, self._n_layers, self._row_bytes = tuple(workers), tuple(n_layers), tuple(row_bytes)

    def copy_slots(self, src: Int[np.ndarray, " n"], dst: Int[np.ndarray, " n"]) -> None:
        for worker in self._workers:
            worker.copy_slots(src, dst)

    def move_out(self, slots: Int[np.ndarray, " n"], host_slots: Int[np.ndarray, " n"]) -> None:
        for worker in self._workers:
            worker.move_out(slots, host_slots)

    def move_in(self, host_slots: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        for worker in self._workers:
            worker.move_in(host_slots, slots)

    def forget_host(self, host_slots: Int[np.ndarray, " n"]) -> None:
        for worker in self._workers:
            worker.forget_host(host_slots)

    def take_rows(self, slots: Int[np.ndarray, " n"], *, host: bool) -> Sequence[Any]:
        return [rows for worker in self._workers for rows in worker.take_rows(slots, host=host)]

    def put_rows(self, slots: Int[np.ndarray, " n"], rows: Sequence[Any]) -> None:
        of_a_layer, at = len(rows) // sum(self._n_layers), 0
        for worker, n in zip(self._workers, self._n_layers, strict=True):
            worker.put_rows(slots, rows[at : at + n * of_a_layer])
            at += n * of_a_layer

    def open_kept(self, name: str, wanted: KeptWanted) -> UInt64[np.ndarray, " places"]:
        return marks_of_all(
            [worker.open_kept(f"{name}-stage{i}", wanted) for i, worker in enumerate(self._workers)]
        )

    @property
    def n_behind(self) -> int:
        return max(worker.n_behind for worker in self._workers)

    def take_lost(self, places: Int[np.ndarray, " n"]) -> Lost:
        return Lost.joined(worker.take_lost(places) for worker in self._workers)

    def keep(
        self, slots: Int[np.ndarray, " n"], places: Int[np.ndarray, " n"], marks: UInt64[np.ndarray, " n"]
    ) -> None:
        for worker in self._workers:
            worker.keep(slots, places, marks)

    def bring(self, places: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        for worker in self._workers:
            worker.bring(places, slots)

    def kept_rows(self, places: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n row_bytes"]:
        return np.concatenate([worker.kept_rows(places) for worker in self._workers], axis=1)

    def put_bytes(self, slots: Int[np.ndarray, " n"], rows: UInt8[np.ndarray, "n row_bytes"]) -> None:
        parts = np.split(rows, np.cumsum(self._row_bytes)[:-1], axis=1)
        for worker, part in zip(self._workers, parts, strict=True):
            worker.put_bytes(slots, part)


def marks_of_all(each: Sequence[UInt64[np.ndarray, " places"]]) -> UInt64[np.ndarray, " places"]:
    """Of workers that each keep a part of a token's KV: what all of them have."""
    n = min(map(len, each))
    first, *others = (marks[:n] for marks in each)
    return np.where(np.all([first == marks for marks in others], axis=0), first, 0) if others else first
