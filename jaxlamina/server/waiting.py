"""Work that nobody may want any more: waited for, or answered piece by piece. Knows a request's connection;
nothing of what is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class EndingStream(StreamingResponse):
    """``parts`` as they come; ``at_end`` is called in any case, also where the client went away before the
    first part was asked for."""

    def __init__(
        self, parts: AsyncIterable[Any], at_end: Callable[[], Awaitable[None] | None], **how: Any
    ) -> None:
        super().__init__(parts, **how)
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if (ending := self._at_end()) is not None:
                await ending


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What ``work`` gives; it is cancelled, and `ClientDisconnect` raised, when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
