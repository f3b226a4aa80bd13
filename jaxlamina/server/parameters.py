"""From a request's fields to `SamplingParams`: which are passed on, and which are refused because nothing
does them yet.

The one place where both are written down.
"""

from __future__ import annotations

from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.sampling.structured import StructuredOutputs
from jaxlamina.server.errors import of_user_error, refused
from jaxlamina.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields
from jaxlamina.server.tools import call_schema, tool_use

# Fields that mean the same in a request and in `SamplingParams`.
PASSED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "use_beam_search", "beam_width"),
    *("length_penalty", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "allowed_token_ids"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    "truncate_prompt_tokens",
)

# field → the values that change nothing; with any other the request is refused.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none"),
}


def sampling_params(body: CompletionRequest | ChatCompletionRequest) -> SamplingParams:
    """How a request is continued. Raises `ApiError` that names the field which is wrong or not supported."""
    check_supported(body)
    given = {name: getattr(body, name) for name in PASSED if getattr(body, name) is not None}
    if isinstance(body, ChatCompletionRequest):
        if body.max_completion_tokens is not None:
            given["max_tokens"] = body.max_completion_tokens
        given.setdefault("max_tokens", None)  # an answer may be as long as there is room; a completion has 16
        if body.top_logprobs is not None and not body.logprobs:
            raise refused("top_logprobs needs logprobs=true", "top_logprobs")
        given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    else:
        given["logprobs"] = body.logprobs
        if body.max_tokens == 0:
            if not body.echo:
                raise refused(
                    "max_tokens=0 writes nothing: ask for at least 1, or for the prompt by echo=true",
                    "max_tokens",
                )
            given["max_tokens"] = 1  # the model writes one, which is not given out
    given["prompt_logprobs"] = _prompt_logprobs(body)
    if body.use_beam_search:
        given.setdefault("temperature", 0.0)  # beam search draws nothing
    given["logit_bias"] = _logit_bias(body.logit_bias or {})
    seed = given.pop("seed", -1)
    if seed != -1:  # which vLLM's clients send for none
        given["seed"] = seed % 2**64
    try:
        return SamplingParams(**given, structured_outputs=_structured(body))
    except UserError as error:
        raise of_user_error(error) from None


def _prompt_logprobs(body: CompletionRequest | ChatCompletionRequest) -> int | None:
    """What is asked for by vLLM's field, by OpenAI's ``echo`` with ``logprobs``, or by both."""
    if body.prompt_logprobs is not None and body.stream:
        raise refused(
            "prompt_logprobs are not streamed: leave stream out, or take echo with logprobs",
            "prompt_logprobs",
        )
    asked = [body.prompt_logprobs]
    if isinstance(body, CompletionRequest) and body.echo:
        asked.append(body.logprobs)
    return max((n for n in asked if n is not None), default=None)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    """By token ids, which are keys of an object, and so text."""
    odd = next((key for key in given if not key.isdecimal() or len(key) > 10), None)
    if odd is not None:
        raise refused(f"logit_bias {odd!r:.40} must be a token id", "logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _structured(body: SamplingFields) -> StructuredOutputs | None:
    """What a call that is forced, ``response_format`` (OpenAI's) or ``structured_outputs`` (vLLM's) ask
    for."""
    wanted = _structured_field(body)
    use, tools = tool_use(body) if isinstance(body, ChatCompletionRequest) else ("none", ())
    if use != "forced":
        return wanted
    if wanted is not None:
        raise refused(
            "tool_choice asks for a call, and response_format or structured_outputs for something else: "
            "give one",
            "tool_choice",
        )
    return StructuredOutputs(json=call_schema(tools))


def _structured_field(body: SamplingFields) -> StructuredOutputs | None:
    format_ = body.response_format
    asked = format_ is not None and format_.type != "text"
    names = ("json", "regex", "choice", "grammar")
    old = {name: x for name in names if (x := getattr(body, f"guided_{name}")) is not None}
    given = {"response_format": asked, "structured_outputs": body.structured_outputs is not None}
    ways = [name for name, is_given in given.items() if is_given] + [f"guided_{name}" for name in old]
    if len(ways) > 1:
        raise refused(f"{ways[0]} and {ways[1]} are two ways to say it: give one", ways[0])
    if ways and not asked:
        return StructuredOutputs.of(old or body.structured_outputs or {})
    if not asked:
        return None
    assert format_ is not None
    if format_.type == "json_object":
        return StructuredOutputs(json={"type": "object"})
    schema = (format_.json_schema or {}).get("schema")
    if format_.type != "json_schema" or not isinstance(schema, dict):
        raise refused(
            'response_format must be {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", '
            '"json_schema": '
            '{"name": …, "schema": {…}}}',
            "response_format",
        )
    return StructuredOutputs(json=schema)


def check_supported(body: SamplingFields) -> None:
    """Raises `ApiError` for a field that asks for what is not done."""
    for name, harmless in NOT_YET.items():
        value = getattr(body, name, None)
        if value not in harmless:
            raise refused(f"{name} is not supported: leave it out", name)
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options needs stream=true", "stream_options")
