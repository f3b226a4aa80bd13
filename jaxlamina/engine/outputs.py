"""What a caller gets back. Plain data: knows nothing of models, devices or scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """One token's log-probability at one position, under the model's own (unscaled, unfiltered) logits."""

    logprob: float
    rank: int  # 1: the likeliest token of the vocabulary
    decoded_token: str  # as inside a text, with its blank; part of a character is U+FFFD


# One position: token id → Logprob, the token that stands there first, then the likeliest ones in order.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt. ``index``: which of the request's sequences it was, or its rank where the
    best are chosen at the end (``best_of``, beam search). The other fields as in ``RequestOutput``.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[PositionLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    ``outputs`` are its ``n`` continuations; the fields beside it are the first one's, which is the best where
    several were ranked.

    ``token_ids`` are all generated tokens, the one that stopped it included; ``text`` leaves out the stop
    string, the stop token and special tokens. ``logprobs`` (one entry a token) is None unless asked for.
    ``finish_reason``: "stop" (end-of-sequence or stop token, or stop string), "length" (``max_tokens`` or the
    model's length), "abort" (the caller gave up, or a grammar outgrew its library's limits). ``stop_reason``
    says which stop string or stop token it was, None for the model's own end-of-sequence token.
    ``cumulative_logprob``: of all its tokens; None unless logprobs were asked for or sequences were ranked by
    it. ``n_cached_tokens``: prompt tokens whose KV was there. ``prompt_logprobs``: one entry a prompt token,
    None for the first, which follows nothing (and for what an aborted request did not come to); None unless
    asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    n_preemptions: int = 0
    n_cached_tokens: int = 0
    outputs: tuple[CompletionOutput, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None


class TokenEvent(msgspec.Struct, frozen=True):
    """One token of a request. ``new_text`` may be empty: half a character, or held for a stop string.

    ``index``: which of the request's continuations it is of. Where the continuations that are given are
    chosen at the end (``best_of``, beam search), all of their events come then; the last token's has the rest
    of the text. ``error``: why the request had to be ended, with no ``output``; it has no more events.
    ``logprobs``: the token's entry, where they are asked for; ``prompt_logprobs``: with the request's first
    event. ``is_again``: it was written before, in an earlier process (`Engine.add_job`); ``n_tokens``: how
    many of its continuation's tokens it stands for then, of which it is the last. ``n_found``: of the tokens
    before it, those whose KV was there; with the first event that is new of a continuation that was computed
    by itself.
    """

    request_id: str
    token_id: int
    new_text: str
    output: RequestOutput | None  # with its last event, once all of the request is finished
    index: int = 0
    logprobs: PositionLogprobs | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    error: Exception | None = None
    is_again: bool = False
    n_tokens: int = 1
    n_found: int | None = None


def events_at_end(output: RequestOutput) -> list[TokenEvent]:
    """Every token of continuations that are known only now."""
    events: list[TokenEvent] = []
    for completion in output.outputs:
        last = len(completion.token_ids) - 1
        for i, token in enumerate(completion.token_ids):
            closes = i == last and completion is output.outputs[-1]
            event = TokenEvent(
                output.request_id,
                token,
                completion.text if i == last else "",
                output if closes else None,
                completion.index,
                None if completion.logprobs is None else completion.logprobs[i],
                None if events else output.prompt_logprobs,
            )
            events.append(event)
    return events
