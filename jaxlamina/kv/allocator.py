"""Slots for KV, one a token: a slab of reference counts and a last-in-first-out free list.

Policy on plain numpy, every call over a whole list of slots. It knows nothing of KV arrays, devices, requests
or layers: a slot is a row number, the same in every layer's pool, and what is stored there is the attention
worker's business. Token-granular KV as in Lamina (2025) §4.2.2, LightLLM's token attention and FineInfer
§3.4.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

import numpy as np
from jaxtyping import Int, Int32, Int64

Slots = Iterable[int | np.integer] | np.ndarray
_ONE = np.int32(1)  # of the slab's own type: only so does ufunc.at not go through casts, 20 times as slow


class OutOfSlots(RuntimeError):
    """Fewer slots are free than were asked for; nothing was allocated."""


def as_slots(slots: Slots) -> Int[np.ndarray, " n"]:
    """Slot numbers as an integer array: any array, sequence or iterable of integers, uncopied if it can be.

    ``ValueError`` for anything but integers in a row.
    """
    if not isinstance(slots, np.ndarray | list | tuple | array) and not hasattr(slots, "__array__"):
        slots = list(slots)
    numbers = np.asarray(slots)
    if numbers.size == 0:
        return np.empty(0, np.int32)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(f"slots must be integers in a row, not {numbers.dtype} of shape {numbers.shape}")
    return numbers


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
        self._owners = np.zeros(capacity, np.int32)  # [S] reference counts, the slab
        # From _top on: the free slots, dealt from _top up. In the type of an index, which numpy need not
        # convert.
        self._stack = np.arange(capacity, dtype=np.intp)
        self._top = 0
        self._stamps = np.zeros(capacity, np.int64)  # [S] the deal that each slot was last part of
        self._n_deals = 0
        self._n_owned = 0  # the sum of the reference counts
        self._place = np.empty(capacity, np.intp)  # [S] scratch of `_once`
        self._owners_view = self._owners.view()
        self._owners_view.flags.writeable = False
        self.n_unshared = 0  # rises when a slot with several owners is left with one
        self._freed: list[np.ndarray] | None = None  # since `take_freed`, for whoever wants to know

    @property
    def n_free(self) -> int:
        """Slots nobody owns."""
        return self.capacity - self._top

    @property
    def n_used(self) -> int:
        """Slots with at least one owner."""
        return self._top

    @property
    def owner_counts(self) -> Int32[np.ndarray, " S"]:
        """How many owners each slot has: a read-only view that follows every change."""
        return self._owners_view

    def n_owners(self, slot: int | np.integer) -> int:
        """How many owners a slot has (0: it is free)."""
        return int(self._owners[self._checked(np.asarray([slot]))[0]])

    def owners_of(self, slots: Slots) -> Int32[np.ndarray, " n"]:
        """How many owners each of these slots has."""
        return self._owners[self._checked(as_slots(slots))]

    def stamps_of(self, slots: Slots) -> Int64[np.ndarray, " n"]:
        """When each of these slots was last dealt, in deals: the same stamp on a slot that is
        owned means that it was owned all along, so that its KV is what it was."""
        return self._stamps[self._checked(as_slots(slots))]

    def allocate(self, n: int) -> Int32[np.ndarray, " {n}"]:
        """``n`` slots with one owner each, or ``OutOfSlots`` and no change."""
        if n < 0:
            raise ValueError(f"{n=} must not be negative")
        top = self._top
        if n > self.capacity - top:
            raise OutOfSlots(f"{n} slots asked for, {self.n_free} of {self.capacity} free")
        taken = self._stack[top : top + n]
        self._top = top + n
        self._n_owned += n
        self._n_deals += 1
        self._owners[taken] = 1
        self._stamps[taken] = self._n_deals
        return taken.astype(np.int32)

    def fork(self, slots: Slots) -> None:
        """One more owner for each of these slots; ``ValueError`` and no change if one of them is free."""
        slots = self._checked(as_slots(slots))
        if slots.size and self._owners[slots].min() < 1:
            self._refuse(slots, times=False)
        np.add.at(self._owners, slots, _ONE)
        self._n_owned += len(slots)

    def free(self, slots: Slots) -> None:
        """One owner fewer for each of these slots; ``ValueError`` and no change if one has too few.

        Slots come back so that the next ``allocate`` of as many deals them in the same order.
        """
        slots = self._checked(as_slots(slots))
        if not slots.size:
            return
        np.subtract.at(self._owners, slots, _ONE)
        left = self._owners[slots]
        fewest = left.min()
        if fewest < 0:
            np.add.at(self._owners, slots, _ONE)
            self._refuse(slots, times=True)
        none_shared = self._n_owned == self._top  # so far: all of these had one owner, and are listed once
        self._n_owned -= len(slots)
        if not none_shared:
            if (left == 1).any():
                self.n_unshared += 1
            if fewest > 0:
                return
        released = slots if none_shared else self._once(slots[left == 0])
        if self._freed is not None:
            self._freed.append(released)
        self._stack[self._top - len(released) : self._top] = released
        self._top -= len(released)

    def note_freed(self) -> None:
        """From now on `take_freed` is asked."""
        self._freed = []

    def take_freed(self) -> Int[np.ndarray, " n"]:
        """Slots that have lost their last owner since this was last called, and have none now."""
        assert self._freed is not None, "note_freed comes first"
        freed, self._freed = np.concatenate([np.empty(0, np.intp), *self._freed]), []
        return self._once(freed[self._owners[freed] == 0])

    def check_integrity(self, owners: Mapping[Hashable, Slots] | None = None) -> None:
        """Raises ``RuntimeError`` naming the first faulty slot.

        Every slot is free exactly once or owned, never both and never neither. With ``owners`` (owner →
        its slots, everyone who holds any) the reference counts must also be what the owners add up to,
        which finds leaks and slots used after they were freed. O(capacity): for tests and idle moments.
        """
        if not 0 <= self._top <= self.capacity:
            raise RuntimeError(f"{self._top} slots of {self.capacity} are in use")
        free = self._stack[self._top :]
        for slot in free[(free < 0) | (free >= self.capacity)]:
            raise RuntimeError(f"slot {slot} is on the free list, the pool has 0 … {self.capacity - 1}")
        times_free = np.bincount(free, minlength=self.capacity)
        counts = self._owners
        for slot in np.flatnonzero(times_free > 1):
            raise RuntimeError(f"slot {slot} is on the free list {times_free[slot]} times")
        for slot in np.flatnonzero(counts < 0):
            raise RuntimeError(f"slot {slot} has {counts[slot]} owners")
        for slot in np.flatnonzero((counts > 0) & (times_free > 0)):
            raise RuntimeError(f"slot {slot} has {counts[slot]} owner(s) and is on the free list")
        for slot in np.flatnonzero((counts == 0) & (times_free == 0)):
            raise RuntimeError(f"slot {slot} has no owner and is not on the free list: it has leaked")
        if owners is not None:
            self._check_owners({name: as_slots(slots) for name, slots in owners.items()})

    def _check_owners(self, owners: dict[Hashable, np.ndarray]) -> None:
        held = np.concatenate([np.empty(0, np.int64), *owners.values()]).astype(np.int64)
        in_pool = (held >= 0) & (held < self.capacity)
        counts = np.bincount(held[in_pool], minlength=self.capacity)
        for slot in (*np.flatnonzero(counts != self._owners), *held[~in_pool]):
            count = self._owners[slot] if 0 <= slot < self.capacity else 0
            names = [name for name, slots in owners.items() for _ in range(int((slots == slot).sum()))]
            raise RuntimeError(f"slot {slot} has reference count {count}, its owners are {names}")

    def _checked(self, slots: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """The slots as indices, all of them within the pool."""
        slots = slots.astype(np.intp, copy=False)
        # As unsigned numbers the negative ones are the largest: one pass.
        if slots.size and slots.view(np.uintp).max() >= self.capacity:
            slot = int(slots[(slots < 0) | (slots >= self.capacity)][0])
            raise ValueError(f"{slot=} must be within 0 … {self.capacity - 1}")
        return slots

    def _once(self, slots: Int[np.ndarray, " n"]) -> Int[np.ndarray, " m"]:
        """Each slot once, where it is listed first."""
        places = np.arange(len(slots))
        self._place[slots[::-1]] = places[::-1]  # of equal slots the last assignment stays
        return slots[self._place[slots] == places]

    def _refuse(self, slots: np.ndarray, *, times: bool) -> None:
        """Raises for the first slot with fewer owners than needed: 1, or with ``times`` as often as it is
        listed."""
        for slot, listed in Counter(slots.tolist()).items():
            needed = listed if times else 1
            if self._owners[slot] < needed:
                raise ValueError(f"{slot=} has {self._owners[slot]} owner(s), {needed} needed")
