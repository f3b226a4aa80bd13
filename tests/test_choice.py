"""One batch or several: what is tried, and what is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.run.staggering import Choice

SECONDS = st.floats(1e-4, 1.0)


@given(st.dictionaries(st.integers(1, 6), SECONDS, min_size=1), st.integers(1, 5), st.integers(6, 64))
def test_every_candidate_is_tried_and_the_fastest_kept(times, n_trials, n_rows):
    choice = Choice(tuple(times), n_trials)
    tried = []
    for step in range(len(times) * (n_trials + 1)):
        n = choice.next("bucket", n_rows)
        tried.append(n)
        # A first time is a compilation's, and says nothing.
        choice.took("bucket", n, 100.0 if step < len(times) else times[n])
    assert all(tried.count(n) == n_trials + 1 for n in times)
    assert {choice.next("bucket", n_rows) for _ in range(5)} <= {
        n for n in times if times[n] == min(times.values())
    }
    assert choice.medians("bucket") == times


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_no_more_batches_than_rows(rows):
    choice = Choice((1, 4), n_trials=2)
    for n_rows in rows:
        assert choice.next(n_rows, n_rows) <= n_rows


def test_buckets_are_told_apart():
    choice = Choice((1, 2), n_trials=1)
    for bucket, faster in (("short", 1), ("long", 2)):
        for _ in range(4):
            n = choice.next(bucket, 8)
            choice.took(bucket, n, 1.0 if n == faster else 2.0)
    assert (choice.next("short", 8), choice.next("long", 8)) == (1, 2)


def test_one_slow_step_does_not_decide():
    choice = Choice((1, 2), n_trials=5)
    for step in range(12):
        n = choice.next("bucket", 8)
        choice.took("bucket", n, 9.0 if step == 6 else {1: 1.0, 2: 2.0}[n])
    assert choice.next("bucket", 8) == 1


def test_times_that_come_late_are_waited_for_with_more_tries():
    choice = Choice((1, 2), n_trials=1)
    assert [choice.next("bucket", 8) for _ in range(6)] == [1, 2, 1, 2, 1, 2]


def test_what_was_chosen_is_said_once_with_its_times():
    said = []
    choice = Choice((1, 2), n_trials=2, on_chosen=lambda *what: said.append(what))
    for bucket, n_rows in (("one row", 1), ("short", 8), ("long", 8)):
        for _ in range(12 if bucket != "long" else 3):
            n = choice.next(bucket, n_rows)
            choice.took(bucket, n, {1: 3.0, 2: 2.0}[n])
        assert choice.settled(bucket, n_rows) == (2 if bucket == "short" else 1)
    assert said == [("short", {1: 3.0, 2: 2.0})]
    assert choice.found() == {
        "one row": (1, {1: 3.0}),
        "short": (2, {1: 3.0, 2: 2.0}),
        "long": (None, {1: 3.0}),
    }
    assert choice.possible(1) == (1,) and choice.possible(2) == (1, 2)


@pytest.mark.parametrize("predicted", [{1: 9.0, 2: 1.0}, {1: 1.0, 2: 9.0}])
def test_what_is_predicted_goes_first_and_measured_times_decide(predicted):
    """With times that the first prediction is right of, and the second one wrong."""
    begun, measured = [], {1: 4.0, 2: 3.0}
    choice = Choice(
        (1, 2),
        n_trials=2,
        predict=lambda bucket, n_rows: predicted,
        on_begun=lambda *what: begun.append(what),
    )
    best = min(predicted, key=predicted.get)
    assert choice.settled("bucket", 8) == best
    tried = []
    for _ in range(6):
        tried.append(choice.next("bucket", 8))
        choice.took("bucket", tried[-1], measured[tried[-1]])
    assert tried == [best] * 3 + [3 - best] * 3
    assert choice.next("bucket", 8) == choice.settled("bucket", 8) == 2
    assert begun == [("bucket", predicted)] and choice.predicted("bucket") == predicted
    assert choice.next("one row", 1) == 1 and len(begun) == 1  # there is nothing to choose


def test_nothing_to_choose_from_is_an_error():
    with pytest.raises(ValueError, match="one at least"):
        Choice(())
