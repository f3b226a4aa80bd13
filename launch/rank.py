"""`python -m launch --config C.toml COMMAND …`: one rank. Rank 0 runs the command, the others serve it until
it is done.

Whatever ends a rank early is one line on stderr, `error: rank 2 (attention worker 1): …`, and a non-zero exit
code. Knows its place, its platform and how it ends; what it does meanwhile is `jaxlamina.ranks`'.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from jaxlamina.errors import UserError
from jaxlamina.exit_codes import BAD_INPUT, FAILED, INTERRUPTED
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.secret import secret_of
from jaxlamina.job.tls import tls_of
from jaxlamina.process.gpus import n_gpus
from jaxlamina.process.parents import end_with_parent
from launch import devices
from launch.commands import segments_in
from launch.options import LaunchOptions, parse
from launch.processes import BEGUN, FIRST_PID, LAUNCHED
from launch.roles import Place, place

WHAT = (
    "One rank of a job: rank 0 runs COMMAND, the others work for it. Started by mpirun, srun or jaxlamina "
    "launch."
)


def run() -> None:
    """The process's entry: ends it with the rank's exit code."""
    _keep_stdout_clean()
    faulthandler.enable()  # what a library dies of is said by where its caller was
    code = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads any more; Python would try again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code:
        # What JAX and MPI do at exit would wait for ranks that may be gone.
        os._exit(code)
    sys.exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank and returns its exit code."""
    who = "error: "
    try:
        here = _place_first()
        if here is not None:
            _redirect(here.rank)
            who = f"error: rank {here.rank}: "
        options = parse("python -m launch", WHAT, arguments)
        if options.starter:
            raise UserError("--starter is for jaxlamina launch, which starts all ranks; this is one")
        here = place(os.environ, options.rank)
        who = f"error: rank {here.rank}: "
        cluster = options.cluster()
        if here.n_ranks is not None:
            cluster.pools.check_world(here.n_ranks)
        who = f"error: {cluster.describe(here.rank)}: "
        _check_starter(cluster, here)
        secret_of(cluster, os.environ)  # before anything takes long
        tls_of(cluster)
        n = n_gpus(os.environ)
        os.environ.update(devices.variables(cluster, here, n))
        if note := devices.note(cluster, here, n):
            print(f"note: {note}", file=sys.stderr, flush=True)
        return _work(cluster, here.rank, options)
    except UserError as error:
        code, text = BAD_INPUT, str(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 (whatever it is, it is this rank's end, and must be its last line)
        traceback.print_exc()
        code, text = FAILED, f"{type(error).__name__}: {error}"
    print(f"{who}{' '.join(text.split())}", file=sys.stderr, flush=True)
    return code


def _work(cluster: Cluster, rank: int, options: LaunchOptions) -> int:
    if options.module is not None:
        return int(importlib.import_module(options.module).main(cluster, rank))
    if rank == 0:
        from jaxlamina.cli.launch import find_model

        find_model(list(options.command), cluster)
    from jaxlamina import ranks  # loads JAX, which must find its environment as it shall be
    from jaxlamina.server import imported

    imported.await_turn(imported.OF_A_SERVER if rank == 0 else (), says_so=rank == 0)
    if rank != 0:
        return ranks.serve(cluster, rank)
    from jaxlamina.cli.launch import defaults
    from jaxlamina.cli.main import main as command_line
    from jaxlamina.process.start_clock import CLOCK

    CLOCK.done("imports")
    group = ranks.join(cluster, rank)
    CLOCK.done("ranks")
    if options.command[0] == "serve":
        _heed_sigterm()
    code = command_line(options.command, who=cluster.describe(rank), defaults=defaults(cluster))
    group.close()
    return code


def _heed_sigterm() -> None:
    """And says so to `launch.local`, which would end all ranks at once: from here on they end in order."""
    from jaxlamina.cli.serve import heed_sigterm

    heed_sigterm()
    folder = os.environ.get(LAUNCHED)
    if folder is not None and Path(folder).exists():
        Path(folder, FIRST_PID).write_text(str(os.getpid()))


def _check_starter(cluster: Cluster, here: Place) -> None:
    if cluster.transport == "mpi" and here.starter == "jaxlamina":
        raise UserError(
            f"transport='mpi' needs MPI to start the ranks: mpirun -n {cluster.n_ranks} python -m launch …"
        )


def _place_first() -> Place | None:
    """This process's place as far as the environment says it, so that also a bad option is said by its
    rank."""
    try:
        return place(os.environ)
    except UserError:
        return None


def _keep_stdout_clean() -> None:
    """What libraries print without asking Python (Gloo does) goes to stderr: stdout is for the command's own
    words."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _redirect(rank: int) -> None:
    """Under `launch.local`: ends with its starter, and gives it this rank's own lines where MPI would mix
    them. On another host there is no such folder."""
    folder = os.environ.get(LAUNCHED)
    if folder is None:
        return
    end_with_parent()
    if Path(folder).exists():
        for name, value in segments_in(folder).items():
            os.environ.setdefault(name, value)
        if rank == 0:
            Path(folder, BEGUN).touch()
    pipe = Path(folder, str(rank))
    if not pipe.exists():  # plain processes have pipes of their own already
        return
    out = os.open(pipe, os.O_WRONLY)
    sys.stderr.flush()
    os.dup2(out, 2)
    os.dup2(out, 1)
    if rank != 0:
        os.dup2(out, sys.stdout.fileno())
    os.close(out)
