"""Streaming inside one attention: a layer's messages in parts, over real ranks; the unsplit model's
tokens."""

from __future__ import annotations

import pytest
from rank_jobs import check_greedy, run_job

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster


@pytest.mark.parametrize(
    ("transport", "dop", "n"),
    [
        ("xla", (1, 1), 2),
        pytest.param("xla", (1, 2), 3, marks=pytest.mark.slow),
        pytest.param("mpi", (1, 1), 3, marks=[pytest.mark.mpi, pytest.mark.slow]),
        pytest.param("mpi", (1, 2), 2, marks=[pytest.mark.mpi, pytest.mark.slow]),
    ],
)
def test_messages_in_parts_give_the_unsplit_models_tokens(
    transport: str, dop: tuple[int, int], n: int
) -> None:
    found = run_job(transport, dop, [("greedy", {"model": "llama", "n_tokens": 30})], mini_batches=n)
    check_greedy(found[0], n_tokens=30)
    assert any(f"in {n} mini-batches" in name for name in found[0]["programs"]), found[0]["programs"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"n_batches": 2}, "take n_batches=1, or mini_batches=1"),
        ({"dop": (2, 1), "tensor_parallel": 2}, "on a model worker with all weights"),
        ({"dop": (1, 2), "partition": "requests"}, "take partition='heads', or mini_batches=1"),
        ({"mini_batches": 0}, "mini_batches=0 must be at least 1"),
    ],
)
def test_where_messages_cannot_go_in_parts(keys: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Cluster(**{"mini_batches": 2, **keys})
