"""From a server's command to its first answer, with no compiled programs on disk and with all of them, and
what streams notice of the programs that are compiled behind. Knows processes, a server's lines and a folder
of programs; nothing of models.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import aiohttp
import numpy as np

from jaxlamina.bench.loads import Size
from jaxlamina.bench.serve_client import Target, ask, look, prompts, session
from jaxlamina.bench.server_process import Server, running
from jaxlamina.errors import UserError
from jaxlamina.process.cache_folder import cache_dir, programs_dir

_POLL_S = 0.05
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
    """Seconds from the command. ``cache``: "empty" or "full". ``all_s``: until all programs were compiled,
    None if that took longer than was waited for, or was not said. ``behind``, ``after``: gaps of streams
    before that and after it."""

    cache: str
    first_answer_s: float
    all_s: float | None
    n_programs: int | None
    behind: Gaps | None
    after: Gaps | None


@dataclass(frozen=True)
class StartLoad:
    """``n_streams`` at once, one request after another each, for at most ``behind_s`` while programs are
    compiled and for ``after_s`` after that."""

    n_streams: int
    size: Size
    behind_s: float
    after_s: float


def command_of(words: Sequence[str]) -> list[str]:
    """The command line of a server on a free port, without a supervisor unless ``words`` ask for one.
    ``UserError`` where they start no server."""
    words = list(words) or ["serve"]
    if "serve" not in words:
        raise UserError(f"{' '.join(words)!r} starts no server: give serve …, or launch … -- serve …")
    if any(word == "--port" or word.startswith("--port=") for word in words):
        raise UserError("--port: the bench takes a free one")
    at = len(words) - words[::-1].index("serve")
    alone = () if {"--supervise", "--no-supervise"} & {*words} else ("--no-supervise",)
    return [sys.executable, "-m", "jaxlamina", *words[:at], *alone, "--port", "0", *words[at:]]


@contextmanager
def cache_without_programs() -> Iterator[Path]:
    """A cache folder that has all that the user's has but compiled programs."""
    with tempfile.TemporaryDirectory(prefix="jaxlamina-bench-") as folder:
        known = cache_dir()
        for path in sorted(known.iterdir()) if known.is_dir() else ():
            if path != programs_dir():
                (Path(folder) / path.name).symlink_to(path)
        yield Path(folder)


def measure(
    command: Sequence[str],
    load: StartLoad,
    *,
    n_rounds: int,
    deadline_s: float,
    on_progress: Callable[[str], object] = lambda what: None,
) -> list[Start]:
    """Two starts of ``command`` (`command_of`) a round: without programs on disk, and with those of the
    first. ``UserError`` for a server that ends, or does not answer within ``deadline_s``."""
    found = []
    for i in range(n_rounds):
        with cache_without_programs() as cache:
            for name in ("empty", "full"):
                on_progress(f"round {i + 1} of {n_rounds}: {name} cache")
                found.append(_start(command, name, cache, load, deadline_s))
    return found


def _start(command: Sequence[str], name: str, cache: Path, load: StartLoad, deadline_s: float) -> Start:
    kept = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    all_compiled = threading.Event()
    all_s, n_programs = None, None
    began_s = time.monotonic()

    def look_for_all(line: str) -> None:
        nonlocal all_s, n_programs
        if found := _ALL.search(line):
            all_s, n_programs = time.monotonic() - began_s, int(found[1])
            all_compiled.set()

    with running(command, kept | {"JAXLAMINA_CACHE": str(cache)}, look_for_all) as server:
        url = server.wait_for("serving ", deadline_s).rpartition(" at ")[2]
        target = asyncio.run(_first_answer(server, url, began_s + deadline_s))
        first_s = time.monotonic() - began_s
        behind = asyncio.run(_streams(target, load, load.behind_s, all_compiled.is_set))
        is_known = all_compiled.is_set()
        after = asyncio.run(_streams(target, load, load.after_s, lambda: False)) if is_known else []
        server.check()
    all_known = (all_s, n_programs) if is_known else (None, None)
    return Start(name, first_s, *all_known, Gaps.of(behind), Gaps.of(after))


async def _first_answer(server: Server, url: str, until_s: float) -> Target:
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


async def _streams(
    target: Target, load: StartLoad, seconds: float, is_over: Callable[[], bool]
) -> list[float]:
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
            gaps.extend(b - a for a, b in pairwise(answer.token_s))

    async with session(target) as http:
        await asyncio.gather(*(stream(http) for _ in range(load.n_streams)))
    return gaps
