"""Ranks and commands of tests as forks of one process that has imported what they need and begun nothing of JAX's.

Their imports take seconds of a core, which is more than most of what tests have them do. What JAX reads from the
environment when it is imported is as the server's; who wants it otherwise gets a server of its own. Real starts
are seen elsewhere: ranks over MPI and by `jaxlamina launch`, commands below a supervisor, in `test_server_end`, in
`test_cli` and in the documents' blocks. All forks have one seed of hashes, which ranks there have not.

    python forked_ranks.py FD KIND    the server: a line of JSON and the process's descriptors for each over socket FD
"""

from __future__ import annotations

import atexit
import gc
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

IMPORTS = {
    "rank": (
        "rank_scenarios",
        "plain_models",
        "test_models",
        "jaxlamina.ranks.attention_rank",
        "jaxlamina.ranks.model_rank",
        "jaxlamina.run.set_up",
        "jaxlamina.transports.xla",
        "jaxlib.mlir.dialects.mhlo",
        "encodings.idna",
    ),
    "command": (
        "jaxlamina.cli.main",
        "jaxlamina.cli.serve",
        "jaxlamina.llm",
        "jaxlamina.ranks",
        "jaxlamina.run.set_up",
        "jaxlamina.server.run",
        "jaxlamina.server.standing_by",
        "jaxlib.mlir.dialects.mhlo",
        "encodings.idna",
        "pydantic.v1",
        "rich.status",
        "uvicorn.lifespan.on",
        "uvicorn.loops.uvloop",
        "uvicorn.protocols.http.httptools_impl",
    ),
}
READ_BY_IMPORTS = ("JAX_", "TF_", "PYTHON", "HF_")  # how names of variables begin
_LARGEST = 1 << 17  # a request's bytes


class Forked:
    """A process of ``kind`` with what `subprocess.Popen` has of a started one. ``out``, ``err``: its descriptors."""

    def __init__(
        self, kind: str, words: Sequence[str], environment: Mapping[str, str], out: int, err: int
    ) -> None:
        self.returncode: int | None = None
        self._life, theirs = socket.socketpair()
        with theirs:
            request = json.dumps(
                {"argv": words, "environment": dict(environment), "cwd": os.getcwd()}
            ).encode()
            assert len(request) < _LARGEST
            socket.send_fds(_server(environment, kind).requests, [request], [theirs.fileno(), out, err])
        self.pid = int(self._told(60))

    def _told(self, timeout: float | None) -> str:
        """What the server says next of this process: its number, then how it ended."""
        self._life.settimeout(timeout)
        try:
            told = self._life.recv(64).decode()
        except TimeoutError:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0) from None
        if not told:
            raise RuntimeError("the server of forked processes has ended: its stderr says why")
        return told

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = int(self._told(timeout))
            self._life.close()
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._life], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedRank(Forked):
    """One rank of `rank_job`. Its output is kept if wanted, else it goes where this process's goes."""

    def __init__(self, argument: str, environment: Mapping[str, str], kept: bool) -> None:
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2 * kept)]  # noqa: SIM115 (closed by `wait`)
        self._said: list[str] = []
        out, err = (file.fileno() for file in self._files) if kept else (1, 2)
        super().__init__("rank", ["rank_job.py", argument], environment, out, err)

    def wait(self, timeout: float | None = None) -> int:
        super().wait(timeout)
        for file in self._files:
            file.seek(0)
            self._said.append(file.read())
            file.close()
        self._files = []
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = self._said
        return out, err


class ForkedCommand(Forked):
    """A command line of `jaxlamina`, whose ``stderr`` is a pipe; nobody reads its stdout."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        self.stderr = open(reading)  # noqa: SIM115 (the caller closes it)
        with open(os.devnull, "wb") as nowhere:
            super().__init__("command", ["jaxlamina", *words], environment, nowhere.fileno(), writing)
        os.close(writing)


class _Server:
    """The process that forks, for one environment of imports. It ends with this process, and its ranks with it."""

    def __init__(self, environment: Mapping[str, str], kind: str) -> None:
        self.requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), kind],
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # its threads would be there at a fork
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        self.requests.close()
        self._process.wait(60)


_servers: dict[tuple[str, Any], _Server] = {}


def _server(environment: Mapping[str, str], kind: str = "rank") -> _Server:
    like = kind, read_by_imports(environment)
    if like not in _servers:
        _servers[like] = server = _Server(environment, kind)
        atexit.register(server.close)
    return _servers[like]


def read_by_imports(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in environment.items() if k.startswith(READ_BY_IMPORTS)))


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
    os.chdir(request["cwd"])
    sys.argv = request["argv"]


def main(arguments: Sequence[str]) -> int:
    fd, kind = arguments
    for name in IMPORTS[kind]:
        importlib.import_module(name)
    # Collections in forks would go through all that was imported, and so copy its memory.
    gc.collect()
    gc.freeze()
    rank_of(socket.socket(fileno=int(fd)))
    if kind == "command":
        from jaxlamina.cli.main import main as command_line

        return command_line()
    import rank_job

    return rank_job.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
