"""Several continuations of one prompt: on forked slots, each as it would be alone, whatever else happens to
it.

The imaginary model's logits are a random function of all tokens that it finds through the slot tables.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import ImaginaryExecutor, LetterTokenizer, V, make, run

from jaxlamina.engine.engine import Engine
from jaxlamina.errors import UserError
from jaxlamina.sampling.params import SamplingParams

PROMPT = [(5 * i) % V for i in range(20)]


def logits_after(history: list[int]) -> np.ndarray:
    """[V] float32, a different row for every history."""
    return np.random.default_rng([len(history), *history]).normal(0, 2, V).astype(np.float32)


class DiceExecutor(ImaginaryExecutor):
    def _logits(self, histories: list[list[int]]):
        return jnp.asarray(np.stack([logits_after(history) for history in histories]))


def dice(n_slots: int = 400, max_num_seqs: int = 8, n_host: int = 0, **options) -> Engine:
    engine = make(n_slots, max_num_seqs, host_kv_slots=n_host, **options)
    engine.executor = DiceExecutor(n_slots, n_host)
    return engine


def sampled(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT):
    request_id = engine.add_request(prompt, params)
    outputs, events = run(engine)
    return outputs[request_id], [event for event in events if event.request_id == request_id]


@pytest.mark.parametrize("ahead", [0, 1])
def test_eight_samples_of_one_prompt_hold_the_prompt_once(ahead: int):
    engine = dice(prefix_caching=False, async_scheduling=bool(ahead))
    engine.add_request(PROMPT, SamplingParams(n=8, seed=1, max_tokens=10))
    for n_steps in range(1, 10):
        engine.step()
        slots = engine.scheduler.slots
        n_taken_in = n_steps - 1 + ahead  # a step that is launched has its slots
        assert slots.n_used == len(PROMPT) + 8 * n_taken_in
        rows = [request.slots.view() for request in engine.scheduler.running]
        assert len(rows) == 8
        for row in rows:
            assert row[: len(PROMPT)].tolist() == rows[0][: len(PROMPT)].tolist()
            assert slots.owners_of(row).tolist() == [8] * len(PROMPT) + [1] * n_taken_in
        engine.check_integrity()
    assert engine.executor.n_prefilled == [len(PROMPT)]
    [event] = [event for event in engine.step() if event.output]
    assert engine.idle and engine.scheduler.slots.n_used == 0
    assert [len(c.token_ids) for c in event.output.outputs] == [10] * 8
    assert engine.stats.n_prompt_tokens_computed == len(PROMPT) and engine.stats.n_generated_tokens == 80


def test_samples_differ_and_the_first_is_what_one_alone_would_be():
    out, _ = sampled(dice(), SamplingParams(n=8, seed=7, max_tokens=6))
    assert [c.index for c in out.outputs] == list(range(8))
    assert len({c.token_ids for c in out.outputs}) == 8
    alone, _ = sampled(dice(), SamplingParams(seed=7, max_tokens=6))
    assert out.outputs[0].token_ids == alone.token_ids == out.token_ids
    fewer, _ = sampled(dice(), SamplingParams(n=3, seed=7, max_tokens=6))
    assert fewer.outputs == out.outputs[:3]
    unseeded = [
        sampled(engine, SamplingParams(n=2, max_tokens=6))[0] for engine in [dice()] for _ in range(2)
    ]
    assert len({c.token_ids for o in unseeded for c in o.outputs}) == 4


@settings(max_examples=40, deadline=None)
@given(
    n_slots=st.integers(40, 90),
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    prefix_caching=st.booleans(),
    n_host=st.sampled_from([0, 20, 300]),
)
def test_samples_are_the_same_in_a_crowd_that_is_preempted(
    n_slots: int, widths: list[int], prefix_caching: bool, n_host: int
):
    crowded = dice(n_slots, 4, n_host, prefix_caching=prefix_caching)
    asked = {}
    for i, n in enumerate(widths):
        params = SamplingParams(n=n, seed=i, max_tokens=12)
        asked[crowded.add_request(PROMPT[: 12 + 4 * (i % 2)], params)] = params, PROMPT[: 12 + 4 * (i % 2)]
    outputs, _ = run(crowded)
    for request_id, (params, prompt) in asked.items():
        alone, _ = sampled(dice(), params, prompt)
        assert outputs[request_id].outputs == alone.outputs
    assert crowded.scheduler.room.n_used == 0


def test_every_sample_is_streamed_under_its_index_and_the_last_event_has_the_output():
    engine = dice(tokenizer=LetterTokenizer())
    params = SamplingParams(n=3, seed=3, max_tokens=30, stop_token_ids=list(range(12)), logprobs=1)
    out, events = sampled(engine, params)
    assert len({len(c.token_ids) for c in out.outputs}) > 1  # they end at different times
    for c in out.outputs:
        mine = [event for event in events if event.index == c.index]
        assert tuple(event.token_id for event in mine) == c.token_ids
        assert "".join(event.new_text for event in mine) == c.text
        assert c.finish_reason == "length" or c.stop_reason == c.token_ids[-1]
        assert c.logprobs is not None and len(c.logprobs) == len(c.token_ids)
        chosen = [row[token].logprob for row, token in zip(c.logprobs, c.token_ids, strict=True)]
        assert c.cumulative_logprob == pytest.approx(sum(chosen))
    assert [event.output is not None for event in events] == [False] * (len(events) - 1) + [True]


def test_best_of_gives_the_likeliest_of_those_it_drew():
    everyone, _ = sampled(dice(), SamplingParams(n=8, seed=5, max_tokens=6, logprobs=0))
    out, events = sampled(dice(), SamplingParams(n=3, best_of=8, seed=5, max_tokens=6))
    ranked = sorted(everyone.outputs, key=lambda c: -c.cumulative_logprob)
    assert [c.token_ids for c in out.outputs] == [c.token_ids for c in ranked[:3]]
    assert [c.cumulative_logprob for c in out.outputs] == [c.cumulative_logprob for c in ranked[:3]]
    assert [c.index for c in out.outputs] == [0, 1, 2] and out.outputs[0].logprobs is None
    assert out.token_ids == ranked[0].token_ids != everyone.token_ids
    for c in out.outputs:  # all at the end, and only of those that are given
        assert tuple(e.token_id for e in events if e.index == c.index) == c.token_ids
    assert len(events) == 18 and events[-1].output == out


def test_abort_ends_all_samples_and_keeps_what_was_written():
    engine = dice(prefix_caching=False)
    request_id = engine.add_request(PROMPT, SamplingParams(n=3, seed=3, max_tokens=30))
    for _ in range(4):
        engine.step()
    out = engine.abort(request_id)
    assert out is not None and [len(c.token_ids) for c in out.outputs] == [4, 4, 4]
    assert {c.finish_reason for c in out.outputs} == {"abort"}
    assert engine.idle and engine.scheduler.slots.n_used == 0
    waiting = engine.add_request(PROMPT, SamplingParams(n=3, max_tokens=30))
    out = engine.abort(waiting)
    assert out is not None and [c.token_ids for c in out.outputs] == [()] * 3


def test_more_samples_than_run_at_once_are_refused():
    engine = dice(max_num_seqs=4)
    with pytest.raises(
        UserError, match="the request has 5 sequences, 4 run at once: ask for fewer, or raise"
    ):
        engine.add_request(PROMPT, SamplingParams(n=5))
    assert engine.idle and engine.abort("0") is None
