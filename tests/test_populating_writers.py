"""Threads that write to a mapped file: all is written, errors are heard of, and a file system that is full is an
error and not the end of the process."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxlamina.workers.populating_writers import PopulatingWriters


def test_all_is_called_and_the_first_error_is_raised() -> None:
    writers = PopulatingWriters(3)
    done = set[int]()
    writers.run([lambda i=i: done.add(i) for i in range(40)])
    assert done == set(range(40))

    def fails(i: int) -> None:
        if i % 2:
            raise ValueError(f"call {i}")
        done.add(-i)

    with pytest.raises(ValueError, match="call 1$"):
        writers.run([lambda i=i: fails(i) for i in range(10)])
    assert {-8, -2} <= done  # the others were waited for
    writers.run([])
    writers.close()


def test_memory_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    """A mapping that goes on behind its file's end, at pages that nobody has."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * mmap.PAGESIZE))
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        file.truncate(4 * mmap.PAGESIZE)
    assert PopulatingWriters.populate(memory[: 4 * mmap.PAGESIZE])
    assert PopulatingWriters.populate(memory[5:9])
    assert not PopulatingWriters.populate(memory[: 4 * mmap.PAGESIZE + 1])


_FULL = """
import sys
import numpy as np
from pathlib import Path
from jaxlamina.workers.kept_kv import KeptKV

rows = np.random.default_rng(0).integers(0, 256, (60, 2**14), np.uint8)
marks = np.arange(1, 61, dtype=np.uint64)
store = KeptKV(Path(sys.argv[1], "0.kv"), 2**14, "one", 60, 1, fraction=50, n_writers=3)
assert store.n_places == 60, store.n_places
filler = Path(sys.argv[1], "other")
filler.write_bytes(bytes(2**19))
for first in range(0, 60, 10):
    places = np.arange(first, first + 10)
    store.later(places, marks[places], lambda at=places: [rows[at]])
store.flush()
lost = store.take_lost().places
assert 0 < len(lost) < 60, lost
filler.unlink()
store.later(lost, marks[lost], lambda: [rows[lost]])
store.flush()
assert not len(store.take_lost().places) and (store.marks == marks).all()
assert (store.rows_at(np.arange(60)) == rows).all()
store.close()
print("kept")
"""


def test_a_full_file_system_loses_what_has_no_room(tmp_path: Path) -> None:
    """A file system of 1 MiB, half of which others have, for 60 rows of 16 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=1m none {folder}"
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*inside, mount], check=False, capture_output=True, timeout=30).returncode:
        pytest.skip("this host lets nobody mount a file system in a namespace of its own")
    script = tmp_path / "full.py"
    script.write_text(_FULL)
    done = subprocess.run(
        [*inside, f"{mount} && exec {sys.executable} {script} {folder}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "kept", done.stderr[-2000:]
