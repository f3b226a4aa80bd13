"""Staggered batches over real ranks: the unsplit model's tokens, for every mode, DOP, transport and partition
that is kept.

How a schedule comes about is in `test_schedules`; what falls together in one exchange, in `test_transports`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_jobs import check_greedy, mpi, run_job

from jaxlamina.planner.calibration import DeviceCalibration
from jaxlamina.planner.hardware import Hardware
from jaxlamina.planner.terms import LinkTerms, Terms

# (model workers, attention workers), batches, mode, partition
CASES: list[tuple[tuple[int, int], int, str, str]] = [
    ((1, 1), 2, "rotational", "heads"),
    ((1, 3), 2, "fixed", "requests"),
    ((2, 1), 3, "rotational", "heads"),
    ((2, 2), 3, "rotational", "tokens"),
    ((3, 1), 4, "rotational", "heads"),
]
USUAL_OVER_MPI = ((2, 1),)  # the others over MPI are slow tests
ONE_TRANSPORT = [
    pytest.param("xla", (1, 1), 3, "fixed", "heads", marks=pytest.mark.slow),
    pytest.param("xla", (2, 1), 2, "fixed", "heads", marks=pytest.mark.slow),
    pytest.param("xla", (2, 2), 3, "rotational", "heads", marks=pytest.mark.slow),
    pytest.param("mpi", (2, 2), 3, "fixed", "requests", marks=[pytest.mark.mpi, pytest.mark.slow]),
]


@pytest.mark.parametrize(
    ("transport", "dop", "n_batches", "mode", "partition"),
    [
        *(
            # Others: test_layouts has them in one process, (2, 1) is run over MPI, and (2, 2) below.
            ("xla", *case) if case[0] == (1, 1) else pytest.param("xla", *case, marks=pytest.mark.slow)
            for case in CASES
        ),
        *(mpi(*case) for case in CASES if case[0] in USUAL_OVER_MPI),
        *(
            pytest.param("mpi", *case, marks=[pytest.mark.mpi, pytest.mark.slow])
            for case in CASES
            if case[0] not in USUAL_OVER_MPI
        ),
        *ONE_TRANSPORT,
    ],
)
def test_staggered_batches_give_the_unsplit_models_tokens(
    transport: str, dop: tuple[int, int], n_batches: int, mode: str, partition: str
) -> None:
    pipelining: dict[str, Any] = {"n_batches": n_batches, "pipelining": mode}
    found = run_job(
        transport, dop, [("greedy", {"model": "llama", "n_tokens": 30})], partition=partition, **pipelining
    )
    check_greedy(found[0], n_tokens=30)
    assert found[0]["ahead"]
    assert any(f"in {n_batches} staggered" in name for name in found[0]["programs"]), found[0]["programs"]


def test_auto_tries_both_and_gives_the_same_tokens(tmp_path: Path) -> None:
    """Unless a calibration says that two batches take far longer: of a machine that does nothing but read
    weights."""
    year = dict.fromkeys(("memory_gib", "bandwidth_gb_s", "tflops_bf16"), "made up, 2026")
    terms = Terms(Hardware("slow", 8, 20, tflops_bf16=0.1, source=year), 1e6, 1e12, 1e12, 1e-9, 1e-9, 1e-9)
    known = DeviceCalibration(terms, {"gloo": LinkTerms(1e-9, 1e12, True)}, "a CPU", {}, "2026-11-26")
    known.save(tmp_path / "slow.json")
    how = {"model": "llama", "n_tokens": 30}
    scenarios = [("greedy", how), ("greedy", how | {"calibration": str(tmp_path / "slow.json")})]
    *found, told = run_job("xla", (1, 1), scenarios, n_batches="auto")
    check_greedy(told, n_tokens=30)
    assert not any("staggered" in name for name in told["programs"]), told["programs"]
    assert "a CPU" in told["staggering"]["origin"] and not told["staggering"]["chosen"], told["staggering"]
    check_greedy(found[0], n_tokens=30)
    decodes = [name for name in found[0]["programs"] if name.startswith("decode, batch 4")]
    assert {"staggered" in name for name in decodes} == {True, False}, decodes
    said = found[0]["staggering"]
    assert said["n_batches"] == "auto" and {of["batch"] for of in said["chosen"]} >= {4}, said
    for bucket in said["chosen"]:  # tried out until both have been timed five times
        times = bucket["step_s"]
        fastest = min(times, key=times.get, default="1")
        assert bucket["n_batches"] in (None, int(fastest)), bucket
        assert bucket["batch"] > 1 or bucket["n_batches"] == 1, bucket


@pytest.mark.parametrize("transport", ["xla", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.slow])])
def test_windows_samples_and_beams(transport: str) -> None:
    """Contexts of another model, rows that come and go, and a second model on the same ranks."""
    scenarios = [("greedy", {"model": "mistral-window", "n_tokens": 24}), ("branches", {"model": "llama"})]
    found = run_job(transport, (2, 2), scenarios, partition="requests", n_batches=3)
    check_greedy(found[0], n_tokens=24)
    assert found[1]["same"], found[1]
