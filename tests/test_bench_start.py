"""`bench start`: a real server's two starts, and what is made of what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from benches import bench, refused
from checkpoint_examples import tiny_words_folder

from jaxlamina.bench.start_bench import Gaps, cache_without_programs, command_of
from jaxlamina.errors import UserError


def test_gaps() -> None:
    assert Gaps.of([]) is None
    found = Gaps.of([0.001 * i for i in range(1, 102)])
    assert found is not None
    assert (found.n, found.p50_ms, found.p99_ms) == (101, pytest.approx(51), pytest.approx(100))


def test_the_port_and_whether_it_is_supervised_go_to_the_server() -> None:
    assert command_of([])[2:] == ["jaxlamina", "serve", "--no-supervise", "--port", "0"]
    words = ["launch", "--dop", "1,1", "--", "serve", "--seed", "1"]
    assert command_of(words)[3:] == [*words[:5], "--no-supervise", "--port", "0", "--seed", "1"]
    words.insert(1, "--supervise")
    assert command_of(words)[3:] == [*words[:6], "--port", "0", "--seed", "1"]
    with pytest.raises(UserError, match="'generate hello' starts no server: give serve"):
        command_of(["generate", "hello"])
    with pytest.raises(UserError, match="the bench takes a free one"):
        command_of(["serve", "--port=80"])


def test_a_cache_without_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLAMINA_CACHE", str(tmp_path))
    (tmp_path / "xla").mkdir()
    (tmp_path / "xla" / "a program").touch()
    (tmp_path / "model.gguf").write_text("weights")
    with cache_without_programs() as folder:
        assert [path.name for path in folder.iterdir()] == ["model.gguf"]
        assert (folder / "model.gguf").read_text() == "weights"
    assert (tmp_path / "model.gguf").read_text() == "weights", "the user's stays"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    folder = tiny_words_folder(tmp_path, max_position_embeddings=64)
    return ["--", "serve", "--model", str(folder), "--max-num-seqs", "2", "--max-model-len", "40"]


def test_two_starts(command: list[str]) -> None:
    options = ["--output-len", "20", "--input-len", "4", "--behind", "60", "--after", "0.5"]
    record, shown = bench("start", *options, *command)
    empty, full = record["starts"]
    assert (empty["cache"], full["cache"]) == ("empty", "full")
    for start in (empty, full):
        assert 0 < start["first_answer_s"] <= start["all_s"]
        assert start["n_programs"] == empty["n_programs"] > 1
        assert start["after"]["n"] >= 19 and 0 < start["after"]["p50_ms"] <= start["after"]["p99_ms"]
    assert "those of the start before" in shown and "not by then" not in shown


def test_a_server_that_ends_is_said(command: list[str]) -> None:
    said = refused("start", *command, "--kv-slots", "999999999")
    assert "the server ended: error: " in said and "--kv-slots" in said
