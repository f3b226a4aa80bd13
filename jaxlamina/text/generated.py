"""A request's text as its tokens come: detokenised, searched for stop strings, released when safe to show.

Knows a detokeniser and strings; nothing of models, sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Token ids in, text out: `add` gives the new text (never half a character), `finish` what is left."""

    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class NoText:
    """For a model without a tokenizer: tokens only."""

    def add(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class GeneratedText:
    """The text so far, cut at the first stop string, before it or with ``include_stop`` behind it; `release`
    never shows what a stop string may yet claim."""

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), *, include_stop: bool = False
    ) -> None:
        self.text = ""
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._search_from = 0  # no stop string starts before this
        self._n_released = 0

    def add(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Takes in a token; True if a stop string is now complete. Without ``may_stop`` its text cannot be
        part of one."""
        return self._extend(self._detokenizer.add(token_id), may_stop)

    def finish(self) -> bool:
        """No more tokens: takes in what the detokeniser held back; True if that completes a stop string."""
        return self.stopped_by is None and self._extend(self._detokenizer.finish(), may_stop=True)

    def release(self, *, finished: bool) -> str:
        """Text not released before. Unless ``finished``, an end that may grow into a stop string stays
        back."""
        held = 0
        if self._stop and not finished:
            held = max(_overlap(self.text, s) for s in self._stop)
        end = max(self._n_released, len(self.text) - held)
        new = self.text[self._n_released : end]
        self._n_released = end
        return new

    def _extend(self, new: str, may_stop: bool) -> bool:
        before = len(self.text)
        self.text += new
        if not may_stop:
            self._search_from = len(self.text)
            return False
        first: tuple[int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(self._search_from, before - len(stop) + 1))
            if at >= 0 and (first is None or at < first[0]):
                first = at, stop
        if first is None:
            return False
        self.stopped_by = first[1]
        self.text = self.text[: first[0] + (len(self.stopped_by) if self._include_stop else 0)]
        return True


def _overlap(text: str, stop: str) -> int:
    """How long the longest end of ``text`` is that ``stop`` starts with (short of all of it)."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
