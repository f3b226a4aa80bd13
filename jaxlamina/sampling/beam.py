"""Beam search as policy: which continuations of which beams live on, which are finished, and when to stop.

Plain data: it gets each live beam's likeliest next tokens and knows no model, slots or text. Names and scores
are vLLM's: a step looks at the 2 x width likeliest continuations of all beams together; of these, those that
end are finished, and the first ``width`` of the others live on. A score is the cumulative log-probability
divided by length ** length_penalty, the prompt's tokens counted and an end token not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Beam:
    """A live continuation. ``parent``: its place among the beams before the last step. ``entries``: one a
    token, the caller's own."""

    tokens: list[int]
    cumulative: float
    parent: int = 0
    entries: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation; ``ended_by`` is its last token where that ended it."""

    tokens: list[int]
    cumulative: float
    score: float
    entries: list[Any]
    ended_by: int | None


class BeamSearch:
    """The beams of one prompt. ``step`` until ``done``; then ``finished`` are the best ``width``, best first.

    It stops early only where no live beam can still get among them.
    """

    def __init__(
        self,
        width: int,
        *,
        prompt_len: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        end_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        if width < 1:
            raise ValueError(f"{width=} must be at least 1")
        if prompt_len < 1 or max_tokens < 1:
            raise ValueError(f"{prompt_len=} and {max_tokens=} must be at least 1")
        self.width = width
        self.prompt_len = prompt_len
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.end_ids = frozenset(end_ids)
        self.min_tokens = min_tokens
        self.live = [Beam([], 0.0)]
        self.finished: list[Hypothesis] = []

    @property
    def n_candidates(self) -> int:
        """How many of each beam's likeliest tokens a step needs, so that ``width`` of all do not end."""
        return self.width * max(2, 1 + len(self.end_ids))

    @property
    def done(self) -> bool:
        if not self.live:
            return True
        return len(self.finished) >= self.width and self.finished[-1].score >= self._attainable()

    def step(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        entry: Callable[[int, int], Any] | None = None,
    ) -> None:
        """Takes one token more: ``tokens``, ``logprobs`` ``[live beams, n]``, each beam's likeliest, in any
        order.

        ``entry(beam, column)`` makes the entry of a token that is taken.
        """
        assert tokens.shape == logprobs.shape and len(tokens) == len(self.live)
        n_tokens = len(self.live[0].tokens) + 1
        totals = np.asarray(logprobs, np.float64) + np.asarray([[beam.cumulative] for beam in self.live])
        order = np.argsort(-totals, axis=None, kind="stable")
        new: list[Beam] = []
        n_seen = 0
        for at in order.tolist():
            row, column = divmod(at, tokens.shape[1])
            token, total = int(tokens[row, column]), float(totals[row, column])
            ends = token in self.end_ids
            if total == -np.inf or (ends and n_tokens <= self.min_tokens):
                continue
            n_seen += 1
            if len(new) == self.width and (n_seen > self.n_candidates or not self.end_ids):
                break
            if not ends and len(new) == self.width:
                continue
            parent = self.live[row]
            entries = parent.entries if entry is None else [*parent.entries, entry(row, column)]
            beam = Beam([*parent.tokens, token], total, row, entries)
            if not ends:
                new.append(beam)
            elif n_seen <= self.n_candidates:
                self._finish(beam, token)
        if n_tokens == self.max_tokens:
            for beam in new:
                self._finish(beam, None)
            new = []
        self.live = new

    def best(self) -> list[Hypothesis]:
        """The best ``width`` there are by now, live ones as if they ended here."""
        everyone = self.finished + [self._hypothesis(beam, None) for beam in self.live if beam.tokens]
        return sorted(everyone, key=lambda h: -h.score)[: self.width]

    def _finish(self, beam: Beam, ended_by: int | None) -> None:
        self.finished.append(self._hypothesis(beam, ended_by))
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self.width :]

    def _hypothesis(self, beam: Beam, ended_by: int | None) -> Hypothesis:
        length = self.prompt_len + len(beam.tokens) - (ended_by is not None)
        score = beam.cumulative / length**self.length_penalty
        return Hypothesis(beam.tokens, beam.cumulative, score, beam.entries, ended_by)

    def _attainable(self) -> float:
        """No live beam's score can end above this: log-probabilities only fall, and of the lengths it may
        still get the longest is the best one for a positive penalty, the shortest for a negative one."""
        n = self.max_tokens if self.length_penalty >= 0 else len(self.live[0].tokens)
        return max(beam.cumulative for beam in self.live) / (self.prompt_len + n) ** self.length_penalty
