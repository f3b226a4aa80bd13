"""Work that may take long and cannot be interrupted, in threads of its own: a few at once, each waited for so
long; and what was made last.

Knows asyncio and threads; nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from jaxlamina.errors import contained

K = TypeVar("K")
T = TypeVar("T")


class Busy(Exception):
    """No thread came free in time."""


class Latest(Generic[K, T]):
    """The ``n_kept`` values by key that were put or asked for last; for any thread."""

    def __init__(self, n_kept: int) -> None:
        self._n_kept, self._lock = n_kept, threading.Lock()
        self._values: OrderedDict[K, T] = OrderedDict()

    def get(self, key: K) -> T | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: K, value: T) -> None:
        with self._lock:
            self._values[key] = value
            if len(self._values) > self._n_kept:
                self._values.popitem(last=False)


class Workshop:
    """At most ``n_threads`` at once. Work that takes longer than it may is left alone and keeps its place
    until it ends, so that what hangs cannot pile up. The threads hold up no end of the process."""

    def __init__(self, n_threads: int) -> None:
        self._places = asyncio.Semaphore(n_threads)
        self._patient = asyncio.Semaphore(max(1, n_threads - 1))

    async def run(self, work: Callable[[], T], deadline_s: float, *, is_patient: bool = False) -> T:
        """What ``work`` gives. `TimeoutError` if it takes longer, `Busy` if it could not begin within as
        long. Work that ``is_patient`` begins however late, and leaves one of several places to other work."""
        if is_patient:
            await self._patient.acquire()
        try:
            async with asyncio.timeout(None if is_patient else deadline_s):
                await self._places.acquire()
        except BaseException as error:
            if is_patient:
                self._patient.release()
            if isinstance(error, TimeoutError):
                raise Busy from None
            raise
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[T] = loop.create_future()

        def end(result: Any, error: Exception | None) -> None:
            self._places.release()
            if is_patient:
                self._patient.release()
            if reply.done():  # nobody waits any more
                return
            if error is not None:
                reply.set_exception(error)
            else:
                reply.set_result(result)

        def run() -> None:
            result: Any = None
            failed: Exception | None = None
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 (handed to whoever waits)
                failed = contained(error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, result, failed)

        threading.Thread(target=run, name="workshop", daemon=True).start()
        async with asyncio.timeout(deadline_s):
            return await reply


def started_threads(n: int) -> ThreadPoolExecutor:
    """A pool that has all of its threads: to start one takes milliseconds, and while requests come together
    each would wait for one more."""
    pool, all_there = ThreadPoolExecutor(n, "server"), threading.Barrier(n)
    for started in [pool.submit(all_there.wait) for _ in range(n)]:
        started.result()
    return pool


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """`asyncio.to_thread`, but a panic of a library's comes as an `Exception`."""

    def run() -> T:
        try:
            return function(*arguments)
        except BaseException as error:  # noqa: BLE001 (handed on)
            raise contained(error) from None

    return await asyncio.to_thread(run)
