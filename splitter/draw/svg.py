"""A scene as SVG: compute pool on the left, memory pool on the right, cuts as dashed lines between slices.

Boxes stand in one column. A value that the next box reads goes straight down; every other value runs in a
lane to the left of the boxes. One self-contained picture that follows the reader's light or dark setting.
Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from splitter.draw.scene import Band, Link, Mark, Scene
from splitter.draw.text import human_bytes, span, text_width

_MARGIN, _GUTTER, _CHANNEL, _TOP = 20.0, 148.0, 118.0, 96.0
_GAP = 24.0  # between two rows
_BAND_MIN = 46.0  # height of a slice's first row, for the slice's name
_LANE, _BEND = 16.0, 6.0  # width of a lane; radius of a line's corners
TITLE, DETAIL, LABEL = 12.0, 10.0, 10.0  # font sizes

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
.xhead {{ fill: {mem}; }}
.op rect, .port rect, .input rect, .output rect, .fold rect {{ fill: {paper}; stroke: {line}; }}
.again rect {{ stroke-dasharray: 3 2; }}
.pill rect, .attention rect {{ fill: {mem-fill}; stroke: {mem}; }}
.port rect {{ stroke: {cut}; }}
.cut {{ stroke: {cut}; stroke-width: 1.5; stroke-dasharray: 7 5; }}
.cut-text {{ font-size: 11px; font-weight: 700; fill: {cut}; }}
.half {{ stroke: {soft}; stroke-width: 0.8; stroke-dasharray: 1 4; }}
"""


def render_svg(scene: Scene, *, heading: str, notes: Sequence[str] = ()) -> str:
    """The whole picture. `heading` and `notes` stand above it."""
    return _Painter(scene, heading, notes).text()


def style(dark: int) -> str:
    """The style rules in light (0) or dark (1)."""
    colours = {name: pair[dark] for name, pair in COLOURS.items()}
    rules = _RULES.format_map(colours).strip().splitlines()
    for k in range(_N_TINTS):
        rules.append(f".p{k} {{ fill: {colours[f'p{k}']}; stroke: {colours[f'p{k}-line']}; }}")
    return "\n".join(f".split-graph {rule}" for rule in rules)


def slots_of(links: Sequence[Link]) -> list[int]:
    """For each link, in order of their first rows, a lane that is free from its first row to its last."""
    until: list[int] = []
    slots = []
    for link in links:
        slot = next((k for k, row in enumerate(until) if row <= link.start), len(until))
        until[slot : slot + 1] = [max([*link.readers, *link.ports])]
        slots.append(slot)
    return slots


def _is_small(mark: Mark) -> bool:
    return not mark.kind.startswith(("op", "fold", "attention"))


def _box_size(mark: Mark) -> tuple[float, float]:
    """Width and height of a box; a row of a cut has no box of its own."""
    if mark.kind == "cut":
        return 0.0, 20.0
    if _is_small(mark):
        return text_width(mark.lines[0], LABEL) + 18, 20.0
    widths = [text_width(t, DETAIL if k else TITLE, bold=not k) for k, t in enumerate(mark.lines)]
    return max(64.0, max(widths) + 22), 14.0 + 13 * len(mark.lines)


def _arrow(name: str, size: int) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size}" markerHeight="{size}" '
        f'orient="auto"><path class="{name}" d="M0 0.8 8 4 0 7.2z"/></marker>'
    )


class _Painter:
    """Rows from top to bottom. The lanes run to the left of the boxes; those of what cuts keep are wide."""

    def __init__(self, scene: Scene, heading: str, notes: Sequence[str]) -> None:
        self.scene, self.heading, self.notes = scene, heading, notes
        self.size = [_box_size(mark) for mark in scene.rows]
        kept = [link for link in scene.links if link.ports]
        passing = [link for link in scene.links if not link.ports and max(link.readers) > link.start + 1]
        wide, narrow = slots_of(kept), slots_of(passing)
        width = [80.0] * (1 + max(wide, default=0))
        for link, slot in zip(kept, wide, strict=True):
            width[slot] = max(width[slot], *(_box_size(port)[0] + 14 for port in link.ports.values()))
        left = [_MARGIN + _GUTTER + sum(width[:slot]) for slot in range(len(width) + 1)]
        lanes_end = left[-1] + _LANE * (1 + max(narrow, default=-1))
        self.lane = {k.key: left[s] + width[s] / 2 for k, s in zip(kept, wide, strict=True)}
        self.lane |= {k.key: lanes_end - _LANE * (s + 0.5) for k, s in zip(passing, narrow, strict=True)}
        self.nothing = left[0] + width[0] / 2  # where an empty cut says so
        column = max(w for w, _ in self.size)
        self.x = lanes_end + 16 + column / 2  # of the boxes' centres
        self.band_right = self.x + column / 2 + 16
        self.mem_x = self.band_right + _CHANNEL
        operators = [band.attention for band in scene.bands if band.attention]
        self.mem_width = max([176.0, *(_box_size(mark)[0] + 4 for mark in operators)])
        note_width = max([text_width(heading, 16, bold=True), *(text_width(n, 11) for n in notes)])
        self.width = max(self.mem_x + self.mem_width + 14 + _MARGIN, note_width + 2 * _MARGIN)
        self.room = [h for _, h in self.size]
        for band in scene.bands:
            self.room[band.first] = max(self.room[band.first], _BAND_MIN)
        self.top = self.bottom = _TOP + 16.0 * len(notes)
        self.y: list[float] = []  # of the rows' centres
        for room in self.room:
            self.y.append(self.bottom + room / 2)
            self.bottom += room + _GAP
        self.straight: dict[int, int] = {}  # row -> bytes that the next row reads of it
        self.meeting: dict[int, list[tuple[int, float, str]]] = {}  # row -> lanes that meet its box
        for link in scene.links:
            for row in link.readers:
                if self._is_straight(link.start, row):
                    self.straight[link.start] = self.straight.get(link.start, 0) + link.size_bytes
                else:
                    self.meeting.setdefault(row, []).append((0, -self.lane[link.key], link.key))
            if link.key in self.lane:
                self.meeting.setdefault(link.start, []).append((1, self.lane[link.key], link.key))
        self.out: list[str] = []

    def text(self) -> str:
        rows, links, bands = self.scene.rows, self.scene.links, self.scene.bands
        self._grounds()
        for band in bands:
            self._band(band)
        for row, mark in enumerate(rows):
            if mark.kind == "cut" and mark.lines:
                self._cut(mark, self.y[row])
        for link in links:
            self._link(link)
        for row, mark in enumerate(rows):
            ports = [(port, self.lane[k.key]) for k in links if row in k.ports for port in [k.ports[row]]]
            if mark.kind != "cut":
                ports = [(mark, self.x)]
            elif mark.lines and not ports:
                port = Mark(
                    f"{mark.key}:none", "port", ("nothing",), "nothing is kept across this cut", None, 0
                )
                ports = [(port, self.nothing)]
            for port, x in ports:
                self._box(port, x, self.y[row], *_box_size(port))
        for band, below in pairwise(bands):
            self._attention(band, below)
        self._legend()
        w, h = f"{self.width:.0f}", f"{self.bottom + 74:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="split-graph" width="{w}" height="{h}" '
            f'viewBox="0 0 {w} {h}" role="img">\n<title>{escape(self.heading)}</title>\n'
            f"<style>\n{style(0)}\n@media (prefers-color-scheme: dark) {{\n{style(1)}\n}}\n</style>\n"
            f"<defs>{_arrow('head', 7)}{_arrow('xhead', 6)}</defs>\n" + "\n".join(self.out) + "\n</svg>\n"
        )

    # --- grounds ---

    def _grounds(self) -> None:
        self._rect(0, 0, self.width, self.bottom + 74, "ground", radius=0)
        self._text(_MARGIN, 32, self.heading, "heading")
        for k, note in enumerate(self.notes):
            self._text(_MARGIN, 51 + 16 * k, note, "note")
        y = self.top - 44
        for x, width, name, note in (
            (_MARGIN - 10, self.band_right - _MARGIN + 20, "Compute pool", "model workers, weights"),
            (self.mem_x - 14, self.mem_width + 28, "Memory pool", "attention workers, KV cache"),
        ):
            self._rect(x, y, width, self.bottom - y, "pool", radius=10)
            self._text(x + 14, y + 18, name, "column")
            self._text(x + 14, y + 32, note, "note")

    def _band(self, band: Band) -> None:
        top = self.y[band.first] - self.room[band.first] / 2 - _GAP / 2 + 3
        height = self.y[band.last] + self.room[band.last] / 2 + _GAP / 2 - 3 - top
        many = len(band.slices) > 1
        self.out.append(f'<g data-slices="{band.slices[0]}-{band.slices[-1]}">')
        for shift in (5, 0) if many else (0,):
            width = self.band_right - _MARGIN - 5 * many
            self._rect(_MARGIN + shift, top + shift, width, height, f"p{band.program % _N_TINTS}", radius=8)
        for k, line in enumerate(band.lines):
            self._text(_MARGIN + 10, top + 20 + 14 * k, line, "d" if k else "t")
        if band.attention and not band.is_folded:
            y = self.y[band.middle] + self.size[band.middle][1] / 2 + _GAP / 2
            self._line(_MARGIN + 8, y, self.band_right - 8, "half")
            self._text(_MARGIN + 10, y - 7, "▲ q part: q goes first", "d")
            self._text(_MARGIN + 10, y + 15, "▼ k, v part", "d")
        self.out.append("</g>")

    def _cut(self, mark: Mark, y: float) -> None:
        data = f'data-cut="{mark.key.split(":")[1]}" data-bytes="{mark.size_bytes}"'
        self.out.append(f"<g {data}><title>{escape(mark.tip)}</title>")
        self._line(_MARGIN - 10, y, self.mem_x - 14, "cut")
        self._text(_MARGIN, y - 4, mark.lines[0], "cut-text")
        self.out.append("</g>")

    # --- graph ---

    def _is_straight(self, start: int, row: int) -> bool:
        return row == start + 1 and self.scene.rows[start].kind != "cut"

    def _left(self, row: int, key: str) -> tuple[float, float]:
        """Where a lane meets the left side of a box; what comes in is above what goes out."""
        keys = [k for _, _, k in sorted(self.meeting[row])]
        width, height = self.size[row]
        return self.x - width / 2, self.y[row] + ((keys.index(key) + 1) / (len(keys) + 1) - 0.5) * height

    def _link(self, link: Link) -> None:
        """One line per row that reads the link, straight down or by its lane; else down to its last cut."""
        rows, start, lane = self.scene.rows, link.start, self.lane.get(link.key, 0.0)
        origin, begin = rows[start].key, f"M{lane:.1f} {self.y[start]:.1f}"
        if rows[start].kind == "cut":
            origin = link.ports[start].key
        elif lane:
            x, y = self._left(start, link.key)
            begin = f"M{x:.1f} {y:.1f}H{lane + _BEND:.1f}q-{_BEND} 0 -{_BEND} {_BEND}"
            if not link.ports and rows[start].operator is not None:
                self._value(x - 4, y + 11, link.size_bytes, link.tip, anchor="end")
        ends = []
        for row in link.readers:
            if self._is_straight(start, row):
                top, bottom = self.y[start] + self.size[start][1] / 2, self.y[row] - self.size[row][1] / 2
                ends.append((rows[row].key, f"M{self.x:.1f} {top:.1f}V{bottom:.1f}"))
                size = self.straight.pop(start, 0)
                if size and rows[start].operator is not None and rows[row].kind != "output":
                    self._value(self.x + 6, top + 15, size, link.tip)
            else:
                x, y = self._left(row, link.key)
                turn = f"V{y - _BEND:.1f}q0 {_BEND} {_BEND} {_BEND}H{x:.1f}"
                ends.append((rows[row].key, begin + turn))
        last = max([start, *link.ports])
        if last > max([start, *link.readers]):
            ends.append((link.ports[last].key, f"{begin}V{self.y[last] - 10:.1f}"))
        via = " ".join(port.key for port in link.ports.values())
        for to, d in ends:
            data = f'data-from="{origin}" data-to="{to}" data-via="{via}"'
            self.out.append(f'<path class="edge" {data} d="{d}" marker-end="url(#head)"/>')

    def _value(self, x: float, y: float, size_bytes: int, tip: str, *, anchor: str = "start") -> None:
        self.out.append(f'<g class="value" data-bytes="{size_bytes}"><title>{escape(tip)}</title>')
        self._text(x, y, human_bytes(size_bytes), "l", anchor=anchor)
        self.out.append("</g>")

    def _box(self, mark: Mark, x: float, y: float, width: float, height: float) -> None:
        """A box around (x, y); the first of its lines is larger."""
        data = f' data-op="{mark.key}"' if mark.operator is not None else ""
        data += f' data-bytes="{mark.size_bytes}"' if mark.size_bytes is not None else ""
        self.out.append(
            f'<g class="{mark.kind}" data-key="{mark.key}"{data}><title>{escape(mark.tip)}</title>'
        )
        small = _is_small(mark)
        for shift in (6, 3, 0) if mark.kind.endswith("many") else (0,):
            left, top = x - width / 2 + shift, y - height / 2 + shift
            self._rect(left, top, width, height, "", radius=10 if small else 6)
        base = y - 6.5 * len(mark.lines) - 3.5
        for k, line in enumerate(mark.lines):
            self._text(x, base + 13 * (k + 1), line, "l" if small else "d" if k else "t", anchor="middle")
        self.out.append("</g>")

    # --- memory pool ---

    def _attention(self, band: Band, below: Band) -> None:
        """The attention operator between two bands. Those of a folded band are one box above it."""
        assert band.attention
        x, top, bottom = self.mem_x + self.mem_width / 2, self.y[band.middle] - 16, self.y[below.first] + 16
        self._box(band.attention, x, (top + bottom) / 2, self.mem_width, bottom - top)
        for row, what in ((band.middle, "q"), (band.last, "k, v"), (below.first, "out")):
            y, ends = self.y[row], [self.x + self.size[row][0] / 2, self.mem_x]
            start, end = reversed(ends) if what == "out" else ends
            d = f"M{start:.1f} {y:.1f}H{end:.1f}"
            self.out.append(f'<path class="exchange" d="{d}" marker-end="url(#xhead)"/>')
            text = f"{what} {human_bytes(self.scene.rows[row].size_bytes or 0)}"
            self._text((self.band_right + self.mem_x - 4) / 2, y - 5, text, "l", anchor="middle")
        if hidden := band.slices[:-1]:
            lines = (f"× {len(hidden)} attention", f"operator{'s' * (len(hidden) > 1)} {span(hidden)}")
            mark = Mark(f"hidden:{hidden[0]}", "attention many", lines, "as the one below")
            above = self.y[band.first] + 16 if band.first > 1 else self.y[0]
            self._box(mark, x - 3, (above + top) / 2, self.mem_width - 16, 34)

    def _legend(self) -> None:
        texts = [
            "minimum cut; the values on it are the context that the model worker keeps",
            "a number on a line is the bytes of its value; q goes first, then k and v (Lamina 2025, 4.2)",
        ]
        x, y = _MARGIN, self.bottom + 22
        self._line(x, y - 4, x + 36, "cut")
        if any(mark.kind.endswith(" again") for mark in self.scene.rows):
            texts.append("cheap, so computed again in each slice rather than carried")
            self.out.append('<g class="op again">')
            self._rect(x, y + 23, 36, 14, "", radius=4)
            self.out.append("</g>")
        for k, text in enumerate(texts):
            self._text(x + 44, y + 18 * k, text, "note")

    # --- primitives ---

    def _line(self, x: float, y: float, to: float, cls: str) -> None:
        self.out.append(f'<line class="{cls}" x1="{x:.1f}" y1="{y:.1f}" x2="{to:.1f}" y2="{y:.1f}"/>')

    def _rect(self, x: float, y: float, w: float, h: float, cls: str, *, radius: float) -> None:
        name = f' class="{cls}"' if cls else ""
        self.out.append(
            f'<rect{name} x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius:g}"/>'
        )

    def _text(self, x: float, y: float, text: str, cls: str, *, anchor: str = "start") -> None:
        where = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.out.append(f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}"{where}>{escape(text)}</text>')
