"""The modules that a user names: where they are looked for, and whether they are there."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from jaxlamina.errors import UserError


@contextmanager
def current_folder() -> Iterator[None]:
    """Python finds modules there too, last: a command that is installed does not look there."""
    before = list(sys.path)
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def check_module(name: str) -> None:
    """``UserError`` if the package of "package.module:function" is not there. Runs none of its code."""
    package = name.partition(":")[0].partition(".")[0]
    with current_folder():
        found = importlib.util.find_spec(package)
    if found is None:
        raise UserError(
            f"unknown model {name!r}: there is no Python package or module {package}, and no such file; "
            "modules are looked for in PYTHONPATH, among what is installed, and in the current folder"
        )
