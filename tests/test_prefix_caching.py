"""Automatic prefix caching with real models: what is computed again, and that it changes no token in
float32."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_examples import few_layers_folder
from test_models import MODELS

from jaxlamina import LLM, SamplingParams
from jaxlamina.bench import prefix_bench
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.weights.sources import InMemoryModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SYSTEM = """You are the keeper of a small library by the sea. Readers write to you with questions about books, maps and
the weather. Answer each of them in a few plain sentences, name the shelf where a book stands, and never promise one
that is lent. If you do not know an answer, say so, and say who in the village might. """
QUESTIONS = ["Where do I find a map of the harbour?", "Which book tells how nets are mended, and is it in?"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(
        few_layers_folder(tmp_path_factory.mktemp("few")), max_num_seqs=8, max_model_len=256, kv_slots=700
    )


def computed(model: LLM, ask):
    """(What ``ask`` gives, prompt tokens that were run through the model for it)."""
    before = model.stats()["n_prompt_tokens_computed"]
    found = ask()
    return found, model.stats()["n_prompt_tokens_computed"] - before


def test_a_second_request_with_a_shared_prefix_computes_only_the_rest(llm: LLM):
    shared = (llm.tokenizer.encode(SYSTEM) * 2)[:100]
    first, second = ({"prompt_token_ids": shared + llm.tokenizer.encode(q)} for q in QUESTIONS)
    llm.reset_prefix_cache()
    [expected], n_whole = computed(llm, lambda: llm.generate(second, GREEDY))
    assert n_whole == len(second["prompt_token_ids"]) and expected.n_cached_tokens == 0
    llm.reset_prefix_cache()
    _, n_first = computed(llm, lambda: llm.generate(first, GREEDY))
    [out], n_second = computed(llm, lambda: llm.generate(second, GREEDY))
    assert n_first == len(first["prompt_token_ids"])
    assert n_second == len(second["prompt_token_ids"]) - 100 and out.n_cached_tokens == 100
    assert out.token_ids == expected.token_ids and out.text == expected.text
    again, n_again = computed(llm, lambda: llm.generate(second, GREEDY))
    assert n_again == 1 and again[0].token_ids == expected.token_ids
    llm.engine.check_integrity()
    assert llm.stats()["kv_slots_used"] == 0 and llm.stats()["kv_slots_cached"] > 100


def test_the_next_turn_of_a_conversation_starts_after_the_last_answer(llm: LLM):
    first = llm.tokenizer.encode(SYSTEM + QUESTIONS[0])
    [answer] = llm.generate({"prompt_token_ids": first}, GREEDY)
    turn = [*first, *answer.token_ids, *llm.tokenizer.encode(QUESTIONS[1])]
    out, n_computed = computed(llm, lambda: llm.generate({"prompt_token_ids": turn}, GREEDY))
    n_question = len(llm.tokenizer.encode(QUESTIONS[1]))
    assert n_computed == n_question + 1  # the answer's last token was never taken in
    llm.reset_prefix_cache()
    [plain] = llm.generate({"prompt_token_ids": turn}, GREEDY)
    assert out[0].token_ids == plain.token_ids


def test_prompts_of_one_call_share_the_prefix_that_the_first_computes(llm: LLM):
    llm.reset_prefix_cache()
    prompts = [SYSTEM + q for q in QUESTIONS]
    outputs, n_computed = computed(llm, lambda: llm.generate(prompts, GREEDY))
    n_shared = outputs[1].n_cached_tokens
    lengths = [len(out.prompt_token_ids) for out in outputs]
    assert outputs[0].n_cached_tokens == 0 and n_shared > 50 and n_computed == sum(lengths) - n_shared
    llm.reset_prefix_cache()
    for prompt, out in zip(prompts, outputs, strict=True):
        [alone] = llm.generate(prompt, GREEDY)
        assert alone.token_ids == out.token_ids


def test_eight_samples_compute_the_prompt_once_and_are_themselves(llm: LLM):
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.9, seed=5, n=8, max_tokens=16, ignore_eos=True)
    [out], n_computed = computed(llm, lambda: llm.generate(SYSTEM, params))
    assert n_computed == len(out.prompt_token_ids) and len({c.token_ids for c in out.outputs}) == 8
    llm.reset_prefix_cache()
    alone = SamplingParams(temperature=0.9, seed=5, max_tokens=16, ignore_eos=True)
    assert llm.generate(SYSTEM, alone)[0].token_ids == out.outputs[0].token_ids


HEADS, REQUESTS, TOKENS = (
    {"attention_workers": b, "partition": p} for b, p in [(2, "heads"), (2, "requests"), (3, "tokens")]
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"split": False}),
        pytest.param("llama", HEADS, marks=pytest.mark.slow),
        pytest.param("llama", REQUESTS, marks=pytest.mark.slow),
        pytest.param("llama", TOKENS, marks=pytest.mark.slow),
        pytest.param("mistral-window", {}, marks=pytest.mark.slow),
        pytest.param("mistral-window", TOKENS, marks=pytest.mark.slow),
    ],
    ids=lambda o: o if isinstance(o, str) else "-".join(map(str, o.values())) or "split",
)
def test_caching_preemption_and_the_host_change_no_token(name: str, options: dict):
    """Random prompts that share prefixes, in a pool that is too small: on the host, recomputed, cached or
    not."""
    config = ModelConfig.from_hf(MODELS[name])
    source = InMemoryModel(config, random_params(config, seed=2))
    rng = np.random.default_rng(4)
    shared = rng.integers(0, 90, 24).tolist()
    prompts = [
        {"prompt_token_ids": [*shared[: 24 - 4 * (i % 3)], *rng.integers(0, 90, 1 + i).tolist()]}
        for i in range(6)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = LLM(source, max_num_seqs=6, prefix_caching=False)
    expected = [out.token_ids for out in plain.generate(prompts, params)]
    assert plain.stats()["n_preemptions"] == 0
    for host_kv_slots, prefix_caching in [(0, True), (200, True), (200, False)]:
        model = LLM(
            source,
            max_num_seqs=4,
            kv_slots=72,
            host_kv_slots=host_kv_slots,
            kv_headroom=0.0,  # so that some give way
            prefix_caching=prefix_caching,
            **options,
        )
        for _ in range(2):
            assert [out.token_ids for out in model.generate(prompts, params)] == expected
            model.engine.check_integrity()
        stats = model.stats()
        assert stats["n_preemptions"] > 0 and stats["kv_slots_used"] == stats["host_kv_slots_used"] == 0
        assert (stats["n_prefix_hit_tokens"] > 0) == prefix_caching
        assert (stats["n_moved_in_tokens"] > 0) == (host_kv_slots > 0)
        assert stats["moved_in_bytes"] % max(1, stats["n_moved_in_tokens"]) == 0


def test_the_bench_measures_a_pair_and_says_what_was_computed():
    config = ModelConfig.from_hf(MODELS["llama"])
    model = LLM(InMemoryModel(config, random_params(config)), max_num_seqs=1)
    times = prefix_bench.measure(llm=model, n_shared_tokens=40, n_own_tokens=3, n_rounds=2)
    assert (times.n_computed_first, times.n_computed_second) == (43, 3) and times.same_tokens
    record = times.to_dict()
    assert record["ratio"] > 0 and record["ratio_limit"] == 0.1 and len(record["first_s"]) == 2
    with pytest.raises(UserError, match="prefix_caching=False"):
        prefix_bench.measure(llm=LLM(InMemoryModel(config, random_params(config)), prefix_caching=False))
    with pytest.raises(UserError, match="n_rounds=0"):
        prefix_bench.measure(n_rounds=0)
