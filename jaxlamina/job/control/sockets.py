"""Listening and connecting, with errors that a user can act on. Knows nothing of what is said."""

from __future__ import annotations

import errno
import socket
import time

from jaxlamina.errors import UserError

_RETRY_S = 0.1
_ATTEMPT_S = 5.0


def parse_address(address: str) -> tuple[str, int]:
    """ "host:port" or "[IPv6]:port". `UserError` otherwise."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise UserError(f"control address {address!r} must be HOST:PORT, as in 10.0.0.1:7070")
    return host, int(port)


def address_text(sockaddr: tuple) -> str:
    """A socket's own or peer's name as "host:port"."""
    host, port = sockaddr[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str) -> socket.socket:
    """A listening socket. `UserError` for an address that is taken, unknown or another host's."""
    host, port = parse_address(address)
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(sockaddr, family=family)
    except socket.gaierror as error:
        raise UserError(
            f"control address {address}: host {host} is not known here ({error.strerror})"
        ) from error
    except OSError as error:
        why = {
            errno.EADDRINUSE: "another process listens there: end it (an older job?) or choose another port",
            errno.EADDRNOTAVAIL: "it is no address of this host: name the host that rank 0 runs on",
        }.get(error.errno or 0, error.strerror)
        raise UserError(f"control address {address} cannot be listened on: {why}") from error


def connect(address: str, deadline_s: float, whose: str) -> socket.socket:
    """A connection to ``whose`` address, tried again and again for ``deadline_s``: it may start later than
    we.

    A name that is not known yet is tried again too: where pods get theirs when they start, that is how it
    begins. `UserError` when the deadline has passed.
    """
    host, port = parse_address(address)
    until = time.monotonic() + deadline_s
    why = "no time was given"
    while (rest_s := until - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((host, port), timeout=min(rest_s, _ATTEMPT_S))
            if sock.getsockname() != sock.getpeername():
                return sock
            sock.close()  # nobody listened on a port of this host, and TCP connected us to ourselves
            why = "nothing listens there"
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(min(_RETRY_S, max(0.0, until - time.monotonic())))
    raise UserError(
        f"{whose} was not reached at {address} within {deadline_s:g} s ({why}): it must be running, and the "
        f"address must be one of its host that other hosts reach"
    )
