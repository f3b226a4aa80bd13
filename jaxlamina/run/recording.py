"""Recording steps of a whole job from rank 0: all ranks are told to record, and what they found becomes one
timeline.

Knows rank 0's executor and the control messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.job.control import messages as m
from jaxlamina.job.group import PREPARE_DEADLINE_S, Group
from jaxlamina.profiling.collect import Recorder
from jaxlamina.profiling.spans import Span
from jaxlamina.profiling.timeline import Meeting, RankTrace, Timeline, timeline
from jaxlamina.run.executor import StepLogits
from jaxlamina.run.matched_programs import Own
from jaxlamina.run.parts import Part
from jaxlamina.run.ranks import RanksExecutor
from jaxlamina.steps.batch import DecodeBatch
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.step import Step
from jaxlamina.transports import Program
from jaxlamina.transports.scopes import KINDS, Scope


class RecordingExecutor(RanksExecutor):
    """`RanksExecutor`, whose decode steps can be recorded on all ranks."""

    _latest: tuple[StepShape, Program | None]

    def __init__(self, *args: Any, group: Group, **options: Any) -> None:
        group.transport.traceable = True
        super().__init__(*args, group=group, **options)
        self._on_error: Callable[[Exception], None] | None = None
        self._wanted: tuple[int, int] | None = None  # decode steps to come first, and steps to record then
        self.recorded: Timeline | None = None

    def record_later(
        self, n_before: int, n_steps: int, on_error: Callable[[Exception], None] | None = None
    ) -> None:
        """Once ``n_before`` more decode steps have run, `record` the next one; ``recorded`` is its timeline
        then. If it cannot be, ``on_error`` is told why; without it, the step fails."""
        self._wanted, self.recorded, self._on_error = (n_before, n_steps), None, on_error

    def run(self, step: Step) -> StepLogits:
        batch = None if step.prompts else step.decodes
        if self._wanted is not None and batch is not None:
            n_before, n_steps = self._wanted
            self._wanted = (n_before - 1, n_steps) if n_before else None
            if not n_before:  # steps run again store the same KV in the same slots
                try:
                    self.recorded = self.record(batch, n_steps)
                except (UserError, ValueError) as error:
                    if self._on_error is None:
                        raise
                    self._on_error(error)
        return super().run(step)

    def _run(self, own: Own, head: Part) -> list[jax.Array]:
        self._latest = head.shape, own.program
        return super()._run(own, head)

    def record(self, batch: DecodeBatch, n_steps: int) -> Timeline:
        """Runs a decode step again and again, each once the last is done, and gives ``n_steps`` of them. Two
        more come before them: one that compiles, and one in which ranks begin to record. ``UserError`` if a
        rank cannot."""
        usual = self.n_batches
        self.n_batches = self._settled_n_batches(batch)  # the same steps, whatever is tried out elsewhere
        try:
            return self._record(batch, n_steps)
        finally:
            self.n_batches = usual

    def _record(self, batch: DecodeBatch, n_steps: int) -> Timeline:
        self.decode(batch).block_until_ready()
        shape, program = self._latest
        assert program is not None
        recorder = Recorder(self.group.transport)
        recorder.start(n_steps + 1)
        others = self.matched.others_in(shape)
        for rank in others:
            self.group.send(rank, m.Record(n_steps + 1))
        while not recorder.is_full:
            with recorder.step(program):
                self.decode(batch).block_until_ready()
        found = {0: recorder.taken()}
        found |= {rank: self.group.receive(rank, m.Recorded, PREPARE_DEADLINE_S) for rank in others}
        for rank, recorded in found.items():
            if recorded.error:
                raise UserError(f"{self.group.cluster.describe(rank)}: {recorded.error}")
        return timeline(
            trace_of(self.group, rank, found.get(rank)) for rank in range(self.group.cluster.n_ranks)
        )


def trace_of(group: Group, rank: int, recorded: m.Recorded | None) -> RankTrace:
    """What a rank sent, or that it took no part."""
    cluster = group.cluster
    name, pool = cluster.describe(rank), cluster.role(rank).pool
    if recorded is None:
        return RankTrace(rank, name, pool, "")
    streams: dict[int, list[Span]] = {}
    for stream, kind, index, batch, start, end in recorded.spans.numpy().tolist():
        streams.setdefault(stream, []).append(Span(Scope(KINDS[kind], index, batch), start, end))
    steps: np.ndarray = recorded.steps.numpy()
    return RankTrace(
        rank,
        name,
        pool,
        recorded.host,
        tuple((begun, done) for begun, done in steps.tolist()),
        streams,
        tuple(
            Meeting(step, peer, start, end, way)
            for step, peer, way, start, end in recorded.meetings.numpy().tolist()
        ),
    )
