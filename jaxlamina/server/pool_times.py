"""What each pool does in a decode step: now and then one is recorded on all ranks while requests are served.

Knows an executor that records (`jaxlamina.run.recording`); nothing of requests, nor of how numbers are shown.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from jaxlamina.profiling.timeline import Timeline

_N_STEPS = 3
_log = logging.getLogger("uvicorn.error")


class PoolTimes:
    """``before_step`` belongs before each of the engine's steps, in its thread; ``seconds`` may be read from
    any.

    The decode step that is recorded is run a few times more than it would be, which changes nothing that is
    written, and holds the others up meanwhile. Where it cannot be recorded, that is said in the log, and
    tried again in its turn.
    """

    def __init__(self, executor: Any, every_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        # By (pool, kind), of one step, the mean of the pool's ranks.
        self.seconds: dict[tuple[str, str], float] = {}
        self.bubble_shares: dict[str, float] = {}
        self.n_recorded = 0
        self.latest_error = ""  # why the latest step could not be recorded
        self.every_s = every_s
        self.on_recorded: Callable[[Timeline], None] | None = None  # in the engine's thread
        self._executor, self._clock = executor, clock
        self._due: float | None = None  # before the first step

    def before_step(self) -> None:
        if self._due is None:
            self._due = self._clock() + self.every_s
        if not self.take_in() and self._clock() >= self._due:
            self._due = math.inf
            self._executor.record_later(0, _N_STEPS, self._failed)

    def take_in(self) -> bool:
        """Takes a recording in, in the engine's thread; whether there was one."""
        found, self._executor.recorded = self._executor.recorded, None
        if found is None:
            return False
        self._take(found)
        self._due = self._clock() + self.every_s
        return True

    @property
    def is_due(self) -> bool:
        """Whether the next decode step is recorded."""
        return self._due == math.inf

    def record_next(self) -> None:
        """Has the next decode step recorded, in the engine's thread."""
        if not self.is_due:
            self._due = self._clock()

    def _take(self, found: Timeline) -> None:
        seconds: dict[tuple[str, str], float] = {}
        shares: dict[str, float] = {}
        for pool in found.pools:
            ranks = found.ranks_of(pool)
            ms = found.ms(ranks)
            seconds |= {(pool, kind): ms[kind] / 1e3 for kind in found.kinds_of(pool)}
            shares[pool] = found.shares(ranks)["bubble"]
        self.seconds, self.bubble_shares = seconds, shares
        self.n_recorded, self.latest_error = self.n_recorded + 1, ""
        if self.on_recorded is not None:
            self.on_recorded(found)

    def _failed(self, error: Exception) -> None:
        _log.warning("a decode step could not be recorded for the pools' metrics: %s", error)
        self.latest_error = str(error)
        self._due = self._clock() + self.every_s
