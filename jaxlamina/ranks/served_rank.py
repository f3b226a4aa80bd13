"""What ranks other than rank 0 have in common: messages taken in one after another, programs compiled before
they are wanted, and steps that are watched.

Knows the control messages' order; what a rank holds and runs is `model_rank`'s and `attention_rank`'s.
"""

from __future__ import annotations

import platform
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from jaxlamina.job.control.channel import ControlClient
from jaxlamina.job.group import Watch
from jaxlamina.process import garbage
from jaxlamina.process.compile_ahead import Ahead, beside_steps
from jaxlamina.profiling.collect import Recorder
from jaxlamina.profiling.under_load import Window
from jaxlamina.ranks.kv_copies import RankCopies
from jaxlamina.steps.shape import StepShape
from jaxlamina.transports import Program, Transport


class ServedRank(ABC):
    """``run`` returns when rank 0 is done. A kind of rank adds to ``_handlers`` what it does at which
    message."""

    kind: str

    def __init__(
        self, cluster: Cluster, rank: int, transport: Transport, client: ControlClient, watch: Watch
    ) -> None:
        garbage.hold()
        self._cluster, self._rank = cluster, rank
        self._transport, self._client, self._watch = transport, client, watch
        self._epoch = 0  # how many models there have been
        self._last: Any = None  # what the last step leaves when it is done
        self._copies = RankCopies(cluster, rank, client.host)
        self._recorder = Recorder(transport)
        self._window: Window | None = None
        self._why_no_window = ""
        # Programs, each with what it is called with in every step; and those that rank 0 will ask for.
        self._programs: dict[StepShape, tuple[Program, Any]] = {}
        self._ahead: Ahead[tuple[Program, Any]] = Ahead()
        self._behind: set[StepShape] = set()  # begun while steps run, and not asked for yet
        self._beside_steps = ExitStack()  # not empty as long as there are such
        self._tracing = (
            threading.Lock()
        )  # a transport knows what it has sent in the program that is being traced
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.PrepareLater: self._on_prepare_later,
            m.Prepare: self._on_prepare,
            m.HoldCopies: self._on_hold_copies,
            m.Record: self._on_record,
            m.Observe: self._on_observe,
        }

    def run(self) -> None:
        while True:
            message = self._client.receive(None)
            if isinstance(message, m.Bye):
                self._ahead.forget()
                # Also so that its thread waits for no array any more: one that comes back to Python from that
                # while the process ends is the process's SIGABRT.
                self._watch.settle()
                return
            handle = self._handlers.get(type(message))
            if handle is None:
                raise UserError(f"rank 0 sent a {type(message).__name__}, which is not for {self.kind}")
            if self._epoch and isinstance(message, (m.Setup, m.SetupModel)):
                garbage.unsettle()
            handle(message)
            # A program more. While others are traced steps would wait for it: there is much that is new each
            # time.
            if isinstance(message, m.Prepare) and not self._behind:
                garbage.settle()

    def _part(self, shape: StepShape) -> StepShape:
        """The parts of a step that this rank has programs for."""
        return shape

    @abstractmethod
    def _compile_later(self, part: StepShape, behind: bool) -> Callable[[], tuple[Program, Any]]:
        """Traces the program of a part, and gives a call that compiles it; in any thread, one at a time."""

    @abstractmethod
    def _kept(self, part: StepShape, behind: bool) -> tuple[Program, Any] | None:
        """What that call gives, from an earlier process; in any thread."""

    def _on_prepare_later(self, message: m.PrepareLater) -> None:
        self._transport.traceable = message.traceable
        part = self._part(message.shape)
        if part not in self._programs and part not in self._ahead:
            self._ahead.begin(part, partial(self._compiled, part, message.behind))
            if message.behind:
                if not self._behind:
                    self._beside_steps.enter_context(beside_steps())
                self._behind.add(part)

    def _compiled(self, part: StepShape, behind: bool = False) -> tuple[Program, Any]:
        if kept := self._kept(part, behind):
            return kept
        with self._tracing:
            compiles = self._compile_later(part, behind)
        return compiles()

    def _on_prepare(self, message: m.Prepare) -> None:
        began = time.perf_counter()
        self._transport.traceable = message.traceable
        part = self._part(message.shape)
        if not (message.wait or self._ahead.is_done(part)):
            self._client.send(m.Prepared(message.shape, None, 0.0))
            return
        if part not in self._programs:
            self._programs[part] = self._ahead.take(part) or self._compiled(part)
        self._behind.discard(part)
        if not self._behind:
            self._beside_steps.close()
        took = time.perf_counter() - began
        program, _ = self._programs[part]
        self._client.send(m.Prepared(message.shape, program.exchanges(), took))

    def _forget_programs(self) -> None:
        """Another model comes."""
        self._ahead.forget()
        self._behind.clear()
        self._beside_steps.close()
        self._programs, self._last = {}, None

    def _on_hold_copies(self, message: m.HoldCopies) -> None:
        self._client.send(m.CopiesAt(self._copies.hold(message.folder, message.n_sharing)))

    def _on_record(self, message: m.Record) -> None:
        try:
            self._recorder.start(message.steps)
        except UserError as error:
            self._client.send(self._recorder.failed(error))

    def _on_observe(self, message: m.Observe) -> None:
        if message.begin:
            self._window = Window(self._transport.device)
            try:
                self._window.begin()
            except UserError as error:
                self._window, self._why_no_window = None, str(error)
        elif self._window is None:
            self._client.send(m.Observed.failed(platform.node(), self._why_no_window))
        else:
            last = self._last
            self._client.send(self._window.taken(lambda: None if last is None else last.block_until_ready()))
            self._window = None

    def _begin(self, step: m.RunStep) -> int:
        """The watch's ticket for a step, which must be of the model that is set up."""
        if step.epoch != self._epoch:
            raise UserError(f"step {step.step} is of model {step.epoch}, and there have been {self._epoch}")
        return self._watch.begin(f"step {step.step} ({step.shape}) with {self._cluster.describe(0)}")

    def _launched(self, ticket: int, last: Any) -> None:
        """The step's program is launched; ``last`` is there when it is done."""
        self._last = last
        self._watch.until(ticket, last)
        if self._recorder.is_full:
            self._client.send(self._recorder.taken())
