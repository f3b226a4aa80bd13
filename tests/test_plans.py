"""Every layout that a cluster file can name × every kind of step: there is a plan that holds, or a reason.
And the check itself: what it takes for wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_check import check_plan

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.ranks.cluster_layout import layout_of, partition_of
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import Plan, plan_of, why_not
from jaxlamina.steps.schedules import balanced
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.table import combinations
from jaxlamina.steps.tasks import (
    FRONT,
    POOL,
    Append,
    Attend,
    HandOver,
    Logits,
    Payload,
    Receive,
    RunSlice,
    Send,
    Swap,
    Task,
)

N_LAYERS = 2
FACTS = {
    "dop": [(1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)],
    "partition": ["auto", "heads", "requests", "tokens"],
    "n_batches": [None, 1, 2, 3, 4, 6, "auto"],
    "mini_batches": [1, 3],
    "shared": ["no", "tensor_parallel", "pipeline_parallel"],
    "prefill_workers": [0, 2],
    "pipelining": ["auto", "rotational", "fixed"],
    "local_attention": [0, 0.5, 1],
}
# A share of the KV on model ranks makes other layouts. Facts that only others decide on are these then.
WITH_A_SHARE: dict[str, Any] = {"n_batches": None, "mini_batches": 1, "pipelining": "auto"}


def clusters() -> Iterator[Cluster]:
    for values in product(*FACTS.values()):
        given = dict(zip(FACTS, values, strict=True))
        if given["local_attention"] and any(given[name] != usual for name, usual in WITH_A_SHARE.items()):
            continue
        shared = given.pop("shared")
        if shared != "no":
            given[shared] = given["dop"][0]  # type: ignore[index]
        try:
            yield Cluster(**given, model_platform="cpu", attention_platform="cpu")  # type: ignore[arg-type]
        except UserError:
            continue


@cache
def layouts() -> dict[tuple[Layout, tuple[int, ...]], Cluster]:
    """With the ranks of prefill workers."""
    found = {}
    for cluster in clusters():
        stages = ()
        if cluster.pipeline_parallel > 1:
            stages = balanced([1] * (N_LAYERS + 1), cluster.n_model)
        try:
            partition = partition_of(cluster, (12,))
        except UserError:  # "auto" has become one that does not go with the rest
            continue
        layout = layout_of(cluster, partition, tuple(stages))
        found.setdefault((layout, tuple(cluster.pools.prefill_ranks)), cluster)
    return found


def steps(layout: Layout, prefill_ranks: tuple[int, ...]) -> Iterator[StepShape]:
    """Of every kind."""
    for q_first in (False, True):
        rows = StepShape("decode", 12, 1, 16, q_first=q_first)
        chunk = StepShape("chunk", 1, 8, 16, q_first=q_first)
        whole = StepShape("prefill", 1, 8, 0)
        if layout.by_heads:
            yield from steps_of(rows, chunk, whole, (chunk, whole), prefill_ranks)
            continue
        # Where model ranks keep a share, attention workers may be asked nothing, and may get nothing.
        some = (True, False) if layout.attends_locally else (True,)
        served = tuple(with_part(prompt, True, True) for prompt in (chunk, whole))
        for asks, stores in product(some, some):
            own = (with_part(x, asks, stores) for x in (rows, chunk, whole))
            yield from steps_of(*own, served, prefill_ranks)
            yield msgspec.structs.replace(with_part(rows, asks, stores), chunk=served[0])


def with_part(shape: StepShape, asks: bool, stores: bool) -> StepShape:
    """With what attention workers have to do with it."""
    return msgspec.structs.replace(shape, rows=shape.batch * asks, new=shape.batch * shape.tokens * stores)


def steps_of(
    rows: StepShape,
    chunk: StepShape,
    whole: StepShape,
    of_prefill_workers: tuple[StepShape, StepShape],
    prefill_ranks: tuple[int, ...],
) -> Iterator[StepShape]:
    """Of these rows and prompts; what prefill workers compute goes to attention workers."""
    yield from (rows, chunk, whole, msgspec.structs.replace(whole, of_all=True))
    alongside = [msgspec.structs.replace(rows, chunk=prompt) for prompt in (chunk, whole)]
    staggered = [msgspec.structs.replace(rows, n_batches=n) for n in (2, 3, 4, 6)]
    parts = msgspec.structs.replace(rows, mini_batches=3, q_first=False)
    yield from (*alongside, *staggered, parts, msgspec.structs.replace(parts, n_batches=3))
    yield from (
        msgspec.structs.replace(staggered[0], chunk=chunk),
        msgspec.structs.replace(parts, chunk=chunk),
    )
    if prefill_ranks:
        prompts = (*of_prefill_workers, of_prefill_workers[0])[: len(prefill_ranks)]
        beside = tuple(
            msgspec.structs.replace(prompt, rank=rank)
            for prompt, rank in zip(prompts, prefill_ranks, strict=True)
        )
        for step in (rows, *staggered, parts, *alongside):
            yield msgspec.structs.replace(step, prefills=beside)
        yield msgspec.structs.replace(beside[0], prefills=beside[1:])
        ready = msgspec.structs.replace(of_prefill_workers[1], rank=prefill_ranks[0], ready=True)
        yield from (ready, msgspec.structs.replace(rows, prefills=(ready,)))


def test_every_step_over_every_layout_has_a_plan_that_holds_or_a_reason() -> None:
    n_plans = n_reasons = 0
    messages: set[tuple[bool, str]] = set()
    for layout, prefill_ranks in layouts():
        for step in steps(layout, prefill_ranks):
            if why_not(layout, step) is not None:
                with pytest.raises(UserError):
                    plan_of(layout, step, N_LAYERS)
                n_reasons += 1
            else:
                plan = plan_of(layout, step, N_LAYERS)
                check_plan(plan, layout)
                n_plans += 1
                for batch in plan.batches:
                    messages.add((batch.local, batch.message if batch.asks or batch.stores else "none"))
    assert len(layouts()) > 150 and n_plans > 5000 and n_reasons > 100
    assert messages == {*product([True], ["q", "kv", "qkv", "none"]), (False, "kv"), (False, "qkv")}


def test_a_model_rank_does_the_same_whatever_prefill_workers_do_beside_it() -> None:
    for layout, prefill_ranks in layouts():
        for step in steps(layout, prefill_ranks):
            if step.prefills and why_not(layout, step) is None:
                whole = plan_of(layout, step, N_LAYERS)
                alone = [plan_of(layout, part, N_LAYERS) for part in step.parts]
                tasks = [(rank, of_rank) for plan in alone for rank, of_rank in plan.model.items()]
                assert len(dict(tasks)) == len(tasks) == len(whole.model)
                for rank, of_rank in tasks:
                    assert [*map(without_batch, whole.model[rank])] == [*map(without_batch, of_rank)]


def without_batch(task: Task) -> str:
    """A batch's number counts those before it in the step."""
    return re.sub(r"batch(es)?=\(?\d+", "batch", repr(task))


ONE = Layout((1,), "heads")
ROTATION = Layout((2,), "heads", 2, "rotational")
STAGES = Layout((2, 3), "tokens", 1, "stages", (0, 1, 1))
ALL_LOCAL = Layout((1,), "heads", local_share=1)
HEADS_SHARED = Layout((1,), "heads", local_share=0.5)
TOKENS_SHARED = Layout((1, 2), "tokens", local_share=0.5)
STAGES_SHARED = replace(STAGES, local_share=0.5)
ROWS = StepShape("decode", 12, 1, 16, 12, 12)
CASES = [
    (ONE, ROWS),
    (ONE, msgspec.structs.replace(ROWS, chunk=StepShape("chunk", 1, 8, 16))),
    (ROTATION, msgspec.structs.replace(ROWS, n_batches=3, q_first=False)),
    (STAGES, msgspec.structs.replace(ROWS, n_batches=4, q_first=False)),
    (STAGES, ROWS),
    (ONE, msgspec.structs.replace(ROWS, prefills=(StepShape("chunk", 1, 8, 16, rank=2),))),
]
CASES_WITH_A_SHARE = [
    (ALL_LOCAL, ROWS),
    (HEADS_SHARED, ROWS),
    (HEADS_SHARED, msgspec.structs.replace(ROWS, n_batches=2)),
    (TOKENS_SHARED, msgspec.structs.replace(ROWS, new=0)),
    (TOKENS_SHARED, msgspec.structs.replace(ROWS, rows=0, chunk=StepShape("chunk", 1, 8, 16, 1, 8))),
    (STAGES_SHARED, msgspec.structs.replace(ROWS, n_batches=4)),
    (STAGES_SHARED, ROWS),
]


def test_q_first_is_an_order() -> None:
    plan = plan_of(ONE, ROWS, 1)
    q, kv, out = (Payload(what, 0, 0) for what in ("q", "kv", "out"))  # type: ignore[arg-type]
    assert plan.model[FRONT][:5] == (
        RunSlice(0, 0, "q"), Send(q, POOL), RunSlice(0, 0, "kv"), Send(kv, POOL), Receive(out, POOL),
    )  # fmt: skip
    assert plan.pool == (Receive(q, 0), Receive(kv, 0), Attend(0, 0), Append(0, 0), Send(out, 0))
    together = plan_of(ONE, msgspec.structs.replace(ROWS, q_first=False), 1)
    assert together.model[FRONT][:2] == (RunSlice(0, 0), Send(Payload("qkv", 0, 0), POOL))


def test_with_all_kv_on_the_model_rank_there_is_no_exchange() -> None:
    plan = plan_of(ALL_LOCAL, ROWS, N_LAYERS)
    assert plan.model == {
        FRONT: (
            RunSlice(0, 0), Attend(0, 0), Append(0, 0),
            RunSlice(0, 1), Attend(0, 1), Append(0, 1),
            Logits((0,)),
        )
    }  # fmt: skip
    assert plan.pool == ()


def test_a_model_rank_attends_to_its_share_while_attention_workers_attend_to_theirs() -> None:
    q, kv, qkv, out = (Payload(what, 0, 0) for what in ("q", "kv", "qkv", "out"))  # type: ignore[arg-type]
    together = plan_of(HEADS_SHARED, msgspec.structs.replace(ROWS, q_first=False), 1)
    assert together.model[FRONT][:-1] == (
        RunSlice(0, 0), Send(qkv, POOL), Attend(0, 0), Append(0, 0), Receive(out, POOL),
    )  # fmt: skip
    assert together.pool == (Receive(qkv, 0), Attend(0, 0), Append(0, 0), Send(out, 0))
    q_first = plan_of(HEADS_SHARED, ROWS, 1)
    assert q_first.model[FRONT][:-1] == (
        RunSlice(0, 0, "q"), Send(q, POOL), RunSlice(0, 0, "kv"), Send(kv, POOL),
        Attend(0, 0), Append(0, 0), Receive(out, POOL),
    )  # fmt: skip
    assert q_first.pool == plan_of(ONE, ROWS, 1).pool


@pytest.mark.parametrize("q_first", [False, True])
def test_only_q_travels_where_attention_workers_get_no_new_tokens(q_first: bool) -> None:
    step = msgspec.structs.replace(ROWS, new=0, q_first=q_first)
    plan = plan_of(TOKENS_SHARED, step, 1)
    q, out = Payload("q", 0, 0), Payload("out", 0, 0)
    runs = [RunSlice(0, 0, "q"), Send(q, POOL), RunSlice(0, 0, "kv")]
    assert plan.model[FRONT][:-1] == (
        *(runs if q_first else [RunSlice(0, 0), Send(q, POOL)]),
        Attend(0, 0), Append(0, 0), Receive(out, POOL),
    )  # fmt: skip
    assert plan.pool == (Receive(q, 0), Attend(0, 0), Send(out, 0))


@pytest.mark.parametrize("q_first", [False, True])
def test_only_k_and_v_travel_where_attention_workers_are_asked_nothing(q_first: bool) -> None:
    plan = plan_of(TOKENS_SHARED, msgspec.structs.replace(ROWS, rows=0, q_first=q_first), 1)
    kv = Payload("kv", 0, 0)
    assert plan.model[FRONT][:-1] == (RunSlice(0, 0), Send(kv, POOL), Attend(0, 0), Append(0, 0))
    assert plan.pool == (Receive(kv, 0), Append(0, 0))
    with pytest.raises(UserError, match="n_batches=2 is for batches that attention workers have KV of"):
        plan_of(TOKENS_SHARED, msgspec.structs.replace(ROWS, rows=0, n_batches=2), 1)


@pytest.mark.parametrize("layout", [HEADS_SHARED, TOKENS_SHARED, STAGES_SHARED])
@pytest.mark.parametrize("new", [12, 0])
def test_staggered_batches_are_attended_to_right_after_they_are_sent(layout: Layout, new: int) -> None:
    plan = plan_of(layout, msgspec.structs.replace(ROWS, n_batches=2, new=new, q_first=False), N_LAYERS)
    sent = set()
    for rank in plan.model:
        tasks = [task for task in plan.model[rank] if not isinstance(task, HandOver)]
        for task, *after in zip(tasks, tasks[1:], tasks[2:], strict=False):
            payload = task.payload if isinstance(task, Send) else getattr(task, "send", None)
            if payload is not None and payload.what != "logits":
                of = payload.batch, payload.layer
                assert after == [Attend(*of), Append(*of)]
                sent.add(of)
    assert sent == {*product(range(2), range(N_LAYERS))}
    moves = [task for tasks in plan.model.values() for task in tasks if isinstance(task, HandOver)]
    assert all(move.local for move in moves) and bool(moves) == bool(layout.stages)


def test_without_a_share_plans_are_as_if_there_were_none() -> None:
    # Attention workers' lists are also the same with one, where they are asked and store.
    for layout, step in CASES:
        plan = plan_of(layout, step, N_LAYERS)
        assert plan == plan_of(replace(layout, local_share=0.0), step, N_LAYERS)
        assert not any(batch.local for batch in plan.batches)
        tasks = [task for of_rank in plan.model.values() for task in of_rank]
        assert not any(isinstance(task, Append) for task in tasks)
        assert not any(task.local for task in tasks if isinstance(task, HandOver))
        if layout.n_replicas > 1:
            continue
        shared = plan_of(replace(layout, local_share=0.5), step, N_LAYERS)
        assert shared.pool == plan.pool
        for rank, of_rank in shared.model.items():
            rest = [
                replace(task, local=False) if isinstance(task, HandOver) else task
                for task in of_rank
                if not isinstance(task, Append)
                and not (isinstance(task, Attend) and not plan.batches[task.batch].has_prompts)
            ]
            assert tuple(rest) == plan.model[rank]


def test_what_prefill_workers_compute_is_taken_in_where_model_ranks_keep_the_rows() -> None:
    rows = msgspec.structs.replace(ROWS, rows=0, new=0)
    step = msgspec.structs.replace(rows, prefills=(StepShape("prefill", 1, 8, 0, 0, 8, rank=3),))
    plan = plan_of(TOKENS_SHARED, step, N_LAYERS)
    check_plan(plan, TOKENS_SHARED)
    assert plan.model[FRONT] == plan_of(TOKENS_SHARED, rows, N_LAYERS).model[FRONT]
    each = [(Receive(Payload("kv", 1, k), 3), Append(1, k)) for k in range(N_LAYERS)]
    assert plan.pool == tuple(task for tasks in each for task in tasks)
    assert not plan.batches[1].local
    # That a prefill worker asks does not make batches of the rows.
    asking = (StepShape("chunk", 1, 8, 16, 1, 8, rank=3),)
    staggered = msgspec.structs.replace(rows, n_batches=2, prefills=asking)
    assert "n_batches=2 is for batches" in (why_not(TOKENS_SHARED, staggered) or "")


def test_prefill_workers_need_attention_workers_that_keep_kv() -> None:
    with pytest.raises(
        UserError, match="local_attention=1 leaves attention workers no KV, .* a share below 1"
    ):
        Cluster(dop=(1, 1), partition="tokens", prefill_workers=1, local_attention=1)


def test_q_can_go_first_in_staggered_steps() -> None:
    plan = plan_of(ROTATION, msgspec.structs.replace(ROWS, n_batches=3), N_LAYERS)
    sent = [task.payload.what for task in plan.model[0] if isinstance(task, Send)]
    swapped = {task.send.what for task in plan.model[0] if isinstance(task, Swap)}
    assert "q" in sent and swapped == {"kv"}


def test_prompts_of_prefill_workers_are_taken_in_after_the_layers_answers() -> None:
    layout, step = CASES[-1]
    order = [(task.layer, task.batch) for task in plan_of(layout, step, 2).pool if isinstance(task, Attend)]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_stage_hands_over_what_the_next_one_needs() -> None:
    plan = plan_of(STAGES, CASES[3][1], N_LAYERS)
    moves = [task for task in plan.model[0] if isinstance(task, HandOver)]
    assert moves and {(move.source, move.target, move.carries) for move in moves} == {(0, 1, "qkv")}


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        (ROTATION, {"n_batches": 2}, "2 staggered batches do not go over 2 replicas .* take 3"),
        (ONE, {"n_batches": 2, "chunk": StepShape("chunk", 1, 8, 16)}, ("n_batches=2: take n_batches=1, or "
                                                                       "mixed_steps=False")),
        (ONE, {"mini_batches": 2, "chunk": StepShape("chunk", 1, 8, 16)}, ("take mini_batches=1, or "
                                                                          "mixed_steps=False")),
        (STAGES, {"mini_batches": 2}, "take partition='heads', or mini_batches=1"),
        (ONE, {"mini_batches": 2, "n_batches": 2}, ("mini_batches=2 and n_batches=2 are two ways .* take one "
                                                   "of them")),
        (ONE, {"kind": "prefill", "n_batches": 2}, "prompts are not staggered"),
        (ALL_LOCAL, {"n_batches": 2}, "batches that attention workers have KV of: take n_batches=1"),
        (replace(ROTATION, local_share=0.5), {}, "with 2 replicas .* is not one: take local_attention=0"),
    ],
)  # fmt: skip
def test_what_cannot_be_says_what_can(layout: Layout, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan_of(layout, msgspec.structs.replace(ROWS, **changes), N_LAYERS)


def test_the_table_in_the_docs_is_what_the_plans_say() -> None:
    assert combinations() in (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()


def broken(plan: Plan, rank: int, at: int, how: str) -> Plan:
    tasks = list(plan.pool if rank == POOL else plan.model[rank])
    at %= len(tasks)
    if how == "left out":
        del tasks[at]
    elif how == "twice":
        tasks.insert(at, tasks[at])
    else:
        tasks[at], tasks[at - 1] = tasks[at - 1], tasks[at]
    if rank == POOL:
        return replace(plan, pool=tuple(tasks))
    return replace(plan, model={**plan.model, rank: tuple(tasks)})


@given(st.sampled_from([*CASES, *CASES_WITH_A_SHARE]), st.data())
def test_a_task_left_out_or_there_twice_is_found(case: tuple[Layout, StepShape], data: st.DataObject) -> None:
    layout, step = case
    plan = plan_of(layout, step, N_LAYERS)
    rank = data.draw(st.sampled_from([*([POOL] if plan.pool else []), *plan.model]))
    at, how = data.draw(st.integers(0, 200)), data.draw(st.sampled_from(["left out", "twice"]))
    with pytest.raises(ValueError, match="plan: "):
        check_plan(broken(plan, rank, at, how), layout)


@given(st.sampled_from(CASES[:1] + CASES[2:3] + CASES_WITH_A_SHARE[1:3]), st.data())
def test_exchanges_in_another_order_than_their_other_ends_are_found(
    case: tuple[Layout, StepShape], data: st.DataObject
) -> None:
    layout, step = case
    plan = plan_of(layout, step, N_LAYERS)
    exchanges = [i for i, task in enumerate(plan.pool) if isinstance(task, Send | Receive | Swap)]
    a, b = data.draw(st.sampled_from(list(pairwise(exchanges))))
    tasks = list(plan.pool)
    tasks[a], tasks[b] = tasks[b], tasks[a]
    with pytest.raises(ValueError, match="the lists stop short"):
        check_plan(replace(plan, pool=tuple(tasks)), layout)


def test_a_slice_on_a_rank_without_its_weights_is_found() -> None:
    layout, step = CASES[4]
    plan = plan_of(layout, step, N_LAYERS)
    with pytest.raises(ValueError, match="rank 0 has no weights"):
        check_plan(broken_stage(plan), layout)


def with_model(plan: Plan, **changes: Callable[[Task], list[Task]]) -> Plan:
    """Each model rank's tasks of these types are replaced."""
    by_type = {"Attend": Attend, "Append": Append, "HandOver": HandOver}
    model = {
        rank: tuple(
            found
            for task in tasks
            for found in next(
                (make(task) for name, make in changes.items() if isinstance(task, by_type[name])), [task]
            )
        )
        for rank, tasks in plan.model.items()
    }
    return replace(plan, model=model)


@pytest.mark.parametrize("kind", ["Attend", "Append"])
@pytest.mark.parametrize("case", CASES_WITH_A_SHARE)
def test_a_share_that_is_not_attended_to_or_not_stored_is_found(
    case: tuple[Layout, StepShape], kind: str
) -> None:
    layout, step = case
    plan = plan_of(layout, step, N_LAYERS)
    check_plan(plan, layout)
    said = "attends" if kind == "Attend" else "appends"
    with pytest.raises(ValueError, match=rf"\('model', '{said}', 0, 0, 0\) is there 0 times, not 1"):
        check_plan(with_model(plan, **{kind: lambda task: []}), layout)


@pytest.mark.parametrize("step", [ROWS, msgspec.structs.replace(ROWS, n_batches=4)])
def test_a_share_on_a_rank_that_does_not_keep_it_is_found(step: StepShape) -> None:
    plan = plan_of(STAGES_SHARED, step, N_LAYERS)
    for task in (Attend(0, 1), Append(0, 1)):
        moved = replace(plan, model={**plan.model, 0: (*plan.model[0], task)})
        with pytest.raises(ValueError, match=f"rank 0 keeps no KV for {re.escape(str(task))}"):
            check_plan(moved, STAGES_SHARED)


@pytest.mark.parametrize("layout", [STAGES_SHARED, Layout((2,), "heads", 1, "stages", (0, 1, 1), 0.5)])
def test_a_context_without_the_local_answer_is_found(layout: Layout) -> None:
    plan = plan_of(layout, msgspec.structs.replace(ROWS, n_batches=4), N_LAYERS)
    check_plan(plan, layout)
    without = with_model(plan, HandOver=lambda task: [replace(task, local=False)])  # type: ignore[type-var]
    with pytest.raises(ValueError, match="the lists stop short"):
        check_plan(without, layout)
    # And one that is to have an answer that nobody has.
    plain = replace(layout, local_share=0.0)
    plan = plan_of(plain, msgspec.structs.replace(ROWS, n_batches=4), N_LAYERS)
    with pytest.raises(ValueError, match="the lists stop short"):
        check_plan(with_model(plan, HandOver=lambda task: [replace(task, local=True)]), plain)  # type: ignore[type-var]


@pytest.mark.parametrize("case", CASES_WITH_A_SHARE)
def test_what_is_stored_before_it_was_read_is_found(case: tuple[Layout, StepShape]) -> None:
    layout, step = case
    plan = plan_of(layout, step, N_LAYERS)
    swapped = with_model(
        plan,
        Attend=lambda task: [Append(task.batch, task.layer), task],
        Append=lambda task: [],  # type: ignore[union-attr]
    )
    with pytest.raises(ValueError, match="the lists stop short"):
        check_plan(swapped, layout)


@pytest.mark.parametrize(
    ("layout", "step", "changes", "said"),
    [
        (HEADS_SHARED, ROWS, {"local": False}, "local of batch 0 is False, not True"),
        (ONE, ROWS, {"local": True}, "local of batch 0 is True, not False"),
        (HEADS_SHARED, ROWS, {"asks": False}, "asks of batch 0 is False, not True"),
        (TOKENS_SHARED, msgspec.structs.replace(ROWS, new=0), {"stores": True}, "stores of batch 0 is True"),
    ],
)
def test_a_batch_that_is_not_what_its_layout_says_is_found(
    layout: Layout, step: StepShape, changes: dict[str, bool], said: str
) -> None:
    plan = plan_of(layout, step, N_LAYERS)
    with pytest.raises(ValueError, match=said):
        check_plan(replace(plan, batches=(replace(plan.batches[0], **changes),)), layout)  # type: ignore[arg-type]


def broken_stage(plan: Plan) -> Plan:
    return replace(plan, model={**plan.model, 0: (*plan.model[0], RunSlice(0, 2))})
