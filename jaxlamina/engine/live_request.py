"""What the engine keeps of a request beside its tokens and slots: its continuations, their text, and what
comes of it.

Knows sampling parameters, text and outputs; nothing of slots, scheduling or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from jaxlamina.engine.outputs import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput
from jaxlamina.errors import contained
from jaxlamina.sampling.adjustments import NOT_ADJUSTED, Adjusted, Counted, bans_of
from jaxlamina.sampling.beam import BeamSearch, Hypothesis
from jaxlamina.sampling.params import SamplingParams, seed_of
from jaxlamina.sampling.sampler import Row
from jaxlamina.sampling.structured import Matcher
from jaxlamina.text.generated import GeneratedText


@dataclass
class Continuation:
    """One sequence that is drawn for a prompt. ``token_ids`` is its request's own list."""

    index: int
    seed: int
    text: GeneratedText
    matcher: Matcher | None = None  # where it is in its grammar, while it is being written
    counted: Counted | None = None  # what its penalties count, if it has any
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    n_written: int = 0  # tokens that it wrote in an earlier process
    n_found: int | None = None  # of the prompt's tokens and its own, whose KV was there in this process
    finished: CompletionOutput | None = None


@dataclass
class LiveRequest:
    """A request of the engine's: ``params.n_sequences`` continuations, or a beam search."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    end_ids: tuple[int, ...]  # tokens that end it; not to be chosen before min_tokens
    new_text: Callable[[], GeneratedText]
    bad_words: tuple[tuple[int, ...], ...] = ()  # the tokens of each
    allowed: np.ndarray | None = None  # the only tokens, as `Adjusted.mask`
    matcher: Matcher | None = None  # at the beginning of its grammar
    continuations: list[Continuation] = field(default_factory=list)
    beams: BeamSearch | None = None
    n_cached_tokens: int | None = None  # of its prompt, whose KV was there when it was first computed
    n_preemptions: int = 0
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)  # if wanted: one a token
    error: Exception | None = None  # why it cannot go on

    def __post_init__(self) -> None:
        p = self.params
        if p.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt_token_ids)
        if p.use_beam_search:
            self.beams = BeamSearch(
                p.n_sequences,
                prompt_len=len(self.prompt_token_ids),
                max_tokens=self.max_tokens,
                length_penalty=p.length_penalty,
                end_ids=self.end_ids,
                min_tokens=p.min_tokens,
            )
        else:
            self.continuations = [
                Continuation(i, seed_of(self.seed, i), self.new_text()) for i in range(p.n_sequences)
            ]

    @cached_property
    def is_plain(self) -> bool:
        """Whether each of its tokens is the likeliest, and nothing else is wanted of it."""
        p = self.params
        return p.greedy and not (p.adjusts or p.min_tokens or p.use_beam_search or self._wants_entries)

    @property
    def may_go_on(self) -> bool:
        """Whether its tokens so far are all that another process needs to go on with it."""
        return self.beams is None and not self._wants_entries

    @property
    def _wants_entries(self) -> bool:
        return self.params.needed_logprobs is not None or self.params.prompt_logprobs is not None

    def row(
        self, index: int, *, position: int, known: Sequence[int], n_in_flight: int, newest_follows: bool
    ) -> Row:
        """How the next token of continuation ``index``, for ``position``, is drawn.

        ``known``: the tokens written, ``n_in_flight`` later ones not in it. ``newest_follows``: the newest of
        all, known or not, is given on the device.
        """
        p = self.params
        if self.beams is not None:
            return _NOT_DRAWN
        c = self.continuations[index]
        if c.matcher is None and self.matcher is not None:
            c.matcher = self.matcher.copy()
        too_early = len(known) + n_in_flight < p.min_tokens
        ends = self.end_ids if too_early else ()
        if not p.adjusts:
            return Row(p, c.seed, position, Adjusted(banned=ends) if ends else NOT_ADJUSTED)
        written = known[:-1] if newest_follows and not n_in_flight else known
        banned, banned_after = bans_of(self.bad_words, written, newest_follows=newest_follows)
        asked = Adjusted(
            mask=self.allowed if c.matcher is None else c.matcher.mask(),
            banned=(*ends, *banned),
            banned_after=banned_after,
            logit_bias=p.logit_bias or {},
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            repetition_penalty=p.repetition_penalty,
            counted=self._counted(c, written) if p.penalises else None,
        )
        return Row(p, c.seed, position, asked)

    def _counted(self, c: Continuation, written: Sequence[int]) -> Counted:
        if c.counted is None:
            c.counted = Counted(self.prompt_token_ids if self.params.repetition_penalty != 1 else ())
        c.counted.go_on(written)
        return c.counted

    def stop_of(self, token: int) -> int | None:
        """What ``stop_reason`` says of an end token: None for the model's own end of sequence."""
        return token if token in (self.params.stop_token_ids or ()) else None

    def why_stop(self, c: Continuation, token: int) -> tuple[FinishReason | None, str | int | None]:
        """Why ``token``, the newest of ``c``, ends it, and which stop string or token did; (None, None) if it
        does not. Its text and its grammar have taken the token in then."""
        n = len(c.token_ids)
        if token in self.end_ids and n > self.params.min_tokens:
            if self.params.include_stop_str_in_output:
                c.text.add(token, may_stop=False)
            return "stop", self.stop_of(token)
        if c.text.add(token, may_stop=n > self.params.min_tokens):
            return "stop", c.text.stopped_by
        ended = None if c.matcher is None else c.matcher.accept(token)
        if ended is not None:
            return ended, None
        if n >= self.max_tokens:
            return "length", None
        return None, None

    def finish(self, c: Continuation, reason: FinishReason, stop_reason: str | int | None) -> None:
        """No more tokens for one continuation; text that was held back may still complete a stop string."""
        if c.text.finish():
            reason, stop_reason = "stop", c.text.stopped_by
        c.finished = self._completion(c, reason, stop_reason)
        c.matcher = None

    def _completion(
        self, c: Continuation, reason: FinishReason, stop_reason: str | int | None
    ) -> CompletionOutput:
        asked = self.params.logprobs is not None
        return CompletionOutput(
            c.index,
            c.text.text,
            tuple(c.token_ids),
            c.cumulative_logprob if self.params.needed_logprobs is not None else None,
            tuple(c.logprobs) if asked else None,
            reason,
            stop_reason,
        )

    def abort(self) -> None:
        """Ends the continuations that have not ended. Nothing stops it."""
        for c in self.continuations:
            if c.finished is None:
                try:
                    self.finish(c, "abort", None)
                except BaseException as error:  # noqa: BLE001 (it may be text that cannot be made for which it ends)
                    contained(error)
                    c.finished = self._completion(c, "abort", None)

    def output(self) -> RequestOutput:
        """All continuations are finished, or the beam search is where it is to end: what the caller gets."""
        outputs = self._ranked() if self.beams is None else self._of_beams(self.beams)
        first = outputs[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            stop_reason=first.stop_reason,
            logprobs=first.logprobs,
            cumulative_logprob=first.cumulative_logprob,
            n_preemptions=self.n_preemptions,
            n_cached_tokens=self.n_cached_tokens or 0,
            outputs=outputs,
            prompt_logprobs=self.prompt_entries,
        )

    @property
    def prompt_entries(self) -> tuple[PositionLogprobs | None, ...] | None:
        """``prompt_logprobs`` as they are given out; None unless they are wanted."""
        return None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs)

    def _ranked(self) -> tuple[CompletionOutput, ...]:
        found = [c.finished for c in self.continuations if c.finished is not None]
        if not self.params.chosen_at_end:
            return tuple(found)
        found.sort(key=lambda out: -(out.cumulative_logprob or 0.0))
        return tuple(replace(out, index=i) for i, out in enumerate(found[: self.params.n]))

    def _of_beams(self, beams: BeamSearch) -> tuple[CompletionOutput, ...]:
        reason: FinishReason = "length" if beams.done else "abort"
        best = beams.best()[: self.params.n] or [Hypothesis([], 0.0, 0.0, [], None)]
        return tuple(self._of_beam(i, h, reason) for i, h in enumerate(best))

    def _of_beam(self, index: int, h: Hypothesis, unended: FinishReason) -> CompletionOutput:
        text = self.new_text()
        for token in h.tokens[: None if h.ended_by is None or self.params.include_stop_str_in_output else -1]:
            text.add(token)
        text.finish()
        reason: FinishReason = unended
        if h.ended_by is not None:
            reason = "stop"
        elif len(h.tokens) == self.max_tokens:
            reason = "length"
        return CompletionOutput(
            index,
            text.text,
            tuple(h.tokens),
            h.cumulative,
            tuple(h.entries) if self.params.logprobs is not None else None,
            reason,
            None if h.ended_by is None else self.stop_of(h.ended_by),
        )


_NOT_DRAWN = Row(SamplingParams(temperature=0.0), 0, 0)  # for rows whose choice is thrown away
