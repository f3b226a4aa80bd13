"""Sampling: the sampler's distribution against a float64 numpy reference, seeds, logprobs, validation."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from jaxlamina.process import kept_programs
from jaxlamina.sampling import sampler
from jaxlamina.sampling.adjustments import Adjusted
from jaxlamina.sampling.params import SamplingParams, seed_of
from jaxlamina.sampling.sampler import Knobs, Row, Sampler, SamplingBatch, choose, filter_logits
from jaxlamina.sampling.structured import StructuredOutputs

V = 50
BEAMS = {"use_beam_search": True, "temperature": 0.0}
SAMPLER = Sampler()
FILTER = jax.jit(filter_logits)
BY_WEIGHT = jax.jit(sampler._by_weight)


def reference_probabilities(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """float64 distribution over the vocabulary, by sorting; independent of the sampler's bisection."""
    x = logits.astype(np.float64) / p.temperature
    probs = np.exp(x - x.max())
    probs[probs < p.min_p * probs.max()] = 0
    if 0 < p.top_k < len(probs):
        probs[probs < np.sort(probs)[-p.top_k]] = 0
    probs /= probs.sum()
    if p.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        n_kept = min(int(np.searchsorted(np.cumsum(probs[order]), p.top_p)) + 1, len(probs))
        probs[probs < probs[order[n_kept - 1]]] = 0
    return probs / probs.sum()


def sample(logits, params, seeds=None, positions=None, banned=None, size=None):
    n = len(params)
    seeds = seeds or [b if p.seed is None else p.seed for b, p in enumerate(params)]
    rows = [
        Row(p, seed, position, Adjusted(banned=ban))
        for p, seed, position, ban in zip(
            params, seeds, positions or [0] * n, banned or [()] * n, strict=True
        )
    ]
    batch = SamplingBatch.build(rows, size or n)
    return SAMPLER(jnp.asarray(logits, jnp.float32), batch)


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.4),
    SamplingParams(temperature=1.7, top_k=5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=V + 7),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=1.3, top_p=0.9, top_k=12),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=2.0, min_p=0.05, top_k=9, top_p=0.8),
]


@pytest.mark.parametrize("vocab_size", [V, 3 * V, 128])  # less than the lanes that tokens lie in, and more
@pytest.mark.parametrize("params", SETTINGS, ids=lambda p: f"t{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}")
def test_draws_follow_the_reference_distribution(params: SamplingParams, vocab_size: int):
    n = 20_000
    row = np.random.default_rng(7).normal(0, 2, vocab_size).astype(np.float32)
    batch = SamplingBatch.build([Row(params, 5, 0)], 1)
    repeated = Knobs(*(np.repeat(column, n, axis=0) for column in batch.knobs))
    batch = batch._replace(knobs=repeated._replace(positions=np.arange(n, dtype=np.int32)))
    tokens = np.asarray(SAMPLER(jnp.broadcast_to(row, (n, vocab_size)), batch).tokens)
    expected = reference_probabilities(row, params)
    counts = np.bincount(tokens, minlength=vocab_size)
    assert counts[expected == 0].sum() == 0
    spread = np.sqrt(n * expected * (1 - expected))
    assert np.all(np.abs(counts - n * expected) <= 5 * spread + 5)  # 5: rare tokens are Poisson


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-45, 1e-30, 1e-8, 0.3, 1.0]), min_size=1, max_size=200).filter(any),
    st.tuples(*[st.sampled_from([0.0, 2**-23, 0.5, 1 - 2**-23])] * 2),
)
def test_no_token_without_weight_is_drawn_whatever_is_rounded(
    weights: list[float], shares: tuple[float, float]
):
    padded = np.zeros((1, 200), np.float32)
    padded[0, : len(weights)] = weights
    assume(padded.sum() > 1e-30)  # the likeliest weighs 1, and XLA has no smaller numbers
    (token,) = np.asarray(BY_WEIGHT(padded, np.float32([shares])))
    assert padded[0, token] > 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    top_k=st.integers(0, V + 3),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_filter_keeps_what_the_reference_keeps(seed: int, top_k: int, top_p: float, min_p: float):
    rows = np.random.default_rng(seed).normal(0, 3, (4, V)).astype(np.float32)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    batch = SamplingBatch.build([Row(params, 0, 0)] * 4, 4)
    kept = np.asarray(FILTER(jnp.asarray(rows), *batch.knobs[1:4]))
    for row, got in zip(rows, kept, strict=True):
        expected = reference_probabilities(row, params)
        sums = np.cumsum(np.sort(expected)[::-1])
        if np.any(np.abs(sums - top_p) < 1e-5) or np.any(np.abs(np.exp(row - row.max()) - min_p) < 1e-6):
            continue  # on the edge float32 and float64 may differ
        assert np.array_equal(np.isfinite(got), expected > 0)
        assert np.array_equal(got[np.isfinite(got)], row[np.isfinite(got)])


def test_ties_with_the_last_kept_token_are_kept():
    row = jnp.asarray([[1.0, 3.0, 3.0, 3.0, 0.0]])
    one = np.ones(1, np.float32)
    kept = filter_logits(row, np.full(1, 2, np.int32), one, 0 * one)
    assert np.isfinite(np.asarray(kept))[0].tolist() == [False, True, True, True, False]


def test_same_seed_same_tokens_whatever_else_is_in_the_batch():
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 2, (4, V))
    mine = SamplingParams(seed=2**63 + 11, temperature=0.9)
    others = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=3, seed=1, logprobs=5),
        SamplingParams(top_p=0.5, min_p=0.1, seed=2),
    ]
    for position in range(20):
        alone = sample(rows[:1], [mine], positions=[position])
        last = sample(rows[[1, 2, 3, 0]], [*others, mine], positions=[0, 3, 9, position], size=None)
        assert int(alone.tokens[0]) == int(last.tokens[3])


@pytest.mark.parametrize("n_rows", [7, 8, 9, 20])
def test_many_rows_are_drawn_block_by_block(n_rows, monkeypatch):
    rows = np.random.default_rng(0).normal(0, 2, (n_rows, V))
    params = [SamplingParams(seed=i, temperature=i % 3, top_p=(1, 0.7)[i % 2]) for i in range(n_rows)]
    at_once = sample(rows, params).tokens
    monkeypatch.setattr(sampler, "_MOST_DRAWN", 4 * V)  # rows
    monkeypatch.setattr(kept_programs, "folder", lambda: None)
    jax.clear_caches()  # so that it is traced anew
    sizes, at_once_of = list[int](), sampler._drawn_at_once
    monkeypatch.setattr(
        sampler, "_drawn_at_once", lambda x, *a, **o: sizes.append(len(x)) or at_once_of(x, *a, **o)
    )
    batch = SamplingBatch.build([Row(p, i, 0) for i, p in enumerate(params)], n_rows)
    by_block = Sampler()(jnp.asarray(rows, jnp.float32), batch).tokens
    assert set(sizes) == {4}
    assert by_block.tolist() == at_once.tolist() and len(set(at_once.tolist())) > 3


def test_the_memory_of_drawing_does_not_follow_the_rows():
    def temp_bytes(n_rows: int, params: SamplingParams) -> int:
        logits = jax.ShapeDtypeStruct((n_rows, 2**17), jnp.float32)
        batch = SamplingBatch.build([Row(params, 0, 0)] * n_rows, n_rows)
        chosen = jax.jit(choose, static_argnames="filters").lower(logits, batch.knobs, filters=batch.filters)
        return chosen.compile().memory_analysis().temp_size_in_bytes

    for params in SamplingParams(), SamplingParams(top_p=0.7):
        least = temp_bytes(1024, SamplingParams(temperature=0.0))
        assert temp_bytes(1024, params) <= least + 1.1 * temp_bytes(128, params)


def test_seed_words_and_position_all_matter():
    rows = np.zeros((1, 5000))
    seeds = [7, 8, 7 + 2**32, 2**64 - 1]
    draws = {
        (seed, position): int(sample(rows, [SamplingParams(seed=seed)], positions=[position]).tokens[0])
        for seed in seeds
        for position in (0, 1, 2)
    }
    assert len(set(draws.values())) == len(draws)


def test_a_requests_sequences_have_seeds_of_their_own():
    seeds = [seed_of(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(4)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**64 for seed in seeds)
    assert [seed_of(5, 0), seed_of(2**64 - 1, 0)] == [5, 2**64 - 1]  # the first draws as it would alone


def test_greedy_is_argmax_and_padding_rows_do_no_harm():
    rows = np.random.default_rng(1).normal(0, 1, (4, V))
    got = sample(rows, [SamplingParams(temperature=0.0)] * 3, size=4)
    assert got.logprobs is None
    assert np.asarray(got.tokens)[:3].tolist() == rows.argmax(-1)[:3].tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-7, 1e-30, 1.2e-38, 1e-38, 1e-40, 1e-50, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 2, "min_p": 0.1}], ids=str)
def test_a_temperature_near_0_takes_the_likeliest_token(temperature: float, filters: dict):
    rows = np.tile([1.0, 5.0, 20.0, 7.0, *np.zeros(92)], (4, 1))
    params = [SamplingParams(temperature=temperature, **filters)] * 3
    got = sample(rows, [*params, SamplingParams(temperature=1.0, top_k=1)])
    assert np.asarray(got.tokens).tolist() == [2] * 4
    assert params[0].greedy == (temperature < 1e-6)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 2, "min_p": 0.1}], ids=str)
def test_of_logits_that_are_infinite_the_largest_is_drawn(filters: dict):
    rows = np.zeros((3, V), np.float32)
    rows[0, 7], rows[1, 9] = np.inf, 3e38
    rows[2], rows[2, 5] = -np.inf, 1
    params = [SamplingParams(temperature=t, **filters) for t in (1.0, 0.01, 2.0)]
    assert np.asarray(sample(rows, params).tokens).tolist() == [7, 9, 5]


def test_a_mixed_batch_keeps_greedy_rows_greedy():
    rows = np.random.default_rng(2).normal(0, 1, (2, V))
    got = sample(rows, [SamplingParams(temperature=0.0), SamplingParams(temperature=5.0, top_k=4)])
    assert int(got.tokens[0]) == rows[0].argmax()


def test_banned_tokens_are_never_chosen():
    rows = np.zeros((2, 8))
    rows[0, 3] = rows[1, 5] = 9
    banned = [(3,), (5, 0, 1)]
    greedy = sample(rows, [SamplingParams(temperature=0.0)] * 2, banned=banned)
    assert int(greedy.tokens[0]) != 3 and int(greedy.tokens[1]) not in (5, 0, 1)
    for position in range(20):
        drawn = sample(rows, [SamplingParams(temperature=2.0)] * 2, banned=banned, positions=[position] * 2)
        assert int(drawn.tokens[0]) != 3 and int(drawn.tokens[1]) not in (5, 0, 1)


@pytest.mark.parametrize("asked", [0, 3, 20])
def test_logprobs_are_the_raw_distribution(asked: int):
    rows = np.random.default_rng(3).normal(0, 2, (2, V))
    got = sample(rows, [SamplingParams(temperature=3.0, top_k=30, logprobs=asked, seed=s) for s in (1, 2)])
    expected = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    for b in range(2):
        token = int(got.tokens[b])
        assert got.logprobs[b] == pytest.approx(expected[b, token], abs=1e-5)
        assert int(got.ranks[b]) == 1 + int((rows[b] > rows[b, token]).sum())
        n_top = got.top_tokens.shape[1]
        assert n_top >= asked
        assert np.asarray(got.top_tokens)[b].tolist() == np.argsort(-rows[b])[:n_top].tolist()
        np.testing.assert_allclose(got.top_logprobs[b], np.sort(expected[b])[::-1][:n_top], atol=1e-5)


def test_a_greedy_batch_is_one_program_whatever_its_parameters():
    sampler = Sampler()
    for position in range(5):
        batch = SamplingBatch.build([Row(SamplingParams(temperature=0.0), position, position)], 1)
        sampler(jnp.zeros((1, V)), batch)
    assert sampler.n_programs == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be a number at least 0.0; 0 is greedy"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"temperature": "warm"}, "temperature='warm' must be"),
        ({"top_p": 0.0}, "top_p=0.0 must be a number above 0.0 and at most 1.0"),
        ({"top_p": 1.2}, "top_p=1.2"),
        ({"top_k": -2}, "top_k=-2 must be a whole number at least -1"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_k": 2**31}, "top_k=2147483648"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids=2147483648"),
        ({"n": 10**9}, "n=1000000000 must be a whole number at least 1 and at most 1024"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1 must be a number at least -2.0 and at most 2.0"),
        ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty=inf"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a number above 0.0; 1 is none"),
        ({"logit_bias": [3]}, "logit_bias=[3] must map token ids to numbers"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias token='3' must be a whole number at least 0"),
        (
            {"logit_bias": {3: 101.0}},
            "logit_bias[3]=101.0 must be a number at least -100.0 and at most 100.0",
        ),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias has 301 tokens: at most 300 are taken"),
        ({"bad_words": "word"}, "bad_words='word' must be a list of strings that are not blank"),
        ({"bad_words": ["word", " "]}, "bad_words=['word', ' '] must be"),
        ({**BEAMS, "presence_penalty": 0.5}, "beam search takes the model's own probabilities"),
        (
            {**BEAMS, "bad_words": ["word"]},
            "leave out presence_penalty, frequency_penalty, repetition_penalty",
        ),
        ({"max_tokens": 0}, "max_tokens=0 must be a whole number at least 1"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5 must be a whole number at least 0 and at most 4"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"stop": ""}, "stop=''"),
        ({"stop": ["a", 3]}, "stop="),
        ({"stop": 3}, "stop=3"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
        ({"stop_token_ids": 2}, "stop_token_ids=2 must be a list"),
        ({"logprobs": 21}, "logprobs=21 must be a whole number at least 0 and at most 20"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens='no' must be True or False"),
        ({"spaces_between_special_tokens": None}, "spaces_between_special_tokens=None must be True or False"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output=1 must be True or False"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 must be -1 (as many as there is room for)"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2 must be a whole number at least -1"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens=True must be"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be a list of token ids, one to"),
        ({"allowed_token_ids": 3}, "allowed_token_ids must be a list of token ids"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids=-1 must be a whole number at least 0"),
        ({"allowed_token_ids": [1, 2.5]}, "allowed_token_ids=2.5 must be a whole number"),
        ({**BEAMS, "allowed_token_ids": [1]}, "leave out presence_penalty"),
        (
            {"allowed_token_ids": [1], "structured_outputs": StructuredOutputs(regex="a")},
            "give one of the two",
        ),
        ({"n": 0}, "n=0 must be a whole number at least 1"),
        (
            {"n": 3, "best_of": 2},
            "best_of=2 must be a whole number at least 3 and at most 1024 (n=3) or None",
        ),
        (
            {"n": 2, "temperature": 0.0},
            "n=2, best_of=None with temperature=0 would write the same text 2 times",
        ),
        ({"best_of": 2, "temperature": 0.0}, "set a temperature of at least 1e-06, or use_beam_search=True"),
        ({"beam_width": 2}, "beam_width=2 is for beam search alone: set use_beam_search=True"),
        ({"length_penalty": 0.5}, "length_penalty=0.5 is for beam search alone"),
        ({"use_beam_search": 1}, "use_beam_search=1 must be True or False"),
        (
            {"use_beam_search": True},
            "temperature=1.0, top_p=1.0, top_k=0, min_p=0.0: beam search draws nothing",
        ),
        ({"use_beam_search": True, "temperature": 0.0, "top_k": 3}, "top_k=3"),
        (
            {"use_beam_search": True, "temperature": 0.0, "stop": "x"},
            "stop=('x',): beam search ends at tokens",
        ),
        ({**BEAMS, "beam_width": 3, "best_of": 4}, "best_of=4 and beam_width=3 mean the same"),
        (
            {**BEAMS, "n": 4, "beam_width": 3},
            "beam_width=3 must be a whole number at least 4 and at most 1024 (n=4) or None",
        ),
        (
            {**BEAMS, "length_penalty": float("nan")},
            "length_penalty=nan must be a number at least -10.0 and at most 10.0",
        ),
    ],
)
def test_bad_parameters_say_what_is_allowed(wrong: dict, message: str):
    with pytest.raises(UserError) as caught:
        SamplingParams(**wrong)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_parameters_are_errors_and_params_are_frozen():
    with pytest.raises(TypeError, match="typical_p"):
        SamplingParams(typical_p=0.9)  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]


def test_how_many_sequences_are_written_and_whether_they_are_ranked():
    asked = [
        ({}, 1, False),
        ({"n": 3}, 3, False),
        ({"n": 2, "best_of": 5}, 5, True),
        (BEAMS, 1, True),
        ({**BEAMS, "n": 2}, 2, True),
        ({**BEAMS, "best_of": 4}, 4, True),
        ({**BEAMS, "n": 3, "beam_width": 4}, 4, True),
    ]
    for options, n_sequences, ranked in asked:
        params = SamplingParams(**options)
        assert (params.n_sequences, params.chosen_at_end) == (n_sequences, ranked)
        assert params.needed_logprobs == (0 if ranked else None)


def test_likeliest_tokens_come_with_their_logprobs():
    rows = np.random.default_rng(3).normal(0, 2, (3, V)).astype(np.float32)
    for asked, n in [(1, 1), (3, 4), (V + 9, V)]:
        tokens, logprobs = Sampler().likeliest(jnp.asarray(rows), asked)
        assert np.asarray(tokens).tolist() == np.argsort(-rows, axis=-1)[:, :n].tolist()
        expected = np.sort(rows - np.log(np.exp(rows).sum(-1, keepdims=True)), axis=-1)[:, ::-1][:, :n]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_what_is_kept_of_a_prompt():
    prompt = [*range(20)]
    for asked, max_tokens, kept in (
        (None, 5, 20),
        (7, 5, 7),
        (16, 5, 16),
        (-1, 5, 11),
        (-1, None, 15),
        (-1, 99, 1),
    ):
        params = SamplingParams(truncate_prompt_tokens=asked, max_tokens=max_tokens)
        assert params.kept(prompt, 16) == prompt[20 - kept :]
    with pytest.raises(UserError, match="truncate_prompt_tokens=17 is more than the model's length, 16"):
        SamplingParams(truncate_prompt_tokens=17).kept(prompt, 16)


def test_stop_forms_are_normalised():
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")
    assert SamplingParams().stop == () and SamplingParams().stop_token_ids == ()
