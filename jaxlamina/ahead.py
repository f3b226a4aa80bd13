"""Programs that other threads compile while this one goes on. Knows no program: keys, and calls that give one.

XLA compiles without Python's lock, so several programs at once are done sooner than one after another; tracing them stays
with the thread that asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
# XLA itself uses more for parts of a program, and tracing has to keep up with them.
_MOST_THREADS = 8


def n_compiling(cores_each: int = 2) -> int:
    """How many programs are compiled at once: one for two cores, up to eight. Small ones keep no more than one core busy."""
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // cores_each))


class Ahead(Generic[T]):
    """``begin`` a program, go on with others, and ``take`` it when it is wanted. ``n_threads``: None for `n_compiling`."""

    def __init__(self, n_threads: int | None = None) -> None:
        self._n_threads = n_threads or n_compiling()
        self._threads: ThreadPoolExecutor | None = None
        self._begun: dict[Hashable, Future[T]] = {}

    def __len__(self) -> int:
        return len(self._begun)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._begun

    def begin(self, key: Hashable, compiles: Callable[[], T]) -> None:
        """Has ``compiles`` called by another thread; nothing if that of ``key`` is there already."""
        if key in self._begun:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._n_threads, "compile")
        self._begun[key] = self._threads.submit(compiles)

    def take(self, key: Hashable) -> T | None:
        """What came of it, once it is done; what it failed with is raised. None if it was not begun, or is taken."""
        future = self._begun.pop(key, None)
        return None if future is None else future.result()

    def forget(self) -> None:
        """Waits for what is being compiled, and drops it and all that was begun; the threads end."""
        threads, self._threads, self._begun = self._threads, None, {}
        if threads is not None:
            threads.shutdown(cancel_futures=True)
