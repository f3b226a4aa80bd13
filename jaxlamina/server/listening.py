"""Where a server listens, and what a signal does to it. Knows sockets and uvicorn; nothing of what is
served."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from jaxlamina.errors import UserError


class DrainingServer(uvicorn.Server):
    """uvicorn's, but a signal begins a drain, and the process is not killed by it afterwards."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._drain()


def bound(host: str, port: int) -> socket.socket:
    """A socket at host and port, 0 for any free one, that does not listen yet. `UserError` if it cannot be
    had."""
    with contextlib.ExitStack() as undone:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            found = undone.enter_context(socket.socket(family, socket.SOCK_STREAM))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError as error:
            raise UserError(f"cannot serve at {host}:{port}: {error}") from None
        undone.pop_all()
    return found


def shown(listener: socket.socket) -> str:
    """Its address as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
