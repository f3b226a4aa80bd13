"""Jobs that a bench compares: what is kept of those that end, however late another one is, and which GPUs
there are for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxlamina.bench import exchange_bench
from jaxlamina.bench.compared_jobs import ComparedJob, only, run_at_once
from jaxlamina.process.gpus import n_gpus, visible_gpus


def test_a_late_job_costs_no_other_one_its_results() -> None:
    """What is written is more than a pipe holds, so that a writer whose turn has not come would stand
    still."""
    late = ComparedJob(("bench", "predict", "--json"))  # 12 s
    chatty = ComparedJob(("--version",), {"PYTHONVERBOSE": "1"})
    first, second = run_at_once([late, chatty], within_s=6)
    assert first.code is None and first.out == ""
    assert second.code == 0 and second.out.startswith("jaxlamina ") and len(second.err) > 2**17


@pytest.mark.parametrize(
    ("mask", "there"),
    [
        ("0,1", ["0", "1"]),
        (" 2 , 3 ", ["2", "3"]),
        ("-1", []),
        ("", []),
        (",0,1", []),
        ("0,,1", ["0"]),
        ("1,-1,0", ["1"]),
        ("GPU-8932f937,MIG-1", ["GPU-8932f937", "MIG-1"]),
    ],
)
def test_gpus_are_those_that_cuda_shows_and_jax_runs_on(
    mask: str, there: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    environment = {"CUDA_VISIBLE_DEVICES": mask}
    assert visible_gpus(environment) == there
    assert n_gpus(environment) == 0, "JAX's plugin for CUDA is not installed"
    (tmp_path / "jax_cuda12_plugin").mkdir()
    (tmp_path / "jax_cuda12_plugin" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert n_gpus(environment) == n_gpus(environment | {"JAX_PLATFORMS": "cuda,cpu"}) == len(there)
    assert n_gpus(environment | {"JAX_PLATFORMS": "cpu,cuda"}) == 0
    each = [only(range(i, i + 1))["CUDA_VISIBLE_DEVICES"] for i in range(len(there))]
    assert each == there, "a job's, of those"
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert exchange_bench.platforms("auto")[0] == ("cuda" if len(there) > 1 else "cpu")
