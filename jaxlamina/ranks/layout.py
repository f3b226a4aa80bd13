"""How a job's pools are laid out, as all ranks' programs need it: workers, partition, replicas or
stages, and staggered steps' order.

Knows ranks and sizes; no array, and no model but its heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax

from jaxlamina.cluster import Cluster
from jaxlamina.errors import UserError
from jaxlamina.ranks.wires import HeadsOf, MixedSizes, Sizes
from jaxlamina.schedules import Schedule, make_schedule
from jaxlamina.steps.shape import StepShape
from jaxlamina.workers.partition import chosen_partition
from jaxlamina.workers.spec import AttentionSpec

Tie = jax.Array | None


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
        return self.partition == "heads" or len(self.workers) == 1

    def model_rank(self, slice_: int) -> int:
        """Who runs a slice of a step that is one batch, and has its attention: the first replica, or the slice's stage."""
        return self.stages[slice_] if self.stages else 0

    def slices_on(self, rank: int, n_slices: int) -> range:
        """The slices whose weights a model rank has."""
        if not self.stages:
            return range(n_slices)
        begin = self.stages.index(rank)
        return range(begin, begin + self.stages.count(rank))

    def sizes(self, shape: StepShape) -> Sizes:
        """Of one staggered batch, which a step of one batch is too."""
        if self.by_heads:
            return Sizes(shape.batch_each, shape.batch_each * shape.tokens, shape.tokens)
        return Sizes(shape.rows, shape.new, shape.tokens)

    def mixed_sizes(self, shape: StepShape) -> MixedSizes:
        """Of a decode step with a chunk alongside."""
        assert shape.chunk is not None
        return MixedSizes(self.sizes(shape), self.sizes(shape.chunk), shape.chunk.kind == "chunk")

    def heads(self, spec: AttentionSpec, n_query_heads: int) -> HeadsOf:
        """One layer's heads on each worker."""
        b = len(self.workers) if self.by_heads else 1
        return HeadsOf(n_query_heads // b, spec.n_kv_heads // b, spec.head_dim, spec.dtype)


def partition_of(cluster: Cluster, n_kv_heads: Sequence[int]) -> str:
    """The cluster's partition, chosen for a model with so many KV heads where the cluster says "auto". ``UserError`` for one
    that cannot be, with these heads or with what else the cluster says."""
    partition = chosen_partition(cluster.partition, cluster.n_attention, n_kv_heads)
    replace(cluster, partition=partition)  # type: ignore[arg-type]  # checks the combination
    return partition


def layout_of(cluster: Cluster, partition: str, stages: tuple[int, ...] = ()) -> Layout:
    """``partition``: the cluster's, as it was chosen for the model where the cluster says "auto"."""
    workers = tuple(cluster.pools.attention_ranks)
    return Layout(workers, partition, cluster.n_replicas, cluster.pipelining_mode, stages)


def span(what: str, index: int, batch: int = 0) -> Any:
    """A scope that names what operators are traced in it, for timelines: ``slice.3.batch.0``, ``attention.3.batch.0``."""
    return jax.named_scope(f"{what}.{index}.batch.{batch}")


@cache
def schedule_of(layout: Layout, shape: StepShape, n_layers: int) -> Schedule:
    """The order of a step of several staggered batches, of which all ranks make their programs. ``UserError`` if there can
    be none of so many over the model workers."""
    n, most = shape.n_batches, layout.n_replicas
    if n < most or (layout.mode == "rotational" and n != most + 1):
        raise UserError(
            f"{n} staggered batches do not go over {most} replicas of the model with pipelining={layout.mode!r}: take "
            f"{most + 1}"
        )
    n_replicas = layout.n_replicas if layout.mode == "fixed" else None
    stages = layout.stages or None
    return make_schedule(layout.mode, shape.n_batches, n_layers, n_replicas=n_replicas, stages=stages)
