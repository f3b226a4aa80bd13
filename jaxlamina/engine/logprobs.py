"""The log-probabilities that are reported of a position, made of what the sampler gave of a row.

Knows numbers and a tokenizer; nothing of requests, scheduling or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxlamina.engine.outputs import Logprob, PositionLogprobs
from jaxlamina.sampling.sampler import Sampled


class LogprobEntries:
    """Makes one entry a position; tokens are shown as they are inside a text of ``tokenizer``'s, with U+FFFD
    for part of a character, or as nothing without one."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._decoded: dict[int, str] = {}

    def of_row(self, sampled: Sampled, row: int, n_top: int) -> PositionLogprobs:
        """Of the token that ``row`` has, drawn or given, and the ``n_top`` likeliest ones."""
        assert sampled.logprobs is not None and sampled.ranks is not None
        assert sampled.top_tokens is not None and sampled.top_logprobs is not None
        chosen = int(sampled.tokens[row]), sampled.logprobs[row], sampled.ranks[row]
        return self._entry(chosen, sampled.top_tokens[row], sampled.top_logprobs[row], n_top)

    def of_beams(
        self, tokens: np.ndarray, logprobs: np.ndarray, n_top: int | None
    ) -> Callable[[int, int], PositionLogprobs] | None:
        """``(beam, column)`` → the entry of ``tokens[beam, column]``, of each beam's likeliest, likeliest
        first; None if none is wanted."""
        if n_top is None:
            return None

        def entry(beam: int, column: int) -> PositionLogprobs:
            chosen = int(tokens[beam, column]), logprobs[beam, column], column + 1
            return self._entry(chosen, tokens[beam], logprobs[beam], n_top)

        return entry

    def _entry(
        self, chosen: tuple[int, Any, Any], top_tokens: Any, top_logprobs: Any, n_top: int
    ) -> PositionLogprobs:
        """The chosen (token, log-probability, rank) and the ``n_top`` likeliest ones."""
        entry = {chosen[0]: self._logprob(*chosen)}
        tops = zip(top_tokens[:n_top], top_logprobs[:n_top], strict=True)
        for rank, (top, logprob) in enumerate(tops, start=1):
            entry.setdefault(int(top), self._logprob(int(top), logprob, rank))
        return entry

    def _logprob(self, token: int, logprob: Any, rank: Any) -> Logprob:
        return Logprob(float(logprob), int(rank), self._shown(token))

    def _shown(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        if token not in self._decoded:  # the same ones come again and again
            self._decoded[token] = self._tokenizer.token_bytes(token).decode("utf-8", "replace")
        return self._decoded[token]
