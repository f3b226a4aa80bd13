"""Prompts on ranks of their own, beside decode steps: the unsplit model's tokens over real ranks, and who
computes which prompt.

A chunk on the model ranks is in `test_mixed_steps`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_jobs import check_greedy, mpi, run_job
from test_policies import check_order
from test_scheduler import make, play, request, run_step, workloads

from jaxlamina.engine.policies import load_policy
from jaxlamina.engine.request import Request
from jaxlamina.engine.room import SCORED_CHUNK
from jaxlamina.engine.scheduled_step import OwnChunk, ScheduledStep
from jaxlamina.engine.scheduler import Scheduler
from jaxlamina.engine.sizes_to_compile import first_of, shapes
from jaxlamina.steps.batch import levelled
from jaxlamina.steps.buckets import Buckets, StepSizes
from jaxlamina.steps.shape import StepShape
from jaxlamina.workers import PrefillBatch

# --- over ranks ---

# transport, (model workers, attention workers), prefill workers, partition, model, and what else the
# cluster's file says
CASES: list[Any] = [
    ("xla", (1, 1), 2, "heads", "llama", {}),
    mpi((1, 1), 1, "heads", "mistral-window", {}),
]
SLOW: list[tuple[str, tuple[int, int], int, str, str, dict[str, Any]]] = [
    ("xla", (1, 2), 1, "requests", "llama", {"q_first": False}),
    ("xla", (1, 2), 1, "heads", "qwen3", {"mini_batches": 2}),
    ("xla", (1, 3), 2, "tokens", "llama", {}),
    ("xla", (1, 1), 1, "heads", "llama", {"n_batches": 2}),
    ("xla", (2, 1), 2, "heads", "llama", {"n_batches": 3}),
    ("xla", (1, 2), 1, "requests", "mistral-window", {"n_batches": 2}),
    ("xla", (2, 1), 1, "heads", "llama", {"tensor_parallel": 2}),
    ("xla", (2, 2), 1, "tokens", "llama", {"pipeline_parallel": 2, "n_batches": 4}),
    ("mpi", (1, 2), 1, "tokens", "mistral-window", {}),
    ("mpi", (1, 1), 2, "heads", "llama", {}),
    ("mpi", (2, 1), 1, "heads", "llama", {"pipeline_parallel": 2}),
    ("mpi", (2, 1), 1, "heads", "llama", {"n_batches": 3}),
]


def marked(case: tuple[Any, ...]) -> Any:
    return pytest.param(*case, marks=[pytest.mark.slow, *([pytest.mark.mpi] if case[0] == "mpi" else [])])


@pytest.mark.parametrize(
    ("transport", "dop", "n_workers", "partition", "model", "how"), [*CASES, *map(marked, SLOW)]
)
def test_the_unsplit_models_tokens(
    transport: str, dop: tuple[int, int], n_workers: int, partition: str, model: str, how: dict[str, Any]
) -> None:
    """Prompts in chunks while others decode, some after cached prefixes; among the slow tests also with
    requests that give way and come back."""
    usual = {"model": model, "n_tokens": 16, "fourth": 20, "max_num_batched_tokens": 8, "max_model_len": 48}
    scenarios = [("greedy", usual)]
    if transport == "xla" and dop != (1, 1):  # what differs between transports is in every step
        scenarios.append(("greedy", usual | {"kv_slots": 60, "host_kv_slots": 16, "kv_headroom": 0.0}))
    cluster = {"partition": partition, "prefill_workers": n_workers, "prefill_pace": "step"}
    cluster |= {"local_prefill_tokens": 0, **how}
    found, *few_slots = run_job(transport, dop, scenarios, **cluster)
    check_greedy(found, n_tokens=16, n_prompts=4)
    for more in few_slots:
        assert more["same"] and more["n_preemptions"], more
    prompts = [name for name in found["programs"] if "prefill" in name or "chunk" in name]
    ranks = [f"on rank {sum(dop) + i}" for i in range(n_workers)]
    assert all(any(rank in name for rank in ranks) for name in prompts), prompts
    assert all(any(rank in name for name in prompts) for rank in ranks), prompts
    beside = [name for name in prompts if name.startswith("decode")]
    assert any("with chunk" in name for name in beside), prompts
    if how.get("n_batches", 1) > 1:
        assert any("staggered" in name for name in beside), beside
    assert found["ahead"]


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["step", "own"])
@pytest.mark.parametrize("kv_dtype", ["int8", "int8-channel"])
def test_int8_kv(kv_dtype: str, pace: str) -> None:
    """Chunks come after tokens whose KV was rounded, as unsplit."""
    options = {
        "model": "llama",
        "n_tokens": 16,
        "fourth": 20,
        "max_num_batched_tokens": 8,
        "max_model_len": 48,
    }
    scenario = ("greedy", options | {"kv_dtype": kv_dtype})
    how = {"prefill_pace": "step"} if pace == "step" else {"prefill_chunk": 8}
    [found] = run_job("xla", (1, 2), [scenario], partition="heads", prefill_workers=1, **how)
    check_greedy(found, n_tokens=16, n_prompts=4)


def test_samples_and_beams() -> None:
    """Beams that gave way come back together: several prompts of one worker in a step."""
    few = {"kv_slots": 40, "kv_headroom": 0.0, "max_num_batched_tokens": 8}
    [found] = run_job("xla", (1, 1), [("branches", {"model": "llama", **few})], prefill_workers=1)
    assert found["same"] and found["n_preemptions"], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "dop", "n_workers", "partition", "pace"),
    [
        ("xla", (1, 1), 2, "heads", "step"),
        ("xla", (1, 2), 1, "tokens", "step"),
        ("xla", (1, 2), 2, "tokens", "own"),
        mpi((1, 1), 1, "heads", "step"),
    ],
)
def test_scored_prompts(
    transport: str, dop: tuple[int, int], n_workers: int, partition: str, pace: str
) -> None:
    """Prompts are as likely as unsplit, and are computed by prefill workers, too, beside others."""
    cluster = {"partition": partition, "prefill_workers": n_workers, "prefill_pace": pace}
    [found] = run_job(transport, dop, [("scored", {"model": "llama"})], **cluster)
    assert found["same"] and found["n"] == 39, found
    of_all = [name for name in found["programs"] if "logits of all" in name]
    how = "logits of all, on rank" if pace == "step" else "logits of all, computed before, on rank"
    assert of_all and all(how in name for name in of_all), of_all
    assert any(name.startswith("decode") for name in of_all) == (pace == "step"), of_all


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["step", "own"])
@pytest.mark.parametrize(
    ("dop", "n_workers", "partition"), [((1, 1), 1, "heads"), ((1, 1), 2, "heads"), ((1, 2), 1, "tokens")]
)
def test_after_warming_up_nothing_is_compiled(
    dop: tuple[int, int], n_workers: int, partition: str, pace: str
) -> None:
    """But where tokens fall to workers by chance."""
    shared = [*range(5, 22)]
    prompts = [shared, [7, 8], [*range(3, 41)], [*range(9, 31)], [*shared, 33, 34]]
    scenario = "warmed", {"model": "llama", "max_model_len": 48, "chunk": 24, "prompts": prompts}
    how = {"prefill_workers": n_workers, "prefill_pace": pace, "local_prefill_tokens": 2}
    [found] = run_job("xla", dop, [scenario], partition=partition, **how)
    assert any(name.startswith("chunk") and "rank" not in name for name in found["programs"]), found
    assert found["same"] and found["n_done"] == found["more_of_sampler"] == 0, found
    assert partition == "tokens" or not found["more"], found
    assert any(name.startswith("decode") and "on rank" in name for name in found["programs"]), found


@pytest.mark.slow
def test_step_bench() -> None:
    [bench] = run_job("xla", (1, 1), [("step_bench", {"model": "llama", "prefill": 4})], prefill_workers=1)
    assert bench["difference"] < 1e-5, bench
    ways = ["split, q first", "split, q with k, v", "split, 2 staggered"]
    for way in ways:
        n, ratio, per_s = bench["ways"][f"{way}, 4 on a prefill worker"]
        assert n == 4 and ratio > 0 and per_s > 0
        assert all(x > 0 for x in bench["own_pace"][f"{way}, 4 on a prefill worker at its own pace"])
    assert {f"{way}, with 4 alongside" for way in ways[:2]} < bench["ways"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "partition"), [("xla", "heads"), mpi("requests")])
def test_logits_and_what_is_exchanged(transport: str, partition: str) -> None:
    """A long prompt in chunks beside decode steps: logits to rounding, nothing stored where it should not be,
    and one exchange more for rank 0 than in a decode step by itself."""
    scenario = "with_chunk", {"model": "llama", "partition": partition}
    [found] = run_job(transport, (1, 2), [scenario], partition=partition, prefill_workers=1)
    assert found["finite"] and found["difference"] < 1e-5 and found["tokens"][0] == found["tokens"][1], found
    assert found.get("stray", 0.0) == 0.0, found
    counts = found["n_exchanges"]
    beside = {n for name, n in counts.items() if "on rank 3" in name}
    alone = {n for name, n in counts.items() if "on rank 3" not in name}
    assert len(alone) == 1 and beside == {alone.pop() + 1}, counts


# --- at their own pace ---

OWN_PACE: list[Any] = [
    ("xla", (1, 1), 1, "heads", "llama", {}),
    ("xla", (1, 2), 2, "requests", "llama", {}),
]
SLOW_OWN_PACE: list[tuple[str, tuple[int, int], int, str, str, dict[str, Any]]] = [
    ("xla", (1, 2), 2, "heads", "qwen3", {"mini_batches": 2}),
    ("xla", (1, 3), 2, "tokens", "mistral-window", {}),
    ("xla", (1, 1), 1, "heads", "llama", {"n_batches": 2}),
    ("xla", (2, 1), 2, "heads", "llama", {"n_batches": 3}),
    ("xla", (2, 1), 1, "heads", "llama", {"tensor_parallel": 2}),
    ("xla", (2, 2), 1, "tokens", "llama", {"pipeline_parallel": 2, "n_batches": 4}),
    ("xla", (1, 1), 1, "tokens", "llama", {"local_attention": "auto"}),
    ("mpi", (1, 1), 2, "heads", "llama", {}),
    ("mpi", (1, 2), 1, "tokens", "mistral-window", {}),
]


@pytest.mark.parametrize(
    ("transport", "dop", "n_workers", "partition", "model", "how"), [*OWN_PACE, *map(marked, SLOW_OWN_PACE)]
)
def test_the_unsplit_models_tokens_at_own_pace(
    transport: str, dop: tuple[int, int], n_workers: int, partition: str, model: str, how: dict[str, Any]
) -> None:
    """Prompts in chunks, some after cached prefixes: one shorter than a chunk is computed again, the others
    go with the steps. Among the slow tests also with requests that give way while their prompts are
    computed."""
    usual = {"model": model, "n_tokens": 16, "fourth": 20, "max_num_batched_tokens": 8, "max_model_len": 48}
    scenarios = [("greedy", usual)]
    if (transport, dop) in (("xla", (1, 2)), ("xla", (1, 3))) and (partition, model) != ("requests", "llama"):
        scenarios.append(("greedy", usual | {"kv_slots": 60, "host_kv_slots": 16, "kv_headroom": 0.0}))
    cluster = {"partition": partition, "prefill_workers": n_workers, "prefill_chunk": 18}
    cluster |= {"local_prefill_tokens": 0, **how}
    found, *few_slots = run_job(transport, dop, scenarios, **cluster)
    assert found["same"] and found["n_tokens"] == [1, 16, 16, 16, 16], found
    assert found["n_prefix_hit_tokens"] >= 18 + 17 and found["n_prompt_tokens_own_pace"] >= 19 + 2 + 20, found
    for more in few_slots:
        assert more["same"] and more["n_preemptions"], more
    prompts = [name for name in found["programs"] if "prefill" in name or "chunk" in name]
    for rank in range(sum(dop), sum(dop) + n_workers):
        assert any(f"computed before, on rank {rank}" in name for name in prompts), prompts
    assert not any(name.startswith("decode") and "computed before" in name for name in prompts), prompts
    assert found["ahead"]


@pytest.mark.parametrize(
    ("partition", "pace", "how"),
    [
        ("requests", "own", {"prefill_chunk": 16}),
        pytest.param("tokens", "own", {"prefill_chunk": 64, "token_block": 64}, marks=pytest.mark.slow),
        ("requests", "step", {}),
    ],
)
def test_a_share_on_model_ranks_and_workers_that_are_full(
    partition: str, pace: str, how: dict[str, Any]
) -> None:
    """A long prompt that has not room on one attention worker goes on to the next, and not to model ranks,
    whose memory prefill workers do not reach; where all attention workers are full model ranks compute it."""
    usual = {"model": "llama", "n_tokens": 16, "fourth": 64, "max_num_batched_tokens": 16}
    tight = {"kv_headroom": 0.0, "host_kv_slots": 32}
    scenarios = [
        ("greedy", usual | {"kv_slots": 100}),
        ("greedy", usual | tight | {"kv_slots": 100}),
        ("greedy", usual | tight | {"kv_slots": 120, "most_each": 15}),
    ]
    cluster = {
        "partition": partition,
        "prefill_workers": 2,
        "prefill_pace": pace,
        "local_attention": 0.5,
        **how,
    }
    for found in run_job("xla", (1, 2), scenarios, **cluster):
        assert found["same"], found
        assert pace == "step" or found["n_prompt_tokens_own_pace"], found


def test_decode_steps_go_on_while_a_worker_computes(tmp_path: Path) -> None:
    """The worker is held until three decode steps have ended since its chunk was begun: had they waited for
    it, none would. A request that is aborted meanwhile does no harm."""
    scenario = "held_worker", {"model": "llama", "folder": str(tmp_path)}
    how: dict[str, Any] = {"prefill_workers": 1, "prefill_chunk": 8, "hold_prompts": tmp_path}
    [found] = run_job("xla", (1, 1), [scenario], **how)
    assert found["same"], found
    _, *of_long = found["n_decodes_meanwhile"]  # the first prompt has nobody beside it
    assert len(of_long) == 3 and min(of_long) >= 3, found


# --- what little is missing of a prompt ---

LOCAL: list[Any] = [
    ("xla", (1, 1), 1, "heads", "llama", {}),
    ("xla", (1, 2), 2, "requests", "llama", {"prefill_pace": "step"}),
]
SLOW_LOCAL: list[tuple[str, tuple[int, int], int, str, str, dict[str, Any]]] = [
    ("xla", (1, 2), 1, "tokens", "mistral-window", {}),
    ("xla", (2, 1), 2, "heads", "llama", {"n_batches": 3}),
    ("xla", (2, 1), 1, "heads", "llama", {"tensor_parallel": 2}),
    ("xla", (2, 2), 1, "tokens", "llama", {"pipeline_parallel": 2, "n_batches": 4}),
    ("xla", (1, 1), 1, "tokens", "llama", {"local_attention": 0.5}),
    ("mpi", (1, 2), 1, "requests", "llama", {}),
]


@pytest.mark.parametrize(
    ("transport", "dop", "n_workers", "partition", "model", "how"), [*LOCAL, *map(marked, SLOW_LOCAL)]
)
def test_model_workers_compute_what_little_is_missing(
    transport: str, dop: tuple[int, int], n_workers: int, partition: str, model: str, how: dict[str, Any]
) -> None:
    usual = {"model": model, "n_tokens": 16, "fourth": 20, "max_num_batched_tokens": 8, "max_model_len": 48}
    cluster = {"partition": partition, "prefill_workers": n_workers, "prefill_chunk": 18, **how}
    [found] = run_job(transport, dop, [("greedy", usual)], **cluster)
    assert found["same"] and found["n_tokens"] == [1, 16, 16, 16, 16], found
    assert found["n_prefix_hit_tokens"] >= 18 + 17, found
    names = found["programs"]
    assert any(name.startswith("chunk") and "rank" not in name for name in names), names
    assert any("on rank" in name for name in names), names


def test_several_of_them_go_in_one_call_of_model_workers() -> None:
    cluster = {"partition": "heads", "prefill_workers": 1}
    [found] = run_job("xla", (1, 1), [("short_prompts", {"model": "llama"})], **cluster)
    several = [name for name in found["programs"] if "batch 4" in name]
    assert found["same"] and several and not any("on rank" in name for name in several), found


def own_pace(n: int = 100, **options: Any) -> Scheduler:
    return make(n, max_num_seqs=8, own_pace_tokens=4, **{"n_prefill_workers": 1, **options})


def begun(plan: ScheduledStep) -> list[tuple[str, int, tuple[int, int], int]]:
    return [(c.request.request_id, c.request.worker, c.span, c.first) for c in plan.begun]


def test_a_chunk_is_taken_in_once_it_is_computed_and_the_next_begins_then() -> None:
    scheduler = own_pace()
    scheduler.add(request("first", 6, 20))
    scheduler.add(request("second", 3, 20))
    assert begun(run_step_of_chunks(scheduler)) == [("first", 0, (0, 4), 0)]
    plan = run_step_of_chunks(scheduler)
    assert not plan.requests and not plan.begun and scheduler.own_pace.is_awaited
    scheduler.own_pace.computed(0)
    plan = run_step_of_chunks(scheduler)
    assert [c.span for c in plan.computed] == [(0, 4)] and begun(plan) == [("first", 0, (4, 6), 4)]
    scheduler.own_pace.computed(0)
    plan = run_step_of_chunks(scheduler)  # its last: whoever waits begins at once
    assert [c.span for c in plan.computed] == [(4, 6)] and begun(plan) == [("second", 0, (0, 3), 0)]
    plan = run_step_of_chunks(scheduler)
    assert [r.request_id for r in plan.decodes] == ["first"] and not plan.computed


def test_what_is_computed_for_one_who_has_gone_is_dropped_and_the_worker_is_free_only_then() -> None:
    scheduler = own_pace()
    gone, next_one = request("gone", 6, 20), request("next", 3, 20)
    scheduler.add(gone)
    run_step_of_chunks(scheduler)
    scheduler.finish(gone)
    scheduler.add(next_one)
    assert not begun(run_step_of_chunks(scheduler)) and not scheduler.running
    scheduler.own_pace.computed(0)
    plan = run_step_of_chunks(scheduler)
    assert not plan.computed and begun(plan) == [("next", 0, (0, 3), 0)]
    scheduler.check_integrity()


@pytest.mark.parametrize("chat_ends", [False, True])
def test_an_interrupted_prompt_goes_on_with_the_steps(chat_ends: bool) -> None:
    """A chat takes the worker, whose memory holds one prompt: the chat's, even if that is aborted."""
    scheduler = own_pace(policy=load_policy("chat-first"), prefill_chunk=2)
    work, chat = request("work", 11, 4), request("chat", 2, 4)
    work.priority = 1
    scheduler.add(work)
    run_step_of_chunks(scheduler)
    scheduler.own_pace.computed(0)
    run_step_of_chunks(scheduler)
    scheduler.add(chat)
    scheduler.own_pace.computed(0)
    assert begun(run_step_of_chunks(scheduler)) == [("chat", 0, (0, 2), 0)]
    if chat_ends:
        scheduler.finish(chat)
    scheduler.own_pace.computed(0)
    plan = run_step_of_chunks(scheduler)
    assert not plan.begun and drawn(plan) == [("work", 0, (8, 10))]


def test_a_beginning_of_less_than_a_chunk_is_computed_again() -> None:
    """Where it is cached, only who decodes has it."""
    scheduler = own_pace(caching=True, prefill_chunk=2)
    for name, n, then in (("before", 2, [(0, 2)]), ("short", 8, [(2, 4)]), ("long", 11, None)):
        scheduler.add(request(name, n, 1))
        plan = run_step_of_chunks(scheduler)
        assert [(c.span, c.first) for c in plan.begun] == [(span, 0) for span in then or ()]
        assert drawn(plan) == ([("long", 0, (8, 10))] if then is None else [])
        while scheduler.own_pace.is_awaited:
            scheduler.own_pace.computed(0)
            plan = run_step_of_chunks(scheduler)
        for r in plan.requests:
            scheduler.finish(r)


@pytest.mark.parametrize("name", ["fifo", "chat-first"])
@settings(max_examples=100, deadline=None)
@given(
    workload=workloads(),
    aborted=st.sets(st.integers(0, 9)),
    random=st.randoms(use_true_random=False),
    n_workers=st.integers(1, 3),
    n_tokens=st.integers(1, 9),
    n_local=st.sampled_from([0, 1, 4]),
)
def test_any_workload_finishes_at_own_pace(
    name: str, workload, aborted, random, n_workers: int, n_tokens: int, n_local: int
) -> None:
    """Workers take as long as they like. Each is asked for one thing at a time, and has the tokens before
    it."""
    at_work: dict[int, Any] = {}
    memory: dict[int, list[int]] = {}

    def check(scheduler: Scheduler, plan: ScheduledStep, before: list[Request]) -> None:
        check_order(scheduler, plan, before)
        for chunk in plan.computed:
            assert at_work.pop(chunk.request.worker) is chunk and chunk.request not in plan.preempted
        for worker in [w for w, chunk in at_work.items() if scheduler.own_pace._at_work.get(w) is not chunk]:
            dropped = at_work.pop(worker)
            assert dropped.request.chunk is not dropped, "nobody took it in"
        for r in plan.prefills:
            assert r.worker not in at_work, "it would wait for what the worker computes"
        for chunk in plan.begun:
            (start, stop), tokens = chunk.span, chunk.request.all_token_ids()
            assert chunk.request.worker not in at_work and chunk.first <= start < stop
            assert stop - chunk.first <= n_tokens
            held = memory.setdefault(chunk.request.worker, [])
            assert held[: chunk.first] == tokens[: chunk.first]
            held[chunk.first :] = tokens[chunk.first : stop]
            at_work[chunk.request.worker] = chunk
        for worker in at_work:
            if random.random() < 0.5:
                scheduler.own_pace.computed(worker)

    how: dict[str, Any] = {"n_prefill_workers": n_workers, "own_pace_tokens": n_tokens}
    how["local_prefill_tokens"] = n_local
    play(workload, aborted, random, check, policy=load_policy(name), **how)


# --- who computes which prompt ---


@pytest.mark.parametrize("name", ["fifo", "chat-first"])
@settings(max_examples=150, deadline=None)
@given(
    workload=workloads(),
    aborted=st.sets(st.integers(0, 9)),
    random=st.randoms(use_true_random=False),
    n_workers=st.integers(1, 3),
    n_local=st.sampled_from([0, 1, 4]),
)
def test_any_workload_finishes(name: str, workload, aborted, random, n_workers: int, n_local: int) -> None:
    """Each worker has one prompt a step and brings it to an end, but for whom a preemptive policy puts
    first."""
    workers: dict[Request, int] = {}

    def check(scheduler: Scheduler, plan: ScheduledStep, before: list[Request]) -> None:
        check_order(scheduler, plan, before)
        units = {(r.worker, r.request_id) for r in plan.prefills if r.worker is not None}
        for r, (start, stop) in zip(plan.prefills, plan.spans, strict=True):
            assert r.worker is not None or (0 < start and stop - start <= n_local and stop == r.n_tokens)
        assert len({worker for worker, _ in units}) == len(units)
        assert all(0 <= worker < n_workers for worker, _ in units)
        for r in [r for r in workers if r.n_computed is None]:
            del workers[r]
        begun = [r for r in scheduler.running if r.n_computed is not None]
        for r in begun:
            assert workers.setdefault(r, r.worker) == r.worker
        assert {r.worker for r in begun} <= {r.worker for r in plan.prefills}, (
            "none rests while it has a prompt"
        )
        if not scheduler.policy.preemptive:
            assert len({r.worker for r in begun}) == len(begun)

    how = {"n_prefill_workers": n_workers, "local_prefill_tokens": n_local}
    play(workload, aborted, random, check, policy=load_policy(name), **how)


def test_what_little_a_prompt_lacks_waits_for_no_worker() -> None:
    scheduler = after_a_cached_prompt(prefill_chunk=3)
    for name, n in (("long", 9), ("little", 6), ("less", 5), ("more", 7), ("last", 5)):
        scheduler.add(request(name, n, 2))
    plan = run_step_of_chunks(scheduler)  # what "more" lacks is too much, and the worker has another prompt
    assert drawn(plan) == [("long", 0, (4, 7)), ("little", None, (4, 6)), ("less", None, (4, 5))]
    plan = run_step_of_chunks(scheduler)
    assert [r.request_id for r in plan.decodes] == ["little", "less"] and drawn(plan) == [("long", 0, (7, 9))]


def after_a_cached_prompt(**options: Any) -> Scheduler:
    """Four tokens of it."""
    scheduler = own_pace(caching=True, local_prefill_tokens=2, **options)
    scheduler.add(request("before", 4, 1))
    run_step_of_chunks(scheduler)
    scheduler.own_pace.computed(0)
    [ended] = run_step_of_chunks(scheduler).requests
    scheduler.finish(ended)
    return scheduler


def test_what_prompts_lack_is_no_more_in_a_step_than_prompts_of_a_step_may_be() -> None:
    scheduler = after_a_cached_prompt(max_prefill_tokens=3)
    for name in "abc":
        scheduler.add(request(name, 6, 2))
    assert [name for name, *_ in drawn(run_step_of_chunks(scheduler))] == ["a", "b"]
    assert [name for name, *_ in drawn(run_step_of_chunks(scheduler))] == ["c"]


def test_what_a_prompt_lacks_is_looked_for_again_after_it_ran() -> None:
    """What was long when it waited is stored, but for its last token, when it waits again."""
    scheduler = after_a_cached_prompt()
    first, work = Request("first", [90, 91, 92], 1), request("work", 9, 8)
    scheduler.add(first)
    run_step_of_chunks(scheduler)
    scheduler.add(work)
    run_step_of_chunks(scheduler)  # the worker has the other's
    assert work in scheduler.waiting
    scheduler.own_pace.computed(0)
    for ended in run_step_of_chunks(scheduler).requests:
        if ended is first:
            scheduler.finish(ended)
    while work.n_computed is not None or not work.output_token_ids:
        if scheduler.own_pace.is_awaited:
            scheduler.own_pace.computed(0)
        run_step_of_chunks(scheduler)
    scheduler._wait_again(work, keep=True)
    scheduler._queue([work])
    scheduler.own_pace._at_work[0] = OwnChunk(first, (0, 1), 0)  # it is busy
    assert drawn(run_step_of_chunks(scheduler)) == [("work", None, (9, 10))]


def drawn(plan: ScheduledStep) -> list[tuple[str, int, tuple[int, int]]]:
    return [(r.request_id, r.worker, span) for r, span in zip(plan.prefills, plan.spans, strict=True)]


def test_whoever_is_free_takes_the_next_prompt_and_the_others_wait_without_slots() -> None:
    scheduler = make(100, max_num_seqs=8, prefill_chunk=4, n_prefill_workers=2)
    for name, n in (("long", 10), ("short", 3), ("next", 6), ("last", 2)):
        scheduler.add(request(name, n, 20))
    plans = [drawn(run_step_of_chunks(scheduler)) for _ in range(4)]
    assert plans == [
        [("long", 0, (0, 4)), ("short", 1, (0, 3))],
        [("next", 1, (0, 4)), ("long", 0, (4, 8))],
        [("long", 0, (8, 10)), ("next", 1, (4, 6))],
        [("last", 0, (0, 2))],
    ]


def test_a_prompt_goes_on_while_a_younger_request_gives_way() -> None:
    """Of two workers one is done with a younger request's short prompt, for whose next token there is no
    slot."""
    scheduler = make(10, max_num_seqs=8, prefill_chunk=2, n_prefill_workers=2)
    older, younger = request("older", 7, 1), request("younger", 1, 4)
    scheduler.add(older)
    scheduler.add(younger)
    assert drawn(run_step_of_chunks(scheduler)) == [("older", 0, (0, 2)), ("younger", 1, (0, 1))]
    assert drawn(run_step_of_chunks(scheduler)) == [("older", 0, (2, 4))]
    scheduler.slots.allocate(1)  # somebody else's
    plan = run_step_of_chunks(scheduler)
    assert plan.preempted == (younger,) and drawn(plan) == [("older", 0, (4, 6))]


def test_of_several_the_one_with_the_fewest_prompt_tokens_left() -> None:
    """Chats begin before batch work that has begun, on the worker that has least of it left."""
    scheduler = make(
        200, max_num_seqs=8, prefill_chunk=4, policy=load_policy("chat-first"), n_prefill_workers=3
    )
    for name, n in (("a", 40), ("b", 9), ("c", 20)):
        work = request(name, n, 4)
        work.priority = 1
        scheduler.add(work)
    run_step_of_chunks(scheduler)
    for name in ("first", "second"):
        scheduler.add(request(name, 2, 4))
    plan = drawn(run_step_of_chunks(scheduler))
    assert plan == [("first", 1, (0, 2)), ("second", 2, (0, 2)), ("a", 0, (4, 8))]
    assert drawn(run_step_of_chunks(scheduler))[1:] == [("b", 1, (4, 8)), ("c", 2, (4, 8))]


def run_step_of_chunks(scheduler: Scheduler) -> ScheduledStep:
    """One step: a token for everyone but those whose prompts go on."""
    plan = scheduler.schedule()
    for r in plan.requests:
        if r.n_computed is None:
            r.output_token_ids.append(7)
    return plan


def test_prompts_without_chunks() -> None:
    scheduler = make(60, max_num_seqs=4, n_prefill_workers=1)
    for i in range(3):
        scheduler.add(request(str(i), 9, 3))
    assert [[r.request_id for r in run_step(scheduler).prefills] for _ in range(4)] == [
        ["0"],
        ["1"],
        ["2"],
        [],
    ]


def test_a_prompt_that_is_scored_comes_in_chunks() -> None:
    scheduler = make(SCORED_CHUNK + 20, max_num_seqs=4, n_prefill_workers=1)
    scored = request("scored", SCORED_CHUNK + 3, 3)
    scored.scores_prompt = True
    scheduler.add(scored)
    assert [drawn(run_step_of_chunks(scheduler)) for _ in range(2)] == [
        [("scored", 0, (0, SCORED_CHUNK))],
        [("scored", 0, (SCORED_CHUNK, SCORED_CHUNK + 3))],
    ]


# --- what is compiled, and what is padded ---


def test_steps_that_are_compiled_before_requests_come() -> None:
    buckets = Buckets(batch=(1, 2), prompt=(8,), context=(16,))
    sizes = {"max_model_len": 16, "max_chunk": 8}
    alone = shapes(buckets, **sizes)
    n_decodes = sum(shape.kind == "decode" for shape in alone)
    n_prompts = len(alone) - n_decodes
    for n_workers, n_sets in ((1, 1), (2, 3)):
        found = shapes(buckets, **sizes, n_prefill_workers=n_workers)
        assert len(set(found)) == len(found) == n_decodes + (n_decodes + 1) * n_prompts * n_sets
        assert str(found[-1]).endswith(f"prefill workers {', '.join(map(str, range(n_workers)))}")


def test_steps_for_what_little_is_missing_are_compiled_before_requests_come() -> None:
    """On model ranks: the largest, one for the least, and one for several prompts where such go together."""
    buckets = Buckets(batch=(1, 8), prompt=(4, 8, 32), context=(16, 64))
    sizes: dict[str, Any] = {"max_model_len": 64, "max_chunk": 32, "n_prefill_workers": 2}
    theirs = shapes(buckets, **sizes)
    for together, several in ((0, []), (32, [StepSizes("chunk", 4, 8, 64)])):
        found = shapes(buckets, **sizes, local_prefill_tokens=7, prompt_batch_tokens=together)
        here = [shape for shape in found if shape not in theirs]
        assert all(s.kind == "chunk" and s.n_tokens <= 8 and not s.workers for s in here), here
        first = [shape for shape in first_of(found) if shape not in first_of(theirs)]
        assert {*first} == {StepSizes("chunk", 1, 8, 64), StepSizes("chunk", 1, 4, 64), *several}
    assert first_of(theirs) == [shape for shape in first_of(found) if shape not in first]


def test_prompts_of_one_step_are_padded_to_the_largest() -> None:
    n, buckets = 40, Buckets(batch=(1,), prompt=(2, 8), context=(4, 16))
    first = PrefillBatch.build([[5, 6]], [[1, 2]], buckets, n)
    chunk = PrefillBatch.build([[7, 8, 9]], [[20, 21, 22]], buckets, n, earlier=[list(range(10, 15))])
    got, same = levelled([first, chunk], n)
    assert got.kind == same.kind == "chunk"
    for x, y in zip(same, chunk, strict=True):
        assert np.array_equal(x, y)
    assert got.tokens.tolist() == [[5, 6, *[0] * 6]] and got.positions.tolist() == [[0, 1, *[1] * 6]]
    assert got.slots.tolist() == [[1, 2, *[n] * 6]] and got.slot_table.shape == (1, 16)
    assert got.lengths.tolist() == [0] and got.logits_at.tolist() == [1]


def test_a_steps_parts() -> None:
    prompts = StepShape("prefill", 1, 16, 0, rank=3), StepShape("chunk", 1, 16, 32, q_first=False, rank=4)
    step = StepShape("decode", 8, 1, 256, prefills=prompts)
    assert str(step) == (
        "decode, batch 8, context 256, with prefill, batch 1, tokens 16, on rank 3, "
        "with chunk, batch 1, tokens 16, context 32, q with k and v, on rank 4"
    )
    assert step.part_of(0) == StepShape("decode", 8, 1, 256)
    assert [step.part_of(rank) for rank in (3, 4, 5)] == [*prompts, None]
