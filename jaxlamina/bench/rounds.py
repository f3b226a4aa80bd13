"""What is made of clocks, and of rounds in which ways take turns. Knows nothing of what is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any


def seconds_of(run: Callable[[], object]) -> float:
    """How long a call takes."""
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def best_rate(run: Callable[[], object], amount: float, passes: int) -> float:
    """``amount`` a second, of the best of so many calls."""
    return max(amount / seconds_of(run) for _ in range(passes))


def ratios(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """Each round's own, so that a slow spell of the machine hits both."""
    return [a / b for a, b in zip(some, others, strict=True)]


def record_of(found: Any, *properties: str) -> dict[str, Any]:
    """A dataclass's fields, and some of its properties."""
    return asdict(found) | {name: getattr(found, name) for name in properties}
