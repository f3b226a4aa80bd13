"""Which share of the KV model ranks are to keep, and as how many staggered batches a step goes: predicted
from measured times.

A decode step of one batch takes its slices, and then as long as the slower pool attends:

    slices + max(local, remote + exchanges)

and one of n staggered batches, whose slices and local attention run while attention workers attend,

    max(n slices + local, remote + n exchanges)

so for each there is a share at which both sides take the same time (max(x A, (1 - x) A + e); with x = 0 this
is Lamina's step, with x = 1 the unsplit model's). What a token's attention takes on either side is measured
when KV is allocated; slices, from steps as they are run. Until then slices are as a cost model predicts them,
where one knows the devices, corrected by how it was wrong of other steps. Knows numbers; no slot, no device
and no clock.

Source: Lamina 2025 §4.3 for the staggered batches; the share is ours.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

# A share of attention workers must save so much of a step, or all stays on the model rank.
_LEAST_GAIN = 0.02
# Staggered batches must be predicted to be so much faster than one for tokens to go where they are best for
# them: predictions from steps elsewhere flatter them (8 % faster was 6 % slower; docs/findings.md).
_LEAST_STAGGERED_GAIN = 0.1
_REMEMBERED = 9  # steps of a kind
_N_TRIALS = 4  # of a kind that has not been seen
# What is predicted to take more than so many times as long as another is not tried.
MAY_PAY = 1.25


@dataclass(frozen=True)
class Speeds:
    """Seconds, of all layers together. ``local_s``: a stored token's attention on the model ranks;
    ``remote_s``: on attention workers, all of them at it. ``exchange_s``: a batch's exchanges; ``row_s``:
    what they take more for each row. ``shared_host``: both pools are one host's cores, so that neither
    attends while the other does for nothing."""

    local_s: float
    remote_s: float
    exchange_s: float
    row_s: float = 0.0
    shared_host: bool = False

    def exchanges_s(self, n_rows: int, n_batches: int = 1) -> float:
        return n_batches * self.exchange_s + n_rows * self.row_s


# Of one layer's exchange with attention workers: seconds, and bytes a second of its messages; as measured
# (docs/benchmarks.md), by how messages go.
LINKS = {
    "memory": (18e-6, 2.5e11),
    "nccl": (35e-6, 2.5e11),
    "mpi": (800e-6, 2e9),
    "cpu": (150e-6, 4e9),
}


class Best(NamedTuple):
    share: float
    n_batches: int
    step_s: float | None  # None while slices have not been seen


class Balance:
    """``share(n)`` for new tokens, ``n_batches`` for each step; ``took`` how long steps took. Thread-safe:
    times come from another thread."""

    def __init__(
        self,
        speeds: Speeds,
        candidates: Sequence[int] = (1,),
        predict: Callable[[int, int], float | None] = lambda n_rows, n_batches: None,
    ) -> None:
        """``candidates``: numbers of staggered batches, among them 1. ``predict``: seconds of the slices of
        so many rows in so many batches, where a cost model knows them."""
        self.speeds, self.candidates, self._predict = speeds, tuple(candidates), predict
        self._lock = threading.Lock()
        self._slices: dict[tuple[int, int], deque[float]] = {}  # by rows and staggered batches
        self._times: dict[tuple[int, int], deque[tuple[float, float]]] = {}  # (predicted, measured)
        self._n_rows = 1
        self._trials: dict[tuple[int, int], int] = {}

    # --- what is asked ---
    def share(self, n_tokens: float) -> float:
        """The share of ``n_tokens``, all that a step attends to, at which it is shortest."""
        return self.best(self._n_rows, n_tokens).share

    def n_batches(self, n_rows: int, n_local: float, n_remote: float, possible: Sequence[int]) -> int:
        """The number of staggered batches by which a step is predicted to be shortest with its tokens where
        they are. One that has not been seen is tried a few times, if it may be the shortest: a kind of step
        has to be compiled first."""
        self._n_rows = n_rows
        able = [n for n in possible if n == 1 or n_remote]
        if not able or able == [1]:
            return 1
        with self._lock:
            untried = [n for n in able if self._trials.get((n_rows, n), 0) < _N_TRIALS]
        known = {n: self.predicted_s(n_rows, n, n_local, n_remote) for n in able}
        least = min((s for s in known.values() if s is not None), default=0.0)
        for n in sorted(untried, key=lambda n: known[n] or 0.0):
            predicted = None if self._predict(n_rows, n) is None else known[n]
            may_pay = (
                predicted < MAY_PAY * least
                if predicted is not None
                else n == 1 or self._may_pay(n_rows, n, n_local, n_remote)
            )
            if may_pay:
                with self._lock:
                    self._trials[n_rows, n] = self._trials.get((n_rows, n), 0) + 1
                return n
        found = {n: s for n, s in known.items() if s is not None}
        return min(found, key=found.__getitem__) if found else able[0]

    def best(self, n_rows: int, n_tokens: float) -> Best:
        """Of all shares and numbers of staggered batches."""
        of_one = self._best_of(n_rows, 1, n_tokens)
        found = of_one
        for n in self.candidates:
            other = self._best_of(n_rows, n, n_tokens) if n > 1 else of_one
            if other.step_s is None or found.step_s is None:
                continue
            if other.step_s < found.step_s * (1 - _LEAST_STAGGERED_GAIN):
                found = other
        return found

    def predicted_s(self, n_rows: int, n_batches: int, n_local: float, n_remote: float) -> float | None:
        """Seconds of a step; None while slices of such have neither been seen nor predicted."""
        slices = self._slices_s(n_rows, n_batches)
        if slices is None:
            return None
        return self._step_s(n_rows, n_batches, slices, n_local, n_remote)

    # --- what is told ---
    def took(self, n_rows: int, n_batches: int, n_local: float, n_remote: float, seconds: float) -> None:
        """A step's seconds, from which the time of its slices follows."""
        local, remote = self._attention_s(n_rows, n_batches, n_local, n_remote)
        predicted = self.predicted_s(n_rows, n_batches, n_local, n_remote)
        if n_batches == 1:
            slices = seconds - max(local, remote)
        else:  # where attention workers are what is waited for, slices may be shorter than this
            slices = seconds - local
        with self._lock:
            key = n_rows, n_batches
            if predicted is not None:
                self._times.setdefault(key, deque(maxlen=_REMEMBERED)).append((predicted, seconds))
            # A share of them at least is there whatever was measured: no step is nothing but attention.
            self._slices.setdefault(key, deque(maxlen=_REMEMBERED)).append(max(slices, 0.05 * seconds))

    # --- what people are told ---
    def state(self) -> dict[str, Any]:
        """Times that the choice is made of, in seconds, and of each kind of step how long its slices take,
        and what was predicted and measured."""
        with self._lock:
            steps = [
                {
                    "batch": n_rows,
                    "n_batches": n,
                    "slices_s": _undisturbed(slices),
                    "predicted_slices_s": self._predict(n_rows, n),
                    "measured_over_predicted": _ratio(self._times.get((n_rows, n), ())),
                }
                for (n_rows, n), slices in sorted(self._slices.items())
            ]
        return {"times": asdict(self.speeds), "steps": steps}

    # --- arithmetic ---
    def _slices_s(self, n_rows: int, n_batches: int) -> float | None:
        with self._lock:
            if found := self._slices.get((n_rows, n_batches)):
                return _undisturbed(found)
            predicted = self._predict(n_rows, n_batches)
            return None if predicted is None else predicted * self._correction(n_batches)

    def _correction(self, n_batches: int) -> float:
        """Slices as they were seen over those that were predicted: the median of all kinds of step of so many
        batches. What is wrong of staggered ones alone must not keep one batch from being tried."""
        ratios = [
            _undisturbed(seen) / predicted
            for (n_rows, n), seen in self._slices.items()
            if n == n_batches and (predicted := self._predict(n_rows, n))
        ]
        return statistics.median(ratios) if ratios else 1.0

    def is_measured(self, n_rows: int | None = None) -> bool:
        """Whether a step of so many rows, None: of the latest, has been timed."""
        n_rows = self._n_rows if n_rows is None else n_rows
        with self._lock:
            return any(rows == n_rows for rows, _ in self._slices)

    def _may_pay(self, n_rows: int, n: int, n_local: float, n_remote: float) -> bool:
        """Whether ``n`` staggered batches can be shorter than one: their slices take at least what those of
        one such batch do, ``n`` times if fewer rows have been seen by themselves."""
        of_one = self._slices_s(n_rows, 1)  # as seen, or as predicted
        if of_one is None:
            return True
        with self._lock:
            alone = {rows: _undisturbed(s) for (rows, k), s in self._slices.items() if k == 1}
        few = [rows for rows in alone if rows <= n_rows // n]
        slices = max(of_one, n * alone[max(few)] if few else 0.0)
        one = self._step_s(n_rows, 1, of_one, n_local, n_remote)
        return self._step_s(n_rows, n, slices, n_local, n_remote) < one

    def _step_s(self, n_rows: int, n_batches: int, slices: float, n_local: float, n_remote: float) -> float:
        """Of slices that take so long."""
        local, remote = self._attention_s(n_rows, n_batches, n_local, n_remote)
        return slices + max(local, remote) if n_batches == 1 else max(slices + local, remote)

    def _attention_s(
        self, n_rows: int, n_batches: int, n_local: float, n_remote: float
    ) -> tuple[float, float]:
        """(on the model ranks, on attention workers with the exchanges)."""
        speeds = self.speeds
        exchanges = speeds.exchanges_s(n_rows, n_batches) if n_remote else 0.0
        return n_local * speeds.local_s, n_remote * speeds.remote_s + exchanges

    def _best_of(self, n_rows: int, n: int, n_tokens: float) -> Best:
        """``n`` staggered batches' best share."""
        speeds = self.speeds
        local, remote = n_tokens * speeds.local_s, n_tokens * speeds.remote_s
        exchanges, slices = speeds.exchanges_s(n_rows, n), self._slices_s(n_rows, n)
        beside = 0.0 if n == 1 else slices
        if beside is None:
            return Best(1.0, n, None)
        alone = None if slices is None else slices + local
        if speeds.shared_host or local + remote <= 0:
            return Best(1.0, n, alone)
        share = min(1.0, max(0.0, (remote + exchanges - beside) / (local + remote)))
        attention = max(beside + share * local, (1 - share) * remote + exchanges)
        step = attention if n > 1 else None if slices is None else slices + attention
        all_local = beside + local
        if n == 1 and all_local - attention < _LEAST_GAIN * (all_local + (slices or 0.0)):
            return Best(1.0, n, alone)
        return Best(share, n, step)


def _undisturbed(seconds: Sequence[float] | deque[float]) -> float:
    """Their lower quartile: what comes between two steps (a prompt, a pause of the host) only adds to one,
    and while requests arrive more than half of the steps may have such a thing."""
    return sorted(seconds)[len(seconds) // 4]


def _ratio(times: Sequence[tuple[float, float]] | deque[tuple[float, float]]) -> float | None:
    return statistics.median(measured / predicted for predicted, measured in times) if times else None
