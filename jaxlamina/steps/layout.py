"""How a job's pools are laid out, as plans need it: workers, partition, where KV may lie, replicas or stages.
Pure: ranks and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxlamina.steps.shape import StepShape


class HeadsLink(NamedTuple):
    """What goes between a model rank and an attention worker: of a layer's KV heads, and the query heads that
    share them, these."""

    rank: int
    worker: int
    heads: range


@dataclass(frozen=True)
class Layout:
    """How the memory pool is laid out, as both kinds of rank need it.

    ``local_share``: of the KV, what model ranks keep and attend to themselves: 0 none (Lamina), 1 all (the
    unsplit model). By heads it says how many of each layer's KV heads those are; by requests and by tokens
    only whether there may be any: which tokens, `jaxlamina.kv.pool_book` decides.

    ``heads_over``: the model ranks that each have an equal share of every layer's heads, 0 … n - 1, where
    they share out the one replica that there is: `links` says which of them talks to whom. Each of them keeps
    KV of as many of its heads.
    """

    workers: tuple[int, ...]  # their ranks
    partition: str
    n_replicas: int = 1  # of the model: ranks 0 … n - 1, or one that several ranks share out
    mode: str = "fixed"  # of staggered batches: which replica runs a slice
    stages: tuple[int, ...] = ()  # of a pipeline: the model rank that runs each slice
    local_share: float = 0.0
    heads_over: int = 1

    @property
    def attends_locally(self) -> bool:
        """Whether model ranks keep KV, too."""
        return self.local_share > 0

    @property
    def has_pool(self) -> bool:
        """Whether attention workers keep any KV."""
        return self.local_share < 1

    @property
    def by_heads(self) -> bool:
        """Whether each that keeps KV has all tokens, of its share of the heads."""
        n_keepers = len(self.workers) * self.has_pool + self.attends_locally
        return self.partition == "heads" or n_keepers == 1

    def local_heads(self, n_kv_heads: int) -> int:
        """Of a layer's KV heads, those whose KV model ranks keep, all together: the last ones of each."""
        if self.attends_locally and not self.by_heads:
            return n_kv_heads
        found = local_heads(n_kv_heads, len(self.workers), self.local_share, self.heads_over)
        assert found is not None, "checked_partition has seen to it"
        return found

    def own_heads(self, index: int, n_kv_heads: int) -> range:
        """Those of them that the model rank of this index keeps.

        >>> Layout((2,), "heads", local_share=0.5, heads_over=2).own_heads(1, 8)
        range(6, 8)
        """
        stop = _part(n_kv_heads, index, self.heads_over).stop
        return range(stop - self.local_heads(n_kv_heads) // self.heads_over, stop)

    def pooled_heads(self, n_kv_heads: int) -> list[int]:
        """By heads, those whose KV attention workers keep, in the order in which they share them out.

        >>> Layout((2,), "heads", local_share=0.5, heads_over=2).pooled_heads(8)
        [0, 1, 4, 5]
        """
        kept = {h for i in range(self.heads_over) for h in self.own_heads(i, n_kv_heads)}
        return [h for h in range(n_kv_heads) if h not in kept]

    def heads_of_worker(self, index: int, n_kv_heads: int) -> range:
        """Those of as many as attention workers have together that the worker of this index has: by heads
        their numbers differ by one at most.

        >>> [Layout((1, 2), "heads").heads_of_worker(i, 3) for i in range(2)]
        [range(0, 1), range(1, 3)]
        """
        return _part(n_kv_heads, index, len(self.workers)) if self.by_heads else range(n_kv_heads)

    def links(self, replica: int, n_kv_heads: int) -> tuple[HeadsLink, ...]:
        """Who of a replica's ranks, or which prefill worker, exchanges which of a layer's heads with whom.

        n_kv_heads: as attention workers have together (`pooled_heads`); each has all of them, unless they
        share them out. In the order in which all do it: by ranks, then by workers.

        >>> Layout((2, 3), "heads", heads_over=2).links(0, 4)
        (HeadsLink(rank=0, worker=2, heads=range(0, 2)), HeadsLink(rank=1, worker=3, heads=range(2, 4)))
        >>> [link[1:] for link in Layout((2, 3, 4), "heads", heads_over=2).links(0, 6) if link.rank == 1]
        [(3, range(3, 4)), (4, range(4, 6))]
        """
        ranks = range(self.heads_over) if replica < self.heads_over else (replica,)
        found = []
        for i, rank in enumerate(ranks):
            for j, worker in enumerate(self.workers):
                of_rank = _part(n_kv_heads, i, len(ranks))
                of_worker = self.heads_of_worker(j, n_kv_heads)
                both = range(max(of_rank.start, of_worker.start), min(of_rank.stop, of_worker.stop))
                if both or not n_kv_heads:
                    found.append(HeadsLink(rank, worker, both))
        return tuple(found)

    def asks(self, segment: StepShape) -> bool:
        """Whether attention workers are asked about stored tokens."""
        if segment.kind == "prefill" or not self.has_pool:
            return False
        return self.by_heads or segment.rows > 0

    def stores(self, segment: StepShape) -> bool:
        """Whether attention workers get new tokens' keys and values."""
        return self.has_pool and (self.by_heads or segment.new > 0)

    def model_rank(self, slice_: int) -> int:
        """Who runs a slice of a step that is one batch, and has its attention: the first replica, or the
        slice's stage."""
        return self.stages[slice_] if self.stages else 0

    def slices_on(self, rank: int, n_slices: int) -> range:
        """The slices whose weights a model rank has."""
        if not self.stages:
            return range(n_slices)
        begin = self.stages.index(rank)
        return range(begin, begin + self.stages.count(rank))

    def local_layers(self, rank: int, n_layers: int) -> range:
        """The attention operators whose KV a model rank keeps a share of: those of its slices."""
        if not self.attends_locally:
            return range(0)
        own = self.slices_on(rank, n_layers + 1)
        return range(own.start, min(own.stop, n_layers))


def _part(n: int, index: int, of: int) -> range:
    return range(index * n // of, (index + 1) * n // of)


def local_heads(n_kv_heads: int, n_workers: int, share: float, n_ranks: int = 1) -> int | None:
    """How many of a layer's KV heads model ranks keep, each of ``n_ranks`` that share them out as many: as
    near to ``share`` as leaves each of the attention workers one at least. None where there is no such
    number; a share between 0 and 1 leaves both sides some.

    >>> [local_heads(8, 1, x) for x in (0, 0.25, 0.3, 0.01, 1)], local_heads(8, 3, 0.5)
    ([0, 2, 2, 1, 8], 4)
    >>> [local_heads(8, 1, x, 2) for x in (0.25, 0.3, 0.01)], local_heads(6, 2, 0.5, 3)
    ([2, 2, 2], 3)
    >>> local_heads(2, 2, 0.5) is None
    True
    """
    if n_kv_heads % n_ranks and share:
        return None
    if share in (0, 1):
        return round(share * n_kv_heads)
    able = _both_sides(n_kv_heads, n_workers, n_ranks)
    return min(able, key=lambda n: abs(n - share * n_kv_heads), default=None)


def even_local_heads(n_kv_heads: int, n_workers: int, n_ranks: int = 1) -> int | None:
    """How many of a layer's KV heads model ranks keep so that the rank or worker with most has fewest. Of
    such numbers it is one that leaves workers equal numbers, whose messages are alike, and then the one
    nearest to an even share. None where there are too few heads.

    >>> [even_local_heads(8, n) for n in (1, 2, 3, 7)], even_local_heads(7, 4), even_local_heads(8, 1, 2)
    ([4, 2, 2, 1], 1, 6)
    >>> even_local_heads(2, 2) is None
    True
    """
    if n_kv_heads % n_ranks:
        return None
    even = n_kv_heads * n_ranks / (n_ranks + n_workers)

    def order(n: int) -> tuple[int, bool, float]:
        n_pooled = n_kv_heads - n
        return max(n // n_ranks, -(-n_pooled // n_workers)), n_pooled % n_workers > 0, abs(n - even)

    return min(_both_sides(n_kv_heads, n_workers, n_ranks), key=order, default=None)


def _both_sides(n_kv_heads: int, n_workers: int, n_ranks: int) -> list[int]:
    """The numbers of heads that model ranks can keep, each as many, so that every worker has one, too."""
    return [n for n in range(n_ranks, n_kv_heads, n_ranks) if n_kv_heads - n >= n_workers]
