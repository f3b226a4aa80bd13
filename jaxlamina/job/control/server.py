"""Rank 0's end of the control channel: forms the group, speaks to each rank, tells all of the first bad news.

Knows nothing of what the messages ask for, and nothing of devices.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from jaxlamina.errors import UserError
from jaxlamina.job.control.admission import Config, Refusal, first_difference, read_hello, why_no_rank
from jaxlamina.job.control.connection import Connection, ConnectionEnded
from jaxlamina.job.control.door import Door, Guest
from jaxlamina.job.control.faults import LAST_WORDS_S, ControlError, Telling
from jaxlamina.job.control.frames import LARGEST_BYTES, Frame, frame
from jaxlamina.job.control.messages import (
    Admitted,
    AnyHello,
    Bye,
    Compiles,
    Computed,
    Fault,
    Hello,
    KeptSoFar,
    M,
    Meets,
    Message,
    Refused,
    Welcome,
    encode,
)
from jaxlamina.job.control.seals import Seals
from jaxlamina.job.control.sockets import address_text, listen
from jaxlamina.job.tls import JobTls

_STRANGERS_SHOWN = 3


@dataclass
class _Member:
    """An attention rank as rank 0 sees it. In the inbox are messages with their epochs; a message None: look
    again whether the group goes on."""

    hello: Hello
    connection: Connection
    inbox: queue.SimpleQueue[tuple[Message | None, int]] = field(default_factory=queue.SimpleQueue)

    @property
    def place(self) -> str:
        return _place(self.hello)


class ControlServer:
    """Rank 0's end. Listens from the start, so that ranks can come while rank 0 is still busy; then
    ``gather``.

    - ``address``: "host:port", of this host. Port 0 takes any that is free; ``self.address`` then has it.
    - ``config``, ``versions``: what every rank must have been started with.
    - ``secret``: of this job. A rank that knows it and cannot take part ends the job before it has begun.
      Anyone else who comes with a Hello that does not fit is turned away alone, and so are all where there is
      no secret (b"").
    - ``tls``: by which ranks connect, where the job has it.
    - ``epoch``: goes with every message from here on. An answer of an earlier one is refused.
    - ``on_refused(line)``: somebody was turned away alone; called a few times at most, from a thread of the
      channel.
    - ``describe(rank)``: as in "rank 2 (attention worker 1)".
    - ``on_fault(rank, line)``: called once at most, from a thread of the channel, with the first bad news
      after ``gather``; the others have been told by then.

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
        on_refused: Callable[[str], None] = lambda line: None,
        secret: bytes = b"",
        tls: JobTls | None = None,
        epoch: int = 0,
    ) -> None:
        self.n_ranks = n_ranks
        self.epoch = epoch
        self._config = dict(config)
        self._versions = dict(versions)
        self._describe = describe
        self._heartbeat_s = heartbeat_s
        self._on_fault, self._on_refused = on_fault, on_refused
        self._secret = secret
        self._changed = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._is_formed = False
        self._is_closing = False
        self._fault: tuple[int, str] | None = None
        self._told: str | None = None  # of the fault, or of why this closes, to those who come now
        self._why_closed = ""
        self._telling = Telling()
        self._strangers: deque[str] = deque(maxlen=_STRANGERS_SHOWN)
        self._n_refused = 0
        listener = listen(address)
        self.address = address_text(listener.getsockname())
        # Of chunks of prompts at a prefill worker's own pace; in the readers' threads.
        self.on_chunk: Callable[[Compiles | Computed], None] = lambda message: None
        self.n_kept: dict[int, int] = {}  # tokens, by rank: what it said last
        self.not_kept: dict[int, deque[KeptSoFar]] = {}  # by rank: what names tokens that are lost
        self.met: set[int] = set()  # ranks that have come to their transport's first exchange
        self._door = Door(listener, self._hear, self._stranger, tls)

    def gather(self, deadline_s: float) -> None:
        """Returns when every rank from 1 on is there and has been welcomed.

        `UserError`, after every rank that did come has been told the same, if some have not come after
        ``deadline_s``, or one came that cannot take part (configuration, versions, a number that is taken or
        does not exist), or ended again.
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

    @property
    def hosts(self) -> list[str]:
        """The name of each rank's host, once all are there."""
        others = [self._members[rank].hello.host for rank in range(1, self.n_ranks)]
        return [socket.gethostname(), *others]

    def send(self, rank: int, message: Message) -> None:
        """Waits only while the rank is slow to read. `ControlError` if the group cannot go on."""
        self._send(rank, encode(message))

    def broadcast(self, message: Message) -> None:
        """``send`` to every rank, put into bytes once."""
        body = encode(message)
        for rank in sorted(self._members):
            self._send(rank, body)

    def receive(self, rank: int, kind: type[M], deadline_s: float) -> M:
        """The next message of ``rank``, which must be a ``kind``.

        `ControlError` if it is another or of an earlier epoch, if none came within ``deadline_s``, or as soon
        as any rank has failed or gone. Messages of a rank are for one thread to receive.
        """
        until = time.monotonic() + deadline_s
        member = self._members[rank]
        while True:
            self._raise_fault()
            try:
                message, epoch = member.inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                line = (
                    f"{self._describe(rank)} sent no {kind.__name__} within {deadline_s:g} s ({member.place})"
                )
                raise ControlError(rank, line) from None
            if message is None:
                continue
            name = type(message).__name__
            if epoch < self.epoch:
                late = f"{name} of epoch {epoch}, and the job is in epoch {self.epoch}"
                raise ControlError(rank, f"{self._describe(rank)} sent {late}")
            if isinstance(message, kind):
                return message
            raise ControlError(rank, f"{self._describe(rank)} sent {name} instead of {kind.__name__}")

    def close(self, fault: str | None = None, wait_s: float = 5.0) -> None:
        """Sends everyone home, and waits at most ``wait_s`` for them to go.

        ``fault``: the line of why rank 0 cannot go on, where that is why; the others get it instead of a Bye.
        """
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._why_closed = fault or f"{self._describe(0)} has closed the control channel"
            members = list(self._members.values())
            self._wake()
        last: Message
        if not self._is_formed:
            last = Refused(fault or f"{self._describe(0)} ended before all ranks had started")
        else:
            last = Bye() if fault is None else Fault(0, fault)
        self._door.close()
        _say(members, last)
        self._door.wait_closed()  # the process may end right after, and with it what is said there
        until = time.monotonic() + wait_s
        for member in members:
            member.connection.wait_ended(max(0.0, until - time.monotonic()))
            member.connection.shut()

    def _send(self, rank: int, body: bytes) -> None:
        self._raise_fault()
        member = self._members[rank]
        try:
            member.connection.send_body(body)
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
            raise ControlError(0, self._why_closed)

    # Before the group is formed

    def _hear(self, guest: Guest, claimed: AnyHello, frame: Frame) -> bytes | None:
        """Takes a rank in; or why not, as a frame for whoever it is."""
        seals = self._proven(guest, claimed, frame)
        with self._changed:
            verdict = self._why_refuse(claimed, frame.body, seals is not None)
            if isinstance(verdict, Hello):
                assert seals is not None
                self._admit(guest, seals, verdict)
                return None
            is_over = self._is_formed or self._is_closing or self._fault is not None
            ends_all = not is_over and seals is not None and bool(self._secret)
            if ends_all:
                self._fault, self._told = (claimed.rank, verdict.known), verdict.told
                self._wake()
        if not (is_over or ends_all):
            self._stranger(f"{guest.address} ({verdict.known})", verdict.known)
        return refused(verdict.told, seals)

    def _proven(self, guest: Guest, claimed: AnyHello, frame: Frame) -> Seals | None:
        """What the connection is sealed by from now on; None if a Hello was not made by one who knows the
        secret, for this connection."""
        return Seals.proven(self._secret, guest.nonce, claimed.nonce, frame, lambda: self.epoch)

    def _stranger(self, text: str, line: str | None = None) -> None:
        """Anyone can connect (a port scan, a load balancer's probe, a rank of another job): that must not end
        this one."""
        with self._changed:
            self._strangers.append(text)
            self._n_refused += line is not None
            is_news = line is not None and self._n_refused <= _STRANGERS_SHOWN
        if is_news and line is not None:
            self._on_refused(line)

    def _why_refuse(self, claimed: AnyHello, body: bytes | bytearray, is_proven: bool) -> Refusal | Hello:
        """Why this process cannot be that rank; or its Hello."""
        if self._fault is not None or self._is_closing:
            told = self._told or f"{self._describe(0)} is ending"
            return Refusal(told, told)
        reason = why_no_rank(claimed, self.n_ranks, is_proven, self._describe)
        if reason is not None:
            return reason
        who = self._describe(claimed.rank)
        hello = read_hello(body, who)
        if isinstance(hello, Refusal):
            return hello
        if claimed.rank in self._members:
            line = (
                f"two processes were started as {who}: {self._members[claimed.rank].place} and "
                f"{_place(hello)}; give every process a rank of its own, and end what is left of an older job"
            )
            return Refusal(line, line)
        return first_difference(hello, self._config, self._versions, self._describe) or hello

    def _admit(self, guest: Guest, seals: Seals, hello: Hello) -> None:
        guest.reader.largest_bytes = LARGEST_BYTES
        connection = Connection(
            guest.sock,
            guest.reader,
            seals,
            heartbeat_s=self._heartbeat_s,
            on_message=lambda message: self._take(hello.rank, message),
            on_end=lambda why: self._ended(hello, why),
        )
        self._members[hello.rank] = _Member(hello, connection)
        with suppress(ConnectionEnded):  # its reader says why
            connection.send(Admitted(), LAST_WORDS_S)
        threading.Thread(target=connection.run, name="control-reader", daemon=True).start()
        self._changed.notify_all()

    def _not_started(self, deadline_s: float) -> str:
        missing = [self._describe(rank) for rank in range(1, self.n_ranks) if rank not in self._members]
        line = (
            f"{' and '.join(missing)} did not start within {deadline_s:g} s: nothing came to {self.address}"
        )
        if self._strangers:
            line += f", but for {'; '.join(self._strangers)}"
        who = "it" if len(missing) == 1 else "they"
        return f"{line}; see what {who} printed, and whether that address is reached"

    # From the readers' threads

    def _take(self, rank: int, message: Message) -> None:
        if isinstance(message, Fault):
            self._bad_news(message.rank, message.line, rank)
        elif isinstance(message, Compiles | Computed):  # nobody waits for it among answers
            self.on_chunk(message)
        elif isinstance(message, KeptSoFar):
            # First: whoever sees that all is written finds what is not.
            self.not_kept.setdefault(rank, deque()).extend([message] if message.places.shape[0] else [])
            self.n_kept[rank] = message.n
        elif isinstance(message, Meets):
            self.met.add(rank)
        else:
            member = self._members[rank]
            member.inbox.put((message, member.connection.epoch))

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
            member.inbox.put((None, self.epoch))


def _place(hello: Hello) -> str:
    return f"process {hello.pid} on {hello.host}"


def refused(reason: str, seals: Seals | None) -> bytes:
    """Sealed for one who knows the secret."""
    body = encode(Refused(reason))
    return b"".join(frame(body) if seals is None else seals.sealing.frame(body))


def _say(members: list[_Member], message: Message) -> None:
    """Last words: to each that takes them in time."""
    for member in members:
        try:
            member.connection.send(message, LAST_WORDS_S)
        except ConnectionEnded:
            pass  # its reader says why
