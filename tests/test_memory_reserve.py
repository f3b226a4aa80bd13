"""The reserve of memory (`jaxlamina.process.memory_reserve`): in processes of its own, which get no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxlamina.process.memory_reserve import MemoryReserve

PROGRAM = """
import re, resource, sys
from pathlib import Path
from jaxlamina.process.memory_reserve import MemoryReserve

MiB = 2**20
reserve = MemoryReserve(16 * MiB) if sys.argv[1] == "reserve" else None
bytearray(20 * MiB)
size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
kept = []
try:
    kept = [bytearray(300_000) for _ in range(20)]  # as of sockets
    kept += [[str(i)] for i in range(20_000)]  # as of Python's own objects
except MemoryError:
    print("lacks")
    sys.exit()
if reserve is None:
    sys.exit()
print(reserve.has(1.0), reserve.has(0.1))
try:
    while True:
        kept.append(bytearray(MiB))
except MemoryError:
    print(reserve.has(0.1))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(reserve.has(1.0))
"""


def said(how: str) -> list[str]:
    words = [sys.executable, "-c", PROGRAM, how]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="the reserve is glibc's")
def test_a_process_that_gets_no_more_goes_on_with_its_reserve():
    assert said("none") == ["lacks"]
    # Some of it is used, and not taken from elsewhere; then all; then there is more again.
    assert said("reserve") == ["False", "True", "False", "True"]


def test_a_reserve_is_one_piece_of_the_heap():
    for wrong in (0, 32 * 2**20):
        with pytest.raises(ValueError, match="n_bytes="):
            MemoryReserve(wrong)
