"""A decode step of a model shape with random weights: unsplit on one device, and split over this job's ranks, in one run.

Ways of running take turns on the same batches. Two times each: many steps launched ahead and waited for once, which is
what the devices need, and steps waited for one by one, which a lone request feels. Knows executors and clocks; nothing of
tables, nor of how ranks were started.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.bench import kernels_bench
from jaxlamina.buckets import Buckets
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, abstract_params, apply
from jaxlamina.ranks import Group, RanksExecutor
from jaxlamina.workers import DecodeBatch, LocalExecutor, UnsplitExecutor
from jaxlamina.workers.workspace import LargestStep

_ROUND_S = 0.4


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


def staggered_of(text: str) -> list[int]:
    """Numbers of staggered batches from "2,4", as ``--staggered`` has it; ``UserError`` for other text."""
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = [0]
    if any(n < 2 for n in numbers):
        raise UserError(f"--staggered {text!r} must be numbers of at least 2, such as 2,4")
    return numbers


def check_cut(cases: Sequence[StepCase], staggered: Sequence[int]) -> None:
    """``UserError`` for a number of staggered batches that a case cannot be cut into."""
    for n in staggered:
        for case in cases:
            if case.batch % n:
                raise UserError(
                    f"{case.batch} requests cannot be cut into {n} staggered batches of equal size"
                )


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
    max_difference: float = 0.0  # of logits from the first way's, relative to the largest

    def to_dict(self) -> dict[str, Any]:
        medians = {"ms": statistics.median(self.ahead_ms), "blocked_ms": statistics.median(self.alone_ms)}
        return asdict(self) | medians


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
    device: jax.Device,
    on_progress: Callable[[str], object] = lambda _: None,
) -> tuple[list[StepResult], float]:
    """(results, bytes/s at which the device reads one long array). Without a group nothing is over ranks.
    ``local``: also the slices called one by one from Python in this process. ``staggered``: also split into so many
    staggered batches. ``UserError`` for one that no case can be cut into."""
    check_cut(cases, staggered)
    on_progress("read bandwidth")
    limit = kernels_bench.read_bandwidth(3)
    on_progress("weights")
    params = random_weights(config, dtype)
    n_slots = max(case.batch * (case.context + 1) for case in cases)
    most = max(case.batch for case in cases), max(case.context for case in cases)
    fn = partial(apply, config)
    executors: dict[str, Any] = {}
    if unsplit:
        executors["unsplit"] = UnsplitExecutor(fn, params, n_slots=n_slots, device=device)
    if local:
        executors["slice by slice"] = LocalExecutor(
            fn, params, n_slots=n_slots, model_device=device, attention_device=device
        )
    if group is not None:
        executors["split"] = RanksExecutor(
            fn, params, group=group, kv_slots=n_slots, most_slots=n_slots, least_slots=2,
            largest=LargestStep(*most, 2), kv_dtype=group.cluster.kv_dtype, config=config,
        )  # fmt: skip
    found = []
    for case in cases:
        found += _case(config, case, executors, staggered, params, limit, n_slots, n_rounds, on_progress)
    return found, limit


def _case(
    config: ModelConfig,
    case: StepCase,
    executors: dict[str, Any],
    staggered: Sequence[int],
    params: Any,
    limit: float,
    n_slots: int,
    n_rounds: int,
    on_progress: Callable[[str], object],
) -> list[StepResult]:
    batch = shuffled_batch(case, n_slots, config.vocab_size)
    floor = (weight_bytes(params) + kv_bytes(config, case, params)) / limit * 1e3
    ways: dict[str, Callable[[], jax.Array]] = {}
    results: dict[str, StepResult] = {}
    first: np.ndarray | None = None
    for name, executor in executors.items():
        if isinstance(executor, RanksExecutor):
            executor.pool.assume_stored(batch)
        for way, options in _ways(name, staggered).items():
            on_progress(f"{case}: compiling {way}")
            ways[way] = partial(_decode, executor, batch, options)
            began = time.perf_counter()
            logits = np.asarray(ways[way]().block_until_ready(), np.float32)
            results[way] = StepResult(str(case), way, floor_ms=floor, prepare_s=time.perf_counter() - began)
            n = options.get("n_batches", 1)
            if n > 1:
                of_pools = (
                    n * weight_bytes(params),
                    kv_bytes(config, case, params) / len(executor.group.workers),
                )
                results[way].pools_floor_ms = max(of_pools) / limit * 1e3
            first = logits if first is None else first
            results[way].max_difference = float(np.abs(logits - first).max() / np.abs(first).max())
    turns = {way: max(3, int(_ROUND_S / timed(step, 3))) for way, step in ways.items()}
    for i in range(n_rounds):
        on_progress(f"{case}: round {i + 1} of {n_rounds}")
        for way, step in ways.items():
            results[way].ahead_ms.append(timed(step, turns[way]) * 1e3)
            results[way].alone_ms.append(alone(step, max(3, turns[way] // 2)) * 1e3)
    return list(results.values())


def _ways(name: str, staggered: Sequence[int]) -> dict[str, dict[str, Any]]:
    """How an executor is asked to run a step: its attributes by the way's name."""
    if name != "split":
        return {name: {}}
    whole = {
        "split, q first": {"q_first": True, "n_batches": 1},
        "split, q with k, v": {"q_first": False, "n_batches": 1},
    }
    return whole | {f"split, {n} staggered": {"n_batches": n} for n in staggered}


def _decode(executor: Any, batch: DecodeBatch, options: dict[str, Any]) -> jax.Array:
    for name, value in options.items():
        setattr(executor, name, value)
    logits: jax.Array = executor.decode(batch)
    return logits


def timed(step: Callable[[], jax.Array], n: int) -> float:
    """Seconds a step, over n steps launched one after another and waited for once."""
    began = time.perf_counter()
    out = None
    for _ in range(n):
        out = step()
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / n


def alone(step: Callable[[], jax.Array], n: int) -> float:
    """Median seconds of n steps, each waited for."""
    times = []
    for _ in range(n):
        began = time.perf_counter()
        step().block_until_ready()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def shuffled_batch(case: StepCase, n_slots: int, vocab_size: int) -> DecodeBatch:
    """Requests of equal length, every token's slot at random over the pool; one bucket that fits exactly."""
    rng = np.random.default_rng(0)
    slots = rng.permutation(n_slots)[: case.batch * (case.context + 1)].reshape(case.batch, -1)
    buckets = Buckets(batch=(case.batch,), prompt=(2,), context=(case.context,))
    return DecodeBatch.build(rng.integers(0, vocab_size, case.batch), list(slots), buckets, n_slots)


def random_weights(config: ModelConfig, dtype: Any) -> dict[str, jax.Array]:
    """Drawn on the device, tensor by tensor, small enough that activations stay near unit size."""

    @partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) < 2:
            return jnp.ones(shape, dtype)
        return (jax.random.normal(key, shape, dtype) * shape[-1] ** -0.5).astype(dtype)

    keys = (jax.random.fold_in(jax.random.key(0), i) for i in range(10**6))
    return {name: draw(next(keys), s.shape) for name, s in abstract_params(config, dtype).items()}


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
