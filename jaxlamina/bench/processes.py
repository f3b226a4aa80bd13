"""A peer in a process of its own, spoken to over a pipe. Knows nothing of what the peer runs."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

from jaxlamina.errors import UserError

_PEAK = "peak memory"


class PeerError(RuntimeError):
    """A peer failed to load or to run; the message is its own error."""


class Loaded(Protocol):
    """What a peer's process holds. `note` says what a reader should know of how it is run."""

    @property
    def note(self) -> str: ...


class PeerProcess:
    """One peer, loaded there by `load` (which must be picklable). Leaving it as a context manager ends the
    process."""

    def __init__(self, name: str, load: Callable[[], Loaded]) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(load, theirs), name=f"bench {name}", daemon=True)
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

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the peer's method gives, over there. Raises `PeerError` if it fails or the process is gone."""
        self._pipe.send((method, *arguments))
        return self._answer()

    def peak_memory_bytes(self) -> int:
        """The largest resident size the process has had."""
        return self.ask(_PEAK)

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


def _serve(load: Callable[[], Loaded], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes the pipe
    os.dup2(
        sys.stderr.fileno(), 1
    )  # libraries that chat on stdout must not come between us and our last line
    warnings.simplefilter("ignore")
    try:
        peer = load()
        pipe.send(("ok", peer.note))
        while True:
            message = pipe.recv()
            if message is None:
                return
            method, *arguments = message
            if method == _PEAK:
                pipe.send(("ok", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
            else:
                pipe.send(("ok", getattr(peer, method)(*arguments)))
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except Exception as e:  # noqa: BLE001 (whatever a library raises is this peer's failure, not the bench's)
        pipe.send(("failed", str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}"))
