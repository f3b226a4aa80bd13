"""Rank 0's programs of steps' shapes, each compiled on all ranks and found to match before anyone runs it.

A shape is compiled before its first step, or ahead of that: `MatchedPrograms.compile_later` has all ranks
begin, `MatchedPrograms.are_ready` looks whether they are done. Knows shapes, the group and what rank 0's
programs are made of (`jaxlamina.ranks.model_side`); no step, no slot, and not which shapes there will be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlamina.errors import UserError
from jaxlamina.job.control import messages as m
from jaxlamina.job.group import PREPARE_DEADLINE_S, Group
from jaxlamina.process.compile_ahead import side_by_side
from jaxlamina.process.compile_counts import Programs
from jaxlamina.process.turns import between_parts
from jaxlamina.ranks.model_side import ModelSide, OwnWeights, receiver
from jaxlamina.steps.exchange import Exchange
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.transports import Program
from jaxlamina.transports.exchanges import first_difference
from jaxlamina.workers.model_worker import Params


class Own(NamedTuple):
    """What rank 0 runs of a step: a program with its weights, unless only prefill workers are in it, and then
    one that takes in their logits, if they are."""

    program: Program | None
    weights: OwnWeights | None
    receive: Program | None

    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(e for program in (self.program, self.receive) if program for e in program.exchanges())


class MatchedPrograms:
    """``of`` each step's shape. ``counts``: is told of each shape that is found to match."""

    def __init__(self, group: Group, side: ModelSide, counts: Programs) -> None:
        self._group, self._side, self._counts = group, side, counts
        self._matched: dict[StepShape, Own] = {}
        self._begun: set[StepShape] = set()  # told of by `compile_later`
        self._compiled: dict[Any, Any] = {}  # rank 0's programs, which several shapes may have in common
        # The transport knows what it has sent in the program that is being traced.
        self._tracing = threading.Lock()
        self._in_turn = threading.Lock()  # one of those that give way waits to trace, and not all of them

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """Those whose programs have been found to match."""
        return tuple(self._matched)

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._matched

    def of(self, shape: StepShape) -> Own:
        """Waits until all ranks have compiled theirs. ``UserError`` where they do not match."""
        found = self._match(shape, wait=True)
        assert found is not None
        return found

    def workers_in(self, shape: StepShape) -> tuple[int, ...]:
        """The attention workers that take part in a step: all, or none where model ranks attend to all of
        it."""
        return self._group.workers if self._plan(shape).pool else ()

    def others_in(self, shape: StepShape) -> tuple[int, ...]:
        """All ranks but this one that take part in a step."""
        return (*self._group.model_ranks_in(shape), *self.workers_in(shape))

    def compile_later(self, shapes: Iterable[StepShape], behind: bool) -> Callable[[], Any] | None:
        """What compiles rank 0's programs, in any thread; the other ranks begin with theirs now. None if
        nothing is missing. ``behind``: while steps run."""
        missing = [shape for shape in shapes if shape not in self._matched]
        self._begun.update(missing)
        if not missing:
            return None
        for shape in missing:
            for rank in self.others_in(shape):
                self._group.send(rank, m.PrepareLater(shape, self._group.transport.traceable, behind))

        own = {rows: None for shape in missing if (rows := shape.part_of(0)) is not None}

        def compile_one(rows: StepShape) -> None:
            if rows not in self._compiled:
                self._compiled[rows] = self._compile(rows, behind)

        return lambda: side_by_side([partial(compile_one, rows) for rows in own])

    def are_ready(self, shapes: Iterable[StepShape]) -> bool:
        """Finds that the ranks' programs match, of those that `compile_later` began with; False while another
        rank is compiling its own."""
        return all(self._match(shape, wait=False) for shape in shapes if shape in self._begun)

    def put_weights(self, params: Params) -> None:
        """Rank 0's programs take these from now on."""
        with self._tracing:
            self._side.put_weights(params)

    def _match(self, shape: StepShape, *, wait: bool) -> Own | None:
        """None, unless told to ``wait``, while another rank is compiling its own."""
        if shape in self._matched:
            return self._matched[shape]
        self._plan(shape)  # what cannot be is said before anybody else hears of it
        others = self.others_in(shape)
        for rank in others:
            self._group.send(rank, m.Prepare(shape, self._group.transport.traceable, wait))
        try:
            own = self._own(shape)
        # the others' answers are taken in whatever happens here, or they would be taken for the next ones
        finally:
            answers = [self._group.receive(rank, m.Prepared, PREPARE_DEADLINE_S) for rank in others]
        lists = {0: own.exchanges()}
        for rank, answer in zip(others, answers, strict=True):
            if answer.exchanges is None:
                return None
            lists[rank] = answer.exchanges
        self._counts.compiled(str(shape))
        difference = first_difference(lists, self._group.cluster.describe)
        if difference is not None:
            raise UserError(f"the ranks' programs of {shape} do not match, so none is run: {difference}")
        self._matched[shape] = own
        return own

    def _own(self, shape: StepShape) -> Own:
        """Compiled where no shape before had the same."""
        rows, program, weights, receive = shape.part_of(0), None, None, None
        if rows is not None:
            if rows not in self._compiled:
                self._compiled[rows] = self._compile(rows)
            program, weights = self._compiled[rows]
        sources = tuple((part.rank, part.logits_of) for part in shape.parts if part.rank)
        if sources:
            if sources not in self._compiled:
                n_words = self._side.model.split(1).traced.jaxpr.outvars[0].aval.shape[-1]
                likes = [jax.ShapeDtypeStruct((*of, n_words), jnp.float32) for _, of in sources]
                ranks = [rank for rank, _ in sources]
                self._compiled[sources] = receiver(self._group.transport, likes, ranks)
            receive = self._compiled[sources]
        return Own(program, weights, receive)

    def _compile(self, rows: StepShape, behind: bool = False) -> tuple[Program, OwnWeights]:
        between_parts()
        if kept := self._side.kept(rows, behind):
            return kept
        with self._in_turn if behind else nullcontext():
            between_parts()
            with self._tracing:
                compiles = self._side.compile_later(rows, behind)
        return compiles()

    def _plan(self, shape: StepShape) -> Any:
        return plan_of(self._side.layout, shape, len(self._side.specs))
