"""Minimum cuts of a model at its attention operators, as policy on plain data (Lamina 2025, §4.2.1).

For attention i the cut separates everything that its q, k and v need from everything that needs its output;
the values that cross are the context, which a model worker keeps while the attention worker computes. A value
is charged once however many operators read it. Knows nothing of JAX: operators and values are numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

INFINITE = 1 << 62


@dataclass(frozen=True)
class Op:
    """One operator. `reads` and `writes` are value numbers.

    `level` is the highest attention whose output it depends on, -1 for none. A `recomputable` operator is
    cheap and depends on inputs and parameters alone, so either side of a cut may run it again.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    level: int
    recomputable: bool = False


@dataclass(frozen=True)
class CutGraph:
    """What the cuts need to know of a model. Parameters, and what derives from them alone, are not in it:
    they are free, since every slice holds its own.

    value_bytes: bytes of each value. inputs: values the model is given. site_reads[i]: q, k, v of attention
    i. site_writes[i]: its output value. outputs: values the last slice must yield.
    """

    ops: tuple[Op, ...]
    value_bytes: tuple[int, ...]
    inputs: tuple[int, ...]
    site_reads: tuple[tuple[int, ...], ...]
    site_writes: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """The cut at one attention: the values that cross it, and their bytes."""

    context: tuple[int, ...]
    context_bytes: int


@dataclass
class _Index:
    """Who reads and writes each value, derived once from a graph."""

    producer: dict[int, int] = field(default_factory=dict)
    consumers: dict[int, list[int]] = field(default_factory=dict)
    reader_level: dict[int, int] = field(default_factory=dict)
    last_site: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(g: CutGraph) -> _Index:
        index = _Index()
        for o, op in enumerate(g.ops):
            for v in op.writes:
                index.producer[v] = o
            for v in set(op.reads):
                index.consumers.setdefault(v, []).append(o)
                index.reader_level[v] = max(index.reader_level.get(v, -1), op.level)
        for i, reads in enumerate(g.site_reads):
            for v in reads:
                index.last_site[v] = i
        return index


def plan_cuts(g: CutGraph) -> list[Cut]:
    """One minimum cut per attention, each the source-minimal one, so that they nest.

    What an earlier cut put on its source side stays there: only the operators between the last cut and the
    attention in hand are looked at, so the work does not grow with the square of the depth.
    """
    index = _Index.of(g)
    finals = set(g.outputs)
    by_level: dict[int, list[int]] = {}
    for o, op in enumerate(g.ops):
        by_level.setdefault(op.level, []).append(o)
    source: set[int] = set()
    candidates: list[int] = []
    live: set[int] = set(g.inputs)
    cuts = []
    for i in range(len(g.site_reads)):
        candidates = [o for o in (*candidates, *by_level.get(i - 1, ())) if o not in source]
        forced = _required(g, index, g.site_reads[i], source)
        step = _CutStep(g, index, finals, i, source | forced, [o for o in candidates if o not in forced])
        moved = forced | step.source_ops(live)
        source |= moved
        known = live.union(*(g.ops[o].writes for o in moved)) if moved else set(live)
        active = {o for o in candidates if o not in source}
        context = tuple(v for v in sorted(known) if step.needed_later(v, active, {}))
        cuts.append(Cut(context, sum(g.value_bytes[v] for v in context)))
        live = {*context, g.site_writes[i]}
    return cuts


def _required(g: CutGraph, index: _Index, values: Iterable[int], source: set[int]) -> set[int]:
    """Operators not yet on the source side without which `values` cannot be, save recomputable ones."""
    found: set[int] = set()
    stack, seen = list(values), set()
    while stack:
        o = index.producer.get(stack.pop())
        if o is None or o in seen or o in source:
            continue
        seen.add(o)
        stack.extend(g.ops[o].reads)
        if not g.ops[o].recomputable:
            found.add(o)
    return found


class _CutStep:
    """The flow problem of one attention, over the operators still undecided."""

    def __init__(
        self, g: CutGraph, index: _Index, finals: set[int], site: int, source: set[int], active: Sequence[int]
    ) -> None:
        self.g, self.index, self.finals, self.site = g, index, finals, site
        self.source, self.active = source, list(active)

    def at_sink(self, v: int) -> bool:
        """Whether something that can only run after this attention reads value `v`."""
        ix = self.index
        return (
            ix.reader_level.get(v, -1) >= self.site or ix.last_site.get(v, -1) > self.site or v in self.finals
        )

    def needed_later(self, v: int, active: set[int], memo: dict[int, bool]) -> bool:
        """Whether the sink side reads `v`, directly or through operators it recomputes."""
        if v not in memo:
            memo[v] = self.at_sink(v) or any(
                not self.g.ops[o].recomputable
                or any(self.needed_later(w, active, memo) for w in self.g.ops[o].writes)
                for o in self.index.consumers.get(v, ())
                if o in active
            )
        return memo[v]

    def source_ops(self, live: set[int]) -> set[int]:
        """The undecided operators on the source side of the source-minimal minimum cut.

        Nodes: 0 source, 1 sink, then one per undecided operator and one per value that can cross.
        """
        if not self.active:
            return set()
        g, ix, flow = self.g, self.index, MaxFlow()
        node = {o: flow.node() for o in self.active}
        values: dict[int, int] = {v: 0 for v in live}
        for o in self.active:
            for v in (*g.ops[o].reads, *g.ops[o].writes):
                values[v] = node.get(ix.producer.get(v, -1), 0)
        for v, start in values.items():
            readers = [o for o in ix.consumers.get(v, ()) if o in node]
            if not readers and not self.at_sink(v):
                continue
            middle = flow.node()
            flow.edge(start, middle, g.value_bytes[v])
            for o in readers:
                flow.edge(middle, node[o], INFINITE)
                producer = ix.producer.get(v, -1)
                if producer in node and not g.ops[producer].recomputable:
                    flow.edge(node[o], node[producer], INFINITE)  # no slice may need a later one
            if self.at_sink(v):
                flow.edge(middle, 1, INFINITE)
        reached = flow.source_side()
        return {o for o in self.active if node[o] in reached}


class MaxFlow:
    """Dinic's algorithm with integers of any size. Node 0 is the source, node 1 the sink.

    The library solvers at hand take 32-bit capacities only, and a context of a large batch exceeds them.
    """

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]
        self._to: list[int] = []
        self._left: list[int] = []

    def node(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, a: int, b: int, capacity: int) -> None:
        for start, end, left in ((a, b, capacity), (b, a, 0)):
            self._edges[start].append(len(self._to))
            self._to.append(end)
            self._left.append(left)

    def source_side(self) -> set[int]:
        """Push the maximum flow; the nodes that residual edges still reach from the source."""
        while 1 in (depth := self._depths()):
            at = [0] * len(self._edges)
            while self._augment(depth, at):
                pass
        return set(depth)

    def _depths(self) -> dict[int, int]:
        depth, queue = {0: 0}, [0]
        for a in queue:
            for e in self._edges[a]:
                b = self._to[e]
                if self._left[e] and b not in depth:
                    depth[b] = depth[a] + 1
                    queue.append(b)
        return depth

    def _augment(self, depth: dict[int, int], at: list[int]) -> bool:
        """One path from source to sink along rising depths, saturated. A path is a list of edges: no
        recursion."""
        path: list[int] = []
        a = 0
        while a != 1:
            edges = self._edges[a]
            while at[a] < len(edges):
                e = edges[at[a]]
                if self._left[e] and depth.get(self._to[e]) == depth[a] + 1:
                    break
                at[a] += 1
            if at[a] < len(edges):
                path.append(edges[at[a]])
                a = self._to[path[-1]]
            elif not path:
                return False
            else:
                a = self._to[path.pop() ^ 1]
                at[a] += 1
        pushed = min(self._left[e] for e in path)
        for e in path:
            self._left[e] -= pushed
            self._left[e ^ 1] += pushed
        return True
