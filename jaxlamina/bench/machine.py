"""What a measurement was taken on: processor, versions, date, load, how fast memory is read and how fast
matrices are multiplied.

Knows nothing of models or peers.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxlamina.bench.rounds import best_rate


@dataclass(frozen=True)
class Machine:
    """Where and when. `load` is the one-minute load average before the run: above about 0.5 somebody else was
    busy."""

    device: str
    n_cores: int
    memory_gib: float
    load: float
    date: str
    versions: dict[str, str]

    def line(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.device}, {self.n_cores} cores, {self.memory_gib:.0f} GiB; {versions}; {self.date}"

    def busy(self) -> str | None:
        """One line of warning when others were using the machine, else None."""
        if self.load <= 0.5:
            return None
        return (
            f"load average was {self.load:.1f} before the run: "
            "other processes were busy, so take these times with care or measure again"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(packages: Iterable[str] = ()) -> Machine:
    """This machine now, with the versions of jaxlamina, Python, JAX and of those `packages` that are
    installed."""
    versions = {"jaxlamina": version_of("jaxlamina") or "source", "python": platform.python_version()}
    for package in ("jax", "jaxlib", *packages):
        found = version_of(package)
        if found is not None:
            versions[package] = found
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return Machine(
        device=_processor(),
        n_cores=n_cores(),
        memory_gib=round(pages / 2**30, 1),
        load=round(os.getloadavg()[0], 2),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions,
    )


def n_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def version_of(package: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class ReadBandwidth:
    """How fast all cores together read memory; `best` of every `measure` so far.

    One pass of integer sums over `size_bytes`, a few pieces a core: what a decode step does with its weights,
    if it did nothing else. Not below 256 MiB, or a large last-level cache would answer instead of the memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self._n = n_cores()
        words = max(size_bytes, 256 * 2**20) // 8
        self._pieces = np.array_split(np.ones(words, np.int64), 4 * self._n)
        self._n_bytes = 8 * words
        self.best = 0.0

    def measure(self, passes: int = 3) -> float:
        """Bytes per second of the best of `passes`; raises `best` if it is higher."""
        self.best = max(self.best, self.now(passes))
        return self.best

    def now(self, passes: int) -> float:
        """Bytes per second of the best of `passes`, whatever was measured before."""
        with ThreadPoolExecutor(self._n) as pool:
            list(pool.map(np.sum, self._pieces))
            return best_rate(lambda: list(pool.map(np.sum, self._pieces)), self._n_bytes, passes)


class MatmulRate:
    """How fast all cores together multiply large float32 matrices (numpy's BLAS); `best` of every `measure`
    so far."""

    def __init__(self, size: int = 1536) -> None:
        self._a = np.ones((size, size), np.float32)
        self.best = 0.0

    def measure(self, passes: int = 3) -> float:
        """Floating-point operations per second of the best of `passes`; raises `best` if it is higher."""
        out = self._a @ self._a
        rate = best_rate(lambda: np.matmul(self._a, self._a, out=out), 2 * len(self._a) ** 3, passes)
        self.best = max(self.best, rate)
        return self.best
