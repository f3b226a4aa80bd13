"""What clients of a supervised server notice when one of its processes dies or is stuck, and where the time
goes: until it is noticed, until a job is ready, until kept KV is back, until each stream goes on.

Knows a supervisor's lines, status and counters, and clients that stream; nothing of models.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import aiohttp
import msgspec

from jaxlamina.bench.job_processes import FAULTS, find, supervised
from jaxlamina.bench.loads import Size
from jaxlamina.bench.serve_client import ANY_TOKEN_IDS, Stream, Target, ask, look, prompts, session
from jaxlamina.bench.serve_metrics import TimedAnswer
from jaxlamina.bench.server_numbers import Numbers
from jaxlamina.bench.server_process import Server
from jaxlamina.bench.start_bench import command_of
from jaxlamina.errors import UserError

_POLL_S = 0.005
_ENDED, _READY, _SPARE = "the job ended: ", "the job is ready again", "a spare stands by"
_OF_RANK = "error: rank"
# A counter, by the name it has in `Counters`.
_COUNTERS = {
    "brought_bytes": "jaxlamina:kept_kv_brought_bytes_total",
    "brought_s": "jaxlamina:kept_kv_brought_seconds_total",
    "n_recomputed": "jaxlamina:recomputed_tokens_total",
}


@dataclass(frozen=True)
class Struck:
    """Seconds from the fault of ``whom``, which ``cause`` says as the supervisor has it, and ``said`` as the
    last line of the job's ranks has it, "" where they said nothing. ``brought_bytes``, ``brought_s``: kept KV
    that came back, and how long hosts were at it. ``n_recomputed`` of the ``n_tokens`` that streams had,
    prompts included. ``spare_s``: until the next spare stood by, None where there is none. ``start_s``: of
    the new job, by phase (`jaxlamina.process.start_clock`); a spare's came before."""

    whom: str
    cause: str
    said: str
    noticed_s: float
    ready_s: float
    brought_bytes: float
    brought_s: float
    next_s: tuple[float, ...]  # of each stream, until its first token after that
    n_recomputed: int
    n_tokens: int
    spare_s: float | None
    start_s: dict[str, float]

    @property
    def median_s(self) -> float:
        return median(self.next_s)

    @property
    def last_s(self) -> float:
        return max(self.next_s)


@dataclass(frozen=True)
class RecoveryLoad:
    """``n_streams`` of ``size`` at once. The fault comes once each has written ``n_written`` tokens."""

    n_streams: int
    size: Size
    n_written: int


def supervised_command(words: Sequence[str]) -> list[str]:
    """The command line of a supervised server on a free port. ``UserError`` where ``words`` start none."""
    words = list(words) or ["serve"]
    if "--no-supervise" in words:
        raise UserError("--no-supervise: without a supervisor nothing recovers; leave it out")
    if "--supervise" not in words and "serve" in words:
        words.insert(len(words) - words[::-1].index("serve"), "--supervise")
    return command_of(words)


def measure(
    command: Sequence[str],
    load: RecoveryLoad,
    *,
    fault: str,
    whom: Sequence[str],
    times: int,
    deadline_s: float,
    standing_by_s: float = 0.0,
    on_progress: Callable[[str], object] = lambda what: None,
) -> tuple[list[Struck], str | None]:
    """One server of ``command`` (`supervised_command`), which is struck so many times, ``whom`` in turn, with
    new streams each time. ``deadline_s``: for whatever is waited for. ``standing_by_s``: what a spare has
    before streams begin. Also why there are fewer than ``times``, where a later one is not in time, or fails;
    ``UserError`` for the first one."""
    lines: list[tuple[float, str]] = []

    def note(line: str) -> None:
        lines.append((time.perf_counter(), line))

    on_progress("the server starts")
    with supervised(command, os.environ, note) as server:
        server.wait_for("ready: ", deadline_s)
        url = server.wait_for("serving ", deadline_s).rpartition(" at ")[2]
        spare_s = standing_by_s if _has_spare(command) else None
        ahead = "--starter" not in " ".join(command)
        bench = _Bench(server, url, load, lines, deadline_s, spare_s, ahead, on_progress)
        found: list[Struck] = []
        for i in range(times):
            bench.fault = f"fault {i + 1} of {times}"
            try:
                found.append(asyncio.run(bench.strike(fault, whom[i % len(whom)], i)))
            except (UserError, KeyboardInterrupt) as error:  # of minutes, what there is already is told
                if not found:
                    raise
                return found, f"fault {i + 1} of {times}: {error or 'interrupted'}"
        return found, None


def _has_spare(command: Sequence[str]) -> bool:
    said = re.search(r" --spare[ =](\d+)", " ".join(command))
    return said is not None and int(said[1]) > 0


class _Bench:
    def __init__(
        self,
        server: Server,
        url: str,
        load: RecoveryLoad,
        lines: list[tuple[float, str]],
        deadline_s: float,
        standing_by_s: float | None,
        is_imported_ahead: bool,
        on_progress: Callable[[str], object],
    ) -> None:
        """``standing_by_s``: None without a spare. ``is_imported_ahead``: what starts next imports before
        that."""
        self.fault = ""  # which one this is, for whoever looks on
        self._is_imported_ahead, self._on_progress = is_imported_ahead, on_progress
        self._server, self._url, self._load = server, url, load
        self._lines, self._deadline_s, self._standing_by_s = lines, deadline_s, standing_by_s

    async def strike(self, fault: str, whom: str, number: int) -> Struck:
        load = self._load
        served = await look(self._url, None, None)
        target = Target(
            self._url,
            "completions",
            served.model,
            ignore_eos=True,
            silence_s=self._deadline_s,
            gives_ids=True,
        )
        async with session(target) as http:
            if self._standing_by_s is not None:
                await self._until(lambda: self._said(_SPARE, number + 1), "the spare")
                await asyncio.sleep(self._standing_by_s)
            elif self._is_imported_ahead:
                await self._imported(http)
            texts = prompts([load.size] * load.n_streams, ANY_TOKEN_IDS, seed=number)
            streams = [Stream() for _ in texts]
            asked = [
                asyncio.create_task(ask(http, target, text, load.size, stream))
                for text, stream in zip(texts, streams, strict=True)
            ]
            try:
                return await self._struck(http, fault, whom, number, streams, asked)
            finally:
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)

    async def _struck(
        self,
        http: aiohttp.ClientSession,
        fault: str,
        whom: str,
        number: int,
        streams: Sequence[Stream],
        asked: Sequence[asyncio.Task[TimedAnswer]],
    ) -> Struck:
        load = self._load

        def all_go_on() -> bool:
            ready = self._said(_READY, number + 1)
            return bool(ready) and all(s.token_s[-1] > ready[number][0] for s in streams)

        def check() -> None:
            for task in asked:
                if task.done() and task.result().error is not None:
                    raise UserError(f"a request failed: {task.result().error}")
            if any(task.done() for task in asked) and not all_go_on():
                raise UserError("streams ended before they could go on: give a greater --output-len")

        async def until(holds: Callable[[], object], what: str) -> None:
            await self._until(holds, what, check)

        before = _counters(await self._metrics(http))
        pid = find(whom, self._server.pid, (await self._status(http))["workers"])
        written = f"all streams to write {load.n_written} tokens"
        await until(lambda: all(len(s.token_s) >= load.n_written for s in streams), written)
        os.kill(pid, FAULTS[fault])
        struck_s = time.perf_counter()
        n_tokens = sum(load.size.n_prompt + len(s.token_s) for s in streams)
        await until(lambda: self._said(_ENDED, number + 1), "the supervisor to notice")
        noticed_s, line = self._said(_ENDED, number + 1)[number]
        await until(lambda: self._said(_READY, number + 1), "the next job")
        ready_s, _ = self._said(_READY, number + 1)[number]
        await until(all_go_on, "all streams to go on")
        next_s = tuple(next(t for t in s.token_s if t > ready_s) - struck_s for s in streams)
        metrics = await self._metrics(http)
        after = _counters(metrics)
        n_recomputed = int(after["n_recomputed"] - before["n_recomputed"])
        times = f"noticed after {noticed_s - struck_s:.2f} s, ready after {ready_s - struck_s:.2f}"
        on = f"streams went on after {min(next_s):.2f} to {max(next_s):.2f}"
        self._on_progress(f"{self.fault}: {times}, {on}; {n_recomputed} tokens computed again")
        spare_s = None
        if self._standing_by_s is not None:
            for task in asked:  # what they would write yet shows nothing
                task.cancel()
            await self._until(lambda: self._said(_SPARE, number + 2), "the next spare")
            spare_s = self._said(_SPARE, number + 2)[number + 1][0] - struck_s
        of_job = [text for at, text in self._said(_OF_RANK, 0) if struck_s < at <= noticed_s]
        return Struck(
            whom=whom,
            said=of_job[-1].strip() if of_job else "",
            cause=line.partition(_ENDED)[2].partition("; it is started")[0],
            noticed_s=noticed_s - struck_s,
            ready_s=ready_s - struck_s,
            brought_bytes=after["brought_bytes"],  # of a job that is new
            brought_s=after["brought_s"],
            next_s=next_s,
            n_recomputed=n_recomputed,
            n_tokens=n_tokens,
            spare_s=spare_s,
            start_s=_start_s(metrics),
        )

    async def _imported(self, http: aiohttp.ClientSession) -> None:
        """Until the next start has its imports."""
        self._tell("the next start's imports")
        until_s = time.perf_counter() + self._deadline_s
        while (await self._status(http))["spare"] != "imported":
            if time.perf_counter() > until_s:
                raise UserError(f"waited {self._deadline_s:g} s (--deadline) for the next start's imports")
            await asyncio.sleep(0.1)

    def _tell(self, what: str) -> None:
        self._on_progress(f"{self.fault}: waits for {what}")

    def _said(self, what: str, n: int) -> list[tuple[float, str]]:
        """The supervisor's lines of it, if there are so many."""
        found = [(at, line) for at, line in list(self._lines) if what in line]
        return found if len(found) >= n else []

    async def _until(
        self, holds: Callable[[], object], what: str, check: Callable[[], None] = lambda: None
    ) -> None:
        self._tell(what)
        until_s = time.perf_counter() + self._deadline_s
        while not holds():
            check()
            self._server.check()
            if time.perf_counter() > until_s:
                last = self._server.last_line()
                raise UserError(f"waited {self._deadline_s:g} s (--deadline) for {what}; last line: {last}")
            await asyncio.sleep(_POLL_S)

    async def _get(self, http: aiohttp.ClientSession, path: str) -> bytes:
        try:
            async with http.get(self._url + path) as answer:
                return await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise UserError(f"the server does not say {path}: {error}") from None

    async def _status(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        return msgspec.json.decode(await self._get(http, "/v1/fault_tolerance/status"), type=dict[str, Any])

    async def _metrics(self, http: aiohttp.ClientSession) -> str:
        return (await self._get(http, "/metrics")).decode()


def _counters(metrics: str) -> dict[str, float]:
    numbers = Numbers(metrics)
    return {name: numbers.get(of) for name, of in _COUNTERS.items()}


def _start_s(metrics: str) -> dict[str, float]:
    phases = re.findall(r'^jaxlamina:start_seconds{.*phase="(.*)"} (\S+)$', metrics, re.MULTILINE)
    return {phase: float(seconds) for phase, seconds in phases}
