"""Which rows of a mapping are pinned, and where: against the rows' bytes one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlamina.workers.pinned_pieces import PinnedPieces

PIECE = 64


class Noted:
    """What is pinned, as a driver would have it."""

    def __init__(self):
        self.pinned = {}

    def pin(self, address, n_bytes):
        assert address not in self.pinned
        self.pinned[address] = n_bytes

    def unpin(self, address):
        del self.pinned[address]

    def begin_copies(self, to, parts):
        raise AssertionError("nothing is copied here")

    def wait_for_copies(self):
        pass


@settings(max_examples=200, deadline=None)
@given(
    at=st.integers(0, 200),
    n_rows=st.integers(1, 40),
    row_bytes=st.integers(1, PIECE),
    data=st.data(),
)
def test_parts_are_the_rows_bytes_within_what_is_pinned(at, n_rows, row_bytes, data):
    address, n_bytes = 1000, at + n_rows * row_bytes
    pins = Noted()
    pieces = PinnedPieces(
        pins, address, n_bytes, at=at, n_rows=n_rows, row_bytes=row_bytes, piece_bytes=PIECE
    )
    rows = st.sets(st.integers(0, n_rows - 1))
    is_there = np.zeros(n_rows, bool)
    for _ in range(2):  # as a file fills
        is_there[list(data.draw(rows))] = True
        due = pieces.due(is_there).tolist()
        for piece in data.draw(st.sets(st.sampled_from(due))) if due else ():
            pieces.pin(piece)
    pinned = {b for start, n in pins.pinned.items() for b in range(start - address, start - address + n)}
    of_row = [range(at + i * row_bytes, at + (i + 1) * row_bytes) for i in range(n_rows)]
    # Nothing is pinned of what was not written, and all that is whole was due.
    assert not any(pinned & set(of_row[i]) for i in np.flatnonzero(~is_there))
    for first in range(0, n_bytes, PIECE):
        of_piece = set(range(first, min(first + PIECE, n_bytes)))
        is_whole = all(is_there[i] for i in range(n_rows) if of_piece & set(of_row[i]))
        assert (first // PIECE in pieces.due(is_there)) == (is_whole and not of_piece & pinned)
    every = np.arange(n_rows, dtype=np.int32)
    has = pieces.has(every)
    assert has.tolist() == [pinned >= set(of_row[i]) for i in range(n_rows)]
    asked = np.asarray(data.draw(st.permutations(every[has].tolist())), np.int32)
    parts = list(pieces.parts(asked))
    assert [b for a, n in parts for b in range(a - address, a - address + n)] == [
        b for i in asked for b in of_row[i]
    ]
    assert all(any(a >= start and a + n <= start + m for start, m in pins.pinned.items()) for a, n in parts)
    pieces.release()
    assert not pins.pinned and not pieces.has(every).any() and not pieces.n_pinned


def test_rows_that_follow_one_another_are_one_part():
    pieces = PinnedPieces(Noted(), 0, 8 * PIECE, at=0, n_rows=32, row_bytes=16, piece_bytes=4 * PIECE)
    assert list(pieces.parts(np.asarray([2, 3, 4, 9, 15, 16]))) == [(32, 48), (144, 16), (240, 16), (256, 16)]
    assert not list(pieces.parts(np.asarray([], np.int32)))
