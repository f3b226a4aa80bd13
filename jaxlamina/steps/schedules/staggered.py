"""The schedule of decode steps: n batches over model replicas that share one attention pool (Lamina 2025
§4.3).

Everything follows from one list. A step's slices get slots in turn, slot ``s = slice * n_batches + batch``:
first slice 0 of every batch, then slice 1 of every batch. Every replica runs its slices, and the pool its
attention operators, in the order of their slots. Nothing ever waits for a later slot, so no durations can
lock it up, and the order is the same whatever they are; they decide the times alone.

In the rotational mode slot s falls on replica ``s mod (n - 1)``. If every slice takes t and attention t / (n
- 1), slot s starts at ``s * t / (n - 1)``, just when that replica is done with slot ``s - (n - 1)`` and the
pool with ``s - n``.

In the mode "stages" a replica is a stage of a pipeline: it has some slices in a row, and no other replica has
them. Its slots are in another order, in which pairs of batches follow each other from stage to stage
(`Schedule.turn`).

A replica may keep a share of the KV and attend to that itself (local attention). It does so right after it
has sent q, k and v, so that the pool attends to the rest meanwhile, and before its next slice. With all KV
on the replica there is no exchange and nothing for the pool to do.

Knows neither models, devices nor transports: the programs read the order, drawings and simulators the times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, get_args

Mode: TypeAlias = Literal["none", "fixed", "rotational", "stages"]
MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True)
class Durations:
    """How long things take, in seconds (any unit will do if it is one). ``ValueError`` for what is not above
    0.

    The first slice has the embedding, the last one the LM head; None: as long as any other. An exchange
    occupies its replica and the pool for ``t_exchange_s``, since one program a rank runs it in line; 0 leaves
    it out. Migrations take no time here: they are small enough to go while attention runs (Lamina 2024
    §5.1.1).
    """

    t_slice_s: float = 1.0
    t_attention_s: float = 1.0
    t_first_slice_s: float | None = None
    t_last_slice_s: float | None = None
    t_exchange_s: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            free = f.name == "t_exchange_s" and value == 0
            if value is not None and not free and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{f.name}={value} must be a finite time above 0")

    def of_slice(self, slice_: int, n_layers: int) -> float:
        """How long this slice takes, of the ``n_layers + 1`` that there are."""
        special = {0: self.t_first_slice_s, n_layers: self.t_last_slice_s}.get(slice_)
        return self.t_slice_s if special is None else special


def check_local_share(share: float) -> None:
    """``ValueError`` for what is no share."""
    if not 0 <= share <= 1:
        raise ValueError(f"local_share={share:g} must be a share of attention, from 0 to 1")


class Operator(NamedTuple):
    """One batch's attention operator of one layer: what q, k and v go to and an output comes back from."""

    batch: int
    layer: int


@dataclass(frozen=True)
class SliceRun:
    """A slice on a replica. Slice k comes before attention k; slice ``n_layers`` ends in logits."""

    step: int
    batch: int
    slice: int
    replica: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class AttentionRun:
    """An attention operator on the pool, whose workers all have a share in it."""

    step: int
    batch: int
    layer: int
    start_s: float
    end_s: float

    @property
    def operator(self) -> Operator:
        return Operator(self.batch, self.layer)


@dataclass(frozen=True)
class LocalRun:
    """What a replica attends to itself of an attention operator: the share of the KV that it keeps."""

    step: int
    batch: int
    layer: int
    replica: int
    start_s: float
    end_s: float

    @property
    def operator(self) -> Operator:
        return Operator(self.batch, self.layer)


@dataclass(frozen=True)
class PoolExchange:
    """One meeting of a replica and the pool: q, k and v of ``send`` go in, the output of ``receive`` comes
    out.

    Both are there if they fall together: the replica has ended one batch's slice and next wants another
    batch's attention, which the pool has ended by then. It starts when both sides have come and there is no
    waiting for a message otherwise. q may go ahead of k and v (q first); it is then a part of this exchange
    that goes early.
    """

    step: int
    replica: int
    send: Operator | None
    receive: Operator | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Migration:
    """A batch's context (the residual stream) goes from one replica to the one that runs ``slice``.

    It may take from ``start_s``, when ``source`` has ended the slice before, until ``end_s``, when ``target``
    begins this one: the time of the attention between. It must not hold up ``source``, which runs another
    slice by then: send it without waiting, or by way of the pool: inside source's exchange after the slice
    before, and target's before this. From stage to stage it goes at the place in the step's order that
    ``slice`` has, and may hold ``source`` up.
    """

    step: int
    batch: int
    slice: int
    source: int
    target: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """``n_steps`` decode steps of ``n_batches`` batches. What is in a tuple is in the order in which it is
    run.

    ``replicas[r]`` are the slices of replica r, ``local`` what replicas attend to themselves, ``local_share``
    of all attention; ``attention`` and ``exchanges`` are the pool's. A replica has its exchanges in the
    pool's order. A step is complete in itself: every step has the same order, and
    nothing but the sampled tokens goes from one to the next, so one program a rank serves all steps.
    ``stages``: each slice's replica, in the mode "stages".
    """

    mode: str
    n_batches: int
    n_replicas: int
    n_layers: int
    n_steps: int
    durations: Durations
    replicas: tuple[tuple[SliceRun, ...], ...]
    attention: tuple[AttentionRun, ...]
    exchanges: tuple[PoolExchange, ...]
    migrations: tuple[Migration, ...]
    stages: tuple[int, ...] = ()
    local: tuple[LocalRun, ...] = ()
    local_share: float = 0.0

    @property
    def has_pool(self) -> bool:
        """Whether the pool has anything to attend to."""
        return self.local_share < 1

    @property
    def t_local_s(self) -> float:
        """What a replica attends to itself of an operator takes so long."""
        return self.local_share * self.durations.t_attention_s

    @property
    def t_pool_s(self) -> float:
        """What the pool attends to of an operator takes so long."""
        return (1 - self.local_share) * self.durations.t_attention_s

    def replica_of(self, batch: int, slice_: int) -> int:
        """Where a slice runs. Rotational: ``(batch + slice) mod (n - 1)``; fixed: ``batch mod
        n_replicas``."""
        if self.mode == "stages":
            return self.stages[slice_]
        return (batch + slice_ if self.mode == "rotational" else batch) % self.n_replicas

    @property
    def kind(self) -> str:
        """What a replica is called: "replica" of the model, or "stage" of it."""
        return "stage" if self.mode == "stages" else "replica"

    def turn(self, batch: int, slice_: int) -> tuple[int, ...]:
        """What a step's slots are sorted by.

        Over stages a slot has a round. Two batches go through a stage side by side, so that slices run for
        one while attention is computed for the other; when they are done, and the next stage with the two
        before them, they go there. A stage has as many rounds for each pair as the longest stage has slices.
        Within a round first batches come before second ones, whatever their stage: the pool need not wait for
        the second slice of one stage while it could serve another.
        """
        if self.mode != "stages":
            return slice_, batch
        stage = self.stages[slice_]
        longest = max(Counter(self.stages).values())
        return (batch // 2 + stage) * longest + slice_ - self.stages.index(stage), batch % 2, batch

    def replica_program(
        self, replica: int, step: int = 0
    ) -> tuple[SliceRun | LocalRun | PoolExchange | Migration, ...]:
        """All that one replica does in a step, in order.

        Between two slices: exchanges with the pool, what it attends to itself for the slice before, the next
        slice's context if it comes from elsewhere, and this slice's context if it goes elsewhere. In this
        order nothing locks up even if every message blocks both ends (`check` tries it), but sending a
        context must not block in a rotation: its target runs a slice of its own for a while yet.
        """
        mine = [e for e in self.exchanges if e.replica == replica and e.step == step]
        before = {_input_of(e.receive): e for e in mine if e.receive is not None and e.send is None}
        after = {tuple(e.send): e for e in mine if e.send is not None}
        kept = {tuple(r.operator): r for r in self.local if r.replica == replica and r.step == step}
        moves = [m for m in self.migrations if m.step == step]
        comes = {(m.batch, m.slice): m for m in moves if m.target == replica}
        goes = {(m.batch, m.slice - 1): m for m in moves if m.source == replica}
        runs = {(run.batch, run.slice): run for run in self.replicas[replica] if run.step == step}
        program: list[SliceRun | LocalRun | PoolExchange | Migration | None] = []
        leaving: list[Migration] = []
        last: tuple[int, int] | None = None
        for key, run in runs.items():
            if last == (key[0], key[1] - 1):  # it waits for what it has just sent
                program.append(before.pop(key, None))
            ready = leaving
            if self.mode == "stages":
                # In the step's order, of which every program is a part: so none waits for another in a
                # circle.
                ready = [m for m in leaving if self.turn(m.batch, m.slice) < self.turn(*key)]
                program += [*ready, before.get(key), comes.get(key), run]
            else:  # All send at once around a ring, so each takes first.
                program += [before.get(key), comes.get(key), *ready, run]
            leaving = [m for m in (*leaving, goes.get(key)) if m is not None and m not in ready]
            program += [after.get(key), kept.get(key)]
            last = key
        return tuple(item for item in (*program, *leaving) if item is not None)

    def pool_program(self, step: int = 0) -> tuple[AttentionRun | PoolExchange, ...]:
        """All that the pool does in a step, in order: an operator follows the exchange that brings its q, k
        and v."""
        runs = {run.operator: run for run in self.attention if run.step == step}
        program: list[AttentionRun | PoolExchange] = []
        for exchange in self.exchanges:
            if exchange.step == step:
                program.append(exchange)
                if exchange.send is not None:
                    program.append(runs[exchange.send])
        return tuple(program)


def make_schedule(
    mode: str,
    n_batches: int,
    n_layers: int,
    durations: Durations = Durations(),
    *,
    n_steps: int = 1,
    n_replicas: int | None = None,
    stages: Sequence[int] | None = None,
    local_share: float = 0.0,
) -> Schedule:
    """The schedule of ``n_steps`` decode steps of a model with ``n_layers`` attention operators.

    Modes:

    - ``"none"``: one batch on one replica, which waits for attention after every slice, as the pool does for
      it.
    - ``"rotational"``: n batches, n - 1 replicas, slice k of batch j on replica ``(j + k) mod (n - 1)``, all
      counted from 0 (Lamina 2025 §4.3). k counts anew in every step, so that all steps are one program.
      Unless ``n_layers + 1`` is a multiple of n - 1 replicas wait for that where steps meet.
    - ``"fixed"``: batch j always on replica ``j mod n_replicas``, no migrations (Lamina 2024 §5.1.2).
      Replicas are n - 1 unless given, as many as the rotation has; then replica 0 has two batches if n is
      above 2, sets the pace and the others wait. ``n_replicas=n`` is the paper's Figure 8b. With n = 2 it is
      the rotation.
    - ``"stages"``: slice k of every batch on replica ``stages[k]``: 0 for the first ones, then 1, and so on
      (`jaxlamina.steps.schedules.balanced`). Batches go from stage to stage in pairs, so 2 for each stage
      keep all at work but for the filling and draining of the pipeline; fewer, and one alone, take turns on
      the stages.

    ``local_share``: of every attention operator, what the replica that ran the slice before it does itself:
    of ``t_attention_s`` it takes that share, the pool the rest. With several replicas only stages can: a
    request's KV stays where it is, and they alone have each of its layers in one place.

    Times are those of list scheduling: everything starts as soon as the order, its resource and its input
    allow. Only a step's first slice on replica r keeps the stagger, ``r * t_slice_s / n_replicas`` behind
    replica 0: started sooner, it would end before the pool had time for it. ``ValueError`` for what cannot
    be.

    With equal slices of t and attention of t / (n - 1), a rotation's replicas and pool never wait within a
    step. From a step to the next it takes ``n * (n_layers + 1) + (-(n_layers + 1)) mod (n - 1)`` times t / (n
    - 1).
    """
    for name, value in (("n_layers", n_layers), ("n_steps", n_steps)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    _check_stages(mode, stages, n_layers)
    of_slices = tuple(stages or ())
    replicas = _n_replicas(mode, n_batches, n_replicas, of_slices)
    check_local_share(local_share)
    if local_share and replicas > 1 and mode != "stages":
        one = "2 batches" if mode == "rotational" else "one"
        raise ValueError(
            f"local_share={local_share:g} of the KV is kept on the model rank that runs a request's slices, "
            f"and {replicas} copies of the model are not one: take {one}, stages, or local_share=0"
        )
    given = mode, n_batches, replicas, n_layers, n_steps, durations
    maker = _Maker(Schedule(*given, (), (), (), (), of_slices, (), local_share))
    for step in range(n_steps):
        maker.add(step)
    return maker.schedule()


def _check_stages(mode: str, stages: Sequence[int] | None, n_layers: int) -> None:
    if mode != "stages":
        if stages is not None:
            raise ValueError(f"{stages=} are of mode 'stages', not of {mode=}")
        return
    if stages is None or len(stages) != n_layers + 1:
        raise ValueError(f"{stages=} must be {n_layers + 1} with {mode=}: each slice's")
    if stages[0] != 0 or any(b - a not in (0, 1) for a, b in pairwise(stages)):
        raise ValueError(f"{stages=} must begin with 0 and go up by one at a time")


def _n_replicas(mode: str, n_batches: int, n_replicas: int | None, stages: tuple[int, ...]) -> int:
    if mode not in MODES:
        raise ValueError(f"{mode=} must be one of {', '.join(MODES)}")
    if mode == "none":
        if n_batches != 1:
            raise ValueError(f"{n_batches=} must be 1 with {mode=}: one batch has the model to itself")
        allowed = range(1, 2)
    elif mode == "stages":
        if n_batches < 1:
            raise ValueError(f"{n_batches=} must be at least 1")
        allowed = range(stages[-1] + 1, stages[-1] + 2)
    else:
        if n_batches < 2:
            raise ValueError(f"{n_batches=} must be at least 2 with {mode=}; one batch alone is mode 'none'")
        allowed = range(1, n_batches + 1) if mode == "fixed" else range(n_batches - 1, n_batches)
    if n_replicas is None:
        return allowed[0] if mode == "stages" else max(1, n_batches - 1)
    if n_replicas not in allowed:
        within = f"{allowed[0]}" if len(allowed) == 1 else f"within 1 … {allowed[-1]}"
        raise ValueError(f"{n_replicas=} must be {within} with {mode=} and {n_batches=}")
    return n_replicas


def _input_of(operator: Operator) -> tuple[int, int]:
    """The batch and the slice that an operator's output goes to."""
    return operator.batch, operator.layer + 1


class _Maker:
    """Lays slots down one after the other, in the order of the module's first lines."""

    def __init__(self, plan: Schedule) -> None:
        """``plan``: the schedule with nothing in it yet."""
        self.plan, self.durations = plan, plan.durations
        self.runs: list[list[SliceRun]] = [[] for _ in range(plan.n_replicas)]
        self.attention: list[AttentionRun] = []
        self.exchanges: list[PoolExchange] = []
        self.migrations: list[Migration] = []
        self.local: list[LocalRun] = []
        self.waiting: set[Operator] = set()  # attended to, and nobody has the output yet
        self.free_s = [0.0] * plan.n_replicas  # when each replica is next free
        self.pool_free_s = 0.0
        self.ended_s = [0.0] * plan.n_batches  # when each batch's last slice has ended
        self.begun_s: list[float] = []  # when each replica began with this step
        # The paper's t / (n - 1), but where attention is shorter no replica need wait that long for its turn
        # in the pool.
        self.stagger_s = min(self.durations.t_slice_s / plan.n_replicas, plan.t_pool_s)

    def add(self, step: int) -> None:
        """One step more, slot by slot. What the pool does comes in its order: slots never look ahead."""
        self.begun_s = []
        for batch, slice_, replica, following in self._slots():
            if (own := Operator(batch, slice_ - 1)) in self.waiting:
                self._exchange(step, replica, None, own)
            self._run(step, batch, slice_, replica)
            if slice_ == self.plan.n_layers:
                continue
            send = Operator(batch, slice_)
            if not self.plan.has_pool:
                self._attend_locally(step, replica, send)
                continue
            receive = None if following is None else Operator(following[0], following[1] - 1)
            # In a rotation it was the pool's last one, so nobody waits for the two to fall together.
            self._exchange(step, replica, send, receive if receive in self.waiting else None)
            self._attend(step, send)
            if self.plan.local_share:
                self._attend_locally(step, replica, send)
            if send == receive:  # One batch to a replica: nothing to do while it is in attention.
                self._exchange(step, replica, None, receive)

    def schedule(self) -> Schedule:
        return replace(
            self.plan,
            replicas=tuple(map(tuple, self.runs)),
            attention=tuple(self.attention),
            exchanges=tuple(self.exchanges),
            migrations=tuple(self.migrations),
            local=tuple(self.local),
        )

    def _slots(self) -> Iterator[tuple[int, int, int, tuple[int, int] | None]]:
        """A step's slots: batch, slice, replica, and the batch and slice that this replica runs next in the
        step."""
        every = [(b, k) for k in range(self.plan.n_layers + 1) for b in range(self.plan.n_batches)]
        following: list[tuple[int, int] | None] = [None] * self.plan.n_replicas
        rows = []
        for batch, slice_ in sorted(every, key=lambda slot: self.plan.turn(*slot), reverse=True):
            replica = self.plan.replica_of(batch, slice_)
            rows.append((batch, slice_, replica, following[replica]))
            following[replica] = (batch, slice_)
        return reversed(rows)

    def _run(self, step: int, batch: int, slice_: int, replica: int) -> None:
        # Its attention output has come by then: an exchange frees its replica last.
        start_s = self.free_s[replica]
        if slice_ == 0:
            start_s = max(start_s, self.ended_s[batch])
        if replica == len(self.begun_s):  # slots come to the replicas in turn
            if self.begun_s:
                start_s = max(start_s, self.begun_s[0] + replica * self.stagger_s)
            self.begun_s.append(start_s)
        source = self.plan.replica_of(batch, slice_ - 1) if slice_ else replica
        if source != replica:
            leaves_s = self.ended_s[batch]
            if self.plan.mode == "stages":
                leaves_s = self.free_s[source]
                start_s = max(start_s, leaves_s)
            self.migrations.append(Migration(step, batch, slice_, source, replica, leaves_s, start_s))
        end_s = start_s + self.durations.of_slice(slice_, self.plan.n_layers)
        self.runs[replica].append(SliceRun(step, batch, slice_, replica, start_s, end_s))
        self.free_s[replica] = self.ended_s[batch] = end_s

    def _exchange(self, step: int, replica: int, send: Operator | None, receive: Operator | None) -> None:
        start_s = max(self.free_s[replica], self.pool_free_s)
        end_s = start_s + self.durations.t_exchange_s
        self.exchanges.append(PoolExchange(step, replica, send, receive, start_s, end_s))
        self.free_s[replica] = self.pool_free_s = end_s
        self.waiting.discard(receive)  # type: ignore[arg-type]

    def _attend(self, step: int, operator: Operator) -> None:
        start_s = self.pool_free_s
        self.pool_free_s = start_s + self.plan.t_pool_s
        self.attention.append(AttentionRun(step, *operator, start_s, self.pool_free_s))
        self.waiting.add(operator)

    def _attend_locally(self, step: int, replica: int, operator: Operator) -> None:
        start_s = self.free_s[replica]
        self.free_s[replica] = start_s + self.plan.t_local_s
        self.local.append(LocalRun(step, *operator, replica, start_s, self.free_s[replica]))
