"""Requests that were accepted, and their tokens so far, in a SQLite file: what a supervisor finds again after
its own end.

A thread writes. Whoever accepts a request waits until it is on the disk; tokens are written in groups, and
nobody waits for them: those that are missing are computed again. A disk that is full costs no request: they
go on without, and what could not be written is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jaxlamina.errors import UserError

KEEP_S = 600.0
"""For so long a request that has ended can be asked for."""
_GROUP_S = 0.02  # tokens of so long are one commit
_AGAIN_S = 1.0  # after a disk would not take them
_ACCEPT_S = 5.0
_CLOSE_S = 5.0
_TABLES = """
CREATE TABLE IF NOT EXISTS requests (
  key TEXT PRIMARY KEY, path TEXT NOT NULL, body BLOB NOT NULL,
  created INTEGER NOT NULL, seed INTEGER NOT NULL, ended REAL);
CREATE TABLE IF NOT EXISTS tokens (key TEXT NOT NULL, which INTEGER NOT NULL, ids BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS of_request ON tokens (key);
CREATE TABLE IF NOT EXISTS cached (key TEXT NOT NULL, which INTEGER NOT NULL, n INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS cached_of_request ON cached (key);
CREATE TABLE IF NOT EXISTS model (said TEXT NOT NULL);
"""
_OF_REQUESTS = ("tokens", "cached")
_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Entry:
    """A request as it came, and what it ``wrote``: tokens of each of its prompts' first sequence.
    ``n_cached``: tokens of each prompt whose KV was there when it was first computed."""

    key: str
    path: str
    body: bytes
    created: int
    seed: int
    wrote: dict[int, list[int]] = field(default_factory=dict)
    n_cached: dict[int, int] = field(default_factory=dict)
    has_ended: bool = False


_Write = Callable[[sqlite3.Connection], object]


class Journal:
    """``path``: the file; None: nothing is kept. ``UserError`` for a file that cannot be one, or is another
    supervisor's."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[tuple[_Write, Callable[[], object] | None] | None] = (
            queue.SimpleQueue()
        )
        self._tokens: defaultdict[tuple[str, int], list[int]] = defaultdict(list)  # not queued yet
        self._lock = threading.Lock()
        self.n_failures = 0  # of commits
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            database = self._opened(path)
            database.executescript(_TABLES)
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
        """Returns once the request is on the disk; or without, where the disk does not take it in time."""
        if self._path is None:
            return
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        row = (entry.key, entry.path, entry.body, entry.created, entry.seed)
        self._put(
            lambda database: database.execute(
                "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, NULL)", row
            ),
            lambda: loop.call_soon_threadsafe(done.set),
        )
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), _ACCEPT_S)

    def wrote(self, key: str, which: int, token: int) -> None:
        if self._path is None:
            return
        with self._lock:
            tokens = self._tokens[key, which]
            tokens.append(token)
            if len(tokens) > 1:
                return
        taken: list[int] = []

        def add(database: sqlite3.Connection) -> None:
            if not taken:  # else it is tried again
                with self._lock:
                    taken.extend(self._tokens.pop((key, which)))
            row = (key, which, array("i", taken).tobytes())
            database.execute("INSERT INTO tokens VALUES (?, ?, ?)", row)

        self._put(add)

    def cached(self, key: str, which: int, n: int) -> None:
        self._put(lambda database: database.execute("INSERT INTO cached VALUES (?, ?, ?)", (key, which, n)))

    def ended(self, key: str) -> None:
        at = time.time()
        self._put(lambda database: database.execute("UPDATE requests SET ended = ? WHERE key = ?", (at, key)))

    def forget(self, key: str) -> None:
        """Nobody will ask for it."""

        def delete(database: sqlite3.Connection) -> None:
            for table in _OF_REQUESTS:
                database.execute(f"DELETE FROM {table} WHERE key = ?", (key,))
            database.execute("DELETE FROM requests WHERE key = ?", (key,))

        self._put(delete)

    def entries(self) -> Iterable[Entry]:
        """All that were there at the start; before anything is written."""
        if self._path is None:
            return []
        wrote: defaultdict[str, dict[int, list[int]]] = defaultdict(dict)
        for key, which, ids in self._database.execute("SELECT key, which, ids FROM tokens ORDER BY rowid"):
            wrote[key].setdefault(which, []).extend(array("i", ids))
        cached: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for key, which, n in self._database.execute("SELECT key, which, n FROM cached"):
            cached[key].setdefault(which, n)
        found = "SELECT key, path, body, created, seed, ended IS NOT NULL FROM requests ORDER BY rowid"
        return [
            Entry(key, path, body, created, seed, wrote[key], cached[key], bool(has_ended))
            for key, path, body, created, seed, has_ended in self._database.execute(found)
        ]

    def model(self) -> str | None:
        """What `be_of` was told last; before anything is written."""
        found = None if self._path is None else self._database.execute("SELECT said FROM model").fetchone()
        return None if found is None else str(found[0])

    def be_of(self, said: str) -> None:
        """Its requests are of this model from now on."""
        self._put(lambda database: database.execute("DELETE FROM model"))
        self._put(lambda database: database.execute("INSERT INTO model VALUES (?)", (said,)))

    def close(self) -> None:
        """All that can be written is."""
        if self._path is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_S)

    def _put(self, write: _Write, on_done: Callable[[], object] | None = None) -> None:
        if self._path is not None:
            self._queue.put((write, on_done))

    # --- the thread ---

    def _write(self) -> None:
        is_over = False
        while not is_over:
            group = [self._queue.get()]
            until = time.monotonic() + _GROUP_S
            # Who accepts a request waits; who writes a token does not.
            while group[-1] is not None and group[-1][1] is None and (left := until - time.monotonic()) > 0:
                with suppress(queue.Empty):
                    group.append(self._queue.get(timeout=left))
            is_over = group[-1] is None
            writes = [item for item in group if item is not None]
            while not self._committed([write for write, _ in writes]):
                if is_over:
                    return
                time.sleep(_AGAIN_S)
            for _, on_done in writes:
                if on_done is not None:
                    with suppress(RuntimeError):  # its loop is over
                        on_done()
        self._database.close()

    def _committed(self, writes: Iterable[_Write]) -> bool:
        try:
            for write in writes:
                write(self._database)
            self._database.commit()
        except (sqlite3.Error, MemoryError) as error:  # SQLite's own "no memory" is Python's
            with suppress(sqlite3.Error, MemoryError):
                self._database.rollback()
            self.n_failures += 1
            if self.n_failures == 1:
                _log.error(
                    "the journal %s takes nothing more: %s; requests go on without",
                    self._path,
                    error or type(error).__name__,
                )
            return False
        return True
