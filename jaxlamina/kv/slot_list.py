"""A request's slots by position: a list of integers that grows, with numpy's view of it at no cost.

It knows neither who owns the slots nor what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from jaxtyping import Int, Int32
from numpy.typing import DTypeLike

from jaxlamina.kv.allocator import Slots, as_slots

_NOTHING = np.empty(0, np.int32)


class SlotList:
    """Slots ``[n]`` int32 in a buffer that doubles when it is full.

    ``append`` is one store, ``view()`` and ``np.asarray`` copy nothing. A view stays as it was when more is
    appended, but not over ``clear`` or ``truncate``: copy what must outlive them.
    """

    __slots__ = ("_buffer", "_n")

    def __init__(self, slots: Slots = ()) -> None:
        self._buffer = _NOTHING
        self._n = 0
        if not (isinstance(slots, tuple) and not slots):
            self.extend(slots)

    def append(self, slot: int) -> None:
        n = self._n
        if n == len(self._buffer):
            self._grow(n + 1)
        self._buffer[n] = slot
        self._n = n + 1

    def extend(self, slots: Slots) -> None:
        """Appends all of these, in order."""
        slots = as_slots(slots)
        end = self._n + len(slots)
        if end > len(self._buffer):
            self._grow(end)
        self._buffer[self._n : end] = slots
        self._n = end

    def truncate(self, n: int) -> None:
        """Keeps the first ``n``."""
        if not 0 <= n <= self._n:
            raise ValueError(f"{n=} must be within 0 … {self._n}, as many as the list has")
        self._n = n

    def clear(self) -> None:
        """Forgets all of them (and frees none: that is the allocator's)."""
        self._n = 0

    def view(self) -> Int32[np.ndarray, " n"]:
        """The slots, uncopied."""
        return self._buffer[: self._n]

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int | np.integer) -> int: ...

    @overload
    def __getitem__(self, index: slice | np.ndarray) -> Int32[np.ndarray, " m"]: ...

    def __getitem__(self, index: int | np.integer | slice | np.ndarray) -> int | Int32[np.ndarray, " m"]:
        """A slot as an ``int``, or a view of several."""
        found = self.view()[index]
        return found if isinstance(found, np.ndarray) else int(found)

    def __iter__(self) -> Iterator[int]:
        return iter(self.view().tolist())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.view(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"SlotList({self.view().tolist()})"

    def _grow(self, needed: int) -> None:
        buffer = np.empty(max(needed, 2 * len(self._buffer), 16), np.int32)
        buffer[: self._n] = self.view()
        self._buffer = buffer


def append_each(lists: Sequence[SlotList], slots: Int[np.ndarray, " n"]) -> None:
    """One slot more for each list, in order: a decode step's growth. ``ValueError`` unless there are as
    many."""
    for row, slot in zip(lists, slots.tolist(), strict=True):
        n = row._n  # `append`, without a call each: half of the time, every step
        if n == len(row._buffer):
            row._grow(n + 1)
        row._buffer[n] = slot
        row._n = n + 1


def extend_each(lists: Sequence[SlotList], slots: Int[np.ndarray, "steps n"]) -> None:
    """As `append_each` of each row of ``slots``, one after another. ``ValueError`` unless there is a column
    for each list."""
    n_more = len(slots)
    for row, column in zip(lists, slots.T, strict=True):
        end = row._n + n_more
        if end > len(row._buffer):
            row._grow(end)
        row._buffer[row._n : end] = column
        row._n = end
