"""From a request's text, messages or token ids to prompts of token ids, and back.

Knows the tokenizer, the chat template and the model's length; nothing of sampling.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxlamina.chat_template import variables_of
from jaxlamina.errors import UserError
from jaxlamina.llm import LLM
from jaxlamina.server import tools
from jaxlamina.server.async_engine import Prompt
from jaxlamina.server.errors import ApiError, refused
from jaxlamina.server.protocol import (
    MAX_PROMPTS,
    ChatFields,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_OURS = ("messages", "add_generation_prompt", "tools", "self")


class Prompts:
    """Raises `ApiError` for whatever cannot be made into a prompt. Thread-safe: long texts are for other threads."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer = llm.tokenizer
        self._vocab_size = llm.config.vocab_size
        self.max_model_len = llm.max_model_len

    def completion(self, body: CompletionRequest) -> list[Prompt]:
        """One each of a request's prompts."""
        given: Any = body.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise refused("prompt is an empty list: give at least one", "prompt")
        if len(given) > MAX_PROMPTS:
            raise refused(f"prompt has {len(given)} prompts: at most {MAX_PROMPTS} go in a request", "prompt")
        return [self._one(prompt, body) for prompt in given]

    def _one(self, prompt: str | list[int], body: CompletionRequest) -> Prompt:
        if isinstance(prompt, str):
            tokens = self._encode(prompt, body.add_special_tokens, "prompt")
            return self._checked(Prompt(tokens, prompt), body.max_tokens, "prompt")
        checked = self._checked(Prompt(prompt), body.max_tokens, "prompt")
        return Prompt(prompt, self.decode(prompt)) if body.echo else checked

    def chat(self, body: ChatFields, max_tokens: int | None = None) -> Prompt:
        """The one prompt that the chat template makes of messages (and tools)."""
        tokenizer = self._with_tokenizer("messages")
        more = dict(body.chat_template_kwargs or {})
        for name in _OURS:
            if name in more:
                raise refused(f"chat_template_kwargs must not have {name!r}", "chat_template_kwargs")
        if self.tool_use(body) != "none":
            more["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        messages = [_plain(message) for message in body.messages]
        try:
            text = tokenizer.apply_chat_template(messages, body.add_generation_prompt, **more)
        except UserError as error:
            raise refused(str(error), "messages") from None
        except RecursionError:
            raise refused("messages or tools are nested too deeply", "messages") from None
        tokens = self._encode(text, False, "messages")
        return self._checked(Prompt(tokens, text), max_tokens, "messages")

    def tool_use(self, body: ChatFields) -> tools.ToolUse:
        """Whether the answer may call tools, or must. Raises `ApiError` if it should and this model's template has no place
        for them, or asks for calls in a form that is not read here."""
        use, _ = tools.tool_use(body)
        if use == "none":
            return use
        template = self._with_tokenizer("messages").chat_template
        if template is None or "tools" not in variables_of(template):
            raise refused("this model's chat template has no place for tools: leave them out", "tools")
        if use == "auto" and tools.OPEN not in template:
            raise refused(
                'this model\'s calls of tools are not in a form that is read here: leave tools out, or take tool_choice="required"',
                "tools",
            )
        return use

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """The token ids that a completion or a chat would have."""
        if (body.prompt is None) == (body.messages is None):
            raise refused("give either prompt or messages", "prompt")
        if body.prompt is not None:
            return self._encode(body.prompt, body.add_special_tokens is not False, "prompt")
        fields = body.model_dump(
            include={"messages", "tools", "add_generation_prompt", "chat_template_kwargs"}
        )
        if not body.messages:
            raise refused("messages is empty", "messages")
        return list(self.chat(ChatFields.model_validate(fields)).token_ids)

    def detokenize(self, body: DetokenizeRequest) -> str:
        self._check_vocabulary(body.tokens, "tokens")
        return self.decode(body.tokens)

    def tokenizer_info(self) -> dict[str, Any]:
        """What lm-evaluation-harness asks for, by vLLM's names, before it has texts tokenized here."""
        tokenizer = self._with_tokenizer("text")
        found = {name: tokenizer.named_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return found | {"chat_template": tokenizer.chat_template, "model_max_length": self.max_model_len}

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._with_tokenizer("text").decode(tokens, skip_special_tokens=False))

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            found: list[int] = self._with_tokenizer(param).encode(text, add_special_tokens=add_special_tokens)
        except UserError as error:
            raise refused(str(error), param) from None
        return found

    def _checked(self, prompt: Prompt, max_tokens: int | None, param: str) -> Prompt:
        n, most = len(prompt.token_ids), self.max_model_len
        if not n:
            raise refused("the prompt is empty: give at least one token", param)
        self._check_vocabulary(prompt.token_ids, param)
        if n >= most or (max_tokens is not None and n + max_tokens > most):
            asked = "" if max_tokens is None else f" and {max_tokens} tokens are asked for"
            raise ApiError(
                400,
                f"the prompt has {n} tokens{asked}; this model's length is {most} tokens, both together",
                param=param,
                code="context_length_exceeded",
            )
        return prompt

    def _check_vocabulary(self, tokens: Any, param: str) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise refused(f"token id {wrong} is not in the vocabulary (0 … {self._vocab_size - 1})", param)

    def _with_tokenizer(self, param: str) -> Any:
        if self._tokenizer is None:
            raise refused("this model has no tokenizer: give a completion's prompt as token ids", param)
        return self._tokenizer


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: content as text, a call's arguments as an object."""
    found: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, list):
        other = next(
            (part.type for part in message.content if part.type != "text" or part.text is None), None
        )
        if other is not None:
            raise refused(f"a content part of type {other!r} is not supported, only text", "messages")
        found["content"] = "\n".join(part.text or "" for part in message.content)
    elif message.content is not None:
        found["content"] = message.content
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [_plain_call(call.model_dump()) for call in message.tool_calls]
    return found


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    try:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise refused("a tool call's arguments are not JSON", "messages") from None
    return call
