"""Scheduling policies: their order over random workloads, chats before batch work, padded KV, and a real
model's tokens."""

from __future__ import annotations

import threading

import pytest
from checkpoint_examples import tiny_words_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import serving
from test_chunked_prefill import llm
from test_scheduler import make, play, request, run_step, workloads

from jaxlamina import SamplingParams
from jaxlamina.engine.policies import POLICIES, ChatFirst, Priority, ShortestRemaining, Turns, load_policy
from jaxlamina.engine.request import Request, RequestState
from jaxlamina.engine.scheduled_step import ScheduledStep
from jaxlamina.engine.scheduler import Scheduler
from jaxlamina.errors import UserError

NAMES = ["fifo", "priority", "chat-first", "shortest-remaining"]


def chat(name: str, prompt: int, max_tokens: int) -> Request:
    return request(name, prompt, max_tokens)


def batch(name: str, prompt: int, max_tokens: int) -> Request:
    r = request(name, prompt, max_tokens)
    r.priority = 1
    return r


def test_nobody_gives_way_to_one_that_has_no_room_even_then():
    """Six small requests go on beside a chat that leaves too little for another one; where they are enough
    they give way."""
    for n_second, goes_on in ((500, True), (390, False)):
        scheduler = make(1000, max_num_seqs=32, policy=ChatFirst())
        scheduler.add(chat("first", 600, 300))
        run_step(scheduler)
        small = [batch(f"small {i}", 40, 100) for i in range(6)]
        for r in small:
            scheduler.add(r)
        run_step(scheduler)
        assert all(r in scheduler.running for r in small)
        scheduler.add(second := chat("second", n_second, 100))
        for _ in range(3):
            run_step(scheduler)
        assert all(r in scheduler.running for r in small) == goes_on
        assert (second in scheduler.running) != goes_on


def test_nobody_gives_way_to_one_whose_padded_row_has_no_room():
    """Padded, each row takes as much as the longest: three rows of 300 have room in 1,000 slots, two of 400."""
    scheduler = make(1000, max_num_seqs=32, policy=ChatFirst(), padded=True)
    running = [chat("first", 200, 100), chat("second", 200, 100), batch("small", 40, 100)]
    for r in running:
        scheduler.add(r)
    run_step(scheduler)
    scheduler.add(chat("long", 300, 100))  # three rows of 400 would take 1,200
    run_step(scheduler)
    assert scheduler.running == running
    scheduler.add(chat("third", 200, 100))
    scheduler.finish(scheduler.waiting[0])
    run_step(scheduler)
    assert [r.request_id for r in scheduler.running] == ["first", "second", "third"]


def check_order(scheduler: Scheduler, plan: ScheduledStep, before: list[Request]) -> None:
    """Whoever is admitted stands before all that wait, and whoever gives way after all that go on."""

    def place(r: Request):
        return scheduler.policy.rank(r), r.turn, r.arrival, r.index

    admitted = [r for r in scheduler.running if r not in before]
    assert scheduler.waiting == sorted(scheduler.waiting, key=place)
    if admitted and scheduler.waiting:
        assert max(map(place, admitted)) < place(scheduler.waiting[0])
    going_on = [r for r in before if r.state is RequestState.RUNNING]
    if plan.preempted and going_on:
        assert min(map(place, plan.preempted)) > max(map(place, going_on))


def check_chats(scheduler: Scheduler, plan: ScheduledStep, before: list[Request]) -> None:
    """While a chat waits for which there is room beside the chats that run, a step takes in a chat or has some
    request give way, unless there is no batch work left that could."""
    check_order(scheduler, plan, before)
    chats = [r for r in scheduler.running if r.priority <= 0]
    waiting = [r for r in scheduler.waiting if r.priority <= 0]
    if waiting and len(chats) < len(scheduler.running) and would_fit(scheduler, waiting, chats):
        taken_in = [r for r in chats if r not in before or r in plan.prefills]
        assert taken_in or plan.preempted


def would_fit(scheduler: Scheduler, waiting: list[Request], chats: list[Request]) -> bool:
    """Whether the first chat that waits is sure to fit if none but these ran: they hold their slots already,
    that of this step, too; nothing may be cached for it."""
    unit = (
        [r for r in waiting if r.request_id == waiting[0].request_id] if waiting[0].lockstep else waiting[:1]
    )
    held = {slot for r in chats for slot in r.slots.view().tolist()}
    rows = [*chats, *unit]
    n_rows = sum(r.width for r in rows)
    if scheduler.padded and n_rows * max(r.longest for r in rows) > scheduler.slots.capacity:
        return False
    n_slots = sum(r.n_tokens for r in unit) + len(held)
    return n_rows <= scheduler.max_num_seqs and n_slots <= scheduler.slots.capacity


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(
    workload=workloads(),
    aborted=st.sets(st.integers(0, 9)),
    random=st.randoms(use_true_random=False),
    padded=st.booleans(),
)
def test_any_workload_finishes_in_the_policys_order(name: str, workload, aborted, random, padded: bool):
    check = check_chats if name == "chat-first" else check_order
    play(workload, aborted, random, check, policy=load_policy(name), padded=padded)


@settings(max_examples=200, deadline=None)
@given(
    events=st.lists(st.one_of(st.integers(0, 3), st.none()), max_size=120),
    crowd=st.integers(0, 40),
)
def test_callers_take_turns(events: list[int | None], crowd: int):
    """Whoever waits is served as often as anybody else who waits, but for two requests; and nobody waits for
    ever."""
    turns = Turns()
    waiting: list[tuple[int, int, int]] = []  # turn, arrival, caller
    served_before: dict[int, int] = {}  # by arrival: requests served while it waited
    bound: dict[int, int] = {}
    backlogged: dict[
        frozenset[int], list[int]
    ] = {}  # two callers who wait: how often each was served meanwhile

    def add(caller: int) -> None:
        arrival = len(bound)
        turn = turns.take(caller)
        waiting.append((turn, arrival, caller))
        served_before[arrival] = 0
        # Of each of five callers, those of no later turn: the round that is on may have been left by none of
        # them but one.
        bound[arrival] = 5 * (turn - turns._now + 1)

    def serve() -> None:
        waiting.sort()
        turn, arrival, caller = waiting.pop(0)
        turns.came(turn)
        assert served_before.pop(arrival) <= bound[arrival]
        for other in served_before:
            served_before[other] += 1
        still = {c for _, _, c in waiting}
        for a in range(5):
            for b in range(a):
                pair = frozenset((a, b))
                if a in still | {caller} and b in still | {caller}:
                    counts = backlogged.setdefault(pair, [0, 0])
                    counts[0] += caller == a
                    counts[1] += caller == b
                    assert abs(counts[0] - counts[1]) <= 2
                else:
                    backlogged.pop(pair, None)

    for _ in range(crowd):
        add(4)
    for event in events:
        if event is not None:
            add(event)
        elif waiting:
            serve()
    while waiting:
        serve()
    assert not turns._last


def test_requests_without_a_caller_are_served_as_they_come():
    assert [Turns().take(None) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("name", ["fifo", "priority"])
def test_one_callers_many_prompts_let_others_in_between(name: str):
    scheduler = make(200, max_num_seqs=2, policy=load_policy(name))
    many = [request(f"many{i}", 4, 3) for i in range(20)]
    for r in many:
        r.caller = "crowd"
        scheduler.add(r)
    run_step(scheduler)
    late = request("late", 4, 3)
    late.caller = "one"
    scheduler.add(late)
    waited = 0
    while late.state is RequestState.WAITING:
        run_step(scheduler)
        waited += 1
    assert waited <= 4 and sum(r.state is RequestState.WAITING for r in many) >= 15
    while not scheduler.idle:
        run_step(scheduler)
    scheduler.check_integrity()


def test_a_chat_is_admitted_at_once_and_batch_work_gives_way_to_it():
    scheduler = make(30, max_num_seqs=3, policy=ChatFirst())
    works = [batch(f"work{i}", 6, 8) for i in range(3)]
    for r in works:
        scheduler.add(r)
    run_step(scheduler)
    assert scheduler.running == works
    hello = chat("hello", 14, 4)
    scheduler.add(hello)
    plan = run_step(scheduler)
    # A row of one would do; the slots of two are needed.
    assert plan.preempted == (works[2], works[1])
    assert plan.prefills == (hello,) and plan.decodes == (works[0],)
    assert scheduler.waiting == works[1:]
    while hello.state is not RequestState.FINISHED:
        run_step(scheduler)
    assert len(works[0].output_token_ids) == 5 and [len(r.output_token_ids) for r in works[1:]] == [1, 1]
    while not scheduler.idle:
        run_step(scheduler)
        scheduler.check_integrity()
    assert [len(r.output_token_ids) for r in works] == [8, 8, 8]


def test_batch_work_does_not_give_way_where_there_is_room():
    scheduler = make(60, max_num_seqs=3, policy=ChatFirst())
    work, hello = batch("work", 6, 8), chat("hello", 6, 4)
    scheduler.add(work)
    run_step(scheduler)
    scheduler.add(hello)
    plan = run_step(scheduler)
    assert not plan.preempted and plan.decodes == (work,) and plan.prefills == (hello,)


def test_a_chat_does_not_give_way_to_another():
    scheduler = make(20, max_num_seqs=3, policy=ChatFirst())
    first, second = chat("first", 10, 4), chat("second", 10, 4)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)
    plan = run_step(scheduler)
    assert not plan.preempted and plan.decodes == (first,) and scheduler.waiting == [second]


def test_a_long_batch_prompt_is_interrupted_for_a_chat():
    scheduler = make(60, policy=ChatFirst(), prefill_chunk=4)
    work, hello = batch("work", 12, 2), chat("hello", 6, 2)
    scheduler.add(work)
    assert scheduler.schedule().spans == ((0, 4),)
    scheduler.add(hello)
    seen = []
    for _ in range(4):
        plan = scheduler.schedule()
        seen.append((*plan.prefills, *plan.spans))
        if hello.n_computed is None and not hello.output_token_ids:
            hello.output_token_ids.append(7)
    assert seen == [(hello, (0, 4)), (hello, (4, 6)), (work, (4, 8)), (work, (8, 12))]
    assert not scheduler.waiting and work.n_preemptions == 0


def test_lower_priority_numbers_go_first_and_the_highest_gives_way():
    scheduler = make(20, policy=Priority())
    low, high, middle = [request(name, 4, 9) for name in ("low", "high", "middle")]
    low.priority, high.priority, middle.priority = -1, 5, 2
    for r in (high, low):
        scheduler.add(r)
    assert run_step(scheduler).prefills == (low, high)
    scheduler.add(middle)
    assert run_step(scheduler).prefills == (middle,)  # there is room: nobody gives way
    preempted = []
    while not scheduler.idle:
        preempted += run_step(scheduler).preempted
    assert preempted[0] is high and low not in preempted


def test_the_shortest_remaining_go_first_and_the_longest_gives_way():
    scheduler = make(20, max_num_seqs=2, policy=ShortestRemaining())
    long, short, middle = request("long", 4, 12), request("short", 4, 3), request("middle", 4, 6)
    for r in (long, middle, short):
        scheduler.add(r)
    assert run_step(scheduler).prefills == (short, middle)
    ends = []
    while not scheduler.idle:
        running = list(scheduler.running)
        run_step(scheduler)
        ends += [r for r in running if r.state is RequestState.FINISHED]
    assert ends == [short, middle, long]


def test_padded_sequences_take_a_rectangle_and_never_give_way():
    seen = {}
    for padded in (False, True):
        scheduler = make(48, max_num_seqs=8, padded=padded)
        for i in range(8):
            scheduler.add(request(str(i), 4, 9))  # 12 slots at its longest
        sizes = []
        while not scheduler.idle:
            plan = run_step(scheduler)
            sizes.append(len(plan.requests))
            assert not (padded and plan.preempted)
        seen[padded] = max(sizes), sum(sizes) / len(sizes)
    assert seen[True] == (4, 4.0)
    assert seen[False][0] == 8 and seen[False][1] > 4.0
    scheduler = make(48, max_num_seqs=8, padded=True)
    for r in (request("short", 4, 2), request("long", 4, 20), request("next", 4, 2)):
        scheduler.add(r)
    assert len(run_step(scheduler).prefills) == 2  # each counts 23: a third would need 69


def test_a_request_that_can_never_fit_padded_is_refused_with_numbers():
    scheduler = make(30, max_num_seqs=4, padded=True)
    with pytest.raises(
        UserError, match=r"may need 36 KV slots \(prompt 8 \+ max_tokens 5 - 1, for each of 3 sequences\)"
    ):
        scheduler.add(Request("r", list(range(8)), 5, width=3))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lifo", "must be one of fifo, fcfs, priority, chat-first, shortest-remaining, or a class"),
        ("nowhere:Lifo", "cannot be loaded .ModuleNotFoundError: No module named 'nowhere'"),
        ("my_policies:Fifo", "cannot be loaded .AttributeError"),
        ("my_policies:NeedsMore", "cannot be loaded .TypeError"),
        ("my_policies:NoPreemptive", "has no attribute preemptive"),
        ("my_policies:NoRank", "gives no rank that can be compared .AttributeError"),
        ("my_policies:NoOrder", "gives no rank that can be compared .TypeError"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_in_one_line(name: str, message: str, my_policies):
    with pytest.raises(UserError, match=message) as caught:
        load_policy(name)
    assert "\n" not in str(caught.value)


@pytest.fixture
def my_policies(tmp_path, monkeypatch):
    (tmp_path / "my_policies.py").write_text(
        "class Lifo:\n    preemptive = False\n    def rank(self, request): return -request.arrival\n"
        "class NeedsMore(Lifo):\n    def __init__(self, more): pass\nclass NoPreemptive:\n"
        "    def rank(self, request): return 0\nclass NoRank:\n    preemptive = True\nclass NoOrder(Lifo):\n"
        "    def rank(self, request): return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_policy_of_ones_own(my_policies):
    scheduler = make(40, max_num_seqs=1, policy=load_policy("my_policies:Lifo"))
    rows = [request(str(i), 4, 1) for i in range(3)]
    for r in rows:
        scheduler.add(r)
    assert [run_step(scheduler).prefills for _ in range(3)] == [(r,) for r in reversed(rows)]


def test_a_policy_in_the_current_folder_is_found(tmp_path, monkeypatch):
    import sys

    (tmp_path / "policy_of_this_folder.py").write_text(
        "class Lifo:\n    preemptive = False\n    def rank(self, request):\n        return -request.arrival\n"
    )
    before = list(sys.path)
    with pytest.raises(UserError, match="and in the current folder"):
        load_policy("policy_of_this_folder:Lifo")
    monkeypatch.chdir(tmp_path)
    assert load_policy("policy_of_this_folder:Lifo").preemptive is False and sys.path == before


def test_what_the_documents_say_of_a_request_is_there():
    import re
    from pathlib import Path

    from jaxlamina.engine.request import Request

    text = (Path(__file__).resolve().parents[1] / "docs/architecture.md").read_text()
    table = text[text.index("| of a `request` |") :].partition("\n\n")[0]
    names = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
    assert len(names) > 8 and all(hasattr(Request("one", (0,), 1), name) for name in names)


def test_all_built_in_policies_load():
    assert [type(load_policy(name)) for name in POLICIES] == list(POLICIES.values())


# --- a real model ---

WORK = [([(5 * i + j) % 50 + 3 for j in range(6 + 5 * i)], 14 - i, i % 2) for i in range(6)]


def serve(engine, work, steps_apart: int) -> list[tuple[int, ...]]:
    """Tokens of ``work``, of which one request comes every so many steps."""
    ids, tokens, coming = [], {}, list(work)
    step = 0
    while coming or not engine.idle:
        if coming and step % steps_apart == 0:
            prompt, max_tokens, priority = coming.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            ids.append(engine.add_request(prompt, params, priority=priority))
        for event in engine.step():
            if event.output is not None:
                tokens[event.request_id] = event.output.outputs[0].token_ids
        engine.check_integrity()
        step += 1
    assert engine.scheduler.room.n_used == 0
    return [tokens[i] for i in ids]


def test_a_models_tokens_do_not_depend_on_the_policy_nor_on_launching_ahead():
    model = llm(
        "llama",
        split=False,
        kv_slots=44,
        max_num_batched_tokens=16,
        scheduling_policy="chat-first",
        kv_manager="padded",
        kv_headroom=0.0,
    )
    engine = model.engine
    assert isinstance(engine.scheduler.policy, ChatFirst) and engine.scheduler.padded
    alone = serve(engine, WORK, steps_apart=40)
    assert engine.stats.n_preemptions == 0
    assert model.stats()["mean_batch_size"] == 69 / 72  # three steps compute a part of a prompt alone
    for padded in (False, True):
        engine.scheduler.padded = padded
        for name in NAMES:
            engine.scheduler.policy = load_policy(name)
            for engine.async_scheduling in (False, True):
                engine.reset_prefix_cache()
                n_before = engine.stats.n_preemptions
                assert serve(engine, WORK, steps_apart=2) == alone, name
                if name != "chat-first":
                    assert (engine.stats.n_preemptions > n_before) is not padded, name
    assert model.stats()["mean_batch_size"] > 1


def test_options_that_do_not_fit_are_refused_in_one_line():
    with pytest.raises(UserError, match="kv_manager='paged' must be one of token, padded"):
        llm("llama", kv_manager="paged")
    model = llm("llama", split=False)
    prompt = {"prompt_token_ids": [5]}
    with pytest.raises(UserError, match="1 priorities for 2 prompts"):
        model.generate([prompt, prompt], priority=[1])
    with pytest.raises(UserError, match="priority='high' must be a whole number"):
        model.generate([prompt], priority=["high"])


def test_a_servers_requests_go_by_their_priority(tmp_path):
    """A row for one at a time: of two that wait, the one with the lower number is answered first, though it
    came last."""
    folder = tiny_words_folder(tmp_path, max_position_embeddings=2048)
    options = (
        "--max-num-seqs",
        "1",
        "--scheduling-policy",
        "priority",
        "--kv-manager",
        "padded",
        "--no-warm-up",
    )
    order = []
    with serving("--model", str(folder), *options) as server:

        def ask(n_tokens: int, priority: int) -> threading.Thread:
            body = {"prompt": "w1 w2", "max_tokens": n_tokens, "ignore_eos": True, "priority": priority}

            def run() -> None:
                server.post("/v1/completions", body)
                order.append(priority)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        server.post("/v1/completions", {"prompt": "w1 w2", "max_tokens": 800, "priority": 7})  # compiled then
        threads = [ask(800, 0)]
        server.wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
        for n, priority in enumerate((5, -3), start=1):
            # So many that answers are far apart: a client's thread may take a while to say that it has its
            # own.
            threads.append(ask(400, priority))
            server.wait_until(lambda n=n: server.metric("vllm:num_requests_waiting") == n)
        for thread in threads:
            thread.join(60)
    assert order == [0, -3, 5]
