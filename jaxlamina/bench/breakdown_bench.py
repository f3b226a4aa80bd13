"""What a decode step's time goes into on each rank of this job: recorded steps of a model shape with random
weights.

One batch and staggered ones, each recorded on all ranks at once (`jaxlamina.profiling`). Knows executors and
timelines; nothing of tables and figures, nor of how ranks were started.

Source: Lamina 2025 §6.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxlamina.bench.step_bench import alone, largest_of, over_ranks, shuffled_batch
from jaxlamina.bench.step_ways import StepCase, check_cut, check_unsplit
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.models.causal_lm import HasModel
from jaxlamina.profiling.timeline import Timeline
from jaxlamina.ranks import Group
from jaxlamina.run.recording import RecordingExecutor


@dataclass(frozen=True)
class Breakdown:
    """One way of running one case."""

    case: StepCase
    n_batches: int
    timeline: Timeline
    untraced_ms: float  # a step waited for, median, without the profiler, with what rank 0 does between steps

    @property
    def way(self) -> str:
        return "one batch" if self.n_batches == 1 else f"{self.n_batches} staggered"

    def __str__(self) -> str:
        return f"{self.case}, {self.way}"

    def to_dict(self) -> dict[str, Any]:
        """Milliseconds a step and shares, for each pool (its ranks' mean) and each rank."""
        t = self.timeline
        groups = {pool: t.ranks_of(pool) for pool in t.pools}
        return {
            "case": str(self.case),
            "batch": self.case.batch,
            "context": self.case.context,
            "n_batches": self.n_batches,
            "n_steps": len(t.windows),
            "step_ms": t.step_ms,
            "untraced_ms": self.untraced_ms,
            "n_unmatched_exchanges": t.n_unmatched,
            "pools": {pool: {"ms": t.ms(ranks), "shares": t.shares(ranks)} for pool, ranks in groups.items()},
            "ranks": [
                {"rank": x.rank, "name": x.name, "pool": x.pool}
                | {"ms": t.ms([x.rank]), "shares": t.shares([x.rank])}
                for x in t.traces
            ],
        }  # fmt: skip


def check(cluster: Cluster, cases: Sequence[StepCase], staggered: Sequence[int]) -> None:
    """``UserError`` for a number of staggered batches that a case cannot be cut into, or that the job cannot
    run."""
    check_cut(cases, staggered)
    check_unsplit(cluster, {"--staggered": staggered})
    a = cluster.n_replicas
    for n in staggered:
        if cluster.pipelining_mode == "rotational" and n != a + 1:
            raise UserError(
                f"--staggered {n}: these ranks rotate {a + 1} batches over {a} model workers; "
                f'take --staggered {a + 1}, or pipelining = "fixed" in the cluster\'s file'
            )
        if n < a:
            raise UserError(f"--staggered {n}: of {a} model workers some would idle; take at least {a}")


def measure(
    source: HasModel,
    cases: Sequence[StepCase],
    *,
    group: Group,
    dtype: Any,
    n_steps: int,
    staggered: Sequence[int] = (),
    on_progress: Callable[[str], object] = lambda _: None,
) -> list[Breakdown]:
    """Each case as one batch and as each number of ``staggered`` ones. ``UserError`` as `check`, and for a
    rank whose profiler says nothing."""
    check(group.cluster, cases, staggered)
    on_progress("weights")
    n_slots = max(case.batch * (case.context + 1) for case in cases)
    known = source.model, source.load(dtype, group.device), group, n_slots, largest_of(cases)
    executor = over_ranks(RecordingExecutor, *known)
    found = []
    for case in cases:
        batch = shuffled_batch(case, n_slots, source.model.vocab_size)
        executor.pool.assume_stored(batch)
        for n in (1, *staggered):
            executor.n_batches = n
            on_progress(f"{case}, n {n}: compiling")
            executor.decode(batch).block_until_ready()
            on_progress(f"{case}, n {n}: recording {n_steps} steps")
            alone_ms = alone(partial(executor.decode, batch), n_steps) * 1e3
            found.append(Breakdown(case, n, executor.record(batch, n_steps), alone_ms))
    return found
