"""The serving job below a supervisor: started, watched, ended for certain, and started again.

Each start has a socket of its own, so an answer of an earlier one is nobody's. Knows processes and the
server's `/health`; nothing of requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeGuard

from jaxlamina.exit_codes import ENDED_BY_SIGTERM, FAILED
from jaxlamina.process.parents import take_orphans
from jaxlamina.server.pieces import STEP_SECONDS
from jaxlamina.supervisor.changes import JobCommand
from jaxlamina.supervisor.job_client import NoAnswer
from jaxlamina.supervisor.leaving import Leaving
from jaxlamina.supervisor.retrying import Retrying, spare_pause_s
from jaxlamina.supervisor.running import NOT_STARTED, Running, why_not_started

_LOOK_S = 0.02
_PROBE_S = 1.0  # between two looks at /health
_STARTING_PROBE_S, _FIRST_PROBE_S = 0.1, 0.02  # the latter in the first seconds: a spare takes none
_FIRST_S = 5.0
_GOING_ON_S = 2.0  # after a recovery, before another spare is started
_log = logging.getLogger("uvicorn.error")


class Cause(NamedTuple):
    """Why a start of the job ended: a word (killed, exit, failed, silent, step, start, planned), and what was
    seen. ``start``: it was not ready in time, or could not be started at all."""

    kind: str
    text: str


class GivenUp(Exception):
    """There is no job, and none will be started."""


class NotChanged(Exception):
    """The job is what it was; why."""


class _Health(NamedTuple):
    """Whether a server takes requests, for how long it has been in a step, and why its engine has failed, if
    it has."""

    takes_requests: bool
    in_step_s: float = 0.0
    failure: str = ""


class SupervisedJob:
    """``command`` with a socket's path after it serves there. It changes with the job: the start that runs,
    or is to be ready next, is of it.

    A start that is not ready when it ends is a failed one: the first ends the job, with ``code``; later ones
    are tried again, after a pause, for ``recovery_s`` and five times at least. A server that was ready is
    ended when it answers nothing for ``stuck_after_s``, or is in one step for ``step_s``; one that is not
    ready after ``start_s``; and one that was asked to end, and may be silent then, after ``shutdown_s``. With
    ``n_spare`` another one is started beside it, which takes over; without, and with ``imports_after_s``, so
    long after it is ready one that only imports what it needs. ``end_s``: what is left of a start that has
    ended may take so long to end by itself. ``causes``: why each start but the last has ended. ``n_starts``:
    those that wait to take over counted, if they hold more than imports.
    """

    def __init__(
        self,
        command: JobCommand,
        folder: Path,
        *,
        stuck_after_s: float,
        step_s: float,
        start_s: float,
        recovery_s: float,
        shutdown_s: float,
        n_spare: int = 0,
        imports_after_s: float | None = None,
        end_s: float = 0.0,
    ) -> None:
        self._has_spare, self._imports_after_s = n_spare > 0, imports_after_s
        self._spare: Running | None = None
        self._leaving = Leaving()
        self._is_changing = False
        self._planned = ""  # why the one that runs is ended, where somebody asked for it
        self.planned: set[int] = set()  # numbers of starts that were ended so
        self._before: JobCommand | None = None  # the command until then, while the new one is not ready
        self.command, self._folder = command, folder
        self._stuck_after_s, self._step_s, self._start_s = stuck_after_s, step_s, start_s
        self._retrying, self._end_s = Retrying(recovery_s), end_s
        self._shutdown_s, self._ends_by = shutdown_s, math.inf
        self._is_told = False  # to end, while it ran and was to run on
        self._secret = secrets.token_hex(16)
        self._running: Running | None = None
        self._is_ready, self._ready_at = False, 0.0  # since when
        self._ending = asyncio.Event()
        self._changed = asyncio.Condition()
        self.was_ready = False
        self.is_paused = False  # and is to be after a start, too
        self.given_up = ""  # why there will be no job any more
        self.why_not_ready = ""  # why the start before this one has ended
        self.code = 0
        self.n_starts = self._n_processes = 0
        self.causes: list[Cause] = []
        self.last_start_s = 0.0

    @property
    def state(self) -> str:
        if self.given_up:
            return "failed"
        if self.ends():
            return "draining"
        return "ready" if self._is_ready else "recovering" if self.was_ready else "starting"

    @property
    def spare_state(self) -> str:
        if self._spare is None:
            return "none"
        if self._spare.imports_alone:
            return "imported" if self._spare.stands_by else "importing"
        return "standing by" if self._spare.stands_by else "starting"

    async def ready(self, deadline_s: float, *, after: int = 0) -> Running:
        """The job that takes requests, waited for; of a start later than number ``after``. `GivenUp`,
        `TimeoutError`."""
        async with asyncio.timeout(deadline_s), self._changed:
            await self._changed.wait_for(lambda: self.given_up or self._has_ready(after))
        if self.given_up:
            raise GivenUp(self.given_up)
        assert self._running is not None
        return self._running

    def _has_ready(self, after: int) -> bool:
        return self._is_ready and self._running is not None and self._running.n > after

    async def run(self) -> None:
        """Until `end`, or until it is given up."""
        take_orphans()  # and end them
        keeping = asyncio.create_task(self._keep_spare())
        try:
            await self._run()
        except Exception as error:  # noqa: BLE001 (a fault of ours: nobody may wait for what does not come)
            _log.error("the supervisor cannot go on", exc_info=error)
            await self._give_up(f"internal error of the supervisor ({type(error).__name__}: {error})", FAILED)
        finally:
            keeping.cancel()
            for left in (self._running, self._spare):
                if left is not None:
                    await self._end(left)
            await self._leaving.gone()

    async def _run(self) -> None:
        code = 0
        while not self.ends():
            cause, code = await self._once()
            if self._planned:
                cause, self._planned = Cause("planned", self._planned), ""
            self.why_not_ready = cause.text
            was_ready, ended_at = self._is_ready, time.monotonic()
            await self._set_ready(False)
            if self._running is not None:
                await self._end(self._running)
            if self.ends():
                break
            undone = None if was_ready else self._before
            if undone is not None:
                self.command, self._before = undone, None
            pause_s = self._retrying.ended(ended_at, was_ready=was_ready, is_first=undone is not None)
            if pause_s is None:
                n_failed = self._retrying.n_failed
                tries = f", {n_failed} times in a row before it was ready" if self.was_ready else ""
                why = f"the job ended: {cause.text}{tries}"
                if self.was_ready or cause.kind != "exit":  # else its own line says more
                    _log.error("%s; it is given up", why)
                await self._give_up(why, code or FAILED)
                return
            self.causes.append(cause)
            _log.log(
                logging.INFO if cause.kind == "planned" else logging.ERROR,
                "the job ended: %s; it is started again%s",
                cause.text,
                f" in {pause_s:g} s" if pause_s else "",
            )
            code = 0
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)
        if not self._is_told or code in ENDED_BY_SIGTERM:  # nothing was to be brought to an end then
            code = 0
        await self._give_up("the server has shut down", code)

    async def _once(self) -> tuple[Cause, int]:
        """The next start of the job, to its end: why it has ended, and its exit code."""
        try:
            running = await self._next()
        except NOT_STARTED as error:
            return Cause("start", f"it could not be started: {why_not_started(error)}"), FAILED
        return (Cause("planned", "it is to end"), 0) if running is None else await self._watch(running)

    async def change(self, new: JobCommand, why: str, *, stop_first: bool, deadline_s: float) -> None:
        """Another start in place of the one that runs, of the command ``new``: made ready beside it, or with
        ``stop_first`` after its end, where there is no room for both. `NotChanged`; `GivenUp`; `TimeoutError`
        where it is under way still: ``command`` says later what came of it."""
        if self._is_changing:
            raise NotChanged("the job is being changed already")
        if self.state != "ready":
            raise NotChanged(f"the job is {self.state}: try again once it is ready")
        self._is_changing = True
        try:
            assert self._running is not None
            n = self._running.n
            await self._end_spare()
            if not stop_first:
                await self._make_ready(new, deadline_s)
                self._check_does_not_end()  # what the job finishes is not to be cut off
            self._before, self.command, self._planned = self.command, new, why
            self.planned.add(n)
            self._running.process.kill()
            await self.ready(deadline_s, after=n)
            if self.command != new:
                raise NotChanged("the new job was not ready when it ended; the one before it runs again")
        finally:
            await self._has_changed()

    async def update(self, ask: Callable[[Running], Awaitable[JobCommand | None]], deadline_s: float) -> None:
        """``ask`` changes the job that runs, and says by which command it starts so; None: it has not
        changed. Later starts are of that command, and a spare of the one before is ended. ``deadline_s``: for
        a job that takes requests. `NotChanged`, `GivenUp`, `TimeoutError`, and what ``ask`` raises."""
        if self._is_changing:
            raise NotChanged("the job is being changed already")
        self._is_changing = True
        try:
            running = await self.ready(deadline_s)
            new = await ask(running)
            if new is None:
                return
            if self._running is not running:
                raise NotChanged("the job ended right after its change, and was started again without it")
            self.command = new
            await self._end_spare()
        finally:
            await self._has_changed()

    async def _end_spare(self) -> None:
        """Of one that is of the command until now."""
        old, self._spare = self._spare, None
        if old is not None:
            old.is_spare = False
            await self._end(old)

    async def _has_changed(self) -> None:
        async with self._changed:
            self._is_changing = False
            self._changed.notify_all()

    async def _make_ready(self, command: JobCommand, deadline_s: float) -> None:
        """A spare of ``command``, which stands by."""
        await self._leaving.gone()
        self._check_does_not_end()
        try:
            new = self._spare = self._start(is_spare=True, command=command)
        except NOT_STARTED as error:
            why = f"the new job could not be started: {why_not_started(error)}"
            raise NotChanged(f"{why}; the one before it runs on") from None
        until = time.monotonic() + deadline_s
        while not new.stands_by:
            await asyncio.sleep(_LOOK_S)
            code = new.exit_code()
            if code is None and time.monotonic() < until and self._spare is new:
                continue
            if self._spare is new:
                self._spare = None
                what = new.ended_with() if code is not None else f"was not ready in {deadline_s:g} s"
                await self._end(new)
                self._check_does_not_end()
                raise NotChanged(f"the new job {what}; the one before it runs on")
            if self._running is not new:
                await self._end(new)
            raise NotChanged("the job ended meanwhile, and was started again")

    def _check_does_not_end(self) -> None:
        if self.given_up:
            raise GivenUp(self.given_up)
        if self.ends():
            raise NotChanged("the server is shutting down")

    def ends(self) -> bool:
        """Whether it was asked to."""
        return self._ending.is_set()

    def end(self) -> None:
        """Asks the job to finish what it does; again: at once."""
        if self._running is not None:
            self._is_told |= not self._planned and self._running.exit_code() is None
            self._running.process.send_signal(signal.SIGKILL if self.ends() else signal.SIGTERM)
        self._ends_by = time.monotonic() + self._shutdown_s
        self._ending.set()

    def kill(self) -> None:
        """For a job that answers nothing any more."""
        if self._running is not None:
            self._running.process.kill()

    async def _next(self) -> Running | None:
        """The spare, however far it is, at once; or, when the memory and ports of what ran before are free,
        one that has imported what it needs, or a new start. What is being made ready for a change is none
        yet. None: it has been asked to end meanwhile. One of `NOT_STARTED` where there is neither."""
        at_once = self._is_of_use(self._spare) and not self._spare.imports_alone
        if not at_once:
            await self._leaving.gone()
            if self.ends():
                return None
        spare, self._spare = self._spare, None
        if at_once or self._is_of_use(spare):
            assert spare is not None
            self._running = spare
            self.n_starts += spare.imports_alone
            spare.take_over()
        else:
            self._running = self._start()
        return self._running

    def _is_of_use(self, spare: Running | None) -> TypeGuard[Running]:
        """Whether there is one that runs, of the command that is wanted."""
        return spare is not None and spare.exit_code() is None and spare.command == self.command.words

    async def _end(self, running: Running) -> None:
        """Until nothing of it runs any more. It may be there still."""
        if running.process.poll() is None:
            running.process.kill()
        await running.forget()
        await self._leaving.end_all(lambda: self._others(running), self._end_s)

    def _others(self, running: Running) -> list[int]:
        return [x.process.pid for x in (self._running, self._spare) if x is not None and x is not running]

    async def _keep_spare(self) -> None:
        """Starts one whenever the job is ready and there is none."""
        imports_alone, after_s = not self._has_spare, _GOING_ON_S
        if imports_alone:
            if self._imports_after_s is None:
                return
            after_s = self._imports_after_s
        n_failed, command = 0, self.command
        while True:
            if self.command is not command:
                n_failed, command = 0, self.command
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._is_ready and not self.ends() and not self._is_changing
                )
            if self._leaving:  # its memory is the spare's
                await self._leaving.gone()
                continue
            left_s = self._ready_at + after_s - time.monotonic()
            if left_s > 0 and (self.causes or imports_alone):
                await asyncio.sleep(left_s)  # requests go on first: a start takes cores
                continue
            try:
                self._spare = spare = self._start(is_spare=True, imports_alone=imports_alone)
            except NOT_STARTED as error:
                n_failed += 1
                _log.error("a spare could not be started: %s", why_not_started(error))
                await asyncio.sleep(spare_pause_s(n_failed))
                continue
            stood_by = False
            while spare.is_spare and spare.process.poll() is None:
                await asyncio.sleep(_LOOK_S)
                if not stood_by and spare.stands_by:
                    stood_by, n_failed = True, 0
                    took_s = time.monotonic() - spare.began
                    if not imports_alone:
                        _log.info("a spare stands by, %.1f s after it was started", took_s)
                elif not stood_by and time.monotonic() - spare.began > self._start_s:
                    spare.process.kill()
            if spare.is_spare:  # it has ended by itself
                self._spare = None
                n_failed += 1
                pause_s = spare_pause_s(n_failed)
                _log.error("the spare %s; the next one in %.0f s", spare.ended_with(), pause_s)
                await self._end(spare)
                await asyncio.sleep(pause_s)

    def _start(
        self, *, is_spare: bool = False, imports_alone: bool = False, command: JobCommand | None = None
    ) -> Running:
        """One of `NOT_STARTED` where the system does not let it."""
        self._n_processes += 1
        self.n_starts += not imports_alone
        words, how = (command or self.command).words, {"is_spare": is_spare, "imports_alone": imports_alone}
        return Running(self._n_processes, words, self._folder, self._secret, **how)

    async def _watch(self, running: Running) -> tuple[Cause, int]:
        """Until the process is over; why it is, and its exit code."""
        began = heard = probed = running.began
        killed_because: Cause | None = None
        while (code := running.exit_code()) is None:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            if now > self._ends_by and not killed_because:
                why = f"it did not end within {self._shutdown_s:g} s of when it was asked to"
                killed_because = Cause("silent", why)
                self._kill(running, killed_because)
            starting_s = _FIRST_PROBE_S if now - began < _FIRST_S else _STARTING_PROBE_S
            if killed_because or now - probed < (_PROBE_S if self._is_ready else starting_s):
                continue
            probed = now
            health = await self._health(running)
            if health is not None:
                heard = time.monotonic()
            is_healthy, in_step_s, failure = health or _Health(False)
            if is_healthy and not self._is_ready and await self._paused_again(running):
                self.last_start_s = time.monotonic() - began
                if self.was_ready:
                    _log.info("the job is ready again, %.1f s after it was started", self.last_start_s)
                self.was_ready, self._before = True, None
                await self._set_ready(True)
            silent_s = time.monotonic() - heard
            if failure:
                killed_because = Cause("failed", failure)
            elif self._is_ready and silent_s > self._stuck_after_s and not self.ends():
                # Its socket is closed long before its last rank is gone.
                killed_because = Cause("silent", f"it answered nothing for {silent_s:.0f} s")
            elif in_step_s > self._step_s:
                killed_because = Cause("step", f"a step took longer than {self._step_s:g} s")
            elif not self._is_ready and time.monotonic() - began > self._start_s:
                killed_because = Cause("start", f"it was not ready within {self._start_s:g} s")
            if killed_because:
                self._kill(running, killed_because)
        if killed_because:
            return killed_because, code
        if code < 0:
            with suppress(ValueError):
                return Cause("killed", f"killed by {signal.Signals(-code).name}"), code
        return Cause("exit", f"exit code {code}"), code

    def _kill(self, running: Running, why: Cause) -> None:
        if self.ends():  # else it is said with what is done about it
            _log.error("the job is killed while it ends: %s", why.text)
        running.process.kill()

    async def _health(self, running: Running) -> _Health | None:
        """None: its server does not answer."""
        try:
            timeout_s = max(_PROBE_S, self._stuck_after_s / 4)
            answer = await running.client.ask("GET", "/health", timeout_s=timeout_s)
        except (NoAnswer, MemoryError):
            return None
        if answer.status == 200:
            return _Health(True, float(answer.headers.get(STEP_SECONDS, 0.0)))
        try:
            said = json.loads(answer.content)
            return _Health(False, 0.0, str(said["reason"]) if said["status"] == "failed" else "")
        except (ValueError, KeyError, TypeError):
            return _Health(False)

    async def _paused_again(self, running: Running) -> bool:
        """Whether a new start is as paused as it is to be, before any request comes."""
        if not self.is_paused:
            return True
        try:
            answer = await running.client.ask("POST", "/pause", timeout_s=_PROBE_S)
        except NoAnswer:
            return False
        return answer.status == 200

    async def _set_ready(self, ready: bool) -> None:
        async with self._changed:
            self._is_ready, self._ready_at = ready, time.monotonic()
            self._changed.notify_all()

    async def _give_up(self, why: str, code: int) -> None:
        async with self._changed:
            self.given_up, self.code = why, code
            self._changed.notify_all()
