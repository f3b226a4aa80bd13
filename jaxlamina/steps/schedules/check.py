"""Whether a schedule can be run as it stands, and how much of it is waiting.

`check` knows what a decode step needs, not how a schedule is made: it reads the finished data only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn, TypeAlias

from jaxlamina.steps.schedules.staggered import (
    AttentionRun,
    LocalRun,
    Migration,
    PoolExchange,
    Schedule,
    SliceRun,
)

_Run: TypeAlias = SliceRun | AttentionRun | LocalRun
_Item: TypeAlias = _Run | PoolExchange | Migration
_POOL = "the attention pool"


def check(schedule: Schedule) -> None:
    """Raises a ``ValueError`` that names the first conflict, if there is one.

    In this order: something is missing, twice or unknown; a slice, a replica's own attention or a context is
    on the wrong replica, or an exchange at it; something starts before what it needs has ended; a replica or
    the pool does two things at once, or not in the listed order; the programs, run in their order with every
    message blocking both ends, lock up.
    """
    _check_complete(schedule)
    _check_places(schedule)
    _check_needs(schedule)
    _check_resources(schedule)
    _check_programs(schedule)


def _conflict(text: str) -> NoReturn:
    raise ValueError(f"schedule: {text}")


def _name(item: _Item) -> str:
    if isinstance(item, PoolExchange):
        sides = []
        if item.send is not None:
            sides.append(f"sends batch {item.send.batch} to attention {item.send.layer}")
        if item.receive is not None:
            sides.append(f"receives batch {item.receive.batch} from attention {item.receive.layer}")
        return (
            f"step {item.step}'s exchange of replica {item.replica} that {' and '.join(sides) or 'is empty'}"
        )
    if isinstance(item, AttentionRun):
        return f"attention {item.layer} of batch {item.batch} in step {item.step}"
    if isinstance(item, LocalRun):
        return f"the replica's own attention {item.layer} of batch {item.batch} in step {item.step}"
    what = "slice" if isinstance(item, SliceRun) else "the context before slice"
    return f"{what} {item.slice} of batch {item.batch} in step {item.step}"


# --- the order ---


def _check_complete(s: Schedule) -> None:
    if len(s.replicas) != s.n_replicas:
        _conflict(f"{len(s.replicas)} replicas have slices, not {s.n_replicas}")
    pairs = [(step, b) for step in range(s.n_steps) for b in range(s.n_batches)]
    slices = {(*p, k) for p in pairs for k in range(s.n_layers + 1)}
    layers = {(*p, k) for p in pairs for k in range(s.n_layers)}
    by_pool, kept = (layers if has_any else set() for has_any in (s.has_pool, s.local_share > 0))
    moves = {(t, b, k) for t, b, k in slices if k and s.replica_of(b, k - 1) != s.replica_of(b, k)}
    sent = [(e.step, *e.send) for e in s.exchanges if e.send is not None]
    received = [(e.step, *e.receive) for e in s.exchanges if e.receive is not None]
    _check_each_once("slice", slices, ((r.step, r.batch, r.slice) for runs in s.replicas for r in runs))
    _check_each_once("attention", by_pool, ((r.step, r.batch, r.layer) for r in s.attention))
    own = ((r.step, r.batch, r.layer) for r in s.local)
    _check_each_once("the replica's own attention", kept, own)
    _check_each_once("the sending to attention", by_pool, sent)
    _check_each_once("the receipt from attention", by_pool, received)
    _check_each_once("the context before slice", moves, ((m.step, m.batch, m.slice) for m in s.migrations))
    for exchange in s.exchanges:
        if exchange.send is None and exchange.receive is None:
            _conflict(_name(exchange))


def _check_each_once(
    what: str, wanted: set[tuple[int, int, int]], found: Iterable[tuple[int, int, int]]
) -> None:
    seen: set[tuple[int, int, int]] = set()
    for key in found:
        if key in seen or key not in wanted:
            step, batch, k = key
            wrong = "is there twice" if key in seen else "is not part of this schedule"
            _conflict(f"{what} {k} of batch {batch} in step {step} {wrong}")
        seen.add(key)
    for step, batch, k in sorted(wanted - seen):
        _conflict(f"{what} {k} of batch {batch} in step {step} is missing")


def _check_places(s: Schedule) -> None:
    for replica, runs in enumerate(s.replicas):
        for run in runs:
            right = s.replica_of(run.batch, run.slice)
            if not run.replica == replica == right:
                _conflict(
                    f"{_name(run)} is on replica {replica}, marked {run.replica}; it belongs on {right}"
                )
    for own in s.local:
        if own.replica != (right := s.replica_of(own.batch, own.layer)):
            _conflict(f"{_name(own)} is on replica {own.replica}; {right} runs that slice")
    for m in s.migrations:
        source, target = s.replica_of(m.batch, m.slice - 1), s.replica_of(m.batch, m.slice)
        if (m.source, m.target) != (source, target):
            _conflict(f"{_name(m)} goes from {m.source} to {m.target}, not from {source} to {target}")
    for e in s.exchanges:
        if e.send is not None and e.replica != s.replica_of(*e.send):
            _conflict(f"{_name(e)}, but replica {s.replica_of(*e.send)} runs that slice")
        if e.receive is not None and e.replica != s.replica_of(e.receive.batch, e.receive.layer + 1):
            right = s.replica_of(e.receive.batch, e.receive.layer + 1)
            _conflict(f"{_name(e)}, but replica {right} runs the slice after it")


# --- the times ---


def _tolerance_s(s: Schedule) -> float:
    """What rounding may do to times that should be equal."""
    return 1e-9 * max((run.end_s for runs in s.replicas for run in runs), default=0.0)


def _programs(s: Schedule) -> dict[str, list[_Item]]:
    programs: dict[str, list[_Item]] = {
        f"replica {r}": [item for step in range(s.n_steps) for item in s.replica_program(r, step)]
        for r in range(s.n_replicas)
    }
    programs[_POOL] = [item for step in range(s.n_steps) for item in s.pool_program(step)]
    return programs


def _check_resources(s: Schedule) -> None:
    slack = _tolerance_s(s)
    for who, program in _programs(s).items():
        # Contexts go beside what a replica does.
        items = [item for item in program if not isinstance(item, Migration)]
        for item in items:
            if item.end_s < item.start_s:
                _conflict(f"{_name(item)} ends before it starts")
        for a, b in pairwise(items):
            if b.start_s < a.end_s - slack:
                _conflict(f"{who} is to start {_name(b)} before {_name(a)} has ended")
    listed: list[Sequence[_Run | PoolExchange]] = [*s.replicas, s.attention, s.exchanges]
    listed += [[run for run in s.local if run.replica == replica] for replica in range(s.n_replicas)]
    for runs in listed:
        for first, then in pairwise(runs):
            if (then.step, then.start_s) < (first.step, first.start_s - slack):
                _conflict(f"{_name(then)} starts before {_name(first)}, which is listed before it")


def _check_needs(s: Schedule) -> None:
    slack = _tolerance_s(s)
    slices = {(r.step, r.batch, r.slice): r for runs in s.replicas for r in runs}
    attention = {(r.step, r.batch, r.layer): r for r in s.attention}
    for first, then in _needs(s, slices, attention):
        if then.start_s < first.end_s - slack:
            _conflict(f"{_name(then)} starts before the end of {_name(first)}, which it needs")
    for m in s.migrations:
        source, target = slices[m.step, m.batch, m.slice - 1], slices[m.step, m.batch, m.slice]
        for own in s.local:
            goes_with = (own.step, own.batch, own.layer) == (m.step, m.batch, m.slice - 1)
            if goes_with and m.start_s < own.end_s - slack:
                _conflict(f"{_name(m)} starts before the end of {_name(own)}, which goes with it")
        if (
            m.start_s < source.end_s - slack
            or m.end_s > target.start_s + slack
            or m.end_s < m.start_s - slack
        ):
            _conflict(f"{_name(m)} does not go between the end of the slice before and the start of this one")


def _needs(
    s: Schedule,
    slices: dict[tuple[int, int, int], SliceRun],
    attention: dict[tuple[int, int, int], AttentionRun],
) -> Iterator[tuple[_Run | PoolExchange, _Run | PoolExchange]]:
    """What must end and what may start then: slice, sending, attention, receipt, slice; slice, the replica's
    own attention, slice; a token, the next step."""
    for (step, batch, k), run in slices.items():
        if k == 0 and step > 0:
            yield slices[step - 1, batch, s.n_layers], run
        elif k > 0 and s.has_pool:
            yield attention[step, batch, k - 1], run
    for (step, batch, k), at in attention.items():
        yield slices[step, batch, k], at
    for own in s.local:
        yield slices[own.step, own.batch, own.layer], own
        yield own, slices[own.step, own.batch, own.layer + 1]
    for e in s.exchanges:
        if e.send is not None:
            yield slices[e.step, *e.send], e
            yield e, attention[e.step, *e.send]
        if e.receive is not None:
            yield attention[e.step, *e.receive], e
            yield e, slices[e.step, e.receive.batch, e.receive.layer + 1]


# --- the programs ---


def _check_programs(s: Schedule) -> None:
    """Runs all programs with no clock: a message passes when both ends have come to it, a run when its input
    is there."""
    programs = _programs(s)
    at = dict.fromkeys(programs, 0)
    done: set[Hashable] = set()

    def head(who: str) -> _Item | None:
        return programs[who][at[who]] if at[who] < len(programs[who]) else None

    moved = True
    while moved:
        moved = False
        for who in programs:
            while (item := head(who)) is not None:
                ends = _ends(item)
                if any(head(end) != item for end in ends) or any(n not in done for n in _inputs(s, item)):
                    break
                done.update(_outputs(item))
                for end in ends:
                    at[end] += 1
                moved = True
    waiting = [f"{who} at {_name(item)}" for who in programs if (item := head(who)) is not None]
    if waiting:
        _conflict(f"the programs lock up: {'; '.join(waiting)}")


def _ends(item: _Item) -> tuple[str, ...]:
    if isinstance(item, SliceRun | LocalRun):
        return (f"replica {item.replica}",)
    if isinstance(item, AttentionRun):
        return (_POOL,)
    if isinstance(item, PoolExchange):
        return f"replica {item.replica}", _POOL
    return f"replica {item.source}", f"replica {item.target}"


def _inputs(s: Schedule, item: _Item) -> list[Hashable]:
    step = item.step
    if isinstance(item, SliceRun):
        if item.slice == 0:
            return [("slice", step - 1, item.batch, s.n_layers)] if step else []
        needs: list[Hashable] = [("out", step, item.batch, item.slice - 1)] if s.has_pool else []
        needs += _own(s, step, item.batch, item.slice - 1)
        if s.replica_of(item.batch, item.slice - 1) != s.replica_of(item.batch, item.slice):
            needs.append(("context", step, item.batch, item.slice))
        return needs
    if isinstance(item, AttentionRun):
        return [("qkv", step, item.batch, item.layer)]
    if isinstance(item, LocalRun):
        return [("slice", step, item.batch, item.layer)]
    if isinstance(item, Migration):
        return [("slice", step, item.batch, item.slice - 1), *_own(s, step, item.batch, item.slice - 1)]
    needs = [] if item.send is None else [("slice", step, *item.send)]
    return needs if item.receive is None else [*needs, ("attention", step, *item.receive)]


def _own(s: Schedule, step: int, batch: int, layer: int) -> list[Hashable]:
    """The replica's own attention, if it has a share."""
    return [("own", step, batch, layer)] if s.local_share else []


def _outputs(item: _Item) -> list[Hashable]:
    step = item.step
    if isinstance(item, SliceRun):
        return [("slice", step, item.batch, item.slice)]
    if isinstance(item, AttentionRun):
        return [("attention", step, item.batch, item.layer)]
    if isinstance(item, LocalRun):
        return [("own", step, item.batch, item.layer)]
    if isinstance(item, Migration):
        return [("context", step, item.batch, item.slice)]
    sides = (("qkv", item.send), ("out", item.receive))
    return [(name, step, *operator) for name, operator in sides if operator is not None]


# --- the waiting ---


@dataclass(frozen=True)
class Shares:
    """What a replica or the pool does with its time; the four add up to 1. ``busy``: with slices and
    attention. A pool that has nothing to attend to is idle at its ends.

    ``idle_within``: waiting between its first and its last run of one step. ``idle_boundary``: waiting from
    its last run of a step to its first of the next.
    """

    busy: float
    exchange: float
    idle_within: float
    idle_boundary: float


@dataclass(frozen=True)
class Bubbles:
    """Every resource's `Shares`, and the seconds from one step's beginning to the next one's."""

    replicas: tuple[Shares, ...]
    attention: Shares
    step_s: float


def bubbles(schedule: Schedule) -> Bubbles:
    """How much of a step every replica and the pool wait, of a schedule that `check` accepts.

    Measured over a resource's last whole cycle: from its first run of the last step but one to its first run
    of the last one, so neither the filling of the pipeline nor its draining is in it; the more steps before,
    the less is left of the start. A schedule of one step has no boundary: from its first to its last run, and
    ``step_s`` is all of it.
    """
    s = schedule
    step = max(s.n_steps - 2, 0)
    by_replica = [[e for e in s.exchanges if e.replica == r] for r in range(s.n_replicas)]
    own = [[r for r in s.local if r.replica == replica] for replica in range(s.n_replicas)]
    work: list[list[_Run]] = [[*runs, *mine] for runs, mine in zip(s.replicas, own, strict=True)]
    for runs in work:
        runs.sort(key=lambda run: run.start_s)
    replicas = tuple(_shares(runs, mine, step) for runs, mine in zip(work, by_replica, strict=True))
    starts_s = [min(r.start_s for runs in s.replicas for r in runs if r.step == k) for k in range(s.n_steps)]
    ends_s = max(r.end_s for runs in s.replicas for r in runs)
    step_s = (starts_s[step + 1] if s.n_steps > 1 else ends_s) - starts_s[step]
    return Bubbles(replicas, _shares(s.attention, s.exchanges, step), step_s)


def _shares(runs: Sequence[_Run], exchanges: Sequence[PoolExchange], step: int) -> Shares:
    now = [r for r in runs if r.step == step]
    if not now:
        return Shares(0.0, 0.0, 0.0, 1.0)
    start_s, last_s = now[0].start_s, now[-1].end_s
    end_s = next((r.start_s for r in runs if r.step == step + 1), last_s)
    busy_s = sum(r.end_s - r.start_s for r in now)
    within_s, boundary_s = (
        sum(max(0.0, min(e.end_s, b) - max(e.start_s, a)) for e in exchanges)
        for a, b in ((start_s, last_s), (last_s, end_s))
    )
    whole_s = end_s - start_s
    return Shares(
        busy=busy_s / whole_s,
        exchange=(within_s + boundary_s) / whole_s,
        # Rounding must not make less than no time of it.
        idle_within=max(0.0, last_s - start_s - busy_s - within_s) / whole_s,
        idle_boundary=max(0.0, end_s - last_s - boundary_s) / whole_s,
    )
