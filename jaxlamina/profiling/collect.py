"""Recording a rank's own steps: JAX's profiler around them, and what its trace says of this rank's program.

On GPUs the trace has each kernel by stream, on CPUs each operator by thread; a CPU's threads are one device
here. Knows traces and one rank's programs; nothing of other ranks.
"""

from __future__ import annotations

import platform
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.job.control import messages as m
from jaxlamina.profiling.spans import Event, spans_of
from jaxlamina.profiling.timeline import BOTH, PUT, TAKE
from jaxlamina.transports import Program, Transport
from jaxlamina.transports.exchanges import by_instruction
from jaxlamina.transports.scopes import (
    EXCHANGE,
    KINDS,
    Scope,
    by_neighbours,
    by_stretch,
    entry_of,
    module_name,
    nameless,
    scopes_of,
    started_by,
)
from pallas_kernels.compat import profile_events

_STEP = "jaxlamina.step"
_END = "end: "
_NCCL = "nccl"  # what every kernel of NCCL's is called here: whose it is, is seen from their order


class Recorder:
    """Runs a rank's programs, and records the steps that it was asked for. Not for several threads."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._left = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._clock_ns: list[int] = []
        self._programs: list[Program] = []

    def start(self, n_steps: int) -> None:
        """Records the next ``n_steps`` steps. ``UserError`` if the profiler is in use."""
        folder = tempfile.TemporaryDirectory()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.enable_hlo_proto = False
        try:
            jax.profiler.start_trace(folder.name, profiler_options=options)
        except RuntimeError as error:
            folder.cleanup()
            raise UserError(f"steps cannot be recorded: {error}") from error
        self._folder, self._left, self._clock_ns, self._programs = folder, n_steps, [], []

    @property
    def is_full(self) -> bool:
        """All steps that were asked for have been recorded: ``take`` them."""
        return self._folder is not None and not self._left

    def run(self, program: Program, *args: Any) -> Any:
        """Calls the program; while it is recorded, also waits for it."""
        if not self._left:
            return program(*args)
        with self.step(program):
            return jax.block_until_ready(program(*args))

    @contextmanager
    def step(self, program: Program) -> Iterator[None]:
        """A step that is recorded, for whoever runs the program himself, and waits for it in here."""
        assert self._left, "no step is to be recorded"
        self._left -= 1
        self._programs.append(program)
        with jax.profiler.TraceAnnotation(_STEP):
            self._clock_ns.append(time.time_ns())
            yield

    def taken(self) -> m.Recorded:
        """`take`, or why not: that a step cannot be read need not end a job."""
        try:
            return self.take()
        except UserError as error:
            return self.failed(error)

    def failed(self, error: UserError) -> m.Recorded:
        return m.Recorded.failed(platform.node(), str(error))

    def take(self) -> m.Recorded:
        """What was recorded. ``UserError`` if the trace has nothing of the programs."""
        assert self._folder is not None and self.is_full
        kept, self._folder = self._folder, None
        with kept as folder:
            jax.profiler.stop_trace()
            known = {id(p): Known.of(p, self._transport) for p in self._programs}
            (path,) = Path(folder).rglob("*.xplane.pb")
            on_cpu = self._transport.device.platform == "cpu"
            steps, events = read(profile_events(str(path)), on_cpu, list(known.values()))
        if len(steps) != len(self._programs):
            raise UserError(f"the profiler's trace has {len(steps)} of the {len(self._programs)} steps")
        spans, meetings = [], []
        for k, ((begun, done), program) in enumerate(zip(steps, self._programs, strict=True)):
            # Where a host has too few cores, the thread that says an operator's end may say it too late.
            own = (e._replace(end_ns=min(e.end_ns, done)) for e in events if begun <= e.start_ns < done)
            inside = sorted(own, key=lambda e: e.start_ns)
            if not inside:
                raise UserError(
                    "the profiler's trace has no operator of this rank's program, so nothing can be said of "
                    "it"
                )
            of = known[id(program)]
            inside = of.exchanges_named(inside)
            for stream, line in spans_of(inside, of.scopes).items():
                spans += [
                    (stream, KINDS.index(s.scope.kind), *s.scope[1:], s.start_ns, s.end_ns) for s in line
                ]
            # An exchange may be several kernels and copies.
            for name, parts in groupby((e for e in inside if e.name in of.peers), key=lambda e: e.name):
                of_name = list(parts)
                whole = of_name[0].start_ns, max(e.end_ns for e in of_name)
                meetings += [(k, *peer, *whole) for peer in of.peers[name]]
        # The clock is read just after an annotation has begun.
        clocks = zip(self._clock_ns, steps, strict=True)
        clock_ns = round(statistics.median(read - begun for read, (begun, _) in clocks))
        return m.Recorded(
            platform.node(),
            _table(steps, 2, clock_ns),
            _table(spans, 6, clock_ns),
            _table(meetings, 5, clock_ns),
        )


def _table(rows: Sequence[tuple[int, ...]], n: int, clock_ns: int) -> m.Array:
    """Rows of n numbers, of which the last two are times since the trace began."""
    table = np.array(rows, np.int64).reshape(-1, n)
    table[:, -2:] += clock_ns
    return m.Array.of(table)


_WAYS = {"put": PUT, "take": TAKE}


@dataclass(frozen=True)
class Known:
    """A program, by the names of its events: what they are for, and whom they meet."""

    module: str
    scopes: dict[str, Scope]
    peers: dict[str, list[tuple[int, int]]]  # rank and way
    exchanges: tuple[str, ...]  # of the entry, in order

    @classmethod
    def of(cls, program: Program, transport: Transport) -> Known:
        hlo = program.hlo()
        exchanges = by_instruction(hlo, transport.rank if transport.name == "xla" else None)
        peers = {
            name: sorted({(e.peer, _WAYS.get(e.op, BOTH)) for e in found})
            for name, found in exchanges.items()
        }
        for name, started in started_by(hlo).items():
            peers[name] = sorted({peer for x in (name, *started) for peer in peers.get(x, ())})
        entry = entry_of(hlo)
        scopes = by_stretch(entry, scopes_of(hlo), peers)
        scopes = by_neighbours(entry, scopes, peers, nameless(hlo))
        by_kernel = {_as_kernel(name): scope for name, scope in scopes.items()} | {_NCCL: EXCHANGE}
        in_order = tuple(name for name in entry if name in peers)
        return cls(module_name(hlo), by_kernel | scopes, peers, in_order)

    def exchanges_named(self, events: Sequence[Event]) -> list[Event]:
        """A step's events, in order, with NCCL's kernels named after the exchanges, if there are as many."""
        n_kernels = sum(e.name == _NCCL for e in events)
        if n_kernels != len(self.exchanges):
            return list(events)
        names = iter(self.exchanges)
        return [e._replace(name=next(names)) if e.name == _NCCL else e for e in events]


def _as_kernel(name: str) -> str:
    """An instruction's name as a GPU kernel of it is called."""
    return re.sub(r"[.\-]", "_", name)


def read(
    rows: Iterable[tuple[str, str, str, int, int, dict[str, Any]]], on_cpu: bool, known: Sequence[Known]
) -> tuple[list[tuple[int, int]], list[Event]]:
    """Of a trace (`profile_events`), the annotated steps in order and these programs' events, whose times are
    nanoseconds since the trace began.

    A CPU's operators are on lines of the threads that run them, with their names as ``hlo_op``. A GPU's
    kernels and copies are on a line a stream, with ``hlo_op`` where XLA launched them one by one; those of a
    CUDA graph may have the graph's name there, or none, and are then known by the kernel's own.
    """
    modules = {program.module for program in known}
    names = set().union(*(program.scopes for program in known))
    steps, events = [], []
    ends: dict[int, int] = {}
    begun: list[tuple[int, Event]] = []
    streams: dict[tuple[str, str], int] = {}
    for plane, line, name, start, duration, stats in rows:
        is_own = stats.get("hlo_module") in modules
        if name == _STEP:
            steps.append((start, start + duration))
        elif on_cpu and name.startswith(_END):
            ends[stats.get("_c", 0)] = start
        elif on_cpu and is_own:
            begun.append((stats.get("_p", -1), Event(stats["hlo_op"], 0, start, start + duration)))
        elif (
            plane.startswith("/device:")
            and line.startswith("Stream")
            and (is_own or "hlo_module" not in stats)
        ):
            stream = streams.setdefault((plane, line), len(streams))
            # A kernel in a CUDA graph may be known by its own name alone, and NCCL's by none that the program
            # has.
            op = str(stats.get("hlo_op", name))
            called = _NCCL if name.startswith(_NCCL) else op if op in names else name
            events.append(Event(called, stream, start, start + duration))
    # A CPU operator that another thread goes on with has an event of its own where it ends.
    events += [e._replace(end_ns=max(e.end_ns, ends.get(flow, 0))) for flow, e in begun]
    return sorted(steps), events
