"""The arrows between rooms (docs/architecture.md): who may import whom, held against the code's own imports."""

from __future__ import annotations

import ast
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


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
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
    "splitter/draw/layout.py",
    "jaxlamina/steps/buckets.py",
    "jaxlamina/job/cluster.py",
    "jaxlamina/engine/policies.py",
    "jaxlamina/run/staggering.py",
    "jaxlamina/job/roles.py",
    "jaxlamina/steps/schedules/check.py",
    "jaxlamina/steps/schedules/staggered.py",
    "jaxlamina/steps/check.py",
    "jaxlamina/steps/layout.py",
    "jaxlamina/steps/plans.py",
    "jaxlamina/steps/shape.py",
    "jaxlamina/steps/step.py",
    "jaxlamina/steps/table.py",
    "jaxlamina/steps/tasks.py",
    "jaxlamina/transports/exchanges.py",
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
    "jaxlamina/kv/placement.py",
    "jaxlamina/kv/pool_book.py",
    "jaxlamina/kv/prefix.py",
    "jaxlamina/kv/slot_list.py",
    "jaxlamina/kv/tiers.py",
    "jaxlamina/engine/scheduler.py",
)


@pytest.mark.parametrize("path", POLICY_ON_ARRAYS)
def test_policy_on_slots_has_no_device(path):
    bad = {n.split(".")[0] for n in imports(ROOT / path)} & {"jax", "jaxlib", "flax"}
    assert not bad, (
        f"{path} imports {bad}; slots are plain numpy here, KV and devices are the workers' business"
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
