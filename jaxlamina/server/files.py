"""Files that clients hand in and fetch, kept in a folder: `files/ID` with its facts beside it as
`files/ID.json`.

Whatever is written is written whole: under a name that ends in ".new", and renamed. What is damaged is set
aside, under a name that ends in ".damaged", and said. Knows OpenAI's file objects; nothing of what is in a
file. Calls block; any thread may make them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxlamina.errors import UserError
from jaxlamina.server.errors import ApiError, refused

PURPOSES = ("batch",)
MAX_FILE_BYTES = 200 * 2**20
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
_NEW, _DAMAGED = ".new", ".damaged"
_FACTS = {"id": str, "bytes": int, "created_at": int, "filename": str, "purpose": str}

_log = logging.getLogger("uvicorn.error")


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def is_id(text: str) -> bool:
    """Whether a name may be looked up: none of ours has a path in it."""
    return _ID.fullmatch(text) is not None


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """What the block writes is at ``path`` after it, on the disk and whole; or nothing is, where the block or
    the disk failed, or the process died meanwhile."""
    new = path.with_name(path.name + _NEW)
    try:
        with open(new, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system that knows no such thing
            os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    with written(path) as file:
        file.write(json.dumps(value, allow_nan=False).encode("ascii"))


def read_json(path: Path, kinds: Mapping[str, type]) -> dict[str, Any] | None:
    """The object of that id that is in a file, with fields of these types; None if there is none. A damaged
    file is set aside. `OSError` if it cannot be read now, which says nothing of what is in it."""
    try:
        value = json.loads(path.read_bytes())
        wrong = next((key for key, kind in kinds.items() if not isinstance(value[key], kind)), None)
        if wrong is not None or value["id"] != path.stem:
            raise ValueError(f"its {wrong or 'id'} is none")
        json.dumps(value, allow_nan=False)  # as it will be sent
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        set_aside(path, f"{type(error).__name__}: {error}")
        return None
    found: dict[str, Any] = value
    return found


def set_aside(path: Path, why: str) -> None:
    """Renames what cannot be used, so that nobody meets it again, and says so."""
    aside = path.with_name(path.name + _DAMAGED)
    _log.warning("%s cannot be used (%.200s): set aside as %s", path, why, aside.name)
    with contextlib.suppress(OSError):
        os.replace(path, aside)


class Folder:
    """A server's folder, which no other server uses meanwhile: ``locked`` by this process, or by what has
    started it, whose servers say when it is theirs alone (`clear`). `UserError` if another one uses it, or if
    it cannot be made."""

    def __init__(self, path: Path, *, locked: bool = True) -> None:
        self.path = path
        try:
            for name in ("files", "batches"):
                (path / name).mkdir(parents=True, exist_ok=True)
            self._lock = open(path / "lock", "w")  # noqa: SIM115 (held as long as the server lives)
        except OSError as error:
            raise UserError(f"cannot use the folder {path}: {error.strerror}") from None
        try:
            if locked:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(
                f"{path} is in use by another server: give this one a folder of its own"
            ) from None
        if locked:
            self.clear()

    def clear(self) -> None:
        """Removes what a server left that died while it wrote."""
        for name in ("files", "batches"):
            for left in (self.path / name).glob(f"*{_NEW}"):
                left.unlink(missing_ok=True)

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
        with written(self.path(found)) as copy:
            shutil.copyfileobj(content, copy)
        return self._registered(found, filename, purpose)

    def adopt(self, content: Path, filename: str, purpose: str) -> dict[str, Any]:
        """A file with the content of another of this file system, which stays where it is."""
        found = new_id("file")
        os.link(content, self.path(found))
        return self._registered(found, filename, purpose)

    def _registered(self, file_id: str, filename: str, purpose: str) -> dict[str, Any]:
        """The object of a file whose content is in its place; or that is gone, too."""
        facts = {
            "id": file_id,
            "object": "file",
            "bytes": self.path(file_id).stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        try:
            write_json(self._facts(file_id), facts)
        except BaseException:
            self.path(file_id).unlink(missing_ok=True)
            raise
        return facts

    def path(self, file_id: str) -> Path:
        """Where a file of ours has its content."""
        return self._folder / file_id

    def find(self, file_id: str, param: str | None = None) -> dict[str, Any]:
        found = self._read(self._facts(file_id)) if is_id(file_id) else None
        if found is None:
            raise ApiError(404, f"there is no file {file_id!r:.80}", param=param, type="not_found_error")
        return found

    def all(self) -> list[dict[str, Any]]:
        """Newest first."""
        found = [facts for path in self._folder.glob("file-*.json") if (facts := self._read(path))]
        return sorted(found, key=lambda facts: (-facts["created_at"], facts["id"]))

    def delete(self, file_id: str) -> None:
        self.find(file_id)
        self._facts(file_id).unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def _read(self, facts: Path) -> dict[str, Any] | None:
        found = read_json(facts, _FACTS)
        if found is not None and not self.path(facts.stem).is_file():
            if facts.exists():  # it was not deleted meanwhile
                set_aside(facts, "its content is gone")
            return None
        return found

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
