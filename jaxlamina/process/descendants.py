"""The processes below another one, as Linux says. Elsewhere there are none."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_NONE = (FileNotFoundError, ProcessLookupError, PermissionError)  # it may end meanwhile, or be another user's


def descendants(pid: int, but: Collection[int] = ()) -> list[int]:
    """All processes below one, each after its parent, ``but`` those and what is below them. `OSError` where
    /proc cannot be read, as when this process may open no more files."""
    found, parents = list[int](), [pid]
    while parents:
        folder = Path(f"/proc/{parents.pop()}/task")
        with suppress(*_NONE):
            for task in os.listdir(folder):
                with suppress(*_NONE):
                    new = [int(x) for x in (folder / task / "children").read_text().split()]
                    new = [x for x in new if x not in found and x not in but]
                    found += new
                    parents += new
    return found
