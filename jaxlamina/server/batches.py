"""OpenAI's batches: files of requests, run in the background, their results kept line by line.

A batch's state is `batches/ID.json`; its results so far are the files it will give out, to which each line is added when
it is there. So a batch goes on after a restart where it was, and no line with a result is run again. Knows files and the
service; not how requests run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from jaxlamina.server.errors import ApiError, of_validation, refused
from jaxlamina.server.files import Files, is_id, new_id, write_json
from jaxlamina.server.protocol import BatchRequest, ChatCompletionRequest, CompletionRequest
from jaxlamina.server.service import Body, Service

ENDPOINTS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}
MAX_LINES = 50_000
_LIFE_S = 24 * 3600
_OVER = ("completed", "failed", "expired", "cancelled")
_MOST_ERRORS = 20
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class _Line:
    custom_id: str
    start: int  # where it is in the file
    length: int


class Batches:
    """Runs every batch of a folder that is not over, ``n_at_once`` lines of all of them at a time.

    That is fewer than the engine takes at once, so that a chat never waits for a row that batch work holds (FineInfer
    §3.1); lines wait here, and not in the engine's queue.
    """

    def __init__(self, folder: Path, files: Files, service: Service, n_at_once: int) -> None:
        self._folder, self._files, self._service = folder, files, service
        self._rows = asyncio.Semaphore(n_at_once)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._known = {path.stem: json.loads(path.read_text("ascii")) for path in folder.glob("batch-*.json")}

    def resume(self) -> None:
        """Goes on with what an earlier server left."""
        for batch in sorted(self._known.values(), key=lambda batch: batch["created_at"]):
            if batch["status"] not in _OVER:
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
        self._known[batch["id"]] = batch
        self._save(batch)
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
            self._tasks[batch_id].cancel()
            self._start(batch)
        return batch

    # -- running one --------------------------------------------------------------------------------------------

    def _start(self, batch: dict[str, Any]) -> None:
        before = self._tasks.get(batch["id"])
        task = asyncio.create_task(self._run(batch, before), name=batch["id"])
        self._tasks[batch["id"]] = task

    async def _run(self, batch: dict[str, Any], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            lines, errors = await asyncio.to_thread(
                _read_lines, self._files.path(batch["input_file_id"]), batch
            )
            if errors:
                batch["errors"] = {"object": "list", "data": errors}
                self._become(batch, "failed")
                return
            with _Results(self._folder, batch["id"]) as results:
                await self._run_lines(batch, lines, results)
                self._hand_out(batch, results)
        except OSError as error:
            _log.error("%s failed: %s", batch["id"], error)
            batch["errors"] = {"object": "list", "data": [_problem(None, "io_error", str(error))]}
            self._become(batch, "failed")

    async def _run_lines(self, batch: dict[str, Any], lines: list[_Line], results: _Results) -> None:
        counts = batch["request_counts"]
        counts |= {"total": len(lines), "completed": results.n_right, "failed": results.n_wrong}
        if batch["status"] == "validating":
            self._become(batch, "in_progress")
        if batch["status"] != "in_progress":  # it is being cancelled
            return
        source = self._files.path(batch["input_file_id"])
        async with asyncio.TaskGroup() as group:
            for line in lines:
                if line.custom_id in results.done:
                    continue
                await self._rows.acquire()
                if time.time() > batch["expires_at"]:
                    self._rows.release()
                    break
                task = group.create_task(self._run_line(batch, line, source, results))
                task.add_done_callback(lambda _: self._rows.release())  # also of one that never began

    async def _run_line(self, batch: dict[str, Any], line: _Line, source: Path, results: _Results) -> None:
        status, body = await self._answer(batch["endpoint"], _json_at(source, line)["body"])
        results.add(line.custom_id, status, body)
        batch["request_counts"] |= {"completed": results.n_right, "failed": results.n_wrong}

    async def _answer(self, endpoint: str, body: Any) -> tuple[int, dict[str, Any]]:
        try:
            request = ENDPOINTS[endpoint].model_validate(body)
            if request.stream:
                raise refused("a batch's answers are not streamed: leave stream out", "stream")
            return 200, await self._service.whole(request, counted=False)
        except ValidationError as error:
            wrong = of_validation(error.errors(include_url=False, include_context=False))
        except RecursionError:
            wrong = refused("the body is nested too deeply")
        except ApiError as error:
            if error.status == 503:  # this server ends, and cancels this: the next one answers
                await asyncio.Event().wait()
            wrong = error
        return wrong.status, wrong.body()

    def _hand_out(self, batch: dict[str, Any], results: _Results) -> None:
        cancelled = batch["status"] == "cancelling"
        if not cancelled:
            self._become(batch, "finalizing")
        results.sync()
        for kind in ("output", "error"):
            if results.path(kind).stat().st_size:
                file_id = new_id("file")
                os.link(results.path(kind), self._files.path(file_id))
                self._files.register(file_id, f"{batch['id']}_{kind}.jsonl", "batch_output")
                batch[f"{kind}_file_id"] = file_id
        counts = batch["request_counts"]
        is_all = counts["completed"] + counts["failed"] == counts["total"]
        self._become(batch, "cancelled" if cancelled else "completed" if is_all else "expired")
        results.delete()

    def _become(self, batch: dict[str, Any], status: str) -> None:
        batch["status"] = status
        batch[f"{status}_at"] = int(time.time())
        self._save(batch)

    def _save(self, batch: dict[str, Any]) -> None:
        write_json(self._folder / f"{batch['id']}.json", batch)


class _Results:
    """Lines that are there, right ones (`output`) and wrong ones (`error`) in a file each."""

    def __init__(self, folder: Path, batch_id: str) -> None:
        self._paths = {kind: folder / f"{batch_id}.{kind}.jsonl" for kind in ("output", "error")}
        self.done: set[str] = set()
        counts = {}
        for kind, path in self._paths.items():
            before = len(self.done)
            self.done |= _custom_ids(path)
            counts[kind] = len(self.done) - before
        self.n_right, self.n_wrong = counts["output"], counts["error"]
        self._files = {kind: open(path, "ab") for kind, path in self._paths.items()}  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def path(self, kind: str) -> Path:
        return self._paths[kind]

    def add(self, custom_id: str, status: int, body: dict[str, Any]) -> None:
        request_id = f"batch_req_{uuid.uuid4().hex}"
        response = {"status_code": status, "request_id": request_id, "body": body}
        line = {"id": request_id, "custom_id": custom_id, "response": response, "error": None}
        right = status == 200
        file = self._files["output" if right else "error"]
        file.write(json.dumps(line).encode("ascii") + b"\n")
        file.flush()
        self.done.add(custom_id)
        self.n_right, self.n_wrong = self.n_right + right, self.n_wrong + (not right)

    def sync(self) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())

    def delete(self) -> None:
        for path in self._paths.values():
            path.unlink()


def _custom_ids(path: Path) -> set[str]:
    """Of the whole lines of a results file; a last one that is torn is cut off."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    return {json.loads(line)["custom_id"] for line in whole.splitlines()}


def _read_lines(path: Path, batch: dict[str, Any]) -> tuple[list[_Line], list[dict[str, Any]]]:
    """Where each request is, and what is wrong with the file."""
    lines: list[_Line] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    try:
        source = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return [], [_problem(None, "file_not_found", "the input file is gone")]
    with source:
        start = 0
        for number, text in enumerate(source, start=1):
            line = _Line("", start, len(text))
            start += len(text)
            if not text.strip():
                continue
            custom_id, wrong = _check_line(text, batch["endpoint"], seen.__contains__)
            if wrong is not None:
                errors.append(_problem(number, "invalid_request", wrong))
            if len(lines) == MAX_LINES:
                errors.append(_problem(number, "too_many_requests", f"at most {MAX_LINES} requests"))
            if len(errors) >= _MOST_ERRORS or len(lines) == MAX_LINES:
                break
            seen.add(custom_id)
            lines.append(_Line(custom_id, line.start, line.length))
    if not lines and not errors:
        errors.append(_problem(None, "empty_file", "the input file has no request"))
    return lines, errors


def _check_line(text: bytes, endpoint: str, is_known: Callable[[str], bool]) -> tuple[str, str | None]:
    """The line's custom_id, and what is wrong with it."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return "", "the line is not JSON"
    if not isinstance(line, dict):
        return "", "the line is not an object"
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return "", "the line has no custom_id"
    if is_known(custom_id):
        return custom_id, "another line has the same custom_id"
    if line.get("method") != "POST" or line.get("url") != endpoint:
        return custom_id, f'the line must have "method": "POST" and "url": "{endpoint}", as the batch'
    if not isinstance(line.get("body"), dict):
        return custom_id, "the line has no body"
    return custom_id, None


def _problem(number: int | None, code: str, message: str) -> dict[str, Any]:
    return {"code": code, "line": number, "message": message, "param": None}


def _json_at(path: Path, line: _Line) -> Any:
    with open(path, "rb") as source:
        source.seek(line.start)
        return json.loads(source.read(line.length))
