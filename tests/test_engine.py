"""The engine with an imaginary model: its "KV" is the token itself, and what it writes next is a checksum of
all tokens it finds through the slot tables. So a wrong slot, length, position or stale entry changes the
text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxlamina.engine.engine import Engine
from jaxlamina.engine.outputs import RequestOutput, TokenEvent
from jaxlamina.errors import UserError
from jaxlamina.run.executor import Capabilities, Executor, StepLogits
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.sampling.sampler import Sampler
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.buckets import Buckets
from jaxlamina.steps.step import Step
from jaxlamina.text.tokenizer import Tokenizer

V = 97
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SAMPLER = Sampler()  # one for all engines: its programs are compiled once


def next_token(history: list[int]) -> int:
    return sum((i + 1) * t for i, t in enumerate(history)) % V


def continuation(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ImaginaryExecutor(Executor):
    device = jax.devices()[0]

    def __init__(self, n_slots: int, n_host_slots: int = 0) -> None:
        self.n_slots = n_slots
        self.kv = np.full((n_slots, 2), -1)  # token, position
        self.host = np.full((n_host_slots, 2), -1)
        self.decode_shapes: set[tuple[int, int]] = set()
        self.n_prefilled: list[int] = []

    def run(self, step: Step) -> StepLogits:
        rows = None if step.decodes is None else self.rows(step.decodes)
        return StepLogits(rows, tuple(self.prompts(part.batch) for part in step.prompts))

    def prompts(self, batch: PrefillBatch):
        histories = []
        for b, last in enumerate(batch.logits_at):
            n = batch.lengths[b]
            assert np.all(batch.slots[b, last + 1 :] == self.n_slots)
            assert np.all(batch.positions[b] == n + np.minimum(np.arange(batch.tokens.shape[1]), last))
            found = self.kv[batch.slot_table[b, :n]]
            assert found[:, 1].tolist() == list(range(n)), "a slot is in the wrong place"
            slots = batch.slots[b, : last + 1]
            self.kv[slots, 0], self.kv[slots, 1] = batch.tokens[b, : last + 1], np.arange(n, n + last + 1)
            histories.append([*found[:, 0].tolist(), *batch.tokens[b, : last + 1].tolist()])
            self.n_prefilled.append(int(last) + 1)
        return self._logits(histories)

    def move_out(self, slots, host_slots):
        self.host[host_slots] = self.kv[slots]

    def move_in(self, host_slots, slots):
        self.kv[slots] = self.host[host_slots]
        self.host[host_slots] = -1

    def rows(self, batch: DecodeBatch):
        self.decode_shapes.add(batch.slot_table.shape)
        histories, newest = [], np.asarray(batch.tokens)
        for b in range(len(newest)):
            if batch.new_slots[b] == self.n_slots:
                histories.append([0])  # padding
                continue
            n = batch.lengths[b]
            found = self.kv[batch.slot_table[b, :n]]
            assert found[:, 1].tolist() == list(range(n)), "a slot is in the wrong place"
            assert batch.positions[b, 0] == n
            self.kv[batch.new_slots[b]] = newest[b, 0], n
            histories.append([*found[:, 0].tolist(), int(newest[b, 0])])
        return self._logits(histories)

    def _logits(self, histories: list[list[int]]):
        logits = np.zeros((len(histories), V), np.float32)
        logits[np.arange(len(histories)), [next_token(h) for h in histories]] = 50
        return jnp.asarray(logits)


class LetterTokenizer:
    """Token t is a letter, or the same one twice."""

    words = tuple(chr(ord("a") + t % 26) * (1 + t % 2) for t in range(V))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - ord("a") for c in text.strip()]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(self.words[i] for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id].encode()

    def detokenizer(self, *how, after=()):
        return LetterDetokenizer()


class LetterDetokenizer:
    def add(self, token_id: int) -> str:
        return LetterTokenizer.words[token_id]

    def finish(self) -> str:
        return ""


def make(
    n_slots: int = 200,
    max_num_seqs: int = 4,
    tokenizer=None,
    eos=(),
    max_model_len: int = 64,
    host_kv_slots: int = 0,
    prefix_caching: bool = True,
    async_scheduling: bool = True,
    headroom: float | None = 0.0,
) -> Engine:
    buckets = Buckets(batch=(1, 2, 4, 8), prompt=(4, 16, 64), context=(8, 64))
    engine = Engine(
        ImaginaryExecutor(n_slots, host_kv_slots),
        tokenizer,
        vocab_size=V,
        buckets=buckets,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        eos_token_ids=eos,
        host_kv_slots=host_kv_slots,
        prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
        headroom=headroom,
    )
    engine.drawing.sampler = SAMPLER
    return engine


def run(engine: Engine) -> tuple[dict[str, RequestOutput], list[TokenEvent]]:
    outputs, events = {}, []
    while not engine.idle:
        for event in engine.step():
            events.append(event)
            if event.output is not None:
                outputs[event.request_id] = event.output
        engine.check_integrity()
    return outputs, events


def one(engine: Engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    request_id = engine.add_request(prompt, params)
    return run(engine)[0][request_id]


@settings(max_examples=60, deadline=None)
@given(
    n_slots=st.integers(24, 70),
    max_num_seqs=st.integers(1, 4),
    shapes=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=8
    ),
    prefix_caching=st.booleans(),
    host_kv_slots=st.sampled_from([0, 16, 200]),
)
@example(24, 3, [(1, 4, 0), (18, 4, 2), (17, 3, 2)], True, 200)  # what two share comes back for each
def test_tokens_do_not_depend_on_batching_preemption_caching_or_the_host(
    n_slots: int, max_num_seqs: int, shapes: list, prefix_caching: bool, host_kv_slots: int
):
    engine = make(n_slots, max_num_seqs, host_kv_slots=host_kv_slots, prefix_caching=prefix_caching)
    expected = {}
    for length, max_tokens, first in shapes:  # of equal first tokens one prompt is the other's prefix
        prompt = [(first + 7 * i) % V for i in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        if length + max_tokens - 1 > n_slots:
            with pytest.raises(UserError):
                engine.add_request(prompt, params)
            continue
        expected[engine.add_request(prompt, params)] = continuation(prompt, max_tokens)
    outputs, events = run(engine)
    assert {i: list(out.token_ids) for i, out in outputs.items()} == expected
    for i, tokens in expected.items():  # streamed in order, each once
        assert [e.token_id for e in events if e.request_id == i] == tokens
    assert engine.scheduler.room.n_used == 0
    stats = engine.stats
    assert stats.n_prompt_tokens_computed == sum(engine.executor.n_prefilled)
    # Each prompt counts once, however often it was computed.
    assert stats.n_prompt_tokens == sum(len(out.prompt_token_ids) for out in outputs.values())
    assert 0 <= stats.n_prompt_tokens - stats.n_prefix_hit_tokens <= stats.n_prompt_tokens_computed
    assert stats.n_generated_tokens == sum(map(len, expected.values()))
    assert engine.kv_stats()["n_moved_in_tokens"] <= engine.kv_stats()["n_moved_out_tokens"]


def test_kv_moves_to_the_host_and_back_instead_of_being_computed_again():
    prompts = [[i] * 12 for i in range(1, 4)]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    for host_kv_slots, n_computed in [(100, 36), (0, None)]:
        engine = make(n_slots=50, host_kv_slots=host_kv_slots, prefix_caching=False)
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        outputs, _ = run(engine)
        assert [list(outputs[i].token_ids) for i in ids] == [continuation(p, 12) for p in prompts]
        assert engine.stats.n_preemptions > 0
        kv = engine.kv_stats()
        if n_computed is None:
            assert engine.stats.n_prompt_tokens_computed > 36 and kv["n_moved_out_tokens"] == 0
        else:
            assert engine.stats.n_prompt_tokens_computed == n_computed
            assert kv["n_moved_in_tokens"] == kv["n_moved_out_tokens"] > 12 and kv["host_kv_slots_used"] == 0


def test_a_second_request_computes_only_what_follows_the_shared_prefix():
    engine = make()
    shared = [(3 * i) % V for i in range(40)]
    first, second = [*shared, 1, 2, 3], [*shared, 9, 8]
    for prompt in (first, second):
        out = one(engine, prompt, GREEDY)
        assert list(out.token_ids) == continuation(prompt, 6)
    assert engine.executor.n_prefilled == [43, 2] and out.n_cached_tokens == 40
    assert engine.stats.n_prefix_hit_tokens == 40 and engine.stats.n_prompt_tokens == 43 + 42
    again = [*second, *continuation(second, 5), 77]  # the next turn of the conversation
    assert list(one(engine, again, GREEDY).token_ids) == continuation(again, 6)
    assert engine.executor.n_prefilled[-1] == 1
    engine.reset_prefix_cache()
    one(engine, second, GREEDY)
    assert engine.executor.n_prefilled[-1] == 42
    assert engine.kv_stats()["kv_slots_cached"] == 42 + 5


def test_without_prefix_caching_everything_is_computed():
    engine = make(prefix_caching=False)
    for _ in range(2):
        one(engine, list(range(40)), GREEDY)
        assert engine.scheduler.slots.n_used == 0
    assert engine.executor.n_prefilled == [40, 40] and engine.stats.n_prefix_hit_tokens == 0


def test_a_step_that_fails_leaves_nothing_in_the_cache():
    engine = make()
    run = engine.executor.run

    def fails(step):
        raise RuntimeError("the device is gone")

    engine.executor.run = fails
    request_id = engine.add_request(list(range(30)), GREEDY)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    assert engine.abort(request_id) is not None
    engine.check_integrity()
    assert engine.scheduler.slots.n_used == 0
    engine.executor.run = run
    assert list(one(engine, list(range(30)), GREEDY).token_ids) == continuation(list(range(30)), 6)


def test_requests_that_nothing_comes_of_are_heard_of():
    """As by a fault of the scheduler; until then they would wait for ever."""
    engine = make(64)
    request_id = engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
    waiting = engine.scheduler._admit
    engine.scheduler._admit = lambda *_: ([], [])
    with pytest.raises(RuntimeError, match="nobody ran in 100 steps in a row, though 1 requests wait"):
        for _ in range(1000):
            assert engine.step() == []
    engine.abort(request_id)
    engine.scheduler._admit = waiting
    assert one(engine, [1, 2, 3], SamplingParams(max_tokens=4)).token_ids


def test_preemption_happens_and_is_counted():
    engine = make(n_slots=24, max_num_seqs=4)
    ids = [engine.add_request([1, 2, 3, 4], SamplingParams(temperature=0.0, max_tokens=12)) for _ in range(4)]
    outputs, _ = run(engine)
    assert engine.stats.n_preemptions > 0
    assert sum(out.n_preemptions for out in outputs.values()) == engine.stats.n_preemptions
    assert len({out.token_ids for out in outputs.values()}) == 1 and len(ids) == len(outputs)


def test_batches_have_bucket_shapes_only():
    engine = make(max_num_seqs=4)
    for length in (3, 9, 20):
        engine.add_request(list(range(length)), SamplingParams(temperature=0.0, max_tokens=5 + length))
    run(engine)
    assert engine.executor.decode_shapes <= {(b, c) for b in (1, 2, 4) for c in (8, 64)}


def test_finish_reasons_length_eos_and_stop_token():
    prompt, n = [5, 6], 6
    tokens = continuation(prompt, n)
    third = tokens[2]
    assert third not in tokens[:2]
    plain = one(make(), prompt, GREEDY)
    assert (plain.finish_reason, plain.stop_reason, list(plain.token_ids)) == ("length", None, tokens)
    eos = one(make(eos=(third,)), prompt, GREEDY)
    assert (eos.finish_reason, eos.stop_reason, list(eos.token_ids)) == ("stop", None, tokens[:3])
    ignored = one(make(eos=(third,)), prompt, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
    assert list(ignored.token_ids) == tokens
    stop = one(make(), prompt, SamplingParams(temperature=0.0, max_tokens=n, stop_token_ids=[third]))
    assert (stop.finish_reason, stop.stop_reason, list(stop.token_ids)) == ("stop", third, tokens[:3])


def test_min_tokens_keeps_stop_tokens_from_being_chosen():
    prompt = [5, 6]
    first = continuation(prompt, 1)[0]
    params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=3, stop_token_ids=[first])
    out = one(make(), prompt, params)
    assert len(out.token_ids) > 3 and first not in out.token_ids[:3]


def test_max_tokens_none_goes_to_the_models_length():
    out = one(make(max_model_len=20), [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=None))
    assert out.finish_reason == "length" and len(out.token_ids) == 17


def test_stop_token_is_left_out_of_the_text_but_not_of_the_tokens():
    engine = make(tokenizer=LetterTokenizer())
    tokens = continuation([5, 6], 6)
    out = one(engine, [5, 6], SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=[tokens[2]]))
    assert out.text == LetterTokenizer().decode(tokens[:2])


def test_stop_strings_cut_the_text_and_streamed_pieces_add_up_to_it():
    text = LetterTokenizer().decode(continuation([5, 6], 12))
    stop = text[5:9]
    engine = make(tokenizer=LetterTokenizer())
    request_id = engine.add_request(
        [5, 6], SamplingParams(temperature=0.0, max_tokens=12, stop=["zzzzz", stop])
    )
    outputs, events = run(engine)
    out = outputs[request_id]
    assert out.finish_reason == "stop" and out.stop_reason == stop
    assert out.text == text[: text.index(stop)]
    assert "".join(event.new_text for event in events) == out.text


def test_text_keeps_the_blank_between_it_and_its_prompt():
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({f"▁{i}": i for i in range(V)}, []))
    blanks, strip = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Strip(" ", 1, 0)
    steps = [blanks, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), strip]
    inner.decoder = tokenizers.decoders.Sequence(steps)
    tokenizer = Tokenizer(inner)
    tokens = continuation([5, 6], 6)
    text = "".join(f" {token}" for token in tokens)
    engine = make(tokenizer=tokenizer)
    first = engine.add_request([5, 6], GREEDY)
    stopped = engine.add_request([5, 6], SamplingParams(temperature=0.0, stop=[f" {tokens[0]}"]))
    outputs, events = run(engine)
    assert outputs[first].text == text == tokenizer.decode([5, 6, *tokens])[len("5 6") :]
    assert "".join(event.new_text for event in events if event.request_id == first) == text
    assert (outputs[stopped].text, outputs[stopped].stop_reason) == ("", f" {tokens[0]}")
    beams = SamplingParams(temperature=0.0, use_beam_search=True, beam_width=2, max_tokens=6, logprobs=1)
    out = one(engine, [5, 6], beams)
    shown = [next(iter(entry.values())).decoded_token for entry in out.logprobs or ()]
    assert out.text == "".join(shown) == text


def test_logprobs_hold_the_chosen_token_and_the_likeliest():
    engine = make(tokenizer=LetterTokenizer())
    out = one(engine, [5, 6], SamplingParams(temperature=0.0, max_tokens=4, logprobs=3))
    assert out.logprobs is not None and len(out.logprobs) == 4
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert len(entry) == 3 and next(iter(entry)) == token
        assert entry[token].rank == 1 and entry[token].logprob == pytest.approx(0, abs=1e-6)
        assert entry[token].decoded_token == LetterTokenizer.words[token]
    assert out.cumulative_logprob == pytest.approx(0, abs=1e-5)
    assert one(engine, [5, 6], GREEDY).logprobs is None


def test_logprobs_zero_reports_the_chosen_token_alone():
    out = one(make(), [5, 6], SamplingParams(temperature=3.0, max_tokens=4, logprobs=0, seed=1))
    assert [list(entry) for entry in out.logprobs or ()] == [[token] for token in out.token_ids]


def test_seeds_come_from_the_engine_unless_given():
    hot = SamplingParams(temperature=30.0, max_tokens=8)
    first, again = one(make(), [5, 6], hot), one(make(), [5, 6], hot)
    assert first.token_ids == again.token_ids  # the engine's seed is 0 in both
    engine = make()
    a, b = (engine.add_request([5, 6], hot) for _ in range(2))
    outputs, _ = run(engine)
    assert outputs[a].token_ids != outputs[b].token_ids
    fixed = SamplingParams(temperature=30.0, max_tokens=8, seed=4)
    c, d = (engine.add_request([5, 6], fixed) for _ in range(2))
    outputs, _ = run(engine)
    assert outputs[c].token_ids == outputs[d].token_ids


def test_abort_frees_slots_and_keeps_what_was_written():
    engine = make()
    request_id = engine.add_request([1, 2, 3], GREEDY)
    waiting = engine.add_request([4], GREEDY)
    engine.step()
    out = engine.abort(request_id)
    assert out is not None and out.finish_reason == "abort" and len(out.token_ids) == 1
    assert engine.abort(request_id) is None
    assert engine.abort(waiting) is not None
    assert engine.idle and engine.scheduler.room.n_used == 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        (list(range(64)), GREEDY, "the prompt has 64 tokens, the model's length is 64"),
        ([V], GREEDY, r"prompt token id 97 is not in the vocabulary \(0 … 96\)"),
        ([-1], GREEDY, "prompt token id -1 is not"),
        (["a"], GREEDY, "prompt token id 'a' is not a whole number"),
        ([1.0], GREEDY, "prompt token id 1.0 is not a whole number"),
        ([1], SamplingParams(stop="x"), "stop strings need a tokenizer"),
        ([1], SamplingParams(bad_words=["x"]), "bad_words need a tokenizer"),
        (
            [1],
            SamplingParams(logit_bias={97: 1.0}),
            r"logit_bias token 97 is not in the vocabulary \(0 … 96\)",
        ),
        ([1] * 30, SamplingParams(max_tokens=20), "may need 49 KV slots .* the pool has 40"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(prompt, params, message: str):
    engine = make(n_slots=40)
    with pytest.raises(UserError, match=message) as caught:
        engine.add_request(prompt, params)
    assert "\n" not in str(caught.value)
    assert engine.idle


def test_stats_count_what_ran():
    engine = make()
    one(engine, [1, 2, 3], GREEDY)
    stats = engine.stats
    assert (stats.n_prompt_tokens, stats.n_generated_tokens, stats.n_decode_tokens) == (3, 6, 5)
    assert (stats.n_prompt_tokens_computed, stats.n_prefix_hit_tokens) == (3, 0)
    assert stats.n_steps == 6 and stats.prefill_s > 0 and stats.decode_s > 0


def test_prompt_batches_that_the_executor_cannot_run_are_refused():
    buckets, sizes = Buckets(batch=(4,), prompt=(4,), context=(8,)), {"max_num_seqs": 4, "max_model_len": 8}
    engine = Engine(ImaginaryExecutor(20), None, vocab_size=V, buckets=buckets, **sizes)
    assert engine.batching.n_tokens == 0
    with pytest.raises(UserError, match="prompt_batch_tokens=64 needs .* partition=heads"):
        Engine(ImaginaryExecutor(20), None, vocab_size=V, buckets=buckets, prompt_batch_tokens=64, **sizes)


def test_mixed_steps_that_the_executor_cannot_run_are_refused():
    class NeverMixed(ImaginaryExecutor):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(why_not_mixed="take n_batches=1, or mixed_steps=False")

    buckets, sizes = Buckets(batch=(1,), prompt=(4,), context=(8,)), {"max_num_seqs": 1, "max_model_len": 8}
    assert Engine(
        ImaginaryExecutor(20), None, vocab_size=V, buckets=buckets, mixed_steps=True, **sizes
    ).mixed_steps
    with pytest.raises(UserError, match="n_batches=1, or mixed_steps=False"):
        Engine(NeverMixed(20), None, vocab_size=V, buckets=buckets, mixed_steps=True, **sizes)
