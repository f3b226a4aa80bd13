"""What ``local_attention="auto"`` comes to under a load that stays as it is: which share of the KV the
balance wants once it has seen steps, and as how many staggered batches it has them run.

Knows the balance; no executor, no device and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxlamina.run.balance import Balance

_SAME = 0.01  # shares that differ by less are one
_MOST = 8


@dataclass(frozen=True)
class WantedShare:
    """``predicted_s``: of a step of the best share and number of staggered batches, by what was known before
    steps of ``share`` were run; None where that was nothing. ``n_batches``: as how many the last of these
    went."""

    share: float
    n_batches: int
    predicted_s: float | None


def choices(
    balance: Balance, n_rows: int, n_tokens: float, run: Callable[[float], int]
) -> tuple[WantedShare, ...]:
    """What is wanted one after the other, until the share stays. ``run``: has some steps run with a share on
    the model rank, of whose times the balance is told; as how many staggered batches the last of them
    went."""
    found: list[WantedShare] = []
    while len(found) < _MOST:
        best = balance.best(n_rows, n_tokens)
        if found and abs(best.share - found[-1].share) < _SAME:
            break
        found.append(WantedShare(best.share, run(best.share), best.step_s))
    return tuple(found)
