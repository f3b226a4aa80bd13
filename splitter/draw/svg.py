"""A scene as SVG: compute pool on the left, memory pool on the right, cuts as dashed lines between slices.

One self-contained picture that follows the reader's light or dark setting. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from splitter.draw.layout import DrawnPlacement, arrange
from splitter.draw.scene import DETAIL, LABEL, TITLE, Band, CutMark, Mark, Scene
from splitter.draw.text import human_bytes, span, text_width

_MARGIN, _GUTTER, _CHANNEL, _TOP = 20.0, 148.0, 118.0, 96.0
_PAD = 7.0  # of a slice around its rows

# class -> (light, dark). Text stands on these grounds with a contrast of at least 4.5:1.
COLOURS = {
    "ground": ("#ffffff", "#14171b"), "ink": ("#1b1f24", "#e6e9ed"), "soft": ("#4f5863", "#aab4bf"),
    "paper": ("#ffffff", "#222831"), "line": ("#68727e", "#7f8a96"), "cut": ("#b3261e", "#ff8f80"),
    "pool": ("#f5f6f8", "#1a1e24"), "pool-line": ("#c9cfd6", "#3a424c"),
    "mem": ("#6b3fa0", "#c3a2ee"), "mem-fill": ("#f4edfb", "#2a2038"),
    "p0": ("#e4eefb", "#16273d"), "p0-line": ("#7ba3d4", "#4c76a8"),
    "p1": ("#e5f4e8", "#16301f"), "p1-line": ("#79b587", "#4b8a5b"),
    "p2": ("#fbf1dc", "#342812"), "p2-line": ("#cfa64f", "#96762f"),
    "p3": ("#fbe7ea", "#391b21"), "p3-line": ("#d18a95", "#9c5561"),
}  # fmt: skip
_N_TINTS = 4

_RULES = """
text {{ font-family: system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: {ink}; }}
.ground {{ fill: {ground}; }}
.pool {{ fill: {pool}; stroke: {pool-line}; }}
.heading {{ font-size: 16px; font-weight: 700; }}
.column {{ font-size: 12px; font-weight: 700; }}
.note {{ font-size: 11px; font-weight: 400; fill: {soft}; }}
.t {{ font-size: 12px; font-weight: 600; }}
.d {{ font-size: 10px; fill: {soft}; }}
.l {{ font-size: 10px; }}
.edge {{ fill: none; stroke: {line}; stroke-width: 1.2; }}
.head {{ fill: {line}; }}
.exchange {{ fill: none; stroke: {mem}; stroke-width: 1.6; }}
.exchange-head {{ fill: {mem}; }}
.op rect, .port rect, .input rect, .output rect {{ fill: {paper}; stroke: {line}; }}
.again rect {{ stroke-dasharray: 3 2; }}
.fold rect {{ fill: {paper}; stroke: {line}; }}
.pill rect {{ fill: {mem-fill}; stroke: {mem}; }}
.attention rect {{ fill: {mem-fill}; stroke: {mem}; stroke-width: 1.4; }}
.port rect {{ stroke: {cut}; }}
.cut {{ stroke: {cut}; stroke-width: 1.5; stroke-dasharray: 7 5; }}
.cut-text {{ font-size: 11px; font-weight: 700; fill: {cut}; }}
.half {{ stroke: {soft}; stroke-width: 0.8; stroke-dasharray: 1 4; }}
"""
_TINT_RULES = ".p{k} .band {{ fill: {p}; stroke: {line}; }} .p{k} .ground-p {{ fill: {p}; }} .on-p{k} rect {{ fill: {p}; }}\n"


def render_svg(scene: Scene, *, heading: str, notes: Sequence[str] = ()) -> str:
    """The whole picture. `heading` and `notes` stand above it."""
    return _Painter(scene, heading, notes).text()


def style(dark: int) -> str:
    """The style rules in light (0) or dark (1)."""
    colours = {name: pair[dark] for name, pair in COLOURS.items()}
    rules = _RULES.format_map(colours)
    for k in range(_N_TINTS):
        rules += _TINT_RULES.format(k=k, p=colours[f"p{k}"], line=colours[f"p{k}-line"])
    scoped = [
        f".split-graph {rule}" if not rule.startswith(".p") or " " in rule else rule
        for rule in rules.strip().splitlines()
    ]
    return "\n".join(scoped)


class _Painter:
    def __init__(self, scene: Scene, heading: str, notes: Sequence[str]) -> None:
        self.scene, self.heading, self.notes = scene, heading, notes
        self.place: DrawnPlacement = arrange(scene.boxes, list(scene.edges))
        self.box = {b.key: b for b in scene.boxes}
        self.top = _TOP + 16.0 * len(notes)
        self.graph_x = _MARGIN + _GUTTER
        self.band_right = self.graph_x + self.place.width + 12
        self.pool_right = self.band_right + 10
        texts = [(t, k == 0) for c in scene.cuts for k, t in enumerate(c.lines)]
        self.mem_width = max([176.0, *(text_width(t, TITLE if b else DETAIL, bold=b) + 26 for t, b in texts)])
        self.mem_x = self.band_right + _CHANNEL
        note_width = max([text_width(heading, 16, bold=True), *(text_width(n, 11) for n in notes)])
        self.width = max(self.mem_x + self.mem_width + 14 + _MARGIN, note_width + 2 * _MARGIN)
        self.bottom = self.top + self.place.height + 16
        self.height = self.bottom + 74
        self.out: list[str] = []

    def at(self, key: str) -> tuple[float, float]:
        x, y = self.place.centre[key]
        return self.graph_x + x, self.top + y

    def row_y(self, row: int, share: float) -> float:
        return self.top + self.place.row_top[row] + share * self.place.row_height[row]

    def text(self) -> str:
        self._grounds()
        for band in self.scene.bands:
            self._band(band)
        for cut in self.scene.cuts:
            self._cut_line(cut)
        self._edges()
        for key, mark in self.scene.marks.items():
            self._box(key, mark)
        self._memory_pool()
        self._legend()
        w, h = f"{self.width:.0f}", f"{self.height:.0f}"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="split-graph" width="{w}" height="{h}" '
            f'viewBox="0 0 {w} {h}" role="img">\n<title>{escape(self.heading)}</title>\n'
            f"<style>\n{style(0)}\n@media (prefers-color-scheme: dark) {{\n{style(1)}\n}}\n</style>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="head" d="M0 0.8 8 4 0 7.2z"/></marker>'
            '<marker id="xhead" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
            'orient="auto"><path class="exchange-head" d="M0 0.8 8 4 0 7.2z"/></marker></defs>\n'
        )
        return head + "\n".join(self.out) + "\n</svg>\n"

    # --- grounds ---

    def _grounds(self) -> None:
        self._rect(0, 0, self.width, self.height, "ground", radius=0)
        self._text(_MARGIN, 32, self.heading, "heading")
        for k, note in enumerate(self.notes):
            self._text(_MARGIN, 51 + 16 * k, note, "note")
        y = self.top - 44
        self._rect(_MARGIN - 10, y, self.pool_right - _MARGIN + 10, self.bottom - y, "pool", radius=10)
        self._rect(self.mem_x - 14, y, self.mem_width + 28, self.bottom - y, "pool", radius=10)
        self.out.append(
            f'<text class="column" x="{_MARGIN + 2:.1f}" y="{y + 20:.1f}">Compute pool'
            '<tspan class="note" dx="8">model workers, weights</tspan></text>'
        )
        self._text(self.mem_x, y + 20, "Memory pool", "column")
        self._text(self.mem_x, y + 35, "attention workers, KV cache", "note")

    def _band(self, band: Band) -> None:
        top, bottom = self.row_y(band.first, 0) - _PAD, self.row_y(band.last, 1) + _PAD
        tint = f"p{band.program % _N_TINTS}"
        self.out.append(f'<g class="{tint}" data-slices="{band.slices[0]}-{band.slices[-1]}">')
        if band.folded and len(band.slices) > 1:
            self._rect(_MARGIN + 5, top + 5, self.band_right - _MARGIN - 5, bottom - top, "band", radius=8)
        self._rect(_MARGIN, top, self.band_right - _MARGIN - 5 * band.folded, bottom - top, "band", radius=8)
        self._text(_MARGIN + 10, top + 20, band.title, "t")
        for k, line in enumerate(band.details):
            self._text(_MARGIN + 10, top + 35 + 13 * k, line, "d")
        if band.middle is not None and not band.folded:
            y = self.row_y(band.middle, 1) + 5
            self.out.append(
                f'<line class="half" x1="{_MARGIN + 8:.1f}" y1="{y:.1f}" x2="{self.band_right - 8:.1f}" y2="{y:.1f}"/>'
            )
            self._text(_MARGIN + 10, y - 7, "▲ q part: q goes first", "d")
            self._text(_MARGIN + 10, y + 15, "▼ k, v part", "d")
        self.out.append("</g>")

    def _cut_line(self, cut: CutMark) -> None:
        y = self.row_y(cut.row, 0.5)
        label = f"min cut {cut.site}: {human_bytes(cut.context_bytes)}"
        self.out.append(f'<g data-cut="{cut.site}" data-bytes="{cut.context_bytes}">')
        self.out.append(f"<title>{escape(cut.cut_tip)}</title>")
        self.out.append(
            f'<line class="cut" x1="{_MARGIN - 10:.1f}" y1="{y:.1f}" x2="{self.mem_x - 14:.1f}" y2="{y:.1f}"/>'
        )
        self._text(_MARGIN, y - 4, label, "cut-text")
        self.out.append("</g>")

    # --- graph ---

    def _edges(self) -> None:
        edges = list(self.scene.edges)
        routes = [[(self.graph_x + x, self.top + y) for x, y in r] for r in self.place.routes]
        self._fan(edges, routes, end=1)
        self._fan(edges, routes, end=0)
        for (start, end), points in zip(edges, routes, strict=True):
            marks = self.scene.marks
            arrow = "" if marks[end].kind == "value" else ' marker-end="url(#head)"'
            d = self._path(points, start, end)
            self.out.append(
                f'<path class="edge" data-from="{escape(start)}" data-to="{escape(end)}" d="{d}"{arrow}/>'
            )

    def _fan(
        self, edges: list[tuple[str, str]], routes: list[list[tuple[float, float]]], *, end: int
    ) -> None:
        """Let the edges that meet at one side of a box meet it at different places, in the order they come from."""
        meeting: dict[str, dict[float, list[int]]] = {}
        for k, edge in enumerate(edges):
            near = routes[k][-2 if end else 1]
            meeting.setdefault(edge[end], {}).setdefault(near[0], []).append(k)
        for key, by_x in meeting.items():
            if self.scene.marks[key].kind in ("value", "pill"):
                continue
            step = min(18.0, 0.7 * self.box[key].width / len(by_x))
            for j, x in enumerate(sorted(by_x)):
                shift = (j - (len(by_x) - 1) / 2) * step
                for k in by_x[x]:
                    px, py = routes[k][-end]
                    routes[k][-end] = (px + shift, py)

    def _path(self, points: list[tuple[float, float]], start: str, end: str) -> str:
        points = list(points)
        from_side = self.box[start].pinned and self._dock(points, 0, start)
        to_side = self.box[end].pinned and self._dock(points, -1, end)
        d = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
        for k, ((x0, y0), (x1, y1)) in enumerate(pairwise(points)):
            if abs(x0 - x1) < 0.5:
                d.append(f"L{x1:.1f} {y1:.1f}")
            elif to_side and k == len(points) - 2:
                d.append(f"C{x0:.1f} {y1:.1f} {x0 + 0.3 * (x1 - x0):.1f} {y1:.1f} {x1:.1f} {y1:.1f}")
            elif from_side and k == 0:
                d.append(f"C{x1 + 0.3 * (x0 - x1):.1f} {y0:.1f} {x1:.1f} {y0:.1f} {x1:.1f} {y1:.1f}")
            else:
                bend = 0.55 * (y1 - y0)
                d.append(f"C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}")
        return " ".join(d)

    def _dock(self, points: list[tuple[float, float]], end: int, key: str) -> bool:
        """Where a line meets a box at the right edge: its left side (True), or its top or bottom if right there."""
        (x, y), half = self.at(key), self.box[key].width / 2
        near = points[-2 if end else 1][0]
        if near < x - half - 10:
            points[end] = (x - half, y)
            return True
        points[end] = (min(max(near, x - half + 10), x + half - 10), points[end][1])
        return False

    def _box(self, key: str, mark: Mark) -> None:
        b, (x, y) = self.box[key], self.at(key)
        look = f"op {mark.kind}" if mark.operator is not None else mark.kind
        data = f' data-op="{escape(key)}"' if mark.operator is not None else ""
        size = f' data-bytes="{mark.size_bytes}"' if mark.size_bytes is not None else ""
        band = next((s for s in self.scene.bands if s.first <= b.row <= s.last), None)
        if mark.kind == "value" and band:
            look += f" on-p{band.program % _N_TINTS}"
        self.out.append(f'<g class="{look}" data-key="{escape(key)}"{data}{size}>')
        if mark.tip:
            self.out.append(f"<title>{escape(mark.tip)}</title>")
        left, top = x - b.width / 2, y - b.height / 2
        if mark.kind == "fold many":
            for shift in (6, 3):
                self._rect(left + shift, top + shift, b.width, b.height, "", radius=6)
        radius = {"value": 2.0, "pill": 10.0, "input": 10.0, "output": 10.0, "port": 10.0}.get(mark.kind, 6.0)
        self._rect(left, top, b.width, b.height, "", radius=radius)
        small = mark.kind in ("value", "port", "input", "output", "pill")
        self._lines(x, y, mark.lines, small=small)
        self.out.append("</g>")

    def _lines(self, x: float, y: float, lines: Sequence[str], *, small: bool = False) -> None:
        """Lines of text centred on (x, y), the first one larger."""
        heights = [LABEL] * len(lines) if small else [TITLE + 1] + [DETAIL + 3] * (len(lines) - 1)
        base = y - sum(heights) / 2
        for k, (line, h) in enumerate(zip(lines, heights, strict=True)):
            base += h
            cls = "l" if small else "t" if k == 0 else "d"
            self._text(x, base - 0.2 * h, line, cls, anchor="middle")

    # --- memory pool ---

    def _memory_pool(self) -> None:
        centre = self.mem_x + self.mem_width / 2
        ends: list[tuple[int, float, float]] = []
        for c in self.scene.cuts:
            top, bottom = self.at(c.send_q)[1] - 16, self.at(c.receive)[1] + 16
            ends.append((c.site, top, bottom))
            name = " ".join(map(str, c.operators))
            self.out.append(f'<g class="attention" data-key="attention:{c.site}" data-op="attention:{name}">')
            self.out.append(f"<title>{escape(c.tip)}</title>")
            self._rect(self.mem_x, top, self.mem_width, bottom - top, "", radius=8)
            self._lines(centre, (top + bottom) / 2, c.lines)
            self.out.append("</g>")
            for key, what in ((c.send_q, "q"), (c.send_kv, "k, v")):
                self._exchange(key, what, back=False)
            self._exchange(c.receive, "out", back=True)
        for (a, _, above), (b, below, _) in pairwise(ends):
            if b > a + 1:
                y, hidden = (above + below) / 2, list(range(a + 1, b))
                self.out.append(f'<g class="attention" data-folded="{hidden[0]}-{hidden[-1]}">')
                for shift in (5, 0):
                    self._rect(self.mem_x + 8 + shift, y - 17 + shift, self.mem_width - 16, 32, "", radius=8)
                self._lines(
                    centre, y, (f"× {len(hidden)} attention", f"operator{'s' * (b > a + 2)} {span(hidden)}")
                )
                self.out.append("</g>")

    def _exchange(self, key: str, what: str, *, back: bool) -> None:
        (x, y), size = self.at(key), self.scene.marks[key].size_bytes or 0
        start, end = x + self.box[key].width / 2, self.mem_x
        if back:
            start, end = end, start
        self.out.append(
            f'<path class="exchange" d="M{start:.1f} {y:.1f}L{end:.1f} {y:.1f}" marker-end="url(#xhead)"/>'
        )
        self._text(
            (self.pool_right + self.mem_x - 14) / 2,
            y - 5,
            f"{what} {human_bytes(size)}",
            "l",
            anchor="middle",
        )

    def _legend(self) -> None:
        y = self.bottom + 22
        x = _MARGIN
        self.out.append(
            f'<line class="cut" x1="{x:.1f}" y1="{y - 4:.1f}" x2="{x + 36:.1f}" y2="{y - 4:.1f}"/>'
        )
        text = "minimum cut; the values on it are the context that the model worker keeps"
        self._text(x + 44, y, text, "note")
        text = "a number on a line is the bytes of its value; q goes first, then k and v (Lamina 2025, 4.2)"
        y += 18
        self._text(x + 44, y, text, "note")
        if not any(m.kind.endswith(" again") for m in self.scene.marks.values()):
            return
        y += 18
        self.out.append('<g class="op again">')
        self._rect(x, y - 13, 36, 14, "", radius=4)
        self.out.append("</g>")
        self._text(x + 44, y, "cheap, so computed again in each slice rather than carried", "note")

    # --- primitives ---

    def _rect(self, x: float, y: float, w: float, h: float, cls: str, *, radius: float) -> None:
        name = f' class="{cls}"' if cls else ""
        self.out.append(
            f'<rect{name} x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius:g}"/>'
        )

    def _text(self, x: float, y: float, text: str, cls: str, *, anchor: str = "start") -> None:
        where = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.out.append(f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}"{where}>{escape(text)}</text>')
