"""Which rank this process is, from what its starter put into the environment; and the map from rank to pool.

Open MPI, PMI (MPICH, Intel MPI), Slurm's srun, or ``JAXLAMINA_RANK``. Pure Python on plain data: the environment is
passed in. Knows nothing of MPI's library, devices or how processes are started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxlamina.errors import UserError
from jaxlamina.roles import Pool, Pools, Role

__all__ = ["Place", "Pool", "Pools", "Role", "place"]

# Starter, then the variables of rank, number of ranks and rank on this host. mpirun inside a Slurm batch job finds the
# job's own SLURM_PROCID=0 in its environment, so what MPI says comes before what Slurm says.
_STARTERS = (
    ("jaxlamina", ("JAXLAMINA_RANK",), ("JAXLAMINA_N_RANKS",), ("JAXLAMINA_LOCAL_RANK",)),
    ("mpirun", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    ("mpirun", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")),
    ("srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)),
)


@dataclass(frozen=True)
class Place:
    """A process among those of its job: its rank of ``n_ranks``, and its place among those on its host, from 0.

    starter: "mpirun", "srun" or "jaxlamina" (no MPI behind it).
    """

    rank: int
    n_ranks: int
    local_rank: int
    starter: str


def place(environment: Mapping[str, str], rank: int | None, n_ranks: int) -> Place:
    """This process's place. ``rank``: one given by hand (`--rank`), which then must agree with the environment.

    ``n_ranks``: how many the DOP needs, taken where the starter does not say how many there are. Raises `UserError`
    where nothing says which rank this is.
    """
    for starter, rank_names, size_names, local_names in _STARTERS:
        found = _number(environment, rank_names)
        if found is None:
            continue
        if rank is not None and rank != found:
            raise UserError(
                f"--rank {rank} is given, but {rank_names[0]}={found}: leave out --rank under {starter}"
            )
        size = _number(environment, size_names)
        local = _number(environment, local_names)
        return Place(found, n_ranks if size is None else size, local or 0, starter)
    if rank is None:
        raise UserError(
            f"nothing says which rank this is: start it by `mpirun -n {n_ranks}`, srun or `jaxlamina launch`, or "
            "give --rank"
        )
    return Place(rank, n_ranks, 0, "jaxlamina")


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environment.get(name)
        if text is None:
            continue
        if not text.isdecimal():
            raise UserError(f"{name}={text!r} must be a whole number")
        return int(text)
    return None
