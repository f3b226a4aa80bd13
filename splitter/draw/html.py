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
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1f24; --soft: #4f5863; --line: #c9cfd6;
  --raised: #f5f6f8; }
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
th, td { text-align: left; vertical-align: top; padding: 2px 14px 2px 0; border-bottom: 1px solid var(--line);
}
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.soft { color: var(--soft); }
#tip { position: fixed; right: 16px; bottom: 16px; max-width: 520px; padding: 8px 10px; font-size: 12px;
  background: var(--raised); border: 1px solid var(--line); border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; pointer-events: none; }
[data-key]:focus { outline: 2px solid var(--soft); }
.split-graph .dim { opacity: 0.25; } .split-graph .lit { stroke-width: 2.4; }
"""

# Titles become a panel at the foot of the page; the lines of a box stand out while it is looked at.
_SCRIPT = """
const tip = document.getElementById("tip"), edges = [...document.querySelectorAll(".split-graph .edge")];
function show(text, key) {
  tip.textContent = text; tip.hidden = !text;
  const on = ({dataset: d}) => [d.from, d.to, ...d.via.split(" ")].includes(key), any = edges.some(on);
  for (const e of edges) { e.classList.toggle("lit", on(e)); e.classList.toggle("dim", any && !on(e)); }
}
for (const title of document.querySelectorAll(".split-graph g > title")) {
  const g = title.parentNode, text = title.textContent;
  title.remove(); g.setAttribute("tabindex", "0"); g.setAttribute("aria-label", text);
  for (const on of ["mouseenter", "focus"]) g.addEventListener(on, () => show(text, g.dataset.key));
  for (const off of ["mouseleave", "blur"]) g.addEventListener(off, () => show("", null));
}
document.addEventListener("keydown", e => { if (e.key === "Escape") show("", null); });
"""


def render_html(view: ModelView, svg: str) -> str:
    """The page. `svg` is the drawing to put into it."""
    r = view.report
    title = f"{r.n_slices} slices at {r.n_attention} attention operators"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(r.line())}.</p>
<p class="soft">Point at a box or a cut, or move through them with the tab key, for details.</p>
<div class="picture">{svg}</div>
<h2>Cuts</h2>
{_cuts(view)}
<h2>Slices</h2>
{_slices(view)}
{_rest(view)}
<div id="tip" role="status" hidden></div>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _details(summary: str, *tables: tuple[Sequence[str], Iterable[Sequence[str]]], data: str = "") -> str:
    """Tables, each a head and its rows, behind a summary. Cells that begin with a digit are numbers."""
    text = f"<details{data}><summary>{escape(summary)}</summary>"
    for head, rows in tables:
        text += "<table><tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"
        for row in rows:
            cells = (f"<td{' class=n' if c[:1].isdigit() else ''}>{escape(c)}</td>" for c in row)
            text += f"<tr>{''.join(cells)}</tr>"
        text += "</table>"
    return text + "</details>\n"


def _both(n: int) -> str:
    return f"{n:,} B" if n < 1024 else f"{n:,} B ({human_bytes(n)})"


def _cuts(view: ModelView) -> str:
    text = ""
    for i, cut in enumerate(view.report.cuts):
        kept, exchanged = _both(cut.context_bytes), _both(cut.exchanged_bytes)
        context = [(v.name, shape_text(v.dtype, v.shape), _both(v.size_bytes)) for v in cut.context]
        sizes = (("q, out", cut.q_bytes), ("k and v, out", cut.kv_bytes), ("attention, back", cut.out_bytes))
        text += _details(
            f"min cut {i} at {cut.attention}: {kept} kept, {exchanged} exchanged",
            (("kept on the model worker", "shape", "bytes"), context),
            (("exchanged with the memory pool", "bytes"), [(what, _both(n)) for what, n in sizes]),
            data=f' data-list-cut="{i}" data-bytes="{cut.context_bytes}"',
        )
    return text


def _operator(view: ModelView, g: int) -> tuple[str, str, str]:
    group = view.groups[g]
    return group.title, group.detail, f"{len(group.members)} equations"


def _slices(view: ModelView) -> str:
    text = ""
    for s in view.model.slices:
        parts = ((Q, "q part" if s.index < view.model.n else "final"), (KV, "k, v part"))
        rows = [(name, *_operator(view, g)) for part, name in parts for g in view.part(s.index, part)]
        summary = (
            f"slice {s.index}: program {letter(view.programs[s.index])}, {len(s.eqn_positions)} equations"
        )
        text += _details(summary, (("part", "operator", "parameters", "size"), rows))
    return text


def _rest(view: ModelView) -> str:
    kinds = ("aux", "state", "load", "operands", "unused")
    rows = [_operator(view, g) for g, group in enumerate(view.groups) if group.kind in kinds]
    outputs = [(name, "computed beside slice 0") for name in view.report.aux_outputs]
    outputs += [(name, "the attention side's state") for name in view.report.state_outputs]
    text = "<h2>Outside the slices</h2>\n" if rows or outputs else ""
    if rows:
        text += _details("operators", (("operators", "what for", "size"), rows))
    if outputs:
        text += _details(f"{len(outputs)} outputs", (("output", "where"), outputs))
    return text
