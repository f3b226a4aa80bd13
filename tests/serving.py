"""A real server process for tests, and plain HTTP to talk to it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_ranks import READ_BY_IMPORTS, ForkedCommand

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 240
STARTED = ("-m", "jaxlamina")  # as a user starts it
# Every word of every message, and what asks for an answer: for models of `tiny_words_folder`.
WORDS_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def environment(**more: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "JAXLAMINA_API"))
    }
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "TERM": "dumb", "JAX_PLATFORMS": "cpu"} | more


@dataclass
class Server:
    """A process that serves. ``lines``: its stderr so far."""

    process: subprocess.Popen[str] | ForkedCommand
    lines: list[str] = field(default_factory=list)
    port: int = 0
    reader: threading.Thread = field(default_factory=threading.Thread)

    @classmethod
    def start(cls, words: list[str], variables: Mapping[str, str] | None = None, **how: Any) -> Any:
        """Of a command that serves; its port is not known yet."""
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(**(variables or {})),
            **how,
        )
        return cls._read(process)

    @classmethod
    def forked(cls, words: list[str], variables: Mapping[str, str]) -> Any:
        return cls._read(ForkedCommand(words, environment(**variables)))

    @classmethod
    def _read(cls, process: subprocess.Popen[str] | ForkedCommand) -> Any:
        server = cls(process)
        server.reader = threading.Thread(target=server.read, daemon=True)
        server.reader.start()
        return server

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, start: str, deadline_s: float = DEADLINE_S) -> str:
        """The first line of stderr that begins so."""
        until = time.monotonic() + deadline_s
        while True:
            found = next((line for line in list(self.lines) if line.startswith(start)), None)
            if found is not None:
                return found
            assert self.process.poll() is None and time.monotonic() < until, "\n".join(self.lines)
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float = 120,
    ) -> tuple[int, Any]:
        """Status and JSON (or bytes, where it is none). ``body``: bytes as they are, or anything as JSON."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, raw, {"Content-Type": "application/json"} | (headers or {}))
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(content)
        except ValueError:
            return answer.status, content

    def get(self, path: str) -> Any:
        status, found = self.request("GET", path)
        assert status == 200, found
        return found

    def post(self, path: str, body: Any) -> Any:
        status, found = self.request("POST", path, body)
        assert status == 200, found
        return found

    def metric(self, name: str, **labels: str) -> float:
        for line in self.get("/metrics").decode().splitlines():
            if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no {name} in /metrics")

    def wait_until(self, holds: Any, deadline_s: float = 60) -> None:
        until = time.monotonic() + deadline_s
        while not holds():
            assert time.monotonic() < until and self.process.poll() is None
            time.sleep(0.05)

    def finish(self, deadline_s: float = 60) -> int:
        return self.process.wait(timeout=deadline_s)


@contextmanager
def serving(
    *options: str,
    before: tuple[str, ...] | None = None,
    ready: bool = True,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """``jaxlamina serve`` with ``options`` on a free port, ready to answer unless it shall not be.
    ``variables``: more of its environment. A fork of a process that has imported what it needs, unless
    Python's words ``before`` the command are given, or imports would read one of the variables."""
    words, variables = ["serve", "--port", "0", *options], variables or {}
    server: Server
    if before is None and not any(name.startswith(READ_BY_IMPORTS) for name in variables):
        server = Server.forked(words, variables)
    else:
        server = Server.start([sys.executable, *(before or STARTED), *words], variables)
    try:
        server.port = int(server.wait_for("serving ").rpartition(":")[2])
        if ready:
            server.wait_for("ready: ")
        yield server
    finally:
        server.close()
