"""Whether a job that has ended is started again, how soon, and when it is given up.

Pure: the time is passed in. Knows nothing of processes.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_FAILED_STARTS = 5
"""In a row, after which a job is given up that was ready before, if it has not been for long, too."""
LONGEST_PAUSE_S = 15.0
LONGEST_SPARE_PAUSE_S = 600.0


def _pause_s(n_failed: int, longest_s: float) -> float:
    """Before the next start, where so many in a row have failed: twice as long each time."""
    return float(min(2.0 ** min(n_failed - 1, 60), longest_s))  # a larger power may be no float


def spare_pause_s(n_failed: int) -> float:
    """Before the next spare, where so many in a row have not stood by. They are never given up: what keeps
    them from it, such as memory that others have, may go, and nobody waits for one."""
    return _pause_s(n_failed, LONGEST_SPARE_PAUSE_S)


@dataclass
class Retrying:
    """A start has failed if it was not ready when it ended. ``recovery_s``: for so long failed starts are
    tried again, and `MOST_FAILED_STARTS` times at least. ``n_failed``: how many have failed in a row."""

    recovery_s: float
    n_failed: int = 0
    _ready_until_s: float | None = None  # of a clock; None: no start was ready yet

    def ended(self, now_s: float, *, was_ready: bool, is_first: bool = False) -> float | None:
        """Seconds until the next start, or None: the job is given up. ``is_first``: those that failed before
        do not count, as the next start is of another command."""
        if was_ready:
            self.n_failed, self._ready_until_s = 0, now_s
            return 0.0
        self.n_failed = 1 if is_first else self.n_failed + 1
        if self._ready_until_s is None:
            return None
        if self.n_failed >= MOST_FAILED_STARTS and now_s - self._ready_until_s > self.recovery_s:
            return None
        return _pause_s(self.n_failed, LONGEST_PAUSE_S)
