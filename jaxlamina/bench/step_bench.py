"""A decode step of a model shape with random weights: unsplit on one device, and split over this job's ranks, in one run.

Ways of running take turns on the same batches. Two times each: many steps launched ahead and waited for once, which is
what the devices need, and steps waited for one by one, which a lone request feels. If asked for, also with a chunk of a
prompt: in the decode step, as a step after it, or on a prefill worker meanwhile where the job has one. Knows executors and
clocks; nothing of tables, nor of how ranks were started.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxlamina.bench import kernels_bench
from jaxlamina.bench.sharded import ShardedExecutor
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, apply
from jaxlamina.ranks import Group
from jaxlamina.run.local import LocalExecutor
from jaxlamina.run.ranks import RanksExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.steps.buckets import Buckets
from jaxlamina.steps.step import PromptPart, Step
from jaxlamina.weights.dummy import random_weights
from jaxlamina.workers import DecodeBatch, PrefillBatch
from jaxlamina.workers.workspace import LargestStep

_ROUND_S = 0.4
# What a device cannot do, such as for want of memory, and arrays that are gone since. An executor's own errors end the bench.
_FAILURES = (RuntimeError,)


@dataclass(frozen=True)
class StepCase:
    """B requests of ``context`` stored tokens each."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> StepCase:
        """From "64x4096"; ``ValueError`` for other text."""
        batch, context = (int(x) for x in text.lower().split("x"))
        if batch < 1 or context < 1:
            raise ValueError(text)
        return cls(batch, context)

    def __str__(self) -> str:
        return f"B {self.batch}, {self.context} tokens"


def cases_of(text: str) -> list[StepCase]:
    """From "16x2048,64x4096", as ``--case`` has it; ``UserError`` for other text."""
    try:
        return [StepCase.parse(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--case {text!r} must be like 16x2048,64x4096: requests x stored tokens") from None


def numbers_of(text: str, option: str = "--staggered") -> list[int]:
    """Numbers of at least 2 from "2,4", as ``--staggered`` has them; ``UserError``, naming the option, for other text."""
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = [0]
    if any(n < 2 for n in numbers):
        raise UserError(f"{option} {text!r} must be numbers of at least 2, such as 2,4")
    return numbers


def check_cut(cases: Sequence[StepCase], staggered: Sequence[int]) -> None:
    """``UserError`` for a number of staggered batches that a case cannot be cut into."""
    for n in staggered:
        for case in cases:
            if case.batch % n:
                raise UserError(f"{case.batch} requests cannot be cut into {n} batches of equal size")


@dataclass(frozen=True)
class Way:
    """How an executor is asked to run a step: with which of its attributes, and whether a chunk of a prompt is computed
    alongside, or in a step after it."""

    name: str
    options: dict[str, Any]
    chunk: str | None = None  # "alongside" or "after"
    decode: str | None = None  # the way of the decode step by itself, where there is a chunk
    share: int = 1  # of the case's requests this way takes one part of so many, on a device of its own


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
    # Of staggered batches: the busier pool's, weights once a batch or each worker's KV once
    pools_floor_ms: float | None = None
    prepare_s: float = 0.0  # tracing and compiling
    # Of logits from the first way's, relative to the largest; None where they are of other requests
    max_difference: float | None = 0.0
    n_prompt_tokens: int = 0  # of another request's prompt, computed alongside or after
    n_stored_tokens: int = 0  # of that prompt, before them
    decode_ms: list[float] = field(default_factory=list)  # then ahead_ms of the decode step by itself

    @property
    def ms(self) -> float:
        return statistics.median(self.ahead_ms)

    @property
    def ratio_to_decode(self) -> float | None:
        """Of a step with prompt tokens to the decode step by itself, in the same rounds."""
        if not self.decode_ms:
            return None
        return statistics.median(a / b for a, b in zip(self.ahead_ms, self.decode_ms, strict=True))

    @property
    def prompt_tokens_per_s(self) -> float | None:
        return self.n_prompt_tokens / self.ms * 1e3 if self.n_prompt_tokens else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "ms": self.ms,
            "blocked_ms": statistics.median(self.alone_ms),
            "ratio_to_decode": self.ratio_to_decode,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
        }


def measure(
    config: ModelConfig,
    cases: Sequence[StepCase],
    *,
    group: Group | None,
    dtype: Any,
    n_rounds: int,
    unsplit: bool,
    local: bool,
    staggered: Sequence[int] = (),
    mini_batches: Sequence[int] = (),
    prefill: int = 0,
    n_devices: int = 1,
    device: jax.Device,
    on_progress: Callable[[str], object] = lambda _: None,
    on_failure: Callable[[str], object] = lambda _: None,
) -> tuple[list[StepResult], float]:
    """(results, bytes/s at which the device reads one long array). Without a group nothing is over ranks.
    ``local``: also the slices called one by one from Python in this process. ``staggered``: also split into so many
    staggered batches; ``mini_batches``: also with each layer's messages in so many parts. ``prefill``: also with so many tokens of another prompt, of as many tokens as the case's requests
    have, at its middle. ``n_devices``: also unsplit over so many devices of this process, each with its share of the requests,
    and each with its share of every weight; then executors come one after another, each with all of the memory, and ways do
    not take turns. ``on_failure``: told of each way that a device could not run, which is left out. ``UserError`` for a number
    that no case can be cut into."""
    check_cut(cases, [*staggered, *mini_batches, n_devices])
    on_progress("read bandwidth")
    limit = kernels_bench.read_bandwidth(3)
    on_progress("weights")
    params = random_weights(config, dtype)
    n_slots = max(case.batch * (case.context + 1) + _before(case) + prefill for case in cases)
    most = max(case.batch for case in cases), max(case.context for case in cases)
    fn = partial(apply, config)
    makers: dict[str, Callable[[], Any]] = {}
    if unsplit:
        makers["unsplit"] = partial(UnsplitExecutor, fn, params, n_slots=n_slots, device=device)
        if n_devices > 1:
            devices = jax.local_devices()[:n_devices]
            by_weights = partial(ShardedExecutor, fn, params, n_slots=n_slots, devices=devices)
            makers[f"unsplit, {n_devices} devices by weights"] = by_weights
    if local:
        makers["slice by slice"] = partial(
            LocalExecutor, fn, params, n_slots=n_slots, model_device=device, attention_device=device
        )
    if group is not None:
        makers["split"] = partial(
            RanksExecutor,
            fn, params, group=group, kv_slots=n_slots, most_slots=n_slots, least_slots=2,
            largest=LargestStep(*most, max(2, prefill)), kv_dtype=group.cluster.kv_dtype, config=config,
        )  # fmt: skip
    at_once = [[name] for name in makers] if n_devices > 1 else [list(makers)]
    found: list[StepResult] = []
    firsts: dict[StepCase, list[np.ndarray]] = {case: [] for case in cases}
    for names in at_once:
        executors: dict[str, Any] = {}
        for name in names:
            try:
                executors[name] = makers[name]()
            except _FAILURES as error:
                on_failure(f"{name}: {_reason(error)}")
        for case in cases:
            batch = shuffled_batch(case, n_slots, config.vocab_size)
            chunk = shuffled_chunk(case, prefill, n_slots, config.vocab_size) if prefill else None
            found += _case(
                config,
                case,
                executors,
                staggered,
                mini_batches,
                batch,
                chunk,
                params,
                limit,
                n_rounds,
                on_progress,
                on_failure,
                firsts[case],
                n_slots,
                n_devices,
            )
        executors.clear()
        gc.collect()  # an executor's programs and the executor name each other
    return found, limit


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]


def _case(
    config: ModelConfig,
    case: StepCase,
    executors: dict[str, Any],
    staggered: Sequence[int],
    mini_batches: Sequence[int],
    batch: DecodeBatch,
    chunk: PrefillBatch | None,
    params: Any,
    limit: float,
    n_rounds: int,
    on_progress: Callable[[str], object],
    on_failure: Callable[[str], object],
    first: list[np.ndarray],
    n_slots: int,
    n_devices: int,
) -> list[StepResult]:
    """``first``: logits of the first way of this case, empty before there are any."""
    part = StepCase(case.batch // n_devices, case.context)
    weights, kv = weight_bytes(params), kv_bytes(config, case, params)
    steps: dict[str, Callable[[], Any]] = {}
    results: dict[str, StepResult] = {}

    def fail(way: str, error: Exception) -> None:
        on_failure(f"{case}, {way}: {_reason(error)}")
        steps.pop(way), results.pop(way, None)

    for name, executor in executors.items():
        if isinstance(executor, RanksExecutor):
            executor.pool.assume_stored(batch)
            if chunk is not None:
                executor.pool.assume_stored(chunk)
        has_workers = isinstance(executor, RanksExecutor) and bool(executor.group.prefill_ranks)
        n_prompt = 0 if chunk is None else chunk.tokens.shape[1]
        for way in _ways(name, staggered, mini_batches, n_prompt, n_devices, has_workers):
            on_progress(f"{case}: compiling {way.name}")
            rows = batch if way.share == 1 else shuffled_batch(part, n_slots, config.vocab_size)
            steps[way.name] = partial(_run, executor, way, rows, chunk)
            began = time.perf_counter()
            try:
                logits = [np.asarray(x, np.float32) for x in steps[way.name]()]
            except _FAILURES as error:
                fail(way.name, error)
                continue
            took, floor = time.perf_counter() - began, (weights + kv / way.share) / limit * 1e3
            result = results[way.name] = StepResult(str(case), way.name, floor_ms=floor, prepare_s=took)
            n = way.options.get("n_batches", 1)
            if n > 1:
                result.pools_floor_ms = max(n * weights, kv / len(executor.group.workers)) / limit * 1e3
            if way.decode in results and chunk is not None:
                result.n_prompt_tokens, result.n_stored_tokens = chunk.tokens.shape[1], int(chunk.lengths[0])
                stored = kv_bytes(config, StepCase(1, result.n_stored_tokens), params)
                result.floor_ms += stored / limit * 1e3
                result.decode_ms = results[way.decode].ahead_ms
            if way.share > 1:
                result.max_difference = None
                continue
            first += logits[len(first) :]
            result.max_difference = max(map(_difference, logits, first))
    turns: dict[str, int] = {}
    for i in range(n_rounds):
        on_progress(f"{case}: round {i + 1} of {n_rounds}")
        for name, step in [*steps.items()]:
            try:
                if name not in turns:
                    turns[name] = max(3, int(_ROUND_S / timed(step, 3)))
                results[name].ahead_ms.append(timed(step, turns[name]) * 1e3)
                results[name].alone_ms.append(alone(step, max(3, turns[name] // 2)) * 1e3)
            except _FAILURES as error:
                fail(name, error)
    return list(results.values())


def _ways(
    name: str,
    staggered: Sequence[int],
    mini_batches: Sequence[int],
    prefill: int,
    n_devices: int,
    has_prefill_workers: bool = False,
) -> list[Way]:
    """How an executor is asked to run a step."""
    whole = [Way(name, {})]
    cut: list[Way] = []  # with a prompt's chunk only on workers of its own
    if name == "unsplit" and n_devices > 1:  # devices do not meet: one shows what all take
        cut.append(Way(f"unsplit, {n_devices} devices by requests", {}, share=n_devices))
    if name == "split":
        whole = [
            Way("split, q first", {"q_first": True, "n_batches": 1, "mini_batches": 1}),
            Way("split, q with k, v", {"q_first": False, "n_batches": 1, "mini_batches": 1}),
        ]
        cut += [Way(f"split, {n} staggered", {"n_batches": n}) for n in staggered]
        cut += [Way(f"split, {n} mini-batches", {"n_batches": 1, "mini_batches": n}) for n in mini_batches]
    chunks: list[Way] = []
    here = {"prefill_workers": 0} if has_prefill_workers else {}
    for way in whole if prefill and name in ("unsplit", "split") else []:  # others have no step for both
        also = {"alongside": f"with {prefill} alongside", "after": f"then {prefill}"}
        chunks += [
            Way(f"{way.name}, {words}", way.options | here, chunk, way.name) for chunk, words in also.items()
        ]
    for way in [*whole, *cut] if prefill and has_prefill_workers else []:
        words = f"{way.name}, {prefill} on a prefill worker"
        chunks.append(Way(words, way.options | {"prefill_workers": 1}, "alongside", way.name))
    return whole + cut + chunks


def _run(
    executor: Any, way: Way, batch: DecodeBatch, chunk: PrefillBatch | None
) -> tuple[jax.Array | None, ...]:
    """Logits of the batch, and of the chunk if there is one."""
    for name, value in way.options.items():
        setattr(executor, name, value)
    if way.chunk is None or chunk is None:
        return (executor.decode(batch),)
    if way.chunk == "alongside":
        logits = executor.run(Step(batch, (PromptPart(chunk),)))
        return logits.decodes, *logits.prompts
    return executor.decode(batch), executor.prefill(chunk)


def _difference(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def timed(step: Callable[[], Any], n: int) -> float:
    """Seconds a step, over n steps launched one after another and waited for once."""
    began = time.perf_counter()
    out = None
    for _ in range(n):
        out = step()
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / n


def alone(step: Callable[[], Any], n: int) -> float:
    """Median seconds of n steps, each waited for."""
    times = []
    for _ in range(n):
        began = time.perf_counter()
        jax.block_until_ready(step())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def shuffled_batch(case: StepCase, n_slots: int, vocab_size: int) -> DecodeBatch:
    """Requests of equal length, every token's slot at random over the pool; one bucket that fits exactly."""
    rng = np.random.default_rng(0)
    slots = rng.permutation(n_slots)[: case.batch * (case.context + 1)].reshape(case.batch, -1)
    buckets = Buckets(batch=(case.batch,), prompt=(2,), context=(case.context,))
    return DecodeBatch.build(rng.integers(0, vocab_size, case.batch), list(slots), buckets, n_slots)


def shuffled_chunk(case: StepCase, n_tokens: int, n_slots: int, vocab_size: int) -> PrefillBatch:
    """So many tokens of another request, of whose prompt half a case's context is stored; its slots are those that
    `shuffled_batch` leaves, and the bucket one that fits exactly."""
    rng, before = np.random.default_rng(0), _before(case)
    slots = rng.permutation(n_slots)[case.batch * (case.context + 1) :][: before + n_tokens]
    buckets = Buckets(batch=(1,), prompt=(n_tokens,), context=(max(1, before),))
    tokens = rng.integers(0, vocab_size, n_tokens)
    return PrefillBatch.build([tokens], [slots[before:]], buckets, n_slots, [slots[:before]])


def _before(case: StepCase) -> int:
    return case.context // 2


def weight_bytes(params: dict[str, jax.Array]) -> int:
    """Bytes of the weights that a decode step reads: of the embedding only some rows."""
    embedding = [x.nbytes for name, x in params.items() if "embed_tokens" in name]
    tied = not any("lm_head" in name for name in params)
    return sum(x.nbytes for x in params.values()) - (0 if tied else sum(embedding))


def kv_bytes(config: ModelConfig, case: StepCase, params: dict[str, jax.Array]) -> int:
    """Bytes of the stored K and V that a step reads."""
    itemsize = next(iter(params.values())).dtype.itemsize
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    return case.batch * case.context * a_token
