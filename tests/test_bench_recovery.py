"""`bench recovery`: a real server that is struck, and what is made of its command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benches import bench
from checkpoint_examples import tiny_words_folder
from supervised import ON_CPUS
from typer.testing import CliRunner

from jaxlamina.bench import recovery_bench
from jaxlamina.bench.cli import app
from jaxlamina.bench.job_processes import find
from jaxlamina.bench.loads import Size
from jaxlamina.bench.recovery_bench import supervised_command
from jaxlamina.errors import UserError


def test_the_server_is_supervised() -> None:
    assert supervised_command([])[3:] == ["serve", "--port", "0", "--supervise"]
    words = ["launch", "--dop", "1,1", "--", "serve", "--seed", "1"]
    assert supervised_command(words)[3:] == [*words[:5], "--port", "0", "--supervise", *words[5:]]
    with pytest.raises(UserError, match="nothing recovers"):
        supervised_command(["serve", "--no-supervise"])
    with pytest.raises(UserError, match="starts no server"):
        supervised_command(["generate", "hello"])


def test_what_is_not_there_cannot_be_struck() -> None:
    with pytest.raises(UserError, match="--whom attention: the job is one process"):
        find("attention", os.getpid(), None)
    workers = {"model": 1, "attention": 1, "prefill": 0}
    with pytest.raises(UserError, match="--whom prefill: the job has none"):
        find("prefill", os.getpid(), workers)
    with pytest.raises(UserError, match="--whom model: no such process"):
        find("model", os.getpid(), workers)


@pytest.mark.slow
def test_faults_before_one_that_fails_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server; the second fault is one that its streams are too short for."""
    strike = recovery_bench._Bench.strike

    async def short(self, fault: str, whom: str, number: int):
        size = Size(40, 900 if number == 0 else 21)
        self._load = recovery_bench.RecoveryLoad(3, size, 20)
        return await strike(self, fault, whom, number)

    monkeypatch.setattr(recovery_bench._Bench, "strike", short)
    folder = tiny_words_folder(tmp_path, max_position_embeddings=2048)
    command = ["--", "serve", "--model", str(folder), "--max-num-seqs", "4", "--max-model-len", "1000"]
    words = ["recovery", "--times", "3", "--deadline", "60", *command, "--no-warm-up"]
    ended = CliRunner().invoke(app, words)
    record = json.loads(ended.stdout.splitlines()[-1])
    assert ended.exit_code == 1 and len(record["faults"]) == 1 and "killed by SIGKILL" in ended.stdout
    assert record["failed"].startswith("fault 2 of 3: streams ended") and record["failed"] in ended.stdout
    waits = [line for line in ended.stderr.splitlines() if line.startswith("fault 1 of 3: waits for ")]
    assert [line.split("waits for ")[1] for line in waits] == [
        "the next start's imports",
        "all streams to write 20 tokens",
        "the supervisor to notice",
        "the next job",
        "all streams to go on",
    ]


def test_a_server_is_struck(tmp_path: Path) -> None:
    folder = tiny_words_folder(tmp_path, max_position_embeddings=2048)
    command = ["--", "serve", "--model", str(folder), "--max-num-seqs", "4", "--max-model-len", "1000"]
    command += ["--no-warm-up", "--spare", "1"]
    load = ["--streams", "3", "--input-len", "40", "--output-len", "900", "--written", "20"]
    record, shown = bench("recovery", "--times", "1", "--deadline", "60", *load, *command)
    [found] = record["faults"]
    assert found["cause"] == "killed by SIGKILL" and "killed by SIGKILL" in shown
    assert 0 < found["noticed_s"] < found["ready_s"] < min(found["next_s"]) < 30
    assert len(found["next_s"]) == 3 and found["last_s"] == max(found["next_s"])
    assert 3 * (40 + 20) <= found["n_tokens"] <= 3 * 940
    n_brought = found["brought_bytes"] / 256  # of a token, in two layers of two heads
    assert found["brought_s"] > 0 and n_brought + found["n_recomputed"] >= found["n_tokens"] - 3
    assert found["n_recomputed"] <= 3 * 17 and found["spare_s"] > found["ready_s"]
    assert {"imports", "weights", "kept KV", "programs"} <= found["start_s"].keys()
    assert f"kept KV {found['start_s']['kept KV']:.2f}" in shown
    assert record["median"]["ready_s"] == found["ready_s"] and record["standing_by_s"] == 0


@pytest.mark.slow
def test_a_rank_is_stopped(tmp_path: Path) -> None:
    folder = tiny_words_folder(tmp_path, max_position_embeddings=2048)
    ranks = ["launch", "--dop", "1,1", "--transport", "xla", "--local-attention", "0", "--model", str(folder)]
    command = ["--", *ranks, "--set", "step_deadline_s=3", *ON_CPUS, "--", "serve", "--max-num-seqs", "4"]
    command += ["--max-model-len", "1000", "--no-warm-up"]
    load = ["--streams", "2", "--input-len", "40", "--output-len", "900", "--written", "20"]
    struck = ["--times", "1", "--strike", "stop", "--whom", "attention", "--deadline", "60"]
    record, shown = bench("recovery", *struck, *load, *command)
    [found] = record["faults"]
    assert "rank 1 (attention worker 0) was not done within 3 s" in found["said"]
    assert f"1. the job said: {found['said'][:40]}" in " ".join(shown.split())
    assert 2 < found["noticed_s"] < found["ready_s"] < min(found["next_s"])
