"""Draws the pictures of architecture.md: `make pictures`, or `python docs/pictures.py`.

``rooms`` has the rooms by floors. Floors and imports are those that `tests/test_rooms.py` reads. An arrow
that follows from others is left out. ``step`` has the life of a step, with the tasks that `plan_of` gives
two ranks. ``local-attention`` has the scale from Lamina to the unsplit model, with step times as they were
measured (docs/measurements). All are SVG as text.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_rooms import FLOORS, ROOMS, imports, room_of, sources

from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import Append, Attend, Logits, Payload, Receive, RunSlice, Send, Task

INK, SOFT, LINE = "#1b1f24", "#4f5863", "#68727e"
BLUE, GREEN, AMBER, VIOLET, GREY = "#e4eefb", "#e5f4e8", "#fbf1dc", "#f4edfb", "#f0f1f3"
MARGIN = 20


# --- SVG ---
def text(x: float, y: float, words: str, *, size: int = 11, anchor: str = "middle", style: str = "") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" {style}>{escape(words)}</text>'
    )


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="4" fill="{fill}" stroke="{LINE}"/>'


def box(x: float, y: float, width: float, height: float, fill: str, name: str, *lines: str) -> Iterator[str]:
    """A name and lines under it, in the middle of a rectangle."""
    yield rectangle(x, y, width, height, fill)
    top = y + height / 2 - 7 * len(lines) + 4
    size = 13 if len(name) < width / 9 else 11
    yield text(x + width / 2, top, name, size=size, style='font-weight="700"')
    for n, line in enumerate(lines, 1):
        yield text(x + width / 2, top + 14 * n, line, size=10, style=f'fill="{SOFT}"')


def left(x: float, y: float, words: str, *, size: int = 12) -> str:
    """Soft words that begin at x."""
    return text(x, y, words, size=size, anchor="start", style=f'fill="{SOFT}"')


def heading(words: str, under: str) -> Iterator[str]:
    yield text(MARGIN, 26, words, size=18, anchor="start", style='font-weight="700"')
    yield left(MARGIN, 46, under)


def arrow(*points: tuple[float, float]) -> str:
    way = " ".join(f"{x:g},{y:g}" for x, y in points)
    style = f'fill="none" stroke="{LINE}" stroke-width="1.4" marker-end="url(#head)"'
    return f'<polyline points="{way}" {style}/>'


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    font = 'font-family="Helvetica, Arial, DejaVu Sans, sans-serif"'
    marker = 'id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
    lines = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<defs><marker {marker}><path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        *parts,
        "</svg>",
    )
    return "\n".join(lines) + "\n"


# --- the rooms ---
GROUND = " ".join(FLOORS[:3]).split()  # every room imports these
SHARED = [name for name in GROUND if name != "__init__"]
COLUMN = {
    "text": 0, "planner": 0, "weights": 1, "model_files": 1, "models": 1, "flax_model": 1, "steps": 3,
    "kv": 3, "launch": 3, "supervisor": 1, "sampling": 4, "simulator": 0,
}  # fmt: skip
SPINE = 2  # the column of all others
HINT = {
    "pallas_kernels": "attention kernels",
    "splitter": "cuts a model at attention",
    "steps": "steps, plans, tasks",
    "models": "what a model computes",
    "text": "tokenizer, detokenizer",
    "model_files": "finds a model's files",
    "kv": "who owns which KV slot",
    "planner": "costs, search, formulas",
    "weights": "reads checkpoints",
    "workers": "weights and KV on devices",
    "transports": "tensors between ranks",
    "sampling": "from logits to tokens",
    "job": "processes of one job",
    "profiling": "timelines of ranks",
    "ranks": "each rank's programs",
    "run": "executors of steps",
    "engine": "admission and scheduling",
    "flax_model": "a model of the user's own",
    "llm": "the Python interface",
    "server": "OpenAI's API",
    "simulator": "a trace on modelled pools",
    "supervisor": "what outlives a job",
    "cli": "the commands",
    "bench": "measurements",
    "launch": "starts ranks",
    "main": "the command line's start",
}
SHOWN = {
    "main": "cli/main.py",
    "llm": "llm.py",
    "launch": "launch/",
    "splitter": "splitter/",
    "pallas_kernels": "pallas_kernels/",
}
FILL = {
    BLUE: "main bench launch cli llm supervisor server simulator",
    GREEN: "engine sampling text",
    AMBER: "run ranks profiling job transports workers",
    VIOLET: "flax_model weights model_files models kv planner steps",
    GREY: "splitter pallas_kernels",
}
MEANING = {
    BLUE: "ways in",
    GREEN: "requests",
    AMBER: "running steps",
    VIOLET: "models, KV slots, plans",
    GREY: "below jaxlamina: for any JAX function",
}
BOX, TALL, GAP, DROP = 176, 38, 20, 20


def fill_of(room: str) -> str:
    return next(colour for colour, names in FILL.items() if room in names.split())


def room_imports() -> dict[str, set[str]]:
    """Room -> the rooms that it imports at run time; all ground files are one room."""
    found: dict[str, set[str]] = {}
    for package in ROOMS:
        for path in sources(package):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            own = _shown_as(module)
            others = {_shown_as(name) for name in imports(path, types=False) if name.split(".")[0] in ROOMS}
            found.setdefault(own, set()).update(others - {own})
    return found


def _shown_as(module: str) -> str:
    package = module.split(".")[0]
    if package != "jaxlamina":
        return package
    room = room_of(module)
    return "ground" if room in GROUND else "main" if room == "__main__" else room


def needed(graph: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """The arrows that do not follow from others; none to the ground, which all may import."""

    def below(room: str) -> set[str]:
        return {deeper for other in graph.get(room, ()) for deeper in {other} | below(other)}

    for room in sorted(graph.keys() - {"ground"}):
        direct = graph[room] - {"ground"}
        yield from ((room, other) for other in sorted(direct) if not any(other in below(x) for x in direct))


def rows_of_rooms(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The floors, the ground first; neighbours that do not import each other share a row."""
    floors = [["pallas_kernels"], ["splitter"], *([*floor.split()] for floor in FLOORS[3:])]
    rows: list[list[str]] = []
    for floor in floors:
        rooms = [*(room for room in floor if room != "__main__"), *(["launch"] if "bench" in floor else [])]
        if rows and not any(other in rows[-1] for room in rooms for other in graph[room]):
            rows[-1] += rooms
        else:
            rows.append(rooms)
    return rows


def rooms() -> str:
    graph = room_imports()
    rows = rows_of_rooms(graph)
    place = {room: (COLUMN.get(room, SPINE), n) for n, row in enumerate(rows) for room in row}
    assert place.keys() == HINT.keys(), "each room wants a hint, a colour and a column"
    top = 64
    height = top + len(rows) * (TALL + DROP)

    def corner(column: int, row: int) -> tuple[float, float]:
        return MARGIN + column * (BOX + GAP), top + (len(rows) - 1 - row) * (TALL + DROP)

    def clear(column: int, low: int, high: int) -> bool:
        return not any(c == column and low < r < high for c, r in place.values())

    def way(room: str, other: str) -> str:
        (c, r), (to, below) = place[room], place[other]
        (x, y), (tx, ty) = corner(c, r), corner(to, below)
        middle, side = x + BOX / 2, x if to < c else x + BOX
        if c == to and clear(c, below, r):
            return arrow((middle, y + TALL), (middle, ty))
        if r == below + 1 and (c, below) not in place.values():
            return arrow(
                (middle, y + TALL), (middle, ty + TALL / 2), (tx if to > c else tx + BOX, ty + TALL / 2)
            )
        if clear(to, below, r + 1):
            return arrow((side, y + TALL / 2), (tx + BOX / 2, y + TALL / 2), (tx + BOX / 2, ty))
        near = tx if to > c else tx + BOX
        lane = near + (-GAP / 2 if to > c else GAP / 2)
        if any(between in place.values() for between in ((k, r) for k in range(c + 1, to))):
            under = y + TALL + DROP / 2  # a box is in its row's way
            return arrow(
                (middle, y + TALL),
                (middle, under),
                (lane, under),
                (lane, ty + TALL / 2),
                (near, ty + TALL / 2),
            )
        return arrow((side, y + TALL / 2), (lane, y + TALL / 2), (lane, ty + TALL / 2), (near, ty + TALL / 2))

    def parts() -> Iterator[str]:
        under = (
            "An arrow means: imports. Imports only go down. An arrow that follows from others is left out."
        )
        yield from heading("The rooms, by floors", under)
        for n, (colour, means) in enumerate(MEANING.items()):
            yield rectangle(MARGIN, 64 + 22 * n, 16, 14, colour)
            yield text(MARGIN + 24, 75 + 22 * n, means, anchor="start")
        yield from (way(room, other) for room, other in needed(graph))
        for room, at in place.items():
            yield from box(*corner(*at), BOX, TALL, fill_of(room), SHOWN.get(room, room), HINT[room])
        (x, y), width = corner(3, 0), 2 * BOX + GAP
        if "pallas_kernels" in graph["ground"]:
            yield arrow((x, y + TALL / 2), (corner(SPINE, 0)[0] + BOX, y + TALL / 2))
        yield from box(x, y, width, TALL, "#ffffff", ", ".join(SHARED), "every room above may import these")

    return picture(2 * MARGIN + 5 * BOX + 4 * GAP, height, "The rooms of JaxLamina, by floors", parts())


# --- a step's life ---
BEFORE = (
    ("request", "server/service.py", "what a client asks"),
    ("text", "text/tokenizer.py", "tokens of the prompt"),
    ("admission", "engine/admission.py", "is it possible?"),
    ("scheduler", "engine/scheduler.py", "who runs, which slots"),
    ("Step", "steps/step.py", "rows and prompts"),
    ("plan", "steps/plans.py", "tasks for each rank"),
)
AFTER = (
    ("logits", "run/executor.py", "one row per request"),
    ("sampling", "sampling/sampler.py", "one token per row"),
    ("text", "text/generated.py", "text, stop strings"),
    ("stream", "server/service.py", "events to the client"),
)
N_LAYERS = 2
WIDE, HIGH, LINE_HIGH = 140, 58, 30


def tasks_of_two_ranks() -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """(the model rank's tasks, the attention rank's) of a decode step."""
    shape = StepShape("decode", batch=4, tokens=1, context=64)
    plan = plan_of(Layout(workers=(1,), partition="heads"), shape, N_LAYERS)
    return plan.model[0], plan.pool


def in_time(
    model: tuple[Task, ...], pool: tuple[Task, ...]
) -> Iterator[tuple[int, Task | None, Task | None]]:
    """(line, the model rank's task, the attention rank's): a message's two ends share a line."""
    lines, todo = [0, 0], [list(model), list(pool)]
    while any(todo):
        for side in (0, 1):
            while todo[side] and not isinstance(todo[side][0], Send | Receive):
                task = todo[side].pop(0)
                yield (lines[side], None, task) if side else (lines[side], task, None)
                lines[side] += 1
        if all(todo):
            ends = todo[0].pop(0), todo[1].pop(0)
            assert payload_of(ends[0]) == payload_of(ends[1]), "a message whose ends do not meet"
            yield (max(lines), *ends)
            lines = [max(lines) + 1] * 2


def payload_of(task: Task) -> Payload:
    assert isinstance(task, Send | Receive)
    return task.payload


def said(task: Task) -> str:
    if isinstance(task, RunSlice):
        piece = {"whole": "whole", "q": "as far as q", "kv": "on to k and v"}[task.piece]
        return f"RunSlice {task.index}: {piece}"
    if isinstance(task, Attend | Append):
        return (
            f"Attend, layer {task.layer}" if isinstance(task, Attend) else f"Append k, v, layer {task.layer}"
        )
    assert isinstance(task, Logits)
    return "Logits: the last slice"


def step() -> str:
    every = list(in_time(*tasks_of_two_ranks()))
    n_lines = 1 + max(line for line, *_ in every)
    run_top = 172
    first = run_top + 84
    run_end = first + n_lines * LINE_HIGH + 12
    after_top = run_end + 34
    height, width = after_top + HIGH + 44, 2 * MARGIN + 6 * WIDE + 5 * GAP
    lanes, task_wide = (width * 0.3, width * 0.7), 200

    def stages(of: tuple[tuple[str, str, str], ...], y: float, x: float) -> Iterator[str]:
        for n, (name, path, does) in enumerate(of):
            assert (ROOT / "jaxlamina" / path).exists(), path
            begin = x + n * (WIDE + GAP)
            yield from box(begin, y, WIDE, HIGH, fill_of(path.split("/")[0]), name, does, path)
            if n:
                yield arrow((begin - GAP, y + HIGH / 2), (begin, y + HIGH / 2))

    def message(y: float, mine: Task, theirs: Task) -> Iterator[str]:
        payload, sends = payload_of(mine), isinstance(mine, Send)
        begin, end = lanes if sends else lanes[::-1]
        yield arrow((begin, y), (end, y))
        words = {"kv": "k, v", "out": "attention output"}.get(payload.what, payload.what)
        yield text(width / 2, y - 5, f"{words} of layer {payload.layer}")
        for lane, task in zip(lanes, (mine, theirs), strict=True):
            outside = lane - 8 if lane == lanes[0] else lane + 8
            anchor = "end" if lane == lanes[0] else "start"
            name = f"{type(task).__name__} {payload.what}"
            yield text(outside, y + 4, name, size=10, anchor=anchor, style=f'fill="{SOFT}"')

    def parts() -> Iterator[str]:
        about = (
            f"One decode step of a model with {N_LAYERS} attention layers, over two ranks. Time goes down."
        )
        yield from heading("A step's life", about)
        yield from stages(BEFORE, 66, MARGIN)
        plan_x = width - MARGIN - WIDE / 2
        yield arrow((plan_x, 66 + HIGH), (plan_x, run_top))
        yield rectangle(MARGIN, run_top, width - 2 * MARGIN, run_end - run_top, "#fffdf7")
        y = run_top + 20
        yield text(MARGIN + 12, y, "executor.run(step)", size=13, anchor="start", style='font-weight="700"')
        how = "run/executor.py: each rank runs its list of tasks as one program. "
        yield left(MARGIN + 180, y, how + "Attend starts on stored tokens when q is there.", size=10)
        heads = ("rank 0: model worker, has the weights", "rank 1: attention worker, has the KV slots")
        for lane, words in zip(lanes, heads, strict=True):
            yield text(lane, run_top + 50, words, size=12, style='font-weight="700"')
            ends = f'x1="{lane:g}" y1="{run_top + 60}" x2="{lane:g}" y2="{run_end - 8}"'
            yield f'<line {ends} stroke="{LINE}" stroke-dasharray="3 3"/>'
        for line, mine, theirs in every:
            y = first + line * LINE_HIGH
            if mine and theirs:
                yield from message(y, mine, theirs)
                continue
            task, lane, fill = (mine, lanes[0], AMBER) if mine else (theirs, lanes[1], VIOLET)
            assert task is not None
            yield rectangle(lane - task_wide / 2, y - 11, task_wide, 22, fill)
            yield text(lane, y + 4, said(task), size=12)
        yield arrow((lanes[0], run_end - 8), (lanes[0], after_top))
        yield from stages(AFTER, after_top, lanes[0] - WIDE / 2)
        last = "The scheduler puts the new tokens into its next step. A request leaves when its text ends."
        yield left(MARGIN, height - 14, last)

    return picture(width, height, "The life of a step", parts())


# --- where attention is computed ---
CURVES = {
    ("B 64, 4096 tokens", 1): ("64 × 4,096, one batch", "#2563c9", ""),
    ("B 64, 4096 tokens", 2): ("64 × 4,096, two staggered", "#2563c9", "5 4"),
    ("B 160, 4096 tokens", 1): ("160 × 4,096, one batch", "#b4530a", ""),
    ("B 160, 4096 tokens", 2): ("160 × 4,096, two staggered", "#b4530a", "5 4"),
    ("B 64, 16384 tokens", 1): ("64 × 16,384, one batch (8 of the model's layers)", "#3d7a46", ""),
}


def measured() -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Of each curve by heads, (share, step time relative to one unsplit GPU), by share."""
    data = json.loads((ROOT / "docs" / "measurements" / "local-attention.json").read_text())
    rows = [(r, statistics.median(r["ahead_ms"])) for r in data["results"] if r["run"] == "heads"]
    unsplit = {r["case"]: ms for r, ms in rows if r["way"] == "unsplit"}
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for r, ms in rows:
        # With all of it on the model worker nothing is staggered.
        if r["way"] != "unsplit" and not (r["share"] == 1 and r["n_batches"] > 1):
            found.setdefault((r["case"], r["n_batches"]), []).append((r["share"], ms / unsplit[r["case"]]))
    of_few = {(r["case"], r["way"]): r["median_ms"] for r in data["layers_8_two_rounds"]}
    case = "B 64, 16384 tokens"
    of_case = [(x, of_few[case, f"split, {x:g} local"] / of_few[case, "unsplit"]) for x in (0.5, 1.0)]
    return {key: sorted(points) for key, points in (found | {(case, 1): of_case}).items()}


def local_attention() -> str:
    """Three points of the scale, and under them the curves."""
    width, height, top, wide = 760, 620, 70, 220
    chart_x, chart_y, chart_w, chart_h = 70.0, 250.0, 640.0, 270.0
    points = ((0.0, "x = 0: Lamina"), (0.5, "x between: both attend"), (1.0, "x = 1: unsplit"))
    low, high = 0.5, 1.3

    def at(x: float, ratio: float) -> tuple[float, float]:
        return chart_x + x * chart_w, chart_y + (high - ratio) / (high - low) * chart_h

    def parts() -> Iterator[str]:
        yield from heading(
            "Where attention is computed is a scale",
            "A share x of the KV stays on the model workers, which attend to it while attention workers "
            "attend to the rest.",
        )
        for n, (x, name) in enumerate(points):
            left_x = MARGIN + n * (wide + 30)
            yield text(left_x + wide / 2, top + 8, name, size=13, style='font-weight="700"')
            own = ("all the KV,", "attention") if x == 1 else ("x of the KV,", "attention") if x else ()
            yield from box(left_x, top + 20, wide / 2 - 8, 80, AMBER, "model", "weights, slices", *own)
            of_rest = "1 − x of the KV," if x else "all the KV,"
            rest = ("idle",) if x == 1 else (of_rest, "attention")
            yield from box(left_x + wide / 2 + 8, top + 20, wide / 2 - 8, 80, VIOLET, "attention", *rest)
            sent = "nothing is sent" if x == 1 else "q, k, v; the output comes back"
            yield text(left_x + wide / 2, top + 118, sent, size=10, style=f'fill="{SOFT}"')
        about = "Decode step's time / one H200 that does all; 8B model, bfloat16, 2 × H200, x by heads"
        yield left(chart_x, chart_y - 16, about, size=12)
        for ratio in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3):
            (x0, y), (x1, _) = at(0, ratio), at(1, ratio)
            dark = LINE if ratio == 1.0 else "#dfe3e8"
            yield f'<line x1="{x0:g}" y1="{y:.1f}" x2="{x1:g}" y2="{y:.1f}" stroke="{dark}"/>'
            yield text(x0 - 8, y + 4, f"{ratio:.1f}", size=11, anchor="end")
        for x in (0, 0.25, 0.5, 0.75, 1):
            (own_x, y) = at(x, low)
            yield text(own_x, y + 18, f"{x:g}", size=11)
        yield text(chart_x + chart_w / 2, chart_y + chart_h + 36, "x, the share on the model worker", size=12)
        for n, (key, curve) in enumerate(measured().items()):
            words, colour, dashes = CURVES[key]
            line = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*point) for point in curve))
            style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
            yield f'<polyline points="{line}" {style}/>'
            for px, py in (at(*point) for point in curve):
                yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>'
            x0, y = chart_x + 12 + (n % 2) * 320, chart_y + chart_h + 56 + (n // 2) * 16
            yield (
                f'<line x1="{x0:g}" y1="{y - 4}" x2="{x0 + 30:g}" y2="{y - 4}" stroke="{colour}" '
                f'stroke-width="2" stroke-dasharray="{dashes}"/>'
            )
            yield left(x0 + 38, y, words, size=11)

    return picture(width, height, "Where attention is computed is a scale", parts())


PICTURES = {"rooms": rooms, "step": step, "local-attention": local_attention}


def path_of(name: str) -> Path:
    return ROOT / "docs" / "images" / f"{name}.svg"


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        path_of(name).write_text(draw())
        print(f"{path_of(name).relative_to(ROOT)}: written")
