"""The keys that requests may bring: one that was said at the start, or those of a file, which may change
while the server runs."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from jaxlamina.errors import UserError

_MOST_BYTES = 2**20
_log = logging.getLogger("uvicorn.error")


class ApiKeys:
    """``file``: a key a line; empty lines and those that begin with # are none. It is read again when it has
    changed, and what cannot be read changes nothing. ``UserError`` for one that cannot be read at the start,
    or has no key."""

    def __init__(self, key: str | None, file: Path | None) -> None:
        if key is not None and file is not None:
            raise UserError("--api-key and --api-key-file are two ways to say it: leave one out")
        self._file, self._seen = file, (0, 0, 0)
        self._keys: tuple[bytes, ...] = () if key is None else (key.encode(),)
        if file is not None:
            try:
                self._seen = self._state(file)
                self._keys = self._read(file)
            except (OSError, ValueError) as error:
                raise UserError(f"--api-key-file {file}: {error}") from None

    @property
    def are_needed(self) -> bool:
        return bool(self._keys)

    def has(self, given: bytes) -> bool:
        """Whether it is one of them; as long as it takes, whichever."""
        self._look()
        found = [hmac.compare_digest(given, key) for key in self._keys]
        return any(found)

    def _look(self) -> None:
        if self._file is None:
            return
        try:
            state = self._state(self._file)
            if state == self._seen:
                return
            self._seen = state
            self._keys = self._read(self._file)
            _log.info("read %d API keys from %s", len(self._keys), self._file)
        except (OSError, ValueError) as error:
            if self._seen != (0, 0, 0):
                _log.error("the API keys of %s are those that they were: %s", self._file, error)
                self._seen = (0, 0, 0)  # said once, and looked for again

    @staticmethod
    def _state(file: Path) -> tuple[int, int, int]:
        found = file.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    @staticmethod
    def _read(file: Path) -> tuple[bytes, ...]:
        with open(file, "rb") as opened:
            text = opened.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        lines = (line.strip() for line in text.splitlines())
        keys = tuple(line for line in lines if line and not line.startswith(b"#"))
        if not keys:
            raise ValueError("it has no key, which would leave the server open to everybody")
        return keys
