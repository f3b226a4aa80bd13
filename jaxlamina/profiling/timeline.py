"""The ranks of a job on one clock: when each was at what, and when it waited for another.

An exchange in a trace begins when one end is ready and lasts until both are done with it; what passes until
the last end has come is waiting, and counted as bubble. Plain data in and out; knows ranks and spans, no
device and no file.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jaxlamina.job.roles import Pool
from jaxlamina.profiling import spans as s
from jaxlamina.profiling.spans import Span
from jaxlamina.transports.scopes import KINDS, Kind

POOLS: tuple[Literal["model", "attention"], ...] = ("model", "attention")  # of a decode step
ALL = -1
# Ways of an exchange: both ends wait for each other, or one puts a message where the other takes it.
BOTH, PUT, TAKE = range(3)


class Meeting(NamedTuple):
    """This rank's end of one exchange, in the order in which it has them. ``peer``: a rank, or `ALL`."""

    step: int
    peer: int
    start_ns: int
    end_ns: int
    way: int = BOTH

    def later(self, ns: int) -> Meeting:
        return self._replace(start_ns=self.start_ns + ns, end_ns=self.end_ns + ns)


@dataclass(frozen=True)
class RankTrace:
    """One rank's recording, in nanoseconds of its host's clock. A rank that took no part has no streams."""

    rank: int
    name: str
    pool: Pool
    host: str
    steps: tuple[tuple[int, int], ...] = ()  # begun, done
    streams: Mapping[int, Sequence[Span]] = field(default_factory=dict)
    meetings: tuple[Meeting, ...] = ()

    def later(self, ns: int) -> RankTrace:
        """The same, were its clock so much ahead."""
        return replace(
            self,
            steps=tuple((a + ns, b + ns) for a, b in self.steps),
            streams={
                n: [x._replace(start_ns=x.start_ns + ns, end_ns=x.end_ns + ns) for x in line]
                for n, line in self.streams.items()
            },
            meetings=tuple(x.later(ns) for x in self.meetings),
        )

    def line(self) -> list[Span]:
        """All streams as one line without overlap."""
        return s.flat((x for line in self.streams.values() for x in line), s.LAUNCH_NS)


@dataclass(frozen=True)
class Timeline:
    """``lines[rank][i]``: step i of that rank, spans and bubbles that fill ``windows[i]`` exactly."""

    traces: tuple[RankTrace, ...]
    windows: tuple[tuple[int, int], ...]
    lines: Mapping[int, tuple[list[Span], ...]]
    n_unmatched: int  # exchanges of which one end only was found: their waiting counts as exchange

    @property
    def step_ms(self) -> float:
        """A step's mean, from when the first rank's device began it until the last was done or the next one
        began."""
        return statistics.fmean(end - start for start, end in self.windows) / 1e6

    def ms(self, ranks: Iterable[int]) -> dict[Kind, float]:
        """Milliseconds a step of each kind, the ranks' mean: together ``step_ms``."""
        ranks = list(ranks)
        found = [s.totals_ns(line) for rank in ranks for line in self.lines[rank]]
        n = len(ranks) * len(self.windows)
        return {kind: sum(totals[kind] for totals in found) / n / 1e6 for kind in KINDS}

    def shares(self, ranks: Iterable[int]) -> dict[Kind, float]:
        """Of these ranks' time within steps, what was spent on each kind: together 1."""
        totals = [s.totals_ns(line) for rank in ranks for line in self.lines[rank]]
        return s.shares({kind: sum(t[kind] for t in totals) for kind in KINDS})

    def ranks_of(self, pool: Pool) -> list[int]:
        return [trace.rank for trace in self.traces if trace.pool == pool]

    @property
    def pools(self) -> list[Pool]:
        """Those of a decode step that have ranks: without attention workers only model workers."""
        return [pool for pool in POOLS if self.ranks_of(pool)]

    def kinds_of(self, pool: Pool) -> list[Kind]:
        """What a pool's ranks spend time on: their own work, what is no work, and of attention what model
        ranks compute."""
        ms = self.ms(self.ranks_of(pool))
        return [kind for kind in KINDS if kind not in POOLS or kind == pool or ms[kind]]


def timeline(traces: Iterable[RankTrace], n_dropped: int = 1) -> Timeline:
    """Puts the ranks together, whatever their order. The first ``n_dropped`` steps, in which some ranks still
    begin to record, are left out. ``ValueError`` if then there is no step that all recorded."""
    traces = aligned(sorted(traces, key=lambda t: t.rank))
    waits, n_unmatched = waits_of(traces)
    whole = {t.rank: t.line() for t in traces}
    windows = _windows(traces, whole)[n_dropped:]
    if not windows:
        raise ValueError("there is no step that all ranks recorded")
    lines = {rank: tuple(_within(s.waiting_out(line, waits[rank]), windows)) for rank, line in whole.items()}
    return Timeline(tuple(traces), tuple(windows), lines, n_unmatched)


def aligned(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """All on the clock of the first rank's host. Ranks of one host share a clock; those of another are moved
    together by the median difference of when exchanges with ranks that are aligned ended, which is about the
    same at both ends. (A message that MPI buffers ends earlier for its sender: then the clock is off by what
    a message takes.)"""
    done: dict[int, RankTrace] = {}
    moved: dict[str, int] = {traces[0].host: 0} if traces else {}
    left = list(traces)
    while left:
        for trace in [t for t in left if t.host in moved]:
            done[trace.rank] = trace.later(moved[trace.host])
            left.remove(trace)
        differences: dict[str, list[int]] = {}
        for trace in left:
            for pair in matched([trace, *done.values()])[0]:
                own = [x for rank, x in pair if rank == trace.rank]
                differences.setdefault(trace.host, []).extend(
                    x.end_ns - own[0].end_ns for rank, x in pair if own and rank != trace.rank
                )
        found = {host: round(statistics.median(x)) for host, x in differences.items() if x}
        moved |= found or {trace.host: 0 for trace in left}  # who met nobody has no other clock than its own
    return [done[trace.rank] for trace in traces]


def matched(traces: Sequence[RankTrace]) -> tuple[list[list[tuple[int, Meeting]]], int]:
    """Exchanges as the (rank, end) of each of these ranks that took part, and how many ends are alone: two
    ranks' k-th exchanges of one way with one another within a step belong together, unless they have
    different numbers of them."""
    by_ends: dict[tuple[int, int, int, bool], dict[int, list[Meeting]]] = {}
    for trace in traces:
        for x in trace.meetings:
            ends = (ALL, ALL) if x.peer == ALL else (trace.rank, x.peer)
            if x.way == TAKE or (x.way == BOTH and ends[0] > ends[1]):
                ends = ends[::-1]  # who puts comes first
            by_ends.setdefault((x.step, *ends, x.way == BOTH), {}).setdefault(trace.rank, []).append(x)
    found: list[list[tuple[int, Meeting]]] = []
    n_alone = 0
    for of_ranks in by_ends.values():
        if len(of_ranks) < 2 or len({len(x) for x in of_ranks.values()}) > 1:
            n_alone += sum(map(len, of_ranks.values()))
            continue
        found += [list(zip(of_ranks, pair, strict=True)) for pair in zip(*of_ranks.values(), strict=True)]
    return found, n_alone


def waits_of(traces: Sequence[RankTrace]) -> tuple[dict[int, list[tuple[int, int]]], int]:
    """For each rank when it was in an exchange and another end was not, or what it takes was not yet put, and
    how many ends have no other end."""
    pairs, n_alone = matched(traces)
    waits: dict[int, list[tuple[int, int]]] = {trace.rank: [] for trace in traces}
    for pair in pairs:
        puts = [x.end_ns for _, x in pair if x.way == PUT]
        all_there = max(puts or [x.start_ns for _, x in pair])
        for rank, x in pair:
            if all_there > x.start_ns and x.way != PUT:
                waits[rank].append((x.start_ns, min(all_there, x.end_ns)))
    return waits, n_alone


def _windows(traces: Sequence[RankTrace], lines: Mapping[int, Sequence[Span]]) -> list[tuple[int, int]]:
    """Each step from its first operator on any rank to its last, or to the next step's first."""
    taking_part = [t for t in traces if t.steps]
    bounds = []
    for k in range(min((len(t.steps) for t in taking_part), default=0)):
        inside = [
            x for t in taking_part for x in lines[t.rank] if t.steps[k][0] <= x.start_ns < t.steps[k][1]
        ]
        if inside:
            bounds.append((min(x.start_ns for x in inside), max(x.end_ns for x in inside)))
    nexts = [start for start, _ in bounds[1:]] + [end for _, end in bounds[-1:]]
    return [(start, min(end, following)) for (start, end), following in zip(bounds, nexts, strict=True)]


def _within(line: Sequence[Span], windows: Sequence[tuple[int, int]]) -> Iterable[list[Span]]:
    at = 0
    for start, end in windows:
        while at < len(line) and line[at].end_ns <= start:
            at += 1
        stop = at
        while stop < len(line) and line[stop].start_ns < end:
            stop += 1
        yield s.with_bubbles(line[at:stop], (start, end))
