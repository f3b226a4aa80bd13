"""Overcommit: which tokens' KV has moved to host memory, and what must be copied to get it there and back.

Policy on plain numpy: it plans copies and counts them, and knows no KV array, no device and no request. A
plan changes who owns which slot at once; the copies it names must then be run in the order they were planned,
and before anything else is written into the pools (attention workers: ``move_out``, ``move_in``).

KV does not change while its slot is owned, so a token may be on both sides at a time: its *twin*. What
several owners share goes out once and comes back once, and what is still on the device when its owner wants
it back (a prefix that the cache has kept, say) is shared again and not copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from jaxlamina.kv.allocator import OutOfSlots, SlotAllocator, Slots, as_slots


class Move(NamedTuple):
    """Where tokens are now, and the copies that bring them there."""

    slots: Int32[np.ndarray, " n"]  # the tokens' slots on the other side, in the order asked
    source: Int32[np.ndarray, " m"]  # slots to copy from, m ≤ n, on the side that they leave
    target: Int32[np.ndarray, " m"]  # slots to copy to


class HostTier:
    """Host slots ``0 … capacity-1`` beside a device's, for requests that wait for room.

    ``plan_out`` when a request must give way, ``plan_in`` before it runs again, ``free`` if it never will.
    ``bytes_per_token`` is a token's K and V in all layers, for the counters.
    """

    def __init__(self, device: SlotAllocator, capacity: int, *, bytes_per_token: int = 0) -> None:
        if capacity < 0:
            raise ValueError(f"{capacity=} must be 0 (no host memory) or more slots")
        self.device = device
        self.capacity = capacity
        self.bytes_per_token = bytes_per_token
        self.moved_out_tokens = 0  # copied to the host
        self.moved_in_tokens = 0  # copied back
        self._host = SlotAllocator(max(1, capacity))
        if capacity == 0:
            self._host.allocate(1)  # nobody's: there is none to deal
        # Twins by device slot: the host slot, and the stamps under which the two hold the same.
        self._twin = np.zeros(device.capacity, np.int32)
        self._stamps = np.zeros((2, device.capacity), np.int64)  # [device | host, S]; 0: no twin
        self._twin_of_host = np.zeros(self._host.capacity, np.int32)

    @property
    def n_free(self) -> int:
        """Host slots nobody owns."""
        return self._host.n_free

    @property
    def n_used(self) -> int:
        """Host slots with at least one owner."""
        return self.capacity - self._host.n_free

    @property
    def moved_out_bytes(self) -> int:
        return self.moved_out_tokens * self.bytes_per_token

    @property
    def moved_in_bytes(self) -> int:
        return self.moved_in_tokens * self.bytes_per_token

    def n_needed_out(self, slots: Slots) -> int:
        """How many host slots ``plan_out`` of these device slots would take."""
        slots = as_slots(slots)
        return len(slots) - int(np.count_nonzero(self._has_host_twin(slots)))

    def n_needed_in(self, slots: Slots) -> int:
        """How many device slots ``plan_in`` of these host slots would take."""
        slots = as_slots(slots)
        return len(slots) - int(np.count_nonzero(self._has_device_twin(slots)))

    def plan_out(self, slots: Slots) -> Move:
        """Takes one owner's device slots to the host: its references become references on ``Move.slots``.

        Their KV must have been written: a slot that was taken for the coming step has nothing to move yet.
        ``OutOfSlots`` and no change if the host has too few; ``ValueError`` and no change if a slot is free
        or listed twice.
        """
        slots = as_slots(slots)
        _check_owned_once(self.device, slots)
        shared = self._has_host_twin(slots)
        source = slots[~shared].astype(np.int32)
        if len(source) > self.n_free:
            raise OutOfSlots(f"{len(source)} host slots asked for, {self.n_free} of {self.capacity} free")
        target = self._host.allocate(len(source))
        host = np.empty(len(slots), np.int32)
        host[shared], host[~shared] = self._twin[slots[shared]], target
        self._host.fork(host[shared])
        self._pair(source, target)
        self.device.free(slots)
        self.moved_out_tokens += len(source)
        return Move(host, source, target)

    def plan_in(self, slots: Slots) -> Move:
        """Brings one owner's host slots back: its references become references on the device's
        ``Move.slots``.

        ``OutOfSlots`` and no change if the device has too few; ``ValueError`` as in ``plan_out``.
        """
        slots = as_slots(slots)
        _check_owned_once(self._host, slots)
        shared = self._has_device_twin(slots)
        source = slots[~shared].astype(np.int32)
        target = self.device.allocate(len(source))
        device = np.empty(len(slots), np.int32)
        device[shared], device[~shared] = self._twin_of_host[slots[shared]], target
        self.device.fork(device[shared])
        self._pair(target, source)
        self._host.free(slots)
        self.moved_in_tokens += len(source)
        return Move(device, source, target)

    def fork(self, slots: Slots) -> None:
        """One more owner for each of these host slots."""
        self._host.fork(slots)

    def free(self, slots: Slots) -> None:
        """One owner fewer for each of these host slots: their KV is not wanted back."""
        self._host.free(slots)

    def check_integrity(self, owners: Mapping[Hashable, Slots] | None = None) -> None:
        """Raises ``RuntimeError`` naming the first faulty host slot; ``owners`` as for ``SlotAllocator``, of
        host slots."""
        if owners is not None and self.capacity == 0:
            owners = {**owners, "no host memory": [0]}
        try:
            self._host.check_integrity(owners)
        except RuntimeError as error:
            raise RuntimeError(f"host {error}") from None
        device = np.flatnonzero(self.device.owner_counts)
        device = device[self._has_host_twin(device)]
        host = self._twin[device]
        for slot in device[self._twin_of_host[host] != device]:
            raise RuntimeError(
                f"device slot {slot} and host slot {self._twin[slot]} are not each other's twin"
            )

    def _pair(self, device: Int[np.ndarray, " n"], host: Int[np.ndarray, " n"]) -> None:
        """These hold the same from now on, for as long as both stay owned."""
        self._twin[device] = host
        self._twin_of_host[host] = device
        self._stamps[0, device] = self.device.stamps_of(device)
        self._stamps[1, device] = self._host.stamps_of(host)

    def _has_host_twin(self, device: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which of these owned device slots have their KV on the host as well."""
        host = self._twin[device]
        return (
            (self._host.owner_counts[host] > 0)
            & (self._stamps[0, device] == self.device.stamps_of(device))
            & (self._stamps[1, device] == self._host.stamps_of(host))
        )

    def _has_device_twin(self, host: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which of these owned host slots have their KV on the device as well."""
        device = self._twin_of_host[host]
        return (
            (self.device.owner_counts[device] > 0)
            & (self._twin[device] == host)
            & self._has_host_twin(device)
        )


def _check_owned_once(slots: SlotAllocator, held: Int[np.ndarray, " n"]) -> None:
    """``ValueError`` unless these slots of one owner are all owned and listed once."""
    if len(np.unique(held)) < len(held):
        raise ValueError(f"slots {held.tolist()} of one owner must differ")
    for slot in held[slots.owners_of(held) < 1]:
        raise ValueError(f"slot={int(slot)} has no owner, so there is nothing to move")
