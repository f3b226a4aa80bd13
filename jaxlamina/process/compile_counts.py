"""A count of the programs that were compiled, by what they were compiled for. Knows nothing of what they
do."""

from __future__ import annotations

from collections import Counter


class Programs:
    """Counts compilations: a jitted function calls `compiled` in its body, and Python runs that once a
    program."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def compiled(self, what: str) -> None:
        """One more program, for ``what``, e.g. "attend, batch 8, context 256"."""
        self.counts[what] += 1

    @property
    def total(self) -> int:
        return self.counts.total()
