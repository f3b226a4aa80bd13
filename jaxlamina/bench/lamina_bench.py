"""The papers' comparison: a model over pools of so many devices, beside the same model unsplit on as many, at
its best (Lamina 2025 §6.2, Figures 10 and 11).

Each way is a job of its own, `jaxlamina bench throughput`, on the same requests. Knows how jobs are started
and what they answer; nothing of models.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from jaxlamina.bench.compared_jobs import ComparedJob, late, launched, only, pretended, reason, run_at_once
from jaxlamina.bench.rounds import record_of

_BENCH = ("bench", "throughput")


@dataclass(frozen=True)
class ComparedWay:
    """Jobs that run at once: copies that share out the requests, or a single one."""

    name: str
    jobs: tuple[ComparedJob, ...]


@dataclass(frozen=True)
class WayMeasured:
    """Of all copies together: ``output_per_s`` their sum (each one's own median over rounds), ``batch`` and
    ``most_at_once`` their sums. ``tbt_ms``: the copies' median and 99th percentile, the worst of them.
    ``devices``: (what, shares of a recorded window: compute, exchange, idle), where one was recorded."""

    way: str
    output_per_s: float
    batch: float
    most_at_once: int
    tbt_ms: tuple[float, float]
    kv_slots: int
    warm_up_s: float
    devices: tuple[tuple[str, Mapping[str, float]], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return record_of(self)


@dataclass
class LaminaReport:
    """``not_chosen``: ways that there are, and that nobody asked for."""

    measured: list[WayMeasured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    not_chosen: Sequence[str] = ()

    @property
    def unsplit_not_measured(self) -> list[str]:
        """Ways that may be better than the best one without a split."""
        return [name for name in (*self.not_chosen, *self.left_out) if name.startswith("unsplit")]

    @property
    def best_homogeneous(self) -> WayMeasured | None:
        found = [m for m in self.measured if m.way.startswith("unsplit")]
        return max(found, key=lambda m: m.output_per_s, default=None)

    def ratio(self, measured: WayMeasured) -> float | None:
        """Tokens a second over those of the best way without a split."""
        best = self.best_homogeneous
        return None if best is None else measured.output_per_s / best.output_per_s

    def to_dict(self) -> dict[str, Any]:
        rows = [m.to_dict() | {"ratio_to_unsplit": self.ratio(m)} for m in self.measured]
        found = {"results": rows, "left_out": self.left_out, "jobs": self.records}
        return found | {"unsplit_not_measured": self.unsplit_not_measured}


def ways(
    n_devices: int, dops: Sequence[tuple[int, int]], shares: Sequence[str], *, on_gpus: bool
) -> list[ComparedWay]:
    """What can be compared on ``n_devices``: unsplit copies, unsplit by tensor parallelism over 2 and more
    (what divides them, and powers of two, which may leave devices idle), and each DOP with each share of the
    attention on model workers. Two model workers and more share out the weights, and keep a share of heads.
    Tensor parallelism is XLA's over the devices of one process, and this project's over ranks: DOP (n, 0).
    CPU processes all have the same processor."""
    found = [ComparedWay(f"unsplit, {n_devices} copies", _copies(n_devices, 1, on_gpus))]
    for n in range(2, n_devices + 1):
        n_copies, n_idle = divmod(n_devices, n)
        if not n_idle or n.bit_count() == 1:
            more = f", {n_copies} copies" if n_copies > 1 else ""
            more += f", {n_idle} idle" if n_idle else ""
            of_process, of_ranks = (_copies(n_copies, n, on_gpus, over_ranks) for over_ranks in (False, True))
            found.append(ComparedWay(f"unsplit, tensor parallel over {n}{more}", of_process))
            found.append(ComparedWay(f"unsplit, DOP ({n}, 0){more}", of_ranks))
    for a, b in dops:
        for share in shares:
            changes = [f"tensor_parallel={a}"] if a > 1 else []
            changes += ['partition="heads"'] if a > 1 and share != "0" else []
            words = (*launched(a, b, changes, "--local-attention", share, on_gpus=on_gpus), *_BENCH)
            environment = {} if not on_gpus else only(range(a + b))
            name = f"DOP ({a}, {b}), " + ("Lamina" if share == "0" else f"local attention {share}")
            found.append(ComparedWay(name, (ComparedJob(words, environment),)))
    return found


def measure(
    compared: Sequence[ComparedWay],
    options: Sequence[str],
    *,
    way_s: float,
    caps: Mapping[str, int] = {},
    not_chosen: Sequence[str] = (),
    on_progress: Callable[[str], object] = lambda what: None,
) -> LaminaReport:
    """Each way in turn, of at most ``way_s`` seconds. ``options``: of `bench throughput`, and ``caps`` those
    of them that a way's jobs share out. What fails or is late is left out, with its reason."""
    report = LaminaReport(not_chosen=not_chosen)
    for i, way in enumerate(compared):
        on_progress(f"{i + 1} of {len(compared)}: {way.name}")
        shared = [word for name, cap in caps.items() for word in (name, str(cap // len(way.jobs)))]
        try:
            records = _run(way, [*options, *shared], way_s)
        except KeyboardInterrupt:  # of hours of measuring, what there is already is told
            report.left_out |= {later.name: "interrupted" for later in compared[i:]}
            break
        if isinstance(records, str):
            report.left_out[way.name] = records
            on_progress(f"{way.name} is left out: {records}")
            continue
        report.records[way.name] = records
        report.measured.append(found := combined(way.name, records))
        on_progress(f"{way.name}: {found.output_per_s:,.0f} tokens/s, batch {found.batch:,.0f}")
    return report


def combined(way: str, records: Sequence[Mapping[str, Any]]) -> WayMeasured:
    """What the jobs of a way come to."""
    runs = [record["results"]["ours"] for record in records]

    def medians(key: str) -> list[float]:
        return [statistics.median(run[key] for run in of) for of in runs]

    def slowest_ms(which: int) -> float:
        return max(statistics.median(run["tbt_ms"][which] for run in of) for of in runs)

    under_load = [record["under_load"] for record in records if record["under_load"]]
    devices = [
        (rank["rank"] if len(records) == 1 else f"copy {i}", _shares(rank))
        for i, load in enumerate(under_load)
        for rank in load["ranks"]
    ]
    return WayMeasured(
        way,
        sum(medians("output_per_s")),
        sum(medians("batch")),
        sum(max(run["most_at_once"] for run in of) for of in runs),
        (slowest_ms(0), slowest_ms(1)),
        sum(record["kv_slots"] for record in records),
        max(record["warm_up_s"] for record in records),
        tuple(devices),
    )


def _shares(rank: Mapping[str, Any]) -> dict[str, float]:
    return {what: rank[what] for what in ("compute", "exchange", "idle")}


def _copies(n: int, n_each: int, on_gpus: bool, over_ranks: bool = False) -> tuple[ComparedJob, ...]:
    """``n`` processes, or jobs of ranks, of ``n_each`` devices each, with their shares of the requests."""
    shards: tuple[str, ...] = ()
    if over_ranks:
        words, there = (*launched(n_each, 0, [f"tensor_parallel={n_each}"], on_gpus=on_gpus), *_BENCH), {}
    else:
        words, there = (*_BENCH, "--no-split"), pretended(n_each)
        shards = ("--tensor-parallel", str(n_each)) if n_each > 1 else ()
    return tuple(
        ComparedJob(
            (*words, "--part", f"{i}/{n}", *shards),
            only(range(i * n_each, (i + 1) * n_each)) if on_gpus else there,
        )
        for i in range(n)
    )


def _run(way: ComparedWay, options: Sequence[str], way_s: float) -> list[dict[str, Any]] | str:
    """The jobs' records, or why there are none."""
    records = []
    jobs = [replace(job, words=(*job.words, *options, "--json")) for job in way.jobs]
    with closing(run_at_once(jobs, way_s)) as each:
        for ended in each:
            if ended.code is None:
                return late(ended, way_s)
            if ended.code:
                return reason(ended.err)
            records.append(json.loads(ended.out.splitlines()[-1]))
    return records
