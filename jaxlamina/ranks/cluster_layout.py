"""The layout that a cluster and a model's heads make, and what all ranks' programs have in common."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import jax

from jaxlamina.job.cluster import Cluster
from jaxlamina.kv.placement import chosen_partition
from jaxlamina.steps.layout import Layout

Tie = jax.Array | None


def partition_of(cluster: Cluster, n_kv_heads: Sequence[int]) -> str:
    """The cluster's partition, chosen for a model with so many KV heads where the cluster says "auto".
    ``UserError`` for one that cannot be, with these heads or with what else the cluster says."""
    partition = chosen_partition(cluster.partition, cluster.n_attention, n_kv_heads)
    replace(cluster, partition=partition)  # type: ignore[arg-type]  # checks the combination
    return partition


def layout_of(cluster: Cluster, partition: str, stages: tuple[int, ...] = ()) -> Layout:
    """``partition``: the cluster's, as it was chosen for the model where the cluster says "auto"."""
    workers = tuple(cluster.pools.attention_ranks)
    return Layout(workers, partition, cluster.n_replicas, cluster.pipelining_mode, stages)


def scope(what: str, index: int, batch: int = 0) -> AbstractContextManager[object]:
    """A scope that names what operators are traced in it, for timelines: ``slice.3.batch.0``,
    ``attention.3.batch.0``."""
    return jax.named_scope(f"{what}.{index}.batch.{batch}")
