"""From a request's text, messages or token ids to prompts of token ids, and back.

Knows the tokenizer, the chat template and the model's length; nothing of sampling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxlamina.errors import UserError
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.server import reasoning, tool_parsers, tools
from jaxlamina.server.async_engine import Prompt
from jaxlamina.server.errors import ApiError, of_user_error, refused
from jaxlamina.server.protocol import (
    MAX_PROMPTS,
    ChatFields,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jaxlamina.server.reading import Reading
from jaxlamina.text.chat_template import text_of_parts, variables_of

if TYPE_CHECKING:
    from jaxlamina.llm import LLM

_OURS = ("messages", "add_generation_prompt", "tools", "self", "chat_template", "continue_final_message")
_END = 64  # tokens of a prompt in which a mark at its end is found
# Characters of a text that is tokenised: real ones have a few a token.
_LEAST_TEXT, _TEXT_PER_TOKEN = 2**20, 256


class Prompts:
    """Raises `ApiError` for whatever cannot be made into a prompt. Thread-safe: long texts are for other
    threads."""

    def __init__(
        self,
        llm: LLM,
        *,
        trust_request_chat_template: bool = False,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """``tool_call_parser``: of `tool_parsers.PARSERS`, None: as the chat template says.
        ``reasoning_parser``: of `reasoning.PARSERS`, None: what is thought is part of the answer."""
        self._tokenizer = llm.tokenizer
        self._trusts_templates = trust_request_chat_template
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser
        self._vocab_size = llm.model.vocab_size
        self.max_model_len = llm.max_model_len

    def completion(self, body: CompletionRequest, params: SamplingParams) -> list[Prompt]:
        """One each of a request's prompts."""
        given: Any = body.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise refused("prompt is an empty list: give at least one", "prompt")
        if len(given) > MAX_PROMPTS:
            raise refused(f"prompt has {len(given)} prompts: at most {MAX_PROMPTS} go in a request", "prompt")
        return [self._one(prompt, body, params) for prompt in given]

    def _one(self, given: str | list[int], body: CompletionRequest, params: SamplingParams) -> Prompt:
        if isinstance(given, str):
            prompt = Prompt(self._encode(given, body.add_special_tokens, "prompt"), given)
        else:
            prompt = Prompt(given)
        prompt = self._kept(prompt, params)
        checked = self._checked(prompt, body.max_tokens, "prompt")
        if body.echo and checked.text is None:
            return Prompt(prompt.token_ids, self.decode(prompt.token_ids))
        return checked

    def _kept(self, prompt: Prompt, params: SamplingParams | None) -> Prompt:
        """Of a prompt what ``truncate_prompt_tokens`` leaves."""
        if params is None or params.truncate_prompt_tokens is None:
            return prompt
        try:
            kept = params.kept(prompt.token_ids, self.max_model_len)
        except UserError as error:
            raise of_user_error(error) from None
        return prompt if len(kept) == len(prompt.token_ids) else Prompt(kept)

    def chat(self, body: ChatFields, params: SamplingParams | None = None) -> Prompt:
        """The one prompt that the chat template makes of messages (and tools)."""
        more = dict(body.chat_template_kwargs or {})
        for name in _OURS:
            if name in more:
                raise refused(f"chat_template_kwargs must not have {name!r}", "chat_template_kwargs")
        template = self._template(body)
        names = variables_of(template)
        messages = [_plain(message, template) for message in body.messages]
        if self.tool_use(body) != "none":
            if "tools" in names:
                more["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            else:
                messages = _told(messages, tools.description(tools.tool_use(body)[1]))
        goes_on = bool(body.continue_final_message)
        begins = body.add_generation_prompt
        if goes_on and "add_generation_prompt" not in body.model_fields_set:
            begins = False
        try:
            text = self._with_tokenizer("messages").apply_chat_template(
                messages, begins, chat_template=template, continue_final_message=goes_on, **more
            )
        except UserError as error:
            raise refused(str(error), "messages") from None
        except (RecursionError, MemoryError):
            raise refused("messages or tools are nested too deeply, or too long", "messages") from None
        except SyntaxError:  # Jinja makes Python of a template, which has limits of its own
            raise refused("the chat template is nested too deeply", "chat_template") from None
        tokens = self._encode(text, False, "messages")
        prompt = self._kept(Prompt(tokens, text), params)
        return self._checked(prompt, None if params is None else params.max_tokens, "messages")

    def _template(self, body: ChatFields) -> str:
        """The chat template: the model's, or the request's own where such are trusted. `ApiError` if there is
        none."""
        tokenizer = self._with_tokenizer("messages")
        if body.chat_template is None:
            if tokenizer.chat_template is None:
                raise refused(
                    "this model has no chat template: use completions, or serve with --chat-template",
                    "messages",
                )
            return str(tokenizer.chat_template)
        if not self._trusts_templates:
            raise refused(
                "a request's own chat_template is a program, which this server does not run unless it is "
                "served with --trust-request-chat-template",
                "chat_template",
            )
        try:
            variables_of(body.chat_template)
        except UserError as error:
            raise refused(str(error), "chat_template") from None
        except (RecursionError, MemoryError):
            raise refused("the chat template is nested too deeply", "chat_template") from None
        return body.chat_template

    def tool_use(self, body: ChatFields) -> tools.ToolUse:
        """Whether the answer may call tools, or must. Raises `ApiError` if it may and this model's template
        has no place for them, or asks for calls in a form that is not read here."""
        use, _ = tools.tool_use(body)
        if use != "auto":
            return use
        template = self._template(body)
        if "tools" not in variables_of(template):
            raise refused(
                "this model's chat template has no place for tools: leave them out, or take "
                'tool_choice="required", which holds the answer to a call',
                "tools",
            )
        if self._call_form(template) is None:
            raise refused(
                "it is not clear in which form this model calls tools: leave tools out, take "
                'tool_choice="required", or '
                f"serve with --tool-call-parser {', '.join(tool_parsers.PARSERS)}",
                "tools",
            )
        return use

    def _call_form(self, template: str) -> str | None:
        return self._tool_call_parser or tool_parsers.parser_of(template)

    def reading(self, body: ChatFields, params: SamplingParams, prompt: Prompt) -> Reading:
        """How what the model writes after ``prompt`` becomes an answer."""
        use, marks = self.tool_use(body), None
        if params.structured_outputs is not None:
            # They hold from the first token on: nothing is thought, and nothing called that is not forced.
            use = use if use == "forced" else "none"
        elif self._reasoning_parser is not None:
            marks = reasoning.PARSERS[self._reasoning_parser]
        form = None if use == "none" else self._call_form(self._template(body))
        if body.continue_final_message:
            goes_on_with = _plain(body.messages[-1], "").get("content", "")
            return Reading(use, form, marks, goes_on_with, goes_on=True)
        text = prompt.text  # None: it was cut at its start
        return Reading(use, form, marks, self.decode(prompt.token_ids[-_END:]) if text is None else text)

    def with_marks(self, params: SamplingParams, reading: Reading) -> SamplingParams:
        """``params`` with which the text has what ``reading`` looks for."""
        is_special = self._with_tokenizer("messages").is_special
        hidden = params.skip_special_tokens and any(map(is_special, reading.marks))
        return replace(params, skip_special_tokens=False) if hidden else params

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """The token ids that a completion or a chat would have."""
        if (body.prompt is None) == (body.messages is None):
            raise refused("give either prompt or messages", "prompt")
        if body.prompt is not None:
            return self._encode(body.prompt, body.add_special_tokens is not False, "prompt")
        if not body.messages:
            raise refused("messages is empty", "messages")
        fields = body.model_dump(include=set(ChatFields.model_fields), exclude_unset=True)
        return list(self.chat(ChatFields.model_validate(fields)).token_ids)

    def detokenize(self, body: DetokenizeRequest) -> str:
        self._check_vocabulary(body.tokens, "tokens")
        return self.decode(body.tokens)

    def tokenizer_info(self) -> dict[str, Any]:
        """What lm-evaluation-harness asks for, by vLLM's names, before it has texts tokenized here."""
        tokenizer = self._with_tokenizer("text")
        found = {name: tokenizer.named_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return found | {"chat_template": tokenizer.chat_template, "model_max_length": self.max_model_len}

    def n_tokens(self, text: str) -> int:
        return len(self._encode(text, False, "text"))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._with_tokenizer("text").decode(tokens, skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, maybe part of a character; nothing without a tokenizer."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def written_bytes(self, params: SamplingParams) -> Callable[[int], bytes]:
        """As `token_bytes`, of the text that a model writes: it may leave special tokens out."""
        left_out = frozenset[int]()
        if self._tokenizer is not None and params.skip_special_tokens:
            left_out = self._tokenizer.special_ids
        return lambda token: b"" if token in left_out else self.token_bytes(token)

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        most = max(_LEAST_TEXT, _TEXT_PER_TOKEN * self.max_model_len)
        if len(text) > most:
            raise ApiError(
                400,
                f"the text has {len(text)} characters, at most {most} are taken: this model's length is "
                f"{self.max_model_len} tokens",
                param=param,
                code="context_length_exceeded",
            )
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


def _told(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """``messages`` with ``text`` at the end of the system message that they begin with."""
    first = messages[0]
    if first["role"] == "system":
        return [first | {"content": f"{first.get('content', '')}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _plain(message: ChatMessage, template: str) -> dict[str, Any]:
    """A message as ``template`` expects it: content as text, a call's arguments as an object. Calls that it
    has no place for are content, and a developer whom it does not know is the system."""
    is_unknown = message.role == "developer" and "developer" not in template
    found: dict[str, Any] = {"role": "system" if is_unknown else message.role}
    if isinstance(message.content, list):
        try:
            found["content"] = text_of_parts([part.model_dump() for part in message.content])
        except UserError as error:
            raise refused(str(error), "messages") from None
    elif message.content is not None:
        found["content"] = message.content
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if message.tool_calls:
        calls = [_plain_call(call.model_dump()) for call in message.tool_calls]
        if "tool_calls" in template:
            found["tool_calls"] = calls
        else:
            written = [json.dumps(call["function"]) for call in calls]
            found["content"] = "\n".join([*filter(None, [found.get("content")]), *written])
    return found


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    try:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise refused("a tool call's arguments are not JSON", "messages") from None
    return call
