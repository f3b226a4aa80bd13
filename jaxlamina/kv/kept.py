"""Which token prefixes have their KV in a store beside the pools: in host memory, by content, also after the
end of the process.

Policy on plain numpy; it knows token ids, places and who keeps a slot's KV, no KV array, no device, no
request. A token's KV follows from the tokens up to it, so a place is found by their digest: a keyed sum, of
which a longer prefix's is made from a shorter one's.

Each keeper (an attention worker, or all of them where each has every token) has places of its own, in one
range; a token is kept where its KV is. The least recently used places are given to others, a prefix's last
tokens before its first.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, UInt64

Tokens = Sequence[int] | np.ndarray
RECORD = np.dtype([("low", "<u8"), ("high", "<u8"), ("used", "<i8")])
"""What is known of a place: its token's digest (low 0: of none), and when it was used."""
WHOLE = "all heads, stages "
"""Of a place that has all of a token's KV, whoever else keeps some."""
EVERY_STEPS = 16
"""Steps after which what requests have written is kept; what they have read is at once."""
_LONGEST = 2**24  # positions that `used` tells apart
_FEWEST_EVICTED = 1 / 64  # of a keeper's places at once, since finding the oldest looks at all


class Digest(NamedTuple):
    """Of the first ``n`` tokens; those of more are made from it."""

    n: int = 0
    low: int = 0
    high: int = 0


class Digests(NamedTuple):
    """Of prefixes of ``first + 1``, ``first + 2``, … tokens."""

    first: int
    low: UInt64[np.ndarray, " n"]
    high: UInt64[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.low)

    @property
    def last(self) -> Digest:
        n = len(self)
        return Digest(self.first + n, int(self.low[-1]), int(self.high[-1])) if n else Digest(self.first)

    def part(self, start: int, stop: int) -> Digests:
        return Digests(self.first + start, self.low[start:stop], self.high[start:stop])

    def with_more(self, more: Digests) -> Digests:
        """And of those that follow."""
        both = (np.concatenate(x) for x in ((self.low, more.low), (self.high, more.high)))
        return Digests(self.first, *both)


NO_DIGESTS = Digests(0, np.empty(0, np.uint64), np.empty(0, np.uint64))


class Kept(NamedTuple):
    """Tokens that are to be kept: which of those that were asked about, and where; ``marks``: what each place
    is known by from then on."""

    which: Int[np.ndarray, " m"]
    places: Int32[np.ndarray, " m"]
    marks: UInt64[np.ndarray, " m"]


class Lost(NamedTuple):
    """Places where tokens were to be kept, known by ``marks``, and are not: there was no memory for them."""

    places: Int[np.ndarray, " m"]
    marks: UInt64[np.ndarray, " m"]

    @classmethod
    def joined(cls, each: Iterable[Lost]) -> Lost:
        places, marks = zip(NOTHING_LOST, *each, strict=True)
        return cls(np.concatenate(places), np.concatenate(marks))


NOTHING_LOST = Lost(np.empty(0, np.int64), np.empty(0, np.uint64))


class KeptWanted(NamedTuple):
    """What workers are told of what they are to keep. ``folder``: where, None: in their own memory.
    ``identity``: what KV depends on beside tokens. ``n_places``: a worker's, None: as many as it has slots,
    as far as memory goes, of which ``n_sharing`` processes of a host have an equal part each. ``ahead``: only
    to be made ready for, since another process still keeps KV there."""

    folder: str | None
    identity: str
    n_places: int | None
    n_sharing: int = 1
    ahead: bool = False

    def of_layout(self, heads: str) -> KeptWanted:
        """``heads``: which of them a row has, and of which layers."""
        return self._replace(identity=f"{self.identity} {heads}")


class KeptFound(NamedTuple):
    """Each keeper's name and places, what these hold, keeper after keeper: a mark each, 0 for nothing; and
    what of a token a place holds, beside what KV follows from (`KeptWanted.of_layout`)."""

    names: tuple[str, ...]
    capacities: tuple[int, ...]
    identity: str
    marks: UInt64[np.ndarray, " places"]


class KeptPrefixes:
    """``find`` before a prompt is computed, ``add`` what has been.

    ``capacities``: each keeper's places, which are numbered one keeper after another. ``records``: of an
    earlier process, written to as this one goes on (anything like an array of `RECORD`); ``keys``: with which
    its digests were made.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        records: np.ndarray | None = None,
        keys: tuple[int, int] | None = None,
    ) -> None:
        self.capacities = tuple(capacities)
        self._bounds = np.cumsum([0, *self.capacities])
        n = int(self._bounds[-1])
        self._records = np.zeros(n, RECORD) if records is None else records
        if len(self._records) != n:
            raise ValueError(f"{len(self._records)} records are not of {n} places")
        self.keys = new_keys() if keys is None else keys
        self._clock = int(self._records["used"].max(initial=0)) // _LONGEST + 1
        self._place_of: dict[int, int] = {}
        self._free: list[list[int]] = []
        self._aside: list[list[int]] = []  # of each keeper: nobody's, and there may be no memory for them
        self._read()
        self.n_kept_tokens = self.n_lost_tokens = 0

    def _read(self) -> None:
        low = self._records["low"]
        held = np.flatnonzero(low)
        self._place_of = dict(zip(low[held].tolist(), held.tolist(), strict=True))
        self._free = [
            (first + np.flatnonzero(low[first:last] == 0)[::-1]).tolist()
            for first, last in zip(self._bounds, self._bounds[1:], strict=False)
        ]
        self._aside = [[] for _ in self._free]

    @property
    def n_places(self) -> int:
        return int(self._bounds[-1])

    @property
    def n_used(self) -> int:
        """Tokens that are kept."""
        return len(self._place_of)

    def confirm(self, marks: UInt64[np.ndarray, " places"]) -> None:
        """Forgets what is not at its place, by what the keepers' ``marks`` say."""
        self._records["low"][self._records["low"] != marks] = 0
        self._read()

    def digests(self, tokens: Tokens, after: Digest = Digest()) -> Digests:  # noqa: B008 (immutable)
        """Of prefixes that end with each of ``tokens``, which follow the ones of ``after``."""
        with np.errstate(over="ignore"):
            ids = np.asarray(tokens, np.uint64) + (
                np.arange(after.n, after.n + len(tokens), dtype=np.uint64) << np.uint64(32)
            )
            sums = [
                np.cumsum(_mixed(ids ^ np.uint64(key)), dtype=np.uint64) + np.uint64(before)
                for key, before in zip(self.keys, (after.low, after.high), strict=True)
            ]
        low, high = sums
        return Digests(after.n, np.where(low == 0, np.uint64(1), low), high)

    def find(self, digests: Digests) -> Int32[np.ndarray, " n"]:
        """Places of the first of these tokens, as far as they are kept without a gap."""
        known = itertools.takewhile(
            lambda place: place is not None, map(self._place_of.get, digests.low.tolist())
        )
        places = np.fromiter(known, np.int32)  # type: ignore[arg-type]
        differs = self._records["high"][places] != digests.high[: len(places)]
        places = places[: int(differs.argmax()) if differs.any() else len(places)]
        self._use(places, digests.first)
        return places

    def add(self, digests: Digests, keepers: Int[np.ndarray, " n"]) -> Kept:
        """Places for those of these tokens that have none, each at its keeper. Where a keeper has fewer
        places than it takes, the last are left out."""
        self._clock += 1
        known = np.asarray([low in self._place_of for low in digests.low.tolist()], bool)
        self._use(
            np.asarray([self._place_of[low] for low in digests.low[known].tolist()], np.int32), digests.first
        )
        which, places = [], []
        for keeper in np.unique(keepers[~known]):
            wanted = np.flatnonzero(~known & (keepers == keeper))
            taken = self._take(int(keeper), len(wanted))
            which.append(wanted[: len(taken)])
            places.append(taken)
        nothing = np.empty(0, np.int32)
        at, of = np.concatenate([nothing, *which]).astype(np.intp), np.concatenate([nothing, *places])
        order = np.argsort(at)
        at, of = at[order], of[order].astype(np.int32)
        marks = digests.low[at]
        # The digest last, so that a record is whole when it is found.
        self._records["high"][of] = digests.high[at]
        self._records["used"][of] = self._time(digests.first + at)
        self._records["low"][of] = marks
        self._place_of.update(zip(marks.tolist(), of.tolist(), strict=True))
        self.n_kept_tokens += len(of)
        return Kept(at, of, marks)

    def lose(self, lost: Lost) -> None:
        """Forgets tokens that are not at their places. A keeper that had no memory for them has it where it
        keeps tokens already: those places go on, and the others are left alone until `try_again`."""
        gone = np.unique(lost.places[self._records["low"][lost.places] == lost.marks])
        for low in self._records["low"][gone].tolist():
            del self._place_of[low]
        self._records["low"][gone] = 0
        self.n_lost_tokens += len(gone)
        keepers = np.searchsorted(self._bounds, gone, "right") - 1
        for keeper in np.unique(keepers).tolist():
            self._aside[keeper] += self._free[keeper] + gone[keepers == keeper].tolist()
            self._free[keeper] = []

    def try_again(self) -> None:
        """Places that `lose` has left alone are given to tokens again, after all others."""
        self._free = [aside + free for aside, free in zip(self._aside, self._free, strict=True)]
        self._aside = [[] for _ in self._free]

    def clear(self) -> None:
        """Forgets everything."""
        self._records["low"] = 0
        self._read()

    def _time(self, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        return self._clock * _LONGEST - np.minimum(positions, _LONGEST - 1)

    def _use(self, places: Int32[np.ndarray, " n"], first: int) -> None:
        self._records["used"][places] = self._time(first + np.arange(len(places)))

    def _take(self, keeper: int, n: int) -> Int[np.ndarray, " m"]:
        """Up to ``n`` of a keeper's places, which are nobody's then; none that was used just now."""
        free = self._free[keeper]
        if len(free) < n:
            self._evict(keeper, n - len(free))
        first = max(0, len(free) - n)
        taken = free[first:]
        del free[first:]  # what stays is not copied: a keeper may have millions
        return np.asarray(taken[::-1], np.int32)

    def _evict(self, keeper: int, n: int) -> None:
        first, last = self._bounds[keeper : keeper + 2]
        used = self._records["used"][first:last]
        held = np.flatnonzero(
            (self._records["low"][first:last] != 0) & (used <= (self._clock - 1) * _LONGEST)
        )
        n = min(len(held), max(n, int(_FEWEST_EVICTED * self.capacities[keeper])))
        if not n:
            return
        oldest = first + held[np.argpartition(used[held], n - 1)[:n]]
        for low in self._records["low"][oldest].tolist():
            del self._place_of[low]
        self._records["low"][oldest] = 0
        self._free[keeper] += oldest.tolist()

    def check_integrity(self) -> None:
        """``RuntimeError`` unless every place is free or some token's, and each is found. O(places)."""
        low = self._records["low"]
        held = np.flatnonzero(low)
        if {int(low[p]): int(p) for p in held} != self._place_of:
            raise RuntimeError("places and what they are found by do not agree")
        free = sorted(place for of_keeper in self._free + self._aside for place in of_keeper)
        if free != np.flatnonzero(low == 0).tolist():
            raise RuntimeError("places that are free are not those without a token")


def new_keys() -> tuple[int, int]:
    """For digests that nobody can foresee: two prompts with the same one would have each other's KV."""
    return secrets.randbits(64), secrets.randbits(64)


def _mixed(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Each number's bits, mixed (the finalizer of splitmix64; Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
