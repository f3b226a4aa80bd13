"""Rows' stored tokens, apart by who keeps them, from decode step to decode step.

Of a step's slot table most is as it was in the step before: a row that goes on has one token more. So what
has been told apart is kept, and only what is new is looked up: of 160 rows of 4,096 tokens a fifth of the
time that all of it takes. Knows slots and places; numpy only, no device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from jaxlamina.kv.placement import NOWHERE, Placement


class Apart(NamedTuple):
    """By keeper, of all rows in the batch's order: local slots, by position, and how many."""

    tables: list[Int32[np.ndarray, "B C"]]
    counts: Int32[np.ndarray, "keepers B"]


class RowsApart:
    """``of`` each decode step; ``forget`` slots whose places change."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._changed = np.zeros(placement.n_slots, bool)
        self._has_changed = False
        self._table = np.zeros((0, 0), np.int32)
        self._lengths = np.zeros(0, np.int32)
        self._last: Apart | None = None
        # Of the last step's rows, by the slot of the token that they stored, or of the newest one before.
        self._row_of: dict[int, tuple[int, bool]] = {}

    def forget(self, slots: Int[np.ndarray, " n"]) -> None:
        """Rows that have any of these are looked up anew."""
        if len(slots):
            self._changed[slots], self._has_changed = True, True

    def of(
        self,
        slot_table: Int32[np.ndarray, "B C"],
        lengths: Int32[np.ndarray, " B"],
        new_slots: Int32[np.ndarray, " B"],
    ) -> Apart:
        """``new_slots``: of the tokens that the step stores, whose rows are looked for in the next one.
        ``ValueError`` for a stored token that is nowhere."""
        b, c = slot_table.shape
        n = self._placement.n_workers
        from_, grown = self._known(slot_table, lengths)
        tables = [np.zeros((b, c), np.int32) for _ in range(n)]
        counts = np.zeros((n, b), np.int32)
        on, last = np.flatnonzero(from_ >= 0), self._last
        if len(on) and last is not None:
            width = min(c, last.tables[0].shape[1])
            own = from_[on]
            is_all = len(on) == b and bool((own == np.arange(b)).all())
            for w in range(n):
                if is_all:
                    tables[w][:, :width] = last.tables[w][:b, :width]
                else:
                    tables[w][on, :width] = last.tables[w][own, :width]
            counts[:, on] = last.counts[:, own]
            more = on[grown[on]]
            newest = slot_table[more, lengths[more] - 1]
            keeper = self._placement.worker[newest]
            _check(keeper, newest)
            for w in range(n):
                rows = more[keeper == w]
                tables[w][rows, counts[w, rows]] = self._placement.local[newest[keeper == w]]
                counts[w, rows] += 1
        for row in np.flatnonzero(from_ < 0):
            slots = slot_table[row, : lengths[row]]
            keeper = self._placement.worker[slots]
            _check(keeper, slots)
            local = self._placement.local[slots]
            for w in range(n):
                here = local[keeper == w]
                tables[w][row, : len(here)] = here
                counts[w, row] = len(here)
        self._table, self._lengths, self._last = slot_table, lengths, Apart(tables, counts)
        newest = slot_table[np.arange(b), np.maximum(lengths - 1, 0)] if c else new_slots
        self._row_of = {int(slot): (row, False) for row, slot in enumerate(newest)}
        self._row_of |= {int(slot): (row, True) for row, slot in enumerate(new_slots)}
        self._changed[:], self._has_changed = False, False
        return self._last

    def _known(
        self, slot_table: Int32[np.ndarray, "B C"], lengths: Int32[np.ndarray, " B"]
    ) -> tuple[Int32[np.ndarray, " B"], Bool[np.ndarray, " B"]]:
        """Which row of the last step each is, -1 for one that is looked up; and whether with one token more:
        a step may be run again."""
        found, grown = np.full(len(lengths), -1, np.int32), np.zeros(len(lengths), bool)
        for row, length in enumerate(lengths):
            if not length:
                continue
            was, one_more = self._row_of.get(int(slot_table[row, length - 1]), (-1, False))
            if was < 0 or self._lengths[was] + one_more != length:
                continue
            slots = slot_table[row, :length]
            same = np.array_equal(slots[: length - one_more], self._table[was, : length - one_more])
            if same and not (self._has_changed and self._changed[slots].any()):
                found[row], grown[row] = was, one_more
        return found, grown


def _check(keepers: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
    if (keepers == NOWHERE).any():
        raise ValueError(f"slots {slots[keepers == NOWHERE][:8]} are read but hold nothing")
