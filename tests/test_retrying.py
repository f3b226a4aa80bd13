"""When a job that has ended is started again, and when it is given up, by a clock of the test's."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.supervisor.retrying import LONGEST_PAUSE_S, MOST_FAILED_STARTS, Retrying, spare_pause_s


def fails(retrying, now_s, start_s=1.0):
    """Failed starts of so many seconds until it is given up: when each of them ended."""
    ends = [now_s + start_s]
    while (pause_s := retrying.ended(ends[-1], was_ready=False)) is not None:
        ends.append(ends[-1] + pause_s + start_s)
    return ends


def test_pauses_grow_and_a_start_that_was_ready_ends_them():
    retrying = Retrying(600)
    assert retrying.ended(0, was_ready=True) == 0
    assert [retrying.ended(n, was_ready=False) for n in range(1, 7)] == [1, 2, 4, 8, 15, 15]
    assert retrying.ended(500, was_ready=True) == 0 and retrying.ended(501, was_ready=False) == 1


def test_a_job_that_was_never_ready_is_given_up_at_once():
    assert Retrying(600).ended(1, was_ready=False) is None


def test_five_failed_starts_however_short_the_time():
    retrying = Retrying(recovery_s=1)
    retrying.ended(100, was_ready=True)
    assert len(fails(retrying, 100)) == 5


def test_starts_of_another_command_are_counted_anew():
    retrying = Retrying(recovery_s=1)
    retrying.ended(0, was_ready=True)
    assert [retrying.ended(10 * n, was_ready=False) for n in range(1, 5)] == [1, 2, 4, 8]
    assert retrying.ended(50, was_ready=False, is_first=True) == 1
    assert [retrying.ended(50 + n, was_ready=False) for n in range(4)] == [2, 4, 8, None]


@given(st.floats(1, 3600), st.floats(0.1, 600), st.floats(0, 1e6))
def test_given_up_after_the_time_and_five_starts_and_not_before(recovery_s, start_s, now_s):
    retrying = Retrying(recovery_s)
    retrying.ended(now_s, was_ready=True)
    ends = fails(retrying, now_s, start_s)
    assert len(ends) >= MOST_FAILED_STARTS and ends[-1] - now_s > recovery_s
    # The first for which both are true.
    assert len(ends) == MOST_FAILED_STARTS or ends[-2] - now_s <= recovery_s
    assert all(b - a <= LONGEST_PAUSE_S + start_s + 1e-6 for a, b in pairwise(ends))


def test_spares_that_fail_are_tried_again_for_ever():
    assert [spare_pause_s(n) for n in (1, 2, 5, 10, 11, 10**6)] == [1, 2, 16, 512, 600, 600]


def test_thousands_of_starts_may_fail():
    """Of a job that is tried for days."""
    retrying = Retrying(recovery_s=1e6)
    retrying.ended(0, was_ready=True)
    assert {retrying.ended(n, was_ready=False) for n in range(2000)} == {1, 2, 4, 8, LONGEST_PAUSE_S}
