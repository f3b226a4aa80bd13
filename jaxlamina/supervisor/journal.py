"""Requests that were accepted, and their tokens so far, in a SQLite file: what a supervisor finds again after
its own end.

A thread writes. Whoever accepts a request waits until it is on the disk; tokens are written in groups, and
nobody waits for them: those that are missing are computed again. A disk that is full costs no request, and
nobody's time: requests go on without, and what could not be written is tried again, as far as it is still of
use and there is room for it (`unwritten`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxlamina.errors import UserError
from jaxlamina.supervisor.unwritten import Of, Unwritten, UnwrittenRequests

KEEP_S = 600.0
"""For so long a request that has ended can be asked for."""
_GROUP_S = 0.02  # tokens of so long are one commit
_AGAIN_S = 1.0  # after a disk would not take them
_TRIED = 100  # requests that are tried then
_SAY_AGAIN_S = 60.0  # that it takes nothing
_ACCEPT_S = 5.0
_CLOSE_S = 5.0
_TABLES = """
CREATE TABLE IF NOT EXISTS requests (
  key TEXT PRIMARY KEY, path TEXT NOT NULL, body BLOB NOT NULL,
  created INTEGER NOT NULL, seed INTEGER NOT NULL, ended REAL);
CREATE TABLE IF NOT EXISTS tokens (
  key TEXT NOT NULL, which INTEGER NOT NULL, ids BLOB NOT NULL, continuation INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS of_request ON tokens (key);
CREATE TABLE IF NOT EXISTS cached (key TEXT NOT NULL, which INTEGER NOT NULL, n INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS cached_of_request ON cached (key);
CREATE TABLE IF NOT EXISTS errors (key TEXT PRIMARY KEY, status INTEGER NOT NULL, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS model (said TEXT NOT NULL);
"""
_ADDED = "ALTER TABLE tokens ADD COLUMN continuation INTEGER NOT NULL DEFAULT 0"  # to earlier versions' files
_OF_REQUESTS = ("tokens", "cached", "errors")
_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Entry:
    """A request as it came, and what it ``wrote``: tokens of each of its sequences.
    ``n_cached``: tokens of each prompt whose KV was there when it was first computed. ``error``: the status
    and the content that it ended with, where these are not of an answer."""

    key: str
    path: str
    body: bytes
    created: int
    seed: int
    wrote: dict[Of, list[int]] = field(default_factory=dict)
    n_cached: dict[int, int] = field(default_factory=dict)
    has_ended: bool = False
    error: tuple[int, bytes] | None = None


class _Group(NamedTuple):
    """What is one commit. ``model``: where that is news."""

    model: str | None
    requests: dict[str, Unwritten]


class Journal:
    """``path``: the file; None: nothing is kept. ``UserError`` for a file that cannot be one, or is another
    supervisor's."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._changed = threading.Condition()  # of these four
        self._unwritten = UnwrittenRequests()
        self._model: str | None = None  # not written yet
        self._accepting: dict[str, Callable[[], object]] = {}  # wakes who waits for a request
        self._is_over = False
        self._said_at = -math.inf
        self.n_failures = 0  # of commits
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            database = self._opened(path)
            database.executescript(_TABLES)
            if "continuation" not in {row[1] for row in database.execute("PRAGMA table_info(tokens)")}:
                database.execute(_ADDED)
            database.execute("DELETE FROM requests WHERE ended < ?", (time.time() - KEEP_S,))
            for table in _OF_REQUESTS:
                database.execute(f"DELETE FROM {table} WHERE key NOT IN (SELECT key FROM requests)")
            database.commit()
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"the journal {path} cannot be used: {error}; give another folder by --journal, or end the "
                f"supervisor that has it"
            ) from None
        self._database = database
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    @staticmethod
    def _opened(path: Path) -> sqlite3.Connection:
        database = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
        # One supervisor alone; a commit is on the disk when it comes back.
        for setting in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
            database.execute(f"PRAGMA {setting}")
        path.chmod(0o600)
        return database

    async def accept(self, entry: Entry) -> None:
        """Returns once the request is on the disk; or without, where the disk takes nothing or is late."""
        if self._path is None:
            return
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._unwritten.begin((entry.key, entry.path, entry.body, entry.created, entry.seed))
            self._changed.notify()
            if self._unwritten.fails:
                return
            self._accepting[entry.key] = lambda: loop.call_soon_threadsafe(done.set)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), _ACCEPT_S)
        finally:
            with self._changed:
                self._accepting.pop(entry.key, None)

    def wrote(self, key: str, of: Of, token: int) -> None:
        self._note(UnwrittenRequests.wrote, key, of, token)

    def cut(self, key: str, of: Of, tokens: Sequence[int]) -> None:
        """It wrote these, and nothing after them."""
        self._note(UnwrittenRequests.cut, key, of, tokens)

    def cached(self, key: str, which: int, n: int) -> None:
        self._note(UnwrittenRequests.cached, key, which, n)

    def ended(self, key: str, error: tuple[int, bytes] | None = None) -> None:
        """``error``: as of `Entry`."""
        self._note(UnwrittenRequests.ended, key, time.time(), error)

    def forget(self, key: str) -> None:
        """Nobody will ask for it."""
        self._note(UnwrittenRequests.forget, key)

    def entries(self) -> Iterable[Entry]:
        """All that were there at the start; before anything is written."""
        if self._path is None:
            return []
        wrote: defaultdict[str, dict[Of, list[int]]] = defaultdict(dict)
        written = "SELECT key, which, continuation, ids FROM tokens ORDER BY rowid"
        for key, which, continuation, ids in self._database.execute(written):
            wrote[key].setdefault((which, continuation), []).extend(array("i", ids))
        cached: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for key, which, n in self._database.execute("SELECT key, which, n FROM cached"):
            cached[key].setdefault(which, n)
        rows = self._database.execute("SELECT key, status, content FROM errors")
        errors = {key: (status, content) for key, status, content in rows}
        found = "SELECT key, path, body, created, seed, ended IS NOT NULL FROM requests ORDER BY rowid"
        return [
            Entry(key, path, body, created, seed, wrote[key], cached[key], bool(has_ended), errors.get(key))
            for key, path, body, created, seed, has_ended in self._database.execute(found)
        ]

    def model(self) -> str | None:
        """What `be_of` was told last; before anything is written."""
        found = None if self._path is None else self._database.execute("SELECT said FROM model").fetchone()
        return None if found is None else str(found[0])

    def be_of(self, said: str) -> None:
        """Its requests are of this model from now on."""
        with self._changed:
            self._model = said
            self._changed.notify()

    def close(self) -> None:
        """All that can be written is."""
        if self._path is not None:
            with self._changed:
                self._is_over = True
                self._changed.notify()
            self._thread.join(_CLOSE_S)

    def _note(self, what: Callable[..., None], *of: Any) -> None:
        if self._path is None:
            return
        with self._changed:
            was_idle = not self._has_some()
            what(self._unwritten, *of)
            if was_idle:  # else the thread is at it, or looks soon
                self._changed.notify()

    def _has_some(self) -> bool:
        return bool(self._unwritten) or self._model is not None

    # --- the thread ---

    def _write(self) -> None:
        try:
            while (found := self._next()) is not None:
                group, is_last_try = found
                is_written = self._committed(group)
                self._has_tried(group, is_written)
                if is_last_try and not is_written:
                    break
        except Exception as error:  # noqa: BLE001 (what is written stays right; nobody is to wait for more)
            _log.error("nothing more is written to the journal %s", self._path, exc_info=error)
            self._has_tried(_Group(None, {}), False)
        else:  # else it stays this supervisor's
            with suppress(sqlite3.Error):
                self._database.close()

    def _next(self) -> tuple[_Group, bool] | None:
        """What is to be written, waited for; and whether it is tried for the last time, since the journal is
        closed. None: that was all."""
        with self._changed:
            while True:
                if not self._has_some():
                    self._unwritten.fails = False
                self._changed.wait_for(lambda: self._is_over or self._has_some())
                fails = self._unwritten.fails
                if fails:
                    self._changed.wait_for(lambda: self._is_over, _AGAIN_S)
                else:  # who accepts a request waits; who writes a token does not
                    self._changed.wait_for(lambda: self._is_over or self._accepting, _GROUP_S)
                if self._has_some():  # it may be forgotten meanwhile
                    group = _Group(self._model, self._unwritten.take(_TRIED if fails else None))
                    self._model = None
                    return group, self._is_over
                if self._is_over:
                    return None

    def _committed(self, group: _Group) -> bool:
        try:
            if group.model is not None:
                self._database.execute("DELETE FROM model")
                self._database.execute("INSERT INTO model VALUES (?)", (group.model,))
            for key, unwritten in group.requests.items():
                _write_request(self._database, key, unwritten)
            self._database.commit()
        except (sqlite3.Error, MemoryError) as error:  # SQLite's own "no memory" is Python's
            with suppress(sqlite3.Error, MemoryError):
                self._database.rollback()
            self.n_failures += 1
            if time.monotonic() - self._said_at > _SAY_AGAIN_S:
                self._said_at = time.monotonic()
                why = error or type(error).__name__
                _log.error("the journal %s takes nothing more: %s; requests go on without", self._path, why)
            return False
        return True

    def _has_tried(self, group: _Group, is_written: bool) -> None:
        with self._changed:
            self._unwritten.fails = not is_written
            if not is_written:
                self._unwritten.put_back(group.requests)
                self._model = self._model or group.model
            # Nobody waits for a disk that takes nothing.
            keys = [key for key in self._accepting if not is_written or key in group.requests]
            over = [self._accepting.pop(key) for key in keys]
        for wake in over:
            with suppress(RuntimeError):  # its loop is over
                wake()


def _write_request(database: sqlite3.Connection, key: str, unwritten: Unwritten) -> None:
    if unwritten.is_forgotten:
        for table in (*_OF_REQUESTS, "requests"):
            database.execute(f"DELETE FROM {table} WHERE key = ?", (key,))
    if unwritten.row is not None:
        database.execute("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, NULL)", unwritten.row)
    for of in unwritten.anew:
        database.execute("DELETE FROM tokens WHERE key = ? AND which = ? AND continuation = ?", (key, *of))
    for (which, continuation), ids in unwritten.tokens.items():
        row = key, which, ids.tobytes(), continuation
        database.execute("INSERT INTO tokens VALUES (?, ?, ?, ?)", row)
    for which, n in unwritten.cached:
        database.execute("INSERT INTO cached VALUES (?, ?, ?)", (key, which, n))
    if unwritten.ended_at is not None:
        database.execute("UPDATE requests SET ended = ? WHERE key = ?", (unwritten.ended_at, key))
    if unwritten.error is not None:
        database.execute("INSERT OR REPLACE INTO errors VALUES (?, ?, ?)", (key, *unwritten.error))
