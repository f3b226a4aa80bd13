"""How a job's pools are laid out, as plans need it: workers, partition, where KV may lie, replicas or stages.
Pure: ranks and sizes."""

from __future__ import annotations

from dataclasses import dataclass

from jaxlamina.steps.shape import StepShape


@dataclass(frozen=True)
class Layout:
    """How the memory pool is laid out, as both kinds of rank need it.

    ``local_share``: of the KV, what model ranks keep and attend to themselves: 0 none (Lamina), 1 all (the
    unsplit model). By heads it says how many of each layer's KV heads those are; by requests and by tokens
    only whether there may be any: which tokens, `jaxlamina.kv.pool_book` decides.
    """

    workers: tuple[int, ...]  # their ranks
    partition: str
    n_replicas: int = 1  # of the model: ranks 0 … n - 1, or one that several ranks share out
    mode: str = "fixed"  # of staggered batches: which replica runs a slice
    stages: tuple[int, ...] = ()  # of a pipeline: the model rank that runs each slice
    local_share: float = 0.0

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
        """Of a layer's KV heads, those whose KV model ranks keep: the last ones."""
        if self.attends_locally and not self.by_heads:
            return n_kv_heads
        found = local_heads(n_kv_heads, len(self.workers), self.local_share)
        assert found is not None, "checked_partition has seen to it"
        return found

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


def local_heads(n_kv_heads: int, n_workers: int, share: float) -> int | None:
    """How many of a layer's KV heads a model rank keeps: as near to ``share`` as leaves each of the attention
    workers an equal number. None where there is no such number; a share between 0 and 1 leaves both sides
    some.

    >>> [local_heads(8, 1, x) for x in (0, 0.25, 0.3, 0.01, 1)], local_heads(8, 3, 0.5)
    ([0, 2, 2, 1, 8], 5)
    >>> local_heads(1, 1, 0.5) is None
    True
    """
    if share in (0, 1):
        return round(share * n_kv_heads)
    able = [n for n in range(1, n_kv_heads) if (n_kv_heads - n) % n_workers == 0]
    return min(able, key=lambda n: abs(n - share * n_kv_heads), default=None)
