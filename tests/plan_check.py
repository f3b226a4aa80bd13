"""Whether a plan can be run as it stands. Knows what a step needs, not how plans are made: it reads the
finished lists only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NoReturn

from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import Plan, PlannedBatch
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


def check_plan(plan: Plan, layout: Layout) -> None:
    """Raises a ``ValueError`` that names the first conflict, if there is one.

    In this order: a batch is not what the layout and its segments say, or its new tokens are kept nowhere; a
    rank runs a slice whose weights it does not have, or attends to, or stores, KV that it does not keep; a
    slice, an attention, an append or a payload is missing, twice or unknown; the lists, run with every
    message blocking both ends, stop short: ends do not match, wait in a circle, or want what is not there
    yet.
    """
    for j, batch in enumerate(plan.batches):
        _check_batch(layout, j, batch)
    for rank, tasks in plan.model.items():
        for task in tasks:
            _check_place(plan, layout, rank, task)
    _check_complete(plan)
    _Rehearsal(plan, layout).run()


def _conflict(text: str) -> NoReturn:
    raise ValueError(f"plan: {text}")


def _who(rank: int) -> str:
    return "the pool" if rank == POOL else f"rank {rank}"


def _check_batch(layout: Layout, j: int, batch: PlannedBatch) -> None:
    on_prefill_worker = {bool(segment.rank) for segment in batch.segments} == {True}
    wanted = {
        "asks": any(map(layout.asks, batch.segments)),
        "stores": any(map(layout.stores, batch.segments)),
        "local": layout.attends_locally and not on_prefill_worker,
    }
    for name, value in wanted.items():
        if getattr(batch, name) != value:
            _conflict(f"{name} of batch {j} is {getattr(batch, name)}, not {value}")
    if not (batch.stores or batch.local):
        _conflict(f"new tokens of batch {j} are kept nowhere")


def _check_place(plan: Plan, layout: Layout, rank: int, task: Task) -> None:
    if isinstance(task, Append) or (isinstance(task, Attend) and plan.batches[task.batch].local):
        keeps = range(0) if rank in _prefill_ranks(plan) else layout.local_layers(rank, plan.n_layers)
        if task.layer not in keeps:
            _conflict(f"{_who(rank)} keeps no KV for {task}")
    if isinstance(task, RunSlice | Logits):
        index = task.index if isinstance(task, RunSlice) else plan.n_layers
        has = (
            range(plan.n_layers + 1)
            if rank in _prefill_ranks(plan)
            else layout.slices_on(rank, plan.n_layers + 1)
        )
        if index not in has:
            _conflict(f"{_who(rank)} has no weights for {task}")


def _prefill_ranks(plan: Plan) -> set[int]:
    return {segment.rank for batch in plan.batches for segment in batch.segments if segment.rank}


def _check_complete(plan: Plan) -> None:
    lists = {**plan.model, POOL: plan.pool}
    found = Counter(key for rank, tasks in lists.items() for task in tasks for key in _keys(rank, task))
    found.update(key for task in plan.intake for key in _keys(FRONT, task))
    for j, batch in enumerate(plan.batches):
        if found["last slice", j] != (0 if _is_computed(batch) else 1):
            _conflict(f"the last slice of batch {j} is there {found['last slice', j]} times, not once")
    wanted = Counter(key for j in range(len(plan.batches)) for key in _wanted(plan, j, found))
    for key in [*wanted, *found]:
        if found[key] != wanted[key]:
            _conflict(f"{key} is there {found[key]} times, not {wanted[key]}")


def _is_computed(batch: PlannedBatch) -> bool:
    """By a prefill worker, before the step."""
    return any(segment.ready for segment in batch.segments)


def _keys(rank: int, task: Task) -> Iterator[Hashable]:
    """What is counted of a task."""
    side = "pool" if rank == POOL else "model"
    if isinstance(task, Logits):
        yield from (("last slice", j) for j in task.batches)
    elif isinstance(task, RunSlice):
        pieces = ("q", "kv") if task.piece == "whole" else (task.piece,)
        yield from (
            ("slice up to" if p == "q" else "slice from q to", p, task.batch, task.index) for p in pieces
        )
    elif isinstance(task, Attend):
        yield side, "attends", task.batch, task.layer, task.part
    elif isinstance(task, Append):
        yield side, "appends", task.batch, task.layer, task.part
    elif isinstance(task, Send):
        yield side, "sends", task.payload
    elif isinstance(task, Receive):
        yield side, "receives", task.payload
    elif isinstance(task, Swap):
        yield side, "sends", task.send
        yield side, "receives", task.receive


def _wanted(plan: Plan, j: int, found: Counter[Hashable]) -> Iterator[Hashable]:
    """What there must be of batch j. q may go by itself, and does where nothing is stored."""
    batch, n = plan.batches[j], plan.n_layers
    computes = not _is_computed(batch)
    if computes:
        yield "last slice", j
    for k in range(n):
        if computes:
            yield from ((("slice up to", "q", j, k)), ("slice from q to", "kv", j, k))
        if computes and (batch.has_prompts or batch.local):
            yield "model", "attends", j, k, 0
        if batch.local:
            yield "model", "appends", j, k, 0
        for p in range(batch.n_parts):
            whats: tuple[str, ...] = ("q",) if batch.asks else ()
            if batch.stores:
                yield "pool", "appends", j, k, p
                whats = (*whats, "kv")
            if batch.asks:
                yield "pool", "attends", j, k, p
                yield from (
                    ("pool", "sends", Payload("out", j, k, p)),
                    ("model", "receives", Payload("out", j, k, p)),
                )
            if len(whats) == 2 and ("model", "sends", Payload("q", j, k, p)) not in found:
                whats = ("qkv",)
            for what in whats:
                payload = Payload(what, j, k, p)  # type: ignore[arg-type]
                yield from (("model", "sends", payload), ("pool", "receives", payload))
    if plan.owner(j) != FRONT:
        yield from (
            ("model", "sends", Payload("logits", j, n)),
            ("model", "receives", Payload("logits", j, n)),
        )


class _Rehearsal:
    """All lists, run with no clock and no arrays: what each rank has by now, as names."""

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self.plan, self.layout = plan, layout
        self.lists: dict[int, tuple[Task, ...]] = {**plan.model, POOL: plan.pool}
        self.lists[FRONT] = (*self.lists.get(FRONT, ()), *plan.intake)
        self.at = dict.fromkeys(self.lists, 0)
        first = range(len(plan.batches))  # all ranks have the step's tokens
        self.has: dict[int, set[Hashable]] = {
            rank: {("context", j, 0) for j in first if rank != POOL} for rank in self.lists
        }
        for j, batch in enumerate(plan.batches):
            if _is_computed(batch):
                has = self.has[plan.owner(j)]
                has |= {("kv", j, k, 0) for k in range(plan.n_layers)} | {("logits", j, plan.n_layers, 0)}

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in self.lists:
                while (task := self._head(rank)) is not None and self._advances(rank, task):
                    moved = True
        waiting = [f"{_who(rank)} at {task}" for rank in self.lists if (task := self._head(rank)) is not None]
        if waiting:
            _conflict(f"the lists stop short: {'; '.join(waiting)}")

    def _head(self, rank: int) -> Task | None:
        tasks = self.lists[rank]
        return tasks[self.at[rank]] if self.at[rank] < len(tasks) else None

    def _advances(self, rank: int, task: Task) -> bool:
        other = self._other_end(rank, task)
        if other is not None:
            peer, its = other
            if peer not in self.lists or self._head(peer) != its or not self._can(peer, its):
                return False
        if not self._can(rank, task):
            return False
        for end, of_end in [(rank, task), *([] if other is None else [other])]:
            self.has[end].update(self._gives(end, of_end))
            self.at[end] += 1
        return True

    def _other_end(self, rank: int, task: Task) -> tuple[int, Task] | None:
        """The other rank of an exchange, and what it must be at."""
        if isinstance(task, HandOver):
            return task.target if rank == task.source else task.source, task
        if isinstance(task, Send):
            return task.peer, Receive(task.payload, rank)
        if isinstance(task, Receive):
            return task.peer, Send(task.payload, rank)
        if isinstance(task, Swap):
            return task.peer, Swap(task.receive, task.send, rank)
        return None

    def _can(self, rank: int, task: Task) -> bool:
        return set(self._needs(rank, task)) <= self.has[rank]

    def _needs(self, rank: int, task: Task) -> Iterator[Hashable]:
        if isinstance(task, RunSlice):
            yield "rest" if task.piece == "kv" else "context", task.batch, task.index
            if task.piece == "kv":
                yield "sent", Payload("q", task.batch, task.index)
            elif task.index:
                yield from self._attention(task.batch, task.index - 1)
        elif isinstance(task, Logits):
            for j in task.batches:
                yield "context", j, self.plan.n_layers
                yield from self._attention(j, self.plan.n_layers - 1)
        elif isinstance(task, Attend) and rank == POOL:
            yield "q", task.batch, task.layer, task.part
        elif isinstance(task, Attend):
            yield from (("q", task.batch, task.layer, 0), ("kv", task.batch, task.layer, 0))
        elif isinstance(task, Append):  # what is stored is read first
            yield "kv", task.batch, task.layer, task.part
            if rank != POOL:
                yield "own", task.batch, task.layer
            elif self.plan.batches[task.batch].asks:
                yield "out", task.batch, task.layer, task.part
        elif isinstance(task, HandOver) and rank == task.source:
            yield "context", task.batch, task.slice
            if task.local:
                yield "own", task.batch, task.slice - 1
            if task.carries == "out":
                yield from self._attention(task.batch, task.slice - 1)
            elif task.carries == "qkv":
                yield from (("q", task.batch, task.slice - 1, 0), ("kv", task.batch, task.slice - 1, 0))
        elif isinstance(task, Send | Swap):
            yield from self._carried(task.payload if isinstance(task, Send) else task.send)

    def _carried(self, payload: Payload) -> Iterator[Hashable]:
        what, batch, layer, part = payload
        if what in ("out", "logits"):
            yield what, batch, layer, part
        else:  # a model rank has q, k and v of all parts at once
            yield from ((name, batch, layer, 0) for name in ("q", "kv") if what in (name, "qkv"))

    def _attention(self, j: int, layer: int) -> Iterator[Hashable]:
        """What a model rank needs for an attention output."""
        batch = self.plan.batches[j]
        if batch.asks:
            yield from (("out", j, layer, p) for p in range(batch.n_parts))
        if batch.has_prompts or batch.local:
            yield "own", j, layer
        if self._adds_own(batch):
            yield from (("q", j, layer, 0), ("kv", j, layer, 0))

    def _adds_own(self, batch: PlannedBatch) -> bool:
        return not self.layout.by_heads and any(segment.kind == "decode" for segment in batch.segments)

    def _gives(self, rank: int, task: Task) -> Iterator[Hashable]:
        if isinstance(task, RunSlice):
            if task.piece != "kv":
                yield from (("q", task.batch, task.index, 0), ("rest", task.batch, task.index))
            if task.piece != "q":
                yield from (("kv", task.batch, task.index, 0), ("context", task.batch, task.index + 1))
        elif isinstance(task, Logits):
            yield from (("logits", j, self.plan.n_layers, 0) for j in task.batches)
        elif isinstance(task, Attend):
            yield (
                ("out", task.batch, task.layer, task.part)
                if rank == POOL
                else ("own", task.batch, task.layer)
            )
        elif isinstance(task, HandOver) and rank == task.target:
            yield "context", task.batch, task.slice
            layer = task.slice - 1
            if task.local:
                yield "own", task.batch, layer
            if task.carries == "qkv":
                yield from (("q", task.batch, layer, 0), ("kv", task.batch, layer, 0))
            elif task.carries == "out":
                yield from self._attention(task.batch, layer)
        elif isinstance(task, Send) and task.payload.what == "q":
            yield "sent", task.payload
        elif isinstance(task, Receive | Swap):
            what, batch, layer, part = task.payload if isinstance(task, Receive) else task.receive
            names = ("q", "kv") if what == "qkv" else (what,)
            yield from ((name, batch, layer, part) for name in names)
