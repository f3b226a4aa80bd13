"""What `batch` and a chat's `/batch` take, made into a file of OpenAI's: one request a line.

Four forms: FineInfer's two lists, `["p1", "p2"] [32, 64]` (prompts and, if wanted, as many max_tokens; §3.1
of its report); OpenAI's lines; lines of bodies (`{"prompt": …}` or `{"messages": …}`); plain text, a prompt a
line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlamina.errors import UserError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Requests:
    """``lines``: custom_id → body, in the order they came. All go to one ``endpoint``. ``source``: the
    input's name."""

    endpoint: str
    lines: dict[str, dict[str, Any]]
    source: str = ""

    def jsonl(self) -> bytes:
        made = (
            {"custom_id": i, "method": "POST", "url": self.endpoint, "body": b} for i, b in self.lines.items()
        )
        return b"".join(json.dumps(line).encode() + b"\n" for line in made)


def read(text: str) -> str:
    """Lists as they are, and of anything else what is in the file of that name. `UserError` for one that
    cannot be read."""
    if text.lstrip().startswith("["):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {text}: {error}") from None


def names_of(inputs: Sequence[str]) -> list[str]:
    """A name for each input that no other has: a file's own, "stdin" or "list"; of equal ones the second is
    "name#2"."""
    own = [
        "list" if text.lstrip().startswith("[") else "stdin" if text == "-" else Path(text).name
        for text in inputs
    ]
    return [name if (n := own[: i + 1].count(name)) == 1 else f"{name}#{n}" for i, name in enumerate(own)]


def parse(
    text: str, *, chat: bool, defaults: Mapping[str, Any], source: str = "", prefix: str = ""
) -> Requests:
    """``chat``: prompts are messages to the model and not texts to go on with; ``defaults``: fields of every
    body that does not say otherwise; ``prefix``: of the custom_id of a line that has none, before its number.
    `UserError` that names the line that is wrong."""
    text = text.removeprefix("\ufeff")  # as some editors begin a file
    if text.lstrip().startswith("["):
        found = [_body_of(prompt, chat) | more for prompt, more in _two_lists(text.strip())]
        named = {f"{prefix}{i}": body for i, body in enumerate(found, start=1)}
    else:
        named = {}
        # A string of JSON may have what `splitlines` takes for an end of a line.
        for i, line in enumerate(text.split("\n"), start=1):
            line = line.removesuffix("\r")
            if line.strip():
                custom_id, body = _line(line, i, chat, prefix)
                if custom_id in named:
                    raise UserError(f"line {i}: another line has the custom_id {custom_id!r}, too")
                named[custom_id] = body
    if not named:
        raise UserError("there is no prompt: give at least one")
    endpoints = {CHAT if "messages" in body else COMPLETIONS for body in named.values()}
    if len(endpoints) > 1:
        raise UserError("some lines have messages and some have prompts: a batch is of one kind")
    [endpoint] = endpoints
    return Requests(endpoint, {name: {**defaults, **body} for name, body in named.items()}, source)


def _two_lists(text: str) -> list[tuple[str, dict[str, int]]]:
    form = 'it must be ["prompt", "prompt"] [32, 64]: prompts, and as many max_tokens or none'
    decoder = json.JSONDecoder()
    try:
        prompts, end = decoder.raw_decode(text)
        rest = text[end:].strip()
        counts = json.loads(rest) if rest else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{form} ({error})") from None
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise UserError(form)
    if counts is None:
        return [(prompt, {}) for prompt in prompts]
    whole = isinstance(counts, list) and all(type(count) is int and count > 0 for count in counts)
    if not whole or len(counts) != len(prompts):
        raise UserError(form)
    return [(prompt, {"max_tokens": count}) for prompt, count in zip(prompts, counts, strict=True)]


def _line(text: str, number: int, chat: bool, prefix: str) -> tuple[str, dict[str, Any]]:
    custom_id = f"{prefix}{number}"
    if not text.lstrip().startswith("{"):
        return custom_id, _body_of(text, chat)
    try:
        body = line = json.loads(text)
    except RecursionError:
        raise UserError(f"line {number} is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"line {number} is not JSON: {error}") from None
    if isinstance(line.get("body"), dict):
        body, custom_id = line["body"], str(line.get("custom_id", custom_id))
    if ("prompt" in body) == ("messages" in body):
        raise UserError(f"line {number} must have either a prompt or messages")
    return custom_id, body


def _body_of(prompt: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
