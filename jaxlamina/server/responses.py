"""`/v1/responses` as a chat: its request as a chat's, and what an answer looks like, whole or as events.

Nothing is stored, so a conversation comes with each request. Knows fields and forms; nothing of the engine or
HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxlamina.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jaxlamina.errors import UserError
from jaxlamina.server.errors import ApiError, refused
from jaxlamina.server.forms import Chunk, Form
from jaxlamina.server.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    ResponseFormat,
    SamplingFields,
    Tool,
    ToolCall,
    Usage,
)
from jaxlamina.server.reading import Read, Reading
from jaxlamina.server.tool_parsers import Call
from jaxlamina.server.tools import tool_call
from jaxlamina.text.chat_template import text_of_parts

MAX_ITEMS, MAX_TOOLS = 4096, 256
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


_Content = str | Annotated[list[ContentPart], Field(max_length=MAX_ITEMS, fail_fast=True)]


class InputItem(_Fields):
    """A message, a call, what came of a call, or what was thought, by ``type``; without one, a message."""

    type: str = "message"
    role: str | None = None
    content: _Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: _Content | None = None


class FunctionTool(_Fields):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(_Fields):
    type: str = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextFields(_Fields):
    format: TextFormat | None = None


class ResponsesRequest(SamplingFields):
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    text: TextFields | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True  # said again, and nothing else: templates have no place for it
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Of these only the values that change nothing are taken (`_NOT_DONE`).
    previous_response_id: str | None = None
    conversation: Any | None = None
    prompt: Any | None = None
    background: bool | None = None
    truncation: str | None = None


# field → (the values that change nothing, what to do instead)
_LEAVE_OUT = "leave it out"
_NOT_DONE: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((None,), "nothing is stored here: send the whole conversation as input"),
    "conversation": ((None,), "nothing is stored here: send the whole conversation as input"),
    "prompt": ((None,), "nothing is stored here: send its text as instructions or input"),
    "background": ((None, False), "nothing is stored here: " + _LEAVE_OUT),
    "truncation": ((None, "disabled"), "what is too long is refused: " + _LEAVE_OUT),
    "n": ((None, 1), "a response is one text: " + _LEAVE_OUT),
    "best_of": ((None, 1), _LEAVE_OUT),
    "use_beam_search": ((False,), _LEAVE_OUT),
    "prompt_logprobs": ((None,), _LEAVE_OUT),
    "return_token_ids": ((None, False), _LEAVE_OUT),
    "response_format": ((None,), "take text.format"),
    "max_tokens": ((None,), "take max_output_tokens"),
}


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The chat that has the same answer. Raises `ApiError` for what is not done."""
    for name, (harmless, instead) in _NOT_DONE.items():
        if getattr(body, name) not in harmless:
            raise refused(f"{name} is not supported in a response: {instead}", name)
    same = {*SamplingFields.model_fields} - {*_NOT_DONE}
    given = {name: getattr(body, name) for name in same & body.model_fields_set}
    found = ChatCompletionRequest.model_construct(
        **given,
        messages=_messages(body),
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_tool_choice(body.tool_choice),
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=_response_format(body.text),
    )
    found.max_completion_tokens = body.max_output_tokens
    return found


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    found = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*found, ChatMessage(role="user", content=body.input)]
    thought: str | None = None
    for item in body.input:
        if item.type == "message":
            if item.role is None or item.content is None:
                raise refused("a message of input needs role and content", "input")
            found.append(ChatMessage(role=item.role, content=_text(item.content)))
        elif item.type == "function_call":
            if None in (item.call_id, item.name, item.arguments):
                raise refused("a function_call of input needs call_id, name and arguments", "input")
            function = FunctionCall(name=item.name or "", arguments=item.arguments or "")
            if not found or found[-1].role != "assistant":
                found.append(ChatMessage(role="assistant"))
            calls = found[-1].tool_calls or []
            found[-1].tool_calls = [*calls, ToolCall(id=item.call_id or "", function=function)]
        elif item.type == "function_call_output":
            if item.call_id is None or item.output is None:
                raise refused("a function_call_output of input needs call_id and output", "input")
            found.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
        elif item.type == "reasoning":
            thought = (thought or "") + _text(item.content or "")
            continue
        else:
            raise refused(f"an item of type {item.type!r:.40} is not supported in input", "input")
        if thought and found[-1].role == "assistant":
            found[-1].reasoning_content = thought
        thought = None
    if not found:
        raise refused("input has no message", "input")
    return found


def _text(content: str | Sequence[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    try:
        return text_of_parts([part.model_dump() for part in content], _TEXT_PARTS)
    except UserError as error:
        raise refused(str(error), "input") from None


def _tool(tool: FunctionTool) -> Tool:
    if tool.type != "function" or tool.name is None:
        raise refused(
            f"a tool of type {tool.type!r:.40} is not supported, only functions with a name", "tools"
        )
    function = FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.parameters)
    return Tool(function=function)


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: TextFields | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    kind, schema = text.format.type, text.format.schema_
    if kind not in ("text", "json_object", "json_schema") or (kind == "json_schema" and schema is None):
        raise refused("text.format must be of type text, json_object, or json_schema with a schema", "text")
    return ResponseFormat(type=kind, json_schema=None if schema is None else {"schema": schema})


# --- the answer ---


class Answer(BaseModel):
    """A response, as far as it has come; or an event of its stream, by ``type``."""

    model_config = ConfigDict(extra="allow")


class ResponsesForm(Form):
    """``n_tokens``: how many tokens a text has."""

    prefix = "resp"
    counts_events = True

    def __init__(
        self, body: ResponsesRequest, model: str, reading: Reading, n_tokens: Callable[[str], int]
    ) -> None:
        super().__init__(model, 1, include_usage=True)
        self._body, self._reading, self._n_tokens = body, reading, n_tokens
        self._reader = reading.reader()
        self._items: list[dict[str, Any]] = []
        self._thought = ""
        self._blank = {"reasoning": "", "message": ""}  # text that has begun no item yet, by kind
        self._is_open = False  # the last item gets more text
        self._n_events = 0
        self._ended: CompletionOutput | None = None

    def identify(self, key: str, created: int) -> None:
        super().identify(key, created)
        self.id = f"{self.prefix}_{key}"

    def whole(self, outputs: Sequence[RequestOutput]) -> Answer:
        for _ in (*self.piece(0, outputs[0].text, None, None), *self.end(0, outputs[0].outputs[0])):
            pass
        return Answer(**self._response(self.usage(outputs)))

    def opening(self) -> Iterator[Answer]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response(None))

    def piece(
        self, choice: int, text: str, entry: PositionLogprobs | None, ids: list[int] | None
    ) -> Iterator[Answer]:
        yield from self._added(self._reader.add(text))

    def end(self, choice: int, completion: CompletionOutput) -> Iterator[Answer]:
        yield from self._added(self._reader.finish())
        self._ended = completion
        if not self._items:
            yield from self._written("message", "", even_blank=True)
        yield from self._closed()

    def usage_chunk(self, counts: Usage) -> Answer:
        response = self._response(counts)
        return self._event(f"response.{response['status']}", response=response)

    def event(self, chunk: Chunk) -> str:
        assert isinstance(chunk, Answer)
        found = chunk.model_dump()
        return f"event: {found['type']}\n{super().event(chunk)}"

    def failure(self, error: ApiError) -> str:
        wrong = {"code": error.code, "message": str(error), "param": error.param}
        return self.event(self._event("error", **wrong))

    last = ""  # the event of the whole response is

    # --- items and their events ---

    def _added(self, read: Read) -> Iterator[Answer]:
        self._thought += read.thought
        yield from self._written("reasoning", read.thought)
        for part in read.parts:
            yield from self._written("message", part) if isinstance(part, str) else self._called(part)

    def _called(self, call: Call) -> Iterator[Answer]:
        yield from self._closed()
        made = tool_call(call, self._reading.form, self.new_id("call", len(self._items)))
        item = {"type": "function_call", "id": self._id("fc"), "call_id": made.id, "name": call.name}
        where = {"item_id": item["id"], "output_index": len(self._items)}
        yield self._item_event("added", item | {"arguments": "", "status": "in_progress"}, where)
        self._items.append(item | {"arguments": call.arguments, "status": "completed"})
        name = "response.function_call_arguments"
        yield self._event(f"{name}.delta", **where, delta=call.arguments)
        yield self._event(f"{name}.done", **where, name=call.name, arguments=call.arguments)
        yield self._item_event("done", self._items[-1], where)

    def _written(self, kind: str, text: str, even_blank: bool = False) -> Iterator[Answer]:
        """``text`` at the end of an item of ``kind``, the last one or another; blanks alone begin none."""
        if not self._is_open or self._items[-1]["type"] != kind:
            self._blank[kind] += text
            if not (self._blank[kind].strip() or even_blank):
                return
            yield from self._closed()
            text, self._blank[kind] = self._blank[kind], ""
            item = self._new_item(kind)
            self._items.append(item)
            self._is_open = True
            yield self._item_event("added", item, self._where())
            yield self._event(
                "response.content_part.added", **self._where(), content_index=0, part=_part(kind, "")
            )
            item["content"] = [_part(kind, "")]
        if text:
            self._items[-1]["content"][0]["text"] += text
            yield self._text_event("delta", delta=text)

    def _new_item(self, kind: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": kind, "id": self._id("rs"), "summary": [], "content": [], "status": "in_progress"}
        return {
            "type": kind, "id": self._id("msg"), "role": "assistant", "content": [], "status": "in_progress"
        }  # fmt: skip

    def _id(self, kind: Literal["msg", "rs", "fc"]) -> str:
        """Of the next item."""
        return f"{kind}_{self.new_id(len(self._items))}"

    def _closed(self) -> Iterator[Answer]:
        """The last item gets nothing more."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        cut = self._ended is not None and self._ended.finish_reason == "length"
        item["status"] = "incomplete" if cut else "completed"
        [part] = item["content"]
        yield self._text_event("done", text=part["text"])
        yield self._event("response.content_part.done", **self._where(), content_index=0, part=part)
        yield self._item_event("done", item, self._where())

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _text_event(self, name: str, **more: Any) -> Answer:
        kind = "output_text" if self._items[-1]["type"] == "message" else "reasoning_text"
        if kind == "output_text":
            more["logprobs"] = []
        return self._event(f"response.{kind}.{name}", **self._where(), content_index=0, **more)

    def _item_event(self, name: str, item: dict[str, Any], where: dict[str, Any]) -> Answer:
        return self._event(
            f"response.output_item.{name}",
            output_index=where["output_index"],
            item=json.loads(json.dumps(item)),
        )

    def _event(self, type_: str, /, **fields: Any) -> Answer:
        self._n_events += 1
        return Answer.model_validate({"type": type_, "sequence_number": self._n_events - 1, **fields})

    def _response(self, counts: Usage | None) -> dict[str, Any]:
        body, ended = self._body, self._ended
        status = "in_progress" if ended is None else "completed"
        why = error = None
        if ended is not None and ended.finish_reason == "length":
            status, why = "incomplete", {"reason": "max_output_tokens"}
        elif ended is not None and ended.finish_reason == "abort":
            status, error = (
                "failed",
                {"code": "server_error", "message": "the text outgrew its grammar's limits"},
            )
        format_ = (
            body.text and body.text.format and body.text.format.model_dump(by_alias=True, exclude_none=True)
        )
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": json.loads(json.dumps(self._items)),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": format_ or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if counts is None else self._usage(counts),
        }

    def _usage(self, counts: Usage) -> dict[str, Any]:
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,  # of a cache that is paid for
            },
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self._n_tokens(self._thought) if self._thought else 0
            },
            "total_tokens": counts.total_tokens,
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
