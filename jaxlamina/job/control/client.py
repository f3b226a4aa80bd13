"""The other ranks' end of the control channel: finds rank 0, says who it is, hears and tells bad news.

Each proves to the other that it knows the job's secret (`seals`), before anything else is said. Knows nothing
of what the messages ask for, and nothing of devices.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping

from jaxlamina.errors import UserError
from jaxlamina.job.control.admission import Config
from jaxlamina.job.control.connection import Connection, ConnectionEnded
from jaxlamina.job.control.faults import LAST_WORDS_S, ControlError, Telling
from jaxlamina.job.control.handshake import introduce
from jaxlamina.job.control.messages import (
    PROTOCOL,
    Bye,
    Fault,
    Hello,
    Message,
    Refused,
    Welcome,
)
from jaxlamina.job.control.sockets import connect
from jaxlamina.job.tls import JobTls

_RANK_0_FIRST_S = 5.0  # how much longer we wait than rank 0, which knows who is missing


class ControlClient:
    """Every other rank's end. Made when it is: rank 0 has been reached, and all ranks are there and agree.

    - ``address``: rank 0's, "host:port"; tried until ``deadline_s`` has passed, and then as long again for
      the others.
    - ``hello``: who this is (``hello_of`` makes one); ``secret``: the job's, b"" where it has none; ``tls``:
      where the job has it.
    - ``on_fault(rank, line)``: called once at most, from a thread of the channel, with the first bad news.

    ``UserError`` where rank 0 is not reached, does not know the secret, refuses this rank (it says why), or
    the group does not come about. ``epoch``: the group's, from rank 0. ``host``: the address of this host by
    which rank 0 was reached.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        secret: bytes = b"",
        tls: JobTls | None = None,
        deadline_s: float,
        heartbeat_s: float = 5.0,
        on_fault: Callable[[int, str], None],
        describe: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self.rank = hello.rank
        self._rank0 = f"{describe(0)} at {address}"
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._fault: tuple[int, str] | None = None
        self._telling = Telling()
        self._is_welcome = False
        self._is_leaving = False
        sock = connect(address, deadline_s, describe(0))
        self.host: str = sock.getsockname()[0]
        wait_s = deadline_s + _RANK_0_FIRST_S
        sock, reader, seals = introduce(sock, hello, secret, wait_s, self._rank0, tls)
        self._connection = Connection(
            sock,
            reader,
            seals,
            heartbeat_s=heartbeat_s,
            on_message=self._take,
            on_end=self._ended,
        )
        threading.Thread(target=self._connection.run, name="control-reader", daemon=True).start()
        try:
            self.epoch = self._join(deadline_s)
        except ControlError as error:
            self.close()
            raise UserError(error.line) from error
        except BaseException:
            self.close()
            raise

    def receive(self, deadline_s: float | None) -> Message:
        """The next message. ``deadline_s`` None: as long as rank 0 is there.

        `ControlError` as soon as any rank has failed or gone, if nothing came within ``deadline_s``, and
        after a Bye.
        """
        until = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            self._raise_fault()
            try:
                timeout = None if until is None else max(0.0, until - time.monotonic())
                message = self._inbox.get(timeout=timeout)
            except queue.Empty:
                raise ControlError(0, f"{self._rank0} sent nothing within {deadline_s:g} s") from None
            if message is not None:
                return message
            if self._is_leaving:
                raise ControlError(0, f"{self._rank0} has ended the group")

    def send(self, message: Message) -> None:
        """Waits only while rank 0 is slow to read. `ControlError` if the group cannot go on."""
        self._raise_fault()
        try:
            self._connection.send(message)
        except ConnectionEnded as error:
            self._connection.shut()
            self._connection.wait_ended(LAST_WORDS_S)
            self._raise_fault()
            raise ControlError(0, f"nothing can be sent to {self._rank0}: {error}") from error

    def close(self, fault: str | None = None) -> None:
        """Leaves. ``fault``: the line of why this rank cannot go on, where that is why; all others get it.

        Before rank 0 said Bye, and without a ``fault``, the others take it that this rank has gone.
        """
        with self._lock:
            is_first_fault = self._fault is None and not self._is_leaving
            self._is_leaving = True
        if fault is not None and is_first_fault:
            try:
                self._connection.send(Fault(self.rank, fault), LAST_WORDS_S)
            except ConnectionEnded:
                pass  # they know by now
        self._connection.shut()
        self._connection.wait_ended(LAST_WORDS_S)

    def _join(self, deadline_s: float) -> int:
        wait_s = deadline_s + _RANK_0_FIRST_S
        try:
            first = self.receive(wait_s)
        except ControlError as error:
            if self._fault is not None:
                raise
            line = f"{self._rank0} was reached, but did not say within {wait_s:g} s that all ranks are there"
            raise UserError(line) from error
        if isinstance(first, Refused):
            raise UserError(first.reason)
        if not isinstance(first, Welcome):
            raise ControlError(0, f"{self._rank0} said {type(first).__name__} instead of Welcome")
        return first.epoch

    def _take(self, message: Message) -> None:
        if isinstance(message, Fault):
            self._bad_news(message.rank, message.line)
            return
        with self._lock:
            self._is_welcome |= isinstance(message, Welcome)
            self._is_leaving |= isinstance(message, Bye | Refused)
        self._inbox.put(message)

    def _ended(self, why: str) -> None:
        self._bad_news(0, f"{self._rank0} has gone: it {why}")
        self._inbox.put(None)

    def _bad_news(self, rank: int, line: str) -> None:
        with self._lock:
            if self._fault is not None or self._is_leaving:
                return
            self._fault = (rank, line)
            is_welcome = self._is_welcome
        with self._telling:
            if is_welcome:
                self._on_fault(rank, line)
        self._inbox.put(None)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            self._telling.wait(LAST_WORDS_S)
            raise ControlError(*self._fault)


def hello_of(rank: int, config: Config, versions: Mapping[str, str]) -> Hello:
    """This process's Hello as ``rank``."""
    return Hello(PROTOCOL, rank, os.getpid(), socket.gethostname(), dict(config), dict(versions))
