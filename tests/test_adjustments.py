"""Penalties, biases and bans: logits against a float64 reference, and through the engine, whatever runs
beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import LetterTokenizer, V, run
from test_parallel_sampling import dice, logits_after

from jaxlamina.errors import UserError
from jaxlamina.sampling.adjustments import Adjusted, Adjustments, Counted, bans_of, build, mask_of, stages
from jaxlamina.sampling.params import SamplingParams


@dataclass(frozen=True)
class Asked(Adjusted):
    """By texts."""

    prompt: Sequence[int] = ()
    written: Sequence[int] = ()

    @property
    def penalised(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def adjusted(self) -> Adjusted:
        asked = Adjusted(**{field.name: getattr(self, field.name) for field in fields(Adjusted)})
        return replace(asked, counted=Counted(self.prompt, self.written)) if self.penalised else asked


def adjust(logits: jax.Array, a: Adjustments) -> jax.Array:
    for stage, arrays in stages(a):
        logits = stage(logits, *arrays)
    return logits


ADJUST = jax.jit(adjust)
MASK = partial(np.asarray, dtype=np.uint32)
TOKENS = st.lists(st.integers(0, V - 1), max_size=12)


def reference(logits: np.ndarray, asked: Asked) -> np.ndarray:
    """float64, a token at a time, the newest token among ``asked.written``."""
    x = logits.astype(np.float64)
    if asked.mask is not None:
        x[[not asked.mask[t // 32] >> (t % 32) & 1 for t in range(V)]] = -np.inf
    for token in asked.banned:
        x[token] = -np.inf
    for before, token in asked.banned_after:
        if asked.written and asked.written[-1] == before:
            x[token] = -np.inf
    for token, bias in asked.logit_bias.items():
        x[token] += bias
    for token in range(len(x)):
        n = list(asked.written).count(token)
        if n or token in asked.prompt:
            x[token] = (
                x[token] / asked.repetition_penalty if x[token] > 0 else x[token] * asked.repetition_penalty
            )
        x[token] -= asked.frequency_penalty * n
        x[token] -= asked.presence_penalty * (n > 0)
    return x


ASKED = st.builds(
    Asked,
    mask=st.none() | st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4).map(MASK),
    banned=TOKENS,
    banned_after=st.lists(st.tuples(st.integers(0, 5), st.integers(0, V - 1)), max_size=5),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32), max_size=9),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.6]),
    prompt=TOKENS,
    written=st.lists(st.integers(0, 5), max_size=12),
)


@settings(max_examples=25)
@given(asked=st.lists(ASKED, min_size=1, max_size=4), seed=st.integers(0, 2**31), on_device=st.booleans())
def test_logits_are_adjusted_as_the_reference_does(asked: list[Asked], seed: int, on_device: bool):
    rows = np.random.default_rng(seed).normal(0, 3, (4, V)).astype(np.float32)
    expected = [reference(row, a) for row, a in zip(rows, asked, strict=False)]
    newest = None
    if on_device:  # then every row has one
        asked = [a if a.written else replace(a, written=[3]) for a in asked]
        expected = [reference(row, a) for row, a in zip(rows, asked, strict=False)]
        newest = jnp.asarray([[a.written[-1]] for a in asked] + [[0]] * (4 - len(asked)), jnp.int32)
        asked = [replace(a, written=a.written[:-1]) for a in asked]
    else:  # the host knows which of them hold
        asked = [
            replace(
                a,
                banned_after=(),
                banned=[*a.banned, *(t for b, t in a.banned_after if [b] == a.written[-1:])],
            )
            for a in asked
        ]
    got = np.asarray(ADJUST(jnp.asarray(rows), build([a.adjusted() for a in asked], 4, newest)))
    np.testing.assert_allclose(got[: len(asked)], expected, rtol=1e-5, atol=1e-5)
    for row, a, adjusted in zip(rows, asked, got, strict=False):
        if a.mask is None and a == Asked(prompt=a.prompt, written=a.written):  # asks for nothing
            assert np.array_equal(adjusted, row)
    assert np.array_equal(got[len(asked) :], rows[len(asked) :])  # padding


@given(prompt=TOKENS, text=st.lists(st.integers(0, V - 1), max_size=99), lengths=st.lists(st.integers(0, 99)))
def test_counts_grow_with_a_text_and_begin_anew_with_less(prompt: list[int], text: list, lengths: list[int]):
    counted = Counted(prompt)
    for length in lengths:
        counted.go_on(written := text[:length])
        n = dict(zip(counted.tokens.tolist(), counted.n_written.tolist(), strict=True))
        assert n == {token: written.count(token) for token in {*prompt, *written}}
        assert len(counted) == len(n)


@given(
    word=st.lists(st.integers(0, 2), min_size=1, max_size=4), written=st.lists(st.integers(0, 2), max_size=9)
)
def test_a_bans_word_is_its_last_token_after_the_others(word: list[int], written: list[int]):
    completes = written[len(written) - len(word) + 1 :] == word[:-1] and len(word) <= len(written) + 1
    banned, after = bans_of([word], written, newest_follows=False)
    assert (banned, after) == ([word[-1]] if completes else [], [])
    if written:
        banned, after = bans_of([word], written[:-1], newest_follows=True)
        assert bool(banned or [t for before, t in after if before == written[-1]]) == completes


PENALISED = [
    SamplingParams(presence_penalty=1.5, max_tokens=12, seed=1),
    SamplingParams(frequency_penalty=0.9, max_tokens=12, seed=2, top_k=9),
    SamplingParams(repetition_penalty=1.8, max_tokens=12, temperature=0.0),
    SamplingParams(
        presence_penalty=-1.0,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={5: 3.0},
        max_tokens=12,
        seed=4,
    ),
    SamplingParams(max_tokens=12, temperature=0.0),
]
PROMPTS = [[(k + 3 * i) % V for i in range(9)] for k in range(len(PENALISED))]


def by_hand(prompt: list[int], p: SamplingParams) -> list[int]:
    """Greedy tokens of the random model by the reference."""
    written: list[int] = []
    while len(written) < (p.max_tokens or 0):
        asked = Asked(
            logit_bias=p.logit_bias or {},
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            repetition_penalty=p.repetition_penalty,
            prompt=prompt,
            written=written,
        )
        written.append(int(reference(logits_after([*prompt, *written]), asked).argmax()))
    return written


def outputs_of(engine, requests) -> list[tuple[int, ...]]:
    ids = [engine.add_request(prompt, params) for prompt, params in requests]
    outputs, _ = run(engine)
    return [outputs[i].token_ids for i in ids]


@pytest.mark.parametrize("ahead", [False, True])
def test_greedy_tokens_are_those_of_the_reference(ahead: bool):
    cases = [
        (prompt, replace(p, temperature=0.0, top_k=0)) for prompt, p in zip(PROMPTS, PENALISED, strict=True)
    ]
    engine = dice(async_scheduling=ahead)
    assert list(map(list, outputs_of(engine, cases))) == [by_hand(*case) for case in cases]


def test_tokens_do_not_depend_on_batch_mates_preemption_or_steps_launched_ahead():
    cases = list(zip(PROMPTS, PENALISED, strict=True))
    alone = [outputs_of(dice(), [case])[0] for case in cases]
    assert outputs_of(dice(), cases) == outputs_of(dice(async_scheduling=False), cases) == alone
    for options in ({}, {"n_host": 200}, {"async_scheduling": False}):
        engine = dice(n_slots=45, **options)
        assert outputs_of(engine, cases) == alone
        assert engine.stats.n_preemptions > 0


def test_each_of_several_samples_is_penalised_for_its_own_tokens():
    params = SamplingParams(n=3, frequency_penalty=2.0, repetition_penalty=1.5, max_tokens=8, seed=5)
    engine = dice()
    request_id = engine.add_request(PROMPTS[0], params)
    together = [c.token_ids for c in run(engine)[0][request_id].outputs]
    assert outputs_of(dice(), [(PROMPTS[0], replace(params, n=1))]) == together[:1]
    engine = dice(n_slots=22, async_scheduling=False)
    request_id = engine.add_request(PROMPTS[0], params)
    assert [c.token_ids for c in run(engine)[0][request_id].outputs] == together
    assert engine.stats.n_preemptions > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_bad_words_are_not_written(ahead: bool):
    params = SamplingParams(max_tokens=40, seed=3, logit_bias=dict.fromkeys((0, 1, 2), 12.0))
    free = dice(tokenizer=LetterTokenizer(), async_scheduling=ahead)
    [tokens] = outputs_of(free, [(PROMPTS[0], params)])
    pairs = list(pairwise(tokens))
    assert (0, 1) in pairs and 2 in tokens
    engine = dice(tokenizer=LetterTokenizer(), async_scheduling=ahead)
    [tokens] = outputs_of(engine, [(PROMPTS[0], replace(params, bad_words=["ab", "c", "aaa"]))])
    pairs = list(pairwise(tokens))
    assert 2 not in tokens and (0, 1) not in pairs and {0, 1} <= set(tokens)
    assert (0, 0, 0) not in zip(tokens, tokens[1:], tokens[2:], strict=False)


@given(tokens=st.sets(st.integers(0, V - 1)))
def test_a_mask_allows_its_tokens_alone(tokens: set[int]):
    kept = np.asarray(adjust(jnp.zeros((1, V)), build([Adjusted(mask=mask_of(tokens, V))], 1)))[0]
    assert set(np.flatnonzero(np.isfinite(kept))) == tokens


@pytest.mark.parametrize("ahead", [False, True])
def test_only_allowed_tokens_are_written_whatever_else_is_asked_for(ahead: bool):
    allowed = [3, 40, 95, V - 1]
    kinds = [
        {},
        {"temperature": 0.0},
        {"repetition_penalty": 1.5, "logit_bias": {5: 100.0, 3: -5.0}},
        {"top_p": 0.5, "min_tokens": 3},
    ]
    params = [
        SamplingParams(**{"max_tokens": 12, "seed": 2, "allowed_token_ids": allowed} | kind) for kind in kinds
    ]
    cases = list(zip(PROMPTS, [*params, PENALISED[0]], strict=True))
    alone = [outputs_of(dice(), [case])[0] for case in cases]
    assert outputs_of(dice(async_scheduling=ahead), cases) == alone
    assert all(set(tokens) <= set(allowed) for tokens in alone[:-1]) and not set(alone[-1]) <= set(allowed)
    assert len(set(alone[0])) > 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"allowed_token_ids": [3, V]}, f"allowed_token_ids={V} is not in the vocabulary"),
        ({"allowed_token_ids": [3], "stop_token_ids": [3, 10**9], "min_tokens": 1}, "may leave no token"),
        ({"allowed_token_ids": [2], "bad_words": ["c"]}, "may leave no token"),
    ],
)
def test_allowed_tokens_that_leave_nothing_to_write_are_refused(asked: dict, message: str):
    engine = dice(tokenizer=LetterTokenizer())
    with pytest.raises(UserError, match=message):
        engine.add_request(PROMPTS[0], SamplingParams(**asked))
    assert engine.idle


def test_logprobs_are_the_models_own():
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, logit_bias={7: 100.0})
    engine = dice()
    request_id = engine.add_request(PROMPTS[0], params)
    [entry] = run(engine)[0][request_id].logprobs or ()
    logits = logits_after(PROMPTS[0]).astype(np.float64)
    assert next(iter(entry)) == 7
    assert entry[7].logprob == pytest.approx(logits[7] - np.log(np.exp(logits).sum()), abs=1e-4)
