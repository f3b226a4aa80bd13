"""Requests that a supervisor follows: what a job is told, a job that dies of one of them, and no memory for an
event."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from jaxlamina.process.memory_reserve import MemoryReserve
from jaxlamina.server.pieces import Follow, Opening, Piece
from jaxlamina.server.settings import MOST_TRIES
from jaxlamina.supervisor import requests as following
from jaxlamina.supervisor.job_client import JobClient
from jaxlamina.supervisor.journal import Entry, Journal
from jaxlamina.supervisor.requests import FollowedRequests, _Gone, _lines

PIECES = [
    Piece(opening=Opening(True, (1,)), text="data: begins\n\n"),
    *(Piece(of=(0, 0), token=n, at=n, text=f"data: {n}\n\n") for n in range(4)),
    Piece(status=200, text="data: [DONE]\n\n"),
]


class OneJob:
    """One that repeats the same answer, in place of a start of the real one."""

    planned, is_paused = frozenset(), False

    def __init__(self):
        self.n, self.n_asked = 1, 0
        self.client = None

    async def answer(self, _body):
        self.n_asked += 1
        for piece in PIECES:
            yield piece.line()

    async def ready(self, _, *, after=0):
        if after >= self.n:
            await asyncio.sleep(0.01)
            raise TimeoutError
        if self.client is None:
            self._folder = tempfile.TemporaryDirectory()
            socket = Path(self._folder.name) / "socket"
            app = web.Application()
            app.router.add_post("/{path:.*}", self._answer)
            self._server = web.AppRunner(app, shutdown_timeout=0.1)
            self.client = JobClient(socket, {})
            await self._server.setup()
            await web.UnixSite(self._server, str(socket)).start()
        return self

    async def _answer(self, asked):
        answer = web.StreamResponse()
        async for line in self.answer(await asked.read()):
            if isinstance(line, int):
                return web.json_response({"error": {"message": "no"}}, status=line)
            if not answer.prepared:
                await answer.prepare(asked)
            await answer.write(line)
        return answer

    async def close(self):
        await self.client.close()
        await self._server.cleanup()
        self._folder.cleanup()

    def ends(self):
        return False


def followed(job, recovery_s=10):
    """A request to its end."""

    async def follow():
        requests = FollowedRequests(job, Journal(None), MemoryReserve(2**20), recovery_s=recovery_s)
        request = await requests.accept("/v1/completions", b"{}")
        async with asyncio.timeout(10):
            await request.over()
        await job.close()
        return request

    return asyncio.run(follow())


def of_first(of_sequences, none):
    """What is said of the first prompt's first continuation."""
    return {(which, index): what for which, index, what in of_sequences}.get((0, 0), none)


class BreakingJob(OneJob):
    """One that breaks off after so many tokens each time it is asked, and tells again what it has to. Or it
    refuses, with a status."""

    def __init__(self, *n_new):
        super().__init__()
        self._n_new, self.follows = list(n_new), []

    async def answer(self, body):
        follow = msgspec.json.decode(body.partition(b"\n")[0], type=Follow)
        self.follows.append(follow)
        n = self._n_new.pop(0)
        if n > 100:
            yield n
            return
        until = len(of_first(follow.written, ())) + n
        yield PIECES[0].line()
        for piece in PIECES[1:-1]:
            if of_first(follow.n_given, 0) <= piece.at < until:
                yield piece.line()
        if until >= len(PIECES) - 2:
            yield PIECES[-1].line()


def test_a_job_is_told_what_there_is_and_how_many_go_on():
    """What it does not tell again comes neither twice nor never."""
    job = BreakingJob(2, 1, 1)
    request, follows = followed(job), job.follows
    assert request.status == 200 and request.events == [piece.text for piece in PIECES]
    assert [follow.written for follow in follows] == [(), ((0, 0, (0, 1)),), ((0, 0, (0, 1, 2)),)]
    assert [follow.n_given for follow in follows] == [(), ((0, 0, 2),), ((0, 0, 3),)]
    assert [follow.n_together for follow in follows] == [0, 1, 1]


class OtherTextJob(OneJob):
    """It writes 0, 1, 2, 3 and breaks off, and then 0, 1, 12, 13 and ends."""

    def __init__(self, is_stream):
        super().__init__()
        self._is_stream = is_stream

    async def answer(self, _body):
        self.n_asked += 1
        yield Piece(opening=Opening(self._is_stream, (1,))).line()
        for at in range(4):
            token = at if at < 2 or self.n_asked == 1 else 10 + at
            yield Piece(of=(0, 0), token=token, at=at, text=f"data: {token}\n\n" * self._is_stream).line()
        if self.n_asked > 1:
            yield Piece(status=200, answer='"the other text"').line()


def test_another_text_is_given_to_who_has_had_none_of_the_first():
    """What comes whole is; a stream is not joined of two."""
    job = OtherTextJob(is_stream=False)
    whole = followed(job)
    assert (whole.status, whole.content, job.n_asked) == (200, b'"the other text"', 2)
    assert whole.tokens == {(0, 0): [0, 1, 12, 13]}
    stream = followed(OtherTextJob(is_stream=True))
    assert stream.status == 500 and b"not_repeated" in stream.content
    assert [event for event in stream.events if "error" not in event][:4] == [
        f"data: {n}\n\n" for n in range(4)
    ]


def test_the_journal_has_the_text_that_was_given(tmp_path):
    """The next supervisor makes the same answer again, and finds that it is the same."""

    async def follow(job, n):
        journal = Journal(tmp_path / "journal.sqlite")
        requests = FollowedRequests(job, journal, MemoryReserve(2**20), recovery_s=10)
        requests.take_up("a model")
        if n:
            job.n_asked = 1
            [key] = requests._ended_before
            request = requests.find(key)
        else:
            request = await requests.accept("/v1/completions", b"{}")
        async with asyncio.timeout(10):
            await request.over()
        await job.close()
        await requests.settle()
        journal.close()
        return request

    for n in range(2):
        request = asyncio.run(follow(OtherTextJob(is_stream=False), n))
        assert (request.status, request.content) == (200, b'"the other text"')


def test_an_answer_that_had_ended_is_not_given_as_another_one():
    """Its client may have had it of the supervisor before."""

    async def follow():
        entry = Entry("k", "/v1/completions", b"{}", 1, 2, {(0, 0): [0, 1, 2, 3]}, has_ended=True)
        job = OtherTextJob(is_stream=False)
        requests = FollowedRequests(job, Journal(None), MemoryReserve(2**20), recovery_s=10)
        requests._ended_before = {"k": entry}
        job.n_asked = 1
        request = requests.find("k")
        async with asyncio.timeout(10):
            await request.over()
        await job.close()
        return request

    request = asyncio.run(follow())
    assert request.status == 500 and b"not_repeated" in request.content


def test_what_a_job_once_took_is_not_refused_for_being_too_much(caplog):
    """A newcomer is."""
    job = BreakingJob(2, 429, 503, 429, 9)
    request = followed(job)
    assert request.status == 200 and request.events == [piece.text for piece in PIECES]
    assert [follow.was_taken for follow in job.follows] == [False] + [True] * 4
    assert followed(BreakingJob(429)).status == 429
    assert "which was accepted" not in caplog.text


@pytest.mark.parametrize("status", [400, 413])
def test_an_open_stream_that_is_refused_says_so(status, caplog):
    request = followed(BreakingJob(2, status))
    assert (
        f'{request.key}, which was accepted, ended with {status}: {{"error": {{"message": "no"}}}}'
        in caplog.text
    )
    assert request.status == status and request.events[:3] == [piece.text for piece in PIECES[:3]]
    assert request.events[3:] == ['data: {"error": {"message": "no"}}\n\n', "data: [DONE]\n\n"]


def test_a_job_that_never_takes_a_request_is_not_asked_for_ever(monkeypatch):
    job = BreakingJob(2, *[503] * 1000)
    request = followed(job, recovery_s=0.5)
    assert (
        request.status == 503
        and b"within 0.5 s" in request.content
        and request.events[-1].endswith("[DONE]\n\n")
    )


@pytest.mark.parametrize("why", ["planned", "paused"])
def test_a_job_that_is_ended_on_purpose_died_of_nobody(why):
    job = BreakingJob(*[0] * (2 * MOST_TRIES), 9)
    job.planned, job.is_paused = {job.n} if why == "planned" else {}, why == "paused"
    assert followed(job).status == 200


class PoisonedJob(OneJob):
    """One that ends, for all that it works at, whenever it is asked for the poison; others get a token each
    time they are asked for while nobody else waits. A start takes ``start_s``."""

    def __init__(self, start_s):
        super().__init__()
        self.n_asked_for_poison = 0
        self._dies, self._start_s = asyncio.Event(), start_s
        self._up = asyncio.Event()
        self._up.set()

    async def ready(self, deadline_s, *, after=0):
        async with asyncio.timeout(deadline_s):
            while not self._up.is_set() or self.n <= after:
                await asyncio.sleep(0.005)
        return self

    async def _start(self):
        await asyncio.sleep(self._start_s)
        self.n += 1
        self._up.set()

    async def ask(self, requests, request):
        dies = self._dies
        if request.entry.body == b"poison":
            self.n_asked_for_poison += 1
            await asyncio.sleep(0.05)  # its step is everybody's
            self._dies.set()
            self._up.clear()
            self._dies, self._starting = asyncio.Event(), asyncio.create_task(self._start())
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


@pytest.mark.parametrize("start_s", [0.0, 0.6])
def test_a_request_that_the_job_dies_of_takes_no_other_with_it(monkeypatch, start_s):
    """Also where all that go on have their first step together, in which it dies; and where a start takes
    longer than a suspect waits for the others."""
    monkeypatch.setattr(following, "_ALONE_S", 0.4)
    monkeypatch.setattr(following, "AGAIN_S", 0.01)

    async def follow():
        job = PoisonedJob(start_s)
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


class WaitingJob(OneJob):
    """One that accepts a request, and gives it no token."""

    async def answer(self, _body):
        yield PIECES[0].line()
        await asyncio.sleep(60)


def test_a_request_goes_on_while_somebody_reads_it():
    """Who sent it may have come back, and its old connection be noticed later. Once nobody reads it any more
    it ends, and whoever waits is told."""

    async def follow():
        job = WaitingJob()
        requests = FollowedRequests(job, Journal(None), MemoryReserve(2**20), recovery_s=10)
        request = await requests.accept("/v1/completions", b"{}")
        await request.begun()
        events = request.events_from(1)
        requests.reads(request)
        requests.abandon(request)
        assert requests.find(request.key) is request and not request.status
        requests.reads_no_more(request)
        async with asyncio.timeout(10):
            said = [event async for _, event in events]
        await job.close()
        assert "went away" in said[0] and requests.find(request.key) is None and request.status == 410

    asyncio.run(follow())


def test_what_has_ended_is_kept_by_when_it_ended_and_how_much_there_is(monkeypatch):
    monkeypatch.setattr(following, "_MOST_KEPT_BYTES", 20_000)

    async def follow():
        job = OneJob()
        requests = FollowedRequests(job, Journal(None), MemoryReserve(2**20), recovery_s=10)
        ended = []
        for _ in range(12):
            request = await requests.accept("/v1/completions", b"{}")
            await request.over()
            await asyncio.sleep(0)  # its task's end
            ended.append(request)
        left = [request for request in ended if requests.find(request.key)]
        assert left == ended[-len(left) :] and 3 <= len(left) <= 7
        assert sum(request.n_bytes for request in left[:-1]) < 20_000
        monkeypatch.setattr(following, "KEEP_S", 0.0)
        last = await requests.accept("/v1/completions", b"{}")
        assert not any(requests.find(request.key) for request in ended) and requests.find(last.key) is last
        await last.over()
        await job.close()

    asyncio.run(follow())


def test_what_an_earlier_supervisor_left_is_to_come(tmp_path):
    async def follow():
        job, journal = OneJob(), Journal(tmp_path / "journal")
        journal.be_of("a model")
        entry = Entry("00ff", "/v1/completions", b"{}", 1, 2)
        await journal.accept(entry)
        journal.close()
        journal = Journal(tmp_path / "journal")
        requests = FollowedRequests(job, journal, MemoryReserve(2**20), recovery_s=10)
        assert requests.find("00ff") is None and requests.is_to_come("00ff")
        assert requests.take_up("a model") == (1, 0) and not requests.is_to_come("00ff")
        request = requests.find("00ff")
        await request.over()
        assert request.status == 200 and not requests.is_to_come("ff00")
        await requests.settle()
        await job.close()
        journal.close()

    asyncio.run(follow())


def test_an_error_is_not_asked_for_again_by_the_next_supervisor(tmp_path):
    """An answer is, for its events."""
    keys = []

    async def of_supervisor(job):
        journal = Journal(tmp_path / "journal")
        requests = FollowedRequests(job, journal, MemoryReserve(2**20), recovery_s=10)
        requests.take_up("a model")
        for key in keys or [None, None]:
            request = requests.find(key) if key else await requests.accept("/v1/completions", b"{}")
            async with asyncio.timeout(10):
                await request.over()
            yield request
        await requests.settle()
        await job.close()
        journal.close()

    async def follow():
        ended = [request async for request in of_supervisor(BreakingJob(9, 400))]
        assert [request.status for request in ended] == [200, 400]
        keys.extend(request.key for request in ended)
        job = OneJob()
        again = [request async for request in of_supervisor(job)]
        assert [(r.status, r.content) for r in again] == [(r.status, r.content) for r in ended]
        assert again[0].events == ended[0].events and job.n_asked == 1

    asyncio.run(follow())


class InParts:
    def __init__(self, *parts):
        self._parts = parts

    async def parts(self):
        for part in self._parts:
            yield part


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ((b"a\nb", b"", b"c\n\nd\n", b"e\nf", b"rest"), [b"a", b"bc", b"", b"d", b"e"]),
        ((*[b"x" * 2**12] * 2**12, b"\ny\n"), [b"x" * 2**24, b"y"]),
    ],
)
def test_lines_come_from_parts(parts, wanted):
    """In a time that goes by their length: one of 16 MiB would take 20 s otherwise."""

    async def lines():
        return [line async for line in _lines(InParts(*parts))]

    began = time.monotonic()
    found = asyncio.run(lines())
    assert time.monotonic() - began < 5
    assert found == wanted
