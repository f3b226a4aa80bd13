"""Files that clients hand in and fetch, kept in a folder: `files/ID` with its facts beside it as `files/ID.json`.

Knows OpenAI's file objects; nothing of what is in a file. Calls block: none is long but `add`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Any, BinaryIO

from jaxlamina.errors import UserError
from jaxlamina.server.errors import ApiError, refused

PURPOSES = ("batch",)
MAX_FILE_BYTES = 200 * 2**20
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def is_id(text: str) -> bool:
    """Whether a name may be looked up: none of ours has a path in it."""
    return _ID.fullmatch(text) is not None


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all, also where the process dies meanwhile."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value), encoding="ascii")
    os.replace(new, path)


class Folder:
    """A server's folder, which no other process uses meanwhile. `UserError` if one does, or if it cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            for name in ("files", "batches"):
                (path / name).mkdir(parents=True, exist_ok=True)
            self._lock = open(path / "lock", "w")  # noqa: SIM115 (held as long as the server lives)
        except OSError as error:
            raise UserError(f"cannot use the folder {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(
                f"{path} is in use by another server: give this one a folder of its own"
            ) from None

    def close(self) -> None:
        self._lock.close()


class Files:
    """Raises `ApiError` for what is not there and for bad uploads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, content: BinaryIO, filename: str, purpose: str) -> dict[str, Any]:
        if purpose not in PURPOSES:
            raise refused(
                f"purpose must be {' or '.join(map(repr, PURPOSES))}, not {purpose!r:.80}", "purpose"
            )
        found = new_id("file")
        with open(self._folder / found, "wb") as copy:
            shutil.copyfileobj(content, copy)
        return self.register(found, filename, purpose)

    def register(self, file_id: str, filename: str, purpose: str) -> dict[str, Any]:
        """The object of a file whose content is in its place already."""
        facts = {
            "id": file_id,
            "object": "file",
            "bytes": self.path(file_id).stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        write_json(self._facts(file_id), facts)
        return facts

    def path(self, file_id: str) -> Path:
        """Where a file of ours has its content."""
        return self._folder / file_id

    def find(self, file_id: str, param: str | None = None) -> dict[str, Any]:
        if not is_id(file_id) or not self._facts(file_id).is_file():
            raise ApiError(404, f"there is no file {file_id!r:.80}", param=param, type="not_found_error")
        found: dict[str, Any] = json.loads(self._facts(file_id).read_text(encoding="ascii"))
        return found

    def all(self) -> list[dict[str, Any]]:
        """Newest first."""
        found = [json.loads(path.read_text(encoding="ascii")) for path in self._folder.glob("file-*.json")]
        return sorted(found, key=lambda facts: (-facts["created_at"], facts["id"]))

    def delete(self, file_id: str) -> None:
        self.find(file_id)
        self._facts(file_id).unlink()
        self.path(file_id).unlink()

    def _facts(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"


def page(objects: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """OpenAI's list of at most ``limit`` objects, from the one after ``after`` on."""
    start = 0
    if after is not None:
        start = next((i + 1 for i, x in enumerate(objects) if x["id"] == after), len(objects))
    shown = objects[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(objects),
    }
