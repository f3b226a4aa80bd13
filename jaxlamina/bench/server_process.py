"""A server in a process of its own, for as long as a measurement needs it. Knows how it starts, what it says,
and how it ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from jaxlamina.errors import UserError

_END_S = 30.0
_POLL_S = 0.05


class Server:
    """A process, and what it has said on stderr so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.strip())
            on_line(self.lines[-1])

    def check(self) -> None:
        """``UserError`` if it has ended."""
        if self._process.poll() is not None:
            raise UserError(f"the server ended: {self.last_line()}")

    def last_line(self) -> str:
        """Its last error, or the last that it said."""
        said = [line for line in self.lines if line] or ["it said nothing"]
        return next((line for line in reversed(said) if line.startswith("error")), said[-1])

    def wait_for(self, start: str, deadline_s: float) -> str:
        """The first line that begins so. ``UserError`` if it ends, or does not say it in time."""
        until_s = time.monotonic() + deadline_s
        while True:
            for line in list(self.lines):
                if line.startswith(start):
                    return line
            self.check()
            if time.monotonic() > until_s:
                raise UserError(f"the server was not ready within {deadline_s:g} s: {self.last_line()}")
            time.sleep(_POLL_S)


@contextmanager
def running(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> Iterator[Server]:
    """A process of ``command``, ended afterwards. ``on_line`` is told each line of its stderr, by another
    thread."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    server = Server(process)
    reader = threading.Thread(target=server.read, args=(on_line,), daemon=True)
    reader.start()
    try:
        yield server
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(_END_S)
        assert process.stderr is not None
        process.stderr.close()


@contextmanager
def serving(options: Sequence[str], *, deadline_s: float) -> Iterator[str]:
    """Yields the address of a server with ``options``, on a free port of this machine, ready to answer.

    ``UserError`` with the server's last line if it ends, or is not ready within the deadline.
    """
    words = ["serve", "--no-supervise", "--port", "0", "--uvicorn-log-level", "warning", *options]
    with running([sys.executable, "-m", "jaxlamina", *words]) as server:
        yield server.wait_for("ready: ", deadline_s).removeprefix("ready: ").removesuffix("/v1")
