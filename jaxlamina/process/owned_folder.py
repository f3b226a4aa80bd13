"""A temporary folder of one process, which is removed at its end; or, where the process was killed, by the
next one that makes a folder of the same kind.

The owner holds a lock, and the kernel takes that back however the owner ends. Knows files alone.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from jaxlamina.errors import UserError

PIPES = "jaxlamina-pipes"
"""The kind of those that launchers make in memory."""
MPI_FILES = "jaxlamina-mpi"
"""The kind of those that launchers make for what mpirun keeps, among temporary files."""
_LOCK = "lock"
_NEW_S = 60.0  # until a folder has its lock


@contextmanager
def owned_folder(base: Path, kind: str, name: str | None = None) -> Iterator[Path]:
    """A folder below ``base`` that its user alone may enter, removed at the end of the ``with``. Those of the
    same ``kind`` and user whose owners are gone are removed now. The same ``name`` is the same folder: it is
    waited for until its owner is gone, and has then what that owner has left. ``OSError`` where there can be
    none, ``UserError`` where it is another user's."""
    own = base / f"{kind}-{os.getuid()}-{name or secrets.token_hex(6)}"
    with _locked(own):
        remove_left(base, kind, own)
        try:
            yield own
        finally:
            shutil.rmtree(own, ignore_errors=True)


def open_lock(folder: Path) -> TextIO:
    """The folder's lock, not held yet, and the folder, as by `make_own`."""
    make_own(folder)
    return open(folder / _LOCK, "w")


def make_own(folder: Path) -> None:
    """Makes a folder that this user alone may enter, if it is not there. ``UserError`` for another user's, or
    one that others may write to: who else may write to where it lies could have made it before us."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(f"{folder} is for files of this user, and is another's: remove it")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(f"{folder} is for files of this user, and others may write to it: remove it")


def remove_left(base: Path, kind: str, own: Path | None = None, left_s: float = 0.0) -> None:
    """Removes the folders of this kind and user below ``base``, but for ``own``, that nobody has locked,
    whose locks were opened ``left_s`` ago, or that have none and are older than a folder that is just
    made."""
    for other in base.glob(f"{kind}-{os.getuid()}-*"):
        if other != own:
            with suppress(OSError):
                _remove(other, left_s)


def _remove(folder: Path, left_s: float) -> None:
    lock = folder / _LOCK
    opened, left_s = (lock, left_s) if lock.exists() else (folder, _NEW_S)
    if time.time() - opened.stat().st_mtime < left_s:
        return
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> TextIO:
    """The folder's lock, held for as long as it is open."""
    while True:
        # The owner before may remove it between any two of these calls.
        with suppress(FileNotFoundError), ExitStack() as unless_ours:
            lock = unless_ours.enter_context(open_lock(folder))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / _LOCK)):
                unless_ours.pop_all()
                return lock
