"""The engine: ``step()`` schedules, runs and postprocesses one iteration over all requests.

A step is launched and its tokens are read as two things, so that the next step can be launched in between: the device
then has it when this one is done, and takes the tokens from its own memory.

Knows requests, slots, sampling and text; the model is an executor that turns batches into logits, so the
same engine runs split, unsplit or with an imaginary model in a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxlamina.admission import Admission
from jaxlamina.buckets import Buckets, Compiled, Shape
from jaxlamina.drawing import Drawing
from jaxlamina.errors import UserError, contained
from jaxlamina.in_flight import LaunchedRows, LaunchedStep, Scored, StepTimes
from jaxlamina.jobs import Continuation, LiveRequest
from jaxlamina.kv import HostTier, PrefixCache, SlotAllocator
from jaxlamina.logprobs import LogprobEntries
from jaxlamina.outputs import PositionLogprobs, RequestOutput, TokenEvent, events_at_end
from jaxlamina.policies import Policy
from jaxlamina.request import Request, RequestState
from jaxlamina.run.executor import Executor
from jaxlamina.sampling import Sampled, Sampler, SamplingParams
from jaxlamina.scheduler import Scheduler
from jaxlamina.step_plan import RunTogether, StepPlan
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.step import PromptPart, Step


@dataclass
class EngineStats:
    """Counts and seconds since the engine was made. What a step gave and nobody wanted is not counted.

    ``prefill_s + decode_s`` is all time in which there was something to do: a batch's is from when the one before it was
    read to when it was read itself.
    """

    n_steps: int = 0
    n_prompt_tokens: int = 0  # of admitted sequences: those computed and those found in the prefix cache
    n_prompt_tokens_computed: int = 0
    n_prefix_hit_tokens: int = 0
    n_generated_tokens: int = 0
    n_decode_tokens: int = 0
    n_preemptions: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    n_prefill_steps: int = 0  # prompts and chunks of them, and
    n_decode_steps: int = 0  # decode steps that these seconds are of
    launch_s: float = 0.0  # of the host, launching programs, a device at work or not
    wait_s: float = 0.0  # of the host, waiting for results: next to none where it is the host that is late

    @property
    def mean_batch_size(self) -> float:
        """Sequences that got a token, a step (FineInfer §4, average batch size)."""
        return self.n_generated_tokens / max(1, self.n_steps)


class Engine:
    """Requests in, token events out, one ``step`` at a time.

    ``prefix_caching`` keeps the KV of prompts and of what was written, until the room is needed.
    ``host_kv_slots``: tokens whose KV may wait in host memory while others need the room; the executor must have as
    many. ``kv_slot_bytes``: a token's KV, for the counters. ``max_num_batched_tokens``: a longer prompt is computed in
    chunks of so many tokens, a step each, so that running requests go on meanwhile; None: prompts are computed whole.
    ``mixed_steps``: a step's first prompt or chunk is computed in the program of its decodes, which then reads weights once
    for both; there is a program for each pair of sizes. An executor with prefill workers computes all prompts on these, beside the decodes, one prompt or chunk of each worker a step.
    ``async_scheduling``: launch each step before the tokens of the one before it are looked at. Results are the same.
    ``policy`` (None: first come, first served), ``padded`` and ``headroom`` are the scheduler's.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Any | None = None,
        *,
        vocab_size: int,
        buckets: Buckets,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        prefix_caching: bool = True,
        host_kv_slots: int = 0,
        kv_slot_bytes: int = 0,
        max_num_batched_tokens: int | None = None,
        mixed_steps: bool = False,
        async_scheduling: bool = True,
        policy: Policy | None = None,
        padded: bool = False,
        headroom: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.executor = executor
        self.capabilities = executor.capabilities
        self.buckets = buckets
        self.sizes = Compiled(buckets)
        slots = SlotAllocator(executor.n_slots)
        if self.capabilities.places_tokens:
            slots.note_freed()
        self.scheduler = Scheduler(
            slots,
            max_num_seqs=max_num_seqs,
            prefill_chunk=max_num_batched_tokens,
            prefix_cache=PrefixCache(slots) if prefix_caching else None,
            host=HostTier(slots, host_kv_slots, bytes_per_token=kv_slot_bytes) if host_kv_slots else None,
            policy=policy,
            padded=padded,
            headroom=headroom,
            n_prefill_workers=self.capabilities.n_prefill_workers,
        )
        self.drawing = Drawing(max_num_seqs, self.sizes, vocab_size, len(eos_token_ids))
        self._entries = LogprobEntries(tokenizer)
        self.stats = EngineStats()
        self.async_scheduling = async_scheduling and not self.capabilities.needs_host_tokens
        if mixed_steps and (why := self.capabilities.why_not_mixed):
            raise UserError(why)
        self.mixed_steps = mixed_steps
        self._ahead: LaunchedStep | None = None  # launched, and not read
        self._times = StepTimes(clock)
        self.before_step: Callable[[], None] | None = None  # called first in every step
        self.admission = Admission(
            tokenizer,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            seed=seed,
        )
        self._live: dict[str, tuple[LiveRequest, list[Request]]] = {}
        # Requests that were there when a step failed: what their slots hold is not known.
        self._lost: set[str] = set()

    @property
    def sampler(self) -> Sampler:
        return self.drawing.sampler

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is to be read."""
        return self.scheduler.idle and self._ahead is None

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queues a request and returns its id. ``UserError`` for a prompt or parameters that cannot be served.

        ``priority``: lower goes first, where the scheduling policy looks at it.
        """
        return self.add_job(self.admission.job(prompt_token_ids, params, prompt), priority=priority)

    def add_job(self, job: LiveRequest, *, priority: int = 0, caller: Hashable | None = None) -> str:
        """Queues what `Admission.job` made, maybe in another thread. ``caller``: whoever else's turn it is, is not kept
        waiting by many jobs of one caller; jobs without one are served as they come."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UserError(f"{priority=} must be a whole number; lower goes first")
        params = job.params
        width, lockstep = params.n_sequences, params.use_beam_search
        request = Request(
            job.request_id,
            job.prompt_token_ids,
            job.max_tokens,
            job,
            width=width,
            lockstep=lockstep,
            priority=priority,
            caller=caller,
            scores_prompt=params.prompt_logprobs is not None,
        )
        self.scheduler.add(request)
        self._live[job.request_id] = job, [request]
        return job.request_id

    def step(self) -> list[TokenEvent]:
        """One iteration: every running sequence gets one token, newly admitted ones their first once their prompt is
        computed. With ``async_scheduling`` the iteration after it has been launched when it returns.

        What one request alone makes fail (its grammar, its text) ends it with an event that has the ``error``. What else fails
        is raised as it is. Requests that were there must then be aborted: ``UserError`` before they are.
        """
        if lost := self._lost & self._live.keys():
            raise UserError(f"a step failed while these requests ran, abort them: {', '.join(sorted(lost))}")
        if self.before_step is not None:
            self.before_step()
        try:
            step = self._ahead or self._launch()
            self._ahead = None
            if step is None:
                return []
            if self.async_scheduling and not step.shapes_next:
                self._ahead = self._launch()
            events = self._take_in(step)
        except BaseException:
            self._ahead, self._lost = None, set(self._live)
            self.scheduler.forget_cached()  # it may name KV that this step was to compute
            raise
        self._forget_unwanted()
        return events

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request early and frees its slots; None if there is no such request any more, or its text cannot be made."""
        if request_id not in self._live:
            return None
        job, _ = self._live[request_id]
        self._drop(job)
        self._forget_unwanted()
        try:
            return job.output()
        except BaseException as error:  # noqa: BLE001 (of beams)
            contained(error)
            return None

    def _drop(self, job: LiveRequest) -> None:
        for request in self._live[job.request_id][1]:
            if self._is_live(request):
                self._finish(request, keep=False)
        job.abort()
        del self._live[job.request_id]

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self.scheduler.forget_cached()

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` unless every slot in use belongs to exactly the requests that run and the cache."""
        self.scheduler.check_integrity()

    def kv_stats(self) -> dict[str, int]:
        """Slots that requests hold, those that several do, slots that only the prefix cache holds, and what went to the host
        and back."""
        scheduler, host = self.scheduler, self.scheduler.host
        n_used = scheduler.n_used
        return {
            "kv_slots": scheduler.slots.capacity,
            "kv_slots_used": n_used,
            "kv_slots_shared": scheduler.n_shared,
            "kv_slots_cached": scheduler.slots.n_used - n_used,
            "host_kv_slots": host.capacity if host else 0,
            "host_kv_slots_used": host.n_used if host else 0,
            "n_moved_out_tokens": host.moved_out_tokens if host else 0,
            "n_moved_in_tokens": host.moved_in_tokens if host else 0,
            "moved_out_bytes": host.moved_out_bytes if host else 0,
            "moved_in_bytes": host.moved_in_bytes if host else 0,
        }

    # -- launching ----------------------------------------------------------------------------------------------

    def _launch(self) -> LaunchedStep | None:
        """Launches the next step; None if there is none. Of the one before it nothing need be known yet."""
        if self.scheduler.idle:
            return None
        self._times.begin()
        plan = self.scheduler.schedule()
        if not plan.requests:  # the last tokens of all are in flight
            return None
        self.stats.n_preemptions += len(plan.preempted)
        self._move(plan)
        self.drawing.begin()
        n_workers = self.capabilities.n_prefill_workers
        runs = plan.runs(n_prefill_workers=n_workers, mixed=self.mixed_steps)
        return LaunchedStep([rows for run in runs for rows in self._run(run)])

    def _move(self, plan: StepPlan) -> None:
        for move in plan.moves_out:
            if len(move.source):
                self.executor.move_out(move.source, move.target)
        for move in plan.moves_in:
            if len(move.source):
                self.executor.move_in(move.source, move.target)
        for move in plan.moves_again:
            self.executor.move_out(move.source, move.target)
        if plan.prefills and self.capabilities.places_tokens:
            # newcomers choose a worker by what each one holds
            self.executor.release(self.scheduler.slots.take_freed())

    def _run(self, run: RunTogether) -> list[LaunchedRows]:
        """Launches one of the executor's steps, and the choice of its tokens."""
        of_rows, of_prompts = self._sizes(run)
        batch = None if of_rows is None else self._decode_batch(run.decodes, of_rows)
        parts = [
            PromptPart(self._prefill_batch(request, span, size), request.scores_prompt, request.worker)
            for (request, span), size in zip(run.prompts, of_prompts, strict=True)
        ]
        step = Step(batch, tuple(parts))
        logits, seconds = self._times.timed(lambda: self.executor.run(step))
        self.stats.launch_s += seconds
        found = []
        if batch is not None:
            assert logits.decodes is not None
            found.append(self._launched(self.drawing.draw(run.decodes, logits.decodes, batch.tokens)))
        for prompt, of_prompt in zip(run.prompts, logits.prompts, strict=True):
            found.append(self._prefilled(*prompt, of_prompt))
        return found

    def _sizes(self, run: RunTogether) -> tuple[Shape | None, list[Shape]]:
        """What the rows, and each prompt, are padded to."""
        rows = _rows_of(run.decodes) if run.decodes else None
        prompts = [_prompt_of(*prompt) for prompt in run.prompts]
        if prompts and self.capabilities.n_prefill_workers:
            # What runs on which prefill worker at once has a program of its own: nothing is padded to another's.
            return rows and self.buckets.fit(rows), [self.buckets.fit(prompt) for prompt in prompts]
        if rows is None or not prompts:
            return rows and self.sizes.fit(rows), [self.sizes.fit(prompt) for prompt in prompts]
        [prompt] = prompts
        rows = self.sizes.fit(replace(rows, alongside=prompt))
        assert rows.alongside is not None
        return rows, [rows.alongside]

    def _decode_batch(self, requests: Sequence[Request], size: Shape) -> DecodeBatch:
        known = [0 if request.n_in_flight else request.output_token_ids[-1] for request in requests]
        slots = [request.slots.view() for request in requests]
        batch = DecodeBatch.build(known, slots, size.buckets, self.executor.n_slots)
        return batch._replace(tokens=self.drawing.newest(requests, batch.tokens))

    def _prefill_batch(self, request: Request, span: tuple[int, int], size: Shape) -> PrefillBatch:
        start, stop = span
        tokens, slots = request.all_token_ids()[start:stop], request.slots.view()
        earlier = [slots[:start]] if start else ()
        return PrefillBatch.build(
            [tokens], [slots[start:stop]], size.buckets, self.executor.n_slots, earlier=earlier
        )

    def _prefilled(self, request: Request, span: tuple[int, int], logits: jax.Array) -> LaunchedRows:
        """``logits`` after the last token of a prompt's ``span``, of a prompt that is scored after every one."""
        start, stop = span
        scored = None
        if request.scores_prompt:
            logits, scored = self.drawing.score(request, span, logits)
        job: LiveRequest = request.payload
        if job.n_cached_tokens is None:
            job.n_cached_tokens = start
        if start == request.n_cached:
            self.stats.n_prompt_tokens += start
            self.stats.n_prefix_hit_tokens += start
        self.stats.n_prompt_tokens += stop - start
        self.stats.n_prompt_tokens_computed += stop - start
        if stop < request.n_tokens:  # the rest comes in the next steps, and with it the first token
            return self._launched(LaunchedRows([request], is_decode=False, logits=logits, scored=scored))
        requests = [request]
        if request.width > 1 and not request.lockstep:  # beams branch with their first tokens
            requests = self._branch([request], [0] * request.width)
            logits = self.drawing.repeated(logits, len(requests))
        return self._launched(self.drawing.draw(requests, logits, scored=scored))

    def _branch(self, members: Sequence[Request], parents: Sequence[int]) -> list[Request]:
        requests = self.scheduler.branch(members, parents)
        job, _ = self._live[requests[0].request_id]
        self._live[job.request_id] = job, requests
        return requests

    def _launched(self, rows: LaunchedRows) -> LaunchedRows:
        rows.fetch()
        return rows

    # -- taking in ----------------------------------------------------------------------------------------------

    def _take_in(self, step: LaunchedStep) -> list[TokenEvent]:
        """Waits for a step's tokens. What is for sequences that have ended since it was launched is thrown away."""
        events: list[TokenEvent] = []
        of_beams: dict[str, dict[int, Candidates]] = {}  # by the request's index
        n_wanted = 0
        for rows in step.batches:
            found, seconds, waited = self._times.read(rows)
            self.stats.wait_s += waited
            wanted = [(row, r) for row, r in enumerate(rows.requests) if self._is_live(r)]
            n_wanted += len(wanted)
            if rows.is_decode:
                self.stats.decode_s += seconds
                self.stats.n_decode_steps += 1
                self.stats.n_decode_tokens += len(wanted)
            else:
                self.stats.prefill_s += seconds
                self.stats.n_prefill_steps += 1
            if rows.scored is not None and found.scored is not None:
                self._keep_scores(rows.requests[0], rows.scored, found.scored)
            if rows.logits is not None:
                continue
            self.stats.n_generated_tokens += len(wanted)
            for row, request in wanted:
                if not self._is_live(request):  # ended with another of its sequences
                    continue
                if request.lockstep:
                    assert found.candidates is not None
                    tokens, logprobs = found.candidates
                    of_request = of_beams.setdefault(request.request_id, {})
                    of_request[request.index] = tokens[row], logprobs[row]
                else:
                    assert found.sampled is not None
                    events += self._accept(request, found.sampled, row)
        events += self._advance_beams(of_beams)
        self.stats.n_steps += n_wanted > 0
        return events

    def _keep_scores(self, request: Request, scored: Scored, reported: Sampled) -> None:
        job: LiveRequest = request.payload
        if job.request_id in self._live and job.params.prompt_logprobs is not None:
            try:
                for row in range(scored.n):
                    entry = self._entries.of_row(reported, row, job.params.prompt_logprobs)
                    job.prompt_logprobs[scored.first + row] = entry
            except BaseException as error:  # noqa: BLE001 (its own; it ends with its first token)
                job.error = contained(error)

    def _is_live(self, request: Request) -> bool:
        """Whether what is drawn for a sequence is still wanted."""
        job: LiveRequest = request.payload
        if request.request_id not in self._live:
            return False
        return job.beams is not None or job.continuations[request.index].finished is None

    def _forget_unwanted(self) -> None:
        """A step that was launched for sequences which have all ended is not waited for."""
        ahead = self._ahead
        if ahead is not None and not any(self._is_live(r) for rows in ahead.batches for r in rows.requests):
            self._ahead = None
        if self.idle:
            self._times.rest()

    def _accept(self, request: Request, sampled: Sampled, row: int) -> list[TokenEvent]:
        """Takes one chosen token into its request, and ends the request if that is to be."""
        job: LiveRequest = request.payload
        c = job.continuations[request.index]
        token = int(sampled.tokens[row])
        request.n_in_flight -= 1
        request.output_token_ids.append(token)
        c.token_ids = request.output_token_ids
        try:
            entry, ended = self._read(job, c, sampled, row)
        except BaseException as error:  # noqa: BLE001 (its own grammar, text or entry: the others go on)
            return [self._fail(job, contained(error))]
        output = None
        if ended:
            self._finish(request)
            if all(other.finished for other in job.continuations):
                output = self._close(job)
        if job.params.chosen_at_end:
            return [] if output is None else events_at_end(output)
        new_text = c.text.release(finished=ended)
        of_prompt = job.prompt_entries if c.index == 0 and len(c.token_ids) == 1 else None
        return [TokenEvent(job.request_id, token, new_text, output, c.index, entry, of_prompt)]

    def _read(
        self, job: LiveRequest, c: Continuation, sampled: Sampled, row: int
    ) -> tuple[PositionLogprobs | None, bool]:
        """Takes in what was drawn for ``c``: (the entry to report of it, whether it ends there)."""
        if job.error is not None:
            raise job.error
        if job.params.needed_logprobs is not None:
            assert sampled.logprobs is not None
            c.cumulative_logprob += float(sampled.logprobs[row])
        entry = None
        if job.params.logprobs is not None:
            entry = self._entries.of_row(sampled, row, job.params.logprobs)
            c.logprobs.append(entry)
        reason, stop_reason = job.why_stop(c, c.token_ids[-1])
        if reason is not None:
            job.finish(c, reason, stop_reason)
        return entry, reason is not None

    def _fail(self, job: LiveRequest, error: Exception) -> TokenEvent:
        """Ends a job that cannot go on."""
        self._drop(job)
        return TokenEvent(job.request_id, 0, "", None, error=error)

    def _finish(self, request: Request, *, keep: bool = True) -> None:
        job: LiveRequest = request.payload
        job.n_preemptions += request.n_preemptions
        if request.state is not RequestState.FINISHED:  # the scheduler ends one whose last token is in flight
            self.scheduler.finish(request, keep=keep)

    def _close(self, job: LiveRequest) -> RequestOutput:
        del self._live[job.request_id]
        return job.output()

    # -- beams --------------------------------------------------------------------------------------------------

    def _advance_beams(self, candidates: dict[str, dict[int, Candidates]]) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for request_id, of_request in candidates.items():
            job, members = self._live[request_id]
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
            members = self._branch(members, [beam.parent for beam in job.beams.live])
            for member, beam in zip(members, job.beams.live, strict=True):
                member.output_token_ids = beam.tokens
        return events

    def _end_of_beams(self, job: LiveRequest) -> list[TokenEvent]:
        del self._live[job.request_id]
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


def _rows_of(requests: Sequence[Request]) -> Shape:
    """The numbers of a decode step of ``requests``, not padded."""
    return Shape("decode", len(requests), 1, max(len(request.slots) for request in requests) - 1)


def _prompt_of(request: Request, span: tuple[int, int]) -> Shape:
    """Those of a prompt's ``span``."""
    start, stop = span
    return Shape("chunk" if start else "prefill", 1, stop - start, start, of_all=request.scores_prompt)


Candidates = tuple[np.ndarray, np.ndarray]  # of a beam: likeliest tokens, their log-probabilities
