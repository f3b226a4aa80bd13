"""A recorded step as the page draws it: one lane per rank, whose spans fill the step exactly.

Plain data in and out. Knows timelines; no server.
"""

from __future__ import annotations

from typing import Any

from jaxlamina.profiling.timeline import POOLS, Timeline
from jaxlamina.transports.scopes import KINDS


def gantt_of(found: Timeline, at: float) -> dict[str, Any]:
    """Of a recording that was made ``at`` (Unix time, seconds), the step whose length is the median.

    ``step_ms``: its length. ``lanes``: of each rank of the two pools ``rank``, ``name``, ``pool`` and
    ``spans``, each [index in ``kinds``, slice or layer (-1: none), batch (-1: none), start_us, length_us].
    """
    by_length = sorted(range(len(found.windows)), key=lambda k: found.windows[k][1] - found.windows[k][0])
    step = by_length[len(by_length) // 2]
    begin, end = found.windows[step]
    lanes = [
        {
            "rank": trace.rank,
            "name": trace.name,
            "pool": trace.pool,
            "spans": [
                [
                    KINDS.index(span.scope.kind),
                    span.scope.number,
                    span.scope.batch,
                    (span.start_ns - begin) / 1e3,
                    span.duration_ns / 1e3,
                ]
                for span in found.lines[trace.rank][step]
            ],
        }
        for trace in found.traces
        if trace.pool in POOLS
    ]
    return {"at": at, "step_ms": (end - begin) / 1e6, "kinds": list(KINDS), "lanes": lanes}
