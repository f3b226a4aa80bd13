"""How much memory this process may still take of its host: what is available, its control groups' and its own
limit.

Knows Linux's files; nothing of devices or of what memory is wanted for.
"""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MEMINFO, _CGROUPS, _SELF = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self")


def host_free_bytes(proc: Path = _MEMINFO, cgroup: Path = _CGROUPS, own: Path = _SELF) -> int:
    """The least of: the host's available memory, what is left of each control group around this process
    (version 2 or 1; files that it has cached do not count as used), and what is left of RLIMIT_AS."""
    free = [*_available(proc), *_left_of_groups(cgroup, own), *_left_of_address_space(own)]
    if not free:  # no Linux: all there is, half of it taken for used
        free.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min(free))


def is_full(error: BaseException) -> bool:
    """Whether it says that there is no memory left: of this process, of a file's folder, or of JAX."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def memory_folder() -> Path:
    """Where files are in memory, or at least temporary."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def boot_id() -> str:
    """Of this start of the host; "" where that is not told."""
    return "".join(_lines(_BOOT_ID))


def _available(proc: Path) -> Iterator[int]:
    for line in _lines(proc):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _left_of_groups(cgroup: Path, own: Path) -> Iterator[int]:
    groups = {cgroup: ("memory.max", "memory.current", "inactive_file ")}
    v1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "
    groups[cgroup / "memory"] = v1
    for line in _lines(own / "cgroup"):
        _, controllers, path = line.split(":", 2)
        names, root = groups[cgroup], cgroup
        if "memory" in controllers.split(","):
            names, root = v1, cgroup / "memory"
        elif controllers:
            continue
        group = root / path.strip("/")
        while group != root and root in group.parents:
            groups[group] = names
            group = group.parent
    for folder, (limit, usage, cached) in groups.items():
        most, used = _lines(folder / limit), _lines(folder / usage)
        if most and used and most[0].isdecimal() and used[0].isdecimal():
            files = sum(int(x.split()[1]) for x in _lines(folder / "memory.stat") if x.startswith(cached))
            yield int(most[0]) - max(0, int(used[0]) - files)


def _left_of_address_space(own: Path) -> Iterator[int]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    sizes = _lines(own / "statm")
    if limit != resource.RLIM_INFINITY and sizes:
        yield limit - int(sizes[0].split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
