"""Requests and answers of the API, field by field, as OpenAI and vLLM name them.

Types and ranges only: what a field does to sampling is `parameters`' affair. Unknown fields are ignored, as vLLM does.
Numbers are bounded so that nothing a client sends can break a step that others are in.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
MAX_N = 128
MAX_PROMPTS = 1024
MAX_STOPS = 16
_StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(_Model):
    include_usage: bool = False


class ResponseFormat(_Model):
    type: str
    json_schema: dict[str, Any] | None = None


class SamplingFields(_Model):
    """What both kinds of completions take. None: the default."""

    model: str | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    use_beam_search: bool = False
    beam_width: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    length_penalty: Annotated[Finite, Field(ge=-10, le=10)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop: _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=2)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    bad_words: Annotated[list[_StopText], Field(max_length=MAX_STOPS)] | None = None
    # Of these only the value that changes nothing is taken (`parameters.NOT_YET`).
    allowed_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None


class CompletionRequest(SamplingFields):
    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = (
        None  # 0: the prompt is echoed, and nothing written
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
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
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(_Model):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Model):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatFields(_Model):
    """What a chat's prompt is made of."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    # As `SamplingFields` above.
    chat_template: str | None = None
    continue_final_message: bool | None = None


class ChatCompletionRequest(ChatFields, SamplingFields):
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # As `SamplingFields` above.
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


class _Answer(_Model):
    id: str
    object: str  # this and the choices are said by each kind
    created: int = Field(default_factory=lambda: int(time.time()))
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
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Model):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None


class ChatCompletionResponse(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: list[PromptEntry | None] | None = None


class DeltaToolCall(ToolCall):
    index: int


class Delta(_Model):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChunkChoice(_Model):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]


class TokenizeRequest(_Model):
    """Either ``prompt`` or the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(_Model):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(_Model):
    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(_Model):
    prompt: str


class BatchRequest(_Model):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
