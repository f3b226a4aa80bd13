"""Where the modules that a user names are looked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def current_folder() -> Iterator[None]:
    """Python finds modules there too, last: a command that is installed does not look there."""
    before = list(sys.path)
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before
