"""Times of steps as integers: the planner's costs at points of a grid, straight lines in between.

Costs are made by walking plans, which is slow beside a simulated step, and a long run has millions of steps.
Times are whole femtoseconds, so that many steps at once are exactly as long as the same steps one by one.
Knows the planner's costs; nothing of requests or of the scheduler.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from math import isqrt
from typing import NamedTuple

from jaxlamina.planner import costs
from jaxlamina.planner.costs import Deployment, StepCost

FS = 10**15  # a second
FS_US = 10**9  # a microsecond


def grid(n_even: int, growth: float, most: int) -> list[int]:
    """0, then every number up to ``n_even``, then each so many times the one before, beyond ``most``."""
    points = list(range(n_even + 1))
    while points[-1] <= most:
        points.append(max(points[-1] + 1, round(growth * points[-1])))
    return points


_ROWS = grid(8, 1.15, 1 << 24)
_CONTEXTS = [128 * i for i in range(9)] + [round(1024 * 1.2**i) for i in range(1, 80)]
_PROMPTS = [0, *(round(16 * 1.15**i) for i in range(110))]


class Pace(NamedTuple):
    """Steps in a row, femtoseconds: the first one's, and how much longer each is than the one before."""

    first: int
    growth: int

    def fs_of(self, n_steps: int) -> int:
        """Of so many."""
        return n_steps * self.first + self.growth * (n_steps * (n_steps - 1) // 2)

    def n_within(self, fs: int) -> int:
        """The most that take at most so long together. At least 0."""
        first, growth = self
        if fs < first:
            return 0
        if growth <= 0:  # as if none were shorter than the first
            return fs // first
        # growth/2 n² + (first - growth/2) n = fs
        b = 2 * first - growth
        return (isqrt(b * b + 8 * growth * fs) - b) // (2 * growth)

    def at_least(self, fs: int, n_steps: int) -> tuple[Pace, int]:
        """With ``fs`` for steps that are shorter; and of ``n_steps`` how many there are until steps cease to
        be so, or begin to."""
        first, growth = self
        if first >= fs:
            return self, n_steps if growth >= 0 else min(n_steps, (first - fs) // -growth + 1)
        return Pace(fs, 0), n_steps if growth <= 0 else min(n_steps, -((first - fs) // growth))


class CostCell:
    """Steps of ``n_rows`` requests whose stored tokens together are from ``lo`` to below ``hi``: the time is
    a straight line over them. It counts the steps that it has given times for."""

    __slots__ = ("at_hi", "at_lo", "fs_at_lo", "fs_per_token", "hi", "lo", "n_rows", "n_steps", "n_stored")

    def __init__(self, n_rows: int, lo: int, hi: int, at_lo: StepCost, at_hi: StepCost) -> None:
        self.n_rows, self.lo, self.hi, self.at_lo, self.at_hi = n_rows, lo, hi, at_lo, at_hi
        self.fs_at_lo = max(1, round(FS * at_lo.step_s))
        self.fs_per_token = round(FS * (at_hi.step_s - at_lo.step_s) / (hi - lo))
        self.n_steps = self.n_stored = 0

    def fs(self, n_stored: int) -> int:
        return self.fs_at_lo + self.fs_per_token * (n_stored - self.lo)

    def pace(self, n_stored: int) -> Pace:
        """Of steps in a row, each with ``n_rows`` stored tokens more than the one before."""
        return Pace(self.fs(n_stored), self.fs_per_token * self.n_rows)

    def n_left(self, n_stored: int) -> int:
        """Steps in a row from here that are of this cell."""
        return (self.hi - 1 - n_stored) // self.n_rows + 1

    def count(self, n_steps: int, n_stored: int) -> None:
        self.n_steps += n_steps
        self.n_stored += n_steps * n_stored + self.n_rows * (n_steps * (n_steps - 1) // 2)

    def busy(self) -> StepCost:
        """Seconds of all steps that were counted."""
        n, share = self.n_steps, (self.n_stored - self.n_steps * self.lo) / (self.hi - self.lo)
        return StepCost(*(a * (n - share) + b * share for a, b in zip(self.at_lo, self.at_hi, strict=True)))


class ModelledTimes:
    """Of one setup. Numbers of rows and tokens between the grid's points are straight lines between these.
    ``batch_sizes``: what rows are padded to, if to any."""

    def __init__(self, setup: Deployment, batch_sizes: tuple[int, ...] = ()) -> None:
        self.setup, self._batch_sizes = setup, batch_sizes
        self._cells: dict[tuple[int, int], CostCell] = {}
        self._newest: dict[int, CostCell] = {}  # by rows
        self.prefill_fs = cache(self._prefill_fs)
        self._added = cache(self._of_prompt)
        self._corner = cache(lambda n_rows, context: costs.step_cost(setup, n_rows, context))
        self._prefill_corner = cache(lambda n, n_stored: costs.prefill_s(setup, n, n_stored))

    def cell(self, n_rows: int, n_stored: int) -> CostCell:
        """Of a decode step of ``n_rows`` requests with ``n_stored`` tokens together."""
        cell = self._newest.get(n_rows)
        if cell is not None and cell.lo <= n_stored < cell.hi:
            return cell
        at = bisect_right(_CONTEXTS, n_stored // n_rows) - 1
        cell = self._cells.get((n_rows, at))
        if cell is None:
            lo, hi = _CONTEXTS[at], _CONTEXTS[at + 1]
            cell = CostCell(n_rows, n_rows * lo, n_rows * hi, self._at(n_rows, lo), self._at(n_rows, hi))
            self._cells[n_rows, at] = cell
        self._newest[n_rows] = cell
        return cell

    @property
    def cells(self) -> list[CostCell]:
        return list(self._cells.values())

    def _at(self, n_real: int, context: int) -> StepCost:
        n_rows = next((size for size in self._batch_sizes if size >= n_real), n_real)
        if n_rows > n_real:  # padding stores nothing
            return costs.step_cost(self.setup, n_rows, context * n_real / n_rows)
        i = bisect_right(_ROWS, n_rows) - 1
        lo, hi = _ROWS[i], _ROWS[i + 1]
        first: StepCost = self._corner(lo, context)
        if lo == n_rows:
            return first
        last: StepCost = self._corner(hi, context)
        share = (n_rows - lo) / (hi - lo)
        return StepCost(*(a + share * (b - a) for a, b in zip(first, last, strict=True)))

    def mixed(self, n_rows: int, n_stored: int, n_prompt: int) -> StepCost:
        """A decode step with a prompt's ``n_prompt`` tokens alongside: what these add is that of the nearest
        point of rows and contexts below."""
        cell = self.cell(n_rows, n_stored)
        share = (n_stored - cell.lo) / (cell.hi - cell.lo)
        at = _ROWS[bisect_right(_ROWS, n_rows) - 1], cell.lo // n_rows
        i = bisect_right(_PROMPTS, n_prompt) - 1
        lo, hi = _PROMPTS[i], _PROMPTS[i + 1]
        more = (n_prompt - lo) / (hi - lo)
        rows = zip(cell.at_lo, cell.at_hi, self._added(*at, lo), self._added(*at, hi), strict=True)
        return StepCost(*(a + share * (b - a) + c + more * (d - c) for a, b, c, d in rows))

    def with_prompt_s(
        self, is_mixed: bool, n_rows: int, n_stored: int, n_prompt: int, prompt_stored: int
    ) -> float:
        """As `jaxlamina.run.modelled.ModelledSteps.with_prompt_s`."""
        if is_mixed and n_prompt:
            return self.mixed(n_rows, n_stored, n_prompt).step_s
        fs = self.cell(n_rows, n_stored).fs(n_stored)
        return (fs + (self.prefill_fs(n_prompt, prompt_stored) if n_prompt else 0)) / FS

    def _of_prompt(self, n_rows: int, context: int, n_prompt: int) -> StepCost:
        """What a prompt adds to a decode step."""
        without = self._corner(n_rows, context)
        mixed = costs.step_cost(self.setup, n_rows, context, n_prompt)
        return StepCost(*(b - a for a, b in zip(without, mixed, strict=True)))

    def _prefill_fs(self, n_tokens: int, n_stored: int) -> int:
        """Of a prompt's ``n_tokens``, after ``n_stored`` of it."""
        i = bisect_right(_PROMPTS, n_tokens) - 1
        lo, hi = max(1, _PROMPTS[i]), _PROMPTS[i + 1]
        first: float = self._prefill_corner(lo, n_stored)
        if lo == n_tokens:
            return round(FS * first)
        last: float = self._prefill_corner(hi, n_stored)
        return round(FS * (first + (last - first) * (n_tokens - lo) / (hi - lo)))
