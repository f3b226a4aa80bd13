"""A plan's tasks one after the other, with times: when each rank ends a step. Pure.

Tasks of a rank come in the order of its list. A message is there when it has been sent, or both ends of it
meet, as the transport has it. Which task comes before which does not depend on times, so that the lists of
all ranks are put into one order once for each plan, and a walk is one pass over that.

Sources: `jaxlamina.steps.tasks` for what tasks are. With every end blocking this is what the plan checker of
the tests rehearses without a clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlamina.errors import UserError
from jaxlamina.planner.terms import Numbers
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import Plan, plan_of, why_not
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import (
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

_RUN, _PUT, _TAKE, _MEET = range(4)
_STEPS = 4  # at most in a row, of which the last one is taken
_SETTLED = 1e-9

BEGIN = "begin"


class _Piece(NamedTuple):
    """Of a task: what is one thing for the clock. ``key``: whose time it takes; ``message``: which it puts,
    takes or meets the other end of."""

    op: int
    key: str
    message: Hashable = None


class Walked(NamedTuple):
    """Seconds of one step after others: ``step_s`` from one end to the next; what each rank is at work and in
    messages, waiting for the other end left out."""

    step_s: Numbers
    work_s: Mapping[int, Numbers]
    messages_s: Mapping[int, Numbers]


@dataclass(frozen=True)
class _Order:
    """All ranks' pieces in one order: (op, rank, key, message or other rank), as numbers."""

    ranks: tuple[int, ...]
    keys: tuple[str, ...]
    ops: tuple[tuple[int, int, int, int], ...]
    n_messages: int
    works: Mapping[int, Mapping[str, int]]  # of each rank how often each key
    messages: Mapping[int, Mapping[tuple[int, str], int]]


def walk(
    layout: Layout,
    shape: StepShape,
    n_layers: int,
    times: Mapping[str, Numbers],
    ends: Mapping[str, tuple[Numbers, Numbers]],
    is_rendezvous: bool,
    on_wire: Mapping[str, Numbers] = MappingProxyType({}),
    n_at_once: int | None = None,
) -> Walked:
    """``times``: seconds of work by key (`work_key`), and of rendezvous messages; ``ends``: of other messages
    what putting one takes, and taking it once it is there; ``on_wire``: what it is on its way, one after the
    other of a sender's, while that goes on. ``n_at_once``: steps that are walked together; then any of these
    numbers may be an array. ``UserError`` where there is no such plan."""
    if reason := why_not(layout, shape):
        raise UserError(reason)
    order = _order(_alike(layout), shape, n_layers, is_rendezvous)
    of_keys: list[Any] = [times.get(key, 0.0) for key in order.keys]
    puts, takes = ([ends.get(key, (0.0, 0.0))[i] for key in order.keys] for i in range(2))
    wires = [on_wire.get(key, 0.0) for key in order.keys]
    clock = _Clock(order, of_keys, puts, takes, wires)
    step_s = clock.one() if n_at_once is None else clock.several(n_at_once)
    work: dict[int, Numbers] = {
        rank: sum(n * times.get(key, 0.0) for key, n in counts.items())
        for rank, counts in order.works.items()
    }
    talk: dict[int, Numbers] = {
        rank: sum(n * _end_s(op, key, times, ends) for (op, key), n in counts.items())
        for rank, counts in order.messages.items()
    }
    return Walked(step_s, work, talk)


class _Clock(NamedTuple):
    """Steps in a row, by the number of each key: seconds of work, of putting, of taking, on the way."""

    order: _Order
    of_keys: Sequence[Any]
    puts: Sequence[Any]
    takes: Sequence[Any]
    wires: Sequence[Any]

    def one(self) -> float:
        order, of_keys, puts, takes, wires = self
        free, there = [0.0] * len(order.ranks), [0.0] * order.n_messages
        wire = [0.0] * len(order.ranks)  # when each sender's last message has come
        front_s = [0.0]
        for _ in range(_STEPS):  # a search is mostly this loop, where calls of `max` were a third
            for op, rank, key, other in order.ops:
                if op == _RUN:
                    free[rank] += of_keys[key]
                elif op == _PUT:
                    free[rank] = now = free[rank] + puts[key]
                    sent = wire[rank]
                    there[other] = wire[rank] = (now if now > sent else sent) + wires[key]  # noqa: FURB136
                elif op == _TAKE:
                    now, come = free[rank], there[other]
                    free[rank] = (now if now > come else come) + takes[key]  # noqa: FURB136
                else:
                    now, come = free[rank], free[other]
                    free[rank] = free[other] = (now if now > come else come) + of_keys[key]  # noqa: FURB136
            front_s.append(max(free))
            if len(front_s) > 2 and math.isclose(
                front_s[-1] - front_s[-2], front_s[-2] - front_s[-3], rel_tol=_SETTLED
            ):
                break  # what follows takes as long again
        return front_s[-1] - front_s[-2]

    def several(self, n: int) -> NDArray[np.float64]:
        """The same sums of ``n`` steps, in the same order."""
        order, of_keys, puts, takes, wires = self
        free, wire = (list(np.zeros((len(order.ranks), n))) for _ in range(2))
        there = list(np.empty((order.n_messages, n)))
        has_wires = any(np.any(seconds) for seconds in wires)
        front_s, settled = [np.zeros(n)], np.zeros(n, bool)
        step_s = front_s[0]
        for _ in range(_STEPS):
            for op, rank, key, other in order.ops:
                now = free[rank]
                if op == _RUN:
                    now += of_keys[key]
                elif op == _PUT:
                    now += puts[key]
                    there[other][:] = now
                    if has_wires:
                        sent = np.maximum(now, wire[rank], out=wire[rank])
                        sent += wires[key]
                        there[other][:] = sent
                elif op == _TAKE:
                    np.maximum(now, there[other], out=now)
                    now += takes[key]
                else:
                    np.maximum(now, free[other], out=now)
                    now += of_keys[key]
                    free[other][:] = now
            front_s.append(np.maximum.reduce(free))
            last_s = front_s[-1] - front_s[-2]
            step_s = np.where(settled, step_s, last_s)
            if len(front_s) > 2:
                before_s = front_s[-2] - front_s[-3]
                longest_s = np.maximum(np.abs(last_s), np.abs(before_s))
                settled |= np.abs(last_s - before_s) <= _SETTLED * longest_s
                if settled.all():
                    break
        return step_s


def _end_s(
    op: int, key: str, times: Mapping[str, Numbers], ends: Mapping[str, tuple[Numbers, Numbers]]
) -> Numbers:
    return times.get(key, 0.0) if op == _MEET else ends.get(key, (0.0, 0.0))[op == _TAKE]


def work_key(task: Task, on_pool: bool) -> str:
    """Which time of work a task takes."""
    if isinstance(task, RunSlice):
        return f"{'first' if task.index == 0 else 'slice'} {task.piece}"
    if isinstance(task, Logits):
        return "last"
    if isinstance(task, Attend):
        return "attend" if on_pool else "attend here"
    assert isinstance(task, Append)
    return "append"


def message_key(payload: Payload) -> str:
    return payload.what


def _alike(layout: Layout) -> Layout:
    """One for all layouts whose plans have the same tasks: how many attention workers there are, and how much
    of the KV model ranks keep, changes their times alone. A search goes through ten of each of them."""
    return replace(
        layout,
        workers=(0, 1),
        partition="heads" if layout.by_heads else "tokens",
        local_share=0.5 if layout.has_pool and layout.attends_locally else layout.local_share,
        heads_over=1,
    )


@lru_cache(256)
def _order(layout: Layout, shape: StepShape, n_layers: int, is_rendezvous: bool) -> _Order:
    plan = plan_of(layout, shape, n_layers)
    lists = {rank: list(_pieces(plan, rank, tasks, is_rendezvous)) for rank, tasks in plan.model.items()}
    if plan.pool:
        lists[POOL] = list(_pieces(plan, POOL, plan.pool, is_rendezvous))
    ranks, keys, messages = tuple(lists), dict[str, int](), dict[Hashable, int]()
    index = {rank: i for i, rank in enumerate(ranks)}
    at = dict.fromkeys(ranks, 0)
    ops: list[tuple[int, int, int, int]] = []
    put: set[Hashable] = set()
    met: dict[Hashable, int] = {}  # an end that waits for the other one
    moved = True
    while moved:
        moved = False
        for rank, pieces in lists.items():
            while at[rank] < len(pieces):
                op, key, message = pieces[at[rank]]
                number = keys.setdefault(key, len(keys))
                if op == _MEET:
                    peer = met.get(message)
                    if peer is None or peer == rank:
                        met[message] = rank
                        break
                    ops.append((op, index[rank], number, index[peer]))
                    at[peer] += 1
                elif op == _TAKE and message not in put:
                    break
                else:
                    put.update([message] if op == _PUT else [])
                    ops.append((op, index[rank], number, messages.setdefault(message, len(messages))))
                at[rank] += 1
                moved = True
    assert all(at[rank] == len(pieces) for rank, pieces in lists.items()), "a plan's lists stop short"
    works = {rank: Counter(p.key for p in pieces if p.op == _RUN) for rank, pieces in lists.items()}
    talks = {rank: Counter((p.op, p.key) for p in pieces if p.op != _RUN) for rank, pieces in lists.items()}
    return _Order(ranks, tuple(keys), tuple(ops), len(messages), works, talks)


def _pieces(plan: Plan, rank: int, tasks: tuple[Task, ...], is_rendezvous: bool) -> Iterator[_Piece]:
    """A rank's list for the clock. What takes no time of its own is left out."""
    yield _Piece(_RUN, BEGIN if rank != POOL else "begin pool")
    for task in tasks:
        if isinstance(task, Swap):
            if is_rendezvous:
                both = "/".join(sorted((message_key(task.send), message_key(task.receive))))
                yield _Piece(_MEET, both, frozenset((task.send, task.receive)))
            else:
                yield _Piece(_PUT, message_key(task.send), task.send)
                yield _Piece(_TAKE, message_key(task.receive), task.receive)
        elif isinstance(task, Send | Receive):
            op = _MEET if is_rendezvous else _PUT if isinstance(task, Send) else _TAKE
            yield _Piece(op, message_key(task.payload), task.payload)
        elif isinstance(task, HandOver):
            op = _MEET if is_rendezvous else _PUT if rank == task.source else _TAKE
            yield _Piece(op, f"hand over {task.carries}", task)
        else:
            yield _Piece(_RUN, work_key(task, rank == POOL))
