"""Scheduling policy: random workloads (hypothesis) must finish, in order, with every slot accounted for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxlamina.engine.request import Request, RequestState
from jaxlamina.engine.room import n_distinct
from jaxlamina.engine.scheduled_step import in_place
from jaxlamina.engine.scheduler import Scheduler
from jaxlamina.errors import UserError
from jaxlamina.kv import HostTier, PrefixCache, SlotAllocator


def make(capacity: int, max_num_seqs: int = 4, *, caching: bool = False, n_host: int = 0, **kw) -> Scheduler:
    slots = SlotAllocator(capacity)
    kw.setdefault("min_prefix_tokens", 1)
    kw.setdefault("headroom", 0.0)  # so many as can run do; `test_headroom` is about others
    return Scheduler(
        slots,
        max_num_seqs=max_num_seqs,
        prefix_cache=PrefixCache(slots) if caching else None,
        host=HostTier(slots, n_host) if n_host else None,
        **kw,
    )


class PretendPool:
    """What every slot holds, on the device and on the host: the tokens up to its own. Reading anything else
    fails."""

    def __init__(self, capacity: int, n_host: int) -> None:
        self.device: list[tuple[int, ...] | None] = [None] * capacity
        self.host: list[tuple[int, ...] | None] = [None] * n_host

    def move(self, plan) -> None:
        for move in plan.moves_out:
            for a, b in zip(move.source.tolist(), move.target.tolist(), strict=True):
                self.host[b] = self.device[a]
        for move in plan.moves_in:
            for a, b in zip(move.source.tolist(), move.target.tolist(), strict=True):
                self.device[b], self.host[a] = self.host[a], None  # the host's is empty then
        for move in plan.moves_again:
            for a, b in zip(move.source.tolist(), move.target.tolist(), strict=True):
                self.host[b] = self.device[a]

    def write(self, r: Request, first: int, stop: int, in_flight: Sequence[int] = ()) -> None:
        """KV of the request's tokens from ``first`` to ``stop``; those before must be there. ``in_flight``:
        its tokens that are not known yet."""
        tokens = (*r.all_token_ids(), *in_flight)
        for p, slot in enumerate(r.slots.view()[:stop].tolist()):
            if p >= first:
                self.device[slot] = tokens[: p + 1]
            assert self.device[slot] == tokens[: p + 1], f"slot {slot} holds {self.device[slot]}"


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
        oldest = next((r for r in order if r.state is not RequestState.FINISHED), None)
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
                if int(r.request_id) in aborted and r.state is not RequestState.FINISHED:
                    scheduler.finish(r)
        if scheduler.idle and step > max(arrivals, default=0):
            break
    assert all(r.state is RequestState.FINISHED for r in everyone)
    assert scheduler.slots.n_used == 0
    for r in everyone:
        assert int(r.request_id) in aborted or len(r.output_token_ids) == r.max_tokens


@st.composite
def workloads(draw):
    """(capacity, max_num_seqs, max_prefill_tokens, prefill_chunk, n_host, caching, requests): prompts that
    often share prefixes."""
    capacity = draw(st.integers(6, 48))
    max_num_seqs = draw(st.integers(1, 6))
    shapes = draw(
        st.lists(
            st.tuples(
                st.integers(1, 12),  # prompt tokens
                st.integers(0, 2),  # which family of prompts
                st.integers(1, 10),  # max_tokens
                st.integers(0, 8),  # arrives in step
                st.integers(1, 4),  # sequences
                st.booleans(),  # in lockstep
            ),
            max_size=10,
        )
    )
    n_host = draw(st.sampled_from([0, 8, 64]))
    chunk = draw(st.sampled_from([None, 1, 2, 5]))
    return capacity, max_num_seqs, draw(st.integers(1, 30)), chunk, n_host, draw(st.booleans()), shapes


@settings(max_examples=300, deadline=None)
@given(workloads(), st.sets(st.integers(0, 9)), st.randoms(use_true_random=False))
def test_any_workload_with_shared_prefixes_branches_and_swaps_finishes(workload, aborted, random):
    play(workload, aborted, random)


def play(workload, aborted: set[int], random, check=lambda scheduler, plan, before: None, **options) -> None:
    """Runs a workload to its end. Every sequence reads only what it or another with the same tokens wrote,
    every slot is owned as counted, and ``check(scheduler, plan, running before)`` holds of every step."""
    capacity, max_num_seqs, max_prefill_tokens, chunk, n_host, caching, shapes = workload
    budget = {"max_prefill_tokens": max_prefill_tokens, "prefill_chunk": chunk}
    options.setdefault("headroom", random.choice([0.0, 0.5, 1.0, None]))
    scheduler = make(capacity, max_num_seqs, caching=caching, n_host=n_host, **budget, **options)
    pool = PretendPool(capacity, n_host)
    arrivals: dict[int, list[Request]] = {}
    live: dict[str, list[Request]] = {}
    for i, (n_prompt, family, max_tokens, step, width, lockstep) in enumerate(shapes):
        prompt = [family * 100 + t for t in range(n_prompt)]
        if i % 3 == 2:
            prompt[-1] = 7000 + i  # shares all but its last token
        r = Request(str(i), prompt, max_tokens, width=width, lockstep=lockstep, priority=(i + family) % 3)
        r.caller = (None, "a", "b", "c")[i % 4]
        most = r.width * r.longest if scheduler.padded else r.most_slots
        if width > max_num_seqs or most > capacity:
            with pytest.raises(UserError):
                scheduler.add(r)
        else:
            arrivals.setdefault(step, []).append(r)
    n_rows = sum(len(r.prompt_token_ids) + r.width * r.max_tokens for of in arrivals.values() for r in of)
    last_arrival = max(arrivals, default=0)
    for step in range(10 + (4 if chunk is None else 12) * n_rows):
        for r in arrivals.get(step, []):
            scheduler.add(r)
            live[r.request_id] = [r]
        advance(scheduler, pool, live, random, check)
        scheduler.check_integrity()
        if step == 5:
            for i in aborted & {int(name) for name in live}:
                for r in live.pop(str(i)):
                    scheduler.finish(r, keep=False)
            scheduler.check_integrity()
        if scheduler.idle and step >= last_arrival:
            break
    assert scheduler.idle and not live
    assert scheduler.room.n_used == 0
    assert scheduler.host is None or scheduler.host.n_used == 0
    scheduler.forget_cached()
    assert scheduler.slots.n_used == 0


def advance(scheduler: Scheduler, pool: PretendPool, live: dict[str, list[Request]], random, check) -> None:
    """One step: moves, writes, a random token each; beams choose their parents at random."""
    before = list(scheduler.running)
    begun = {r for r in before if r.n_computed is not None}
    plan = scheduler.schedule()
    assert sum(r.width for r in scheduler.running) <= scheduler.max_num_seqs
    if (
        plan.preempted and not scheduler.policy.preemptive
    ):  # prompts that have begun go on, nobody is admitted
        assert set(plan.prefills) <= begun - set(plan.preempted)
    check(scheduler, plan, before)
    pool.move(plan)
    unfinished = []
    for r, (start, stop), _ in plan.computed:
        pool.write(r, start, stop)
        unfinished += [r] if stop < r.n_tokens else []
    for r in plan.decodes:
        pool.write(r, r.n_tokens - 1, r.n_tokens)
    for r, (start, stop) in zip(plan.prefills, plan.spans, strict=True):
        assert r.n_cached <= start < stop <= r.n_tokens
        pool.write(r, start, stop)
        if stop < r.n_tokens:
            assert stop - start == scheduler.prefill_chunk
            unfinished.append(r)
    together: dict[str, list[Request]] = {}
    for r in plan.requests:
        assert len(r.slots) == r.n_tokens
        if r in unfinished:
            continue
        if r.lockstep:
            together.setdefault(r.request_id, []).append(r)
            continue
        rows = [r]
        if r.width > 1:
            rows = live[r.request_id] = scheduler.branch([r], [0] * r.width)
        for row in rows:
            row.output_token_ids.append(random.randrange(3))
            if len(row.output_token_ids) == row.max_tokens:
                scheduler.finish(row)
    for name, members in together.items():
        members.sort(key=lambda r: r.index)
        assert members == live[name], "beams run together or not at all"
        n_before = len(members[0].output_token_ids)
        if n_before + 1 == members[0].max_tokens:
            for r in members:
                scheduler.finish(r)
            continue
        width = members[0].width if n_before == 0 else max(1, len(members) - random.randrange(2))
        parents = [random.randrange(len(members)) for _ in range(width)]
        live[name] = scheduler.branch(members, parents)
        for j, r in enumerate(live[name]):  # distinct, as beams are
            r.output_token_ids.append(j)
    for name in [n for n, rows in live.items() if all(r.state is RequestState.FINISHED for r in rows)]:
        del live[name]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.integers(0, 8), max_size=3),
    st.sets(st.integers(0, 7), max_size=3),
    st.sampled_from([None, 8, 16]),
    st.integers(30, 120),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 3),
)
@example([30], [], set(), None, 30, True, 1, 1)  # it fills the pool
def test_who_is_let_in_ahead_begins_with_the_others(
    prompts, so_many_there, left, chunk, capacity, caching, most, max_tokens
):
    """The step is the one that it would have been, also where some go away before it."""
    steps = []
    for ahead in (False, True):
        scheduler = make(capacity, 4, caching=caching, prefill_chunk=chunk, max_prefill_tokens=64)
        fits = capacity - max_tokens + 1
        requests = [request(f"r{i}", min(n, fits), max_tokens) for i, n in enumerate(prompts)]
        for i, one in enumerate(requests):
            if ahead and i in so_many_there:
                scheduler.admit_ahead(most)
            scheduler.add(one)
        if ahead:
            scheduler.admit_ahead(most)
            scheduler.check_integrity()
            assert scheduler.running
        for i in sorted(left):
            if i < len(requests):
                scheduler.finish(requests[i], keep=False)
        if ahead:
            scheduler.admit_ahead(most)
        step = scheduler.schedule()
        scheduler.check_integrity()
        assert scheduler.admit_ahead(most) == () and not step.decodes and not step.preempted
        steps.append(([r.request_id for r in step.prefills], step.spans))
    if not left:
        assert steps[0] == steps[1]
    else:  # nobody waits who would have begun: the one that goes may have kept others out
        assert set(steps[1][0]) <= {f"r{i}" for i in range(len(prompts))} - {f"r{i}" for i in left}


def test_a_second_prompt_is_admitted_after_the_prefix_that_the_first_left():
    scheduler = make(64, caching=True)
    first = Request("first", list(range(20)), 4)
    scheduler.add(first)
    while not scheduler.idle:
        run_step(scheduler)
    assert (
        scheduler.room.n_used == 0 and scheduler.slots.n_used == 20 + 3
    )  # the last token was never taken in
    answer = first.output_token_ids
    same = Request("same", list(range(20)), 4)
    longer = Request("longer", [*range(20), *answer, 50, 51], 4)
    for r in (same, longer):
        scheduler.add(r)
    assert scheduler.schedule().prefills == (same, longer)
    assert same.n_cached == 19  # its last token is computed again: what follows it is not known
    assert longer.n_cached == 23
    assert list(same.slots)[:19] == list(longer.slots)[:19]


def test_requests_of_one_step_share_what_the_first_computes():
    scheduler = make(64, caching=True)
    rows = [Request(str(i), [*range(30), 100 + i], 2) for i in range(3)]
    for r in rows:
        scheduler.add(r)
    assert scheduler.schedule().prefills == tuple(rows)
    assert [r.n_cached for r in rows] == [0, 30, 30]
    assert scheduler.slots.n_used == 30 + 3


def test_short_prefixes_are_not_worth_another_program():
    scheduler = make(64, caching=True, min_prefix_tokens=16)
    for name, n_shared in [("a", 0), ("b", 15), ("c", 16)]:
        r = Request(name, [*range(n_shared), *range(100 + n_shared, 130)], 1)
        scheduler.add(r if name != "a" else Request("a", list(range(30)), 1))
        plan = run_step(scheduler)
        assert plan.prefills[0].n_cached == (16 if name == "c" else 0)


def test_cached_prefixes_give_way_before_anyone_running_does():
    scheduler = make(24, caching=True)
    scheduler.add(Request("old", list(range(12)), 1))
    run_step(scheduler)
    assert scheduler.prefix_cache is not None and scheduler.prefix_cache.n_cached == 12
    scheduler.add(Request("new", list(range(100, 110)), 14))
    while not scheduler.idle:
        assert not run_step(scheduler).preempted
        scheduler.check_integrity()
    assert scheduler.prefix_cache.evicted_tokens == 10 + 13 - (24 - 12)


def test_the_preempted_come_back_from_what_is_left_of_their_prefix():
    scheduler = make(24, caching=True)
    old, young = Request("old", list(range(8)), 12), Request("young", list(range(50, 60)), 6)
    scheduler.add(old)
    scheduler.add(young)
    computed = []
    while not scheduler.idle:
        plan = run_step(scheduler)
        computed += [(r.request_id, r.n_tokens - 1, r.n_cached) for r in plan.prefills]
        scheduler.check_integrity()
    assert young.n_preemptions == 1
    name, n_tokens, n_cached = computed[-1]
    assert name == "young" and 0 < n_cached < n_tokens  # old took some of its tail meanwhile


def test_kv_of_the_preempted_goes_to_the_host_and_comes_back_without_prefill():
    scheduler = make(12, n_host=16)
    old, young = request("old", 4, 9), request("young", 3, 5)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(3):
        run_step(scheduler)
    held = list(young.slots)
    plan = run_step(scheduler)
    assert plan.preempted == (young,) and [m.source.tolist() for m in plan.moves_out] == [held]
    assert scheduler.host is not None and scheduler.host.n_used == len(held) == 5
    scheduler.check_integrity()
    while old.state is not RequestState.FINISHED:
        run_step(scheduler)
    plan = run_step(scheduler)
    assert plan.decodes == (young,) and not plan.prefills
    assert len(plan.moves_in[0].target) == 5 and scheduler.host.n_used == 0
    run_step(scheduler)
    assert scheduler.idle and scheduler.host.moved_in_tokens == 5


def test_what_does_not_fit_the_host_is_recomputed():
    scheduler = make(12, n_host=4)
    scheduler.add(request("old", 4, 9))
    scheduler.add(request("young", 3, 5))
    moves = n_prefills = 0
    while not scheduler.idle:
        plan = run_step(scheduler)
        moves += len(plan.moves_out)
        n_prefills += len(plan.prefills)
    assert moves == 0 and n_prefills == 3


def test_a_swapped_request_that_is_dropped_frees_the_host():
    scheduler = make(12, n_host=16)
    old, young = request("old", 4, 9), request("young", 3, 5)
    scheduler.add(old)
    scheduler.add(young)
    while not run_step(scheduler).preempted:
        pass
    scheduler.finish(young)
    assert scheduler.host is not None and scheduler.host.n_used == 0
    scheduler.check_integrity()


def test_branches_hold_their_common_slots_once():
    scheduler = make(40, max_num_seqs=8)
    leader = Request("r", list(range(20)), 4, width=8)
    scheduler.add(leader)
    scheduler.schedule()
    rows = scheduler.branch([leader], [0] * 8)
    assert scheduler.slots.n_used == 20 and scheduler.running == rows
    assert [r.index for r in rows] == list(range(8))
    for r in rows:
        r.output_token_ids.append(r.index)
    scheduler.schedule()
    assert scheduler.slots.n_used == 20 + 8
    assert scheduler.slots.owners_of(leader.slots.view()).tolist() == [8] * 20 + [1]
    scheduler.check_integrity()


def test_branches_that_are_dropped_and_doubled():
    scheduler = make(40, max_num_seqs=8)
    leader = Request("r", [1, 2], 9, width=3, lockstep=True)
    other = Request("other", [1], 9)
    scheduler.add(leader)
    scheduler.add(other)
    scheduler.schedule()
    rows = scheduler.branch([leader], [0, 0, 0])
    for j, r in enumerate(rows):
        r.output_token_ids.append(10 + j)
    other.output_token_ids.append(5)
    scheduler.schedule()
    last = [r.slots[-1] for r in rows]
    new = scheduler.branch(rows, [2, 2])  # the third twice, the others no more
    assert [r.slots[-1] for r in new] == [last[2]] * 2
    assert [r.output_token_ids for r in new] == [[12], [12]]
    assert rows[2].state is RequestState.FINISHED and scheduler.running == [*new, other]
    scheduler.check_integrity()
    assert scheduler.slots.n_used == 2 + 1 + 2


@pytest.mark.parametrize("caching", [False, True])
def test_beams_are_preempted_together_and_share_again_what_they_shared(caching: bool):
    scheduler = make(34, max_num_seqs=4, caching=caching)
    old, leader = request("old", 4, 24), Request("b", list(range(100, 108)), 8, width=3, lockstep=True)
    scheduler.add(old)
    scheduler.add(leader)
    assert scheduler.schedule().prefills == (old, leader)
    rows = scheduler.branch([leader], [0, 0, 0])
    for n in range(24):
        for j, r in enumerate((old, *rows)):
            if r.state is RequestState.RUNNING:
                r.output_token_ids.append(10 * n + j)
        if n == 23:
            scheduler.finish(old)
        plan = scheduler.schedule()
        if plan.preempted:
            assert set(plan.preempted) == set(rows) and plan.decodes == (old,)
            n_tokens = rows[0].n_tokens
        assert len({r.state for r in rows}) == 1
        scheduler.check_integrity()
    assert plan.prefills == tuple(rows) and {r.n_preemptions for r in rows} == {1}
    assert {len(r.slots) for r in rows} == {n_tokens}
    held = {slot for r in rows for slot in r.slots}
    assert len(held) == 8 + 3 * (n_tokens - 8)  # the prompt once
    assert [r.n_cached for r in rows] == [0, 8, 8]  # the old one needed all that was cached of it


def test_tokens_of_common_prefixes_are_counted_once():
    assert n_distinct([[1, 2, 3]]) == 3
    assert n_distinct([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [9]]) == 3 + 1 + 1 + 1


def test_more_sequences_than_run_at_once_are_refused():
    with pytest.raises(UserError, match="the request has 5 sequences, 4 run at once"):
        make(40).add(Request("r", [1], 2, width=5))
    with pytest.raises(
        UserError, match=r"may need 14 KV slots \(prompt 2 \+ max_tokens 5 - 1, for each of 3 beams\)"
    ):
        make(13).add(Request("r", [1, 2], 5, width=3, lockstep=True))


def test_first_come_first_served_within_free_slots():
    scheduler = make(20)
    a, b, c = request("a", 8, 4), request("b", 9, 2), request("c", 1, 2)
    for r in (a, b, c):
        scheduler.add(r)
    plan = scheduler.schedule()
    assert plan.prefills == (a, b)  # 8, then 9 + 2 (one step more for both) of 12
    assert c.state is RequestState.WAITING  # fits by itself, but not with one step for everyone


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
    while old.state is not RequestState.FINISHED:
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
    scheduler.max_prefill_tokens = 20  # as `bench throughput --kv-present`, whose prompts take no time
    d, e = request("d", 11, 2), request("e", 9, 2)
    for r in (d, e):
        scheduler.add(r)
    assert run_step(scheduler).prefills == (d, e)


def test_a_request_that_can_never_fit_is_refused_with_numbers():
    scheduler = make(16)
    with pytest.raises(
        UserError, match=r"need 17 KV slots \(prompt 10 \+ max_tokens 8 - 1\), the pool has 16"
    ):
        scheduler.add(request("big", 10, 8))
    with_host = make(16, n_host=100)
    with pytest.raises(
        UserError, match=r"the pool has 16 \(host slots hold requests that wait, not a part of one"
    ):
        with_host.add(request("big", 10, 8))
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
    with pytest.raises(ValueError, match="min_prefix_tokens=0"):
        make(4, 1, min_prefix_tokens=0)


# --- long prompts ---


def test_a_long_prompt_is_computed_in_chunks_while_others_decode():
    scheduler = make(100, prefill_chunk=4)
    short, long, last = request("short", 3, 8), request("long", 10, 2), request("last", 2, 1)
    for r in (short, long, last):
        scheduler.add(r)
    plan = scheduler.schedule()
    assert plan.prefills == (short, long) and plan.spans == ((0, 3), (0, 4))
    short.output_token_ids.append(7)
    plan = scheduler.schedule()
    assert plan.decodes == (short,) and plan.prefills == (long,) and plan.spans == ((4, 8),)
    assert list(scheduler.waiting) == [last]  # nobody else comes before it is done
    short.output_token_ids.append(7)
    plan = scheduler.schedule()
    assert plan.decodes == (short,) and plan.spans == ((8, 10),)
    short.output_token_ids.append(7)
    long.output_token_ids.append(7)
    plan = scheduler.schedule()
    assert plan.decodes == (short, long) and plan.prefills == (last,)


def test_what_is_not_computed_yet_is_not_cached():
    scheduler = make(100, caching=True, prefill_chunk=4)
    scheduler.add(request("long", 10, 2))
    plan = scheduler.schedule()
    assert plan.spans == ((0, 4),)
    scheduler.finish(plan.prefills[0])
    assert scheduler.prefix_cache is not None and scheduler.prefix_cache.n_cached == 4
    again = request("again", 10, 2)
    scheduler.add(again)
    assert scheduler.schedule().spans == ((4, 8),) and again.n_cached == 4


def test_a_prompt_that_loses_its_slots_half_way_begins_again():
    scheduler = make(12, prefill_chunk=2, caching=True)
    old, long = request("old", 2, 8), request("long", 9, 2)
    scheduler.add(old)
    run_step(scheduler)
    scheduler.add(long)
    seen = []
    for _ in range(40):
        plan = scheduler.schedule()
        seen += [(r, len(r.output_token_ids)) for r in plan.preempted]
        for r, (_, stop) in zip(plan.prefills, plan.spans, strict=True):
            if stop == r.n_tokens:
                r.output_token_ids.append(7)
        for r in plan.decodes:
            r.output_token_ids.append(7)
        for r in plan.requests:
            if len(r.output_token_ids) == r.max_tokens and r.state is RequestState.RUNNING:
                scheduler.finish(r)
        scheduler.check_integrity()
        if scheduler.idle:
            break
    assert seen == [(long, 0)]
    assert scheduler.idle and len(old.output_token_ids) == 8 and len(long.output_token_ids) == 2


def test_a_long_prompt_that_takes_the_whole_pool_is_computed():
    scheduler = make(6, prefill_chunk=2)
    scheduler.add(request("long", 6, 1))
    assert [scheduler.schedule().spans for _ in range(3)] == [((0, 2),), ((2, 4),), ((4, 6),)]


# --- a step is scheduled while the tokens of the one before it are in flight ---


class Ahead:
    """Runs a scheduler a step ahead: tokens of a step are known once the next one has been scheduled and has
    written."""

    def __init__(self, scheduler: Scheduler, pool: PretendPool, random) -> None:
        self.scheduler, self.pool, self.random = scheduler, pool, random
        self.drawn: dict[Request, list[int]] = {}  # tokens in flight
        self.launched: list[tuple[Request, int]] = []  # the rows of the latest step, with what each one draws
        self.ended: set[Request] = set()

    def step(self, stops: Sequence[int]) -> None:
        """``stops``: tokens that end a request."""
        before, self.launched = self.launched, []
        plan = self.scheduler.schedule()
        self.pool.move(plan)
        for r in plan.decodes:
            self.pool.write(r, r.n_tokens - 1, r.n_tokens, self.drawn.get(r, []))
            self.draw(r)
        for r, (start, stop) in zip(plan.prefills, plan.spans, strict=True):
            assert not r.n_in_flight
            self.pool.write(r, start, stop)
            if stop == r.n_tokens:
                for row in self.scheduler.branch([r], [0] * r.width) if r.width > 1 else [r]:
                    self.draw(row)
        self.scheduler.check_integrity()
        for r, token in before:
            if r not in self.ended:
                self.take_in(r, token, stops)
                self.scheduler.check_integrity()

    def draw(self, r: Request) -> None:
        assert r.n_generated < r.max_tokens, "it is known that this one has ended"
        token = self.random.randrange(4)
        self.drawn.setdefault(r, []).append(token)
        self.launched.append((r, token))
        r.n_in_flight += 1

    def take_in(self, r: Request, token: int, stops: Sequence[int]) -> None:
        assert self.drawn[r].pop(0) == token
        r.n_in_flight -= 1
        r.output_token_ids.append(token)
        if token in stops or len(r.output_token_ids) == r.max_tokens:
            if r.state is not RequestState.FINISHED:
                self.scheduler.finish(r)
            self.drawn.pop(r)
            self.ended.add(r)


@settings(max_examples=200, deadline=None)
@given(
    workloads(), st.sets(st.integers(0, 9)), st.randoms(use_true_random=False), st.sampled_from([(), (3,)])
)
def test_any_workload_a_step_ahead_finishes(workload, aborted, random, stops):
    """Every sequence reads what it or another wrote though its tokens are known late, and no slot is lost."""
    capacity, max_num_seqs, max_prefill_tokens, chunk, n_host, caching, shapes = workload
    budget = {"max_prefill_tokens": max_prefill_tokens, "prefill_chunk": chunk}
    scheduler = make(capacity, max_num_seqs, caching=caching, n_host=n_host, **budget)
    pool = PretendPool(capacity, n_host)
    ahead = Ahead(scheduler, pool, random)
    arrivals: dict[int, list[Request]] = {}
    for i, (n_prompt, family, max_tokens, step, width, _) in enumerate(shapes):
        r = Request(str(i), [family * 100 + t for t in range(n_prompt)], max_tokens, width=width)
        if width <= max_num_seqs and r.most_slots <= capacity:
            arrivals.setdefault(step, []).append(r)
    n_rows = sum(len(r.prompt_token_ids) + r.width * r.max_tokens for of in arrivals.values() for r in of)
    for step in range(10 + 12 * n_rows):
        for r in arrivals.get(step, []):
            scheduler.add(r)
        ahead.step(stops)
        if step == 5:
            for r in [r for r in (*scheduler.running, *scheduler.waiting) if int(r.request_id) in aborted]:
                scheduler.finish(r, keep=False)
                ahead.ended.add(r)
            scheduler.check_integrity()
        if scheduler.idle and not ahead.launched and step >= max(arrivals, default=0):
            break
    assert scheduler.idle and scheduler.room.n_used == 0
    assert scheduler.host is None or scheduler.host.n_used == 0
    scheduler.forget_cached()
    assert scheduler.slots.n_used == 0


def test_the_last_token_in_flight_gives_its_slots_to_the_next_step():
    scheduler = make(6, max_num_seqs=1, caching=True)
    first, second = request("first", 4, 1), request("second", 5, 1)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.schedule().prefills == (first,)
    first.n_in_flight = 1
    assert scheduler.schedule().prefills == (second,)  # nobody knows the first one's token yet
    assert first.state is RequestState.FINISHED and second.n_cached == 4


def test_a_step_too_many_leaves_nothing():
    scheduler = make(20, caching=True)
    r = request("r", 4, 9)
    scheduler.add(r)
    scheduler.schedule()
    r.n_in_flight = 1
    assert scheduler.schedule().decodes == (r,) and len(r.slots) == 5
    r.output_token_ids.append(7)  # which ends it; the step that takes it in runs on
    scheduler.finish(r)
    scheduler.check_integrity()
    assert scheduler.prefix_cache is not None
    assert scheduler.slots.n_used == scheduler.prefix_cache.match_length([0, 1, 2, 3, 7]) == 4
    assert scheduler.idle


@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(0, 12), st.integers(0, 12))
def test_who_goes_on_keeps_its_row(before, now, n_before, n_now) -> None:
    """But those whose rows are no more."""
    requests = [request(str(i), 1, 1) for i in range(12)]
    were, are = ([requests[i] for i in order] for order in (before[:n_before], now[:n_now]))
    rows = in_place(are, were)
    assert len(rows) == n_now and set(rows) == set(are)
    for i, r in enumerate(were[:n_now]):
        assert rows[i] is r or r not in are
