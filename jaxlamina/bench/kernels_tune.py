"""The best tuning of the Hopper kernel for a case, by trying those that fit. Knows the kernel and a clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax

from jaxlamina.bench import kernels_bench
from jaxlamina.errors import UserError
from pallas_kernels import mosaic_gpu
from pallas_kernels.gpu import tunings
from pallas_kernels.gpu.spec import Tuning

_ROUNDS = 5


def tune(
    case: kernels_bench.KernelCase, dtype: Any, seed: int, on_progress: Callable[[str], object]
) -> dict[tunings.Key, tuple[int, int]]:
    """(warps, stages) for the case's bf16 and int8 pools. ``UserError`` without a GPU of compute capability
    9."""
    if jax.default_backend() != "gpu":
        raise UserError("--tune needs an NVIDIA GPU of compute capability 9.0 or later")
    inputs = kernels_bench.make_inputs(case, dtype, seed)
    found = {}
    for these in (inputs, kernels_bench.quantised(inputs)):
        q = these.q[:, None]
        spec = mosaic_gpu.spec_for(q, these.k, these.table, None, these.scale, None, None)
        calls = {}
        for tuning in tunings.candidates(spec):
            on_progress(f"{case.name}, {spec.kind}: {tuning.n_warps} warps, {tuning.n_stages} stages")
            calls[tuning] = _call(these, q, tuning)
        n = {t: kernels_bench.repeats(call) for t, call in calls.items()}
        times: dict[Tuning, list[float]] = {t: [] for t in calls}
        for _ in range(_ROUNDS):
            for t, call in calls.items():
                times[t].append(kernels_bench.timed(call, n[t]))
        best = min(times, key=lambda t: statistics.median(times[t]))
        key = tunings.Key.of(spec, jax.devices()[0].device_kind)
        found[key] = best.n_warps, best.n_stages
    return found


def _call(inputs: kernels_bench.KernelCaseInputs, q: jax.Array, tuning: Tuning) -> Callable[[], Any]:
    args = (q, inputs.k, inputs.v, inputs.table, inputs.lengths)

    @jax.jit
    def run(q: jax.Array, k: Any, v: Any, table: jax.Array, lengths: jax.Array) -> Any:
        return mosaic_gpu.partial_attention(q, k, v, table, lengths, None, scale=inputs.scale, tuning=tuning)

    compiled = run.lower(*args).compile()
    return lambda: compiled(*args)
