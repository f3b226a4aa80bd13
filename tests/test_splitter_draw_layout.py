"""Where the boxes of a drawing go, and how its numbers read; that this is plain Python."""

from __future__ import annotations

import ast
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitter.draw.layout import Box, arrange, spread
from splitter.draw.text import human_bytes

DRAW = Path(__file__).resolve().parents[1] / "splitter" / "draw"


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(10, 120), min_size=1, max_size=5), min_size=2, max_size=6),
    links=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=25),
    pin=st.booleans(),
)
def test_layout_keeps_boxes_apart_and_lines_downwards(rows, links, pin):
    boxes = [Box(f"{r}.{i}", float(w), 20.0, r) for r, row in enumerate(rows) for i, w in enumerate(row)]
    if pin:
        boxes.append(Box("pinned", 40.0, 16.0, 1, pinned=True))
    ends = [(boxes[a % len(boxes)], boxes[b % len(boxes)]) for a, b in links]
    edges = list(dict.fromkeys((a.key, b.key) for a, b in ends if a.row < b.row))
    got = arrange(boxes, edges)
    for a, b in combinations(boxes, 2):
        (ax, ay), (bx, by) = got.centre[a.key], got.centre[b.key]
        apart = abs(ax - bx) >= (a.width + b.width) / 2 - 1e-6 or abs(ay - by) >= (a.height + b.height) / 2
        assert apart, (a, b)
    for box in boxes:
        x, _ = got.centre[box.key]
        assert -1e-6 <= x - box.width / 2 and x + box.width / 2 <= got.width + 1e-6
    if pin:
        assert got.centre["pinned"][0] + 20 == pytest.approx(got.width)
    for points in got.routes:
        assert all(a[1] <= b[1] for a, b in pairwise(points))


def test_a_long_line_is_straight():
    boxes = [Box("a", 40, 20, 0), Box("e", 40, 20, 4), *(Box(f"m{r}", 90, 20, r) for r in (1, 2, 3))]
    edges = [("a", "e"), ("a", "m1"), ("m1", "m2"), ("m2", "m3"), ("m3", "e")]
    route = arrange(boxes, edges).routes[0]
    assert len({round(x, 3) for x, _ in route[1:-1]}) == 1


def test_layout_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="must lead down"):
        arrange([Box("a", 1, 1, 0), Box("b", 1, 1, 0)], [("a", "b")])
    with pytest.raises(ValueError, match="not there"):
        arrange([Box("a", 1, 1, 0)], [("a", "z")])
    with pytest.raises(ValueError, match="one key"):
        arrange([Box("a", 1, 1, 0), Box("a", 1, 1, 1)], [])


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8), st.floats(0, 30))
def test_spread_keeps_the_gaps_and_stays_near(wishes, gap):
    got = spread(wishes, [1.0] * len(wishes), [gap] * (len(wishes) - 1))
    assert all(b - a >= gap - 1e-6 for a, b in pairwise(got))
    ordered = sorted(wishes)
    if all(b - a >= gap for a, b in pairwise(ordered)):
        assert spread(ordered, [1.0] * len(ordered), [gap] * (len(ordered) - 1)) == pytest.approx(ordered)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (4608, "4.5 KiB"), (4616, "4.51 KiB"), (393216, "384 KiB"),
        (10240, "10 KiB"), (1048575, "1 MiB"), (3 << 30, "3 GiB"), (2**50 * 2000, "2000 PiB"),
    ],
)  # fmt: skip
def test_bytes_for_people(n, text):
    assert human_bytes(n) == text


@pytest.mark.parametrize("name", ["groups", "names", "layout", "text"])
def test_policy_of_the_drawings_is_pure_python(name):
    imported = set()
    for node in ast.walk(ast.parse((DRAW / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    own = {f"splitter.draw.{n}" for n in ("groups", "names", "layout", "text")}
    assert (
        not {m for m in imported if m.split(".")[0] in ("jax", "numpy", "pallas_kernels", "splitter")} - own
    )
