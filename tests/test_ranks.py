"""Whole-step programs over real ranks on this machine: the tokens of the unsplit model, for each transport and partition.

A job is started for each of them, by mpirun or as plain processes, and runs several scenarios (`rank_job`). How ranks
fail is in `test_launch_ranks`, how tensors travel in `test_transports`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.commands import mpirun_argv
from launch.local import free_ports

ROOT = Path(__file__).resolve().parents[1]
JOB = (sys.executable, str(Path(__file__).with_name("rank_job.py")))
DEADLINE_S = 300
TRANSPORTS = (pytest.param("mpi", marks=pytest.mark.mpi), "xla")


def run_job(
    transport: str, n_workers: int, scenarios: list[tuple[str, dict[str, Any]]], **cluster: Any
) -> list[dict[str, Any]]:
    """What rank 0 printed, a scenario each."""
    control, coordinator = (f"127.0.0.1:{port}" for port in free_ports(2))
    job = {
        "cluster": {
            "dop": [1, n_workers], "transport": transport, "control": control, "coordinator": coordinator,
            "model_platform": "cpu", "attention_platform": "cpu", "token_block": 4, **cluster,
        },
        "scenarios": scenarios,
    }  # fmt: skip
    n = n_workers + 1
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [*JOB, json.dumps(job)]
    if transport == "mpi":
        ranks = [(*mpirun_argv(n, "Open MPI", root=os.geteuid() == 0), *command)]
        places = [environment]
    else:
        ranks = [tuple(command)] * n
        places = [environment | {"JAXLAMINA_RANK": str(i), "JAXLAMINA_N_RANKS": str(n)} for i in range(n)]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, **(pipe if i == 0 else {}))
        for i, (argv, env) in enumerate(zip(ranks, places, strict=True))
    ]
    try:
        out, err = processes[0].communicate(timeout=DEADLINE_S)
        codes = [process.wait(timeout=30) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), (codes, err[-3000:])
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [x["scenario"] for x in found] == [name for name, _ in scenarios]
    return found


def check_greedy(found: dict[str, Any], n_tokens: int = 64) -> None:
    assert found["same"], found
    assert found["n_tokens"] == [n_tokens] * 4
    # The first prompt again, and the third after it, start from what is stored.
    assert found["n_prefix_hit_tokens"] >= 18 + 17
    assert any(name.startswith("chunk") for name in found["programs"]), found["programs"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("n_workers", "partition"),
    [(1, "heads"), (2, "heads"), (2, "requests"), (2, "tokens"), (3, "requests"), (3, "tokens")],
)
def test_ranks_give_the_unsplit_models_tokens(transport: str, n_workers: int, partition: str) -> None:
    scenarios = [("greedy", {"model": "llama"}), ("moves", {"model": "llama"})]
    if n_workers < 3:
        scenarios += [("branches", {"model": "llama"}), ("greedy", {"model": "mistral-window"})]
    found = run_job(transport, n_workers, scenarios, partition=partition)
    check_greedy(found[0])
    assert found[1]["same"], found[1]
    for more in found[2:]:
        assert more["same"], more


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_q_with_k_and_v_gives_the_same_tokens(transport: str) -> None:
    found = run_job(transport, 2, [("greedy", {"model": "llama"})], q_first=False)
    check_greedy(found[0])
    assert all("q with k and v" in x for x in found[0]["programs"] if x.startswith(("decode", "chunk")))


def test_three_workers_cannot_share_two_heads() -> None:
    found = run_job("xla", 3, [("refused", {"model": "llama"})], partition="heads")
    assert "2 KV heads" in found[0]["line"] and "3 attention workers" in found[0]["line"]
    assert "partition='requests' or 'tokens'" in found[0]["line"]


@pytest.mark.parametrize("kv_dtype", ["int8", "int8-channel"])
def test_int8_kv_on_other_ranks(kv_dtype: str) -> None:
    """Rounded by the same rule wherever it is kept: the unsplit model's tokens, whose KV is int8 too."""
    scenarios = [("greedy", {"model": "llama", "n_tokens": 24, "kv_dtype": kv_dtype})]
    check_greedy(run_job("xla", 2, scenarios)[0], n_tokens=24)


@pytest.mark.parametrize(("transport", "n_workers"), [(TRANSPORTS[0], 1), ("xla", 3)])
def test_smollm2_over_ranks(transport: str, n_workers: int) -> None:
    found = run_job(transport, n_workers, [("greedy", {"model": "smollm2-135m-instruct"})])
    check_greedy(found[0])
    print(found[0])
