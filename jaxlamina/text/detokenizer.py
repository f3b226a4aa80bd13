"""Token ids to text one at a time, never half a character.

Every token stands for some bytes; text is those bytes decoded as UTF-8, with one U+FFFD for each maximal
invalid run (what `tokenizers` and Python both do). So a streamed text is by construction the text of the
whole sequence. Knows the decoders of byte-level BPE and of SentencePiece-like vocabularies; for any other it
asks `tokenizers` for the whole text again each time. A text may go on behind other tokens, as what a model
writes does behind its prompt. Knows nothing of stop strings.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tokenizers

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer(Protocol):
    def add(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still open."""
        ...

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never got its last bytes, else nothing."""
        ...


class TokenBytes:
    """id -> bytes of one vocabulary, and whether a text's first space is dropped (`strip_first`)."""

    def __init__(
        self, of_token: Callable[[int], bytes], special_ids: frozenset[int], strip_first: bool
    ) -> None:
        self.of_token, self.special_ids, self.strip_first = of_token, special_ids, strip_first


class ByteDetokenizer:
    """For a vocabulary in which every token has bytes of its own. ``after``: tokens that the text goes on
    behind; a first space is dropped only if these have no text."""

    def __init__(self, vocabulary: TokenBytes, skip_special_tokens: bool, after: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = vocabulary.strip_first and not any(
            vocabulary.of_token(i) for i in after if i not in self._skipped
        )

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._stripped(self._utf8.decode(self._vocabulary.of_token(token_id)))

    def finish(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text


class WholeTextDetokenizer:
    """For any other decoder: decodes everything again at each token, so its cost grows with the square.
    ``after``: tokens that the text goes on behind."""

    def __init__(self, decode: Callable[[list[int]], str], after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = _end_with_text(decode, after)
        self._shown = decode(self._ids)

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) or not text.startswith(self._shown):
            return ""  # a character still open, or a decoder that has not settled
        new, self._shown = text[len(self._shown) :], text
        return new

    def finish(self) -> str:
        text = self._decode(self._ids)
        new, self._shown = text[len(self._shown) :], text
        return new


def _end_with_text(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[int]:
    """A short end of ``ids`` that has text, if any has, without a character that is still open."""
    n = 8
    while n < len(ids) and not decode([*ids[-n:]]):
        n *= 2
    end = [*ids[-n:]]
    while decode(end).endswith(REPLACEMENT):
        end.pop()
    return end


def token_bytes(tokenizer: tokenizers.Tokenizer) -> TokenBytes | None:
    """The bytes of every token if the tokenizer's decoder is one that gives tokens bytes; else None."""
    decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    if kinds == ["ByteLevel"]:
        return TokenBytes(_cached(tokenizer, _byte_level), special, strip_first=False)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replaces_space = steps[0].get("pattern") == {"String": "▁"} and steps[0].get("content") == " "
        strip = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        if replaces_space and strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0:
            return TokenBytes(_cached(tokenizer, _sentencepiece), special, strip_first=strip["start"] == 1)
    return None


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return (
        [s for d in decoder["decoders"] for s in _steps(d)]
        if decoder.get("type") == "Sequence"
        else [decoder]
    )


def _cached(tokenizer: tokenizers.Tokenizer, to_bytes: Callable[[str], bytes]) -> Callable[[int], bytes]:
    known: dict[int, bytes] = {}

    def of_token(token_id: int) -> bytes:
        found = known.get(token_id)
        if found is None:
            # Models pad their vocabulary: an id without a token has no text.
            token = tokenizer.id_to_token(token_id) if token_id >= 0 else None
            found = known[token_id] = b"" if token is None else to_bytes(token)
        return found

    return of_token


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_characters()


def _byte_level(token: str) -> bytes:
    # A token with any other character was added as plain text, such as a special token's name.
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode("utf-8")


def _sentencepiece(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode("utf-8")
