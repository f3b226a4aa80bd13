"""Serves a trace under a modelled clock: a heap of events drives the engine's own `Scheduler`, with its
slots, headroom and policy. Nothing is computed; a step takes as long as the planner's costs say.

It takes turns with the scheduler as `jaxlamina.engine.engine` does: with ``async_scheduling`` a step is
scheduled when the one before it begins, so a newcomer waits for the end of the running step and for one more.
Tokens of a step are there at its end, and who wrote its last token leaves.

Runs of steps that do nothing but decode the same requests are taken at once (`Scheduler.n_steps_alike`). The
result is the same as step by step, to the femtosecond; ``one_by_one`` does the latter.
"""

from __future__ import annotations

import heapq
import math
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from jaxlamina.engine import chunk_size
from jaxlamina.engine.policies import load_policy
from jaxlamina.engine.prompt_batches import PromptBatches
from jaxlamina.engine.request import Request, RequestState
from jaxlamina.engine.scheduled_step import RunTogether, ScheduledStep
from jaxlamina.engine.scheduler import Scheduler
from jaxlamina.errors import UserError
from jaxlamina.kv import SlotAllocator
from jaxlamina.kv.kept import EVERY_STEPS
from jaxlamina.options import DEFAULT_SEQS, EngineOptions, definitions
from jaxlamina.planner import costs
from jaxlamina.planner.costs import Deployment, StepCost
from jaxlamina.planner.failures import MOST_S, FailureRate
from jaxlamina.planner.traces import Trace
from jaxlamina.process import garbage
from jaxlamina.simulator.results import OverTime, SimulatedRun
from jaxlamina.simulator.step_times import FS, FS_US, CostCell, ModelledTimes, Pace
from jaxlamina.steps.buckets import Buckets, CompiledSizes, bucket

_ARRIVAL, _STEP, _FAILURE, _READY = range(4)  # at the same moment in this order
_REPORT_EVERY = 1000  # ended requests


class Failure(NamedTuple):
    """At ``at_s`` a worker of ``pool`` dies. The runtime starts its whole job again, whoever died: nothing
    runs for ``downtime_s``."""

    at_s: float
    pool: Literal["attention", "model"]
    downtime_s: float


@dataclass(frozen=True)
class ServingPolicy:
    """The engine's options that the scheduler knows (`jaxlamina.options.EngineOptions`).

    ``kv_slots``: None for what the setup's memory holds. ``max_tokens``: what each request asks for, of which
    it writes what the trace says; None: it asks for just this. ``kept_kv``: KV is also kept in host memory,
    so that after a failure requests go on with all but their last few tokens (docs/reliability.md).
    ``buckets``: a step's requests, and a prompt's tokens, cost as many as they are padded to; None: as many
    as they are. ``prompt_batch_tokens``: short prompts go in calls of so many tokens by the engine's rule,
    with ``buckets`` or those of a GPU's programs; 0: each is a call of its own.
    ``with_prefill``: False: prompts take no time, as where the papers count decode steps alone.
    ``host_s``: seconds that the host has to do for each program that it launches (schedule, launch, read
    tokens, send them): a step has one for its decodes, and one for each call of prompts. While a step runs
    the next one is launched (``async_scheduling``), so it takes the devices' time or that, whichever is
    longer. A step that was not launched ahead takes its own beside.

    ``UserError`` for an option that the engine would not take.
    """

    scheduling_policy: str = "fifo"
    max_num_seqs: int = DEFAULT_SEQS
    max_num_batched_tokens: int | Literal["auto"] | None = "auto"
    tpot_slo_ms: float | None = None
    mixed_steps: bool = False
    async_scheduling: bool = True
    kv_headroom: float | None = None
    kv_slots: int | None = None
    max_tokens: int | None = None
    kept_kv: bool = True
    buckets: Buckets | None = None
    prompt_batch_tokens: int = 0
    with_prefill: bool = True
    host_s: float = 0.0

    def __post_init__(self) -> None:
        for name, definition in definitions(EngineOptions).items():
            if hasattr(self, name):
                definition.checked(getattr(self, name))


def gpu_buckets(setup: Deployment, max_num_seqs: int, trace: Trace) -> Buckets:
    """What the engine pads to where attention is the Mosaic GPU kernel, for a model as long as its config
    says, or as a request of ``trace`` is."""
    longest = int((trace.n_prompt + trace.n_output).max(initial=0))
    return Buckets.default(max_num_seqs, max(setup.config.max_position_embeddings, longest), "doubling")


def simulate(
    setup: Deployment,
    trace: Trace,
    policy: ServingPolicy | None = None,
    *,
    failures: Sequence[tuple[float, Literal["attention", "model"], float] | Failure] = (),
    rate: FailureRate | None = None,
    one_by_one: bool = False,
    on_progress: Callable[[int, int], object] = lambda n_done, n_all: None,
) -> SimulatedRun:
    """All requests of ``trace``, until the last has ended. ``rate``: failures at random times beside
    ``failures``; with it KV that is kept takes time to come back. ``on_progress``: how many have ended, and
    all.

    ``UserError`` for a request that the setup's KV slots could not hold, and for failures and a host's time
    that cannot be.
    """
    policy = policy or ServingPolicy()
    if not 0 <= policy.host_s < math.inf:
        raise UserError(f"the host's time for a program, {policy.host_s:g} s, must be finite and at least 0")
    known = [_checked(Failure(*failure), setup) for failure in failures]
    with garbage.young_only():
        return _Simulation(setup, trace, policy, known, rate, one_by_one, on_progress).run()


def _checked(failure: Failure, setup: Deployment) -> Failure:
    if failure.pool not in ("attention", "model"):
        raise UserError(f"a failure's pool {failure.pool!r} must be attention or model")
    if failure.pool == "attention" and not setup.is_split:
        raise UserError("a setup without attention workers has no failure of one: say model")
    for name in ("at_s", "downtime_s"):
        if not 0 <= getattr(failure, name) <= MOST_S:
            raise UserError(
                f"a failure's {name}={getattr(failure, name):g} must be at least 0 and {MOST_S:.0e} at most"
            )
    return failure


class _Life:
    """What is known of a request beside what the scheduler knows."""

    __slots__ = ("index", "n_kept", "n_output", "request")

    def __init__(self, index: int, n_output: int) -> None:
        self.index, self.n_output, self.n_kept = index, n_output, 0
        self.request: Request | None = None


class _KeptKv:
    """`jaxlamina.engine.room.KeptPlaces`: after a failure a request finds what was kept of it."""

    def find(self, request: Request, n_cached: int) -> np.ndarray:
        life: _Life = request.payload
        return np.arange(n_cached, min(life.n_kept, request.n_known - 1))

    def stats(self) -> dict[str, float]:
        return {}


@dataclass
class _Launched:
    """A step that is scheduled: who gets a token of it, and what it computes."""

    rows: list[Request]
    n_decodes: int
    n_stored: int  # of the decodes, before it
    calls: list[RunTogether]  # of prompts; the first one may be the program of the decodes
    n_returned: int  # tokens whose kept KV comes back before it

    @property
    def n_programs(self) -> int:
        """That the host launches for it."""
        is_mixed = bool(self.calls and self.calls[0].decodes)
        return len(self.calls) + (self.n_decodes > 0 and not is_mixed)


def _is_late(step: _Launched) -> bool:
    """Whether all for whom a step was scheduled have ended since."""
    return not step.calls and all(request.payload.request is None for request in step.rows)


@dataclass
class _Simulation:
    setup: Deployment
    trace: Trace
    policy: ServingPolicy
    failures: list[Failure]
    rate: FailureRate | None
    one_by_one: bool
    on_progress: Callable[[int, int], object]
    events: list[tuple[int, int, int]] = field(default_factory=list)  # (fs, what, which or which start)

    def __post_init__(self) -> None:
        trace, n = self.trace, len(self.trace)
        if not n:
            raise UserError("the trace has no request")
        if any(trace.arrival_us[1:] < trace.arrival_us[:-1]) or trace.arrival_us[0] < 0:
            raise UserError("a trace's arrivals must be in order, from 0 on")
        if min(trace.n_prompt.min(), trace.n_output.min()) < 1:
            raise UserError("each request of a trace must have a prompt and an output")
        self._arrivals, self._prompts, self._outputs = (
            array("q", x.tolist()) for x in (trace.arrival_us, trace.n_prompt, trace.n_output)
        )
        self._first_s, self._end_s = array("d", bytes(8 * n)), array("d", bytes(8 * n))
        self._n_ended, self._n_preemptions, self._n_prompt_steps = 0, 0, 0
        self._prefill_fs = self._down_fs = self._return_fs = self._n_failures = 0
        self._host_fs, self._waited_fs = round(FS * self.policy.host_s), 0
        self._mixed: list[StepCost] = []
        buckets = self.policy.buckets
        self._times = ModelledTimes(self.setup, () if buckets is None else buckets.batch)
        predict = partial(self._times.with_prompt_s, self.policy.mixed_steps)
        self._most_prompt_tokens, self._chunk_size = chunk_size.chosen(
            self.policy.max_num_batched_tokens,
            self.policy.tpot_slo_ms,
            predict if self.policy.with_prefill else None,
        )
        sizes = buckets or gpu_buckets(self.setup, self.policy.max_num_seqs, trace)
        self._batching = PromptBatches(CompiledSizes(sizes), self.policy.prompt_batch_tokens)
        self._live: dict[int, _Life] = {}
        self._come: list[int] = []  # and not taken in yet
        self._n_starts = 0  # of the job: steps of an earlier start are lost
        self._ready_at = 0
        self._is_down = False
        self._is_idle = True
        self._current: _Launched | None = None
        self._ahead: _Launched | None = None
        self._over_time = array("d"), array("q"), array("q"), array("q")
        self.n_slots = self._slots()
        self._random = self._random_failures()
        self._start()

    def _slots(self) -> int:
        """As many as fit, or as could ever be used if these are fewer."""
        sizes = ((n, self._max_tokens(out)) for n, out in zip(self._prompts, self._outputs, strict=True))
        prompt, out = max(sizes, key=sum)
        most = min(self.policy.max_num_seqs, len(self.trace)) * (prompt + out)
        n = int(
            min(costs.kv_slots(self.setup) if self.policy.kv_slots is None else self.policy.kv_slots, most)
        )
        if n < 1:
            raise UserError("the setup has no memory for KV beside the weights: take more or larger devices")
        if prompt + out - 1 > n:  # before it is made, which takes as much memory as its prompt is long
            raise UserError(
                f"a request of the trace may need {prompt + out - 1:,} KV slots (prompt {prompt:,}, "
                f"output {out:,}), the pool has {n:,}: leave it out, or take more or larger devices"
            )
        return n

    def _random_failures(self) -> Iterator[tuple[float, int]] | None:
        """``UserError`` where full slots would hardly ever be back before the next one."""
        if self.rate is None:
            return None
        return_s = self.rate.return_s(self.setup, self.n_slots) if self.policy.kept_kv else 0.0
        return self.rate.times(self.setup.n_model + self.setup.n_attention, return_s)

    def _max_tokens(self, n_output: int) -> int:
        """What a request of so many asks for."""
        return max(self.policy.max_tokens or 0, n_output)

    def _start(self) -> None:
        """A new engine with the requests that have not ended, after the tokens that they have."""
        self._scheduler = Scheduler(
            SlotAllocator(self.n_slots),
            max_num_seqs=self.policy.max_num_seqs,
            prefill_chunk=self._most_prompt_tokens,
            chunk_size=self._chunk_size,
            policy=load_policy(self.policy.scheduling_policy),
            headroom=self.policy.kv_headroom,
        )
        if not self.policy.with_prefill:  # what takes no time is not shared out over steps
            self._scheduler.max_prefill_tokens = sys.maxsize
        if self.policy.kept_kv and (self.failures or self.rate):
            self._scheduler.room.kept = _KeptKv()
        for life in self._live.values():
            self._add(life)

    def _add(self, life: _Life) -> None:
        index, before = life.index, life.request
        prompt = (0,) * self._prompts[index]
        life.request = Request(str(index), prompt, self._max_tokens(life.n_output), life)
        if before is not None:
            life.request.output_token_ids = before.output_token_ids
        self._scheduler.add(life.request)

    # --- events ---

    def run(self) -> SimulatedRun:
        events = self.events
        events.append((self._arrivals[0] * FS_US, _ARRIVAL, 0))
        events += [(round(FS * f.at_s), _FAILURE, i) for i, f in enumerate(self.failures)]
        heapq.heapify(events)
        n_known = len(self.failures)
        self._await_failure()
        n = len(self.trace)
        while self._n_ended < n:
            now, what, which = heapq.heappop(events)
            if what == _ARRIVAL:
                self._come.append(which)
                if which + 1 < n:
                    heapq.heappush(events, (self._arrivals[which + 1] * FS_US, _ARRIVAL, which + 1))
                if self._is_idle and not self._is_down:
                    self._is_idle = False
                    heapq.heappush(events, (now, _STEP, self._n_starts))
            elif what == _STEP:
                if which == self._n_starts:
                    self._turn(now)
            elif what == _FAILURE:
                self._fail(now, self.failures[which])
                if which >= n_known:  # a random one
                    self._await_failure()
            elif now == self._ready_at and self._is_down:
                self._is_down = False
                self._start()
                self._turn(now)
        self.on_progress(n, n)
        return self._found()

    def _await_failure(self) -> None:
        """The next one at a random time, if there are such."""
        if self._random is None or self.rate is None:
            return
        at_s, device = next(self._random)
        pool: Literal["attention", "model"] = "model" if device < self.setup.n_model else "attention"
        heapq.heappush(self.events, (round(FS * at_s), _FAILURE, len(self.failures)))
        self.failures.append(Failure(at_s, pool, self.rate.downtime_s))

    def _turn(self, now: int) -> None:
        """A step is over, or the engine was idle: the next one begins."""
        if self._current is not None:
            self._accept(self._current, now)
            self._current = None
        is_changed = bool(self._come)
        for index in self._come:
            life = self._live[index] = _Life(index, self._outputs[index])
            self._add(life)
        self._come.clear()
        is_ahead = self._ahead is not None and self.policy.async_scheduling
        step, self._ahead = self._ahead or self._launch(), None
        if self.policy.max_tokens is not None and step is not None and _is_late(step):
            step, is_ahead = self._launch(), False
        self._note(now, step)
        self._is_idle = step is None
        if step is None:
            return
        # One that should have been launched ahead, and was not, takes longer than those after it.
        is_like_next = is_ahead == self.policy.async_scheduling
        if is_like_next and not (step.calls or is_changed or self.one_by_one):
            skipped_fs = self._skip(now, step)
            if skipped_fs:
                self._ahead = step
                heapq.heappush(self.events, (now + skipped_fs, _STEP, self._n_starts))
                return
        if self.policy.async_scheduling:
            self._ahead = self._launch()
        self._current = step
        heapq.heappush(self.events, (now + self._with_host(step, is_ahead), _STEP, self._n_starts))

    def _with_host(self, step: _Launched, is_ahead: bool) -> int:
        """How long the step takes: the next one is launched meanwhile, and itself before, unless that was
        done ahead."""
        fs = self._fs(step)
        n_next = 0 if self._ahead is None else self._ahead.n_programs
        found = max(fs, n_next * self._host_fs)
        if not is_ahead:
            found += step.n_programs * self._host_fs
        self._waited_fs += found - fs
        return found

    def _fail(self, now: int, failure: Failure) -> None:
        ready_at = max(self._ready_at, now + round(FS * failure.downtime_s))
        self._down_fs += ready_at - max(now, self._ready_at)
        self._ready_at, self._is_down, self._is_idle = ready_at, True, False
        self._n_starts += 1
        self._n_failures += 1
        for life in self._live.values():
            request = life.request
            assert request is not None
            request.n_in_flight = 0
            if request.state is RequestState.RUNNING:
                n = len(request.prompt_token_ids)
                n_written = max(0, request.n_stored - n)
                life.n_kept = max(
                    life.n_kept, min(request.n_stored, n) + n_written // EVERY_STEPS * EVERY_STEPS
                )
        self._current = self._ahead = None
        heapq.heappush(self.events, (ready_at, _READY, 0))

    # --- steps ---

    def _launch(self) -> _Launched | None:
        """As `Engine._launch` and what draws tokens."""
        if self._scheduler.idle:
            return None
        step: ScheduledStep = self._scheduler.schedule()
        self._n_preemptions += len(step.preempted)
        if not step.prefills and not step.decodes:
            return None
        rows, calls = list(step.decodes), list[RunTogether]()
        n_stored = 0
        for request in rows:
            request.n_in_flight += 1
            n_stored += len(request.slots) - 1
        if step.prefills:
            runs = step.runs(mixed=self.policy.mixed_steps, calls=self._batching.calls)
            calls = [run for run in runs if run.prompts]
            for request, (_, stop) in (prompt for run in calls for prompt in run.prompts):
                if stop == request.n_tokens:
                    rows.append(request)
                    request.n_in_flight += 1
        n_returned = sum(len(move.target) for move in step.brought)
        return _Launched(rows, len(step.decodes), n_stored, calls, n_returned)

    def _fs(self, step: _Launched) -> int:
        """How long a step takes the devices; it is counted."""
        fs, calls = 0, step.calls
        if calls and calls[0].decodes:
            [(_, (start, stop))] = calls[0].prompts
            cost = self._times.mixed(step.n_decodes, step.n_stored, self._padded(stop - start))
            self._mixed.append(cost)
            fs, calls = round(FS * cost.step_s), calls[1:]
        elif step.n_decodes:
            cell = self._times.cell(step.n_decodes, step.n_stored)
            cell.count(1, step.n_stored)
            fs = cell.fs(step.n_stored)
        self._n_prompt_steps += len(calls)
        if self.policy.with_prefill:
            prompts_fs = sum(map(self._call_fs, calls))
            self._prefill_fs += prompts_fs
            fs += prompts_fs
        if step.n_returned and self.rate is not None:
            return_fs = round(FS * self.rate.return_s(self.setup, step.n_returned))
            self._return_fs += return_fs
            fs += return_fs
        return fs

    def _call_fs(self, call: RunTogether) -> int:
        """Of prompts in a call of their own: padded ones are all tokens of one, after as many as they have
        stored on average."""
        stored = [start for _, (start, _) in call.prompts]
        if call.size is not None:
            return self._times.prefill_fs(call.size.batch * call.size.n_tokens, sum(stored) // len(stored))
        [(_, (start, stop))] = call.prompts
        return self._times.prefill_fs(self._padded(stop - start), start)

    def _padded(self, n_tokens: int) -> int:
        """What a prompt's tokens cost as many as."""
        buckets = self.policy.buckets
        return n_tokens if buckets is None else bucket(n_tokens, buckets.prompt)

    def _accept(self, step: _Launched, now: int) -> None:
        """As `Postprocess.take_in`: everyone's token."""
        for request in step.rows:
            life: _Life = request.payload
            if life.request is None:  # it had ended when this step was run for it
                continue
            request.n_in_flight -= 1
            tokens = request.output_token_ids
            tokens.append(0)
            n = len(tokens)
            if n == 1:
                self._first_s[life.index] = now / FS
            if n == life.n_output:
                self._end_s[life.index] = now / FS
                if request.state is not RequestState.FINISHED:
                    self._scheduler.finish(request)
                life.request = None
                del self._live[life.index]
                self._n_ended += 1
                if self._n_ended % _REPORT_EVERY == 0:
                    self.on_progress(self._n_ended, len(self.trace))

    def _skip(self, now: int, step: _Launched) -> int:
        """Runs ``step`` and as many after it as are like it, all at once, so that ``step`` is the one that
        comes then; femtoseconds, 0 for none. Who comes meanwhile must not find another step begun."""
        scheduler, n_rows = self._scheduler, step.n_decodes
        if n_rows != len(scheduler.running):
            return 0
        n = scheduler.n_steps_alike()
        if self.policy.max_tokens is not None:  # else it is what the scheduler knows
            n = min(n, min(r.payload.n_output - len(r.output_token_ids) for r in step.rows) - 1)
        if n <= 0:
            return 0
        cell: CostCell = self._times.cell(n_rows, step.n_stored)
        of_devices = cell.pace(step.n_stored)
        n = min(n, cell.n_left(step.n_stored))
        if self.policy.async_scheduling:
            pace, n = of_devices.at_least(self._host_fs, n)
        else:
            pace = Pace(of_devices.first + self._host_fs, of_devices.growth)
        if self.events:
            until, what, _ = self.events[0]
            n_before = pace.n_within(until - now - 1)
            # With the next step scheduled as one begins, the step in which somebody comes is like the others.
            n = min(n, n_before + (what == _ARRIVAL and self.policy.async_scheduling))
        if n <= 0:
            return 0
        scheduler.skip(n)
        for request in step.rows:
            request.output_token_ids += [0] * n
        cell.count(n, step.n_stored)
        fs = pace.fs_of(n)
        self._waited_fs += fs - of_devices.fs_of(n)
        step.n_stored += n * n_rows
        return fs

    # --- results ---

    def _note(self, now: int, step: _Launched | None) -> None:
        at, batch, slots, waiting = self._over_time
        at.append(now / FS)
        batch.append(0 if step is None else step.n_decodes)
        slots.append(self._scheduler.slots.n_used)
        waiting.append(len(self._scheduler.waiting))

    def _found(self) -> SimulatedRun:
        self._scheduler.check_integrity()
        cells = self._times.cells
        parts = [*(cell.busy() for cell in cells), *self._mixed]
        trace = self.trace
        return SimulatedRun(
            setup=self.setup,
            arrival_s=trace.arrival_us / 1e6,
            first_s=np.asarray(self._first_s),
            end_s=np.asarray(self._end_s),
            n_prompt=trace.n_prompt,
            n_output=trace.n_output,
            n_preemptions=self._n_preemptions,
            n_decode_steps=sum(cell.n_steps for cell in cells) + len(self._mixed),
            n_prompt_steps=self._n_prompt_steps,
            n_kv_slots=self.n_slots,
            n_slots_left=self._scheduler.slots.n_used,
            decoding=StepCost(*(sum(part) for part in zip(*parts, strict=True)))
            if parts
            else StepCost(0, 0, 0, 0),
            prefill_s=self._prefill_fs / FS,
            n_failures=self._n_failures,
            down_s=self._down_fs / FS,
            kv_return_s=self._return_fs / FS,
            host_s=self._waited_fs / FS,
            over_time=OverTime(*(np.asarray(x) for x in self._over_time)),
        )
