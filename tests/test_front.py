"""What a supervisor passes on to its job's server, and what of the answer: by real connections, with a job of a
few lines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from types import SimpleNamespace

import pytest
import uvicorn

from jaxlamina.process.memory_reserve import MemoryReserve
from jaxlamina.server.api_keys import ApiKeys
from jaxlamina.supervisor.front import Front
from jaxlamina.supervisor.job_client import JobClient
from jaxlamina.supervisor.run import _is_news

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def exchanged(tmp_path, asked, says):
    """What comes of the bytes ``asked`` at a front whose job answers with the bytes ``says``, if any; and what
    the job was asked, or None."""
    seen = []

    async def serve(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(says)
        if says:
            writer.write_eof()
        await reader.read()
        writer.close()

    async def run():
        at = tmp_path / "socket"
        job = SimpleNamespace(client=JobClient(at, {}), given_up="", was_ready=True, ends=lambda: False)
        job.ready = lambda *_: asyncio.sleep(0, job)
        keys = ApiKeys("secret", None)
        front = Front(job, None, None, MemoryReserve(2**20), None, keys, of_this_host=False)
        app = front.app(lambda _: contextlib.nullcontext(), max_body_bytes=1000, dashboard=False)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        serving = asyncio.create_task(server.serve([listener]))
        async with asyncio.timeout(20), await asyncio.start_unix_server(serve, at):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(asked)
            found = await reader.read()
            writer.close()
            server.should_exit = True
            await serving
            await job.client.close()
        return found

    return asyncio.run(run()), next(iter(seen), None)


def head(line, *headers):
    return "\r\n".join([f"{line} HTTP/1.1", "Connection: close", *headers, "", ""]).encode()


@pytest.mark.parametrize(
    ("line", "host", "passed_on"),
    [
        ("GET /x?q=%2F?", "a/v1/models?", "GET /x?q=%2F?"),
        ("POST /x%3F", "a/pause?", "POST /x%3F"),
        ("GET /v1%3F/../a%3Fb%23c%5Cd%2541", "a", "GET /v1%3F/../a%3Fb%23c%5Cd%2541"),
        ("GET //v1/models", "a", "GET //v1/models"),
        ("GET /v1/models", "a/x?", None),
        ("POST /pause", "a/x?", None),
    ],
)
def test_what_the_gate_has_seen_is_what_goes_on(tmp_path, line, host, passed_on):
    """Without a key."""
    found, seen = exchanged(tmp_path, head(line, f"Host: {host}", "Content-Length: 0"), OK)
    if passed_on is None:
        assert b" 401 " in found[:20] and seen is None
    else:
        assert found.endswith(b"ok") and seen.startswith(f"{passed_on} HTTP/1.1\r\n".encode())


def test_a_body_in_pieces_that_is_too_large_is_refused(tmp_path):
    pieces = b"1f4\r\n%s\r\n" % (b"x" * 500) * 3 + b"0\r\n\r\n"
    asked = head("POST /x", "Host: a", "Transfer-Encoding: chunked") + pieces
    found, _ = exchanged(tmp_path, asked, b"")
    assert b" 413 " in found[:20] and b"at most 1000 bytes" in found


def test_where_an_answer_is_else_is_said_without_the_jobs_address(tmp_path):
    says = b"HTTP/1.1 307 Else\r\nLocation: http://job/x?a=b\r\nContent-Length: 0\r\n\r\n"
    found, _ = exchanged(tmp_path, head("GET /x/?a=b", "Host: a"), says)
    assert b" 307 " in found[:20] and b"\r\nlocation: /x?a=b\r\n" in found.lower()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_answer_that_breaks_off_has_no_end(tmp_path, caplog, is_chunked):
    """And one line in the log."""
    log = logging.getLogger("uvicorn.error")
    how = b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n" if is_chunked else b"Content-Length: 9\r\n\r\nabc"
    log.addFilter(_is_news)
    try:
        found, _ = exchanged(tmp_path, head("GET /x", "Host: a"), b"HTTP/1.1 200 OK\r\n" + how)
    finally:
        log.removeFilter(_is_news)
    assert found.endswith(b"3\r\nabc\r\n" if is_chunked else b"\r\n\r\nabc")
    [said] = [record for record in caplog.records if record.levelno > logging.INFO]
    assert said.getMessage().startswith("an answer that was passed on broke off: ") and not said.exc_info
