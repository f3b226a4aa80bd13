"""A step's slots as messages: an attention rank has the tables that rank 0 has, and is told only what changed
in them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.job.control import messages as m
from jaxlamina.job.control.messages import RunStep, decode, encode
from jaxlamina.kv.allocator import SlotAllocator
from jaxlamina.kv.planned_rows import SegmentSlots
from jaxlamina.ranks.remote_worker import SlotTables
from jaxlamina.steps.shape import StepShape

SHAPE = StepShape("decode", 1, 1, 16)


def sent(tables: SlotTables, segments: list[SegmentSlots]) -> tuple[RunStep, int]:
    """The message as it comes, and its bytes."""
    line = encode(m.RunStep(1, 0, SHAPE, *tables.as_message(segments)))
    step = decode(line)
    assert isinstance(step, RunStep)
    return step, len(line)


def segment(table: np.ndarray, rng: np.random.Generator) -> SegmentSlots:
    def ints(*shape: int) -> np.ndarray:
        return rng.integers(0, 99, shape, dtype=np.int32)

    return SegmentSlots(table, ints(len(table)), ints(3), {4: ints(len(table), 1)})


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=12),
    st.integers(0, 9),
)
def test_both_ends_have_the_same_tables(steps: list[tuple[int, int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, there = SlotTables(), SlotTables()
    table, kept = rng.integers(0, 99, (4, 9), dtype=np.int32), []
    for n_rows, n_columns, n_changes in steps:
        if n_changes > 10:  # another bucket
            table = rng.integers(0, 99, (n_rows, n_columns), dtype=np.int32)
        table = table.copy()
        at = rng.integers(0, max(1, table.size), n_changes)
        table.reshape(-1)[at[at < table.size]] = 100
        segments = [segment(table, rng), segment(table[:1], rng)][: 1 + n_rows % 2]
        step, _ = sent(here, segments)
        found = there.slots_from(step)
        for got, want in zip(found, segments, strict=True):
            for a, b in zip(got[:3], want[:3], strict=True):
                np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(got.q_positions[4], want.q_positions[4])
        kept.append((found, [np.array(got.slot_table) for got in found]))
    for found, copies in kept:  # a device may still read what came before
        for got, copy in zip(found, copies, strict=True):
            np.testing.assert_array_equal(got.slot_table, copy)


def test_a_row_that_goes_on_costs_a_few_bytes() -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(0, 2**19, (64, 8192), dtype=np.int32)
    here = SlotTables()
    _, first = sent(here, [segment(table, rng)])
    table = table.copy()
    table[:, 5000] += 1
    _, second = sent(here, [segment(table, rng)])
    assert first > table.nbytes and second < 4096


def test_the_allocator_says_which_slots_are_free_again() -> None:
    slots = SlotAllocator(8)
    slots.note_freed()
    a, b = slots.allocate(3), slots.allocate(2)
    slots.fork(a[:1])
    slots.free(a)
    slots.free(b)
    again = slots.allocate(1)  # the one that was freed last
    freed = slots.take_freed().tolist()
    assert freed == sorted({*a[1:].tolist(), *b.tolist()} - set(again.tolist()))
    assert slots.take_freed().tolist() == []
