"""The processes below a supervisor: which of them is whose, and how a fault comes to one.

Knows Linux's /proc and signals, and who starts ranks; nothing of what they compute.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxlamina.bench.server_process import Server, running
from jaxlamina.errors import UserError
from jaxlamina.job.roles import Pools
from jaxlamina.process import ending
from jaxlamina.process.descendants import descendants

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "spin": signal.SIGUSR1}
_SPINS = """
import signal


def spin(*_):
    while True:
        pass


signal.signal(signal.SIGUSR1, spin)
"""
"""As sitecustomize.py: SIGUSR1 has a process's main thread spin for ever."""
_RANKS = ("JAXLAMINA_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def began(pid: int) -> float:
    """When, in the kernel's ticks; infinity if it is not there."""
    found = ending.began(pid)
    return float("inf") if found is None else found


def words_of(pid: int) -> list[str]:
    """Its command line."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def rank_of(pid: int) -> int | None:
    """Of a process of a job over ranks; None of others."""
    if "launch" not in words_of(pid):
        return None
    with suppress(OSError):
        variables = dict(
            word.partition("=")[::2] for word in Path(f"/proc/{pid}/environ").read_text().split("\0")
        )
        return next((int(variables[name]) for name in _RANKS if variables.get(name, "").isdecimal()), None)
    return None


def find(whom: str, supervisor: int, workers: Mapping[str, int] | None) -> int:
    """The process of the server, or of the last worker of a kind, in the job that runs. ``workers``: of each
    kind how many a job over ranks has; None: it is one process. ``UserError`` if there is none."""
    below = sorted(descendants(supervisor), key=began)  # a spare is younger
    if workers is None:
        if whom != "server":
            raise UserError(f"--whom {whom}: the job is one process, which is the server")
        found = [pid for pid in below if "serve" in words_of(pid)]
    else:
        pools = Pools(workers["model"], workers["attention"], n_prefill=workers["prefill"])
        ranks = [rank for rank in range(pools.n_ranks) if pools.role(rank).pool == whom]
        if whom != "server" and not ranks:
            raise UserError(f"--whom {whom}: the job has none")
        wanted = 0 if whom == "server" else ranks[-1]
        found = [pid for pid in below if rank_of(pid) == wanted]
    if not found:
        raise UserError(f"--whom {whom}: no such process is below the supervisor")
    return found[0]


@contextmanager
def supervised(
    command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str], None]
) -> Iterator[Server]:
    """As `running`, with faults of all kinds for the job; what a supervisor leaves behind is killed."""
    left: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="jaxlamina-bench-") as folder:
        Path(folder, "sitecustomize.py").write_text(_SPINS)
        path = os.pathsep.join(filter(None, (folder, environment.get("PYTHONPATH"))))
        try:
            with running(command, {**environment, "PYTHONPATH": path}, on_line) as server:
                try:
                    yield server
                finally:
                    left = {pid: began(pid) for pid in descendants(server.pid)}
        finally:
            for pid, since in left.items():
                if began(pid) == since:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
