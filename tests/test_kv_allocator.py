"""The slot allocator against a dict model (hypothesis), and check_integrity against planted faults."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as StateBundle
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, multiple, rule

from jaxlamina.kv import OutOfSlots, SlotAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of allocate, fork and free agrees with a dict from slot to number of owners."""

    holdings = StateBundle("holdings")  # each: the slots one owner holds

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(12)
        self.model = dict.fromkeys(range(12), 0)
        self.held: dict[int, list[int]] = {}
        self.n_held = 0

    def _hold(self, slots: list[int]) -> tuple[int, list[int]]:
        self.n_held += 1
        self.held[self.n_held] = slots
        return self.n_held, slots

    @rule(target=holdings, n=st.integers(0, 14))
    def allocate(self, n: int):
        free = [s for s, owners in self.model.items() if owners == 0]
        if n > len(free):
            with pytest.raises(OutOfSlots, match=f"{n} slots asked for, {len(free)} of 12 free"):
                self.slots.allocate(n)
            return multiple()
        got = self.slots.allocate(n)
        assert len(set(got)) == n and set(got) <= set(free)
        for slot in got:
            self.model[slot] = 1
        return self._hold(got)

    @rule(target=holdings, holding=holdings, keep=st.integers(0, 12))
    def fork_prefix(self, holding: tuple[int, list[int]], keep: int):
        shared = holding[1][:keep]
        self.slots.fork(shared)
        for slot in shared:
            self.model[slot] += 1
        return self._hold(shared)

    @rule(holding=consumes(holdings))
    def free(self, holding: tuple[int, list[int]]):
        self.slots.free(holding[1])
        for slot in holding[1]:
            self.model[slot] -= 1
        del self.held[holding[0]]

    @rule(slot=st.integers(0, 11))
    def free_of_a_free_slot_changes_nothing(self, slot: int):
        if self.model[slot] == 0:
            with pytest.raises(ValueError, match=f"slot={slot} has 0 owner"):
                self.slots.free([slot])
            with pytest.raises(ValueError, match=f"slot={slot} has 0 owner"):
                self.slots.fork([slot])

    @invariant()
    def agrees(self):
        assert {s: self.slots.n_owners(s) for s in range(12)} == self.model
        assert self.slots.n_free == sum(owners == 0 for owners in self.model.values())
        assert self.slots.n_used + self.slots.n_free == 12
        self.slots.check_integrity(self.held)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_fresh_pool_deals_in_rising_order_and_reuses_last_freed_first():
    slots = SlotAllocator(8)
    assert slots.allocate(3) == [0, 1, 2]
    second = slots.allocate(2)
    assert second == [3, 4]
    slots.free([0, 1, 2])
    slots.free(second)
    assert slots.allocate(2) == [3, 4]  # freed last, dealt first, in the order they had
    assert slots.allocate(4) == [0, 1, 2, 5]


def test_shared_slot_is_free_only_after_its_last_owner():
    slots = SlotAllocator(4)
    prefix = slots.allocate(2)
    slots.fork(prefix)
    slots.free(prefix)
    assert slots.n_free == 2
    slots.free(prefix)
    assert slots.n_free == 4


def test_freeing_a_slot_twice_in_one_call_is_refused_whole():
    slots = SlotAllocator(4)
    a, b = slots.allocate(2)
    with pytest.raises(ValueError, match=f"slot={b} has 1 owner"):
        slots.free([a, b, b])
    assert slots.n_owners(a) == 1


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int):
    with pytest.raises(ValueError, match="must be at least 1"):
        SlotAllocator(capacity)


def test_out_of_range_slot_is_refused():
    slots = SlotAllocator(4)
    for slot in (-1, 4):
        with pytest.raises(ValueError, match=f"slot={slot} must be within 0 … 3"):
            slots.free([slot])


@pytest.mark.parametrize(
    ("plant", "owners", "message"),
    [
        (lambda a: a._free.append(5), None, "slot 5 is on the free list 2 times"),
        (lambda a: a._free.append(1), None, "slot 1 has 1 owner.* and is on the free list"),
        (lambda a: a._free.append(99), None, "slot 99 is on the free list"),
        (lambda a: a._free.remove(4), None, "slot 4 has no owner .* leaked"),
        (lambda a: a._owners.__setitem__(2, -1), None, "slot 2 has -1 owners"),
        (lambda a: None, {"r": [0, 1]}, r"slot 2 has reference count 1, its owners are \[\]"),
        (lambda a: None, {"r": [0, 1, 2], "s": [2]}, r"slot 2 has reference count 1.*'r', 's'"),
        (lambda a: None, {"r": [0, 1, 2, 3]}, r"slot 3 has reference count 0.*'r'"),
        (lambda a: None, {"r": [0, 1, 2, 8]}, r"slot 8 has reference count 0.*'r'"),
    ],
)
def test_check_integrity_names_the_faulty_slot(plant, owners, message: str):
    slots = SlotAllocator(8)
    slots.allocate(3)
    slots.check_integrity({"r": [0, 1, 2]})
    plant(slots)
    with pytest.raises(RuntimeError, match=message):
        slots.check_integrity(owners)
