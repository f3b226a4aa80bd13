"""The simulator beside the engine itself on the same clock, and beside itself step by step."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_engine import SAMPLER, ImaginaryExecutor, V

from jaxlamina.cli.main import main
from jaxlamina.engine.engine import Engine
from jaxlamina.engine.scheduled_step import ScheduledStep
from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config
from jaxlamina.planner.costs import Deployment, LinkTerms, Terms, prefill_s, step_cost
from jaxlamina.planner.hardware import Hardware
from jaxlamina.planner.traces import Trace, load, repeated
from jaxlamina.run.executor import Capabilities, StepLogits
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.simulator import ServingPolicy, SimulatedRun, gpu_buckets, simulate
from jaxlamina.simulator.step_times import FS, FS_US, ModelledTimes, Pace
from jaxlamina.steps.batch import PrefillBatch
from jaxlamina.steps.buckets import Buckets
from jaxlamina.steps.step import Step

H200 = Hardware.load("h200")
TERMS = Terms(H200, 4e12, 4e14, 3e12, 20e-6, 10e-6, 1e-3)
LLAMA = model_config("llama-3-8b")
UNSPLIT = Deployment(LLAMA, TERMS)


def trace_of(rows: list[tuple[int, int, int]]) -> Trace:
    """Of (microseconds after the one before, prompt, output)."""
    gaps, prompts, outputs = np.array(rows, np.int64).T
    return Trace(np.cumsum(gaps), prompts, outputs)


def check_whole(run: SimulatedRun, trace: Trace) -> None:
    """Requests in = requests out, in order, and all slots are free."""
    assert len(run.end_s) == len(trace) and run.n_slots_left == 0
    assert (run.arrival_s < run.first_s).all() and (run.first_s <= run.end_s).all()
    assert ((run.first_s < run.end_s) == (trace.n_output > 1)).all()


ROWS = st.lists(
    st.tuples(st.sampled_from([0, 0, 700, 9_000, 150_000]), st.integers(1, 40), st.integers(1, 24)),
    min_size=1,
    max_size=12,
)
HOST_US = st.sampled_from([0, 0, 3000, 9_000, 60_000])  # a step takes the devices 5,000 and more
SHORT = [(0, 9, 3), *[(0, 12, 3)] * 4, (0, 5, 2)]


class ClockedExecutor(ImaginaryExecutor):
    """Whose steps take as long as the simulator's: one after another, each begun when all its programs are
    launched, which begins as the one before it does, and that one is done."""

    def __init__(self, n_slots: int, times: ModelledTimes) -> None:
        super().__init__(n_slots)
        self.times, self.now, self.ends = times, 0, [0]  # femtoseconds
        self.n_together = 0  # the most prompts of a call
        self.host_fs, self.is_first = 0, True
        self.begun = self.computed = 0  # the latest step: when, and how long it computes

    def next_step(self) -> None:
        """The calls that come are of another step."""
        self.is_first = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(batches_prompts=True)

    def run(self, step: Step) -> StepLogits:
        fs = 0
        if step.decodes is not None:
            rows = step.decodes.new_slots < self.n_slots
            n_stored = int(step.decodes.lengths[rows].sum())
            fs = self.times.cell(int(rows.sum()), n_stored).fs(n_stored)
        for part in step.prompts:
            n, stored = n_prompts(part.batch, self.n_slots), part.batch.lengths
            n_tokens = int(part.batch.logits_at[0]) + 1 if n == 1 else part.batch.tokens.size
            fs = self.times.prefill_fs(n_tokens, int(stored[:n].sum()) // n)
            self.n_together = max(self.n_together, n)
        if self.is_first:
            self.is_first, self.last = False, len(self.ends) - 1
            self.is_ahead = self.ends[-1] > self.now
            self.launched = self.begun if self.is_ahead else max(self.now, self.ends[-1])
            self.computed = 0
        self.launched += self.host_fs
        if self.is_ahead:  # what is before it is read when all of it is launched
            self.ends[self.last] = max(self.ends[self.last], self.launched)
        self.begun = max(self.ends[self.last], self.launched)
        self.computed += fs
        self.ends.append(self.begun + self.computed)
        return super().run(step)

    def prompts(self, batch: PrefillBatch) -> jax.Array:
        n = n_prompts(batch, self.n_slots)
        logits = super().prompts(PrefillBatch(*(x[:n] for x in batch)))
        return jnp.pad(logits, [(0, len(batch.tokens) - n), (0, 0)])


def n_prompts(batch: PrefillBatch, n_slots: int) -> int:
    """Without padding, which stores nothing."""
    return int((batch.slots[:, 0] < n_slots).sum())


@settings(max_examples=25, deadline=None)
@given(
    rows=ROWS,
    n_slots=st.integers(64, 120),
    max_num_seqs=st.integers(1, 6),
    chunk=st.sampled_from([None, 7]),
    is_async=st.booleans(),
    headroom=st.sampled_from([None, 0.0, 1.0]),
    together=st.sampled_from([0, 128]),
    host_us=HOST_US,
)
@example(
    rows=SHORT, n_slots=120, max_num_seqs=6, chunk=None, is_async=True, headroom=0.0, together=128, host_us=0
)
def test_it_is_the_engine_on_another_clock(
    rows, n_slots, max_num_seqs, chunk, is_async, headroom, together, host_us
):
    """The engine computes with an imaginary model, and its clock goes by the same times of steps."""
    trace = trace_of(rows)
    times = ModelledTimes(UNSPLIT)
    executor = ClockedExecutor(n_slots, times)
    engine = Engine(
        executor,
        vocab_size=V,
        buckets=Buckets.default(max_num_seqs, LLAMA.max_position_embeddings, "doubling"),
        max_num_seqs=max_num_seqs,
        max_model_len=96,
        eos_token_ids=(),
        prefix_caching=False,
        max_num_batched_tokens=chunk,
        async_scheduling=is_async,
        headroom=headroom,
        prompt_batch_tokens=together,
    )
    engine.drawing.sampler = SAMPLER
    executor.host_fs = host_us * FS_US
    schedule = engine.scheduler.schedule

    def scheduled() -> ScheduledStep:
        executor.next_step()
        return schedule()

    engine.scheduler.schedule = scheduled
    first_s, end_s, ids = [0.0] * len(trace), [0.0] * len(trace), {}
    n_come = 0
    while n_come < len(trace) or not engine.idle:
        if engine.idle:
            executor.now = max(executor.now, int(trace.arrival_us[n_come]) * FS_US)
        while n_come < len(trace) and int(trace.arrival_us[n_come]) * FS_US <= executor.now:
            n_prompt, n_output = int(trace.n_prompt[n_come]), int(trace.n_output[n_come])
            params = SamplingParams(temperature=0.0, max_tokens=n_output)
            ids[engine.add_request([n_come % V] * n_prompt, params)] = n_come
            n_come += 1
        events = engine.step()
        # As many of the executor's steps have been read.
        executor.now = executor.ends[engine.stats.n_decode_steps + engine.stats.n_prefill_steps]
        for event in events:
            first_s[ids[event.request_id]] = first_s[ids[event.request_id]] or executor.now / FS
            end_s[ids[event.request_id]] = executor.now / FS
    policy = ServingPolicy(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        async_scheduling=is_async,
        kv_headroom=headroom,
        kv_slots=n_slots,
        prompt_batch_tokens=together,
        host_s=host_us / 1e6,
    )
    found = simulate(UNSPLIT, trace, policy)
    check_whole(found, trace)
    assert found.first_s.tolist() == first_s
    assert found.end_s.tolist() == end_s
    assert found.n_preemptions == engine.stats.n_preemptions
    assert found.n_decode_steps == engine.stats.n_decode_steps
    assert found.n_prompt_steps == engine.stats.n_prefill_steps
    assert rows is not SHORT or executor.n_together == 4


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    n_slots=st.integers(104, 200),
    max_num_seqs=st.integers(1, 6),
    chunk=st.sampled_from([None, 7]),
    mixed=st.booleans(),
    is_async=st.booleans(),
    max_tokens=st.sampled_from([None, 64]),
    name=st.sampled_from(["fifo", "chat-first", "shortest-remaining"]),
    failures=st.lists(
        st.tuples(st.floats(0, 0.4), st.just("model"), st.sampled_from([0.0, 0.05, 3.0])), max_size=2
    ),
    kept_kv=st.booleans(),
    together=st.sampled_from([0, 128]),
    host_us=HOST_US,
)
def test_many_steps_at_once_are_the_same_as_one_by_one(
    rows,
    n_slots,
    max_num_seqs,
    chunk,
    mixed,
    is_async,
    max_tokens,
    name,
    failures,
    kept_kv,
    together,
    host_us,
):
    trace = trace_of(rows)
    policy = ServingPolicy(
        scheduling_policy=name,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        mixed_steps=mixed,
        async_scheduling=is_async,
        kv_slots=n_slots,
        max_tokens=max_tokens,
        kept_kv=kept_kv,
        prompt_batch_tokens=together,
        host_s=host_us / 1e6,
    )
    fast = simulate(UNSPLIT, trace, policy, failures=failures)
    slow = simulate(UNSPLIT, trace, policy, failures=failures, one_by_one=True)
    check_whole(fast, trace)
    assert fast.first_s.tolist() == slow.first_s.tolist() and fast.end_s.tolist() == slow.end_s.tolist()
    for field in ("n_preemptions", "n_decode_steps", "n_prompt_steps", "prefill_s", "down_s", "host_s"):
        assert getattr(fast, field) == getattr(slow, field), field
    assert fast.decoding == pytest.approx(slow.decoding)


@settings(max_examples=25, deadline=None)
@given(
    n_rows=st.integers(2, 64),
    n_output=st.integers(20, 200),
    us=st.floats(1, 1000),
    longer=st.sampled_from([1.0, 1.5]),
)
def test_two_batches_whose_attention_takes_as_long_as_their_slices_leave_none_within_a_step(
    n_rows, n_output, us, longer
):
    """t_a = t_m: messages take no time, and nothing is once a step. Within a step neither pool waits. At its
    end the last slices of both batches are one, which waits for the second batch's attention, and the
    attention pool for it: less than two of the 2 L + 1. If attention takes longer, the model worker waits."""
    compute = Terms(H200, math.inf, math.inf, math.inf, us / 1e6, 0.0, 0.0)
    memory = Terms(H200, math.inf, math.inf, math.inf, 0.0, longer * us / 1e6, 0.0)
    setup = Deployment(LLAMA, compute, memory, LinkTerms(0.0, math.inf), n_attention=1, n_batches=2)
    trace = trace_of([(0, 30, n_output)] * n_rows)
    run = simulate(setup, trace, ServingPolicy(max_num_seqs=n_rows, kv_slots=1 << 16))
    check_whole(run, trace)
    a_slice = 1 / (LLAMA.num_hidden_layers + 1)
    if longer == 1:
        assert 0 <= run.bubbles["model"] <= a_slice and 0 <= run.bubbles["attention"] <= a_slice
    else:
        assert run.bubbles["model"] == pytest.approx(1 - 1 / longer, abs=2 * a_slice)


def test_a_failure_costs_its_downtime_and_what_is_computed_again():
    trace = trace_of([(0, 900, 400)] * 4)
    whole, lost, kept = (
        simulate(UNSPLIT, trace, ServingPolicy(kept_kv=kept_kv), failures=failures)
        for failures, kept_kv in (
            ((), False),
            ([(1.0, "model", 10.0)], False),
            ([(1.0, "model", 10.0)], True),
        )
    )
    again_s = 4 * prefill_s(UNSPLIT, 900)
    assert kept.seconds - whole.seconds == pytest.approx(10, abs=0.1)
    assert lost.seconds - kept.seconds == pytest.approx(again_s, rel=0.5)
    assert lost.prefill_s > whole.prefill_s + again_s > kept.prefill_s
    assert kept.down_s == 10 and whole.down_s == 0
    for failures, what in (([(1.0, "attention", 1.0)], "no failure"), ([(-1.0, "model", 1.0)], "at_s")):
        with pytest.raises(UserError, match=what):
            simulate(UNSPLIT, trace, failures=failures)


def test_a_prompt_costs_as_many_tokens_as_are_computed_for_it():
    buckets = Buckets((4,), (64, 96, 128), (4096,))
    padded = ServingPolicy(buckets=buckets)
    run, whole = (simulate(UNSPLIT, trace_of([(0, n, 1)]), p) for n, p in ((81, padded), (96, None)))
    assert run.prefill_s == whole.prefill_s > simulate(UNSPLIT, trace_of([(0, 81, 1)])).prefill_s


def test_prompts_may_be_longer_than_the_models_config_says():
    """A trace's, in chunks that are longer, too."""
    longest = LLAMA.max_position_embeddings + 4000
    load = trace_of([(0, longest, 2), (0, 10, 2)])
    policy = ServingPolicy(max_num_batched_tokens=None, buckets=gpu_buckets(UNSPLIT, 8, load))
    assert simulate(UNSPLIT, load, policy).prefill_s > simulate(UNSPLIT, trace_of([(0, 10, 2)])).prefill_s


def test_short_prompts_cost_the_calls_that_they_go_in():
    """As many tokens as such a call is padded to, here 16 prompts of 32; and what is too long is alone."""
    apart, together, longer = (
        simulate(UNSPLIT, trace_of([(0, n, 1)] * 64), ServingPolicy(prompt_batch_tokens=n_tokens))
        for n, n_tokens in ((30, 0), (30, 512), (200, 512))
    )
    assert (apart.n_prompt_steps, together.n_prompt_steps, longer.n_prompt_steps) == (64, 4, 64)
    assert together.prefill_s == pytest.approx(4 * prefill_s(UNSPLIT, 512), rel=0.01)
    assert together.prefill_s < apart.prefill_s / 4


def test_short_prompts_are_simulated_together_where_the_engine_has_them_so(tmp_path, capsys):
    trace = tmp_path / "short.jsonl"
    line = {"timestamp": 0, "input_length": 30, "output_length": 2}
    trace.write_text(f"{json.dumps(line)}\n" * 16)
    load = ("simulate", "--model", "llama-3-8b", "--trace", str(trace), "--json")
    split = ("--dop", "1,1")
    for options, n in (
        ((), 1),
        (("--prompt-batch-tokens", "0"), 16),
        (split, 1),
        ((*split, "--partition", "requests"), 16),
        (("--dop", "2,1"), 16),
        ((*split, "--memory", "h20"), 16),
    ):
        assert main([*load, *options]) == 0
        assert json.loads(capsys.readouterr().out)["n_prompt_steps"] == n


def test_times_between_the_grids_points_are_near_the_planners():
    times = ModelledTimes(UNSPLIT)
    for n_rows in (1, 7, 30, 333):
        for context in (0, 100, 1500, 9999):
            n_stored = n_rows * context
            exact = step_cost(UNSPLIT, n_rows, context).step_s
            assert times.cell(n_rows, n_stored).fs(n_stored) / FS == pytest.approx(exact, rel=0.01)
            mixed = step_cost(UNSPLIT, n_rows, context, 1000).step_s
            assert times.mixed(n_rows, n_stored, 1000).step_s == pytest.approx(mixed, rel=0.05)
    for n_tokens, n_stored in ((1, 0), (77, 0), (2048, 4096), (5000, 0)):
        exact = prefill_s(UNSPLIT, n_tokens, n_stored)
        assert times.prefill_fs(n_tokens, n_stored) / FS == pytest.approx(exact, rel=0.01)


@given(n_stored=st.integers(0, 5000), n=st.integers(0, 300), more=st.integers(0, 10**12))
def test_steps_that_fit_into_a_time(n_stored, n, more):
    cell = ModelledTimes(UNSPLIT).cell(3, n_stored)
    pace = cell.pace(n_stored)
    assert pace.fs_of(n) == sum(cell.fs(n_stored + 3 * i) for i in range(n))
    limit = pace.fs_of(n) + more
    found = pace.n_within(limit)
    assert pace.fs_of(found) <= limit < pace.fs_of(found + 1)


@given(first=st.integers(1, 200), growth=st.integers(-9, 9), n=st.integers(1, 20), least=st.integers(0, 250))
def test_steps_that_are_at_least_so_long(first, growth, n, least):
    n = min(n, (first - 1) // -growth + 1) if growth < 0 else n  # no step takes less than nothing
    several = [first + growth * i for i in range(n)]
    pace, n_alike = Pace(first, growth).at_least(least, n)
    assert 1 <= n_alike <= n
    assert pace.fs_of(n_alike) == sum(max(least, fs) for fs in several[:n_alike])
    if n_alike < n:  # no fewer than must be
        assert (several[n_alike] < least) != (several[0] < least)


def test_a_day_is_the_trace_again_and_again():
    trace = load("azure-conversation")
    day = repeated(trace, 86400)
    assert 23.9 < day.arrival_us[-1] / 3.6e9 < 24
    assert (np.diff(day.arrival_us) >= 0).all()
    again = bisect_right(day.arrival_us.tolist(), int(trace.arrival_us[-1]))
    assert day.n_prompt[again : again + 50].tolist() == trace.n_prompt[:50].tolist()
    assert len(repeated(trace, 60)) == (trace.arrival_us < 60e6).sum()
    for seconds in (0, -1, math.inf, math.nan, 1e18):
        with pytest.raises(UserError):
            repeated(trace, seconds)


def test_a_host_is_hidden_behind_the_devices_or_they_wait_for_it():
    trace = trace_of([(0, 900, 400)] * 4)
    step_ms = 1e3 * step_cost(UNSPLIT, 4, 1100).step_s
    assert 3 < step_ms < 20
    runs = {
        (ms, is_async): simulate(
            UNSPLIT,
            trace,
            ServingPolicy(host_s=ms / 1e3, async_scheduling=is_async, max_num_batched_tokens=None),
        )
        for ms in (0, 2, 30)
        for is_async in (True, False)
    }
    without = runs[0, True]
    tpot = {key: 1e3 * run.tpot_s[-1] for key, run in runs.items()}  # of who came last, so no prompt is in it
    assert without.host_s == 0 and tpot[0, False] == pytest.approx(tpot[0, True])
    assert tpot[2, True] == pytest.approx(tpot[0, True]) and 0 < runs[2, True].host_s < 0.02
    assert tpot[2, False] == pytest.approx(tpot[0, False] + 2, abs=0.02)
    assert tpot[30, True] == pytest.approx(30, rel=0.01)
    assert tpot[30, False] == pytest.approx(tpot[0, False] + 30, rel=0.01)
    assert runs[30, True].seconds == pytest.approx(without.seconds + runs[30, True].host_s)
    # Steps become longer than what the host has to do while they are taken at once.
    longer = Deployment(LLAMA, replace(TERMS, attention_bytes_s=3e10))
    first_s, last_s = (step_cost(longer, 4, n).step_s for n in (900, 1300))
    middle = ServingPolicy(host_s=(first_s + last_s) / 2)
    fast, slow = (simulate(longer, trace, middle, one_by_one=one_by_one) for one_by_one in (False, True))
    assert fast.end_s.tolist() == slow.end_s.tolist() and fast.host_s == slow.host_s
    waited_s = fast.host_s - 4 * middle.host_s  # but for four prompts' programs
    n_short = waited_s / ((last_s - first_s) / 4)  # steps that wait, half of the half on average
    assert 0.4 * fast.n_decode_steps < n_short < 0.6 * fast.n_decode_steps
    for host_s in (-1, math.nan, math.inf):
        with pytest.raises(UserError, match="the host's time for a program"):
            simulate(UNSPLIT, trace, ServingPolicy(host_s=host_s))


def test_a_prompts_program_makes_the_step_before_it_longer():
    """It is launched beside the decodes' while that step runs, which hides one launch and not two."""
    first, second = (0, 900, 400), (1_000_000, 900, 1)
    step_s = step_cost(UNSPLIT, 1, 1100).step_s
    waited = []
    for requests in ([first], [first, second]):
        run = simulate(UNSPLIT, trace_of(requests), ServingPolicy(host_s=0.9 * step_s))
        waited.append(run.host_s)
    assert waited[1] - waited[0] == pytest.approx(2 * 0.9 * step_s - step_s, rel=0.1)


def test_what_there_is_none_of_is_null(capsys, tmp_path):
    """Answers of one token have no time per token."""
    one = tmp_path / "one.csv"
    one.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:00Z,100,1\n")
    assert main(["simulate", "--trace", str(one), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["tpot_s"] is None and found["ttft_s"]["p50"] > 0
    assert main(["simulate", "--trace", str(one)]) == 0
    assert re.search(r"TPOT p50, p99 \(ms\) +– ", capsys.readouterr().out)
    assert main(["simulate", "--trace", str(one), "--speedup", "1e-300"]) == 0  # of one request, at 0
    assert main(["simulate", "--speedup", "1e-300"]) == 2
    assert "the last request would never come" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1.0", "nan"])
def test_the_command_refuses_what_the_engine_would(capsys, value):
    assert main(["simulate", "--tpot-slo-ms", value]) == 2
    assert capsys.readouterr().err == f"error: --tpot-slo-ms {value} must be above 0\n"


def test_what_cannot_be_served_is_refused():
    with pytest.raises(UserError, match="KV slots"):
        simulate(UNSPLIT, trace_of([(0, 900, 400)]), ServingPolicy(kv_slots=1000))
    with pytest.raises(UserError, match="2,000,000,003 KV slots"):  # and no list of as many tokens is made
        simulate(UNSPLIT, trace_of([(0, 2_000_000_000, 4)]))
    with pytest.raises(UserError, match=r"need 99 KV slots \(prompt 60, output 40\), the pool has 70"):
        simulate(UNSPLIT, trace_of([(0, 60, 4)]), ServingPolicy(kv_slots=70, max_tokens=40))
    with pytest.raises(UserError, match="no memory"):
        simulate(Deployment(model_config("llama-3-70b"), TERMS), trace_of([(0, 9, 4)]))
    with pytest.raises(UserError, match="no request"):
        simulate(UNSPLIT, Trace(*(np.empty(0, np.int64),) * 3))


def test_prompts_that_take_no_time_are_all_there_after_one_step() -> None:
    trace = trace_of([(0, 3000, 5)] * 20)
    policy = ServingPolicy(with_prefill=False, max_num_batched_tokens=None)
    assert len(set(simulate(UNSPLIT, trace, policy).first_s)) == 1
    assert len(set(simulate(UNSPLIT, trace, replace(policy, with_prefill=True)).first_s)) > 1


def simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> dict[str, float]:
    """As JSON, of sixteen short requests at once."""
    trace = tmp_path / "sixteen.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + 16 * "2026-01-01 00:00:00,30,40\n")
    assert main(["simulate", "--trace", str(trace), *words, "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_a_device_that_is_said_twice_is_the_one_left_out(capsys, tmp_path):
    """Short prompts go together where pools are in one host, and that they are does not depend on the option."""
    alone, said = (
        simulated(capsys, tmp_path, "--compute", "h200", "--dop", "1,2", *memory)
        for memory in ((), ("--memory", "h200"))
    )
    assert said["n_prompt_steps"] == alone["n_prompt_steps"] < 16 and said["seconds"] == alone["seconds"]


def test_more_devices_than_a_host_has_are_joined_by_a_network(capsys, tmp_path):
    of_hosts = [
        simulated(capsys, tmp_path, "--dop", f"1,{n}", "--partition", "tokens")["exchange_s"] for n in (7, 8)
    ]
    assert of_hosts[1] > 1.5 * of_hosts[0]


def test_sums_are_those_of_xla_or_at_their_best(capsys, tmp_path):
    words = ("--model", "LLaMA3-70B", "--dop", "4,0", "--tensor-parallel", "4")
    as_run, at_best = (simulated(capsys, tmp_path, *words, *how)["decode_s"] for how in ((), ("--at-best",)))
    assert as_run > 1.2 * at_best


def test_staggered_batches_stay_on_their_copies_or_go_around(capsys, tmp_path):
    """As many batches as copies are fixed ones' alone."""
    words = ("--dop", "2,2", "--batches", "2")
    assert simulated(capsys, tmp_path, *words, "--pipelining", "fixed")["n_decode_steps"]
    assert main(["simulate", *words]) == 2
    assert "2 staggered batches do not go over 2 replicas" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dop", "2,0"], "has 2 copies of the model, and no attention workers that these could have in"),
        (["--partition", "tokens"], "--partition is of attention workers, of which --dop says none"),
        (["--memory", "h20"], "--memory is of attention workers"),
        (["--link-gb-s", "3"], "--link-gb-s is of attention workers"),
        (["--link-us", "3"], "--link-us is of attention workers"),
        (["--batches", "2"], "--batches is of attention workers"),
        (["--dop", "1,1", "--pipelining", "round"], "--pipelining round must be one of rotational, fixed"),
    ],
)
def test_what_pools_cannot_be_is_one_line(capsys, words, message):
    assert main(["simulate", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
