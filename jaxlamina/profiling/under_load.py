"""What devices did in a stretch of time in which an engine was at work: computing, exchanging messages, or
nothing.

Steps run as they would, launched ahead and not waited for; JAX's profiler (CUPTI, on NVIDIA GPUs) records
what each rank's device runs meanwhile, and the gaps between are what it was idle. An exchange lasts from when
the device begins to wait for the other end. Recording itself costs the host some time for each kernel, so
idleness is at most this. Knows traces, the control messages and an engine's counters; no request.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from jaxlamina.errors import UserError
from jaxlamina.job.control import messages as m
from jaxlamina.profiling.spans import LAUNCH_NS, Span, flat, totals_ns, with_bubbles
from jaxlamina.transports.scopes import EXCHANGE, Scope
from pallas_kernels.compat import profile_events

_BEGIN, _END = "jaxlamina.begin", "jaxlamina.end"
_COMPUTE = Scope("model")
# By their names alone, since kernels of a CUDA graph have no other: the mailbox's, NCCL's, XLA's collectives
# and MPI calls.
_EXCHANGES = re.compile(r"mail_|nccl|permute|all-to-all|all-gather|all-reduce|send|recv|mpi", re.IGNORECASE)
_N_KERNELS = 12
_log = logging.getLogger("uvicorn.error")

Row = tuple[str, str, str, int, int, dict[str, Any]]


def device_events(rows: Iterable[Row], on_cpu: bool) -> tuple[tuple[int, int], list[tuple[str, int, int]]]:
    """Of a trace (`profile_events`) what is between its two marks: their times, and name, start and end of
    all that the device ran. ``UserError`` without marks."""
    marks: dict[str, int] = {}
    found: list[tuple[str, int, int]] = []
    for plane, line, name, start, duration, stats in rows:
        if name in (_BEGIN, _END):
            marks[name] = start
        elif on_cpu and "hlo_op" in stats:
            found.append((str(stats["hlo_op"]), start, start + duration))
        elif not on_cpu and plane.startswith("/device:") and line.startswith("Stream"):
            found.append((name, start, start + duration))
    if len(marks) < 2:
        raise UserError("the profiler's trace has not both marks of the time that was to be recorded")
    begin, end = marks[_BEGIN], marks[_END]
    return (begin, end), [e for e in found if e[2] > begin and e[1] < end]


def observed(
    host: str, window: tuple[int, int], events: Sequence[tuple[str, int, int]], launch_ns: int = LAUNCH_NS
) -> m.Observed:
    """The window's nanoseconds by what the device did. Gaps of at most ``launch_ns`` are a launch and no
    idleness."""
    spans = [Span(EXCHANGE if _EXCHANGES.search(name) else _COMPUTE, a, b) for name, a, b in events]
    line = with_bubbles(flat(spans, launch_ns), window)
    totals = totals_ns(line)
    by_name: Counter[str] = Counter()
    n_of: Counter[str] = Counter()
    for name, a, b in events:
        by_name[name] += b - a
        n_of[name] += 1
    kernels = tuple((name, ns, n_of[name]) for name, ns in by_name.most_common(_N_KERNELS))
    gaps = sorted((s.duration_ns for s in line if s.scope.kind == "bubble"), reverse=True)
    return m.Observed(
        host, window[1] - window[0], totals["model"], totals["exchange"], totals["bubble"], len(gaps),
        gaps[0] if gaps else 0, kernels,
    )  # fmt: skip


class Window:
    """One process's recording: ``begin``, then ``end`` once what is to be seen has been launched and is
    done."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def begin(self) -> None:
        """``UserError`` if the profiler is in use."""
        folder = tempfile.TemporaryDirectory()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.enable_hlo_proto = False
        if self._device.platform != "cpu":
            options.host_tracer_level = 1  # the marks, and not all that the host does
        try:
            jax.profiler.start_trace(folder.name, profiler_options=options)
        except RuntimeError as error:
            folder.cleanup()
            raise UserError(f"nothing can be recorded: {error}") from error
        self._folder = folder
        with jax.profiler.TraceAnnotation(_BEGIN):
            pass

    def end(self) -> m.Observed:
        """What there was. ``UserError`` if the trace does not say."""
        assert self._folder is not None, "not begun"
        kept, self._folder = self._folder, None
        with kept as folder:
            with jax.profiler.TraceAnnotation(_END):
                pass
            jax.profiler.stop_trace()
            (path,) = Path(folder).rglob("*.xplane.pb")
            window, events = device_events(profile_events(str(path)), self._device.platform == "cpu")
        return observed(platform.node(), window, events)

    def taken(self, wait: Callable[[], Any]) -> m.Observed:
        """`end` after ``wait``, or why not."""
        try:
            wait()
            return self.end()
        except UserError as error:
            return m.Observed.failed(platform.node(), str(error))


@dataclass(frozen=True)
class UnderLoad:
    """``ranks``: (name, what its device did), this process's first. Counts and seconds are the engine's
    meanwhile: ``decode_s`` and ``prefill_s`` of steps, ``launch_s`` in which the host launched them,
    ``wait_s`` in which it waited."""

    ranks: tuple[tuple[str, m.Observed], ...]
    seconds: float
    n_decode_steps: int
    n_decode_tokens: int
    decode_s: float
    n_prefill_steps: int
    n_prompt_tokens: int
    prefill_s: float
    launch_s: float
    wait_s: float

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["ranks"]
        of_ranks = [
            {
                "rank": name,
                "error": x.error,
                **{kind: x.share(f"{kind}_ns") for kind in ("compute", "exchange", "idle")},
                "n_gaps": x.n_gaps,
                "longest_gap_ms": x.longest_gap_ns / 1e6,
                "kernels": [(kernel, ns / 1e6, n) for kernel, ns, n in x.kernels],
            }
            for name, x in self.ranks
        ]
        return found | {"ranks": of_ranks}

    def lines(self) -> list[str]:
        """For people."""
        busy = max(self.decode_s + self.prefill_s, 1e-9)

        def each(seconds: float, n: int) -> str:
            return f"{1e3 * seconds / n:.2f} ms each" if n else "none"

        n_steps = max(1, self.n_decode_steps + self.n_prefill_steps)
        lines = [
            (
                f"{self.seconds:.2f} s under load: {self.n_decode_steps} decode steps, "
                f"{each(self.decode_s, self.n_decode_steps)}, "
                f"of {self.n_decode_tokens / max(1, self.n_decode_steps):.1f} requests; "
                f"{self.n_prefill_steps} prompts or chunks, "
                f"{each(self.prefill_s, self.n_prefill_steps)}, {self.n_prompt_tokens:,} tokens, "
                f"{self.prefill_s / busy:.0%} of the steps' time"
            ),
            (
                f"host: {1e3 * self.launch_s / n_steps:.2f} ms a step launching, "
                f"{1e3 * self.wait_s / n_steps:.2f} waiting for "
                f"results; no step {max(0.0, 1 - busy / self.seconds):.0%} of the time"
            ),
        ]
        per_step = max(1, self.n_decode_steps)
        for name, x in self.ranks:
            if x.error:
                lines.append(f"{name}: {x.error}")
                continue
            ms = {kind: getattr(x, f"{kind}_ns") / 1e6 / per_step for kind in ("compute", "exchange", "idle")}
            shares = ", ".join(f"{kind} {x.share(f'{kind}_ns'):.1%} ({ms[kind]:.2f} ms)" for kind in ms)
            lines.append(
                f"{name}: {shares} for each decode step; longest gap {x.longest_gap_ns / 1e6:.2f} ms of "
                f"{x.n_gaps:,}"
            )
            lines += [
                f"    {ns / 1e6 / per_step:8.3f} ms  {n:8,} × {kernel[:90]}" for kernel, ns, n in x.kernels
            ]
        return lines


class LoadObserver:
    """``begin`` and ``end`` between two steps, in the engine's thread. With an executor over ranks all of
    them record."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._executor = engine, engine.executor
        self._group: Any = self._executor.group
        self._window = Window(self._executor.device)
        self._before: dict[str, float] = {}
        self._began_s = 0.0

    def begin(self) -> None:
        for rank in self._others:
            self._group.send(rank, m.Observe(begin=True))
        self._before = asdict(self._engine.stats)
        self._window.begin()
        self._began_s = time.perf_counter()

    def end(self) -> UnderLoad:
        seconds = time.perf_counter() - self._began_s
        after = asdict(self._engine.stats)
        for rank in self._others:
            self._group.send(rank, m.Observe(begin=False))
        own = self._window.taken(self._wait)
        describe = self._group.cluster.describe if self._group else lambda _: "this process"
        found = [(describe(0), own)]
        found += [(describe(rank), self._group.receive(rank, m.Observed, _ANSWER_S)) for rank in self._others]
        names = (
            "n_decode_steps",
            "n_decode_tokens",
            "decode_s",
            "n_prefill_steps",
            "prefill_s",
            "launch_s",
            "wait_s",
        )
        counts: dict[str, Any] = {name: after[name] - self._before[name] for name in names}
        n_prompt = int(after["n_prompt_tokens_computed"] - self._before["n_prompt_tokens_computed"])
        return UnderLoad(tuple(found), seconds, n_prompt_tokens=n_prompt, **counts)

    @property
    def _others(self) -> tuple[int, ...]:
        if self._group is None:
            return ()
        return (*self._group.workers, *self._group.replicas, *self._group.prefill_ranks)

    def _wait(self) -> None:
        """Until what was launched is done: what comes next on the device comes after it."""
        (jax.device_put(0, self._executor.device) + 1).block_until_ready()


_ANSWER_S = 300.0  # for a rank to read its trace


def say_under_load(found: UnderLoad) -> None:
    """In the log, and as a line of JSON."""
    for line in found.lines():
        _log.info("%s", line)
    _log.info("under load: %s", json.dumps(found.to_dict()))


class OneWindow:
    """``before_step`` belongs before each of the engine's steps, in its thread: once ``after_s`` have passed
    since the first one, ``for_s`` seconds are recorded, and ``on_found`` is told of them."""

    def __init__(
        self,
        engine: Any,
        after_s: float,
        for_s: float,
        on_found: Callable[[UnderLoad], Any],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer, self._on_found, self._clock = LoadObserver(engine), on_found, clock
        self._after_s, self._for_s = after_s, for_s
        self._due: float | None = None
        self._state = "before"

    @property
    def has_begun(self) -> bool:
        return self._state != "before"

    def before_step(self) -> None:
        if self._state == "over":
            return
        now = self._clock()
        if self._due is None:
            self._due = now + self._after_s
        if now < self._due:
            return
        if self._state == "before":
            self._go_on("recording", self._observer.begin)
            self._due = self._clock() + self._for_s
        else:
            self.finish()

    def finish(self) -> None:
        """Ends what is being recorded, between two steps or after the last one."""
        if self._state == "recording":
            self._go_on("over", lambda: self._on_found(self._observer.end()))

    def _go_on(self, state: str, do: Callable[[], Any]) -> None:
        self._state = state
        try:
            do()
        except UserError as error:
            self._state = "over"
            _log.warning("what devices do under load could not be recorded: %s", error)
