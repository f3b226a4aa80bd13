"""Decode steps while prefill workers compute prompts at their own pace, beside the same steps undisturbed,
and beside what the workers do with nobody to wait for.

Steps are launched one ahead, as an engine does: the host looks between two steps whether a worker is done.
Knows an executor and clocks; nothing of requests or tables.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxlamina.errors import UserError
from jaxlamina.run.ranks import RanksExecutor
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.step import PromptPart, Step

_CHUNKS = 4  # of each worker, a round
_LONGEST_S = 120.0  # of a round
_COMPILING_S = 900.0


@dataclass
class OwnPace:
    """A round each. Times in ms are medians of the round's steps: undisturbed, while workers compute, and of
    those steps that a chunk was taken in before. Rates are prompt tokens/s of all workers together: beside
    the steps, and with neither steps nor intakes."""

    n_workers: int
    undisturbed_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    with_intake_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    alone_tokens_per_s: list[float] = field(default_factory=list)
    steps_per_chunk: list[float] = field(default_factory=list)


class OwnPaceRun:
    """``round`` by round. ``chunk``: what each worker computes, over and over, after as many tokens as its
    ``lengths`` say."""

    def __init__(self, executor: RanksExecutor, batch: DecodeBatch, chunk: PrefillBatch) -> None:
        self._executor, self._batch = executor, batch
        self._parts = [PromptPart(chunk, worker=i) for i in range(executor.prefill_workers)]
        self._n_tokens = len(self._parts) * chunk.tokens.shape[1]
        self.found = OwnPace(len(self._parts))

    def warm_up(self) -> None:
        """Compiles everything."""
        for part in self._parts:
            self._executor.begin_prompt(part)
            self._await(1, _COMPILING_S)
            self._take_in(part)
        jax.block_until_ready(self._executor.decode(self._batch))

    def round(self) -> None:
        found, n_workers = self.found, len(self._parts)
        beside, n_chunks, seconds = self._beside()
        found.beside_ms.append(_median_ms([s for s, _ in beside]))
        found.with_intake_ms.append(_median_ms([s for s, has_intake in beside if has_intake]))
        found.tokens_per_s.append(n_chunks * self._n_tokens / n_workers / seconds)
        found.steps_per_chunk.append(len(beside) / (n_chunks / n_workers))
        n_steps = min(len(beside), 200)
        found.undisturbed_ms.append(_median_ms([s for s, _ in self._steps(lambda i: i < n_steps)]))
        began = time.perf_counter()
        for _ in range(_CHUNKS):
            for part in self._parts:
                self._executor.begin_prompt(part)
            self._await(n_workers)
        found.alone_tokens_per_s.append(_CHUNKS * self._n_tokens / (time.perf_counter() - began))

    def _beside(self) -> tuple[list[tuple[float, bool]], int, float]:
        """Each step's seconds and whether a chunk was taken in before it; chunks taken in, and seconds."""
        executor, began, n_chunks = self._executor, time.perf_counter(), 0
        for part in self._parts:
            executor.begin_prompt(part)

        def look() -> bool:
            nonlocal n_chunks
            done = executor.computed()
            for worker in done:
                self._take_in(self._parts[worker])
                executor.begin_prompt(self._parts[worker])
            n_chunks += len(done)
            return bool(done)

        def goes_on(_: int) -> bool:
            return n_chunks < _CHUNKS * len(self._parts) and time.perf_counter() - began < _LONGEST_S

        steps = self._steps(goes_on, look)
        seconds = time.perf_counter() - began
        self._await(len(self._parts))  # what was begun last
        if not n_chunks:
            raise UserError(
                f"prefill workers computed no chunk within {_LONGEST_S:g} s: give --prefill fewer"
            )
        return steps, n_chunks, seconds

    def _steps(
        self, goes_on: Callable[[int], bool], look: Callable[[], bool] = lambda: False
    ) -> list[tuple[float, bool]]:
        """Decode steps, one launched ahead: how long after the one before each was there. The first, which
        had none before it, is left out."""
        found: list[tuple[float, bool]] = []
        launched: list[tuple[Any, bool]] = []
        last_s: float | None = None
        i = 0
        while goes_on(i) or i < 3:
            has_intake = look()
            launched.append((self._executor.decode(self._batch), has_intake))
            i += 1
            if len(launched) > 1:
                logits, had_intake = launched.pop(0)
                jax.block_until_ready(logits)
                now_s = time.perf_counter()
                if last_s is not None:
                    found.append((now_s - last_s, had_intake))
                last_s = now_s
        jax.block_until_ready(launched.pop()[0])
        return found

    def _take_in(self, part: PromptPart) -> None:
        ready = PromptPart(part.batch, part.scored, part.worker, ready=True)
        self._executor.run(Step(prompts=(ready,)))

    def _await(self, n: int, most_s: float = _LONGEST_S) -> None:
        until = time.perf_counter() + most_s
        while n > 0:
            n -= len(self._executor.computed(1.0))
            if n > 0 and time.perf_counter() > until:
                raise UserError(f"a prefill worker is not done within {most_s:g} s: give --prefill fewer")


def _median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds) if seconds else 0.0
