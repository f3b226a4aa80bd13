"""KV of tokens by place, in host memory that may outlive this process: a file, mapped.

A place's mark is written after its KV, and wiped before, so that a process which dies in between leaves no
place that says what it does not hold. Knows rows and marks; no device, no token, and not what a mark means.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import mmap
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from jaxtyping import Bool, Int, Shaped, UInt8, UInt64

from jaxlamina.errors import UserError
from jaxlamina.kv.kept import RECORD, TOGETHER, KeptFound, KeptPrefixes, KeptWanted, Lost, new_keys
from jaxlamina.process import kept_folders
from jaxlamina.process.cuda_driver import CudaError
from jaxlamina.process.host_memory import boot_id, host_free_bytes, is_full, memory_folder
from jaxlamina.workers.pinned_pieces import PinnedPieces, Pins, runs
from jaxlamina.workers.populating_writers import N_WRITERS, PopulatingWriters

FRACTION = 0.25
"""Of the memory that is free, for KV that is kept, where nobody says how much."""
_HEAD_BYTES = 4096
_VERSION = "jaxlamina kept KV 2"
_AT_ONCE_BYTES = 2**23  # of rows that are written: what a core's cache has
_LOOK_S, _POPULATED_BYTES = 1.0, 2**25
_MADV_POPULATE_READ = 22  # Linux 5.14 or later
_log = logging.getLogger("uvicorn.error")


class Copied(NamedTuple):
    """Rows of kept KV, and by what each is known at its place."""

    places: Int[np.ndarray, " n"]
    marks: UInt64[np.ndarray, " n"]
    rows: UInt8[np.ndarray, "n row_bytes"]


class _Later(NamedTuple):
    """What is to be put once ``parts`` has it."""

    places: Int[np.ndarray, " n"]
    marks: UInt64[np.ndarray, " n"]
    parts: Callable[[], Sequence[Shaped[np.ndarray, "n ..."]]]


class MappedAhead:
    """A file that another process still writes to, mapped for when this one goes on with it.

    A thread has the kernel enter pages into this process's page tables as they come to hold KV: first touches
    are most of the time in which KV is read otherwise. Only places with marks are touched, so no page is
    allocated, and nothing is written. A file that is not of these rows and ``identity`` is left alone.
    ``pins``: of a device that copies by itself from what is pinned.
    """

    def __init__(self, path: Path, row_bytes: int, identity: str, pins: Pins | None = None) -> None:
        self.n_populated = 0  # places
        self.pinned: PinnedPieces | None = None
        self._is_refused = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kept KV ahead", daemon=True)
        self._mapping: mmap.mmap | None = None
        n = places_kept(path, row_bytes, identity)
        if not n:
            return
        self._row_bytes, self._n_places = row_bytes, n
        self._file = _open(path)
        try:
            self._mapping = mmap.mmap(self._file, _n_bytes(n, row_bytes))
        except OSError as error:
            _log.debug("kept KV is not mapped ahead: %s", error)
            os.close(self._file)
            return
        if pins is not None:
            memory = np.frombuffer(self._mapping, np.uint8)
            rows = {"at": _n_bytes(n, 0), "n_rows": n, "row_bytes": row_bytes}
            self.pinned = PinnedPieces(pins, memory.ctypes.data, len(memory), **rows)
        self._thread.start()

    def taken(self, file: int, n_bytes: int) -> mmap.mmap | None:
        """The mapping, if it is of all of ``file``; else nothing stays pinned. Nothing is populated any
        more."""
        if self._mapping is None:
            return None
        self._over.set()
        self._thread.join()
        is_same = os.path.sameopenfile(self._file, file) and len(self._mapping) == n_bytes
        os.close(self._file)
        if not is_same and self.pinned is not None:
            self.pinned.release()
            self.pinned = None
        return self._mapping if is_same else None

    def _run(self) -> None:
        assert self._mapping is not None
        n, row_bytes = self._n_places, self._row_bytes
        is_done = np.zeros(n, bool)
        try:
            while not self._over.is_set():
                marks = np.frombuffer(os.pread(self._file, 8 * n, _HEAD_BYTES), np.uint64)
                new = np.flatnonzero((marks != 0) & ~is_done)  # ValueError of a file that was cut off
                for i, j in runs(new):
                    first = _n_bytes(n, 0) + int(new[i]) * row_bytes
                    last = first + (j - i) * row_bytes
                    for at in range(first - first % mmap.PAGESIZE, last, _POPULATED_BYTES):
                        if self._over.is_set():
                            return
                        self._mapping.madvise(_MADV_POPULATE_READ, at, min(_POPULATED_BYTES, last - at))
                is_done[new] = True
                self.n_populated = int(is_done.sum())
                if len(new):
                    self._pin(is_done)
                self._over.wait(_LOOK_S)
        except (OSError, ValueError) as error:
            _log.debug("kept KV is not mapped ahead: %s", error)

    def _pin(self, is_done: Bool[np.ndarray, " places"]) -> None:
        if self.pinned is None or self._is_refused:
            return
        try:
            for piece in self.pinned.due(is_done).tolist():
                if self._over.is_set():
                    return
                self.pinned.pin(piece)
        except CudaError as error:
            self._is_refused = True
            _log.debug("no more of kept KV is pinned ahead: %s", error)


class KeptKV:
    """``row_bytes``: of a token's KV. ``identity``: whatever KV depends on, beside tokens. ``path``: None for
    memory of this process's own; a file of the same rows and ``identity`` is gone on with, and has as many
    places as it has. ``n_places``: of a new one, as far as there is memory for them: a ``fraction`` of what
    is free, of which ``n_sharing`` files of this host have an equal part each; there may be none. ``ahead``:
    of the same path. ``changed`` is set whenever something was put. One that this process wrote to before is
    closed first. ``n_writers``: threads beside its own that write, 1 for none.

    Where memory is full, what `later` was to keep is `lost`, and a line of the log says so once. What was
    kept before stays. Its thread keeps it alive, so it is to be closed, or to `end_with` something.
    """

    def __init__(
        self,
        path: Path | None,
        row_bytes: int,
        identity: str,
        n_places: int,
        n_sharing: int,
        ahead: MappedAhead | None = None,
        fraction: float = FRACTION,
        n_writers: int = N_WRITERS,
    ) -> None:
        self._fraction = fraction
        self.row_bytes = row_bytes
        self._where = str(path or "this process's memory")
        self._is_full = False
        self._folder = None
        self._pinned: PinnedPieces | None = None
        if path is not None:
            self._folder = kept_folders.held_alone(path.parent)  # for as long as something is written there
            if (before := _writers.get(path.resolve())) is not None:
                before.close()
        head = _head(row_bytes, identity)
        self._file = _open(path)
        try:
            found = _places_of(self._file, head, self.row_bytes)
            self.n_places = found if found is not None else self._make(head, n_places, n_sharing)
            whole = self._mapped(ahead)
        except (OSError, MemoryError) as error:
            self._say_full(error, n_places, "No KV is kept here, and a recovery computes it again")
            self.n_places, whole = 0, np.empty(_n_bytes(0, row_bytes), np.uint8)
        at = _n_bytes(self.n_places, 0)
        self._writers = PopulatingWriters(n_writers) if n_writers > 1 else None
        self.marks: UInt64[np.ndarray, " places"] = whole[_HEAD_BYTES:at].view(np.uint64)
        self._data = whole[at:].reshape(self.n_places, row_bytes)
        self.changed = threading.Event()
        self.on_written: Callable[[int], object] = lambda n: None  # of all tokens so far; in another thread
        self._n_begun = self._n_written = 0
        self._due = np.zeros(self.n_places, np.int64)  # written once `_n_written` is as much
        self._progress = threading.Condition()
        self._lost: queue.SimpleQueue[Lost] = queue.SimpleQueue()
        # One to which a collection may put something, whatever the thread is at in which it runs.
        self._waiting: queue.SimpleQueue[_Later | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        self._n_rows_at_once = max(1, _AT_ONCE_BYTES // row_bytes)
        self._rows = np.empty((self._n_rows_at_once, row_bytes), np.uint8)
        self._putting = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="kept KV", daemon=True)
        self._thread.start()
        if path is not None:
            _writers[path.resolve()] = self

    @property
    def _n_bytes(self) -> int:
        return _n_bytes(self.n_places, self.row_bytes)

    def _make(self, head: bytes, most: int, n_sharing: int) -> int:
        os.ftruncate(self._file, 0)
        free = os.statvfs(self._file)
        room = min(host_free_bytes(), free.f_bavail * free.f_frsize)
        n = max(0, min(most, int(self._fraction * room / n_sharing) // (self.row_bytes + 8)))
        os.ftruncate(self._file, _n_bytes(n, self.row_bytes))
        os.posix_fallocate(self._file, 0, _n_bytes(n, 0))  # marks are written by the mapping
        os.pwrite(self._file, n.to_bytes(8, "little") + head, 0)
        return n

    def _mapped(self, ahead: MappedAhead | None) -> UInt8[np.ndarray, " bytes"]:
        mapping = None
        if ahead is not None:
            mapping = ahead.taken(self._file, self._n_bytes)
            self._pinned = ahead.pinned
        return np.frombuffer(mapping or mmap.mmap(self._file, self._n_bytes), np.uint8)

    def put(
        self,
        places: Int[np.ndarray, " n"],
        marks: UInt64[np.ndarray, " n"],
        parts: Sequence[Shaped[np.ndarray, "n ..."]],
    ) -> None:
        """Keeps a token's KV in each of ``places``: of each of ``parts`` a row. Where the file has no memory
        left that is an error, which a plain write to the mapping would end the process for."""
        self._check()
        if not len(places):
            return
        parts = [np.ascontiguousarray(part).reshape(len(places), -1).view(np.uint8) for part in parts]
        which = _in_a_row(places)
        with self._putting:
            self._check()
            self.marks[which] = 0
            n = self._n_rows_at_once
            pieces = [slice(first, first + n) for first in range(0, len(places), n)]
            if self._writers is not None and len(parts) == 1:
                self._writers.run([partial(self._write_rows, places[x], parts[0][x], True) for x in pieces])
            else:
                for x in pieces:
                    self._write_rows(places[x], self._joined([part[x] for part in parts]))
            self.marks[which] = marks
        self.changed.set()

    def _joined(self, parts: Sequence[UInt8[np.ndarray, "n _"]]) -> UInt8[np.ndarray, "n row_bytes"]:
        """In memory that the next call uses again."""
        if len(parts) == 1:
            return parts[0]
        rows, at = self._rows[: len(parts[0])], 0
        for part in parts:
            rows[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        return rows

    def _write_rows(
        self, places: Int[np.ndarray, " n"], rows: UInt8[np.ndarray, "n row_bytes"], by_mapping: bool = False
    ) -> None:
        """``by_mapping``: for one of several threads."""
        for first, stop in runs(places):
            place, run = int(places[first]), rows[first:stop]
            to = self._data[place : place + len(run)]
            if by_mapping and PopulatingWriters.populate(to):
                np.copyto(to, run)
            else:
                at = _n_bytes(self.n_places, 0) + place * self.row_bytes
                _write_all(self._file, memoryview(run.data).cast("B"), at)

    def copied(self, places: Int[np.ndarray, " n"]) -> Copied:
        """What is at those of ``places`` that hold something, and that nobody wrote to meanwhile; in any
        thread."""
        places = places[self.marks[places] != 0]  # others are not looked at, as by `rows_at`
        which = _in_a_row(places)
        marks = self.marks[which].copy()
        rows = self._data[which].copy()
        # A writer wipes the mark first. A mark that comes again is the same KV's.
        is_whole = (marks != 0) & (self.marks[which] == marks)
        return Copied(*(x if is_whole.all() else x[is_whole] for x in (places, marks, rows)))

    def rows_at(self, places: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n row_bytes"]:
        """All parts that `put` was given, one after the other, once they are written; to be read before more
        is put. Zeros of what is not kept."""
        self.wait_for(places)
        which = _in_a_row(places)
        is_there = self.marks[which] != 0
        if is_there.all():
            found: np.ndarray = self._data[which]
            return found
        # A place that nobody wrote to is not looked at: where memory is full that would end the process.
        found = np.zeros((len(places), self.row_bytes), np.uint8)
        found[is_there] = self._data[places[is_there]]
        return found

    def read(self, places: Int[np.ndarray, " n"], out: UInt8[np.ndarray, "m row_bytes"]) -> None:
        """As `rows_at`, into the first rows of ``out`` and without waiting; in any thread. Into memory that
        is used again, since a new array's pages are touched for the first time: that takes longer than the
        copy."""
        self._check_places(places)
        # Any other mode than "raise" writes to `out` itself, and not to a copy of it.
        np.take(self._data, places, axis=0, out=out[: len(places)], mode="clip")

    def is_pinned(self, places: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which rows a device copies by itself."""
        self._check_places(places)
        return np.zeros(len(places), bool) if self._pinned is None else self._pinned.has(places)

    def _check_places(self, places: Int[np.ndarray, " n"]) -> None:
        if len(places) and not 0 <= places.min() <= places.max() < self.n_places:
            raise IndexError(f"places {places} must be within 0 … {self.n_places - 1}")

    def parts(self, places: Int[np.ndarray, " n"]) -> Iterator[tuple[int, int]]:
        """(address, bytes) of these rows, which are pinned, in their order; to be read as by `read`."""
        assert self._pinned is not None
        return self._pinned.parts(places)

    def later(
        self,
        places: Int[np.ndarray, " n"],
        marks: UInt64[np.ndarray, " n"],
        parts: Callable[[], Sequence[Shaped[np.ndarray, "n ..."]]],
    ) -> None:
        """Has a thread call ``parts``, which waits for a device, and `put` what it gives; in the order of the
        calls. Does not wait: whoever calls looks at `n_behind` first."""
        self._check()
        self._n_begun += len(places)
        self._due[places] = self._n_begun
        self._waiting.put(_Later(places, marks, parts))

    @property
    def n_behind(self) -> int:
        """Tokens that `later` was called for and that are neither written yet nor lost."""
        return self._n_begun - self._n_written

    def wait_for(self, places: Int[np.ndarray, " n"]) -> None:
        """Until what is to be at ``places`` is written. Raises what has made writing fail."""
        self._wait_until(int(np.take(self._due, places, mode="clip").max(initial=0)))

    def take_lost(self) -> Lost:
        """What `later` was to keep and there was no memory for, since this was asked last."""
        return Lost.joined(self._lost.get() for _ in range(self._lost.qsize()))

    def flush(self) -> None:
        """Waits for what is being written. Raises what has made it fail."""
        self._wait_until(self._n_begun)

    def _wait_until(self, n_written: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._n_written >= n_written)
        self._check()

    def end_with(self, owner: object) -> None:
        """It is closed once ``owner`` is gone, which is not waited for."""
        # Of what was closed before that nothing but the queue is left.
        weakref.finalize(owner, self._waiting.put, None).atexit = False

    def close(self) -> None:
        """Nothing is written any more once all is that `later` was called for; what is there stays."""
        self._waiting.put(None)
        self._thread.join()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _write(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            if self._failed is None:
                self._try(partial(self._put_or_lose, waiting))
            # Also of what has failed: whoever waits until less is behind would never hear of it.
            self._try(partial(self.on_written, self._n_written + len(waiting.places)))
            with self._progress:
                self._n_written += len(waiting.places)
                self._progress.notify_all()
        with self._putting:  # another thread may be at `put`
            self._failed = self._failed or ValueError("what kept KV is closed")
            if self._writers is not None:
                self._writers.close()
            if self._pinned is not None:
                self._try(self._pinned.release)
            os.close(self._file)

    def _put_or_lose(self, waiting: _Later) -> None:
        try:
            self.put(waiting.places, waiting.marks, waiting.parts())
        except Exception as error:  # noqa: BLE001 (raised again if it says anything but that)
            self._say_full(
                error,
                len(waiting.places),
                "They are not kept, and a recovery computes them again; "
                "jaxlamina:kept_kv_lost_tokens_total counts such tokens",
            )
            self._lost.put(Lost(waiting.places, waiting.marks))

    def _say_full(self, error: BaseException, n: int, so: str) -> None:
        """Once, since later there is a metric. Raises what says something else."""
        if not is_full(error):
            raise error
        if not self._is_full:
            self._is_full = True
            wanted = f"{n} tokens, {n * self.row_bytes / 2**20:.1f} MiB"
            _say_full(f"{self._where} has no room for {wanted} ({_words(error)}). {so}")

    def _try(self, what: Callable[[], object]) -> None:
        try:
            what()
        except BaseException as error:  # noqa: BLE001 (the next one that keeps or finds hears of it)
            self._failed = self._failed or error


_writers: weakref.WeakValueDictionary[Path, KeptKV] = weakref.WeakValueDictionary()


@atexit.register  # before JAX's own end, since it was imported earlier
def flush_all() -> None:
    """Waits for what is being written that another process may go on with."""
    for kept in list(_writers.values()):
        with suppress(Exception):  # whoever kept it has heard of it, or wants no more of it
            kept.flush()


def _say_full(what: str) -> None:
    _log.warning(
        "the memory for kept KV is full: %s. The job goes on. Give fewer kept_kv_slots, or more memory there "
        "(docker run --shm-size)",
        what,
    )


def _words(error: BaseException) -> str:
    """Why, in a line."""
    said = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
    return said or type(error).__name__


def _write_all(file: int, left: memoryview, at: int) -> None:
    while left:
        n = os.pwrite(file, left, at)
        left, at = left[n:], at + n


def places_kept(path: Path, row_bytes: int, identity: str) -> int:
    """How many places an earlier process's file has; 0 where there is none of the same rows and
    ``identity``."""
    if not path.exists():
        return 0
    file = _open(path)
    try:
        return _places_of(file, _head(row_bytes, identity), row_bytes) or 0
    finally:
        os.close(file)


def _n_bytes(n_places: int, row_bytes: int) -> int:
    """Of a file: what it is, a mark each, and a row each."""
    return _HEAD_BYTES + n_places * (8 + row_bytes)


def _head(row_bytes: int, identity: str) -> bytes:
    """On a disk a mark may be there after a power loss, and its row not. So each start of the host has files
    of its own."""
    return _digest(identity, str(row_bytes), boot_id())


class _Index(msgspec.Struct):
    """What an index begins with: whose it is, and each keeper's name and places, in the order of the
    records. Those that have gone come last: their files are still there when they come back."""

    digest: bytes
    keys: tuple[int, int]
    keepers: list[tuple[str, int]]


def kept_prefixes(wanted: KeptWanted, found: KeptFound) -> KeptPrefixes:
    """What the keepers have, as it was written down where they keep it; what is not both there and written
    down is nothing. Keepers may have come and gone since, and those that have gone may come back. Of another
    kind of KV their files on this host are removed."""
    n = sum(found.capacities)
    if wanted.n_places is not None and n < wanted.n_places:
        _log.warning(
            "kept_kv_slots=%d: %d tokens are kept, since memory was short, or there were other workers, when "
            "that began: another number, or another folder, begins anew",
            wanted.n_places,
            n,
        )
    if not len(found.marks):
        return KeptPrefixes(found.capacities)
    path = None if wanted.folder is None else Path(wanted.folder, "index")
    file = _open(path)
    try:
        index, records = _index(file, path, found)
    except (OSError, MemoryError) as error:
        if not is_full(error):
            raise
        mib = len(found.marks) * RECORD.itemsize / 2**20
        _say_full(
            f"{path or 'the index'} has no room for {mib:.1f} MiB ({_words(error)}). What is kept is not "
            "found after the end of this process: a recovery computes it again"
        )
        return KeptPrefixes(found.capacities)
    return KeptPrefixes(found.capacities, records[: len(found.marks)], index.keys, found.marks)


def _index(file: int, path: Path | None, found: KeptFound) -> tuple[_Index, np.ndarray]:
    """Of these keepers, and a mapping of its records; ``file`` is closed."""
    keepers = list(zip(found.names, found.capacities, strict=True))
    with os.fdopen(file, "r+b", closefd=True):
        before, old = _read_index(file)
        if path is not None and before is not None and before.digest != _digest(found.identity):
            _remove_gone(path.parent, before, found.names)
            before, old = None, {}
        keepers += [keeper for keeper in old if keeper[0] not in found.names]
        index = _Index(_digest(found.identity), new_keys() if before is None else before.keys, keepers)
        if before != index:
            records = np.concatenate([old.get(keeper, np.zeros(keeper[1], RECORD)) for keeper in keepers])
            os.ftruncate(file, 0)
            said = msgspec.msgpack.encode(index)
            head = len(said).to_bytes(4, "little") + said
            _write_all(file, memoryview(head.ljust(_HEAD_BYTES, b"\0") + records.tobytes()), 0)
        whole = np.frombuffer(mmap.mmap(file, 0), np.uint8)
    return index, whole[_HEAD_BYTES:].view(RECORD)


def _remove_gone(folder: Path, index: _Index, names: Sequence[str]) -> None:
    now = TOGETHER.join(names).split(TOGETHER)
    for name in TOGETHER.join(name for name, _ in index.keepers).split(TOGETHER):
        for kind in () if name in now else (".kv", ".copy.kv", "-stage*.kv"):
            for path in folder.glob(name + kind):
                path.unlink(missing_ok=True)


def _read_index(file: int) -> tuple[_Index | None, dict[tuple[str, int], np.ndarray]]:
    """An index, and each of its keepers' records; nothing where there is none."""
    head = os.pread(file, _HEAD_BYTES, 0)
    try:
        found = msgspec.msgpack.decode(head[4 : 4 + int.from_bytes(head[:4], "little")], type=_Index)
    except msgspec.MsgspecError:
        return None, {}
    n = sum(n for _, n in found.keepers)
    records = np.frombuffer(os.pread(file, n * RECORD.itemsize, _HEAD_BYTES), np.uint8)
    if len(records) != n * RECORD.itemsize:
        return None, {}
    parts, at = {}, 0
    for name, n in found.keepers:
        parts[name, n] = records.view(RECORD)[at : at + n]
        at += n
    return found, parts


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b("\n".join((_VERSION, *parts)).encode(), digest_size=32).digest()


def _in_a_row(places: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"] | slice:
    """Places that follow one another as a slice, which is a view of what they have."""
    first, n = (int(places[0]), len(places)) if len(places) else (0, 0)
    return slice(first, first + n) if (places == np.arange(first, first + n)).all() else places


def _open(path: Path | None) -> int:
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"KV cannot be kept in {path}: {error.strerror}; give another folder") from None
    file, name = tempfile.mkstemp(prefix="jaxlamina-kept-", dir=memory_folder())
    os.unlink(name)
    return file


def _places_of(file: int, head: bytes, row_bytes: int) -> int | None:
    """How many places a file of an earlier process has, if it is of the same kind."""
    first = os.pread(file, _HEAD_BYTES, 0)
    if first[8:40] != head:
        return None
    n = int.from_bytes(first[:8], "little")
    is_whole = os.fstat(file).st_size == _n_bytes(n, row_bytes)
    return n if n and is_whole else None
