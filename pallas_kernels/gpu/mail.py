"""Messages that one GPU writes into another's memory: a warp's program for either end. Knows bytes; not what
they mean.

A receiver has, for each sender, a ring of slots in its own memory. Message number m goes to slot m mod
n_slots. Every CTA carries its own part of a message and has its own two marks: in the receiver's memory how
many messages have come, and in the sender's how many were taken. So nobody waits for more than memory of its
own GPU, and a sender waits only where it is a whole ring ahead. Either end's CTAs count for themselves, in
memory that stays: messages are numbered in the order in which they are put and taken, in whatever programs
and loops.

Numbers of messages are 32 bits and may wrap: what is compared is their difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORD = 16  # bytes that a lane moves at once
_AHEAD = 4  # words that a lane has on the way
# What a rank knows of a peer: addresses of 64 bits, near in its own memory and far in the peer's.
ADDRESSES = (
    "far_data", "far_come", "near_taken", "near_sent",  # to it
    "near_data", "near_come", "far_taken", "near_received",  # from it
)  # fmt: skip
N_FIELDS = 2 * len(ADDRESSES)  # 32-bit words


@dataclass(frozen=True)
class Ring:
    """What both ends of a pair must agree on."""

    n_slots: int = 8  # a power of two, at least 2
    slot_bytes: int = 4 << 20
    n_ctas: int = 32
    n_warps: int = 8

    @property
    def n_ahead(self) -> int:
        """Messages that can be put before the first is taken; that the last one was taken is said with the
        next."""
        return self.n_slots - 1

    @property
    def data_bytes(self) -> int:
        return self.n_slots * self.slot_bytes

    @property
    def mark_bytes(self) -> int:
        """Of one kind, of all CTAs."""
        return self.n_ctas * 4

    def carries(self, n_bytes: int) -> bool:
        """Whether a message of so many bytes fits."""
        return 0 < n_bytes <= self.slot_bytes and n_bytes % WORD == 0


class Carrier:
    """One warp's program. ``peers``: the table ``[n_ranks, N_FIELDS]`` of 32-bit words, of which row ``peer``
    is read."""

    def __init__(self, w: Any, ring: Ring, peers: Any, peer: int) -> None:
        self.w, self.ring = w, ring
        self._peers, self._row = peers, peer * N_FIELDS
        self._first = (w.warp == 0) & (w.lane == 0)

    def put(self, message: Any, n_bytes: int, done: Any) -> None:
        """``message`` to the peer; ``done`` [1] becomes a float32 0."""
        w, own = self.w, self.w.cta * 4
        data, come, taken, sent = map(self._address, ADDRESSES[:4])
        number = w.load(sent, own, "i32")
        slot = self._slot(number)

        def wait() -> None:
            w.wait_for(taken, own, number + (1 - self.ring.n_slots), self._first)
            w.sync_cta()

        self._copy(n_bytes, lambda at: (message, at), lambda at: (data, slot + at), wait)
        w.sync_cta()
        w.release(come, own, number + 1, self._first)  # all that this CTA's warps wrote comes before it
        w.store_b32(sent, own, number + 1, self._first)
        w.store_f32(done, 0, [w.f32(0.0)], self._first & (w.cta == 0))

    def take(self, message: Any, n_bytes: int) -> None:
        """The peer's message, once it is there. That it was taken is said by the next one, which begins when
        all of this is done: so that nothing has to be waited for here."""
        w, own = self.w, self.w.cta * 4
        data, come, taken, received = map(self._address, ADDRESSES[4:])
        number = w.load(received, own, "i32")
        slot = self._slot(number)
        other = (w.warp == self.ring.n_warps - 1) & (w.lane == 0)  # than the one that waits
        w.release(taken, own, number, other)
        w.wait_for(come, own, number + 1, self._first)
        w.sync_cta()
        self._copy(n_bytes, lambda at: (data, slot + at), lambda at: (message, at))
        w.store_b32(received, own, number + 1, self._first)

    def _slot(self, number: Any) -> Any:
        return self.w.i64(number & (self.ring.n_slots - 1)) * self.ring.slot_bytes

    def _address(self, name: str) -> Any:
        return self.w.load_pointer(self._peers, 4 * (self._row + 2 * ADDRESSES.index(name)))

    def _copy(
        self,
        n_bytes: int,
        source: Callable[[Any], tuple[Any, Any]],
        to: Callable[[Any], tuple[Any, Any]],
        before_stores: Callable[[], None] | None = None,
    ) -> None:
        """This CTA's words of a message; a lane has several on the way at once. ``before_stores`` meets the
        first loads."""
        w = self.w
        n_words, lanes = n_bytes // WORD, 32 * self.ring.n_warps
        each = -(-n_words // self.ring.n_ctas)
        begin = w.cta * each
        lane = w.warp * 32 + w.lane

        def turn(i: Any, carry: list[Any]) -> list[Any]:
            words = [lane + (i * (lanes * _AHEAD) + lanes * j) for j in range(_AHEAD)]
            inside = [(word < each) & (begin + word < n_words) for word in words]
            offsets = [w.i64(begin + word) * WORD for word in words]
            values = [w.load_word(*source(at), kept) for at, kept in zip(offsets, inside, strict=True)]
            if before_stores is not None:
                w.cond(i == 0, lambda: [before_stores()][:0], [])
            for at, value, kept in zip(offsets, values, inside, strict=True):
                w.store_word(*to(at), value, kept)
            return carry

        w.loop(-(-each // (lanes * _AHEAD)), turn, [])
