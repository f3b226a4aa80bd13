"""Tool calls: what a request asks for, and calls in what a model writes.

A model that may call writes Hermes' form, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, somewhere in its text; one
that must is held to the JSON object alone. Knows fields and text; whether a model's template asks for that form is
`Prompts`' question.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from jaxlamina.server.errors import refused
from jaxlamina.server.protocol import ChatFields, FunctionCall, Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ToolUse = Literal["none", "auto", "forced"]


def tool_use(body: ChatFields) -> tuple[ToolUse, Sequence[Tool]]:
    """Whether the answer may call tools, or must, and which. Raises `ApiError` for a ``tool_choice`` that is none."""
    choice, tools = body.tool_choice, body.tools or []
    if not tools and choice not in (None, "none", "auto"):
        raise refused("tool_choice needs tools", "tool_choice")
    if not tools or choice == "none":
        return "none", []
    if choice in (None, "auto"):
        return "auto", tools
    if choice == "required":
        return "forced", tools
    name = _named(choice)
    if name is None:
        raise refused(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": …}}',
            "tool_choice",
        )
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise refused(f"tool_choice names {name!r:.80}, which is none of tools", "tool_choice")
    return "forced", named


def _named(choice: Any) -> str | None:
    function = (
        choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON schema of a call of one of ``tools``: its name, then arguments by its own schema, or none."""
    return {"anyOf": [_call_of(tool, f"#/anyOf/{i}/properties/arguments") for i, tool in enumerate(tools)]}


def _call_of(tool: Tool, place: str) -> dict[str, Any]:
    parameters = tool.function.parameters
    if parameters is None:
        arguments: Any = {"type": "object", "additionalProperties": False}
    else:
        arguments = {"type": "object"} | _moved(parameters, place)
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references into itself hold where it is part of another one, at ``place``."""
    if isinstance(schema, list):
        return [_moved(x, place) for x in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    ref = moved.get("$ref")
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
        moved["$ref"] = place + ref[1:]
    return moved


class Parser(Protocol):
    """Takes calls out of a text that comes in pieces."""

    n_calls: int

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that can be shown now, and the calls that are complete now."""
        ...

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The same, when there is no more text."""
        ...


class ForcedCallParser:
    """Of a text that is one call and nothing else. One that was cut off is shown as it was written."""

    def __init__(self) -> None:
        self.n_calls = 0
        self._held = ""

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        return "", []

    def finish(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        call = _parse(held)
        if call is None:
            return held, []
        self.n_calls = 1
        return "", [call]


class ToolCallParser:
    """Of a text in which calls may stand.

    What may yet become a call is held back. A call that is no JSON object with a name is shown as it was written.
    """

    def __init__(self) -> None:
        self.n_calls = 0
        self._held = ""

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
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

    def finish(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        return held, []


def parser_for(use: ToolUse) -> Parser | None:
    """A new one; None where nothing is to be taken out."""
    if use == "none":
        return None
    return ForcedCallParser() if use == "forced" else ToolCallParser()


def parse(text: str, use: ToolUse = "auto") -> tuple[str, list[ToolCall]]:
    """A whole text without its calls, and the calls."""
    parser = parser_for(use)
    if parser is None:
        return text, []
    shown, calls = parser.add(text)
    rest, more = parser.finish()
    return shown + rest, calls + more


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
