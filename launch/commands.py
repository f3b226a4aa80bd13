"""Command lines and environments that start a job's ranks. Pure Python on plain data; starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxlamina.job.cluster import Cluster
from launch.options import LaunchOptions
from launch.processes import LAUNCHED, Child

# Open MPI's defaults made a send of 16 KiB take 5 to 11 ms beside threads that multiply matrices: eager sends
# up to 1 MiB, and waiting ranks that yield, brought a layer from 4.7-8.7 ms to 0.45-0.95. Each rank uses
# several cores.
OPEN_MPI = (
    *("--oversubscribe", "--bind-to", "none"),
    *("--mca", "btl_vader_eager_limit", "1048576", "--mca", "mpi_yield_when_idle", "1"),
)
# Eight messages of that size are to fit into the memory by which ranks of a host send to each other. In
# Open MPI's own 4 MiB they do not, and then messages go by TCP, without a word. Larger messages go by that
# memory, too. Copied from process to process they are a quarter faster at best, but containers may forbid
# that, which Open MPI finds out with the first one.
_SEGMENT_BYTES = 16 * 2**20
IN_MEMORY = (
    *("--mca", "btl_vader_segment_size", str(_SEGMENT_BYTES)),
    *("--mca", "btl_vader_single_copy_mechanism", "none"),
)


# What says of one rank which it is. A starter that has it, as a rank of another job may, keeps it to itself.
OF_ONE_RANK = ("JAXLAMINA_RANK", "JAXLAMINA_N_RANKS", "JAXLAMINA_LOCAL_RANK", "JAXLAMINA_DEVICE")


def rank_argv(options: LaunchOptions) -> tuple[str, ...]:
    """One rank, by this interpreter. ``-P``: a folder `launch` where the user is must not be taken for
    ours."""
    config = () if options.config is None else ("--config", options.config)
    changes = tuple(word for change in options.changes for word in ("--set", change))
    what = ("--", *options.command) if options.module is None else ("--module", options.module)
    return (sys.executable, "-P", "-m", "launch", *config, *changes, *what)


def mpirun_argv(n_ranks: int, version: str, *, root: bool, in_memory: bool = True) -> tuple[str, ...]:
    """``version``: what `mpirun --version` says; another MPI than Open MPI gets no options that it may not
    know. ``in_memory``: whether ranks send to each other by memory that they share (`has_room`)."""
    if not is_open_mpi(version):
        return ("mpirun", "-n", str(n_ranks))
    as_root = ("--allow-run-as-root",) if root else ()
    return ("mpirun", "-n", str(n_ranks), *as_root, *OPEN_MPI, *(IN_MEMORY if in_memory else ()))


# A rank's own, and as much for a spare, a job that ends and others each: one that finds none left is ended by
# SIGBUS.
ROOM_BYTES = 4 * _SEGMENT_BYTES


def has_room(n_ranks: int, free_bytes: int) -> bool:
    """Whether the file system in which ranks' shared memory lies has room for it."""
    return n_ranks * ROOM_BYTES <= free_bytes


def segments_in(folder: str) -> dict[str, str]:
    """By which a rank's Open MPI, of version 4 or 5, puts memory that it shares with others of its host into
    ``folder``: 16 MiB, which a rank that is killed together with mpirun leaves behind."""
    return {f"OMPI_MCA_btl_{of}_backing_directory": folder for of in ("vader", "sm")}


def session_in(folder: str) -> dict[str, str]:
    """By which an mpirun of this host alone, Open MPI's of version 4, puts its own files into ``folder``:
    8 MB, which one that is killed leaves behind."""
    return {"OMPI_MCA_orte_tmpdir_base": folder}


def without_ssh() -> dict[str, str]:
    """By which an mpirun of this host, Open MPI's of version 4, begins where there is no ssh, as in many
    containers: it looks for the program though it will not need it."""
    return {"OMPI_MCA_plm": "isolated"}


def is_open_mpi(version: str) -> bool:
    return "open mpi" in version.lower() or "open-mpi" in version.lower()


def mpirun_among(words: Sequence[str]) -> int | None:
    """At which of a starter's words mpirun is; None where another starts the ranks."""
    names = [Path(word).name for word in words]
    return next((i for i, name in enumerate(names) if name in ("mpirun", "mpiexec", "orterun")), None)


def handing_on(words: Sequence[str], at: int, names: Sequence[str]) -> tuple[str, ...]:
    """A starter's words, whose Open MPI, ``at``, gives ranks on other hosts the variables ``names``. Others
    hand on all."""
    said = {word.partition("=")[0] for word in words}
    more = [word for name in names if name not in said for word in ("-x", name)]
    return (*words[: at + 1], *more, *words[at + 1 :])


def mpi_child(
    mpirun: Sequence[str], options: LaunchOptions, environment: Mapping[str, str], pipes: str
) -> Child:
    """The one mpirun, or other starter, that starts all ranks. ``pipes``: the folder where each rank on this
    host finds a pipe for its lines, if there is one."""
    return Child(
        (*mpirun, *rank_argv(options)),
        None,
        {**environment, LAUNCHED: pipes},
        stdout=True,
        stdin=options.reads_stdin,
    )


def plain_children(
    cluster: Cluster, options: LaunchOptions, environment: Mapping[str, str], pipes: str
) -> list[Child]:
    """A process for each rank."""
    return [
        Child(
            rank_argv(options),
            rank,
            {
                **environment,
                LAUNCHED: pipes,
                "JAXLAMINA_RANK": str(rank),
                "JAXLAMINA_N_RANKS": str(cluster.n_ranks),
                "JAXLAMINA_LOCAL_RANK": str(rank),
            },
            stdout=rank == 0,
            stdin=rank == 0 and options.reads_stdin,
        )
        for rank in range(cluster.n_ranks)
    ]
