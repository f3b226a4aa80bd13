"""The processes below another one, as Linux says. Elsewhere there are none."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def descendants(pid: int, but: Collection[int] = ()) -> list[int]:
    """All processes below one, each after its parent, ``but`` those and what is below them."""
    found, parents = list[int](), [pid]
    while parents:
        folder = Path(f"/proc/{parents.pop()}/task")
        with suppress(OSError):  # it may end meanwhile
            for task in os.listdir(folder):
                with suppress(OSError):
                    new = [int(x) for x in (folder / task / "children").read_text().split()]
                    new = [x for x in new if x not in found and x not in but]
                    found += new
                    parents += new
    return found
