"""Which token prefixes have their KV in a store beside the pools: in host memory, by content, also after the
end of the process.

Policy on plain numpy; it knows token ids, places and who keeps a slot's KV, no KV array, no device, no
request. A token's KV follows from the tokens up to it, so a place is found by their digest: a keyed sum, of
which a longer prefix's is made from a shorter one's.

Each keeper (an attention worker, or all of them where each has every token) has places of its own, in one
range; a token is kept where its KV is. Time goes by rounds. A place whose token was used longest ago is given
to another first, and of one round's the one that is furthest from its prefix's beginning. So of prefixes that
are all in use, and have not room together, each keeps its first tokens, up to the same length.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, UInt64

Tokens = Sequence[int] | np.ndarray
RECORD = np.dtype([("low", "<u8"), ("high", "<u8"), ("used", "<i8")])
"""What is known of a place: its token's digest (low 0: of none), and when it was used."""
WHOLE = "all heads, stages "
"""Of a place that has all of a token's KV, whoever else keeps some."""
TOGETHER = "+"
"""Between the names of workers that are one keeper."""
EVERY_STEPS = 16
"""Steps after which what a request has written is kept, at most; what it has read is at once."""
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

NOTHING_KEPT = np.empty(0, np.int32)  # places


class Kept(NamedTuple):
    """Tokens that are to be kept: which of those that were asked about, and where; ``marks``: what each place
    is known by from then on. ``at``: where the first n of those that were asked about are then, these and
    others."""

    which: Int[np.ndarray, " m"]
    places: Int32[np.ndarray, " m"]
    marks: UInt64[np.ndarray, " m"]
    at: Int32[np.ndarray, " n"]


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
    ``identity``: what KV depends on beside tokens, and how many places somebody has asked for. ``n_places``:
    of all keepers, or a worker's own; None: as many as it has slots. As far as memory goes, of which
    ``n_sharing`` processes of a host have an equal part each. ``ahead``: only
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
    """``find`` before a prompt is computed, ``add`` what has been; each round (`next_round`) ``use`` what is
    still of use.

    ``capacities``: each keeper's places, which are numbered one keeper after another. ``records``: of an
    earlier process, written to as this one goes on (anything like an array of `RECORD`); ``keys``: with which
    its digests were made; ``marks``: what keepers say that their places hold. What is not both is forgotten.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        records: np.ndarray | None = None,
        keys: tuple[int, int] | None = None,
        marks: UInt64[np.ndarray, " places"] | None = None,
    ) -> None:
        self.capacities = tuple(capacities)
        self._bounds = np.cumsum([0, *self.capacities])
        n = int(self._bounds[-1])
        self._records = np.zeros(n, RECORD) if records is None else records
        if len(self._records) != n:
            raise ValueError(f"{len(self._records)} records are not of {n} places")
        if marks is not None:
            self._records["low"][self._records["low"] != marks] = 0
        self.keys = new_keys() if keys is None else keys
        self._clock = int(self._records["used"].max(initial=0)) // _LONGEST + 1
        self._place_of: dict[int, int] = {}
        self._free: list[list[int]] = []
        # Of each keeper: if it has no free place, none of its tokens was used before.
        self._oldest = np.zeros(len(self.capacities), np.int64)
        self._to_go: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of each keeper, as `_first_to_go` has it
        self._aside: list[list[int]] = []  # of each keeper: nobody's, and there may be no memory for them
        self._read()
        self.n_kept_tokens = self.n_lost_tokens = 0

    def _read(self) -> None:
        low = self._records["low"]
        held = np.flatnonzero(low)
        self._place_of = dict(zip(low[held].tolist(), held.tolist(), strict=True))
        # Two have the same if a keeper comes back, and another has computed it meanwhile.
        low[np.setdiff1d(held, np.fromiter(self._place_of.values(), np.intp), assume_unique=True)] = 0
        self._oldest[:] = 0
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

    @property
    def fewest_free(self) -> int:
        """Places that have no token yet, of the keeper that has the fewest."""
        return min(map(len, self._free), default=0)

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
        places = places[: _n_until(self._records["high"][places] != digests.high[: len(places)])]
        self._use(places, digests.first)
        return places

    def next_round(self) -> None:
        """What was used before may go first from now on."""
        self._clock += 1
        self._oldest[:] = 0
        self._to_go.clear()

    def use(self, places: Int32[np.ndarray, " n"], digests: Digests) -> int:
        """How many of these tokens are still at the ``places`` that `add` said, without a gap. They are in
        use."""
        n = _n_until(self._records["low"][places] != digests.low[: len(places)])
        self._use(places[:n], digests.first)
        return n

    def add(self, digests: Digests, keepers: Int[np.ndarray, " n"]) -> Kept:
        """Places for those of these tokens that have none, each at its keeper. All are in use. Nothing is
        kept from the first one on that there is no place for: it would not be found."""
        times = self._time(digests.first + np.arange(len(digests)))
        n = _n_until(times < self._oldest[keepers])
        digests, keepers, times = digests.part(0, n), keepers[:n], times[:n]
        get = self._place_of.get
        at = np.fromiter((get(low, -1) for low in digests.low.tolist()), np.int32, n)
        known = np.flatnonzero(at >= 0)
        self._records["used"][at[known]] = times[known]
        is_new = at < 0
        for keeper in np.unique(keepers[is_new]):
            wanted = np.flatnonzero(is_new & (keepers == keeper))
            taken = self._take(int(keeper), times[wanted])
            at[wanted[: len(taken)]] = taken
        # Those before may have been given their places.
        at[known[self._records["low"][at[known]] != digests.low[known]]] = -1
        n = _n_until(at < 0)
        self._give_back(at[n:][is_new[n:]], keepers[n:][is_new[n:]])
        which = np.flatnonzero(is_new[:n])
        places, marks = at[which], digests.low[which]
        # The digest last, so that a record is whole when it is found.
        self._records["high"][places] = digests.high[which]
        self._records["used"][places] = times[which]
        self._records["low"][places] = marks
        self._place_of.update(zip(marks.tolist(), places.tolist(), strict=True))
        self.n_kept_tokens += len(which)
        return Kept(which, places, marks, at[:n])

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
        self._oldest[:] = 0
        self._aside = [[] for _ in self._free]

    def clear(self) -> None:
        """Forgets everything."""
        self._records["low"] = 0
        self._read()

    def _time(self, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        return self._clock * _LONGEST - np.minimum(positions, _LONGEST - 1)

    def _use(self, places: Int32[np.ndarray, " n"], first: int) -> None:
        self._records["used"][places] = self._time(first + np.arange(len(places)))

    def _take(self, keeper: int, times: Int[np.ndarray, " n"]) -> Int32[np.ndarray, " m"]:
        """Places for a keeper's tokens that are used at ``times``, for the first of them: nobody's now."""
        free = self._free[keeper]
        if len(free) < len(times) and times[len(free)] > self._oldest[keeper]:
            self._evict(keeper, times[len(free) :])
        first = max(0, len(free) - len(times))
        taken = free[first:]
        del free[first:]  # what stays is not copied: a keeper may have millions
        self._oldest[keeper] = times[: len(taken)].min(initial=self._oldest[keeper])
        return np.asarray(taken[::-1], np.int32)

    def _give_back(self, places: Int32[np.ndarray, " n"], keepers: Int[np.ndarray, " n"]) -> None:
        """Those of ``places`` that `_take` gave, -1 for none."""
        for place, keeper in zip(places[places >= 0].tolist(), keepers[places >= 0].tolist(), strict=True):
            self._free[keeper].append(place)
            self._oldest[keeper] = 0

    def _evict(self, keeper: int, times: Int[np.ndarray, " n"]) -> None:
        """Takes places from a keeper's tokens that were used before those of ``times``, oldest first; and
        from some that were not used in this round."""
        oldest, ages = self._first_to_go(keeper, len(times))
        goes = ages <= (self._clock - 1) * _LONGEST
        goes[: len(times)] |= ages[: len(times)] < times[: len(ages)]
        n = _n_until(~goes)
        self._oldest[keeper] = ages[n] if n < min(len(times), len(ages)) else 0
        gone = np.sort(oldest[:n])[::-1]  # so that places which are given next are in a row
        for low in self._records["low"][gone].tolist():
            del self._place_of[low]
        self._records["low"][gone] = 0
        self._free[keeper] += gone.tolist()

    def _first_to_go(self, keeper: int, n: int) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " m"]]:
        """A keeper's ``n`` places that were used longest ago, if so many are, and when that was; or more.
        All are looked at for many at once: what was known in this round and is still so does as well."""
        low, used = self._records["low"], self._records["used"]
        places, ages = self._to_go.get(keeper, (NOTHING_KEPT, NOTHING_KEPT))
        is_so = (low[places] != 0) & (used[places] == ages)
        if is_so.sum() < n:
            first, last = self._bounds[keeper : keeper + 2]
            places = first + np.flatnonzero(low[first:last])
            m = min(len(places), max(n, int(_FEWEST_EVICTED * self.capacities[keeper])))
            ages = used[places]
            order = np.argpartition(ages, m - 1)[:m] if m else np.empty(0, np.intp)
            order = order[np.argsort(ages[order])]
            is_so = np.ones(m, bool)
            places, ages = self._to_go[keeper] = places[order], ages[order]
        return places[is_so], ages[is_so]

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


def _n_until(is_end: Bool[np.ndarray, " n"]) -> int:
    """How many come before the first True."""
    return int(is_end.argmax()) if is_end.any() else len(is_end)


def _mixed(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Each number's bits, mixed (the finalizer of splitmix64; Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
