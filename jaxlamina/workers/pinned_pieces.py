"""Rows of a mapping, parts of which are pinned: a device copies those by itself, and no thread of the host.

By pieces, since what is pinned takes memory whether it was ever written to or not. Knows rows, bytes and
pieces; not what a row holds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

PIECE_BYTES = 2**26


@runtime_checkable
class Pins(Protocol):
    """What pins memory of this process for a device, as `CudaDriver`."""

    def pin(self, address: int, n_bytes: int) -> None:
        """Until `unpin` a device copies by itself from there."""

    def unpin(self, address: int) -> None:
        """What `pin` was given."""

    def begin_copies(self, to: int, parts: Iterable[tuple[int, int]]) -> None:
        """Of pinned memory, (address, bytes) one after another, to ``to`` on the device."""

    def wait_for_copies(self) -> None:
        """For all that was begun."""


class PinnedPieces:
    """``address``: where the mapping is, of ``n_bytes``. ``n_rows`` of ``row_bytes`` each begin ``at`` bytes
    behind it. ``piece_bytes``: pages, at least a row."""

    def __init__(
        self,
        pins: Pins,
        address: int,
        n_bytes: int,
        *,
        at: int,
        n_rows: int,
        row_bytes: int,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        assert row_bytes <= piece_bytes
        self._pins, self._address, self._piece_bytes = pins, address, piece_bytes
        self._at, self._row_bytes = at, row_bytes
        starts = np.arange(0, n_bytes, piece_bytes)
        self._bounds = np.append(starts, n_bytes)
        # The rows that have bytes in each piece.
        self._first = np.clip((starts - at) // row_bytes, 0, n_rows)
        self._stop = np.clip(-((at - self._bounds[1:]) // row_bytes), 0, n_rows)
        self._is_pinned = np.zeros(len(starts), bool)
        self._changing = threading.Lock()

    @property
    def n_pinned(self) -> int:
        """Pieces."""
        return int(self._is_pinned.sum())

    def due(self, is_there: Bool[np.ndarray, " rows"]) -> Int[np.ndarray, " n"]:
        """The pieces that are not pinned yet and all of whose rows are there."""
        n_there = np.concatenate([[0], np.cumsum(is_there)])
        is_whole = n_there[self._stop] - n_there[self._first] == self._stop - self._first
        return np.flatnonzero(is_whole & ~self._is_pinned)

    def pin(self, piece: int) -> None:
        """Raises what the driver does."""
        with self._changing:
            start, stop = self._bounds[piece : piece + 2].tolist()
            self._pins.pin(self._address + start, stop - start)
            self._is_pinned[piece] = True

    def has(self, rows: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which of ``rows`` are pinned, all of their bytes."""
        first = self._at + np.asarray(rows, np.int64) * self._row_bytes
        last = first + self._row_bytes - 1
        return self._is_pinned[first // self._piece_bytes] & self._is_pinned[last // self._piece_bytes]

    def parts(self, rows: Int[np.ndarray, " n"]) -> Iterator[tuple[int, int]]:
        """(address, bytes) of ``rows`` in their order; of rows that follow one another one part, within what
        was pinned at once."""
        for i, j in runs(rows):
            start = self._at + int(rows[i]) * self._row_bytes
            stop = start + (j - i) * self._row_bytes
            while start < stop:
                end = min(stop, (start // self._piece_bytes + 1) * self._piece_bytes)
                yield self._address + start, end - start
                start = end

    def release(self) -> None:
        """Nothing is pinned any more; to be called before the mapping goes."""
        with self._changing:
            for piece in np.flatnonzero(self._is_pinned).tolist():
                self._is_pinned[piece] = False
                self._pins.unpin(self._address + int(self._bounds[piece]))


def runs(rows: Int[np.ndarray, " n"]) -> Iterator[tuple[int, int]]:
    """Where in ``rows`` those begin and end that follow one another."""
    return pairwise([*np.flatnonzero(np.diff(rows, prepend=-2) != 1).tolist(), len(rows)])
