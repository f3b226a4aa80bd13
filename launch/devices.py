"""The environment by which a rank gets its pool's platform and a GPU of its own. To be set before JAX is
imported.

Pure Python on plain data. Knows nothing of JAX beyond JAX_PLATFORMS.
"""

from __future__ import annotations

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.process.gpus import MEMORY_SHARE
from launch.roles import Place


def variables(cluster: Cluster, place: Place, n_gpus: int) -> dict[str, str]:
    """What to set for one rank: JAX_PLATFORMS of its pool, JAXLAMINA_DEVICE, which of ``n_gpus`` it takes,
    and how much of its memory.

    GPUs go round the ranks of a host in their order; ranks of a pool on another platform take none. Hosts are
    taken to have consecutive ranks, as mpirun and srun place them unless told otherwise. Raises `UserError`
    where a rank that needs a GPU finds none left.
    """
    platform = cluster.platform(place.rank)
    found: dict[str, str] = {}
    if platform is not None:
        # The CPU stays within reach: what waits on the host lives there.
        found["JAX_PLATFORMS"] = platform if platform == "cpu" else f"{platform},cpu"
    if platform not in (None, "cuda"):
        return found
    if cluster.gpu_memory_utilization is not None:
        found[MEMORY_SHARE] = str(cluster.gpu_memory_utilization)
    taken = _taken(cluster, place, n_gpus)
    if taken < n_gpus:
        found["JAXLAMINA_DEVICE"] = str(taken)
    elif platform == "cuda" or (n_gpus and cluster.transport == "xla"):
        # XLA's ranks are of one platform.
        way = "transport mpi" if cluster.transport == "xla" else 'one of the pools with platform "cpu"'
        raise UserError(
            f"no GPU is left for this rank: {n_gpus} here, for {taken + 1} ranks or more. Start fewer ranks "
            f"on this host, or use {way}"
        )
    elif n_gpus:
        found["JAX_PLATFORMS"] = "cpu"
    return found


def note(cluster: Cluster, place: Place, n_gpus: int) -> str:
    """What to tell the user of this rank's choice of a GPU, or of none; "" where nothing is. Of a rank that
    `variables` has not refused."""
    if cluster.platform(place.rank) is None and 0 < n_gpus <= _taken(cluster, place, n_gpus):
        return (
            f"{cluster.describe(place.rank)}: no GPU is left for it ({n_gpus} here), so it computes on the "
            "CPU: start fewer ranks on this host, or say which pool is to: model_platform, attention_platform"
        )
    if place.local_rank is not None or n_gpus < 2 or cluster.platform(place.rank) not in (None, "cuda"):
        return ""
    return (
        f"{cluster.describe(place.rank)}: nothing says which of its host's ranks it is, so it takes GPU 0 of "
        f"{n_gpus}: where other ranks are on this host, give each its own by CUDA_VISIBLE_DEVICES"
    )


def _taken(cluster: Cluster, place: Place, n_gpus: int) -> int:
    """How many of ``n_gpus`` ranks before it on its host take."""
    if n_gpus == 1 and place.starter == "srun":
        return 0  # Slurm has given this task a GPU of its own
    first = place.rank - (place.local_rank or 0)
    return sum(cluster.platform(rank) in (None, "cuda") for rank in range(first, place.rank))
