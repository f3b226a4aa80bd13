"""From a step's shape and the layout to a plan: for each rank an ordered list of tasks. Pure.

Whatever combinations of layouts and kinds of step there are is decided here: `why_not` says what cannot be,
`plan_of` makes the lists, and interpreters run them as they are (`jaxlamina.ranks.model_programs`,
`jaxlamina.ranks.attention_programs`).

Sources: Lamina 2025 §4.2.2 (q first, then k and v), §4.3 (staggered batches), §5 (prefill workers: their k
and v are taken in after what model workers wait for); Lamina 2024 §5.2.1 (messages in parts), §5.6 (a chunk
alongside a decode step).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec

from jaxlamina.errors import UserError
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.schedules import (
    AttentionRun,
    LocalRun,
    PoolExchange,
    Schedule,
    SliceRun,
    make_schedule,
)
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import (
    FRONT,
    POOL,
    Append,
    Attend,
    HandOver,
    Logits,
    Payload,
    Receive,
    RunSlice,
    Send,
    Swap,
    Task,
)


@dataclass(frozen=True)
class PlannedBatch:
    """What goes through the slices together: rows of one token each, then a prompt's tokens as rows, if there
    is one alongside; or prompts alone. ``first_segment``: of the step's segments (`StepShape.segments`), the
    one that the first of these is, or is a part of; it is part ``index`` of ``of`` equal ones. ``n_parts``:
    of its messages. ``asks``: whether attention workers are asked about stored tokens; ``stores``: whether
    they get new ones; ``local``: whether model ranks attend to stored tokens of their own, and store."""

    segments: tuple[StepShape, ...]
    first_segment: int = 0
    index: int = 0
    of: int = 1
    n_parts: int = 1
    asks: bool = True
    stores: bool = True
    local: bool = False

    @property
    def message(self) -> Literal["q", "kv", "qkv"]:
        """What goes to attention workers, if it goes at once."""
        assert self.asks or self.stores
        return "qkv" if self.asks and self.stores else "q" if self.asks else "kv"

    @property
    def has_prompts(self) -> bool:
        return any(segment.kind != "decode" for segment in self.segments)


@dataclass(frozen=True)
class Plan:
    """``model``: of each model rank and prefill worker that takes part; shards of a replica all do what its
    first one does. ``pool``: of every attention worker. ``intake``: what rank 0 does after all this by a
    program of its own."""

    n_layers: int
    batches: tuple[PlannedBatch, ...]
    model: Mapping[int, tuple[Task, ...]]
    pool: tuple[Task, ...]
    intake: tuple[Task, ...] = ()

    def owner(self, batch: int) -> int:
        """The rank that runs a batch's last slice, or has run it before."""
        if batch_rank := next((s.rank for s in self.batches[batch].segments if s.ready), 0):
            return batch_rank
        ends = (
            (rank, task) for rank, tasks in self.model.items() for task in tasks if isinstance(task, Logits)
        )
        return next(rank for rank, task in ends if batch in task.batches)


def why_not(layout: Layout, shape: StepShape) -> str | None:
    """Why there is no plan of such a step over this layout, and what to do instead; None if there is one."""
    n, most = shape.n_batches, layout.n_replicas
    if len(shape.parts) > 1 and any(part.ready for part in shape.parts):
        return (
            "what a prefill worker has computed is a step of its own: rank 0 takes its logits in first, "
            "and would not get to the rows"
        )
    if n > 1 and shape.kind != "decode":
        return f"prompts are not staggered: n_batches={n} is of decode steps"
    if shape.chunk is not None and (n > 1 or shape.mini_batches > 1):
        name, value = ("n_batches", n) if n > 1 else ("mini_batches", shape.mini_batches)
        return (
            f"mixed_steps=True computes a prompt along with rows that are one batch, not with "
            f"{name}={value}: take {name}=1, or mixed_steps=False"
        )
    if shape.mini_batches > 1 and not layout.by_heads:
        return (
            f"mini_batches={shape.mini_batches} cuts up the messages of a batch of which each worker has "
            f"all tokens: take partition='heads', or mini_batches=1"
        )
    if shape.mini_batches > 1 and n > 1:
        both = f"mini_batches={shape.mini_batches} and n_batches={n}"
        return f"{both} are two ways to cut up a batch: take one of them"
    if layout.attends_locally and most > 1:
        return (
            f"local_attention={layout.local_share:g} keeps KV on the model rank that runs a request's "
            f"slices, and with {most} replicas of the model that is not one: take local_attention=0"
        )
    if n > 1 and not any(layout.asks(segment) for segment in shape.parts[0].segments):
        return f"n_batches={n} is for batches that attention workers have KV of: take n_batches=1"
    if n > 1 and (n < most or (layout.mode == "rotational" and n != most + 1)):
        return (
            f"{n} staggered batches do not go over {most} replicas of the model with "
            f"pipelining={layout.mode!r}: take {most + 1}"
        )
    return None


@cache
def plan_of(layout: Layout, shape: StepShape, n_layers: int) -> Plan:
    """The plan of a step of this shape for a model with ``n_layers`` attention operators. ``UserError`` as
    `why_not` says."""
    if reason := why_not(layout, shape):
        raise UserError(reason)
    rows, *beside = shape.parts
    n_before = len(rows.segments)
    rows_plan = (
        _staggered(layout, rows, n_layers) if rows.n_batches > 1 else _one_batch(layout, rows, n_layers)
    )
    batches, model, pool = list(rows_plan.batches), dict(rows_plan.model), [*rows_plan.pool]
    after_layer: list[list[Task]] = [[] for _ in range(n_layers)]
    for i, part in enumerate(beside):
        own = _one_batch(
            layout, part, n_layers, n_batches_before=len(batches), n_segments_before=n_before + i
        )
        batches += own.batches
        model |= own.model
        for task in own.pool:
            after_layer[_layer_of(task)].append(task)
    if beside:
        pool = _taken_in(pool, after_layer)
    intake = [
        Receive(Payload("logits", batch, n_layers), rank)
        for rank, tasks in model.items()
        for batch in _sent_to_front(tasks)
        if rank in {part.rank for part in shape.parts if part.rank}
    ]
    return Plan(n_layers, tuple(batches), model, tuple(pool), tuple(intake))


def _planned(layout: Layout, segments: Sequence[StepShape], **what: Any) -> PlannedBatch:
    """A batch of these. What prefill workers compute goes to attention workers alone."""
    planned = PlannedBatch(
        tuple(segments),
        asks=any(map(layout.asks, segments)),
        stores=any(map(layout.stores, segments)),
        local=layout.attends_locally and not segments[0].rank,
        **what,
    )
    assert planned.stores or planned.local, "its new tokens would be kept nowhere"
    return planned


def _sent_to_front(tasks: Sequence[Task]) -> list[int]:
    return [task.payload.batch for task in tasks if isinstance(task, Send) and task.payload.what == "logits"]


def _layer_of(task: Task) -> int:
    """Of a task of the pool."""
    if isinstance(task, Attend | Append):
        return task.layer
    if isinstance(task, Swap):
        return task.receive.layer
    assert isinstance(task, Send | Receive)
    return task.payload.layer


def _taken_in(pool: Sequence[Task], after: Sequence[list[Task]]) -> list[Task]:
    """The pool's list with what prefill workers compute meanwhile: each layer of it comes after the layer's
    last task of the rows, for whose answers model ranks wait. Of rows that model ranks keep themselves there
    is none."""
    if not pool:
        return [task for tasks in after for task in tasks]
    found: list[Task] = []
    left = [sum(_ends_layer(task) == i for task in pool) for i in range(len(after))]
    for task in pool:
        found.append(task)
        if (layer := _ends_layer(task)) is not None:
            left[layer] -= 1
            if not left[layer]:
                found += after[layer]
    return found


def _ends_layer(task: Task) -> int | None:
    """The layer of a batch that this may be the last task of: its answer, or without one what stores its
    tokens."""
    if isinstance(task, Send):
        return task.payload.layer
    if isinstance(task, Swap):
        return task.send.layer
    return task.layer if isinstance(task, Append) else None


# --- one batch ---
def _one_batch(
    layout: Layout, shape: StepShape, n_layers: int, n_batches_before: int = 0, n_segments_before: int = 0
) -> Plan:
    """A step of one batch: model and pool take turns, layer by layer; from stage to stage where there are
    several."""
    index = n_batches_before
    if shape.ready:
        return _computed_before(layout, shape, n_layers, index, n_segments_before)
    n_parts = shape.mini_batches if layout.has_pool else 1
    batch = _planned(layout, shape.segments, first_segment=n_segments_before, n_parts=n_parts)
    model: dict[int, list[Task]] = {}
    pool: list[Task] = []
    for k in range(n_layers):
        rank, following = (shape.rank or layout.model_rank(i) for i in (k, k + 1))
        of_model, of_pool = _layer(batch, index, k, rank, shape.q_first)
        model.setdefault(rank, []).extend(of_model)
        pool += of_pool
        if rank != following:
            for end in (rank, following):
                model.setdefault(end, []).append(HandOver(index, k + 1, rank, following, "out"))
    rank = shape.rank or layout.model_rank(n_layers)
    model[rank].append(Logits((index,)))
    if rank != FRONT:
        logits = Payload("logits", index, n_layers)
        model[rank].append(Send(logits, FRONT))
        if not shape.rank:
            model[FRONT].append(Receive(logits, rank))
    return Plan(n_layers, (batch,), {rank: tuple(tasks) for rank, tasks in model.items()}, tuple(pool))


def _computed_before(
    layout: Layout, shape: StepShape, n_layers: int, index: int, n_segments_before: int
) -> Plan:
    """A prompt's chunk that a prefill worker has computed at its own pace: nothing but messages. Its logits
    come first, so that rank 0 goes on with the next step while attention workers take in the rest."""
    batch = _planned(layout, shape.segments, first_segment=n_segments_before)
    model: list[Task] = [Send(Payload("logits", index, n_layers), FRONT)]
    pool: list[Task] = []
    for k in range(n_layers):
        kv = Payload("kv", index, k)
        model.append(Send(kv, POOL))
        pool += [Receive(kv, shape.rank), Append(index, k)]
    return Plan(n_layers, (batch,), {shape.rank: tuple(model)}, tuple(pool))


def _layer(
    batch: PlannedBatch, index: int, k: int, rank: int, q_first: bool
) -> tuple[list[Task], list[Task]]:
    """(the model rank's tasks, the pool's) of one layer."""
    own = _own_attention(batch, index, k)
    if not batch.asks:
        if not batch.stores:
            return [RunSlice(index, k), *own], []
        kv = Payload("kv", index, k)
        return [RunSlice(index, k), Send(kv, POOL), *own], [Receive(kv, rank), Append(index, k)]
    parts = range(batch.n_parts)
    outs = [Payload("out", index, k, p) for p in parts]
    stored: list[list[Task]] = [[Append(index, k, p)] if batch.stores else [] for p in parts]
    answers: list[list[Task]] = [
        [Attend(index, k, p), *stored[p], Send(out, rank)] for p, out in enumerate(outs)
    ]
    if q_first and batch.n_parts == 1:
        q, kv, [out] = Payload("q", index, k), Payload("kv", index, k), outs
        of_kv, from_kv = ([Send(kv, POOL)], [Receive(kv, rank)]) if batch.stores else ([], [])
        model = [RunSlice(index, k, "q"), Send(q, POOL), RunSlice(index, k, "kv"), *of_kv, *own]
        return [*model, Receive(out, POOL)], [Receive(q, rank), *from_kv, *answers[0]]
    # A part is sent before the answer to the one before it is asked for: so a worker has it when it is done
    # with that.
    first, *others = (Payload(batch.message, index, k, p) for p in parts)
    of_model: list[Task] = [RunSlice(index, k), Send(first, POOL)]
    of_pool: list[Task] = [Receive(first, rank)]
    for p, message in enumerate(others):
        of_model += [Send(message, POOL), Receive(outs[p], POOL)]
        of_pool += [Receive(message, rank), *answers[p]]
    return [*of_model, *own, Receive(outs[-1], POOL)], [*of_pool, *answers[-1]]


def _own_attention(batch: PlannedBatch, index: int, k: int) -> list[Task]:
    """What a model rank attends to by itself, while attention workers do their part: prompts' new tokens
    among themselves, and its own share of the KV."""
    if batch.local:
        return [Attend(index, k), Append(index, k)]
    return [Attend(index, k)] if batch.has_prompts else []


# --- several staggered batches ---
def _staggered(layout: Layout, shape: StepShape, n_layers: int) -> Plan:
    """The order that a schedule has. q goes with k and v, or before them. The last slices of all batches are
    one where one rank runs them all: it reads their weights, the longest of all, once."""
    n = shape.n_batches
    schedule = schedule_of(layout, n, n_layers)
    one = msgspec.structs.replace(shape, batch=shape.batch_each, n_batches=1)
    batches = tuple(_planned(layout, one.segments, index=j, of=n) for j in range(n))
    q_first, message = shape.q_first and batches[0].stores, batches[0].message
    carries = "nothing" if layout.by_heads else "qkv"
    model: dict[int, tuple[Task, ...]] = {}
    for rank in range(schedule.n_replicas):
        tasks: list[Task] = []
        for item in schedule.replica_program(rank):
            if isinstance(item, PoolExchange):
                tasks.append(_exchanged(item, POOL, "out", q_first, message))
            elif isinstance(item, LocalRun):
                tasks += _own_attention(batches[item.batch], item.batch, item.layer)
            elif not isinstance(item, SliceRun):
                ends = item.batch, item.slice, item.source, item.target
                tasks.append(HandOver(*ends, carries, layout.attends_locally))  # type: ignore[arg-type]
            elif item.slice < n_layers:
                tasks += _slices(item, q_first)
            elif layout.n_replicas > 1 or layout.stages:
                tasks.append(Logits((item.batch,)))
        if layout.n_replicas == 1 and not layout.stages:
            tasks.append(Logits(tuple(range(n))))
        model[rank] = (*tasks, *_logits_moved(schedule, rank))
    pool: list[Task] = []
    for run in schedule.pool_program():
        if isinstance(run, AttentionRun):
            pool.append(Attend(run.batch, run.layer))
            pool += [Append(run.batch, run.layer)] if batches[run.batch].stores else []
            continue
        if q_first and run.send is not None:
            pool.append(Receive(Payload("q", *run.send), run.replica))
        pool.append(_exchanged(run, run.replica, "in", q_first, message))
    return Plan(n_layers, batches, model, tuple(pool))


def _slices(item: SliceRun, q_first: bool) -> list[Task]:
    if not q_first:
        return [RunSlice(item.batch, item.slice)]
    q = Send(Payload("q", item.batch, item.slice), POOL)
    return [RunSlice(item.batch, item.slice, "q"), q, RunSlice(item.batch, item.slice, "kv")]


def _exchanged(
    item: PoolExchange, peer: int, receives: str, q_first: bool, message: Literal["q", "kv", "qkv"]
) -> Task:
    """An exchange as that end of it does it which receives attention output, or what comes in to be attended
    to."""
    to_pool = None if item.send is None else Payload("kv" if q_first else message, *item.send)
    from_pool = None if item.receive is None else Payload("out", *item.receive)
    send, receive = (to_pool, from_pool) if receives == "out" else (from_pool, to_pool)
    if send is None or receive is None:
        return Receive(receive, peer) if receive is not None else Send(send, peer)  # type: ignore[arg-type]
    return Swap(send, receive, peer)


def _logits_moved(schedule: Schedule, rank: int) -> list[Task]:
    """At a step's end: all batches' logits go to the front."""
    n = schedule.n_layers
    owners = [schedule.replica_of(j, n) for j in range(schedule.n_batches)]
    payloads = [Payload("logits", j, n) for j in range(schedule.n_batches)]
    if rank == FRONT:
        return [
            Receive(payload, owner) for payload, owner in zip(payloads, owners, strict=True) if owner != FRONT
        ]
    return [Send(payload, FRONT) for payload, owner in zip(payloads, owners, strict=True) if owner == rank]


def schedule_of(layout: Layout, n_batches: int, n_layers: int) -> Schedule:
    """The order of a step of several staggered batches."""
    n_replicas = layout.n_replicas if layout.mode == "fixed" else None
    shared = {"n_replicas": n_replicas, "stages": layout.stages or None, "local_share": layout.local_share}
    return make_schedule(layout.mode, n_batches, n_layers, **shared)  # type: ignore[arg-type]
