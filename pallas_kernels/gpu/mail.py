"""Messages that one GPU writes into another's memory: a warp's program for either end. Knows bytes; not what they mean.

A receiver has, for each sender, a ring of slots in its own memory. Message number m goes to slot m mod n_slots. Every CTA
carries its own part of a message and has its own marks: one beside the slot, in the receiver's memory, that says which
message is there, and one in the sender's memory that says which one was taken. So nobody waits for more than memory of its
own GPU, and a sender waits only where it is a whole ring ahead. Every CTA of either end counts for itself, in memory that
stays: messages are numbered in the order in which they are put and taken, in whatever programs and loops.

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
    "far_data", "far_marks", "near_taken", "near_sent",  # to it
    "near_data", "near_marks", "far_taken", "near_received",  # from it
)  # fmt: skip
N_FIELDS = 2 * len(ADDRESSES)  # 32-bit words


@dataclass(frozen=True)
class Ring:
    """What both ends of a pair must agree on."""

    n_slots: int = 8  # a power of two
    slot_bytes: int = 4 << 20
    n_ctas: int = 16
    n_warps: int = 8

    @property
    def data_bytes(self) -> int:
        return self.n_slots * self.slot_bytes

    @property
    def mark_bytes(self) -> int:
        """Of one kind, of all slots."""
        return self.n_slots * self.n_ctas * 4

    @property
    def count_bytes(self) -> int:
        """Of one kind."""
        return self.n_ctas * 4

    def carries(self, n_bytes: int) -> bool:
        """Whether a message of so many bytes fits."""
        return 0 < n_bytes <= self.slot_bytes and n_bytes % WORD == 0


class Carrier:
    """One warp's program. ``peers``: the table ``[n_ranks, N_FIELDS]`` of 32-bit words, of which row ``peer`` is read."""

    def __init__(self, w: Any, ring: Ring, peers: Any, peer: int) -> None:
        self.w, self.ring = w, ring
        self._peers, self._row = peers, peer * N_FIELDS
        self._first = (w.warp == 0) & (w.lane == 0)

    def put(self, message: Any, n_bytes: int, done: Any) -> None:
        """``message`` to the peer; ``done`` [1] becomes a float32 0."""
        w = self.w
        data, marks, taken, sent = map(self._address, ADDRESSES[:4])
        number = w.load(sent, w.cta * 4, "i32")
        slot = number & (self.ring.n_slots - 1)
        mark, base = self._mark(slot), w.i64(slot) * self.ring.slot_bytes

        def wait() -> None:
            w.wait_for(taken, mark, number + (1 - self.ring.n_slots), self._first)
            w.sync_cta()

        self._copy(n_bytes, lambda at: (message, at), lambda at: (data, base + at), wait)
        self._finish(marks, mark, sent, number + 1)
        w.store_f32(done, 0, [w.f32(0.0)], self._first & (w.cta == 0))

    def take(self, message: Any, n_bytes: int) -> None:
        """The peer's message, once it is there."""
        w = self.w
        data, marks, taken, received = map(self._address, ADDRESSES[4:])
        number = w.load(received, w.cta * 4, "i32")
        slot = number & (self.ring.n_slots - 1)
        mark, base = self._mark(slot), w.i64(slot) * self.ring.slot_bytes
        w.wait_for(marks, mark, number + 1, self._first)
        w.sync_cta()
        self._copy(n_bytes, lambda at: (data, base + at), lambda at: (message, at))
        self._finish(taken, mark, received, number + 1)

    def _finish(self, marks: Any, mark: Any, count: Any, number: Any) -> None:
        """All that this CTA's warps read and wrote comes before the mark."""
        w = self.w
        w.sync_cta()
        w.release(marks, mark, number, self._first)
        w.store_b32(count, w.cta * 4, number, self._first)

    def _address(self, name: str) -> Any:
        return self.w.load_pointer(self._peers, 4 * (self._row + 2 * ADDRESSES.index(name)))

    def _mark(self, slot: Any) -> Any:
        return (slot * self.ring.n_ctas + self.w.cta) * 4

    def _copy(
        self,
        n_bytes: int,
        source: Callable[[Any], tuple[Any, Any]],
        to: Callable[[Any], tuple[Any, Any]],
        before_stores: Callable[[], None] | None = None,
    ) -> None:
        """This CTA's words of a message; a lane has several on the way at once. ``before_stores`` meets the first loads."""
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
