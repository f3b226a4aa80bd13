"""Models of the users' own over real ranks: the tokens that their own functions say."""

from __future__ import annotations

from typing import Any

import pytest
from plain_models import NAMES
from rank_jobs import TRANSPORTS, mpi, run_job

IN_FLOAT32 = [name for name in NAMES if name != "qk_norm_bf16"]


def check(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["same"] and each["n_tokens"] == [64, 64, 64], each


@pytest.mark.parametrize(
    ("transport", "dop", "models", "cluster"),
    [
        mpi((1, 2), ["soft_cap_window"], {}),
        ("xla", (2, 1), ["imported_dpa"], {"tensor_parallel": 2, "n_batches": 3}),
        pytest.param(  # its stages and prompts: test_pipeline_parallel and test_prefill_workers
            "xla",
            (2, 2),
            ["nnx_scan_layers"],
            {"pipeline_parallel": 2, "partition": "tokens", "prefill_workers": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_over_ranks(transport: str, dop: tuple[int, int], models: list[str], cluster: dict[str, Any]):
    check(run_job(transport, dop, [("as_written", {"model": model}) for model in models], **cluster))


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dop", [(1, 1), (1, 2)])
@pytest.mark.parametrize("models", [IN_FLOAT32[i::4] for i in range(4)])
def test_all_over_ranks(transport: str, dop: tuple[int, int], models: list[str]):
    check(run_job(transport, dop, [("as_written", {"model": model}) for model in models]))
