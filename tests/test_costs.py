"""What a step costs: tasks' times walked in the order of its plan; walks by hand, limits, and what must hold
for any step."""

from __future__ import annotations

import math
import pickle
import random
import time
from dataclasses import fields, replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config
from jaxlamina.planner import roofline, terms
from jaxlamina.planner.calibration import for_device
from jaxlamina.planner.costs import (
    Deployment,
    LinkTerms,
    Terms,
    kv_slots,
    prefill_s,
    shape_of,
    step_cost,
    step_costs,
)
from jaxlamina.planner.hardware import GIB, Hardware
from jaxlamina.planner.task_times import Matrices, TaskTimes
from jaxlamina.planner.walk import walk
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import FRONT, POOL

MODEL = model_config("llama-3-8b")
H200 = Hardware.load("h200")
ROOF = Terms.of_data_sheet(H200)
REAL = Terms(
    H200, 4.4e12, 6e14, 4.7e12, 4e-6, 1.3e-5, 1e-4, product_knee=1.7, attention_step_s=1e-5,
    attention_row_bytes=500.0, attention_token_bytes=100.0, combine_fixed_s=1e-5, product_fixed_s=6e-6,
    product_tile=64,
)  # fmt: skip
BY_MEMORY, MET = LinkTerms(6e-6, 3e11), LinkTerms(1e-5, 2e11, is_rendezvous=True)
ONE = MappingProxyType(
    {"begin": 0.0, "begin pool": 0.0, "first whole": 2.0, "slice whole": 3.0, "last": 5.0, "attend": 4.0}
)


def split(link: LinkTerms = BY_MEMORY, terms: Terms = REAL, **how) -> Deployment:
    given = {"n_attention": 1} | how
    return Deployment(MODEL, terms, terms, link, **given)


# --- the walk ---
def steps(
    n_batches: int,
    n_layers: int,
    times,
    ends=MappingProxyType({}),
    met: bool = False,
    on_wire=MappingProxyType({}),
    **how,
):
    layout = Layout((1,), "heads", mode="rotational", **how)
    shape = StepShape("decode", n_batches, 1, 1, n_batches=n_batches, q_first=False)
    return walk(layout, shape, n_layers, times, ends, met, on_wire)


def test_one_batch_takes_turns():
    found = steps(1, 3, ONE)
    assert found.step_s == 2 + 3 + 3 + 5 + 3 * 4
    assert found.work_s == {FRONT: 13, POOL: 12}


def test_a_message_that_is_put_holds_its_sender_up_and_its_taker():
    found = steps(1, 3, ONE, {"qkv": (0.25, 0.5), "out": (0.125, 1.0)})
    assert found.step_s == 25 + 3 * (0.25 + 0.5 + 0.125 + 1.0)
    assert found.messages_s == {FRONT: 3 * 1.25, POOL: 3 * 0.625}


def test_ends_that_meet_take_one_time_for_both():
    found = steps(1, 3, ONE | {"qkv": 0.5, "out": 0.25}, met=True)
    assert found.step_s == 25 + 3 * 0.75
    assert found.messages_s == {FRONT: 2.25, POOL: 2.25}


@given(t=st.floats(0.1, 10), n_layers=st.integers(2, 12))
@settings(deadline=None, max_examples=20)
def test_two_batches_of_equal_slices_and_attention_leave_no_bubble(t, n_layers):
    times = {"first whole": t, "slice whole": t, "attend": t, "last": t}
    found = steps(2, n_layers, times)
    # Of both batches all slices but the last ones, which are one; the last attention is waited for.
    assert found.work_s == pytest.approx({FRONT: (2 * n_layers + 1) * t, POOL: 2 * n_layers * t})
    assert found.step_s == pytest.approx((2 * n_layers + 2) * t)


def test_the_busier_pool_sets_the_pace_of_two_batches():
    times = {"first whole": 1.0, "slice whole": 1.0, "last": 1.0, "attend": 3.0}
    assert steps(2, 10, times).step_s == 2 * 10 * 3 + 1 + 1  # the first slice and the last one
    times["slice whole"], times["attend"] = 3.0, 1.0
    assert steps(2, 10, times).step_s == pytest.approx(2 * 1 + 2 * 9 * 3 + 1 + 1)


def test_a_local_share_runs_beside_the_pool():
    times = ONE | {"attend here": 4.0, "attend": 3.0}
    assert steps(1, 3, times, local_share=0.5).step_s == 13 + 3 * 4
    assert steps(1, 3, times | {"attend": 6.0}, local_share=0.5).step_s == 13 + 3 * 6


# --- times of tasks ---
def test_a_slice_has_all_of_a_layers_matrices():
    m = Matrices.of(MODEL)
    layer = m.qkv + m.o + m.up + m.down
    norms = 2 * MODEL.num_hidden_layers * MODEL.hidden_size + MODEL.hidden_size
    assert MODEL.num_hidden_layers * layer + m.head + norms == roofline.n_step_params(MODEL)


def test_of_a_data_sheet_unsplit_is_the_roofline():
    setup = Deployment(MODEL, ROOF)
    cost = step_cost(setup, 16, 2048)
    weights = 2 * (roofline.n_step_params(MODEL)) / ROOF.product_bytes_s
    kv = 16 * 2048 * roofline.kv_bytes_per_token(MODEL) / ROOF.attention_bytes_s
    assert cost.step_s == pytest.approx(weights + kv, rel=1e-3)  # norms have no product
    assert cost.attention_busy_s == 0
    assert cost.model_busy_s == pytest.approx(cost.step_s)


def test_messages_are_those_of_the_wires():
    by_heads = TaskTimes(split(), 64, 4096).messages
    assert by_heads["qkv"] == (64 * (32 + 2 * 8) * 128 * 2, 1)
    assert by_heads["out"] == (64 * 32 * 128 * 2, 1)
    two = TaskTimes(split(n_attention=2), 64, 4096).messages
    assert (two["qkv"][0], two["out"][0]) == (by_heads["qkv"][0], by_heads["out"][0])
    kept = TaskTimes(split(local_share=0.25), 64, 4096).messages
    assert kept["qkv"][0] == 0.75 * by_heads["qkv"][0]
    by_tokens = TaskTimes(split(n_attention=2, partition="tokens"), 64, 4096).messages
    assert by_tokens["q"] == (2 * 64 * 32 * 128 * 2, 2)  # every worker is asked about every row
    assert by_tokens["kv"][0] == 64 * 2 * 8 * 128 * 2  # and a new token is kept by one
    assert by_tokens["out"][0] == 2 * 64 * 32 * 129 * 4  # partials: float32, with their log-sum-exp
    by_requests = TaskTimes(split(n_attention=2, partition="requests"), 64, 4096).messages
    assert (by_requests["q"][0], by_requests["out"][0]) == (64 * 32 * 128 * 2, 64 * 32 * 129 * 4)


def test_tiles_are_those_of_the_products_kernel():
    from pallas_kernels import products

    assert (terms.TILED_ROWS.start, terms.TILED_ROWS[-1]) == (products.FEWEST_ROWS, products.MOST_ROWS)
    assert all(products.padded_rows(n) == 64 * math.ceil(n / 64) for n in terms.TILED_ROWS)
    each = [REAL.product_s(1e8, n, 2) for n in (32, 64, 65, 128)]
    assert each[0] == each[1] < each[2] == each[3]


def test_an_operator_without_a_price_is_an_error():
    experts = replace(MODEL, n_experts=8, experts_per_token=2)
    with pytest.raises(UserError, match="experts"):
        Deployment(experts, ROOF)
    windowed = replace(MODEL, windows=(128, *MODEL.windows[1:]))
    with pytest.raises(UserError, match="sliding windows"):
        Deployment(windowed, ROOF)


def shards(n: int, link: LinkTerms = BY_MEMORY) -> Deployment:
    return Deployment(MODEL, REAL, n_model=n, tensor_parallel=n, model_link=link)


def test_shards_read_less_each_and_sum_twice_a_layer():
    one, two = Deployment(MODEL, REAL), shards(2)
    assert step_cost(one, 16, 64).step_s / 2 < step_cost(two, 16, 64).step_s < step_cost(one, 16, 64).step_s
    free = shards(2, LinkTerms(0.0, math.inf))
    sum_s = BY_MEMORY.message_s(16 * 4096 * 2)  # each has a part of all 16 rows
    columns_s = BY_MEMORY.message_s(16 * 128_256 / 2 * 2)  # of the second one
    longer_s = step_cost(two, 16, 64).step_s - step_cost(free, 16, 64).step_s
    assert longer_s == pytest.approx(2 * 32 * sum_s + columns_s)
    # Ranks of a split model swap whole parts, pair by pair, and look up embeddings in parts, too.
    times = [TaskTimes(split(n_model=n, tensor_parallel=n, n_attention=4), 16, 64) for n in (1, 2, 4, 8)]
    assert [t.sum_s(16) / sum_s for t in times] == pytest.approx([0, 1, 5, 13])
    assert TaskTimes(shards(4), 16, 64).sum_s(16) == BY_MEMORY.message_s(1.5 * 16 * 4096 * 2)
    assert times[1].works["first whole"] > times[1].sum_s(16) > 0


def test_each_shard_talks_to_the_workers_of_its_heads():
    def of(n: int, workers: int, partition: str = "heads") -> Deployment:
        return split(n_model=n, tensor_parallel=n, n_attention=workers, partition=partition)

    found = {(n, workers): of(n, workers).n_links for n in (1, 2, 4) for workers in (1, 2, 4)}
    assert found[1, 4] == (4, 1) and found[4, 1] == (1, 4)
    assert found[2, 4] == (2, 1) and found[4, 4] == (1, 1) and found[4, 2] == (1, 2)
    assert of(2, 3, "tokens").n_links == (3, 2)
    # Messages go over two shards' links at once, and half as many are each one's.
    one, two = (TaskTimes(of(n, 2), 64, 4096).ends()[1]["qkv"] for n in (1, 2))
    assert two[0] == pytest.approx(one[0] / 2) and two[1] == one[1]
    assert TaskTimes(of(1, 2), 64, 4096).messages == TaskTimes(of(2, 2), 64, 4096).messages


@pytest.mark.parametrize(("model", "rows", "context", "measured_ms"), [
    ("llama-3-8b", 64, 4096, 13.75), ("llama-3-8b", 160, 4096, 27.99), ("llama-3-8b", 16, 2048, 6.74),
])  # fmt: skip
def test_mini_batches_are_priced_within_5_percent_of_what_they_took(model, rows, context, measured_ms):
    """Two of them over two H200 (docs/benchmarks.md, `bench step`, by memory): nothing was fitted to these."""
    known = for_device("h200")
    setup = Deployment(
        model_config(model), known.terms, known.terms, known.links["memory"], n_attention=1, mini_batches=2
    )
    assert 1e3 * step_cost(setup, rows, context).step_s == pytest.approx(measured_ms, rel=0.05)


def test_a_slow_link_is_hidden_by_mini_batches():
    """Of messages that take as long as attention one part travels while another is attended to."""
    link = LinkTerms(0.0, 2e9, by_nic=True)
    whole, parts = (step_cost(split(link, ROOF, mini_batches=n), 64, 4096).step_s for n in (1, 2))
    assert 0.6 * whole < parts < 0.9 * whole
    alone = split(link, mini_batches=2)
    assert step_cost(alone, 1, 4096) == step_cost(replace(alone, mini_batches=1), 1, 4096)


def test_a_pipelines_stages_take_turns_on_one_batch_and_work_together_on_several():
    free = LinkTerms(0.0, 1e30)
    one, two = split(free, ROOF, mode="fixed"), split(free, ROOF, n_model=2, pipeline_parallel=2)
    assert two.layout.stages.count(0) in (15, 16, 17, 18) and len(two.layout.stages) == 33
    alone, staged = (step_cost(setup, 64, 1024) for setup in (one, two))
    assert staged.step_s == pytest.approx(alone.step_s)
    assert staged.model_busy_s == pytest.approx(alone.model_busy_s / 2)
    four = step_cost(replace(two, n_batches=4), 64, 1024)
    # Two pairs of batches over two stages take three turns of a pair, in two of which each stage has one.
    assert four.step_s == pytest.approx(1.5 * four.model_busy_s, rel=0.05)
    assert four.model_busy_s == pytest.approx(
        step_cost(replace(one, n_batches=4), 64, 1024).model_busy_s / 2, rel=0.1
    )
    assert kv_slots(two) == kv_slots(one)
    assert prefill_s(two, 512) == pytest.approx(prefill_s(one, 512))
    with pytest.raises(UserError, match="over as many model workers"):
        split(n_model=3, pipeline_parallel=2)


def test_a_network_card_sends_while_its_sender_goes_on():
    carried, put = (split(BY_MEMORY._replace(by_nic=by_nic), n_batches=2) for by_nic in (True, False))
    assert step_cost(carried, 64, 4096).step_s < step_cost(put, 64, 4096).step_s
    # Messages follow each other on the wire: a slow one is the limit, whoever waits.
    slow = split(LinkTerms(0.0, 1e8, by_nic=True), n_batches=2)
    q_k_v_s = TaskTimes(slow, 64, 4096).on_wire["qkv"]
    assert step_cost(slow, 64, 4096).step_s >= 2 * 32 * q_k_v_s
    found = steps(1, 3, ONE, {"qkv": (0.25, 0.5), "out": (0.125, 1.0)}, on_wire={"qkv": 2.0})
    assert found.step_s == 25 + 3 * (0.25 + 2.0 + 0.5 + 0.125 + 1.0)


def test_a_deployment_is_remembered_by_what_it_is():
    assert hash(split()) == hash(split()) and split() == split()


def test_a_prompt_alone_is_a_step_too():
    assert (
        step_cost(Deployment(MODEL, REAL), 0, 0, 256).step_s
        > step_cost(Deployment(MODEL, REAL), 0, 0, 64).step_s
    )


def test_where_workers_do_not_divide_heads_the_one_with_most_decides():
    three, four = (split(n_attention=n) for n in (3, 4))  # 3 of 8 heads, and 2
    attend_s = [TaskTimes(of, 64, 4096).works["attend"] for of in (three, four)]
    assert attend_s[0] == pytest.approx(TaskTimes(split(n_attention=2), 64, 3072).works["attend"], rel=0.05)
    assert attend_s[0] > 1.3 * attend_s[1]
    assert kv_slots(three) == pytest.approx(kv_slots(four) * 2 / 3, rel=1e-6)
    # Also beside model workers that keep some: of 8 heads 1, and 3, 2 and 2.
    beside = split(n_attention=3, local_share=1 / 8)
    assert TaskTimes(beside, 64, 4096).works["attend"] == pytest.approx(attend_s[0])
    assert kv_slots(beside) == kv_slots(three)


def test_what_cannot_be_an_instance_is_an_error():
    with pytest.raises(UserError, match="8 KV heads.*9 attention workers"):
        split(n_attention=9)
    assert split(n_attention=3, partition="requests").layout.workers == (1, 2, 3)
    with pytest.raises(UserError, match="staggered batches do not go over 2 replicas"):
        step_cost(split(n_model=2, n_batches=4), 64, 4096)
    with pytest.raises(UserError, match="say model_link"):
        Deployment(MODEL, REAL, n_model=2, tensor_parallel=2)
    with pytest.raises(UserError, match="8 KV heads are not shared out evenly over 3 model workers"):
        shards(3)
    with pytest.raises(UserError, match="tensor_parallel must be 1 or 4"):
        split(n_model=4, tensor_parallel=2)
    with pytest.raises(UserError, match="must be above 0"):
        replace(REAL, attention_bytes_s=0.0)
    with pytest.raises(UserError, match="at least 0"):
        replace(REAL, step_fixed_s=math.nan)


# --- any step ---
SETUPS = st.builds(
    split,
    link=st.sampled_from([BY_MEMORY, MET]),
    n_batches=st.sampled_from([1, 2]),
    n_attention=st.sampled_from([1, 2, 4]),
    partition=st.sampled_from(["heads", "requests", "tokens"]),
    local_share=st.sampled_from([0.0, 0.5]),
    q_first=st.booleans(),
)


@given(setup=SETUPS, rows=st.integers(2, 300), more=st.integers(1, 100), context=st.integers(1, 20_000))
@settings(deadline=None, max_examples=25)
def test_more_rows_and_tokens_never_take_less(setup, rows, more, context):
    cost = step_cost(setup, rows, context)
    assert step_cost(setup, rows + more, context).step_s >= cost.step_s * (1 - 1e-9)
    assert step_cost(setup, rows, context + more).step_s >= cost.step_s * (1 - 1e-9)
    if rows >= setup.n_batches == 1:
        assert step_cost(setup, rows, context, chunk_tokens=more).step_s >= cost.step_s * (1 - 1e-9)


@given(setup=SETUPS, rows=st.integers(1, 300), context=st.integers(1, 20_000))
@settings(deadline=None, max_examples=25)
def test_a_step_is_as_long_as_each_pool_is_at_work(setup, rows, context):
    cost = step_cost(setup, rows, context)
    assert cost.step_s >= max(cost.model_busy_s, cost.attention_busy_s) * (1 - 1e-9)
    assert cost.exchange_s > 0


@pytest.mark.parametrize("link", [BY_MEMORY, MET, LinkTerms(1.65e-5, 4.57e10, by_nic=True)])
@pytest.mark.parametrize("terms", [REAL, ROOF])
def test_many_steps_at_once_cost_the_same_bits_as_one_after_the_other(link, terms):
    slower = link._replace(bytes_s=0.37 * link.bytes_s)
    setups = [
        split(one, terms, n_attention=n, partition=partition, local_share=share, n_batches=n_batches)
        for n, one in ((1, link), (2, slower), (4, link))
        for partition, share in (("heads", 0.0), ("tokens", 0.0), ("tokens", 0.35), ("tokens", 0.95))
        for n_batches in (1, 2)
    ]
    on_two = {"n_model": 2, "tensor_parallel": 2, "model_link": BY_MEMORY}
    setups += [
        split(link, terms, local_share=share, n_attention=n, **on_two) for share in (0.0, 0.5) for n in (1, 2)
    ]
    setups += [
        split(link, terms, n_model=2, n_batches=3),
        split(link, terms, mini_batches=2),
        Deployment(MODEL, terms),
    ]
    drawn = random.Random(0)
    asked = [(setup, drawn.randint(1, 300), drawn.uniform(1, 20_000)) for setup in setups for _ in range(5)]
    drawn.shuffle(asked)
    assert step_costs(asked) == [step_cost(*one) for one in asked]


def test_what_was_remembered_of_a_setup_stays_in_its_process():
    setup = split()
    assert hash(setup) == hash(split()) and setup == split()
    step_cost(setup, 4, 100)
    again = pickle.loads(pickle.dumps(setup))
    assert again == setup and vars(again).keys() == {one.name for one in fields(setup)}


def test_what_the_runtime_does_not_stagger_is_one_batch():
    one, two = split(), split(n_batches=2)
    assert step_cost(two, 64, 4096, 64, 2048) == step_cost(one, 64, 4096, 64, 2048)
    assert step_cost(two, 1, 4096) == step_cost(one, 1, 4096)
    assert step_cost(two, 64, 4096) != step_cost(one, 64, 4096)


def test_with_all_kv_on_the_model_worker_nothing_is_exchanged():
    assert step_cost(split(local_share=1.0), 64, 4096) == step_cost(Deployment(MODEL, REAL), 64, 4096)


def test_replicas_of_an_unsplit_model_share_the_rows():
    two = Deployment(MODEL, REAL, n_model=2)
    assert step_cost(two, 64, 4096).step_s == step_cost(Deployment(MODEL, REAL), 32, 4096).step_s


def test_more_attention_workers_take_less_of_a_long_context():
    costs = [step_cost(split(n_attention=n), 160, 8192).step_s for n in (1, 2, 4)]
    assert costs[0] > costs[1] > costs[2]


def test_the_period_of_a_layer_is_found_however_many_there_are():
    times = TaskTimes(split(n_batches=2), 64, 4096)
    found = []
    for n in (20, 30, 40):
        ends = times.ends()
        layout, shape = times.setup.layout, shape_of(times.setup, has_chunk=False)
        found.append(walk(layout, shape, n, times.works | ends[0], ends[1], False).step_s)
    assert found[2] - found[1] == pytest.approx(found[1] - found[0])


def test_kv_goes_where_the_share_says():
    slots = kv_slots(split())
    per_token = roofline.kv_bytes_per_token(MODEL)
    assert slots == int(0.9 * 141 * GIB / per_token)
    assert kv_slots(split(local_share=1.0)) == kv_slots(Deployment(MODEL, REAL))
    assert kv_slots(split(local_share=0.5)) > slots
    assert kv_slots(split(local_share=0.5, partition="tokens")) > kv_slots(split(local_share=0.5))


def test_prompts_take_longer_after_stored_tokens():
    unsplit = Deployment(MODEL, REAL)
    assert prefill_s(unsplit, 512, 4096) > prefill_s(unsplit, 512) > prefill_s(unsplit, 256) > 0


def test_what_each_request_has_of_its_own_is_added_on_the_rank_that_has_them():
    slower = replace(REAL, row_fixed_s=1e-3)
    for n_model, rows in ((1, 6), (2, 3)):
        setups = [Deployment(MODEL, terms, n_model=n_model, model_link=BY_MEMORY) for terms in (REAL, slower)]
        without, added = (step_cost(setup, 6, 100).step_s for setup in setups)
        assert added - without == pytest.approx(1e-3 * rows)
    assert prefill_s(setups[0], 64) == prefill_s(setups[1], 64)


def test_a_call_takes_at_most_two_milliseconds():
    setup = split(n_batches=2)
    step_cost(setup, 64, 4096)
    each = []
    for rows in range(64, 94):
        began = time.process_time()
        step_cost(setup, rows, 4096)
        each.append(time.process_time() - began)
    assert min(each) < 2e-3
