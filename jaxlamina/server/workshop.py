"""Work that may take long and cannot be interrupted, in threads of its own: a few at once, each waited for so
long.

Knows asyncio and threads; nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from jaxlamina.errors import contained

T = TypeVar("T")


class Busy(Exception):
    """No thread came free in time."""


class Workshop:
    """At most ``n_threads`` at once. Work that takes longer than it may is left alone and keeps its place
    until it ends, so that what hangs cannot pile up. The threads hold up no end of the process."""

    def __init__(self, n_threads: int) -> None:
        self._places = asyncio.Semaphore(n_threads)

    async def run(self, work: Callable[[], T], deadline_s: float) -> T:
        """What ``work`` gives. `TimeoutError` if it takes longer, `Busy` if it could not begin."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._places.acquire()
        except TimeoutError:
            raise Busy from None
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[T] = loop.create_future()

        def end(result: Any, error: Exception | None) -> None:
            self._places.release()
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


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """`asyncio.to_thread`, but a panic of a library's comes as an `Exception`."""

    def run() -> T:
        try:
            return function(*arguments)
        except BaseException as error:  # noqa: BLE001 (handed on)
            raise contained(error) from None

    return await asyncio.to_thread(run)
