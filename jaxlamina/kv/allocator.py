"""Slots for KV, one a token: a slab of reference counts and a last-in-first-out free list.

Pure Python on plain integers. It knows nothing of arrays, devices, requests or layers: a slot is a row
number, the same in every layer's pool, and what is stored there is the attention worker's business.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping


class OutOfSlots(RuntimeError):
    """Fewer slots are free than were asked for; nothing was allocated."""


class SlotAllocator:
    """Deals in slots ``0 … capacity-1``, each holding one token's K and V in every layer.

    A slot may have several owners (prefix sharing, parallel sampling): ``fork`` adds one, ``free`` takes
    one away, and the last owner's ``free`` returns the slot to the free list. The list is LIFO, so slots
    touched last (still in a cache) are dealt out first, and a fresh pool deals in rising order.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"{capacity=} must be at least 1 slot")
        self.capacity = capacity
        self._owners = array("i", bytes(4 * capacity))  # [S] reference counts, the slab
        self._free = array("i", range(capacity - 1, -1, -1))  # the end is dealt out first

    @property
    def n_free(self) -> int:
        """Slots nobody owns."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Slots with at least one owner."""
        return self.capacity - len(self._free)

    def n_owners(self, slot: int) -> int:
        """How many owners a slot has (0: it is free)."""
        return self._owners[self._checked(slot)]

    def allocate(self, n: int) -> list[int]:
        """``n`` slots with one owner each, or ``OutOfSlots`` and no change."""
        if n < 0:
            raise ValueError(f"{n=} must not be negative")
        if n > len(self._free):
            raise OutOfSlots(f"{n} slots asked for, {len(self._free)} of {self.capacity} free")
        if n == 0:
            return []
        taken = self._free[-n:].tolist()[::-1]
        del self._free[-n:]
        for slot in taken:
            self._owners[slot] = 1
        return taken

    def fork(self, slots: Iterable[int]) -> None:
        """One more owner for each of these slots; ``ValueError`` and no change if one of them is free."""
        slots = self._owned(slots, times=False)
        for slot in slots:
            self._owners[slot] += 1

    def free(self, slots: Iterable[int]) -> None:
        """One owner fewer for each of these slots; ``ValueError`` and no change if one has too few.

        Slots come back so that the next ``allocate`` of as many deals them in the same order.
        """
        slots = self._owned(slots, times=True)
        for slot in reversed(slots):
            self._owners[slot] -= 1
            if self._owners[slot] == 0:
                self._free.append(slot)

    def check_integrity(self, owners: Mapping[Hashable, Iterable[int]] | None = None) -> None:
        """Raises ``RuntimeError`` naming the first faulty slot.

        Every slot is free exactly once or owned, never both and never neither. With ``owners`` (owner →
        its slots, everyone who holds any) the reference counts must also be what the owners add up to,
        which finds leaks and slots used after they were freed. O(capacity): for tests and idle moments.
        """
        times_free = Counter(self._free)
        for slot in times_free:
            if not 0 <= slot < self.capacity:
                raise RuntimeError(f"slot {slot} is on the free list, the pool has 0 … {self.capacity - 1}")
        for slot, count in enumerate(self._owners):
            if times_free[slot] > 1:
                raise RuntimeError(f"slot {slot} is on the free list {times_free[slot]} times")
            if count < 0:
                raise RuntimeError(f"slot {slot} has {count} owners")
            if count and times_free[slot]:
                raise RuntimeError(f"slot {slot} has {count} owner(s) and is on the free list")
            if not count and not times_free[slot]:
                raise RuntimeError(f"slot {slot} has no owner and is not on the free list: it has leaked")
        if owners is None:
            return
        held_by: dict[int, list[Hashable]] = {}
        for owner, slots in owners.items():
            for slot in slots:
                held_by.setdefault(slot, []).append(owner)
        for slot in sorted(held_by.keys() | {s for s, count in enumerate(self._owners) if count}):
            count = self._owners[slot] if 0 <= slot < self.capacity else 0
            names = held_by.get(slot, [])
            if count != len(names):
                raise RuntimeError(f"slot {slot} has reference count {count}, its owners are {names}")

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.capacity:
            raise ValueError(f"{slot=} must be within 0 … {self.capacity - 1}")
        return slot

    def _owned(self, slots: Iterable[int], *, times: bool) -> list[int]:
        """The slots as a list, all of them owned; with ``times``, as often as they are listed."""
        slots = list(slots)
        for slot, listed in Counter(slots).items():
            needed = listed if times else 1
            if self._owners[self._checked(slot)] < needed:
                raise ValueError(f"{slot=} has {self._owners[slot]} owner(s), {needed} needed")
        return slots
