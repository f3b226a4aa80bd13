"""Rank 0's picture of the memory pool: which attention rank has which token, and what each is told of a step.

By heads every rank has every slot, so all are told the same. By requests or by tokens a slot is on one rank, and a step's
rows are cut up (`jaxlamina.workers.partition`); each rank's part is padded to the largest, so that one bucket serves all.
Knows slots, rows and messages; no model and no array on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxlamina.control import messages as m
from jaxlamina.errors import UserError
from jaxlamina.ranks.group import Group
from jaxlamina.ranks.wires import PlacedIndices
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.shape import StepShape
from jaxlamina.workers.kv_pools import pieces
from jaxlamina.workers.partition import NO_SLOT, Placement, RowsPlan, place_new, place_stored, plan_rows
from jaxlamina.workers.spec import AttentionSpec

Arrays = dict[str, m.Array]


class PlannedRows(NamedTuple):
    """Rows or prompts as attention ranks have them: their bucket, what each attention rank is told of each segment, and where
    the model ranks' programs find each segment's rows and tokens (nothing by heads)."""

    shape: StepShape
    told: Sequence[tuple[Arrays, ...]]
    at: tuple[PlacedIndices, ...]

    def with_chunk(self, chunk: PlannedRows) -> PlannedRows:
        """And a prompt alongside."""
        told = [own + more for own, more in zip(self.told, chunk.told, strict=True)]
        return PlannedRows(msgspec.structs.replace(self.shape, chunk=chunk.shape), told, self.at + chunk.at)


class RemotePool:
    """``plan`` for each step; ``copy_slots`` and the others in between."""

    def __init__(
        self,
        group: Group,
        layout: Layout,
        specs: Sequence[AttentionSpec],
        n_slots: int,
        n_host_slots: int,
        token_block: int,
    ) -> None:
        self._group, self._layout = group, layout
        self.n_slots, self._n_host_slots = n_slots, n_host_slots
        self._windows = sorted({spec.window for spec in specs if spec.window is not None})
        b = len(layout.workers)
        self.placement = None if layout.by_heads else Placement(n_slots, [-(-n_slots // b)] * b)
        self._token_block = token_block if layout.partition == "tokens" else None
        self._host_worker = np.full(n_host_slots, -1, np.int32)

    def plan(
        self, kind: Any, batch: DecodeBatch | PrefillBatch, q_first: bool, n_batches: int = 1
    ) -> PlannedRows:
        """Of n staggered batches the j-th has rows j, j + n, …; what is told of them is batch after batch."""
        b, t = batch.tokens.shape
        new_slots = batch.new_slots[:, None] if isinstance(batch, DecodeBatch) else batch.slots
        q_first = q_first or kind == "prefill"  # where q does not travel at all
        if self.placement is None:
            context = batch.slot_table.shape[1]
            shape = StepShape(kind, b, t, context, q_first=q_first, n_batches=n_batches)
            known = batch.slot_table, batch.lengths, new_slots
            table, lengths, new = (np.concatenate(_staggered(x, n_batches)) for x in known)
            told = (_told(table, lengths, new.reshape(-1), {}),)
            return PlannedRows(shape, [told] * len(self._layout.workers), ())
        place_new(
            self.placement, self._token_block, batch.slot_table, batch.lengths, batch.positions, new_slots
        )
        rows = batch.slot_table, batch.lengths, batch.positions, new_slots
        plans = [
            plan
            for table, lengths, positions, new in zip(*(_staggered(x, n_batches) for x in rows), strict=True)
            for plan in plan_rows(self.placement, table, lengths, positions, new, self._windows)
        ]
        n_workers = len(self._layout.workers)
        sizes = b // n_batches, batch.slot_table.shape[1], new_slots.size // n_batches
        plans = level(plans, *sizes, n_workers=n_workers)
        shape = StepShape(
            kind,
            b,
            t,
            plans[0].slot_table.shape[1],
            len(plans[0].rows),
            len(plans[0].new),
            q_first,
            n_batches,
        )
        workers = [_one_after_another(plans[w::n_workers]) for w in range(n_workers)]
        at = PlacedIndices(*(np.stack([getattr(p, f) for p in workers]) for f in PlacedIndices._fields))  # type: ignore[arg-type]
        each = [(_told(p.slot_table, p.lengths, p.new_slots, p.q_positions),) for p in workers]
        return PlannedRows(shape, each, (at,))

    def assume_stored(self, batch: DecodeBatch | PrefillBatch) -> None:
        """As `jaxlamina.workers.partition.place_stored` has it."""
        if self.placement is not None:
            place_stored(self.placement, self._token_block, batch.slot_table, batch.lengths)

    def copy_slots(self, src: np.ndarray, dst: np.ndarray) -> None:
        if self.placement is None:
            self._group.broadcast(m.CopySlots(_ints(src), _ints(dst)))
            return
        self.placement.place(dst, self._placed(src))
        from_, to, local = self.placement.worker[src], self.placement.worker[dst], self.placement.local
        for w, u in _pairs(from_, to):
            goes = (from_ == w) & (to == u)
            if w == u:
                self._send(w, m.CopySlots(_ints(local[src[goes]]), _ints(local[dst[goes]])))
            else:
                self._carry(w, local[src[goes]], u, local[dst[goes]], host=False)

    def move_out(self, slots: np.ndarray, host_slots: np.ndarray) -> None:
        self._check_host(host_slots)
        if self.placement is None:
            self._group.broadcast(m.MoveOut(_ints(slots), _ints(host_slots)))
            return
        owners = self._placed(slots)
        before = self._host_worker[host_slots]
        for w in range(self.placement.n_workers):
            stale = host_slots[(before == w) & (owners != w)]
            if len(stale):
                self._send(w, m.ForgetHost(_ints(stale)))
            mine = owners == w
            if mine.any():
                self._send(w, m.MoveOut(_ints(self.placement.local[slots[mine]]), _ints(host_slots[mine])))
        self._host_worker[host_slots] = owners

    def move_in(self, host_slots: np.ndarray, slots: np.ndarray) -> None:
        self._check_host(host_slots)
        if self.placement is None:
            self._group.broadcast(m.MoveIn(_ints(host_slots), _ints(slots)))
            return
        from_ = self._host_worker[host_slots]
        if (from_ < 0).any():
            raise ValueError(f"host slots {host_slots[from_ < 0]} hold nothing")
        self.placement.place(slots, from_)
        to, local = self.placement.worker[slots], self.placement.local[slots]
        for w, u in _pairs(from_, to):
            goes = (from_ == w) & (to == u)
            if w == u:
                self._send(w, m.MoveIn(_ints(host_slots[goes]), _ints(local[goes])))
            else:
                self._carry(w, host_slots[goes], u, local[goes], host=True)
        self._host_worker[host_slots] = -1

    def release(self, slots: np.ndarray) -> None:
        if self.placement is not None:
            self.placement.release(slots)

    def _carry(self, w: int, from_: np.ndarray, u: int, to: np.ndarray, *, host: bool) -> None:
        """Tokens from one rank to another by way of this one: rare, so the slow line will do."""
        for piece in pieces(len(from_)):
            self._send(w, m.TakeRows(_ints(from_[piece]), host))
            rows = self._group.receive(self._layout.workers[w], m.Rows).rows
            self._send(u, m.PutRows(_ints(to[piece]), rows))

    def _send(self, worker: int, message: m.Message) -> None:
        self._group.send(self._layout.workers[worker], message)

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


def _staggered(rows: np.ndarray, n: int) -> list[np.ndarray]:
    return [rows[j::n] for j in range(n)]


def _one_after_another(plans: Sequence[RowsPlan]) -> RowsPlan:
    """One worker's parts of several staggered batches as one; each counts its rows from 0."""
    fields = {
        name: np.concatenate([getattr(p, name) for p in plans])
        for name in RowsPlan._fields
        if name != "q_positions"
    }
    queries = {w: np.concatenate([p.q_positions[w] for p in plans]) for w in plans[0].q_positions}
    return RowsPlan(**fields, q_positions=queries)


def level(plans: Sequence[RowsPlan], b: int, c: int, n_new: int, *, n_workers: int) -> list[RowsPlan]:
    """Workers' parts, all padded to the same rows, stored tokens a row and new tokens, of sizes that are few (`quarters`).

    ``b``, ``c``, ``n_new``: of a batch: its rows, width of its slot table (0: nothing is asked of stored tokens), and new
    tokens. What is asked or sent is never of size 0, though nobody may have any of it: no program could send that.
    """
    n = n_workers
    r = quarters(max(1, *(len(p.rows) for p in plans)), b, n) if c else 0
    c = quarters(max(1, *(p.slot_table.shape[1] for p in plans)), c, n) if c else 0
    new = quarters(max(1, *(len(p.new) for p in plans)), n_new, n)
    found = []
    for p in plans:
        table = np.zeros((r, c), np.int32)
        table[: p.slot_table.shape[0], : p.slot_table.shape[1]] = p.slot_table
        spread = np.where(p.spread >= len(p.rows), r, p.spread).astype(np.int32)
        queries = {window: _longer(x, r, 0) for window, x in p.q_positions.items()}
        kept = _longer(p.new, new, 0), _longer(p.new_slots, new, NO_SLOT)
        found.append(RowsPlan(_longer(p.rows, r, 0), spread, table, _longer(p.lengths, r, 0), queries, *kept))
    return found


def quarters(n: int, most: int, n_workers: int) -> int:
    """The next quarter of ``most`` that holds ``n`` and a worker's even share; 0 for none. A program is compiled for each
    size that occurs, so they are few: two workers' are a half, three quarters and all.

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


def _pairs(from_: np.ndarray, to: np.ndarray) -> list[tuple[int, int]]:
    return sorted(set(zip(from_.tolist(), to.tolist(), strict=True)))


def _ints(x: np.ndarray) -> m.Array:
    return m.Array.of(np.asarray(x, np.int32))


def _told(
    slot_table: np.ndarray, lengths: np.ndarray, new_slots: np.ndarray, q_positions: dict[int, np.ndarray]
) -> Arrays:
    arrays = {"slot_table": slot_table, "lengths": lengths, "new_slots": new_slots}
    arrays |= {f"q{window}": x for window, x in q_positions.items()}
    return {name: m.Array.of(np.asarray(x, np.int32)) for name, x in arrays.items()}
