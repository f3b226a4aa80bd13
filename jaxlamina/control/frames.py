"""Where a message begins and ends in a stream of bytes: four bytes that say whose stream it is, a length, a body.

Pure functions of bytes; knows nothing of sockets or of what a body holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

LARGEST_BYTES = 1 << 30
"""The largest body between ranks that know each other: KV that moves is sent in several messages if it is more."""

_MAGIC = (
    b"JXLc"  # not ASCII digits or a plausible length: an HTTP request or an ssh banner is told apart at once
)
_HEADER = struct.Struct(">4sI")


class FrameError(ValueError):
    """The stream is none of ours, or a body is larger than allowed."""


def frame(body: bytes, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """``body`` as it goes into the stream. `FrameError` if the other side would refuse it for its size."""
    if len(body) > largest_bytes:
        raise FrameError(
            f"a message of {len(body)} bytes is larger than the {largest_bytes} that may be sent"
        )
    return _HEADER.pack(_MAGIC, len(body)) + body


class FrameReader:
    """Bodies out of a stream that arrives in any pieces: ``feed`` a piece, then take all ``bodies``."""

    def __init__(self, largest_bytes: int = LARGEST_BYTES) -> None:
        self.largest_bytes = largest_bytes
        self._buffer = bytearray()

    @property
    def missing_bytes(self) -> int:
        """How many bytes are known to be missing to the next body: 0 between two frames and in a header."""
        if len(self._buffer) < _HEADER.size:
            return 0
        return _HEADER.size + self._length() - len(self._buffer)

    @property
    def is_between_frames(self) -> bool:
        return not self._buffer

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def bodies(self) -> Iterator[bytes]:
        """What is complete. `FrameError`, after the bodies before it, for a header that cannot be."""
        while self._buffer:
            begun = bytes(self._buffer[: len(_MAGIC)])
            if not _MAGIC.startswith(begun):
                raise FrameError(f"the stream is none of JaxLamina's: {bytes(self._buffer[:16])!r}")
            if len(self._buffer) < _HEADER.size:
                return
            length = self._length()
            if length > self.largest_bytes:
                raise FrameError(
                    f"a message of {length} bytes is larger than the {self.largest_bytes} allowed"
                )
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                body = bytes(view[_HEADER.size : end])
            del self._buffer[:end]
            yield body

    def _length(self) -> int:
        return _HEADER.unpack_from(self._buffer)[1]
