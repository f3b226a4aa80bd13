"""How a job's pools are laid out, as plans need it: workers, partition, replicas or stages. Pure: ranks and
sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How the memory pool is laid out, as both kinds of rank need it."""

    workers: tuple[int, ...]  # their ranks
    partition: str
    n_replicas: int = 1  # of the model: ranks 0 … n - 1, or one that several ranks share out
    mode: str = "fixed"  # of staggered batches: which replica runs a slice
    stages: tuple[int, ...] = ()  # of a pipeline: the model rank that runs each slice

    @property
    def by_heads(self) -> bool:
        """Whether every attention worker has all tokens, of its share of the heads."""
        return self.partition == "heads" or len(self.workers) == 1

    def model_rank(self, slice_: int) -> int:
        """Who runs a slice of a step that is one batch, and has its attention: the first replica, or the
        slice's stage."""
        return self.stages[slice_] if self.stages else 0

    def slices_on(self, rank: int, n_slices: int) -> range:
        """The slices whose weights a model rank has."""
        if not self.stages:
            return range(n_slices)
        begin = self.stages.index(rank)
        return range(begin, begin + self.stages.count(rank))
