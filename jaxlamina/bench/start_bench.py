"""From a server's command to its first answer, with no compiled programs on disk and with all of them, and what streams notice of
the programs that are compiled behind. Knows processes, a server's lines and a folder of programs; nothing of models.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import aiohttp
import numpy as np

from jaxlamina.bench.loads import Size
from jaxlamina.bench.serve_client import Target, ask, look, prompts, session
from jaxlamina.cache import cache_dir
from jaxlamina.errors import UserError

_PROGRAMS = "xla"  # the cache folder's part that `jaxlamina.compilation` fills
_POLL_S = 0.05
_END_S = 60.0
_ALL = re.compile(r"compiled all (\d+) programs")


@dataclass(frozen=True)
class Gaps:
    """Milliseconds between pieces of text of streams: how many, their median and 99th percentile."""

    n: int
    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Gaps | None:
        """None of none."""
        if not seconds:
            return None
        p50, p99 = 1e3 * np.percentile(seconds, [50, 99])
        return cls(len(seconds), float(p50), float(p99))


@dataclass(frozen=True)
class Start:
    """Seconds from the command. ``cache``: "empty" or "full". ``all_s``: until all programs were compiled, None if that took longer
    than was waited for, or was not said. ``behind``, ``after``: gaps of streams before that and after it."""

    cache: str
    first_answer_s: float
    all_s: float | None
    n_programs: int | None
    behind: Gaps | None
    after: Gaps | None


@dataclass(frozen=True)
class Load:
    """``n_streams`` at once, one request after another each, for at most ``behind_s`` while programs are compiled and for
    ``after_s`` after that."""

    n_streams: int
    size: Size
    behind_s: float
    after_s: float


def command_of(words: Sequence[str]) -> list[str]:
    """The command line of a server on a free port. ``UserError`` where ``words`` start none."""
    words = list(words) or ["serve"]
    if "serve" not in words:
        raise UserError(f"{' '.join(words)!r} starts no server: give serve …, or launch … -- serve …")
    if any(word == "--port" or word.startswith("--port=") for word in words):
        raise UserError("--port: the bench takes a free one")
    at = len(words) - words[::-1].index("serve")
    return [sys.executable, "-m", "jaxlamina", *words[:at], "--port", "0", *words[at:]]


@contextmanager
def cache_without_programs() -> Iterator[Path]:
    """A cache folder that has all that the user's has but compiled programs."""
    with tempfile.TemporaryDirectory(prefix="jaxlamina-bench-") as folder:
        known = cache_dir()
        for path in sorted(known.iterdir()) if known.is_dir() else ():
            if path.name != _PROGRAMS:
                (Path(folder) / path.name).symlink_to(path)
        yield Path(folder)


def measure(
    words: Sequence[str],
    load: Load,
    *,
    n_rounds: int,
    deadline_s: float,
    on_progress: Callable[[str], object] = lambda what: None,
) -> list[Start]:
    """Two starts a round: without programs on disk, and with those of the first. ``UserError`` for a server that ends, or does
    not answer within ``deadline_s``."""
    command, found = command_of(words), []
    for i in range(n_rounds):
        with cache_without_programs() as cache:
            for name in ("empty", "full"):
                on_progress(f"round {i + 1} of {n_rounds}: {name} cache")
                found.append(_start(command, name, cache, load, deadline_s))
    return found


def _start(command: Sequence[str], name: str, cache: Path, load: Load, deadline_s: float) -> Start:
    began_s = time.monotonic()
    with _running(command, {"JAXLAMINA_CACHE": str(cache)}) as server:
        url = server.address(began_s + deadline_s)
        target = asyncio.run(_first_answer(server, url, began_s + deadline_s))
        first_s = time.monotonic() - began_s
        behind = asyncio.run(_streams(target, load, load.behind_s, server.all_compiled.is_set))
        n = server.n_programs
        all_s = None if server.all_compiled_at_s is None else server.all_compiled_at_s - began_s
        after = asyncio.run(_streams(target, load, load.after_s, lambda: False)) if all_s is not None else []
        server.check()
    return Start(name, first_s, all_s, n, Gaps.of(behind), Gaps.of(after))


class _Server:
    """A process and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.all_compiled = threading.Event()
        self.all_compiled_at_s: float | None = None
        self.n_programs: int | None = None

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.strip())
            if found := _ALL.search(line):
                self.n_programs, self.all_compiled_at_s = int(found[1]), time.monotonic()
                self.all_compiled.set()

    def check(self) -> None:
        """``UserError`` if it has ended."""
        if self.process.poll() is not None:
            raise UserError(f"the server ended: {self.last_line()}")

    def last_line(self) -> str:
        said = [line for line in self.lines if line]
        return next(
            (line for line in reversed(said) if line.startswith("error")), (said or ["it said nothing"])[-1]
        )

    def address(self, until_s: float) -> str:
        while True:
            for line in list(self.lines):
                if line.startswith("serving ") and " at http" in line:
                    return line.rpartition(" at ")[2]
            self.check()
            if time.monotonic() > until_s:
                raise UserError(f"the server listens nowhere yet: {self.last_line()}")
            time.sleep(_POLL_S)


@contextmanager
def _running(command: Sequence[str], variables: Mapping[str, str]) -> Iterator[_Server]:
    kept = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | dict(variables),
        start_new_session=True,  # a job's ranks end with it
    )
    server = _Server(process)
    reader = threading.Thread(target=server.read, daemon=True)
    reader.start()
    try:
        yield server
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(_END_S)
        assert process.stderr is not None
        process.stderr.close()


async def _first_answer(server: _Server, url: str, until_s: float) -> Target:
    """Asks for one token, again and again from the start; what was asked, for others to ask."""
    size = Size(1, 1)
    while True:
        try:
            served = await look(url, None, None)
            target = Target(url, "completions", served.model, ignore_eos=True)
            async with session(target) as http:
                answer = await ask(http, target, "a", size)
            why = answer.error
        except UserError as error:
            why = str(error)
        if why is None:
            return target
        server.check()
        if time.monotonic() > until_s:
            raise UserError(f"the server has not answered by the deadline: {why}; {server.last_line()}")
        await asyncio.sleep(_POLL_S)


async def _streams(target: Target, load: Load, seconds: float, is_over: Callable[[], bool]) -> list[float]:
    """Seconds between pieces of text. ``UserError`` if a request fails."""
    served = await look(target.base_url, target.model, None)
    [prompt] = prompts([load.size], served.token_ids, seed=0)
    until_s = time.monotonic() + seconds
    gaps: list[float] = []

    async def stream(http: aiohttp.ClientSession) -> None:
        while time.monotonic() < until_s and not is_over():
            answer = await ask(http, target, prompt, load.size)
            if answer.error is not None:
                raise UserError(f"a request failed: {answer.error}")
            gaps.extend(b - a for a, b in pairwise(answer.text_s))

    async with session(target) as http:
        await asyncio.gather(*(stream(http) for _ in range(load.n_streams)))
    return gaps
