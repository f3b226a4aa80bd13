"""From what a model writes in a chat to what is shown: what it thought, what it answers, what it calls.

Knows the parsers and in which order they look at a text; nothing of requests or of how an answer is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxlamina.server.reasoning import Marks, ReasoningParser
from jaxlamina.server.tool_parsers import PARSERS, Call, CallParser, ForcedCallParser, Part, apart
from jaxlamina.server.tools import ToolUse


class Read(NamedTuple):
    """``parts``: what is answered and what is called, as they were written, after the thought."""

    thought: str
    parts: tuple[Part, ...]

    @property
    def answered(self) -> str:
        return apart(self.parts)[0]

    @property
    def calls(self) -> list[Call]:
        return apart(self.parts)[1]


@dataclass(frozen=True)
class Reading:
    """How one request's texts are read. ``form``: the name of the parser of calls; ``thinks``: marks around
    what is thought, None where that is part of the answer; ``prompt``, ``goes_on``: as of
    `ReasoningParser`."""

    use: ToolUse = "none"
    form: str | None = None
    thinks: Marks | None = None
    prompt: str = ""
    goes_on: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """What must not be left out of a text, even if it is a special token's name."""
        thinks = () if self.thinks is None else (self.thinks.open, self.thinks.close)
        calls = PARSERS[self.form].marks if self.use == "auto" and self.form is not None else ()
        return (*thinks, *calls)

    def reader(self) -> Reader:
        """For one text."""
        calls: CallParser | None = None
        if self.use != "none":
            calls = ForcedCallParser() if self.use == "forced" else PARSERS[self.form or "hermes"]()
        if self.thinks is None:
            return Reader(None, calls)
        return Reader(ReasoningParser(self.thinks, self.prompt, goes_on=self.goes_on), calls)


class Reader:
    """Takes one text in pieces."""

    def __init__(self, thinks: ReasoningParser | None, calls: CallParser | None) -> None:
        self.n_calls = 0
        self._thinks, self._calls = thinks, calls

    def add(self, text: str) -> Read:
        """What is known now and was not before."""
        thought = ""
        if self._thinks is not None:
            thought, text = self._thinks.add(text)
        return self._of(thought, text, ends=False)

    def finish(self) -> Read:
        """The same, when there is no more text."""
        thought, text = ("", "") if self._thinks is None else self._thinks.finish()
        return self._of(thought, text, ends=True)

    def whole(self, text: str) -> Read:
        first, rest = self.add(text), self.finish()
        return Read(first.thought + rest.thought, first.parts + rest.parts)

    def _of(self, thought: str, text: str, *, ends: bool) -> Read:
        if self._calls is None:
            return Read(thought, (text,))
        parts = (*self._calls.add(text), *(self._calls.finish() if ends else ()))
        self.n_calls += sum(not isinstance(part, str) for part in parts)
        return Read(thought, parts)
