"""What of each request is not on the disk yet: kept by request, put together, dropped with it, and bounded.

Pure. Knows what a journal has of a request; nothing of disks and threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

MOST_BYTES = 64 * 2**20
"""Beyond which requests have no place here any more, where the disk takes nothing."""
_EACH_BYTES, _CACHED_BYTES, _TOKEN_BYTES = 1024, 128, 4  # about so many a request, a prompt found, a token

Row = tuple[str, str, bytes, int, int]
"""A request's key, path, body, when it was made, seed."""
Of = tuple[int, int]
"""Which of its prompts, which continuation."""


@dataclass
class Unwritten:
    """Of one request, in the order in which it is to be written. ``is_forgotten``: what the disk has of it is
    taken away first. ``row``: it is not there at all. ``anew``: sequences of which what it has is."""

    is_forgotten: bool = False
    row: Row | None = None
    anew: set[Of] = field(default_factory=set)
    tokens: dict[Of, array[int]] = field(default_factory=dict)
    cached: list[tuple[int, int]] = field(default_factory=list)
    ended_at: float | None = None
    error: tuple[int, bytes] | None = None  # that it ended with

    @property
    def is_nowhere(self) -> bool:
        """Whether the disk has nothing of it."""
        return self.row is not None and not self.is_forgotten

    @property
    def n_bytes(self) -> int:
        of_body = 0 if self.row is None else len(self.row[2])
        of_tokens = _TOKEN_BYTES * sum(map(len, self.tokens.values()))
        of_error = 0 if self.error is None else len(self.error[1])
        return _EACH_BYTES + of_body + of_tokens + _CACHED_BYTES * len(self.cached) + of_error

    def then(self, later: Unwritten) -> Unwritten | None:
        """Both in one; None: nothing of them has to be written any more."""
        if later.is_forgotten:
            return None if self.is_nowhere and later.row is None else later
        self.row = self.row or later.row
        for of in later.anew:
            self.tokens.pop(of, None)
        self.anew |= later.anew
        for of, ids in later.tokens.items():
            self.tokens.setdefault(of, array("i")).extend(ids)
        self.cached += later.cached
        self.ended_at, self.error = self.ended_at or later.ended_at, self.error or later.error
        return self


class UnwrittenRequests:
    """Of all requests. While the disk takes nothing (``fails``), a request that would take more than
    `MOST_BYTES` has no place here from then on: the disk keeps what it has of it until it ends."""

    def __init__(self) -> None:
        self.fails = False
        self.n_bytes = 0
        self._of: dict[str, Unwritten] = {}
        self._without: dict[str, bool] = {}  # who has no place, and whether the disk has nothing of it

    def __bool__(self) -> bool:
        return bool(self._of)

    def begin(self, row: Row) -> None:
        key, n_bytes = row[0], len(row[2])
        if self._has_room(key, n_bytes):
            self._at(key).row = row
            self.n_bytes += n_bytes
        else:
            self._without[key] = True

    def wrote(self, key: str, of: Of, token: int) -> None:
        if self._has_place(key, _TOKEN_BYTES):
            self._at(key).tokens.setdefault(of, array("i")).append(token)
            self.n_bytes += _TOKEN_BYTES

    def cut(self, key: str, of: Of, tokens: Sequence[int]) -> None:
        """It wrote these, and nothing after them."""
        n_bytes = _TOKEN_BYTES * len(tokens)
        if self._has_place(key, n_bytes):
            request = self._at(key)
            self.n_bytes += n_bytes - _TOKEN_BYTES * len(request.tokens.pop(of, ()))
            request.anew.add(of)
            if tokens:
                request.tokens[of] = array("i", tokens)

    def cached(self, key: str, which: int, n: int) -> None:
        if self._has_place(key, _CACHED_BYTES):
            self._at(key).cached.append((which, n))
            self.n_bytes += _CACHED_BYTES

    def ended(self, key: str, at: float, error: tuple[int, bytes] | None = None) -> None:
        if not self._without.get(key):
            of_it = self._at(key)
            of_it.ended_at, of_it.error = at, error
            self.n_bytes += 0 if error is None else len(error[1])

    def forget(self, key: str) -> None:
        had, is_nowhere = self._take(key), self._without.pop(key, False)
        if not is_nowhere and (had is None or not had.is_nowhere):
            self._put(key, Unwritten(is_forgotten=True))

    def take(self, most: int | None = None) -> dict[str, Unwritten]:
        """The first ``most`` requests, or all of them, which are to be written or put back."""
        if most is not None:
            first = dict(islice(self._of.items(), most))
            for key in first:
                self._take(key)
            return first
        taken, self._of, self.n_bytes = self._of, {}, 0
        return taken

    def put_back(self, taken: dict[str, Unwritten]) -> None:
        """It was not written."""
        for key, before in taken.items():
            later = self._take(key)
            both = before if later is None else before.then(later)
            if both is not None:
                self._put(key, both)

    def _has_place(self, key: str, n_bytes: int) -> bool:
        if key in self._without:
            return False
        if self._has_room(key, n_bytes):
            return True
        had = self._take(key)
        self._without[key] = had is not None and had.is_nowhere
        return False

    def _has_room(self, key: str, n_bytes: int) -> bool:
        more = n_bytes + (0 if key in self._of else _EACH_BYTES)
        return not self.fails or self.n_bytes + more <= MOST_BYTES

    def _at(self, key: str) -> Unwritten:
        if key not in self._of:
            self._put(key, Unwritten())
        return self._of[key]

    def _put(self, key: str, new: Unwritten) -> None:
        self._of[key] = new
        self.n_bytes += new.n_bytes

    def _take(self, key: str) -> Unwritten | None:
        found = self._of.pop(key, None)
        self.n_bytes -= 0 if found is None else found.n_bytes
        return found
