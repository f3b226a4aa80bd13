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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

WORD = 16  # bytes that a lane moves at once
_AHEAD = 4  # words that a lane has on the way
# What a rank knows of a peer: addresses of 64 bits, near in its own memory and far in the peer's.
ADDRESSES = (
    "far_data", "far_come", "near_taken", "near_sent",  # to it
    "near_data", "near_come", "far_taken", "near_received",  # from it
)  # fmt: skip
N_FIELDS = 2 * len(ADDRESSES)  # 32-bit words

_Place = Callable[[Any], tuple[Any, Any]]  # a word's offset in a message -> (pointer, offset)


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

    def put(self, message: Any, n_bytes: int, done: Any | None = None) -> None:
        """``message`` to the peer; ``done`` [1] becomes a float32 0."""
        w, own = self.w, self.w.cta * 4
        data, come, taken, sent = map(self._address, ADDRESSES[:4])
        number = w.load(sent, own, "i32")
        slot = self._slot(number)

        def wait() -> None:
            w.wait_for(taken, own, number + (1 - self.ring.n_slots), self._first)
            w.sync_cta()

        _move(w, self.ring, n_bytes, [lambda at: (message, at)], _first, lambda at: (data, slot + at), wait)
        w.sync_cta()
        w.release(come, own, number + 1, self._first)  # all that this CTA's warps wrote comes before it
        w.store_b32(sent, own, number + 1, self._first)
        if done is not None:
            w.store_f32(done, 0, [w.f32(0.0)], self._first & (w.cta == 0))

    def take(self, message: Any, n_bytes: int) -> None:
        """The peer's message, once it is there. That it was taken is said by the next one, which begins when
        all of this is done: so that nothing has to be waited for here."""
        here, taken = self.waited_for()
        self.w.sync_cta()
        _move(self.w, self.ring, n_bytes, [here], _first, lambda at: (message, at))
        taken()

    def waited_for(self) -> tuple[_Place, Callable[[], None]]:
        """Waits in one lane until the peer's next message is there, for all that `sync_cta` then: where it
        lies, and what counts it as taken once it was read."""
        w, own = self.w, self.w.cta * 4
        data, come, taken, received = map(self._address, ADDRESSES[4:])
        number = w.load(received, own, "i32")
        slot = self._slot(number)
        other = (w.warp == self.ring.n_warps - 1) & (w.lane == 0)  # than the one that waits
        w.release(taken, own, number, other)
        w.wait_for(come, own, number + 1, self._first)
        return lambda at: (data, slot + at), lambda: w.store_b32(received, own, number + 1, self._first)

    def _slot(self, number: Any) -> Any:
        return self.w.i64(number & (self.ring.n_slots - 1)) * self.ring.slot_bytes

    def _address(self, name: str) -> Any:
        return self.w.load_pointer(self._peers, 4 * (self._row + 2 * ADDRESSES.index(name)))


def add_up(
    w: Any,
    ring: Ring,
    peers: Any,
    ranks: Sequence[int],
    rank: int,
    part: Any,
    n_bytes: int,
    kind: str,
    to: Any,
) -> None:
    """One warp's program of rank ``rank``: ``to`` becomes the sum of what all ``ranks`` have as ``part``, in
    their order, by float32. Each puts its own into the others' rings and adds what they put into its own.
    ``kind``: "bf16" or "f32", of the elements."""
    others = {r: Carrier(w, ring, peers, r) for r in ranks if r != rank}
    for carrier in others.values():
        carrier.put(part, n_bytes)
    there = {r: carrier.waited_for() for r, carrier in others.items()}
    w.sync_cta()
    places = [there[r][0] if r != rank else lambda at: (part, at) for r in ranks]

    def added(words: Sequence[list[Any]]) -> list[Any]:
        each = [[x for bits in word for x in _numbers(w, bits, kind)] for word in words]
        sums = [reduce(add, of_one) for of_one in zip(*each, strict=True)]
        if kind == "f32":
            return [w.bits(x) for x in sums]
        return [w.pack(low, high, kind) for low, high in zip(sums[::2], sums[1::2], strict=True)]

    _move(w, ring, n_bytes, places, added, lambda at: (to, at))
    for _, taken in there.values():
        taken()


def _numbers(w: Any, bits: Any, kind: str) -> list[Any]:
    """What 32 bits hold, as float32."""
    if kind == "f32":
        return [w.number(bits)]
    return [w.bf16_bits_to_f32(bits), w.bf16_bits_to_f32(bits // 65536)]


def _first(words: Sequence[list[Any]]) -> list[Any]:
    return words[0]


def _move(
    w: Any,
    ring: Ring,
    n_bytes: int,
    sources: Sequence[_Place],
    combine: Callable[[Sequence[list[Any]]], list[Any]],
    to: _Place,
    before_stores: Callable[[], None] | None = None,
) -> None:
    """This CTA's words of a message: what ``combine`` makes of those that ``sources`` have. A lane has
    several on the way at once. ``before_stores`` meets the first loads."""
    n_words, lanes = n_bytes // WORD, 32 * ring.n_warps
    each = -(-n_words // ring.n_ctas)
    begin = w.cta * each
    lane = w.warp * 32 + w.lane

    def turn(i: Any, carry: list[Any]) -> list[Any]:
        words = [lane + (i * (lanes * _AHEAD) + lanes * j) for j in range(_AHEAD)]
        inside = [(word < each) & (begin + word < n_words) for word in words]
        offsets = [w.i64(begin + word) * WORD for word in words]
        values = [
            [w.load_word(*source(at), kept) for source in sources]
            for at, kept in zip(offsets, inside, strict=True)
        ]
        if before_stores is not None:
            w.cond(i == 0, lambda: [before_stores()][:0], [])
        for at, value, kept in zip(offsets, values, inside, strict=True):
            w.store_word(*to(at), combine(value), kept)
        return carry

    w.loop(-(-each // (lanes * _AHEAD)), turn, [])
