"""The end of processes below this one: until nothing of them runs, and until they are gone.

The first is what another job waits for that has memory and ports of its own; the second is for one that needs
theirs. Knows processes by number.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from jaxlamina.process import ending
from jaxlamina.process.descendants import descendants

_LOOK_S = 0.02
_MOST_S = 10.0  # for the kernel to end a process that is killed; and to take it away
_log = logging.getLogger("uvicorn.error")


class Leaving:
    """Processes that run nothing any more and are there still: of each when it began, and until when it is
    waited for."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int | None, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    async def end_all(self, but: Callable[[], Collection[int]], end_s: float) -> None:
        """Until nothing below this process runs ``but`` those, which may change meanwhile, and what is below
        them. The others are killed after ``end_s``."""
        kill_at = time.monotonic() + end_s
        while (left := self._left(but())) != []:
            now = time.monotonic()
            if now > kill_at + _MOST_S:
                _log.error(
                    "processes of the job do not end: %s", "nobody says which" if left is None else left
                )
                return
            for pid in left or ():
                with suppress(ProcessLookupError, PermissionError):
                    if now >= kill_at:
                        os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_LOOK_S)

    def _left(self, but: Collection[int]) -> list[int] | None:
        """Those that run; None: the system says nothing, as without files, so that some may."""
        try:
            return [pid for pid in _below(but) if not self._leaves(pid)]
        except (OSError, MemoryError):
            return None

    def _leaves(self, pid: int) -> bool:
        began = ending.began(pid)
        if pid in self._of or _is_gone(pid, began):
            return True
        if ending.exit_code(pid, began) is None:
            return False
        self._of[pid] = began, time.monotonic() + _MOST_S
        return True

    async def gone(self) -> None:
        """Until all that `end_all` has seen end are: a GPU and ports are free only then."""
        while self._of:
            for pid, (began, until) in list(self._of.items()):
                is_late = time.monotonic() > until
                if is_late:
                    _log.error("a process of the job has ended, and is not taken away: %s", pid)
                if is_late or _is_gone(pid, began):
                    self._of.pop(pid, None)
            await asyncio.sleep(_LOOK_S)


def _is_gone(pid: int, began: int | None) -> bool:
    """It is, once it is waited for; a grandchild is waited for by another."""
    if began is not None and ending.began(pid) == began:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return ending.is_gone(pid, began)


def _below(but: Collection[int]) -> set[int]:
    """All processes below this one ``but`` those and what is below them. What a process leaves behind comes
    up to this one, and could be missed on its way by one look."""
    pid = os.getpid()
    return {*descendants(pid, but), *descendants(pid, but)}
