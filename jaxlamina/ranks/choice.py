"""One batch or several staggered ones: tried on the steps that come, and the faster kept, for each bucket.

Staggering reads every weight once a batch, so it costs where exchanges and weights outweigh attention, and pays where
attention is long. Where that turns depends on model, devices and lengths; steps are all alike, so they are measured. Knows
numbers and buckets; what a step is, is the executor's affair.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Hashable, Sequence


class Choice:
    """``next(bucket)`` says how many batches its next step shall have; ``took`` says how long one took.

    Candidates take turns until each has ``n_trials`` times after a first one, which is not counted: it may still have
    compiled something. Then it is the one with the least median for good. Thread-safe: times come from another thread.
    """

    def __init__(self, candidates: Sequence[int], n_trials: int = 5) -> None:
        if not candidates or n_trials < 1:
            raise ValueError(f"{candidates=} and {n_trials=} must be one at least")
        self._candidates, self._n_trials = tuple(candidates), n_trials
        self._begun: dict[Hashable, int] = {}
        self._times: dict[tuple[Hashable, int], list[float]] = {}
        self._lock = threading.Lock()

    def next(self, bucket: Hashable, n_rows: int) -> int:
        """Batches for a step of so many rows: no more than rows."""
        possible = [n for n in self._candidates if n <= n_rows] or [1]
        with self._lock:
            if all(len(self._counted(bucket, n)) >= self._n_trials for n in possible):
                return min(possible, key=lambda n: statistics.median(self._counted(bucket, n)))
            turn = self._begun.get(bucket, 0)
            self._begun[bucket] = turn + 1
            return possible[turn % len(possible)]

    def took(self, bucket: Hashable, n_batches: int, seconds: float) -> None:
        with self._lock:
            times = self._times.setdefault((bucket, n_batches), [])
            if len(times) <= self._n_trials:
                times.append(seconds)

    def medians(self, bucket: Hashable) -> dict[int, float]:
        """Seconds a step by number of batches, of those that have been timed."""
        with self._lock:
            found = {n: self._counted(bucket, n) for n in self._candidates}
            return {n: statistics.median(times) for n, times in found.items() if times}

    def _counted(self, bucket: Hashable, n: int) -> list[float]:
        return self._times.get((bucket, n), [])[1:]
