"""The engine: ``step()`` schedules, runs and postprocesses one iteration over all requests.

Knows requests, slots, sampling and text; the model is an executor that turns batches into logits, so the
same engine runs split, unsplit or with an imaginary model in a test.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jaxlamina.buckets import Buckets
from jaxlamina.errors import UserError
from jaxlamina.kv import SlotAllocator
from jaxlamina.outputs import FinishReason, Logprob, PositionLogprobs, RequestOutput
from jaxlamina.sampling import Sampled, Sampler, SamplingBatch, SamplingParams
from jaxlamina.scheduler import Request, Scheduler, State, StepPlan
from jaxlamina.text import GeneratedText, NoText
from jaxlamina.workers.batch import DecodeBatch, PrefillBatch


class Executor(Protocol):
    """Runs a model over batches, and keeps the KV of ``n_slots`` slots between them."""

    n_slots: int

    def decode(self, batch: DecodeBatch) -> jax.Array:
        """Logits ``[B, V]`` float32 after each row's new token."""
        ...

    def prefill(self, batch: PrefillBatch) -> jax.Array:
        """Logits ``[B, V]`` float32 after each row's last token."""
        ...


@dataclass(frozen=True)
class TokenEvent:
    """One request's progress in a step. ``new_text`` may be empty: half a character, or held for a stop string."""

    request_id: str
    token_id: int
    new_text: str
    output: RequestOutput | None  # once it is finished


@dataclass
class _Job:
    """What the engine keeps of a request beside its tokens and slots."""

    prompt: str | None
    params: SamplingParams
    seed: int
    text: GeneratedText
    end_ids: tuple[int, ...]  # tokens that end it; not to be chosen before min_tokens
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0


@dataclass
class EngineStats:
    """Counts and seconds since the engine was made."""

    n_steps: int = 0
    n_prompt_tokens: int = 0
    n_generated_tokens: int = 0
    n_decode_tokens: int = 0
    n_preemptions: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Engine:
    """Requests in, token events out, one ``step`` at a time."""

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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.buckets = buckets
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.scheduler = Scheduler(SlotAllocator(executor.n_slots), max_num_seqs=max_num_seqs)
        self.sampler = Sampler()
        self.stats = EngineStats()
        self._clock = clock
        self._seeds = np.random.default_rng(seed)
        self._ids = itertools.count()
        self._requests: dict[str, Request] = {}

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def add_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, prompt: str | None = None
    ) -> str:
        """Queues a request and returns its id. ``UserError`` for a prompt or parameters that cannot be served."""
        tokens = self._checked_prompt(prompt_token_ids)
        room = self.max_model_len - len(tokens)
        request_id = str(next(self._ids))
        detokenizer = NoText() if self.tokenizer is None else self.tokenizer.detokenizer()
        if params.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        job = _Job(
            prompt,
            params,
            int(self._seeds.integers(2**63)),
            GeneratedText(detokenizer, params.stop or ()),
            (() if params.ignore_eos else self.eos_token_ids) + tuple(params.stop_token_ids or ()),
        )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        request = Request(request_id, tokens, max_tokens, job)
        self.scheduler.add(request)
        self._requests[request_id] = request
        return request_id

    def step(self) -> list[TokenEvent]:
        """One iteration: every running request gets one token, newly admitted ones their first."""
        plan = self.scheduler.schedule()
        events = self._decode(plan.decodes)
        for request in plan.prefills:
            events += self._prefill(request)
        self._count(plan)
        return events

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request early and frees its slots; None if there is no such request any more."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, "abort", None)

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` unless every slot in use belongs to exactly the requests that run."""
        self.scheduler.check_integrity()

    def _decode(self, requests: Sequence[Request]) -> list[TokenEvent]:
        if not requests:
            return []
        began = self._clock()
        newest = [request.output_token_ids[-1] for request in requests]
        slots = [request.slots for request in requests]
        batch = DecodeBatch.build(newest, slots, self.buckets, self.executor.n_slots)
        events = self._sample(requests, self.executor.decode(batch))
        self.stats.decode_s += self._clock() - began
        self.stats.n_decode_tokens += len(requests)
        return events

    def _prefill(self, request: Request) -> list[TokenEvent]:
        began = self._clock()
        tokens, slots = [request.all_token_ids()], [request.slots]
        batch = PrefillBatch.build(tokens, slots, self.buckets, self.executor.n_slots)
        events = self._sample([request], self.executor.prefill(batch))
        self.stats.prefill_s += self._clock() - began
        self.stats.n_prompt_tokens += len(tokens[0])
        return events

    def _sample(self, requests: Sequence[Request], logits: jax.Array) -> list[TokenEvent]:
        jobs = [request.payload for request in requests]
        n_outputs = [len(request.output_token_ids) for request in requests]
        batch = SamplingBatch.build(
            [job.params for job in jobs],
            [job.seed for job in jobs],
            [request.n_tokens for request in requests],
            [
                job.end_ids if n < job.params.min_tokens else ()
                for job, n in zip(jobs, n_outputs, strict=True)
            ],
            logits.shape[0],
        )
        sampled = Sampled(*jax.device_get(tuple(self.sampler(logits, batch))))
        return [self._accept(request, sampled, row) for row, request in enumerate(requests)]

    def _accept(self, request: Request, sampled: Sampled, row: int) -> TokenEvent:
        """Takes one chosen token into its request, and ends the request if that is to be."""
        job: _Job = request.payload
        token = int(sampled.tokens[row])
        request.output_token_ids.append(token)
        if job.params.logprobs is not None:
            self._record_logprobs(job, sampled, row)
        reason, stop_reason = self._why_stop(request, token)
        output = None if reason is None else self._finish(request, reason, stop_reason)
        return TokenEvent(request.request_id, token, job.text.release(finished=output is not None), output)

    def _why_stop(self, request: Request, token: int) -> tuple[FinishReason | None, str | int | None]:
        job: _Job = request.payload
        n = len(request.output_token_ids)
        if token in job.end_ids and n > job.params.min_tokens:
            return "stop", None if token not in (job.params.stop_token_ids or ()) else token
        if job.text.add(token, may_stop=n > job.params.min_tokens):
            return "stop", job.text.stopped_by
        if n >= request.max_tokens:
            return "length", None
        return None, None

    def _finish(self, request: Request, reason: FinishReason, stop_reason: str | int | None) -> RequestOutput:
        assert request.state is not State.FINISHED
        job: _Job = request.payload
        if job.text.finish():
            reason, stop_reason = "stop", job.text.stopped_by
        self.scheduler.finish(request)
        del self._requests[request.request_id]
        wants_logprobs = job.params.logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt=job.prompt,
            prompt_token_ids=tuple(request.prompt_token_ids),
            text=job.text.text,
            token_ids=tuple(request.output_token_ids),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=tuple(job.logprobs) if wants_logprobs else None,
            cumulative_logprob=job.cumulative_logprob if wants_logprobs else None,
            n_preemptions=request.n_preemptions,
        )

    def _record_logprobs(self, job: _Job, sampled: Sampled, row: int) -> None:
        assert sampled.logprobs is not None and sampled.ranks is not None
        assert sampled.top_tokens is not None and sampled.top_logprobs is not None
        token = int(sampled.tokens[row])
        entry = {token: self._logprob(token, sampled.logprobs[row], sampled.ranks[row])}
        n_top = job.params.logprobs or 0
        tops = zip(sampled.top_tokens[row][:n_top], sampled.top_logprobs[row][:n_top], strict=True)
        for rank, (top, logprob) in enumerate(tops, start=1):
            entry.setdefault(int(top), self._logprob(int(top), logprob, rank))
        job.logprobs.append(entry)
        job.cumulative_logprob += float(sampled.logprobs[row])

    def _logprob(self, token: int, logprob: Any, rank: Any) -> Logprob:
        decoded = "" if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)
        return Logprob(float(logprob), int(rank), decoded)

    def _checked_prompt(self, prompt_token_ids: Sequence[int]) -> tuple[int, ...]:
        tokens = tuple(prompt_token_ids)
        if not tokens:
            raise UserError("the prompt is empty: give at least one token")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise UserError(f"prompt token id {token!r} is not a whole number")
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"prompt token id {token} is not in the vocabulary (0 … {self.vocab_size - 1}): "
                    "was the prompt tokenised for another model?"
                )
        if len(tokens) >= self.max_model_len:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, the model's length is {self.max_model_len} and at least "
                "one token is to be generated: shorten the prompt or raise max_model_len"
            )
        return tuple(int(token) for token in tokens)

    def _count(self, plan: StepPlan) -> None:
        self.stats.n_steps += 1
        self.stats.n_generated_tokens += len(plan.requests)
        self.stats.n_preemptions += len(plan.preempted)
