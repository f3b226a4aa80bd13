"""A load on a server: requests sent when they arrive, whether or not earlier ones are answered. Knows asyncio
and clocks.

Policy (when requests arrive, what is made of their times) is in `loads` and `serve_metrics`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp

from jaxlamina.bench.loads import Size
from jaxlamina.bench.serve_client import Prompt, Target, ask, session
from jaxlamina.bench.serve_metrics import TimedAnswer
from jaxlamina.errors import UserError


@dataclass(frozen=True)
class Load:
    """Requests, and seconds after the start at which each is sent (rising)."""

    sizes: Sequence[Size]
    prompts: Sequence[Prompt]
    arrive_s: Sequence[float]
    max_concurrency: int | None = None


@dataclass(frozen=True)
class Measured:
    """Answers in the order of the load. ``latest_s``: how much later than it should a request was begun at
    most, which is this client's fault and not the server's (waiting for ``max_concurrency`` does not
    count)."""

    answers: list[TimedAnswer]
    duration_s: float
    latest_s: float


async def run(
    target: Target, load: Load, on_answer: Callable[[TimedAnswer], object] = lambda answer: None
) -> Measured:
    """Sends the load and waits for all answers."""
    gate = None if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
    late_s = [0.0]

    async def one(http: aiohttp.ClientSession, prompt: Prompt, size: Size, at_s: float) -> TimedAnswer:
        late_s.append(time.perf_counter() - began_s - at_s)
        async with AsyncExitStack() as stack:
            if gate is not None:
                await stack.enter_async_context(gate)
            answer = await ask(http, target, prompt, size)
        on_answer(answer)
        return answer

    async with session(target) as http, asyncio.TaskGroup() as group:
        began_s = time.perf_counter()
        tasks = []
        for size, prompt, at_s in zip(load.sizes, load.prompts, load.arrive_s, strict=True):
            await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            tasks.append(group.create_task(one(http, prompt, size, at_s)))
    answers = [task.result() for task in tasks]
    return Measured(answers, max(a.end_s for a in answers) - began_s, max(late_s))


async def try_out(target: Target, prompt: Prompt, size: Size) -> None:
    """One request before the clock runs. ``UserError`` if it fails: the others would, too."""
    async with session(target) as http:
        answer = await ask(http, target, prompt, size)
    if answer.error is not None:
        raise UserError(f"the first request failed, so none was timed: {answer.error}")
