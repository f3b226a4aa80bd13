"""Whether a file can be written, said before anything is done for it. Knows nothing of what is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jaxlamina.errors import UserError


def check_output(path: Path | None, option: str) -> None:
    """``UserError``, before anything else is done, if ``path``, of ``option``, could not be written. None:
    nothing is to be."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {str(path)!r} is a folder: name a file in it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{option} {str(path)!r}: there is no such folder; make it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"{option} {str(path)!r} may not be written: name another file")


def check_apart(paths: Mapping[str, Path | None]) -> None:
    """``UserError`` where two options, by name, write the same file."""
    known: dict[Path, str] = {}
    for option, path in paths.items():
        if path is not None and (other := known.setdefault(path.resolve(), option)) != option:
            raise UserError(f"{other} and {option} are both {str(path)!r}: name two files")
