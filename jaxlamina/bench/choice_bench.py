"""Whether the planner takes the layout that is fastest: of each case, a trace with a limit of TPOT, the plans
for this machine's devices, and what a decode step of each takes.

The planner says which plans, and of which batch. A plan is measured by `jaxlamina bench step` on as many
devices as one instance has, at its batch and the trace's mean context. Plans of the same instance are
measured by one job; jobs that find devices at the same time run at once. Knows plans and how jobs are
started; nothing of models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxlamina.bench.compared_jobs import (
    ComparedJob,
    late,
    launched,
    only,
    pretended,
    reason,
    run_at_once,
)
from jaxlamina.bench.step_ways import StepCase
from jaxlamina.errors import UserError
from jaxlamina.planner.costs import Deployment, step_cost
from jaxlamina.planner.prediction import LOSS_AIM
from jaxlamina.planner.question import Question
from jaxlamina.planner.search import PoolPlan, describe, search


class InstanceJob(NamedTuple):
    """What measures steps of one instance, on ``n_devices``: the words before ``bench step`` and after it."""

    n_devices: int
    launch: tuple[str, ...]
    options: tuple[str, ...]


@dataclass
class Candidate:
    """A plan, with as many requests as can be cut into its batches. ``ways_ms``: what each way of running it
    takes that was measured."""

    name: str
    setup: Deployment
    copies: int
    step: StepCase
    predicted_ms: float
    ways_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: PoolPlan, context: int) -> Candidate:
        setup = plan.setup
        n_rows = plan.n_rows - plan.n_rows % setup.n_batches
        predicted = 1e3 * step_cost(setup, n_rows, context).step_s
        return cls(_name(plan), setup, plan.copies, StepCase(n_rows, context), predicted)

    def tokens_s(self, ms: float) -> float:
        """Of all copies, with steps of so many ms."""
        return self.copies * self.step.batch / ms * 1e3

    @property
    def measured_ms(self) -> float | None:
        """The fastest way's."""
        return min(self.ways_ms.values(), default=None)

    @property
    def predicted_tokens_s(self) -> float:
        return self.tokens_s(self.predicted_ms)

    @property
    def measured_tokens_s(self) -> float | None:
        return None if self.measured_ms is None else self.tokens_s(self.measured_ms)

    @property
    def error(self) -> float | None:
        """Relative; above 0: predicted to take longer than it did."""
        return None if self.measured_ms is None else self.predicted_ms / self.measured_ms - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.name, "copies": self.copies, "requests": self.step.batch,
            "context": self.step.context, "predicted_ms": self.predicted_ms, "measured_ms": self.measured_ms,
            "predicted_tokens_s": self.predicted_tokens_s, "measured_tokens_s": self.measured_tokens_s,
            "ways_ms": self.ways_ms,
        }  # fmt: skip


@dataclass
class ChoiceCase:
    """A trace's load and a limit of TPOT. ``candidates``: plans, the one that is predicted to be best
    first."""

    name: str
    slo_s: float | None
    candidates: list[Candidate]

    @property
    def measured(self) -> list[Candidate]:
        return [one for one in self.candidates if one.measured_ms is not None]

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]

    def is_late(self, one: Candidate) -> bool:
        """Whether it was measured to miss the limit of TPOT."""
        return self.slo_s is not None and (one.measured_ms or 0.0) > 1e3 * self.slo_s

    @property
    def best(self) -> Candidate | None:
        """Of those that meet the limit the one that was measured to write most tokens a second."""
        in_time = [one for one in self.measured if not self.is_late(one)]
        return max(in_time, key=lambda one: one.measured_tokens_s or 0.0, default=None)

    @property
    def is_counted(self) -> bool:
        """Whether the chosen plan was measured, and something to compare it with."""
        return self.chosen.measured_ms is not None and len(self.measured) > 1

    @property
    def loss(self) -> float | None:
        """How many tokens a second fewer the chosen plan writes than the best one, relative; None where the
        case is not counted, or the chosen plan misses the limit."""
        chosen, best = self.chosen.measured_tokens_s, self.best
        if not self.is_counted or self.is_late(self.chosen) or chosen is None or best is None:
            return None
        return 1 - chosen / (best.measured_tokens_s or 0.0)

    @property
    def agrees(self) -> bool:
        """Whether the first choice meets the limit, and is the measured best or within `LOSS_AIM` of it."""
        return self.loss is not None and self.loss <= LOSS_AIM

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.name, "slo_s": self.slo_s, "counted": self.is_counted, "agrees": self.agrees,
            "loss": self.loss,
            "best": None if self.best is None else self.best.name,
            "candidates": [one.to_dict() for one in self.candidates],
        }  # fmt: skip


@dataclass
class ChoiceReport:
    cases: list[ChoiceCase]
    left_out: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"cases": [case.to_dict() for case in self.cases], "left_out": self.left_out}


def case_of(name: str, question: Question, n_split: int, within: float = 1.0) -> ChoiceCase:
    """All unsplit plans, and the best split ones of ``n_split`` different pools. Those that are predicted to
    write fewer tokens than the first choice by more than ``within`` of them are left out, but for the second
    best. ``UserError`` where there are no two plans."""
    found = search(question)
    context = max(1, round(question.workload.context))
    pools: dict[tuple[int, int, int], PoolPlan] = {}
    for plan in found.split:
        setup = plan.setup
        pools.setdefault((setup.n_model, setup.n_attention, setup.tensor_parallel), plan)
    plans = [*found.whole, *list(pools.values())[:n_split]]
    made = sorted((Candidate.of(plan, context) for plan in plans), key=lambda one: -one.predicted_tokens_s)
    if len(made) < 2:
        there = f"one plan, {made[0].name}" if made else "no unsplit plan"
        n_cut = max(0, len(pools) - n_split)
        cut = f"--split-plans {n_split} leaves out {n_cut} split: give more"
        raise UserError(f"for these devices there is {there}; {cut if n_cut else 'nothing to choose from'}")
    least = (1 - within) * made[0].predicted_tokens_s
    near = made[:2] + [one for one in made[2:] if one.predicted_tokens_s >= least]
    return ChoiceCase(name, question.slo_s, near)


def _name(plan: PoolPlan) -> str:
    """In words, with what `describe` leaves out."""
    setup, words = plan.setup, [describe(plan)]
    if not setup.is_split:
        return f"{words[0]}, tensor parallel" if setup.tensor_parallel > 1 else words[0]
    words += [f"by {setup.partition}"]
    words += [f"x = {setup.local_share:.3g}"] if setup.local_share else []
    words += [f"{setup.n_batches} staggered"] if setup.n_batches > 1 else []
    return ", ".join(words)


def jobs_of(setup: Deployment, on_gpus: bool) -> dict[str, InstanceJob]:
    """What measures this instance, by the names that `jaxlamina.bench.step_ways` gives its ways: tensor
    parallelism without a split is XLA's over the devices of one process, and this project's over ranks."""
    if not setup.is_split:
        if (n := setup.tensor_parallel) == 1:
            return {"unsplit": InstanceJob(1, (), ())}
        over_ranks = launched(n, 0, [f"tensor_parallel={n}"], on_gpus=on_gpus)
        return {
            f"unsplit, {n} devices by weights": InstanceJob(n, (), ("--devices", str(n), "--no-unsplit")),
            f"unsplit over {n} ranks": InstanceJob(n, over_ranks, ("--no-unsplit",)),
        }
    changes = [f"tensor_parallel={setup.tensor_parallel}"] if setup.tensor_parallel > 1 else []
    changes += [f'pipelining="{setup.mode}"'] if setup.n_replicas > 1 else []
    a, b, n = setup.n_model, setup.n_attention, setup.n_batches
    options = ("--no-unsplit", "--partitions", setup.partition, "--shares", str(setup.local_share))
    staggered, words = (("--staggered", str(n)), f", {n} staggered") if n > 1 else ((), "")
    job = InstanceJob(a + b, launched(a, b, changes, on_gpus=on_gpus), (*options, *staggered))
    return {f"split by {setup.partition}, {setup.local_share:g} local{words}": job}


def measure(
    cases: Sequence[ChoiceCase],
    words: Sequence[str],
    *,
    n_devices: int,
    on_gpus: bool,
    way_s: float,
    left_out: Mapping[str, str] = {},
    on_progress: Callable[[str], object] = lambda what: None,
) -> ChoiceReport:
    """Fills in what the candidates take. ``words``: of `bench step`, for every job. A job that fails or is
    not done within ``way_s`` is left out, with its reason, but for steps that it had told of."""
    report = ChoiceReport(list(cases), dict(left_out))
    wanted: dict[InstanceJob, dict[tuple[str, str], list[Candidate]]] = {}
    for candidate in (one for case in cases for one in case.candidates):
        for way, job in jobs_of(candidate.setup, on_gpus).items():
            steps = wanted.setdefault(job, {})
            steps.setdefault((str(candidate.step), way), []).append(candidate)
    done = 0
    for wave in waves(list(wanted), n_devices if on_gpus else 1):
        on_progress(f"jobs {done + 1} to {done + len(wave)} of {len(wanted)}: {', '.join(map(_told, wave))}")
        done += len(wave)
        try:
            ended = _run({job: [*words, "--case", _cases(wanted[job])] for job in wave}, on_gpus, way_s)
        except KeyboardInterrupt:  # of minutes of measuring, what there is already is told
            report.left_out[", ".join(map(_told, wave))] = "interrupted, and all after it"
            break
        for job, found in ended.items():
            if isinstance(found, str):
                report.left_out[_told(job)] = found
                continue
            for line in found["failed"]:
                report.left_out[f"{_told(job)}: {line.partition(': ')[0]}"] = line.partition(": ")[2]
            for result in found["results"]:
                for candidate in wanted[job].get((result["case"], result["way"]), ()):
                    candidate.ways_ms[result["way"]] = result["ms"]
    return report


def _cases(wanted: Mapping[tuple[str, str], Sequence[Candidate]]) -> str:
    """As ``--case`` has them."""
    steps = (candidates[0].step for candidates in wanted.values())
    return ",".join(dict.fromkeys(f"{step.batch}x{step.context}" for step in steps))


def _so_far(said: str) -> Iterator[dict[str, Any]]:
    """Of a job that was too late, the steps that it has told of on the way."""
    for case, way, ms in re.findall(r"^(B \d+, \d+ tokens), (.+): ([\d.]+) ms$", said, re.MULTILINE):
        yield {"case": case, "way": way, "ms": float(ms)}


def _told(job: InstanceJob) -> str:
    return " ".join((*job.launch, "bench step", *job.options))


def waves(jobs: Sequence[InstanceJob], n_devices: int) -> Iterator[list[InstanceJob]]:
    """Jobs that run at once, each with devices of its own: the largest first, and smaller ones in what it
    leaves. A job that has more than there are runs alone."""
    left = sorted(jobs, key=lambda job: -job.n_devices)
    while left:
        wave, free = [left.pop(0)], n_devices
        free -= wave[0].n_devices
        for job in [*left]:
            if job.n_devices <= free:
                left.remove(job)
                wave.append(job)
                free -= job.n_devices
        yield wave


def _run(
    jobs: Mapping[InstanceJob, Sequence[str]], on_gpus: bool, way_s: float
) -> dict[InstanceJob, dict[str, Any] | str]:
    """Of each job that runs at once the record, or why there is none."""
    first, started = 0, list[ComparedJob]()
    found: dict[InstanceJob, dict[str, Any] | str] = {}
    for job, options in jobs.items():
        environment = only(range(first, first + job.n_devices)) if on_gpus else {}
        if not on_gpus and not job.launch:
            environment = pretended(job.n_devices)
        words = (*job.launch, "bench", "step", *job.options, *options, "--json")
        started.append(ComparedJob(words, environment))
        first += job.n_devices
    for job, ended in zip(jobs, run_at_once(started, way_s), strict=True):
        if ended.code is None:
            found[job] = {
                "results": list(_so_far(ended.err)),
                "failed": [f"the rest: {late(ended, way_s)}"],
            }
            continue
        # A bench of which one way failed ends with 1, and has told of the others.
        line = ended.out.strip().splitlines()[-1:] or [""]
        record = json.loads(line[0]) if line[0].startswith("{") else None
        found[job] = reason(ended.err) if record is None else record
    return found
