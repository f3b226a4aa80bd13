"""What two ends of a control connection prove to each other: that both know the job's secret, and that each
message is the next one of the other end, whole and unchanged.

The secret never travels. Each end draws a nonce for each connection. Both make the same keys of the secret
and the two nonces, one key for each direction. A frame's seal has its number, the job's epoch, and an
HMAC-SHA256 of both and of the body, cut to 16 bytes. Nobody without the secret can make, change, repeat or
reorder a frame; everybody on the way can read it. Knows bytes; nothing of sockets or of what a message says.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from jaxlamina.job.control.frames import MAC_BYTES, Frame, FrameError, Seal, sealed_frame, sealed_head

NONCE_BYTES = 32


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class Sealing:
    """Frames of one direction, in the order in which they are sent. ``epoch()``: the job's, now."""

    def __init__(self, key: bytes, epoch: Callable[[], int]) -> None:
        self._mac, self._epoch, self._n = hmac.new(key, digestmod=sha256), epoch, 0

    def frame(self, body: bytes) -> tuple[bytes, ...]:
        """The next frame, as of `frames.frame`. It stays the next until it is ``sent``."""
        epoch = self._epoch()
        return sealed_frame(body, Seal(epoch, self._n, _mac(self._mac, body, epoch, self._n)))

    def sent(self) -> None:
        self._n += 1


class Unsealing:
    """Frames of the other direction, in the order in which they came. ``epoch``: that of the last one."""

    def __init__(self, key: bytes) -> None:
        self._mac, self._n = hmac.new(key, digestmod=sha256), 0
        self.epoch = 0

    def body(self, frame: Frame) -> bytes | bytearray:
        """`FrameError` that says why, if it is not the next frame of an end that knows the secret."""
        if frame.seal is None:
            raise FrameError("a message without a proof, where each must have one")
        epoch, number, mac = frame.seal
        if not hmac.compare_digest(_mac(self._mac, frame.body, epoch, number), mac):
            raise FrameError(
                f"message {self._n} was changed on its way, or is of another job or connection: its proof "
                "does not fit"
            )
        if number != self._n:
            raise FrameError(f"message {number} came again or out of order: message {self._n} was due")
        if epoch < self.epoch:
            raise FrameError(f"a message of epoch {epoch} came, and the job is in epoch {self.epoch}")
        self._n, self.epoch = number + 1, epoch
        return frame.body


class Seals(NamedTuple):
    """One end of a connection."""

    sealing: Sealing
    unsealing: Unsealing

    @classmethod
    def of_rank_0(cls, secret: bytes, own: bytes, theirs: bytes, epoch: Callable[[], int]) -> Seals:
        """``own``, ``theirs``: nonces. ``secret`` may be empty: then seals find mistakes and no strangers."""
        down, up = _keys(secret, own, theirs)
        return cls(Sealing(down, epoch), Unsealing(up))

    @classmethod
    def proven(
        cls, secret: bytes, own: bytes, theirs: bytes, frame: Frame, epoch: Callable[[], int]
    ) -> Seals | None:
        """As ``of_rank_0``, if ``frame`` is the first of an end that knows the secret."""
        try:
            seals = cls.of_rank_0(secret, own, theirs, epoch)
            seals.unsealing.body(frame)
        except FrameError:
            return None
        return seals

    @classmethod
    def of_rank(cls, secret: bytes, own: bytes, theirs: bytes) -> Seals:
        """As ``of_rank_0``; the epoch is what rank 0 said last."""
        down, up = _keys(secret, theirs, own)
        unsealing = Unsealing(down)
        return cls(Sealing(up, lambda: unsealing.epoch), unsealing)


def _keys(secret: bytes, of_rank_0: bytes, of_rank: bytes) -> tuple[bytes, bytes]:
    """From rank 0, and to it. `FrameError` for a nonce of another length than ours: the two are told apart by
    it."""
    for nonce in (of_rank_0, of_rank):
        if len(nonce) != NONCE_BYTES:
            raise FrameError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    both = hmac.digest(secret, b"jaxlamina control" + of_rank_0 + of_rank, sha256)
    return hmac.digest(both, b"from rank 0", sha256), hmac.digest(both, b"to rank 0", sha256)


def _mac(keyed: hmac.HMAC, body: bytes | bytearray, epoch: int, number: int) -> bytes:
    of_frame = keyed.copy()
    of_frame.update(sealed_head(body, epoch, number))
    of_frame.update(body)
    return of_frame.digest()[:MAC_BYTES]
