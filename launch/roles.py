"""Which rank this process is, from what its starter put into the environment; and the map from rank to pool.

Open MPI, PMI (MPICH, Intel MPI), Slurm's srun, or ``JAXLAMINA_RANK``. Pure Python on plain data: the
environment is passed in. Knows nothing of MPI's library, devices or how processes are started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxlamina.errors import UserError
from jaxlamina.job.roles import Pool, Pools, Role

__all__ = ["Place", "Pool", "Pools", "Role", "place"]

Starter = Literal["jaxlamina", "mpirun", "srun"]

# Starter, then the variables of rank, number of ranks and rank on this host. mpirun inside a Slurm batch job
# finds the job's own SLURM_PROCID=0 in its environment, so what MPI says comes before what Slurm says.
_STARTERS: tuple[tuple[Starter, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("jaxlamina", ("JAXLAMINA_RANK",), ("JAXLAMINA_N_RANKS",), ("JAXLAMINA_LOCAL_RANK",)),
    ("mpirun", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    ("mpirun", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")),
    ("srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)),
)


@dataclass(frozen=True)
class Place:
    """A process among those of its job: its rank, and its place among those on its host, from 0.

    n_ranks: of the job; None where its starter does not say, as with local_rank. starter: "mpirun", "srun" or
    "jaxlamina" (no MPI there).
    """

    rank: int
    n_ranks: int | None
    local_rank: int | None
    starter: Starter


def place(environment: Mapping[str, str], rank: int | None = None) -> Place:
    """This process's place. ``rank``: one given by hand (`--rank`), which then must agree with the
    environment.

    Raises `UserError` where nothing says which rank this is.
    """
    for starter, rank_names, size_names, local_names in _STARTERS:
        found = _number(environment, rank_names)
        if found is None:
            continue
        if rank is not None and rank != found:
            raise UserError(
                f"--rank {rank} is given, but {rank_names[0]}={found}: leave out --rank under {starter}"
            )
        local = _number(environment, local_names)
        if local is None and rank_names == ("PMI_RANK",):  # srun may speak PMI, which does not have this
            local = _number(environment, ("SLURM_LOCALID",))
            starter = starter if local is None else "srun"
        return Place(found, _number(environment, size_names), local, starter)
    if rank is None:
        raise UserError(
            "nothing says which rank this is: start it by mpirun, srun or `jaxlamina launch`, or give --rank"
        )
    return Place(rank, None, None, "jaxlamina")


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environment.get(name)
        if text is None:
            continue
        if not text.isdecimal():
            raise UserError(f"{name}={text!r} must be a whole number")
        return int(text)
    return None
