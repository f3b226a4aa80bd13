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

from jaxlamina.errors import UserError
from jaxlamina.job.control import frames, sockets
from jaxlamina.job.control.channel import ControlClient, ControlError, ControlServer, hello_of
from jaxlamina.job.control.frames import FrameReader
from jaxlamina.job.control.messages import (
    Hello,
    StepShape,
    decode,
)

RANK = Path(__file__).with_name("control_rank.py")
CONFIG: dict[str, Any] = {"dop": "1,2", "kv_dtype": "auto", "max_num_seqs": 8, "window": None, "scale": 0.5}
VERSIONS = {"jax": "1.2.3", "jaxlamina": "0.1.0"}
JOB = "the job's word"
_OWN = {"config": CONFIG, "versions": VERSIONS, "job": JOB}
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
        given = {"describe": describe, "versions": VERSIONS, "on_fault": self.faults, "job": JOB}
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
        options = {"deadline_s": 10, "on_fault": self.faults, "describe": describe} | options

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


def said_by(sock: socket.socket) -> Any:
    """The next message on a bare socket, heartbeats left out; None when the other side closes."""
    reader = FrameReader()
    sock.settimeout(5)
    while True:
        data = sock.recv(1)  # a byte a time: nothing of what follows is taken
        if not data:
            return None
        reader.feed(data)
        for body in reader.bodies():
            message = decode(body)
            if type(message).__name__ not in ("Ping", "Pong"):
                return message
