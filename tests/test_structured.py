"""Structured outputs: what is written follows schema, expression or choice; bad ones are refused at
once."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from checkpoint_examples import byte_model, few_layers_folder
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina import LLM, SamplingParams, StructuredOutputs, UserError
from jaxlamina.sampling.structured import Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NUMBER = r"[1-9][0-9]{2}-[0-9]{4}"
CHOICES = ("positive", "negative", "neither", 'neither "one"\n nor the öther')
GRAMMAR = 'start: WORD " is " ("red" | NUMBER) "."\nWORD: /[A-Z][a-z]{1,6}/\nNUMBER: /[1-9][0-9]/'
PROMPT = "My friend Ada is 36 years old and likes red. As JSON:"
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
SEEDED = SamplingParams(temperature=1.5, max_tokens=60, seed=3)
END = 2  # the tokenizer's <|im_end|>


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(
        few_layers_folder(tmp_path_factory.mktemp("few")), max_num_seqs=5, max_model_len=256, kv_slots=700
    )


def follows_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 150
        and 1 <= len(value["tags"]) <= 2
        and set(value["tags"]) <= {"red", "green"}
    )


ASKED = [
    (StructuredOutputs(json=SCHEMA), follows_schema),
    (StructuredOutputs(regex=NUMBER), lambda text: bool(re.fullmatch(NUMBER, text))),
    (
        StructuredOutputs(grammar=GRAMMAR),
        lambda text: bool(re.fullmatch(r"[A-Z][a-z]{1,6} is (red|[1-9][0-9])[.]", text)),
    ),
    (StructuredOutputs(choice=CHOICES), lambda text: text in CHOICES),
]


def test_outputs_follow_what_was_asked_and_end_where_it_is_complete(llm: LLM):
    params = [replace(p, structured_outputs=asked) for asked, _ in ASKED for p in (GREEDY, SEEDED)]
    params += [GREEDY, SEEDED]  # these two are free
    together = llm.generate([PROMPT] * len(params), params)
    for out, follows in zip(together, [f for _, f in ASKED for _ in range(2)], strict=False):
        assert out.finish_reason == "stop" and follows(out.text), out.text
    assert len(llm.tokenizer.encode(together[2].text)) == len(
        together[2].token_ids
    )  # no end token was needed
    llm.engine.async_scheduling = False
    again = llm.generate([PROMPT] * len(params), params)
    llm.engine.async_scheduling = True
    assert [out.token_ids for out in again] == [out.token_ids for out in together]
    # Each is what it is alone, and so are those beside them.
    for i in (1, 5, 7, 9):
        [alone] = llm.generate(PROMPT, params[i])
        assert alone.token_ids == together[i].token_ids


def test_samples_of_one_prompt_each_follow_and_differ(llm: LLM):
    [out] = llm.generate(PROMPT, replace(SEEDED, n=3, structured_outputs=StructuredOutputs(regex=NUMBER)))
    assert len({c.text for c in out.outputs}) == 3
    assert all(re.fullmatch(NUMBER, c.text) and c.finish_reason == "stop" for c in out.outputs)


def test_an_output_cut_by_max_tokens_is_the_beginning_of_one(llm: LLM):
    asked = StructuredOutputs(json=json.dumps(SCHEMA))
    [out] = llm.generate(PROMPT, replace(GREEDY, max_tokens=4, structured_outputs=asked))
    assert out.finish_reason == "length" and out.text.startswith('{"name": "')


def test_penalties_and_biases_choose_among_what_is_allowed(llm: LLM):
    asked = StructuredOutputs(choice=["red", "green"])
    biases = {llm.tokenizer.encode("green")[0]: 100.0, llm.tokenizer.encode("blue")[0]: 100.0}
    params = replace(
        GREEDY, structured_outputs=asked, logit_bias=biases, repetition_penalty=1.2, ignore_eos=True
    )
    [out] = llm.generate(PROMPT, params)
    assert (out.text, out.finish_reason) == ("green", "stop")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "(a"}, r"structured_outputs.regex cannot be followed: .*unclosed group"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex cannot be followed: .*look-around"),
        ({"json": {"type": "banana"}}, "structured_outputs.json cannot be followed: Invalid type: banana"),
        (
            {"json": {"type": "object", "unevaluatedProperties": False}},
            "structured_outputs.json .*Unimplemented",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_when_it_is_queued(llm: LLM, asked: dict, message: str):
    params = SamplingParams(structured_outputs=StructuredOutputs(**asked))
    with pytest.raises(UserError, match=message) as caught:
        llm.engine.add_request([1, 2, 3], params)
    assert "\n" not in str(caught.value) and llm.engine.idle


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "must have one of json, regex, choice and grammar"),
        ({"regex": "a", "choice": ["b"]}, "must have one of json, regex, choice and grammar"),
        ({"grammar": 3}, "structured_outputs.grammar=3 must be a string"),
        ({"json": "{"}, "structured_outputs.json is not JSON"),
        ({"json": "[1]"}, "must be a JSON schema: an object or its text"),
        ({"regex": 3}, "structured_outputs.regex=3 must be a string"),
        ({"choice": []}, "must be a list of strings that are not empty"),
        ({"choice": "yes"}, "must be a list of strings"),
        ({"choice": ["a", ""]}, "must be a list of strings"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(asked: dict, message: str):
    with pytest.raises(UserError, match=message):
        StructuredOutputs(**asked)


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.tokenizer, llm.model.vocab_size, [END])


def accepts(grammars: Grammars, llm: LLM, schema: dict, text: str) -> bool:
    matcher = grammars.matcher(StructuredOutputs(json=schema))
    for token in [*llm.tokenizer.encode(text), END]:
        if not matcher.mask()[token // 32] >> (token % 32) & 1:
            return False
        matcher.accept(token)
    return True


ends = st.integers(-3, 3) | st.sampled_from([-0.5, 0.25, 1.5, 99, -99, 12345, 2**40])


@given(
    low=ends,
    length=st.sampled_from([0.01, 0.25, 0.5, 0.75, 1, 1.5, 2, 30]),
    keys=st.tuples(
        st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])
    ),
    is_mirrored=st.booleans(),
    in_parts=st.booleans(),
)
def test_numbers_keep_to_their_bounds(llm, grammars, low, length, keys, is_mirrored, in_parts):
    low, high = (-low - length, -low) if is_mirrored else (low, low + length)
    bounds = [{keys[0]: low}, {keys[1]: high}]
    schema = {"allOf": bounds, "type": "number"} if in_parts else {"type": "number"} | bounds[0] | bounds[1]
    for value in {low, high, low + length / 2, low - 0.01, high + 0.01, *map(int, (low, high)), 0}:
        is_above = value > low or (value == low and keys[0] == "minimum")
        is_below = value < high or (value == high and keys[1] == "maximum")
        if not (is_above and is_below):
            assert not accepts(grammars, llm, schema, json.dumps(value))
            assert not accepts(grammars, llm, schema, f"{value:.3f}")


def test_bounds_leave_out_nothing_else(llm, grammars):
    for schema, given_in, out in (
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ("0.1", "0.5", "0.000001"), ("0", "0.0", "0.51", "-0.1")),
        ({"exclusiveMaximum": -99, "minimum": -99.5}, ("-99.5", "-99.00001"), ("-99", "-99.0", "-98.9")),
        ({"exclusiveMinimum": 0}, ("0.1", "1", "1000", "7.5"), ("0", "0.0", "-1")),
    ):
        for text in (*given_in, *out):
            assert accepts(grammars, llm, {"type": "number"} | schema, text) == (text in given_in), text
    whole = {"type": "integer", "exclusiveMinimum": 2**46, "exclusiveMaximum": 2**46 + 2}
    assert accepts(grammars, llm, whole, str(2**46 + 1)) and not accepts(grammars, llm, whole, str(2**46))
    value = {"exclusiveMinimum": 0}
    assert accepts(grammars, llm, {"const": value}, '{"exclusiveMinimum": 0}')


@pytest.mark.parametrize(
    "beside", [{"min_tokens": 2}, {"bad_words": ["x"]}, {"use_beam_search": True, "temperature": 0.0}]
)
def test_what_does_not_go_with_a_grammar_is_refused(beside: dict):
    with pytest.raises(UserError, match="structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **beside)


@pytest.mark.parametrize("vocab_size", [288, 290])
def test_a_grammar_beside_tokens_that_alone_are_allowed(vocab_size):
    """In one batch: both say which tokens may come as words of 32, of as many tokens as the model has."""
    llm = LLM(byte_model(vocab_size=vocab_size), split=False, max_num_seqs=2, max_model_len=64)
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
    one = replace(params, structured_outputs=StructuredOutputs(regex="[a-z]{20}"))
    assert len(llm.engine.admission.matcher(one).mask()) == -(-vocab_size // 32)
    two = replace(params, allowed_token_ids=[97, 98])
    alone = [llm.generate([prompt], p)[0].token_ids for prompt, p in (([65], one), ([66], two))]
    together = llm.generate([[65], [66]], [one, two])
    assert [out.token_ids for out in together] == alone
    assert re.fullmatch("[a-z]{8}", together[0].text) and set(together[1].token_ids) <= {97, 98}


def test_a_tokenizer_that_the_library_cannot_read_is_one_line():
    class Odd:
        def to_json(self) -> str:
            return '{"model": {}}'

    with pytest.raises(UserError, match="structured_outputs do not work with this tokenizer") as caught:
        Grammars(Odd(), 8, (0,))
    assert "\n" not in str(caught.value)
