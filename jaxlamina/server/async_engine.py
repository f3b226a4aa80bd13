"""The engine in a thread of its own, and requests from asyncio: token events as an async iterator.

The thread alone runs the engine (`jaxlamina.server.engine_thread`). Here, on the event loop's side, is all
bookkeeping of who waits for what, and of whether requests are taken. Knows `Engine`; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from jaxlamina.engine.engine import Engine, PauseMode, TokenEvent
from jaxlamina.engine.live_request import LiveRequest
from jaxlamina.errors import UserError
from jaxlamina.sampling.params import SamplingParams, seed_of
from jaxlamina.sampling.structured import Matcher
from jaxlamina.server.engine_thread import Abort, Add, Ask, BetweenSteps, EngineThread, Observer, Reply
from jaxlamina.server.settings import GRAMMAR_TIMEOUT_S
from jaxlamina.server.workshop import Busy, Latest, Workshop, in_thread

T = TypeVar("T")
_log = logging.getLogger("uvicorn.error")
_NONE: Mapping[int, Any] = {}
_COMPILING_AT_ONCE = 2  # grammars
_GRAMMARS_KEPT = 8  # compiled: they may take some MiB each
_AGAIN_GRAMMAR_S = 120.0  # for one that was compiled before: all come at once in a new process
_LOOK_S = 0.02  # whether requests have ended that a pause waits for
State = Literal["starting", "ready", "draining", "stopped", "failed"]


class Prompt(NamedTuple):
    token_ids: Sequence[int]
    text: str | None = None


class Unavailable(Exception):
    """No request is taken, or this one is not finished: the engine is not ready, ends, or has failed."""


class TooMany(Exception):
    """As many requests as are allowed at once are there."""


class Answers:
    """The events of one caller's prompts, as they come: an async iterator of (which prompt, event).

    Ends when all are finished. Raises `Unavailable` where they cannot be finished any more, and whatever
    ended one of them alone (`TokenEvent.error`). Whoever stops earlier says so by `close`, which may be
    called at any time and ends what still runs.
    """

    def __init__(self, engine: AsyncEngine, prompts: Sequence[Prompt], counted: bool) -> None:
        self.counted = counted
        self.n_prompt_tokens = tuple(len(prompt.token_ids) for prompt in prompts)
        self._engine = engine
        self._left = len(prompts)
        self._queue: asyncio.Queue[tuple[int, TokenEvent] | Exception] = asyncio.Queue()

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> tuple[int, TokenEvent]:
        if not self._left and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._engine._leave(self, finished=not self._left)

    def _give(self, index: int, event: TokenEvent) -> None:
        if event.error is not None:
            self._fail(event.error)
            self.close()
            return
        self._queue.put_nowait((index, event))
        if event.output is not None:
            self._left -= 1
            if not self._left:
                self._engine._leave(self, finished=True)

    def _fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)


class AsyncEngine:
    """``prepare(stopped)`` runs in the thread before the first request is taken (see
    `jaxlamina.engine.warm_up`), ``before_step()`` before each step.

    What a request needs before its first step (checks, grammar) is made in other threads; a grammar that
    takes longer than ``grammar_timeout_s`` is refused, and so is one that waits as long for its turn, unless
    it is of batch work. ``state``: "starting" until then, "ready", "draining" once `drain` is called,
    "stopped", or "failed" with ``reason``.
    """

    def __init__(
        self,
        engine: Engine,
        observer: Observer,
        *,
        prepare: Callable[[Callable[[], bool]], None],
        max_concurrent: int,
        before_step: Callable[[], None] = lambda: None,
        grammar_timeout_s: float = GRAMMAR_TIMEOUT_S,
    ) -> None:
        self.state: State = "starting"
        self.reason = ""
        self.max_concurrent = max_concurrent
        self._engine = engine
        self._thread = EngineThread(
            engine,
            observer,
            prepare=prepare,
            before_step=before_step,
            ready=self._ready,
            deliver=self._deliver,
            end=self._end,
        )
        self._grammar_timeout_s = grammar_timeout_s
        self._compiling = Workshop(_COMPILING_AT_ONCE)
        self._matchers: Latest[Hashable, Matcher] = Latest(_GRAMMARS_KEPT)
        self._callers = itertools.count()
        self._loop: asyncio.AbstractEventLoop
        self._open: set[Answers] = set()
        self._replies: set[Reply[Any]] = set()
        self._none_open: asyncio.Event
        self._begun: asyncio.Event

    def start(self) -> None:
        """Begins, from a coroutine: events go to its loop."""
        self._loop = asyncio.get_running_loop()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._begun = asyncio.Event()
        self._thread.start(self._loop)

    async def started(self) -> bool:
        """Waits for the end of ``prepare``; whether requests are taken now."""
        await self._begun.wait()
        return self.state == "ready"

    @property
    def n_open(self) -> int:
        """Callers with a request that is not finished, batch work left out."""
        return sum(answers.counted for answers in self._open)

    @property
    def step_s(self) -> float:
        """For how long the engine has been in a step."""
        return self._thread.step_s

    @property
    def is_paused(self) -> bool:
        return self._engine.is_paused

    def check_ready(self) -> None:
        """Raises `Unavailable` unless a request would be taken now."""
        if self.state != "ready":
            raise Unavailable(self._why_not())

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        counted: bool = True,
        seed: int | None = None,
        written: Mapping[int, Mapping[int, Sequence[int]]] = _NONE,
        n_given: Mapping[int, Mapping[int, int]] = _NONE,
        n_cached: Mapping[int, int] = _NONE,
        n_together: int = 0,
        was_taken: bool = False,
    ) -> Answers:
        """Queues ``prompts`` together and returns once all are accepted. Together they are one caller among
        others.

        ``priority``: as of `Engine.add_request`. ``counted``: against ``max_concurrent``; what is not is
        batch work, whose grammar leaves room for others'. ``seed``: of requests whose parameters have none,
        None: any. ``written``, ``n_given``, ``n_cached``: as of
        `Engine.add_job`, by prompt; the first is left out of those that begin anew. Raises `UserError` for
        what cannot be served (then none of them is), `Unavailable`, `TooMany`; anything else is a fault of
        ours. ``n_together``: as of `EngineThread.expect`, 0 for who comes alone. ``was_taken``: by a process
        before this one, so nothing is too much at once.
        """
        self.check_ready()
        if counted and not was_taken and self.n_open >= self.max_concurrent:
            raise TooMany(f"{self.max_concurrent} requests are being answered already: try again later")
        answers = Answers(self, prompts, counted)
        self._open.add(answers)
        self._none_open.clear()
        reply: Reply[None] = Reply(self._loop)
        self._thread.expect(n_together)
        try:
            timeout_s = _AGAIN_GRAMMAR_S if was_taken else self._grammar_timeout_s
            matcher = await self._compiled(params, timeout_s, is_patient=not counted)
            jobs = await in_thread(self._jobs, prompts, params, matcher, seed)
            again = [written.get(which, {}) if job.may_go_on else {} for which, job in enumerate(jobs)]
            if answers not in self._open or self.state in ("stopped", "failed"):  # that ended meanwhile
                raise Unavailable(self._why_not())
            await self._post(
                Add(
                    answers,
                    jobs,
                    again,
                    n_given,
                    n_cached,
                    priority,
                    next(self._callers),
                    n_together > 0,
                    reply,
                ),
                reply,
            )
        except BaseException:
            answers.close()
            raise
        return answers

    async def _compiled(
        self, params: SamplingParams, timeout_s: float, *, is_patient: bool
    ) -> Matcher | None:
        """The grammar of ``params``, if they have one. No request changes it: each follows a copy."""
        asked = params.structured_outputs
        if asked is None:
            return None
        key = asked.kind, asked.schema_text or asked.regex or asked.grammar or tuple(asked.choice or ())

        def compiled() -> Matcher | None:
            found = self._matchers.get(key)  # others may have waited for the same
            if found is None and (found := self._engine.admission.matcher(params)) is not None:
                self._matchers.put(key, found)
            return found

        if (known := self._matchers.get(key)) is not None:
            return known
        try:
            return await self._compiling.run(compiled, timeout_s, is_patient=is_patient)
        except TimeoutError:
            raise UserError(
                f"structured_outputs take longer than {timeout_s:g} s to compile: ask for something simpler"
            ) from None
        except Busy:
            raise TooMany("other requests' structured_outputs are being compiled: try again later") from None

    def _jobs(
        self, prompts: Sequence[Prompt], params: SamplingParams, matcher: Matcher | None, seed: int | None
    ) -> list[LiveRequest]:
        make = self._engine.admission.job
        seeds = [None if seed is None else seed_of(seed, which) for which in range(len(prompts))]
        return [
            make(prompt.token_ids, params, prompt.text, matcher, own)
            for prompt, own in zip(prompts, seeds, strict=True)
        ]

    async def pause(self, mode: PauseMode, *, clear_cache: bool, deadline_s: float) -> None:
        """As `Engine.pause`; returns once no step will run: with "wait", when those that were there are
        finished. Requests that come are accepted, and wait. `TimeoutError` past the deadline, the pause
        holds then; `Unavailable`."""
        waits = mode == "wait"
        async with asyncio.timeout(deadline_s):
            await self.ask(lambda _: self._thread.pause(mode, clear_cache and not waits), deadline_s)
            while waits and not await self.ask(lambda engine: engine.rests, deadline_s):
                await asyncio.sleep(_LOOK_S)
            if waits and clear_cache:
                await self.ask(Engine.reset_prefix_cache, deadline_s)

    async def resume(self, deadline_s: float) -> None:
        """`TimeoutError`, `Unavailable`."""
        await self.ask(Engine.resume, deadline_s)

    async def ask(self, read: Callable[[Engine], T], deadline_s: float, *, may_fail: bool = True) -> T:
        """What ``read`` finds, called between two steps. `TimeoutError` past the deadline, `Unavailable`.
        What else it raises is the caller's, and unless it ``may_fail`` the engine's end."""
        if self.state in ("stopped", "failed"):
            raise Unavailable(self._why_not())
        reply: Reply[T] = Reply(self._loop)
        async with asyncio.timeout(deadline_s):
            return await self._post(Ask(read, reply, may_fail), reply)

    def between_steps(self, call: Callable[[], None]) -> None:
        """Has the engine's thread do so before its next step, from any thread. What it raises ends the
        engine."""
        self._thread.put(BetweenSteps(call))

    def fail(self, reason: str) -> None:
        """Whoever waits is told that nobody will be answered any more."""
        if self.state != "failed":
            self._end("failed", reason)

    async def drain(self, deadline_s: float) -> None:
        """Takes no more requests, waits for those there are, and at the deadline ends them with
        `Unavailable`."""
        if self.state in ("starting", "ready"):
            self.state = "draining"
        try:
            async with asyncio.timeout(deadline_s):
                await self._none_open.wait()
        except TimeoutError:
            for answers in list(self._open):
                answers._fail(Unavailable("the server has shut down before this request was finished"))
                self._leave(answers, finished=False)

    async def stop(self, deadline_s: float) -> bool:
        """Ends the thread; whether it did so in time (a program that compiles cannot be interrupted)."""
        self._thread.stop()
        await asyncio.to_thread(self._thread.join, deadline_s)
        if self.state != "failed":
            self._end("stopped", "the server has shut down")
        return not self._thread.is_alive

    async def _post(self, message: Add | Ask, reply: Reply[T]) -> T:
        self._replies.add(reply)
        try:
            self._thread.put(message)
            return await reply.future
        finally:
            self._replies.discard(reply)

    def _leave(self, answers: Answers, *, finished: bool) -> None:
        if answers in self._open:
            self._open.discard(answers)
            if not self._open:
                self._none_open.set()
            if not finished:
                self._thread.put(Abort(answers))

    def _end(self, state: State, reason: str) -> None:
        """Nobody will be answered any more: whoever waits hears so."""
        self.state, self.reason = state, reason
        self._begun.set()
        for reply in list(self._replies):
            reply.give(Unavailable(self._why_not()))
        for answers in list(self._open):
            answers._fail(Unavailable(self._why_not()))
            self._leave(answers, finished=True)

    def _why_not(self) -> str:
        if self.state == "starting":
            return "the model is being compiled: try again later"
        if self.state == "failed":
            return f"the engine has failed: {self.reason}"
        return "the server is shutting down"

    def _ready(self) -> None:
        if self.state == "starting":
            self.state = "ready"
        self._begun.set()

    @staticmethod
    def _deliver(given: Sequence[tuple[Answers, int, TokenEvent]]) -> None:
        for answers, index, event in given:
            answers._give(index, event)
