"""What the server is made of, by itself: calls of tools in a text, parameters, what is to be compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from checkpoint_examples import byte_tokenizer
from supervised import wait_until
from test_engine import LetterTokenizer
from test_models import MODELS

from jaxlamina import LLM, SamplingParams
from jaxlamina.engine.sizes_to_compile import first_of, shapes
from jaxlamina.engine.warm_up import Behind, _empty_batch, _later, warm_up
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.process import kept_programs
from jaxlamina.process.turns import wait_between_parts
from jaxlamina.sampling import adjustments
from jaxlamina.sampling.sampler import LOGPROBS_WIDTHS
from jaxlamina.sampling.structured import StructuredOutputs
from jaxlamina.server.errors import ApiError
from jaxlamina.server.parameters import NOT_YET, PASSED, sampling_params
from jaxlamina.server.prompts import Prompts
from jaxlamina.server.protocol import ChatCompletionRequest, CompletionRequest, Tool
from jaxlamina.server.run import ToCompile
from jaxlamina.server.settings import Settings
from jaxlamina.server.tools import call_schema
from jaxlamina.steps.buckets import Buckets, StepSizes
from jaxlamina.text.tokenizer import Tokenizer
from jaxlamina.weights.sources import InMemoryModel

# Programs that choose tokens, and say how likely they are.
SAMPLER = ("choose", "report", "likeliest", *(stage.__name__ for stage in adjustments.STAGES))


def test_every_sampling_parameter_can_be_given():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(PASSED) | {"logprobs", "prompt_logprobs", "logit_bias", "structured_outputs"} == fields
    body = {
        "prompt": "x", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "n": 2, "best_of": 3,
        "max_tokens": 9, "min_tokens": 2, "stop": ["a"], "stop_token_ids": [4], "ignore_eos": True, "logprobs": 5,
        "prompt_logprobs": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "bad_words": ["b"],
        "allowed_token_ids": [1, 2], "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True, "truncate_prompt_tokens": 7,
    }  # fmt: skip
    wanted = {name: value for name, value in body.items() if name != "prompt"}
    assert sampling_params(CompletionRequest(**body)) == SamplingParams(**wanted)
    assert sampling_params(CompletionRequest(prompt="x", logit_bias={"7": -2})).logit_bias == {7: -2}
    structured = {"json": {"type": "object"}}
    older = {"guided_json": structured["json"]}
    for more in ({"structured_outputs": structured}, older, {"response_format": {"type": "json_object"}}):
        found = sampling_params(CompletionRequest(prompt="x", **more))
        assert found.structured_outputs == StructuredOutputs(**structured)
    with pytest.raises(ApiError, match="structured_outputs.gramma is not supported"):
        sampling_params(CompletionRequest(prompt="x", structured_outputs={"gramma": "x"}))
    beams = {"prompt": "x", "use_beam_search": True, "beam_width": 4, "length_penalty": 0.5}
    found = sampling_params(CompletionRequest(**beams))
    assert (found.beam_width, found.length_penalty, found.temperature) == (4, 0.5, 0)


def test_log_probabilities_of_a_prompt_are_asked_for_in_two_ways():
    asked = [({"echo": True, "logprobs": 3}, 3), ({"echo": True}, None), ({"logprobs": 3}, None)]
    asked += [({"echo": True, "logprobs": 3, "prompt_logprobs": n}, max(3, n)) for n in (0, 5)]
    for fields, n in asked:
        assert sampling_params(CompletionRequest(prompt="x", **fields)).prompt_logprobs == n


def test_marks_that_are_special_tokens_are_not_left_out_of_a_text():
    """Mistral's are, and without them no call would be seen; where nothing looks for them they stay out."""
    inner = byte_tokenizer()
    inner.add_special_tokens(["[TOOL_CALLS]", "[THINK]"])
    template = "{{ tools }}{{ messages[0].content }}[TOOL_CALLS]"
    model = SimpleNamespace(
        tokenizer=Tokenizer(inner, chat_template=template),
        model=SimpleNamespace(vocab_size=300),
        max_model_len=900,
    )
    chat = {"messages": [{"role": "user", "content": "x"}]}
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    for parsers, more, skips in (
        ({}, {}, True),
        ({}, tools, False),
        ({"tool_call_parser": "hermes"}, tools, True),
        ({"reasoning_parser": "mistral"}, {}, False),
        ({"reasoning_parser": "qwen3"}, {}, True),
        ({"reasoning_parser": "mistral"}, {"response_format": {"type": "json_object"}}, True),
        ({}, tools | {"tool_choice": "required"}, True),
    ):
        prompts = Prompts(model, **parsers)
        body = ChatCompletionRequest(**chat, **more)
        params = sampling_params(body)
        reading = prompts.reading(body, params, prompts.chat(body, params))
        assert prompts.with_marks(params, reading).skip_special_tokens == skips, (parsers, more)


@pytest.mark.parametrize(
    "template",
    [
        *("{{ nothing", "{{" + 5000 * "(" + "1" + 5000 * ")" + "}}", "{{ 'a' * 10 ** 15 }}", "{{ 1 / 0 }}"),
        *(30 * "{% for x in [1] %}" + 30 * "{% endfor %}", 3000 * "{% if 1 %}" + 3000 * "{% endif %}"),
        *("{{ ''.__class__.mro() }}", "{% include 'x' %}", "{{ messages | nothing }}", "{{ range(10 ** 9) | list }}"),
    ],
    ids=lambda template: template[:24].encode("ascii", "replace"),
)  # fmt: skip
def test_a_requests_template_that_fails_is_refused(template):
    model = SimpleNamespace(
        tokenizer=Tokenizer(byte_tokenizer()), model=SimpleNamespace(vocab_size=300), max_model_len=900
    )
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], chat_template=template)
    with pytest.raises(ApiError) as error:
        Prompts(model, trust_request_chat_template=True).chat(body)
    assert error.value.status == 400 and "\n" not in str(error.value)
    with pytest.raises(ApiError, match="--trust-request-chat-template"):
        Prompts(model).chat(body)


@pytest.mark.parametrize(("knows", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_where_a_template_does_not_know_one(knows, role):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}" + knows
    model = SimpleNamespace(
        tokenizer=Tokenizer(byte_tokenizer(), chat_template=template),
        model=SimpleNamespace(vocab_size=300),
        max_model_len=256,
    )
    said = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    body = ChatCompletionRequest(messages=said)
    assert Prompts(model).chat(body).text == f"{role}:a user:b "


def test_references_of_a_tools_schema_hold_in_the_schema_of_calls():
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "x": {"$ref": "#/$defs/X"}},
        "$defs": {"X": {"type": "integer"}},
    }
    value = {"$ref": "#/x"}
    node["properties"] |= {"value": {"enum": [value], "default": value}, "const": {"$ref": "#/$defs/X"}}
    tools = [Tool(function={"name": name, "parameters": node}) for name in ("a", "b")]
    for i, call in enumerate(call_schema(tools)["anyOf"]):
        place, arguments = f"#/anyOf/{i}/properties/arguments", call["properties"]["arguments"]
        assert arguments["properties"]["next"]["anyOf"][0] == {"$ref": place}
        assert arguments["properties"]["x"] == {"$ref": f"{place}/$defs/X"}
        assert arguments["properties"]["const"] == arguments["properties"]["x"]
        assert arguments["properties"]["value"] == {"enum": [value], "default": value}
        assert call["properties"]["name"] == {"const": "ab"[i]}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"structured_outputs": {"regex": "a"}, "guided_choice": ["b"]},
        {"guided_regex": "a", "guided_choice": ["b"]},
    ],
    ids=lambda fields: " and ".join(fields),
)
def test_the_form_of_an_answer_is_said_once(fields):
    body = CompletionRequest(prompt="x", **fields)
    with pytest.raises(ApiError, match=" and ".join(fields) + " are two ways to say it: give one") as caught:
        sampling_params(body)
    assert caught.value.param == next(iter(fields))
    for name, value in fields.items():
        assert sampling_params(CompletionRequest(prompt="x", **{name: value})).structured_outputs is not None


def test_defaults_of_completions_and_chats():
    assert sampling_params(CompletionRequest(prompt="x")) == SamplingParams()
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert sampling_params(ChatCompletionRequest(**chat)) == SamplingParams(max_tokens=None)
    both = sampling_params(ChatCompletionRequest(**chat, max_tokens=5, max_completion_tokens=7))
    assert both.max_tokens == 7
    assert sampling_params(ChatCompletionRequest(**chat, logprobs=True)).logprobs == 0


@pytest.mark.parametrize("name", NOT_YET)
def test_a_field_that_is_not_supported_is_one_of_the_api_and_refused(name):
    odd = {"functions": [{}]}
    odd |= {"suffix": "b", "function_call": {"name": "f"}}
    kinds = [kind for kind in (CompletionRequest, ChatCompletionRequest) if name in kind.model_fields]
    assert kinds
    for kind in kinds:
        base = (
            {"prompt": "x"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
        )
        for harmless in NOT_YET[name]:
            sampling_params(kind(**base, **{name: harmless}))
        with pytest.raises(ApiError, match=f"{name} is not supported") as error:
            sampling_params(kind(**base, **{name: odd.get(name, 2)}))
        assert error.value.param == name and error.value.status == 400


def test_what_is_to_be_compiled():
    buckets = Buckets(batch=(1, 2), prompt=(16, 24, 32), context=(16, 32))
    found = shapes(buckets, max_model_len=32, max_chunk=20)
    decodes = [StepSizes("decode", b, 1, c) for b in (1, 2) for c in (16, 32)]
    assert found[:4] == decodes and found[4:6] == [StepSizes("prefill", 1, n, 0) for n in (16, 24)]
    # 17 tokens after 17 are more than 32
    assert found[6:] == [StepSizes("chunk", 1, *pair) for pair in ((16, 16), (16, 32), (24, 16))]
    assert len(shapes(buckets, max_model_len=32, max_chunk=None, chunks=False)) == 4 + 3


def test_what_is_to_be_compiled_for_scored_prompts():
    buckets = Buckets(batch=(1,), prompt=(16, 24, 32), context=(16, 32, 64))
    plain = shapes(buckets, max_model_len=60, max_chunk=20)
    found = shapes(buckets, max_model_len=60, max_chunk=20, scored=True)
    assert found[: len(plain)] == plain
    # Chunks of 20, after 20 and after 40 tokens.
    kinds = [("prefill", 0), ("chunk", 32), ("chunk", 64)]
    assert found[len(plain) :] == [StepSizes(k, 1, n, c, of_all=True) for k, c in kinds for n in (16, 24)]
    found = shapes(buckets, max_model_len=30, max_chunk=None, scored=True)
    assert [s for s in found if s.of_all] == [
        StepSizes("prefill", 1, n, 0, of_all=True) for n in (16, 24, 32)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(more, marks=pytest.mark.slow) for more in ({"split": False}, {"kv_dtype": "int8"}))],
    ids=str,
)
def test_after_warming_up_nothing_is_compiled(options):
    config = ModelConfig.from_hf(MODELS["llama"])
    llm = LLM(
        InMemoryModel(config, random_params(config, seed=1), LetterTokenizer(), eos_token_ids=(2,)), max_num_seqs=2,
        max_model_len=40,
        max_num_batched_tokens=16, **options,
    )  # fmt: skip
    todo = shapes(llm.buckets, max_model_len=40, max_chunk=16, scored=True)
    done = []
    warm_up(llm.engine, todo, done.append, lambda: False)
    assert done == [*range(1, len(todo) + 1)]
    n = llm.stats()["n_compilations"]
    assert n > len(todo) // 2 and llm.stats()["n_steps"] == 0
    tokens = [[1, 2, 3], [*range(1, 31)], [5] * 18]
    ways = [{"temperature": 0}, {"temperature": 0.7, "seed": 1}, {"temperature": 0.7, "seed": 2, "top_k": 5}]
    kinds = [{}, {"n": 2}, {"best_of": 2, "logprobs": 20}, {"min_tokens": 3, "logprobs": 3}]
    kinds += [{"repetition_penalty": 1.3, "logit_bias": {3: 1.0}}]
    kinds += [{"presence_penalty": 1.0, "bad_words": ["ab", "c"], "logprobs": 0}]
    kinds += [{"allowed_token_ids": [*range(9)]}]
    asked = [
        way | kind
        for way in ways
        for kind in kinds
        if way["temperature"] or kind.keys().isdisjoint({"n", "best_of"})
    ]
    asked += [{"temperature": 0, "prompt_logprobs": n} for n in (0, 5, 20)]
    asked += [{"temperature": 0, "use_beam_search": True, "beam_width": n, "logprobs": 2} for n in (1, 2)]
    for fields in asked:
        for _ in range(2):  # the second time from what is cached
            llm.generate(
                [{"prompt_token_ids": row} for row in tokens], SamplingParams(max_tokens=8, **fields)
            )
    assert llm.stats()["n_compilations"] == n, llm.stats()["compilations"]
    llm.engine.check_integrity()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_moves_to_the_host_are_compiled_before(workers, caplog):
    config = ModelConfig.from_hf(MODELS["llama"] | {"max_position_embeddings": 128})
    llm = LLM(
        InMemoryModel(config, random_params(config, seed=1)), max_num_seqs=4, max_model_len=80, kv_slots=100,
        host_kv_slots=150, attention_workers=workers,
    )  # fmt: skip
    warm_up(llm.engine, shapes(llm.buckets, max_model_len=80, max_chunk=None), lambda n: None, lambda: False)
    assert llm.engine.kv_stats()["host_kv_slots_used"] == 0
    with jax.log_compiles():
        prompts = [{"prompt_token_ids": [*range(1, n)]} for n in (8, 17, 33, 40, 9)]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert llm.engine.kv_stats()["n_moved_out_tokens"] > 64
    compiled = [r.message for r in caplog.records if "Finished XLA compilation" in r.message]
    assert not [m for m in compiled if "_rows_at" in m or "_with_rows" in m]
    llm.engine.check_integrity()


@pytest.mark.parametrize("model", ["llama", pytest.param("mistral-window", marks=pytest.mark.slow)])
@pytest.mark.parametrize("partition", [pytest.param("requests", marks=pytest.mark.slow), "tokens"])
def test_warming_up_workers_that_share_requests_or_tokens(model, partition):
    """Steps of full rows need no program more; others may."""
    config = ModelConfig.from_hf(MODELS[model])
    params = random_params(config, seed=1)
    options = {"max_num_seqs": 2, "max_model_len": 40, "kv_slots": 60}
    llm = LLM(InMemoryModel(config, params), attention_workers=2, partition=partition, **options)
    todo = shapes(llm.buckets, max_model_len=40, max_chunk=None)
    for shape in todo:  # rows of padding alone are a step, too
        run = llm.executor.decode if shape.kind == "decode" else llm.executor.prefill
        assert np.isfinite(run(_empty_batch(shape, llm.executor.n_slots, 40))).all()
    warm_up(llm.engine, todo, lambda n: None, lambda: False)
    n = llm.stats()["n_compilations"]
    warm_up(llm.engine, todo, lambda n: None, lambda: False)
    assert llm.stats()["n_compilations"] == n
    prompts = [{"prompt_token_ids": row} for row in ([1, 2, 3], [*range(1, 31)])]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    expected = LLM(InMemoryModel(config, params), **options).generate(prompts, greedy)
    assert [o.token_ids for o in llm.generate(prompts, greedy)] == [o.token_ids for o in expected]
    llm.engine.check_integrity()


@pytest.mark.parametrize(("split", "mixed"), [(True, False), (False, False), (False, True)])
def test_programs_are_compiled_ahead_by_other_threads(split, mixed, caplog, monkeypatch):
    """Each once, and what is run finds what was compiled for its sizes. Steps that are run slice by slice
    compile slices."""
    monkeypatch.setattr(kept_programs, "folder", lambda: None)  # nothing is there of earlier processes
    jax.clear_caches()  # nor of earlier tests
    config = ModelConfig.from_hf(MODELS["llama"])
    llm = LLM(
        InMemoryModel(config, random_params(config, seed=1)), split=split, mixed_steps=mixed, max_num_seqs=2,
        max_model_len=24, max_num_batched_tokens=16,
    )  # fmt: skip
    todo = shapes(llm.buckets, max_model_len=24, max_chunk=16, mixed=mixed, scored=True)
    jax.config.update("jax_log_compiles", True)  # `jax.log_compiles` is this thread's alone
    try:
        warm_up(llm.engine, todo, lambda n: None, lambda: False)
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [r for r in caplog.records if "Finished XLA compilation" in r.message]
    steps = [
        r for r in compiled if any(f"_traced_{kind}" in r.message for kind in ("decode", "prefill", "mixed"))
    ]
    drawing = [r for r in compiled if any(f"jit({name})" in r.message for name in SAMPLER)]
    if not split:
        assert len(steps) == len(todo) == llm.executor.programs.total
    n_reports = len({s.n_tokens for s in todo if s.of_all}) * len(
        LOGPROBS_WIDTHS
    )  # of prompts' tokens, once run
    assert len(drawing) >= llm.engine.sampler.n_programs > 10 * len(llm.buckets.batch)
    assert len([r for r in drawing if not r.threadName.startswith("compile")]) == n_reports
    assert all(r.threadName.startswith("compile") for r in steps)
    llm.engine.check_integrity()


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"split": False, "mixed_steps": True}, marks=pytest.mark.slow)], ids=str
)
def test_programs_are_compiled_behind_requests(options):
    """A few serve every request, with the same tokens; the others come while requests run, those that were
    wanted first, and then nothing is compiled for a request any more."""
    config = ModelConfig.from_hf(MODELS["llama"] | {"max_position_embeddings": 256})
    limits = {"max_num_seqs": 4, "max_model_len": 200, "max_num_batched_tokens": 64}
    params = random_params(config, seed=1)
    llm = LLM(InMemoryModel(config, params), **limits, **options)
    sizes = {"max_model_len": 200, "max_chunk": 64, "mixed": llm.engine.mixed_steps}
    todo = shapes(llm.buckets, **sizes)
    first = first_of(todo)
    warm_up(llm.engine, first, lambda n: None, lambda: False, all_of_drawing=False)
    prompts = [{"prompt_token_ids": [t % 90 for t in range(1, n)]} for n in (3, 100, 40, 33, 7)]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [o.token_ids for o in LLM(InMemoryModel(config, params), **limits).generate(prompts, greedy)]
    n = llm.stats()["n_compilations"]
    assert [o.token_ids for o in llm.generate(prompts, greedy)] == expected
    assert llm.stats()["n_compilations"] == n, "the first programs hold every step"
    assert set(llm.engine.sizes.wanted) <= {*todo} - {*first}

    rest, done, calls = [s for s in todo if s not in first], [], queue.SimpleQueue()
    behind = Behind(llm.engine, rest, done.append, calls.put)
    behind.start()
    seen = [len(llm.engine.sizes.shapes)]
    while len(done) < len(rest):
        calls.get(timeout=120)()  # as the engine's thread, between steps
        seen.append(len(llm.engine.sizes.shapes))
        assert [o.token_ids for o in llm.generate(prompts[:2], greedy)] == expected[:2]
        while calls.empty() and len(done) < len(rest):
            time.sleep(0.01)
    assert behind.join(60) and done == [*range(1, len(rest) + 1)]
    assert seen == sorted(seen) and {*llm.engine.sizes.shapes} == {*todo, *first}
    n = llm.stats()["n_compilations"]
    assert [o.token_ids for o in llm.generate(prompts, greedy)] == expected
    llm.generate(prompts, SamplingParams(temperature=0.7, top_p=0.9, logprobs=3, repetition_penalty=1.2))
    assert llm.stats()["n_compilations"] == n, llm.stats()["compilations"]
    llm.engine.check_integrity()


@pytest.mark.parametrize("keeps", [{}, {"kept_kv_slots": 64}], ids=str)
def test_what_follows_kept_kv_has_programs_before_a_fault(keeps):
    """Without prefix caching and chunks only kept KV is followed by the rest of a prompt."""
    config = ModelConfig.from_hf(MODELS["llama"] | {"max_position_embeddings": 8192})
    limits = {"max_num_seqs": 2, "max_model_len": 8192, "max_num_batched_tokens": None}
    model = InMemoryModel(config, random_params(config, seed=1))
    llm = LLM(model, prefix_caching=False, **limits, **keeps)
    todo = ToCompile.of(llm, Settings()).all
    most = max(shape.context for shape in todo if shape.kind != "decode")
    assert (most == max(llm.buckets.context)) == bool(keeps), todo


def test_what_loads_at_its_first_run_is_run_while_nothing_is_compiled(monkeypatch):
    """As on GPUs, where cuDNN's attention is loaded so; on padding alone, before a request's step is padded
    to it."""
    monkeypatch.setattr("jaxlamina.engine.warm_up._loads_at_first_run", lambda device: True)
    config = ModelConfig.from_hf(MODELS["llama"] | {"max_position_embeddings": 256})
    limits = {"max_num_seqs": 2, "max_model_len": 200, "max_num_batched_tokens": 64}
    llm = LLM(InMemoryModel(config, random_params(config, seed=1)), split=False, **limits)
    executor, compiling = llm.executor, set()
    run_step, compile_later = executor.run, executor.compile_later
    ran: list[tuple[tuple[int, int], bool, bool]] = []

    def recorded(step):
        for batch in (part.batch for part in step.prompts):
            sizes = batch.tokens.shape[1], batch.slot_table.shape[1]
            known = any((s.n_tokens, s.context) == sizes and s.has_prompt for s in llm.engine.sizes.shapes)
            ran.append((sizes, bool(compiling), known))
        return run_step(step)

    def compiled_later(step, **options):
        compiles = compile_later(step, **options)

        def run():
            compiling.add(compiles)
            try:
                return compiles()
            finally:
                compiling.remove(compiles)

        return run

    monkeypatch.setattr(executor, "run", recorded)
    monkeypatch.setattr(executor, "compile_later", compiled_later)
    todo = shapes(llm.buckets, max_model_len=200, max_chunk=64)
    first = first_of(todo)
    warm_up(llm.engine, first, lambda n: None, lambda: False, all_of_drawing=False)
    rest, done, calls = [s for s in todo if s not in first], [], queue.SimpleQueue()
    behind = Behind(llm.engine, rest, done.append, calls.put, n_at_once=3)
    behind.start()
    while len(done) < len(rest):
        with contextlib.suppress(queue.Empty):
            calls.get(timeout=0.1)()
    assert behind.join(60)
    prompts = {(s.n_tokens, s.context) for s in (*first, *rest) if s.has_prompt}
    assert len(prompts) > len([s for s in first if s.has_prompt]) >= 1
    assert {sizes for sizes, _, _ in ran} == prompts
    assert not any(meanwhile or known for _, meanwhile, known in ran), ran
    llm.engine.check_integrity()


def to_compile():
    """A model of two layers, and the sizes of all its steps."""
    config = ModelConfig.from_hf(MODELS["llama"])
    llm = LLM(InMemoryModel(config, random_params(config, seed=1)), max_num_seqs=2, max_model_len=40)
    return llm, shapes(llm.buckets, max_model_len=40, max_chunk=None)


def test_compiling_behind_goes_on_with_another_engine_thread():
    """As of a spare that takes over: the call that was not made yet goes along."""
    llm, todo = to_compile()
    before, after, done_before, done = queue.SimpleQueue(), queue.SimpleQueue(), [], []
    behind = Behind(llm.engine, todo, done_before.append, before.put)
    behind.start()
    while not done_before:
        before.get(timeout=120)()
    while before.empty():
        time.sleep(0.01)
    behind.go_on_with(done.append, after.put)
    while behind.n_done < behind.n_all:
        after.get(timeout=120)()
        while after.empty() and behind.n_done < behind.n_all:
            time.sleep(0.01)
    assert behind.join(60) and before.qsize() == 1
    assert done_before + done == [*range(1, len(todo) + 1)] and len(done_before) < len(todo)
    assert {*llm.engine.sizes.shapes} == {*todo}


def test_a_spare_compiles_from_the_other_end():
    """Whoever serves compiles the same programs at the same time: neither does what the other has on disk by then."""
    llm, todo = to_compile()
    orders = []
    for nobody_waits in (False, True):
        behind = Behind(llm.engine, todo[1:], print, print, 2, again=todo[:1], nobody_waits=nobody_waits)
        orders.append([shape for _ in todo for shape in behind._next()])
    assert len(todo) > 3 and orders == [todo, [todo[0], *todo[:0:-1]]]


@pytest.mark.parametrize("n_before", [0, 3])
def test_nothing_is_compiled_behind_while_it_rests(monkeypatch, n_before):
    """Not even the next of the many small programs that draw tokens."""
    llm, todo = to_compile()
    warm_up(llm.engine, todo[:1], lambda n: None, lambda: False, all_of_drawing=False)
    behind = Behind(llm.engine, todo[1:], lambda n: None, lambda call: call())
    begun = []

    def counted(done, *args, **how):
        begun.append(0)
        if len(begun) == n_before:
            behind.rest(3600)
        return done(*args, **how)

    for of, what in ((kept_programs, "later"), (llm.executor, "compile_later")):
        monkeypatch.setattr(of, what, partial(counted, getattr(of, what)))
    if not n_before:
        behind.rest(3600)
    behind.start()
    wait_until(lambda: len(begun) >= n_before)
    assert not behind.join(1) and len(begun) == n_before
    behind.stop()
    assert behind.join(120) and len(begun) == n_before


def test_a_step_in_pieces_rests_before_it_is_lowered_and_before_it_is_compiled():
    llm, [shape, *_] = to_compile()
    parts, pieces = [], llm.executor._pieces

    def compile_it():
        wait_between_parts(lambda: parts.append((len(pieces._jitted), len(pieces._ahead))))
        _later(llm.engine, shape, behind=True)()

    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()
    assert parts == [(0, 0), (1, 0)] and len(pieces._ahead) == 1


def test_compiling_behind_ends_when_told():
    llm, todo = to_compile()
    behind = Behind(llm.engine, todo, lambda n: None, lambda call: None)  # no step comes
    behind.rest(3600)
    behind.start()
    assert not behind.join(0.1)
    behind.stop()
    assert behind.join(120) and not llm.engine.sizes.shapes


def test_what_fails_while_compiling_ahead_is_raised(monkeypatch):
    config = ModelConfig.from_hf(MODELS["llama"])
    model = InMemoryModel(config, random_params(config, seed=1))
    llm = LLM(model, split=False, max_num_seqs=2, max_model_len=24)
    todo = shapes(llm.buckets, max_model_len=24, max_chunk=None)
    compile_later = llm.executor.compile_later

    def failing(step, **how):
        compiles = compile_later(step, **how)

        def run():
            if step.decodes is not None and len(step.decodes.tokens) == 2:
                raise RuntimeError("no room")
            return compiles()

        return run

    monkeypatch.setattr(llm.executor, "compile_later", failing)
    done = []
    with pytest.raises(RuntimeError, match="no room"):
        warm_up(llm.engine, todo, done.append, lambda: False)
    assert done == [*range(1, 1 + [shape.batch for shape in todo].index(2))]
    assert llm.stats()["n_steps"] == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]


def test_warming_up_stops_when_told():
    config = ModelConfig.from_hf(MODELS["llama"])
    llm = LLM(InMemoryModel(config, random_params(config, seed=1)), max_num_seqs=1, max_model_len=16)
    done = []
    warm_up(
        llm.engine, shapes(llm.buckets, max_model_len=16, max_chunk=None), done.append, lambda: len(done) == 2
    )
    assert done == [1, 2]
