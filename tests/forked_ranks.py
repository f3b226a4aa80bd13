"""Ranks of tests as forks of one process that has imported what ranks need and begun nothing of JAX's.

A rank's imports take seconds of a core, which is more than most of what tests have it do. What JAX reads from the
environment when it is imported is as the server's; a job that wants it otherwise gets a server of its own. Real
starts are seen elsewhere: over MPI, and by `jaxlamina launch`. All forks have one seed of hashes, which ranks
there have not.

    python forked_ranks.py FD    the server: a line of JSON and the rank's descriptors for each rank over socket FD
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

IMPORTS = (
    "rank_scenarios",
    "plain_models",
    "test_models",
    "jaxlamina.ranks.attention_rank",
    "jaxlamina.ranks.model_rank",
    "jaxlamina.run.set_up",
    "jaxlamina.transports.xla",
    "jaxlib.mlir.dialects.mhlo",
    "encodings.idna",
)
READ_BY_IMPORTS = ("JAX_", "TF_", "PYTHON")  # how names of variables begin
_LARGEST = 1 << 17  # a request's bytes


class ForkedRank:
    """One rank of `rank_job`, with what `subprocess.Popen` has of a started one. Its output is kept if wanted,
    else it goes where this process's goes."""

    def __init__(self, argument: str, environment: Mapping[str, str], kept: bool) -> None:
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2 * kept)]  # noqa: SIM115 (closed by `wait`)
        self._said: list[str] = []
        self.returncode: int | None = None
        self._life, theirs = socket.socketpair()
        with theirs:
            request = json.dumps(
                {"argv": ["rank_job.py", argument], "environment": dict(environment)}
            ).encode()
            assert len(request) < _LARGEST
            fds = [theirs.fileno(), *([file.fileno() for file in self._files] or (1, 2))]
            socket.send_fds(_server(environment).requests, [request], fds)
        self.pid = int(self._told(60))

    def _told(self, timeout: float | None) -> str:
        """What the server says next of this rank: its process, then how it ended."""
        self._life.settimeout(timeout)
        try:
            told = self._life.recv(64).decode()
        except TimeoutError:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0) from None
        if not told:
            raise RuntimeError("the server of forked ranks has ended: its stderr says why")
        return told

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = int(self._told(timeout))
            self._life.close()
            for file in self._files:
                file.seek(0)
                self._said.append(file.read())
                file.close()
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None and not select.select([self._life], [], [], 0)[0]:
            with suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = self._said
        return out, err


class _Server:
    """The process that forks, for one environment of imports. It ends with this process, and its ranks with it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # its threads would be there at a fork
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        self.requests.close()
        self._process.wait(60)


_servers: dict[tuple[tuple[str, str], ...], _Server] = {}


def _server(environment: Mapping[str, str]) -> _Server:
    at_import = tuple(sorted((k, v) for k, v in environment.items() if k.startswith(READ_BY_IMPORTS)))
    if at_import not in _servers:
        _servers[at_import] = server = _Server(environment)
        atexit.register(server.close)
    return _servers[at_import]


# --- the server ---


def rank_of(requests: socket.socket) -> None:
    """Forks for each request, and says of each rank its number and its exit code. Comes back in forks alone, each
    of which is then like a process that was started for its rank."""
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lives: dict[int, int] = {}  # of ranks that run, by process
    while True:
        ready, _, _ = select.select([requests, waking], [], [])
        if waking in ready:
            os.read(waking, 4096)
            ended(lives)
        if requests not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(requests, _LARGEST, 3)
        if not request:
            for pid in lives:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            sys.exit()
        alone()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (waking, woken, *lives.values(), fds[0]):
                os.close(fd)
            requests.close()
            begin(json.loads(request), *fds[1:])
            return
        os.write(fds[0], b"%d" % pid)
        lives[pid] = fds[0]
        for fd in fds[1:]:
            os.close(fd)


def ended(lives: dict[int, int]) -> None:
    """Says the exit codes of those that have ended."""
    while lives:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        life = lives.pop(pid)
        with suppress(BrokenPipeError):  # nobody asks any more
            os.write(life, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(life)


def alone() -> None:
    """Threads would be missing in a fork, with the locks that they hold, and a backend would be shared."""
    from jax._src import xla_bridge

    assert not xla_bridge.backends_are_initialized()
    assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1, threading.enumerate()


def begin(request: dict[str, Any], out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]


def main(arguments: Sequence[str]) -> int:
    for name in IMPORTS:
        importlib.import_module(name)
    rank_of(socket.socket(fileno=int(arguments[0])))
    import rank_job

    return rank_job.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
