"""Where a server listens, and what a signal does to it. Knows sockets and uvicorn; nothing of what is
served."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from jaxlamina.errors import UserError
from jaxlamina.server.tls import TlsDoor


class DrainingServer(uvicorn.Server):
    """uvicorn's, but a signal begins a drain, and the process is not killed by it afterwards.
    ``last_signal``: the last that came, or 0. ``tls``: its port takes HTTPS."""

    def __init__(
        self, config: uvicorn.Config, drain: Callable[[], None], tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(config)
        self._drain, self._tls = drain, tls
        self.last_signal = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None or sockets is None:
            return await super().startup(sockets)
        await super().startup([])
        kind: Any = self.config.http_protocol_class  # of `connections.protocol`
        of_uvicorn = {"server_state": self.server_state, "app_state": self.lifespan.state}
        make = partial(kind, config=self.config, **of_uvicorn)
        limits: dict[str, Any] = {"timeout_s": kind.timeout_s, "most": kind.most}
        for listener in sockets:
            listener.listen(self.config.backlog)
            n_open = self.server_state.connections.__len__
            self.servers.append(TlsDoor(listener, self._tls, make, n_open=n_open, **limits))  # type: ignore[arg-type]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.last_signal = sig
        self._drain()


def bound(host: str, port: int) -> socket.socket:
    """A socket at host and port, 0 for any free one, that does not listen yet. `UserError` if it cannot be
    had."""
    with contextlib.ExitStack() as undone:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # Said to be TCP, or asyncio would leave Nagle's algorithm on: 40 ms for what is written in two.
            found = undone.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError as error:
            raise UserError(f"cannot serve at {host}:{port}: {error}") from None
        undone.pop_all()
    return found


@contextlib.contextmanager
def bound_at(path: str) -> Iterator[socket.socket]:
    """A Unix socket at ``path``, in place of one that somebody has left there; it is removed afterwards.
    `UserError` if it cannot be had."""
    with socket.socket(socket.AF_UNIX) as found:
        try:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(path).st_mode):
                    os.remove(path)
            found.bind(path)
            os.chmod(path, 0o666)  # as uvicorn has it
        except OSError as error:
            raise UserError(f"cannot serve at {path}: {error}") from None
        try:
            yield found
        finally:
            Path(path).unlink(missing_ok=True)


def door(uds: str | None, host: str, port: int) -> contextlib.AbstractContextManager[socket.socket]:
    """`bound_at` where there is a path, else `bound`."""
    return bound_at(uds) if uds else bound(host, port)


def shown(listener: socket.socket, is_tls: bool = False) -> str:
    """Its address as a URL, or as unix:PATH."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
