"""Schedules of decode steps: the paper's claims, held over many shapes and durations, and what the checker
must catch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.steps.schedules import (
    AttentionRun,
    Durations,
    LocalRun,
    Migration,
    Operator,
    PoolExchange,
    SliceRun,
    balanced,
    bubbles,
    check,
    make_schedule,
)

# Quarters: sums of them are exact, so times can be compared with ==.
quarters = st.integers(1, 40).map(lambda n: n / 4)
durations = st.builds(
    Durations,
    quarters,
    quarters,
    t_first_slice_s=st.none() | quarters,
    t_last_slice_s=st.none() | quarters,
    t_exchange_s=st.just(0.0) | quarters,
)


@st.composite
def shapes(draw, max_steps=3):
    """Arguments of `make_schedule` but for durations."""
    mode = draw(st.sampled_from(["none", "fixed", "rotational", "stages"]))
    n = 1 if mode == "none" else draw(st.integers(1 if mode == "stages" else 2, 8))
    n_layers = draw(st.integers(1, 9))
    options = {"n_steps": draw(st.integers(1, max_steps))}
    if mode == "fixed":
        options["n_replicas"] = draw(st.none() | st.integers(1, n))
    if mode == "stages":
        begins = draw(st.sets(st.integers(1, n_layers), max_size=4))
        options["stages"] = [sum(begin <= k for begin in begins) for k in range(n_layers + 1)]
    # A share of attention on replicas, but for several copies of the model.
    copies = {"rotational": n - 1, "fixed": options.get("n_replicas") or n - 1}.get(mode, 1)
    if copies == 1:
        options["local_share"] = draw(st.sampled_from([0, 0, 0.25, 0.5, 1]))
    return (mode, n, n_layers), options


def ideal(n, n_layers, n_steps=1):
    """A rotation (or, for n = 1, one batch) with equal slices and t_a = t_m / (n - 1), where t_a is 1 s."""
    mode = "rotational" if n > 1 else "none"
    return make_schedule(mode, n, n_layers, Durations(max(1, n - 1), 1), n_steps=n_steps)


def untimed(items):
    """The order alone: no times, no steps."""
    skip = ("start_s", "end_s", "step")
    return [(type(i).__name__, *(getattr(i, f.name) for f in fields(i) if f.name not in skip)) for i in items]


# --- what is claimed ---


@given(shapes(), durations)
def test_every_schedule_is_free_of_conflicts(shape, times):
    arguments, options = shape
    check(make_schedule(*arguments, times, **options))


@given(shapes(), durations, durations)
def test_the_order_does_not_depend_on_durations_or_the_step(shape, times, other_times):
    arguments, options = shape
    other = {**options, "local_share": 0.75} if 0 < options.get("local_share", 0) < 1 else options
    a, b = make_schedule(*arguments, times, **options), make_schedule(*arguments, other_times, **other)
    assert untimed(a.exchanges) == untimed(b.exchanges)
    for replica in range(a.n_replicas):
        first = untimed(a.replica_program(replica))
        for step in range(a.n_steps):
            assert untimed(b.replica_program(replica, step)) == first
    assert untimed(b.pool_program(a.n_steps - 1)) == untimed(a.pool_program())


@given(st.integers(2, 8), st.integers(1, 20), st.integers(1, 3))
def test_rotation_with_equal_slices_has_no_bubble_within_a_step(n, n_layers, n_steps):
    # Lamina 2025 §4.3. Claimed: with t_a = t_m / (n - 1) every replica and the pool work without a gap from
    # their first run of a step to their last one of it; slot s of a step starts s * t_a after the step's
    # start.
    schedule = ideal(n, n_layers, n_steps)
    check(schedule)
    period = n * (n_layers + 1) + -(n_layers + 1) % (n - 1)
    for runs in schedule.replicas:
        for run in runs:
            assert run.start_s == run.step * period + run.slice * n + run.batch
    for run in schedule.attention:
        assert run.start_s == run.step * period + run.layer * n + run.batch + (n - 1)
    for runs in (*schedule.replicas, schedule.attention):
        for step in range(n_steps):
            mine = [r for r in runs if r.step == step]
            assert [r.start_s for r in mine[1:]] == [r.end_s for r in mine[:-1]]
    waits = bubbles(schedule)
    assert all(shares.idle_within == 0 for shares in (*waits.replicas, waits.attention))


@given(st.integers(2, 8), st.integers(1, 20))
def test_what_a_rotation_waits_between_steps(n, n_layers):
    # The pool has no attention between a batch's last slice and its next first one: n * t_a. What n_layers +
    # 1 lacks to a multiple of n - 1 is the price of beginning anew at replica 0.
    waits = bubbles(ideal(n, n_layers, n_steps=4))
    anew = -(n_layers + 1) % (n - 1)
    assert waits.step_s == n * (n_layers + 1) + anew
    assert waits.attention.idle_boundary == pytest.approx((n + anew) / waits.step_s)
    for replica, shares in enumerate(waits.replicas):
        n_runs = len(range(replica, n * (n_layers + 1), n - 1))
        assert shares.idle_boundary == pytest.approx(1 - n_runs * (n - 1) / waits.step_s)
        assert anew or shares.idle_boundary == 0


@given(st.integers(2, 9), st.integers(1, 12))
def test_rotation_is_the_papers(n, n_layers):
    schedule = make_schedule("rotational", n, n_layers)
    assert schedule.n_replicas == n - 1
    places = {(r.batch + 1, r.slice + 1): r.replica + 1 for runs in schedule.replicas for r in runs}
    # Lamina 2025 §4.3 counts all three from 1; two batches and slices further, that is a shift of the
    # replicas' names.
    shift = {(place - ((j + k) % (n - 1) + 1)) % (n - 1) for (j, k), place in places.items()}
    assert len(shift) == 1
    moved = {(m.batch, m.slice, m.source, m.target) for m in schedule.migrations}
    assert moved == {
        (b, k, (b + k - 1) % (n - 1), (b + k) % (n - 1))
        for b in range(n)
        for k in range(1, n_layers + 1)
        if n > 2
    }


@given(st.integers(1, 9), durations, st.integers(1, 3))
def test_two_batches_fixed_are_the_rotation(n_layers, times, n_steps):
    fixed, rotation = (make_schedule(m, 2, n_layers, times, n_steps=n_steps) for m in ("fixed", "rotational"))
    assert replace(fixed, mode="rotational") == rotation
    assert hash(replace(fixed, mode="rotational")) == hash(rotation)
    assert not fixed.migrations


@given(shapes(), durations)
def test_nothing_waits_for_nothing(shape, times):
    # List scheduling: whatever does not start with the stagger starts when something else has ended.
    arguments, options = shape
    schedule = make_schedule(*arguments, times, **options)
    items = [r for runs in schedule.replicas for r in runs]
    items += [*schedule.attention, *schedule.exchanges, *schedule.local]
    ends = {item.end_s for item in items} | {0.0}
    firsts = [
        next(r for r in runs if r.step == k) for runs in schedule.replicas for k in range(schedule.n_steps)
    ]
    assert all(item.start_s in ends or item in firsts for item in items)
    if schedule.mode == "stages":
        return  # all but the first wait for a context
    begun = [runs[0].start_s for runs in schedule.replicas]
    stagger = min(times.t_slice_s / schedule.n_replicas, schedule.t_pool_s)
    assert begun == pytest.approx([r * stagger for r in range(schedule.n_replicas)])


@given(st.integers(2, 8), st.integers(1, 12))
def test_a_rotations_sends_and_receipts_fall_together(n, n_layers):
    # The first sending of a step and the last receipt are alone; all others meet the neighbour's.
    schedule = make_schedule("rotational", n, n_layers)
    assert len(schedule.exchanges) == n * n_layers + 1
    first, *between, last = schedule.exchanges
    assert first.receive is None and last.send is None
    attended = [run.operator for run in schedule.attention]
    assert [(e.receive, e.send) for e in between] == list(pairwise(attended))


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 6), st.integers(1, 8))
def test_pairs_keep_all_stages_at_work(n_stages, n_slices_each, n_pairs, part):
    # As any pipeline: a pair's slices on a stage, as often as there are pairs and stages less one. Attention
    # that has its turn within a slice costs no more than itself, for all batches under way, each time a pair
    # goes on to a stage.
    n_slices, t_attention_s = n_stages * n_slices_each, 1 / (2 * n_stages * part)
    stages = [k // n_slices_each for k in range(n_slices)]
    if n_slices == 1:
        return
    schedule = make_schedule("stages", 2 * n_pairs, n_slices - 1, Durations(1, t_attention_s), stages=stages)
    check(schedule)
    n_turns = n_pairs + n_stages - 1
    least_s = n_turns * 2 * n_slices_each
    assert least_s <= bubbles(schedule).step_s <= least_s + n_turns * 2 * n_stages * t_attention_s + 1e-9


@given(st.integers(1, 9), st.integers(1, 8), durations)
def test_one_stage_is_a_replica(n_layers, n_batches, times):
    # Two batches in turn are the rotation over one replica; one batch alone waits for its own attention.
    stages = [0] * (n_layers + 1)
    schedule = make_schedule("stages", n_batches, n_layers, times, stages=stages)
    check(schedule)
    if n_batches < 3:
        mode = "none" if n_batches == 1 else "rotational"
        assert replace(schedule, mode=mode, stages=()) == make_schedule(mode, n_batches, n_layers, times)


# --- a share on the replica ---
shares = st.integers(0, 8).map(lambda n: n / 8)


@given(st.integers(1, 9), quarters, quarters, shares)
def test_two_batches_take_the_replica_or_the_pool(n_layers, t_slice_s, t_attention_s, share):
    # While the pool attends to one batch, the replica attends to its share of it and runs the other's slice.
    times = Durations(t_slice_s, t_attention_s)
    for mode in ("rotational", "fixed"):
        schedule = make_schedule(mode, 2, n_layers, times, n_steps=3, local_share=share)
        check(schedule)
        each_s = max(t_slice_s + share * t_attention_s, (1 - share) * t_attention_s)
        assert bubbles(schedule).step_s == 2 * t_slice_s + 2 * n_layers * each_s


@given(st.integers(1, 9), quarters, quarters, shares)
def test_one_batch_takes_the_longer_part_of_its_attention(n_layers, t_slice_s, t_attention_s, share):
    schedule = make_schedule(
        "none", 1, n_layers, Durations(t_slice_s, t_attention_s), n_steps=3, local_share=share
    )
    check(schedule)
    longer_s = max(share, 1 - share) * t_attention_s
    assert bubbles(schedule).step_s == (n_layers + 1) * t_slice_s + n_layers * longer_s
    [replica], pool = bubbles(schedule).replicas, bubbles(schedule).attention
    local_s, pool_s = (x * n_layers * t_attention_s for x in (share, 1 - share))
    step_s = bubbles(schedule).step_s
    assert replica.busy == pytest.approx(((n_layers + 1) * t_slice_s + local_s) / step_s)
    assert pool.busy == pytest.approx(pool_s / step_s)


@given(shapes(), durations)
def test_no_share_is_none(shape, times):
    arguments, options = shape
    plain = {name: value for name, value in options.items() if name != "local_share"}
    schedule = make_schedule(*arguments, times, **plain)
    assert schedule == make_schedule(*arguments, times, **plain, local_share=0.0)
    assert not schedule.local
    if "local_share" not in options:
        return
    # All of it: no exchange, and nothing for the pool. Else the order of all else is as it was.
    whole = make_schedule(*arguments, times, **plain, local_share=1)
    assert not whole.exchanges and not whole.attention and not whole.pool_program()
    share = make_schedule(*arguments, times, **plain, local_share=0.5)
    assert untimed(share.pool_program()) == untimed(schedule.pool_program())
    for replica in range(schedule.n_replicas):
        rest = [item for item in share.replica_program(replica) if not isinstance(item, LocalRun)]
        assert untimed(rest) == untimed(schedule.replica_program(replica))


# --- shared out ---


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_no_other_stages_have_less_on_the_largest(costs, data):
    n_stages = data.draw(st.integers(1, len(costs)))

    def sizes(begins):
        ends = (*begins, len(costs))
        return sorted((sum(costs[a:b]) for a, b in pairwise((0, *ends))), reverse=True)

    found = balanced(costs, n_stages)
    assert sorted(set(found)) == list(range(n_stages)) and list(found) == sorted(found)
    every = (sizes(begins) for begins in combinations(range(1, len(costs)), n_stages - 1))
    assert sizes([found.index(k) for k in range(1, n_stages)]) == min(every)


def test_stages_by_hand():
    assert balanced([5, 1, 1, 1, 4], 2) == (0, 0, 1, 1, 1)
    assert balanced([1] * 9, 4) == (0, 0, 1, 1, 2, 2, 3, 3, 3)
    for n in (0, 4):
        with pytest.raises(ValueError, match=f"n_stages={n} must be within 1 … 3, the slices"):
            balanced([1, 1, 1], n)


# --- by hand ---


def short(item):
    if isinstance(item, SliceRun):
        return f"slice {item.batch}.{item.slice}"
    if isinstance(item, AttentionRun):
        return f"attention {item.batch}.{item.layer}"
    if isinstance(item, LocalRun):
        return f"own attention {item.batch}.{item.layer}"
    if isinstance(item, Migration):
        return f"{item.batch}.{item.slice} from {item.source} to {item.target}"
    sides = (("send", item.send), ("receive", item.receive))
    return " ".join(f"{what} {op.batch}.{op.layer}" for what, op in sides if op is not None)


def test_programs_of_two_batches_over_one_replica():
    schedule = make_schedule("rotational", 2, 2)
    assert [short(i) for i in schedule.replica_program(0)] == [
        "slice 0.0", "send 0.0",
        "slice 1.0", "send 1.0 receive 0.0",
        "slice 0.1", "send 0.1 receive 1.0",
        "slice 1.1", "send 1.1 receive 0.1",
        "slice 0.2", "receive 1.1",
        "slice 1.2",
    ]  # fmt: skip
    assert [short(i) for i in schedule.pool_program()] == [
        "send 0.0", "attention 0.0",
        "send 1.0 receive 0.0", "attention 1.0",
        "send 0.1 receive 1.0", "attention 0.1",
        "send 1.1 receive 0.1", "attention 1.1",
        "receive 1.1",
    ]  # fmt: skip


def test_programs_of_two_batches_with_a_share_on_the_replica():
    schedule = make_schedule("rotational", 2, 1, Durations(2, 4), local_share=0.25)
    assert [short(i) for i in schedule.replica_program(0)] == [
        "slice 0.0", "send 0.0", "own attention 0.0",
        "slice 1.0", "send 1.0 receive 0.0", "own attention 1.0",
        "slice 0.1", "receive 1.0",
        "slice 1.1",
    ]  # fmt: skip
    assert [(r.start_s, r.end_s) for r in schedule.local] == [(2, 3), (5, 6)]
    assert [(r.start_s, r.end_s) for r in schedule.attention] == [(2, 5), (5, 8)]
    whole = make_schedule("rotational", 2, 1, Durations(2, 4), local_share=1)
    assert [short(i) for i in whole.replica_program(0)] == [
        "slice 0.0", "own attention 0.0", "slice 1.0", "own attention 1.0", "slice 0.1", "slice 1.1",
    ]  # fmt: skip


def test_a_context_goes_with_what_its_stage_attended_to():
    schedule = make_schedule("stages", 2, 1, Durations(2, 4), stages=[0, 1], local_share=0.25)
    check(schedule)
    assert [short(i) for i in schedule.replica_program(0)] == [
        "slice 0.0", "send 0.0", "own attention 0.0",
        "slice 1.0", "send 1.0", "own attention 1.0", "0.1 from 0 to 1", "1.1 from 0 to 1",
    ]  # fmt: skip
    early = [replace(m, start_s=2) if m.batch == 0 else m for m in schedule.migrations]
    with pytest.raises(ValueError, match="starts before the end of the replica's own attention 0 of batch 0"):
        check(replace(schedule, migrations=tuple(early)))
    elsewhere = [replace(r, replica=1) for r in schedule.local]
    with pytest.raises(ValueError, match="own attention 0 of batch 0 in step 0 is on replica 1; 0 runs that"):
        check(replace(schedule, local=tuple(elsewhere)))


def test_a_slice_must_follow_what_its_replica_attends_to():
    schedule = make_schedule("none", 1, 1, Durations(2, 4), local_share=0.75)
    late = [replace(r, end_s=r.end_s + 0.5) for r in schedule.local]
    with pytest.raises(
        ValueError, match="slice 1 of batch 0 in step 0 starts before the end of the replica's"
    ):
        check(replace(schedule, local=tuple(late)))


def test_programs_of_three_batches_over_two_replicas():
    schedule = make_schedule("rotational", 3, 1, Durations(2, 1))
    assert [short(i) for i in schedule.replica_program(0)] == [
        "slice 0.0", "send 0.0", "0.1 from 0 to 1",
        "slice 2.0", "send 2.0 receive 1.0", "1.1 from 1 to 0", "2.1 from 0 to 1",
        "slice 1.1",
    ]  # fmt: skip
    assert [short(i) for i in schedule.replica_program(1)] == [
        "slice 1.0", "send 1.0 receive 0.0", "0.1 from 0 to 1", "1.1 from 1 to 0",
        "slice 0.1", "receive 2.0", "2.1 from 0 to 1",
        "slice 2.1",
    ]  # fmt: skip
    assert [(r.start_s, r.end_s) for r in schedule.replicas[1]] == [(1, 3), (3, 5), (5, 7)]


def test_programs_of_two_pairs_over_two_stages():
    schedule = make_schedule("stages", 4, 3, Durations(2, 1), stages=[0, 0, 1, 1])
    check(schedule)
    assert [short(i) for i in schedule.replica_program(0)] == [
        "slice 0.0", "send 0.0",
        "slice 1.0", "send 1.0 receive 0.0",
        "slice 0.1", "send 0.1 receive 1.0",
        "slice 1.1", "send 1.1", "0.2 from 0 to 1",
        "slice 2.0", "send 2.0", "1.2 from 0 to 1",
        "slice 3.0", "send 3.0 receive 2.0",
        "slice 2.1", "send 2.1 receive 3.0",
        "slice 3.1", "send 3.1", "2.2 from 0 to 1", "3.2 from 0 to 1",
    ]  # fmt: skip
    assert [short(i) for i in schedule.replica_program(1)] == [
        "receive 0.1", "0.2 from 0 to 1",
        "slice 0.2", "send 0.2 receive 1.1", "1.2 from 0 to 1",
        "slice 1.2", "send 1.2 receive 0.2",
        "slice 0.3", "receive 1.2",
        "slice 1.3", "receive 2.1", "2.2 from 0 to 1",
        "slice 2.2", "send 2.2 receive 3.1", "3.2 from 0 to 1",
        "slice 3.2", "send 3.2 receive 2.2",
        "slice 2.3", "receive 3.2",
        "slice 3.3",
    ]  # fmt: skip
    # The pool serves both stages' first batches, then both stages' second ones.
    attended = [(r.batch, r.layer) for r in schedule.attention]
    assert attended[4:8] == [(0, 2), (2, 0), (1, 2), (3, 0)]


def test_one_batch_goes_from_stage_to_stage():
    schedule = make_schedule("stages", 1, 2, Durations(2, 1), stages=[0, 1, 1])
    check(schedule)
    assert [short(i) for i in schedule.replica_program(0)] == ["slice 0.0", "send 0.0", "0.1 from 0 to 1"]
    assert [short(i) for i in schedule.replica_program(1)] == [
        "receive 0.0", "0.1 from 0 to 1",
        "slice 0.1", "send 0.1", "receive 0.1",
        "slice 0.2",
    ]  # fmt: skip
    assert [(r.start_s, r.end_s) for r in schedule.replicas[1]] == [(3, 5), (6, 8)]


def test_one_batch_waits_for_its_own_attention():
    schedule = make_schedule("none", 1, 2, Durations(2, 1, 3, 5, t_exchange_s=0.5))
    check(schedule)
    assert [short(i) for i in schedule.replica_program(0)] == [
        "slice 0.0", "send 0.0", "receive 0.0",
        "slice 0.1", "send 0.1", "receive 0.1",
        "slice 0.2",
    ]  # fmt: skip
    assert [(r.start_s, r.end_s) for r in schedule.replicas[0]] == [(0, 3), (5, 7), (9, 14)]
    assert [(r.start_s, r.end_s) for r in schedule.attention] == [(3.5, 4.5), (7.5, 8.5)]


def test_fixed_shares_replicas_out():
    def batches(**options):
        schedule = make_schedule("fixed", 5, 3, **options)
        check(schedule)
        return [sorted({run.batch for run in runs}) for runs in schedule.replicas]

    assert batches() == [[0, 4], [1], [2], [3]]
    assert batches(n_replicas=2) == [[0, 2, 4], [1, 3]]
    assert batches(n_replicas=5) == [[0], [1], [2], [3], [4]]


def test_a_batch_to_itself_makes_its_replica_wait():
    # Lamina 2024, Figure 8b: with a replica a batch, a replica is idle while its batch is in attention.
    waits = bubbles(make_schedule("fixed", 3, 9, Durations(2, 1), n_steps=4, n_replicas=3))
    assert waits.step_s == 10 * 2 + 9 * 1
    assert {shares.idle_within for shares in waits.replicas} == {9 / 29}
    assert {shares.busy for shares in waits.replicas} == {20 / 29}


def test_bubbles_by_hand():
    # One batch: slices 1, 1, 1, 4; attention 0.5 between.
    waits = bubbles(make_schedule("none", 1, 3, Durations(1, 0.5, t_last_slice_s=4), n_steps=3))
    assert waits.step_s == 8.5
    (replica,) = waits.replicas
    assert (replica.busy, replica.idle_within, replica.idle_boundary) == (7 / 8.5, 1.5 / 8.5, 0)
    pool = waits.attention
    assert (pool.busy, pool.idle_within, pool.idle_boundary) == (1.5 / 8.5, 2 / 8.5, 5 / 8.5)


def test_a_longer_head_is_a_bubble_of_the_pool_between_steps():
    plain, headed = (
        bubbles(make_schedule("rotational", 2, 8, Durations(1, 1, None, head), n_steps=4)) for head in (1, 3)
    )
    assert headed.replicas[0].busy == 1
    assert headed.step_s == plain.step_s + 2 * 2
    assert plain.attention.idle_boundary * plain.step_s == pytest.approx(2)
    assert headed.attention.idle_boundary * headed.step_s == pytest.approx(2 + 2 * 2)
    assert headed.attention.idle_within == 0


@given(shapes(max_steps=4), durations)
def test_shares_add_up(shape, times):
    arguments, options = shape
    waits = bubbles(make_schedule(*arguments, times, **options))
    for shares in (*waits.replicas, waits.attention):
        parts = [getattr(shares, f.name) for f in fields(shares)]
        assert sum(parts) == pytest.approx(1) and min(parts) >= 0


# --- what the checker must catch ---


def mended(schedule, row, index, **changes):
    """The schedule with one slice run changed."""
    runs = list(schedule.replicas[row])
    runs[index] = replace(runs[index], **changes)
    replicas = list(schedule.replicas)
    replicas[row] = tuple(runs)
    return replace(schedule, replicas=tuple(replicas))


@given(shapes(), durations, st.data())
def test_two_runs_swapped_are_a_conflict(shape, times, data):
    arguments, options = shape
    schedule = make_schedule(*arguments, times, **options)
    several = [r for r, runs in enumerate(schedule.replicas) if len(runs) > 1]
    if not several:
        return
    replica = data.draw(st.sampled_from(several))
    runs = schedule.replicas[replica]
    i, j = data.draw(st.lists(st.integers(0, len(runs) - 1), min_size=2, max_size=2, unique=True))
    swapped = schedule
    for here, there in ((i, runs[j]), (j, runs[i])):
        what = {"step": there.step, "batch": there.batch, "slice": there.slice}
        swapped = mended(swapped, replica, here, **what)
    with pytest.raises(ValueError, match="^schedule: "):
        check(swapped)


@given(shapes(), durations, st.data())
def test_anything_missing_twice_or_out_of_order_is_a_conflict(shape, times, data):
    arguments, options = shape
    schedule = make_schedule(*arguments, times, **options)
    name = data.draw(st.sampled_from(["attention", "exchanges", "migrations", "local"]))
    items = list(getattr(schedule, name))
    if not items:
        return
    i, j = (data.draw(st.integers(0, len(items) - 1)) for _ in range(2))
    for wrong in (items[:i] + items[i + 1 :], items + [items[i]], items[:i] + [items[j]] + items[i + 1 :]):
        if wrong != items:
            with pytest.raises(ValueError, match="missing|twice"):
                check(replace(schedule, **{name: tuple(wrong)}))
    if i != j and name not in ("migrations", "local"):
        items[i], items[j] = items[j], items[i]
        with pytest.raises(ValueError, match="^schedule: "):
            check(replace(schedule, **{name: tuple(items)}))


@given(shapes(), durations, st.data())
def test_an_earlier_start_is_a_conflict(shape, times, data):
    arguments, options = shape
    schedule = make_schedule(*arguments, times, **options)
    every = ["attention", "exchanges", "local"]
    name = data.draw(st.sampled_from([name for name in every if getattr(schedule, name)]))
    items = list(getattr(schedule, name))
    i = data.draw(st.integers(0, len(items) - 1))
    items[i] = replace(items[i], start_s=items[i].start_s - 0.1)
    with pytest.raises(ValueError, match="before"):
        check(replace(schedule, **{name: tuple(items)}))


def test_conflicts_are_named():
    schedule = ideal(3, 4)

    def conflict(wrong):
        with pytest.raises(ValueError) as error:
            check(wrong)
        return str(error.value)

    runs = schedule.replicas[0]
    assert (runs[1].batch, runs[1].slice) == (2, 0)
    assert conflict(mended(schedule, 0, 1, start_s=1.5)) == (
        "schedule: replica 0 is to start slice 0 of batch 2 in step 0 before step 0's exchange of replica 0 "
        "that sends batch 0 to attention 0 has ended"
    )
    assert conflict(mended(schedule, 0, 1, replica=1)) == (
        "schedule: slice 0 of batch 2 in step 0 is on replica 0, marked 1; it belongs on 0"
    )
    assert "slice 5 of batch 2 in step 0 is not part of" in conflict(mended(schedule, 0, 1, slice=5))
    moved = replace(schedule.migrations[0], target=0)
    assert conflict(replace(schedule, migrations=(moved, *schedule.migrations[1:]))) == (
        "schedule: the context before slice 1 of batch 0 in step 0 goes from 0 to 0, not from 0 to 1"
    )
    early = replace(schedule.migrations[0], start_s=0.5)
    assert "does not go between" in conflict(replace(schedule, migrations=(early, *schedule.migrations[1:])))
    elsewhere = replace(schedule.exchanges[0], replica=1)
    assert "but replica 0 runs that slice" in conflict(
        replace(schedule, exchanges=(elsewhere, *schedule.exchanges[1:]))
    )
    last = replace(schedule.exchanges[-1], replica=1 - schedule.exchanges[-1].replica)
    assert "runs the slice after it" in conflict(
        replace(schedule, exchanges=(*schedule.exchanges[:-1], last))
    )
    backwards = mended(schedule, 1, -1, end_s=schedule.replicas[1][-1].start_s - 1)
    assert conflict(backwards) == "schedule: slice 4 of batch 1 in step 0 ends before it starts"
    empty = PoolExchange(0, 0, None, None, 0.0, 0.0)
    assert "is empty" in conflict(replace(schedule, exchanges=(*schedule.exchanges, empty)))


def sooner(schedule, row, step, batch, slice_):
    """The schedule with one slice run half a second sooner."""
    runs = schedule.replicas[row]
    (i,) = (i for i, r in enumerate(runs) if (r.step, r.batch, r.slice) == (step, batch, slice_))
    return mended(schedule, row, i, start_s=runs[i].start_s - 0.5, end_s=runs[i].end_s - 0.5)


def test_a_slice_must_follow_its_batchs_attention():
    # Replica 1 of this schedule has one batch and waits for it; it is free half a second sooner.
    schedule = make_schedule("fixed", 3, 2, Durations(2, 1))
    with pytest.raises(
        ValueError, match="slice 1 of batch 1 in step 0 starts before the end of attention 0 of"
    ):
        check(sooner(schedule, 1, step=0, batch=1, slice_=1))


def test_an_attention_must_follow_its_slice():
    schedule = ideal(3, 2)
    early = replace(schedule.attention[0], start_s=1.5, end_s=2.5)
    with pytest.raises(
        ValueError, match="attention 0 of batch 0 in step 0 starts before the end of slice 0 of"
    ):
        check(replace(schedule, attention=(early, *schedule.attention[1:])))


def test_a_step_must_follow_the_last_ones_token():
    # Replica 2 ends its last slice a second before replica 0 ends batch 2's.
    schedule = make_schedule("rotational", 4, 1, Durations(3, 1), n_steps=2)
    last = schedule.replicas[2][1]
    assert (last.step, last.batch, last.slice, last.end_s) == (0, 1, 1, 8)
    token = next(r for r in schedule.replicas[0] if (r.step, r.batch, r.slice) == (0, 2, 1))
    first = schedule.replicas[2][2]
    assert (first.step, first.batch, first.slice) == (1, 2, 0) and token.end_s == 9
    check(mended(schedule, 2, 2, start_s=9.0))
    with pytest.raises(ValueError, match="slice 0 of batch 2 in step 1 starts before the end of slice 1 of"):
        check(mended(schedule, 2, 2, start_s=8.5))


def test_an_order_that_locks_up_is_found_without_the_clock():
    schedule = make_schedule("rotational", 4, 3)

    def still(items):
        return tuple(replace(item, start_s=0.0, end_s=0.0) for item in items)

    timeless = replace(
        schedule,
        replicas=tuple(still(runs) for runs in schedule.replicas),
        **{name: still(getattr(schedule, name)) for name in ("attention", "exchanges", "migrations")},
    )
    check(timeless)
    first, second, *others = timeless.exchanges
    with pytest.raises(ValueError, match="lock up: replica 0 at step 0's exchange"):
        check(replace(timeless, exchanges=(second, first, *others)))


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("striped", 2, 2), {}, "mode='striped' must be one of none, fixed, rotational, stages"),
        (("none", 2, 2), {}, "n_batches=2 must be 1 with mode='none'"),
        (("rotational", 1, 2), {}, "n_batches=1 must be at least 2"),
        (("fixed", 0, 2), {}, "n_batches=0 must be at least 2"),
        (("rotational", 3, 0), {}, "n_layers=0 must be at least 1"),
        (("rotational", 3, 2), {"n_steps": 0}, "n_steps=0 must be at least 1"),
        (("rotational", 3, 2), {"n_replicas": 3}, "n_replicas=3 must be 2 with mode='rotational'"),
        (("fixed", 3, 2), {"n_replicas": 4}, "n_replicas=4 must be within 1 … 3"),
        (("fixed", 3, 2), {"stages": [0, 0, 0]}, "are of mode 'stages', not of mode='fixed'"),
        (("stages", 3, 2), {}, "stages=None must be 3 with mode='stages': each slice's"),
        (("stages", 3, 2), {"stages": [0, 1]}, "must be 3 with mode='stages'"),
        (("stages", 3, 2), {"stages": [1, 1, 1]}, "must begin with 0 and go up by one at a time"),
        (("stages", 3, 2), {"stages": [0, 2, 2]}, "must begin with 0 and go up by one at a time"),
        (("stages", 3, 2), {"stages": [0, 1, 0]}, "must begin with 0 and go up by one at a time"),
        (("none", 1, 2), {"local_share": 1.5}, "local_share=1.5 must be a share of attention, from 0 to 1"),
        (("none", 1, 2), {"local_share": -0.5}, "local_share=-0.5 must be a share of attention"),
        (("none", 1, 2), {"local_share": float("nan")}, "local_share=nan must be a share of attention"),
        (("rotational", 3, 2), {"local_share": 0.5}, "2 copies of the model are not one: take 2 batches"),
        (
            ("fixed", 3, 2),
            {"local_share": 1, "n_replicas": 2},
            "local_share=1 of the KV is kept on the model",
        ),
        (("stages", 0, 2), {"stages": [0, 1, 1]}, "n_batches=0 must be at least 1"),
        (
            ("stages", 3, 2),
            {"stages": [0, 1, 1], "n_replicas": 3},
            "n_replicas=3 must be 2 with mode='stages'",
        ),
    ],
)
def test_what_cannot_be_scheduled(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments, **options)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", [f.name for f in fields(Durations)])
def test_times_must_be_above_0(name, bad):
    if (name, bad) == ("t_exchange_s", 0):
        assert Durations(**{name: bad}).t_exchange_s == 0
        return
    with pytest.raises(ValueError, match=f"{name}=.* must be a finite time above 0"):
        Durations(**{name: bad})


def test_schedules_are_plain_python():
    program = (
        "import sys, jaxlamina.steps.schedules as s; s.check(s.make_schedule('rotational', 3, 4)); "
        "bad = {'jax', 'numpy', 'matplotlib'} & set(sys.modules); assert not bad, bad"
    )
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, timeout=60)


def test_operators_are_what_runs_say():
    schedule = make_schedule("none", 1, 1)
    assert schedule.attention[0].operator == Operator(batch=0, layer=0) == schedule.exchanges[0].send
