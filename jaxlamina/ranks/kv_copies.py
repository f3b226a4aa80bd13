"""A second copy of kept KV, on another rank's host: there after the loss of the host that it was kept on.

    rank that keeps                                rank on another host
    KeptKV ── Copying (a thread, behind the steps) ──TCP── CopyHolder ── KeptKV, "worker0.copy.kv"

`Copying` brings the copy's marks to what the own file's are: it compares all of both whenever something was
put, and sends the rows that differ. So it need not be told what to send, has nothing that could fill up, and
no step waits for it; what a place held in between is never sent. When it begins, places that hold nothing in
the own file come from the copy: all of them where the host is a new one. A row is written to the copy like to
the own file, its mark last. So neither has a mark whose row it has not, whoever is killed when.

The two ranks know each other by the job's secret, as ranks and rank 0 do, and seal what they say. Which rank
holds whose copy is `jaxlamina.kv.copies`'s. Knows rows and marks; no token, no device, no step.
"""

from __future__ import annotations

import hmac
import os
import queue
import re
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
from jaxtyping import UInt64

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from jaxlamina.job.control.client import hello_of
from jaxlamina.job.control.connection import Connection, ConnectionEnded
from jaxlamina.job.control.door import Door, Guest
from jaxlamina.job.control.faults import LAST_WORDS_S
from jaxlamina.job.control.frames import Frame
from jaxlamina.job.control.handshake import introduce
from jaxlamina.job.control.seals import Seals
from jaxlamina.job.control.server import refused
from jaxlamina.job.control.sockets import address_text, connect, listen, parse_address
from jaxlamina.job.group import Group
from jaxlamina.job.secret import secret_of
from jaxlamina.job.tls import JobTls, tls_of
from jaxlamina.kv.copies import copy_holders
from jaxlamina.kv.kept import KeptWanted
from jaxlamina.process import kept_folders
from jaxlamina.workers.capacity import EXPLICIT_FRACTION
from jaxlamina.workers.kept_kv import KeptKV, places_kept
from jaxlamina.workers.kv_pools import KVPools

_PIECE_BYTES = 2**20  # of rows in a message, or one row: between two a step gets its turn
_LARGEST_BYTES = 2**28  # of a message, as of the marks of 32 million tokens
_CONNECT_S, _ANSWER_S = 10.0, 60.0
_NAME = re.compile(r"[a-z0-9-]{1,64}")


class CopyHolder:
    """Holds copies in ``folder`` for ranks that connect to ``address``, until `close`.

    ``host``: an address of this host to listen at. ``secret``: the job's; ``UserError`` where it has none,
    since whoever connects could write KV then. ``n_sharing``: as of `KeptKV`.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        secret: bytes,
        heartbeat_s: float,
        n_sharing: int,
        tls: JobTls | None = None,
    ) -> None:
        self._secret = _of_copies(secret)
        self._folder, self._heartbeat_s, self._n_sharing = folder, heartbeat_s, n_sharing
        self._lock = threading.Lock()
        self._guests: dict[str, _Keeper] = {}  # by the name of what they have open
        self._connections: list[Connection] = []
        listener = listen(address_text((host, 0)))
        self.port: int = listener.getsockname()[1]
        self.address = address_text(listener.getsockname())
        self._door = Door(listener, self._hear, lambda _: None, tls)

    def close(self) -> None:
        """What is held stays in its files."""
        self._door.close()
        self._door.wait_closed()
        for connection in self._connections:
            connection.shut()
            connection.wait_ended(LAST_WORDS_S)
        with self._lock:
            for name in list(self._guests):
                self._forget(name)

    def _hear(self, guest: Guest, claimed: m.AnyHello, frame: Frame) -> bytes | None:
        seals = Seals.proven(self._secret, guest.nonce, claimed.nonce, frame, lambda: 0)
        if claimed.protocol != m.PROTOCOL or seals is None:
            return refused("this is a rank of another job, or of another version", None)
        keeper = _Keeper(self)
        guest.reader.largest_bytes = _LARGEST_BYTES
        connection = keeper.connection = Connection(
            guest.sock,
            guest.reader,
            seals,
            heartbeat_s=self._heartbeat_s,
            on_message=keeper.take,
            on_end=keeper.ended,
        )
        self._connections.append(connection)
        with suppress(ConnectionEnded):  # its reader says why
            connection.send(m.Admitted(), LAST_WORDS_S)
        threading.Thread(target=connection.run, name="kept KV copies", daemon=True).start()
        return None

    def open(self, keeper: _Keeper, asked: m.OpenCopy) -> UInt64[np.ndarray, " places"]:
        """The copy's marks. A rank that has started again takes its copy from its earlier connection."""
        if not _NAME.fullmatch(asked.name) or asked.row_bytes < 1 or (asked.n_places or 1) < 1:
            raise ValueError("no copy is called so, or is of such a size")
        path = self._folder / f"{asked.name}.copy.kv"
        with self._lock:
            self._forget(asked.name, keeper)
            n = places_kept(path, asked.row_bytes, asked.identity)
            if asked.n_places is not None and n != asked.n_places:
                n = asked.n_places
                path.unlink(missing_ok=True)
            if n:
                how = asked.row_bytes, asked.identity, n, self._n_sharing
                kept = KeptKV(path, *how, fraction=EXPLICIT_FRACTION)
                if kept.n_places == n:
                    self._guests[asked.name], keeper.kept = keeper, kept
                    return kept.marks
                kept.close()  # there is not the memory
                path.unlink()
            return np.empty(0, np.uint64)

    def ended(self, keeper: _Keeper) -> None:
        with self._lock:
            for name in [name for name, other in self._guests.items() if other is keeper]:
                self._forget(name)

    def _forget(self, name: str, asks: _Keeper | None = None) -> None:
        keeper = self._guests.pop(name, None)
        if keeper is None:
            return
        if keeper is not asks:
            keeper.connection.shut()
        keeper.drop()


class _Keeper:
    """A rank whose KV this process holds a copy of, as long as it is connected."""

    def __init__(self, holder: CopyHolder) -> None:
        self._holder = holder
        self._lock = threading.Lock()
        self.connection: Connection
        self.kept: KeptKV | None = None

    def take(self, message: m.Message) -> None:
        """In the connection's thread. What cannot be ends the connection."""
        try:
            answer = self._answer(message)
            if answer is not None:
                self.connection.send(answer)
        except ConnectionEnded:
            pass  # the reader says why
        except (ValueError, IndexError, OSError, UserError) as error:
            _note(f"a copy of another rank's KV is not kept any more: {error}")
            self.connection.shut()

    def _answer(self, message: m.Message) -> m.Message | None:
        if isinstance(message, m.OpenCopy):
            return m.KeptMarks(m.Array.of(self._holder.open(self, message)))
        with self._lock:
            if self.kept is None:
                raise ValueError(f"{type(message).__name__} came, and no copy is open")
            if isinstance(message, m.PutCopy):
                places, marks, rows = (x.numpy() for x in (message.places, message.marks, message.rows))
                self._check(places)
                shapes = marks.dtype == np.uint64, rows.dtype == np.uint8, marks.shape == places.shape
                if not all(shapes) or rows.shape != (len(places), self.kept.row_bytes):
                    raise ValueError("rows came that are not a token's KV each")
                self.kept.put(places, marks, [rows])
                return None
            if isinstance(message, m.TakeKept):
                places = message.places.numpy()
                self._check(places)
                if len(places) * self.kept.row_bytes > _LARGEST_BYTES:
                    raise ValueError("more rows are asked for than go into a message")
                return m.Rows((m.Array.of(self.kept.rows_at(places)),))
        raise ValueError(f"{type(message).__name__} is not for one that holds a copy")

    def _check(self, places: np.ndarray) -> None:
        assert self.kept is not None
        is_of_places = places.dtype == np.int64 and places.ndim == 1
        if not is_of_places or len(places) and not 0 <= places.min() <= places.max() < self.kept.n_places:
            raise ValueError("a place came that the copy has not")

    def drop(self) -> None:
        with self._lock:  # what it is writing is written
            kept, self.kept = self.kept, None
        if kept is not None:
            kept.close()

    def ended(self, _: str) -> None:
        self._holder.ended(self)


class Copying:
    """The other end: `find` what a copy has, then `begin`, with the own file. ``who``: the rank that holds
    it, in words. ``UserError`` where it is not reached at ``address``."""

    def __init__(
        self,
        address: str,
        rank: int,
        secret: bytes,
        heartbeat_s: float,
        who: str,
        wait_s: float = _CONNECT_S,
        tls: JobTls | None = None,
    ) -> None:
        self._who, self._rank = f"{who} at {address}", rank
        self._inbox: queue.SimpleQueue[m.Message | None] = queue.SimpleQueue()
        self._why = ""
        self._is_closed = False
        self._kept: KeptKV | None = None
        self._theirs = np.empty(0, np.uint64)  # marks
        self._thread = threading.Thread(target=self._run, name="copying kept KV", daemon=True)
        sock: socket.socket = connect(address, wait_s, who)
        own = hello_of(rank, {}, {}), _of_copies(secret)
        sock, reader, seals = introduce(sock, *own, wait_s, self._who, tls)
        reader.largest_bytes = _LARGEST_BYTES
        self._connection = Connection(
            sock,
            reader,
            seals,
            heartbeat_s=heartbeat_s,
            on_message=self._inbox.put,
            on_end=self._ended,
        )
        threading.Thread(target=self._connection.run, name="kept KV copy", daemon=True).start()

    def find(self, name: str, identity: str, row_bytes: int) -> int:
        """How many places the copy ``name`` has; 0: there is none. ``UserError`` where it is not said."""
        self._asked = name, identity, row_bytes
        self._theirs = self._opened(None)
        return len(self._theirs)

    def begin(self, kept: KeptKV) -> None:
        """Takes what ``kept`` has not from the copy, and has all that is put from now on copied.
        ``UserError`` where that ends early, or there is no room for a copy."""
        if len(self._theirs) != kept.n_places:
            self._theirs = self._opened(kept.n_places)
            if not len(self._theirs):
                raise UserError(f"{self._who} has no memory for a copy: give fewer kept_kv_slots")
        missing = np.flatnonzero((kept.marks == 0) & (self._theirs != 0))
        for places in self._pieces(missing):
            [rows] = self._ask(m.TakeKept(m.Array.of(places)), m.Rows).rows
            if rows.dtype != "uint8" or rows.shape != (len(places), kept.row_bytes):
                raise UserError(f"{self._who} sent what is not the KV that was asked for")
            try:
                kept.put(places, self._theirs[places], [rows.numpy()])
            except OSError as error:
                raise UserError(f"no memory is left for what it has ({error.strerror})") from None
        self._kept = kept
        kept.changed.set()  # of earlier processes it may have what the copy has not
        self._thread.start()

    def close(self) -> None:
        """Nothing is copied any more; what is there stays."""
        self._is_closed = True
        self._connection.shut()
        if self._kept is not None:
            self._kept.changed.set()
            self._thread.join()

    def _opened(self, n_places: int | None) -> UInt64[np.ndarray, " places"]:
        found = self._ask(m.OpenCopy(*self._asked, n_places), m.KeptMarks).marks
        if found.dtype != "uint64" or len(found.shape) != 1:
            raise UserError(f"{self._who} sent marks that are none")
        return found.numpy().copy()

    def _run(self) -> None:
        kept = self._kept
        assert kept is not None
        try:
            while not self._is_closed:
                kept.changed.wait()
                kept.changed.clear()
                for places in self._pieces(self._to_send(kept)):
                    places, marks, rows = kept.copied(places)
                    self._connection.send(m.PutCopy(*map(m.Array.of, (places, marks, rows))))
                    self._theirs[places] = marks
        except ConnectionEnded as error:
            if not self._is_closed:
                _note(f"rank {self._rank}'s KV is not copied any more: {self._who} {self._why or error}")

    def _to_send(self, kept: KeptKV) -> np.ndarray:
        marks = kept.marks
        return np.flatnonzero((marks != self._theirs) & (marks != 0))

    def _pieces(self, places: np.ndarray) -> Iterator[np.ndarray]:
        _, _, row_bytes = self._asked
        n = max(1, _PIECE_BYTES // row_bytes)
        return (places[i : i + n] for i in range(0, len(places), n))

    def _ask(self, message: m.Message, kind: type[m.M]) -> m.M:
        try:
            self._connection.send(message, _ANSWER_S)
            answer = self._inbox.get(timeout=_ANSWER_S)
        except (ConnectionEnded, queue.Empty) as error:
            raise UserError(f"{self._who} {self._why or str(error) or 'did not answer'}") from error
        if not isinstance(answer, kind):
            raise UserError(f"{self._who} {self._why or 'sent something else than what was asked for'}")
        return answer

    def _ended(self, why: str) -> None:
        self._why = why
        self._inbox.put(None)


class RankCopies:
    """What a rank has to do with copies: the one of its own KV, and those of others' that it holds.

    ``host``: an address of its host that others reach.
    """

    def __init__(self, cluster: Cluster, rank: int, host: str) -> None:
        self._cluster, self._rank, self._host = cluster, rank, host
        self._holder: CopyHolder | None = None
        self._copying: Copying | None = None

    def hold(self, folder: str, n_sharing: int) -> str:
        """The address at which this process holds others' copies from now on, as `m.CopiesAt` has it."""
        kept_folders.hold(Path(folder))
        if self._holder is not None:
            self._holder.close()
        how = secret_of(self._cluster, os.environ), self._cluster.heartbeat_s, n_sharing
        self._holder = CopyHolder(Path(folder), self._host, *how, tls_of(self._cluster))
        return self._holder.address if self._rank else f":{self._holder.port}"

    def open_kept(
        self, pools: KVPools, name: str, wanted: KeptWanted, copy_at: str | None
    ) -> UInt64[np.ndarray, " places"]:
        """As of `KVPools`, with a copy at an address. Where that is not to be had, KV is kept once."""
        if wanted.ahead:
            return pools.open_kept(name, wanted)
        if self._copying is not None:
            self._copying.close()
            self._copying = None
        if wanted.folder is not None:
            kept_folders.hold(Path(wanted.folder))
        n = 0
        if copy_at is not None:
            with self._noted():
                self._copying = self._reached(copy_at)
                n = self._copying.find(name, wanted.identity, pools.row_bytes)
        # A file that is made anew has as many places as the copy, or nothing could be found by its index.
        marks = pools.open_kept(name, wanted._replace(n_places=n) if n else wanted)
        if self._copying is not None:
            with self._noted():
                self._copying.begin(pools.kept)
        return marks

    def _reached(self, copy_at: str) -> Copying:
        if copy_at.startswith(":"):
            copy_at = address_text((parse_address(self._cluster.control)[0], int(copy_at[1:])))
        how = secret_of(self._cluster, os.environ), self._cluster.heartbeat_s, "the rank with the copy"
        return Copying(copy_at, self._rank, *how, tls=tls_of(self._cluster))

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            _note(f"rank {self._rank}'s KV is kept without a copy: {error}")
            if self._copying is not None:
                self._copying.close()
                self._copying = None


def copies_at(
    group: Group, own: RankCopies, keepers: Sequence[int], folder: str, n_sharing: int
) -> dict[int, str]:
    """Has ranks hold copies, as rank 0; for each of ``keepers`` its copy's address, if there is to be one."""
    others = [rank for rank in range(group.cluster.n_ranks) if rank not in keepers]
    holders = copy_holders(group.control.hosts, keepers, others)
    if not holders:
        _note(f"kv_replicas={group.cluster.kv_replicas}, and no rank is on another host: KV is kept once")
    addresses = {}
    for rank in sorted(set(holders.values())):
        if rank == 0:
            addresses[rank] = own.hold(folder, n_sharing)
        else:
            group.send(rank, m.HoldCopies(folder, n_sharing))
            addresses[rank] = group.receive(rank, m.CopiesAt).address
    return {rank: addresses[holder] for rank, holder in holders.items()}


def _of_copies(secret: bytes) -> bytes:
    """Another one than the control channel's, so that neither can be taken for the other."""
    if not secret:
        raise UserError(
            "kv_replicas=1 needs a secret that all ranks know, and this job has none: give "
            "job_secret_file, or start the ranks by jaxlamina launch"
        )
    return hmac.digest(secret, b"jaxlamina kept KV copies", sha256)


def _note(line: str) -> None:
    print(f"note: {line}", file=sys.stderr, flush=True)
