"""Stop strings over a text that comes in pieces, against a search of the whole text (hypothesis); what is
written behind a prompt, against transformers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from jaxlamina.text.generated import GeneratedText, NoText
from jaxlamina.text.tokenizer import Tokenizer

PIECES = ["a", "b", "ab", "", "ba", "aab"]


class Pieces:
    def __init__(self, left: str = "") -> None:
        self.left = left

    def add(self, token_id: int) -> str:
        return PIECES[token_id]

    def finish(self) -> str:
        return self.left


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    left=st.text("ab", max_size=3),
    include=st.booleans(),
)
def test_text_ends_before_the_first_stop_string_and_release_never_takes_back(tokens, stops, left, include):
    text = GeneratedText(Pieces(left), stops, include_stop=include)
    shown = ""
    for i, token in enumerate(tokens):
        whole = "".join(PIECES[t] for t in tokens[: i + 1])
        stopped = text.add(token)
        assert stopped == any(s in whole for s in stops)
        shown += text.release(finished=stopped)
        assert text.text.startswith(shown)
        if stopped:
            break
    else:
        whole = "".join(PIECES[t] for t in tokens) + left
        stopped = text.finish()
        assert stopped == any(s in whole for s in stops)
    shown += text.release(finished=True)
    cut = min((whole.index(s) for s in stops if s in whole), default=len(whole)) if tokens or left else 0
    if include and stopped:  # or behind it
        cut += len(text.stopped_by)
        assert whole[:cut].endswith(text.stopped_by)
    assert shown == text.text == (whole[:cut] if tokens or left else "")
    assert (text.stopped_by in stops) == stopped


def test_nothing_is_held_back_that_cannot_become_a_stop_string():
    text = GeneratedText(Pieces(), ["aabb"])
    assert [(text.add(t), text.release(finished=False))[1] for t in (1, 0, 0, 0, 1)] == ["b", "", "", "a", ""]


def test_text_before_min_tokens_is_no_part_of_a_stop_string():
    text = GeneratedText(Pieces(), ["ab"])
    assert not text.add(2, may_stop=False)
    assert not text.add(0, may_stop=False)
    assert not text.add(1)  # "ab" a|b: its a came too early
    assert text.add(2)
    assert text.text == "abab"


def test_no_tokenizer_no_text():
    text = GeneratedText(NoText())
    assert not text.add(1) and not text.finish() and text.release(finished=True) == ""


# --- behind a prompt ---

SPECIAL = ["<s>", "</s>", "[INST]"]
WORDS = ["<unk>", "▁is", "▁Paris", "able", "▁", "▁Hello", "]", "▁▁", "é", "<0xC3>", "<0xA9>"]
N = len(WORDS) + len(SPECIAL)
DECODERS = {
    "llama": [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ],
    "gemma": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    "metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
}


def sentencepiece(decoder: str) -> Inner:
    inner = Inner(models.BPE({w: i for i, w in enumerate(WORDS)}, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(DECODERS[decoder])
    inner.add_special_tokens(SPECIAL)
    return inner


def behind(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    detokenizer = tokenizer.detokenizer(skip, after=prompt)
    return "".join([*map(detokenizer.add, ids), detokenizer.finish()])


@pytest.fixture(scope="module")
def by_transformers():
    from transformers import PreTrainedTokenizerFast

    return {name: PreTrainedTokenizerFast(tokenizer_object=sentencepiece(name)) for name in DECODERS}


# Of bytes that are no characters `tokenizers` makes as many U+FFFD as there are in the run.
whole_characters = st.lists(
    st.sampled_from([*([i] for i in range(N) if i not in (9, 10)), [9, 10]]), max_size=20
).map(lambda parts: [i for part in parts for i in part])


@pytest.mark.parametrize("decoder", DECODERS)
@given(prompt=whole_characters, ids=whole_characters, skip=st.booleans())
def test_a_prompt_and_what_is_written_behind_it_are_the_text_of_both(
    decoder, by_transformers, prompt, ids, skip
):
    """Also behind a template's end, such as a special token."""
    tokenizer, theirs = Tokenizer(sentencepiece(decoder)), by_transformers[decoder]
    both = theirs.decode([*prompt, *ids], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    before = theirs.decode(prompt, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(prompt, skip) == before
    assert before + behind(tokenizer, prompt, ids, skip) == both


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_continuation_begins_with_its_own_blank_and_a_text_with_none(decoder):
    tokenizer = Tokenizer(sentencepiece(decoder))
    of = {word: i for i, word in enumerate([*WORDS, *SPECIAL])}
    paris = [of["▁Paris"], of["able"]]
    dropped = "" if decoder != "gemma" else " "
    assert tokenizer.decode(paris) == behind(tokenizer, [], paris) == dropped + "Parisable"
    assert behind(tokenizer, [of["▁is"]], paris) == " Parisable"
    assert behind(tokenizer, [of["▁is"], of["[INST]"], of["]"]], paris) == " Parisable"
    assert behind(tokenizer, [of["▁is"], *[of["[INST]"]] * 20], paris) == " Parisable"
    assert behind(tokenizer, [of["<s>"]], paris) == dropped + "Parisable"  # an empty prompt
    assert behind(tokenizer, [of["<s>"]], paris, skip=False) == " Parisable"
    # A character that the prompt left open is no part of what is written.
    assert behind(tokenizer, [of["▁is"], of["<0xC3>"]], paris) == " Parisable"
    assert behind(tokenizer, [of["▁is"]], [of["<0xC3>"], of["<0xA9>"]]) == "é"
