"""How many requests and tokens a second come of a full queue: this engine, beside one request at a time,
beside a padded KV cache of the same bytes and beside transformers' continuous batching. No HTTP, no text.

Knows `LLM`, peers' processes and clocks; nothing of how results are shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np

from jaxlamina.bench.kv_present import KvPresent
from jaxlamina.bench.loads import Size
from jaxlamina.bench.processes import PeerError, PeerProcess
from jaxlamina.bench.prompts import prompts as passages
from jaxlamina.bench.rounds import ratios, record_of, seconds_of
from jaxlamina.bench.shapes import kv_token_bytes
from jaxlamina.bench.throughput_peers import BatchingJob, ContinuousBatching
from jaxlamina.engine.outputs import TokenEvent
from jaxlamina.errors import UserError
from jaxlamina.llm import LLM
from jaxlamina.models.causal_lm import HasModel
from jaxlamina.process import garbage
from jaxlamina.profiling.under_load import OneWindow, UnderLoad
from jaxlamina.ranks import Group
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.weights.sources import InMemoryModel

# Continuous batching over one request at a time, generated tokens a second, SmolLM2 on a CPU, 32
# ShareGPT-like requests.
RATIO_LIMIT = 3.0
OURS, ALONE, PADDED, TRANSFORMERS = "ours", "ours, one at a time", "ours, padded KV", "transformers"
_ROOM = 1.2  # of memory beside weights and KV, for what a step works with


@dataclass(frozen=True)
class ThroughputOptions:
    """``source``: the model with its weights; ``model``: its checkpoint's name, None for random weights or a
    function. ``n_alone``: of the requests
    the first so many are also served one after another. ``padded``: also serve all with a padded KV cache.
    ``profile_s``: seconds that are recorded of one more run. ``kv_present``: prompts are not computed.
    ``steady``: a run of ours ends once no request waits any more, so that its batches are full.
    Other options as of `LLM`."""

    model: str | None
    source: HasModel
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    split: bool
    n_rounds: int
    n_alone: int
    compare: bool
    kv_slots: int | None = None
    padded: bool = False
    kv_headroom: float | None = None
    profile_s: float = 0.0
    kv_present: bool = False
    tensor_parallel: int = 1
    steady: bool = False

    @property
    def kv_token_bytes(self) -> int:
        return kv_token_bytes(self.source.model, np.dtype(self.dtype).itemsize)

    def to_dict(self) -> dict[str, Any]:
        names = ["dtype", "split", "tensor_parallel", "max_num_seqs", "max_num_batched_tokens"]
        names += ["kv_headroom", "kv_present", "steady"]
        said = {name: getattr(self, name) for name in names}
        return said | {"n_layers": len(self.source.model.kv)}


@dataclass(frozen=True)
class Run:
    """All requests of one way, once; steady: those that were done, and all tokens, until no request waited.
    ``batch``: sequences that got a token, mean over the engine's steps.
    ``wait_s``: in which the host waited for results; None where that is not known. ``local_attention``: where
    attention was computed at the end, as of `LLM.stats`; None where there is no choice.
    ``most_at_once``: sequences that ran. ``tbt_ms``: the time between a request's tokens, median and 99th
    percentile of all tokens but first ones."""

    n_requests: int
    n_prompt: int
    n_output: int
    seconds: float
    n_steps: int | None = None
    batch: float | None = None
    n_preemptions: int | None = None
    wait_s: float | None = None
    local_attention: dict[str, Any] | None = None
    most_at_once: int | None = None
    tbt_ms: tuple[float, float] | None = None

    @property
    def requests_per_s(self) -> float:
        return self.n_requests / self.seconds

    @property
    def output_per_s(self) -> float:
        return self.n_output / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return (self.n_prompt + self.n_output) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return record_of(self, "requests_per_s", "output_per_s", "tokens_per_s")


@dataclass
class ThroughputReport:
    """What was found, a run a round of each way. ``in_turns``: whether transformers and this engine took
    turns, and not one after the other. ``same_tokens``: requests whose tokens all are those of transformers.
    ``headings``: what a table says of a way in its name."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    device: str = ""
    warm_up_s: float = 0.0
    kv_slots: int = 0
    in_turns: bool = True
    same_tokens: int | None = None
    under_load: UnderLoad | None = None
    headings: dict[str, str] = field(default_factory=dict)

    def heading(self, way: str) -> str:
        """A way, and what must be known of it beside its numbers."""
        return f"{way} ({self.headings[way]})" if way in self.headings else way

    def ratio(self, way: str) -> tuple[float, float, float]:
        """Generated tokens a second of ours over another way's: median, lowest and highest of the rounds' own
        ratios (where they took turns), or of each of ours over the other's median."""
        ours = [run.output_per_s for run in self.runs[OURS]]
        theirs = [run.output_per_s for run in self.runs[way]]
        if way == TRANSFORMERS and not self.in_turns:
            theirs = [statistics.median(theirs)] * len(ours)
        found = ratios(ours, theirs)
        return statistics.median(found), min(found), max(found)

    def ratios(self) -> dict[str, tuple[float, float, float]]:
        return {way: self.ratio(way) for way in (ALONE, PADDED, TRANSFORMERS) if way in self.runs}

    def to_dict(self) -> dict[str, Any]:
        names = ("kv_slots", "warm_up_s", "in_turns", "same_tokens", "notes", "headings", "left_out")
        return {name: getattr(self, name) for name in names} | {
            "accelerator": self.device,
            "results": {way: [run.to_dict() for run in runs] for way, runs in self.runs.items()},
            "ratios": self.ratios(),
            "ratio_limit": RATIO_LIMIT,
            "under_load": self.under_load and self.under_load.to_dict(),
        }


def measure(
    options: ThroughputOptions,
    sizes: Sequence[Size],
    *,
    encode: Callable[[str], Sequence[int]] | None,
    group: Group | None = None,
    on_progress: Callable[[str], object] = lambda what: None,
) -> ThroughputReport:
    """Serves requests of ``sizes``, greedily and to their full length, ``n_rounds`` times in each way.

    transformers has a process of its own on the same device. On a CPU it takes turns with ours; on a GPU it
    is loaded first, and takes turns only where enough memory is left beside it. ``UserError`` for a request
    that is longer than the model, or if the two find different devices.
    """
    longest = max(size.n_tokens for size in sizes)
    if longest > options.source.model.max_len:
        raise UserError(f"a request has {longest} tokens, the model {options.source.model.max_len} positions")
    load = _Load(sizes, _prompts(sizes, options.source.model.vocab_size, encode))
    report = ThroughputReport()
    with ExitStack() as stack:
        theirs: _Theirs | None = None
        if options.compare:
            on_progress("loading transformers")
            theirs = stack.enter_context(_Theirs(options, load, report))
            report.in_turns = theirs.leaves(_needed_bytes(options, sizes))
            if not report.in_turns:
                for i in range(options.n_rounds):
                    on_progress(f"round {i + 1} of {options.n_rounds}: transformers")
                    theirs.turn()
                theirs.close()
        on_progress("loading")
        ours = _Ours(options, longest, group)
        report.device = ours.device.device_kind
        if theirs is not None:
            theirs.check_same_platform(ours.device.platform)
        padded = _Ours(options, longest, group, kv_manager="padded") if options.padded else None
        report.kv_slots = ours.kv_slots
        on_progress("compiling")
        report.warm_up_s = ours.warm_up(load, options.n_alone)
        if padded is not None:
            report.warm_up_s += padded.warm_up(load, 0)
        garbage.settle()  # as a server does when all is compiled
        stack.callback(garbage.unsettle)
        for i in range(options.n_rounds):
            head = f"round {i + 1} of {options.n_rounds}"
            on_progress(f"{head}, {len(sizes)} requests")
            _round(ours, load, options.n_alone, report)
            if padded is not None:
                on_progress(f"{head}, {PADDED}")
                report.runs.setdefault(PADDED, []).append(padded.run(load))
            if theirs is not None and report.in_turns:
                on_progress(f"{head}, {TRANSFORMERS}")
                theirs.turn()
        if options.profile_s:
            on_progress("recording")
            report.under_load = ours.recorded(
                load, options.profile_s, statistics.median(r.seconds for r in report.runs[OURS])
            )
    if theirs is not None and theirs.tokens is not None and options.model is not None:
        report.same_tokens = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True))
    return report


@dataclass(frozen=True)
class _Load:
    sizes: Sequence[Size]
    prompts: Sequence[Sequence[int]]

    @property
    def n_outputs(self) -> list[int]:
        return [size.n_output for size in self.sizes]

    def part(self, begin: int, end: int) -> _Load:
        return _Load(self.sizes[begin:end], self.prompts[begin:end])

    def run(self, seconds: float, **more: Any) -> Run:
        n_prompt = sum(size.n_prompt for size in self.sizes)
        return Run(len(self.sizes), n_prompt, sum(self.n_outputs), seconds, **more)


def _round(ours: _Ours, load: _Load, n_alone: int, report: ThroughputReport) -> None:
    """Ours once; of the requests that are also served one by one, half come before it and half after, so that
    a machine that slows down hits both."""
    halves = load.part(0, n_alone // 2), load.part(n_alone // 2, n_alone)
    alone_s = ours.one_at_a_time(halves[0])
    report.runs.setdefault(OURS, []).append(ours.run(load))
    if n_alone:
        alone_s += ours.one_at_a_time(halves[1])
        report.runs.setdefault(ALONE, []).append(load.part(0, n_alone).run(alone_s))


class _NoneWaits(Exception):
    """Ends a steady run."""


class _Ours:
    """The engine, without a tokenizer and without a prefix cache: every round does all the work."""

    def __init__(
        self, options: ThroughputOptions, longest: int, group: Group | None, kv_manager: str = "token"
    ) -> None:
        self.tokens: list[list[int]] = []
        self._steady = options.steady
        self._llm = LLM(
            _source(options, group),
            dtype=options.dtype,
            split=options.split,
            tensor_parallel=options.tensor_parallel,
            max_num_seqs=options.max_num_seqs,
            max_model_len=longest,
            prefix_caching=False,
            kv_slots=options.kv_slots,
            kv_manager=kv_manager,
            kv_headroom=options.kv_headroom,
            group=group,
            use_tqdm_on_load=False,
            **self._of_prompts(options, longest),
        )
        if options.kv_present:
            engine = self._llm.engine
            engine.executor = KvPresent(engine.executor, options.source.model.vocab_size)
            engine.scheduler.max_prefill_tokens = options.max_num_seqs * longest  # they take no time
        self.kv_slots = int(self._llm.stats()["kv_slots"])
        self.device = self._llm.model_device

    @staticmethod
    def _of_prompts(options: ThroughputOptions, longest: int) -> dict[str, Any]:
        if options.kv_present:  # they come whole, as many at once as have room
            return {"max_num_batched_tokens": options.max_num_seqs * longest, "mixed_steps": False}
        return {"max_num_batched_tokens": options.max_num_batched_tokens}

    def warm_up(self, load: _Load, n_alone: int) -> float:
        """Serves the requests once, by which every program that they meet is compiled, and no other;
        seconds."""
        alone_s = self.one_at_a_time(load.part(0, n_alone))
        return alone_s + seconds_of(lambda: self._generate(load))

    def run(self, load: _Load) -> Run:
        clock = _StepClock(self._llm.engine)
        self._begin()
        with clock:
            self.tokens = self._generate(load)
        (began_s, before), after = self._begun, self._llm.stats()
        seconds = time.perf_counter() - began_s

        def more(key: str) -> Any:
            return after[key] - before[key]

        counted = load.run(seconds)
        if self._steady:
            n_prompt, n_output = more("n_prompt_tokens"), more("n_generated_tokens")
            counted = Run(len(self.tokens), n_prompt, n_output, seconds)
        return replace(
            counted,
            n_steps=more("n_steps"),
            batch=more("n_generated_tokens") / more("n_steps"),
            n_preemptions=more("n_preemptions"),
            wait_s=more("wait_s"),
            local_attention=after.get("local_attention"),
            most_at_once=clock.most_at_once,
            tbt_ms=clock.tbt_ms(),
        )

    def _begin(self) -> None:
        self._begun = time.perf_counter(), self._llm.stats()

    def recorded(self, load: _Load, for_s: float, usual_s: float) -> UnderLoad | None:
        """What devices do from a quarter of a run on, for so many seconds; None if nothing could be
        recorded."""
        found: list[UnderLoad] = []
        engine = self._llm.engine
        for after_s in (0.25 * usual_s, 0.0):
            window = OneWindow(engine, after_s, for_s, found.append)
            engine.before_step = window.before_step
            try:
                self._generate(load)
                window.finish()
            finally:
                engine.before_step = None
            if window.has_begun:  # not so where this run was over that soon
                break
        return found[0] if found else None

    def one_at_a_time(self, load: _Load) -> float:
        """Seconds for all requests, each begun when the one before it is done."""
        each = [load.part(i, i + 1) for i in range(len(load.sizes))]
        return sum(seconds_of(partial(self._generate, one)) for one in each)

    def _generate(self, load: _Load) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in load.prompts]
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in load.n_outputs]
        if self._steady:
            return self._until_none_waits(asked, params)
        found = [list(output.token_ids) for output in self._llm.generate(asked, params, use_tqdm=False)]
        if [len(tokens) for tokens in found] != load.n_outputs:
            raise UserError("some outputs are shorter than asked for: the KV of one request does not fit")
        return found

    def _until_none_waits(self, asked: Any, params: list[SamplingParams]) -> list[list[int]]:
        """Tokens of those requests that are done one step after the last has begun. Others are ended. The
        first step, which admits as many as have room, is left out of what is counted. ``UserError`` where all
        have room."""
        engine, done, last_step, is_full = self._llm.engine, list[list[int]](), -1, False

        def look(event: TokenEvent) -> None:
            nonlocal last_step, is_full
            if not is_full:
                if not engine.scheduler.waiting:
                    raise _NoneWaits
                self._begin()
                is_full = True
            if 0 <= last_step < engine.stats.n_steps:
                raise _NoneWaits
            if event.output is not None:
                done.append(list(event.output.token_ids))
            if not engine.scheduler.waiting:
                last_step = engine.stats.n_steps

        with suppress(_NoneWaits):
            self._llm.generate(asked, params, use_tqdm=False, on_token=look)
        if not done:
            raise UserError(f"{len(asked)} requests have room at once, so none waits: ask for more of them")
        return done


class _StepClock:
    """While it is entered, notes when each of the engine's steps begins, how many tokens of rows there are by
    then and how many in all, and how many sequences run."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._noted: list[tuple[float, int, int, int]] = []

    def __enter__(self) -> Self:
        self._engine.before_step = self._note
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.before_step = None
        self._note()

    @property
    def most_at_once(self) -> int:
        """Sequences that end with their first token run within one step alone, which gives each one token."""
        _, _, n_tokens, n_running = (np.array(column) for column in zip(*self._noted, strict=True))
        return int(max(n_running.max(), np.diff(n_tokens).max()))

    def tbt_ms(self) -> tuple[float, float] | None:
        """Median and 99th percentile over tokens: each step's time as often as it gave tokens."""
        times, n_tokens, _, _ = (np.array(column) for column in zip(*self._noted, strict=True))
        gaps_ms, weights = np.diff(times) * 1e3, np.diff(n_tokens)
        if not weights.sum():
            return None
        low, high = np.quantile(gaps_ms, (0.5, 0.99), weights=weights, method="inverted_cdf")
        return float(low), float(high)

    def _note(self) -> None:
        engine = self._engine
        stats, n_running = engine.stats, len(engine.scheduler.running)
        noted = time.perf_counter(), stats.n_decode_tokens, stats.n_generated_tokens, n_running
        self._noted.append(noted)


class _Theirs:
    """transformers in its process. Where it fails it is left out, and the report says why."""

    def __init__(self, options: ThroughputOptions, load: _Load, report: ThroughputReport) -> None:
        self.tokens: list[list[int]] | None = None
        self._load, self._report = load, report
        self._platform, self._free_bytes = "", 0
        self._process: PeerProcess | None = None
        job = BatchingJob(
            options.model,
            options.source.model.config,
            options.dtype,
            load.sizes,
            options.max_num_seqs,
            options.max_num_batched_tokens,
        )
        try:
            self._process = PeerProcess(TRANSFORMERS, partial(ContinuousBatching, job))
            self._platform, self._free_bytes = self._process.ask("where")
            report.notes[TRANSFORMERS] = self._process.note
            report.headings[TRANSFORMERS] = self._process.ask("heading")
        except PeerError as error:
            self._give_up(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def leaves(self, n_bytes: float) -> bool:
        """Whether there is memory for so much beside it."""
        return self._platform != "gpu" or self._free_bytes > n_bytes

    def check_same_platform(self, platform: str) -> None:
        if self._platform and self._platform != platform:
            raise UserError(
                f"transformers would run on the {self._platform} and JAX on the {platform}: set "
                "JAX_PLATFORMS=cpu to compare on the CPU"
            )

    def turn(self) -> None:
        if self._process is None:
            return
        try:
            seconds, self.tokens = self._process.ask("run", self._load.prompts, self._load.n_outputs)
        except PeerError as error:
            self._give_up(error)
            return
        self._report.runs.setdefault(TRANSFORMERS, []).append(self._load.run(seconds))

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _give_up(self, error: PeerError) -> None:
        self.close()
        self.tokens = None
        self._report.runs.pop(TRANSFORMERS, None)
        self._report.left_out[TRANSFORMERS] = str(error)


def _source(options: ThroughputOptions, group: Group | None) -> Any:
    """The model for `LLM`, its weights read once for all that is compared, and without its tokenizer; not
    read at all yet where no device is to have all of them."""
    source = options.source
    shared = options.tensor_parallel > 1 or (group is not None and group.cluster.shares_weights)
    if source.model.config is None or (shared and source.later(options.dtype)):
        return source
    return InMemoryModel(source.model.config, source.load(np.dtype(options.dtype)))


def _prompts(
    sizes: Sequence[Size], vocab_size: int, encode: Callable[[str], Sequence[int]] | None
) -> list[list[int]]:
    """A prompt a size: real text cut to the token, or random ids without a tokenizer. These have their own
    lengths from the start: thousands as long as the longest could fill a host's memory."""
    if encode is None:
        drawn = (
            passages(1, x.n_prompt, vocab_size=vocab_size, encode=None, seed=i) for i, x in enumerate(sizes)
        )
        return [prompt for (prompt,) in drawn]
    longest = max(size.n_prompt for size in sizes)
    made = passages(len(sizes), longest, vocab_size=vocab_size, encode=encode)
    return [prompt[: size.n_prompt] for prompt, size in zip(made, sizes, strict=True)]


def _needed_bytes(options: ThroughputOptions, sizes: Sequence[Size]) -> float:
    """Memory for weights, and for KV of as many of these requests as can run at once."""
    itemsize = np.dtype(options.dtype).itemsize
    weights = itemsize * sum(x.size for x in options.source.model.like(options.dtype).values())
    longest = max(size.n_tokens for size in sizes)
    return _ROOM * (weights + options.kv_token_bytes * options.max_num_seqs * longest)
