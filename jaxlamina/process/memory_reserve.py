"""Memory that a process has and does not use: what it goes on with when its host gives it no more.

Python, its libraries and SQLite take small pieces all the time. Most of them end a connection where one is
missing, and some the process. All take pieces from the C library's heap, or fall back on it. So the heap is
kept larger than it has to be: one large piece is asked for and given back, and the C library is told not to
give that to the host. Untouched, it takes address space and no memory. Knows glibc; of another C library
nothing, and nothing of what needs memory.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of mallopt
_MOST_BYTES = 32 * 2**20  # that mallopt takes for a piece of the heap


class MemoryReserve:
    """``n_bytes`` in one piece, less than 32 MiB. Made before the process has threads, which would have heaps
    of their own."""

    def __init__(self, n_bytes: int) -> None:
        if not 0 < n_bytes < _MOST_BYTES:
            raise ValueError(f"{n_bytes=} must be more than 0 and less than {_MOST_BYTES}")
        self.n_bytes = n_bytes
        self._heap: ctypes.PyDLL | None = None
        if sys.platform == "linux":
            heap = ctypes.PyDLL(None)  # holds Python's lock: nobody wants the piece meanwhile
            if hasattr(heap, "mallopt"):
                heap.mallopt(_ARENA_MAX, 1)
                heap.mallopt(_MMAP_THRESHOLD, _MOST_BYTES)
                heap.mallopt(_TRIM_THRESHOLD, 2 * _MOST_BYTES)
                heap.malloc.argtypes, heap.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
                heap.free.argtypes, heap.free.restype = [ctypes.c_void_p], None
                self._heap = heap
        self.has(1.0)

    def has(self, share: float) -> bool:
        """Whether this ``share`` of it is there; taken from the host again where that gives it. Without glibc
        always."""
        if self._heap is None:
            return True
        found = self._heap.malloc(int(share * self.n_bytes))
        self._heap.free(found)
        return found is not None
