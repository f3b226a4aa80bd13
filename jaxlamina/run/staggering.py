"""One batch or several staggered ones: tried on the steps that come, and the faster kept, for each bucket.

Staggering reads every weight once a batch, so it costs where exchanges and weights outweigh attention, and
pays where attention is long. Where that turns depends on model, devices and lengths; steps are all alike, so
they are measured. Where a cost model knows the devices, what it predicts to be fastest goes first. Knows
numbers and buckets; what a step is, is the executor's affair.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Predict = Callable[[Any, int], Mapping[int, float] | None]


class Choice:
    """``next(bucket)`` says how many batches its next step shall have; ``took`` says how long one took.

    Candidates take turns until each has ``n_trials`` times after a first one, which is not counted: it may
    still have compiled something. Then it is the one with the least median for good, and ``on_chosen(bucket,
    medians)`` is told.

    ``predict(bucket, n_rows)``: seconds by number of batches, where they are known: then all trials of what
    is predicted to be fastest go first, and ``on_begun(bucket, predicted)`` is told. Measured times decide
    all the same. Thread-safe: times come from another thread.
    """

    def __init__(
        self,
        candidates: Sequence[int],
        n_trials: int = 5,
        on_chosen: Callable[[Any, Mapping[int, float]], None] = lambda bucket, medians: None,
        predict: Predict = lambda bucket, n_rows: None,
        on_begun: Callable[[Any, Mapping[int, float]], None] = lambda bucket, predicted: None,
    ) -> None:
        if not candidates or n_trials < 1:
            raise ValueError(f"{candidates=} and {n_trials=} must be one at least")
        self._candidates, self._n_trials, self._on_chosen = tuple(candidates), n_trials, on_chosen
        self._predict, self._on_begun = predict, on_begun
        self._predicted: dict[Hashable, Mapping[int, float]] = {}
        self._n_rows: dict[Hashable, int] = {}
        self._begun: dict[Hashable, int] = {}
        self._times: dict[tuple[Hashable, int], list[float]] = {}
        self._lock = threading.Lock()

    def next(self, bucket: Hashable, n_rows: int) -> int:
        """Batches for a step of so many rows: no more than rows."""
        possible, predicted = self._in_order(bucket, n_rows)
        with self._lock:
            self._n_rows[bucket] = n_rows
            chosen = self._chosen(bucket, n_rows)
            if chosen is not None:
                return chosen
            turn = self._begun.get(bucket, 0)
            self._begun[bucket] = turn + 1
        if predicted and not turn:
            self._on_begun(bucket, predicted)
        return possible[(turn // (self._n_trials + 1) if predicted else turn) % len(possible)]

    def possible(self, n_rows: int) -> tuple[int, ...]:
        """What ``next`` may say for so many rows."""
        return tuple(n for n in self._candidates if n <= n_rows) or (1,)

    def settled(self, bucket: Hashable, n_rows: int) -> int:
        """As ``next``, for a step whose time will not be told: what has been chosen, or else what is
        predicted to be fastest, or else the first candidate."""
        possible, _ = self._in_order(bucket, n_rows)
        with self._lock:
            return self._chosen(bucket, n_rows) or possible[0]

    def _in_order(self, bucket: Hashable, n_rows: int) -> tuple[tuple[int, ...], Mapping[int, float]]:
        """Candidates, in the order in which they are tried, and what is predicted of them."""
        possible = self.possible(n_rows)
        if len(possible) == 1:
            return possible, {}
        if bucket not in self._predicted:
            self._predicted[bucket] = self._predict(bucket, n_rows) or {}
        predicted = self._predicted[bucket]
        return tuple(sorted(possible, key=lambda n: predicted.get(n, 0.0))), predicted

    def predicted(self, bucket: Hashable) -> Mapping[int, float]:
        """Seconds of a step by number of batches, as they were predicted when the bucket came."""
        return self._predicted.get(bucket, {})

    def took(self, bucket: Hashable, n_batches: int, seconds: float) -> None:
        with self._lock:
            times = self._times.setdefault((bucket, n_batches), [])
            if len(times) > self._n_trials:
                return
            times.append(seconds)
            n_rows = self._n_rows.get(bucket)
            is_last = n_rows is not None and len(self.possible(n_rows)) > 1 and self._chosen(bucket, n_rows)
        if is_last:
            self._on_chosen(bucket, self.medians(bucket))

    def found(self) -> dict[Any, tuple[int | None, dict[int, float]]]:
        """Of each bucket that had a step: the number chosen, None while it is tried out, and `medians`."""
        with self._lock:
            chosen = {bucket: self._chosen(bucket, n_rows) for bucket, n_rows in self._n_rows.items()}
        return {bucket: (n, self.medians(bucket)) for bucket, n in chosen.items()}

    def _chosen(self, bucket: Hashable, n_rows: int) -> int | None:
        possible = self.possible(n_rows)
        if any(len(self._counted(bucket, n)) < self._n_trials for n in possible):
            return possible[0] if len(possible) == 1 else None
        return min(possible, key=lambda n: statistics.median(self._counted(bucket, n)))

    def medians(self, bucket: Hashable) -> dict[int, float]:
        """Seconds a step by number of batches, of those that have been timed."""
        with self._lock:
            found = {n: self._counted(bucket, n) for n in self._candidates}
            return {n: statistics.median(times) for n, times in found.items() if times}

    def _counted(self, bucket: Hashable, n: int) -> list[float]:
        return self._times.get((bucket, n), [])[1:]
