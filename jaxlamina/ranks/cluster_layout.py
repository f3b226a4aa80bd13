"""The layout that a cluster and a model's heads make, and what all ranks' programs have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import jax

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.kv.placement import AUTO, LocalShare, chosen_partition, share_by_heads
from jaxlamina.kv.wishes import Wishes
from jaxlamina.steps.layout import Layout
from jaxlamina.transports import Transport

Tie = jax.Array | None


def partition_of(cluster: Cluster, n_kv_heads: Sequence[int]) -> str:
    """The cluster's partition, chosen for a model with so many KV heads where the cluster says "auto".
    ``UserError`` for one that cannot be, with these heads or with what else the cluster says."""
    asked, share = cluster.partition, cluster.local_share
    if asked == AUTO and cluster.prefill_workers and share not in (0, 1):
        asked = "tokens"  # prefill workers send prompts to attention workers alone
    partition = chosen_partition(asked, cluster.n_attention, n_kv_heads, share, cluster.tensor_parallel)
    replace(cluster, partition=partition)  # type: ignore[arg-type]  # checks the combination
    return partition


def layout_of(
    cluster: Cluster,
    partition: str,
    stages: tuple[int, ...] = (),
    local_share: LocalShare | None = None,
    heads_over: int = 1,
) -> Layout:
    """``partition``: the cluster's, as it was chosen for the model where the cluster says "auto". So is
    ``local_share``, the share of the KV that model ranks keep: by requests and by tokens only whether it is
    0, 1 or between is in the layout. ``heads_over``: as `Layout` has it."""
    workers = tuple(cluster.pools.attention_ranks)
    share = cluster.local_share if local_share is None else local_share
    if isinstance(share, str) or (0 < share < 1 and partition != "heads"):
        share = 0.5
    return Layout(workers, partition, cluster.n_replicas, cluster.pipelining_mode, stages, share, heads_over)


def local_share_of(
    cluster: Cluster, partition: str, n_kv_heads: Sequence[int], why_no_heads: str = ""
) -> LocalShare:
    """The share of the KV that model ranks keep; by heads a number. ``why_no_heads``: why model ranks that
    share out the weights cannot share out heads, if they cannot; then ``UserError``, unless it is "auto"."""
    share = cluster.local_share
    if why_no_heads and share:
        if share != AUTO:
            instead = "local_attention=0" if cluster.n_attention else "fewer of them, or attention workers"
            raise UserError(
                f"local_attention={share:g} with tensor_parallel={cluster.tensor_parallel} is some of each "
                f"model worker's own heads, and {why_no_heads}: take {instead}"
            )
        return 0.0
    known = cluster.n_attention, n_kv_heads, cluster.tensor_parallel
    return share_by_heads(share, *known) if partition == "heads" else share


def q_first_of(cluster: Cluster, transport: Transport) -> bool:
    """Whether q goes by itself, before k and v are computed: the cluster's word, or else whether that gains
    more than one message more costs, as measured (docs/benchmarks.md): between accelerators over XLA's
    collectives it does; by memory that both reach, between ranks on CPUs, and by MPI through hosts' memory,
    it does not."""
    if cluster.q_first is not None:
        return cluster.q_first
    return transport.name == "xla" and transport.device.platform != "cpu" and not transport.by_memory


def wishes_of(
    layout: Layout,
    token_block: int,
    share: LocalShare,
    following: Callable[[float], float] | None = None,
) -> Wishes | None:
    """Where new tokens go, where they may lie on model ranks, too: by ``following``, if the share follows the
    load."""
    if not layout.attends_locally or layout.by_heads:
        return None
    of_all = 0.5 if isinstance(share, str) else share
    by_tokens = layout.partition == "tokens"
    wanted = following or (lambda _: of_all)
    return Wishes(len(layout.workers), token_block if by_tokens else None, wanted)


def scope(what: str, index: int, batch: int = 0) -> AbstractContextManager[object]:
    """A scope that names what operators are traced in it, for timelines: ``slice.3.batch.0``,
    ``attention.3.batch.0``."""
    return jax.named_scope(f"{what}.{index}.batch.{batch}")
