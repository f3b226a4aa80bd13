"""The ranks of a job on one clock, who waits for whom, and the file that shows them. How spans come about is
in `test_profiling`; what ranks of a job really do, in `test_breakdown`."""

from __future__ import annotations

import gzip
import json

import pytest

from jaxlamina.profiling import perfetto
from jaxlamina.profiling import spans as s
from jaxlamina.profiling.spans import Span
from jaxlamina.profiling.timeline import (
    ALL,
    PUT,
    TAKE,
    Meeting,
    RankTrace,
    aligned,
    matched,
    timeline,
    waits_of,
)
from jaxlamina.transports.scopes import EXCHANGE, Scope

SLICE, ATTENTION = Scope("model", 0, 0), Scope("attention", 2, 1)
MS = 1_000_000


def two_ranks(n_steps=3, skew_ns=0, second_host="a"):
    """A step of 10 ms: the model works 4 and sends; the memory pool, who waits since 1, has it at 5, answers
    from 8 to 9."""
    model, pool, sent, answered = [], [], [], []
    for k in range(n_steps):
        t = k * 20 * MS
        model += [
            Span(SLICE, t, t + 4 * MS),
            Span(EXCHANGE, t + 4 * MS, t + 9 * MS),
            Span(SLICE, t + 9 * MS, t + 10 * MS),
        ]
        pool += [
            Span(EXCHANGE, t + MS, t + 5 * MS),
            Span(ATTENTION, t + 5 * MS, t + 8 * MS),
            Span(EXCHANGE, t + 8 * MS, t + 9 * MS),
        ]
        sent += [Meeting(k, 1, t + 4 * MS, t + 5 * MS), Meeting(k, 1, t + 5 * MS, t + 9 * MS)]
        answered += [Meeting(k, 0, t + MS, t + 5 * MS), Meeting(k, 0, t + 8 * MS, t + 9 * MS)]
    steps = tuple((k * 20 * MS - MS, k * 20 * MS + 12 * MS) for k in range(n_steps))
    first = RankTrace(0, "rank 0 (model worker 0)", "model", "a", steps, {0: model}, tuple(sent))
    second = RankTrace(
        1, "rank 1 (attention worker 0)", "attention", second_host, steps, {0: pool}, tuple(answered)
    )
    return [first, second.later(skew_ns)]  # fmt: skip


def test_waiting_for_the_other_end_is_bubble():
    t = timeline(two_ranks())
    assert (len(t.windows), t.n_unmatched, t.step_ms) == (2, 0, 10.0)
    assert t.ms([0]) == {"model": 5.0, "attention": 0.0, "exchange": 2.0, "other": 0.0, "bubble": 3.0}
    assert t.ms([1]) == {"model": 0.0, "attention": 3.0, "exchange": 2.0, "other": 0.0, "bubble": 5.0}
    assert t.shares(t.ranks_of("attention"))["bubble"] == 0.5
    assert t.shares([0, 1])["exchange"] == 0.2


def test_the_ranks_order_does_not_matter():
    traces = two_ranks()
    assert timeline(traces) == timeline(traces[::-1])


@pytest.mark.parametrize("skew_ns", [-3_700 * MS, 123_456])
def test_clocks_of_two_hosts_are_aligned_by_their_exchanges(skew_ns):
    traces = two_ranks(skew_ns=skew_ns, second_host="b")
    assert aligned(traces) == two_ranks(second_host="b")
    assert timeline(traces).ms([1]) == timeline(two_ranks()).ms([1])
    # On one host the clock is one, whatever exchanges look like.
    assert aligned(two_ranks(skew_ns=skew_ns)) == two_ranks(skew_ns=skew_ns)


def test_an_exchange_with_one_end_is_counted_and_its_waiting_is_not_bubble():
    first, second = two_ranks()
    lost = tuple(x for x in second.meetings if x.step != 1 or x.start_ns % (20 * MS) == MS)
    t = timeline([first, RankTrace(**{**vars(second), "meetings": lost})])
    assert t.n_unmatched == 3
    assert s.totals_ns(t.lines[0][0])["bubble"] == 0 and s.totals_ns(t.lines[0][1])["bubble"] == 3 * MS


def test_collectives_of_all_wait_for_the_last():
    ends = {0: 5, 1: 2, 2: 9}
    traces = [
        RankTrace(r, f"rank {r}", "model", "a", ((0, 20),), {0: [Span(EXCHANGE, at, 12)]}, (Meeting(0, ALL, at, 12),))
        for r, at in ends.items()
    ]  # fmt: skip
    assert matched(traces) == ([[(r, Meeting(0, ALL, at, 12)) for r, at in ends.items()]], 0)
    t = timeline(traces, n_dropped=0)
    assert t.windows == ((2, 12),)
    assert [s.totals_ns(t.lines[r][0])["exchange"] for r in ends] == [3, 3, 3]


def test_a_rank_that_takes_no_part_is_idle_and_no_steps_are_no_timeline():
    traces = [*two_ranks(), RankTrace(2, "rank 2 (attention worker 1)", "attention", "")]
    t = timeline(traces)
    assert t.shares([2])["bubble"] == 1 and t.shares([1, 2])["bubble"] == 0.75
    with pytest.raises(ValueError, match="no step that all ranks recorded"):
        timeline(traces, n_dropped=3)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_file(tmp_path, name):
    first, second = two_ranks()
    both = {0: second.streams[0], 1: [Span(ATTENTION, 26 * MS, 27 * MS)]}
    path = tmp_path / name
    perfetto.write({"B 1": timeline([first, RankTrace(**{**vars(second), "streams": both})])}, path)
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)
    events = document["traceEvents"]
    assert document["otherData"] == {"began_unix_ns": str(20 * MS)}
    named = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert named == {(0, first.name), (1, second.name), (2, "steps")}
    line = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, 1)]
    assert [e["name"] for e in line[:5]] == [
        "bubble",
        "exchange",
        "attention 2, batch 1",
        "exchange",
        "bubble",
    ]
    assert {e["args"]["step"] for e in line} == {0, 1} and {e["args"]["of"] for e in line} == {"B 1"}
    assert line[0]["ts"] == 0 and line[2]["dur"] == 3_000
    assert len([e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, 3)]) == 1
    assert {e["name"] for e in events if e["ph"] == "X" and e["pid"] == 0} == {
        "slice 0, batch 0",
        "exchange",
        "bubble",
    }


def test_who_takes_waits_for_what_is_put_and_who_puts_waits_for_nobody():
    def trace(rank, meetings):
        return RankTrace(
            rank, f"rank {rank}", "model", "a", ((0, 90),), {0: [Span(EXCHANGE, 0, 80)]}, meetings
        )

    traces = [
        trace(0, (Meeting(0, 1, 10, 30, PUT), Meeting(0, 1, 30, 70, TAKE))),
        trace(1, (Meeting(0, 0, 5, 40, TAKE), Meeting(0, 0, 50, 60, PUT))),
    ]
    waits, n_alone = waits_of(traces)
    assert waits == {0: [(30, 60)], 1: [(5, 30)]} and n_alone == 0
