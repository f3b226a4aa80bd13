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
class RequestOutput:
    """A finished request.

    ``token_ids`` are all generated tokens, the one that stopped it included; ``text`` leaves out the stop
    string, the stop token and special tokens. ``logprobs`` (one entry a token) is None unless asked for.
    ``finish_reason``: "stop" (end-of-sequence or stop token, or stop string), "length" (``max_tokens`` or
    the model's length), "abort" (the caller gave up). ``stop_reason`` says which stop string or stop token
    it was, None for the model's own end-of-sequence token.
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
