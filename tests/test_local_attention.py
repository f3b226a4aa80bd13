"""A share of the KV on model ranks: real ranks' tokens are those of the unsplit model, whatever the share, the
partition, the transport and the layout."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from rank_jobs import check_greedy, run_job

SHARES = (0.25, 0.5, 0.75, 1.0, "auto")
PARTITIONS = ("heads", "requests", "tokens")
# Two pairs of heads each, so that a quarter of four KV heads is one.
LLAMA = ["llama", {"num_attention_heads": 8, "num_key_value_heads": 4}]
DOPS: dict[str, dict[str, Any]] = {
    "1,1": {"dop": (1, 1)},
    "1,2": {"dop": (1, 2)},
    "2,1 stages": {"dop": (2, 1), "pipeline_parallel": 2},
}
GREEDY = ("greedy", {"model": LLAMA})


def cases() -> Any:
    """A cover of them all in every run, the rest marked slow."""
    cover = {
        ("xla", "1,1", "heads", 0.5, 1), ("mpi", "1,1", "tokens", "auto", 2), ("xla", "1,2", "requests", 0.5, 1),
        ("mpi", "1,2", "heads", 0.75, 2), ("xla", "2,1 stages", "tokens", 0.5, 1), ("xla", "1,1", "tokens", 0.25, 2),
        ("mpi", "2,1 stages", "heads", 0.25, 2), ("xla", "1,1", "requests", 1.0, 1), ("mpi", "1,1", "requests", "auto", 2),
    }  # fmt: skip
    found = []
    for case in product(("xla", "mpi"), DOPS, PARTITIONS, SHARES, (1, 2)):
        marks = [pytest.mark.mpi] if case[0] == "mpi" else []
        marks += [] if case in cover else [pytest.mark.slow]
        found.append(pytest.param(*case, marks=marks))
    return found


@pytest.mark.parametrize(("transport", "dop", "partition", "share", "n_batches"), cases())
def test_tokens_are_those_of_the_unsplit_model(
    transport: str, dop: str, partition: str, share: Any, n_batches: int
) -> None:
    how = DOPS[dop] | {"partition": partition, "local_attention": share, "n_batches": n_batches}
    [found] = run_job(transport, scenarios=[GREEDY], **how)
    check_greedy(found)
