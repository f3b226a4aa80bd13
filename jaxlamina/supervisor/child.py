"""The serving job below a supervisor: started, watched, ended for certain, and started again.

Each start has a socket of its own, so an answer of an earlier one is nobody's. Knows processes and the
server's `/health`; nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx

from jaxlamina.process.parents import end_with_parent, take_orphans
from jaxlamina.server.pieces import HEADER, SECRET, STEP_SECONDS

MOST_FAILED_STARTS = 5
"""In a row, after which a job is given up that was ready before."""
_LOOK_S = 0.1
_PROBE_S = 1.0  # between two looks at /health
_STARTING_PROBE_S = 0.1
_KILLED_S = 10.0  # for the kernel to take a killed process away
_log = logging.getLogger("uvicorn.error")


class Cause(NamedTuple):
    """Why a start of the job ended: a word (killed, exit, silent, step, start), and what was seen."""

    kind: str
    text: str


class GivenUp(Exception):
    """There is no job, and none will be started."""


class Running:
    """One start of the job. ``client`` reaches its server; ``n``: which start it is."""

    def __init__(
        self, n: int, process: subprocess.Popen[bytes], socket: Path, headers: Mapping[str, str]
    ) -> None:
        self.n, self.process, self.socket = n, process, socket
        # A step may take long; what ends a job that is silent is its probe.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=limits),
            base_url="http://job",
            headers=headers,
            timeout=httpx.Timeout(None, connect=5.0),
        )


class SupervisedJob:
    """``command`` with a socket's path after it serves there.

    A start that is not ready when it ends is a failed one: the first ends the job, with ``code``; later ones
    are tried again, after a pause. A server that was ready is ended when it answers nothing for
    ``stuck_after_s``, or is in one step for ``step_s``; and one that is not ready after ``start_s``.
    ``causes``: why each start but the last has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        api_key: str | None,
        stuck_after_s: float,
        step_s: float,
        start_s: float,
    ) -> None:
        self._command, self._folder = tuple(command), folder
        self._stuck_after_s, self._step_s, self._start_s = stuck_after_s, step_s, start_s
        self._secret = secrets.token_hex(16)
        self._headers = {HEADER: self._secret}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._running: Running | None = None
        self._is_ready = False
        self._is_ending = False
        self._changed = asyncio.Condition()
        self.was_ready = False
        self.given_up = ""  # why there will be no job any more
        self.code = 0
        self.n_starts = 0
        self.causes: list[Cause] = []
        self.last_start_s = 0.0

    @property
    def state(self) -> str:
        if self.given_up:
            return "failed"
        if self._is_ending:
            return "draining"
        return "ready" if self._is_ready else "recovering" if self.was_ready else "starting"

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
        n_failed = 0
        while not self.ends():
            began = time.monotonic()
            running = self._start()
            cause = await self._watch(running, began)
            was_ready = self._is_ready
            await self._set_ready(False)
            await running.client.aclose()
            await _end_orphans()
            running.socket.unlink(missing_ok=True)
            if self.ends():
                break
            n_failed = 0 if was_ready else n_failed + 1
            if not self.was_ready or n_failed >= MOST_FAILED_STARTS:
                tries = f", {n_failed} times in a row before it was ready" if self.was_ready else ""
                await self._give_up(f"the job ended: {cause.text}{tries}", running.process.returncode or 0)
                return
            self.causes.append(cause)
            pause_s = 0.0 if was_ready else 2.0 ** (n_failed - 1)
            _log.error(
                "the job ended: %s; it is started again%s",
                cause.text,
                f" in {pause_s:g} s" if pause_s else "",
            )
            await asyncio.sleep(pause_s)
        await self._give_up("the server has shut down", 0)

    def ends(self) -> bool:
        """Whether it was asked to."""
        return self._is_ending

    def end(self) -> None:
        """Asks the job to finish what it does; again: at once."""
        if self._running is not None:
            self._running.process.send_signal(signal.SIGKILL if self._is_ending else signal.SIGTERM)
        self._is_ending = True

    def kill(self) -> None:
        """For a job that answers nothing any more."""
        if self._running is not None:
            self._running.process.kill()

    def _start(self) -> Running:
        self.n_starts += 1
        socket = self._folder / f"{self.n_starts}.sock"
        process = subprocess.Popen(
            [*self._command, str(socket)],
            stdin=subprocess.DEVNULL,
            env=os.environ | {SECRET: self._secret},
            start_new_session=True,  # a terminal's Ctrl-C is for the supervisor alone
            preexec_fn=partial(end_with_parent, signal.SIGKILL),  # noqa: PLW1509 (from the main thread)
        )
        self._running = Running(self.n_starts, process, socket, self._headers)
        return self._running

    async def _watch(self, running: Running, began: float) -> Cause:
        """Until the process is over; why it is."""
        heard = probed = began
        killed_because: Cause | None = None
        while (code := running.process.poll()) is None:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            if killed_because or now - probed < (_PROBE_S if self._is_ready else _STARTING_PROBE_S):
                continue
            probed = now
            health = await self._health(running)
            if health is not None:
                heard = time.monotonic()
            is_healthy, in_step_s = health or (False, 0.0)
            if is_healthy and not self._is_ready:
                self.last_start_s = time.monotonic() - began
                if self.was_ready:
                    _log.info("the job is ready again, %.1f s after it was started", self.last_start_s)
                self.was_ready = True
                await self._set_ready(True)
            silent_s = time.monotonic() - heard
            if self._is_ready and silent_s > self._stuck_after_s:
                killed_because = Cause("silent", f"it answered nothing for {silent_s:.0f} s")
            elif in_step_s > self._step_s:
                killed_because = Cause("step", f"a step took longer than {self._step_s:g} s")
            elif not self._is_ready and time.monotonic() - began > self._start_s:
                killed_because = Cause("start", f"it was not ready within {self._start_s:g} s")
            if killed_because:
                running.process.kill()
        if killed_because:
            return killed_because
        if code < 0:
            with suppress(ValueError):
                return Cause("killed", f"killed by {signal.Signals(-code).name}")
        return Cause("exit", f"exit code {code}")

    async def _health(self, running: Running) -> tuple[bool, float] | None:
        """Whether its server takes requests, and for how long it has been in a step; None: it does not
        answer."""
        try:
            answer = await running.client.get("/health", timeout=max(_PROBE_S, self._stuck_after_s / 4))
        except httpx.HTTPError:
            return None
        return answer.status_code == 200, float(answer.headers.get(STEP_SECONDS, 0.0))

    async def _set_ready(self, ready: bool) -> None:
        async with self._changed:
            self._is_ready = ready
            self._changed.notify_all()

    async def _give_up(self, why: str, code: int) -> None:
        async with self._changed:
            self.given_up, self.code = why, code
            self._changed.notify_all()


async def _end_orphans() -> None:
    """Processes that a dead job has left; a GPU and ports are free only when they are gone."""
    until = time.monotonic() + _KILLED_S
    while left := _children():
        if time.monotonic() > until:
            _log.error("processes of the job do not end: %s", left)
            return
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 (it does not block)
        await asyncio.sleep(0.02)


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found
