"""What goes with what, as a table: made by asking for the plans. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import why_not
from jaxlamina.steps.shape import StepShape

_LAYOUTS = {
    "one model worker, or shards of one": Layout((1, 2), "heads"),
    "the same, by requests or tokens": Layout((1, 2), "tokens"),
    "two copies, rotational": Layout((2, 3), "heads", 2, "rotational"),
    "two copies, fixed": Layout((2, 3), "heads", 2, "fixed"),
    "two stages": Layout((2, 3), "heads", 1, "stages", (0, 0, 1)),
    "a share on one model worker, or on shards of one, by heads": Layout((1, 2), "heads", local_share=0.5),
    "a share on one model worker, by tokens": Layout((1, 2), "tokens", local_share=0.5),
}
_ROWS = StepShape("decode", 12, 1, 16, rows=12, new=12)
_CHUNK = StepShape("chunk", 1, 8, 16, rows=1, new=8)
_STEPS: dict[str, dict[str, Any]] = {
    "rows as one batch": {},
    "rows, and a prompt alongside": {"chunk": _CHUNK},
    "rows as two staggered batches": {"n_batches": 2},
    "rows as three staggered batches": {"n_batches": 3},
    "rows with messages in parts": {"mini_batches": 3},
    "three staggered batches, and a prompt alongside": {"n_batches": 3, "chunk": _CHUNK},
    "messages in parts, and a prompt alongside": {"mini_batches": 3, "chunk": _CHUNK},
    "three staggered batches with messages in parts": {"n_batches": 3, "mini_batches": 3},
}


def combinations() -> str:
    """Markdown: kinds of step by layouts; "yes", or the number of the reason below."""
    reasons: list[str] = []
    lines = ["| a step of | " + " | ".join(_LAYOUTS) + " |", "|---" * (len(_LAYOUTS) + 1) + "|"]
    for name, changes in _STEPS.items():
        cells = []
        for layout in _LAYOUTS.values():
            reason = why_not(layout, msgspec.structs.replace(_ROWS, **changes))
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            cells.append("yes" if reason is None else f"no ({reasons.index(reason) + 1})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{n}. {reason}" for n, reason in enumerate(reasons, 1))])
