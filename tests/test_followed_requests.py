"""Requests that a supervisor follows: what a job is told, a job that dies of one of them, and no memory for an
event."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import msgspec
import pytest

from jaxlamina.process.memory_reserve import MemoryReserve
from jaxlamina.server.pieces import Follow, Opening, Piece
from jaxlamina.supervisor.journal import Journal
from jaxlamina.supervisor.requests import MOST_TRIES, FollowedRequests, _Gone

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


def followed(job):
    """A request to its end."""

    async def follow():
        requests = FollowedRequests(job, Journal(None), MemoryReserve(2**20), recovery_s=10)
        request = await requests.accept("/v1/completions", b"{}")
        async with asyncio.timeout(10):
            await request.over()
        await job.client.aclose()
        return request

    return asyncio.run(follow())


class BreakingJob(OneJob):
    """One that breaks off after so many tokens each time it is asked, and tells again what it has to."""

    def __init__(self, *n_new):
        super().__init__()
        self._n_new, self.follows = list(n_new), []

    def answer(self, asked):
        follow = msgspec.json.decode(asked.read().partition(b"\n")[0], type=Follow)
        self.follows.append(follow)
        written = len(dict(follow.written).get(0, ()))
        until = written + self._n_new.pop(0)

        async def lines():
            yield PIECES[0].line()
            for piece in PIECES[1:-1]:
                if dict(follow.n_given).get(0, 0) <= piece.at < until:
                    yield piece.line()
            if until >= len(PIECES) - 2:
                yield PIECES[-1].line()

        return httpx.Response(200, content=lines())


def test_a_job_is_told_what_there_is_and_how_many_go_on():
    """What it does not tell again comes neither twice nor never."""
    job = BreakingJob(2, 1, 1)
    request, follows = followed(job), job.follows
    assert request.status == 200 and request.events == [piece.text for piece in PIECES]
    assert [dict(follow.written) for follow in follows] == [{}, {0: (0, 1)}, {0: (0, 1, 2)}]
    assert [dict(follow.n_given) for follow in follows] == [{}, {0: 2}, {0: 3}]
    assert [follow.n_together for follow in follows] == [0, 1, 1]


class PoisonedJob(OneJob):
    """One that ends, for all that it works at, whenever it is asked for the poison; others get a token each
    time they are asked for while nobody else waits."""

    def __init__(self):
        super().__init__()
        self.client = None
        self.n_asked_for_poison = 0
        self._dies = asyncio.Event()

    async def ask(self, requests, request):
        dies = self._dies
        if request.entry.body == b"poison":
            self.n_asked_for_poison += 1
            await asyncio.sleep(0.05)  # its step is everybody's
            self._dies.set()
            self._dies = asyncio.Event()
            raise _Gone("it died")
        if not request.tokens or request in requests._waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(dies.wait(), 0.1)
        if not dies.is_set():
            n = len(request.tokens[0, 0])
            requests._token(request, Piece(of=(0, 0), token=n, at=n, text="data: a\n\n"))
            if self.n_asked_for_poison == MOST_TRIES:
                request.end(200, b"")
                return
            await asyncio.wait_for(dies.wait(), 10)
        raise _Gone("it died")


def test_a_request_that_the_job_dies_of_takes_no_other_with_it(monkeypatch):
    """Also where all that go on have their first step together, in which it dies."""

    async def follow():
        job = PoisonedJob()
        requests = FollowedRequests(job, Journal(None), MemoryReserve(2**20), recovery_s=10)
        monkeypatch.setattr(requests, "_ask", lambda running, request: job.ask(requests, request))
        bodies = [b"a", b"b", b"poison"]
        followed = [await requests.accept("/v1/completions", body) for body in bodies]
        async with asyncio.timeout(30):
            for request in followed:
                await request.over()
        return [request.status for request in followed], job.n_asked_for_poison

    statuses, n_asked = asyncio.run(follow())
    assert statuses == [200, 200, 500] and n_asked == MOST_TRIES


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

    job = OneJob()
    request, n_asked = followed(job), job.n_asked
    assert (request.status, n_asked) == (200, 2)
    assert request.events == [piece.text for piece in PIECES]
