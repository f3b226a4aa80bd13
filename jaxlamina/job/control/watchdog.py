"""Deadlines for what a thread may wait on for ever: a step whose peer has gone sits in a device call, not in
Python.

One thread looks after all of them. Knows nothing of JAX, ranks or what is done about it: that is for
``on_late``.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_SLEEP_S = 1.0
_WHERE_S = 0.5


@dataclass
class _Job:
    what: str
    deadline_s: float
    until: float
    in_turn: bool


class Watchdog:
    """``begin`` something and say when it is ``done``; if that takes more than ``deadline_s`` seconds,
    ``on_late(line)`` is called, once for it and from the watchdog's thread.

    ``where()``: how far what is late has come, as in "last completed exchange 12 of 93"; asked when something
    is late, and put into the line. It may wait for what the step waits for, as a GPU's driver did, so it has
    half a second. ``now``: seconds of a clock that only goes forward. ``begin``, ``done`` and ``restart``
    take microseconds and wake no thread, so every step can have its ticket.
    """

    def __init__(
        self,
        deadline_s: float,
        on_late: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        where: Callable[[], str] = lambda: "",
    ) -> None:
        if not deadline_s > 0:
            raise ValueError(f"{deadline_s=} must be above 0")
        self.deadline_s = deadline_s
        self._on_late = on_late
        self._now, self._where = now, where
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._tickets = itertools.count()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, what: str, deadline_s: float | None = None, *, in_turn: bool = True) -> int:
        """A ticket for ``what``, as in "step 12 (decode, batch 8, context 256)"; ``deadline_s``: another than
        usual. ``in_turn``: it may have to wait for others, as `restart` has it."""
        seconds = deadline_s or self.deadline_s
        job = _Job(what, seconds, self._now() + seconds, in_turn)
        with self._lock:
            ticket = next(self._tickets)
            self._jobs[ticket] = job
        return ticket

    def done(self, ticket: int) -> None:
        """It is done, late or not."""
        with self._lock:
            self._jobs.pop(ticket, None)

    def restart(self) -> None:
        """What goes in turn and is not done has all of its time again: it had to wait for something that is
        done now."""
        with self._lock:
            now = self._now()
            for job in self._jobs.values():
                if job.in_turn:
                    job.until = max(job.until, now + job.deadline_s)

    def check(self) -> float:
        """Tells of what is late by now; returns in how many seconds the next can be."""
        with self._lock:
            now = self._now()
            late = [self._jobs.pop(t) for t, job in list(self._jobs.items()) if job.until <= now]
            next_s = min([self.deadline_s, *(job.until - now for job in self._jobs.values())])
        where = self._how_far() if late else ""
        for job in late:
            note = f" ({where})" if where else ""
            self._on_late(f"{job.what} was not done within {job.deadline_s:g} s{note}")
        return next_s

    def _how_far(self) -> str:
        found: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=lambda: found.put(self._asked()), name="how far", daemon=True).start()
        with suppress(queue.Empty):
            return found.get(timeout=_WHERE_S)
        return f"how far it is was not known within {_WHERE_S:g} s"

    def _asked(self) -> str:
        try:
            return self._where()
        except Exception as error:  # noqa: BLE001 (that it is late must be said in any case)
            return f"how far it is cannot be known: {type(error).__name__}: {error}"

    def close(self) -> None:
        """Ends the thread; nothing is late any more."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        # Short sleeps: one that takes much longer than asked was a stop of this process (Ctrl-Z), and so of
        # what it waits for. That time counts for nobody.
        asked, wait_s = self._now(), min(_SLEEP_S, self.deadline_s)
        while not self._closed.wait(wait_s):
            overslept_s = self._now() - asked - wait_s
            if overslept_s > _SLEEP_S:
                with self._lock:
                    for job in self._jobs.values():
                        job.until += overslept_s
            asked, wait_s = self._now(), min(_SLEEP_S, self.check())
