"""Jobs without attention workers, DOP (a, 0): model workers keep all KV, and the tokens are those of the unsplit
model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_jobs import check_greedy, run_job
from test_predicted import TERMS

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.planner.calibration import DeviceCalibration
from jaxlamina.planner.costs import LinkTerms
from jaxlamina.ranks.cluster_layout import layout_of, local_share_of, partition_of

LLAMA = "llama"
SHARDS, STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
# Prompts in chunks, and so few slots that requests wait in host memory.
SMALL = {"max_num_batched_tokens": 8, "kv_slots": 150, "host_kv_slots": 64, "kv_headroom": 0.0}
SLOW = pytest.mark.slow
MPI = pytest.mark.mpi


@pytest.mark.parametrize(
    ("transport", "dop", "how"),
    [
        ("xla", (1, 0), {}),
        ("xla", (2, 0), SHARDS),
        pytest.param("mpi", (2, 0), SHARDS, marks=MPI),
        pytest.param("mpi", (1, 0), {}, marks=[MPI, SLOW]),
        pytest.param("xla", (2, 0), STAGES, marks=SLOW),
        pytest.param("mpi", (2, 0), STAGES, marks=[MPI, SLOW]),
    ],
)
def test_tokens_are_those_of_the_unsplit_model(transport: str, dop: Any, how: Any) -> None:
    """A prefix is found again; then with chunks of prompts, and preemption."""
    scenarios = [("greedy", {"model": LLAMA}), ("greedy", {"model": LLAMA, **SMALL})]
    whole, small = run_job(transport, dop, scenarios, local_attention="auto", **how)
    check_greedy(whole)
    assert whole["local_attention"]["share"] == 1 and whole["staggering"]["n_batches"] == 1
    assert small["same"] and small["n_preemptions"] and small["n_moved_in_tokens"], small


def test_three_shards_meet_in_collectives_of_all_ranks_and_steps_have_a_price(tmp_path: Path) -> None:
    three = [LLAMA, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}]
    how = {"tensor_parallel": 3, "local_attention": "auto"}
    known = DeviceCalibration(TERMS, {"gloo": LinkTerms(1e-4, 1e9, True)}, "a CPU", {}, "2026-11-27")
    known.save(tmp_path / "cpu.json")
    scenario = "greedy", {"model": three, "calibration": str(tmp_path / "cpu.json")}
    [found] = run_job("xla", (3, 0), [scenario], **how)
    check_greedy(found)
    assert found["staggering"]["origin"] == known.origin, found["staggering"]


@SLOW
@pytest.mark.parametrize(("dop", "how"), [((1, 0), {}), ((2, 0), SHARDS)])
def test_all_else_that_ranks_do(dop: Any, how: Any) -> None:
    """Samples and beams, copies and moves of KV, int8, programs compiled ahead, scored prompts, other
    weights, a prompt in a decode step, and several prompts in one call."""
    scenarios: list[tuple[str, dict[str, Any]]] = [
        *((name, {"model": LLAMA}) for name in ("branches", "moves", "warmed", "scored", "short_prompts")),
        ("greedy", {"model": LLAMA, "n_tokens": 24, "kv_dtype": "int8-channel"}),
        ("updated", {"model": LLAMA}),
        ("with_chunk", {"model": LLAMA, "partition": "heads"}),
    ]
    *found, updated, mixed = run_job("xla", dop, scenarios, local_attention="auto", **how)
    assert all(one["same"] for one in found), found
    warmed = found[2]
    assert not warmed["more"] and warmed["ahead"] == warmed["n_todo"] and warmed["all_by_others"], warmed
    assert updated["same_before"] and updated["same_after"] and updated["differ"], updated
    assert mixed["difference"] < 1e-5 and mixed["tokens"][0] == mixed["tokens"][1], mixed


@pytest.mark.parametrize(
    ("dop", "how", "name"),
    [
        ((1, 0), {}, "unsplit over 1 rank"),
        pytest.param((2, 0), SHARDS, "unsplit over 2 ranks", marks=SLOW),
    ],
)
def test_bench_step_has_a_way_for_it(dop: Any, how: Any, name: str) -> None:
    scenario = "step_bench", {"model": LLAMA, "prefill": 8}
    [bench] = run_job("xla", dop, [scenario], local_attention="auto", **how)
    more = ("", ", with 8 alongside", ", then 8")
    assert [*bench["ways"]] == [way + words for way in ("unsplit", name) for words in more]
    assert bench["difference"] < 1e-5, bench


def test_heads_that_ranks_cannot_share_out_are_refused_with_the_number_that_can() -> None:
    [found] = run_job("xla", (3, 0), [("refused", {"model": LLAMA})], tensor_parallel=3, local_attention=1)
    assert "2 KV heads, which 3 does not divide: take dop=(2, 0) with tensor_parallel=2" in found["line"]
    with pytest.raises(UserError, match=r"take dop=\(1, 0\) with tensor_parallel=1, or attention workers"):
        partition_of(Cluster(dop=(2, 0), **SHARDS), [8, 3])
    with pytest.raises(UserError, match="other operands: take fewer of them, or attention workers"):
        local_share_of(Cluster(dop=(2, 0), **SHARDS), "heads", [8], "other operands")


def test_a_job_refuses_what_attention_workers_do_and_ends() -> None:
    """`bench step` is told of staggered batches in the job itself."""
    with pytest.raises(
        AssertionError, match=r"--staggered is about attention workers, of which dop=\(1, 0\)"
    ):
        ways = {"model": LLAMA, "staggered": [2]}
        run_job("xla", (1, 0), [("step_bench", ways)], local_attention="auto")


@pytest.mark.parametrize("how", [{"dop": (1, 0)}, {"dop": (3, 0), "tensor_parallel": 3}])
def test_model_ranks_have_all_heads_and_nobody_is_told(how: Any) -> None:
    cluster = Cluster(**how)
    assert partition_of(cluster, [6]) == "heads" and local_share_of(cluster, "heads", [6]) == 1
    layout = layout_of(cluster, "heads", heads_over=cluster.tensor_parallel)
    assert not layout.has_pool and layout.attends_locally and layout.by_heads
    own = [h for i in range(cluster.n_model) for h in layout.own_heads(i, 6)]
    assert own == [*range(6)] and not layout.pooled_heads(6) and not layout.links(0, 0)
