"""Compiling before anybody waits: every program that requests of a model may meet, run once on rows that are nobody's.

Knows buckets and an executor; nothing of requests or servers. Sizes as data (`shapes`), so that a bar can show how many
are left. Where an executor can, other threads compile several programs at once, before any is run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any, Literal

import jax
import numpy as np

from jaxlamina.ahead import Ahead, n_compiling
from jaxlamina.buckets import Buckets, bucket
from jaxlamina.engine import Engine
from jaxlamina.scheduler import SCORED_CHUNK
from jaxlamina.workers.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.kv_pools import move_sizes


@dataclass(frozen=True)
class Shape:
    """One program's sizes. ``n_tokens``: of a prompt or chunk, 1 for decode; ``context``: earlier tokens, padded;
    ``alongside``: the prompt or chunk that a decode step has with it; ``workers``: prefill workers, by their index, of which
    each has such a prompt or chunk at once; ``of_all``: logits of all tokens, for a prompt that is scored."""

    kind: Literal["decode", "prefill", "chunk"]
    batch: int
    n_tokens: int
    context: int
    alongside: Shape | None = None
    workers: tuple[int, ...] = ()
    of_all: bool = False

    def __str__(self) -> str:
        if self.kind == "decode":
            text = f"decode, batch {self.batch}, context {self.context}"
            return text if self.alongside is None else f"{text}; {self.alongside}"
        text = f"{self.kind}, {self.n_tokens} tokens, context {self.context}{', logits of all' * self.of_all}"
        return f"{text}, prefill workers {', '.join(map(str, self.workers))}" if self.workers else text


def shapes(
    buckets: Buckets,
    *,
    max_model_len: int,
    max_chunk: int | None,
    chunks: bool = True,
    mixed: bool = False,
    n_prefill_workers: int = 0,
    scored: bool = False,
) -> list[Shape]:
    """Every shape that a request of ``max_model_len`` tokens can meet, decode steps first.

    ``max_chunk``: prompt tokens computed in one step, None: all. ``chunks``: whether a prompt may follow stored tokens.
    ``mixed``: whether a decode step may have a prompt or chunk alongside. ``n_prefill_workers``: then any of them may have
    one at once, with a decode step or without. ``scored``: also those of prompts whose log-probabilities are wanted, if no
    prefill worker computes them.
    """
    decodes = [Shape("decode", batch, 1, context) for batch in buckets.batch for context in buckets.context]
    longest = bucket(min(max_chunk or max_model_len, max_model_len), buckets.prompt)
    prompts = [size for size in buckets.prompt if size <= longest]
    found = [Shape("prefill", 1, size, 0) for size in prompts]
    if chunks:
        for fewest_tokens, size in _with_fewest(prompts):
            for fewest_earlier, context in _with_fewest(buckets.context):
                # Prefill workers' chunks of one step are padded to the largest, of tokens and of earlier ones.
                if fewest_tokens + fewest_earlier <= max_model_len or n_prefill_workers > 1:
                    found.append(Shape("chunk", 1, size, context))
    if n_prefill_workers:
        sets = [s for n in range(n_prefill_workers) for s in combinations(range(n_prefill_workers), n + 1)]
        found = [replace(prompt, workers=workers) for prompt in found for workers in sets]
    mixed = mixed or n_prefill_workers > 0
    both = [replace(decode, alongside=prompt) for decode in decodes for prompt in found if mixed]
    if scored and not n_prefill_workers:
        both += _scored(buckets, max_model_len, max_chunk)
    return decodes + found + both


def _scored(buckets: Buckets, max_model_len: int, max_chunk: int | None) -> list[Shape]:
    """Nothing of such a prompt comes from a cache: each chunk follows whole ones."""
    most = min(SCORED_CHUNK, max_chunk or SCORED_CHUNK)
    found: dict[Shape, None] = {}
    for start in range(0, max_model_len, most):
        longest = bucket(min(most, max_model_len - start), buckets.prompt)
        context = bucket(start, buckets.context) if start else 0
        for size in buckets.prompt:
            if size <= longest:
                found[Shape("chunk" if start else "prefill", 1, size, context, of_all=True)] = None
    return list(found)


def _with_fewest(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each size with the least number that is padded to it."""
    yield 1, sizes[0]
    yield from ((below + 1, size) for below, size in pairwise(sizes))


def warm_up(
    engine: Engine, todo: Sequence[Shape], on_done: Callable[[int], None], stopped: Callable[[], bool]
) -> None:
    """Compiles and runs each of ``todo`` once, and once a batch size all that may be done with logits. No request may be
    there, nor anything in the prefix cache. Where several workers share requests or tokens, a step's programs depend on where
    its tokens lie, too; those of full and evenly shared rows are run.

    ``on_done(n)`` when one more is compiled, for the last when all are run; ``stopped()`` is asked before each, and True ends it
    early.
    """
    n_done = 0

    def done() -> None:
        nonlocal n_done
        n_done += 1
        if n_done < len(todo):
            on_done(n_done)

    # No step is run meanwhile: compiling tries kernels out on the device.
    compiled = _compile_ahead(engine, todo, done, stopped)
    _prepare_drawing(engine, {shape.batch for shape in todo}, stopped)
    sampled: set[int] = set()
    for shape in todo:
        if stopped():
            return
        of_rows = _run(engine, shape)
        for logits in of_rows:
            if shape.of_all:
                engine.drawing.warm_up_scores(logits)
            elif len(logits) not in sampled:
                sampled.add(len(logits))
                engine.drawing.warm_up(logits, engine.admission.max_model_len)
        jax.block_until_ready(of_rows)
        if shape not in compiled:
            done()
    if stopped():
        return
    _move(engine)
    if todo:
        on_done(len(todo))


def _compile_ahead(
    engine: Engine, todo: Sequence[Shape], done: Callable[[], None], stopped: Callable[[], bool]
) -> set[Shape]:
    """Has other threads compile the programs of ``todo``, as many at once as pays, where the executor has ``compile_later``
    (`UnsplitExecutor`, `RanksExecutor`) and knows them before they run; which those were. What one failed with is raised."""
    executor: Any = engine.executor
    if not hasattr(executor, "compile_later"):
        return set()
    ahead: Ahead[Any] = Ahead()
    begun: deque[Shape] = deque()
    compiled: set[Shape] = set()

    def take() -> None:
        shape = begun.popleft()
        ahead.take(shape)
        compiled.add(shape)
        done()

    try:
        for shape in todo:
            if stopped():
                return compiled
            compiles = executor.compile_later(*_batches(engine, shape, _empty_batch), of_all=shape.of_all)
            if compiles is not None:
                ahead.begin(shape, compiles)
                begun.append(shape)
            if len(begun) > n_compiling():
                take()
        while begun and not stopped():
            take()
        return compiled
    finally:
        ahead.forget()


def _prepare_drawing(engine: Engine, n_rows: set[int], stopped: Callable[[], bool]) -> None:
    """Has other threads compile what is done with logits of so many rows: many small programs."""
    executor: Any = engine.executor
    n_words, longest = engine.drawing.vocab_size, engine.admission.max_model_len
    ahead: Ahead[None] = Ahead(n_compiling(cores_each=1))
    try:
        for n in sorted(n_rows):
            logits = jax.device_put(np.zeros((n, n_words), np.float32), executor.device)
            ahead.begin(n, partial(engine.drawing.warm_up, logits, longest))
        for n in sorted(n_rows):
            if stopped():
                return
            ahead.take(n)
    finally:
        ahead.forget()


def _batches(engine: Engine, shape: Shape, made: Callable[[Shape, int, int], Any]) -> list[Any]:
    """Those of a step of such sizes, each ``made(part, n_slots, most)``."""
    most = engine.admission.max_model_len
    parts = [part for part in (shape, shape.alongside) if part is not None]
    return [made(part, engine.executor.n_slots, most) for part in parts]


def _move(engine: Engine) -> None:
    """To the host and back, whatever is there: it is nobody's. Not where workers share requests or tokens: what they move
    depends on where it lies."""
    executor: Any = engine.executor
    host = engine.scheduler.host
    if host is None or getattr(executor, "places_tokens", False):
        return
    most = min(engine.admission.max_model_len, executor.n_slots, host.capacity)
    for n in move_sizes(most):
        slots = np.arange(min(n, most))
        executor.move_out(slots, slots)
        executor.move_in(slots, slots)


def _run(engine: Engine, shape: Shape) -> tuple[jax.Array, ...]:
    executor: Any = engine.executor
    places = getattr(executor, "places_tokens", False)
    parts = _batches(engine, shape, _stored_batch if places else _empty_batch)
    if places:
        for batch in parts:
            n_distinct = len(np.unique(batch.slot_table[:, 0])) if batch.slot_table.size else 0
            executor.assume_stored(type(batch)(*(x[:n_distinct] for x in batch)))
    workers = (shape if shape.alongside is None else shape.alongside).workers
    found: tuple[jax.Array, ...]
    if workers:
        rows = parts[0] if len(parts) == 2 else None
        of_rows, of_prompts = executor.decode_with_prompts(rows, dict.fromkeys(workers, parts[-1]))
        found = (*(() if rows is None else (of_rows,)), *of_prompts)
    elif len(parts) == 2:
        found = tuple(executor.decode_with_chunk(*parts))
    else:
        run = executor.prefill_all if shape.of_all else executor.prefill
        found = (executor.decode(*parts) if shape.kind == "decode" else run(*parts),)
    if places:
        executor.release(np.arange(executor.n_slots))
    return found


def _empty_batch(shape: Shape, n_slots: int, _most: int) -> DecodeBatch | PrefillBatch:
    """Rows of padding alone."""
    b, t = shape.batch, shape.n_tokens
    tokens, table, lengths = _zeros(b, t), _zeros(b, shape.context), _zeros(b)
    if shape.kind == "decode":
        return DecodeBatch(tokens, _zeros(b, 1), table, lengths, _zeros(b) + n_slots)
    return PrefillBatch(tokens, _zeros(b, t), _zeros(b), _zeros(b, t) + n_slots, table, lengths)


def _stored_batch(shape: Shape, n_slots: int, most: int) -> DecodeBatch | PrefillBatch:
    """Rows of as many tokens as go in, of at most ``most`` each; those that find no slots of their own are copies of
    earlier ones, and store nothing."""
    batch = _empty_batch(shape, n_slots, most)
    n_stored = min(shape.context, most - 1, n_slots - 1)
    n_new = min(shape.n_tokens, n_slots - n_stored)
    n_each = n_stored + n_new
    n_own = min(shape.batch, n_slots // n_each)
    first = np.arange(shape.batch, dtype=np.int32) % n_own * n_each
    batch.slot_table[:, :n_stored] = first[:, None] + np.arange(n_stored)
    batch.lengths[:] = n_stored
    batch.positions[:] = n_stored + np.minimum(np.arange(shape.n_tokens), n_new - 1)
    new = batch.new_slots[:, None] if isinstance(batch, DecodeBatch) else batch.slots
    new[:n_own, :n_new] = first[:n_own, None] + n_stored + np.arange(n_new)
    if isinstance(batch, PrefillBatch):
        batch.logits_at[:] = n_new - 1
    return batch


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)
