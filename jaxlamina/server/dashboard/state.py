"""What the page draws, as plain data: numbers that the server has anyway, read when the page asks for them.

Nobody samples while no page is open, and the engine is asked at most each half second, however many pages
are. Knows the engine's statistics and the recordings of steps; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jaxlamina
from jaxlamina.engine.engine import Engine
from jaxlamina.engine.request import Request
from jaxlamina.profiling.timeline import Timeline
from jaxlamina.profiling.under_load import LoadObserver, UnderLoad
from jaxlamina.server.async_engine import AsyncEngine, Unavailable
from jaxlamina.server.dashboard.gantt import gantt_of
from jaxlamina.server.metrics import Metrics, snapshot
from jaxlamina.server.pool_times import PoolTimes

_APART_S = 0.5  # samples
_N_SAMPLES = 600  # ten minutes of one page that asks once a second
_N_RECORDINGS = 12
_N_REQUESTS = 16
_ASK_S = 1.0  # for the end of a step, between which and the next one the engine is asked
_READ_TRACES_S = 300.0

# Of `snapshot`: what goes into each sample.
_NUMBERS = (
    *("n_running", "n_waiting", "n_generated_tokens", "n_prompt_tokens", "n_prefix_hit_tokens"),
    *("n_steps", "n_decode_steps", "n_decode_tokens", "n_prefill_steps", "n_preemptions"),
    *("decode_s", "prefill_s", "launch_s", "wait_s", "n_batches", "local_share", "wanted_share"),
    *("kv_slots", "kv_slots_used", "kv_slots_cached", "kv_slots_shared"),
    *("host_kv_slots", "host_kv_slots_used", "kept_kv_slots", "kept_kv_slots_used"),
)

Predict = Callable[[Engine], float | None]


class AlreadyWatching(Exception):
    """Devices are being watched already."""


class DashboardState:
    """For the event loop. ``progress``: programs compiled, of those that are there before the first request.
    ``pools``: recorded steps, where steps are recorded; its ``on_recorded`` must be `add`. ``predict``: how
    many milliseconds the engine's decode step takes by a cost model, or None where it has no say; called in
    the engine's thread."""

    def __init__(
        self,
        engine: AsyncEngine,
        metrics: Metrics,
        model_name: str,
        progress: Callable[[], tuple[int, int]],
        pools: PoolTimes | None = None,
        predict: Predict | None = None,
    ) -> None:
        self._engine, self._metrics, self._progress = engine, metrics, progress
        self._model_name, self._pools, self._predict = model_name, pools, predict
        self._samples: deque[dict[str, Any]] = deque(maxlen=_N_SAMPLES)
        self._recordings: deque[dict[str, Any]] = deque(maxlen=_N_RECORDINGS)
        self._now: dict[str, Any] = {}
        self._sampling, self._watching = asyncio.Lock(), asyncio.Lock()
        self._asked_s = float("-inf")

    def add(self, found: Timeline) -> None:
        """A recording, from the engine's thread."""
        self._recordings.append(gantt_of(found, time.time()))

    async def read(self, after: float = 0.0, recorded_after: float = 0.0) -> dict[str, Any]:
        """The server now, samples taken later than ``after``, recordings later than ``recorded_after`` (Unix
        time, seconds).

        ``server``: its state as `/health` has it. ``samples``, oldest first: ``t`` (Unix time), the engine's
        counts and seconds so far under `EngineStats`' and `Room.stats`' names, sums and counts of
        `Metrics.latencies`, and ``predicted_step_ms``, what a decode step takes by a cost model, null where
        no model says so. ``kv``: what each worker keeps (`jaxlamina.kv.placement.Held`). ``requests``: the
        first of those that run and that wait. ``ranks``: their names; none in one process. ``pools``: seconds
        of the latest recorded step as in `/metrics`, null where no steps are recorded. ``recordings``: as of
        `gantt_of`. What the engine says is missing until it has been ready, and of an earlier moment while it
        is in a long step (``server.in_step_s``).
        """
        await self._sample()
        engine = self._engine
        n_compiled, n_first = self._progress()
        server = {
            "version": jaxlamina.__version__,
            "model": self._model_name,
            "state": engine.state,
            "reason": engine.reason,
            "paused": engine.is_paused,
            "in_step_s": engine.step_s,
            "compiled": [n_compiled, n_first],
        }
        return {
            "now": time.time(),
            "server": server,
            "samples": [sample for sample in self._samples if sample["t"] > after],
            "pools": self._of_pools(),
            "recordings": [x for x in list(self._recordings) if x["at"] > recorded_after],
            **self._now,
        }

    async def record(self) -> None:
        """Has the next decode step recorded on all ranks. `ValueError` where none are; `TimeoutError`,
        `Unavailable`."""
        pools = self._pools
        if pools is None:
            raise ValueError("no steps are recorded here: serve over ranks with --pool-metrics-interval 60")
        await self._engine.ask(lambda _: pools.record_next(), _ASK_S)

    async def watch(self, seconds: float) -> UnderLoad:
        """What devices do in that time, in which steps run as they would. `UserError` if the profiler is in
        use, `AlreadyWatching`, `TimeoutError`, `Unavailable`."""
        if self._watching.locked():
            raise AlreadyWatching("devices are being watched already: try again in a moment")
        async with self._watching:
            observer = await self._engine.ask(_begun, _READ_TRACES_S)
            await asyncio.sleep(seconds)
            return await self._engine.ask(lambda _: observer.end(), _READ_TRACES_S)

    async def _sample(self) -> None:
        async with self._sampling:
            if self._engine.state not in ("ready", "draining"):
                return
            if time.monotonic() - self._asked_s < _APART_S:
                return
            self._asked_s = time.monotonic()
            try:
                sample, self._now = await self._engine.ask(self._read, _ASK_S)
            except (TimeoutError, Unavailable):  # in a long step, or over
                return
            self._samples.append(sample | self._metrics.latencies())

    def _read(self, engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
        """A sample, and what else is now; in the engine's thread."""
        if self._pools is not None:
            self._pools.take_in()
        numbers = snapshot(engine)
        sample: dict[str, float | None] = {name: numbers[name] for name in _NUMBERS}
        sample["t"] = time.time()
        sample["predicted_step_ms"] = None if self._predict is None else self._predict(engine)
        scheduler, group = engine.scheduler, engine.executor.group
        waiting = [*scheduler.waiting, *(scheduler.held or ())]
        now = {
            "kv": [held._asdict() for held in engine.executor.held()],
            "ranks": [group.cluster.describe(rank) for rank in range(group.cluster.n_ranks)] if group else [],
            "requests": {
                "running": [_shown(request) for request in scheduler.running[:_N_REQUESTS]],
                "waiting": [_shown(request) for request in waiting[:_N_REQUESTS]],
            },
        }
        return sample, now

    def _of_pools(self) -> dict[str, Any] | None:
        pools = self._pools
        if pools is None:
            return None
        seconds: dict[str, dict[str, float]] = {}
        for (pool, kind), value in pools.seconds.items():
            seconds.setdefault(pool, {})[kind] = value
        return {
            "seconds": seconds,
            "bubble_shares": pools.bubble_shares,
            "n_recorded": pools.n_recorded,
            "every_s": pools.every_s,
            "is_due": pools.is_due,
            "error": pools.latest_error,
        }


def _shown(request: Request) -> dict[str, Any]:
    """Nothing of what it says."""
    return {
        "id": request.request_id,
        "index": request.index,
        "priority": request.priority,
        "n_prompt": len(request.prompt_token_ids),
        "n_computed": request.n_computed,  # of its prompt; null once that is done
        "n_written": len(request.output_token_ids),
        "max_tokens": request.max_tokens,
        "n_preemptions": request.n_preemptions,
    }


def _begun(engine: Engine) -> LoadObserver:
    observer = LoadObserver(engine)
    observer.begin()
    return observer
