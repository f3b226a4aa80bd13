"""Whether a process has ended, which Linux says before it has taken the process away.

A process that is killed runs nothing any more, and stays for as long as the kernel frees its memory: a
second or longer where it has a GPU or some gigabytes. Until then it may hold memory, ports and locks, and
`waitpid` does not know of its end. Where /proc does not say all of this, nothing has ended here, and
`waitpid` is what is left.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

# Of include/linux/sched.h: set at the begin of a thread's end, and where a signal is the cause.
_EXITING, _SIGNALED = 0x4, 0x400


class _Stat(NamedTuple):
    """What /proc says of a process or thread: ``status`` as `waitpid` gives it, 0 until it is known;
    ``began``: the kernel's ticks."""

    is_zombie: bool
    flags: int
    began: int
    status: int

    @property
    def runs(self) -> bool:
        return not (self.is_zombie or self.flags & _EXITING)


def began(pid: int) -> int | None:
    """When a process has begun, which tells it from a later one of the same number; None: nobody says."""
    found = _stat(Path(f"/proc/{pid}/stat"))
    return None if found is None else found.began


def is_gone(pid: int, since: int | None) -> bool:
    """Whether the process that began at ``since`` (None: of any) is not there any more, by what /proc says.
    Where it cannot be read, as without files or memory, the process may be there."""
    try:
        Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, MemoryError):
        return False
    now = began(pid)
    return None not in (since, now) and now != since


def exit_code(pid: int, since: int | None) -> int | None:
    """The code, as of `subprocess.Popen`, of the process that began at ``since``, once none of its threads
    runs a program any more; None: one does, or nobody says."""
    found = _stat(Path(f"/proc/{pid}/stat"))
    if found is None or found.runs or found.began != since:
        return None
    if not found.status and (found.flags & _SIGNALED or not found.is_zombie):
        return None  # the code is not there yet, or not for us to see
    try:
        threads = [_stat(path / "stat") for path in Path(f"/proc/{pid}/task").iterdir()]
    except (OSError, MemoryError):
        return None
    if any(thread is not None and thread.runs for thread in threads):
        return None
    return os.waitstatus_to_exitcode(found.status)


def code_of(process: subprocess.Popen[bytes], since: int | None) -> int | None:
    """As `exit_code`, of a child of this process, which it waits for if it is gone already."""
    code = process.poll()
    return exit_code(process.pid, since) if code is None else code


def _stat(path: Path) -> _Stat | None:
    try:
        words = path.read_text().rpartition(")")[2].split()
        return _Stat(words[0] in "ZX", int(words[6]), int(words[19]), int(words[49]))
    except (OSError, MemoryError, ValueError, IndexError):
        return None
