"""How many prompt tokens a step computes while others write: the policy alone, in the scheduler, in the
simulator, and on real steps of a CPU."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chunked_prefill import GREEDY, LONG, PROMPTS, llm
from test_predicted import TERMS
from test_scheduler import make, request, run_step
from test_simulator import LLAMA, UNSPLIT, check_whole, trace_of

from jaxlamina import SamplingParams
from jaxlamina.engine.chunk_size import DECODE_STEPS, LEAST_TOKENS, MOST_TOKENS, ChunkSize, chosen
from jaxlamina.errors import UserError
from jaxlamina.planner.calibration import DeviceCalibration
from jaxlamina.planner.costs import Deployment
from jaxlamina.server.metrics import snapshot
from jaxlamina.simulator import ServingPolicy, simulate
from jaxlamina.steps.buckets import Buckets, CompiledSizes, StepSizes

FIXED_S, ROW_S, TOKEN_S = 1e-3, 1e-5, 1e-5


def line(n_rows: int, n_stored: int, n_prompt: int, prompt_stored: int) -> float:
    """Seconds of a step, as a straight line."""
    return FIXED_S + ROW_S * n_rows + 1e-8 * (n_stored + prompt_stored) + TOKEN_S * n_prompt


STEPS = st.tuples(st.integers(1, 512), st.integers(0, 1 << 20), st.integers(0, 1 << 15))


@settings(max_examples=200, deadline=None)
@given(
    step=STEPS,
    limit_s=st.none() | st.floats(1e-4, 1.0),
    most=st.integers(1, 9000),
    slower=st.floats(0.1, 10),
)
def test_it_is_the_most_tokens_within_the_limit(step, limit_s, most, slower):
    """As predicted, and after steps that took another time than predicted."""
    policy = ChunkSize(line, most=most, limit_s=limit_s)
    for corrected in (1.0, slower):
        n = policy.next(*step)
        assert (
            n in policy.sizes and policy.sizes == tuple(sorted({*policy.sizes})) and max(policy.sizes) == most
        )
        rows, stored, before = step
        by_size = {size: policy.expected_s(rows, stored, size, before) for size in policy.sizes}
        for size, seconds in by_size.items():
            assert seconds == pytest.approx(corrected * policy.predicted_s(rows, stored, size, before))
        limit = limit_s or DECODE_STEPS * policy.expected_s(rows, stored, 0, 0)
        larger = [seconds for size, seconds in by_size.items() if size > n]
        assert all(seconds > limit for seconds in larger)
        assert by_size[n] <= limit or n == min(policy.sizes)
        for size, _ in itertools.product((0, *policy.sizes), range(3)):
            policy.took(rows, stored, size, before, slower * policy.predicted_s(rows, stored, size, before))
    assert policy.next(0, 0, 0) == most  # nobody waits for it


def test_a_measured_size_says_what_its_neighbours_take_and_a_first_time_is_not_counted():
    policy = ChunkSize(line, limit_s=line(8, 800, 1024, 0) * 1.001)
    assert policy.next(8, 800, 0) == 1024
    policy.took(8, 800, 512, 0, 60.0)  # it was compiled
    assert policy.next(8, 800, 0) == 1024
    for _ in range(3):
        policy.took(8, 800, 512, 0, 3 * line(8, 800, 512, 0))
        policy.took(8, 800, 0, 0, line(8, 800, 0, 0))
    assert policy.next(8, 800, 0) == 256  # 1024 and 512 would take three times as long as predicted
    assert policy.latest is not None
    assert policy.latest.measured_s == pytest.approx(3 * policy.latest.predicted_s, rel=1e-2)


def test_of_sizes_padded_to_the_same_the_largest_is_taken():
    policy = ChunkSize(line, limit_s=1e-9)
    assert policy.next(4, 100, 0) == LEAST_TOKENS
    policy.padded = lambda n_tokens, n_stored: max(512, n_tokens)  # the smallest that is compiled
    assert policy.next(4, 100, 0) == 512


def test_what_is_asked_for():
    assert chosen(512, None, line) == (512, None) and chosen(None, None, line) == (None, None)
    assert chosen("auto", None, None) == (MOST_TOKENS, None)
    most, policy = chosen("auto", 20.0, line)
    assert most == MOST_TOKENS and policy is not None and policy.limit_s == 0.02
    with pytest.raises(UserError, match="tpot_slo_ms=20 .* no cost is known"):
        chosen("auto", 20.0, None)
    with pytest.raises(UserError, match="max_num_batched_tokens is given"):
        chosen(512, 20.0, line)


def test_tokens_that_a_chunk_is_padded_to_while_programs_are_compiled():
    sizes = CompiledSizes(Buckets(batch=(4,), prompt=(128, 512), context=(64, 1024)))
    assert sizes.chunk_tokens(100, 0, mixed=False) == 128  # nothing is compiled: it will be
    sizes.add([StepSizes("chunk", 1, 512, 1024)])
    assert sizes.chunk_tokens(100, 0, mixed=False) == 512 and not sizes.wanted
    sizes.add([StepSizes("prefill", 1, 128, 0)])
    assert sizes.chunk_tokens(100, 0, mixed=False) == 128 and sizes.chunk_tokens(100, 5, mixed=False) == 512
    sizes.add([StepSizes("decode", 4, 1, 64, alongside=StepSizes("chunk", 1, 512, 64))])
    assert sizes.chunk_tokens(100, 5, mixed=True) == 512


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 900), min_size=1, max_size=8),
    limit_s=st.floats(1e-4, 2e-2),
    caching=st.booleans(),
)
def test_a_step_of_the_scheduler_has_no_more_prompt_tokens_than_it_says(prompts, limit_s, caching):
    policy = ChunkSize(line, most=512, limit_s=limit_s)
    scheduler = make(
        8000, max_num_seqs=8, caching=caching, prefill_chunk=512, max_prefill_tokens=2000, chunk_size=policy
    )
    first = request("first", 1, 60)
    scheduler.add(first)
    run_step(scheduler)
    for i, n in enumerate(prompts):
        scheduler.add(request(str(i), n, 3))
    requests = [*scheduler.running, *scheduler.waiting]
    while not scheduler.idle:
        plan = scheduler.schedule()
        n_prompt = sum(stop - start for start, stop in plan.spans)
        if plan.decodes and plan.prefills:
            # One prompt goes, however many others do.
            assert n_prompt <= scheduler.prefill_chunk and scheduler.prefill_chunk in policy.sizes
        for r in plan.requests:
            if r.n_computed is None:
                r.output_token_ids.append(7)
                if len(r.output_token_ids) == r.max_tokens:
                    scheduler.finish(r)
        scheduler.check_integrity()
    assert len(requests) == 1 + len(prompts) and all(
        len(r.output_token_ids) == r.max_tokens for r in requests
    )


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 700, 90_000]), st.integers(1, 3000), st.integers(1, 40)),
        min_size=1, max_size=10,
    ),
    slo_ms=st.none() | st.floats(1, 200),
    mixed=st.booleans(),
)  # fmt: skip
def test_the_simulator_chooses_as_the_engine_does(rows, slo_ms, mixed):
    """The same scheduler with the same policy; many steps at once are the same as one by one."""
    trace = trace_of(rows)
    policy = ServingPolicy(max_num_seqs=4, mixed_steps=mixed, tpot_slo_ms=slo_ms)
    fast, slow = (simulate(UNSPLIT, trace, policy, one_by_one=alone) for alone in (False, True))
    check_whole(fast, trace)
    assert fast.end_s.tolist() == slow.end_s.tolist() and fast.n_prompt_steps == slow.n_prompt_steps


def test_a_shorter_limit_costs_newcomers_time_and_saves_it_others():
    """The eighth request writes nearly all of its tokens while prompts are computed: its TPOT is their steps'."""
    trace = trace_of([(0, 100, 300)] * 7 + [(0, 100, 24)] + [(2000, 8000, 4)] * 4)
    slow, usual, fast = (
        simulate(UNSPLIT, trace, ServingPolicy(**how))
        for how in ({"tpot_slo_ms": 15.0}, {}, {"max_num_batched_tokens": 2048})
    )
    assert slow.tpot_s[7] <= 0.015 and slow.tpot_s[7] < usual.tpot_s[7] < fast.tpot_s[7] / 2
    decode_s = UNSPLIT.compute.step_fixed_s + 0.006
    assert usual.tpot_s[7] <= DECODE_STEPS * decode_s
    assert fast.ttft_s[-1] < usual.ttft_s[-1] < slow.ttft_s[-1]


@pytest.mark.parametrize("mixed", [False, True])
def test_tokens_are_the_same_on_a_cpu_whatever_is_chosen(mixed: bool, tmp_path: Path):
    """Real steps, measured: their times correct the prediction; sizes below the usual least, so that there is
    something to choose of short prompts."""
    path = tmp_path / "cpu.json"
    DeviceCalibration(TERMS, {}, "a CPU", {}, "2026-11-26").save(path)
    wanted = [
        o.outputs[0].token_ids
        for o in llm("llama", max_num_batched_tokens=None, split=False).generate(PROMPTS, GREEDY)
    ]
    model = llm("llama", split=False, mixed_steps=mixed, calibration=str(path), tpot_slo_ms=0.01)
    policy = model.engine.chunk_size
    assert policy is not None and policy.limit_s == 1e-5
    policy.sizes = (16, 32, 64)  # not even the fewest stay within ten microseconds: they are taken
    engine = model.engine
    writes = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine.add_request([9, 8], writes)
    engine.step()
    got: dict[str, list[int]] = {engine.add_request(p["prompt_token_ids"], GREEDY): [] for p in PROMPTS}
    while not engine.idle:
        for event in engine.step():
            if event.request_id in got:
                got[event.request_id].append(event.token_id)
    assert [tuple(tokens) for tokens in got.values()] == wanted
    assert model.stats()["n_prompt_tokens_computed"] == 2 + 3 + len(LONG) + 1 + 2
    assert engine.stats.n_prefill_steps > 1 + len(PROMPTS)  # the long one in chunks
    numbers = snapshot(engine)
    assert model.stats()["prompt_chunk_tokens"] == numbers["prompt_chunk_tokens"]
    assert numbers["prompt_chunk_tokens"] in policy.sizes  # which of them depends on measured times
    assert numbers["predicted_prompt_step_s"] > 0 and numbers["measured_over_predicted_prompt"] > 0
    engine.check_integrity()


def test_explicit_chunks_and_unknown_devices_stay_as_they_are(tmp_path: Path):
    path = tmp_path / "cpu.json"
    DeviceCalibration(TERMS, {}, "a CPU", {}, "2026-11-26").save(path)
    given_one = llm("llama", split=False, calibration=str(path), max_num_batched_tokens=16)
    assert given_one.engine.chunk_size is None and given_one.engine.scheduler.prefill_chunk == 16
    unknown = llm("llama")  # two workers on one device have no price
    assert unknown.engine.chunk_size is None and unknown.engine.scheduler.prefill_chunk == MOST_TOKENS
    with pytest.raises(UserError, match="no cost is known"):
        llm("llama", tpot_slo_ms=50.0)


def test_a_prompt_token_has_a_price_on_a_split_model_too():
    from jaxlamina.planner.costs import LinkTerms
    from jaxlamina.run.modelled import ModelledSteps

    link = LinkTerms(1e-5, 5e10)
    split = dataclasses.replace(UNSPLIT, memory=UNSPLIT.compute, link=link, n_attention=1)
    for setup in (
        UNSPLIT,
        split,
        Deployment(LLAMA, UNSPLIT.compute, n_model=2, tensor_parallel=2, model_link=link),
    ):
        known = ModelledSteps(setup)
        for mixed in (False, True):
            times = [known.with_prompt_s(mixed, 8, 8000, n, 0) for n in (0, 128, 512, 2048)]
            assert all(a is not None and b is not None and a < b for a, b in itertools.pairwise(times))
