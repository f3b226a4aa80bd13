"""Calls and thoughts in what a model writes: each form, what is none, and that the pieces a text comes in
make no difference."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.engine.outputs import CompletionOutput, RequestOutput
from jaxlamina.server import reasoning
from jaxlamina.server.async_engine import Prompt
from jaxlamina.server.chat import ChatForm
from jaxlamina.server.parameters import sampling_params
from jaxlamina.server.prompts import Prompts
from jaxlamina.server.protocol import ChatCompletionRequest
from jaxlamina.server.reading import Reading
from jaxlamina.server.tool_parsers import PARSERS, ForcedCallParser, apart, parser_of
from jaxlamina.text.tokenizer import Tokenizer

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": "}{\\""}}'
LIST = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]'
NAMED = '[TOOL_CALLS]f[ARGS]{"a": {"b": "]}"}}'
PYTHON = '[f(a="x\\"]", b=[1, {"c": True}]), g(d=-1.5, e=null)]'

# (form, text, what is shown, (name, arguments) of each call)
TEXTS = [
    (
        "hermes",
        f"Let me see.{HERMES} and {HERMES}\n",
        "Let me see. and \n",
        [("f", {"a": "é"}), ("f", {"a": "é"})],
    ),
    ("hermes", f"<tool_call>no</tool_call>{HERMES}!", "<tool_call>no</tool_call>!", [("f", {"a": "é"})]),
    *(("hermes", text, text, []) for text in ("<tool_call>{", "<tool_call>[1]</tool_call>x", "<tool_")),
    *(("hermes", f"a{HERMES}b{HERMES[:-n]}", "ab", [("f", {"a": "é"})] * 2) for n in (1, 11, 12, 13)),
    ("hermes", HERMES[:-14], HERMES[:-14], []),
    ("hermes", '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    ("llama3_json", f"\n{LLAMA}", "", [("f", {"a": '}{"'})]),
    ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}\n", "", [("f", {"a": '}{"'})] * 2),
    ("llama3_json", f"{LLAMA} and more", " and more", [("f", {"a": '}{"'})]),
    ("llama3_json", '{"name": "f", "arguments": {}}', "", [("f", {})]),
    *(
        ("llama3_json", text, text, [])
        for text in (f"It is {LLAMA}", '{"name": "Ada", "age": 36}', "<|python_tag|>print(1)", LLAMA[:-1])
    ),
    ("mistral", f"Yes. {LIST}!", "Yes. !", [("f", {"a": [1]}), ("g", {})]),
    ("mistral", f"{NAMED}{NAMED} x", " x", [("f", {"a": {"b": "]}"}})] * 2),
    ("mistral", '[TOOL_CALLS]f-1[CALL_ID]abc123xyz[ARGS]{"a": 1}', "", [("f-1", {"a": 1})]),
    *(
        ("mistral", text, text, [])
        for text in ("[TOOL_CALLS]", "[TOOL_CALLS] no!", '[TOOL_CALLS]a b{"c": 1}', "[TOOL_CALLS][1]", "[TOO")
    ),
    ("mistral", "[TOOL_CALLS]f{x}", "[TOOL_CALLS]f{x}", []),
    ("pythonic", f" {PYTHON}\n", "", [("f", {"a": 'x"]', "b": [1, {"c": True}]}), ("g", {"d": -1.5, "e": None})]),
    ("pythonic", "[a.b()]", "", [("a.b", {})]),
    *(
        ("pythonic", text, text, [])
        for text in (f"{PYTHON} and", "[f(1)]", "[f(x=g())]", "[f(**x)]", "[1, 2]", "hello", "[f(x={1: 2})]", "[f(")
    ),
    *(("pythonic", text, text, []) for text in ("[f(x=" + 5000 * "-" + "1)]", "[f(x=" + 300 * "[" + 300 * "]" + ")]")),
]  # fmt: skip


HUGE = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": [-1e999]}}</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"x": 1e999}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1e999}}]',
    "pythonic": "[f(x=1e999)]",
}
TEXTS += [(form, text, text, []) for form, text in [*HUGE.items(), ("mistral", '[TOOL_CALLS]f{"x": 1e999}')]]


def read(parser, *pieces):
    """All text that is shown, and the calls."""
    return apart([*(part for piece in pieces for part in parser.add(piece)), *parser.finish()])


def found(calls):
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), TEXTS, ids=lambda x: str(x)[:40])
def test_calls_are_taken_out_of_a_text(form, text, shown, calls):
    text_left, got = read(PARSERS[form](), text)
    assert (text_left, found(got)) == (shown, calls)


def test_a_call_that_is_forced_is_all_of_a_text():
    assert found(read(ForcedCallParser(), '{"name": "f", "arguments": {"a": 1}}')[1]) == [("f", {"a": 1})]
    for text in ('{"name": "f", "argu', "[]", "NaN", "[" * 100_000):
        assert read(ForcedCallParser(), text) == (text, [])


def in_pieces(text, cuts):
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)] or [text]


pieces = st.sampled_from(
    [
        *(HERMES, LLAMA, LIST, NAMED, PYTHON, "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
        *("<", "[", "{", "}", '"', "x", " ", ";", "f(", ")", "{}", "é"),
    ]
)  # fmt: skip
CUTS = st.lists(st.integers(0, 200), max_size=6)


@pytest.mark.parametrize("form", PARSERS)
@given(text=st.lists(pieces, max_size=6).map("".join), cuts=CUTS)
def test_how_a_text_is_cut_makes_no_difference(form, text, cuts):
    assert read(PARSERS[form](), *in_pieces(text, cuts)) == read(PARSERS[form](), text)


@pytest.mark.parametrize(("reason", "said"), [("stop", "tool_calls"), ("length", "length")])
def test_an_answer_that_was_cut_off_says_so_after_a_call(reason, said):
    completion = CompletionOutput(0, f"{HERMES} and", (1,), None, None, reason)
    output = RequestOutput("r", None, (1,), completion.text, (1,), reason, outputs=(completion,))
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}])
    form = ChatForm(body, "m", Prompt([1]), Reading("auto", "hermes"), lambda token: b"")
    [choice] = form.whole([output]).choices
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == said
    chunks = [*form.piece(0, completion.text, None, None), *form.end(0, completion)]
    assert chunks[-1].choices[0].finish_reason == said


def test_what_cannot_become_a_call_is_shown_at_once():
    for form, text in (("llama3_json", "H"), ("pythonic", "[1"), ("mistral", "x"), ("hermes", "x")):
        assert PARSERS[form]().add(text) == [text]
    parser = PARSERS["mistral"]()
    assert parser.add("a[TOOL") == ["a"] and parser.add("BOX]") == ["[TOOLBOX]"]
    parser = PARSERS["llama3_json"]()
    assert len(parser.add(f"{LLAMA};")) == 1  # each when it is complete


def test_a_template_says_how_it_wants_calls():
    assert parser_of("… return a json object within <tool_call></tool_call> …") == "hermes"
    assert parser_of("<tool_call>\n<function=name>") is None  # Qwen3-Coder's
    assert parser_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    assert parser_of(llama) == "llama3_json"
    assert parser_of("[func_name1(params_name1=params_value1)]") == "pythonic"
    assert parser_of("{{ tools | tojson }}") is None


# --- what is thought ---


class GoesOn(str):
    """A message that the text goes on with."""


@pytest.mark.parametrize(
    ("name", "prompt", "text", "thought", "answered"),
    [
        ("qwen3", "assistant\n", "<think>\nhm\n</think>\n\n4", "\nhm\n", "\n\n4"),
        ("qwen3", "assistant\n", "4 <think>", "", "4 <think>"),
        ("qwen3", "assistant\n<think>\n", "hm</think>4", "hm", "4"),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "4", "", "4"),
        ("deepseek_r1", "assistant", "hm</think>4", "hm", "4"),
        ("deepseek_r1", "assistant", "<think>hm</thin", "hm</thin", ""),
        ("deepseek_r1", "<think></think>", "4", "", "4"),
        ("glm45", "", "\n<think>a</think>b</think>", "a", "b</think>"),
        ("mistral", "", "[THINK]a[/THINK]b", "a", "b"),
        ("deepseek_r1", GoesOn("The capital is"), " Paris.", "", " Paris."),
        ("deepseek_r1", GoesOn("<think>easy</think>The capital is"), " Paris.", "", " Paris."),
        ("qwen3", GoesOn("<think>\nso"), " on</think>4", " on", "4"),
        ("mistral", GoesOn("[THINK]so"), " on[/THINK]4", " on", "4"),
        ("glm45", GoesOn("so"), " on", "", " on"),
    ],
)
def test_what_is_thought_is_told_from_what_is_answered(name, prompt, text, thought, answered):
    goes_on = isinstance(prompt, GoesOn)
    reader = Reading("none", None, reasoning.PARSERS[name], prompt, goes_on=goes_on).reader()
    first, rest = reader.add(text), reader.finish()
    assert (first.thought + rest.thought, first.answered + rest.answered) == (thought, answered)


@pytest.mark.parametrize("more", [{}, {"truncate_prompt_tokens": 50}, {"truncate_prompt_tokens": 4}])
@pytest.mark.parametrize("goes_on", [False, True])
def test_where_a_chat_ends_is_known_also_if_its_start_is_cut_off(more, goes_on):
    words = {f"w{i}": i for i in range(8)} | {"<think>": 8}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    ends = "{% if add_generation_prompt %}<think>{% endif %}"
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}" + ends
    llm = SimpleNamespace(
        tokenizer=Tokenizer(inner, chat_template=template),
        model=SimpleNamespace(vocab_size=9),
        max_model_len=100,
    )
    prompts = Prompts(llm, reasoning_parser="qwen3")
    messages = [{"role": "user", "content": "w1 w2 w3 w4 w5 w6"}]
    if goes_on:
        messages.append({"role": "assistant", "content": "<think> w1 w2 w3"})
    body = ChatCompletionRequest(messages=messages, max_tokens=5, continue_final_message=goes_on, **more)
    params = sampling_params(body)
    read = prompts.reading(body, params, prompts.chat(body, params)).reader().whole("hm</think>4")
    assert (read.thought, read.answered) == ("hm", "4")


thoughts = st.sampled_from(["<think>", "</think>", "<", "</", "think>", "x", "\n", "[THINK]", HERMES])


@pytest.mark.parametrize("name", reasoning.PARSERS)
@given(
    text=st.lists(thoughts, max_size=6).map("".join),
    cuts=CUTS,
    prompt=st.sampled_from(["", "<think>\n", "<think></think>"]),
)
def test_how_a_thought_is_cut_makes_no_difference(name, text, cuts, prompt):
    reading = Reading("auto", "hermes", reasoning.PARSERS[name], prompt)
    reader = reading.reader()
    parts = [*map(reader.add, in_pieces(text, cuts)), reader.finish()]
    whole = reading.reader().whole(text)
    assert "".join(part.thought for part in parts) == whole.thought
    assert "".join(part.answered for part in parts) == whole.answered
    assert [call for part in parts for call in part.calls] == [*whole.calls]
    assert reader.n_calls == len(whole.calls)
