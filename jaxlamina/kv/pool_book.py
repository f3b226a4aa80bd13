"""The book of the memory pool: which attention worker has which token, and what each is told of a step.

By heads every worker has every slot, so all are told the same. By requests or by tokens a slot is on one
worker, and a step's rows are cut up (`jaxlamina.kv.placement`); each worker's part is padded to the largest
(`jaxlamina.kv.planned_rows`), so that one bucket serves all. Knows slots and rows; no model, and of workers
only that they copy and move slots when told to (`jaxlamina.kv.kv_worker`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from jaxtyping import Int, UInt64

from jaxlamina.errors import UserError
from jaxlamina.kv.kept import TOGETHER, WHOLE, KeptFound, KeptWanted, Lost
from jaxlamina.kv.kv_worker import KVWorker, marks_of_all
from jaxlamina.kv.placement import (
    NO_SLOT,
    NOWHERE,
    Held,
    PlacedIndices,
    Placement,
    RowsPlan,
    plan_rows,
)
from jaxlamina.kv.planned_rows import (
    PlannedRows,
    SegmentSlots,
    batch_after_batch,
    by_batch,
    level,
    one_after_another,
    quarters,
    segment_slots,
    slots_in_plan,
)
from jaxlamina.kv.rows_apart import RowsApart
from jaxlamina.kv.wishes import Wishes, place_stored
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.shape import StepShape


class PoolBook:
    """``plan`` for each step; ``copy_slots`` and the others in between."""

    def __init__(
        self,
        workers: Sequence[KVWorker],
        layout: Layout,
        windows: Sequence[int],
        n_slots: int,
        n_host_slots: int,
        token_block: int,
        wishes: Wishes | None = None,
        capacities: Sequence[int] | None = None,
    ) -> None:
        """``workers``: the attention workers, and last what model ranks keep, if they keep any: several that
        share out heads. ``windows``: of the model's attention operators. ``token_block``: how many positions
        in a row stay together where tokens are divided. ``wishes``: where new tokens are to go, if not to all
        alike; ``capacities``: slots of each of ``workers``, if not an equal part of ``n_slots``."""
        self._workers, self._layout, self._windows = workers, layout, windows
        self._n_own = layout.heads_over if layout.attends_locally else 0
        self._n_attention = len(workers) - self._n_own
        self.n_slots, self._n_host_slots = n_slots, n_host_slots
        n = len(layout.workers) + layout.attends_locally
        capacities = capacities or [-(-n_slots // n)] * n
        self.placement = None if layout.by_heads else Placement(n_slots, capacities)
        self._capacities = [n_slots] * len(workers) if layout.by_heads else list(capacities)
        by_tokens = layout.partition == "tokens"
        self.wishes = wishes or Wishes(len(layout.workers), token_block if by_tokens else None)
        self._kept_bounds = np.zeros(1, np.intp)  # of each keeper's places
        self._host_worker = np.full(n_host_slots, -1, np.int32)
        is_apart = self.placement is not None and by_tokens and layout.attends_locally and not windows
        self._apart = RowsApart(self.placement) if is_apart and self.placement is not None else None

    def plan(
        self,
        kind: Literal["decode", "prefill", "chunk"],
        batch: DecodeBatch | PrefillBatch,
        q_first: bool,
        n_batches: int = 1,
        on_prefill_worker: bool = False,
        computed: bool = False,
    ) -> PlannedRows:
        """Of n staggered batches the j-th has rows j, j + n, …; what is told of them is batch after batch.
        Where attention workers have nothing of it, it is one batch. ``computed``: a prompt that is computed
        already, so that earlier tokens say where its new ones are best, and are asked nothing."""
        b, t = batch.tokens.shape
        earlier = batch.slot_table, batch.lengths
        if computed:
            batch = batch._replace(slot_table=batch.slot_table[:, :0], lengths=np.zeros(b, np.int32))
        new_slots = batch.new_slots[:, None] if isinstance(batch, DecodeBatch) else batch.slots
        q_first = q_first or kind == "prefill"  # where q does not travel at all
        if self.placement is None:
            context, n_batches = batch.slot_table.shape[1], n_batches if self._layout.has_pool else 1
            shape = StepShape(kind, b, t, context, q_first=q_first, n_batches=n_batches)
            known = batch.slot_table, batch.lengths, new_slots
            table, lengths, new = (batch_after_batch(x, n_batches) for x in known)
            slots = (segment_slots(table, lengths, new.reshape(-1), {}),)
            of_rank = slots if self._layout.attends_locally else ()
            return PlannedRows(shape, [slots] * len(self._layout.workers), (), of_rank)
        if on_prefill_worker and not self.is_for_workers(batch):  # type: ignore[arg-type]
            raise ValueError("a prefill worker does not reach what model ranks keep")
        rows = batch.slot_table, batch.lengths, batch.positions, new_slots
        self.wishes.place(self.placement, *earlier, *rows[2:], here=not on_prefill_worker)
        if isinstance(batch, DecodeBatch) and self._apart is not None:
            return self._decode_apart(batch, self._apart, q_first, n_batches)
        if n_batches > 1 and self._layout.attends_locally and self._is_local(batch, new_slots):
            n_batches = 1
        plans = [
            plan
            for table, lengths, positions, new in zip(*(by_batch(x, n_batches) for x in rows), strict=True)
            for plan in plan_rows(self.placement, table, lengths, positions, new, self._windows)
        ]
        n = self.placement.n_workers
        whole = b // n_batches, batch.slot_table.shape[1], new_slots.size // n_batches
        local: tuple[SegmentSlots, ...] = ()
        n_workers = len(self._layout.workers)
        if self._layout.attends_locally:
            own = plans[n_workers::n]
            local = (slots_in_plan(one_after_another(level(own, *whole, whole))),)
            if kind == "decode":
                n_local = int(local[0].lengths.sum())
                self.wishes.seen(n_local, int(batch.lengths.sum()) - n_local)
            plans = [plan for i, plan in enumerate(plans) if i % n < n_workers]
        plans = level(plans, *whole, self._sizes(plans, *whole))
        first = plans[0]
        sizes = first.slot_table.shape[1], len(first.rows), len(first.new)
        shape = StepShape(kind, b, t, *sizes, q_first, n_batches)
        workers = [one_after_another(plans[w::n_workers]) for w in range(n_workers)]
        at = PlacedIndices(*(np.stack([getattr(p, f) for p in workers]) for f in PlacedIndices._fields))  # type: ignore[arg-type]
        return PlannedRows(shape, [(slots_in_plan(p),) for p in workers], (at,), local)

    @property
    def has_few_shapes(self) -> bool:
        """Whether where tokens lie makes few kinds of step."""
        return self.placement is None or (self._layout.attends_locally and self.wishes.by_tokens)

    def ways_of(self, rows: PlannedRows, numbers: Sequence[int], *, all_local: bool) -> list[PlannedRows]:
        """The same rows of padding as they may also be planned, by where tokens lie: attention workers have
        nothing to do with them, are asked, or are asked and store. ``numbers``: of staggered batches where
        they take part. ``all_local``: only the first."""
        assert self.has_few_shapes and self.placement is not None
        found = []
        for asks, stores in ((False, False), (True, False), (True, True)):
            for n in numbers if asks else (1,):
                if not (asks and all_local) and rows.shape.batch % n == 0:
                    found.append(self._padding(rows, asks, stores, n))
        return found

    def _padding(self, rows: PlannedRows, asks: bool, stores: bool, n_batches: int) -> PlannedRows:
        def of_segment(segment: StepShape) -> StepShape:
            each = segment.batch // n_batches
            chunk = None if segment.chunk is None else of_segment(segment.chunk)
            n_rows = each if asks and segment.kind != "prefill" else 0
            n_new = each * segment.tokens if stores else 0
            sizes = {"rows": n_rows, "new": n_new, "n_batches": n_batches, "chunk": chunk}
            return msgspec.structs.replace(segment, **sizes)

        shape, n_workers = of_segment(rows.shape), len(self._layout.workers)

        def slots(n_rows: int, context: int, n_new: int, n_tokens: int) -> SegmentSlots:
            queries = {window: np.zeros((n_rows, n_tokens), np.int32) for window in self._windows}
            empty = np.zeros((n_rows, context), np.int32), np.zeros(n_rows, np.int32)
            return segment_slots(*empty, np.full(n_new, NO_SLOT), queries)

        of_worker = tuple(
            slots(n_batches * s.rows, s.context, n_batches * s.new, s.tokens) for s in shape.segments
        )
        local = tuple(slots(s.batch, s.context, s.batch * s.tokens, s.tokens) for s in shape.segments)
        at = tuple(
            PlacedIndices(
                *(
                    np.zeros((n_workers, n), np.int32)
                    for n in (n_batches * s.rows, s.batch, n_batches * s.new)
                )
            )
            for s in shape.segments
        )
        return PlannedRows(shape, [of_worker] * n_workers, at, local)

    def _decode_apart(
        self, batch: DecodeBatch, apart: RowsApart, q_first: bool, n_batches: int
    ) -> PlannedRows:
        """By tokens, with a share on model ranks: every row may have tokens on every side, so all have all
        rows, and whether workers are asked, and store, is all that shapes differ in."""
        assert self.placement is not None
        b, c = batch.slot_table.shape
        tables, counts = apart.of(batch.slot_table, batch.lengths, batch.new_slots)
        real = batch.new_slots < self.n_slots
        new = np.where(real, batch.new_slots, 0)
        keeper = np.where(real, self.placement.worker[new], NOWHERE)
        n_workers = len(self._layout.workers)
        n_local, n_all = int(counts[-1].sum()), int(counts.sum())
        self.wishes.seen(n_local, n_all - n_local)
        stores = bool((keeper[real] < n_workers).any())
        asks = stores or n_local < n_all
        n_batches = n_batches if asks else 1
        order = np.concatenate(by_batch(np.arange(b), n_batches))
        segments = [
            segment_slots(
                table[order] if n_batches > 1 else table,
                counts[w][order],
                np.where(keeper == w, self.placement.local[new], NO_SLOT)[order],
                {},
            )
            for w, table in enumerate(tables)
        ]
        each = b // n_batches
        rows, stored = each if asks else 0, each if stores else 0
        shape = StepShape("decode", b, 1, c, rows, stored, q_first, n_batches)
        of_workers = [
            (
                segment_slots(
                    segment.slot_table if asks else np.zeros((0, c), np.int32),
                    segment.lengths if asks else np.zeros(0, np.int32),
                    segment.new_slots if stores else np.zeros(0, np.int32),
                    {},
                ),
            )
            for segment in segments[:n_workers]
        ]
        own = [np.tile(np.arange(n, dtype=np.int32), (n_workers, n_batches)) for n in (rows, each, stored)]
        return PlannedRows(shape, of_workers, (PlacedIndices(*own),), (segments[-1],))

    def _is_local(self, batch: DecodeBatch | PrefillBatch, new_slots: Int[np.ndarray, "B T"]) -> bool:
        """Whether model ranks have all of it, and get what is new."""
        assert self.placement is not None
        owners = (
            self.placement.worker[stored_slots(batch)],
            self.placement.worker[new_slots[new_slots < self.n_slots]],
        )
        return all(bool((x == len(self._layout.workers)).all()) for x in owners)

    def _sizes(self, plans: Sequence[RowsPlan], b: int, c: int, n_new: int) -> tuple[int, int, int]:
        """Rows, stored tokens a row and new tokens that all attention workers' parts are padded to."""
        n = len(self._layout.workers)
        most = [max(len(p.rows) for p in plans), max(p.slot_table.shape[1] for p in plans)]
        most_new = max(len(p.new) for p in plans)
        if not self._layout.attends_locally:
            r, width = (quarters(max(1, x), of, n) if c else 0 for x, of in zip(most, (b, c), strict=True))
            return r, width, quarters(max(1, most_new), n_new, n)
        # With a model rank's share three kinds of program are enough by tokens: nothing goes to workers, they
        # are asked, or they are asked and store. Padding costs a table's bytes: attention goes by lengths.
        if not most[0] and not most_new:
            return 0, c, 0
        if self.wishes.by_tokens:
            return b if c else 0, c, n_new if most_new else 0
        return (quarters(max(1, most[0]), b, 4) if c else 0), c, quarters(most_new, n_new, 4)

    def is_for_workers(self, batch: PrefillBatch, n_others: int = 0) -> bool:
        """Whether attention workers have all tokens that a prompt follows, and room for its own, and for
        ``n_others`` more."""
        if self.placement is None or not self._layout.attends_locally:
            return True
        are_there = self.placement.worker[stored_slots(batch)] < len(self._layout.workers)
        return bool(are_there.all()) and self.workers_have_room(batch, n_others)

    def workers_have_room(self, batch: PrefillBatch, n_others: int = 0) -> bool:
        """Whether attention workers, all of them together, have it for a prompt's own tokens and ``n_others``
        more."""
        if self.placement is None or not self._layout.attends_locally:
            return True
        n_workers, new = len(self._layout.workers), self.new_slots(batch)
        before = self.placement.worker[new]  # of what these slots held, whose places are free then
        n_free = self.placement.n_free[:n_workers].sum() + ((before >= 0) & (before < n_workers)).sum()
        return bool(n_free >= len(new) + n_others)

    def new_slots(self, batch: DecodeBatch | PrefillBatch) -> Int[np.ndarray, " n"]:
        """Where a step's new tokens go, without padding."""
        slots = batch.new_slots if isinstance(batch, DecodeBatch) else batch.slots
        return slots[slots < self.n_slots]

    def assume_stored(self, batch: DecodeBatch | PrefillBatch) -> None:
        """As `jaxlamina.kv.wishes.place_stored` has it."""
        if self.placement is not None:
            self._forget(stored_slots(batch))
            place_stored(self.placement, self.wishes, batch.slot_table, batch.lengths)

    def held(self) -> list[Held]:
        """Of the attention workers, and last of what model ranks keep, if they keep any."""
        used = [None] * len(self._capacities) if self.placement is None else self.placement.n_used.tolist()
        return [
            Held("attention" if i < self._n_attention else "model", n, capacity)
            for i, (n, capacity) in enumerate(zip(used, self._capacities, strict=True))
        ]

    def copy_slots(self, src: Int[np.ndarray, " n"], dst: Int[np.ndarray, " n"]) -> None:
        """Slot ``src[i]``'s KV also into ``dst[i]``: beside its original where there is room, else on another
        worker."""
        if self.placement is None:
            for worker in self._workers:
                worker.copy_slots(src, dst)
            return
        self._forget(dst)
        self.placement.place(dst, self._placed(src))
        from_, to, local = self.placement.worker[src], self.placement.worker[dst], self.placement.local
        for w, u in _pairs(from_, to):
            goes = (from_ == w) & (to == u)
            if w == u:
                self._workers[w].copy_slots(local[src[goes]], local[dst[goes]])
            else:
                self._carry(w, local[src[goes]], u, local[dst[goes]], host=False)

    def move_out(self, slots: Int[np.ndarray, " n"], host_slots: Int[np.ndarray, " n"]) -> None:
        """Each worker keeps its tokens' KV in a host store of its own."""
        self._check_host(host_slots)
        if self.placement is None:
            for worker in self._workers:
                worker.move_out(slots, host_slots)
            return
        owners = self._placed(slots)
        before = self._host_worker[host_slots]
        for w, worker in enumerate(self._workers):
            stale = host_slots[(before == w) & (owners != w)]
            if len(stale):
                worker.forget_host(stale)
            mine = owners == w
            if mine.any():
                worker.move_out(self.placement.local[slots[mine]], host_slots[mine])
        self._host_worker[host_slots] = owners

    def move_in(self, host_slots: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        """Tokens come back to the worker they were on where there is room."""
        self._check_host(host_slots)
        if self.placement is None:
            for worker in self._workers:
                worker.move_in(host_slots, slots)
            return
        from_ = self._host_worker[host_slots]
        if (from_ < 0).any():
            raise ValueError(f"host slots {host_slots[from_ < 0]} hold nothing")
        self._forget(slots)
        self.placement.place(slots, from_)
        to, local = self.placement.worker[slots], self.placement.local[slots]
        for w, u in _pairs(from_, to):
            goes = (from_ == w) & (to == u)
            if w == u:
                self._workers[w].move_in(host_slots[goes], local[goes])
            else:
                self._carry(w, host_slots[goes], u, local[goes], host=True)
        self._host_worker[host_slots] = -1

    def open_kept(self, wanted: KeptWanted) -> KeptFound:
        """Workers that share out heads are one keeper; else each is one, and goes on where there are others
        beside it now. Places that are asked for are shared out as slots are."""
        share_heads = self.placement is None and len(self._workers) > 1
        wanted = wanted.of_layout(str(self._layout) if share_heads else WHOLE + str(self._layout.stages))
        names = [f"worker{w}" for w in range(self._n_attention)]
        names += ["own", *(f"own{i}" for i in range(1, self._n_own))][: self._n_own]
        each = [wanted] * len(names)
        if self.placement is not None and wanted.n_places is not None:
            bounds = np.cumsum([0, *self._capacities]) * wanted.n_places // sum(self._capacities)
            each = [wanted._replace(n_places=n) for n in np.diff(bounds).tolist()]
        marks = [
            worker.open_kept(name, of_worker)
            for worker, name, of_worker in zip(self._workers, names, each, strict=True)
        ]
        if share_heads:
            names, marks = [TOGETHER.join(names)], [marks_of_all(marks)]
        found = KeptFound(tuple(names), tuple(map(len, marks)), wanted.identity, np.concatenate(marks))
        self._kept_bounds = np.cumsum([0, *found.capacities])
        return found

    def keepers_of(self, slots: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Where the KV of ``slots`` can be kept."""
        return np.zeros(len(slots), np.intp) if self.placement is None else self._placed(slots)

    @property
    def n_behind(self) -> int:
        """Tokens, of the worker that is behind the most."""
        return max(worker.n_behind for worker in self._workers)

    def take_lost(self, places: Int[np.ndarray, " n"]) -> Lost:
        """By heads a token is lost where any worker has lost it."""
        if self.placement is None:
            return Lost.joined(worker.take_lost(places) for worker in self._workers)
        each, keepers = [], self._keepers_at(places)
        for w, worker in enumerate(self._workers):
            first = self._kept_bounds[w]
            lost = worker.take_lost(places[keepers == w] - first)
            each.append(lost._replace(places=lost.places + first))
        return Lost.joined(each)

    def keep(
        self, slots: Int[np.ndarray, " n"], places: Int[np.ndarray, " n"], marks: UInt64[np.ndarray, " n"]
    ) -> None:
        if self.placement is None:
            for worker in self._workers:
                worker.keep(slots, places, marks)
            return
        keepers = self._keepers_at(places)
        for w in np.unique(keepers):
            mine = keepers == w
            local = self.placement.local[slots[mine]]
            self._workers[w].keep(local, places[mine] - self._kept_bounds[w], marks[mine])

    def bring(self, places: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        """Tokens come back to the worker that keeps them where there is room."""
        if self.placement is None:
            for worker in self._workers:
                worker.bring(places, slots)
            return
        from_ = self._keepers_at(places)
        self._forget(slots)
        self.placement.place(slots, from_)
        to, local, own = (
            self.placement.worker[slots],
            self.placement.local[slots],
            places - self._kept_bounds[from_],
        )
        for w, u in _pairs(from_, to):
            goes = (from_ == w) & (to == u)
            if w == u:
                self._workers[w].bring(own[goes], local[goes])
            else:
                for piece in _carried(int(goes.sum())):
                    rows = self._workers[w].kept_rows(own[goes][piece])
                    self._workers[u].put_bytes(local[goes][piece], rows)

    def _keepers_at(self, places: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        found: np.ndarray = np.searchsorted(self._kept_bounds, places, "right") - 1
        return found

    def rehearse_moves(self, n: int) -> None:
        """On each worker n of its own slots, or all, to the host and back, whatever is there."""
        self._check_host(np.arange(n))
        for worker, n_slots in zip(self._workers, self._capacities, strict=True):
            slots = np.arange(min(n, n_slots))
            worker.move_out(slots, slots)
            worker.move_in(slots, slots)

    def release(self, slots: Int[np.ndarray, " n"]) -> None:
        """``slots`` are nobody's now: their places are free for others, which keeps the workers balanced."""
        if self.placement is not None:
            self._forget(slots)
            self.placement.release(slots)

    def _forget(self, slots: Int[np.ndarray, " n"]) -> None:
        """Their places change."""
        if self._apart is not None:
            self._apart.forget(slots)

    def _carry(self, w: int, from_: np.ndarray, u: int, to: np.ndarray, *, host: bool) -> None:
        """Tokens from one worker to another by way of this process: rare, so a slow line will do."""
        for piece in _carried(len(from_)):
            self._workers[u].put_rows(to[piece], self._workers[w].take_rows(from_[piece], host=host))

    def _placed(self, slots: np.ndarray) -> np.ndarray:
        assert self.placement is not None
        owners = self.placement.worker[slots]
        if (owners < 0).any():
            raise ValueError(f"slots {slots[owners < 0][:8]} are read but hold nothing")
        return owners

    def _check_host(self, host_slots: np.ndarray) -> None:
        if not self._n_host_slots:
            raise UserError("there are no host KV slots: give host_kv_slots (n_host_slots of an executor)")
        if len(host_slots) and not (0 <= host_slots.min() and host_slots.max() < self._n_host_slots):
            raise ValueError(f"host slots {host_slots} must be within 0 … {self._n_host_slots - 1}")


_MOST_CARRIED = 256  # slots at a time


def _carried(n: int) -> list[slice]:
    return [slice(first, first + _MOST_CARRIED) for first in range(0, n, _MOST_CARRIED)]


def stored_slots(batch: DecodeBatch | PrefillBatch) -> Int[np.ndarray, " n"]:
    """The slots of all tokens that rows follow."""
    return batch.slot_table[np.arange(batch.slot_table.shape[1]) < batch.lengths[:, None]]


def _pairs(from_: np.ndarray, to: np.ndarray) -> list[tuple[int, int]]:
    return sorted(set(zip(from_.tolist(), to.tolist(), strict=True)))
