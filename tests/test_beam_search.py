"""Beam search against a search that keeps no KV and stops for nothing, against all sequences there are, and
against transformers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from checkpoint_examples import few_layers_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import LetterTokenizer, V, run
from test_models import MODELS
from test_parallel_sampling import dice, logits_after, sampled

from jaxlamina import LLM, SamplingParams
from jaxlamina.engine.outputs import RequestOutput
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.sampling.beam import BeamSearch
from jaxlamina.weights import open_checkpoint
from jaxlamina.weights.sources import InMemoryModel

PROMPT = [(5 * i) % V for i in range(20)]


def beams(width: int, max_tokens: int, **options) -> SamplingParams:
    options.setdefault("n", width)
    return SamplingParams(
        temperature=0.0, use_beam_search=True, beam_width=width, max_tokens=max_tokens, **options
    )


def logprobs_after(history: list[int]) -> np.ndarray:
    row = logits_after(history).astype(np.float64)
    return row - np.log(np.exp(row - row.max()).sum()) - row.max()


def score(total: float, n_prompt: int, tokens: list[int], ended: bool, penalty: float) -> float:
    return total / (n_prompt + len(tokens) - ended) ** penalty


def reference(prompt, width, max_tokens, penalty=1.0, end_ids=(), min_tokens=0, logprobs=logprobs_after):
    """Best ``width`` of (score, tokens): every continuation of every beam is ranked, to the very last
    step."""
    n_looked_at = width * max(2, 1 + len(set(end_ids)))
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for n in range(1, max_tokens + 1):
        ranked = sorted(
            (
                (total + logprob, [*tokens, t])
                for total, tokens in live
                for t, logprob in enumerate(logprobs([*prompt, *tokens]))
                if n > min_tokens or t not in end_ids
            ),
            key=lambda one: -one[0],
        )
        live = [one for one in ranked if one[1][-1] not in end_ids][:width]
        for total, tokens in ranked[:n_looked_at]:
            if tokens[-1] in end_ids:
                finished.append((score(total, len(prompt), tokens, True, penalty), tokens))
    finished += [(score(total, len(prompt), tokens, False, penalty), tokens) for total, tokens in live]
    return sorted(finished, key=lambda one: -one[0])[:width]


def found(out: RequestOutput, penalty: float = 1.0) -> list[tuple[float, list[int]]]:
    rows = []
    for c in out.outputs:
        assert c.cumulative_logprob is not None
        ended = c.finish_reason == "stop"
        tokens = list(c.token_ids)
        rows.append((score(c.cumulative_logprob, len(out.prompt_token_ids), tokens, ended, penalty), tokens))
    return rows


def same(got, expected) -> None:
    assert [tokens for _, tokens in got] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([s for s, _ in got], [s for s, _ in expected], atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 9),
    penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 3.0]),
    end_ids=st.sets(st.integers(0, V - 1), max_size=12),
    min_tokens=st.integers(0, 4),
    first=st.integers(0, V - 1),
)
def test_beams_are_those_of_a_search_without_kv(width, max_tokens, penalty, end_ids, min_tokens, first):
    prompt = [first, 3, 4]
    min_tokens = min(min_tokens, max_tokens)
    params = beams(
        width,
        max_tokens,
        length_penalty=penalty,
        stop_token_ids=sorted(end_ids),
        min_tokens=min_tokens,
    )
    out, _ = sampled(dice(), params, prompt)
    same(found(out, penalty), reference(prompt, width, max_tokens, penalty, end_ids, min_tokens))


def test_beams_wide_enough_find_the_best_of_all_sequences():
    """Policy alone, 4 tokens, 3 steps: 64 beams leave none out."""
    rows = {
        h: np.log(np.random.default_rng([len(h), *h]).dirichlet(np.ones(4)))
        for n in range(3)
        for h in itertools.product(range(4), repeat=n)
    }
    search = BeamSearch(64, prompt_len=2, max_tokens=3, length_penalty=2.0)
    while not search.done:
        logprobs = np.stack([rows[tuple(beam.tokens)] for beam in search.live])
        search.step(np.broadcast_to(np.arange(4), logprobs.shape), logprobs)
    totals = {h: sum(rows[h[:i]][h[i]] for i in range(3)) for h in itertools.product(range(4), repeat=3)}
    expected = sorted(totals, key=lambda h: -totals[h])
    assert [tuple(h.tokens) for h in search.finished] == expected
    assert [h.score for h in search.finished] == pytest.approx([totals[h] / 5**2 for h in expected])


def test_a_search_stops_early_only_when_nothing_can_get_better():
    search = BeamSearch(2, prompt_len=1, max_tokens=100, length_penalty=0.0, end_ids=[9])
    tokens, logprobs = np.asarray([[9, 1, 2, 3]]), np.log(np.asarray([[0.5, 0.3, 0.1, 0.1]]))
    search.step(tokens, logprobs)
    assert [beam.tokens for beam in search.live] == [[1], [2]] and not search.done  # one of two is finished
    search.step(tokens.repeat(2, 0), logprobs.repeat(2, 0))
    assert [h.tokens for h in search.finished] == [[9], [1, 9]]
    assert search.done  # 0.3 · 0.3 cannot become more than 0.3 · 0.5
    longer = BeamSearch(1, prompt_len=1, max_tokens=100, length_penalty=1.0, end_ids=[9])
    longer.step(tokens, logprobs)
    assert not longer.done  # 0.3 a hundred tokens long may: log 0.3 / 101 is above log 0.5 / 1
    with pytest.raises(ValueError, match="width=0"):
        BeamSearch(0, prompt_len=1, max_tokens=1)


def test_beams_hold_what_they_have_in_common_once():
    engine = dice(prefix_caching=False)
    engine.add_request(PROMPT, beams(4, 12))
    while not engine.idle:
        engine.step()
        engine.check_integrity()
        rows = engine.scheduler.running
        histories = {tuple(r.all_token_ids()[:n]) for r in rows for n in range(1, len(r.slots) + 1)}
        assert engine.scheduler.slots.n_used == len(histories)
    assert engine.executor.n_prefilled == [len(PROMPT)]


@settings(max_examples=30, deadline=None)
@given(
    n_slots=st.integers(70, 110),
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    prefix_caching=st.booleans(),
    n_host=st.sampled_from([0, 30, 400]),
)
def test_beams_are_the_same_beside_others_and_after_preemption(n_slots, widths, prefix_caching, n_host):
    engine = dice(n_slots, 5, n_host, prefix_caching=prefix_caching)
    expected = {}
    for i, width in enumerate(widths):
        prompt = PROMPT[: 10 + 5 * (i % 3)]
        expected[engine.add_request(prompt, beams(width, 10))] = reference(prompt, width, 10)
        engine.add_request(prompt, SamplingParams(max_tokens=15, seed=i, n=2))
    outputs, _ = run(engine)
    for request_id, rows in expected.items():
        same(found(outputs[request_id]), rows)
    assert engine.scheduler.room.n_used == 0


def test_outputs_text_logprobs_and_events_of_beams():
    engine = dice(tokenizer=LetterTokenizer(), eos=tuple(range(10)))
    params = beams(4, 12, n=3, logprobs=2, stop_token_ids=[80, 81])
    out, events = sampled(engine, params)
    assert len(out.outputs) == 3 and out.token_ids == out.outputs[0].token_ids
    assert "stop" in {c.finish_reason for c in out.outputs}
    for c in out.outputs:
        ended = c.finish_reason == "stop"
        assert ended == (c.token_ids[-1] in {*range(10), 80, 81})
        assert c.stop_reason == (c.token_ids[-1] if c.token_ids[-1] in (80, 81) else None)
        assert c.text == LetterTokenizer().decode(c.token_ids[: -1 if ended else None])
        assert c.logprobs is not None and len(c.logprobs) == len(c.token_ids)
        for row, token in zip(c.logprobs, c.token_ids, strict=True):
            assert next(iter(row)) == token and 2 <= len(row) <= 3
            ranks = sorted(one.rank for one in row.values())
            assert ranks[:2] == [1, 2] and row[token].decoded_token == LetterTokenizer.words[token]
        total = sum(row[token].logprob for row, token in zip(c.logprobs, c.token_ids, strict=True))
        assert c.cumulative_logprob == pytest.approx(total, abs=1e-4)
        mine = [event for event in events if event.index == c.index]
        assert tuple(event.token_id for event in mine) == c.token_ids
        assert "".join(event.new_text for event in mine) == c.text
    assert events[-1].output == out and all(event.output is None for event in events[:-1])


def test_beams_that_are_aborted_give_what_they_have():
    engine = dice(prefix_caching=False)
    request_id = engine.add_request(PROMPT, beams(3, 20))
    for _ in range(4):
        engine.step()
    out = engine.abort(request_id)
    assert out is not None and [len(c.token_ids) for c in out.outputs] == [4, 4, 4]
    same(found(out), reference(PROMPT, 3, 4))
    assert {c.finish_reason for c in out.outputs} == {"abort"} and engine.scheduler.slots.n_used == 0
    waiting = engine.add_request(PROMPT, beams(3, 20))
    out = engine.abort(waiting)
    assert out is not None and out.token_ids == () and out.finish_reason == "abort"


# --- transformers ---


def transformers_model(config: ModelConfig, params):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    hf = transformers.AutoConfig.for_model(**config.to_hf())
    model = transformers.AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    weights = {name: torch.from_numpy(np.array(x)) for name, x in params.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and not set(missing) - {"lm_head.weight"}
    model.tie_weights()
    return torch, model.eval()


def transformers_beams(torch, model, prompt, width: int, n: int, **options) -> list[list[int]]:
    options.setdefault("eos_token_id", None)
    rows = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return [row[len(prompt) :].tolist() for row in rows]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("width", [2, 5])
def test_beams_of_a_random_model_are_transformers(name: str, width: int):
    config = ModelConfig.from_hf(MODELS[name])
    params = random_params(config, seed=3)
    torch, model = transformers_model(config, params)
    llm = LLM(InMemoryModel(config, params), max_num_seqs=8, kv_slots=400)
    for prompt in ([5, 6, 7], [11] * 20):
        [out] = llm.generate({"prompt_token_ids": prompt}, beams(width, 12))
        expected = transformers_beams(torch, model, prompt, width, 12)
        assert [list(c.token_ids) for c in out.outputs] == expected


@pytest.mark.filterwarnings("ignore")
def test_beams_of_real_words_are_transformers(tmp_path):
    checkpoint = open_checkpoint(few_layers_folder(tmp_path))
    params = checkpoint.load()
    torch, model = transformers_model(checkpoint.config, params)
    llm = LLM(checkpoint, max_num_seqs=4, max_model_len=128, kv_slots=400)
    prompt = llm.tokenizer.encode("The capital of France is")
    [out] = llm.generate({"prompt_token_ids": prompt}, beams(4, 10, ignore_eos=True))
    assert [list(c.token_ids) for c in out.outputs] == transformers_beams(torch, model, prompt, 4, 10)
    # A token that ends: without a length penalty both count alike, whatever they take for the length. Only
    # the best one is compared, as transformers leaves out an end that comes fifth to eighth of a step's
    # candidates.
    stop = llm.tokenizer.encode(".")[0]
    params = beams(4, 10, ignore_eos=True, stop_token_ids=[stop], length_penalty=0.0)
    [out] = llm.generate({"prompt_token_ids": prompt}, params)
    best = transformers_beams(torch, model, prompt, 4, 10, eos_token_id=stop, length_penalty=0.0)[0]
    assert list(out.token_ids) == best[: best.index(stop) + 1] and out.stop_reason == stop
    assert llm.stats()["kv_slots_used"] == 0
