"""What one heavy request does to everybody else: streams and `/health`, with it and without it in turns.
Knows asyncio.

Streams and questions for `/health` go on all the time; what is made of their times is pure.
"""

from __future__ import annotations

import asyncio
import io
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import numpy as np

from jaxlamina.bench.heavy import Heavy
from jaxlamina.bench.loads import Size
from jaxlamina.bench.serve_bench import try_out
from jaxlamina.bench.serve_client import Prompt, Target, ask, session
from jaxlamina.errors import UserError

HEALTH_LIMIT_MS = 250.0
RATIO_LIMIT = 2.0
_HEALTH_EVERY_S = 0.02
_SETTLE_S = 0.5  # after a heavy request: its last work is not its successor's

Span = tuple[float, float]  # seconds of one clock


@dataclass(frozen=True)
class Effect:
    """Of one heavy request: milliseconds between others' pieces of text (p99) and of `/health`, beside it and
    without it.

    ``ratio``: the median over rounds of each round's own. ``statuses``: how the request was answered, and how
    often.
    """

    name: str
    mib: float
    statuses: dict[str, int]
    answer_s: float  # the median
    beside_itl_ms: float
    alone_itl_ms: float
    ratio: float
    beside_health_ms: float  # the longest of all
    alone_health_ms: float

    @property
    def is_met(self) -> bool:
        return self.ratio <= RATIO_LIMIT and self.beside_health_ms <= HEALTH_LIMIT_MS


@dataclass
class _Round:
    alone: Span
    beside: Span
    answers: list[tuple[str, float]]


@dataclass
class _Seen:
    """Spans between pieces of text, and of questions for `/health`."""

    texts: list[Span] = field(default_factory=list)
    healths: list[Span] = field(default_factory=list)
    n_failed: int = 0


async def measure(
    target: Target,
    prompt: Prompt,
    size: Size,
    heavy: Sequence[Heavy],
    *,
    n_streams: int,
    window_s: float,
    n_rounds: int,
    on_progress: Callable[[str], object] = lambda what: None,
) -> list[Effect]:
    """Each of ``heavy`` for ``n_rounds``, in turns. A round is ``window_s`` without it, and about as long
    with it, again and again, one at a time. ``UserError`` where streams fail or say nothing."""
    await try_out(target, prompt, size)
    rounds: dict[str, list[_Round]] = {request.name: [] for request in heavy}
    seen = _Seen()
    async with session(target) as http, _going_on(target, prompt, size, n_streams, seen):
        await asyncio.sleep(window_s)
        for i in range(n_rounds):
            for request in heavy:
                on_progress(f"round {i + 1} of {n_rounds}: {request.name}")
                rounds[request.name].append(await _round(http, target.base_url, request, window_s))
                await asyncio.sleep(_SETTLE_S)
    if seen.n_failed:
        raise UserError(
            f"{seen.n_failed} of the requests beside failed: nothing is said of the others' times"
        )
    return [effect(request, rounds[request.name], seen.texts, seen.healths) for request in heavy]


@asynccontextmanager
async def _going_on(target: Target, prompt: Prompt, size: Size, n: int, seen: _Seen) -> AsyncIterator[None]:
    over = asyncio.Event()

    async def stream(http: aiohttp.ClientSession) -> None:
        while not over.is_set():
            answer = await ask(http, target, prompt, size)
            seen.n_failed += answer.error is not None
            seen.texts += pairwise(answer.token_s)

    async def health(http: aiohttp.ClientSession) -> None:
        while not over.is_set():
            began_s = time.perf_counter()
            async with http.get(target.base_url + "/health") as response:
                await response.read()
                seen.n_failed += response.status != 200
            seen.healths.append((began_s, time.perf_counter()))
            await asyncio.sleep(_HEALTH_EVERY_S)

    async with session(target) as http, asyncio.TaskGroup() as group:
        for work in (*[stream] * n, health):
            group.create_task(work(http))
        yield
        over.set()  # what is being answered is read to its end, which is when its times are known


async def _round(http: aiohttp.ClientSession, url: str, request: Heavy, window_s: float) -> _Round:
    began_s = time.perf_counter()
    await asyncio.sleep(window_s)
    middle_s = time.perf_counter()
    answers = []
    while (now_s := time.perf_counter()) < middle_s + window_s:
        answers.append((await _send(http, url, request), time.perf_counter() - now_s))
    return _Round((began_s, middle_s), (middle_s, time.perf_counter()), answers)


async def _send(http: aiohttp.ClientSession, url: str, request: Heavy) -> str:
    """How it was answered: a status, or that the server closed the connection before it had read
    everything."""
    headers = {"Content-Type": "application/json"}
    try:
        async with http.post(url + request.path, data=io.BytesIO(request.body), headers=headers) as response:
            await response.read()
            return f"{response.status}"
    except (aiohttp.ClientError, OSError):
        return "closed"


def effect(
    request: Heavy, rounds: Sequence[_Round], texts: Sequence[Span], healths: Sequence[Span]
) -> Effect:
    """From spans to figures. A span that a heavy request's overlaps is beside it, however little.

    ``UserError`` where a window has no piece of text: the windows are too short, or the model says nothing.
    """
    ratios = []
    beside, alone, beside_health, alone_health = [], [], [], []
    for one in rounds:
        near, far = _beside(one.beside, texts), _within(one.alone, texts)
        if not near or not far:
            raise UserError(
                f"no stream said anything around {request.name!r}: choose a longer --window or --output-len"
            )
        ratios.append(_p99(near) / _p99(far))
        beside += near
        alone += far
        beside_health += _beside(one.beside, healths)
        alone_health += _within(one.alone, healths)
    answers = [answer for one in rounds for answer in one.answers]
    return Effect(
        request.name,
        len(request.body) / 2**20,
        dict(Counter(status for status, _ in answers)),
        statistics.median(seconds for _, seconds in answers),
        _p99(beside),
        _p99(alone),
        statistics.median(ratios),
        max(beside_health, default=0.0),
        max(alone_health, default=0.0),
    )


def _beside(window: Span, spans: Sequence[Span]) -> list[float]:
    """Milliseconds of all that overlap."""
    return [1e3 * (b - a) for a, b in spans if a < window[1] and b > window[0]]


def _within(window: Span, spans: Sequence[Span]) -> list[float]:
    return [1e3 * (b - a) for a, b in spans if a >= window[0] and b <= window[1]]


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))
