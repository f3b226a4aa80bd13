"""The client by which a supervisor reaches its server, at servers that answer, break off, are late, or are not
there."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading

import pytest
import uvicorn
from supervised import wait_until

from jaxlamina.supervisor.job_client import JobClient, NoAnswer, NotReached


def asked(tmp_path, says, ask):
    """What ``ask(client)`` gives at a server that calls ``says(request, writer)`` with what it reads first."""

    serving = set()

    async def serve(reader, writer):
        serving.add(asyncio.current_task())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await says(head, reader, writer)
        finally:
            writer.close()

    async def run():
        server = await asyncio.start_unix_server(serve, tmp_path / "socket")
        client = JobClient(tmp_path / "socket", {"x-secret": "s"})
        try:
            async with asyncio.timeout(10):
                return await ask(client)
        finally:
            await client.close()
            server.close()
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    return asyncio.run(run())


async def parts_of(client):
    answer = await client.open("POST", "/stream", body=b"{}")
    found = []
    try:
        async for part in answer.parts():
            found.append(part)
    except NoAnswer:
        found.append(None)
    answer.close()
    return found


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_what_is_asked_comes_as_it_is(tmp_path):
    """Path, query, body and headers; and nothing of the client's own beside them."""
    seen = []

    async def says(head, reader, writer):
        seen.append(head + await reader.readexactly(2))
        writer.write(
            b"HTTP/1.1 302 Found\r\nlocation: /b\r\nx-step-seconds: 1.5\r\ncontent-length: 2\r\n\r\nno"
        )

    asking = ("POST", "/a b/../%41?#\\", "c=%2F&d?")
    found = asked(tmp_path, says, lambda client: client.ask(*asking, body=b"{}"))
    assert (found.status, found.headers["X-Step-Seconds"], found.content) == (302, "1.5", b"no")
    head, _, body = seen[0].partition(b"\r\n\r\n")
    first, *headers = head.lower().split(b"\r\n")
    assert first == b"post /a%20b/../%2541%3f%23%5c?c=%2f&d? http/1.1" and body == b"{}"
    names = {header.partition(b":")[0] for header in headers}
    assert names == {b"host", b"x-secret", b"content-type", b"content-length", b"connection"}


def test_an_answer_is_not_unpacked_and_one_that_breaks_off_says_so(tmp_path):
    packed = gzip.compress(b"text")

    async def says(_head, reader, writer):
        await reader.readexactly(2)
        writer.write(CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n"))
        writer.write(b"%x\r\n%s\r\n" % (len(packed), packed))
        await writer.drain()

    assert asked(tmp_path, says, parts_of) == [packed, None]


def test_an_answer_may_have_long_headers(tmp_path):
    long = b"x" * 100_000

    async def says(_head, _reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nx-long: %s\r\ncontent-length: 0\r\n\r\n" % long)

    found = asked(tmp_path, says, lambda client: client.ask("GET", "/"))
    assert found.headers["x-long"] == long.decode()


@pytest.mark.parametrize("n", [0, 20])
def test_an_answer_that_never_begins_is_none(tmp_path, n):
    async def says(_head, _reader, writer):
        writer.write(CHUNKED[:n])

    with pytest.raises(NoAnswer) as found:
        asked(tmp_path, says, lambda client: client.ask("GET", "/"))
    assert not isinstance(found.value, NotReached) and str(found.value)


def test_an_answer_before_all_was_asked_is_one(tmp_path):
    """A real server, which need not read what it is asked, and closes then whatever it may close."""

    async def refuse(scope, _receive, send):
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 400, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async def slowly(parts):
        for part in parts:
            await asyncio.sleep(0.002)
            yield part

    async def ask():
        client = JobClient(tmp_path / "socket", {})
        try:
            for parts in ([b""], [b"a", b"b"], [b"x" * 2**16] * 40):
                for _ in range(20):
                    answer = await client.open("POST", "/", body=slowly(parts))
                    assert (answer.status, await answer.read()) == (400, b"no")
                    answer.close()
        finally:
            await client.close()

    config = uvicorn.Config(refuse, uds=str(tmp_path / "socket"), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        asyncio.run(ask())
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def test_a_late_answer_is_none_and_another_is_not_waited_for(tmp_path):
    async def says(head, _reader, writer):
        if b"late" in head:
            await asyncio.sleep(1)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async def ask(client):
        late = asyncio.create_task(client.ask("GET", "/late", timeout_s=0.5))
        others = await asyncio.gather(*(client.ask("GET", "/") for _ in range(200)))
        assert not late.done() and {other.status for other in others} == {200}
        with pytest.raises(NoAnswer):
            await late

    asked(tmp_path, says, ask)


def test_a_server_that_is_not_there_was_not_asked(tmp_path):
    async def ask():
        client = JobClient(tmp_path / "none", {})
        with pytest.raises(NotReached):
            await client.ask("GET", "/")
        with pytest.raises(NotReached):
            await client.open("POST", "/", body=b"{}")
        await client.close()

    asyncio.run(ask())


@pytest.mark.parametrize("is_awaited", [True, False])
def test_closing_ends_what_is_open(tmp_path, is_awaited):
    """Whether its next part is being waited for or not: it was asked. And later nothing is asked."""

    async def says(_head, _reader, writer):
        writer.write(CHUNKED + b"1\r\na\r\n")
        await writer.drain()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(20)

    async def ask(client):
        answer = await client.open("GET", "/")
        parts = answer.parts()
        assert await anext(parts) == b"a"
        following = asyncio.create_task(anext(parts)) if is_awaited else anext(parts)
        await asyncio.sleep(0.05)
        await client.close()
        for ended in (following, answer.read()):
            with pytest.raises(NoAnswer) as found:
                await ended
            assert not isinstance(found.value, NotReached)
        answer.close()
        with pytest.raises(NotReached):
            await client.ask("GET", "/")

    asked(tmp_path, says, ask)


def test_closing_as_a_wait_runs_out(tmp_path):
    """And once more."""

    async def says(_head, _reader, _writer):
        await asyncio.sleep(20)

    async def ask(client):
        late = asyncio.create_task(client.ask("GET", "/", timeout_s=0.1))
        await asyncio.sleep(0.05)
        [wait] = client._open._waits
        while not wait.expired():
            await asyncio.sleep(0)
        await client.close()
        await client.close()
        with pytest.raises(NoAnswer):
            await late

    asked(tmp_path, says, ask)
