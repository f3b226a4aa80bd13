"""Tool calls in Hermes' form: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` in a model's text.

Knows text alone; whether a model's template asks for that form is `Prompts`' question.
"""

from __future__ import annotations

import json
import uuid

from jaxlamina.server.protocol import FunctionCall, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCallParser:
    """Splits a text that comes in pieces into what is to be shown and the calls in it.

    What may yet become a call is held back. A call that is no JSON object with a name is shown as it was written.
    """

    def __init__(self) -> None:
        self.n_calls = 0
        self._held = ""

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that can be shown now, and the calls that are complete now."""
        self._held += text
        shown, calls = "", []
        while (start := self._held.find(OPEN)) >= 0 and (end := self._held.find(CLOSE, start)) >= 0:
            call = _parse(self._held[start + len(OPEN) : end])
            end += len(CLOSE)
            shown += self._held[: start if call else end]
            calls += [call] if call else []
            self._held = self._held[end:]
        self.n_calls += len(calls)
        if start < 0:
            start = len(self._held) - _overlap(self._held, OPEN)
        shown, self._held = shown + self._held[:start], self._held[start:]
        return shown, calls

    def finish(self) -> str:
        """No more text: what is still held back."""
        held, self._held = self._held, ""
        return held


def parse(text: str) -> tuple[str, list[ToolCall]]:
    """A whole text without its calls, and the calls."""
    parser = ToolCallParser()
    shown, calls = parser.add(text)
    return shown + parser.finish(), calls


def _parse(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = json.dumps(call.get("arguments", {}))
    return ToolCall(
        id=f"call_{uuid.uuid4().hex}", function=FunctionCall(name=call["name"], arguments=arguments)
    )


def _overlap(text: str, mark: str) -> int:
    """How long the longest end of ``text`` is that ``mark`` starts with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
