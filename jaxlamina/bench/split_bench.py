"""What splitting costs before anything runs: tracing, cutting, and compiling the distinct slices of a model
shape.

Weights are abstract: shapes and dtypes, nothing allocated, so a 70B shape fits anywhere. Compiling needs no
weights either. Knows nothing of tables; `cli` shows what comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxlamina.bench.rounds import record_of, seconds_of
from jaxlamina.models import ModelConfig, abstract_params, apply
from pallas_kernels import compat
from splitter import SplitModel, split, trace

SPLIT_LIMIT_S = 2.0  # after tracing, at 80 layers
PROGRAMS_LIMIT = 3


@dataclass(frozen=True)
class SplitTimes:
    """One layer count. Times in seconds, of one decode step's slices at the bench's batch size.

    build_s: the abstract model. trace_s: to one flat jaxpr. split_s: minimum cuts and slices. programs: of
    each distinct slice its name, how many slices share it, and the seconds to lower and compile it.
    every_slice_s: the same for every slice on its own, None where that was not asked for.
    """

    n_layers: int
    n_params: int
    n_eqns: int
    build_s: float
    trace_s: float
    split_s: float
    n_slices: int
    n_programs: int
    programs: tuple[tuple[str, int, float], ...]
    context_bytes: tuple[int, int]
    exchanged_bytes_per_token: float
    every_slice_s: float | None = None

    @property
    def compile_s(self) -> float:
        """Seconds to lower and compile all distinct slices."""
        return sum(seconds for _, _, seconds in self.programs)

    def to_dict(self) -> dict[str, Any]:
        return record_of(self, "compile_s")


def measure(
    config: ModelConfig,
    layer_counts: Sequence[int],
    *,
    batch_size: int = 8,
    dtype: Any = jnp.bfloat16,
    every_slice: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[SplitTimes]:
    """Times for `config` at each layer count, in the order given, for a decode step of `batch_size` requests.

    A two-layer model goes through everything first, so that what Python and JAX load at first use is in no
    figure. The persistent compilation cache is off meanwhile.
    """
    with _no_compilation_cache():
        on_progress("warming up on 2 layers")
        _measure(config.with_layers(2), batch_size, dtype, False, lambda _: None)
        return [
            _measure(config.with_layers(n), batch_size, dtype, every_slice, on_progress) for n in layer_counts
        ]


def _measure(
    config: ModelConfig, batch_size: int, dtype: Any, every_slice: bool, on_progress: Callable[[str], None]
) -> SplitTimes:
    n = config.num_hidden_layers
    on_progress(f"{n} layers: tracing")
    start = time.perf_counter()
    params = abstract_params(config, dtype)
    step = jax.ShapeDtypeStruct(
        (batch_size, 1), jnp.int32
    )  # tokens and positions of one decode step, [B, T=1]
    built = time.perf_counter()
    traced = trace(partial(apply, config), params, step, step)
    traced_at = time.perf_counter()
    on_progress(f"{n} layers: splitting")
    model = split(traced)
    split_at = time.perf_counter()
    programs = []
    for name, first, shared_by in distinct(model):
        on_progress(f"{n} layers: compiling {name}")
        programs.append((name, shared_by, compile_slice(model, first, params)))
    every = None
    if every_slice:
        on_progress(f"{n} layers: compiling every slice on its own")
        every = sum(compile_slice(model, i, params) for i in range(model.n + 1))
    report = model.report()
    contexts = [cut.context_bytes for cut in report.cuts]
    return SplitTimes(
        n_layers=n,
        n_params=sum(x.size for x in params.values()),
        n_eqns=len(traced.jaxpr.eqns),
        build_s=built - start,
        trace_s=traced_at - built,
        split_s=split_at - traced_at,
        n_slices=report.n_slices,
        n_programs=report.n_programs,
        programs=tuple(programs),
        context_bytes=(min(contexts), max(contexts)),
        exchanged_bytes_per_token=report.exchanged_bytes_per_token,
        every_slice_s=every,
    )


def distinct(model: SplitModel) -> Iterator[tuple[str, int, int]]:
    """(name, index of the first slice, number of slices) of every distinct program."""
    users: dict[int, list[int]] = {}
    for s in model.slices:
        users.setdefault(id(s.program), []).append(s.index)
    for indices in users.values():
        name = f"slice {indices[0]}" if len(indices) == 1 else f"slices {indices[0]}–{indices[-1]}"
        yield name, indices[0], len(indices)


def compile_slice(model: SplitModel, i: int, params: dict[str, jax.ShapeDtypeStruct]) -> float:
    """Seconds to trace, lower and compile slice i, both parts in one program, from shapes alone."""
    piece = model.slices[i]
    context = tuple(compat.like_of(v) for v in piece.context_vars)
    attention_out = model.sites[i - 1].out if i else None

    # A new function object each time: nothing compiled before can answer.
    def run(slice_params: Any, context: Any, attention_out: Any) -> Any:
        if i == model.n:
            return piece.final(slice_params, context, attention_out)
        q, rest = piece.q_part(slice_params, context, attention_out)
        return q, piece.kv_part(slice_params, rest, None)

    arguments = (model.slice_params(i, params), context, attention_out)
    return seconds_of(lambda: jax.jit(run).lower(*arguments).compile())


@contextmanager
def _no_compilation_cache() -> Iterator[None]:
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
