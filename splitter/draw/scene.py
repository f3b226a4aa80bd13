"""The picture of a split model before it has coordinates: boxes in rows, edges, slices, cuts and attention.

Slices stand below each other, the queries' part of each above its keys' and values' part; runs of slices that are
not shown in full are one box. Knows nothing of pixels beyond the size of a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from splitter.draw.layout import Box
from splitter.draw.model import KV, ModelView, Q
from splitter.draw.text import human_bytes, shortened, span, text_width

TITLE, DETAIL, LABEL = 12.0, 10.0, 10.0  # font sizes
_PLAIN_KINDS = ("tables", "given", "weights")  # drawn as late as they may run


@dataclass(frozen=True)
class Mark:
    """What a box shows. `kind` is its look; `lines` its text, the first in bold; `tip` the text to hover for.

    operator: the group it stands for, or None. size_bytes: what a port, a label or a pill carries.
    """

    kind: str
    lines: tuple[str, ...]
    tip: str = ""
    operator: int | None = None
    size_bytes: int | None = None


@dataclass
class Band:
    """A slice, or a run of them folded into one box; rows from `first` to `last`; `middle` is "send q"'s row."""

    slices: tuple[int, ...]
    program: int
    title: str
    details: tuple[str, ...]
    folded: bool
    first: int = 0
    middle: int | None = None
    last: int = 0


@dataclass(frozen=True)
class CutMark:
    """The cut at attention `site`: its row, what crosses it, and the box keys of "send q", "send k, v", "receive".

    lines, tip: of the attention operator. cut_tip: of the cut.
    """

    site: int
    row: int
    context_bytes: int
    send_q: str
    send_kv: str
    receive: str
    lines: tuple[str, ...]
    tip: str
    cut_tip: str
    operators: tuple[int, ...]


@dataclass
class Scene:
    """Everything there is to draw."""

    boxes: list[Box] = field(default_factory=list)
    marks: dict[str, Mark] = field(default_factory=dict)
    edges: dict[tuple[str, str], None] = field(default_factory=dict)
    bands: list[Band] = field(default_factory=list)
    cuts: list[CutMark] = field(default_factory=list)


def shown_slices(n_slices: int, programs: Sequence[int], layers: slice | None, most: int = 6) -> set[int]:
    """The slices to draw in full: of `layers`, or the first of every program, `most` at the most; always the last."""
    if layers is not None:
        return {*range(n_slices)[layers], n_slices - 1}
    firsts = [programs.index(p) for p in sorted(set(programs))]
    return {*firsts[:most], n_slices - 1}


def folded(n_slices: int, shown: set[int]) -> list[tuple[int, ...]]:
    """The slices in order, those not shown joined to runs."""
    runs: list[tuple[int, ...]] = []
    for i in range(n_slices):
        if i not in shown and runs and runs[-1][-1] not in shown:
            runs[-1] = (*runs[-1], i)
        else:
            runs.append((i,))
    return runs


def make_scene(view: ModelView, layers: slice | None = None) -> Scene:
    return _Director(view, layers).scene


class _Director:
    """Sets the scene from top to bottom; `source` says which box each value comes from at the current row."""

    def __init__(self, view: ModelView, layers: slice | None) -> None:
        self.view = view
        self.n = view.model.n
        self.scene = Scene()
        self.row = 0
        self.source: dict[int, str] = {}
        shown = shown_slices(self.n + 1, view.programs, layers)
        runs = folded(self.n + 1, shown)
        self._inputs(runs[0][0])
        for k, run in enumerate(runs):
            is_full = run[0] in shown
            band = self._full(run[0], first=k == 0) if is_full else self._fold(run, first=k == 0, shown=shown)
            self.scene.bands.append(band)
            if run[-1] < self.n:
                self._cut(run[-1])

    # --- boxes ---

    def _add(self, key: str, mark: Mark, *, row: int, pinned: bool = False) -> str:
        sizes = [TITLE] + [DETAIL] * (len(mark.lines) - 1)
        small = mark.kind in ("value", "port", "input", "output", "pill")
        if small:
            sizes = [LABEL] * len(mark.lines)
        width = max(
            text_width(t, s, bold=not small and k == 0)
            for k, (t, s) in enumerate(zip(mark.lines, sizes, strict=True))
        )
        if mark.kind == "value":
            width, height = width + 6, 13.0
        elif small:
            width, height = width + 18, 20.0
        else:
            width, height = max(64.0, width + 22), 27.0 if len(sizes) == 1 else 38.0 + 13 * (len(sizes) - 2)
        self.scene.boxes.append(Box(key, width, height, row, pinned))
        self.scene.marks[key] = mark
        return key

    def _edge(self, start: str, end: str) -> None:
        self.scene.edges[start, end] = None

    def _inputs(self, first: int) -> None:
        for n in self.view.context(first):
            v = self.view.value(n)
            text = f"{shortened(v.name, 28)} · {human_bytes(v.size_bytes)}"
            self.source[n] = self._add(
                f"in:{n}", Mark("input", (text,), f"input {v}", size_bytes=v.size_bytes), row=0
            )
        self.row = 1

    def _receive(self, i: int) -> None:
        """The point where slice i gets the attention's output."""
        out = self.view.numbers([self.view.a.regions[i - 1].out])[0]
        size = self.view.value(out).size_bytes
        tip = f"slice {i} goes on when attention {i - 1} has answered: {human_bytes(size)}"
        mark = Mark("pill", ("receive",), tip, size_bytes=size)
        self.source[out] = self._add(f"recv:{i}", mark, row=self.row, pinned=True)
        self.row += 1

    def _send(self, i: int, what: str, values: Sequence[int]) -> str:
        size = sum(self.view.value(v).size_bytes for v in values)
        name = "send q" if what == Q else "send k, v"
        tip = f"slice {i}: {name} to attention {i}, {human_bytes(size)}"
        return self._add(
            f"{what}:{i}", Mark("pill", (name,), tip, size_bytes=size), row=self.row, pinned=True
        )

    # --- slices ---

    def _full(self, i: int, *, first: bool) -> Band:
        view, last = self.view, i == self.n
        q_groups, kv_groups = view.part(i, Q), view.part(i, KV)
        aux = [g for g, group in enumerate(view.groups) if group.kind == "aux"] if i == 0 else []
        program = view.programs[i]
        size = sum(
            view.bytes_of_weights[w]
            for w in {w for g in q_groups + kv_groups for w in view.groups[g].weights}
        )
        title = f"Slice {i}"
        details = (f"program {letter(program)}", *([f"{human_bytes(size)} of weights"] if size else []))
        band = Band((i,), program, title, details, folded=False, first=self.row)
        if not first:
            self._receive(i)
        readers: dict[int, list[str]] = {}
        if not q_groups:  # room for the slice's name
            self.scene.boxes.append(Box(f"room:{i}", 0.0, 30.0, self.row))
            self.row += 1
        self._groups(i, q_groups, readers)
        if not last:
            region = view.a.regions[i]
            q, k, v = ([*view.numbers([x])] for x in (region.q, region.k, region.v))
            band.middle = self.row
            key = self._send(i, Q, q)
            self.row += 1
            self._groups(i, [*kv_groups, *aux], readers)
            sends = [(key, q), (self._send(i, KV, k + v), k + v)]
            band.last = self.row
            self.row += 1
            for key, values in sends:
                for x in values:
                    readers.setdefault(x, []).append(key)
            ports = [(x, self._port(i, x)) for x in view.context(i + 1)]
        else:
            ports = self._outputs()
            band.last = self.row - 1
        for x, key in ports:
            readers.setdefault(x, []).append(key)
        self._connect(readers)
        self.source = {x: key for x, key in ports}
        return band

    def _groups(self, i: int, groups: Sequence[int], readers: dict[int, list[str]]) -> None:
        """Rows of one part of a slice: every group below those it reads, labels in the rows between."""
        if not groups:
            return
        view = self.view
        made = {v: g for g in groups for v in view.writes(g)}
        above = {g: {made[v] for v in view.reads(g) if v in made} for g in groups}
        depth: dict[int, int] = {}
        for g in _in_order(groups, above):
            depth[g] = max((depth[h] + 1 for h in above[g]), default=0)
        for g in reversed(groups):
            below = [depth[h] for h in groups if g in above[h]]
            if view.groups[g].kind in _PLAIN_KINDS and below:
                depth[g] = max(depth[g], min(below) - 1)
        for g in groups:
            group = view.groups[g]
            again = isinstance(group.place, frozenset) and len(group.place) > 1
            lines = tuple(shortened(t, 34) for t in (group.title, group.detail) if t)
            mark = Mark(f"{group.kind}{' again' if again else ''}", lines, view.explain(g), operator=g)
            key = self._add(f"op:{i}:{g}", mark, row=self.row + 2 * depth[g])
            for v in view.reads(g):
                readers.setdefault(v, []).append(key)
            for v in view.writes(g):
                self.source[v] = key
        self.row += 2 * max(depth.values()) + 2

    def _connect(self, readers: dict[int, list[str]]) -> None:
        """Edges from where values are to who reads them, through a label with their bytes."""
        shared: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for v, keys in readers.items():
            if v in self.source:
                shared.setdefault((self.source[v], tuple(dict.fromkeys(keys))), []).append(v)
        row_of = {b.key: b.row for b in self.scene.boxes}
        for k, ((start, ends), values) in enumerate(shared.items()):
            carries_weight = self.scene.marks[start].operator is None or all(
                self.scene.marks[e].kind in ("port", "output") or e.startswith("q:") for e in ends
            )
            if carries_weight:
                for e in ends:
                    self._edge(start, e)
                continue
            described = [self.view.value(v) for v in values]
            size = sum(d.size_bytes for d in described)
            mark = Mark("value", (human_bytes(size),), "\n".join(map(str, described)), size_bytes=size)
            label = self._add(f"{start}>{k}", mark, row=row_of[start] + 1)
            self._edge(start, label)
            for e in ends:
                self._edge(label, e)

    def _port(self, i: int, n: int) -> str:
        v = self.view.value(n)
        text = f"{shortened(v.name, 28)} · {human_bytes(v.size_bytes)}"
        mark = Mark("port", (text,), f"kept across cut {i}: {v}", size_bytes=v.size_bytes)
        return self._add(f"port:{i}:{n}", mark, row=self.row)

    def _outputs(self) -> list[tuple[int, str]]:
        """One box for all outputs of one group."""
        by_source: dict[str, list[tuple[int, str]]] = {}
        for n, name in self.view.finals():
            by_source.setdefault(self.source.get(n, ""), []).append((n, name))
        ports = []
        for k, outputs in enumerate(by_source.values()):
            values = [self.view.value(n) for n, _ in outputs]
            size = sum(v.size_bytes for v in values)
            name = shortened(outputs[0][1], 28) if len(outputs) == 1 else f"{len(outputs)} outputs"
            tip = "\n".join(
                f"{name}: {v.shape}, {human_bytes(v.size_bytes)}"
                for (_, name), v in zip(outputs, values, strict=True)
            )
            mark = Mark("output", (f"{name} · {human_bytes(size)}",), tip, size_bytes=size)
            key = self._add(f"out:{k}", mark, row=self.row + 1)
            ports += [(n, key) for n, _ in outputs]
        return ports

    def _fold(self, run: tuple[int, ...], *, first: bool, shown: set[int]) -> Band:
        view, (a, b) = self.view, (run[0], run[-1])
        programs = sorted({view.programs[i] for i in run})
        like = [i for i in sorted(shown) if [view.programs[i]] == programs]
        numbers = f"slice{'s' if b > a else ''} {span(run)}"
        if len(programs) > 1:
            lines = [f"{len(run)} slices", f"{numbers}, {len(programs)} programs"]
        else:
            lines = [f"× {len(run)} equal slices" if b > a else "Equal slice" if like else "Slice", numbers]
            lines[1] += f", as slice {like[0]}" if like else f", program {letter(programs[0])}"
        sizes = sorted({view.report.cuts[i].context_bytes for i in run[:-1]})
        if sizes:
            each = " to ".join(human_bytes(s) for s in dict.fromkeys((sizes[0], sizes[-1])))
            lines.append(
                f"{len(run) - 1} cuts of {each} between them"
                if b > a + 1
                else f"a cut of {each} between them"
            )
        band = Band(
            run,
            view.programs[a],
            f"Slices {span(run)}" if b > a else f"Slice {a}",
            (),
            folded=True,
            first=self.row,
        )
        if not first:
            self._receive(a)
        tip = "\n".join(f"slice {i}: program {letter(view.programs[i])}" for i in run)
        kind = "fold many" if b > a else "fold"
        key = self._add(f"fold:{a}", Mark(kind, tuple(lines), tip), row=self.row)
        for start in dict.fromkeys(self.source.values()):
            self._edge(start, key)
        self.row += 1
        region = view.a.regions[b]
        for what, atoms in ((Q, [region.q]), (KV, [region.k, region.v])):
            if what == Q:
                band.middle = self.row
            self._edge(key, self._send(b, what, view.numbers(atoms)))
            self.row += 1
        band.last = self.row - 1
        ports = [(x, self._port(b, x)) for x in view.context(b + 1)]
        for _, port in ports:
            self._edge(key, port)
        self.source = dict(ports)
        return band

    def _cut(self, i: int) -> None:
        view, site, cut = self.view, self.view.model.sites[i], self.view.report.cuts[i]
        operators = [
            g
            for g, group in enumerate(view.groups)
            if group.kind == "attention" and view.writes(g) & set(view.numbers([view.a.regions[i].out]))
        ]
        lines = ["Attention", shortened(site.name, 26)]
        if len(site.q.shape) >= 2:
            heads, kv_heads, width = site.q.shape[-2], site.k.shape[-2], site.q.shape[-1]
            lines.append(f"{heads} head{'s' * (heads > 1)}, {kv_heads} for k and v, of {width}")
        if site.window is not None:
            lines.append(f"sliding window {site.window:,}")
        if site.softcap is not None:
            lines.append(f"soft cap {site.softcap:g}")
        if view.operands[i]:
            lines.append(f"own operands: {len(view.operands[i])} equations")
        if view.a.regions[i].state:
            lines.append("writes its own cache")
        tip = [f"attention {i}: {site.name}", *(view.explain(g) for g in operators)]
        tip += [f"q {site.q.dtype}{list(site.q.shape)}, k, v {site.k.dtype}{list(site.k.shape)}"]
        tip += [f"own operand {p.dtype}{list(p.shape)}" for p in site.private[:8]]
        kept = f"context kept at cut {i}: {cut.context_bytes:,} bytes"
        if (spare := cut.context_bytes - view.model.cuts[i].context_bytes) > 0:
            kept += f"\n{spare:,} of them are not read any more; they stay so that slices are equal"
        self.scene.cuts.append(
            CutMark(
                site=i,
                row=self.row,
                context_bytes=cut.context_bytes,
                send_q=f"{Q}:{i}",
                send_kv=f"{KV}:{i}",
                receive=f"recv:{i + 1}",
                lines=tuple(lines),
                tip="\n".join(tip),
                cut_tip=kept,
                operators=tuple(operators),
            )
        )
        if not view.context(i + 1):
            self._add(
                f"port:{i}:none",
                Mark("port", ("nothing",), "nothing is kept across this cut", size_bytes=0),
                row=self.row,
            )
        self.row += 1


def _in_order(groups: Sequence[int], above: dict[int, set[int]]) -> list[int]:
    """Groups, each behind those it reads."""
    below: dict[int, list[int]] = {g: [] for g in groups}
    for g in groups:
        for h in above[g]:
            below[h].append(g)
    waiting = {g: len(above[g]) for g in groups}
    done = [g for g in groups if not waiting[g]]
    for g in done:
        for h in below[g]:
            waiting[h] -= 1
            if not waiting[h]:
                done.append(h)
    assert len(done) == len(groups), "groups need each other"
    return done


def letter(program: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA."""
    text = ""
    program += 1
    while program:
        program, rest = divmod(program - 1, 26)
        text = chr(65 + rest) + text
    return text
