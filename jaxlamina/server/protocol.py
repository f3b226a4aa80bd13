"""Requests and answers of the API, field by field, as OpenAI and vLLM name them.

Types and ranges only: what a field does to sampling is `parameters`' affair. Unknown fields are ignored, as
vLLM does. Numbers are bounded so that nothing a client sends can break a step that others are in.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jaxlamina.sampling.params import MAX_ALLOWED_TOKENS, MAX_LOGIT_BIASES

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
MAX_N = 128
MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_TEMPLATE = 2**17  # characters
MAX_CHOICES = 2**14
# Of the lists of a request, which end at their first error: a million errors would take minutes to tell.
MAX_CONTINUATIONS = 4096  # of all prompts
MAX_TOKEN_IDS = 2**18
MAX_MESSAGES = 4096
MAX_PARTS = 256  # of a message
MAX_TOOLS = 1024
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
_StopText = Annotated[str, Field(min_length=1, max_length=1024)]


def _at_most(n: int) -> BeforeValidator:
    """An object of at most ``n`` fields, before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > n:
            raise ValueError(f"it has {len(value)} fields, at most {n} are taken")
        return value

    return BeforeValidator(check)


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class _Asked(_Model):
    """Of a request: null stands for the default, as if the field were not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name in required}


class StreamOptions(_Asked):
    include_usage: bool = False


class ResponseFormat(_Model):
    type: str
    json_schema: dict[str, Any] | None = None


class SamplingFields(_Asked):
    """What both kinds of completions take. None: the default."""

    model: str | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None  # -1: none; below: modulo 2**64
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    use_beam_search: bool = False
    beam_width: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    length_penalty: Annotated[Finite, Field(ge=-10, le=10)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop: _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[Finite, Field(ge=-100, le=100)]], _at_most(MAX_LOGIT_BIASES)] | None
    ) = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    # vLLM's names for parts of it before there was one field.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = None
    guided_grammar: str | None = None
    bad_words: Annotated[list[_StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)] | None
    ) = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    return_token_ids: bool | None = None


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[
            list[Annotated[list[int], Field(fail_fast=True)]], Field(max_length=MAX_PROMPTS, fail_fast=True)
        ]
    )
    echo: bool = False
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = (
        None  # 0: the prompt is echoed, and nothing written
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None  # only the value that changes nothing is taken (`parameters.NOT_YET`)
    add_special_tokens: bool = True


class FunctionCall(_Model):
    name: str
    arguments: str


class ToolCall(_Model):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(_Model):
    type: str
    text: str | None = None


class ChatMessage(_Model):
    role: str
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(_Model):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Model):
    type: Literal["function"] = "function"
    function: FunctionDefinition


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChatFields(_Asked):
    """What a chat's prompt is made of."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(ChatFields, SamplingFields):
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include_reasoning: bool = True
    # As `suffix` above.
    functions: list[Any] | None = None
    function_call: Any | None = None


class PromptTokensDetails(_Model):
    cached_tokens: int


class Usage(_Model):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(_Model):
    """A token each. None: the prompt's first, which follows nothing."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Model):
    logprob: float
    rank: int
    decoded_token: str


PromptEntry = dict[str, PromptLogprob]  # by token id


class CompletionChoice(_Model):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[PromptEntry | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class _Answer(_Model):
    id: str
    object: str  # this and the choices are said by each kind
    created: int
    model: str
    choices: list[Any]
    usage: Usage | None = None


class CompletionResponse(_Answer):
    """Also a chunk of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TokenLogprob(_Model):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Model):
    content: list[ChatTokenLogprob]


class ChatAnswer(_Model):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Model):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: list[PromptEntry | None] | None = None
    prompt_token_ids: list[int] | None = None


class DeltaToolCall(ToolCall):
    index: int


class Delta(_Model):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChunkChoice(_Model):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | None = None


class TokenizeRequest(_Asked):
    """Either ``prompt`` or the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(_Model):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(_Model):
    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(_Model):
    prompt: str


class ErrorDetails(_Model):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Model):
    error: ErrorDetails


class WeightsRequest(_Model):
    """``model`` and ``revision`` as of the command line."""

    model: str
    revision: str | None = None
    keep_kv: bool = False


class BatchRequest(_Model):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[str, str], Field(max_length=16), _at_most(16)] | None = None
