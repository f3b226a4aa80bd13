"""From a step's drawn tokens to events: each request's text, entries and end, and its beams.

Knows requests, their jobs and the scheduler, which is told who has ended and who branches; no executor and no
device but what a launched step waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from jaxlamina.engine.in_flight import LaunchedStep, Scored, StepTimes
from jaxlamina.engine.live_request import Continuation, LiveRequest
from jaxlamina.engine.logprobs import LogprobEntries
from jaxlamina.engine.outputs import PositionLogprobs, RequestOutput, TokenEvent, events_at_end
from jaxlamina.engine.request import Request, RequestState
from jaxlamina.engine.scheduler import Scheduler
from jaxlamina.errors import contained
from jaxlamina.sampling.sampler import Sampled

_Drawn = tuple[Sampled, int]  # and the row
Candidates = tuple[np.ndarray, np.ndarray]  # of a beam: likeliest tokens, their log-probabilities


@dataclass
class EngineStats:
    """Counts and seconds since the engine was made. What a step gave and nobody wanted is not counted.

    ``prefill_s + decode_s`` is all time in which there was something to do: a batch's is from when the one
    before it was read to when it was read itself.
    """

    n_steps: int = 0
    n_prompt_tokens: int = 0  # of admitted sequences, each once: computed, or found in the prefix cache
    n_prompt_tokens_computed: int = 0  # also again, and with what was written
    n_prompt_tokens_own_pace: int = 0  # of these, by prefill workers at their own pace
    n_prefix_hit_tokens: int = 0
    n_generated_tokens: int = 0
    n_decode_tokens: int = 0
    n_preemptions: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    n_prefill_steps: int = 0  # prompts and chunks of them, and
    n_decode_steps: int = 0  # decode steps that these seconds are of
    n_launches: int = 0  # programs: of a step's rows, and of each call of prompts
    launch_s: float = 0.0  # of the host, launching them, a device at work or not
    wait_s: float = 0.0  # of the host, waiting for results: next to none where it is the host that is late

    @property
    def busy_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def mean_batch_size(self) -> float:
        """Sequences that got a token, a step (FineInfer §4, average batch size)."""
        return self.n_generated_tokens / max(1, self.n_steps)


class Postprocess:
    """All requests that have not ended, and what becomes of the tokens that are drawn for them."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any | None) -> None:
        self._scheduler, self._entries = scheduler, LogprobEntries(tokenizer)
        # By id, with their sequences.
        self.live: dict[str, tuple[LiveRequest, list[Request]]] = {}

    def take_in(self, step: LaunchedStep, times: StepTimes, stats: EngineStats) -> list[TokenEvent]:
        """Waits for a step's tokens. What is for sequences that have ended since it was launched is thrown
        away."""
        events: list[TokenEvent] = []
        of_beams: dict[str, dict[int, Candidates]] = {}  # by the request's index
        n_wanted = 0
        for rows in step.batches:
            found, seconds, waited = times.read(rows)
            stats.wait_s += waited
            step.seconds += seconds
            wanted = [(row, r) for row, r in enumerate(rows.requests) if self.is_live(r)]
            n_wanted += len(wanted)
            if rows.is_decode:
                stats.decode_s += seconds
                stats.n_decode_steps += 1
                stats.n_decode_tokens += len(wanted)
            else:
                stats.prefill_s += seconds
                stats.n_prefill_steps += 1
            if rows.scored is not None and found.scored is not None:
                self._keep_scores(rows.requests[0], rows.scored, found.scored)
            if rows.logits is not None:
                continue
            stats.n_generated_tokens += len(wanted)
            for row, request in wanted:
                if request.payload.params.n_sequences > 1 and not self.is_live(request):
                    continue  # it has ended with another of its sequences
                if request.lockstep:
                    assert found.candidates is not None
                    tokens, logprobs = found.candidates
                    of_request = of_beams.setdefault(request.request_id, {})
                    of_request[request.index] = tokens[row], logprobs[row]
                else:
                    assert found.sampled is not None
                    request.n_in_flight -= 1
                    events += self._accept(request, int(found.sampled.tokens[row]), (found.sampled, row))
        events += self._advance_beams(of_beams)
        stats.n_steps += n_wanted > 0
        return events

    def _keep_scores(self, request: Request, scored: Scored, reported: Sampled) -> None:
        job: LiveRequest = request.payload
        if job.request_id in self.live and job.params.prompt_logprobs is not None:
            try:
                for row in range(scored.n):
                    entry = self._entries.of_row(reported, row, job.params.prompt_logprobs)
                    job.prompt_logprobs[scored.first + row] = entry
            except BaseException as error:  # noqa: BLE001 (its own; it ends with its first token)
                job.error = contained(error)

    def is_live(self, request: Request) -> bool:
        """Whether what is drawn for a sequence is still wanted."""
        job: LiveRequest = request.payload
        if request.request_id not in self.live:
            return False
        return job.beams is not None or job.continuations[request.index].finished is None

    def take_back(self, request: Request, tokens: Sequence[int], n_given: int) -> list[TokenEvent]:
        """What a sequence wrote in an earlier process, as if it were drawn now, up to its end. Of the first
        ``n_given`` there is one event."""
        job: LiveRequest = request.payload
        c = job.continuations[request.index]
        c.matcher = job.matcher and job.matcher.copy()
        c.n_written = len(tokens)
        request.output_token_ids = []
        events: list[TokenEvent] = []
        for n, token in enumerate(tokens, start=1):
            if not self.is_live(request):
                break
            found = self._accept(request, token, None, silent=n < n_given)
            events += found if n > n_given else [replace(event, n_tokens=n) for event in found]
        return events

    def _accept(
        self, request: Request, token: int, drawn: _Drawn | None, *, silent: bool = False
    ) -> list[TokenEvent]:
        """Takes one token into its request, and ends the request if that is to be. ``silent``: unless it
        does, its text is for a later event."""
        job: LiveRequest = request.payload
        c = job.continuations[request.index]
        request.output_token_ids.append(token)
        c.token_ids = request.output_token_ids
        try:
            entry, ended = self._read(job, c, drawn)
        except BaseException as error:  # noqa: BLE001 (its own grammar, text or entry: the others go on)
            return [self._fail(job, contained(error))]
        if silent and not ended:
            return []
        output = None
        if ended:
            self._finish(request)
            if all(other.finished for other in job.continuations):
                output = self._close(job)
        if job.params.chosen_at_end:
            return [] if output is None else events_at_end(output)
        new_text = c.text.release(finished=ended)
        n = len(c.token_ids)
        of_prompt = job.prompt_entries if c.index == 0 and n == 1 else None
        n_found = c.n_found if n == c.n_written + 1 else None
        return [
            TokenEvent(
                job.request_id,
                token,
                new_text,
                output,
                c.index,
                entry,
                of_prompt,
                is_again=n <= c.n_written,
                n_found=n_found,
            )
        ]

    def _read(
        self, job: LiveRequest, c: Continuation, drawn: _Drawn | None
    ) -> tuple[PositionLogprobs | None, bool]:
        """Takes in the newest token of ``c``: (the entry to report of it, whether it ends there)."""
        if job.error is not None:
            raise job.error
        entry = None
        if job.params.needed_logprobs is not None:
            assert drawn is not None and drawn[0].logprobs is not None
            sampled, row = drawn
            c.cumulative_logprob += float(drawn[0].logprobs[row])
            if job.params.logprobs is not None:
                entry = self._entries.of_row(sampled, row, job.params.logprobs)
                c.logprobs.append(entry)
        reason, stop_reason = job.why_stop(c, c.token_ids[-1])
        if reason is not None:
            job.finish(c, reason, stop_reason)
        return entry, reason is not None

    def _fail(self, job: LiveRequest, error: Exception) -> TokenEvent:
        """Ends a job that cannot go on."""
        self.drop(job)
        return TokenEvent(job.request_id, 0, "", None, error=error)

    def _finish(self, request: Request, *, keep: bool = True) -> None:
        job: LiveRequest = request.payload
        job.n_preemptions += request.n_preemptions
        if request.state is not RequestState.FINISHED:  # the scheduler ends one whose last token is in flight
            self._scheduler.finish(request, keep=keep)

    def _close(self, job: LiveRequest) -> RequestOutput:
        del self.live[job.request_id]
        return job.output()

    def _advance_beams(self, candidates: dict[str, dict[int, Candidates]]) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for request_id, of_request in candidates.items():
            job, members = self.live[request_id]
            assert job.beams is not None
            try:
                self._step_beams(job, [of_request[member.index] for member in members])
            except BaseException as error:  # noqa: BLE001 (its own entries)
                events.append(self._fail(job, contained(error)))
                continue
            if job.beams.done:
                for member in members:
                    self._finish(member)
                events += self._end_of_beams(job)
                continue
            members = self.branch(members, [beam.parent for beam in job.beams.live])
            for member, beam in zip(members, job.beams.live, strict=True):
                member.output_token_ids = beam.tokens
        return events

    def _end_of_beams(self, job: LiveRequest) -> list[TokenEvent]:
        del self.live[job.request_id]
        try:
            return events_at_end(job.output())
        except BaseException as error:  # noqa: BLE001 (its own text)
            return [TokenEvent(job.request_id, 0, "", None, error=contained(error))]

    def _step_beams(self, job: LiveRequest, found: Sequence[Candidates]) -> None:
        if job.error is not None:
            raise job.error
        assert job.beams is not None
        width = min(len(row) for row, _ in found)  # rows may come of batches with others that look at more
        tokens = np.stack([row[:width] for row, _ in found])
        logprobs = np.stack([row[:width] for _, row in found])
        job.beams.step(tokens, logprobs, self._entries.of_beams(tokens, logprobs, job.params.logprobs))

    def drop(self, job: LiveRequest) -> None:
        for request in self.live[job.request_id][1]:
            if self.is_live(request):
                self._finish(request, keep=False)
        job.abort()
        del self.live[job.request_id]

    def branch(self, members: Sequence[Request], parents: Sequence[int]) -> list[Request]:
        requests = self._scheduler.branch(members, parents)
        job, _ = self.live[requests[0].request_id]
        self.live[job.request_id] = job, requests
        return requests
