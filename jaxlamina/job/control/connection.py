"""One peer over one TCP connection: a thread that reads, a thread that keeps it alive, sends from any thread.

Whatever ends a connection (closed, broken, silent, or bytes that are no message of this peer's) is told once,
as text. Knows nothing of ranks or of what a message means, but for Ping and Pong.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable

from jaxlamina.job.control.frames import FrameError, FrameReader
from jaxlamina.job.control.messages import Message, MessageError, Ping, Pong, decode, encode
from jaxlamina.job.control.seals import Seals
from jaxlamina.job.tls import TlsSocket

SILENT_AFTER = 3
"""A peer of which nothing was heard for so many heartbeats has gone: its host, its network or its process."""

_CHUNK_BYTES = 1 << 16


class ConnectionEnded(ConnectionError):
    """What was to be sent can no longer be sent."""


class Connection:
    """``run`` in a thread of its own; it returns when the connection has ended, after ``on_end(why)``.

    ``on_message`` gets every message but Ping and Pong, in the thread of ``run``. ``why`` goes on from "it":
    "closed its control connection". Both ends know each other by ``seals`` already. The peer answers our
    Pings and we answer its, so the two need not agree on ``heartbeat_s`` (seconds between our Pings).
    """

    def __init__(
        self,
        sock: socket.socket,
        reader: FrameReader,
        seals: Seals,
        *,
        heartbeat_s: float,
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._socket = sock
        self._reader = reader
        self._seals = seals
        self._heartbeat_s = heartbeat_s
        self._silence_s = SILENT_AFTER * heartbeat_s
        self._on_message = on_message
        self._on_end = on_end
        self._sending = threading.Lock()
        self._pong_is_due = threading.Event()
        self._stopped = False
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def epoch(self) -> int:
        """Of the last message that came."""
        return self._seals.unsealing.epoch

    def run(self) -> None:
        self._thread = threading.current_thread()
        beat = threading.Thread(target=self._beat, name="control-heartbeat", daemon=True)
        beat.start()
        try:
            why = self._read()
            self._stop()
            self._on_end(why)
        finally:
            self._stop()
            with self._sending:  # nobody may be writing to a descriptor that is given away
                self._socket.close()
            self._has_ended.set()

    def send(self, message: Message, wait_s: float | None = None) -> None:
        """`MessageError` or `FrameError` for what cannot be sent, `ConnectionEnded` if the peer is no longer
        there.

        It waits as long as the peer goes on reading; with ``wait_s`` no longer than that, and then the
        connection is given up if part of the message has left.
        """
        self.send_body(encode(message), wait_s)

    def send_body(self, body: bytes, wait_s: float | None = None) -> None:
        """As ``send``, of a message that is encoded already."""
        until = None if wait_s is None else time.monotonic() + wait_s
        if not self._sending.acquire(timeout=-1 if wait_s is None else wait_s):
            raise ConnectionEnded(f"it took nothing for {wait_s:g} s")
        try:
            for i, piece in enumerate(self._seals.sealing.frame(body)):
                self._send_all(memoryview(piece), until, has_begun=i > 0)
            self._seals.sealing.sent()
        finally:
            self._sending.release()

    def shut(self) -> None:
        """Ends the connection, if it has not ended yet. Does not wait."""
        self._stop()

    def wait_ended(self, seconds: float) -> bool:
        """Whether ``run`` has come to its end, after at most ``seconds``; at once in the thread of
        ``run``."""
        if threading.current_thread() is self._thread:
            return False
        return self._has_ended.wait(seconds)

    def _send_all(self, rest: memoryview, until: float | None, has_begun: bool) -> None:
        size = len(rest)
        poller = select.poll()
        while rest:
            if self._stopped:
                raise ConnectionEnded("the connection has ended")
            try:
                rest = rest[self._socket.send(rest) :]
                continue
            except BlockingIOError:
                pass
            except OSError as error:
                raise ConnectionEnded(error.strerror or str(error)) from error
            wait_s = self._silence_s
            if until is not None:
                wait_s = min(wait_s, until - time.monotonic())
            poller.register(self._socket, select.POLLOUT)
            if wait_s <= 0 or not poller.poll(wait_s * 1000):
                if has_begun or len(rest) < size or isinstance(self._socket, TlsSocket):
                    self._stop()  # half a message has left: nothing can follow it
                raise ConnectionEnded("it does not take what is sent")

    def _stop(self) -> None:
        self._stopped = True
        self._pong_is_due.set()
        try:
            # Not close: the threads that wait on this descriptor are to wake up, and it must not be another's
            # meanwhile.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    def _beat(self) -> None:
        """Pings and Pongs. A thread of its own: whoever reads must never wait for someone who is sending."""
        next_ping = time.monotonic() + self._heartbeat_s
        while True:
            is_pong = self._pong_is_due.wait(max(0.0, next_ping - time.monotonic()))
            self._pong_is_due.clear()
            if self._stopped:
                return
            if not is_pong:
                next_ping = time.monotonic() + self._heartbeat_s
            try:
                self.send(Pong() if is_pong else Ping())
            except ConnectionEnded:
                pass  # why it has ended, if it has, is for the reader to say

    def _read(self) -> str:
        """Reads until the connection ends; returns why."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        heard = time.monotonic()
        while True:
            try:
                for frame in self._reader.frames():
                    self._take(decode(self._seals.unsealing.body(frame)))
            except (FrameError, MessageError) as error:
                return f"sent what cannot be read ({error})"
            asked = time.monotonic()
            wait_s = max(0.0, heard + self._silence_s - asked)
            if not (self._has_decrypted() or poller.poll(wait_s * 1000)):
                if time.monotonic() > asked + wait_s + self._heartbeat_s:
                    heard = (
                        time.monotonic()
                    )  # it is we who were stopped (Ctrl-Z): the peer may have been as well
                    continue
                return f"was silent for {self._silence_s:g} s"
            try:
                n_bytes = self._receive()
            except BlockingIOError:
                continue
            except OSError as error:
                return f"lost its control connection ({error.strerror or error})"
            if not n_bytes:
                where = "" if self._reader.is_between_frames else " in the middle of a message"
                return f"closed its control connection{where}"
            heard = time.monotonic()

    def _has_decrypted(self) -> bool:
        """Whether there is something to read that is not in the socket any more."""
        return isinstance(self._socket, TlsSocket) and self._socket.pending() > 0

    def _receive(self) -> int:
        space = self._reader.space()
        if space is not None:
            n_bytes = self._socket.recv_into(space)
            self._reader.filled(n_bytes)
            return n_bytes
        data = self._socket.recv(_CHUNK_BYTES)
        self._reader.feed(data)
        return len(data)

    def _take(self, message: Message) -> None:
        if isinstance(message, Ping):
            self._pong_is_due.set()
        elif not isinstance(message, Pong):
            self._on_message(message)
