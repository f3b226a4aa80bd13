"""Requests with any of what can be asked for, beside each other in one engine, are given what they are given
alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from checkpoint_examples import byte_model
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlamina import LLM, SamplingParams, StructuredOutputs, UserError
from jaxlamina.engine.engine import Engine
from jaxlamina.engine.live_request import LiveRequest
from jaxlamina.engine.outputs import TokenEvent
from jaxlamina.weights.sources import InMemoryModel

pytest.importorskip("llguidance")

T = TypeVar("T")
EOS = 257
LENGTH = 64
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRUCTURED = [
    StructuredOutputs(regex="[a-z]{3,20}"),
    StructuredOutputs(regex="(é|ü|x){4,9}"),
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(choice=["yes", "no", "nobody"]),
    StructuredOutputs(grammar='start: "(" start? ")"'),
]
DRAWN: dict[str, list[Any]] = {
    "temperature": [0.5, 1.0, 2.0],
    "top_k": [-1, 1, 5, 1000],
    "top_p": [0.1, 0.9],
    "min_p": [0.05, 1.0],
    "n": [2, 3],
    "best_of": [1, 2, 3, 4],
}
NOT_OF_BEAMS: dict[str, list[Any]] = {
    "presence_penalty": [-2.0, 0.7],
    "frequency_penalty": [0.5, 2.0],
    "repetition_penalty": [0.8, 1.5],
    "logit_bias": [{EOS: 6.0}, {97: 5.0, 98: 4.0}, {97: -100.0}, dict.fromkeys(range(70), 3.0)],
    "allowed_token_ids": [[97, 98], [97, EOS], list(range(64, 160)), [287], [0xC3, 0xA9, 32]],
    "bad_words": [["a"], ["ab", "ba"], ["b", "aa a"]],
    "structured_outputs": STRUCTURED,
    "stop": ["a", ["ab", "bb"], ["b", "zz"], "aaa"],
}
OF_ALL: dict[str, list[Any]] = {
    "seed": [0, 7, 2**64 - 1],
    "min_tokens": [1, 4],
    "stop_token_ids": [[97], [98, EOS], [287]],
    "ignore_eos": [True],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "logprobs": [0, 1, 3, 20],
    "prompt_logprobs": [0, 2, 20],
    "truncate_prompt_tokens": [-1, 1, 9],
}
BEAMS: dict[str, list[Any]] = {"beam_width": [1, 2, 3], "n": [1, 2], "length_penalty": [-1.0, 0.5, 2.0]}
KINDS = {
    "greedy": NOT_OF_BEAMS | OF_ALL,
    "drawn": DRAWN | NOT_OF_BEAMS | OF_ALL,
    "beams": BEAMS | OF_ALL,
    "anything": BEAMS | DRAWN | NOT_OF_BEAMS | OF_ALL | {"use_beam_search": [True]},
}
LIKELY = {97: 5.5, 98: 5.0, EOS: 3.5}  # else random weights like no token better than the others

FEW = {"kv_slots": 72}
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "few slots": FEW,
    "few slots, host": {**FEW, "host_kv_slots": 300},
    "few rows": {"max_num_seqs": 4},
    "no prefix caching": {"prefix_caching": False},
    "attention workers by heads": {"split": True, "attention_workers": 2},
    "attention workers by tokens": {"split": True, "attention_workers": 2, "partition": "tokens"},
    "attention workers by requests": {"split": True, "attention_workers": 2, "partition": "requests"},
    "chunks": {"max_num_batched_tokens": 8},
    "chunks, few slots": {"max_num_batched_tokens": 8, **FEW},
    "a step at a time": {"async_scheduling": False},
    "mixed steps": {"split": True, "mixed_steps": True, "max_num_batched_tokens": 16},
    "prompts together": {"prompt_batch_tokens": 64},
    "priority": {"scheduling_policy": "priority", **FEW},
    "shortest-remaining": {"scheduling_policy": "shortest-remaining", **FEW},
    "padded": {"kv_manager": "padded", "prefix_caching": False},
    "int8": {"kv_dtype": "int8", **FEW},
}
ROUNDS_KV = ("int8",)  # which stores a prompt that is found otherwise than one that is computed
EACH = ["default", *(pytest.param(name, marks=pytest.mark.slow) for name in ENGINES if name != "default")]


@functools.lru_cache
def model_of(vocab_size: int) -> InMemoryModel:
    return byte_model(vocab_size=vocab_size)


@functools.lru_cache
def engine_of(vocab_size: int, name: str) -> Engine:
    options: dict[str, Any] = {"split": False, "max_num_seqs": 8, "max_model_len": LENGTH, **ENGINES[name]}
    return LLM(model_of(vocab_size), **options).engine


@st.composite
def asked(draw: Any) -> dict[str, Any]:
    """Of parameters, most of which go together."""
    kind = draw(st.sampled_from(["greedy", "greedy", "drawn", "drawn", "drawn", "beams", "anything"]))
    known = KINDS[kind]
    names = draw(st.lists(st.sampled_from(sorted(known)), max_size=6, unique=True))
    found: dict[str, Any] = {name: draw(st.sampled_from(known[name])) for name in names}
    found["max_tokens"] = draw(st.sampled_from([12, 20, 5, 1]))
    if kind == "anything":
        return found
    if kind in ("greedy", "beams"):
        found["temperature"] = 0.0
    if kind == "beams":
        return found | {"use_beam_search": True}
    if "structured_outputs" in found or {"allowed_token_ids", "min_tokens"} <= found.keys():
        for name in ("min_tokens", "bad_words", "allowed_token_ids"):
            found.pop(name, None)
    if draw(st.booleans()):
        found.setdefault("logit_bias", LIKELY)
    if "best_of" in found:
        found["best_of"] = max(found["best_of"], found.get("n", 1))
    return found


REQUESTS = st.tuples(
    st.integers(0, 1),  # prompts of one kind begin alike
    st.sampled_from([1, 2, 9, 17, 33, 40]),  # tokens of it
    st.integers(90, 100),  # its last token
    asked(),
    st.integers(0, 3),  # it is added before this step
    st.integers(0, 2),  # its priority
    st.one_of(*[st.none()] * 4, st.integers(0, 12)),  # it is ended so many steps later
)


def accepted(make: Callable[[], T]) -> T | None:
    """None: it is refused, in a line."""
    try:
        return make()
    except UserError as error:
        assert "\n" not in str(error)
        return None


def run(
    engine: Engine, begun: dict[int, list[tuple[LiveRequest, int]]], ended: dict[int, list[str]]
) -> dict[str, list[TokenEvent]]:
    """Steps until all are done. ``begun``: by step, what is added before it, and its priority."""
    events: dict[str, list[TokenEvent]] = {}
    step = 0
    while begun or not engine.idle:
        for job, priority in begun.pop(step, ()):
            engine.add_job(job, priority=priority)
            events[job.request_id] = []
        for request_id in ended.pop(step, ()):
            engine.abort(request_id)
        for event in engine.step() if not engine.idle else ():
            assert event.error is None, event.error
            events[event.request_id].append(event)
        step += 1
        assert step < 2000
    engine.check_integrity()
    return events


def near(a: float | None, b: float | None) -> bool:
    return a is b if a is None or b is None else bool(np.isclose(a, b, atol=1e-4, rtol=0))


def check_entries(got: Any, expected: Any) -> None:
    assert (got is None) == (expected is None)
    for a, b in zip(got or (), expected or (), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert len(a) == len(b) and next(iter(a)) == next(iter(b))
            assert all(near(x.logprob, y.logprob) for x, y in zip(a.values(), b.values(), strict=True))
            assert all(a[token].decoded_token == b[token].decoded_token for token in a.keys() & b.keys())


def check_same(got: Any, expected: Any) -> None:
    assert got.prompt_token_ids == expected.prompt_token_ids
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        assert (a.index, a.token_ids, a.text) == (b.index, b.token_ids, b.text)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert near(a.cumulative_logprob, b.cumulative_logprob)
        check_entries(a.logprobs, b.logprobs)
    check_entries(got.prompt_logprobs, expected.prompt_logprobs)


def check_whole(events: list[TokenEvent], params: SamplingParams) -> None:
    """Events add up to the output, which comes with the last, and which is as it was asked for."""
    *before, last = events
    assert last.output is not None and not any(event.output for event in before)
    for out in last.output.outputs:
        of = [event for event in events if event.index == out.index]
        assert tuple(event.token_id for event in of) == out.token_ids
        assert "".join(event.new_text for event in of) == out.text
        assert 1 <= len(out.token_ids) <= params.max_tokens
        if params.allowed_token_ids is not None:
            assert set(out.token_ids) <= set(params.allowed_token_ids)
        if out.finish_reason == "stop" and params.structured_outputs is None:
            assert len(out.token_ids) > params.min_tokens


@pytest.mark.parametrize("name", EACH)
@given(st.sampled_from([288, 290]), st.lists(REQUESTS, min_size=4, max_size=6))
@settings(max_examples=40)
def test_requests_are_given_what_they_are_given_alone(
    name: str, vocab_size: int, drawn: list[tuple[int, int, int, dict[str, Any], int, int, int | None]]
) -> None:
    engine, alone = engine_of(vocab_size, name), engine_of(vocab_size, "no prefix caching")
    begun: dict[int, list[tuple[LiveRequest, int]]] = {}
    ended: dict[int, list[str]] = {}
    jobs: list[tuple[LiveRequest, LiveRequest, bool]] = []
    try:
        for i, (kind, n, last, options, at, priority, end) in enumerate(drawn):
            if (params := accepted(lambda options=options: SamplingParams(**options))) is None:  # type: ignore[misc]
                continue
            prompt = [(31 * kind + 7 * j) % 258 for j in range(n - 1)] + [last]

            def job_of(of: Engine, prompt=prompt, params=params, i=i) -> LiveRequest | None:  # type: ignore[no-untyped-def]
                job = accepted(lambda: of.admission.job(prompt, params, None, seed=100 + i))
                if job is None or accepted(lambda: of.add_job(job)) is None:  # it may never fit
                    return None
                of.abort(job.request_id)
                return of.admission.job(prompt, params, None, seed=100 + i)

            if (job := job_of(engine)) is None:
                continue
            alike = job_of(alone)
            assert alike is not None
            begun.setdefault(at, []).append((job, priority))
            if end is not None:
                ended.setdefault(at + 1 + end, []).append(job.request_id)
            jobs.append((job, alike, end is not None))
        together = run(engine, begun, ended)
        for job, alike, may_have_ended in jobs:
            events = together[job.request_id]
            is_whole = bool(events) and events[-1].output is not None
            assert is_whole or may_have_ended
            if is_whole:
                check_whole(events, job.params)
            if name in ROUNDS_KV:
                continue
            [expected] = run(alone, {0: [(alike, 0)]}, {}).values()
            if is_whole:
                check_same(events[-1].output, expected[-1].output)
            for index in range(job.params.n):
                of, of_alone = ([e.token_id for e in es if e.index == index] for es in (events, expected))
                assert of == of_alone[: len(of)]
    finally:  # the next example shall not find what this one left
        for job, alike, _ in jobs:
            engine.abort(job.request_id)
            alone.abort(alike.request_id)
