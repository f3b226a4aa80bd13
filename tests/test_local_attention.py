"""A share of the KV on model ranks: real ranks' tokens are those of the unsplit model, whatever the share, the
partition, the transport and the layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from rank_jobs import check_greedy, run_job
from rank_scenarios import PROMPTS, source

from jaxlamina import LLM, SamplingParams
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.ranks.cluster_layout import local_share_of, partition_of
from jaxlamina.run.set_up import SlotsWanted, _room, setup_of
from jaxlamina.steps.layout import Layout
from jaxlamina.workers.workspace import LargestStep

SHARES = (0.25, 0.5, 0.75, 1.0, "auto")
PARTITIONS = ("heads", "requests", "tokens")
# Two pairs of heads each, so that a quarter of four KV heads is one.
LLAMA = ["llama", {"num_attention_heads": 8, "num_key_value_heads": 4}]
DOPS: dict[str, dict[str, Any]] = {
    "1,1": {"dop": (1, 1)},
    "1,2": {"dop": (1, 2)},
    "2,1 stages": {"dop": (2, 1), "pipeline_parallel": 2},
}
STEP = LargestStep(4, 64, 64)
GREEDY = ("greedy", {"model": LLAMA})


def cases() -> Any:
    """A cover of them all in every run, the rest marked slow."""
    cover = {
        ("xla", "1,2", "requests", 0.5, 1), ("mpi", "1,2", "heads", 0.75, 2),
        ("xla", "2,1 stages", "tokens", 0.5, 1),
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


@pytest.mark.parametrize("n_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("partition", ["tokens", pytest.param("requests", marks=pytest.mark.slow)])
def test_auto_shares_by_measured_times_between_hosts(partition: str, n_batches: int) -> None:
    how: dict[str, Any] = {"local_attention": "auto", "partition": partition, "n_batches": n_batches}
    [found] = run_job("xla", (1, 1), [GREEDY], elsewhere=True, **how)
    check_greedy(found)
    local = found["local_attention"]
    assert (
        not local["times"]["shared_host"] and min(local["times"]["local_s"], local["times"]["remote_s"]) > 0
    )
    assert local["n_remote_tokens"] > 0 and 0 < local["wanted"] < 1, local
    assert local["steps"] and all(step["slices_s"] > 0 for step in local["steps"]), local


def test_room_is_that_of_both_pools() -> None:
    """By tokens the sum; by heads as many tokens as fit on each side in halves."""
    setup = setup_of(
        [], [], Layout((1,), "tokens", local_share=0.5), 16, SlotsWanted(None, 10**6, 2, 0), STEP, None
    )
    by_tokens = _room(setup, Layout((1,), "tokens", local_share=0.5), [1000, 880], 0)
    assert by_tokens.n_slots == 1880 >= 1.75 * 1000 and by_tokens.each == (1000, 880)
    by_heads = _room(setup, Layout((1,), "heads", local_share=0.5), [2000, 1760], 0)
    assert by_heads.n_slots == 1760 and by_heads.each == (1760, 1760)
    assert _room(setup, Layout((1,), "tokens", local_share=1.0), [0, 880], 0).n_slots == 880
    with pytest.raises(UserError, match="kv_slots=100, and all ranks together have room for the KV of 30"):
        wanted = setup_of(
            [], [], Layout((1,), "tokens", local_share=0.5), 16, SlotsWanted(100, 100, 2, 0), STEP, None
        )
        _room(wanted, Layout((1,), "tokens", local_share=0.5), [10, 20], 0)


SMALL = {"max_num_seqs": 4, "max_model_len": 96, "kv_slots": 130, "host_kv_slots": 260, "kv_headroom": 0.0}


@pytest.mark.parametrize(
    "partition",
    [
        pytest.param("heads", marks=pytest.mark.slow),
        pytest.param("requests", marks=pytest.mark.slow),
        pytest.param("tokens", marks=pytest.mark.mpi),
    ],
)
def test_samples_beams_preemption_and_moves(partition: str) -> None:
    """KV is copied from side to side where rows part, and goes to the host and back where there is no room."""
    transport = "mpi" if partition == "tokens" else "xla"
    scenarios = [("branches", {"model": LLAMA}), ("greedy", {"model": LLAMA, "n_tokens": 40, **SMALL})]
    how: dict[str, Any] = {"partition": partition, "local_attention": 0.5}
    branches, greedy = run_job(transport, (1, 1), scenarios, **how)
    assert branches["same"], branches
    assert greedy["same"] and greedy["n_preemptions"] and greedy["n_moved_in_tokens"], greedy


@pytest.mark.parametrize(
    ("partition", "kv_dtype"),
    [
        ("heads", "int8"), ("tokens", "auto"), pytest.param("requests", "int8", marks=pytest.mark.slow),
        pytest.param("tokens", "int8", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_one_process_shares_attention_too(partition: str, kv_dtype: str) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 96, "kv_dtype": kv_dtype}

    def tokens_of(**options: Any) -> list[list[int]]:
        llm = LLM(source(LLAMA), **limits, **options)
        found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
        llm.engine.check_integrity()
        return found

    shared = tokens_of(local_attention=0.5, partition=partition, attention_workers=2)
    # int8 KV has a scale for each token and head: where it lies is all the same.
    assert shared == tokens_of(split=False)


def test_what_a_share_cannot_go_with_is_refused_by_name() -> None:
    for changes, words in (
        ({"dop": (2, 1)}, "2 copies of the model"),
        ({"dop": (2, 1), "tensor_parallel": 2, "partition": "tokens"}, "partition='heads'"),
        ({"dop": (2, 1), "tensor_parallel": 2, "prefill_workers": 1}, "prefill_workers=0"),
        ({"prefill_workers": 1, "partition": "heads"}, "partition='tokens'"),
        ({"mini_batches": 2, "partition": "tokens"}, "mini_batches=1"),
    ):
        with pytest.raises(UserError, match=words):
            Cluster(local_attention=0.5, **changes)
        assert Cluster(**{"local_attention": "auto"} | changes | {"partition": "auto"}).local_share in (
            0,
            "auto",
        )
    with pytest.raises(UserError, match="from 0 to 1, or 'auto'"):
        Cluster(local_attention=1.5)
    with pytest.raises(UserError, match="one of 1 KV heads at least.*too few for 1 att"):
        partition_of(Cluster(local_attention=0.5, partition="heads"), [1])
    assert [partition_of(Cluster(local_attention=x), [8]) for x in ("auto", 0.5, 0.3, 0, 1)] == [
        *("tokens", "heads", "tokens", "heads", "heads")
    ]


# Three KV heads to a rank, of which one stays there.
SIX = ["llama", {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4}]
SHARDS = {"tensor_parallel": 2, "partition": "heads", "local_attention": 0.5}


@pytest.mark.parametrize(
    ("transport", "dop", "model", "n_batches"),
    [
        ("xla", (2, 1), LLAMA, 2),
        pytest.param("xla", (2, 2), SIX, 1, marks=pytest.mark.slow),
        pytest.param("mpi", (2, 1), SIX, 1, marks=[pytest.mark.mpi, pytest.mark.slow]),
        pytest.param("mpi", (2, 2), SIX, 2, marks=[pytest.mark.mpi, pytest.mark.slow]),
    ],
)
def test_shards_keep_a_share_of_their_heads(transport: str, dop: Any, model: Any, n_batches: int) -> None:
    """Rows together, then one by one: fewer than there are staggered batches go as one."""
    scenarios = [
        ("greedy", {"model": model}),
        ("greedy", {"model": model, "n_tokens": 24, "max_num_seqs": 1}),
    ]
    for found, n_tokens in zip(
        run_job(transport, dop, scenarios, n_batches=n_batches, **SHARDS), (64, 24), strict=True
    ):
        check_greedy(found, n_tokens)
        assert 0 < found["local_attention"]["share"] < 1, found


@pytest.mark.slow
def test_shards_samples_beams_preemption_int8_and_all_local() -> None:
    small = {"model": LLAMA, "n_tokens": 40, **SMALL}
    scenarios = [
        ("branches", {"model": LLAMA}),
        ("greedy", small),
        ("greedy", small | {"kv_dtype": "int8-channel"}),
    ]
    for share in (0.5, 1.0):
        branches, *greedy = run_job("xla", (2, 1), scenarios, **SHARDS | {"local_attention": share})
        assert branches["same"], branches
        for found in greedy:
            assert found["same"] and found["n_preemptions"] and found["n_moved_in_tokens"], found


def test_shards_share_is_a_number_of_each_ones_heads() -> None:
    cluster = Cluster(dop=(2, 1), tensor_parallel=2, local_attention=0.3)
    assert partition_of(cluster, [8]) == "heads"  # tokens cannot be: as near to it as heads come
    assert local_share_of(replace(cluster, local_attention="auto"), "heads", [8]) == 0
    auto = replace(cluster, local_attention="auto", partition="heads")
    assert [local_share_of(auto, "heads", [k]) for k in (8, 2, 3)] == [
        6 / 8,
        0,
        0,
    ]  # three heads each, and two
    assert local_share_of(auto, "heads", [8], "other operands") == 0
    # Where that is less for the fullest one, workers have unequal numbers: 1 beside 2, 2, 1 and 1.
    assert local_share_of(Cluster(dop=(1, 4), partition="heads"), "heads", [7]) == 1 / 7
    assert partition_of(Cluster(dop=(1, 3), partition="heads", local_attention=0.5), [8]) == "heads"
    with pytest.raises(UserError, match="of a layer's 3 KV heads.*take local_attention=0"):
        partition_of(cluster, [3])
    with pytest.raises(UserError, match="take 1 or 2 attention workers, or local_attention=0"):
        partition_of(replace(cluster, dop=(2, 3)), [4])
    with pytest.raises(UserError, match="other operands: take local_attention=0"):
        local_share_of(cluster, "heads", [8], "other operands")


@pytest.mark.slow
def test_step_bench_measures_every_share_of_every_partition() -> None:
    three = ["llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}]
    ways = {"model": three, "shares": [0.0, 0.5], "partitions": ["heads", "tokens"]}
    [bench] = run_job("xla", (1, 2), [("step_bench", ways)])
    split = [f"split by {by}, {x} local" for by in ("heads", "tokens") for x in (0, 0.5)]
    assert [*bench["ways"]] == ["unsplit", *(way + more for way in split for more in ("", ", 2 staggered"))]
    assert bench["difference"] < 1e-5, bench


def test_programs_of_attention_workers_may_come_later() -> None:
    """A server begins with those that model ranks run alone. Requests compile nothing more, whichever side
    their tokens are on."""
    scenario = "warmed", {"model": LLAMA, "alone": True}
    how: dict[str, Any] = {"local_attention": "auto", "partition": "tokens", "n_batches": 1}
    [found] = run_job("xla", (1, 1), [scenario], elsewhere=True, **how)
    assert found["same"] and not found["more"] and found["ahead"] == found["n_todo"], found
