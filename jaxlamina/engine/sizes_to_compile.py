"""Which sizes of steps requests may meet, and the few of them that serve every request.

Sizes as data, so that a bar can show how many are left: ``shapes`` lists all, ``first_of`` those that every
step can be padded to, which are compiled before anybody waits (`jaxlamina.engine.warm_up`). Knows buckets; no
executor, no program and no request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from jaxlamina.engine.prompt_batches import n_rows
from jaxlamina.engine.room import SCORED_CHUNK
from jaxlamina.steps.buckets import Buckets, StepSizes, bucket

# A first request's prompt, a sentence in a chat's template, is no longer.
_SHORT_TOKENS = 64


def shapes(
    buckets: Buckets,
    *,
    max_model_len: int,
    max_chunk: int | None,
    chunks: bool = True,
    mixed: bool = False,
    n_prefill_workers: int = 0,
    scored: bool = False,
    own_pace_tokens: int = 0,
    local_prefill_tokens: int = 0,
    prompt_batch_tokens: int = 0,
) -> list[StepSizes]:
    """Every shape that a request of ``max_model_len`` tokens can meet, decode steps first.

    ``max_chunk``: prompt tokens computed in one step, None: all. ``chunks``: whether a prompt may follow
    stored tokens. ``mixed``: whether a decode step may have a prompt or chunk alongside.
    ``n_prefill_workers``: then any of them may have one at once, with a decode step or without. ``scored``:
    also those of prompts whose log-probabilities are wanted, if no prefill worker computes them.
    ``own_pace_tokens``, ``local_prefill_tokens``, ``prompt_batch_tokens``: as of `Capabilities`.
    """
    decodes = [
        StepSizes("decode", batch, 1, context) for batch in buckets.batch for context in buckets.context
    ]
    longest = bucket(min(max_chunk or max_model_len, max_model_len), buckets.prompt)
    prompts = [size for size in buckets.prompt if size <= longest]
    found = [StepSizes("prefill", 1, size, 0) for size in prompts if buckets.prefills]
    if chunks or not buckets.prefills:
        for fewest_tokens, size in _with_fewest(prompts):
            for fewest_earlier, context in _with_fewest(buckets.context, 1 if buckets.prefills else 0):
                if fewest_earlier and not chunks:
                    continue
                # Prefill workers' chunks of one step are padded to the largest, of tokens and of earlier
                # ones.
                if fewest_tokens + fewest_earlier <= max_model_len or n_prefill_workers > 1:
                    found.append(StepSizes("chunk", 1, size, context))
    here = found  # on model ranks
    if n_prefill_workers:
        most_here = bucket(min(local_prefill_tokens, longest), buckets.prompt) if local_prefill_tokens else 0
        here = [s for s in found if s.kind == "chunk" and s.context and s.n_tokens <= most_here]
        sets = [s for n in range(n_prefill_workers) for s in combinations(range(n_prefill_workers), n + 1)]
        found = [replace(prompt, workers=workers) for prompt in found for workers in sets]
    mixed = mixed or n_prefill_workers > 0
    both = [replace(decode, alongside=prompt) for decode in decodes for prompt in found if mixed]
    if scored and not n_prefill_workers:
        both += _scored(buckets, max_model_len, max_chunk)
    if n_prefill_workers:
        both += here
    if prompt_batch_tokens:
        rows = {size: n_rows(buckets, prompt_batch_tokens, size) for size in prompts}
        both += [replace(prompt, batch=rows[prompt.n_tokens]) for prompt in here if rows[prompt.n_tokens] > 1]
    at_own_pace: list[StepSizes] = []
    if n_prefill_workers and own_pace_tokens:
        at_own_pace = [
            StepSizes("prefill", 1, size, 0, workers=(worker,), own_pace=True)
            for size in _quartered(
                bucket(min(own_pace_tokens, max_model_len), buckets.prompt), buckets.prompt
            )
            for worker in range(n_prefill_workers)
        ]
    return decodes + at_own_pace + found + both


def _scored(buckets: Buckets, max_model_len: int, max_chunk: int | None) -> list[StepSizes]:
    """Nothing of such a prompt comes from a cache: each chunk follows whole ones."""
    most = min(SCORED_CHUNK, max_chunk or SCORED_CHUNK)
    found: dict[StepSizes, None] = {}
    for start in range(0, max_model_len, most):
        longest = bucket(min(most, max_model_len - start), buckets.prompt)
        for size in buckets.prompt:
            if size <= longest:
                found[buckets.fit(StepSizes("chunk", 1, size, start, of_all=True))] = None
    return list(found)


def _quartered(longest: int, sizes: Sequence[int]) -> list[int]:
    """Of ``sizes`` those that hold ``longest``, a quarter of it, a quarter of that, …: each is compiled twice
    on its worker, for a prompt's first chunk and for later ones, before a server answers."""
    found, n = [longest], longest // 4
    while n >= sizes[0]:
        found.append(bucket(n, sizes))
        n //= 4
    return sorted(set(found))


def _with_fewest(sizes: Sequence[int], least: int = 1) -> Iterator[tuple[int, int]]:
    """Each size with the least number that is padded to it."""
    yield least, sizes[0]
    yield from ((below + 1, size) for below, size in pairwise(sizes))


def first_of(todo: Sequence[StepSizes], n_at_once: int = 1) -> list[StepSizes]:
    """The few that every step of ``todo`` can be padded to, one of each kind, and those that a first request,
    alone and short, is run by. Where more are compiled ``n_at_once``, also a prompt or chunk of half the
    longest's tokens: to compute padding is what costs most until there are finer ones. And one for several
    short prompts, where such go together: those with little to compute come many at once after a fault.
    Beside prefill workers, where nothing is compiled later, model ranks have one for the shortest, too."""
    largest: dict[Any, StepSizes] = {}
    several = [shape for shape in todo if shape.kind == "chunk" and shape.batch > 1]
    todo = [shape for shape in todo if shape.kind == "decode" or shape.batch == 1]
    for shape in todo:
        group = shape.kind == "decode", shape.alongside is None, shape.workers, shape.of_all, shape.own_pace
        largest[group] = largest[group].joined(shape) if group in largest else shape
    small = [shape for shape in todo if not (shape.alongside or shape.workers or shape.of_all)]
    rests: list[StepSizes] = []
    if any(shape.workers for shape in todo):  # then model ranks' prompts are short as they are
        rests = sorted(several, key=lambda shape: (-shape.n_tokens, -shape.context))[:1]
        here = [shape for shape in small if shape.kind == "chunk"]
        rests += sorted(here, key=lambda shape: (shape.n_tokens, -shape.context))[:1]
        small = [shape for shape in small if shape.kind == "decode"]
    short = [shape for shape in small if shape.kind != "decode" and shape.n_tokens >= _SHORT_TOKENS]
    # None of these can be compiled behind, and each is on one worker.
    own_pace = [shape for shape in todo if shape.own_pace]
    found = [
        *largest.values(),
        *own_pace,
        *rests,
        *[shape for shape in small if shape.kind == "decode"][:1],
        *short[:1],
    ]
    if n_at_once > len(set(found)):
        most = max((shape.n_tokens for shape in small), default=0)
        longest_context = max((shape.context for shape in small if shape.kind == "chunk"), default=0)
        half = [
            s for s in small if s.kind == "chunk" and s.n_tokens <= most // 2 and s.context == longest_context
        ]
        found += sorted(half, key=lambda shape: shape.n_tokens)[-1:]
        found += sorted(several, key=lambda shape: (shape.n_tokens, -shape.context))[:1]
    return list(dict.fromkeys(found))
