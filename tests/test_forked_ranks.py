"""Forked ranks are like started ones: how they end is seen, they may be waited for and killed, and each reads its
own environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import forked_ranks
import pytest
from forked_ranks import ForkedRank
from rank_jobs import ROOT, started

from launch.local import free_ports

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}


def rank(**environment: str) -> ForkedRank:
    """One that waits for others, which never come."""
    ports = dict(zip(("control", "coordinator"), free_ports(2), strict=True))
    cluster = {"transport": "xla", **{name: f"127.0.0.1:{port}" for name, port in ports.items()}}
    job = json.dumps(
        {"cluster": cluster | {"model_platform": "cpu", "attention_platform": "cpu"}, "scenarios": []}
    )
    return ForkedRank(job, ENVIRONMENT | {"JAXLAMINA_RANK": "0"} | environment, kept=True)


def test_a_rank_that_waits_is_waited_for_and_killed() -> None:
    waiting = rank()
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.communicate(timeout=0.5)
    assert Path(f"/proc/{waiting.pid}/exe").exists()
    waiting.kill()
    assert waiting.communicate(timeout=20) == ("", "") and waiting.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{waiting.pid}").exists()
    waiting.kill()  # a process of the same number would be somebody else's


def test_a_rank_that_fails_says_so_and_ends_as_a_process_does() -> None:
    failed = rank(JAXLAMINA_RANK="x")
    out, err = failed.communicate(timeout=20)
    assert failed.wait() == 1 and not out and "JAXLAMINA_RANK='x' must be a whole number" in err


def test_a_rank_has_the_flags_of_its_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """XLA reads them at its first use, which is after the fork, and ends a process at one that it does not know.
    Either rank may be the first to; the other one ends because that one has gone."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with started("xla", 1, []) as (leader, _):
        _, err = leader.communicate(timeout=60)
    assert leader.returncode and "xla_no_such_flag" in err + capfd.readouterr().err


def test_what_jax_reads_when_it_is_imported_has_a_server_of_its_own() -> None:
    usual, same = (forked_ranks._server(ENVIRONMENT | {"XLA_FLAGS": flags}) for flags in ("", "--a"))
    assert usual is same
    other = rank(JAX_LOG_COMPILES="1")
    assert forked_ranks._server(ENVIRONMENT | {"JAX_LOG_COMPILES": "1"}) is not usual
    other.kill()
    assert other.wait(timeout=20) == -signal.SIGKILL
