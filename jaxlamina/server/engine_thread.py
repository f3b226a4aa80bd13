"""The thread that alone touches the engine: it takes in what has come, runs one step, gives the step's events
out, and so on.

What it is sent are messages, and what it gives out are calls of the event loop's. Knows `Engine` and a clock;
not who waits for what, which is `jaxlamina.server.async_engine`'s, and nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from jaxlamina.engine.engine import Engine, PauseMode, TokenEvent
from jaxlamina.engine.live_request import LiveRequest
from jaxlamina.engine.outputs import RequestOutput
from jaxlamina.process.turns import short_turns

T = TypeVar("T")
_log = logging.getLogger("uvicorn.error")
_TOGETHER_S = 0.5  # that a step waits for requests which go on together


class Ended(Exception):
    """This request was ended by who operates the server."""


class Observer(Protocol):
    """Is told, by the engine's thread, what happens to requests. Seconds."""

    def first_token(self, after_s: float) -> None: ...

    def next_token(self, after_s: float) -> None: ...

    def finished(self, output: RequestOutput, after_s: float, first_after_s: float) -> None: ...

    def aborted(self) -> None: ...


class Reply(Generic[T]):
    """A future of the event loop's that the engine's thread fills in."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[T] = loop.create_future()
        self._loop = loop

    def set(self, value: T) -> None:
        _call(self._loop, self.give, value)

    def fail(self, error: Exception) -> None:
        _call(self._loop, self.give, error)

    def give(self, value: Any) -> None:
        if not self.future.done():
            if isinstance(value, Exception):
                self.future.set_exception(value)
            else:
                self.future.set_result(value)


@dataclass(frozen=True)
class Add:
    answers: Any  # who waits: handed back with each event
    jobs: Sequence[LiveRequest]
    written: Sequence[Mapping[int, Sequence[int]]]
    n_given: Mapping[int, Mapping[int, int]]
    n_cached: Mapping[int, int]
    priority: int
    caller: int
    is_together: bool
    reply: Reply[None]


@dataclass(frozen=True)
class Abort:
    answers: Any


@dataclass(frozen=True)
class Ask:
    read: Callable[[Engine], Any]
    reply: Reply[Any]
    may_fail: bool = True


@dataclass(frozen=True)
class BetweenSteps:
    call: Callable[[], None]


class _Stop:
    pass


@dataclass
class _Running:
    """What the thread knows of a request in the engine. Times are of `time.perf_counter`."""

    answers: Any
    index: int
    arrived: float
    first: float | None = None
    last: dict[int, float] = field(default_factory=dict)  # by continuation


class EngineThread:
    """``put`` what it is to do. ``prepare(stopped)`` is called before all else, ``before_step()`` before each
    step. On the event loop it calls ``ready()`` once the first is done, ``deliver`` with all events of a
    step, each as (`Add.answers`, which of its prompts, event), and ``end("failed", reason)`` when the engine
    has failed."""

    def __init__(
        self,
        engine: Engine,
        observer: Observer,
        *,
        prepare: Callable[[Callable[[], bool]], None],
        before_step: Callable[[], None],
        ready: Callable[[], None],
        deliver: Callable[[Sequence[tuple[Any, int, TokenEvent]]], None],
        end: Callable[..., None],
    ) -> None:
        self._engine, self._observer = engine, observer
        self._prepare, self._before_step = prepare, before_step
        self._ready, self._deliver, self._end = ready, deliver, end
        self._inbox: queue.SimpleQueue[Add | Abort | Ask | BetweenSteps | _Stop] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._step_since: float | None = None
        self._running: dict[str, _Running] = {}
        self._given: list[tuple[Any, int, TokenEvent]] = []  # to be delivered
        self._n_together = 0  # that have come
        self._expected = 0, 0.0  # how many are to come, and until when they are waited for

    # --- for others, in any thread ---

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def put(self, message: Add | Abort | Ask | BetweenSteps) -> None:
        """It is taken in before the next step."""
        self._inbox.put(message)

    def stop(self) -> None:
        """It ends after its step."""
        self._stopping.set()
        self._inbox.put(_Stop())

    def join(self, deadline_s: float) -> None:
        self._thread.join(deadline_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def step_s(self) -> float:
        """For how long the engine has been in a step."""
        since = self._step_since
        return 0.0 if since is None else time.perf_counter() - since

    def expect(self, n: int) -> None:
        """``n`` requests go on together after another process's end, and each says so. No step is begun
        before all of them are there, but for half a second at most: the first ones would have the others
        wait for a step of their own."""
        if n > self._expected[0]:
            self._expected = n, time.perf_counter() + _TOGETHER_S

    # --- in the thread ---

    # For when a launch is over. First, since threads that compile behind go back to what they found.
    @short_turns()
    def _run(self) -> None:
        try:
            self._prepare(self._stopping.is_set)
            _call(self._loop, self._ready)
            self._engine.meanwhile = self._deliver_given
            while self._take_in():
                if not self._engine.rests:
                    self._before_step()
                    self._step_since = time.perf_counter()
                    events = self._engine.step()
                    self._step_since = None
                    self._give_out(events)
            self._deliver_given()
            if self._engine.idle:  # the end: no slot may be lost or shared by now
                self._engine.check_integrity()
        except BaseException as error:  # noqa: BLE001 (whatever it is, nobody is answered any more)
            _log.error("the engine has failed", exc_info=True)
            self._deliver_given()
            _call(self._loop, self._end, "failed", f"{type(error).__name__}: {error}")

    def _take_in(self) -> bool:
        """Does what has been asked for; waits where there is nothing else to do. False: it is over."""
        while not self._stopping.is_set():
            wait_s = None if self._engine.rests else self._awaits_s()
            if wait_s != 0:
                self._deliver_given()
            try:
                message = self._inbox.get(block=wait_s != 0, timeout=wait_s)
            except queue.Empty:
                return True
            if isinstance(message, Add):
                self._add(message)
            elif isinstance(message, Abort):
                self._abort(message.answers)
            elif isinstance(message, Ask):
                try:
                    message.reply.set(message.read(self._engine))
                except Exception as error:  # who asks is told
                    message.reply.fail(error)
                    if not message.may_fail:
                        raise
            elif isinstance(message, BetweenSteps):
                message.call()
        return False

    def _awaits_s(self) -> float:
        """How long a step waits for requests that come together (`expect`)."""
        n, until_s = self._expected
        return max(0.0, until_s - time.perf_counter()) if self._n_together < n else 0.0

    def _add(self, message: Add) -> None:
        now = time.perf_counter()
        self._n_together += message.is_together
        try:
            for index, job in enumerate(message.jobs):
                how: Any = {"priority": message.priority, "caller": message.caller}
                before: Any = {
                    "written": message.written[index],
                    "n_given": message.n_given.get(index, {}),
                    "n_cached": message.n_cached.get(index),
                }
                # First: of one that the engine has taken and cannot go on with, nothing may stay there.
                self._running[job.request_id] = _Running(message.answers, index, now)
                self._engine.add_job(job, **before, **how)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this request's)
            self._abort(message.answers)
            message.reply.fail(error)
        else:
            message.reply.set(None)

    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """As `Engine.pause`, called by what the thread is asked (`Ask`). Whose requests it ends are told."""
        for request_id in self._engine.pause(mode, clear_cache=clear_cache):
            if (running := self._running.pop(request_id, None)) is not None:
                error = Ended("this request was ended by a pause of the server: send it again")
                event = TokenEvent(request_id, 0, "", None, error=error)
                self._given.append((running.answers, running.index, event))
                self._observer.aborted()
        self._deliver_given()

    def _abort(self, answers: Any) -> None:
        for request_id in [id_ for id_, running in self._running.items() if running.answers is answers]:
            del self._running[request_id]
            if self._engine.abort(request_id) is not None:
                self._observer.aborted()

    def _give_out(self, events: Sequence[TokenEvent]) -> None:
        """They are delivered once this thread launches the next step, or waits: it would wait for Python
        otherwise, while the event loop makes answers of them."""
        now = time.perf_counter()
        for event in events:
            running = self._running.get(event.request_id)
            if running is None:  # aborted while its step ran
                continue
            self._given.append((running.answers, running.index, event))
            if event.output is not None or event.error is not None:
                del self._running[event.request_id]
            try:
                self._observe(running, event, now)
            except Exception:  # noqa: BLE001 (a count less)
                _log.exception("request %s was not counted", event.request_id)

    def _deliver_given(self) -> None:
        given, self._given = self._given, []
        if given:
            _call(self._loop, self._deliver, given)

    def _observe(self, running: _Running, event: TokenEvent, now: float) -> None:
        if event.error is not None:
            self._observer.aborted()
            return
        if event.is_again:  # noted when it was written
            running.first = running.first or now
        elif running.first is None:
            running.first = now
            self._observer.first_token(now - running.arrived)
        elif event.index in running.last:
            self._observer.next_token(now - running.last[event.index])
        running.last[event.index] = now
        if event.output is not None:
            self._observer.finished(event.output, now - running.arrived, running.first - running.arrived)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    if not loop.is_closed():  # a server that did not wait for this thread has nobody left to tell
        loop.call_soon_threadsafe(function, *arguments)
