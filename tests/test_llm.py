"""The Python interface: SmolLM2 split against unsplit, and every way of asking and of asking wrongly."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from checkpoint_examples import tiny_words_folder
from serving import ROOT
from test_models import MODELS

import jaxlamina
from jaxlamina import LLM, SamplingParams, UserError
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.weights.sources import InMemoryModel
from jaxlamina.workers import capacity
from jaxlamina.workers.calibration import Calibration

MODEL = "smollm2-135m-instruct"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
BEAMS = SamplingParams(temperature=0.0, use_beam_search=True, beam_width=3, max_tokens=26)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "1 2 3 4 5 6",
    "def fibonacci(n):\n",
    """Water boils at a temperature of one hundred degrees because the pressure of its vapour then equals that of
    the air around it. On a high mountain the air is thinner, so""",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, max_num_seqs=5, max_model_len=256, kv_slots=700)


@pytest.fixture(scope="module")
def small() -> LLM:
    """A random model without a tokenizer, in a pool that four of its longest requests do not fit into."""
    config = ModelConfig.from_hf(MODELS["llama"])
    return LLM(
        InMemoryModel(config, random_params(config, seed=1)), max_num_seqs=4, kv_slots=64, kv_headroom=0.0
    )


def run_recorded(model: LLM, prompts: list[str], params: SamplingParams) -> tuple[list, list[np.ndarray]]:
    """Outputs, and the logits of every step that the model's executor runs for them."""
    steps: list[np.ndarray] = []
    run = model.executor.run

    def recording(step):
        logits = run(step)
        steps.extend(np.array(x) for x in (logits.decodes, *logits.prompts) if x is not None)
        return logits

    with patch.object(model.executor, "run", recording):
        return model.generate(prompts, params), steps


@pytest.mark.parametrize("n", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_split_smollm2_equals_unsplit_over_steps_of_a_mixed_batch(llm: LLM, n: int):
    params = SamplingParams(
        temperature=0.0, max_tokens=n + 1, ignore_eos=True
    )  # the first comes of the prefill
    unsplit = LLM(MODEL, max_num_seqs=5, max_model_len=256, kv_slots=700, split=False)
    runs = []
    for model in (llm, unsplit):
        model.reset_prefix_cache()
        before = model.stats()["n_decode_tokens"]
        outputs, steps = run_recorded(model, PROMPTS, params)
        runs.append((outputs, steps))
        assert len({len(out.prompt_token_ids) for out in outputs}) > 2
        assert model.stats()["n_decode_tokens"] == before + 5 * n
    (split_outputs, split_steps), (unsplit_outputs, unsplit_steps) = runs
    assert [out.token_ids for out in split_outputs] == [out.token_ids for out in unsplit_outputs]
    assert split_outputs[0].text.startswith(" Paris")
    assert len(split_steps) == len(unsplit_steps) == 5 + n
    for got, want in zip(split_steps, unsplit_steps, strict=True):
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_a_batch_writes_what_each_prompt_alone_writes(llm: LLM):
    together = llm.generate(PROMPTS, GREEDY)
    assert [out.prompt for out in together] == PROMPTS
    for prompt, out in zip(PROMPTS[:2], together, strict=False):
        [alone] = llm.generate(prompt, GREEDY)
        assert alone.token_ids == out.token_ids and alone.text == out.text


def test_prompts_as_text_or_token_ids_and_parameters_each(llm: LLM):
    ids = llm.tokenizer.encode(PROMPTS[0])
    prompts = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    lengths = [SamplingParams(temperature=0.0, max_tokens=n) for n in (3, 2, 1)]
    outputs = llm.generate(prompts, lengths)
    assert [len(out.token_ids) for out in outputs] == [3, 2, 1]
    assert {out.prompt_token_ids for out in outputs} == {tuple(ids)}
    assert [out.prompt for out in outputs] == [PROMPTS[0], PROMPTS[0], None]
    assert outputs[0].text.startswith(outputs[1].text)
    assert llm.generate([], GREEDY) == []


def test_chat_answers_one_conversation_or_several(llm: LLM):
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    [answer] = llm.chat(question, GREEDY)
    assert "Paris" in answer.text and answer.finish_reason == "stop"
    assert answer.prompt is not None and answer.prompt.endswith("<|im_start|>assistant\n")
    assert "<|im_end|>" not in answer.text
    begun = [*question, {"role": "assistant", "content": "The capital of"}]
    [on] = llm.chat(begun, GREEDY, continue_final_message=True)
    assert on.text.startswith(" France") and on.prompt.endswith("<|im_start|>assistant\nThe capital of")
    parts = [{"type": "text", "text": text} for text in ("What is the", "capital of France?")]
    joined = llm.chat_prompt([{"role": "user", "content": "What is the\ncapital of France?"}])
    assert llm.chat_prompt([{"role": "user", "content": parts}]) == joined
    with pytest.raises(UserError, match="a content part of type 'image_url' is not supported"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])
    several = llm.chat([question, [{"role": "user", "content": "Say hello."}]], GREEDY)
    assert several[0].token_ids == answer.token_ids and len(several) == 2


def test_streamed_pieces_are_the_text(llm: LLM):
    [whole] = llm.generate(PROMPTS[1], GREEDY)
    pieces = list(llm.stream(PROMPTS[1], GREEDY))
    assert len(pieces) > 4 and "".join(pieces) == whole.text


def test_texts_are_streamed_by_turns_and_beside_others(llm: LLM):
    """Each step is everybody's, whoever asks for it; and who is not asked loses nothing."""
    params = [replace(GREEDY, max_tokens=n, ignore_eos=True) for n in (5, 9, 14)]
    whole = [out.text for out in llm.generate(PROMPTS[:3], params)]
    streams = [llm.stream(prompt, p) for prompt, p in zip(PROMPTS[:2], params, strict=False)]
    pieces = ["".join(x) for x in zip(*itertools.zip_longest(*streams, fillvalue=""), strict=True)]
    assert pieces == whole[:2]
    first = llm.stream(PROMPTS[0], params[0])
    begun = next(first)
    assert [out.text for out in llm.generate(PROMPTS[1:3], params[1:])] == whole[1:]
    assert begun + "".join(first) == whole[0] and llm.engine.idle


def test_a_stream_left_early_frees_its_slots(llm: LLM):
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    stream.close()
    assert llm.engine.idle and llm.stats()["kv_slots_used"] == 0
    untouched = llm.stream(PROMPTS[1], GREEDY)
    untouched.close()
    assert llm.engine.idle
    with pytest.raises(UserError, match="the prompt is empty"):
        llm.stream({"prompt_token_ids": []})  # at once, not at the first piece


def test_stop_strings_and_logprobs_of_a_real_text(llm: LLM):
    [plain] = llm.generate(PROMPTS[1], GREEDY)
    stop = plain.text[10:14]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=stop, logprobs=2)
    [out] = llm.generate(PROMPTS[1], params)
    assert out.text == plain.text[: plain.text.index(stop)] and out.stop_reason == stop
    assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert len(entry) == 2 and entry[token].rank == 1
        first, second = entry.values()
        assert first.logprob >= second.logprob
        assert entry[token].decoded_token == llm.tokenizer.decode([token], skip_special_tokens=False)


def test_every_token_is_reported_as_it_comes(llm: LLM):
    events = []
    outputs = llm.generate(PROMPTS[:2], GREEDY, on_token=events.append)
    for out in outputs:
        mine = [event for event in events if event.request_id == out.request_id]
        assert tuple(event.token_id for event in mine) == out.token_ids
        assert "".join(event.new_text for event in mine) == out.text
        assert mine[-1].output is out and all(event.output is None for event in mine[:-1])


def test_seeded_requests_repeat_alone_and_in_a_batch(llm: LLM):
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=12)
    [alone] = llm.generate(PROMPTS[0], params)
    others = [SamplingParams(temperature=1.5, max_tokens=12), GREEDY]
    outputs = llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[2]], [others[0], params, others[1]])
    assert outputs[1].token_ids == alone.token_ids
    [other] = llm.generate(PROMPTS[0], SamplingParams(temperature=0.8, top_p=0.9, seed=12, max_tokens=12))
    assert other.token_ids != alone.token_ids


def test_split_report_says_what_crosses(llm: LLM):
    report = llm.split_report()
    assert report.n_slices == 31 and report.n_programs == 3 and report.n_tokens == 1
    residual, positions = 576 * 4, 4
    assert {cut.context_bytes for cut in report.cuts} == {residual + positions}
    assert report.exchanged_bytes_per_token == 30 * 4 * (9 + 3 + 3 + 9) * 64


def test_a_growing_sequence_compiles_nothing_within_a_bucket(llm: LLM):
    llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    before = llm.stats()
    llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    after = llm.stats()
    assert after["n_compilations"] == before["n_compilations"]
    assert after["n_steps"] == before["n_steps"] + 50
    n = after["buckets"]["context"][0]
    what = f"slices and attention, decode, batch 1, context {n}, q with k and v"
    assert after["compilations"][what] <= 3, "the first layers, others, and the last slice"


def test_compiled_programs_are_kept_on_disk(tmp_path):
    """Another process has what one has compiled, though the user has chosen no folder for it."""
    model = tiny_words_folder(tmp_path, 64)
    chosen = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    environment = chosen | {"JAXLAMINA_CACHE": str(tmp_path / "cache"), "JAX_LOG_COMPILES": "1"}

    def n_written() -> tuple[int, int]:
        command = [
            sys.executable,
            "-m",
            "jaxlamina",
            "generate",
            "w1",
            "--model",
            str(model),
            "--max-tokens",
            "3",
            "--raw",
        ]
        done = subprocess.run(command, check=True, env=environment, cwd=ROOT, capture_output=True, text=True)
        return len(list((tmp_path / "cache" / "xla").glob("*-cache"))), done.stderr.count(
            "Persistent compilation cache hit"
        )

    n_programs, n_hits = n_written()
    assert n_programs > 3 and n_hits < n_programs
    assert n_written() == (n_programs, n_programs)


def test_more_requests_than_fit_are_served_in_turn(small: LLM):
    prompts = [{"prompt_token_ids": [3 + i] * (6 + i)} for i in range(7)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    outputs = small.generate(prompts, params)
    assert small.stats()["n_preemptions"] > 0 and small.stats()["kv_slots_used"] == 0
    small.engine.check_integrity()
    for prompt, out in zip(prompts, outputs, strict=True):
        assert small.generate(prompt, params)[0].token_ids == out.token_ids


def test_capacity_comes_from_memory_when_not_given(monkeypatch):
    config = ModelConfig.from_hf(MODELS["llama"])
    model = InMemoryModel(config, random_params(config))
    assert LLM(model, max_num_seqs=3).stats()["kv_slots"] == 3 * 64  # no more than could be used
    slot_bytes = 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr("jaxlamina.workers.capacity.host_free_bytes", lambda: 10 * 20 * slot_bytes)
    short = LLM(model, max_num_seqs=3)
    assert short.stats()["kv_slots"] == 20 and short.max_model_len == 21
    [out] = short.generate({"prompt_token_ids": [1]}, SamplingParams(temperature=0.0, max_tokens=None))
    assert len(out.token_ids) == 20
    with pytest.raises(UserError, match="fewer than one request of 40 tokens: lower max_model_len"):
        LLM(model, max_model_len=40)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.generate({"prompt_token_ids": []}), "the prompt is empty"),
        (
            lambda m: m.generate({"prompt_token_ids": [5] * 64}),
            "the prompt has 64 tokens, the model's length is 64",
        ),
        (lambda m: m.generate({"prompt_token_ids": [96]}), "prompt token id 96 is not in the vocabulary"),
        (lambda m: m.generate("words"), "needs a tokenizer"),
        (lambda m: m.chat([{"role": "user", "content": "x"}]), "chat needs a tokenizer"),
        (lambda m: m.generate([3.5]), "a prompt must be a string"),
        (lambda m: m.generate({"text": "x"}), "a prompt must be a string"),
        (lambda m: m.generate({"prompt_token_ids": [1], "lora": 1}), r"a prompt has no field \['lora'\]"),
        (
            lambda m: m.generate({"prompt_token_ids": [1]}, [GREEDY, GREEDY]),
            "2 sampling parameters for 1 prompts",
        ),
        (
            lambda m: m.generate([{"prompt_token_ids": [1]}, {"prompt_token_ids": [999]}]),
            "prompt token id 999",
        ),
        (lambda m: SamplingParams(temperature=-1), "temperature=-1"),
        (
            lambda m: m.generate({"prompt_token_ids": [1]}, SamplingParams(n=5)),
            "has 5 sequences, 4 run at once",
        ),
        (lambda m: m.stream({"prompt_token_ids": [1]}, SamplingParams(n=2)), "cannot be streamed as one"),
        (
            lambda m: m.generate({"prompt_token_ids": [1]}, BEAMS),
            r"may need 76 KV slots \(prompt 1 \+ max_tokens 26 - 1, for each of 3 beams\)",
        ),
    ],
)
def test_bad_requests_are_refused_in_one_line_and_leave_nothing_behind(small: LLM, ask, message: str):
    with pytest.raises(UserError, match=message) as caught:
        ask(small)
    assert "\n" not in str(caught.value)
    assert small.engine.idle


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype='float8' must be one of auto, float32, bfloat16"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_model_len": 65}, "max_model_len=65 must be at least 2 and at most 64"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"kv_slots": 0}, "kv_slots=0"),
        ({"kv_headroom": 1.5}, "kv_headroom=1.5 must be from 0 to 1"),
        ({"devices": []}, "must be one device, or two"),
        ({"devices": [None] * 4, "attention_workers": 2}, "or 3: one for each attention worker"),
        ({"kv_dtype": "int4"}, "kv_dtype='int4' must be one of auto, int8, int8-channel"),
        ({"attention_workers": 0}, "attention_workers=0 must be at least 1"),
        (
            {"attention_workers": 4, "partition": "heads"},
            "2 KV heads for 4 attention workers, each of which needs one",
        ),
        ({"partition": "layers"}, "partition='layers' must be one of auto, heads, requests, tokens"),
        ({"attention_workers": 2, "split": False}, "attention_workers=2 needs the model split"),
        ({"host_kv_slots": -1}, "host_kv_slots=-1 must be 0"),
        ({"host_kv_slots": "some"}, "host_kv_slots='some' must be 0"),
        (
            {"calibration_tokens": [1, 2]},
            "calibration_tokens finds fixed scales, which kv_dtype='auto' has not",
        ),
        ({"calibration_headroom": 2.0, "kv_dtype": "int8"}, "calibration_headroom finds fixed scales"),
        ({"calibration_tokens": [1, 10**6], "kv_dtype": "int8-channel"}, "token 1000000 must be from 0 to"),
        ({"calibration_tokens": "text", "kv_dtype": "int8-channel"}, "a calibration text needs a tokenizer"),
        ({"calibration_headroom": 0.5, "kv_dtype": "int8-channel"}, "headroom 0.5 must be from 1 to 100"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options: dict, message: str):
    model = InMemoryModel(ModelConfig.from_hf(MODELS["llama"]), {})
    with pytest.raises(UserError, match=message):
        LLM(model, **options)


def test_longrope_is_served_up_to_its_original_length():
    """Beyond it every key of a sequence is turned otherwise, those that are stored too."""
    config = ModelConfig.from_hf(MODELS["phi3-longrope"])
    with pytest.raises(UserError, match="max_model_len=22 must be at least 2 and at most 21, the model's"):
        LLM(InMemoryModel(config, {}), max_model_len=22)
    llm = LLM(InMemoryModel(config, random_params(config, seed=3)), max_num_seqs=1)
    assert llm.max_model_len == 21


def test_host_slots_come_by_themselves_where_they_pay(monkeypatch):
    """On a CPU there are none; where there are, what gives way is not computed again."""
    config = ModelConfig.from_hf(MODELS["llama"])
    model = InMemoryModel(config, random_params(config, seed=1))
    options = {"max_num_seqs": 4, "kv_slots": 64, "kv_headroom": 0.0, "prefix_caching": False}
    prompts = [{"prompt_token_ids": [i] * 12} for i in range(1, 5)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = []
    for n_host in (0, 64):
        if n_host:
            monkeypatch.setattr(capacity, "is_accelerator", lambda device: True)
            monkeypatch.setattr(capacity, "host_free_bytes", lambda: 2**30)
        llm = LLM(model, **options)
        found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
        stats = llm.stats()
        assert stats["host_kv_slots"] == n_host and stats["n_preemptions"] > 0
        assert (stats["n_moved_in_tokens"] > 0) == (n_host > 0)
    assert found[0] == found[1]


@pytest.mark.parametrize("split", [True, False])
def test_fixed_scales_are_found_from_the_tokens_given(split: bool):
    config = ModelConfig.from_hf(MODELS["llama"])
    model = InMemoryModel(config, random_params(config, seed=1))

    def scales(tokens, headroom=None) -> np.ndarray:
        llm = LLM(
            model,
            kv_dtype="int8-channel-asymmetric",
            max_model_len=32,
            kv_slots=40,
            split=split,
            calibration_tokens=tokens,
            calibration_headroom=headroom,
        )
        [out] = llm.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(out.outputs[0].token_ids) == 4
        return np.asarray(llm.executor.kv.k[0].scales)

    one, other = scales([1, 2, 3, 4]), scales([[5, 6], [7, 8]])
    assert not np.allclose(one, other)
    np.testing.assert_allclose(scales(np.arange(1, 5), 2.6), one * 2.6 / Calibration().headroom, rtol=1e-5)


def test_a_partition_left_open_is_one_that_fits_and_is_said_once(capsys):
    config = ModelConfig.from_hf(MODELS["llama"])  # 2 KV heads
    model = InMemoryModel(config, random_params(config, seed=3))
    prompt = {"prompt_token_ids": [5, 9, 11, 3]}
    texts = {}
    for n in (1, 2, 3):
        found = LLM(model, attention_workers=n, max_num_seqs=1, max_model_len=32)
        [output] = found.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4))
        texts[n] = output.token_ids
    assert texts[1] == texts[2] == texts[3]
    [line] = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("note: 2 KV heads do not divide evenly over 3 attention workers") and "tokens" in line
    )


def test_empty_text_prompt_is_refused(llm: LLM):
    with pytest.raises(UserError, match="the prompt is empty"):
        llm.generate("")


def test_unknown_model_is_refused_by_name():
    with pytest.raises(UserError, match="no-such-model"):
        LLM("no-such-model")


def test_bfloat16_is_near_float32():
    config = ModelConfig.from_hf(MODELS["llama"])
    model = InMemoryModel(config, random_params(config, seed=1))
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3)
    first = []
    for dtype in ("float32", "bfloat16"):
        llm = LLM(model, dtype=dtype, max_num_seqs=1, max_model_len=32)
        assert {of.dtype.name for of in llm.executor.specs} == {dtype}
        [out] = llm.generate({"prompt_token_ids": [5, 9, 11, 3]}, params)
        first.append({token: x.logprob for token, x in out.outputs[0].logprobs[0].items()})
    assert first[0] != first[1] and list(first[0]) == list(first[1])
    assert list(first[0].values()) == pytest.approx(list(first[1].values()), abs=0.05)


@pytest.mark.slow  # each of its 30 layers is compiled anew for four tokens
def test_bfloat16_writes_too():
    model = LLM(MODEL, dtype="bfloat16", max_num_seqs=1, max_model_len=64, kv_slots=64)
    [out] = model.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=4))
    assert out.text.startswith(" Paris")


def test_package_exports_what_it_names():
    for name in jaxlamina.__all__:
        assert getattr(jaxlamina, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jaxlamina.nothing
