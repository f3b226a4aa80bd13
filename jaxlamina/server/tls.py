"""HTTPS at a server's port: its certificate, and connections until their clients have shaken hands.

Connections are taken in here and not by uvicorn, which knows one only after its handshake: any number could
wait for theirs, for a minute each. Knows asyncio and certificates; nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from jaxlamina.errors import UserError
from jaxlamina.process.certificates import load_certificate

_ACCEPT_AGAIN_S = 0.1
_log = logging.getLogger("uvicorn.error")


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Of `Settings.ssl_certfile` and `Settings.ssl_keyfile`; None without them. ``UserError`` for files that
    cannot be used."""
    if certificate is None:
        if key is not None:
            raise UserError("--ssl-keyfile goes with --ssl-certfile: give both")
        return None
    for name, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if path is not None and not path.is_file():
            raise UserError(f"{name} {path}: there is no such file")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    given = f"--ssl-certfile {certificate}" + ("" if key is None else f" and --ssl-keyfile {key}")
    try:
        load_certificate(context, certificate, key, given)
    except OSError as error:
        raise UserError(f"--ssl-certfile, --ssl-keyfile: {error.strerror}") from None
    return context


class TlsDoor:
    """What `asyncio.Server` is to a plain port: takes in connections at ``listener``, and gives each a
    protocol of ``make`` once its handshake is done.

    ``timeout_s``: for a handshake, and for a goodbye. ``n_open()``: connections beyond handshakes; one that
    would be more than ``most`` with those is closed, since nobody could read why.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.Protocol],
        *,
        timeout_s: float,
        most: int,
        n_open: Callable[[], int],
    ) -> None:
        self._listener, self._context, self._make = listener, context, make
        self._timeout_s, self._most, self._n_open = timeout_s, most, n_open
        self._shaking: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._shaking):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._shaking, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.error("no connection can be taken in: %s", error)  # too many open files, say
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if self._n_open() + len(self._shaking) >= self._most:
                sock.close()
                continue
            task = loop.create_task(self._shake(sock))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake(self, sock: socket.socket) -> None:
        with suppress(OSError):  # of TLS, too, and of the time
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                sock,
                ssl=self._context,
                ssl_handshake_timeout=self._timeout_s,
                ssl_shutdown_timeout=self._timeout_s,
            )
