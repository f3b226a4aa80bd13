"""A decode step of a model shape with random weights: unsplit on one device, and split over this job's ranks,
in one run.

Ways of running (`step_ways`) take turns on the same batches. Two times each: many steps launched ahead and
waited for once, which is what the devices need, and steps waited for one by one, which a lone request feels.
If asked for, also with a chunk of a prompt: in the decode step, as a step after it, or on a prefill worker
meanwhile where the job has one, in step with the rows and at its own pace (`own_pace`). Knows executors and
clocks; nothing of tables, nor of how ranks were started.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.bench import kernels_bench
from jaxlamina.bench.chosen_share import WantedShare, choices
from jaxlamina.bench.own_pace import OwnPace, OwnPaceRun
from jaxlamina.bench.rounds import ratios, record_of, seconds_of
from jaxlamina.bench.shapes import kv_token_bytes, weight_bytes
from jaxlamina.bench.step_ways import StepCase, StepOptions, Way, check_cut, layouts, staggered_words, ways_of
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.kv.placement import AUTO, LocalShare
from jaxlamina.models import ModelConfig
from jaxlamina.models.causal_lm import CausalLM, HasModel, built
from jaxlamina.ranks import Group
from jaxlamina.ranks.cluster_layout import partition_of
from jaxlamina.run.local import LocalExecutor
from jaxlamina.run.ranks import RanksExecutor
from jaxlamina.run.sharded import ShardedExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.steps.buckets import Buckets
from jaxlamina.steps.step import PromptPart, Step
from jaxlamina.weights.dummy import Drawn
from jaxlamina.workers import DecodeBatch, PrefillBatch
from jaxlamina.workers.workspace import LargestStep

E = TypeVar("E", bound=RanksExecutor)

_ROUND_S = 0.4
# With each share that the balance wants: so many times so many steps, launched ahead.
_TIMES, _STEPS = 5, 4
# What a device cannot do, such as for want of memory, and arrays that are gone since. An executor's own
# errors end the bench.
_FAILURES = (RuntimeError,)


@dataclass
class StepResult:
    """One way of running one case. Times in ms a step, a round each."""

    case: str
    way: str
    ahead_ms: list[float] = field(default_factory=list)
    alone_ms: list[float] = field(default_factory=list)
    floor_ms: float = (
        0.0  # of one device that does all: weights and KV once, at the read bandwidth of this run
    )
    # Of staggered batches: the busier pool's, weights once a batch and the KV that model ranks keep once, or
    # each worker's KV once
    pools_floor_ms: float | None = None
    prepare_s: float = 0.0  # tracing and compiling
    # Of logits from the first way's, relative to the largest; None where they are of other requests
    max_difference: float | None = 0.0
    n_prompt_tokens: int = 0  # of another request's prompt, computed alongside or after
    n_stored_tokens: int = 0  # of that prompt, before them
    decode_ms: list[float] = field(default_factory=list)  # then ahead_ms of the decode step by itself
    chosen: tuple[WantedShare, ...] = ()  # of "auto", what was wanted; the last of it was measured
    own_pace: OwnPace | None = None  # then ahead_ms and decode_ms are its, and alone_ms is empty

    @property
    def ms(self) -> float:
        return statistics.median(self.ahead_ms)

    @property
    def blocked_ms(self) -> float | None:
        return statistics.median(self.alone_ms) if self.alone_ms else None

    def ratio_to(self, other_ms: Sequence[float]) -> float:
        """The median of the rounds' own ratios, to times of the same rounds."""
        return statistics.median(ratios(self.ahead_ms, other_ms))

    @property
    def ratio_to_decode(self) -> float | None:
        """Of a step with prompt tokens to the decode step by itself, in the same rounds."""
        return self.ratio_to(self.decode_ms) if self.decode_ms else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        if self.own_pace is not None:
            return statistics.median(self.own_pace.tokens_per_s)
        return self.n_prompt_tokens / self.ms * 1e3 if self.n_prompt_tokens else None

    def to_dict(self) -> dict[str, Any]:
        return record_of(self, "ms", "blocked_ms", "ratio_to_decode", "prompt_tokens_per_s")


DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def dtype_of(name: str) -> Any:
    """JAX's type, as ``--dtype`` has it; ``UserError`` for another name."""
    if name not in DTYPES:
        raise UserError(f"dtype={name!r} must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def source_of(shape: ModelConfig | str) -> HasModel:
    """What `flags.shape_of` found, with its weights: random ones, or those of a user's own model."""
    return built(shape) if isinstance(shape, str) else Drawn(shape)


def job_of(name: str, model: CausalLM, dtype: str, group: Group | None) -> dict[str, Any]:
    """What a record says of the model, and of what runs it."""
    over = group and f"{group.description}, {partition_of(group.cluster, model.kv_heads)}"
    return {
        "model": name,
        "n_layers": len(model.kv),
        "dtype": model.dtype or dtype,
        "job": over or "one device",
        "accelerator": _device_of(group).device_kind,
    }


def _device_of(group: Group | None) -> jax.Device:
    return jax.local_devices()[0] if group is None else group.device


def measure(
    source: HasModel,
    options: StepOptions,
    *,
    group: Group | None = None,
    on_progress: Callable[[str], object] = lambda _: None,
    on_failure: Callable[[str], object] = lambda _: None,
) -> tuple[list[StepResult], float]:
    """(results, bytes/s at which the device reads one long array). Without a group nothing is over ranks.
    ``on_failure``: told of each way that a device could not run, which is left out. ``UserError`` for a
    number that no case can be cut into."""
    check_cut(options.cases, [*options.staggered, *options.mini_batches, options.n_parts])
    on_progress("read bandwidth")
    read = kernels_bench.read_bandwidth()
    limit = statistics.median(read() for _ in range(3))
    del read  # and its array of 4 GiB, which KV may need
    on_progress("weights")
    later = None if options.unsplit or options.local else source.later(options.dtype)
    params = later or source.load(options.dtype, _device_of(group))
    bench = _Bench(source.model, options, group, params, limit, on_progress, on_failure)
    makers = bench.makers()
    found: list[StepResult] = []
    for names in [[name] for name in makers] if options.one_by_one else [list(makers)]:
        executors: dict[str, Any] = {}
        for name in names:
            try:
                executors[name] = makers[name]()
            except _FAILURES as error:
                on_failure(f"{name}: {_reason(error)}")
        for case in options.cases:
            results = _CaseRun(bench, case).run(executors)
            found += results
            for result in results:
                on_progress(f"{result.case}, {result.way}: {result.ms:.2f} ms")
        executors.clear()
        gc.collect()  # an executor's programs and the executor name each other
    return found, limit


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]


@dataclass
class _Bench:
    """What all cases have in common. ``first``: logits of each case's first way, empty before there are
    any."""

    model: CausalLM
    options: StepOptions
    group: Group | None
    params: Mapping[str, jax.Array]
    limit: float
    on_progress: Callable[[str], object]
    on_failure: Callable[[str], object]
    first: defaultdict[StepCase, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    @property
    def n_slots(self) -> int:
        prefill = self.options.prefill
        return max(case.batch * (case.context + 1) + _before(case) + prefill for case in self.options.cases)

    def makers(self) -> dict[str, Callable[[], Any]]:
        """Of executors, by the name of their ways."""
        options, device, n_slots = self.options, _device_of(self.group), self.n_slots
        fn = self.model.fn
        found: dict[str, Callable[[], Any]] = {}
        if options.unsplit:
            found["unsplit"] = partial(UnsplitExecutor, fn, self.params, n_slots=n_slots, device=device)
        if options.n_devices > 1:
            devices = jax.local_devices()[: options.n_devices]
            by_weights = partial(ShardedExecutor, fn, self.params, n_slots=n_slots, devices=devices)
            found[f"unsplit, {options.n_devices} devices by weights"] = by_weights
        if options.local:
            workers = {"model_device": device, "attention_device": device}
            found["slice by slice"] = partial(LocalExecutor, fn, self.params, n_slots=n_slots, **workers)
        if self.group is not None:
            largest = largest_of(options.cases, options.prefill)
            known = self.model, self.params, self.group, n_slots, largest
            for name, changes in layouts(options, self.group.cluster, self.model.kv_heads):
                cluster = replace(self.group.cluster, **changes)
                found[name] = partial(over_ranks, RanksExecutor, *known, cluster=cluster)
        return found


class _CaseRun:
    """One case in all ways of some executors."""

    def __init__(self, bench: _Bench, case: StepCase) -> None:
        self._bench, self._case = bench, case
        self._steps: dict[str, Callable[[], Any]] = {}
        self._places: dict[str, tuple[Any, LocalShare | None]] = {}  # executor and share on the model rank
        self._results: dict[str, StepResult] = {}
        self._at_own_pace: dict[str, tuple[Way, OwnPaceRun]] = {}
        options, known = bench.options, (bench.n_slots, bench.model.vocab_size)
        self._batch = shuffled_batch(case, *known)
        self._part = shuffled_batch(StepCase(case.batch // options.n_parts, case.context), *known)
        self._chunk = shuffled_chunk(case, options.prefill, *known) if options.prefill else None

    def run(self, executors: dict[str, Any]) -> list[StepResult]:
        for name, executor in executors.items():
            n_workers, own_pace = 0, False
            if isinstance(executor, RanksExecutor):
                n_workers = len(executor.group.prefill_ranks)
                own_pace = n_workers > 0 and executor.group.cluster.prefill_pace == "own"
                self._store(executor, None)
            for way in ways_of(name, self._bench.options, n_workers, own_pace):
                self._prepare(executor, way)
        turns: dict[str, int] = {}
        n_rounds = self._bench.options.n_rounds
        for i in range(n_rounds):
            self._bench.on_progress(f"{self._case}: round {i + 1} of {n_rounds}")
            for name, step in [*self._steps.items()]:
                try:
                    self._store(*self._places[name])
                    if name not in turns:
                        turns[name] = max(3, int(_ROUND_S / kernels_bench.timed(step, 3)))
                    self._results[name].ahead_ms.append(kernels_bench.timed(step, turns[name]) * 1e3)
                    self._results[name].alone_ms.append(alone(step, max(3, turns[name] // 2)) * 1e3)
                except _FAILURES as error:
                    self._fail(name, error)
            for name, (way, own_pace_run) in self._at_own_pace.items():
                executor, share = self._places[name]
                self._store(executor, share)
                _set(executor, way)
                own_pace_run.round()
        return list(self._results.values())

    def _prepare_own_pace(self, executor: RanksExecutor, way: Way) -> None:
        assert self._chunk is not None
        self._places[way.name] = executor, None
        self._store(executor, None)
        _set(executor, way)
        run = OwnPaceRun(executor, self._batch, self._chunk)
        self._at_own_pace[way.name] = way, run
        began = time.perf_counter()
        run.warm_up()
        n_tokens, n_stored = self._chunk.tokens.shape[1], int(self._chunk.lengths[0])
        self._results[way.name] = StepResult(
            str(self._case),
            way.name,
            ahead_ms=run.found.beside_ms,
            prepare_s=time.perf_counter() - began,
            max_difference=None,  # of earlier tokens it has none, and their time is the same
            n_prompt_tokens=n_tokens,
            n_stored_tokens=n_stored,
            decode_ms=run.found.undisturbed_ms,
            own_pace=run.found,
        )

    def _store(self, executor: Any, share: LocalShare | None) -> None:
        """Has the case's tokens stored where a way has them."""
        if not isinstance(executor, RanksExecutor) or executor.pool.placement is None:
            return
        if share is not None and not isinstance(share, str):
            executor.place_by(share)
        for stored in (self._batch, self._chunk):
            if stored is not None:
                executor.assume_stored(stored)

    def _prepare(self, executor: Any, way: Way) -> None:
        """Compiles a way's step, and compares its logits with those of the first way."""
        bench, limit = self._bench, self._bench.limit
        bench.on_progress(f"{self._case}: compiling {way.name}")
        if way.chunk == "own pace":
            self._prepare_own_pace(executor, way)
            return
        chosen: tuple[WantedShare, ...] = ()
        if way.local_share == AUTO:
            try:
                chosen = self._chosen(executor)
            except _FAILURES as error:
                bench.on_failure(f"{self._case}, {way.name}: {_reason(error)}")
                return
            share, n = chosen[-1].share, chosen[-1].n_batches
            way = Way(f"{way.name}{staggered_words(n)} ({share:.3f})", {"n_batches": n}, local_share=share)
        rows = self._batch if way.share == 1 else self._part
        step = self._steps[way.name] = partial(_run, executor, way, rows, self._chunk)
        self._places[way.name] = executor, way.local_share
        self._store(executor, way.local_share)
        began = time.perf_counter()
        try:
            logits = [np.asarray(x, np.float32) for x in step()]
        except _FAILURES as error:
            self._fail(way.name, error)
            return
        took = time.perf_counter() - began
        itemsize = np.dtype(bench.model.dtype or bench.options.dtype).itemsize
        weights, a_token = weight_bytes(bench.model, itemsize), kv_token_bytes(bench.model, itemsize)
        kv = self._case.batch * self._case.context * a_token
        floor = (weights + kv / way.share) / limit * 1e3
        result = StepResult(str(self._case), way.name, floor_ms=floor, prepare_s=took, chosen=chosen)
        n = way.options.get("n_batches", 1)
        if n > 1:
            of_model, of_memory = executor.group.cluster.tensor_parallel, len(executor.group.workers)
            kept = (executor.local_attention() or {"share": 0.0})["share"]  # as the step has just had it
            floor = pools_floor(n * weights, kv, kept, of_model, of_memory)
            result.pools_floor_ms = floor / limit * 1e3
        chunk = self._chunk
        if way.decode in self._results and chunk is not None:
            result.n_prompt_tokens, result.n_stored_tokens = chunk.tokens.shape[1], int(chunk.lengths[0])
            result.floor_ms += result.n_stored_tokens * a_token / limit * 1e3
            result.decode_ms = self._results[way.decode].ahead_ms
        self._results[way.name] = result
        placed = isinstance(executor, RanksExecutor) and executor.pool.placement is not None
        if way.share > 1 or placed:  # or whose KV is what other steps have left there
            result.max_difference = None
            return
        first = bench.first[self._case]
        first += logits[len(first) :]
        result.max_difference = max(map(_difference, logits, first))

    def _chosen(self, executor: RanksExecutor) -> tuple[WantedShare, ...]:
        """What the executor's balance comes to, which it is told steps' times of as a server's is."""
        balance, group = executor.balance, executor.group
        assert balance is not None

        def run(share: float) -> int:
            self._store(executor, share)
            executor.n_batches = group.cluster.n_batches_on(executor.device.platform)
            for _ in range(_TIMES):
                kernels_bench.timed(partial(executor.decode, self._batch), _STEPS)
                group.watch.settle()
            return executor.latest_n_batches

        found = choices(balance, self._case.batch, self._case.batch * self._case.context, run)
        self._bench.on_progress(f"{self._case}: auto by {balance.speeds}: {found}")
        return found

    def _fail(self, way: str, error: Exception) -> None:
        self._bench.on_failure(f"{self._case}, {way}: {_reason(error)}")
        self._steps.pop(way)
        failed = self._results.pop(way, None)
        for result in self._results.values():
            if failed is not None and result.decode_ms is failed.ahead_ms:
                result.decode_ms = []  # it has no decode step to be compared with


def pools_floor(weights: float, kv: float, kept: float, n_model: int, n_memory: int) -> float:
    """Bytes that a device of the busier pool reads at least: ``weights`` and KV on ``n_model`` model ranks,
    which keep a share of ``kept``, or of the other KV on ``n_memory`` attention workers."""
    return max((weights + kept * kv) / n_model, (1 - kept) * kv / n_memory)


def over_ranks(
    kind: type[E],
    model: CausalLM,
    params: Mapping[str, jax.Array],
    group: Group,
    n_slots: int,
    largest: LargestStep,
    cluster: Cluster | None = None,
) -> E:
    """An executor over ranks, with KV slots for so many tokens. ``cluster``: as of `RanksExecutor`."""
    return kind(
        model.fn, params, group=group, kv_slots=n_slots, most_slots=n_slots, least_slots=2,
        largest=largest, kv_dtype=group.cluster.kv_dtype, source=model, cluster=cluster,
    )  # fmt: skip


def largest_of(cases: Sequence[StepCase], prefill: int = 0) -> LargestStep:
    # A prefill worker keeps all of the prompt that it computes.
    longest = max(max(case.context, _before(case) + prefill) for case in cases)
    return LargestStep(max(case.batch for case in cases), longest, max(2, prefill))


def _set(executor: Any, way: Way) -> None:
    """For the steps that come."""
    for name, value in way.options.items():
        setattr(executor, name, value)


def _run(
    executor: Any, way: Way, batch: DecodeBatch, chunk: PrefillBatch | None
) -> tuple[jax.Array | None, ...]:
    """Logits of the batch, and of the chunk if there is one."""
    _set(executor, way)
    if way.chunk is None or chunk is None:
        return (executor.decode(batch),)
    if way.chunk == "alongside":
        logits = executor.run(Step(batch, (PromptPart(chunk),)))
        return logits.decodes, *logits.prompts
    return executor.decode(batch), executor.prefill(chunk)


def _difference(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def alone(step: Callable[[], Any], n: int) -> float:
    """Median seconds of n steps, each waited for."""
    return statistics.median(seconds_of(lambda: jax.block_until_ready(step())) for _ in range(n))


def shuffled_batch(case: StepCase, n_slots: int, vocab_size: int) -> DecodeBatch:
    """Requests of equal length, every token's slot at random over the pool; one bucket that fits exactly."""
    rng = np.random.default_rng(0)
    slots = rng.permutation(n_slots)[: case.batch * (case.context + 1)].reshape(case.batch, -1)
    buckets = Buckets(batch=(case.batch,), prompt=(2,), context=(case.context,))
    return DecodeBatch.build(rng.integers(0, vocab_size, case.batch), list(slots), buckets, n_slots)


def shuffled_chunk(case: StepCase, n_tokens: int, n_slots: int, vocab_size: int) -> PrefillBatch:
    """So many tokens of another request, of whose prompt half a case's context is stored; its slots are those
    that `shuffled_batch` leaves, and the bucket one that fits exactly."""
    rng, before = np.random.default_rng(0), _before(case)
    slots = rng.permutation(n_slots)[case.batch * (case.context + 1) :][: before + n_tokens]
    buckets = Buckets(batch=(1,), prompt=(n_tokens,), context=(max(1, before),))
    tokens = rng.integers(0, vocab_size, n_tokens)
    return PrefillBatch.build([tokens], [slots[before:]], buckets, n_slots, [slots[:before]])


def _before(case: StepCase) -> int:
    return case.context // 2
