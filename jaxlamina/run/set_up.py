"""What ranks are told before the first step: weights are shared out, and attention ranks find how much KV
they have room for.

Runs on rank 0. Knows the group and the layout; no step and no request.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxlamina.errors import UserError
from jaxlamina.job.control import messages as m
from jaxlamina.job.group import PREPARE_DEADLINE_S, Group
from jaxlamina.models.causal_lm import CausalLM
from jaxlamina.ranks.apart import WHOLE, SharedOut
from jaxlamina.ranks.cluster_layout import layout_of
from jaxlamina.ranks.model_side import shared_out_of, traces
from jaxlamina.ranks.parcels import ParcelSender
from jaxlamina.ranks.shards import shard_like, shard_of
from jaxlamina.ranks.stages import Stages, stages_of
from jaxlamina.steps.layout import Layout
from jaxlamina.weights.later import Later, put
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


class WeightShares:
    """What each model rank and prefill worker holds of the weights, and how they get it from this rank."""

    def __init__(self, group: Group, model: ModelFn, params: Params) -> None:
        cluster, n = group.cluster, group.cluster.n_model
        self._group = group
        self.others = (*group.replicas, *group.prefill_ranks)
        self._like = like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
        self.shared = shared_out_of(cluster, model, like)
        self.stages = Stages((), (frozenset(params),) * n)
        if cluster.pipeline_parallel > 1:
            self.stages = stages_of(traces(model, like), like, n)
        self._senders = {rank: ParcelSender(group.transport, rank) for rank in self.others}
        self._here = jax.sharding.SingleDeviceSharding(group.device)

    def of(self, params: Params, rank: int) -> dict[str, jax.Array]:
        return self._part_of(params, rank, self._names(rank))

    def _names(self, rank: int) -> Iterable[str]:
        return self._like if rank in self._group.prefill_ranks else self.stages.params[rank]

    def _shared(self, rank: int) -> SharedOut:
        return WHOLE if rank in self._group.prefill_ranks else self.shared

    def _part_of(self, params: Params, rank: int, names: Iterable[str]) -> dict[str, jax.Array]:
        shared, found = self._shared(rank), dict[str, jax.Array]()
        for name in names:  # one after another: of those that are made here, all are not to be here at once
            x = params[name]
            found |= shard_of({name: put(x, self._here) if isinstance(x, Later) else x}, shared, rank)
        return found

    def send(self, params: Params, message_to: Callable[[int], m.Message]) -> None:
        """Tells each of the others, who then take their weights in, and waits for them."""
        if not self.others:
            return
        group = self._group
        ticket = group.watch.begin("sending weights to the other model workers", PREPARE_DEADLINE_S)
        for rank in self.others:
            group.send(rank, message_to(rank))
        for rank in self.others:
            like = shard_like({name: self._like[name] for name in self._names(rank)}, self._shared(rank))
            self._senders[rank].send(like, partial(self._part_of, params, rank))
        group.watch.done(ticket)
        for rank in self.others:
            group.receive(rank, m.ModelReady, PREPARE_DEADLINE_S)


def share_out(
    group: Group,
    shares: WeightShares,
    params: Params,
    source: CausalLM | None,
    kv_dtype: str,
    partition: str,
    share: float | Literal["auto"],
) -> dict[str, jax.Array]:
    """Sends the other model ranks and prefill workers the model and their weights: all, or what each is to
    hold. Gives this rank's."""
    if shares.others and (source is None or source.origin is None):
        raise UserError(
            "several model workers need a model that each can make by itself: name the function that makes "
            "it, as model=package.module:build"
        )
    dtype = str(next(x.dtype for x in params.values() if jnp.issubdtype(x.dtype, jnp.floating)))

    def setup_for(rank: int) -> m.SetupModel:
        assert source is not None and source.origin is not None
        is_prefill = rank in group.prefill_ranks
        names = tuple(sorted(params if is_prefill else shares.stages.params[rank]))
        ranks = () if is_prefill else shares.stages.ranks
        local_share = layout_of(group.cluster, partition, ranks, share).local_share
        heads_over = shares.shared.heads_over
        how = partition, ranks, local_share, heads_over
        return m.SetupModel(dict(source.origin), dtype, kv_dtype, names, *how)

    shares.send(params, setup_for)
    return shares.of(params, 0)


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
        local_share=layout.local_share,
        heads_over=layout.heads_over,
        channel_scales=None if scales is None else tuple(tuple(map(_array, layer)) for layer in scales),
    )


class KVRoom(NamedTuple):
    """Slots of all KV and host slots; ``each``: of the attention workers, and last of a model rank that keeps
    a share. ``remote_token_s``, ``local_token_s``: a stored token's attention on the slowest attention
    worker, and on all other model ranks together, 0 if it was not measured. ``shared_host``: all of it is the
    memory of this rank's host."""

    n_slots: int
    n_host_slots: int
    each: tuple[int, ...]
    remote_token_s: float = 0.0
    local_token_s: float = 0.0
    shared_host: bool = False


def allocate(
    group: Group,
    setup: m.Setup,
    layout: Layout,
    own: Callable[[], m.SlotsFound | None],
    measure: bool = False,
) -> KVRoom:
    """Slots that all ranks have room for, which they then take; ``own``: what this rank has room for itself,
    where it is to keep KV. What they held for a model before this one is gone. ``UserError`` where that is
    less than is wanted. ``measure``: also how long attention takes, unless both pools share one host's
    cores."""
    group.next_model()
    others = others_with_kv(group, layout, len(setup.layers))
    for rank in (*group.workers, *others):
        group.send(rank, setup)
    of_rank_0 = own()
    of_workers, of_others = (
        [group.receive(rank, m.SlotsFound, PREPARE_DEADLINE_S) for rank in ranks]
        for ranks in (group.workers, others)
    )
    of_model = [*([] if of_rank_0 is None else [of_rank_0]), *of_others]
    keepers = (*(of_workers if layout.has_pool else ()), *of_model)
    n_host_slots = min(x.n_host_slots for x in keepers)
    found = [x.n_slots for x in of_workers]
    if of_model:
        found.append(min(x.n_slots for x in of_model))
    shared_host = all(x.platform == "cpu" and x.host == platform.node() for x in keepers)
    measure = measure and not shared_host
    room = _room(setup, layout, found, n_host_slots)
    n_local = room.each[-1]
    workers = group.workers if layout.has_pool else ()
    for rank, n in (*zip(workers, room.each, strict=False), *((rank, n_local) for rank in others)):
        group.send(rank, m.Allocate(n, n_host_slots, measure))
    of_workers_s, of_others_s = (
        [group.receive(rank, m.Allocated, PREPARE_DEADLINE_S).token_s for rank in ranks]
        for ranks in (workers, others)
    )
    return room._replace(
        remote_token_s=max(of_workers_s, default=0.0),
        local_token_s=sum(of_others_s),
        shared_host=shared_host,
    )


def set_up_prompts(group: Group, n_slots: int, setup: m.Setup) -> None:
    """Has prefill workers take memory for the KV of a prompt of up to ``n_slots`` tokens each."""
    for rank in group.prefill_ranks:
        group.send(rank, m.SetupPrompts(n_slots, setup.channel_scales))
    for rank in group.prefill_ranks:
        group.receive(rank, m.Allocated, PREPARE_DEADLINE_S)


def others_with_kv(group: Group, layout: Layout, n_layers: int) -> tuple[int, ...]:
    """The model ranks but this one that keep a share of the KV: of attention operators of their own, or of
    heads of their own."""
    if layout.heads_over > 1 and layout.attends_locally:
        return group.replicas
    if not layout.stages:
        return ()
    return tuple(rank for rank in group.replicas if layout.local_layers(rank, n_layers))


def _room(setup: m.Setup, layout: Layout, found: Sequence[int], n_host_slots: int) -> KVRoom:
    """``found``: of each rank, as `m.SlotsFound` has it."""
    if layout.by_heads:
        n_slots = min(found[: len(layout.workers)] if not layout.attends_locally else found)
        n_slots = found[-1] if not layout.has_pool else n_slots
        n_each = [n_slots if layout.has_pool else 1] * len(layout.workers)
        return KVRoom(n_slots, n_host_slots, (*n_each, *([n_slots] if layout.attends_locally else [])))
    b = len(layout.workers)
    if not layout.attends_locally:
        return KVRoom(min(found), n_host_slots, (-(-min(found) // b),) * b)
    least = setup.kv_slots or setup.least_slots
    n_slots = min(sum(found), setup.kv_slots or setup.most_slots)
    if n_slots < least:
        room = f"all ranks together have room for the KV of {n_slots} tokens"
        if setup.kv_slots:
            raise UserError(f"kv_slots={setup.kv_slots}, and {room}: leave kv_slots out to have it chosen")
        raise UserError(f"{room}, fewer than one request of {least}: lower max_model_len")
    # A light load is the model rank's alone; workers need room for what it has none for, and for an even
    # part.
    of_workers, n_local = found[:-1], min(found[-1], n_slots)
    each = [min(n, -(-n_slots // b)) for n in of_workers]
    if sum(each) + n_local < n_slots:
        each = [min(n, n_slots) for n in of_workers]
    return KVRoom(n_slots, n_host_slots, (*each, n_local))


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
