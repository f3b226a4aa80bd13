"""Rank 0's end of the control channel: forms the group, speaks to each rank, tells all of the first bad news.

Knows nothing of what the messages ask for, and nothing of devices.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxlamina.control.admission import Config, first_difference, read_hello, why_no_rank
from jaxlamina.control.connection import Connection, ConnectionEnded, read_body
from jaxlamina.control.faults import LAST_WORDS_S, ControlError, Telling
from jaxlamina.control.frames import LARGEST_BYTES, FrameError, FrameReader, frame
from jaxlamina.control.messages import (
    AnyHello,
    Bye,
    Fault,
    Hello,
    M,
    Message,
    MessageError,
    Refused,
    Welcome,
    decode_any_hello,
    encode,
)
from jaxlamina.control.sockets import address_text, listen
from jaxlamina.errors import UserError

_HELLO_BYTES = 1 << 20  # of a peer that is not known yet; a Hello has a few hundred
_HELLO_S = 10.0
_ACCEPT_AGAIN_S = 0.1


@dataclass
class _Member:
    """An attention rank as rank 0 sees it. None in the inbox: look again whether the group goes on."""

    hello: Hello
    connection: Connection
    inbox: queue.SimpleQueue[Message | None] = field(default_factory=queue.SimpleQueue)

    @property
    def place(self) -> str:
        return _place(self.hello)


class ControlServer:
    """Rank 0's end. Listens from the start, so that ranks can come while rank 0 is still busy; then ``gather``.

    - ``address``: "host:port", of this host. Port 0 takes any that is free; ``self.address`` then has it.
    - ``config``, ``versions``: what every rank must have been started with.
    - ``describe(rank)``: as in "rank 2 (attention worker 1)".
    - ``on_fault(rank, line)``: called once at most, from a thread of the channel, with the first bad news after
      ``gather``; the others have been told by then.

    ``UserError`` where ``address`` cannot be listened on.
    """

    def __init__(
        self,
        address: str,
        n_ranks: int,
        config: Config,
        *,
        describe: Callable[[int], str],
        versions: Mapping[str, str],
        heartbeat_s: float = 5.0,
        on_fault: Callable[[int, str], None],
        epoch: int = 0,
    ) -> None:
        self.n_ranks = n_ranks
        self.epoch = epoch
        self._config = dict(config)
        self._versions = dict(versions)
        self._describe = describe
        self._heartbeat_s = heartbeat_s
        self._on_fault = on_fault
        self._changed = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._is_formed = False
        self._is_closing = False
        self._fault: tuple[int, str] | None = None
        self._telling = Telling()
        self._strangers: list[str] = []
        self._why_closing: str | None = None
        self._greeters: set[threading.Thread] = set()  # who have not yet taken in, or turned away, who came
        self._listener = listen(address)
        self._listener.setblocking(False)
        self._woken, self._waker = socket.socketpair()
        self.address = address_text(self._listener.getsockname())
        self._acceptor = threading.Thread(target=self._accept, name="control-accept", daemon=True)
        self._acceptor.start()

    def gather(self, deadline_s: float) -> None:
        """Returns when every rank from 1 on is there and has been welcomed.

        `UserError`, after every rank that did come has been told the same, if some have not come after
        ``deadline_s``, or one came that cannot take part (configuration, versions, a number that is taken or does
        not exist), or ended again.
        """
        until = time.monotonic() + deadline_s
        with self._changed:
            while self._fault is None and len(self._members) < self.n_ranks - 1:
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    break
            if self._fault is None and len(self._members) == self.n_ranks - 1:
                self._is_formed = True
                line = ""
            else:
                line = self._fault[1] if self._fault is not None else self._not_started(deadline_s)
        if line:
            self.close(fault=line, wait_s=LAST_WORDS_S)
            raise UserError(line)
        try:
            self.broadcast(Welcome(self.epoch))
        except ControlError as error:
            raise UserError(error.line) from error

    def send(self, rank: int, message: Message) -> None:
        """Waits only while the rank is slow to read. `ControlError` if the group cannot go on."""
        self._send(rank, frame(encode(message)))

    def broadcast(self, message: Message) -> None:
        """``send`` to every rank, put into bytes once."""
        pieces = frame(encode(message))
        for rank in sorted(self._members):
            self._send(rank, pieces)

    def receive(self, rank: int, kind: type[M], deadline_s: float) -> M:
        """The next message of ``rank``, which must be a ``kind``.

        `ControlError` if it is another, if none came within ``deadline_s``, or as soon as any rank has failed or gone.
        Messages of a rank are for one thread to receive.
        """
        until = time.monotonic() + deadline_s
        member = self._members[rank]
        while True:
            self._raise_fault()
            try:
                message = member.inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                line = (
                    f"{self._describe(rank)} sent no {kind.__name__} within {deadline_s:g} s ({member.place})"
                )
                raise ControlError(rank, line) from None
            if isinstance(message, kind):
                return message
            if message is not None:
                name = type(message).__name__
                raise ControlError(rank, f"{self._describe(rank)} sent {name} instead of {kind.__name__}")

    def close(self, fault: str | None = None, wait_s: float = 5.0) -> None:
        """Sends everyone home, and waits at most ``wait_s`` for them to go.

        ``fault``: the line of why rank 0 cannot go on, where that is why; the others get it instead of a Bye.
        """
        with self._changed:
            if self._is_closing:
                return
            self._is_closing, self._why_closing = True, fault
            members = list(self._members.values())
            self._wake()
        last: Message
        if not self._is_formed:
            last = Refused(fault or f"{self._describe(0)} ended before all ranks had started")
        else:
            last = Bye() if fault is None else Fault(0, fault)
        self._waker.close()  # wakes the acceptor, which takes in whoever has connected
        self._acceptor.join(LAST_WORDS_S)
        _say(members, last)
        until = time.monotonic() + LAST_WORDS_S
        for greeter in list(self._greeters):  # the process may end right after, and with it what they say
            greeter.join(max(0.0, until - time.monotonic()))
        until = time.monotonic() + wait_s
        for member in members:
            member.connection.wait_ended(max(0.0, until - time.monotonic()))
            member.connection.shut()

    def _send(self, rank: int, pieces: Sequence[bytes]) -> None:
        self._raise_fault()
        member = self._members[rank]
        try:
            member.connection.send_frame(pieces)
        except ConnectionEnded as error:
            member.connection.shut()
            member.connection.wait_ended(LAST_WORDS_S)  # the reader may know more: a Fault, say
            self._raise_fault()
            line = f"nothing can be sent to {self._describe(rank)}: {error} ({member.place})"
            raise ControlError(rank, line) from error

    def _raise_fault(self) -> None:
        if self._fault is not None:
            self._telling.wait(LAST_WORDS_S)
            raise ControlError(*self._fault)
        if self._is_closing:
            raise ControlError(0, f"{self._describe(0)} has closed the control channel")

    # Before the group is formed

    def _accept(self) -> None:
        """Until `close`; whoever has connected by then is still heard, and told why."""
        with self._listener, self._woken, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                selector.select()
                is_closing = self._is_closing
                try:
                    sock, peer = self._listener.accept()
                except OSError as error:
                    if is_closing:
                        return
                    if not isinstance(error, BlockingIOError):
                        time.sleep(_ACCEPT_AGAIN_S)  # too many open files, say: ranks go on trying
                    continue
                sock.setblocking(True)
                greeter = threading.Thread(
                    target=self._greet, args=(sock, peer), name="control-reader", daemon=True
                )
                self._greeters.add(greeter)
                greeter.start()

    def _greet(self, sock: socket.socket, peer: tuple) -> None:
        """Reads who it is; then this thread is that rank's reader."""
        try:
            connection = self._heard(sock, peer)
        finally:
            self._greeters.discard(threading.current_thread())
        if connection is not None:
            connection.run()

    def _heard(self, sock: socket.socket, peer: tuple) -> Connection | None:
        """The connection of a rank that is taken in. Others are told why not."""
        reader = FrameReader(_HELLO_BYTES)
        try:
            body = read_body(sock, reader, _HELLO_S)
            claimed = decode_any_hello(body)
        except (OSError, FrameError, MessageError) as error:
            # Anyone can connect (a port scan, a load balancer's probe): that must not end the job.
            sock.close()
            with self._changed:
                self._strangers.append(f"{address_text(peer)} ({error})")
            return None
        reader.largest_bytes = LARGEST_BYTES
        with self._changed:
            verdict = self._why_refuse(claimed, body)
            if isinstance(verdict, Hello):
                return self._admit(sock, reader, verdict)
            if not self._is_formed and self._fault is None:
                self._fault = (claimed.rank, verdict)
                self._wake()
        _refuse(sock, verdict)
        return None

    def _why_refuse(self, claimed: AnyHello, body: bytes | bytearray) -> str | Hello:
        """The line of why this process cannot be that rank; or its Hello."""
        if self._fault is not None or self._is_closing:
            return self._fault[1] if self._fault else self._why_closing or f"{self._describe(0)} is ending"
        reason = why_no_rank(claimed, self.n_ranks, self._describe)
        if reason is not None:
            return reason
        who = self._describe(claimed.rank)
        hello = read_hello(body, who)
        if isinstance(hello, str):
            return hello
        if claimed.rank in self._members:
            return (
                f"two processes were started as {who}: {self._members[claimed.rank].place} and {_place(hello)}; give "
                "every process a rank of its own, and end what is left of an older job"
            )
        return first_difference(hello, self._config, self._versions, self._describe) or hello

    def _admit(self, sock: socket.socket, reader: FrameReader, hello: Hello) -> Connection:
        connection = Connection(
            sock,
            reader,
            heartbeat_s=self._heartbeat_s,
            on_message=lambda message: self._take(hello.rank, message),
            on_end=lambda why: self._ended(hello, why),
        )
        self._members[hello.rank] = _Member(hello, connection)
        self._changed.notify_all()
        return connection

    def _not_started(self, deadline_s: float) -> str:
        missing = [self._describe(rank) for rank in range(1, self.n_ranks) if rank not in self._members]
        line = (
            f"{' and '.join(missing)} did not start within {deadline_s:g} s: nothing came to {self.address}"
        )
        if self._strangers:
            line += f", but for {'; '.join(self._strangers[:3])}"
        return f"{line}; see what {'it' if len(missing) == 1 else 'they'} printed, and whether that address is reached"

    # From the readers' threads

    def _take(self, rank: int, message: Message) -> None:
        if isinstance(message, Fault):
            self._bad_news(message.rank, message.line, rank)
        else:
            self._members[rank].inbox.put(message)

    def _ended(self, hello: Hello, why: str) -> None:
        who = self._describe(hello.rank)
        self._bad_news(hello.rank, f"{who} has gone: it {why} ({_place(hello)})", hello.rank)

    def _bad_news(self, rank: int, line: str, sender: int) -> None:
        with self._changed:
            if self._fault is not None or self._is_closing:
                return
            self._fault = (rank, line)
            others = [member for r, member in self._members.items() if r != sender]
            is_formed = self._is_formed
        with self._telling:
            if is_formed:  # before, gather says it
                _say(others, Fault(rank, line))
                self._on_fault(rank, line)
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        for member in self._members.values():
            member.inbox.put(None)


def _place(hello: Hello) -> str:
    return f"process {hello.pid} on {hello.host}"


def _say(members: list[_Member], message: Message) -> None:
    """Last words: to each that takes them in time."""
    for member in members:
        try:
            member.connection.send(message, LAST_WORDS_S)
        except ConnectionEnded:
            pass  # its reader says why


def _refuse(sock: socket.socket, reason: str) -> None:
    try:
        sock.settimeout(LAST_WORDS_S)
        sock.sendall(b"".join(frame(encode(Refused(reason)))))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 12):
            pass  # closed with something unread, TCP would take the reason back
    except OSError:
        pass  # it has gone on its own
    finally:
        sock.close()
