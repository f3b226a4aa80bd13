"""Scheduling policy: random workloads (hypothesis) must finish, in order, with every slot accounted for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from jaxlamina.kv import SlotAllocator
from jaxlamina.scheduler import Request, Scheduler, State


def make(capacity: int, max_num_seqs: int = 4, **kw) -> Scheduler:
    return Scheduler(SlotAllocator(capacity), max_num_seqs=max_num_seqs, **kw)


def request(name: str, prompt: int, max_tokens: int) -> Request:
    return Request(name, list(range(prompt)), max_tokens)


def run_step(scheduler: Scheduler):
    """One step of an imaginary model: everyone scheduled gets a token, and stops at max_tokens."""
    plan = scheduler.schedule()
    for r in plan.requests:
        assert len(r.slots) == r.n_tokens  # each token that is taken in has its slot
        r.output_token_ids.append(7)
        if len(r.output_token_ids) == r.max_tokens:
            scheduler.finish(r)
    return plan


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(4, 40),
    max_num_seqs=st.integers(1, 5),
    max_prefill_tokens=st.integers(1, 30),
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 6)), max_size=12),
    aborted=st.sets(st.integers(0, 11)),
)
def test_any_workload_finishes_and_no_slot_is_lost(
    capacity: int, max_num_seqs: int, max_prefill_tokens: int, shapes: list, aborted: set[int]
):
    scheduler = make(capacity, max_num_seqs, max_prefill_tokens=max_prefill_tokens)
    arrivals: dict[int, list[Request]] = {}
    everyone = []
    for i, (prompt, max_tokens, step) in enumerate(shapes):
        r = request(str(i), prompt, max_tokens)
        if r.most_slots > capacity:
            with pytest.raises(UserError):
                scheduler.add(r)
        else:
            arrivals.setdefault(step, []).append(r)
            everyone.append(r)
    order: list[Request] = []  # as they were queued
    tokens_run = sum(r.most_slots for r in everyone)
    for step in range(10 + 3 * tokens_run):  # far more than one request at a time would take
        for r in arrivals.get(step, []):
            scheduler.add(r)
            order.append(r)
        oldest = next((r for r in order if r.state is not State.FINISHED), None)
        before = oldest.n_tokens if oldest else 0
        plan = run_step(scheduler)
        assert oldest is None or oldest.n_tokens == before + 1  # the oldest is never held up
        assert len(scheduler.running) <= max_num_seqs
        assert not (plan.preempted and plan.prefills)
        assert [order.index(r) for r in scheduler.running] == sorted(
            order.index(r) for r in scheduler.running
        )
        assert [order.index(r) for r in scheduler.waiting] == sorted(
            order.index(r) for r in scheduler.waiting
        )
        scheduler.check_integrity()
        if step == 3:
            for r in order:
                if int(r.request_id) in aborted and r.state is not State.FINISHED:
                    scheduler.finish(r)
        if scheduler.idle and step > max(arrivals, default=0):
            break
    assert all(r.state is State.FINISHED for r in everyone)
    assert scheduler.slots.n_used == 0
    for r in everyone:
        assert int(r.request_id) in aborted or len(r.output_token_ids) == r.max_tokens


def test_first_come_first_served_within_free_slots():
    scheduler = make(20)
    a, b, c = request("a", 8, 4), request("b", 9, 2), request("c", 1, 2)
    for r in (a, b, c):
        scheduler.add(r)
    plan = scheduler.schedule()
    assert plan.prefills == (a, b)  # 8, then 9 + 2 (one step more for both) of 12
    assert c.state is State.WAITING  # fits by itself, but not with one step for everyone


def test_nobody_overtakes_a_request_that_does_not_fit():
    scheduler = make(20)
    a, big, small = request("a", 10, 4), request("big", 15, 2), request("small", 1, 2)
    for r in (a, big, small):
        scheduler.add(r)
    assert scheduler.schedule().prefills == (a,)
    assert scheduler.schedule().decodes == (a,)
    assert list(scheduler.waiting) == [big, small]


def test_the_youngest_is_preempted_and_prefilled_again_with_its_tokens():
    scheduler = make(12)
    old, young = request("old", 4, 9), request("young", 3, 5)
    scheduler.add(old)
    scheduler.add(young)
    assert run_step(scheduler).prefills == (old, young)  # 7 slots
    run_step(scheduler)  # 9
    run_step(scheduler)  # 11
    plan = run_step(scheduler)  # old takes the last one, none is left for young
    assert plan.decodes == (old,) and plan.preempted == (young,)
    assert young.n_preemptions == 1 and len(young.slots) == 0 and len(young.output_token_ids) == 3
    while old.state is not State.FINISHED:
        run_step(scheduler)
    plan = run_step(scheduler)
    assert plan.prefills == (young,) and young.n_tokens == 3 + 4
    run_step(scheduler)
    assert scheduler.idle


def test_prefill_tokens_of_a_step_are_bounded_but_one_always_goes():
    scheduler = make(100, max_prefill_tokens=10)
    a, b, c = request("a", 30, 2), request("b", 5, 2), request("c", 6, 2)
    for r in (a, b, c):
        scheduler.add(r)
    assert run_step(scheduler).prefills == (a,)
    assert run_step(scheduler).prefills == (b,)
    assert run_step(scheduler).prefills == (c,)


def test_a_request_that_can_never_fit_is_refused_with_numbers():
    scheduler = make(16)
    with pytest.raises(
        UserError, match=r"need 17 KV slots \(prompt 10 \+ max_tokens 8 - 1\), the pool has 16"
    ):
        scheduler.add(request("big", 10, 8))
    exact = request("exact", 10, 7)
    scheduler.add(exact)
    while not scheduler.idle:
        run_step(scheduler)
    assert len(exact.output_token_ids) == 7


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        make(4, 0)
    with pytest.raises(ValueError, match="max_prefill_tokens=0"):
        make(4, 1, max_prefill_tokens=0)
