"""Folders in memory for KV that outlives a job: one of a supervisor, on each host that has ranks.

On its own host a supervisor owns its folder for as long as it lives. On others the ranks do, so there the
folder is nobody's between two starts of the job. At its end a supervisor removes the folder, and has `main`
run on the other hosts. What one leaves that was killed, or a host that could not be reached, is found by the
next supervisor of the same journal, and is cleared away by any other: on its own host at once, on others by
ranks once it is an hour old. Knows files; nothing of KV.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jaxlamina.errors import UserError
from jaxlamina.process.host_memory import memory_folder
from jaxlamina.process.owned_folder import open_lock, owned_folder, remove_left

if TYPE_CHECKING:
    from jaxlamina.job.cluster import Cluster

OWNED = "JAXLAMINA_KEPT_KV_FOLDER"
"""The environment's variable by which a supervisor says to its job which folder is its own."""
_KIND = "jaxlamina-kv"
_LEFT_S = 3600.0  # since its lock was opened: by then a job that is down has been given up
_held: dict[Path, TextIO] = {}  # locks, by folder
_alone: weakref.WeakValueDictionary[Path, HeldAlone] = weakref.WeakValueDictionary()
_ENDING_S = 10.0  # that a process which is ending is waited for
_LOOK_S = 0.02


@contextmanager
def kept_folder(journal: Path | None) -> Iterator[Path]:
    """The folder, owned; it is removed at the end of the ``with``. Of the same ``journal`` it is always the
    same."""
    name = None
    if journal is not None:
        name = hashlib.blake2b(os.fsencode(journal.resolve()), digest_size=8).hexdigest()
    with owned_folder(memory_folder(), _KIND, name) as own:
        yield own


def hold(folder: Path) -> None:
    """Has a rank's host keep a supervisor's ``folder`` for as long as this process lives; of any other folder
    nothing. ``UserError`` for one that is not this user's."""
    if not _is_ours(folder) or folder in _held:
        return
    _held[folder] = lock = open_lock(folder)
    with suppress(BlockingIOError):  # the supervisor has it
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    remove_left(folder.parent, _KIND, folder, _LEFT_S)


class HeldAlone:
    """A lock that is held for as long as anything refers to this."""

    def __init__(self, lock: int) -> None:
        weakref.finalize(self, os.close, lock).atexit = False  # the kernel does that, after the last write


def hold_alone(folder: Path) -> HeldAlone | None:
    """Has one model of this process alone keep KV in a ``folder`` of the user's; None in a supervisor's own,
    in which only its job does. One that is just ending is waited for. ``UserError`` where another one has it,
    and where there can be none."""
    if os.environ.get(OWNED) == str(folder):
        return None
    if _is_ours(folder):
        raise UserError(
            f"kept_kv_folder={folder} is called as servers' own folders are, which are cleared away: give "
            f"one with a name that does not begin with {_KIND}-"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(
            f"kept_kv_folder={folder} cannot be used: {error.strerror}; give another one"
        ) from None
    held = HeldAlone(lock)
    if held_alone(folder) is not None:
        gc.collect()  # a model that is gone may not be collected yet
    until = time.monotonic() + _ENDING_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                raise UserError(
                    f"another process, or another model of this one, keeps KV in kept_kv_folder={folder}: "
                    "give this one a folder of its own, or end the other"
                ) from None
            time.sleep(_LOOK_S)
    _alone[folder.resolve()] = held
    return held


def held_alone(folder: Path) -> HeldAlone | None:
    """What `hold_alone` gave, if it is still held."""
    return _alone.get(folder.resolve())


def main(cluster: Cluster, rank: int) -> int:
    """Run as each rank of a job that does nothing else (`launch.local --module`): removes the folder of a
    supervisor that has ended."""
    del rank
    folder = Path(cluster.kept_kv_folder or "")
    if _is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _is_ours(folder: Path) -> bool:
    return folder.name.startswith(f"{_KIND}-")
