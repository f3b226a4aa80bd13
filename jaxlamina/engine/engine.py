"""The engine: ``step()`` schedules, runs and postprocesses one iteration over all requests.

A step is launched and its tokens are read as two things, so that the next step can be launched in between:
the device then has it when this one is done, and takes the tokens from its own memory.

Knows requests, slots, sampling and text; the model is an executor that turns batches into logits, so the
same engine runs split, unsplit or with an imaginary model in a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from jaxlamina.engine.admission import Admission
from jaxlamina.engine.chunk_size import ChunkSize
from jaxlamina.engine.in_flight import LaunchedRows, LaunchedStep, StepTimes
from jaxlamina.engine.keeping import KEPT_TOTALS, Keeping
from jaxlamina.engine.live_request import LiveRequest
from jaxlamina.engine.next_tokens import Drawing
from jaxlamina.engine.outputs import RequestOutput, TokenEvent
from jaxlamina.engine.policies import Policy
from jaxlamina.engine.postprocess import EngineStats, Postprocess
from jaxlamina.engine.prompt_batches import PromptBatches
from jaxlamina.engine.request import Request
from jaxlamina.engine.scheduled_step import OwnChunk, PromptSpan, RunTogether, ScheduledStep, in_place
from jaxlamina.engine.scheduler import Scheduler
from jaxlamina.engine.step_batches import StepBatches
from jaxlamina.errors import UserError, contained
from jaxlamina.kv import HostTier, PrefixCache, SlotAllocator
from jaxlamina.kv.kept import KeptPrefixes
from jaxlamina.run.executor import Executor, StepLogits
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.sampling.sampler import Sampler
from jaxlamina.steps.buckets import Buckets, CompiledSizes, StepSizes
from jaxlamina.steps.step import PromptPart, Step

_NONE: Mapping[int, Any] = {}
# For prefill workers, where nothing else is to be done: then whoever calls looks for what has come meanwhile.
_WAIT_S = 0.02
_MOST_OF_NOBODY = 100  # steps in a row that nobody runs in, though requests wait: a preemption makes one such
_LOOKED_AT_TOGETHER = 8  # newcomers: what is kept of the first comes back while others are looked at

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of the requests that are there when an engine is paused."""


class Engine:
    """Requests in, token events out, one ``step`` at a time.

    ``prefix_caching`` keeps the KV of prompts and of what was written, until the room is needed.
    ``host_kv_slots``: tokens whose KV may wait in host memory while others need the room; the executor must
    have as many. ``kv_slot_bytes``: a token's KV, for the counters. ``max_num_batched_tokens``: a longer
    prompt is computed in chunks of so many tokens, a step each, so that running requests go on meanwhile;
    None: prompts are computed whole. ``chunk_size``: chooses fewer tokens, for each step; it is told what
    steps took. ``mixed_steps``: a step's first prompt or chunk is computed in the program of its decodes,
    which then reads weights once for both; there is a program for each pair of sizes.
    ``prompt_batch_tokens``: of several short prompts in one call (`PromptBatches`); None: the executor's.
    An executor with prefill workers computes prompts on these, beside the decodes, one prompt or chunk of
    each worker a step, or at these workers' own pace; what few tokens are missing of it computes itself.
    ``async_scheduling``: launch each step before the tokens of the one before it are looked at. Results are
    the same. ``policy`` (None: first come, first served), ``padded`` and ``headroom`` are the scheduler's.
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
        chunk_size: ChunkSize | None = None,
        mixed_steps: bool = False,
        prompt_batch_tokens: int | None = None,
        async_scheduling: bool = True,
        policy: Policy | None = None,
        padded: bool = False,
        headroom: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.executor = executor
        self.capabilities = executor.capabilities
        self.buckets = buckets
        self.sizes = CompiledSizes(buckets)
        slots = SlotAllocator(executor.n_slots)
        if self.capabilities.places_tokens:
            slots.note_freed()
        self._kv_slot_bytes = kv_slot_bytes
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
            own_pace_tokens=self.capabilities.own_pace_tokens,
            local_prefill_tokens=self.capabilities.local_prefill_tokens,
            chunk_size=chunk_size,
        )
        self.drawing = Drawing(max_num_seqs, self.sizes, vocab_size, len(eos_token_ids))
        self.stats = EngineStats()
        self.async_scheduling = async_scheduling
        if mixed_steps and (why := self.capabilities.why_not_mixed):
            raise UserError(why)
        self.mixed_steps, self.max_num_batched_tokens = mixed_steps, max_num_batched_tokens
        n_together = (
            self.capabilities.prompt_batch_tokens if prompt_batch_tokens is None else prompt_batch_tokens
        )
        if n_together and not self.capabilities.batches_prompts:
            raise UserError(
                f"prompt_batch_tokens={n_together} needs programs that do not depend on where tokens lie: "
                "take partition=heads, or leave it out"
            )
        self.batching = PromptBatches(self.sizes, n_together)
        self.batches = StepBatches(
            self.sizes,
            self.drawing.newest,
            n_slots=executor.n_slots,
            max_model_len=max_model_len,
            n_prefill_workers=self.capabilities.n_prefill_workers,
            mixed=mixed_steps,
        )
        self.chunk_size = chunk_size
        if chunk_size is not None:
            chunk_size.padded = self.batches.chunk_tokens
        self._keeping: Keeping | None = None
        self._kept_before: dict[str, float] = {}  # its totals, of those before it
        self._ahead: LaunchedStep | None = None  # launched, and not read
        self._rows: tuple[Request, ...] = ()  # of the latest decode step
        self._again: list[TokenEvent] = []  # of tokens that are there already, until the next step
        self._stands_still = False
        self._n_of_nobody = 0  # steps in a row that nobody ran in
        self.n_weight_updates = 0
        self._times = StepTimes(clock)
        self.before_step: Callable[[], None] | None = None  # called first in every step
        # Called when this thread will not want Python for a while: a step is launched, or waited for, or kept
        # KV comes back.
        self.meanwhile: Callable[[], None] = lambda: None
        executor.on_launch = lambda: self.meanwhile()
        self.admission = Admission(
            tokenizer,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            seed=seed,
        )
        self.postprocess = Postprocess(self.scheduler, tokenizer)
        # Requests that were there when a step failed: what their slots hold is not known.
        self._lost: set[str] = set()

    @property
    def sampler(self) -> Sampler:
        return self.drawing.sampler

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is to be read."""
        return self.scheduler.idle and self._ahead is None and not self._again

    @property
    def rests(self) -> bool:
        """`step` has nothing to do."""
        return self.idle or (self._stands_still and not self._again)

    @property
    def is_paused(self) -> bool:
        return self.scheduler.held is not None

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> list[str]:
        """Until `resume` newcomers wait. Those that are there stand still between two steps (keep), are
        finished by further steps (wait), or are ended (abort). Gives the ids of those that were ended.

        ``clear_cache``: forgets cached prefixes, and with "keep" also requests' own KV, which is computed
        again from their tokens when they go on.
        """
        self.scheduler.keep_out()
        ended = list(self.postprocess.live) if mode == "abort" else []
        for request_id in ended:
            self.abort(request_id)
        self._stands_still = mode == "keep"
        if self._stands_still:
            self._settle()
        if clear_cache and self._stands_still:
            self.forget_kv()
        elif clear_cache:
            self.reset_prefix_cache()
        return ended

    def resume(self) -> None:
        """Requests go on, and newcomers are let in."""
        self._stands_still = False
        self.scheduler.let_in()

    def forget_kv(self) -> None:
        """All KV, in the pools, on the host and kept by content, is computed again from tokens, when it is
        needed. Tokens that were drawn stay."""
        self._settle()
        self.scheduler.forget_kv()
        self._forget_kept()

    def put_weights(self, params: Mapping[str, jax.Array], *, keep_kv: bool) -> None:
        """The next step is computed with ``params`` (`Executor.put_weights`). ``keep_kv``: requests and
        cached prefixes keep the KV of the weights before. KV that is kept by content is neither found nor
        kept any more: `keep_kv` opens what is to be in its place."""
        self._settle()
        if not keep_kv:
            self.scheduler.forget_kv()
        if self._keeping is not None:
            self._keeping.begin_anew(self._live())
            self._kept_before = {name: self.kv_stats()[name] for name in KEPT_TOTALS}
            self._keeping = self.scheduler.room.kept = None
        self.executor.put_weights(params)
        self.n_weight_updates += 1

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queues a request and returns its id. ``UserError`` for a prompt or parameters that cannot be
        served.

        ``priority``: lower goes first, where the scheduling policy looks at it.
        """
        return self.add_job(self.admission.job(prompt_token_ids, params, prompt), priority=priority)

    def add_job(
        self,
        job: LiveRequest,
        *,
        priority: int = 0,
        caller: Hashable | None = None,
        written: Mapping[int, Sequence[int]] = _NONE,
        n_given: Mapping[int, int] = _NONE,
        n_cached: int | None = None,
    ) -> str:
        """Queues what `Admission.job` made, maybe in another thread. ``caller``: whoever else's turn it is,
        is not kept waiting by many jobs of one caller; jobs without one are served as they come.

        ``written``: what continuations of the request wrote in an earlier process, of one that
        `LiveRequest.may_go_on`. The next step gives their events again, one for the first ``n_given`` tokens
        of each, and the request goes on after them: their KV is computed like a prompt's, and each
        continuation is computed by itself. ``n_cached``: prompt tokens whose KV was there when it was first
        computed.
        """
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UserError(f"{priority=} must be a whole number; lower goes first")
        if written and not job.may_go_on:
            raise UserError(
                "a request with log-probabilities, or that chooses at its end, cannot go on: begin it anew"
            )
        if not all(0 <= token < self.admission.vocab_size for ids in written.values() for token in ids):
            raise UserError("what the request wrote has tokens that are not in the vocabulary")
        job.n_cached_tokens = n_cached
        params = job.params
        written = {index: tokens for index, tokens in written.items() if tokens}
        requests = [
            Request(
                job.request_id,
                job.prompt_token_ids,
                job.max_tokens,
                job,
                index,
                width=1 if written else params.n_sequences,
                lockstep=params.use_beam_search,
                priority=priority,
                caller=caller,
                scores_prompt=params.prompt_logprobs is not None,
                # One that begins anew is to repeat its tokens: it is computed as it was.
                most_found=n_cached if self.capabilities.rounds_kv and not written else None,
                output_token_ids=list(written.get(index, ())),  # by which it may be ranked
            )
            for index in range(params.n_sequences if written else 1)
        ]
        for request in requests:
            self.scheduler.add(request)
        self.postprocess.live[job.request_id] = job, requests
        # The request's output comes with the last event, which is to be one that is still to be given.
        for index in sorted(written, key=lambda index: n_given.get(index, 0) < len(written[index])):
            again = self.postprocess.take_back(requests[index], written[index], n_given.get(index, 0))
            self._again += again
        for request in [request for request in requests if self.postprocess.is_live(request)][1:]:
            request.n_counted = len(job.prompt_token_ids)  # which count once
        return job.request_id

    def step(self) -> list[TokenEvent]:
        """One iteration: every running sequence gets one token, newly admitted ones their first once their
        prompt is computed. With ``async_scheduling`` the iteration after it has been launched when it
        returns. Or no iteration yet, but the events of tokens that requests had when they were added.

        What one request alone makes fail (its grammar, its text) ends it with an event that has the
        ``error``. What else fails is raised as it is. Requests that were there must then be aborted:
        ``UserError`` before they are.
        """
        if self.is_paused and self.rests and self.postprocess.live:
            raise UserError("the engine is paused: resume it first")
        if lost := self._lost & self.postprocess.live.keys():
            raise UserError(f"a step failed while these requests ran, abort them: {', '.join(sorted(lost))}")
        if self.before_step is not None:
            self.before_step()
        again, self._again = self._again, []
        if again or self._stands_still:  # they go out while the step is run, which may take long
            return again
        try:
            step = self._ahead or self._launch()
            self._ahead = None
            if step is None:
                self._nobody_runs()
                return []
            self._n_of_nobody = 0
            if self.async_scheduling and not step.shapes_next:
                self._ahead = self._launch()
            self.meanwhile()
            events = self._take_in(step)
        except BaseException:
            self._lose()
            raise
        self._forget_unwanted()
        return events

    def _nobody_runs(self) -> None:
        """What is to be waited for is waited for. ``RuntimeError`` where that is nothing, step after step:
        requests would wait for ever, and nobody would hear of it."""
        if self.scheduler.own_pace.is_awaited:
            self.meanwhile()
            self._take_computed(_WAIT_S)
            return
        self._n_of_nobody = 0 if self.scheduler.idle else self._n_of_nobody + 1
        if self._n_of_nobody > _MOST_OF_NOBODY:
            n = len(self.scheduler.waiting)
            raise RuntimeError(f"nobody ran in {_MOST_OF_NOBODY} steps in a row, though {n} requests wait")

    def _take_in(self, step: LaunchedStep) -> list[TokenEvent]:
        events = self.postprocess.take_in(step, self._times, self.stats)
        if self._keeping is not None:
            self._keeping.keep(self.scheduler.running)
        if self.chunk_size is not None and step.sizes is not None:
            self.chunk_size.took(*step.sizes, step.seconds)
        return events

    def _lose(self) -> None:
        self._ahead, self._lost = None, set(self.postprocess.live)
        self.scheduler.forget_cached()  # it may name KV that this step was to compute

    def _settle(self) -> None:
        """Nothing is in flight any more; the next `step` gives the events."""
        step, self._ahead = self._ahead, None
        if step is not None:
            try:
                self._again += self._take_in(step)
            except BaseException:
                self._lose()
                raise
        self._times.rest()

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request early and frees its slots; None if there is no such request any more, or its text
        cannot be made."""
        if request_id not in self.postprocess.live:
            return None
        job, _ = self.postprocess.live[request_id]
        self.postprocess.drop(job)
        self._forget_unwanted()
        try:
            return job.output()
        except BaseException as error:  # noqa: BLE001 (of beams)
            contained(error)
            return None

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, and what is kept by content."""
        self.scheduler.forget_cached()
        self._forget_kept()

    def _forget_kept(self) -> None:
        if self._keeping is not None:
            self._keeping.forget(self._live())

    def _live(self) -> Iterator[Request]:
        return (request for _, members in self.postprocess.live.values() for request in members)

    def keep_kv(self, prefixes: KeptPrefixes) -> None:
        """From now on KV is kept by content at the places of ``prefixes``, which the executor has opened, and
        found there."""
        least = self.scheduler.min_prefix_tokens
        n_slots = min(held.n_slots for held in self.executor.held())  # of whoever has fewest
        how = {"min_tokens": least, "bytes_per_token": self._kv_slot_bytes, "n_slots": n_slots}
        self._keeping = self.scheduler.room.kept = Keeping(self.executor, prefixes, **how)

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` unless every slot in use belongs to exactly the requests that run and the
        cache."""
        self.scheduler.check_integrity()

    def kv_stats(self) -> dict[str, float]:
        """`Room.stats` of its slots. Totals of kept KV go on over updates of weights."""
        found, before = self.scheduler.room.stats(), self._kept_before
        return found | {name: found[name] + n for name, n in before.items()}

    def _forget_unwanted(self) -> None:
        """A step that was launched for sequences which have all ended is not waited for."""
        ahead = self._ahead
        if ahead is not None and not any(
            self.postprocess.is_live(r) for rows in ahead.batches for r in rows.requests
        ):
            self._ahead = None
        if self.idle:
            self._times.rest()

    # --- launching ---

    def _launch(self) -> LaunchedStep | None:
        """Launches the next step; None if there is none. Of the one before it nothing need be known yet."""
        if self.scheduler.idle:
            return None
        self._times.begin()
        self._take_computed()
        step = self._schedule()
        if not step.requests and not step.begun:  # the last tokens of all are in flight
            return None
        self.stats.n_preemptions += len(step.preempted)
        self._move(step)
        launched = None
        if step.requests:
            self.drawing.begin()
            n_workers = self.capabilities.n_prefill_workers
            calls = self.batching.calls
            runs = step.runs(n_prefill_workers=n_workers, mixed=self.mixed_steps, calls=calls)
            sizes = None if self.chunk_size is None else self.batches.sizes_to_tell(step)
            launched = LaunchedStep([rows for run in runs for rows in self._run(run)], sizes)
        for chunk in step.begun:  # behind what the same worker is to send
            self.executor.begin_prompt(self.batches.to_compute(chunk))
        return launched

    def _schedule(self) -> ScheduledStep:
        """What is kept of newcomers' KV comes back meanwhile, where nobody runs: that may be much, as after a
        fault, and so is looking for it."""
        if self._keeping is None:
            return self.scheduler.schedule()
        try:
            if moves := self.scheduler.admit_ahead(_LOOKED_AT_TOGETHER):
                self._release_freed()
                self.meanwhile()
            while moves:
                self._keeping.bring_beside(moves)
                moves = self.scheduler.admit_ahead(_LOOKED_AT_TOGETHER)
            return self.scheduler.schedule()
        finally:
            self._keeping.brought()

    def _take_computed(self, wait_s: float = 0.0) -> None:
        """Tells the scheduler which prefill workers are done with their chunks; waits for one for so long at
        most."""
        if self.scheduler.own_pace.is_awaited:
            for worker in self.executor.computed(wait_s):
                self.scheduler.own_pace.computed(worker)

    def _move(self, step: ScheduledStep) -> None:
        for move in step.moves_out:
            if len(move.source):
                self.executor.move_out(move.source, move.target)
        for move in step.moves_in:
            if len(move.source):
                self.executor.move_in(move.source, move.target)
        for move in step.moves_again:
            self.executor.move_out(move.source, move.target)
        if step.prefills or step.computed:
            self._release_freed()
        if self._keeping is not None and step.brought:
            self.meanwhile()
            self._keeping.bring(step.brought)

    def _release_freed(self) -> None:
        """Before newcomers have places: they choose a worker by what each one holds."""
        if self.capabilities.places_tokens:
            self.executor.release(self.scheduler.slots.take_freed())

    def _run(self, run: RunTogether) -> list[LaunchedRows]:
        """Launches one of the executor's steps, and the choice of its tokens."""
        if run.computed is not None:
            return [self._run_computed(run.computed)]
        if run.size is not None:
            return [self._run_prompts(run.prompts, run.size)]
        of_rows, of_prompts = self.batches.sizes_of(run)
        self._rows = rows = in_place(run.decodes, self._rows) if run.decodes else self._rows
        batch = None if of_rows is None else self.batches.rows(rows, of_rows)
        parts = [
            PromptPart(self.batches.prompts([(request, span)], size), request.scores_prompt, request.worker)
            for (request, span), size in zip(run.prompts, of_prompts, strict=True)
        ]
        logits = self._timed(Step(batch, tuple(parts)))
        found = []
        if batch is not None:
            assert logits.decodes is not None
            found.append(self._launched(self.drawing.draw(rows, logits.decodes, batch.tokens)))
        for prompt, of_prompt in zip(run.prompts, logits.prompts, strict=True):
            found.append(self._prefilled(*prompt, of_prompt))
        return found

    def _run_prompts(self, prompts: Sequence[PromptSpan], size: StepSizes) -> LaunchedRows:
        """Several in one call, of who decodes."""
        part = PromptPart(self.batches.prompts(prompts, size), worker=None)
        [logits] = self._timed(Step(prompts=(part,))).prompts
        for request, span in prompts:
            self._count(request, span)
        return self._launched(self.drawing.draw([request for request, _ in prompts], logits))

    def _timed(self, step: Step) -> StepLogits:
        logits, seconds = self._times.timed(lambda: self.executor.run(step))
        self.stats.launch_s += seconds
        self.stats.n_launches += 1
        return logits

    def _run_computed(self, chunk: OwnChunk) -> LaunchedRows:
        """Has attention workers take in what a prefill worker has computed at its own pace."""
        start, stop = chunk.span
        [logits] = self._timed(Step(prompts=(self.batches.to_take_in(chunk),))).prompts
        self.stats.n_prompt_tokens_own_pace += stop - start
        return self._prefilled(chunk.request, chunk.span, logits)

    def _prefilled(self, request: Request, span: tuple[int, int], logits: jax.Array) -> LaunchedRows:
        """``logits`` after the last token of a prompt's ``span``, of a prompt that is scored after every
        one."""
        stop, scored = span[1], None
        if request.scores_prompt:
            logits, scored = self.drawing.score(request, span, logits)
        self._count(request, span)
        if stop < request.n_tokens:  # the rest comes in the next steps, and with it the first token
            return self._launched(LaunchedRows([request], is_decode=False, logits=logits, scored=scored))
        request.scores_prompt = False  # it is known: after a preemption its KV may be found
        requests = [request]
        if request.width > 1 and not request.lockstep:  # beams branch with their first tokens
            requests = self.postprocess.branch([request], [0] * request.width)
            logits = self.drawing.repeated(logits, len(requests))
        return self._launched(self.drawing.draw(requests, logits, scored=scored))

    def _count(self, request: Request, span: tuple[int, int]) -> None:
        """That a prompt's ``span`` is computed."""
        start, stop = span
        job: LiveRequest = request.payload
        c = job.continuations[request.index] if job.continuations else None
        if c is not None and c.n_found is None:
            c.n_found = start
        if job.n_cached_tokens is None:
            job.n_cached_tokens = min(start, len(request.prompt_token_ids))
        self.stats.n_prompt_tokens_computed += stop - start
        # Of a request that is computed again, or has written before, each of the prompt's tokens counts once.
        before, n_prompt = request.n_counted, len(request.prompt_token_ids)
        request.n_counted = max(before, min(stop, n_prompt))
        self.stats.n_prompt_tokens += request.n_counted - before
        if start == request.n_cached:
            self.stats.n_prefix_hit_tokens += max(0, min(start, n_prompt) - before)

    def _launched(self, rows: LaunchedRows) -> LaunchedRows:
        rows.fetch()
        return rows
