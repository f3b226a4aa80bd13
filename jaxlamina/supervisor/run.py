"""A supervisor's life: the port, the journal, the job below it; and its end, in order.

SIGTERM or SIGINT: no new request is taken, the job finishes what it does, then both end. A second signal ends
the job at once. Knows how the parts are put together; nothing of what they do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from jaxlamina.errors import UserError
from jaxlamina.exit_codes import FAILED
from jaxlamina.process import kept_folders
from jaxlamina.process.host_memory import memory_folder
from jaxlamina.process.kept_folders import kept_folder
from jaxlamina.process.memory_reserve import MemoryReserve
from jaxlamina.process.owned_folder import MPI_FILES, PIPES, owned_folder, remove_left
from jaxlamina.server.api_keys import ApiKeys
from jaxlamina.server.connections import protocol
from jaxlamina.server.files import Folder
from jaxlamina.server.listening import DrainingServer
from jaxlamina.server.settings import CONNECTIONS_END_S, Settings, end_s
from jaxlamina.server.tls import tls_context
from jaxlamina.supervisor.changes import JobCommand
from jaxlamina.supervisor.child import GivenUp, SupervisedJob
from jaxlamina.supervisor.front import Front
from jaxlamina.supervisor.job_client import NoAnswer
from jaxlamina.supervisor.journal import Journal
from jaxlamina.supervisor.operating import Operating
from jaxlamina.supervisor.requests import FollowedRequests
from jaxlamina.supervisor.settings import Supervision

_JOURNAL = "journal.sqlite"
_REMOVE_S = 20.0  # for ranks on all hosts to begin, and to remove a folder
_FILES_EACH = 2  # of a request: its client's connection, and one to the job
_RESERVE_BYTES = 24 * 2**20
_LEAST_RESERVE = 0.1  # of it, without which Python can break anywhere
_RESERVE_LOOK_S = 0.5
_IMPORTS_AFTER_S = 10.0  # a start is over by then, and so is a short life
_LAUNCHER_END_S = 10.0  # for one that ends ranks, after their own time for that
_STARTER_END_S = 5.0  # for what has started ranks on other hosts, to end those
_MOST_OF_A_PATH = 107  # bytes, of a Unix socket
_NOT_COMPLETED = "ASGI callable returned without completing response."
_log = logging.getLogger("uvicorn.error")


def supervise(
    command: JobCommand,
    settings: Settings,
    supervision: Supervision,
    listener: socket.socket,
    on_ready: Callable[[], None],
    kv_folder: str | None,
) -> int:
    """Serves at ``listener`` until a signal, or until the job cannot be started; the exit code. ``command``
    serves the same at the Unix socket that it is given as ``--uds``. ``kv_folder``: where the job is told
    already to keep KV."""
    memory = MemoryReserve(_RESERVE_BYTES)
    path = None if supervision.journal is None else supervision.journal / _JOURNAL
    journal = Journal(path)
    with (
        owned_folder(Path(tempfile.gettempdir()), "jaxlamina-job") as folder,
        kept_folder(supervision.journal) as of_kv,
        closing(Folder(settings.files_dir or folder / "files")),
    ):
        if len(os.fsencode(folder / "99999999.sock")) > _MOST_OF_A_PATH:
            raise UserError(f"sockets cannot be in {folder}, a path too long: set TMPDIR to a shorter one")
        files = () if settings.files_dir is not None else ("--files-dir", str(folder / "files"))
        kept = () if kv_folder is not None else ("--kept-kv-folder", str(of_kv))
        os.environ[kept_folders.OWNED] = str(of_kv)
        whole = command.and_more("--no-supervise", *files, *kept, "--uds")
        try:
            supervisor = _Supervisor(whole, settings, supervision, journal, memory, folder, on_ready)
            code = supervisor.run(listener)
            if command.has_starter and kept and supervisor.was_ready:
                _remove_elsewhere(command, of_kv)
            return code
        finally:
            journal.close()
            # Of launchers that were killed: a change ends its job so.
            remove_left(memory_folder(), PIPES)
            remove_left(Path(tempfile.gettempdir()), MPI_FILES)


def _remove_elsewhere(command: JobCommand, kv_folder: Path) -> None:
    """A job of the same ranks, which do nothing but remove what was kept on their hosts."""
    words = command.on_each_host(kept_folders.__name__, f"kept_kv_folder={kv_folder}")
    how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    why = f"it took more than {_REMOVE_S:g} s"
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(words, check=False, text=True, timeout=_REMOVE_S, **how)  # type: ignore[call-overload]
        if not done.returncode:
            return
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    _log.warning("%s may be left on other hosts, for the next server to clear away: %s", kv_folder, why)


def _is_news(record: logging.LogRecord) -> bool:
    """Not what uvicorn says of its life here: the job's server says the same, and the last line is to be why
    the job has ended. Nor that an answer has no end: `Front` says why."""
    return record.msg != _NOT_COMPLETED and (
        record.levelno != logging.INFO or "uvicorn" not in Path(record.pathname).parts
    )


class _Supervisor:
    def __init__(
        self,
        command: JobCommand,
        settings: Settings,
        supervision: Supervision,
        journal: Journal,
        memory: MemoryReserve,
        folder: Path,
        on_ready: Callable[[], None],
    ) -> None:
        self._on_ready, self._start_s = on_ready, supervision.start_timeout
        self._memory, self._has_journal = memory, supervision.journal is not None
        self._job = SupervisedJob(
            command,
            folder,
            stuck_after_s=supervision.stuck_after,
            step_s=supervision.step_timeout,
            start_s=supervision.start_timeout,
            recovery_s=supervision.recovery_timeout,
            shutdown_s=end_s(settings.shutdown_timeout) + _LAUNCHER_END_S,
            n_spare=supervision.spare,
            # Of ranks on other hosts nobody sees when it is their turn.
            imports_after_s=None if command.has_starter else _IMPORTS_AFTER_S,
            end_s=_STARTER_END_S if command.has_starter else 0.0,
        )
        self._requests = FollowedRequests(self._job, journal, memory, recovery_s=supervision.recovery_timeout)
        keys = ApiKeys(settings.api_key, settings.api_key_file)
        operating = Operating(self._job)
        is_unix = settings.uds is not None
        front = Front(self._job, self._requests, journal, memory, operating, keys, of_this_host=is_unix)
        limit = settings.max_body_bytes
        app = front.app(self._lifespan, max_body_bytes=limit, dashboard=settings.dashboard)
        tls = tls_context(settings.ssl_certfile, settings.ssl_keyfile)
        config = uvicorn.Config(
            app,
            log_level=settings.uvicorn_log_level,
            http=protocol(settings.max_connections, settings.client_timeout, files_each=_FILES_EACH),
            timeout_graceful_shutdown=CONNECTIONS_END_S,
            ws="none",
        )
        _log.addFilter(_is_news)
        self._server = DrainingServer(config, self._end, tls)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def was_ready(self) -> bool:
        """Whether any start of the job was."""
        return self._job.was_ready

    def run(self, listener: socket.socket) -> int:
        self._server.run([listener])
        code, number = self._job.code, self._server.last_signal
        if (
            number and not 0 <= code <= 128
        ):  # it was ended by a signal, too, which need not have been this one
            return 128 + number
        return FAILED if code < 0 else code

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
        others = [asyncio.create_task(self._welcome()), asyncio.create_task(self._look_after_memory())]
        yield
        for task in others:
            task.cancel()
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

    async def _look_after_memory(self) -> None:
        """Keeps the reserve full. Where it is used up, this process ends before it loses a request: the next
        one has them from the journal. Without a journal it goes on as well as it can."""
        while True:
            await asyncio.sleep(_RESERVE_LOOK_S)
            if self._has_journal and not (self._memory.has(1.0) or self._memory.has(_LEAST_RESERVE)):
                _log.error("the supervisor gets no more memory, and ends: start it again with its journal")
                os._exit(FAILED)  # at once, like one that is killed: to end in order takes memory

    async def _model(self) -> str:
        """What tells it from others, once the job is ready."""
        n = 0
        while True:
            running = await self._job.ready(self._start_s, after=n)
            n = running.n
            with suppress(NoAnswer):  # it died just then
                info = json.loads((await running.client.ask("GET", "/server_info")).content)
                found = {"names": info["server"]["served_model_names"], "config": info["model"]["config"]}
                return json.dumps(found, sort_keys=True)

    async def _over(self) -> None:
        """There is no job any more: whoever waits hears so, and this process ends."""
        await self._requests.settle()
        self._server.should_exit = True
