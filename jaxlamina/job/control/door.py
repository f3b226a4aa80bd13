"""Who connects to rank 0, until it is known who that is: one thread for all, however many they are.

Anyone who reaches the port can connect. Whoever does gets a Challenge, and has some seconds and 64 KiB for a
Hello; of more than `MOST_GUESTS` at once the one that has said nothing for longest goes. Knows Challenge and
Hello; whether a Hello is a rank's is for others.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxlamina.job.control.faults import LAST_WORDS_S
from jaxlamina.job.control.frames import Frame, FrameError, FrameReader, frame
from jaxlamina.job.control.messages import (
    PROTOCOL,
    AnyHello,
    Challenge,
    MessageError,
    decode_any_hello,
    encode,
)
from jaxlamina.job.control.seals import new_nonce
from jaxlamina.job.control.sockets import address_text
from jaxlamina.job.tls import JobTls, TlsSocket

MOST_GUESTS = 64
HELLO_BYTES = 1 << 16
"""Of a peer that is not known yet; a Hello has about a thousand."""

_HELLO_S = 10.0
_ACCEPT_AGAIN_S = 0.1
_CHUNK_BYTES = 1 << 16


@dataclass
class Guest:
    """``nonce``: of its Challenge; ``until``: it has time to say something."""

    sock: socket.socket
    address: str
    until: float
    reader: FrameReader
    nonce: bytes
    is_leaving: bool = False  # it has been told why it cannot stay


class Door:
    """Hears all that connect to ``listener``, until `close`, in a thread of its own.

    - ``on_hello(guest, claimed, frame)``: takes the socket over and returns None, or returns the frame by
      which the other side is told why not. ``frame`` has the Hello, whose seal nobody has looked at.
    - ``on_stranger(text)``: somebody connected and said nothing that could be answered.
    - ``tls``: by which all is said after the Challenge.
    """

    def __init__(
        self,
        listener: socket.socket,
        on_hello: Callable[[Guest, AnyHello, Frame], bytes | None],
        on_stranger: Callable[[str], None],
        tls: JobTls | None = None,
    ) -> None:
        self._listener, self._on_hello, self._on_stranger = listener, on_hello, on_stranger
        self._tls = tls
        self._guests: dict[socket.socket, Guest] = {}  # the oldest first
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="control-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody comes in any more. Who has connected by now is still heard, for as long as last words take;
        not waited for."""
        self._waker.close()

    def wait_closed(self) -> None:
        self._thread.join(2 * LAST_WORDS_S)

    def _run(self) -> None:
        with self._listener, self._woken, self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ, self._come_in)
            self._selector.register(self._woken, selectors.EVENT_READ, self._close)
            while self._guests or not self._is_closing:
                next_s = min((guest.until for guest in self._guests.values()), default=None)
                wait_s = None if next_s is None else max(0.0, next_s - time.monotonic())
                for key, _ in self._selector.select(wait_s):
                    if isinstance(key.data, Guest):
                        if key.data.sock in self._guests:  # it may have made room for another meanwhile
                            self._hear(key.data)
                    else:
                        key.data()
                now = time.monotonic()
                for guest in [guest for guest in self._guests.values() if guest.until <= now]:
                    self._drop(guest, "it said nothing whole in time")

    def _come_in(self) -> bool:
        """One that waits to, if there is one: the others are heard before the next, so that nobody who has
        said who it is has to make room unheard."""
        try:
            sock, peer = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError:
            time.sleep(_ACCEPT_AGAIN_S)  # too many open files, say: ranks go on trying
            return False
        if len(self._guests) >= MOST_GUESTS:
            self._drop(next(iter(self._guests.values())), f"{MOST_GUESTS} others came after it")
        sock.setblocking(False)
        until, reader, nonce = time.monotonic() + _HELLO_S, FrameReader(HELLO_BYTES), new_nonce()
        challenge = Challenge(PROTOCOL, nonce, tls=self._tls is not None)
        try:
            sock.send(b"".join(frame(encode(challenge))))
            sock = sock if self._tls is None else self._tls.guest(sock)
        except OSError as error:  # it has gone on its own
            sock.close()
            self._on_stranger(f"{address_text(peer)} ({error})")
            return True
        guest = Guest(sock, address_text(peer), until, reader, nonce)
        self._guests[sock] = guest
        self._selector.register(sock, selectors.EVENT_READ, guest)
        return True

    def _close(self) -> None:
        self._is_closing = True
        while len(self._guests) < MOST_GUESTS and self._come_in():
            pass
        for fd in (self._woken, self._listener):
            self._selector.unregister(fd)
        self._listener.close()
        until = time.monotonic() + LAST_WORDS_S
        for guest in self._guests.values():
            guest.until = min(guest.until, until)

    def _hear(self, guest: Guest) -> None:
        try:
            if guest.is_leaving:
                if not socket.socket.recv(guest.sock, _CHUNK_BYTES):  # whatever it is
                    self._drop(guest)
                return
            if isinstance(guest.sock, TlsSocket) and not guest.sock.has_shaken():
                return
            data = guest.sock.recv(_CHUNK_BYTES)
            if not data:
                self._drop(guest, "it closed the connection before it had said who it is")
                return
            guest.reader.feed(data)
            hello = next(guest.reader.frames(), None)
            if hello is None:
                return
            claimed = decode_any_hello(hello.body)
        except BlockingIOError:
            return
        except ssl.SSLError as error:  # OpenSSL has told it
            self._on_stranger(f"{guest.address} (its TLS: {error.reason or error})")
            self._forget(guest)
            self._see_out(guest)
            return
        except (OSError, FrameError, MessageError) as error:
            self._drop(guest, str(error))
            return
        self._forget(guest)
        try:
            why_not = self._on_hello(guest, claimed, hello)
        except OSError:
            guest.sock.close()  # it has gone meanwhile
            return
        if why_not is not None:
            self._tell(guest, why_not)

    def _tell(self, guest: Guest, refused: bytes) -> None:
        """A guest is told to go, and has time to read that: closed with something unread, TCP would take it
        back."""
        try:
            guest.sock.send(refused)
        except OSError:
            guest.sock.close()  # it has gone on its own
            return
        self._see_out(guest)

    def _see_out(self, guest: Guest) -> None:
        try:
            guest.sock.shutdown(socket.SHUT_WR)
        except OSError:
            guest.sock.close()  # it has gone on its own
            return
        guest.is_leaving, guest.until = True, time.monotonic() + LAST_WORDS_S
        self._guests[guest.sock] = guest
        self._selector.register(guest.sock, selectors.EVENT_READ, guest)

    def _drop(self, guest: Guest, why: str | None = None) -> None:
        self._forget(guest)
        guest.sock.close()
        if why is not None and not guest.is_leaving:
            self._on_stranger(f"{guest.address} ({why})")

    def _forget(self, guest: Guest) -> None:
        del self._guests[guest.sock]
        self._selector.unregister(guest.sock)
