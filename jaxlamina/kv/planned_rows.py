"""A step's rows as workers are told of them: each worker's slots, padded to sizes that all have in common.

``SegmentSlots`` is what one worker gets, ``PlannedRows`` what all get and how the model's programs find it.
The functions make them of what `jaxlamina.kv.placement.plan_rows` cuts up. Plain numpy: knows rows, slots and
sizes; not which worker has which token (`jaxlamina.kv.pool_book`), no worker and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int32

from jaxlamina.kv.placement import NO_SLOT, PlacedIndices, RowsPlan
from jaxlamina.steps.shape import StepShape


class SegmentSlots(NamedTuple):
    """The slots on one worker of a step's rows, or of a prompt's tokens: R rows with up to C stored tokens, M
    new tokens."""

    slot_table: Int32[Any, "R C"]
    lengths: Int32[Any, " R"]
    new_slots: Int32[Any, " M"]  # ≥ S for none
    q_positions: dict[int, Int32[Any, "R T"]]  # by window, for tables that lost their positions

    def part(self, j: int, n: int) -> SegmentSlots:
        """The j-th of n equal parts of the rows and new tokens."""
        if n == 1:
            return self

        def cut(x: Any) -> Any:
            return x[j * (len(x) // n) : (j + 1) * (len(x) // n)]

        queries = {window: cut(x) for window, x in self.q_positions.items()}
        return SegmentSlots(cut(self.slot_table), cut(self.lengths), cut(self.new_slots), queries)


class PlannedRows(NamedTuple):
    """Rows or prompts as workers have them: their bucket, each worker's slots of each segment, and where the
    model's programs find each segment's rows and tokens (nothing by heads). ``local``: the slots of each
    segment of the KV that model ranks keep, in the batch's order; nothing where they keep none."""

    shape: StepShape
    slots: Sequence[tuple[SegmentSlots, ...]]
    at: tuple[PlacedIndices, ...]
    local: tuple[SegmentSlots, ...] = ()

    def with_chunk(self, chunk: PlannedRows) -> PlannedRows:
        """And a prompt alongside. Where model ranks keep a share, attention workers have to do with both or
        with neither, so that such steps are few."""
        rows = self
        if self.local and self.at:
            asks, stores = (any(getattr(x.shape, n) for x in (self, chunk)) for n in ("rows", "new"))
            rows, chunk = rows._of_all(asks, stores), chunk._of_all(asks, stores)
        slots = [own + more for own, more in zip(rows.slots, chunk.slots, strict=True)]
        shape = msgspec.structs.replace(rows.shape, chunk=chunk.shape)
        return PlannedRows(shape, slots, rows.at + chunk.at, rows.local + chunk.local)

    def _of_all(self, asks: bool, stores: bool) -> PlannedRows:
        """The same, but that attention workers are asked about all rows, or get all new tokens, of which they
        keep none, if they have to do with none of them so far."""
        shape, n_workers = self.shape, len(self.slots)
        more_rows = asks and not shape.rows and shape.kind != "prefill"
        more_new = stores and not shape.new
        n_rows = shape.batch if more_rows else shape.rows
        n_new = shape.batch * shape.tokens if more_new else shape.new

        def widened(slots: SegmentSlots) -> SegmentSlots:
            new_slots = np.full(n_new, NO_SLOT) if more_new else slots.new_slots
            if not more_rows:
                return segment_slots(slots.slot_table, slots.lengths, new_slots, slots.q_positions)
            table = np.zeros((n_rows, shape.context), np.int32)
            queries = {w: np.zeros((n_rows, shape.tokens), np.int32) for w in slots.q_positions}
            return segment_slots(table, np.zeros(n_rows, np.int32), new_slots, queries)

        def in_order(n: int) -> Int32[np.ndarray, "b n"]:
            return np.tile(np.arange(n, dtype=np.int32), (n_workers, 1))

        [at] = self.at
        if more_rows:
            at = at._replace(rows=in_order(n_rows), spread=in_order(shape.batch))
        at = at._replace(new=in_order(n_new)) if more_new else at
        shape = msgspec.structs.replace(shape, rows=n_rows, new=n_new)
        return PlannedRows(shape, [(widened(slots),) for [slots] in self.slots], (at,), self.local)


def segment_slots(
    slot_table: np.ndarray, lengths: np.ndarray, new_slots: np.ndarray, q_positions: dict[int, np.ndarray]
) -> SegmentSlots:
    arrays = (np.asarray(x, np.int32) for x in (slot_table, lengths, new_slots))
    return SegmentSlots(*arrays, {window: np.asarray(x, np.int32) for window, x in q_positions.items()})  # type: ignore[call-arg, arg-type]


def slots_in_plan(p: RowsPlan) -> SegmentSlots:
    return segment_slots(p.slot_table, p.lengths, p.new_slots, p.q_positions)


def by_batch(rows: np.ndarray, n: int) -> list[np.ndarray]:
    return [rows[j::n] for j in range(n)]


def batch_after_batch(rows: np.ndarray, n: int) -> np.ndarray:
    return np.concatenate(by_batch(rows, n)) if n > 1 else rows  # tables are large


def one_after_another(plans: Sequence[RowsPlan]) -> RowsPlan:
    """One worker's parts of several staggered batches as one; each counts its rows from 0."""
    fields = {
        name: np.concatenate([getattr(p, name) for p in plans])
        for name in RowsPlan._fields
        if name != "q_positions"
    }
    queries = {w: np.concatenate([p.q_positions[w] for p in plans]) for w in plans[0].q_positions}
    return RowsPlan(**fields, q_positions=queries)


def level(
    plans: Sequence[RowsPlan], b: int, c: int, n_new: int, sizes: tuple[int, int, int]
) -> list[RowsPlan]:
    """Workers' parts, all padded to the same ``sizes``: rows, stored tokens a row and new tokens.

    ``b``, ``c``, ``n_new``: of the whole batch: its rows, width of its slot table (0: nothing is asked of
    stored tokens), and new tokens. What is padded to all of the batch's rows, or to all of its new tokens, is
    in its order.
    """
    r, width, new = sizes
    return [_levelled(p, r, width, new, whole_rows=r == b, whole_new=new == n_new) for p in plans]


def _levelled(p: RowsPlan, r: int, width: int, n_new: int, *, whole_rows: bool, whole_new: bool) -> RowsPlan:
    n = len(p.rows)
    if whole_rows:
        here = np.flatnonzero(p.spread < n)
        from_, to, rows, spread = p.spread[here], here, np.arange(r), np.arange(len(p.spread))
    else:
        from_ = to = np.arange(n)
        rows, spread = _longer(p.rows, r, 0), np.where(p.spread >= n, r, p.spread)
    table = np.zeros((r, width), np.int32)
    table[to, : p.slot_table.shape[1]] = p.slot_table[from_]
    lengths = np.zeros(r, np.int32)
    lengths[to] = p.lengths[from_]
    queries = {window: np.zeros((r, *x.shape[1:]), np.int32) for window, x in p.q_positions.items()}
    for window, x in p.q_positions.items():
        queries[window][to] = x[from_]
    new, new_slots = _longer(p.new, n_new, 0), _longer(p.new_slots, n_new, NO_SLOT)
    if whole_new:
        kept = p.new_slots != NO_SLOT
        new, new_slots = np.arange(n_new), np.full(n_new, NO_SLOT, np.int32)
        new_slots[p.new[kept]] = p.new_slots[kept]
    return RowsPlan(
        rows.astype(np.int32),
        spread.astype(np.int32),
        table,
        lengths,
        queries,
        new.astype(np.int32),
        new_slots,
    )


def quarters(n: int, most: int, n_workers: int) -> int:
    """The next quarter of ``most`` that holds ``n`` and a worker's even share; 0 for none. A program is
    compiled for each size that occurs, so they are few: two workers' are a half, three quarters and all.

    >>> [quarters(n, 64, 2) for n in (0, 1, 32, 33, 50)], quarters(1, 64, 3)
    ([0, 32, 32, 48, 64], 32)
    """
    if not n:
        return 0
    step = -(-most // 4)
    share = -(-most // n_workers)
    return min(most, -(-max(n, share) // step) * step)


def _longer(x: np.ndarray, n: int, fill: int) -> np.ndarray:
    out = np.full((n, *x.shape[1:]), fill, np.int32)
    out[: len(x)] = x
    return out
