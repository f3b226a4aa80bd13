"""Which rank does what under DOP (a, b): a model workers, then b attention workers, then prefill workers if
there are any, on one flat axis of ranks.

Pure Python on plain data. Knows nothing of MPI, devices or how processes are started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxlamina.errors import UserError

Pool = Literal["model", "attention", "prefill"]
MOST_LOCAL_RANKS = 1024
"""Processes of a job that one host starts by itself: more are a slip of the pen."""


@dataclass(frozen=True)
class Role:
    """What one rank is.

    rank: on the flat axis, from 0. pool: whose worker it is. index: its place in that pool, from 0. replica:
    which model replica a model worker serves, and shard: its place in that replica's tensor-parallel group;
    other workers have replica 0 and shard = index.
    """

    rank: int
    pool: Pool
    index: int
    replica: int
    shard: int


@dataclass(frozen=True)
class Pools:
    """DOP (a, b) (Lamina 2025, §4): n_model compute-pool ranks and n_attention memory-pool ranks. With none
    of these the compute-pool ranks keep all KV: the unsplit model.

    n_replicas: how many copies of the model the compute pool holds; each is sharded over n_model / n_replicas
    ranks. n_prefill: ranks that compute prompts and nothing else (§5); DOP does not count them.
    """

    n_model: int
    n_attention: int
    n_replicas: int = 1
    n_prefill: int = 0

    def __post_init__(self) -> None:
        for name, least in (("n_model", 1), ("n_attention", 0), ("n_replicas", 1), ("n_prefill", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{name}={value!r} must be a whole number, at least {least}")
        if self.n_model % self.n_replicas:
            raise UserError(f"n_model={self.n_model} must be a multiple of n_replicas={self.n_replicas}")

    @classmethod
    def parse(cls, text: str, n_replicas: int = 1) -> Pools:
        """From "a,b", as a command line gives it, such as "2,1"."""
        parts = text.split(",")
        if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
            raise UserError(f"DOP {text!r} must be a,b: model workers, attention workers; such as 2,1")
        return cls(int(parts[0]), int(parts[1]), n_replicas)

    @property
    def n_ranks(self) -> int:
        return self.n_model + self.n_attention + self.n_prefill

    @property
    def n_shards(self) -> int:
        """Ranks that share one replica of the model."""
        return self.n_model // self.n_replicas

    def role(self, rank: int) -> Role:
        """The role of one rank. Raises `UserError` for a rank outside 0 … n_ranks - 1."""
        if not 0 <= rank < self.n_ranks:
            raise UserError(f"{rank=} must be at least 0 and below {self.n_ranks}, the ranks of DOP {self}")
        if rank in self.prefill_ranks:
            index = rank - self.prefill_ranks[0]
            return Role(rank, "prefill", index, 0, index)
        if rank >= self.n_model:
            index = rank - self.n_model
            return Role(rank, "attention", index, 0, index)
        return Role(rank, "model", rank, rank // self.n_shards, rank % self.n_shards)

    def check_world(self, n_ranks: int) -> None:
        """Raises `UserError` unless exactly so many ranks were started as this DOP needs."""
        if n_ranks != self.n_ranks:
            raise UserError(
                f"DOP {self} needs {self.n_ranks} ranks, {n_ranks} were started: mpirun -n {self.n_ranks}"
            )

    @property
    def roles(self) -> tuple[Role, ...]:
        """All ranks' roles, by rank."""
        return tuple(self.role(rank) for rank in range(self.n_ranks))

    @property
    def model_ranks(self) -> Sequence[int]:
        return range(self.n_model)

    @property
    def attention_ranks(self) -> Sequence[int]:
        return range(self.n_model, self.n_model + self.n_attention)

    @property
    def prefill_ranks(self) -> Sequence[int]:
        return range(self.n_model + self.n_attention, self.n_ranks)

    def __str__(self) -> str:
        dop = f"({self.n_model}, {self.n_attention})"
        return f"{dop} + {self.n_prefill} for prefill" if self.n_prefill else dop
