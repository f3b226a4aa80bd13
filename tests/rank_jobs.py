"""Jobs of real ranks on this machine that run `rank_job`, and what their rank 0 printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import ForkedRank
from quick_to_compile import FLAGS

from launch.commands import mpirun_argv
from launch.local import free_ports

ROOT = Path(__file__).resolve().parents[1]
JOB = (sys.executable, str(Path(__file__).with_name("rank_job.py")))
DEADLINE_S = 300
TRANSPORTS = (pytest.param("mpi", marks=pytest.mark.mpi), "xla")


def mpi(*values: Any) -> Any:
    """A case of a test over MPI."""
    return pytest.param("mpi", *values, marks=pytest.mark.mpi)


@contextmanager
def started(
    transport: str,
    dop: int | tuple[int, int],
    scenarios: list[tuple[str, dict[str, Any]]],
    hold: Any = None,
    weigh: Any = None,
    behind: Any = None,
    slow: Any = None,
    unreadable: bool = False,
    frozen: Any = None,
    elsewhere: bool = False,
    hold_prompts: Any = None,
    parcel_bytes: int = 0,
    **cluster: Any,
) -> Iterator[list[Any]]:
    """A job's processes, of one model worker unless ``dop`` is a pair: mpirun, or each rank's own. Rank 0's
    output is what the first one says."""
    dop = (1, dop) if isinstance(dop, int) else dop
    control, coordinator = (f"127.0.0.1:{port}" for port in free_ports(2))
    job = {
        "cluster": {
            "dop": dop, "transport": transport, "control": control, "coordinator": coordinator,
            "model_platform": "cpu", "attention_platform": "cpu", "token_block": 4, "q_first": True,
            "local_attention": 0, **cluster,
        },
        "scenarios": scenarios,
    }  # fmt: skip
    more = {
        "hold": hold,
        "weigh": weigh and str(weigh),
        "behind": behind,
        "slow": slow,
        "unreadable": unreadable,
        "frozen": frozen and str(frozen),
        "elsewhere": elsewhere,
        "hold_prompts": hold_prompts and str(hold_prompts),
        "parcel_bytes": parcel_bytes,
    }
    job |= {name: x for name, x in more.items() if x}
    n = sum(dop) + cluster.get("prefill_workers", 0)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    if "smollm2" not in json.dumps(scenarios):  # a model so small is compiled for longer than it runs
        # Each once, as in `make test`: a program is kept under the flags as they are written.
        flags = dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *FLAGS])
        environment["XLA_FLAGS"] = " ".join(flags)
    processes: list[Any]
    if transport == "mpi":
        command = [*mpirun_argv(n, "Open MPI", root=os.geteuid() == 0), *JOB, json.dumps(job)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, **pipes)]
    else:
        places = [{"JAXLAMINA_RANK": str(i), "JAXLAMINA_N_RANKS": str(n)} for i in range(n)]
        processes = [ForkedRank(json.dumps(job), environment | of, not i) for i, of in enumerate(places)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_job(
    transport: str, dop: int | tuple[int, int], scenarios: Any, **cluster: Any
) -> list[dict[str, Any]]:
    """What rank 0 printed, a scenario each."""
    with started(transport, dop, scenarios, **cluster) as processes:
        out, err = processes[0].communicate(timeout=DEADLINE_S)
        codes = [process.wait(timeout=30) for process in processes]
    assert not any(codes), (codes, err[-3000:])
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [x["scenario"] for x in found] == [name for name, _ in scenarios]
    return found


def check_greedy(found: dict[str, Any], n_tokens: int = 64, n_prompts: int = 3) -> None:
    assert found["same"], found
    assert found["n_tokens"] == [1] + [n_tokens] * n_prompts
    # The first prompt again, and the third after it, start from what is stored.
    assert found["n_prefix_hit_tokens"] >= 18 + 17
    assert any(name.startswith("chunk") for name in found["programs"]), found["programs"]
