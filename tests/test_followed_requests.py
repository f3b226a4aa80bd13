"""A request that a supervisor follows, when the supervisor itself gets no memory for an event."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from jaxlamina.process.memory_reserve import MemoryReserve
from jaxlamina.server.pieces import Opening, Piece
from jaxlamina.supervisor.journal import Journal
from jaxlamina.supervisor.requests import FollowedRequests

PIECES = [
    Piece(opening=Opening(True, (1,)), text="data: begins\n\n"),
    *(Piece(of=(0, 0), token=n, at=n, text=f"data: {n}\n\n") for n in range(4)),
    Piece(status=200, text="data: [DONE]\n\n"),
]


class OneJob:
    """One that repeats the same answer, in place of a start of the real one."""

    def __init__(self):
        self.n, self.n_asked = 1, 0
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self.answer), base_url="http://job")

    def answer(self, _):
        self.n_asked += 1

        async def lines():
            for piece in PIECES:
                yield piece.line()

        return httpx.Response(200, content=lines())

    async def ready(self, _, *, after=0):
        if after >= self.n:
            raise TimeoutError
        return self

    def ends(self):
        return False


@pytest.mark.parametrize("at", range(6))
def test_an_event_without_memory_is_given_once(at, monkeypatch):
    """In whichever event there is none."""
    give, calls = FollowedRequests._give, []

    def without_memory(request, text):
        calls.append(text)
        if len(calls) == at + 1:
            raise MemoryError
        give(request, text)

    monkeypatch.setattr(FollowedRequests, "_give", staticmethod(without_memory))

    async def follow():
        job = OneJob()
        requests = FollowedRequests(job, Journal(None), MemoryReserve(2**20), recovery_s=10)
        request = await requests.accept("/v1/completions", b"{}")
        async with asyncio.timeout(10):
            await request.over()
        await job.client.aclose()
        return request, job.n_asked

    request, n_asked = asyncio.run(follow())
    assert (request.status, n_asked) == (200, 2)
    assert request.events == [piece.text for piece in PIECES]
