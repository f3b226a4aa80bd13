"""Drawings: every operator once, the report's weights on the cuts, nothing overlapping, pages that work
offline."""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import split_examples as ex
from draw_examples import IDS, MODELS, drawn

from splitter import attention, split
from splitter.draw import to_html, to_svg
from splitter.draw.model import KV, ModelView, Q
from splitter.draw.scene import folded, letter, make_scene, shown_slices
from splitter.draw.svg import COLOURS, slots_of
from splitter.draw.text import human_bytes

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"
LAYERS = [None, slice(None), slice(1, 2)]


def boxes_of(root: ET.Element) -> dict[str, tuple[float, float, float, float]]:
    """Left, top, right, bottom of every box by its key."""
    found = {}
    for g in root.iter(f"{SVG}g"):
        if "data-key" in g.attrib:
            rect = g.findall(f"{SVG}rect")[-1].attrib
            x, y, w, h = (float(rect[a]) for a in ("x", "y", "width", "height"))
            assert g.attrib["data-key"] not in found, "two boxes have one key"
            found[g.attrib["data-key"]] = (x, y, x + w, y + h)
    return found


def ends_of(path: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where a path of M, H, V and q commands starts and ends."""
    first = x, y = (0.0, 0.0)
    for command, rest in re.findall(r"([MHVq])([^MHVq]*)", path):
        numbers = [float(n) for n in rest.split()]
        if command == "M":
            first = x, y = numbers[0], numbers[1]
        elif command == "q":
            x, y = x + numbers[2], y + numbers[3]
        else:
            x, y = (numbers[0], y) if command == "H" else (x, numbers[0])
    return first, (x, y)


def text_of(element: ET.Element) -> str:
    return " ".join(t.strip() for t in element.itertext() if t.strip())


# --- the picture ---


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_operator_of_the_shown_slices_appears_exactly_once(name, layers):
    model = drawn(name)
    view = ModelView(model)
    root = ET.fromstring(to_svg(model, layers=layers))
    shown = shown_slices(model.n + 1, view.programs, layers)
    expected = {f"op:{i}:{g}" for i in shown for part in (Q, KV) for g in view.part(i, part)}
    if 0 in shown:
        expected |= {f"op:0:{g}" for g, group in enumerate(view.groups) if group.kind == "aux"}
    ends = {run[-1] for run in folded(model.n + 1, shown)} - {model.n}
    expected |= {f"attention:{i}" for i in ends}
    got = [g.attrib["data-op"] for g in root.iter(f"{SVG}g") if "data-op" in g.attrib]
    assert len(got) == len(set(got)), "an operator is drawn twice"
    assert set(got) == expected


@pytest.mark.parametrize("name", MODELS)
def test_cuts_carry_the_weights_of_the_report(name):
    model = drawn(name)
    report = model.report()
    root = ET.fromstring(to_svg(model, layers=slice(None)))
    cuts = {int(g.attrib["data-cut"]): g for g in root.iter(f"{SVG}g") if "data-cut" in g.attrib}
    assert sorted(cuts) == list(range(report.n_attention))
    keyed = {g.attrib["data-key"]: g for g in root.iter(f"{SVG}g") if "data-key" in g.attrib}
    for i, cut in enumerate(report.cuts):
        assert int(cuts[i].attrib["data-bytes"]) == cut.context_bytes
        assert f"context kept at cut {i}: {cut.context_bytes:,} bytes" in text_of(cuts[i])
        assert f"min cut {i}: {human_bytes(cut.context_bytes)}" in text_of(cuts[i])
        ports = [g for key, g in keyed.items() if key.startswith((f"port:{i}:", f"cut:{i}:none"))]
        assert sorted(int(g.attrib["data-bytes"]) for g in ports) == (
            sorted(v.size_bytes for v in cut.context) or [0]
        )
        assert int(keyed[f"q:{i}"].attrib["data-bytes"]) == cut.q_bytes
        assert int(keyed[f"kv:{i}"].attrib["data-bytes"]) == cut.kv_bytes
        assert int(keyed[f"recv:{i + 1}"].attrib["data-bytes"]) == cut.out_bytes


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_boxes_do_not_overlap_and_labels_are_inside_the_picture(name, layers):
    root = ET.fromstring(to_svg(drawn(name), layers=layers))
    boxes = boxes_of(root)
    for (a, (l1, t1, r1, b1)), (b, (l2, t2, r2, b2)) in combinations(boxes.items(), 2):
        assert r1 <= l2 or r2 <= l1 or b1 <= t2 or b2 <= t1, f"{a} and {b} overlap"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for left, top, right, bottom in boxes.values():
        assert 0 <= left and right <= width and 0 <= top and bottom <= height


@pytest.mark.parametrize("name", MODELS)
def test_q_is_sent_before_anything_of_the_k_v_part(name):
    model = drawn(name)
    view = ModelView(model)
    boxes = boxes_of(ET.fromstring(to_svg(model, layers=slice(None))))
    for i in range(model.n):
        q_top, q_bottom = boxes[f"q:{i}"][1], boxes[f"q:{i}"][3]
        assert all(boxes[f"op:{i}:{g}"][3] < q_top for g in view.part(i, Q))
        assert all(boxes[f"op:{i}:{g}"][1] > q_bottom for g in view.part(i, KV))
        assert boxes[f"kv:{i}"][1] > max([q_bottom, *(boxes[f"op:{i}:{g}"][3] for g in view.part(i, KV))])
        assert boxes[f"recv:{i + 1}"][1] > boxes[f"kv:{i}"][3]
        left, top, _, bottom = boxes[f"attention:{i}"]
        assert left > boxes[f"q:{i}"][2], "attention stands in the other pool"
        assert top < q_top and bottom > boxes[f"recv:{i + 1}"][3]


@pytest.mark.parametrize("name", MODELS)
def test_lines_say_what_each_operator_reads(name):
    """The lines of a box come from the boxes that make the values it reads."""
    model = drawn(name)
    view = ModelView(model)
    above: dict[str, set[str]] = {}
    for path in ET.fromstring(to_svg(model, layers=slice(None))).iter(f"{SVG}path"):
        if path.get("class") == "edge":
            above.setdefault(path.attrib["data-to"], set()).add(path.attrib["data-from"])
    home = {v: f"in:{v}" for v in view.context(0)}
    for i in range(model.n + 1):
        groups = [g for part in (Q, KV) for g in view.part(i, part)]
        for g in groups:
            inside = {f"op:{i}:{h}" for h in groups if h != g and view.writes(h) & set(view.reads(g))}
            got = above.get(f"op:{i}:{g}", set())
            assert {k for k in got if k.startswith(f"op:{i}:")} == inside
            made = {v for h in groups for v in view.writes(h)}
            kept = {home[v] for v in {*view.reads(g)} & {*view.context(i)} - made}
            assert {k for k in got if not k.startswith((f"op:{i}:", "recv:"))} == kept
        home |= {v: f"op:{i}:{g}" for g in groups for v in view.writes(g)}


@pytest.mark.parametrize("name", MODELS)
def test_every_line_is_drawn_from_box_to_box(name):
    """A line starts at one of its boxes, passes the cuts that it names, and ends at the other box."""
    root = ET.fromstring(to_svg(drawn(name)))
    boxes = boxes_of(root)
    for path in (p for p in root.iter(f"{SVG}path") if p.get("class") == "edge"):
        (x0, y0), (x1, y1) = ends_of(path.attrib["d"])
        for (x, y), key in (((x0, y0), path.attrib["data-from"]), ((x1, y1), path.attrib["data-to"])):
            left, top, right, bottom = boxes[key]
            assert left - 0.1 <= x <= right + 0.1 and top - 0.1 <= y <= bottom + 0.1, (name, key)
        assert y0 < y1, "lines lead downwards"
        assert set(path.attrib["data-via"].split()) <= boxes.keys()


@pytest.mark.parametrize("name", MODELS)
def test_lanes_are_shared_only_by_one_value_after_the_other(name):
    links = make_scene(ModelView(drawn(name)), slice(None)).links
    rows = [
        (link, slot, max([*link.readers, *link.ports]))
        for link, slot in zip(links, slots_of(links), strict=True)
    ]
    for (a, i, last_a), (b, j, last_b) in combinations(rows, 2):
        assert i != j or last_a <= b.start or last_b <= a.start


def test_equal_slices_are_folded():
    model = split(ex.llama, ex.llama_params(30, abstract=True), IDS, IDS)
    root = ET.fromstring(to_svg(model))
    bands = [g.attrib["data-slices"] for g in root.iter(f"{SVG}g") if "data-slices" in g.attrib]
    assert bands == ["0-0", "1-1", "2-29", "30-30"]
    text = text_of(root)
    assert "× 28 equal slices" in text and "slices 2 … 29, as slice 1" in text
    assert "× 27 attention" in text and "operators 2 … 28" in text
    assert [g.attrib["data-cut"] for g in root.iter(f"{SVG}g") if "data-cut" in g.attrib] == ["0", "1", "29"]


def test_which_slices_are_shown():
    equal = [0, *[1] * 28, 2]
    assert shown_slices(30, equal, None) == {0, 1, 29}
    assert shown_slices(30, equal, slice(3, 5)) == {3, 4, 29}
    assert len(shown_slices(30, list(range(30)), None)) == 7, "no more than six and the last"
    assert folded(6, {0, 3, 5}) == [(0,), (1, 2), (3,), (4,), (5,)]
    assert folded(4, {3}) == [(0, 1, 2), (3,)]


def test_a_run_of_unequal_slices_says_so():
    text = text_of(ET.fromstring(to_svg(drawn("shared-kv"), layers=slice(0, 0))))
    assert "4 slices" in text and "slices 0 … 3, 3 programs" in text and "cuts of 264 B to 520 B" in text


def test_names_from_the_model_are_escaped():
    nasty = "w<&>\"'"

    def fn(params, x):
        with jax.named_scope("a<b>&c"):
            y = jnp.sort(x) * params[nasty]
        return {"o<u>&t": attention(y, y, y, name="<at&tention>")}

    model = split(fn, {nasty: jnp.ones(8)}, jnp.ones((2, 1, 4, 8)))
    text = text_of(ET.fromstring(to_svg(model)))
    for name in (nasty, "o<u>&t", "<at&tention>", "a<b>&c"):
        assert name in text
    page = to_html(model)
    assert not any(raw in page for raw in ("<at&tention>", "<b>&c", "w<&>", "<u>&t"))


def test_the_drawing_follows_light_and_dark_with_enough_contrast():
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        bright, dim = sorted((luminance(a), luminance(b)), reverse=True)
        return (bright + 0.05) / (dim + 0.05)

    assert "prefers-color-scheme: dark" in to_svg(drawn("bare"))
    grounds = ["ground", "pool", "paper", "mem-fill", "p0", "p1", "p2", "p3"]
    for theme in (0, 1):
        for ground in grounds:
            for ink in ("ink", "soft"):
                assert contrast(COLOURS[ink][theme], COLOURS[ground][theme]) >= 4.5, (ink, ground, theme)
            assert contrast(COLOURS["line"][theme], COLOURS[ground][theme]) >= 3, (ground, theme)
        assert contrast(COLOURS["cut"][theme], COLOURS["pool"][theme]) >= 4.5


# --- the page ---


class _Page(HTMLParser):
    VOID = frozenset({"meta", "br", "link", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["llama", "flax", "bare"])
def test_the_page_needs_nothing_from_outside(name):
    text = to_html(drawn(name))
    assert re.findall(r"https?://[^\s\"'<>]*", text) == ["http://www.w3.org/2000/svg"]
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {"#head", "#xhead"}
    assert "@import" not in text
    page = _Page()
    page.feed(text)
    assert not page.open, "every element is closed"
    tags = {tag for tag, _ in page.found}
    assert {"svg", "details", "table", "script", "style"} <= tags and not tags & {"link", "img", "iframe"}
    assert not any({"src", "href"} & attrs.keys() for _, attrs in page.found)
    assert not any(k.startswith("on") for _, attrs in page.found for k in attrs)


@pytest.mark.parametrize("name", ["llama", "flax"])
def test_the_page_lists_every_cut_with_its_bytes(name):
    model = drawn(name)
    page = _Page()
    page.feed(to_html(model))
    listed = [a for tag, a in page.found if tag == "details" and "data-list-cut" in a]
    assert [(int(a["data-list-cut"]), int(a["data-bytes"])) for a in listed] == [
        (i, cut.context_bytes) for i, cut in enumerate(model.report().cuts)
    ]
    for cut in model.report().cuts:
        assert all(f"<td>{v.name}</td>" in to_html(model) for v in cut.context)


def test_the_example_picture_is_a_drawing():
    root = ET.parse(ROOT / "docs" / "images" / "split-llama.svg").getroot()
    assert root.tag == f"{SVG}svg" and "Attention" in text_of(root) and "equal slices" in text_of(root)


# --- numbers, and what the drawings know ---


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (4608, "4.5 KiB"), (4616, "4.51 KiB"), (393216, "384 KiB"),
        (10240, "10 KiB"), (1048575, "1 MiB"), (3 << 30, "3 GiB"), (2**50 * 2000, "2000 PiB"),
    ],
)  # fmt: skip
def test_bytes_for_people(n, text):
    assert human_bytes(n) == text


def test_letters_of_programs():
    assert [letter(i) for i in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


@pytest.mark.parametrize("name", ["groups", "names", "text"])
def test_policy_of_the_drawings_is_pure_python(name):
    imported = set()
    for node in ast.walk(ast.parse((ROOT / "splitter" / "draw" / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    own = {f"splitter.draw.{n}" for n in ("groups", "names", "text")}
    rooms = ("jax", "numpy", "pallas_kernels", "splitter")
    assert not {m for m in imported if m.split(".")[0] in rooms} - own
