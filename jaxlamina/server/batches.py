"""OpenAI's batches: files of requests, run in the background, their results kept line by line.

A batch's state is `batches/ID.json`; its results so far are the files it will give out, to which each line is
added when it is there. So a batch goes on after a restart where it was, and no line with a result is run
again. A batch always comes to an end: what a line raises is that line's result, and anything else fails the
batch, which gives out the results it has. Knows files and the service; not how requests run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from jaxlamina.server.batch_files import Line, Results, Source, Starts, of_deaths, problem
from jaxlamina.server.errors import ApiError, of_validation, refused
from jaxlamina.server.files import Files, is_id, new_id, read_json, write_json
from jaxlamina.server.protocol import BatchRequest, ChatCompletionRequest, CompletionRequest
from jaxlamina.server.service import Body, Service
from jaxlamina.server.settings import MOST_TRIES

ENDPOINTS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}
_LIFE_S = 24 * 3600
# Batches whose files are open, four each: both together take less than `connections` leaves for other files.
_RUNNING_AT_ONCE, _ENDING_AT_ONCE = 16, 4
_GOING = ("validating", "in_progress")
_OVER = ("completed", "failed", "expired", "cancelled")
_ENDS = ("draining", "stopped", "failed")  # states of an engine that answers nobody any more
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_KINDS = {
    **dict.fromkeys(("id", "endpoint", "input_file_id", "status"), str),
    **dict.fromkeys(("created_at", "expires_at"), int),
    "request_counts": dict,
}
_FAILED = ".failed"  # in place of ".json": the batch failed, and there was no room to write that

_log = logging.getLogger("uvicorn.error")


class Batches:
    """Runs every batch of a folder that is not over, ``n_at_once`` lines of all of them at a time.

    That is fewer than the engine takes at once, so that a chat never waits for a row that batch work holds
    (FineInfer §3.1); lines wait here, and not in the engine's queue. A few batches at a time have their files
    open, the oldest first; the others stay as they are. ``max_line_bytes``: of a line of input.
    """

    def __init__(
        self, folder: Path, files: Files, service: Service, n_at_once: int, max_line_bytes: int
    ) -> None:
        self._folder, self._files, self._service = folder, files, service
        self._max_line_bytes = max_line_bytes
        self._rows = asyncio.Semaphore(n_at_once)
        self._running = asyncio.Semaphore(_RUNNING_AT_ONCE)
        self._ending = asyncio.Semaphore(_ENDING_AT_ONCE)
        self._suspect = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, dict[str, Any]] = {}

    def look(self) -> None:
        """At what earlier servers left, before anything else: none of them writes any more."""
        self._known = {batch["id"]: batch for batch in _states(self._folder)}

    def resume(self) -> None:
        """Goes on with what an earlier server left."""
        for batch in sorted(self._known.values(), key=lambda batch: batch["created_at"]):
            is_over = batch["status"] in _OVER and not Results.are_left(self._folder, batch["id"])
            if not is_over and batch["id"] not in self._tasks:
                self._start(batch)

    async def stop(self) -> None:
        """Lets go of all that runs; lines without a result are run again by the next server."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def create(self, body: BatchRequest) -> dict[str, Any]:
        if body.endpoint not in ENDPOINTS:
            raise refused(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
        self._files.find(body.input_file_id, "input_file_id")
        now = int(time.time())
        batch: dict[str, Any] = {
            "id": new_id("batch"),
            "object": "batch",
            "endpoint": body.endpoint,
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + _LIFE_S,
            **{f"{name}_at": None for name in _TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.metadata,
        }
        self._save(batch)
        self._known[batch["id"]] = batch
        self._start(batch)
        return batch

    def find(self, batch_id: str) -> dict[str, Any]:
        if not is_id(batch_id) or batch_id not in self._known:
            raise ApiError(404, f"there is no batch {batch_id!r:.80}", type="not_found_error")
        return self._known[batch_id]

    def all(self) -> list[dict[str, Any]]:
        """Newest first."""
        return sorted(self._known.values(), key=lambda batch: (-batch["created_at"], batch["id"]))

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Ends it; results that are there are given out."""
        batch = self.find(batch_id)
        if batch["status"] in _OVER:
            raise refused(f"the batch is {batch['status']} already")
        if batch["status"] != "cancelling":
            self._become(batch, "cancelling")
            if batch_id in self._tasks:
                self._tasks[batch_id].cancel()
            self._start(batch)
        return batch

    # --- running one ---

    def _start(self, batch: dict[str, Any]) -> None:
        before = self._tasks.get(batch["id"])
        task = asyncio.create_task(self._run(batch, before), name=batch["id"])
        self._tasks[batch["id"]] = task

    async def _run(self, batch: dict[str, Any], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            async with self._place(batch):
                with await asyncio.to_thread(Results, self._folder, batch["id"]) as results:
                    with Starts(self._folder, batch["id"]) as starts:
                        if batch["status"] in _GOING:
                            await self._run_all(batch, results, starts)
                    await self._end(batch, results)
                with suppress(OSError):
                    starts.delete()
                    results.delete()
        except Exception as error:  # noqa: BLE001 (whatever it is, the batch is not to wait for ever)
            self._fail(batch, error)

    @asynccontextmanager
    async def _place(self, batch: dict[str, Any]) -> AsyncIterator[None]:
        """Waits until the batch may open its files. What has only to be ended, or expires here, waits for no
        batch that runs."""
        places = self._ending
        if batch["status"] in _GOING:
            with suppress(TimeoutError):
                async with asyncio.timeout(batch["expires_at"] - time.time()):
                    await self._running.acquire()
                    places = self._running
        if places is self._ending:
            await places.acquire()
        try:
            yield
        finally:
            places.release()

    async def _run_all(self, batch: dict[str, Any], results: Results, starts: Starts) -> None:
        """Runs the lines that have no result; ``errors`` say why some could not be."""
        try:
            with Source(self._files.path(batch["input_file_id"])) as source:
                lines, errors = await asyncio.to_thread(source.lines, batch["endpoint"], self._max_line_bytes)
                if not errors:
                    counts = {"total": len(lines), "completed": results.n_right, "failed": results.n_wrong}
                    batch["request_counts"] |= counts
                    if batch["status"] == "validating":
                        self._become(batch, "in_progress")
                    left = [line for line in lines if line.custom_id not in results.done]
                    await self._run_lines(batch, left, source, results, starts)
        except FileNotFoundError:
            errors = [problem(None, "file_not_found", "the input file is gone")]
        except Exception as error:  # noqa: BLE001 (what comes of no line)
            errors = [_io_problem(error)]
        if errors:
            batch["errors"] = {"object": "list", "data": errors}

    async def _run_lines(
        self, batch: dict[str, Any], lines: list[Line], source: Source, results: Results, starts: Starts
    ) -> None:
        """Until all have a result, or the batch expires, whatever its lines wait for then."""
        left_s = batch["expires_at"] - time.time()
        if left_s <= 0:
            return
        try:
            async with asyncio.timeout(left_s), asyncio.TaskGroup() as group:
                for line in lines:
                    await self._rows.acquire()
                    task = group.create_task(self._run_line(batch, line, source, results, starts))
                    task.add_done_callback(lambda _: self._rows.release())  # also of one that never began
        except TimeoutError:  # a line's own would come in a group
            pass

    async def _run_line(
        self, batch: dict[str, Any], line: Line, source: Source, results: Results, starts: Starts
    ) -> None:
        if starts.deaths(line) >= MOST_TRIES:
            wrong = of_deaths(MOST_TRIES)
            _log.error("%s, line %.200r: %s", batch["id"], line.custom_id, wrong)
            status, body = wrong.status, wrong.body()
        else:
            while True:
                with suppress(_EndedByPause):  # run again: it waits in the engine until the server goes on
                    async with _Beginning(starts, line, self._suspect, self._is_well) as beginning:
                        status, body = await self._contained(batch, source, line, beginning.over)
                    break
        results.add(line.custom_id, status, body)
        batch["request_counts"] |= {"completed": results.n_right, "failed": results.n_wrong}

    async def _contained(
        self, batch: dict[str, Any], source: Source, line: Line, on_event: Callable[[], None]
    ) -> tuple[int, dict[str, Any]]:
        """As `_answer`; whatever else comes of the line is its result, too."""
        try:
            return await self._answer(batch["endpoint"], source, line, on_event)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, _EndedByPause):
            raise
        except BaseException as error:  # noqa: BLE001 (Rust's panics are no `Exception`)
            _log.exception("%s, line %.200r", batch["id"], line.custom_id)
            wrong = ApiError(500, f"internal error ({type(error).__name__})", type="internal_error")
            return wrong.status, wrong.body()

    async def _answer(
        self, endpoint: str, source: Source, line: Line, on_event: Callable[[], None]
    ) -> tuple[int, dict[str, Any]]:
        try:
            body = await asyncio.to_thread(lambda: ENDPOINTS[endpoint].model_validate(source.body(line)))
            if body.stream:
                raise refused("a batch's answers are not streamed: leave stream out", "stream")
            return 200, await self._service.whole(body, counted=False, on_event=on_event)
        except ValidationError as error:
            wrong = of_validation(error.errors(include_url=False, include_context=False))
        except RecursionError:
            wrong = refused("the body is nested too deeply")
        except ApiError as error:
            if error.code == "aborted":
                raise _EndedByPause from None
            if error.status == 503 and self._service.engine.state in _ENDS:
                await asyncio.Event().wait()  # the server cancels this: the next one answers
            wrong = error
        return wrong.status, wrong.body()

    def _is_well(self) -> bool:
        return self._service.engine.state != "failed"

    # --- its end ---

    async def _end(self, batch: dict[str, Any], results: Results) -> None:
        """Gives out what results there are."""
        if batch["status"] in _OVER and batch["status"] != "failed":
            return  # it had only to be tidied up
        counts = batch["request_counts"]
        counts |= {"completed": results.n_right, "failed": results.n_wrong}
        status = batch["status"]
        if status == "cancelling":
            last = "cancelled"
        elif batch["errors"]:
            last = "failed"
        else:
            is_all = counts["completed"] + counts["failed"] == counts["total"]
            last = "completed" if is_all else "expired"
            self._become(batch, "finalizing")
        await asyncio.to_thread(results.sync)
        for kind in ("output", "error"):
            if results.path(kind).stat().st_size and batch[f"{kind}_file_id"] is None:
                name = f"{batch['id']}_{kind}.jsonl"
                batch[f"{kind}_file_id"] = self._files.adopt(results.path(kind), name, "batch_output")["id"]
        self._become(batch, last)
        say = _log.error if last == "failed" else _log.info
        why = f" ({batch['errors']['data'][0]['message']})" if batch["errors"] else ""
        say("%s is %s%s: %d of %d lines done", batch["id"], last, why, counts["completed"], counts["total"])

    def _fail(self, batch: dict[str, Any], error: Exception) -> None:
        """The batch cannot even be brought to its end: on a full disk, say. The next server gives out its
        results."""
        wrong = _io_problem(error)
        _log.error(
            "%s is failed (%s)", batch["id"], wrong["message"], exc_info=not isinstance(error, OSError)
        )
        batch["errors"] = batch["errors"] or {"object": "list", "data": [wrong]}
        batch |= {"status": "failed", "failed_at": int(time.time())}
        path = self._path(batch["id"])
        try:
            write_json(path, batch)
        except OSError:
            with suppress(OSError):  # a state needs room, a name none
                os.replace(path, path.with_suffix(_FAILED))

    def _become(self, batch: dict[str, Any], status: str) -> None:
        changed = {"status": status, f"{status}_at": int(time.time())}
        self._save(batch | changed)
        batch |= changed

    def _save(self, batch: dict[str, Any]) -> None:
        path = self._path(batch["id"])
        write_json(path, batch)
        path.with_suffix(_FAILED).unlink(missing_ok=True)

    def _path(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.json"


class _EndedByPause(Exception):
    """A pause of the server ended a line's request, which says nothing of the line."""


class _Beginning:
    """From before a line is run until there is a token of its answer: what a server may die of, as ``starts``
    will say.

    A line over which a server has died already waits for others of this kind (``lock``): of several that were
    begun when it died, only the one that it dies of again is to be given up.
    """

    def __init__(self, starts: Starts, line: Line, lock: asyncio.Lock, is_well: Callable[[], bool]) -> None:
        self._starts, self._line, self._is_well = starts, line, is_well
        self._lock = lock if starts.deaths(line) else None
        self._is_over = False

    async def __aenter__(self) -> Self:
        if self._lock is not None:
            await self._lock.acquire()
        self._starts.say(Starts.BEGUN, self._line)
        return self

    def over(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._release()
            with suppress(OSError):  # it only looks worse than it is then
                self._starts.say(Starts.GONE_WELL, self._line)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_over:
            self._is_over = True
            self._release()
            if kind is not None and self._is_well():  # somebody ended it, which says nothing of the line
                with suppress(OSError):
                    self._starts.say(Starts.UNDONE, self._line)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _states(folder: Path) -> list[dict[str, Any]]:
    """Of all batches that can be read."""
    found = {}
    for suffix in (_FAILED, ".json"):  # where both are there, the latter was written later
        for path in folder.glob(f"batch-*{suffix}"):
            try:
                batch = read_json(path, _KINDS)
            except OSError as unread:  # another server may be able to
                _log.warning("%s cannot be read, and is left as it is: %s", path, unread)
                continue
            if batch is None or not is_id(batch["id"]) or not is_id(batch["input_file_id"]):
                continue
            batch = dict.fromkeys(("errors", "output_file_id", "error_file_id", "metadata")) | batch
            if suffix == _FAILED:
                error = OSError("there was no room on the disk")
                batch["errors"] = batch["errors"] or {"object": "list", "data": [_io_problem(error)]}
                batch["status"] = "failed"
            found[batch["id"]] = batch
    return list(found.values())


def _io_problem(error: BaseException) -> dict[str, Any]:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, OSError):
        return problem(None, "io_error", str(error))
    return problem(None, "internal_error", f"internal error ({type(error).__name__})")
