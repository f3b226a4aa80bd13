"""What admission leaves free for those that run: enough and no more than that, whatever they write."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler import make, request, run_step

from jaxlamina.engine.headroom import Headroom, most_wanted
from jaxlamina.engine.policies import load_policy
from jaxlamina.engine.request import RequestState

ROWS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=8)


@given(ROWS)
def test_most_wanted_is_what_playing_it_through_wants(rows):
    """A step is a slot of each; who has all gives them back before the next."""
    most = wanted = 0
    for step in range(1, 21):
        wanted += sum(to_come >= step for to_come, _ in rows)
        most = max(most, wanted)
        wanted -= sum(to_come + held for to_come, held in rows if to_come == step)
    to_come, held = np.array(rows, int).reshape(-1, 2).T
    assert most_wanted(to_come, held) == most


def ended(n_generated: int, max_tokens: int):
    r = request("r", 4, max_tokens)
    r.output_token_ids = [1] * n_generated
    return r


def test_the_share_is_the_mean_of_those_that_have_ended_and_the_last_ones_count_most() -> None:
    headroom = Headroom()
    assert headroom.share == 0.5 and headroom.of([ended(0, 21), ended(0, 100_000)]).tolist() == [10, 512]
    headroom.ended(ended(0, 10))  # never ran
    assert headroom.share == 0.5
    headroom.ended(ended(1, 10))
    headroom.ended(ended(3, 10))
    assert headroom.share == pytest.approx((0.1 + 0.3) / 2) and headroom.of([ended(0, 100_001)]) == 20_000
    for _ in range(1000):
        headroom.ended(ended(10, 10))
    assert headroom.share == pytest.approx(1)
    for _ in range(64):
        headroom.ended(ended(1, 10))
    assert headroom.share == pytest.approx(0.1 + 0.9 * (1 - 1 / 64) ** 64)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.25, 2), (1.0, 7)])
def test_a_fixed_share(share: float, expected: int) -> None:
    headroom = Headroom(share)
    headroom.ended(ended(1, 10))
    assert headroom.share == share
    assert expected == max(1, math.ceil(share * 7))
    # The last token's slot is never taken; one is left all the same.
    assert headroom.of([ended(2, 10), ended(9, 10)]).tolist() == [expected, 1]


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_no_share(share: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        Headroom(share)


SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12)


def play(sizes, capacity: int, **options):
    """(steps, preemptions) until all have written their whole max_tokens."""
    scheduler = make(capacity, max_num_seqs=6, **options)
    requests = [request(str(i), *size) for i, size in enumerate(sizes)]
    for r in requests:
        scheduler.add(r)
    n_steps = n_preempted = 0
    while not scheduler.idle:
        n_preempted += len(run_step(scheduler).preempted)
        scheduler.check_integrity()
        n_steps += 1
        assert n_steps < 1000
    assert all(r.state is RequestState.FINISHED and len(r.output_token_ids) == r.max_tokens for r in requests)
    return n_steps, n_preempted


@given(SIZES, st.integers(0, 30))
def test_with_room_for_all_that_may_be_written_none_gives_way(sizes, spare: int) -> None:
    capacity = max(a + b - 1 for a, b in sizes) + spare
    assert play(sizes, capacity, headroom=1.0)[1] == 0


def test_a_queue_of_equals_is_served_in_fewer_steps_than_padded_and_with_fewer_that_give_way() -> None:
    sizes = [(4, 12), (4, 3), (4, 12), (4, 3), (4, 12), (4, 3), (4, 12), (4, 3)]
    n_steps, n_preempted = play(sizes, 40, headroom=1.0)
    assert n_preempted == 0 and n_steps < play(sizes, 40, padded=True)[0]
    eager = play(sizes, 40, headroom=0.0)
    assert eager[1] > 0
    assert play(sizes, 40, headroom=None)[1] < eager[1]


def test_who_may_displace_others_leaves_room_for_their_next_tokens_alone() -> None:
    scheduler = make(24, max_num_seqs=4, headroom=1.0, policy=load_policy("chat-first"))
    batch = request("batch", 4, 18)
    batch.priority = 1
    scheduler.add(batch)
    run_step(scheduler)
    later = request("later", 4, 18)
    later.priority = 1
    chat = request("chat", 4, 12)
    scheduler.add(later)
    run_step(scheduler)
    assert later.state is RequestState.WAITING  # both would come to want 42
    scheduler.add(chat)
    plan = run_step(scheduler)
    assert plan.prefills == (chat,) and not plan.preempted


def test_samples_of_one_prompt_share_it() -> None:
    """Four of one prompt come to want 13 slots more, and give back only those."""
    scheduler = make(40, max_num_seqs=8, headroom=1.0)
    first = request("samples", 20, 4)
    first.width = 4
    scheduler.add(first)
    scheduler.add(request("next", 6, 4))
    plan = scheduler.schedule()
    assert [r.request_id for r in plan.prefills] == ["samples"]  # 20 + 6 + 5 rows of 3 are more than 40
    first.output_token_ids.append(1)
    rows = scheduler.branch([first], [0] * 4)
    assert [r.n_cached for r in rows] == [0, 20, 20, 20]
