"""The pictures of docs/architecture.md are what the code says now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_rooms import FLOORS

ROOT = Path(__file__).resolve().parents[1]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = script()


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_the_script_draws(name):
    drawn = pictures.PICTURES[name]()
    ElementTree.fromstring(drawn)
    assert pictures.path_of(name).read_text() == drawn, "run `make pictures` and commit docs/images"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_architecture_shows_the_picture(name):
    assert f"](images/{name}.svg)" in (ROOT / "docs" / "architecture.md").read_text()


def test_every_room_is_in_the_picture():
    shown = re.findall(r">([^<>]+)</text>", pictures.rooms())
    words = {word for line in shown for word in re.findall(r"[\w.]+", line)}
    asked = {name for floor in FLOORS for name in floor.split()} - {"__init__", "__main__", "main", "llm"}
    assert asked | {"cli", "main.py", "llm.py", "launch", "splitter", "pallas_kernels"} <= words


def test_arrows_that_follow_from_others_are_left_out():
    graph = {"a": {"b", "c", "ground"}, "b": {"c"}, "c": set(), "ground": set()}
    assert list(pictures.needed(graph)) == [("a", "b"), ("b", "c")]


def test_both_ends_of_a_message_share_a_line():
    lines = list(pictures.in_time(*pictures.tasks_of_two_ranks()))
    messages = [(mine, theirs) for _, mine, theirs in lines if mine and theirs]
    assert [pictures.payload_of(mine).what for mine, _ in messages] == ["q", "kv", "out"] * pictures.N_LAYERS
    every = [task for _, *ends in lines for task in ends if task]
    model, pool = pictures.tasks_of_two_ranks()
    assert len(every) == len(model) + len(pool)
