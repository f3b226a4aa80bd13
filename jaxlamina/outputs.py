"""What a caller gets back. Plain data: knows nothing of models, devices or scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """One token's log-probability at one position, under the model's own (unscaled, unfiltered) logits."""

    logprob: float
    rank: int  # 1: the likeliest token of the vocabulary
    decoded_token: str


# One generated position: token id → Logprob, the chosen token first, then the likeliest ones in order.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt. ``index``: which of the request's sequences it was, or its rank where the best are
    chosen at the end (``best_of``, beam search). The other fields as in ``RequestOutput``.
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
    ``finish_reason``: "stop" (end-of-sequence or stop token, or stop string), "length" (``max_tokens`` or
    the model's length), "abort" (the caller gave up, or a grammar outgrew its library's limits). ``stop_reason`` says which stop string or stop token
    it was, None for the model's own end-of-sequence token. ``cumulative_logprob``: of all its tokens; None unless
    logprobs were asked for or sequences were ranked by it. ``n_cached_tokens``: prompt tokens whose KV was there.
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
