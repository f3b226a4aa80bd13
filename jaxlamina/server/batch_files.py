"""What a batch has on disk beside its state: the lines it was given, the results so far, and what was begun
last.

Whatever of these is torn or damaged costs the lines it was about, never the batch. Knows files and the form
of lines; nothing of how a line is run.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxlamina.server.errors import ApiError
from jaxlamina.server.files import set_aside, written

MAX_LINES = 50_000
_MOST_ERRORS = 20

_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Line:
    custom_id: str
    start: int  # where it is in the file
    length: int


class Source:
    """The lines of an input file, which stays open: it may be deleted meanwhile. `FileNotFoundError` if it is
    gone."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def lines(self, endpoint: str, max_line_bytes: int) -> tuple[list[Line], list[dict[str, Any]]]:
        """Where each request is, and what is wrong with the file."""
        lines: list[Line] = []
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        end = 0
        for number, text in enumerate(self._file, start=1):
            start, end = end, end + len(text)
            if not text.strip():
                continue
            custom_id, wrong = _check_line(text, endpoint, max_line_bytes, seen.__contains__)
            if wrong is not None:
                errors.append(problem(number, "invalid_request", wrong))
            if len(lines) == MAX_LINES:
                errors.append(problem(number, "too_many_requests", f"at most {MAX_LINES} requests"))
            if len(errors) >= _MOST_ERRORS or len(lines) == MAX_LINES:
                break
            seen.add(custom_id)
            lines.append(Line(custom_id, start, len(text)))
        if not lines and not errors:
            errors.append(problem(None, "empty_file", "the input file has no request"))
        return lines, errors

    def body(self, line: Line) -> Any:
        return json.loads(os.pread(self._file.fileno(), line.length, line.start))["body"]


class Results:
    """Lines that are there, right ones (`output`) and wrong ones (`error`) in a file each. To be written in a
    ``with``."""

    def __init__(self, folder: Path, batch_id: str) -> None:
        self._paths = {kind: folder / f"{batch_id}.{kind}.jsonl" for kind in ("output", "error")}
        self.done: set[str] = set()
        counts = {}
        for kind, path in self._paths.items():
            before = len(self.done)
            self.done |= _custom_ids(path)
            counts[kind] = len(self.done) - before
        self.n_right, self.n_wrong = counts["output"], counts["error"]

    def __enter__(self) -> Self:
        self._files = {kind: open(path, "ab") for kind, path in self._paths.items()}  # noqa: SIM115
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    @staticmethod
    def are_left(folder: Path, batch_id: str) -> bool:
        """Whether there are results that were not given out."""
        return any((folder / f"{batch_id}.{kind}.jsonl").exists() for kind in ("output", "error"))

    def path(self, kind: str) -> Path:
        return self._paths[kind]

    def add(self, custom_id: str, status: int, body: dict[str, Any]) -> None:
        request_id = f"batch_req_{uuid.uuid4().hex}"
        response = {"status_code": status, "request_id": request_id, "body": body}
        line = {"id": request_id, "custom_id": custom_id, "response": response, "error": None}
        right = status == 200
        _append(self._files["output" if right else "error"].fileno(), json.dumps(line).encode("ascii"))
        self.done.add(custom_id)
        self.n_right, self.n_wrong = self.n_right + right, self.n_wrong + (not right)

    def sync(self) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())

    def delete(self) -> None:
        for path in self._paths.values():
            path.unlink(missing_ok=True)


class Starts:
    """How often a server died while it had begun a line and had not a token of its answer: the line may be
    what it died of.

    A few bytes a line, written before the line is run and not forced to the disk: they survive the process,
    not the host. To be written in a ``with``.
    """

    BEGUN, GONE_WELL, UNDONE = b"+", b"=", b"-"

    def __init__(self, folder: Path, batch_id: str) -> None:
        self._path = folder / f"{batch_id}.starts"
        self._counts: Counter[int] = Counter()
        for text in self._path.read_bytes().splitlines() if self._path.exists() else ():
            mark, place = text[:1], text[1:]
            if place.isdigit() and len(place) < 20:  # not torn or damaged
                step = {self.BEGUN: 1, self.UNDONE: -1}.get(mark)
                self._counts[int(place)] = 0 if step is None else self._counts[int(place)] + step

    def __enter__(self) -> Self:
        self._file = open(self._path, "ab")
        if self._file.tell():  # the last mark may be torn: what follows is a line of its own
            _append(self._file.fileno(), b"")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def deaths(self, line: Line) -> int:
        return self._counts[line.start]

    def say(self, mark: bytes, line: Line) -> None:
        _append(self._file.fileno(), mark + str(line.start).encode())

    def delete(self) -> None:
        self._path.unlink(missing_ok=True)


def problem(number: int | None, code: str, message: str) -> dict[str, Any]:
    """One of a batch's ``errors``; ``number`` of the input's line."""
    return {"code": code, "line": number, "message": message, "param": None}


def of_deaths(n: int) -> ApiError:
    return ApiError(
        500,
        f"the server ended {n} times while it had begun this line and had no token of its answer: it is not "
        "run again; see whether the line does that alone",
        type="internal_error",
    )


def _append(file: int, text: bytes) -> None:
    """A line at the end of a file: all of it or, on a full disk, nothing."""
    end = os.fstat(file).st_size
    line = text + b"\n"
    try:
        while line:  # what could be written in part only will say why
            line = line[os.write(file, line) :]
    except OSError:
        os.ftruncate(file, end)
        raise


def _custom_ids(path: Path) -> set[str]:
    """Of the whole lines of a results file. A last one that is torn is cut off; damaged ones are set aside
    with the file as it was, and their requests are run again."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole, torn = content[: content.rfind(b"\n") + 1].splitlines(keepends=True), not content.endswith(b"\n")
    named = [(text, _custom_id(text)) for text in whole]
    good = [text for text, custom_id in named if custom_id is not None]
    if len(good) < len(whole):
        set_aside(path, f"{len(whole) - len(good)} of {len(whole)} results are damaged")
    if len(good) < len(whole) or (torn and content):
        with written(path) as file:
            file.writelines(good)
    return {custom_id for _, custom_id in named if custom_id is not None}


def _custom_id(text: bytes) -> str | None:
    """Of a result; None if it is none."""
    try:
        line = json.loads(text)
        return line["custom_id"] if isinstance(line["custom_id"], str) and line["response"] else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _check_line(
    text: bytes, endpoint: str, max_bytes: int, is_known: Callable[[str], bool]
) -> tuple[str, str | None]:
    """The line's custom_id, and what is wrong with it."""
    if len(text) > max_bytes:
        return "", f"the line has {len(text)} bytes, more than {max_bytes}"
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
