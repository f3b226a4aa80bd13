"""The client that reaches a job's server, by the socket that it listens at.

Every token of every stream comes this way, so what parses is C. Knows HTTP and a socket; nothing of jobs and
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
from yarl import URL

_CONNECT_S = 5.0
OF_JOB = "http://job"
"""Before the path in what the server takes for its own address."""
_MOST_OF_HEADERS = 2**17  # bytes of a line: nobody but the job makes them
_OURS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # that aiohttp would add

Headers = Mapping[str, str] | Iterable[tuple[str, str]]


class NoAnswer(Exception):
    """The server cannot be reached, answers too late, or its answer broke off."""


class NotReached(NoAnswer):
    """It was never asked."""


class Said(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes


class JobAnswer:
    """One that comes: its ``status`` and ``headers`` are there. To be closed."""

    def __init__(self, found: aiohttp.ClientResponse, open_until_closed: _OpenUntilClosed) -> None:
        self._found, self.status, self.headers = found, found.status, found.headers
        self._open = open_until_closed

    async def parts(self) -> AsyncIterator[bytes]:
        """Its bytes, as they come. `NoAnswer`."""
        while True:
            async with self._open(if_closed=NoAnswer):
                part = await self._found.content.readany()
            if not part:
                return
            yield part

    async def read(self) -> bytes:
        """All of it. `NoAnswer`."""
        async with self._open(if_closed=NoAnswer):
            return await self._found.read()

    def close(self) -> None:
        """What has not come is not waited for."""
        self._found.close()


class JobClient:
    """``headers`` go with whatever is asked. Each answer has a connection of its own: one that is used again
    may have been closed just then. That is not said to the server: it would close the connection after an
    answer that it gives before it has read what was asked, and aiohttp does not read an answer once it cannot
    write any more. To be closed, once anything was asked."""

    def __init__(self, socket: Path, headers: Mapping[str, str]) -> None:
        self._socket, self._headers = socket, headers
        self._open = _OpenUntilClosed()

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Belongs to the event loop that asks first."""
        return aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self._socket), limit=0, force_close=True),
            headers={**self._headers, "Connection": "keep-alive"},  # see JobClient
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),  # a step may take long
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_OURS,
            auto_decompress=False,
            max_line_size=_MOST_OF_HEADERS,
            max_field_size=_MOST_OF_HEADERS,
        )

    async def ask(
        self,
        method: str,
        path: str,
        query: str = "",
        *,
        body: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Said:
        """``body``: JSON. `NoAnswer`."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        async with (
            self._open(timeout_s),
            self._request(method, path, query, body, headers) as found,
        ):
            return Said(found.status, found.headers, await found.read())

    async def open(
        self,
        method: str,
        path: str,
        query: str = "",
        *,
        body: bytes | AsyncIterable[bytes] | None = None,
        headers: Headers = (),
    ) -> JobAnswer:
        """`NoAnswer`."""
        async with self._open():
            found = await self._request(method, path, query, body, headers)
        return JobAnswer(found, self._open)

    def _request(self, method: str, path: str, query: str, body: Any, headers: Headers) -> Any:
        """aiohttp's: to be awaited, or entered."""
        url = URL(f"{OF_JOB}{quote(path)}{query and '?' + query}", encoded=True)
        return self._session.request(method, url, data=body, headers=headers, allow_redirects=False)

    async def close(self) -> None:
        """Whoever waits for an answer has `NoAnswer`."""
        self._open.close()
        if "_session" in vars(self):
            await self._session.close()


class _OpenUntilClosed:
    """A block of it waits until `close`, or for ``timeout_s``: aiohttp would have those wait for ever whose
    connection its session closes. What the block raises comes out as `NoAnswer`, where it means that."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()
        self._is_closed = False

    @asynccontextmanager
    async def __call__(
        self, timeout_s: float | None = None, *, if_closed: type[NoAnswer] = NotReached
    ) -> AsyncIterator[None]:
        if self._is_closed:
            raise if_closed("the client was closed")
        try:
            async with asyncio.timeout(timeout_s) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except aiohttp.ClientConnectorError as error:
            raise NotReached(str(error) or type(error).__name__) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NoAnswer(str(error) or type(error).__name__) from error

    def close(self) -> None:
        self._is_closed = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)
