"""Rows told apart from step to step give what all of it looked up anew gives, whatever happens between steps."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlamina.kv.placement import Placement, plan_rows
from jaxlamina.kv.rows_apart import RowsApart

N_SLOTS, WIDTH = 120, 24


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_same_as_looked_up_anew(data: st.DataObject) -> None:
    placement = Placement(N_SLOTS, [N_SLOTS, N_SLOTS])
    apart, free, rows = RowsApart(placement), list(range(N_SLOTS)), list[list[int]]()
    draw = data.draw

    def place(slots: list[int]) -> None:
        wish = np.asarray([draw(st.integers(0, 1)) for _ in slots], np.int64)
        placement.place(np.asarray(slots, np.int64), wish)

    for _ in range(draw(st.integers(2, 8))):
        what = draw(st.sampled_from(["come", "end", "move", "again", "step", "step", "step"]))
        if what == "come" and len(free) > WIDTH and len(rows) < 5:
            rows.append([free.pop() for _ in range(draw(st.integers(0, 9)))])
            place(rows[-1])
        elif what == "end" and rows:
            slots = rows.pop(draw(st.integers(0, len(rows) - 1)))
            apart.forget(np.asarray(slots, np.int64))
            placement.release(np.asarray(slots, np.int64))
            free += slots
        elif what == "move" and rows:  # its tokens get other places
            slots = rows[draw(st.integers(0, len(rows) - 1))]
            apart.forget(np.asarray(slots, np.int64))
            place(slots)
        order = draw(st.permutations(range(len(rows))))
        rows = [rows[i] for i in order] if what == "step" and draw(st.booleans()) else rows
        if not rows or max(map(len, rows)) >= WIDTH or len(free) < len(rows):
            continue
        table, lengths = np.zeros((len(rows), WIDTH), np.int32), np.asarray([len(r) for r in rows], np.int32)
        for own, slots in zip(table, rows, strict=True):
            own[: len(slots)] = slots
        new = [free.pop() for _ in rows]
        place(new)
        found = apart.of(table, lengths, np.asarray(new, np.int32))
        wanted = plan_rows(placement, table, lengths, lengths[:, None], np.asarray(new)[:, None], [])
        for w, plan in enumerate(wanted):
            for row in range(len(rows)):
                n = int(found.counts[w, row])
                at = int(plan.spread[row])
                assert n == (plan.lengths[at] if at < len(plan.rows) else 0)
                assert found.tables[w][row, :n].tolist() == (plan.slot_table[at, :n].tolist() if n else [])
        if what == "again":  # a step may be run again
            free += new
        else:
            for slots, slot in zip(rows, new, strict=True):
                slots.append(slot)
