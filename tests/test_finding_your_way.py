"""docs/finding-your-way.md says where behaviours are decided: what it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in (ROOT / "docs" / "finding-your-way.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| Behaviour", "| **"))
]
TENSORS = {"q", "k", "v"}


def names_in(path: Path) -> set[str]:
    """Its functions and classes, and methods and fields as Class.name."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{inner.name}")
                elif isinstance(inner, ast.AnnAssign):
                    found.add(f"{node.name}.{ast.unparse(inner.target)}")
    return found


def test_there_are_twenty_ways_and_no_line_numbers():
    assert len(ROWS) >= 20
    assert not [row for row in ROWS if re.search(r"\.py:\d|\bline \d", " ".join(row))]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_is_named_is_there(row: list[str]):
    _, first, decided, second = row
    [path] = re.findall(r"^`([^`]+\.py)`$", first)
    others = re.findall(r"^`([^`]+\.py)`: (.*)", second)
    assert others or second in ("", "the file that uses it")
    known = {name for other, _ in others for name in names_in(ROOT / other)}
    for words, here in [(decided, names_in(ROOT / path)), *((words, known) for _, words in others)]:
        said = re.findall(r"`([\w.]+)`", words)
        assert said and said[0] in here and set(said) <= here | known | TENSORS, set(said) - here
