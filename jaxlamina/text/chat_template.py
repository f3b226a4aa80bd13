"""Chat templates: the Jinja program of a model that turns messages into one prompt.

Templates come with models from strangers, so they run in jinja2's immutable sandbox and see plain data only;
what bounds their time and memory is `template_process`. The environment is the one of transformers
(`apply_chat_template`): same filters, functions and tags. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxlamina.errors import UserError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote, for training; here it is its
    body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _broken(error: jinja2.exceptions.TemplateSyntaxError) -> UserError:
    return UserError(f"the model's chat template is broken at line {error.lineno}: {error.message}")


@lru_cache(maxsize=32)
def variables_of(template: str) -> frozenset[str]:
    """The names that a template expects to be given. `UserError` for one that is no Jinja."""
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(template)))
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise _broken(error) from None
    except RecursionError:
        raise UserError("the model's chat template is nested too deeply") from None


def plain(value: Any) -> Any:
    """A copy made of JSON types alone: an object's methods are what a template could misuse."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # a subclass, such as an enum, back to its base
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    raise UserError(f"messages must be made of strings, numbers, lists and dicts, not {type(value).__name__}")


def text_of_parts(parts: Sequence[Any], kinds: Sequence[str] = ("text",)) -> str:
    """A message's content in parts ({"type": "text", "text": …}) as templates expect it: a line each.
    `UserError` for a part that is not of these kinds."""
    texts = []
    for part in parts:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if kind not in kinds or not isinstance(text, str):
            raise UserError(f"a content part of type {kind!r:.40} is not supported, only text")
        texts.append(text)
    return "\n".join(texts)


def with_text(message: Any) -> Any:
    """A message whose content, if it is in parts, is their text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return {**message, "content": text_of_parts(content)} if isinstance(content, list | tuple) else message


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt that `template` makes of `messages` ({"role": …, "content": …} each) and `variables`.

    Raises `UserError` for messages of another form, for what the template itself rejects, and for a template
    that is broken or leaves the sandbox.
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise UserError(
            'messages must be a list such as [{"role": "user", "content": "Hello"}], and not empty'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f'message {i} must be a dict with a "role" and a "content"')
        if "content" not in message and "tool_calls" not in message:
            raise UserError(f'message {i} (role {message["role"]!r}) has no "content"')
    try:
        return _compiled(template).render(
            messages=plain(messages), **{k: plain(v) for k, v in variables.items()}
        )
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise _broken(error) from None
    except jinja2.exceptions.TemplateError as error:
        raise UserError(f"the model's chat template refused the messages: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"the model's chat template failed on these messages: {error}") from None
