"""Tool calls: what a request asks for, and how calls look in an answer.

A model that may call does so in the form of its template (`tool_parsers`); one that must is held to a JSON
object alone. Knows fields; nothing of templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from jaxlamina.sampling.structured import each_schema
from jaxlamina.server.errors import refused
from jaxlamina.server.protocol import ChatFields, FunctionCall, Tool, ToolCall
from jaxlamina.server.tool_parsers import Call

ToolUse = Literal["none", "auto", "forced"]


def tool_use(body: ChatFields) -> tuple[ToolUse, Sequence[Tool]]:
    """Whether the answer may call tools, or must, and which. Raises `ApiError` for a ``tool_choice`` that is
    none."""
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

    def moved(one: dict[str, Any]) -> dict[str, Any]:
        ref = one.get("$ref")
        if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            return one | {"$ref": place + ref[1:]}
        return one

    return each_schema(schema, moved)


def tool_call(call: Call, form: str | None, id_: str) -> ToolCall:
    """``id_``: hexadecimal digits of its own; Mistral's templates take ids of nine letters and digits
    alone."""
    id_ = id_[:9] if form == "mistral" else f"call_{id_}"
    return ToolCall(id=id_, function=FunctionCall(name=call.name, arguments=call.arguments))


def description(tools: Sequence[Tool]) -> str:
    """What a system message says of tools where the chat template has no place for them."""
    listed = [tool.function.model_dump(exclude_none=True) for tool in tools]
    return (
        f"You can call these tools: {json.dumps(listed)}\n"
        'To call one, answer with a JSON object: {"name": its name, "arguments": {its arguments}}'
    )
