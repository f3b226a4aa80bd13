"""Where what is fetched, compiled or remembered between runs is kept. Knows nothing of what that is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from jaxlamina.process.owned_folder import make_own


def cache_dir() -> Path:
    """`$JAXLAMINA_CACHE`, `$XDG_CACHE_HOME/jaxlamina` or `~/.cache/jaxlamina`; a temporary folder without a
    home."""
    if chosen := os.environ.get("JAXLAMINA_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "jaxlamina"
    try:
        return Path.home() / ".cache" / "jaxlamina"
    except RuntimeError:  # no HOME and no entry in the password file, as in some containers
        return _temporary()


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"jaxlamina-{os.getuid()}"


def programs_dir() -> Path:
    """Of the cache folder that of compiled programs."""
    return cache_dir() / "xla"


def make_programs_dir() -> Path:
    """It, made if it is not there. ``OSError`` where it cannot be, ``UserError`` where it would be among
    temporary files in a folder that somebody else could write to: programs are run as they are found."""
    folder = programs_dir()
    if folder.parent == _temporary():
        make_own(folder.parent)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
