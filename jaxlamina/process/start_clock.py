"""Where a process's start goes: seconds of each phase, from the process's own beginning to its first request.

One a process, as the process has one start. Knows clocks alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path


class StartClock:
    """``began_s``: when the process began, by `time.clock_gettime(time.CLOCK_BOOTTIME)`; None: read from
    /proc, or now where there is none."""

    def __init__(self, began_s: float | None = None) -> None:
        self._last_s = began_s
        self._seconds: dict[str, float] = {}
        self._is_over = False

    def done(self, phase: str) -> None:
        """What came since the last call was ``phase``. One that comes again is added to; after `over` nothing
        is."""
        if self._is_over:
            return
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        last_s = _began_s(now_s) if self._last_s is None else self._last_s
        self._seconds[phase] = self._seconds.get(phase, 0.0) + max(0.0, now_s - last_s)
        self._last_s = now_s

    def restart(self) -> None:
        """The start begins now: what came before was nobody's waiting."""
        self._last_s, self._seconds = time.clock_gettime(time.CLOCK_BOOTTIME), {}

    def over(self) -> None:
        """The start is: what is loaded or compiled from now on is none of it."""
        self._is_over = True

    @property
    def seconds(self) -> Mapping[str, float]:
        """In the order of the phases; empty until the start is over."""
        return dict(self._seconds) if self._is_over else {}

    def __str__(self) -> str:
        parts = ", ".join(f"{phase} {s:.1f}" for phase, s in self._seconds.items() if s >= 0.05)
        return f"started in {sum(self._seconds.values()):.1f} s: {parts}"


def _began_s(now_s: float) -> float:
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return now_s
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


CLOCK = StartClock()
"""This process's."""
