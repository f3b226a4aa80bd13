"""`python -m launch.local`: starts all ranks of a job, and ends them all. What `jaxlamina launch` runs.

Knows transports as far as to know who starts their ranks on this host: mpirun for "mpi", itself for "xla". On
several hosts a starter does that it is told of.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from jaxlamina.errors import UserError
from jaxlamina.exit_codes import BAD_INPUT
from jaxlamina.job.cluster import JOB, Cluster
from jaxlamina.job.roles import MOST_LOCAL_RANKS
from jaxlamina.process.host_memory import memory_folder
from jaxlamina.process.owned_folder import MPI_FILES, PIPES, owned_folder
from jaxlamina.server.pieces import SECRET
from launch.commands import (
    OF_ONE_RANK,
    ROOM_BYTES,
    handing_on,
    has_room,
    is_open_mpi,
    mpi_child,
    mpirun_among,
    mpirun_argv,
    plain_children,
    session_in,
    without_ssh,
)
from launch.options import LaunchOptions, parse
from launch.processes import LAUNCHED, Job

WHAT = "Starts all ranks of a job: rank 0 runs COMMAND, on this host, and the others work for it."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one job and returns its exit code."""
    try:
        options = parse("python -m launch.local", WHAT, arguments)
        if options.rank is not None:
            raise UserError("--rank is for `python -m launch`, one rank; this starts all of them")
        options = _on_free_ports(options)
        cluster = options.cluster()
        if not options.starter and cluster.n_ranks > MOST_LOCAL_RANKS:
            raise UserError(
                f"dop={cluster.dop} is {cluster.n_ranks} processes of this host, which starts "
                f"{MOST_LOCAL_RANKS} at most: take fewer, or --starter"
            )
        with (
            # Another host must not have it, as it may have /tmp.
            owned_folder(memory_folder(), PIPES) as folder,
            owned_folder(Path(tempfile.gettempdir()), MPI_FILES) as mpi_files,
        ):
            return _job(cluster, options, str(folder), str(mpi_files)).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def _job(cluster: Cluster, options: LaunchOptions, folder: str, mpi_files: str = "") -> Job:
    environment = {name: value for name, value in os.environ.items() if name not in OF_ONE_RANK}
    environment[JOB] = secrets.token_hex(16)  # by which rank 0 knows its own
    job = partial(
        Job,
        describe=cluster.describe,
        end_s=options.end_s,
        folder=folder,
        is_supervised=SECRET in os.environ,
    )
    if options.starter:
        child = mpi_child(_starter(options.starter, environment), options, environment, folder)
        return job([child], begin_s=cluster.start_deadline_s)
    if cluster.transport == "xla":
        children = plain_children(cluster, options, environment, folder)
        return job(children)
    if shutil.which("mpirun") is None:
        raise UserError(
            "transport='mpi' needs mpirun, which is not here: apt-get install openmpi-bin libopenmpi-dev, "
            "or take --transport xla"
        )
    version, free_bytes = _version("mpirun"), shutil.disk_usage(folder).free
    in_memory = has_room(cluster.n_ranks, free_bytes)
    if is_open_mpi(version) and not in_memory:  # another MPI gets no options that it may not know
        print(
            f"note: {Path(folder).parent} has {free_bytes >> 20} MiB left: ranks send to each other by TCP, "
            f"and by memory where there are {ROOM_BYTES >> 20} MiB a rank (docker run --shm-size=1g)",
            file=sys.stderr,
        )
    as_root = os.geteuid() == 0
    mpirun = mpirun_argv(cluster.n_ranks, version, root=as_root, in_memory=in_memory)
    pipes = {rank: _pipe(Path(folder, str(rank))) for rank in range(cluster.n_ranks)}
    own = session_in(mpi_files) | (without_ssh() if shutil.which("ssh") is None else {})
    child = mpi_child(mpirun, options, own | environment, folder)
    return job([child], pipes=pipes)


def _starter(words: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    """With which ranks on other hosts find the packages and know their job."""
    if shutil.which(words[0]) is None:
        raise UserError(f"--starter {shlex.join(words)!r}: there is no program {words[0]!r} here")
    at = mpirun_among(words)
    if at is None or shutil.which(words[at]) is None or not is_open_mpi(_version(words[at])):
        return words
    return handing_on(
        words, at, [n for n in (JOB, LAUNCHED, "PYTHONPATH") if n == LAUNCHED or n in environment]
    )


def _pipe(path: Path) -> int:
    """A named pipe's reading end. Opened for writing too, so that it does not end when a writer does."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


def _version(mpirun: str) -> str:
    done = subprocess.run(
        [mpirun, "--version"],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
    )
    return done.stdout


def _on_free_ports(options: LaunchOptions) -> LaunchOptions:
    """The options with ports that nobody listens at, where the cluster's file names none: two jobs may run at
    once."""
    cluster, usual = options.cluster(), Cluster()
    wanted = [name for name in ("control", "coordinator") if getattr(cluster, name) == getattr(usual, name)]
    changes = [
        f'{name}="127.0.0.1:{port}"' for name, port in zip(wanted, free_ports(len(wanted)), strict=True)
    ]
    return replace(options, changes=(*options.changes, *changes))


def free_ports(n: int) -> list[int]:
    """Ports of this host at which nobody listens now.

    Drawn from below the range (32768 on, usually) out of which the kernel serves whoever asks for any port:
    until rank 0 listens, one of those might be given away.
    """
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 1000):
        if len(found) == n:
            break
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    if len(found) < n:
        raise UserError("no free port from 20000 to 32000 on 127.0.0.1: give --set control=127.0.0.1:PORT")
    return found


if __name__ == "__main__":
    sys.exit(main())
