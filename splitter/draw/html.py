"""A drawing as one HTML file that works offline: the picture, details on hovering, and the lists behind it.

Knows nothing of layout; the lists come from the report and the view, the picture from `svg`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from splitter.draw.model import KV, ModelView, Q
from splitter.draw.scene import letter
from splitter.draw.text import human_bytes, shape_text

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1f24; --soft: #4f5863; --line: #c9cfd6; --raised: #f5f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171b; --ink: #e6e9ed; --soft: #aab4bf; --line: #3a424c; --raised: #222831; }
}
body { margin: 0 auto; max-width: 1400px; padding: 16px; background: var(--ground); color: var(--ink);
  font: 14px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 20px; } h2 { font-size: 16px; }
.picture { overflow: auto; border: 1px solid var(--line); border-radius: 8px; }
details { margin: 4px 0; } details details { margin-left: 20px; }
summary { cursor: pointer; } summary:hover { background: var(--raised); }
table { border-collapse: collapse; margin: 4px 0 8px 20px; }
th, td { text-align: left; padding: 2px 14px 2px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.soft { color: var(--soft); }
#tip { position: fixed; display: none; max-width: 520px; padding: 8px 10px; background: var(--raised); color: var(--ink);
  border: 1px solid var(--line); border-radius: 6px; font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere;
  pointer-events: none; }
[data-key]:focus { outline: 2px solid var(--soft); }
.split-graph .dim { opacity: 0.25; } .split-graph .lit { stroke-width: 2.4; }
"""

# Titles become a panel that follows the pointer or the keyboard; the lines of a box stand out while it is looked at.
_SCRIPT = """
const tip = document.getElementById("tip"), svg = document.querySelector(".split-graph");
const edges = [...svg.querySelectorAll(".edge")];
function light(key) {
  for (const e of edges) {
    const on = key !== null && (e.dataset.from === key || e.dataset.to === key);
    e.classList.toggle("lit", on); e.classList.toggle("dim", key !== null && !on);
  }
}
function hide() { tip.style.display = "none"; light(null); }
function show(text, key, x, y) {
  tip.textContent = text; tip.style.display = "block";
  const w = tip.offsetWidth, h = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - w - 4)) + "px";
  tip.style.top = Math.max(4, y + 18 + h > innerHeight ? y - h - 10 : y + 18) + "px";
  light(edges.some(e => e.dataset.from === key || e.dataset.to === key) ? key : null);
}
for (const g of svg.querySelectorAll("g")) {
  const title = g.querySelector(":scope > title");
  if (!title) continue;
  const text = title.textContent, key = g.dataset.key || "";
  title.remove(); g.setAttribute("tabindex", "0"); g.setAttribute("aria-label", text);
  g.addEventListener("mousemove", e => show(text, key, e.clientX, e.clientY));
  g.addEventListener("mouseleave", hide);
  g.addEventListener("focus", () => { const r = g.getBoundingClientRect(); show(text, key, r.right, r.top); });
  g.addEventListener("blur", hide);
}
document.addEventListener("keydown", e => { if (e.key === "Escape") hide(); });
"""


def render_html(view: ModelView, svg: str) -> str:
    """The page. `svg` is the drawing to put into it."""
    r = view.report
    title = f"{r.n_slices} slices at {r.n_attention} attention operators"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(r.line())}.</p>",
        '<p class="soft">Point at a box or a cut, or move through them with the tab key, for details.</p>',
        f'<div class="picture">{svg}</div>',
        "<h2>Cuts</h2>",
        *_cuts(view),
        "<h2>Slices</h2>",
        *_slices(view),
        *_rest(view),
        '<div id="tip" role="status"></div>',
        f"<script>{_SCRIPT}</script>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _details(summary: str, inside: Iterable[str], *, data: str = "") -> str:
    return f"<details{data}><summary>{summary}</summary>{''.join(inside)}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells that start with a digit are aligned as numbers."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=n' if c[:1].isdigit() else ''}>{escape(c)}</td>" for c in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _both(n: int) -> str:
    return f"{n:,} B" if n < 1024 else f"{n:,} B ({human_bytes(n)})"


def _cuts(view: ModelView) -> Iterable[str]:
    for i, cut in enumerate(view.report.cuts):
        context = [(v.name, shape_text(v.dtype, v.shape), _both(v.size_bytes)) for v in cut.context]
        exchanged = [
            ("q, out", _both(cut.q_bytes)),
            ("k and v, out", _both(cut.kv_bytes)),
            ("attention, back", _both(cut.out_bytes)),
        ]
        yield _details(
            f"min cut {i} at {escape(cut.attention)}: <b>{_both(cut.context_bytes)}</b> kept, "
            f"{_both(cut.exchanged_bytes)} exchanged",
            [
                _table(("kept on the model worker", "shape", "bytes"), context),
                _table(("exchanged with the memory pool", "bytes"), exchanged),
            ],
            data=f' data-list-cut="{i}" data-bytes="{cut.context_bytes}"',
        )


def _slices(view: ModelView) -> Iterable[str]:
    for s in view.model.slices:
        rows = []
        for part, name in ((Q, "q part" if s.index < view.model.n else "final"), (KV, "k, v part")):
            for g in view.part(s.index, part):
                group = view.groups[g]
                rows.append((name, group.title, group.detail, f"{len(group.members)} equations"))
        yield _details(
            f"slice {s.index}: program {letter(view.programs[s.index])}, {len(s.eqn_positions)} equations",
            [_table(("part", "operator", "parameters", "size"), rows)],
        )


def _rest(view: ModelView) -> Iterable[str]:
    r = view.report
    rows = [
        (group.title, group.detail, f"{len(group.members)} equations")
        for group in view.groups
        if group.kind in ("aux", "state", "load", "operands", "unused")
    ]
    outputs = [(name, "computed beside slice 0") for name in r.aux_outputs]
    outputs += [(name, "the attention side's state") for name in r.state_outputs]
    if not rows and not outputs:
        return
    yield "<h2>Outside the slices</h2>"
    if rows:
        yield _details("operators", [_table(("operators", "what for", "size"), rows)])
    if outputs:
        yield _details(f"{len(outputs)} outputs", [_table(("output", "where"), outputs)])
