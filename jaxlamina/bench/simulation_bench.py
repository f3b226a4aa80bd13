"""The simulator beside the engine: a slice of a trace served by a model on this machine, and the same slice
simulated with terms that were fitted to steps of other sizes.

Knows `LLM`, clocks and the simulator; nothing of how results are shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from jaxlamina.engine.engine import Engine
from jaxlamina.errors import UserError
from jaxlamina.llm import LLM
from jaxlamina.models.config import ModelConfig
from jaxlamina.planner import roofline
from jaxlamina.planner.costs import Deployment, Terms, prefill_s, step_cost
from jaxlamina.planner.hardware import Hardware
from jaxlamina.planner.traces import Trace
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.simulator import ServingPolicy, SimulatedRun, simulate
from jaxlamina.weights.sources import ModelSource

# (requests, stored tokens of each) and prompts of the steps that terms are fitted to. Products compute a
# prompt's rows by vectors of 16 (of AVX-512; `pallas_kernels/native/product_kernel.cc`) and no other padding.
_VECTOR = 16
DECODES = ((1, 16), (2, 400), (4, 16), (8, 400), (8, 16), (1, 400))
PROMPTS = (40, 200, 400)
_STEPS = 12  # timed, of each
_FLOAT32_BYTES = 4
_KNEE = 2.0  # of products: reading weights and multiplying with them, on the way from one to the other


class ServedSlice(NamedTuple):
    """Output tokens a second, median seconds to the first token and for each after it, and seconds in all."""

    output_per_s: float
    ttft_s: float
    tpot_s: float
    seconds: float

    @classmethod
    def of(cls, trace: Trace, first_s: np.ndarray, end_s: np.ndarray) -> ServedSlice:
        several = trace.n_output > 1
        tpot = (end_s - first_s)[several] / (trace.n_output[several] - 1)
        ttft = first_s - trace.arrival_us / 1e6
        seconds = float(end_s.max())
        n_output = float(trace.n_output.sum())
        return cls(n_output / seconds, float(np.median(ttft)), float(np.median(tpot)), seconds)


class MeasuredStep(NamedTuple):
    """A decode step of ``n_rows`` requests, or for 0 a prompt: tokens together, of a prompt as many as are
    computed for it, and its median seconds."""

    n_rows: int
    n_tokens: int
    seconds: float


@dataclass(frozen=True)
class SimulationReport:
    """``rounds``: each live, and simulated with terms that are fitted to steps before, after and within it.
    ``held_out_error``: of single steps, each by terms that are fitted to the others. ``tpot_of_5_percent``:
    by what share TPOT's median grows where all steps take 5 % longer, simulated; the median of the rounds."""

    trace: Trace
    rounds: Sequence[tuple[ServedSlice, ServedSlice]]
    fit_error: float  # the median of the fitted steps' own
    held_out_error: float  # the median
    terms: Terms
    tpot_of_5_percent: float

    def median(self, which: int) -> ServedSlice:
        """Of live runs (0) or simulated ones (1)."""
        rows = zip(*(pair[which] for pair in self.rounds), strict=True)
        return ServedSlice(*(statistics.median(row) for row in rows))

    def error(self, name: str) -> float:
        """Simulated over live, less 1: of the medians."""
        return float(getattr(self.median(1), name) / getattr(self.median(0), name) - 1)

    def spread(self, name: str) -> float:
        """Of live runs: largest over smallest, less 1."""
        values = [getattr(live, name) for live, _ in self.rounds]
        return max(values) / min(values) - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "n_requests": len(self.trace),
            "live": self.median(0)._asdict(),
            "simulated": self.median(1)._asdict(),
            "errors": {name: self.error(name) for name in ServedSlice._fields},
            "live_spread": {name: self.spread(name) for name in ServedSlice._fields},
            "fit_error": self.fit_error,
            "held_out_error": self.held_out_error,
            "tpot_of_5_percent": self.tpot_of_5_percent,
            "rounds": [[one._asdict() for one in pair] for pair in self.rounds],
        }


class _Clock:
    """Seconds since it was made: of the wall, or of this process's CPU. Time in which there is nothing to do
    is skipped."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read, self._skipped = read, -read()

    def now(self) -> float:
        return self._read() + self._skipped

    def skip_to(self, seconds: float) -> None:
        self._skipped += max(0.0, seconds - self.now())

    @contextmanager
    def standing(self) -> Iterator[None]:
        """What is done meanwhile takes no time."""
        began = self.now()
        yield
        self._skipped -= self.now() - began


class _Kind(NamedTuple):
    """Of a step that terms are fitted to: requests with so many stored tokens each, or for 0 a prompt."""

    n_rows: int
    n_tokens: int


class _Steps:
    """Single steps, each kind in turn: before and after a live run, and in it while nothing is to be done.
    A machine's pace drifts by more than the aim within a minute."""

    KINDS = (*(_Kind(*step) for step in DECODES), *(_Kind(0, n) for n in PROMPTS))

    def __init__(self, engine: Engine, read: Callable[[], float]) -> None:
        self._engine, self._read = engine, read
        self._seconds: dict[_Kind, list[float]] = {kind: [] for kind in self.KINDS}
        self._turns = cycle(self.KINDS)

    def all_once(self) -> None:
        for _ in self.KINDS:
            self.next_one()

    def next_one(self) -> None:
        kind = next(self._turns)
        self._seconds[kind].append(self._timed(kind))

    def medians(self) -> list[MeasuredStep]:
        return [_step_of(kind, statistics.median(values)) for kind, values in self._seconds.items()]

    def keep_last(self) -> None:
        """Of each kind, for the round after this one, whose beginning it is."""
        self._seconds = {kind: values[-1:] for kind, values in self._seconds.items()}

    def _timed(self, kind: _Kind) -> float:
        if kind.n_rows:
            return _decode_s(self._engine, self._read, *kind)
        clock = _Clock(self._read)
        self._engine.add_request([11 + i % 1000 for i in range(kind.n_tokens)], _greedy(1))
        while not self._engine.idle:
            self._engine.step()
        return clock.now()


def _step_of(kind: _Kind, seconds: float) -> MeasuredStep:
    n_rows, n = kind
    n_tokens = n_rows * (n + _STEPS // 2) if n_rows else -(-n // _VECTOR) * _VECTOR
    return MeasuredStep(n_rows, n_tokens, seconds)


def slice_of(trace: Trace, n: int, shorter: float, rate: float) -> Trace:
    """The first ``n`` requests, ``shorter`` times shorter, of which ``rate`` arrive a second on average."""
    if not 1 < n <= len(trace):
        raise UserError(f"--num-prompts {n} must be from 2 to the trace's {len(trace):,}")
    prompts, outputs = ((x[:n] // shorter).astype(int).clip(2) for x in (trace.n_prompt, trace.n_output))
    arrivals = trace.arrival_us[:n] - trace.arrival_us[0]
    return Trace((arrivals * ((n - 1) / rate * 1e6 / arrivals[-1])).astype(int), prompts, outputs)


def measure(
    source: ModelSource,
    config: ModelConfig,
    trace: Trace,
    *,
    n_rounds: int,
    max_num_seqs: int,
    of_cpu: bool,
    on_progress: Callable[[str], object] = lambda what: None,
) -> SimulationReport:
    """``of_cpu``: all times are this process's CPU seconds, as on a machine that others use."""
    on_progress("loading")
    llm = LLM(
        source,
        dtype="float32",
        split=False,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1024,
        max_model_len=1024,
        prefix_caching=False,
        kv_slots=1024 * max_num_seqs,
        use_tqdm_on_load=False,
    )
    engine, read = llm.engine, time.process_time if of_cpu else time.perf_counter
    policy = ServingPolicy(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1024,
        kv_slots=1024 * max_num_seqs,
        buckets=replace(engine.buckets, prompt=tuple(range(_VECTOR, 1024 + 1, _VECTOR))),
    )
    rounds, errors, held_out, growths = [], [], [], []
    on_progress("compiling")
    single = _Steps(engine, read)
    single.all_once()
    _live(engine, trace, read)
    on_progress("single steps")
    single.all_once()
    for i in range(1, n_rounds + 1):
        on_progress(f"round {i} of {n_rounds}: {len(trace)} requests, and single steps between them")
        single.keep_last()
        live = _live(engine, trace, read, single.next_one)
        on_progress(f"round {i} of {n_rounds}: single steps")
        single.all_once()
        steps = single.medians()
        terms = fitted(config, steps)
        simulated = _simulated(config, terms, trace, policy)
        rounds.append((live, simulated))
        growths.append(_simulated(config, _longer(terms, 1.05), trace, policy).tpot_s / simulated.tpot_s - 1)
        errors.append(statistics.median(_error(config, terms, step) for step in steps))
        held_out.append(statistics.median(held_out_errors(config, steps)))
    fit_error, held_out_error, growth = map(statistics.median, (errors, held_out, growths))
    return SimulationReport(trace, rounds, fit_error, held_out_error, terms, growth)


def _simulated(config: ModelConfig, terms: Terms, trace: Trace, policy: ServingPolicy) -> ServedSlice:
    setup = Deployment(config, terms, kv_bytes=_FLOAT32_BYTES, weight_bytes=_FLOAT32_BYTES)
    found: SimulatedRun = simulate(setup, trace, policy)
    return ServedSlice.of(trace, found.first_s, found.end_s)


def _longer(terms: Terms, factor: float) -> Terms:
    """All steps so many times as long."""
    rates = ("product_bytes_s", "product_flop_s", "attention_bytes_s")
    changed = {name: getattr(terms, name) / factor for name in rates}
    changed |= {name: getattr(terms, name) * factor for name in ("step_fixed_s", "row_fixed_s")}
    return replace(terms, **changed)


def _live(
    engine: Engine, trace: Trace, read: Callable[[], float], meanwhile: Callable[[], object] = lambda: None
) -> ServedSlice:
    """``meanwhile``: done each time that all requests so far have been served, and of no time."""
    n = len(trace)
    first, end, ids = np.zeros(n), np.zeros(n), dict[str, int]()
    arrivals, n_come, clock = trace.arrival_us / 1e6, 0, _Clock(read)
    while n_come < n or not engine.idle:
        if engine.idle:
            with clock.standing():
                meanwhile()
            clock.skip_to(arrivals[n_come])
        while n_come < n and arrivals[n_come] <= clock.now():
            prompt = [(7 * n_come + i) % 1000 + 10 for i in range(trace.n_prompt[n_come])]
            ids[engine.add_request(prompt, _greedy(int(trace.n_output[n_come])))] = n_come
            n_come += 1
        events = engine.step()
        now = clock.now()
        for event in events:
            which = ids[event.request_id]
            first[which], end[which] = first[which] or now, now
    return ServedSlice.of(trace, first, end)


def _greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


def _decode_s(engine: Engine, read: Callable[[], float], n_rows: int, context: int) -> float:
    """The median of decode steps, without those in which prompts are computed."""
    for i in range(n_rows):
        engine.add_request([11 + (i + j) % 1000 for j in range(context)], _greedy(_STEPS + 4))
    several = []
    while not engine.idle:
        before, clock = engine.stats.n_prefill_steps, _Clock(read)
        engine.step()
        if engine.stats.n_prefill_steps == before:
            several.append(clock.now())
    # Of the first the prompts' work may be left, and by the last none has been launched.
    return statistics.median(several[1:-1])


def fitted(config: ModelConfig, steps: Sequence[MeasuredStep]) -> Terms:
    """Terms of this machine, by least squares of relative errors. Weights are read at one rate and multiplied
    with at another one; a step has a fixed time, and each row and each stored token takes its own. Without a
    term of their own rows of decode steps would go at the rate of prompts' tokens, and on CPUs they take
    longer. A straight line over rows missed steps of one row by 4 %, and steps of four by 11 %
    (docs/findings.md)."""
    from scipy.optimize import least_squares

    n_weights = roofline.n_step_params(config)
    one_row_s = min(step.seconds for step in steps if step.n_rows)
    flop_s = max(2 * n_weights * step.n_tokens / step.seconds for step in steps if not step.n_rows)
    first = (_FLOAT32_BYTES * n_weights / one_row_s, flop_s, 1e10, one_row_s / 10, one_row_s / 20)
    found = least_squares(
        lambda logs: [_predicted_s(config, _terms(np.exp(logs)), step) / step.seconds - 1 for step in steps],
        np.log(first), x_scale=0.1, xtol=1e-6, ftol=1e-9,
    )  # fmt: skip
    return _terms(np.exp(found.x))


def _terms(numbers: np.ndarray) -> Terms:
    source = {"memory_gib": "any, 2025", "bandwidth_gb_s": "not used, 2025", "tflops_bf16": "not used, 2025"}
    machine = Hardware("this machine", 1024.0, 1.0, tflops_bf16=1.0, source=source)
    read, flop_s, kv, fixed_s, row_s = map(float, numbers)
    return Terms(machine, read, flop_s, kv, 0.0, 0.0, fixed_s, product_knee=_KNEE, row_fixed_s=row_s)


def _predicted_s(config: ModelConfig, terms: Terms, step: MeasuredStep) -> float:
    setup = Deployment(config, terms, kv_bytes=_FLOAT32_BYTES, weight_bytes=_FLOAT32_BYTES)
    if not step.n_rows:
        return prefill_s(setup, step.n_tokens)
    return step_cost(setup, step.n_rows, step.n_tokens / step.n_rows).step_s


def held_out_errors(config: ModelConfig, steps: Sequence[MeasuredStep]) -> list[float]:
    """Of each step by terms that are fitted to the others, relative."""
    others = ([*steps[:i], *steps[i + 1 :]] for i in range(len(steps)))
    return [_error(config, fitted(config, rest), step) for rest, step in zip(others, steps, strict=True)]


def _error(config: ModelConfig, terms: Terms, step: MeasuredStep) -> float:
    return abs(_predicted_s(config, terms, step) / step.seconds - 1)
