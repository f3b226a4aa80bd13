"""A server's life: a socket, the engine's thread, the application, uvicorn; and its end, in order.

SIGTERM or SIGINT: no new request is taken, running ones have time to finish, then the process ends with 0. A
second signal shortens that. Knows how the parts are put together; nothing of what they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import uvicorn
from fastapi import FastAPI

import jaxlamina
from jaxlamina.engine.engine import Engine
from jaxlamina.engine.sizes_to_compile import first_of, shapes
from jaxlamina.engine.warm_up import Behind, warm_up
from jaxlamina.errors import UserError
from jaxlamina.process import garbage
from jaxlamina.process.compile_ahead import n_compiling
from jaxlamina.process.start_clock import CLOCK
from jaxlamina.profiling.under_load import OneWindow, say_under_load
from jaxlamina.server.app import Parts, make_app
from jaxlamina.server.async_engine import AsyncEngine
from jaxlamina.server.batches import Batches
from jaxlamina.server.connections import protocol
from jaxlamina.server.dashboard.state import DashboardState
from jaxlamina.server.files import Files, Folder
from jaxlamina.server.listening import DrainingServer
from jaxlamina.server.metrics import Metrics
from jaxlamina.server.pool_times import PoolTimes
from jaxlamina.server.predicted import StepPredictor
from jaxlamina.server.prompts import Prompts
from jaxlamina.server.replacing import Replacing
from jaxlamina.server.service import Service
from jaxlamina.server.settings import COMPILING_END_S, CONNECTIONS_END_S, LAST_WORDS_S, THREAD_END_S, Settings
from jaxlamina.server.tls import tls_context
from jaxlamina.server.workshop import started_threads
from jaxlamina.steps.buckets import StepSizes

if TYPE_CHECKING:
    from jaxlamina.llm import LLM

_READY_S = 60.0  # of one that compiles nothing before
# A supervisor's requests go on first: tracing programs shares Python's lock with them.
GOING_ON_S = 10.0
_N_THREADS = 8  # for requests' Python, which one of them has at a time, and for what gives it up

Progress = Callable[[int, int], None]
_log = logging.getLogger("uvicorn.error")


class ToCompile(NamedTuple):
    """What is compiled before the first request, and that and what follows behind."""

    first: list[StepSizes]
    all: list[StepSizes]

    @classmethod
    def of(cls, llm: LLM, settings: Settings) -> ToCompile:
        todo = _todo(llm, settings) if settings.warm_up else []
        first = todo if settings.wait_for_all else first_of(todo, n_compiling())
        behind = llm.engine.capabilities.compiles_behind
        return cls(first, list(dict.fromkeys((*first, *todo))) if behind else first)

    def behind(
        self,
        engine: Engine,
        on_done: Callable[[int], None],
        between_steps: Callable[[Callable[[], None]], None],
        *,
        is_alone: bool,
        nobody_waits: bool = False,
    ) -> Behind:
        """What compiles the rest. ``is_alone``: attention workers have no part in steps as yet, and need
        programs of the first sizes, too. ``nobody_waits``: there are no requests yet."""
        n_at_once = max(1, n_compiling() // 2)  # the rest is the steps'
        rest, again = self.all[len(self.first) :], self.first if is_alone else []
        how: Any = {"again": again, "nobody_waits": nobody_waits}
        return Behind(engine, rest, on_done, between_steps, n_at_once, **how)


class _LogProgress:
    """A line at most so often, and one at the end."""

    def __init__(self, every_s: float = 15.0) -> None:
        self._every_s, self._last = every_s, time.monotonic()

    def __call__(self, n_done: int, n_all: int) -> None:
        now = time.monotonic()
        if n_done == n_all:
            _log.info("compiled all %d programs", n_all)
        elif now - self._last >= self._every_s:
            self._last = now
            _log.info("compiled %d of %d programs; requests are answered meanwhile", n_done, n_all)


class App:
    """One server of one model. ``on_progress(n_done, n_all)``: programs compiled of those that are there
    before the first request, from the engine's thread. Before `run` its folder may be another server's."""

    def __init__(
        self,
        llm: LLM,
        settings: Settings,
        on_progress: Progress,
        on_ready: Callable[[], None],
    ) -> None:
        self.settings = settings
        self._on_progress, self._on_ready = on_progress, on_ready
        self._todo = ToCompile.of(llm, settings)
        self._is_warm = False
        self._behind: Behind | None = None
        self._is_alone = False  # until attention workers' programs are there, too
        self._log_progress = _LogProgress()
        self._n_done = 0
        self._engine = llm.engine
        pools = None
        if settings.pool_metrics_interval:
            pools = PoolTimes(llm.executor, settings.pool_metrics_interval)
        if settings.profile_after:
            window = OneWindow(llm.engine, settings.profile_after, settings.profile_s, say_under_load)
            llm.engine.before_step = window.before_step
        name = settings.served_model_names[0]
        predictor = StepPredictor.of(llm)
        self.metrics = metrics = Metrics(name, pools, predictor)
        self.engine = AsyncEngine(
            llm.engine,
            metrics,
            prepare=self._prepare,
            max_concurrent=settings.max_concurrent_requests,
            before_step=(lambda: None) if pools is None else pools.before_step,
            grammar_timeout_s=settings.grammar_timeout,
        )
        dashboard = None
        if settings.dashboard:
            predict = None if predictor is None else predictor.step_ms
            dashboard = DashboardState(self.engine, metrics, name, self._progress, pools, predict)
            if pools is not None:
                pools.on_recorded = dashboard.add
        self._stack = contextlib.ExitStack()
        folder = settings.files_dir or Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxlamina-"))
        )
        own = Folder(folder, locked=settings.supervisor is None)  # which has it, for all of its servers
        self._folder = locked = self._stack.enter_context(contextlib.closing(own))
        ignores_priority = getattr(llm.engine.scheduler.policy, "ignores_priority", False)
        prompts = Prompts(
            llm,
            trust_request_chat_template=settings.trust_request_chat_template,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        service = Service(
            self.engine,
            prompts,
            settings.served_model_names,
            ignores_priority,
            settings.max_grammar_bytes,
        )
        files = Files(locked.path / "files")
        n_at_once = max(1, llm.engine.scheduler.max_num_seqs - 1)
        self._batches = Batches(locked.path / "batches", files, service, n_at_once, settings.max_body_bytes)
        parts = Parts(
            settings,
            self.engine,
            service,
            metrics,
            files,
            self._batches,
            self._progress,
            _info(llm, settings),
            dashboard,
            Replacing(llm, self.engine),
        )
        # A Unix socket stays plain: nobody is on its way.
        tls = None if settings.uds else tls_context(settings.ssl_certfile, settings.ssl_keyfile)
        self.app = make_app(parts, self._lifespan)
        config = uvicorn.Config(
            self.app,
            uds=settings.uds,
            log_level=settings.uvicorn_log_level,
            access_log=settings.supervisor is None,  # which has its own
            http=protocol(settings.max_connections, settings.client_timeout),
            timeout_graceful_shutdown=CONNECTIONS_END_S,
            ws="none",
        )
        config.load()
        self._threads = started_threads(_N_THREADS)
        self._stack.callback(self._threads.shutdown, wait=False)
        config.get_loop_factory()  # imports it, and
        # what answers are sent by: the first request would wait for that. Where no event loop runs.
        self._threads.submit(anyio.run, _nothing).result()
        self._server = DrainingServer(config, self.end, tls)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._ended_in_time = True
        self.is_compiling = False  # once `run` is over: a thread still does, which cannot be interrupted
        self._failed_to_start = False
        self._compiling_end_s = COMPILING_END_S
        if (group := llm.executor.group) is not None:
            group.last_words = self._last_words
            self._compiling_end_s = THREAD_END_S  # ranks end together, as their libraries would have it

    def stood_by(self, behind: Behind | None) -> None:
        """The programs are compiled, and what there was then is no garbage (`garbage.settle`); ``behind``
        goes on with the others, where there are any."""
        self._is_warm, self._behind = True, behind
        _started()

    def run(self, listener: socket.socket | None = None) -> bool:
        """Serves until `end` or a signal; whether everything had ended in time. `UserError` if it was never
        ready."""
        try:
            self._server.run(None if listener is None else [listener])
        finally:
            self.close()
        if self._failed_to_start:
            raise UserError(f"the model cannot be run: {self.engine.reason}")
        return self._ended_in_time

    def close(self) -> None:
        """Gives its folder back, as `run` does at its end."""
        garbage.unsettle()
        self._stack.close()

    def end(self) -> None:
        """Begins the end, from any thread; called again, shortens it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_drain)
        else:
            self._server.should_exit = True

    def _last_words(self, line: str) -> None:
        """The process is about to end since its job has failed: every client is told so, as far as that is
        quick."""
        loop, told = self._loop, threading.Event()
        if loop is None or loop.is_closed():
            return

        async def tell() -> None:
            self.engine.fail(line)
            while self._server.server_state.tasks:
                await asyncio.sleep(0.01)
            told.set()

        asyncio.run_coroutine_threadsafe(tell(), loop)
        told.wait(LAST_WORDS_S)

    def _begin_drain(self) -> None:
        if self._draining is not None:
            self._server.should_exit = True
            return
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            stopping = asyncio.create_task(self._batches.stop())
            await self.engine.drain(self.settings.shutdown_timeout)
            await stopping
        finally:
            self._server.should_exit = True

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(self._threads)
        self._folder.clear()
        self._batches.look()
        self.engine.start()
        resuming = asyncio.create_task(self._once_started())
        yield
        resuming.cancel()
        await self._batches.stop()
        await self.engine.drain(0.0)
        behind = self._behind
        if behind is not None:
            behind.stop()
        self._ended_in_time = await self.engine.stop(THREAD_END_S)
        if behind is not None:
            self.is_compiling = not await asyncio.to_thread(behind.join, self._compiling_end_s)

    async def _once_started(self) -> None:
        is_ready = await self.engine.started()
        while not self._server.started:  # uvicorn listens once the lifespan has begun, and tells nobody
            await asyncio.sleep(0.01)
        if is_ready:
            if not self._is_warm:
                _started()
            self._batches.resume()
            self._on_ready()
            self._compile_behind()
        elif self.engine.state == "failed":
            self._failed_to_start = self._server.should_exit = True

    def _prepare(self, stopped: Callable[[], bool]) -> None:
        first = self._todo.first
        self._on_progress(0, len(first))
        if self._is_warm:
            self._compiled(len(first))
            return
        if self.settings.warm_up and not self.settings.wait_for_all:
            self._is_alone = self._engine.executor.stay_alone(True)
        all_of_drawing = self.settings.wait_for_all
        warm_up(self._engine, first, self._compiled, stopped, all_of_drawing=all_of_drawing)
        garbage.settle()

    def _compiled(self, n: int) -> None:
        self._n_done = n
        self._on_progress(n, len(self._todo.first))

    def _compile_behind(self) -> None:
        """The rest of the programs, while requests are answered."""
        told = self._compiled_behind, self.engine.between_steps
        if self._behind is not None:  # since it stood by
            self._behind.go_on_with(*told)
            self._note_compiled(self._behind)
        elif self._todo.all and not self.settings.wait_for_all:
            self._behind = self._todo.behind(self._engine, *told, is_alone=self._is_alone)
            if self.settings.supervisor is not None:
                self._behind.rest(GOING_ON_S)
            self._behind.start()

    def _compiled_behind(self, n: int) -> None:
        assert self._behind is not None
        self._note_compiled(self._behind)
        if n == self._behind.n_all:
            self.engine.between_steps(garbage.settle)

    def _note_compiled(self, behind: Behind) -> None:
        n_first = len(self._todo.first)
        self._n_done = n_first + behind.n_done
        self._log_progress(self._n_done, n_first + behind.n_all)

    def _progress(self) -> tuple[int, int]:
        """Of the programs that are there before the first request."""
        return self._n_done, len(self._todo.first)


async def _nothing() -> None:
    async with anyio.create_task_group():
        pass


def _started() -> None:
    """The first request may come; of a spare, once it stands by."""
    CLOCK.done("programs")
    CLOCK.over()
    _log.info("%s", CLOCK)


def _info(llm: LLM, settings: Settings) -> dict[str, Any]:
    """What ``/server_info`` says: nothing that is secret, and what does not change."""
    said = (
        *("served_model_names", "max_concurrent_requests", "max_body_bytes"),
        *("trust_request_chat_template", "tool_call_parser", "reasoning_parser"),
    )
    scheduler = llm.engine.scheduler
    model = {
        "config": dict(llm.model.description),
        "max_model_len": llm.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "kv_slots": scheduler.slots.capacity,
        "model_device": str(llm.model_device),
        "attention_device": llm.stats()["attention_device"],
    }
    return {
        "version": jaxlamina.__version__,
        "server": {name: getattr(settings, name) for name in said}
        | {name: getattr(llm.options, name) for name in ("max_num_batched_tokens", "prefix_caching")},
        "model": model,
    }


def _todo(llm: LLM, settings: Settings) -> list[StepSizes]:
    """What is to be compiled before requests are taken, as far as it can be known."""
    most = llm.engine.max_num_batched_tokens
    in_chunks = most is not None and (most < llm.max_model_len or llm.engine.chunk_size is not None)
    return shapes(
        llm.buckets,
        max_model_len=llm.max_model_len,
        max_chunk=most,
        chunks=llm.options.prefix_caching or llm.options.keeps_kv or in_chunks,
        mixed=llm.engine.mixed_steps,
        n_prefill_workers=llm.engine.capabilities.n_prefill_workers,
        own_pace_tokens=llm.engine.capabilities.own_pace_tokens,
        local_prefill_tokens=llm.engine.capabilities.local_prefill_tokens,
        scored=settings.warm_up_prompt_logprobs,
        prompt_batch_tokens=llm.engine.batching.n_tokens,
    )


@contextmanager
def in_process(llm: LLM, settings: Settings) -> Iterator[None]:
    """A server in a thread of this process, ready to answer, for as long as the block lasts."""
    ready, over = threading.Event(), threading.Event()
    app = App(llm, settings, lambda n_done, n_all: None, ready.set)

    def run() -> None:
        try:
            app.run()
        finally:
            over.set()

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    try:
        until = time.monotonic() + _READY_S
        while not ready.wait(0.05):
            if over.is_set() or app.engine.state == "failed":
                raise RuntimeError(f"the server has failed: {app.engine.reason}")
            if time.monotonic() > until:
                raise UserError(f"the server was not ready within {_READY_S:g} s")
        yield
    finally:
        if not over.is_set():
            app.end()
            app.end()
        thread.join(THREAD_END_S + CONNECTIONS_END_S)
