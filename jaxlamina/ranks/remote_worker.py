"""An attention rank as rank 0 has it: what it is to do with its KV, and a step's slots, as messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt8, UInt64

from jaxlamina.job.control import messages as m
from jaxlamina.job.group import PREPARE_DEADLINE_S, Group
from jaxlamina.kv.kept import KeptWanted, Lost
from jaxlamina.kv.planned_rows import SegmentSlots


class RemoteWorker:
    """A `jaxlamina.kv.kv_worker.KVWorker` in another process. ``copy_at``: where what it keeps from
    `open_kept` on is to have a copy."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self._rank = group, rank
        self.copy_at: str | None = None
        self._n_to_keep = 0  # tokens, since `open_kept`
        self._due = np.zeros(0, np.int64)  # of each place, how many are written once it is

    def copy_slots(self, src: Int[np.ndarray, " n"], dst: Int[np.ndarray, " n"]) -> None:
        self._send(m.CopySlots(_ints(src), _ints(dst)))

    def move_out(self, slots: Int[np.ndarray, " n"], host_slots: Int[np.ndarray, " n"]) -> None:
        self._send(m.MoveOut(_ints(slots), _ints(host_slots)))

    def move_in(self, host_slots: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        self._send(m.MoveIn(_ints(host_slots), _ints(slots)))

    def forget_host(self, host_slots: Int[np.ndarray, " n"]) -> None:
        self._send(m.ForgetHost(_ints(host_slots)))

    def take_rows(self, slots: Int[np.ndarray, " n"], *, host: bool) -> list[np.ndarray]:
        self._send(m.TakeRows(_ints(slots), host))
        return [rows.numpy() for rows in self._group.receive(self._rank, m.Rows).rows]

    def put_rows(self, slots: Int[np.ndarray, " n"], rows: Sequence[np.ndarray]) -> None:
        self._send(m.PutRows(_ints(slots), tuple(map(m.Array.of, rows))))

    def open_kept(self, name: str, wanted: KeptWanted) -> UInt64[np.ndarray, " places"]:
        self._send(m.OpenKept(name, *wanted, self.copy_at))
        found = self._group.receive(self._rank, m.KeptMarks, PREPARE_DEADLINE_S).marks.numpy()
        # What was kept before is written by now, and said to be.
        self._n_to_keep = self._group.control.n_kept[self._rank] = 0
        self._due = np.zeros(len(found), np.int64)
        self._group.control.not_kept.pop(self._rank, None)
        return found

    @property
    def n_behind(self) -> int:
        return self._n_to_keep - self._group.control.n_kept.get(self._rank, 0)

    def take_lost(self, places: Int[np.ndarray, " n"]) -> Lost:
        if len(places) and self._due[places].max() > self._group.control.n_kept.get(self._rank, 0):
            last = int(self._due[places].argmax())
            self.kept_rows(places[last : last + 1])  # comes once that is written, and the others are before
        said = self._group.control.not_kept.get(self._rank, deque())
        each = (said.popleft() for _ in range(len(said)))
        return Lost.joined(Lost(of.places.numpy(), of.marks.numpy()) for of in each)

    def keep(
        self, slots: Int[np.ndarray, " n"], places: Int[np.ndarray, " n"], marks: UInt64[np.ndarray, " n"]
    ) -> None:
        self._n_to_keep += len(slots)
        self._due[places] = self._n_to_keep
        self._send(m.Keep(_ints(slots), _ints(places), m.Array.of(marks)))

    def bring(self, places: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        self._send(m.Bring(_ints(places), _ints(slots)))

    def kept_rows(self, places: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n row_bytes"]:
        self._send(m.TakeKept(_ints(places)))
        [rows] = self._group.receive(self._rank, m.Rows).rows
        return rows.numpy()

    def put_bytes(self, slots: Int[np.ndarray, " n"], rows: UInt8[np.ndarray, "n row_bytes"]) -> None:
        self._send(m.PutBytes(_ints(slots), m.Array.of(rows)))

    def _send(self, message: m.Message) -> None:
        self._group.send(self._rank, message)


class SlotTables:
    """A step's slots as messages between rank 0 and an attention rank; both ends have one and see all steps
    of a model.

    Slot tables are large (2 MiB for 64 rows of 8,192 tokens), and most of a step's is as it was in the one
    before: a row that goes on has one slot more. So both ends keep the last one of each segment, and a
    message says what changed."""

    def __init__(self) -> None:
        self._last: dict[int, np.ndarray] = {}

    def as_message(
        self, segments: Sequence[SegmentSlots]
    ) -> tuple[tuple[dict[str, m.Array], ...], tuple[m.Changes | None, ...]]:
        """A `RunStep`'s segments and tables."""
        changes = tuple(self._changes(i, slots.slot_table) for i, slots in enumerate(segments))
        told = (_arrays(slots, of is None) for slots, of in zip(segments, changes, strict=True))
        return tuple(told), changes

    def slots_from(self, step: m.RunStep) -> tuple[SegmentSlots, ...]:
        """What the other end's `as_message` was given."""
        return tuple(
            self._slots(i, *one) for i, one in enumerate(zip(step.segments, step.tables, strict=True))
        )

    def _changes(self, i: int, table: Int[np.ndarray, "R C"]) -> m.Changes | None:
        last, self._last[i] = self._last.get(i), table
        if last is None or last.shape != table.shape:
            return None
        at = np.flatnonzero(last != table)
        return None if 4 * len(at) > table.size else m.Changes(_ints(at), _ints(table.reshape(-1)[at]))

    def _slots(self, i: int, arrays: dict[str, m.Array], changes: m.Changes | None) -> SegmentSlots:
        if changes is None:
            table = arrays["slot_table"].numpy()
        else:
            table = self._last[i].copy()  # a device may read the last one yet
            table.reshape(-1)[changes.at.numpy()] = changes.values.numpy()
        self._last[i] = table
        queries = {
            int(name.removeprefix("q")): x.numpy() for name, x in arrays.items() if name.startswith("q")
        }
        return SegmentSlots(table, arrays["lengths"].numpy(), arrays["new_slots"].numpy(), queries)


def _arrays(slots: SegmentSlots, with_table: bool) -> dict[str, m.Array]:
    arrays = {"lengths": slots.lengths, "new_slots": slots.new_slots}
    arrays |= {"slot_table": slots.slot_table} if with_table else {}
    arrays |= {f"q{window}": x for window, x in slots.q_positions.items()}
    return {name: m.Array.of(x) for name, x in arrays.items()}


def _ints(x: Int[np.ndarray, " n"]) -> m.Array:
    return m.Array.of(np.asarray(x, np.int32))
