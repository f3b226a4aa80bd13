"""How log-probabilities look in an answer where tokens are parts of characters or bring blanks: of a small
random model, whole and as chunks."""

from __future__ import annotations

import codecs

import pytest
from checkpoint_examples import LLAMA, byte_tokenizer
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers

from jaxlamina import LLM, SamplingParams
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.server.chat import ChatForm
from jaxlamina.server.completions import CompletionForm
from jaxlamina.server.forms import Text
from jaxlamina.server.parameters import sampling_params
from jaxlamina.server.prompts import Prompts
from jaxlamina.server.protocol import ChatCompletionRequest, CompletionRequest
from jaxlamina.server.reading import Reading
from jaxlamina.text.tokenizer import Tokenizer
from jaxlamina.weights.sources import InMemoryModel

C3, A9, A = 0xC3, 0xA9, 0x61


def model(tokenizer: Inner) -> LLM:
    config = ModelConfig.from_hf(LLAMA | {"vocab_size": tokenizer.get_vocab_size()})
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    text = Tokenizer(tokenizer, named_tokens=named, chat_template="{{ messages[0].content }}")
    return LLM(InMemoryModel(config, random_params(config, seed=1), text), max_num_seqs=2, kv_slots=128)


@pytest.fixture(scope="module")
def of_bytes() -> LLM:
    return model(byte_tokenizer())


def answer(llm: LLM, **asked):
    """A completion's choice, whole, and the choices of its chunks."""
    body = CompletionRequest(**asked)
    params, prompts = sampling_params(body), Prompts(llm)
    [prompt] = prompts.completion(body, params)
    raw = prompts.token_bytes, prompts.written_bytes(params)
    whole, streamed = (CompletionForm(body, "m", [prompt], *raw) for _ in range(2))
    events = []
    [output] = llm.generate([{"prompt_token_ids": list(prompt.token_ids)}], params, on_token=events.append)
    chunks = [chunk for event in events for chunk in streamed.chunks(0, event)]
    return whole.whole([output]).choices[0], [choice for chunk in chunks for choice in chunk.choices]


def whole_before(raws: list[bytes]) -> list[int]:
    """Characters that are whole before each."""
    utf8, found, n = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for raw in raws:
        found.append(n)
        n += len(utf8.decode(raw))
    return found


def test_parts_of_characters_have_names_and_places_of_their_own(of_bytes):
    choice, parts = answer(of_bytes, prompt="éab", max_tokens=0, echo=True, logprobs=20)
    found = choice.logprobs
    assert found.tokens == ["bytes:\\xc3", "bytes:\\xa9", "a", "b"]
    assert (choice.text, found.text_offset) == ("éab", [0, 0, 1, 2])
    # None stands for another: 20 of them, and what stands there.
    assert all(20 <= len(top) <= 21 for top in found.top_logprobs[1:])
    assert parts[0].logprobs == found


@pytest.mark.parametrize("echo", [True, False])
def test_places_of_what_is_written_are_those_in_the_text(of_bytes, echo):
    asked = {"allowed_token_ids": [C3, A9, A], "max_tokens": 24, "seed": 3, "logprobs": 2, "echo": echo}
    choice, parts = answer(of_bytes, prompt="éab", **asked)
    found = choice.logprobs
    raws = [*"éab".encode()] if echo else []
    n_prompt = len(raws)
    named = {"a": A, "b": 0x62, "bytes:\\xc3": C3, "bytes:\\xa9": A9}
    assert [named[token] for token in found.tokens[:n_prompt]] == raws
    raws = [bytes([named[token]]) for token in found.tokens]
    assert {C3, A9, A} == {raw[0] for raw in raws[n_prompt:]}
    assert found.text_offset == whole_before(raws)
    for raw, at in zip(raws, found.text_offset, strict=True):
        assert raw != b"a" or choice.text[at] == "a" or choice.text[at : at + 2] == "\ufffda"
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [x for part in parts if part.logprobs for x in getattr(part.logprobs, name)] == getattr(
            found, name
        )


def test_special_tokens_that_a_text_leaves_out_take_no_place_in_it():
    inner = Inner(
        models.BPE({word: i for i, word in enumerate(["<s>", "</s>", "ab", *map(str, range(285))])}, [])
    )
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<s>", "</s>"])
    llm = model(inner)
    asked = {"prompt": [5], "allowed_token_ids": [1, 2], "max_tokens": 24, "seed": 3, "ignore_eos": True}
    for skips, width in ((True, 0), (False, len("</s>"))):
        choice, parts = answer(llm, **asked, logprobs=0, skip_special_tokens=skips)
        found = choice.logprobs
        assert {*found.tokens} == {"</s>", "ab"}
        widths = [width if token == "</s>" else 2 for token in found.tokens]
        assert found.text_offset == [sum(widths[:i]) for i in range(24)] and len(choice.text) == sum(widths)
        assert [
            at for part in parts if part.logprobs for at in part.logprobs.text_offset
        ] == found.text_offset


def test_a_chats_tokens_have_their_own_bytes(of_bytes):
    body = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}], max_tokens=6, seed=1, logprobs=True, top_logprobs=20,
        allowed_token_ids=[C3, A9],
    )  # fmt: skip
    params, prompts = sampling_params(body), Prompts(of_bytes)
    prompt = prompts.chat(body, params)
    form = ChatForm(body, "m", prompt, Reading(), prompts.token_bytes)
    [output] = of_bytes.generate([{"prompt_token_ids": list(prompt.token_ids)}], params)
    [choice] = form.whole([output]).choices
    entries = choice.logprobs.content
    assert [entry.bytes for entry in entries] == [[token] for token in output.token_ids]
    assert {entry.token for entry in entries} == {"\ufffd"}
    for entry in entries:
        tops = [bytes(top.bytes) for top in entry.top_logprobs]
        assert len({*tops}) == 20 and all(top.decode("utf-8", "replace") for top in tops)


def test_tokens_keep_their_blanks():
    words = ["<unk>", "<s>", "</s>", *(f"▁{i}" for i in range(284)), "▁"]
    inner = Inner(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    blanks, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse(), strip])
    inner.add_special_tokens(["<s>", "</s>"])
    llm = model(inner)
    for prompt, text, first in (([1, 8, 9], "<s> 5 6", "<s>"), ([8, 9], "5 6", " 5")):
        asked = {"prompt": prompt, "max_tokens": 3, "seed": 3, "logprobs": 1, "echo": True}
        choice, parts = answer(llm, allowed_token_ids=[*range(3, 287)], **asked)
        found = choice.logprobs
        assert choice.text.startswith(text + " ") and found.tokens[0] == first
        assert "".join(found.tokens).endswith(choice.text)
        for token, at in zip(found.tokens[1:], found.text_offset[1:], strict=True):
            assert token[0] == " " and choice.text[at : at + len(token)] == token
        assert found.text_offset[0] == 0
        assert [
            at for part in parts if part.logprobs for at in part.logprobs.text_offset
        ] == found.text_offset
    [out] = llm.generate([{"prompt_token_ids": [1, 8]}], SamplingParams(max_tokens=3, logprobs=0, seed=3))
    assert "".join(next(iter(entry.values())).decoded_token for entry in out.logprobs) == out.text


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_events_that_are_put_together_are_those_of_their_chunks(of_bytes, chat, ids):
    """Nearly all of a stream is events of which only the text, and the ids, are made anew."""
    asked = {
        "max_tokens": 30,
        "n": 2,
        "seed": 5,
        "return_token_ids": ids,
        "allowed_token_ids": [C3, A9, A, 0x22],
    }
    prompts = Prompts(of_bytes)
    if chat:
        body = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **asked)
        params = sampling_params(body)
        prompt = prompts.chat(body, params)
        form = ChatForm(body, 'm"', prompt, Reading(), prompts.token_bytes)
    else:
        body = CompletionRequest(prompt="é", **asked)
        params = sampling_params(body)
        [prompt] = prompts.completion(body, params)
        form = CompletionForm(body, 'm"', [prompt], prompts.token_bytes, prompts.written_bytes(params))
    events = []
    of_bytes.generate([{"prompt_token_ids": list(prompt.token_ids)}], params, on_token=events.append)
    chunks = [chunk for event in events for chunk in form.chunks(0, event)]
    texts = [chunk for chunk in chunks if isinstance(chunk, Text)]
    assert len(texts) > len(chunks) / 2
    for text in texts:
        assert form.event(text) == form.event(form.text_chunk(text))
    written = [chunk.ids for chunk in texts if chunk.choice == 1]
    assert all(isinstance(one, list) for one in written) if ids else {*map(type, written)} == {type(None)}
