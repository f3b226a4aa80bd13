"""`jaxlamina serve` in a process of its own, for as long as a measurement needs it. Knows how it starts and ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxlamina.errors import UserError

_END_S = 30.0


@contextmanager
def serving(options: Sequence[str], *, deadline_s: float) -> Iterator[str]:
    """Yields the address of a server with ``options``, on a free port of this machine, ready to answer.

    ``UserError`` with the server's last line if it ends, or is not ready within the deadline.
    """
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jaxlamina",
            "serve",
            "--port",
            "0",
            "--uvicorn-log-level",
            "warning",
            *options,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.strip())
            if line.startswith("ready: "):
                ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        until = time.monotonic() + deadline_s
        while not ready.wait(0.1):
            if process.poll() is not None or time.monotonic() > until:
                last = next((line for line in reversed(lines) if line), "it said nothing")
                why = "ended" if process.poll() is not None else f"was not ready within {deadline_s:g} s"
                raise UserError(f"the server {why}: {last}")
        [address] = [line for line in lines if line.startswith("ready: ")]
        yield address.removeprefix("ready: ").removesuffix("/v1")
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
