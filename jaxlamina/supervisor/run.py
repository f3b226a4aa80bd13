"""A supervisor's life: the port, the journal, the job below it; and its end, in order.

SIGTERM or SIGINT: no new request is taken, the job finishes what it does, then both end. A second signal ends
the job at once. Knows how the parts are put together; nothing of what they do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette

from jaxlamina.server.connections import protocol
from jaxlamina.server.listening import DrainingServer
from jaxlamina.server.settings import CONNECTIONS_END_S, Settings
from jaxlamina.supervisor.child import GivenUp, SupervisedJob
from jaxlamina.supervisor.front import Front
from jaxlamina.supervisor.journal import Journal
from jaxlamina.supervisor.requests import FollowedRequests
from jaxlamina.supervisor.settings import Supervision

_JOURNAL = "journal.sqlite"
_log = logging.getLogger("uvicorn.error")


def supervise(
    command: Sequence[str],
    settings: Settings,
    supervision: Supervision,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> int:
    """Serves at ``listener`` until a signal, or until the job cannot be started; the exit code. ``command``
    serves the same at the Unix socket that it is given as ``--uds``."""
    path = None if supervision.journal is None else supervision.journal / _JOURNAL
    journal = Journal(path)
    with tempfile.TemporaryDirectory(prefix="jaxlamina-") as folder:
        files = () if settings.files_dir is not None else ("--files-dir", str(Path(folder, "files")))
        words = (*command, "--no-supervise", *files, "--uds")
        try:
            return _Supervisor(words, settings, supervision, journal, Path(folder), on_ready).run(listener)
        finally:
            journal.close()


class _Supervisor:
    def __init__(
        self,
        command: Sequence[str],
        settings: Settings,
        supervision: Supervision,
        journal: Journal,
        folder: Path,
        on_ready: Callable[[], None],
    ) -> None:
        self._on_ready, self._start_s = on_ready, supervision.start_timeout
        self._job = SupervisedJob(
            command,
            folder,
            api_key=settings.api_key,
            stuck_after_s=supervision.stuck_after,
            step_s=supervision.step_timeout,
            start_s=supervision.start_timeout,
        )
        self._requests = FollowedRequests(self._job, journal, recovery_s=supervision.recovery_timeout)
        front = Front(self._job, self._requests, journal)
        app = front.app(self._lifespan, api_key=settings.api_key, max_body_bytes=settings.max_body_bytes)
        config = uvicorn.Config(
            app,
            log_level=settings.uvicorn_log_level,
            http=protocol(settings.max_connections, settings.client_timeout),
            timeout_graceful_shutdown=CONNECTIONS_END_S,
            ws="none",
        )
        self._server = DrainingServer(config, self._end)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, listener: socket.socket) -> int:
        self._server.run([listener])
        return self._job.code

    def _end(self) -> None:
        if self._loop is None:
            self._server.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._job.end)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        running = asyncio.create_task(self._job.run())
        running.add_done_callback(lambda _: asyncio.ensure_future(self._over()))
        welcoming = asyncio.create_task(self._welcome())
        yield
        welcoming.cancel()
        self._job.end()
        self._job.kill()
        await running

    async def _welcome(self) -> None:
        try:
            model = await self._model()
        except (GivenUp, TimeoutError):
            return
        n, n_others = self._requests.take_up(model)
        if n or n_others:
            _log.info("of an earlier supervisor %d requests go on, %d of another model do not", n, n_others)
        self._on_ready()

    async def _model(self) -> str:
        """What tells it from others, once the job is ready."""
        n = 0
        while True:
            running = await self._job.ready(self._start_s, after=n)
            n = running.n
            with suppress(httpx.HTTPError):  # it died just then
                info = (await running.client.get("/server_info")).json()
                found = {"names": info["server"]["served_model_names"], "config": info["model"]["config"]}
                return json.dumps(found, sort_keys=True)

    async def _over(self) -> None:
        """There is no job any more: whoever waits hears so, and this process ends."""
        await self._requests.settle()
        self._server.should_exit = True
