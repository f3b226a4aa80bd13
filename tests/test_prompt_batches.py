"""Short prompts in one call: which ones, and the tokens of prompts in calls of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models import MODELS

from jaxlamina import LLM, SamplingParams
from jaxlamina.engine.prompt_batches import PromptBatches, n_rows
from jaxlamina.engine.request import Request
from jaxlamina.engine.scheduled_step import PromptSpan, ScheduledStep
from jaxlamina.engine.sizes_to_compile import first_of, shapes
from jaxlamina.engine.warm_up import Behind, warm_up
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.steps.buckets import Buckets, CompiledSizes, StepSizes
from jaxlamina.weights.sources import InMemoryModel

SHARED = [(11 * i) % 50 + 3 for i in range(20)]
# Of all lengths; some begin alike, so that they follow KV that one before them computes in the same step.
PROMPTS = [
    {"prompt_token_ids": ids}
    for ids in (
        *([[5 + i, 9, 11 + i] for i in range(6)]),
        SHARED + [4],
        SHARED + [7, 8],
        [(3 * i) % 40 + 2 for i in range(70)],
        *([[30 + i] * (4 + i) for i in range(5)]),
        SHARED[:10] + [90],
    )
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=6, seed=3, ignore_eos=True)


def llm(name: str = "llama", **options: Any) -> LLM:
    config = ModelConfig.from_hf(MODELS[name] | {"max_position_embeddings": 128})
    sizes = {"max_num_seqs": 8, "max_model_len": 112} | options
    return LLM(InMemoryModel(config, random_params(config, seed=3)), **sizes)


def n_calls(model: LLM) -> list[int]:
    """Runs what is asked next with a record of the prompts of each call."""
    found, run = [], model.executor.run

    def recorded(step: Any) -> Any:
        found.extend(len(part.batch.tokens) for part in step.prompts)
        return run(step)

    model.executor.run = recorded
    return found


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("llama", {"split": False}),
        ("llama", {}),
        ("llama", {"split": False, "kv_dtype": "int8", "mixed_steps": True}),
        ("mistral-window", {"split": False}),
        pytest.param("llama", {"attention_workers": 2, "partition": "heads"}, marks=pytest.mark.slow),
        pytest.param("mistral-window", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_tokens_of_prompts_in_calls_of_their_own(name: str, where: dict[str, Any]):
    params = [GREEDY if i % 3 else DRAWN for i in range(len(PROMPTS))]
    params[4] = SamplingParams(temperature=0.8, n=2, seed=1, max_tokens=4)  # branches: a call of its own
    params[5] = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)  # and one that is scored
    together, apart = llm(name, prompt_batch_tokens=128, **where), llm(name, prompt_batch_tokens=0, **where)
    found, calls = [], []
    for model in (together, apart):
        calls.append(n_calls(model))
        found.append([[c.token_ids for c in o.outputs] for o in model.generate(PROMPTS, params)])
        # And once more, from what the cache has: chunks after different numbers of tokens.
        found[-1] += [[c.token_ids for c in o.outputs] for o in model.generate(PROMPTS, params)]
        model.engine.check_integrity()
        assert model.stats()["kv_slots_used"] == 0
    assert found[0] == found[1]
    assert max(calls[0]) in (4, 8) and max(calls[1]) == 1 and len(calls[0]) < len(calls[1])
    counts = [model.stats()["n_prompt_tokens"] for model in (together, apart)]
    assert counts[0] == counts[1]


def test_no_more_tokens_are_computed_than_one_by_one():
    """A prompt follows what another of the step computes, and is in no call with it."""
    prompts = [{"prompt_token_ids": SHARED + [40 + i]} for i in range(8)]
    stats = []
    for n_tokens in (128, 0):
        model = llm(split=False, prompt_batch_tokens=n_tokens, max_num_batched_tokens=64)
        assert [len(o.outputs[0].token_ids) for o in model.generate(prompts, GREEDY)] == [6] * 8
        stats.append(model.stats()["n_prompt_tokens_computed"])
    assert stats[0] == stats[1] == len(SHARED) + 8


def test_until_a_program_is_there_prompts_go_one_by_one():
    """And nothing is compiled while requests are answered; what steps wanted is compiled behind."""
    model = llm(split=False, prompt_batch_tokens=128, max_num_batched_tokens=64)
    todo = shapes(model.buckets, max_model_len=112, max_chunk=64, prompt_batch_tokens=128)
    several = [shape for shape in todo if shape.kind != "decode" and shape.batch > 1]
    assert {(s.batch, s.n_tokens) for s in several} == {(4, 32)}
    first = first_of(todo)
    assert not set(first) & set(several)
    [known] = set(first_of(todo, n_at_once=8)) & set(several)  # where several are compiled at once
    assert known.context == max(shape.context for shape in several)
    warm_up(model.engine, first, lambda n: None, lambda: False)
    n, calls = model.stats()["n_compilations"], n_calls(model)
    expected = [o.token_ids for o in model.generate(PROMPTS, GREEDY)]
    assert set(calls) == {1} and model.stats()["n_compilations"] == n
    assert set(several) & set(model.engine.sizes.wanted)
    behind = Behind(model.engine, several, lambda n: None, lambda call: call())
    behind.start()
    assert behind.join(120)
    model.engine.reset_prefix_cache()
    n = model.stats()["n_compilations"]
    assert [o.token_ids for o in model.generate(PROMPTS, GREEDY)] == expected
    assert max(calls) == 4 and model.stats()["n_compilations"] == n


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_runs_have_each_prompt_once_in_order_and_none_beside_what_it_follows(data: st.DataObject):
    buckets = Buckets.default(16, 256)
    n_tokens = data.draw(st.sampled_from([0, 64, 128, 512]))
    batches = PromptBatches(CompiledSizes(buckets), n_tokens)
    prompts: list[PromptSpan] = []
    computed_by: dict[int, int] = {}  # each slot
    n_slots = 0
    for i in range(data.draw(st.integers(0, 20))):
        shared = data.draw(st.sampled_from([0, 0, *range(1, 1 + min(20, n_slots))]))
        n_new = data.draw(st.integers(1, 150))
        request = Request(f"{i}", list(range(shared + n_new)), 4, scores_prompt=data.draw(st.booleans()))
        own = list(range(n_slots, n_slots + n_new))
        request.slots.extend([*range(shared), *own])
        n_slots += n_new
        computed_by |= dict.fromkeys(own, i)
        prompts.append((request, (shared, shared + n_new)))
    step = ScheduledStep(tuple(r for r, _ in prompts), (), (), spans=tuple(s for _, s in prompts))
    runs = step.runs(calls=batches.calls)
    assert [prompt for run in runs for prompt in run.prompts] == prompts
    for run in runs:
        size = run.size
        if len(run.prompts) == 1:
            assert size is None
            continue
        assert size is not None and len(run.prompts) <= size.batch
        assert size.batch * size.n_tokens <= n_tokens and size.batch >= 4
        ids = {int(request.request_id) for request, _ in run.prompts}
        for request, (start, stop) in run.prompts:
            assert stop - start <= size.n_tokens and start <= max(1, size.context)
            assert not request.scores_prompt
            assert not {computed_by[slot] for slot in np.asarray(request.slots.view()[:start]).tolist()} & ids


def test_where_no_program_is_there_that_is_found_out_once_a_step(monkeypatch):
    sizes = CompiledSizes(Buckets.default(16, 256))
    sizes.add([StepSizes("prefill", 1, 256, 0), StepSizes("chunk", 16, 16, 256)])
    batches, looks = PromptBatches(sizes, 512), []
    monkeypatch.setattr(batches, "_alike", lambda prompts: looks.append(0) or list(prompts))
    prompts: list[PromptSpan] = []
    for i in range(64):
        request = Request(f"{i}", list(range(30)), 4)
        request.slots.extend(range(30 * i, 30 * i + 30))
        prompts.append((request, (0, 30)))
    assert [run.prompts for run in batches.calls(prompts)] == [(prompt,) for prompt in prompts]
    missing = StepSizes("prefill", 16, 32, 0)
    assert len(looks) == 1 and sizes.wanted == {missing: 1}
    after = [(request, (20, 30)) for request, _ in prompts]  # of these there is one
    assert [len(run.prompts) for run in batches.calls(prompts + after)] == [1] * 64 + [16] * 4
    assert len(looks) == 2 + 4 and sizes.wanted[missing] == 2


def test_sizes_of_several_prompts_are_no_others():
    sizes = CompiledSizes(Buckets.default(16, 256))
    one = StepSizes("chunk", 1, 256, 256)
    several = StepSizes("chunk", 8, 16, 256)
    sizes.add([one, several])
    assert sizes.fit(StepSizes("chunk", 1, 9, 5)) == one
    assert sizes.fit_known(StepSizes("chunk", 8, 9, 5)) == several
    assert sizes.fit_known(StepSizes("chunk", 4, 9, 5)) is None
    assert str(several) == "chunk, 16 tokens, context 256, 8 prompts"
    assert [n_rows(sizes.buckets, 512, width) for width in (16, 32, 128, 256)] == [16, 16, 4, 1]
