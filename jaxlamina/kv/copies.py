"""On which rank's host a second copy of a rank's kept KV lies, so that it outlives the rank's own host.

Policy on plain data; knows ranks and their hosts' names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def copy_holders(hosts: Sequence[str], keepers: Sequence[int], others: Sequence[int]) -> dict[int, int]:
    """For each of ``keepers``, the attention workers' ranks, the rank that holds a copy for it; none where
    all ranks are on its host. ``hosts``: each rank's. ``others``: ranks that keep no KV.

    It is on another host, and keeps KV itself if one there does; of those one with the fewest copies, the
    next one after the keeper. The same ranks on the same hosts always give the same.
    """
    n_copies: Counter[int] = Counter()
    found = {}
    for i, rank in enumerate(keepers):
        next_ones = [*keepers[i + 1 :], *keepers[:i]]
        elsewhere = [r for r in next_ones if hosts[r] != hosts[rank]]
        elsewhere = elsewhere or [r for r in others if hosts[r] != hosts[rank]]
        if elsewhere:
            found[rank] = min(elsewhere, key=n_copies.__getitem__)
            n_copies[found[rank]] += 1
    return found
