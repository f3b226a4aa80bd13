"""How the end of a group is told to whoever uses the channel. Knows nothing of how it came to be known."""

from __future__ import annotations

import threading
from types import TracebackType

LAST_WORDS_S = 1.0
"""For handing a Fault, Refused or Bye to a peer that may no longer read."""


class ControlError(RuntimeError):
    """The group cannot go on: a rank has failed, has gone, or did not answer in time. ``line`` names it."""

    def __init__(self, rank: int, line: str) -> None:
        super().__init__(line)
        self.rank = rank
        self.line = line


class Telling:
    """The time in which a fault is told to the other ranks and to ``on_fault``, as a context; once only.

    Whoever is about to raise it waits for that first: the process may end right after, and with it the news.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._teller: threading.Thread | None = None

    def __enter__(self) -> None:
        self._teller = threading.current_thread()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()

    def wait(self, seconds: float) -> None:
        """For the end of it, at most ``seconds``; not at all in the thread that tells."""
        if threading.current_thread() is not self._teller:
            self._is_over.wait(seconds)
