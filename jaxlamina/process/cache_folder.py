"""Where what is fetched, compiled or remembered between runs is kept. Knows nothing of what that is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
        return Path(tempfile.gettempdir()) / f"jaxlamina-{os.getuid()}"


def programs_dir() -> Path:
    """Of the cache folder that of compiled programs."""
    return cache_dir() / "xla"
