"""What ranks are told before the first step: weights are shared out, and attention ranks find how much KV
they have room for.

Runs on rank 0. Knows the group and the layout; no step and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxlamina.errors import UserError
from jaxlamina.job.control import messages as m
from jaxlamina.job.group import PREPARE_DEADLINE_S, Group
from jaxlamina.models.causal_lm import CausalLM
from jaxlamina.ranks.model_side import send_parameters, traces
from jaxlamina.ranks.shards import shard_axes, shard_of
from jaxlamina.ranks.stages import Stages, stages_of
from jaxlamina.steps.layout import Layout
from jaxlamina.workers.model_worker import ModelFn, Params
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from jaxlamina.workers.workspace import LargestStep


class SlotsWanted(NamedTuple):
    """Tokens whose KV is kept: ``kv_slots``, or as many as fit between ``least`` and ``most``; ``host``: in
    host memory."""

    kv_slots: int | None
    most: int
    least: int
    host: int | None


def share_out(
    group: Group,
    model: ModelFn,
    params: Params,
    source: CausalLM | None,
    kv_dtype: str,
    partition: str,
) -> tuple[dict[str, jax.Array], tuple[int, ...]]:
    """Sends the other model ranks and prefill workers their weights: all, or what each is to hold. Gives this
    rank's, and each slice's rank if they are stages of a pipeline."""
    cluster, n = group.cluster, group.cluster.n_model
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
    axes = shard_axes(traces(model, like), like, n) if cluster.tensor_parallel > 1 else {}
    stages = Stages((), (frozenset(params),) * n)
    if cluster.pipeline_parallel > 1:
        stages = stages_of(traces(model, like), like, n)

    def share(rank: int) -> dict[str, jax.Array]:
        return shard_of({name: params[name] for name in stages.params[rank]}, axes, n, rank)

    others = (*group.replicas, *group.prefill_ranks)
    if not others:
        return share(0), stages.ranks
    if source is None or source.origin is None:
        raise UserError(
            "several model workers need a model that each can make by itself: name the function that makes "
            "it, as model=package.module:build"
        )
    ticket = group.watch.begin("sending weights to the other model workers", PREPARE_DEADLINE_S)
    dtype = str(next(iter(params.values())).dtype)
    for rank in others:
        is_prefill = rank in group.prefill_ranks
        names = tuple(sorted(params if is_prefill else stages.params[rank]))
        ranks = () if is_prefill else stages.ranks
        group.send(rank, m.SetupModel(dict(source.origin), dtype, kv_dtype, names, partition, ranks))
    for rank in others:  # one after another: this device may have no room for all at once
        own = dict(params) if rank in group.prefill_ranks else share(rank)
        done = send_parameters(group.transport, jax.device_put(own, group.device), rank)
        done.block_until_ready()
    group.watch.until(ticket, done)
    for rank in others:
        group.receive(rank, m.ModelReady, PREPARE_DEADLINE_S)
    return share(0), stages.ranks


def setup_of(
    specs: Sequence[AttentionSpec],
    n_query_heads: Sequence[int],
    layout: Layout,
    token_block: int,
    wanted: SlotsWanted,
    largest: LargestStep,
    scales: Sequence[ChannelScales] | None,
) -> m.Setup:
    """What attention ranks are told of a model: a layer's heads and KV, and how much of it they are to
    keep."""
    return m.Setup(
        layers=tuple(_layer(spec, n) for spec, n in zip(specs, n_query_heads, strict=True)),
        partition=layout.partition,
        token_block=token_block,
        kv_slots=wanted.kv_slots,
        most_slots=wanted.most,
        least_slots=wanted.least,
        largest=(largest.batch, largest.context, largest.prompt),
        n_host_slots=wanted.host,
        stages=layout.stages,
        channel_scales=None if scales is None else tuple(tuple(map(_array, layer)) for layer in scales),
    )


def allocate(group: Group, setup: m.Setup) -> tuple[int, int]:
    """Slots, and host slots, that all attention ranks have room for. What they held for a model before this
    one is gone."""
    group.epoch += 1
    group.broadcast(setup)
    found = [group.receive(rank, m.SlotsFound, PREPARE_DEADLINE_S) for rank in group.workers]
    n_slots, n_host_slots = min(x.n_slots for x in found), min(x.n_host_slots for x in found)
    group.broadcast(m.Allocate(n_slots, n_host_slots))
    for rank in group.workers:
        group.receive(rank, m.Allocated, PREPARE_DEADLINE_S)
    return n_slots, n_host_slots


def _layer(spec: AttentionSpec, n_query_heads: int) -> m.Layer:
    return m.Layer(
        n_query_heads,
        spec.n_kv_heads,
        spec.head_dim,
        spec.dtype.name,
        spec.scale,
        spec.window,
        spec.softcap,
        spec.kv,
    )


def _array(x: Any) -> m.Array | None:
    return None if x is None else m.Array.of(x)
