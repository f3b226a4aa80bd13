"""An attention rank as rank 0 has it: what it is to do with its KV, and a step's slots, as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlamina.control import messages as m
from jaxlamina.kv.pool_book import SegmentSlots
from jaxlamina.ranks.group import Group


class RemoteWorker:
    """A `jaxlamina.kv.pool_book.KVWorker` in another process."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self._rank = group, rank

    def copy_slots(self, src: np.ndarray, dst: np.ndarray) -> None:
        self._send(m.CopySlots(_ints(src), _ints(dst)))

    def move_out(self, slots: np.ndarray, host_slots: np.ndarray) -> None:
        self._send(m.MoveOut(_ints(slots), _ints(host_slots)))

    def move_in(self, host_slots: np.ndarray, slots: np.ndarray) -> None:
        self._send(m.MoveIn(_ints(host_slots), _ints(slots)))

    def forget_host(self, host_slots: np.ndarray) -> None:
        self._send(m.ForgetHost(_ints(host_slots)))

    def take_rows(self, slots: np.ndarray, *, host: bool) -> tuple[m.Array, ...]:
        self._send(m.TakeRows(_ints(slots), host))
        return self._group.receive(self._rank, m.Rows).rows

    def put_rows(self, slots: np.ndarray, rows: Sequence[Any]) -> None:
        self._send(m.PutRows(_ints(slots), tuple(rows)))

    def _send(self, message: m.Message) -> None:
        self._group.send(self._rank, message)


def slots_as_message(slots: SegmentSlots) -> dict[str, m.Array]:
    """A segment's slots on one worker, by name."""
    arrays = {name: getattr(slots, name) for name in SegmentSlots._fields[:-1]}
    arrays |= {f"q{window}": x for window, x in slots.q_positions.items()}
    return {name: m.Array.of(x) for name, x in arrays.items()}


def slots_from(arrays: dict[str, m.Array]) -> SegmentSlots:
    """What `slots_as_message` was given."""
    queries = {int(name.removeprefix("q")): x.numpy() for name, x in arrays.items() if name.startswith("q")}
    table, lengths, new_slots = (arrays[name].numpy() for name in SegmentSlots._fields[:-1])
    return SegmentSlots(table, lengths, new_slots, queries)


def _ints(x: np.ndarray) -> m.Array:
    return m.Array.of(np.asarray(x, np.int32))
