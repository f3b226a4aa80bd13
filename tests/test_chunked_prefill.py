"""Prompts in chunks between decode steps: the tokens of prompts computed whole, and nobody waits for a long
one."""

from __future__ import annotations

import pytest
from test_models import MODELS

from jaxlamina import LLM, SamplingParams
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.weights.sources import InMemoryModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = [(7 * i) % 50 + 3 for i in range(90)]
PROMPTS = [{"prompt_token_ids": p} for p in ([5, 9, 11], LONG, LONG[:40], [8, 2])]


def llm(name: str, **options) -> LLM:
    config = ModelConfig.from_hf(MODELS[name] | {"max_position_embeddings": 128})
    model = InMemoryModel(config, random_params(config, seed=3))
    return LLM(model, max_num_seqs=4, max_model_len=112, **options)


TOKENS = {"attention_workers": 2, "partition": "tokens"}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("llama", {"split": False}),
        ("llama", {}),
        ("llama", TOKENS),
        ("mistral-window", {}),
        pytest.param("mistral-window", {"split": False}, marks=pytest.mark.slow),
        pytest.param("mistral-window", TOKENS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_same_tokens_as_whole_prompts(name: str, where: dict):
    chunked = llm(name, max_num_batched_tokens=16, **where)
    whole = llm(name, max_num_batched_tokens=None, split=False)
    outputs = chunked.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [
        o.outputs[0].token_ids for o in whole.generate(PROMPTS, GREEDY)
    ]
    n_shared = outputs[2].n_cached_tokens
    assert n_shared == 39  # of the long prompt, which was done before this one came
    assert chunked.stats()["n_prompt_tokens_computed"] == 3 + 90 + 1 + 2
    chunked.engine.check_integrity()
    assert chunked.stats()["kv_slots_used"] == 0


@pytest.mark.parametrize("where", [{"split": False}, {}], ids=["unsplit", "local"])
@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_in_the_programs_of_decode_steps(where: dict, ahead: bool):
    """Of one kind of step and another the same tokens, seeds and branches, and a prefix that others left is
    used."""
    drawn = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=5, ignore_eos=True)
    params = [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), GREEDY, drawn, GREEDY]
    options = {"max_num_batched_tokens": 16, "async_scheduling": ahead, **where}
    mixed = llm("llama", mixed_steps=True, **options)
    found = [
        [c.token_ids for o in model.generate(PROMPTS, params) for c in o.outputs]
        for model in (mixed, llm("llama", **options))
    ]
    assert found[0] == found[1] and len(found[0]) == 6
    mixed.engine.check_integrity()
    assert mixed.stats()["kv_slots_used"] == 0
    if where:  # a program of its own, which has been run
        assert any(", with " in name for name in mixed.engine.executor.programs.counts)


@pytest.mark.parametrize("ahead", [0, 1])
def test_others_get_their_tokens_while_a_long_prompt_is_computed(ahead: int):
    model = llm("llama", max_num_batched_tokens=16, async_scheduling=bool(ahead))
    engine = model.engine
    first = engine.add_request(PROMPTS[0]["prompt_token_ids"], SamplingParams(max_tokens=40, ignore_eos=True))
    assert [e.request_id for e in engine.step()] == [first]
    second = engine.add_request(LONG, GREEDY)
    seen = [[e.request_id for e in engine.step()] for _ in range(6 + ahead)]
    # 90 tokens are six chunks, of which the first comes after a step that was launched already; with the last
    # comes the long prompt's first token.
    assert seen == [[first]] * (5 + ahead) + [[first, second]]


def test_samples_and_beams_of_a_long_prompt():
    prompts = [PROMPTS[1], PROMPTS[2]]
    drawn = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=5, ignore_eos=True)
    beams = SamplingParams(max_tokens=6, temperature=0, use_beam_search=True, beam_width=3, n=2)
    found = [
        [
            c.token_ids
            for o in llm("llama", max_num_batched_tokens=n).generate(prompts, [drawn, beams])
            for c in o.outputs
        ]
        for n in (16, None)
    ]
    assert found[0] == found[1] and len(found[0]) == 5


def test_out_of_range():
    with pytest.raises(UserError, match="max_num_batched_tokens=0 must be at least 1"):
        llm("llama", max_num_batched_tokens=0)
