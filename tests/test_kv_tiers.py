"""The host tier: who owns what after a move, what is copied, and what is shared instead.

That the copies bring the right KV to the right tokens is tested on pools of integers in test_kv_machine.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxlamina.kv import HostTier, OutOfSlots, PrefixCache, SlotAllocator


def make(n_slots: int = 16, n_host_slots: int = 8) -> tuple[SlotAllocator, HostTier]:
    slots = SlotAllocator(n_slots)
    return slots, HostTier(slots, n_host_slots, bytes_per_token=1000)


def test_out_and_back():
    slots, tier = make()
    slots.allocate(2)
    own = slots.allocate(3)
    out = tier.plan_out(own)
    assert out.source.tolist() == own.tolist() and out.target.tolist() == out.slots.tolist() == [0, 1, 2]
    assert (slots.n_used, tier.n_used, tier.n_free) == (2, 3, 5)
    other = slots.allocate(5)  # takes the slots that were left
    assert tier.n_needed_in(out.slots) == 3
    back = tier.plan_in(out.slots)
    assert back.source.tolist() == [0, 1, 2] and back.target.tolist() == back.slots.tolist()
    assert not set(back.slots) & set(other)
    slots.check_integrity({"first two": [0, 1], "other": other, "request": back.slots})
    tier.check_integrity({})
    assert (tier.moved_out_tokens, tier.moved_out_bytes, tier.moved_in_tokens, tier.moved_in_bytes) == (
        3,
        3000,
        3,
        3000,
    )


def test_samples_that_share_a_prompt_share_it_on_the_host_and_after():
    slots, tier = make()
    prompt = slots.allocate(4)
    slots.fork(prompt)
    one, two = np.append(prompt, slots.allocate(1)), np.append(prompt, slots.allocate(1))
    first = tier.plan_out(one)
    assert slots.n_used == 5  # the other still holds the prompt
    assert tier.n_needed_out(two) == 1
    second = tier.plan_out(two)
    assert second.source.tolist() == two[4:].tolist()  # the prompt is there already
    assert second.slots[:4].tolist() == first.slots[:4].tolist()
    assert slots.n_used == 0 and tier.n_used == 6
    tier.check_integrity({"one": first.slots, "two": second.slots})
    slots.allocate(6)
    one_back = tier.plan_in(first.slots)
    assert tier.n_needed_in(second.slots) == 1
    two_back = tier.plan_in(second.slots)
    assert len(one_back.source) == 5 and two_back.source.tolist() == second.slots[4:].tolist()
    assert one_back.slots[:4].tolist() == two_back.slots[:4].tolist() and slots.n_used == 6 + 6
    assert (tier.moved_out_tokens, tier.moved_in_tokens, tier.n_used) == (6, 6, 0)


def test_what_the_prefix_cache_kept_meanwhile_is_not_copied_back():
    slots, tier = make()
    cache = PrefixCache(slots)
    own = slots.allocate(5)
    cache.insert([1, 2, 3], own[:3])
    out = tier.plan_out(own)
    assert cache.evict(1) == 1
    slots.allocate(3)  # reuses what was evicted and left
    back = tier.plan_in(out.slots)
    assert back.slots[:2].tolist() == own[:2].tolist()
    assert back.source.tolist() == out.slots[2:].tolist()
    assert tier.moved_in_tokens == 3


def test_a_slot_dealt_anew_is_no_twin_even_if_it_is_the_same_slot():
    slots, tier = make()
    own = slots.allocate(2)
    out = tier.plan_out(own)
    assert slots.allocate(2).tolist() == own.tolist()  # somebody else's tokens
    assert tier.n_needed_in(out.slots) == 2
    assert tier.n_needed_out(own) == 2
    tier.free(out.slots)
    again = tier.plan_out(own)
    assert again.source.tolist() == own.tolist()


def test_a_slot_dealt_anew_is_the_twin_of_its_new_owners_only():
    slots, tier = make()
    own = slots.allocate(2)
    first = tier.plan_out(own)
    other = slots.allocate(2)
    assert other.tolist() == own.tolist()
    slots.fork(other)  # by somebody who stays on the device
    second = tier.plan_out(other)
    assert tier.n_needed_in(first.slots) == 2 and tier.n_needed_in(second.slots) == 0
    assert not set(tier.plan_in(first.slots).slots) & set(other)
    assert tier.plan_in(second.slots).slots.tolist() == other.tolist()


def test_no_room_changes_nothing():
    slots, tier = make(8, 4)
    own = slots.allocate(6)
    with pytest.raises(OutOfSlots, match="6 host slots asked for, 4 of 4 free"):
        tier.plan_out(own)
    slots.check_integrity({"own": own})
    out = tier.plan_out(own[2:])
    slots.allocate(5)
    with pytest.raises(OutOfSlots, match="4 slots asked for, 1 of 8 free"):
        tier.plan_in(out.slots)
    tier.check_integrity({"own": out.slots})
    assert (tier.moved_out_tokens, tier.moved_in_tokens) == (4, 0)


def test_without_host_memory_there_is_no_room():
    slots, tier = make(8, 0)
    own = slots.allocate(1)
    assert (tier.n_free, tier.n_used) == (0, 0)
    with pytest.raises(OutOfSlots, match="1 host slots asked for, 0 of 0 free"):
        tier.plan_out(own)
    tier.check_integrity({})
    with pytest.raises(ValueError, match="capacity=-1"):
        HostTier(slots, -1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [([0, 0], "must differ"), ([0, 3], "slot=3 has no owner"), ([99], "slot=99 must be within 0 … 15")],
)
def test_slots_that_cannot_be_moved_are_refused(wrong: list[int], message: str):
    slots, tier = make()
    own = slots.allocate(2)
    with pytest.raises(ValueError, match=message):
        tier.plan_out(wrong)
    assert tier.n_used == 0
    slots.check_integrity({"own": own})


def test_check_integrity_names_the_fault():
    slots, tier = make()
    own = slots.allocate(2)
    slots.fork(own)
    out = tier.plan_out(own)
    tier.check_integrity({"own": out.slots})
    with pytest.raises(RuntimeError, match=r"host slot 0 has reference count 1, its owners are \[\]"):
        tier.check_integrity({})
    tier._twin_of_host[1] = 0
    with pytest.raises(RuntimeError, match="device slot 1 and host slot 1 are not each other's twin"):
        tier.check_integrity()
