"""The picture of a split model before it has coordinates: boxes in one column, and who reads whose values.

Slices stand below each other, the queries' part of each above its keys' and values' part. Runs of slices that
are not shown in full are one box. Knows nothing of pixels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from splitter.draw.model import KV, ModelView, Q
from splitter.draw.text import human_bytes, shortened, span


@dataclass(frozen=True)
class Mark:
    """A box, in a row of its own or on a lane. `lines`: its text, the first in bold. `tip`: for hovering.

    kind: op, fold, pill (a message), input, output, port (a value that is kept), attention, or cut (a row of
    ports).
    operator: the group it stands for, or None. size_bytes: what it carries.
    """

    key: str
    kind: str
    lines: tuple[str, ...] = ()
    tip: str = ""
    operator: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True)
class Link:
    """Values that one row makes: the rows that read them, and the cuts on which they are kept.

    ports: row of a cut (or of the inputs) -> the value as it stands there.
    """

    key: str
    start: int
    readers: tuple[int, ...]
    ports: Mapping[int, Mark]
    size_bytes: int
    tip: str


@dataclass
class Band:
    """A slice, or a run of them folded into one box: rows from `first` to `last`.

    middle: the row of "send q"; the last row is "send k, v". The final band has neither.
    attention: what follows the band. The cut at it is the next row; the next band begins with "receive".
    """

    slices: tuple[int, ...]
    program: int
    lines: tuple[str, ...]
    is_folded: bool
    first: int
    middle: int = 0
    last: int = 0
    attention: Mark | None = None


@dataclass
class Scene:
    """Everything there is to draw."""

    rows: list[Mark] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    bands: list[Band] = field(default_factory=list)


def shown_slices(n_slices: int, programs: Sequence[int], layers: slice | None, most: int = 6) -> set[int]:
    """The slices to draw in full: those of `layers`, or the first of each program; always the last."""
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
    """Sets the scene from top to bottom; `source` says which row made each value that is there now."""

    def __init__(self, view: ModelView, layers: slice | None) -> None:
        self.view = view
        self.n = view.model.n
        self.scene = Scene()
        self.source: dict[int, int] = {}
        self.readers: dict[tuple[int, int], list[int]] = {}  # (value, row that made it) -> rows
        self.ports: dict[tuple[int, int], dict[int, Mark]] = {}
        shown = shown_slices(self.n + 1, view.programs, layers)
        runs = folded(self.n + 1, shown)
        self._add(Mark("inputs", "cut"))
        self._ports(view.context(runs[0][0]), "in", "input")
        for run in runs:
            self._band(run, shown)
            if run[-1] < self.n:
                self._cut(run[-1])
        self._outputs()
        self._make_links()

    def _add(self, mark: Mark, reads: Collection[int] = (), writes: Collection[int] = ()) -> int:
        row = len(self.scene.rows)
        self.scene.rows.append(mark)
        for v in reads:
            if v in self.source:
                self.readers.setdefault((v, self.source[v]), []).append(row)
        self.source.update(dict.fromkeys(writes, row))
        return row

    def _message(self, key: str, name: str, to: str, reads: list[int], writes: Collection[int] = ()) -> int:
        size = sum(self.view.value(v).size_bytes for v in [*reads, *writes])
        tip = f"{name} {to}, {human_bytes(size)}"
        return self._add(Mark(key, "pill", (name,), tip, size_bytes=size), reads, writes)

    # --- slices ---

    def _band(self, run: tuple[int, ...], shown: set[int]) -> None:
        view, a, b = self.view, run[0], run[-1]
        is_full = a in shown
        lines = [f"Slice{'s' * (b > a)} {span(run)}"]
        if is_full:
            size = sum(view.bytes_of_weights[w] for w in view.weights(a))
            lines += [
                f"program {letter(view.programs[a])}",
                *([f"{human_bytes(size)} of weights"] if size else []),
            ]
        band = Band(run, view.programs[a], tuple(lines), not is_full, first=len(self.scene.rows))
        self.scene.bands.append(band)
        if a:
            out = view.numbers([view.a.regions[a - 1].out])
            self._message(f"recv:{a}", "receive", f"the output of attention {a - 1}", [], out)
        if is_full:
            self._groups(a, view.part(a, Q))
        else:
            self._fold(run, shown)
        if b < self.n:
            region = view.a.regions[b]
            to = f"to attention {b}"
            band.middle = self._message(f"q:{b}", "send q", to, view.numbers([region.q]))
            if is_full:
                aux = [g for g, group in enumerate(view.groups) if group.kind == "aux"] if a == 0 else []
                self._groups(a, [*aux, *view.part(a, KV)])
            self._message(f"kv:{b}", "send k, v", to, view.numbers([region.k, region.v]))
        band.last = len(self.scene.rows) - 1

    def _groups(self, i: int, groups: Sequence[int]) -> None:
        """Operators of one part of a slice. Each is below those it reads, straight below one if possible."""
        view = self.view
        made = {v: g for g in groups for v in view.writes(g)}
        above = {g: {made[v] for v in view.reads(g) if v in made} for g in groups}
        last = -1
        while above:
            ready = [g for g in above if not above[g] & above.keys()]
            assert ready, "groups need each other"
            # What only prepares inputs or weights runs as late as it may.
            last = max(
                ready, key=lambda g: (view.groups[g].kind not in ("given", "weights"), last in above[g])
            )
            del above[last]
            group = view.groups[last]
            again = len(group.place) > 1
            lines = tuple(shortened(t, 34) for t in (group.title, group.detail) if t)
            kind = f"op {group.kind}{' again' if again else ''}"
            mark = Mark(f"op:{i}:{last}", kind, lines, view.explain(last), operator=last)
            self._add(mark, view.reads(last), view.writes(last))

    def _fold(self, run: tuple[int, ...], shown: set[int]) -> None:
        view, a, b = self.view, run[0], run[-1]
        programs = sorted({view.programs[i] for i in run})
        like = [i for i in sorted(shown) if [view.programs[i]] == programs]
        numbers = f"slice{'s' if b > a else ''} {span(run)}"
        if len(programs) > 1:
            lines = [f"{len(run)} slices", f"{numbers}, {len(programs)} programs"]
        else:
            lines = [f"× {len(run)} equal slices" if b > a else "Equal slice" if like else "Slice", numbers]
            lines[1] += f", as slice {like[0]}" if like else f", program {letter(programs[0])}"
        if sizes := {view.report.cuts[i].context_bytes for i in run[:-1]}:
            each = " to ".join(dict.fromkeys(map(human_bytes, (min(sizes), max(sizes)))))
            cuts = f"{len(run) - 1} cuts" if b > a + 1 else "a cut"
            lines.append(f"{cuts} of {each} between them")
        tip = "\n".join(f"slice {i}: program {letter(view.programs[i])}" for i in run)
        region = view.a.regions[b]
        made = {*view.context(b + 1), *view.numbers([region.q, region.k, region.v])} - self.source.keys()
        kind = "fold many" if b > a else "fold"
        self._add(Mark(f"fold:{a}", kind, tuple(lines), tip), [*self.source], made)

    # --- between slices, and at the ends ---

    def _ports(self, values: Sequence[int], key: str, kind: str) -> None:
        """The row that was just added shows `values`. Other values are not there any more."""
        row = len(self.scene.rows) - 1
        self.source = {n: self.source.get(n, row) for n in values}
        for n in values:
            v = self.view.value(n)
            text = f"{shortened(v.name, 28)} · {human_bytes(v.size_bytes)}"
            tip = f"input {v}" if kind == "input" else f"kept across this cut: {v}"
            mark = Mark(f"{key}:{n}", kind, (text,), tip, size_bytes=v.size_bytes)
            self.ports.setdefault((n, self.source[n]), {})[row] = mark

    def _cut(self, i: int) -> None:
        view, site, cut = self.view, self.view.model.sites[i], self.view.report.cuts[i]
        lines = ["Attention", shortened(site.name, 32)]
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
        operator = view.group_of[view.numbers([view.a.regions[i].out])[0]]
        tip = [f"attention {i}: {site.name}", view.explain(operator)]
        tip += [f"q {site.q.dtype}{list(site.q.shape)}, k, v {site.k.dtype}{list(site.k.shape)}"]
        tip += [f"own operand {p.dtype}{list(p.shape)}" for p in site.private[:8]]
        mark = Mark(f"attention:{i}", "attention", tuple(lines), "\n".join(tip), operator)
        self.scene.bands[-1].attention = mark
        kept = f"context kept at cut {i}: {cut.context_bytes:,} bytes"
        if (spare := cut.context_bytes - view.model.cuts[i].context_bytes) > 0:
            kept += f"\n{spare:,} of them are not read any more; they stay so that slices are equal"
        label = f"min cut {i}: {human_bytes(cut.context_bytes)}"
        self._add(Mark(f"cut:{i}", "cut", (label,), kept, size_bytes=cut.context_bytes))
        self._ports(view.context(i + 1), f"port:{i}", "port")

    def _outputs(self) -> None:
        """One box for all outputs of one row."""
        by_source: dict[int, list[tuple[int, str]]] = {}
        for n, name in self.view.finals():
            by_source.setdefault(self.source.get(n, -1), []).append((n, name))
        for k, outputs in enumerate(by_source.values()):
            values = [self.view.value(n) for n, _ in outputs]
            size = sum(v.size_bytes for v in values)
            name = shortened(outputs[0][1], 28) if len(outputs) == 1 else f"{len(outputs)} outputs"
            rows = zip(outputs, values, strict=True)
            tip = "\n".join(f"{name}: {v.shape}, {human_bytes(v.size_bytes)}" for (_, name), v in rows)
            mark = Mark(f"out:{k}", "output", (f"{name} · {human_bytes(size)}",), tip, size_bytes=size)
            self._add(mark, [n for n, _ in outputs])

    def _make_links(self) -> None:
        """Values that one row makes for the same readers go together, unless a cut shows them."""
        shared: dict[tuple[int, tuple[int, ...], int], list[int]] = {}
        for v, start in {**self.ports, **self.readers}:
            readers = tuple(dict.fromkeys(self.readers.get((v, start), ())))
            shared.setdefault((start, readers, v if (v, start) in self.ports else -1), []).append(v)
        for (start, readers, port), values in sorted(shared.items()):
            described = [self.view.value(v) for v in values]
            size, tip = sum(d.size_bytes for d in described), "\n".join(map(str, described))
            ports = self.ports.get((port, start), {})
            self.scene.links.append(Link(f"{start}:{values[0]}", start, readers, ports, size, tip))


def letter(program: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA."""
    before, last = divmod(program, 26)
    return (letter(before - 1) if before else "") + chr(65 + last)
