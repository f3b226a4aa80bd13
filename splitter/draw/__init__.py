"""Drawings of a split model: the partitioned computation graph of Lamina 2025, Figure 6, as SVG or HTML.

Operators are nodes, edges carry the bytes of their values, slices are coloured regions of the compute pool,
attention stands between them in the memory pool, and dashed lines are the minimum cuts. Knows nothing of
files or the CLI.
"""

from __future__ import annotations

from splitter.draw.html import render_html
from splitter.draw.model import ModelView
from splitter.draw.scene import make_scene
from splitter.draw.svg import render_svg
from splitter.draw.text import human_bytes
from splitter.slices import SplitModel


def to_svg(split_model: SplitModel, *, layers: slice | None = None) -> str:
    """The partitioned graph as one SVG text, without scripts or references to anything outside.

    Args:
      layers: which slices to draw in full, e.g. `slice(0, 3)` or `slice(None)` for all of them; slice i
        is the one that ends by sending q, k, v to attention i. None draws the first slice of every
        program and the last slice. The rest is folded into "× 28 equal slices".
    """
    return _draw(ModelView(split_model), layers)


def to_html(split_model: SplitModel, *, layers: slice | None = None) -> str:
    """The same as one HTML file with details on hovering and the list of cuts. It needs no network."""
    view = ModelView(split_model)
    return render_html(view, _draw(view, layers))


def _draw(view: ModelView, layers: slice | None) -> str:
    r = view.report
    heading = f"{r.n_slices} slices at {r.n_attention} attention operators, {r.n_programs} programs"
    exchanged = human_bytes(round(r.exchanged_bytes_per_token))
    step = f"a step of {r.n_tokens:,} token{'s' * (r.n_tokens != 1)}"
    note = f"Bytes are those of {step}. The pools exchange {exchanged} a token."
    return render_svg(make_scene(view, layers), heading=heading, notes=[note])


__all__ = ["to_html", "to_svg"]
