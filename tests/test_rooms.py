"""The arrows between rooms (docs/architecture.md): who may import whom, held against the code's own
imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("pallas_kernels", "splitter", "jaxlamina", "launch")
MAY_IMPORT = {
    "pallas_kernels": set(),
    "splitter": {"pallas_kernels"},
    "jaxlamina": {"pallas_kernels", "splitter"},
    "launch": {"jaxlamina", "pallas_kernels", "splitter"},
}
COMPAT = ROOT / "pallas_kernels" / "compat.py"


def imports(path: Path, types: bool = True) -> list[str]:
    """``types``: those that only type checkers run, too."""
    names = []
    tree = ast.parse(path.read_text())
    skipped = set() if types else only_for_types(tree)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [f"{node.module}.{a.name}" for a in node.names]
    return names


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room):
    assert sources(room), f"{room} holds no code"
    for path in sources(room):
        for name in imports(path):
            other = name.split(".")[0]
            if other in ROOMS and other != room:
                assert other in MAY_IMPORT[room], f"{path.relative_to(ROOT)} imports {name}"


# Rooms of `jaxlamina/`, the ground first: each imports only from floors below its own, and from itself. The
# modules beside the rooms have floors of their own. `cli/main.py` is the way in, which knows the benches as
# well.
FLOORS = (
    "__init__ errors exit_codes dtypes",
    "options",
    "process console",
    "steps",
    "models text",
    "model_files kv planner",
    "weights",
    "workers",
    "transports flax_model",
    "sampling",
    "job",
    "profiling",
    "ranks",
    "run",
    "engine",
    "server simulator",
    "supervisor",
    "llm",
    "cli",
    "bench",
    "main __main__",
)


def room_of(module: str) -> str:
    """Of a module of `jaxlamina`, by its dotted name."""
    if module == "jaxlamina.cli.main":
        return "main"
    name = (module.split(".") + ["__init__"])[1]
    return name if name in " ".join(FLOORS).split() else "__init__"


def only_for_types(tree: ast.Module) -> set[ast.AST]:
    ifs = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {inner for one in ifs for inner in ast.walk(one)}


def test_no_import_runs_back_up():
    floor = {name: n for n, names in enumerate(FLOORS) for name in names.split()}
    here = ROOT / "jaxlamina"
    assert {p.stem for p in here.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} <= set(floor)
    up = []
    for path in sources("jaxlamina"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in imports(path, types=False):
            own, other = room_of(module), "cli" if name.startswith("jaxlamina.cli") else room_of(name)
            if name.startswith("jaxlamina.") and own != other and floor[other] >= floor[own]:
                up.append(f"{module} imports {name}")
    assert not up, up


def test_jax_internals_are_imported_in_one_file():
    for room in ROOMS:
        for path in sources(room):
            if path != COMPAT:
                inner = [n for n in imports(path) if n.startswith(("jax._src", "jax.extend", "jaxlib"))]
                assert not inner, (
                    f"{path.relative_to(ROOT)} imports {inner}; that belongs in pallas_kernels/compat.py"
                )


POLICY = (
    "splitter/mincut.py",
    "splitter/draw/groups.py",
    "jaxlamina/steps/buckets.py",
    "jaxlamina/job/cluster.py",
    "jaxlamina/engine/chunk_size.py",
    "jaxlamina/engine/own_pace.py",
    "jaxlamina/engine/policies.py",
    "jaxlamina/run/staggering.py",
    "jaxlamina/job/roles.py",
    "jaxlamina/planner/failures.py",
    "jaxlamina/steps/schedules/check.py",
    "jaxlamina/steps/schedules/staggered.py",
    "jaxlamina/steps/layout.py",
    "jaxlamina/steps/plans.py",
    "jaxlamina/steps/shape.py",
    "jaxlamina/steps/step.py",
    "jaxlamina/steps/table.py",
    "jaxlamina/steps/tasks.py",
    "jaxlamina/transports/exchanges.py",
    "jaxlamina/transports/hlo.py",
    "jaxlamina/transports/scopes.py",
    "launch/commands.py",
    "launch/devices.py",
    "launch/roles.py",
)


@pytest.mark.parametrize("path", POLICY)
def test_policy_is_pure_python(path):
    bad = {n.split(".")[0] for n in imports(ROOT / path)} & {"jax", "jaxlib", "numpy", "flax"}
    assert not bad, f"{path} imports {bad}; policy is plain Python on plain data"


POLICY_ON_ARRAYS = (
    "jaxlamina/kv/allocator.py",
    "jaxlamina/kv/kv_worker.py",
    "jaxlamina/kv/placement.py",
    "jaxlamina/kv/planned_rows.py",
    "jaxlamina/kv/pool_book.py",
    "jaxlamina/kv/prefix.py",
    "jaxlamina/kv/slot_list.py",
    "jaxlamina/kv/tiers.py",
    "jaxlamina/engine/scheduler.py",
    "jaxlamina/engine/sizes_to_compile.py",
    "jaxlamina/planner/candidates.py",
    "jaxlamina/planner/costs.py",
    "jaxlamina/planner/question.py",
    "jaxlamina/planner/search.py",
    "jaxlamina/planner/task_times.py",
    "jaxlamina/planner/terms.py",
    "jaxlamina/planner/walk.py",
    "jaxlamina/simulator/results.py",
    "jaxlamina/simulator/simulation.py",
    "jaxlamina/simulator/step_times.py",
)


@pytest.mark.parametrize("path", POLICY_ON_ARRAYS)
def test_policy_on_arrays_has_no_device(path):
    bad = {n.split(".")[0] for n in imports(ROOT / path)} & {"jax", "jaxlib", "flax"}
    assert not bad, (
        f"{path} imports {bad}; slots and costs are plain numpy here, KV and devices are the workers' business"
    )


def test_no_two_public_classes_share_a_name():
    """So that a name leads to one place, whoever looks for it."""
    places: dict[str, list[str]] = {}
    for room in ROOMS:
        for path in sources(room):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert not shared, shared


def test_architecture_lists_the_rooms_from_the_top_floor_to_the_ground():
    rows = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    listed = [re.findall(r"`(?:cli/)?(\w+)(?:/|\.py)`", row) for row in rows]
    named = [set(floor.split()) - {"__init__", "__main__"} for floor in reversed(FLOORS)]
    top = listed.index(["main"])
    lines = iter(listed[top:])
    for floor in named:
        found: set[str] = set()
        while found < floor:
            found |= set(next(lines))
        assert found == floor
