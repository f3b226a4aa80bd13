"""A response by itself: its events belong together, however the text comes, and say what the whole answer
says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from test_tool_parsers import CUTS, HERMES, LIST, LLAMA, NAMED, PYTHON, in_pieces

from jaxlamina.engine.outputs import CompletionOutput, RequestOutput, TokenEvent
from jaxlamina.server import reasoning
from jaxlamina.server.errors import ApiError
from jaxlamina.server.forms import dump
from jaxlamina.server.reading import Reading
from jaxlamina.server.responses import ResponsesForm, ResponsesRequest, as_chat
from jaxlamina.server.tool_parsers import PARSERS

READING = Reading("auto", "hermes", reasoning.PARSERS["qwen3"])
texts = st.lists(
    st.sampled_from(["<think>", "</think>", "hm ", "\n", "yes", HERMES, "<tool_call>"]), max_size=7
)


def output_of(text, reason):
    completion = CompletionOutput(0, text, (1, 2, 3), None, None, reason)
    return RequestOutput("r", None, (1, 2), text, (1, 2, 3), reason, outputs=(completion,))


def form(reading=READING):
    return ResponsesForm(ResponsesRequest(input="x"), "m", reading, lambda text: len(text.split()))


def said(output):
    """What an answer's items say, each with its kind."""
    return [
        (item["type"], item.get("arguments") or item["content"][0]["text"], item["status"]) for item in output
    ]


@given(text=texts.map("".join), cuts=CUTS, reason=st.sampled_from(["stop", "length"]))
def test_events_say_what_the_whole_answer_says(text, cuts, reason):
    output = output_of(text, reason)
    whole = dump(form().whole([output]))
    Response.model_validate(whole)  # the client's own type
    streamed = form()
    pieces = in_pieces(text, cuts)
    events = [*streamed.opening()]
    for i, piece in enumerate(pieces):
        last = output if i == len(pieces) - 1 else None
        events += streamed.chunks(0, TokenEvent("r", 1, piece, last))
    events = [event.model_dump() for event in (*events, *streamed.closing())]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    final = events[-1]["response"]
    if not text.strip():
        assert [item["content"][0]["text"] for item in final["output"]] == [text]
    assert said(final["output"]) == said(whole["output"]) and final["usage"] == whole["usage"]
    assert final["status"] == whole["status"] == {"stop": "completed", "length": "incomplete"}[reason]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == final["output"]
    for index, item in enumerate(items):
        mine = [event for event in events if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added" and mine[0]["item"]["id"] == item["id"]
        assert mine[-1]["type"] == "response.output_item.done"
        assert all(event["item_id"] == item["id"] for event in mine[1:-1])
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert deltas == (
            item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        )


@pytest.mark.parametrize("name", PARSERS)
@given(
    text=st.lists(
        st.sampled_from(
            ["<think>", "</think>", "One ", " ", "two", "; ", HERMES, LLAMA, LIST, NAMED, PYTHON]
        ),
        max_size=7,
    ).map("".join),
    cuts=CUTS,
)
def test_how_a_text_is_cut_makes_no_difference_to_the_items(name, text, cuts):
    reading = Reading("auto", name, reasoning.PARSERS["qwen3"])
    output = output_of(text, "stop")
    streamed = form(reading)
    for piece in in_pieces(text, cuts):
        for _ in streamed.piece(0, piece, None, None):
            pass
    for _ in streamed.end(0, output.outputs[0]):
        pass
    found = streamed.usage_chunk(streamed.usage([output])).model_dump()["response"]["output"]
    assert said(found) == said(dump(form(reading).whole([output]))["output"])


def test_text_and_calls_keep_their_order():
    text = f"One {HERMES} two {HERMES}{HERMES}\nthree"
    found = dump(form().whole([output_of(text, "stop")]))["output"]
    call = ("function_call", '{"a": "\\u00e9"}', "completed")
    message = [("message", words, "completed") for words in ("One ", " two ", "\nthree")]
    assert said(found) == [message[0], call, message[1], call, call, message[2]]


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("<think>\n\n</think>\n\nHello", [("message", "\n\nHello")]),
        ("\n<think>\n hm\n</think> \n", [("reasoning", "\n hm\n")]),
        ("<think> a</think>\n b", [("reasoning", " a"), ("message", "\n b")]),
    ],
)
def test_blanks_stay_where_they_were_written(text, items):
    """As in a chat's `reasoning_content` and `content`."""
    read = READING.reader().whole(text)
    assert all(found in (read.thought, read.answered) for _, found in items)
    for pieces in ([text], [*text]):
        found = form()
        done = output_of(text, "stop")
        events = [event for piece in pieces for event in found.piece(0, piece, None, None)]
        events += [*found.end(0, done.outputs[0]), found.usage_chunk(found.usage([done]))]
        output = events[-1].model_dump()["response"]["output"]
        assert [(item["type"], item["content"][0]["text"]) for item in output] == items


def test_a_response_says_whether_calls_may_be_together():
    for asked in ({}, {"parallel_tool_calls": False}):
        body = ResponsesRequest(input="x", **asked)
        found = dump(ResponsesForm(body, "m", READING, len).whole([output_of("yes", "stop")]))
        assert found["parallel_tool_calls"] == asked.get("parallel_tool_calls", True)


def test_an_answer_that_cannot_be_finished_ends_with_an_error():
    [name, data] = form().failure(ApiError(503, "the server is shutting down", code="c")).strip().split("\n")
    assert name == "event: error"
    found = json.loads(data.removeprefix("data: "))
    assert (found["message"], found["code"], found["type"]) == ("the server is shutting down", "c", "error")


def test_a_conversation_becomes_a_chats():
    items = [
        {"role": "developer", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "m"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
    ]
    body = ResponsesRequest(
        input=items,
        instructions="e",
        max_output_tokens=5,
        top_k=3,
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
    )
    chat = as_chat(body)
    roles = [(m.role, m.content) for m in chat.messages]
    assert roles == [
        *(("system", "e"), ("developer", "Be short."), ("user", "a\nb"), ("assistant", "c"), ("tool", "d")),
    ]
    assert chat.messages[3].reasoning_content == "hm"
    assert [call.function.name for call in chat.messages[3].tool_calls] == ["f", "g"]
    assert (chat.max_completion_tokens, chat.top_k, chat.temperature) == (5, 3, None)
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert chat.response_format.json_schema["schema"] == {"type": "object"}
    with pytest.raises(ApiError, match="nothing is stored here"):
        as_chat(ResponsesRequest(input="x", previous_response_id="resp_1"))
