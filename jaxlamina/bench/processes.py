"""A peer in a process of its own, spoken to over a pipe. Knows nothing of what the peer runs."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

from jaxlamina.bench.peers import LOADERS, Decoded, Job
from jaxlamina.errors import UserError


class PeerError(RuntimeError):
    """A peer failed to load or to run; the message is its own error."""


class PeerProcess:
    """One peer, loaded. Use as a context manager: leaving it ends the process."""

    def __init__(self, name: str, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(name, job, theirs), name=f"bench {name}", daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self.note: str = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def decode(self, prompts: Sequence[Sequence[int]], n_steps: int) -> Decoded:
        """`Peer.decode` over there. Raises `PeerError` if it fails or the process is gone."""
        self._pipe.send(("decode", [list(p) for p in prompts], n_steps))
        return self._answer()

    def peak_memory_bytes(self) -> int:
        """The largest resident size the process has had."""
        self._pipe.send(("peak",))
        return self._answer()

    def close(self) -> None:
        try:
            self._pipe.send(None)
        except OSError:  # it has ended already
            pass
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _answer(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self._process.join(timeout=10)
            raise PeerError(
                f"{self.name}: its process ended with exit code {self._process.exitcode}"
            ) from None
        if kind == "failed":
            raise PeerError(f"{self.name}: {value}")
        return value


def _serve(name: str, job: Job, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes the pipe
    os.dup2(
        sys.stderr.fileno(), 1
    )  # libraries that chat on stdout must not come between us and our last line
    warnings.simplefilter("ignore")
    try:
        peer = LOADERS[name](job)
        pipe.send(("ok", peer.note))
        while True:
            message = pipe.recv()
            if message is None:
                return
            if message[0] == "peak":
                pipe.send(("ok", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
            else:
                pipe.send(("ok", peer.decode(*message[1:])))
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except Exception as e:  # noqa: BLE001 (whatever a library raises is this peer's failure, not the bench's)
        pipe.send(("failed", str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}"))
