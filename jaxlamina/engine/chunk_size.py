"""How many prompt tokens a step computes while other requests write: as many as keep the step within a limit.

A step with prompt tokens takes longer than a decode step, and everyone who writes waits for it. So the limit
is the TPOT that is asked for, else some decode steps' time. At first the time of a step is predicted. Once
steps have been measured, predictions are multiplied by measured over predicted time. Choosing a chunk by the
time between tokens is Sarathi-Serve's (2024, §4.3).

Pure: numbers, and a function that predicts. Knows no request, no clock and no device.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from jaxlamina.errors import UserError

MOST_TOKENS = 2048
"""Prompt tokens of a step where nobody waits for it, and where nothing predicts what it takes."""
LEAST_TOKENS = 128  # fewer hardly make a step shorter: weights are read all the same
DECODE_STEPS = 5.0
"""Where no TPOT is asked for, a step with prompt tokens takes so many decode steps' time at most: what
Sarathi-Serve (2024, §5) calls a strict limit."""
_KEPT = 8  # latest measurements, of each size

Predict = Callable[[int, int, int, int], float | None]
"""(rows, their stored tokens together, prompt tokens, stored tokens before these) -> seconds of a step."""


class Expected(NamedTuple):
    """Of the latest step with prompt tokens: seconds, as predicted at first and as measured."""

    predicted_s: float
    measured_s: float


class ChunkSize:
    """``next`` says how many prompt tokens a step may compute, ``took`` what a step took.

    ``most``: tokens at most, and where nobody writes. ``limit_s``: of a step; None: `DECODE_STEPS` decode
    steps. Sizes are powers of two and ``most``: programs are compiled for these, and choosing another size of
    them compiles nothing. ``padded(tokens, stored)``: to how many tokens a chunk is padded; to be set by who
    compiles programs.
    """

    def __init__(self, predict: Predict, *, most: int = MOST_TOKENS, limit_s: float | None = None) -> None:
        if most < 1 or (limit_s is not None and not limit_s > 0):
            raise ValueError(f"{most=} must be at least 1 and {limit_s=} above 0")
        doubled = [1 << i for i in range(LEAST_TOKENS.bit_length() - 1, most.bit_length())]
        self.sizes = tuple(n for n in doubled if n < most) + (most,)
        self.most, self.limit_s = most, limit_s
        self.padded: Callable[[int, int], int] = lambda n_tokens, n_stored: n_tokens
        self.latest: Expected | None = None
        self._predict = predict
        self._known: dict[tuple[int, int, int, int], float | None] = {}
        self._ratios: dict[int, deque[float]] = {}  # by prompt tokens, padded: measured over predicted

    def next(self, n_rows: int, n_stored: int, prompt_stored: int) -> int:
        """Prompt tokens for a step of ``n_rows`` with ``n_stored`` tokens together, after ``prompt_stored``
        of the prompt: the most that stay within the limit. Where not even the fewest do, those that take
        least."""
        if not n_rows:
            return self.most
        limit_s = self.limit_s
        if limit_s is None:
            decode_s = self.expected_s(n_rows, n_stored, 0, 0)
            limit_s = math.inf if decode_s is None else DECODE_STEPS * decode_s
        seconds = {}
        for n in self.sizes:
            n_run = self.padded(n, prompt_stored)
            seconds[n] = self.expected_s(n_rows, n_stored, n_run, prompt_stored) or 0.0
        limit_s = max(limit_s, min(seconds.values()))
        return max(n for n, expected_s in seconds.items() if expected_s <= limit_s)

    def expected_s(self, n_rows: int, n_stored: int, n_run: int, prompt_stored: int) -> float | None:
        """Of a step whose prompt tokens are padded to ``n_run``, as predicted and corrected; None where
        nothing is predicted."""
        predicted_s = self.predicted_s(n_rows, n_stored, n_run, prompt_stored)
        return None if predicted_s is None else self._ratio(n_run) * predicted_s

    def predicted_s(self, n_rows: int, n_stored: int, n_run: int, prompt_stored: int) -> float | None:
        """The same, not corrected. Rows and stored tokens are rounded to an eighth, so that few steps need a
        prediction of their own."""
        rounded = _rounded(n_rows), _rounded(n_stored), n_run, _rounded(prompt_stored)
        if rounded not in self._known:
            self._known[rounded] = self._predict(*rounded)
        return self._known[rounded]

    def took(self, n_rows: int, n_stored: int, n_run: int, prompt_stored: int, seconds: float) -> None:
        """A step's measured time. The first one of a size is not counted: it may have compiled something."""
        predicted_s = self.predicted_s(n_rows, n_stored, n_run, prompt_stored)
        if not predicted_s or not seconds > 0:
            return
        if n_run:
            self.latest = Expected(predicted_s, seconds)
        if n_run in self._ratios:
            self._ratios[n_run].append(seconds / predicted_s)
        else:
            self._ratios[n_run] = deque(maxlen=_KEPT)

    def _ratio(self, n_run: int) -> float:
        """Measured over predicted time of this size, or of the nearest that was measured: decode steps, and
        steps with prompt tokens, by themselves."""
        measured = [n for n, ratios in self._ratios.items() if ratios and bool(n) == bool(n_run)]
        if not measured:
            return 1.0
        nearest = min(measured, key=lambda n: abs(math.log(n / n_run)) if n_run else 0.0)
        return statistics.median(self._ratios[nearest])


def chosen(
    asked: int | str | None, tpot_slo_ms: float | None, predict: Predict | None
) -> tuple[int | None, ChunkSize | None]:
    """Of the options ``max_num_batched_tokens`` and ``tpot_slo_ms``: (prompt tokens of a step at most, what
    chooses among fewer). ``predict``: None where no cost is known. ``UserError`` for a limit that nothing
    could keep."""
    if asked == "auto" and predict is not None:
        limit_s = None if tpot_slo_ms is None else tpot_slo_ms / 1e3
        return MOST_TOKENS, ChunkSize(predict, limit_s=limit_s)
    if tpot_slo_ms is not None:
        raise UserError(
            f"{tpot_slo_ms=:g} chooses chunks of prompts, and here nothing is chosen: "
            + (
                "no cost is known of this model, layout and device; give calibration, or leave it out"
                if asked == "auto"
                else "max_num_batched_tokens is given; leave one of them out"
            )
        )
    return (MOST_TOKENS if asked == "auto" else asked), None  # type: ignore[return-value]


def _rounded(n: int) -> int:
    """To three significant bits."""
    unit = 1 << max(0, n.bit_length() - 3)
    return (n + unit // 2) // unit * unit
