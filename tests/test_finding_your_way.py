"""docs/finding-your-way.md says where behaviours are decided: what it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split("|")]
    for line in (ROOT / "docs" / "finding-your-way.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| Behaviour")
]


def names_in(path: Path) -> set[str]:
    """Its functions and classes, and methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_there_are_twenty_ways():
    assert len(ROWS) >= 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_is_named_is_there(row: list[str]):
    _, first, decided, *second = (*row, "")[:4]
    [path] = re.findall(r"`([^`]+\.py)`", first)
    known = names_in(ROOT / path)
    said = [name for name in re.findall(r"`([\w.]+)`", decided) if name not in ("q", "k", "v")]
    assert said and set(said) <= known, set(said) - known
    for other, names in re.findall(r"`([^`]+\.py)`: (.*)", second[0]):
        said = re.findall(r"`([\w.]+)`", names)
        assert said and set(said) <= names_in(ROOT / other), set(said) - names_in(ROOT / other)
