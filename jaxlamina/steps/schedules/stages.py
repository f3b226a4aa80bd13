"""Which slices make up which stage of a pipeline. Knows costs and nothing of what they are: bytes, or
seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], n_stages: int) -> tuple[int, ...]:
    """Each slice's stage, for slices of these costs: every stage has some slices in a row, one at least.

    The costliest stage costs as little as can be, then the next costliest, and so on. ``ValueError`` for more
    stages than slices.

    >>> balanced([5, 1, 1, 1, 4], 2)
    (0, 0, 1, 1, 1)
    """
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n_stages=} must be within 1 … {n}, the slices")
    up_to = [0, *accumulate(costs)]
    # By slices so far, the best stages for them: their costs, the highest first, and where each one ends.
    # What is added to two lists alike leaves them in the order they were in, so the best goes on from a best.
    best: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {0: ((), ())}
    for n_more in reversed(range(n_stages)):
        best = {
            end: min(
                (tuple(sorted((*sizes, up_to[end] - up_to[begin]), reverse=True)), (*ends, end))
                for begin, (sizes, ends) in best.items()
                if begin < end
            )
            for end in range(n_stages - n_more, n - n_more + 1)
        }
    begins = (0, *best[n][1])
    return tuple(stage for stage in range(n_stages) for _ in range(begins[stage], begins[stage + 1]))
