"""Calls of tools in what a model writes, in the forms that models are taught: Hermes', Llama 3's, Mistral's,
pythonic.

A parser takes text in pieces, of any size, and gives the text to show and the calls, as they were written;
how the text is cut makes no difference. What may yet become a call is held back, and what turns out to be
none is shown as it was written. Pure: knows nothing of requests or answers.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol


class Call(NamedTuple):
    name: str
    arguments: str  # JSON


Part = str | Call
"""Text to show, maybe none, or a call."""


class CallParser(Protocol):
    """Takes calls out of one text."""

    marks: ClassVar[
        tuple[str, ...]
    ]  # what stands around calls, and may be a special token of the tokenizer's

    def add(self, text: str) -> Sequence[Part]:
        """The text that can be shown now and the calls that are complete now, as they were written."""
        ...

    def finish(self) -> Sequence[Part]:
        """The same, when there is no more text."""
        ...


class ForcedCallParser(CallParser):
    """Of a text that is one call as a JSON object and nothing else. One that was cut off is shown."""

    marks = ()

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> Sequence[Part]:
        self._held += text
        return ()

    def finish(self) -> Sequence[Part]:
        held, self._held = self._held, ""
        return _calls(held) or [held]


class HermesParser(CallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the text; the last mark may be
    missing, or part of it, where the text ends."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    marks = (OPEN, CLOSE)

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> Sequence[Part]:
        self._held += text
        parts: list[Part] = []
        while (start := self._held.find(self.OPEN)) >= 0:
            end = self._held.find(self.CLOSE, start)
            if end < 0:
                break
            found = _calls(self._held[start + len(self.OPEN) : end])
            end += len(self.CLOSE)
            parts += [self._held[: start if found else end], *found]
            self._held = self._held[end:]
        if start < 0:
            start = len(self._held) - overlap(self._held, self.OPEN)
        shown, self._held = self._held[:start], self._held[start:]
        return [*parts, shown]

    def finish(self) -> Sequence[Part]:
        held, self._held = self._held, ""
        call = held.removeprefix(self.OPEN)  # all that is held, if it has the mark
        calls = [] if call == held else _calls(call[: len(call) - overlap(call, self.CLOSE)])
        return calls or [held]


class Llama3Parser(CallParser):
    """`{"name": …, "parameters": {…}}` at the text's beginning, maybe after `<|python_tag|>`; several with
    `;` between them."""

    TAG = "<|python_tag|>"
    marks = (TAG,)

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False  # no call comes any more
        self._called = False
        self._end = _JsonEnd()

    def add(self, text: str) -> Sequence[Part]:
        self._held += text
        calls: list[Call] = []
        while not self._is_text:
            blank = self._blank()
            rest = self._held[blank:]
            if not rest or (not self._called and self.TAG.startswith(rest)):
                return calls
            if not self._called and rest.startswith(self.TAG):
                blank += len(self.TAG)
                blank += _n_blanks(self._held[blank:])
                rest = self._held[blank:]
                if not rest:
                    return calls
            if rest[0] != "{":
                self._is_text = True
                break
            end = self._end.find(rest)
            if end is None:
                return calls
            found = _calls(rest[:end], bare=True)
            if not found:
                self._is_text = True
                break
            calls += found
            self._held, self._called, self._end = rest[end:], True, _JsonEnd()
        shown, self._held = self._held, ""
        return [*calls, shown]

    def _blank(self) -> int:
        """Where the next call could begin."""
        blank = _n_blanks(self._held)
        if self._called and self._held[blank : blank + 1] == ";":
            blank += 1
            blank += _n_blanks(self._held[blank:])
        return blank

    def finish(self) -> Sequence[Part]:
        held, self._held = self._held, ""
        return [] if self._called and not held.strip("; \t\r\n") else [held]


class MistralParser(CallParser):
    """`[TOOL_CALLS]` and then a list, `[{"name": …, "arguments": {…}}, …]`, or one call as `name{…}` (newer
    models: maybe with `[CALL_ID]…` and `[ARGS]` after the name)."""

    MARK = "[TOOL_CALLS]"
    marks = (MARK, "[CALL_ID]", "[ARGS]")
    _NAME = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*\Z")
    _LONGEST_NAME = 256

    def __init__(self) -> None:
        self._held = ""
        self._in_call = False  # what is held begins with the mark
        self._end = _JsonEnd()

    def add(self, text: str) -> Sequence[Part]:
        self._held += text
        parts: list[Part] = []
        while True:
            if not self._in_call:
                start = self._held.find(self.MARK)
                self._in_call = start >= 0
                if start < 0:
                    start = len(self._held) - overlap(self._held, self.MARK)
                parts.append(self._held[:start])
                self._held = self._held[start:]
                if not self._in_call:
                    return parts
            found = self._call()
            if found is None:
                return parts
            end, calls = found
            parts += calls or [self._held[:end]]
            self._held, self._in_call, self._end = self._held[end:], False, _JsonEnd()

    def _call(self) -> tuple[int, list[Call]] | None:
        """(How long what is held is, as one call or several; those) of what follows the mark; none: it is
        text; None: it has not all come."""
        after = len(self.MARK)
        rest = self._held[after:]
        start = _n_blanks(rest)
        if not rest[start:]:
            return None
        if rest[start] != "[":
            start = rest.find("{", 0, self._LONGEST_NAME)
            if start < 0:
                is_text = len(rest) >= self._LONGEST_NAME or not _MAY_BE_NAME.fullmatch(rest)
                return (after, []) if is_text else None
        end = self._end.find(rest[start:])
        if rest[start] == "{" and (name := self._NAME.match(rest[:start])) is None:
            return after, []
        if end is None:
            return None
        value = rest[start : start + end]
        if value[0] == "[":
            return after + start + end, _calls(value)
        arguments = _loads(value)
        calls = [] if arguments is None or name is None else [Call(name[1], json.dumps(arguments))]
        return after + start + end, calls

    def finish(self) -> Sequence[Part]:
        held, self._held = self._held, ""
        return [held]


class PythonicParser(CallParser):
    """A text that is a list of calls in Python, `[get_weather(city="Oslo"), get_time()]`, and nothing
    else."""

    marks = ()
    _BEGINS = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")
    _MAY_BEGIN = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.]*)?)?")
    _LONGEST = 100_000

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_text = self._begins = False

    def add(self, text: str) -> Sequence[Part]:
        self._held.append(text)
        if not (self._is_text or self._begins):
            held = "".join(self._held)
            self._begins = self._BEGINS.match(held) is not None
            self._is_text = not self._begins and not self._MAY_BEGIN.fullmatch(held)
        return [self._take()] if self._is_text else []

    def finish(self) -> Sequence[Part]:
        held = self._take()
        calls = _python_calls(held) if self._begins and len(held) <= self._LONGEST else []
        return calls or [held]

    def _take(self) -> str:
        held, self._held = "".join(self._held), []
        return held


PARSERS: dict[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}


def parser_of(template: str) -> str | None:
    """The name of the parser for calls as a chat template asks for them; None: it is not clear."""
    if "[func_name1(" in template:
        return "pythonic"
    if MistralParser.MARK in template:
        return "mistral"
    if HermesParser.OPEN in template:  # others write what is no JSON between the same marks
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if '"parameters": dictionary of argument name' in template or Llama3Parser.TAG in template:
        return "llama3_json"
    return None


def apart(parts: Iterable[Part]) -> tuple[str, list[Call]]:
    """All text, and the calls."""
    text, calls = "", list[Call]()
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            calls.append(part)
    return text, calls


_MAY_BE_NAME = re.compile(r"[\s\w.\-\[\]]*")


class _JsonEnd:
    """Where a value that begins with a bracket ends, of a text that grows."""

    def __init__(self) -> None:
        self._seen = self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        for at in range(self._seen, len(text)):
            c = text[at]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = c == "\\"
                self._in_string = c != '"'
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        self._seen = len(text)
        return None


def _n_blanks(text: str) -> int:
    return len(text) - len(text.lstrip())


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON's")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _loads(text: str) -> Any:
    """A JSON value, or None for what is none, or has a number that could not be written as JSON again."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _calls(text: str, bare: bool = False) -> list[Call]:
    """The call, or list of calls, that a JSON text is; empty if it is anything else. ``bare``: nothing else
    says that it is one, so it must have arguments."""
    value = _loads(text)
    found = []
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        arguments = call.get("arguments", call.get("parameters"))
        if bare and not isinstance(arguments, dict):
            return []
        arguments = {} if arguments is None else arguments
        found.append(Call(call["name"], json.dumps(arguments)))
    return found


def _python_calls(text: str) -> list[Call]:
    try:
        body = ast.parse(text.strip(), mode="eval").body
        return [_python_call(call) for call in body.elts] if isinstance(body, ast.List) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _python_call(call: ast.expr) -> Call:
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
        raise ValueError("not a call of keywords alone")
    arguments = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("** is no keyword")
        arguments[keyword.arg] = _python_value(keyword.value)
    return Call(ast.unparse(call.func), json.dumps(arguments, allow_nan=False))


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _python_value(node: ast.expr) -> Any:
    """A literal's value, of those that JSON has; JSON's own names for three of them will do."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            named = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if not all(isinstance(name, str) for name in named):
                raise ValueError("a key is no string")
            return dict(zip(named, map(_python_value, values), strict=True))
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
    raise ValueError("not a literal")


def overlap(text: str, mark: str) -> int:
    """How long the longest end of ``text`` is that ``mark`` starts with, short of all of it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
