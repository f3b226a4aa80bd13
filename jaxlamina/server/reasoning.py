"""What a model thinks before it answers, apart from the answer: text between two marks, such as <think> and
</think>.

A parser takes text in pieces, of any size; how the text is cut makes no difference. Pure: knows nothing of
requests or answers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from jaxlamina.server.tool_parsers import overlap


class Marks(NamedTuple):
    """``opened``: a model thinks from the beginning even where neither its prompt nor its text has the first
    mark."""

    open: str
    close: str
    opened: bool = False


PARSERS = {
    "qwen3": Marks("<think>", "</think>"),
    "deepseek_r1": Marks("<think>", "</think>", opened=True),
    "glm45": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
}


class ReasoningParser:
    """Of one text, that follows ``prompt``: a template may end a prompt within the marks, or behind them.
    ``goes_on``: the prompt is a message that the text goes on with, and has its marks where it has them."""

    def __init__(self, marks: Marks, prompt: str, *, goes_on: bool = False) -> None:
        self._marks = marks
        if goes_on:
            self._opened = prompt.rfind(marks.open) > prompt.rfind(marks.close)
        else:
            end = prompt.rstrip()
            self._opened = end.endswith(marks.open) or (marks.opened and not end.endswith(marks.close))
        self._state: Literal["begins", "thinks", "answers"] = "begins"
        self._held = ""

    def add(self, text: str) -> tuple[str, str]:
        """(What was thought, what was answered), as far as it is known which of them it is."""
        self._held += text
        thought = ""
        if self._state == "begins":
            rest = self._held.lstrip()
            if rest.startswith(self._marks.open):
                self._held, self._state = rest[len(self._marks.open) :], "thinks"
            elif self._marks.open.startswith(rest):
                return "", ""
            else:
                self._state = "thinks" if self._opened else "answers"
        if self._state == "thinks":
            end = self._held.find(self._marks.close)
            if end >= 0:
                thought, self._held = self._held[:end], self._held[end + len(self._marks.close) :]
                self._state = "answers"
            else:
                end = len(self._held) - overlap(self._held, self._marks.close)
                thought, self._held = self._held[:end], self._held[end:]
                return thought, ""
        answered, self._held = self._held, ""
        return thought, answered

    def finish(self) -> tuple[str, str]:
        """The same, when there is no more text."""
        held, self._held = self._held, ""
        thinks = self._state == "thinks" or (self._state == "begins" and self._opened)
        return (held, "") if thinks else ("", held)
