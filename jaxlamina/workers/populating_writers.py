"""Threads that write to a mapped file whose pages are not there yet.

To write by system calls is slower: one at a time may write to a file, and here each enters its own pages.
Knows memory; not what is written there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import numpy as np
from jaxtyping import UInt8

N_WRITERS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Four write twice as much to a new file as one, and a GPU's host has cores for them (docs/findings.md)."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14 or later
_libc = ctypes.CDLL(None)  # `mmap.madvise` holds Python up meanwhile


class PopulatingWriters:
    """``n`` threads."""

    def __init__(self, n: int) -> None:
        self._waiting: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        # From the start: at the end of a process, when all is written that waits, none can be started.
        threads = [threading.Thread(target=self._run, name=f"kept KV {i}", daemon=True) for i in range(n)]
        for thread in threads:
            thread.start()
        self._n = n

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """All of them, until the last is over; raises what the first of those that failed has raised."""
        futures = [Future[None]() for _ in calls]
        for one in zip(futures, calls, strict=True):
            self._waiting.put(one)
        wait(futures)
        for future in futures:
            future.result()

    @staticmethod
    def populate(memory: UInt8[np.ndarray, " ..."]) -> bool:
        """Whether ``memory``, in one piece of a mapping, is there to be written to. Not where no memory is
        left, nor with Linux before 5.14."""
        first = memory.ctypes.data
        begin = first - first % mmap.PAGESIZE
        n_bytes = ctypes.c_size_t(first + memory.nbytes - begin)
        found: int = _libc.madvise(ctypes.c_void_p(begin), n_bytes, _MADV_POPULATE_WRITE)
        return found == 0

    def close(self) -> None:
        for _ in range(self._n):
            self._waiting.put(None)

    def _run(self) -> None:
        while (one := self._waiting.get()) is not None:
            future, call = one
            try:
                call()
            except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
                future.set_exception(error)
            else:
                future.set_result(None)
