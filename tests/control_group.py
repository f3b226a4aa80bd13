"""A group for tests of the control channel: rank 0 in the test's process, the others in threads, processes or
as sockets."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from jaxlamina.errors import UserError
from jaxlamina.job.control import frames, sockets
from jaxlamina.job.control.channel import ControlClient, ControlError, ControlServer, hello_of
from jaxlamina.job.control.frames import FrameReader
from jaxlamina.job.control.messages import (
    Admitted,
    Challenge,
    Hello,
    Message,
    Ping,
    Pong,
    StepShape,
    decode,
    encode,
)
from jaxlamina.job.control.seals import Seals, new_nonce

RANK = Path(__file__).with_name("control_rank.py")
CONFIG: dict[str, Any] = {"dop": "1,2", "kv_dtype": "auto", "max_num_seqs": 8, "window": None, "scale": 0.5}
VERSIONS = {"jax": "1.2.3", "jaxlamina": "0.1.0"}
SECRET = b"the job's secret"
_OWN = {"config": CONFIG, "versions": VERSIONS}
SHAPE = StepShape("decode", 8, 1, 256)


def frame(body: bytes) -> bytes:
    return b"".join(frames.frame(body))


def describe(rank: int) -> str:
    return "rank 0 (model worker 0)" if rank == 0 else f"rank {rank} (attention worker {rank - 1})"


class Faults(queue.Queue):
    """What on_fault was called with."""

    def __call__(self, rank: int, line: str) -> None:
        self.put((rank, line))

    def only(self, timeout: float = 5) -> tuple[int, str]:
        fault = self.get(timeout=timeout)
        time.sleep(0.05)
        assert self.empty(), "told twice"
        return fault


class Group:
    """Rank 0 in this process, the others in threads, in processes, or as bare sockets; all are ended at the
    end."""

    def __init__(self) -> None:
        self.faults = Faults()
        self._ends: list[Callable[[], Any]] = []

    def server(self, n_ranks: int, address: str = "127.0.0.1:0", **options: Any) -> ControlServer:
        given = {"describe": describe, "versions": VERSIONS, "on_fault": self.faults, "secret": SECRET}
        options = given | options
        server = ControlServer(address, n_ranks, options.pop("config", CONFIG), **options)
        self._ends.append(lambda: server.close(wait_s=0.2))
        return server

    def join(self, address: str, rank: int, **options: Any) -> Joining:
        joining = Joining(address, rank, **options)
        self._ends.append(joining.close)
        return joining

    def process(self, end: str, address: str, number: int, **options: Any) -> Process:
        process = Process(end, address, number, **options)
        self._ends.append(process.close)
        return process

    def raw(self, address: str) -> socket.socket:
        host, port = sockets.parse_address(address)
        sock = socket.create_connection((host, port), timeout=5)
        self._ends.append(sock.close)
        return sock

    def bare(self, address: str, secret: bytes = SECRET) -> Bare:
        return Bare(self.raw(address), secret)

    def close(self) -> None:
        for end in reversed(self._ends):
            end()


class Joining:
    """A client that is being made in a thread, as it takes until the group is formed."""

    def __init__(self, address: str, rank: int, hello: Hello | None = None, **options: Any) -> None:
        self.faults = Faults()
        self._made: queue.Queue[ControlClient | Exception] = queue.Queue()
        self._client: ControlClient | None = None
        own = [options.pop(name, usual) for name, usual in _OWN.items()]
        hello = hello or hello_of(rank, *own)
        usual = {"deadline_s": 10, "on_fault": self.faults, "describe": describe, "secret": SECRET}
        options = usual | options

        def make() -> None:
            try:
                self._made.put(ControlClient(address, hello, **options))
            except (UserError, ControlError) as error:
                self._made.put(error)

        threading.Thread(target=make, daemon=True).start()

    def client(self) -> ControlClient:
        made = self._made.get(timeout=20)
        if isinstance(made, Exception):
            raise made
        self._client = made
        return made

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class Process:
    """tests/control_rank.py; the lines it prints, as they come."""

    def __init__(self, end: str, address: str, number: int, **options: Any) -> None:
        options = {"config": CONFIG} | options
        command = [sys.executable, str(RANK), end, address, str(number), json.dumps(options)]
        environment = os.environ | {"PYTHONPATH": str(RANK.parents[1])}
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.popen.stdout:
            self.lines.put(line.rstrip("\n"))

    def line(self, timeout: float = 20) -> str:
        return self.lines.get(timeout=timeout)

    def send(self, number: int) -> None:
        os.kill(self.popen.pid, number)

    def wait(self, timeout: float = 10) -> int:
        return self.popen.wait(timeout)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.send(signal.SIGKILL)
        self.popen.wait()
        self._reader.join()
        self.popen.stdin.close()
        self.popen.stdout.close()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sockets.address_text(sock.getsockname())


class Bare:
    """A rank's end as bytes: what it says is sealed here and sent by the test."""

    def __init__(self, sock: socket.socket, secret: bytes = SECRET) -> None:
        self.sock = sock
        self._reader = FrameReader()
        sock.settimeout(5)
        challenge = self._next()
        assert isinstance(challenge, Challenge)
        self.nonce = new_nonce()
        self._seals = Seals.of_rank(secret, self.nonce, challenge.nonce)

    def hello(self, rank: int, config: dict[str, Any] = CONFIG, **more: Any) -> bytes:
        """``more``: fields that there are not."""
        hello = msgspec.structs.replace(hello_of(rank, config, VERSIONS), nonce=self.nonce)
        raw = msgspec.msgpack.decode(encode(hello)) | more
        return self.sealed(msgspec.msgpack.encode(raw))

    def sealed(self, body: Message | bytes) -> bytes:
        """Of the next message, which is taken for sent."""
        found = self._seals.sealing.frame(body if isinstance(body, bytes) else encode(body))
        self._seals.sealing.sent()
        return b"".join(found)

    def said(self) -> Any:
        """The next message, heartbeats and Admitted left out; None when the other side closes."""
        while isinstance(message := self._next(), Ping | Pong | Admitted):
            pass
        return message

    def _next(self) -> Any:
        while True:
            for frame in self._reader.frames():
                return decode(frame.body if frame.seal is None else self._seals.unsealing.body(frame))
            data = self.sock.recv(1)  # a byte a time: nothing of what follows is taken
            if not data:
                return None
            self._reader.feed(data)
