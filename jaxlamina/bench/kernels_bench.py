"""Partial attention over shuffled token slots: our backends beside others' kernels, in one run, on the same
arrays.

Every peer's result is first checked against float64 on fresh random inputs; then peers take turns, so that a
slow spell of the machine hits all. Knows kernels and clocks; nothing of models, requests or how results are
shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.bench import kernel_peers, machine
from jaxlamina.bench.rounds import ratios, record_of
from jaxlamina.planner import traces
from pallas_kernels import reference
from pallas_kernels.quantized import QuantizedPool, quantise, values_of

_CHECKED = 2  # KV heads of one request that are compared with float64
ERROR_LIMIT = 4e-3  # of an output, relative, for bfloat16 inputs


@dataclass(frozen=True)
class KernelCase:
    """A decode step's attention: B requests of `lengths` stored tokens, heads as in DESIGN's axis letters."""

    name: str
    lengths: tuple[int, ...]
    N: int
    K: int
    H: int

    def __str__(self) -> str:
        low, high = min(self.lengths), max(self.lengths)
        context = f"{low}" if low == high else f"{low}–{high}, {self.n_tokens} in all"
        return f"{self.name}: B {len(self.lengths)}, N {self.N}, K {self.K}, H {self.H}, tokens {context}"

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)

    def kv_bytes(self, itemsize: float) -> float:
        """What must be read: every stored token's key and value once."""
        return 2 * self.n_tokens * self.K * self.H * itemsize


def conversation_lengths(n: int, seed: int) -> tuple[int, ...]:
    """Tokens of n requests drawn from the Azure conversation trace."""
    trace = traces.load("azure-conversation")
    known = trace.n_prompt + trace.n_output
    return tuple(int(x) for x in np.random.default_rng(seed).choice(known, n))


def cases(small: bool, seed: int) -> dict[str, KernelCase]:
    """The issue's shapes for an accelerator; shapes of the demo model's size for a CPU."""
    if small:
        return {
            "demo": KernelCase("demo", (288,) * 8, 9, 3, 64),
            "long": KernelCase("long", (4096,) * 16, 9, 3, 64),  # more than a processor's caches hold
            "ragged": KernelCase(
                "ragged", tuple(min(x, 512) for x in conversation_lengths(16, seed)), 9, 3, 64
            ),
        }
    return {
        "mha": KernelCase("mha", (4096,) * 64, 32, 32, 128),
        "gqa": KernelCase("gqa", (8192,) * 128, 64, 8, 128),
        "long": KernelCase("long", (131072,) * 16, 32, 8, 128),
        "ragged": KernelCase("ragged", conversation_lengths(512, seed), 32, 8, 128),
    }


@dataclass
class KernelCaseInputs:
    """A case's arrays. Slots of all requests are shuffled over the pool; `slots` are they, end to end."""

    case: KernelCase
    q: jax.Array  # [B, N, H]
    k: Any  # [S, K, H], or an int8 pool
    v: Any
    table: jax.Array  # [B, C] int32
    lengths: jax.Array  # [B] int32
    slots: np.ndarray

    @property
    def scale(self) -> float:
        return float(self.case.H**-0.5)


@dataclass
class Result:
    """One peer on one case."""

    case: str
    peer: str
    times_us: list[float]  # a round each
    bytes_read: float
    error: (
        float | None
    )  # worst of the checked heads, relative to float64; None where the check is another peer's
    of_limit: float = 0.0
    ratio: dict[str, float] = field(
        default_factory=dict
    )  # our time over a peer's, medians of the rounds' own

    @property
    def time_us(self) -> float:
        return statistics.median(self.times_us)

    @property
    def bytes_per_s(self) -> float:
        return self.bytes_read / self.time_us * 1e6

    def to_dict(self) -> dict[str, Any]:
        return record_of(self, "time_us", "bytes_per_s")


def measure(
    chosen: Sequence[KernelCase],
    peers: Sequence[str],
    *,
    n_rounds: int,
    seed: int,
    dtype: Any,
    on_progress: Callable[[str], object] = lambda _: None,
) -> tuple[list[Result], dict[str, str], float]:
    """(results, why peers were left out of a case, read bandwidth in bytes/s of the device in this run, its
    median). It is read again in every round, since other users of a host's memory come and go."""
    results: list[Result] = []
    left_out: dict[str, str] = {}
    on_progress("read bandwidth")
    read, limits = read_bandwidth(), list[float]()
    for case in chosen:
        on_progress(f"{case.name}: inputs")
        inputs = make_inputs(case, dtype, seed)
        running: dict[str, tuple[Callable[[], Any], float | None, float]] = {}
        for peer in peers:
            on_progress(f"{case.name}: {peer}")
            try:
                prepared = kernel_peers.PEERS[peer](inputs)
                call, wanted, bytes_read = prepared.call, prepared.inputs, prepared.bytes_read
                error = check(wanted, prepared.output(call())) if prepared.checked else None
                running[peer] = call, error, bytes_read
            except kernel_peers.LeftOut as why:
                left_out[f"{case.name}/{peer}"] = str(why)
        results += _take_turns(case, running, n_rounds, read, limits, on_progress)
        del running, inputs
    return results, left_out, statistics.median(limits)


def _take_turns(
    case: KernelCase,
    running: dict[str, tuple[Callable[[], Any], float | None, float]],
    n_rounds: int,
    read: Callable[[], float],
    limits: list[float],
    on_progress: Callable[[str], object],
) -> list[Result]:
    found = {peer: Result(case.name, peer, [], n, error) for peer, (_, error, n) in running.items()}
    calls = {peer: repeats(call) for peer, (call, _, _) in running.items()}
    for i in range(n_rounds):
        on_progress(f"{case.name}: round {i + 1} of {n_rounds}")
        for peer, (call, _, _) in running.items():
            found[peer].times_us.append(timed(call, calls[peer]) * 1e6)
        limits.append(read())
    for result in found.values():
        rates = (result.bytes_read / us * 1e6 for us in result.times_us)
        result.of_limit = statistics.median(ratios(list(rates), limits[-n_rounds:]))
        for other in found.values():
            if other is not result:
                result.ratio[other.peer] = statistics.median(ratios(result.times_us, other.times_us))
    return list(found.values())


def repeats(call: Callable[[], Any], warm_s: float = 0.5, round_s: float = 0.15) -> int:
    """How many calls make a round; before it, half a second of work, so that clocks are up."""
    began = time.perf_counter()
    kernel_peers.wait(call())
    while time.perf_counter() - began < warm_s:
        kernel_peers.wait(call())
    return max(3, int(round_s / max(timed(call, 1), 1e-6)))


def timed(call: Callable[[], Any], n: int) -> float:
    """Seconds a call, over n calls with one wait at the end."""
    began = time.perf_counter()
    out = None
    for _ in range(n):
        out = call()
    kernel_peers.wait(out)
    return (time.perf_counter() - began) / n


def read_bandwidth() -> Callable[[], float]:
    """Measures, each time it is called, the bytes per second at which the device reads one long array."""
    if jax.default_backend() == "cpu":  # a reduction by XLA stays on one core
        memory = machine.ReadBandwidth(2**28)
        return lambda: memory.now(3)
    n = 2**30
    array = jax.block_until_ready(jax.random.bits(jax.random.key(0), (n,), jnp.uint32))
    top = jax.jit(jnp.max)
    n_calls = repeats(lambda: top(array))
    return lambda: 4 * n / timed(lambda: top(array), n_calls)


def make_inputs(case: KernelCase, dtype: Any, seed: int) -> KernelCaseInputs:
    """Random q, k, v, and every request's slots at random over the pool."""
    rng = np.random.default_rng(seed)
    n_slots = -(-case.n_tokens // 64) * 64
    slots = rng.permutation(n_slots)[: case.n_tokens].astype(np.int32)
    table = np.zeros((len(case.lengths), max(case.lengths)), np.int32)
    at = 0
    for b, n in enumerate(case.lengths):
        table[b, :n] = slots[at : at + n]
        at += n
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (len(case.lengths), case.N, case.H), dtype)
    k, v = (_normal(key, (n_slots, case.K, case.H), dtype) for key in keys[1:])
    return KernelCaseInputs(case, q, k, v, jnp.asarray(table), jnp.asarray(case.lengths, jnp.int32), slots)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """In 64 pieces: random bits of a whole pool would need several times its memory."""
    piece = (shape[0] // 64, *shape[1:])
    return jax.lax.map(lambda k: jax.random.normal(k, piece, dtype), jax.random.split(key, 64)).reshape(shape)


def quantised(inputs: KernelCaseInputs) -> KernelCaseInputs:
    """The same with int8 pools, a scale a slot and KV head."""

    def pool(x: jax.Array) -> QuantizedPool:
        pieces = jax.lax.map(quantise, x.reshape(64, -1, *x.shape[1:]))
        values, scales = pieces
        return QuantizedPool(values.reshape(x.shape), scales.reshape(x.shape[:2]))

    k, v = (jax.jit(pool)(x) for x in (inputs.k, inputs.v))
    return KernelCaseInputs(inputs.case, inputs.q, k, v, inputs.table, inputs.lengths, inputs.slots)


def check(inputs: KernelCaseInputs, out: np.ndarray) -> float:
    """Worst relative error of out `[B, N, H]` over some heads of one request, against float64 numpy."""
    case, rng = inputs.case, np.random.default_rng()
    b = int(rng.integers(len(case.lengths)))
    heads = rng.choice(case.K, min(_CHECKED, case.K), replace=False)
    slots = inputs.table[b, : case.lengths[b]]
    keys, values = (np.asarray(_rows(pool, slots)) for pool in (inputs.k, inputs.v))
    g, worst = case.N // case.K, 0.0
    q = np.asarray(inputs.q[b].astype(jnp.float32), np.float64)
    for head in heads:
        mine = slice(head * g, (head + 1) * g)
        one = [x[:, head : head + 1].astype(np.float64) for x in (keys, values)]
        wanted, _ = reference.attend_one(q[mine], *one, scale=inputs.scale, softcap=None)
        got = np.asarray(out[b, mine], np.float64)
        errors = np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
        worst = max(worst, float(errors.max()))
    return worst


def _rows(pool: Any, slots: jax.Array) -> jax.Array:
    rows = values_of(pool)[slots].astype(jnp.float32)
    return (
        rows * pool.scales[slots].astype(jnp.float32)[..., None] if isinstance(pool, QuantizedPool) else rows
    )
