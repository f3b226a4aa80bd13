"""Steps launched ahead: whatever is asked for, the results are those of an engine that looks at each token
first.

Both engines run the same real executor, one after the other.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import LetterTokenizer
from test_models import MODELS

from jaxlamina import LLM, SamplingParams
from jaxlamina.engine.engine import Engine
from jaxlamina.engine.in_flight import StepTimes
from jaxlamina.engine.outputs import RequestOutput, TokenEvent
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.run.executor import StepLogits, WrappedExecutor
from jaxlamina.sampling.sampler import Sampler
from jaxlamina.server.engine_thread import Add, EngineThread
from jaxlamina.server.metrics import Metrics
from jaxlamina.steps.step import Step
from jaxlamina.weights.sources import InMemoryModel

SAMPLER = Sampler()  # one for all engines: its programs are compiled once
N_SLOTS, N_HOST_SLOTS = 56, 64


def engine_of(llm: LLM, async_scheduling: bool, **options: Any) -> Engine:
    """Another engine on the executor of ``llm``."""
    engine = Engine(
        llm.executor,
        llm.tokenizer,
        vocab_size=llm.config.vocab_size,
        buckets=llm.buckets,
        max_num_seqs=options.pop("max_num_seqs", 4),
        max_model_len=llm.max_model_len,
        async_scheduling=async_scheduling,
        headroom=0.0,  # so that some give way
        **options,
    )
    engine.drawing.sampler = SAMPLER
    return engine


@pytest.fixture(scope="module")
def small() -> LLM:
    """A random model whose tokens are letters, in a pool that is soon full."""
    config = ModelConfig.from_hf(MODELS["llama"])
    model = InMemoryModel(config, random_params(config, seed=1), LetterTokenizer())
    return LLM(
        model, split=False, max_num_seqs=4, max_model_len=48, kv_slots=N_SLOTS, host_kv_slots=N_HOST_SLOTS
    )


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    return LLM("smollm2-135m-instruct", max_num_seqs=12, max_model_len=64, kv_slots=700)


class Run:
    """What came of requests ``(prompt, parameters, added before step, aborted before step or never)``."""

    def __init__(self, engine: Engine, requests: list[tuple[list[int], SamplingParams, int, int | None]]):
        self.engine = engine
        self.outputs: dict[int, RequestOutput | None] = {}
        self.aborted: set[int] = set()
        self.events: list[tuple[int, TokenEvent]] = []
        ids: dict[str, int] = {}
        for step in itertools.count():
            for i, (prompt, params, begin, _) in enumerate(requests):
                if begin == step:
                    ids[engine.add_request(prompt, params)] = i
            for request_id, i in ids.items():
                if requests[i][3] == step and i not in self.outputs:
                    self.outputs[i] = engine.abort(request_id)
                    self.aborted.add(i)
                    engine.check_integrity()
            for event in engine.step():
                self.events.append((ids[event.request_id], event))
                if event.output is not None:
                    self.outputs[ids[event.request_id]] = event.output
            engine.check_integrity()
            if engine.idle and len(ids) == len(requests):
                break
        assert len(self.outputs) == len(requests) and engine.scheduler.room.n_used == 0

    def of(self, i: int) -> list[tuple[int, int, str]]:
        """A request's events, each continuation's in order."""
        found = [event for j, event in self.events if j == i]
        assert [event.output is not None for event in found[:-1]] == [False] * (len(found) - 1)
        return sorted([(e.index, e.token_id, e.new_text) for e in found], key=lambda e: e[0])


def check_same(got: RequestOutput, expected: RequestOutput) -> None:
    """The same in all but when it ran. Log-probabilities of other batches may differ in their last digits."""
    assert [replace(c, logprobs=None, cumulative_logprob=None) for c in got.outputs] == [
        replace(c, logprobs=None, cumulative_logprob=None) for c in expected.outputs
    ]
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)
        check_same_logprobs(a.logprobs, b.logprobs)
    check_same_logprobs(got.prompt_logprobs, expected.prompt_logprobs)


def check_same_logprobs(got: Any, expected: Any) -> None:
    assert (got is None) == (expected is None)
    for row_a, row_b in zip(got or (), expected or (), strict=True):
        assert list(row_a or ()) == list(row_b or ())
        for one, other in zip((row_a or {}).values(), (row_b or {}).values(), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert (one.rank, one.decoded_token) == (other.rank, other.decoded_token)


@st.composite
def parameters(draw: Any) -> SamplingParams:
    max_tokens = draw(st.integers(1, 14))
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stop_token_ids": draw(st.sampled_from([(), (), range(0, 96, 7), range(0, 96, 6)])),
        "min_tokens": draw(st.integers(0, max_tokens)) if draw(st.booleans()) else 0,
        "logprobs": draw(st.sampled_from([None, 3])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 2])),
    }
    kind = draw(st.sampled_from(["greedy", "drawn", "samples", "best", "beams"]))
    if kind == "beams":
        n = draw(st.integers(1, 3))
        return SamplingParams(temperature=0.0, use_beam_search=True, n=1, best_of=n, **options)
    options["stop"] = draw(st.sampled_from([None, "a", ["bb", "ee", "o"]]))
    if kind == "greedy":
        return SamplingParams(temperature=0.0, **options)
    several: dict[str, int] = {"drawn": {}, "samples": {"n": 3}, "best": {"n": 1, "best_of": 2}}[kind]
    return SamplingParams(temperature=draw(st.sampled_from([0.8, 3.0])), top_p=0.9, **options, **several)


requests_ = st.tuples(
    st.integers(1, 30),  # prompt tokens
    st.integers(0, 1),  # which family of prompts: those of one share a prefix
    parameters(),
    st.integers(0, 6),  # added before this step
    st.one_of(st.none(), st.none(), st.integers(0, 16)),  # aborted before this step
)


@settings(max_examples=40)
@given(
    shapes=st.lists(requests_, min_size=2, max_size=7),
    host_kv_slots=st.sampled_from([0, N_HOST_SLOTS]),
    prefix_caching=st.booleans(),
    chunk=st.sampled_from([None, 8]),
)
def test_any_workload_gives_what_it_gives_a_step_at_a_time(
    small: LLM, shapes: list, host_kv_slots: int, prefix_caching: bool, chunk: int | None
):
    """Random requests that come and go, in a pool in which few of them fit at once."""
    requests = []
    for i, (n, family, params, begin, end) in enumerate(shapes):
        prompt = [(40 * family + 7 * t) % 96 for t in range(n)]
        rows = params.n_sequences if params.use_beam_search else 1
        n_new = max(1, min(params.max_tokens, N_SLOTS // rows - n))
        params = replace(params, max_tokens=n_new, min_tokens=min(params.min_tokens, n_new), seed=i)
        requests.append((prompt, params, begin, end))
    options = {"host_kv_slots": host_kv_slots, "prefix_caching": prefix_caching}
    options |= {"max_num_batched_tokens": chunk}
    ahead = Run(engine_of(small, True, **options), requests)
    plain = Run(engine_of(small, False, **options), [(*r[:3], None) for r in requests])
    for i, (_, params, _, _) in enumerate(requests):
        got, expected = ahead.outputs[i], plain.outputs[i]
        assert got is not None and expected is not None
        if i not in ahead.aborted:
            check_same(got, expected)
            assert ahead.of(i) == plain.of(i)
        elif not params.chosen_at_end:
            for a, b in zip(got.outputs, expected.outputs, strict=True):
                assert a.token_ids == b.token_ids[: len(a.token_ids)]
            shown = [(index, token) for index, token, _ in ahead.of(i)]
            assert shown == [(c.index, t) for c in got.outputs for t in c.token_ids]
    # Each prompt counts once, however often it was computed, and at most if it was ended before.
    stats, n_asked = ahead.engine.stats, sum(len(prompt) for prompt, *_ in requests)
    assert stats.n_prompt_tokens == n_asked if not ahead.aborted else stats.n_prompt_tokens <= n_asked
    assert 0 <= stats.n_prompt_tokens - stats.n_prefix_hit_tokens <= stats.n_prompt_tokens_computed


QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
TEXT = "Once upon a time, in a small village by the sea, there lived an old fisherman who"


@pytest.mark.slow  # tiny models do the same above
def test_smollm2_writes_the_same_a_step_ahead(smollm2: LLM):
    """Ends of sequence, stop strings, samples, ranked ones and beams beside each other; what is counted, and
    what the prefix cache keeps."""
    encode = smollm2.tokenizer.encode
    plain = smollm2.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=20))[0].text
    asked = [
        (smollm2.chat_prompt(QUESTION)["prompt_token_ids"], {"max_tokens": 20}),  # ends by itself
        (encode(TEXT), {"max_tokens": 20, "stop": plain[30:36], "logprobs": 2}),
        (encode(TEXT), {"max_tokens": 20, "stop": plain[8:11], "min_tokens": 10}),
        (
            encode(TEXT),
            {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 24, "stop": ["."], "n": 2},
        ),
        (encode("1 2 3 4 5 6"), {"temperature": 1.2, "seed": 6, "max_tokens": 12, "best_of": 2}),
        (encode("def fibonacci(n):\n"), {"max_tokens": 1}),
    ]
    asked.append((encode(TEXT), {"max_tokens": 6, "use_beam_search": True, "beam_width": 2, "n": 2}))
    requests = [
        (prompt, SamplingParams(**{"temperature": 0.0} | options), i % 3, None)
        for i, (prompt, options) in enumerate(asked)
    ]
    end_ids = tuple(smollm2.engine.admission.eos_token_ids)
    runs = [
        Run(engine_of(smollm2, async_scheduling, max_num_seqs=12, eos_token_ids=end_ids), requests)
        for async_scheduling in (True, False)
    ]
    reasons: Counter[str] = Counter()
    for i in range(len(requests)):
        got, expected = (run.outputs[i] for run in runs)
        assert got is not None and expected is not None
        check_same(got, expected)
        assert runs[0].of(i) == runs[1].of(i)
        assert got.n_cached_tokens == expected.n_cached_tokens
        for c in got.outputs:
            reasons[c.finish_reason] += 1
            tokens = [*got.prompt_token_ids, *c.token_ids]
            caches = [run.engine.scheduler.prefix_cache for run in runs]
            kept = [cache.match_length(tokens) for cache in caches if cache is not None]
            assert kept[0] == kept[1] >= len(got.prompt_token_ids)
    assert reasons["stop"] >= 3 and reasons["length"] >= 3
    counted = [
        {k: v for k, v in asdict(run.engine.stats).items() if isinstance(v, int) and k != "n_steps"}
        | run.engine.kv_stats()
        for run in runs
    ]
    assert counted[0] == counted[1]


def recorded(engine: Engine) -> list[tuple[str, Any]]:
    """What ``engine`` does from now on, in order: ("launch", the tokens of a decode step or None), ("read",
    tokens)."""
    seen: list[tuple[str, Any]] = []
    executor, read = engine.executor, engine._times.read

    class Recording(WrappedExecutor):
        def run(self, step: Step) -> StepLogits:
            if step.decodes is not None:
                seen.append(("launch", step.decodes.tokens))
            seen.extend(("launch", None) for _ in step.prompts)
            return super().run(step)

    def reading(rows: Any) -> Any:
        found = read(rows)
        seen.append(("read", None if rows.sampled is None else found[0].sampled.tokens[: len(rows.requests)]))
        return found

    engine.executor, engine._times.read = Recording(executor), reading  # type: ignore[method-assign]
    return seen


def test_a_step_is_launched_before_the_tokens_of_the_one_before_it_are_read(small: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=5)
    orders = {}
    for async_scheduling in (True, False):
        engine = engine_of(small, async_scheduling)
        seen = recorded(engine)
        out = Run(engine, [([1, 2, 3], params, 0, None)]).outputs[0]
        assert out is not None
        orders[async_scheduling] = [what for what, _ in seen]
        taken_in = [tokens for what, tokens in seen if what == "launch" and tokens is not None]
        assert all(isinstance(tokens, jax.Array) for tokens in taken_in) == async_scheduling
        assert [int(tokens[0, 0]) for tokens in taken_in] == list(out.token_ids[:-1])
        assert [int(tokens[0]) for what, tokens in seen if what == "read"] == list(out.token_ids)
    # Five tokens are five steps: that the last one is the last is known ahead.
    assert orders[True] == ["launch", *["launch", "read"] * 4, "read"]
    assert orders[False] == ["launch", "read"] * 5


class Done:
    """Nobody waits for it."""

    def set(self, value: None) -> None:
        pass


class InTurn:
    """An event loop that does at once what it is told."""

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, function: Any, *arguments: Any) -> None:
        function(*arguments)


def test_tokens_go_out_while_a_step_is_launched_and_before_one_is_waited_for(small: LLM):
    """The engine's thread wants no Python then, which others need to make answers of them."""
    engine = engine_of(small, True)
    seen: list[str] = []

    class Launching(WrappedExecutor):
        def run(self, step: Step) -> StepLogits:
            seen.append("launch")
            found = super().run(step)
            seen.append("launched")
            return found

    engine.executor = Launching(engine.executor)
    read = engine._times.read
    engine._times.read = lambda rows: (seen.append("read"), read(rows))[1]  # type: ignore[method-assign]
    thread = EngineThread(
        engine,
        Metrics("tiny"),
        prepare=lambda stopped: None,
        before_step=lambda: None,
        ready=lambda: None,
        deliver=lambda given: seen.extend(
            f"out {len(event.output.token_ids) if event.output else ''}" for *_, event in given
        ),
        end=lambda *_: seen.append("end"),
    )
    loop: Any = InTurn()
    params = SamplingParams(temperature=0.0, max_tokens=5)
    job = engine.admission.job([1, 2, 3], params, None)
    thread.start(loop)
    added = Add(object(), [job], [{}], {}, {}, 0, 0, False, Done())  # type: ignore[arg-type]
    thread.put(added)
    until = time.monotonic() + 60
    while "out 5" not in seen and time.monotonic() < until:
        time.sleep(0.01)
    thread.stop()
    thread.join(30)
    first = ["launch", "launched", "launch", "launched", "read"]
    each = ["launch", "out ", "launched", "read"]
    assert seen == [*first, *each * 3, "out ", "read", "out 5"]


def test_a_step_of_beams_is_waited_for_and_the_others_go_on(small: LLM):
    engine = engine_of(small, True)
    seen = recorded(engine)
    beams = SamplingParams(temperature=0.0, use_beam_search=True, best_of=2, max_tokens=3)
    Run(engine, [([1, 2, 3], beams, 0, None), ([4, 5], SamplingParams(max_tokens=6, seed=1), 0, None)])
    order = [what for what, _ in seen]
    # Two prompts, two steps with beams; then the one that is drawn goes on by itself, a step ahead.
    assert order == ["launch"] * 2 + ["read"] * 2 + ["launch", "read"] * 2 + ["launch"] + [
        "launch",
        "read",
    ] * 2 + ["read"]


def test_a_step_that_nobody_wants_any_more_is_not_waited_for(small: LLM):
    engine = engine_of(small, True)
    first = engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20))
    second = engine.add_request([4, 5], SamplingParams(temperature=0.0, max_tokens=20))
    tokens = {first: [], second: []}
    for _ in range(3):
        for event in engine.step():
            tokens[event.request_id].append(event.token_id)
    for request_id in (first, second):
        assert not engine.idle
        out = engine.abort(request_id)
        assert out is not None and list(out.token_ids) == tokens[request_id] and len(out.token_ids) == 3
        engine.check_integrity()
    assert engine.idle and engine.scheduler.room.n_used == 0 and engine.step() == []
    # A token that ends it: nothing is left after it is seen, though the next step was launched.
    end = tokens[first][2]
    request_id = engine.add_request(
        [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[end])
    )
    while not any(event.output for event in engine.step()):
        pass
    assert engine.idle and request_id not in engine.postprocess.live


def test_what_a_failed_step_leaves_can_be_aborted(small: LLM):
    engine = engine_of(small, True)
    ids = [engine.add_request([1, 2, 3 + i], SamplingParams(max_tokens=20, seed=1)) for i in range(2)]
    engine.step()
    executor = engine.executor

    class Failing(WrappedExecutor):
        def run(self, step: Step) -> StepLogits:
            raise RuntimeError("the device is gone")

    engine.executor = Failing(executor)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    engine.executor = executor
    with pytest.raises(UserError, match="a step failed while these requests ran, abort them: 0, 1"):
        engine.step()
    assert all(engine.abort(request_id) is not None for request_id in ids)
    engine.check_integrity()
    assert engine.idle and engine.scheduler.slots.n_used == 0
    Run(engine, [([1, 2, 3], SamplingParams(max_tokens=4, seed=1), 0, None)])


def test_what_the_host_launches_and_waits_for_is_counted(small: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=20)
    for async_scheduling in (True, False):
        engine = engine_of(small, async_scheduling)
        Run(engine, [([1, 2, 3], params, 0, None)] * 2)
        s = engine.stats
        assert 0 < s.launch_s and 0 < s.wait_s <= s.prefill_s + s.decode_s
        assert s.n_prefill_steps == 2 and s.n_decode_steps >= 19


def test_a_step_lasts_from_when_the_one_before_it_was_read():
    """Rows that are done when a clock says so: `StepTimes` knows neither apart from real ones."""
    clock = {"now": 1.0}
    times = StepTimes(lambda: clock["now"])

    class Timed:
        def __init__(self, done_at: float) -> None:
            self.done_at = done_at

        def read(self) -> str:
            clock["now"] = max(clock["now"], self.done_at)
            return "found"

    def launch() -> str:
        clock["now"] += 0.25
        return "launched"

    rows: Any = Timed
    times.begin()  # there is something to do
    assert times.timed(launch) == ("launched", 0.25)
    assert times.read(rows(2.0)) == ("found", 1.0, 0.75)
    clock["now"] = 3.0
    times.begin()  # still
    assert times.read(rows(2.5)) == ("found", 1.0, 0.0)  # it was done: nothing is waited for
    times.rest()
    clock["now"] = 10.0
    times.begin()
    assert times.read(rows(10.5)) == ("found", 0.5, 0.5)
