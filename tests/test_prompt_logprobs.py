"""How likely prompts are, whatever chunks they come in and whatever runs beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_models import MODELS

from jaxlamina import LLM, SamplingParams
from jaxlamina.engine.outputs import TokenEvent
from jaxlamina.engine.room import SCORED_CHUNK
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.weights.sources import InMemoryModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
SCORED = replace(GREEDY, prompt_logprobs=5)


def small(**options: Any) -> LLM:
    config = ModelConfig.from_hf(MODELS["llama"] | {"max_position_embeddings": 1024})
    model = InMemoryModel(config, random_params(config, seed=1))
    return LLM(model, **{"max_num_seqs": 4, "max_model_len": 64, "kv_slots": 120} | options)


def logprobs_of(entries: Any) -> np.ndarray:
    """Of the tokens that stand there, the first one's left out."""
    assert entries[0] is None
    return np.asarray([next(iter(entry.values())).logprob for entry in entries[1:]])


PROMPTS = [[5, 9, 11, 3, 4, 17, 8, 2, 1, 6, 12, 40, 41, 50, 51, 52, 53, *range(20, 40)], [7, 8], [3]]


def scores(llm: LLM, params: Any = SCORED) -> list[np.ndarray]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)
    llm.engine.check_integrity()
    return [logprobs_of(out.prompt_logprobs) for out in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"split": False},
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 8, "mixed_steps": True},
        {"max_num_batched_tokens": 8, "async_scheduling": False},
        {"attention_workers": 2, "partition": "tokens", "max_num_batched_tokens": 16},
        {"kv_slots": 64, "kv_headroom": 0.0, "scheduling_policy": "shortest-remaining"},
    ],
    ids=str,
)
def test_however_prompts_are_computed(options):
    expected = scores(small())
    assert [len(x) for x in expected] == [36, 1, 0]
    for found, wanted in zip(scores(small(**options)), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_what_is_cached_is_computed_again_and_others_still_use_it():
    llm = small()
    prompt = {"prompt_token_ids": PROMPTS[0]}
    [before] = llm.generate(prompt, GREEDY)
    [out] = llm.generate(prompt, SCORED)
    assert out.n_cached_tokens == 0 and None not in out.prompt_logprobs[1:]
    assert out.token_ids == before.token_ids
    [after] = llm.generate(prompt, GREEDY)
    assert after.n_cached_tokens > 16 and after.prompt_logprobs is None
    llm.engine.check_integrity()


def test_a_long_prompt_comes_in_chunks_that_leave_room_for_logits():
    llm = small(max_model_len=SCORED_CHUNK + 100, kv_slots=SCORED_CHUNK + 100, max_num_batched_tokens=None)
    tokens = [3 + 7 * i % 50 for i in range(SCORED_CHUNK + 40)]
    [out] = llm.generate({"prompt_token_ids": tokens}, SCORED)
    counts = llm.stats()["compilations"]
    assert any(f"tokens {SCORED_CHUNK}" in what and "logits of all" in what for what in counts), counts
    assert llm.stats()["n_prompt_tokens_computed"] == len(tokens) and None not in out.prompt_logprobs[1:]


def test_events_bring_them_once_and_each_tokens_own():
    llm = small()
    drawn = SamplingParams(max_tokens=4, n=2, seed=1, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    best = SamplingParams(max_tokens=4, best_of=3, seed=1, logprobs=0, prompt_logprobs=0)
    beams = SamplingParams(
        max_tokens=4, use_beam_search=True, n=2, temperature=0, logprobs=1, prompt_logprobs=1
    )
    for params in (drawn, best, beams, GREEDY):
        events: list[TokenEvent] = []
        [out] = llm.generate({"prompt_token_ids": PROMPTS[0]}, params, on_token=events.append)
        assert events[0].prompt_logprobs == out.prompt_logprobs
        assert all(event.prompt_logprobs is None for event in events[1:])
        for completion in out.outputs:
            mine = [event.logprobs for event in events if event.index == completion.index]
            assert tuple(mine) == (completion.logprobs or (None,) * len(mine))


def test_after_a_preemption_they_are_what_they_were():
    """Nor are they computed again: the prompt's KV may be found."""
    llm = small(kv_slots=80, kv_headroom=0)
    params = replace(SCORED, max_tokens=20, ignore_eos=True)
    prompts = [PROMPTS[0], PROMPTS[0][1:]]
    events: list[TokenEvent] = []
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, on_token=events.append)
    assert sum(out.n_preemptions for out in outputs) > 0
    for out in outputs:
        first, *others = [event for event in events if event.request_id == out.request_id]
        assert first.prompt_logprobs == out.prompt_logprobs and None not in out.prompt_logprobs[1:]
        assert all(event.prompt_logprobs is None for event in others)
    n_once = sum(map(len, prompts))
    assert n_once <= llm.stats()["n_prompt_tokens_computed"] < n_once + len(prompts[1])
    llm.engine.check_integrity()


def test_aborted_before_it_was_computed():
    llm = small(max_num_batched_tokens=8)
    request_id = llm.engine.add_request(PROMPTS[0], SCORED)
    llm.engine.step()
    out = llm.engine.abort(request_id)
    known = [entry is not None for entry in out.prompt_logprobs]
    assert len(known) == len(PROMPTS[0]) and known[1] and not known[-1]
    llm.engine.check_integrity()


@pytest.mark.parametrize("wrong", [-1, 21, True, 1.5])
def test_how_many_there_may_be(wrong):
    with pytest.raises(UserError, match="prompt_logprobs=.* at least 0 and at most 20 or None"):
        SamplingParams(prompt_logprobs=wrong)
