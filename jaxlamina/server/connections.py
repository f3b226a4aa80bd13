"""Connections that cost nothing to whoever holds them are bounded: how many there are, and how long each
waits for its client.

A subclass of uvicorn's protocol, whichever of its two parsers it has. Knows connections; nothing of what is
asked.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from jaxlamina.server.errors import ApiError, JsonResponse

_LEAST_RATE = 1024  # bytes per second of a body that comes in pieces, beyond the timeout
_OTHER_FILES = 128  # that a server has open beside its connections
_CHECKS = 4  # of a connection within its timeout
_Protocol: Any = AutoHTTPProtocol


def protocol(most: int, timeout_s: float, *, files_each: int = 1) -> type[asyncio.Protocol]:
    """For `uvicorn.Config`: at most ``most`` connections, or as many as the process may have files for, where
    a request takes ``files_each``; ``timeout_s`` as `Settings.client_timeout`."""
    files = _file_limit(most * files_each + _OTHER_FILES) - _OTHER_FILES
    bound = min(most, files // files_each)
    limits = {"most": max(1, bound), "timeout_s": timeout_s}
    return type("Connection", (_Connection,), limits)


def _file_limit(wanted: int) -> int:
    """How many files the process may have open; more than before if it may say so itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted or soft == resource.RLIM_INFINITY:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


class _Connection(_Protocol):  # type: ignore[misc]
    """Closed when its client keeps it waiting: for a whole head, for a body that comes at all, for taking in
    an answer. Between two requests uvicorn's own, shorter time holds; while an answer is made there is
    none."""

    most: int
    timeout_s: float

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._n_received = self._n_resumed = 0
        self._phase: Any = None
        self._check: asyncio.TimerHandle | None = None
        if len(self.connections) > self.most:
            transport.write(_full(self.most))
            transport.close()
        else:
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._n_received += len(data)
        super().data_received(data)

    def resume_writing(self) -> None:
        self._n_resumed += 1
        super().resume_writing()

    def _look(self) -> None:
        now, phase = self.loop.time(), self._waits_for()
        if phase != self._phase:
            self._phase, self._since, self._received_before = phase, now, self._n_received
        if phase is not None and self._is_late(now - self._since, phase[0]):
            self.transport.abort()
            return
        self._check = self.loop.call_later(self.timeout_s / _CHECKS, self._look)

    def _waits_for(self) -> tuple[Any, ...] | None:
        """What the client is to do next."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return "head", id(cycle)
        if self.flow.write_paused:
            return "take in", self._n_resumed
        if cycle.more_body and not self.flow.read_paused:
            return "body", id(cycle)
        return None

    def _is_late(self, waited_s: float, what: str) -> bool:
        if waited_s < self.timeout_s:
            return False
        n_bytes = self._n_received - self._received_before
        return what != "body" or n_bytes <= _LEAST_RATE * (waited_s - self.timeout_s)


def _full(most: int) -> bytes:
    error = ApiError(
        503,
        f"{most} connections are open already: try again later",
        type="service_unavailable",
        code="service_unavailable",
    )
    body = bytes(JsonResponse(error.body()).body)
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body
