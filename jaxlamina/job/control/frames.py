"""Where a message begins and ends in a stream of bytes: four bytes that say whose stream it is, a length, a
body.

Pure functions of bytes; knows nothing of sockets or of what a body holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

LARGEST_BYTES = 1 << 30
"""The largest body between ranks that know each other: KV that moves is sent in several messages if it is
more."""

_MAGIC = (
    b"JXLc"  # not ASCII digits or a plausible length: an HTTP request or an ssh banner is told apart at once
)
_HEADER = struct.Struct(">4sI")
_LARGE_BYTES = 1 << 16


class FrameError(ValueError):
    """The stream is none of ours, or a body is larger than allowed."""


def frame(body: bytes, largest_bytes: int = LARGEST_BYTES) -> tuple[bytes, ...]:
    """``body`` as it goes into the stream, in one piece or, where a copy would cost more than a packet, in
    two.

    `FrameError` if the other side would refuse it for its size.
    """
    if len(body) > largest_bytes:
        raise FrameError(
            f"a message of {len(body)} bytes is larger than the {largest_bytes} that may be sent"
        )
    header = _HEADER.pack(_MAGIC, len(body))
    return (header + body,) if len(body) < _LARGE_BYTES else (header, body)


class FrameReader:
    """Bodies out of a stream that arrives in any pieces: ``feed`` a piece, then take all ``bodies``.

    While a large body comes in, ``space`` is where its next bytes may be put without a copy; say ``filled``
    then.
    """

    def __init__(self, largest_bytes: int = LARGEST_BYTES) -> None:
        self.largest_bytes = largest_bytes
        self._buffer = bytearray()  # what has come and is not in _large
        self._large = bytearray()
        self._n_filled = 0

    @property
    def is_between_frames(self) -> bool:
        return not self._buffer and not self._large

    def space(self) -> memoryview | None:
        """The rest of a large body that has begun, or None: then ``feed``."""
        return memoryview(self._large)[self._n_filled :] if self._large else None

    def filled(self, n_bytes: int) -> None:
        """The first ``n_bytes`` of ``space`` have been written."""
        self._n_filled += n_bytes

    def feed(self, data: bytes) -> None:
        space = self.space()
        if space is not None:
            n = min(len(space), len(data))
            space[:n] = data[:n]
            self.filled(n)
            data = data[n:]
        self._buffer += data

    def bodies(self) -> Iterator[bytes | bytearray]:
        """What is complete. `FrameError`, after the bodies before it, for a header that cannot be."""
        while True:
            if self._large:
                if self._n_filled < len(self._large):
                    return
                body, self._large = self._large, bytearray()
                yield body
            length = self._next_length()
            if length is None:
                return
            end = _HEADER.size + length
            if len(self._buffer) >= end:
                body = self._buffer[_HEADER.size : end]
                del self._buffer[:end]
                yield body
            elif length >= _LARGE_BYTES:
                self._large, self._n_filled = bytearray(length), 0
                begun = bytes(self._buffer[_HEADER.size :])
                self._buffer.clear()
                self.feed(begun)
                return
            else:
                return

    def _next_length(self) -> int | None:
        """Of the body whose header has come, if it has."""
        begun = bytes(self._buffer[: _HEADER.size])
        if not _MAGIC.startswith(begun[: len(_MAGIC)]):
            raise FrameError(f"the stream is none of JaxLamina's: {bytes(self._buffer[:16])!r}")
        if len(begun) < _HEADER.size:
            return None
        length = _HEADER.unpack(begun)[1]
        if length > self.largest_bytes:
            raise FrameError(f"a message of {length} bytes is larger than the {self.largest_bytes} allowed")
        return length
