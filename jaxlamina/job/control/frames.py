"""Where a message begins and ends in a stream of bytes: four bytes that say whose stream it is, a length, a
body; of most messages also a seal, between length and body.

Pure functions of bytes; knows nothing of sockets, of what a body holds, or of whether a seal is true.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

LARGEST_BYTES = 1 << 30
"""The largest body between ranks that know each other: KV that moves is sent in several messages if it is
more."""

MAC_BYTES = 16

# Not ASCII digits or a plausible length: an HTTP request or an ssh banner is told apart at once.
_OPEN, _SEALED = b"JXLc", b"JXLs"
_HEADER = struct.Struct(">4sI")
_SEALED_HEAD = struct.Struct(">4sIIQ")
_LARGE_BYTES = 1 << 16


class FrameError(ValueError):
    """The stream is none of ours, a body is larger than allowed, or a seal is not what it should be."""


class Seal(NamedTuple):
    """What a sealed frame says of itself: the job's epoch, which message of its direction it is, and a proof
    of ``MAC_BYTES`` for all of it."""

    epoch: int
    number: int
    mac: bytes


class Frame(NamedTuple):
    """``seal``: None of an open frame."""

    body: bytes | bytearray
    seal: Seal | None


def frame(body: bytes, largest_bytes: int = LARGEST_BYTES) -> tuple[bytes, ...]:
    """``body`` as an open frame goes into the stream, in one piece or, where a copy would cost more than a
    packet, in two.

    `FrameError` if the other side would refuse it for its size.
    """
    return _pieces(_HEADER.pack(_OPEN, _length(body, largest_bytes)), body)


def sealed_frame(body: bytes, seal: Seal) -> tuple[bytes, ...]:
    """As `frame`, with a seal."""
    return _pieces(sealed_head(body, seal.epoch, seal.number) + seal.mac, body)


def sealed_head(body: bytes | bytearray, epoch: int, number: int) -> bytes:
    """What comes before a seal's ``mac``, which is of this and of ``body``. `FrameError` as of `frame`."""
    return _SEALED_HEAD.pack(_SEALED, _length(body, LARGEST_BYTES), epoch, number)


def _length(body: bytes | bytearray, largest_bytes: int) -> int:
    if len(body) > largest_bytes:
        raise FrameError(
            f"a message of {len(body)} bytes is larger than the {largest_bytes} that may be sent"
        )
    return len(body)


def _pieces(head: bytes, body: bytes) -> tuple[bytes, ...]:
    return (head + body,) if len(body) < _LARGE_BYTES else (head, body)


class FrameReader:
    """Frames out of a stream that arrives in any pieces: ``feed`` a piece, then take all ``frames``.

    While a large body comes in, ``space`` is where its next bytes may be put without a copy; say ``filled``
    then.
    """

    def __init__(self, largest_bytes: int = LARGEST_BYTES) -> None:
        self.largest_bytes = largest_bytes
        self._buffer = bytearray()  # what has come and is not in _large
        self._large = bytearray()
        self._n_filled = 0
        self._seal: Seal | None = None  # of _large

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

    def frames(self) -> Iterator[Frame]:
        """What is complete. `FrameError`, after the frames before it, for a header that cannot be."""
        while True:
            if self._large:
                if self._n_filled < len(self._large):
                    return
                body, self._large = self._large, bytearray()
                yield Frame(body, self._seal)
            head = self._next_head()
            if head is None:
                return
            begin, length, seal = head
            end = begin + length
            if len(self._buffer) >= end:
                body = self._buffer[begin:end]
                del self._buffer[:end]
                yield Frame(body, seal)
            elif length >= _LARGE_BYTES:
                self._large, self._n_filled, self._seal = bytearray(length), 0, seal
                begun = bytes(self._buffer[begin:])
                self._buffer.clear()
                self.feed(begun)
                return
            else:
                return

    def _next_head(self) -> tuple[int, int, Seal | None] | None:
        """Of the next frame, if its header has come: where its body begins, the body's length, its seal."""
        sealed_bytes = _SEALED_HEAD.size + MAC_BYTES
        begun = bytes(self._buffer[:sealed_bytes])
        if not any(magic.startswith(begun[: len(magic)]) for magic in (_OPEN, _SEALED)):
            raise FrameError(f"the stream is none of JaxLamina's: {bytes(self._buffer[:16])!r}")
        if len(begun) < _HEADER.size:
            return None
        magic, length = _HEADER.unpack_from(begun)
        if length > self.largest_bytes:
            raise FrameError(f"a message of {length} bytes is larger than the {self.largest_bytes} allowed")
        if magic == _OPEN:
            return _HEADER.size, length, None
        if len(begun) < sealed_bytes:
            return None
        _, _, epoch, number = _SEALED_HEAD.unpack_from(begun)
        return sealed_bytes, length, Seal(epoch, number, begun[_SEALED_HEAD.size :])
