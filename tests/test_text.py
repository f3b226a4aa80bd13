"""Stop strings over a text that comes in pieces, against a search of the whole text (hypothesis)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.text.generated import GeneratedText, NoText

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
