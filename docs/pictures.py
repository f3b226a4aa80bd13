"""Draws docs/images/rooms.svg and docs/images/step.svg from the code: `python docs/pictures.py`.

The rooms are the packages of `jaxlamina/`, by the floors that tests/test_rooms.py holds. The tasks of the step are those of
a real plan (`jaxlamina.steps.plans.plan_of`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_rooms import FLOORS, imports, room_of, sources

from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import Append, Attend, Logits, Receive, RunSlice, Send, Task

INK, FAINT, PAPER = "#222", "#b8b8b8", "#fff"
MODEL, MEMORY, HOST = "#dbe9f6", "#fde3cf", "#eeeeee"
FONT = 'font-family="Helvetica, Arial, sans-serif"'


class Picture:
    """Elements of an SVG."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            (
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
                f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
            ),
        ]

    def text(self, x: float, y: float, words: str, size: int = 13, **how: str) -> None:
        given = {"fill": INK, "text-anchor": "middle"} | {k.replace("_", "-"): v for k, v in how.items()}
        more = " ".join(f'{name}="{value}"' for name, value in given.items())
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" {FONT} font-size="{size}" {more}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, fill: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="5" fill="{fill}" stroke="{INK}"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, color: str = INK, tip: bool = True) -> None:
        end = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(
            f'<path d="M{x:.1f},{y:.1f} L{to_x:.1f},{to_y:.1f}" stroke="{color}" fill="none"{end}/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def purpose(room: str) -> str:
    """The first sentence of a room's own description."""
    path = ROOT / "jaxlamina" / room
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    said = ast.get_docstring(ast.parse(source)) or ""
    first = " ".join(said.split("\n\n")[0].split()).replace("`", "")
    return first.partition(". ")[0].rstrip(".")


def arrows() -> set[tuple[str, str]]:
    """Which room imports which, at run time."""
    found = set()
    for path in sources("jaxlamina"):
        own = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name in imports(path, types=False):
            if name.startswith("jaxlamina."):
                found.add((own, "cli" if name.startswith("jaxlamina.cli") else room_of(name)))
    return {(a, b) for a, b in found if a != b}


def rooms() -> str:
    """Floors from the top; beside each room what it is, and the rooms that it imports."""
    named = [[name for name in floor.split() if (ROOT / "jaxlamina" / name).is_dir()] for floor in FLOORS]
    order = [name for floor in reversed(named) for name in floor]
    known = arrows()
    width, row, left = 1240, 34, 150
    picture = Picture(width, 60 + row * len(order))
    picture.text(
        20, 26, "Rooms of jaxlamina/: each imports only from rooms below it", 16, text_anchor="start"
    )
    picture.text(width - 20, 26, "imports", 12, text_anchor="end", fill="#666")
    colors = {
        "steps": MODEL,
        "kv": MEMORY,
        "workers": MODEL,
        "ranks": MODEL,
        "run": MODEL,
        "engine": "#e4f2dc",
    }
    for i, name in enumerate(order):
        y = 44 + i * row
        picture.box(20, y, left - 40, row - 8, colors.get(name, HOST))
        picture.text(20 + (left - 40) / 2, y + 17, name, 13)
        said = purpose(name)
        picture.text(
            left,
            y + 17,
            said if len(said) < 72 else said[:69].rsplit(" ", 1)[0] + " …",
            12,
            text_anchor="start",
        )
        used = [other for other in order if (name, other) in known]
        if used:
            picture.text(width - 20, y + 17, ", ".join(used), 10, text_anchor="end", fill="#666")
    return picture.svg()


def words_of(task: Task) -> tuple[str, str | None]:
    """What is shown of a task, and the message that it sends or takes."""
    if isinstance(task, RunSlice):
        piece = {"whole": "", "q": ": q", "kv": ": k, v"}[task.piece]
        return f"slice {task.index}{piece}", None
    if isinstance(task, Send | Receive):
        payload = task.payload
        names = {"q": "q", "kv": "k, v", "qkv": "q, k, v", "out": "output", "logits": "logits"}
        return ("send " if isinstance(task, Send) else "take ") + names[
            payload.what
        ], f"{payload.what} {payload.layer}"
    if isinstance(task, Attend):
        return f"attend {task.layer}", None
    if isinstance(task, Append):
        return f"store {task.layer}", None
    assert isinstance(task, Logits), task
    return "last slice", None


def step() -> str:
    """From a request to its text, and below it what two ranks do in a step of a model with two attention operators."""
    chain: Sequence[tuple[str, str, str]] = (
        ("text/", "prompt", ""),
        ("engine/admission", "tokens", ""),
        ("engine/scheduler", "request", ""),
        ("steps/plans", "Step", ""),
        ("run/", "tasks", ""),
        ("sampling/", "logits", ""),
        ("engine/postprocess", "token", ""),
        ("server/", "text", ""),
    )
    layout = Layout(workers=(1,), partition="heads")
    plan = plan_of(layout, StepShape("decode", 1, 1, 64), 2)
    lanes = [("model rank 0", MODEL, plan.model[0]), ("attention rank 1", MEMORY, plan.pool)]
    height = 30
    places = _in_time([tasks for _, _, tasks in lanes])
    picture = Picture(1180, 200 + height * (1 + max(max(lane) for lane in places)))
    picture.text(20, 26, "A step's life", 16, text_anchor="start")
    w, gap = 118, 26
    for i, (room, comes, _) in enumerate(chain):
        x = 20 + i * (w + gap)
        picture.box(x, 60, w, 34, HOST)
        picture.text(x + w / 2, 82, room, 11)
        if i:
            picture.line(x - gap, 77, x, 77)
        picture.text(x - gap / 2 if i else x + w / 2, 52, comes, 11, fill="#444")
    picture.text(
        20,
        140,
        "Its tasks, q first, as plan_of gives them for one model rank and one attention rank",
        14,
        text_anchor="start",
    )
    ends: dict[str, tuple[float, float, bool]] = {}
    for lane, (name, fill, tasks) in enumerate(lanes):
        x = 200 + lane * 460
        picture.text(x + 110, 172, name, 13, font_weight="bold")
        for task, at in zip(tasks, places[lane], strict=True):
            y = 184 + at * height
            said, message = words_of(task)
            picture.box(x, y, 220, height - 8, fill)
            picture.text(x + 110, y + 15, said, 12)
            if message is None:
                continue
            here = (x + (220 if lane == 0 else 0), y + 11, isinstance(task, Send))
            if message in ends:
                a, b = (ends[message], here) if ends[message][2] else (here, ends[message])
                picture.line(a[0], a[1], b[0], b[1])
            ends[message] = here
    return picture.svg()


def _in_time(lanes: Sequence[Sequence[Task]]) -> list[list[int]]:
    """A row for each task, so that a message is taken after it is sent."""
    sent: dict[str, int] = {}
    places: list[list[int]] = [[] for _ in lanes]
    left = [list(tasks) for tasks in lanes]
    while any(left):
        for lane, tasks in enumerate(left):
            while tasks:
                _, message = words_of(tasks[0])
                at = places[lane][-1] + 1 if places[lane] else 0
                if isinstance(tasks[0], Receive):
                    if message not in sent:
                        break
                    at = max(at, sent[str(message)] + 1)
                if isinstance(tasks[0], Send):
                    sent[str(message)] = at
                places[lane].append(at)
                tasks.pop(0)
    return places


PICTURES = {"rooms.svg": rooms, "step.svg": step}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / "docs" / "images" / name).write_text(draw())
