"""Timelines of one rank: scopes out of real HLO, spans out of events, a recording of this process.

Several ranks on one clock are in `test_timeline`; what ranks of a job really do, in `test_breakdown`.
"""

from __future__ import annotations

import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from jaxlamina.profiling import spans as s
from jaxlamina.profiling.collect import Known, Recorder, read
from jaxlamina.profiling.spans import Event, Span
from jaxlamina.profiling.timeline import RankTrace, timeline
from jaxlamina.ranks.cluster_layout import scope
from jaxlamina.transports import SPAN
from jaxlamina.transports.exchanges import by_instruction
from jaxlamina.transports.scopes import (
    EXCHANGE,
    KINDS,
    OTHER,
    Scope,
    by_neighbours,
    by_stretch,
    entry_of,
    module_name,
    nameless,
    scope_in,
    scopes_of,
    started_by,
)
from jaxlamina.transports.xla import XlaTransport

SLICE, ATTENTION = Scope("model", 0, 0), Scope("attention", 2, 1)
SCOPES = [SLICE, Scope("model", 1, 0), ATTENTION, EXCHANGE, OTHER]


def step(x, w):
    for i in range(3):
        with scope("slice", i, 1):
            x = jnp.tanh(x @ w)
        with scope("attention", i, 1):
            x = jnp.cumsum(x, axis=1) / jnp.linalg.norm(x)
        with jax.named_scope(SPAN):
            x = jnp.sort(x, axis=0)  # not fused with what comes after it, and long enough to be seen
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


def test_instructions_of_a_function_that_was_lowered_once():
    entry = entry_of(HLO)
    assert entry == ["x", "plain", "own", "started", "done", "sent", "called"]
    # One function's instruction in every stretch has the name of the first; what else is there says whose it
    # is.
    first, shared = [Scope("attention", i, 0) for i in range(6)], Scope("attention", 0, 0)
    names = [name for i in range(6) for name in (f"shared{i}", f"own{i}", f"sent{i}")]
    scopes = {f"own{i}": x for i, x in enumerate(first)} | {f"shared{i}": shared for i in range(6)}
    scopes |= {"own2": SLICE, "own3": Scope("attention", 3, 1)}
    found = by_stretch(names, scopes, {f"sent{i}" for i in range(6)})
    assert [found[f"shared{i}"] for i in range(6)] == [shared, first[1], shared, scopes["own3"], *first[4:]]
    assert {name: found[name] for name in scopes if name.startswith("own")} == {
        name: scope for name, scope in scopes.items() if name.startswith("own")
    }
    # A slice may go over several stretches, and two may share one.
    two = {"a": Scope("model", 0, 0), "b": Scope("model", 0, 1), "c": Scope("model", 0, 1)}
    assert by_stretch(["a", "b", "sent", "c"], two, {"sent"}) == two


def test_instructions_whose_names_are_lost():
    one, two, layer = Scope("model", 1, 0), Scope("model", 2, 0), Scope("attention", 1, 0)
    entry = [
        "a",
        "norm",
        "q",
        "sent",
        "combined",
        "o",
        "add",
        "up",
        "last",
        "k",
        "got",
        "b",
        "c",
        "sent2",
        "d",
        "own",
    ]
    scopes = {
        "norm": one,
        "combined": layer,
        "add": one,
        "last": two,
        "got": EXCHANGE,
        "c": layer,
        "own": EXCHANGE,
    }
    without = {"a", "q", "o", "k", "b", "d"}
    found = by_neighbours(entry, scopes, {"sent", "got", "sent2"}, without)
    lost = {"a": one, "q": one, "o": one, "k": two, "b": layer}  # "up" has a name, though no scope
    assert found == scopes | lost
    named = 'metadata={op_name="jit(step)/slice.1.batch.0/add"}'
    hlo = f"""HloModule jit_step

ENTRY %main (x: f32[2]) -> f32[2] {{
  %x = f32[2]{{0}} parameter(0)
  %dot.1 = f32[2]{{0}} dot(%x, %x), lhs_contracting_dims={{0}}
  %dot.2 = f32[2]{{0}} dot(%x, %x), lhs_contracting_dims={{0}}, {named}
  ROOT %copy = f32[2]{{0}} copy(%dot.1)
}}
"""
    assert nameless(hlo) == {"dot.1"}


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


# --- a device's own trace


def test_a_gpus_kernels_by_stream_and_name():
    of_step = {"hlo_module": "jit_step", "hlo_op": "fusion.3"}
    rows = [
        ("/host:CPU", "python", "jaxlamina.step", 100, 900, {}),
        ("/device:GPU:0", "Stream #13(Compute)", "loop_add", 200, 50, of_step),
        ("/device:GPU:0", "Stream #13(Compute)", "fusion_4", 260, 40, of_step | {"hlo_op": "command_buffer"}),
        ("/device:GPU:0", "Stream #13(Compute)", "MemcpyH2D", 150, 10, {}),
        (
            "/device:GPU:0",
            "Stream #14(Compute)",
            "ncclKernel",
            300,
            99,
            of_step | {"hlo_op": "permute-start"},
        ),
        ("/device:GPU:0", "Stream #13(Compute)", "loop_add", 500, 9, of_step | {"hlo_module": "jit_other"}),
        ("/device:GPU:0", "XLA Ops", "fusion.3", 200, 50, of_step),
    ]
    scopes = {"fusion.3": SLICE, "fusion_4": ATTENTION, "permute-start": EXCHANGE, "nccl": EXCHANGE}
    known = Known("jit_step", scopes, {"permute-start": [1]}, ("permute-start",))
    steps, events = read(rows, False, [known])
    assert steps == [(100, 1000)]
    assert s.spans_of(events, known.scopes, launch_ns=0) == {
        0: [Span(OTHER, 150, 160), Span(SLICE, 200, 250), Span(ATTENTION, 260, 300)],
        1: [Span(EXCHANGE, 300, 399)],
    }
    # NCCL's kernels are told apart by their order alone, if all of them are there.
    one = Event("nccl", 1, 300, 399)
    assert one in events and one._replace(name="permute-start") in known.exchanges_named(events)
    assert known.exchanges_named([one, one]) == [one, one]


def test_a_cpus_operator_that_another_thread_ends():
    own = {"hlo_module": "jit_step", "hlo_op": "dot.1"}
    rows = [
        ("/host:CPU", "one", "dot.1", 10, 5, own | {"_p": 7}),
        ("/host:CPU", "two", "end: dot.1", 90, 1, {"_c": 7}),
        ("/host:CPU", "two", "dot.1", 100, 20, own | {"_p": 8}),
        ("/host:CPU", "two", "end: dot.1", 119, 1, {"_c": 8}),
        ("/host:CPU", "two", "dot.1", 200, 20, own | {"hlo_module": "jit_other", "_p": 9}),
    ]
    _, events = read(rows, True, [Known("jit_step", {"dot.1": SLICE}, {}, ())])
    assert [(e.start_ns, e.end_ns) for e in events] == [(10, 90), (100, 120)]


def test_a_recording_of_this_process():
    transport = XlaTransport(0, 1, jax.devices("cpu")[0])
    program = transport.compile(step, *arguments())
    bound = transport.bind(arguments())
    recorder = Recorder(transport)
    wanted = recorder.run(program, *bound)
    recorder.start(8)
    with pytest.raises(UserError, match="cannot be recorded"):
        Recorder(transport).start(1)
    for n_left in reversed(range(8)):
        assert not recorder.is_full
        got = recorder.run(program, *bound)
        assert recorder.is_full == (n_left == 0)
    assert jnp.array_equal(jnp.asarray(got.addressable_data(0)), jnp.asarray(wanted.addressable_data(0)))
    found = recorder.take()
    assert not recorder.is_full and found.steps.shape == (8, 2) and found.meetings.shape == (0, 5)
    trace = RankTrace(
        0, "rank 0", "model", found.host, tuple(map(tuple, found.steps.numpy().tolist())),
        {0: [Span(Scope(KINDS[k], i, j), a, b) for _, k, i, j, a, b in found.spans.numpy().tolist()]},
    )  # fmt: skip
    t = timeline([trace], n_dropped=0)
    computed = {Scope(kind, i, 1) for kind in ("model", "attention") for i in range(3)}
    for line, (begun, done) in zip(t.lines[0], trace.steps, strict=True):
        assert {x.scope for x in line} <= computed | {EXCHANGE, OTHER, s.BUBBLE}
        assert begun <= line[0].start_ns < line[-1].end_ns <= done
    # Not all in every step: on busy cores the end of an operator is told late, and hides what is over until
    # then.
    assert computed | {EXCHANGE} <= {x.scope for line in t.lines[0] for x in line}
    assert t.shares([0])["model"] > 0
