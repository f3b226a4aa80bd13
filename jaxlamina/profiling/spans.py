"""From a device's events to spans that do not overlap, the gaps between them, and what share of a step each
kind has.

Plain data in and out; times are whole nanoseconds of one clock. Knows kinds of work; no device, no file, no
rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from jaxlamina.transports.scopes import EXCHANGE, KINDS, OTHER, Kind, Scope

BUBBLE = Scope("bubble")
# Between two operators, so little is the launch of the second and no idleness.
LAUNCH_NS = 2_000
# Where several streams are at work, the step is said to be at what is first here: an exchange that runs
# behind computation costs nothing. Operators without a scope are loops and calls, within which others have
# theirs.
_FIRST: dict[Kind, int] = {"model": 0, "attention": 0, "exchange": 1, "other": 2, "bubble": 3}


class Event(NamedTuple):
    """One run of an operator, as a trace has it."""

    name: str
    stream: int
    start_ns: int
    end_ns: int


class Span(NamedTuple):
    """Time spent on one scope, ``[start_ns, end_ns)``."""

    scope: Scope
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def spans_of(
    events: Iterable[Event], scopes: Mapping[str, Scope], launch_ns: int = LAUNCH_NS
) -> dict[int, list[Span]]:
    """Each stream's spans, in order and without overlap, as `merged`. Events of unknown names are "other"."""
    by_stream: dict[int, list[Span]] = {}
    for event in events:
        span = Span(scopes.get(event.name, OTHER), event.start_ns, event.end_ns)
        by_stream.setdefault(event.stream, []).append(span)
    return {stream: flat(spans, launch_ns) for stream, spans in sorted(by_stream.items())}


def flat(spans: Iterable[Span], launch_ns: int = 0) -> list[Span]:
    """One line of spans that may overlap: at each moment that which comes first of those at work (see
    ``_FIRST``; of two alike, the one that began last, which is the inner one)."""
    waiting = sorted(
        (s for s in spans if s.end_ns > s.start_ns), key=lambda s: (s.start_ns, s.end_ns, s.scope)
    )
    at_work: list[tuple[int, int, Scope, int]] = []  # (order, -start, scope, end)
    cuts = sorted({t for s in waiting for t in (s.start_ns, s.end_ns)})
    line: list[Span] = []
    begun = 0
    for start, end in pairwise(cuts):
        while begun < len(waiting) and waiting[begun].start_ns <= start:
            s = waiting[begun]
            heapq.heappush(at_work, (_FIRST[s.scope.kind], -s.start_ns, s.scope, s.end_ns))
            begun += 1
        while at_work and at_work[0][3] <= start:
            heapq.heappop(at_work)
        if at_work:
            line.append(Span(at_work[0][2], start, end))
    return merged(line, launch_ns)


def merged(line: Sequence[Span], launch_ns: int = 0) -> list[Span]:
    """A line in order, in which gaps of at most ``launch_ns`` are part of what is before them, and neighbours
    of one scope are one span."""
    found: list[Span] = []
    for span in line:
        if found and span.start_ns - found[-1].end_ns <= launch_ns:
            found[-1] = found[-1]._replace(end_ns=span.start_ns)
            if found[-1].scope == span.scope:
                found[-1] = found[-1]._replace(end_ns=span.end_ns)
                continue
        found.append(span)
    return found


def waiting_out(line: Sequence[Span], waits: Iterable[tuple[int, int]]) -> list[Span]:
    """``line`` with those parts of its exchanges taken out in which the other end was not there yet."""
    found: list[Span] = []
    left = _union(waits)[::-1]
    for span in line:
        if span.scope != EXCHANGE:
            found.append(span)
            continue
        at = span.start_ns
        while left and left[-1][0] < span.end_ns:
            start, end = left[-1]
            if start > at:
                found.append(span._replace(start_ns=at, end_ns=start))
            at = max(at, min(end, span.end_ns))
            if end > span.end_ns:
                break  # the rest of it is for the next one
            left.pop()
        if at < span.end_ns:
            found.append(span._replace(start_ns=at))
    return found


def with_bubbles(line: Sequence[Span], window: tuple[int, int]) -> list[Span]:
    """A line without overlap, cut to ``window``, and its gaps as spans: together exactly the window."""
    start, end = window
    found: list[Span] = []
    at = start
    for span in line:
        span = span._replace(start_ns=max(span.start_ns, at), end_ns=min(span.end_ns, end))
        if span.duration_ns <= 0:
            continue
        if span.start_ns > at:
            found.append(Span(BUBBLE, at, span.start_ns))
        found.append(span)
        at = span.end_ns
    if at < end:
        found.append(Span(BUBBLE, at, end))
    return found


def totals_ns(line: Iterable[Span]) -> dict[Kind, int]:
    """Nanoseconds of each kind; every kind is there."""
    found = dict.fromkeys(KINDS, 0)
    for span in line:
        found[span.scope.kind] += span.duration_ns
    return found


def shares(totals: Mapping[Kind, int]) -> dict[Kind, float]:
    """Of ``totals_ns``, the share of each kind: together 1. ``ValueError`` if there is no time at all."""
    whole = sum(totals.values())
    if whole <= 0:
        raise ValueError("there is no time to have shares of")
    return {kind: totals[kind] / whole for kind in KINDS}


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
