"""Timelines: scopes out of real HLO, spans out of events, ranks on one clock, and the file that shows them.

What ranks of a job really do is in `test_breakdown`.
"""

from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from jaxlamina.profiling import perfetto
from jaxlamina.profiling import spans as s
from jaxlamina.profiling.collect import Recorder
from jaxlamina.profiling.scopes import (
    EXCHANGE,
    KINDS,
    OTHER,
    Scope,
    module_name,
    scope_in,
    scopes_of,
    started_by,
)
from jaxlamina.profiling.spans import Event, Span
from jaxlamina.profiling.timeline import ALL, Meeting, RankTrace, aligned, matched, timeline
from jaxlamina.ranks.layout import span
from jaxlamina.transports import SPAN
from jaxlamina.transports.exchanges import by_instruction
from jaxlamina.transports.xla import XlaTransport

SLICE, ATTENTION = Scope("model", 0, 0), Scope("attention", 2, 1)
SCOPES = [SLICE, Scope("model", 1, 0), ATTENTION, EXCHANGE, OTHER]


def step(x, w):
    for i in range(3):
        with span("slice", i, 1):
            x = jnp.tanh(x @ w)
        with span("attention", i, 1):
            x = jnp.cumsum(x, axis=1) / jnp.linalg.norm(x)
        with jax.named_scope(SPAN):
            x = jnp.flip(x, axis=0)
    return x @ w


def arguments():
    return jnp.ones((64, 64)), jnp.full((64, 64), 1e-2)


# --- scopes


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(step)/slice.3.batch.0/dot_general", Scope("model", 3, 0)),
        ("jit(program)/shard_map/attention.12.batch.2/jit(attend)/exp", Scope("attention", 12, 2)),
        ("jit(step)/slice.3.batch.0/exchange/ppermute", EXCHANGE),
        ("jit(step)/exchange", EXCHANGE),
        ("jit(step)/slice.3/dot_general", None),
        ("jit(step)/my_exchange/dot_general", None),
        ("jit(exchange)/add", None),
        ("", None),
    ],
)
def test_the_innermost_scope_counts(op_name, scope):
    assert scope_in(op_name) == scope


def test_scopes_of_a_compiled_function():
    hlo = jax.jit(step).lower(*arguments()).compile().as_text()
    assert module_name(hlo) == "jit_step"
    scopes = scopes_of(hlo)
    wanted = (
        {Scope("model", i, 1) for i in range(3)} | {Scope("attention", i, 1) for i in range(3)} | {EXCHANGE}
    )
    assert set(scopes.values()) == wanted
    names = {name for name in re.findall(r"%?([\w.\-]+) = ", hlo)}
    assert set(scopes) <= names
    # What runs are the entry's instructions: every product of a slice is known, and the last one is of none.
    entry = hlo[hlo.index("\nENTRY") :]
    found = re.findall(r'%?([\w.\-]+) = [^\n]*op_name="jit\(step\)/([^"]*dot_general)"', entry)
    assert len(found) == 4
    for name, where in found:
        number = re.match(r"slice\.(\d+)", where)
        assert scopes.get(name) == (Scope("model", int(number[1]), 1) if number else None)


HLO = """HloModule jit_step, is_scheduled=true

%fused (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} add(%a, %a), metadata={op_name="jit(step)/slice.1.batch.0/add"}
  %c = f32[8]{0} add(%b, %a), metadata={op_name="jit(step)/slice.1.batch.0/add"}
  ROOT %d = f32[8]{0} add(%c, %a), metadata={op_name="jit(step)/exchange/add"}
}

%wrapped (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %all = f32[8]{0} all-to-all(%p), replica_groups={{0,1}}, dimensions={0}, metadata={op_name="jit(step)/exchange/all_to_all"}
}

%mixed (m: f32[8]) -> f32[8] {
  %m = f32[8]{0} parameter(0)
  ROOT %inner = f32[8]{0} fusion(%m), kind=kLoop, calls=%fused
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %plain = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %own = f32[8]{0} fusion(%plain), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/attention.4.batch.0/add"}
  %started = ((f32[8]), f32[8]) async-start(%own), calls=%wrapped
  %done = f32[8]{0} async-done(%started)
  %sent = f32[8]{0} collective-permute(%done), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %called = f32[8]{0} call(%sent), to_apply=%mixed
}
"""


def test_scopes_through_what_an_instruction_calls():
    scopes = scopes_of(HLO)
    assert scopes["plain"] == scopes["inner"] == Scope("model", 1, 0)  # the commonest in a fusion
    assert scopes["own"] == Scope("attention", 4, 0)
    assert scopes["started"] == EXCHANGE
    assert "called" not in scopes and "x" not in scopes  # a call's own events have their own scopes
    with pytest.raises(ValueError, match="compiled program"):
        scopes_of("module @jit_step {}")


def test_who_meets_whom_by_instruction():
    found = by_instruction(HLO, rank=1)
    assert {name: [(e.op, e.peer) for e in exchanges] for name, exchanges in found.items()} == {
        "all": [("all", -1)],
        "sent": [("recv", 0), ("send", 0)],
    }
    assert started_by(HLO) == {"started": ["p", "all"]}
    assert by_instruction(HLO, rank=None) == {}


# --- spans

SPANS = st.builds(
    lambda scope, start, length: Span(scope, start, start + length),
    st.sampled_from(SCOPES),
    st.integers(0, 60),
    st.integers(0, 20),
)


def covered(spans):
    return {t for x in spans for t in range(x.start_ns, x.end_ns)}


def check_line(line):
    assert all(x.start_ns < x.end_ns for x in line)
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(line))


@given(st.lists(SPANS, max_size=12), st.randoms())
def test_a_line_has_no_overlap_covers_the_same_and_knows_no_order(spans, random):
    line = s.flat(spans)
    check_line(line)
    assert covered(line) == covered(spans)
    shuffled = list(spans)
    random.shuffle(shuffled)
    assert s.flat(shuffled) == line
    # An exchange is seen only where nothing is computed.
    computed = covered(x for x in spans if x.scope.kind in ("model", "attention"))
    assert computed == covered(x for x in line if x.scope.kind in ("model", "attention"))
    exchanged = covered(x for x in spans if x.scope == EXCHANGE)
    assert exchanged - computed == covered(x for x in line if x.scope == EXCHANGE)


@given(st.lists(SPANS, max_size=12), st.integers(0, 5))
def test_merging_closes_launches_and_nothing_else(spans, launch_ns):
    line = s.flat(spans)
    merged = s.merged(line, launch_ns)
    check_line(merged)
    assert covered(line) <= covered(merged)
    gaps = covered(merged) - covered(line)
    starts = {x.start_ns for x in line}
    assert all(any(t + n in starts for n in range(1, launch_ns + 1)) for t in gaps)
    for a, b in pairwise(merged):
        gap = b.start_ns - a.end_ns
        assert gap > launch_ns or (gap == 0 and a.scope != b.scope)


@given(
    st.lists(SPANS, max_size=12),
    st.lists(
        st.tuples(st.integers(-5, 80), st.integers(0, 20)).map(lambda x: (x[0], x[0] + x[1])), max_size=5
    ),
)
def test_waiting_is_taken_out_of_exchanges_alone(spans, waits):
    line = s.flat(spans)
    left = s.waiting_out(line, waits)
    check_line(left)
    waited = {t for start, end in waits for t in range(start, end)}
    assert (
        covered(x for x in left if x.scope == EXCHANGE)
        == covered(x for x in line if x.scope == EXCHANGE) - waited
    )
    assert [x for x in left if x.scope != EXCHANGE] == [x for x in line if x.scope != EXCHANGE]


@given(st.lists(SPANS, max_size=12), st.integers(0, 40), st.integers(1, 50))
def test_spans_and_bubbles_fill_a_step_and_shares_are_all_of_it(spans, start, length):
    line = s.with_bubbles(s.flat(spans), (start, start + length))
    check_line(line)
    assert covered(line) == set(range(start, start + length))
    assert not covered(x for x in line if x.scope == s.BUBBLE) & covered(spans)
    totals = s.totals_ns(line)
    assert sum(totals.values()) == length
    assert sum(s.shares(totals).values()) == pytest.approx(1, abs=1e-12)


def test_shares_of_no_time():
    with pytest.raises(ValueError, match="no time"):
        s.shares(dict.fromkeys(KINDS, 0))


def test_events_become_spans_by_stream():
    scopes = {"dot": SLICE, "add": SLICE, "all": EXCHANGE}
    events = [
        Event("add", 7, 1_300, 2_000), Event("dot", 7, 0, 1_000), Event("all", 9, 500, 9_000),
        Event("copy", 7, 9_000, 9_500),
    ]  # fmt: skip
    assert s.spans_of(events, scopes) == {
        7: [Span(SLICE, 0, 2_000), Span(OTHER, 9_000, 9_500)],
        9: [Span(EXCHANGE, 500, 9_000)],
    }


# --- ranks

MS = 1_000_000


def two_ranks(n_steps=3, skew_ns=0, second_host="a"):
    """A step of 10 ms: the model works 4 and sends; the memory pool, who waits since 1, has it at 5, answers from 8 to 9."""
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


# --- a device's own trace


def test_a_recording_of_this_process():
    transport = XlaTransport(0, 1, jax.devices("cpu")[0])
    program = transport.compile(step, *arguments())
    bound = transport.bind(arguments())
    recorder = Recorder(transport)
    wanted = recorder.run(program, *bound)
    recorder.start(2)
    with pytest.raises(UserError, match="cannot be recorded"):
        Recorder(transport).start(1)
    for n_left in (1, 0):
        assert not recorder.is_full
        got = recorder.run(program, *bound)
        assert recorder.is_full == (n_left == 0)
    assert jnp.array_equal(jnp.asarray(got.addressable_data(0)), jnp.asarray(wanted.addressable_data(0)))
    found = recorder.take()
    assert not recorder.is_full and found.steps.shape == (2, 2) and found.meetings.shape == (0, 4)
    trace = RankTrace(
        0, "rank 0", "model", found.host, tuple(map(tuple, found.steps.numpy().tolist())),
        {0: [Span(Scope(KINDS[k], i, j), a, b) for _, k, i, j, a, b in found.spans.numpy().tolist()]},
    )  # fmt: skip
    t = timeline([trace], n_dropped=0)
    wanted_scopes = {Scope(kind, i, 1) for kind in ("model", "attention") for i in range(3)} | {EXCHANGE}
    for line, (begun, done) in zip(t.lines[0], trace.steps, strict=True):
        assert wanted_scopes <= {x.scope for x in line} <= wanted_scopes | {OTHER, s.BUBBLE}
        assert begun <= line[0].start_ns < line[-1].end_ns <= done
    assert t.shares([0])["model"] > 0
