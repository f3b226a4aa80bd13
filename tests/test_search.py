"""The planner's search, workloads, reasons and sweeps: by hand, and what must hold for any question."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config
from jaxlamina.planner import figures, inputs, roofline, sweeps, traces
from jaxlamina.planner import search as planner_search
from jaxlamina.planner.candidates import instance_usd_h, split_setups
from jaxlamina.planner.costs import Deployment, LinkTerms, Terms, step_cost
from jaxlamina.planner.hardware import GIB, Hardware
from jaxlamina.planner.question import Device, Question
from jaxlamina.planner.reasons import LEAST_GAIN, break_even_usd_h, verdict
from jaxlamina.planner.search import SIGMAS_P99, evaluate, least_link_bytes_s, search, search_all, slots
from jaxlamina.planner.workload import Workload
from jaxlamina.steps.layout import local_heads

MODELS = {name: model_config(name) for name in ("llama-3-8b", "llama-33b", "llama-65b", "llama-3-70b")}
FHBN = LinkTerms(16.5e-6, 45.7e9, by_nic=True)
CONVERSATION = inputs.workload("azure-conversation")
LONGER = CONVERSATION.at_context(2500)  # where splitting LLaMA3-70B pays
few = settings(max_examples=10, deadline=None)


def sheet(name, usd_h=None):
    hardware = Hardware.load(name)
    in_host = LinkTerms(0.0, math.inf)  # sums that take no time, so that steps can be reckoned by hand
    return Device(Terms.of_data_sheet(hardware), usd_h or hardware.price_usd_h, in_host)


def question(model="llama-3-70b", **changes):
    base = Question(
        MODELS[model], CONVERSATION, inputs.device("h100"), inputs.device("h20"), FHBN, budget_usd_h=45.0
    )
    return replace(base, **changes)


# --- workloads ---
def test_a_live_requests_context_is_weighted_by_its_steps():
    # One request decodes 3 tokens after a prompt of 10: contexts 10, 11, 12. Another one 1 after 100.
    trace = traces.Trace(np.array([0, 1]), np.array([10, 100]), np.array([3, 1]))
    found = Workload.of_trace("two", trace)
    contexts = [10, 11, 12, 100]
    assert found.context == pytest.approx(np.mean(contexts)) and found.context_sd == pytest.approx(
        np.std(contexts)
    )
    assert found.n_output == 2 and min(found.prompts) >= 10 and max(found.prompts) <= 100
    alike = Workload.of_lengths("alike", 10, 3)
    assert (alike.context, alike.context_sd) == (11, pytest.approx(np.std([10, 11, 12])))
    longer = found.at_context(2 * found.context)
    assert longer.n_output == 2 * found.n_output
    assert longer.context_sd == 2 * found.context_sd and longer.stored_tokens(4) == 8 * found.context
    assert longer.stored_tokens(4, 1.0) == pytest.approx(8 * found.context + 2 * longer.context_sd)
    with pytest.raises(UserError, match="context"):
        found.at_context(float("nan"))


# --- by hand ---
def test_an_unsplit_plan_by_hand():
    config, h100 = MODELS["llama-3-8b"], sheet("h100")
    asked = question("llama-3-8b", compute=h100, memory=None, budget_usd_h=23.0)
    [plan] = (plan for plan in search(asked).whole if plan.setup.n_model == 2)
    weights, per_token = 2 * roofline.n_params(config), 2 * 2 * 32 * 8 * 128
    n_slots = int((0.9 * 2 * 80 * GIB - weights) / per_token)
    n_rows = int(n_slots / CONVERSATION.context)
    n = roofline.n_step_params(config)
    products_s = max(2 * n / 2 / 3.35e12, 2 * n * n_rows / 2 / 989e12)
    step_s = products_s + n_rows * CONVERSATION.context * per_token / 2 / 3.35e12
    assert (plan.setup.n_model, plan.copies, plan.n_slots, plan.n_rows) == (2, 1, n_slots, n_rows)
    assert plan.tpot_p50_s == pytest.approx(step_s, rel=1e-4)  # norms have no product
    assert plan.tokens_s == n_rows / plan.tpot_p50_s and plan.usd_h == pytest.approx(22.12)
    assert plan.tokens_per_usd == pytest.approx(3600 * n_rows / step_s / 22.12, rel=1e-4)


def test_a_split_plan_by_hand():
    config, h100, h20 = MODELS["llama-33b"], sheet("h100"), sheet("h20")
    setup = Deployment(config, h100.terms, h20.terms, FHBN, 1, 2, n_batches=2)
    asked = question(
        "llama-33b", compute=h100, memory=h20, budget_usd_h=None, counts={h100.name: 2, h20.name: 4}
    )
    plan = evaluate(asked, setup, copies=2)
    per_token = 2 * 2 * 60 * 52 * 128
    n_slots = int(0.9 * 2 * 96 * GIB / per_token)
    n_rows = int(n_slots / CONVERSATION.context)
    half = n_rows / 2
    n = roofline.n_step_params(config)
    slices_s = max(2 * n / 3.35e12, 2 * n * half / 989e12)
    attention_s = half * CONVERSATION.context * per_token / (2 * 4e12)
    layer_s = slices_s / 60 + attention_s / 60
    assert (plan.n_slots, plan.n_rows) == (n_slots, n_rows)
    # Model workers are the busier side. A layer sends to two workers and takes from two, 16.5 µs in all for
    # each batch; the first attention and the last one are not hidden. The last slices of both are one.
    busy_s = 2 * slices_s + 60 * 2 * 2 * 16.5e-6
    assert 0.97 * busy_s < plan.tpot_p50_s < busy_s + 2 * layer_s
    assert plan.tokens_s == pytest.approx(2 * n_rows / plan.tpot_p50_s)
    assert plan.usd_h == pytest.approx(2 * (11.06 + 2 * 4.63))
    assert plan.model_idle == pytest.approx(1 - 2 * slices_s / plan.tpot_p50_s, abs=0.02)
    assert plan.attention_idle == pytest.approx(1 - 2 * attention_s / plan.tpot_p50_s)


def test_a_batch_that_fills_the_kernels_tiles_goes_before_a_larger_one():
    device = inputs.device("h20")
    setup = Deployment(MODELS["llama-3-8b"], device.terms)
    for most, n_rows in ((128, 128), (70, 64), (33, 31), (30, 30)):
        plan = evaluate(question("llama-3-8b", compute=device, memory=None, most_requests=most), setup, 1)
        assert plan.n_rows == n_rows
        assert plan.tokens_s >= most / step_cost(setup, most, CONVERSATION.context).step_s


def test_shards_of_a_model_keep_shares_of_their_own_heads():
    """As measured on three H200 (docs/benchmarks.md): three quarters on two model ranks beat none."""
    h200 = inputs.device("h200")
    asked = question(
        "llama-3-8b", compute=h200, memory=h200, link=h200.in_host, budget_usd_h=None,
        counts={h200.name: 3}, workload=CONVERSATION.at_context(4096), most_requests=64, with_prefill=True,
    )  # fmt: skip
    found = search(asked)
    on_shards = [plan for plan in found.split if plan.setup.tensor_parallel == 2]
    kept = {plan.setup.local_share: plan for plan in on_shards if plan.setup.local_share}
    assert kept.keys() == {0.25, 0.5, 0.75}
    for plan in kept.values():
        setup = plan.setup
        assert (setup.partition, setup.n_batches, plan.n_prefill) == ("heads", 1, 0)
        assert setup.layout.local_heads(8) == 8 * setup.local_share
    assert on_shards[0] is kept[0.75]
    alone = Deployment(MODELS["llama-3-8b"], h200.terms)
    assert 0.5 < kept[0.75].cost.step_s / step_cost(alone, 64, 4096).step_s < 0.65  # measured: 0.60


@pytest.mark.parametrize(("n_shards", "n_workers"), [(2, 1), (2, 3), (4, 2), (8, 1), (8, 8)])
def test_every_share_of_shards_is_one_that_layouts_have(n_shards, n_workers):
    h100, h20 = sheet("h100"), sheet("h20")
    asked = question(counts={h100.name: n_shards, h20.name: n_workers}, budget_usd_h=None)
    shares = {
        setup.local_share
        for setup in split_setups(asked)
        if (setup.n_model, setup.n_attention, setup.tensor_parallel) == (n_shards, n_workers, n_shards)
    } - {0.0}
    able = {local_heads(8, n_workers, n / 8, n_shards) for n in range(1, 8)} - {None}
    assert shares == {n / 8 for n in able}


def test_what_model_workers_keep_is_bounded_by_their_memory():
    config, h100, h20 = MODELS["llama-33b"], sheet("h100"), sheet("h20")
    setup = Deployment(config, h100.terms, h20.terms, FHBN, 1, 1, partition="tokens", local_share=0.5)
    per_token = 2 * 2 * 60 * 52 * 128
    room = 0.9 * 80 * GIB - 2 * roofline.n_params(config)
    assert slots(setup) == pytest.approx(room / per_token / 0.5, rel=1e-3)


def test_p99_is_of_more_stored_tokens_and_never_of_more_than_fit():
    asked = question("llama-3-8b", memory=None)
    full = search(asked).whole[0]
    light = search(replace(asked, most_requests=64)).whole[0]
    most = CONVERSATION.stored_tokens(light.n_rows, SIGMAS_P99) / light.n_rows
    assert light.tpot_p99_s == pytest.approx(step_cost(light.setup, light.n_rows, most).step_s)
    room = full.n_slots / full.n_rows
    assert full.tpot_p50_s <= full.tpot_p99_s <= step_cost(full.setup, full.n_rows, room).step_s * (1 + 1e-9)


def test_prompts_take_model_workers_time_or_prefill_workers():
    asked = question("llama-3-8b")
    without, found = search(asked), search(replace(asked, with_prefill=True))
    others = {q.setup: q for q in without.split}
    same = [(p, others[p.setup]) for p in found.split if not p.n_prefill]
    assert same and all(p.tokens_s < q.tokens_s and p.cost == q.cost for p, q in same)
    beside = [plan for plan in found.split if plan.n_prefill]
    assert beside and all(
        instance_usd_h(asked, p.setup, p.n_prefill)
        == pytest.approx(instance_usd_h(asked, p.setup) + 11.06 * p.n_prefill)
        for p in beside[:20]
    )
    # A prefill worker can compute so many prompts a second, and not more answers begin.
    assert found.split[0].score(asked) < without.split[0].score(asked)


def test_the_search_has_the_calibrated_terms():
    h200, h20 = inputs.device("h200"), inputs.device("h20")
    assert h200.terms == Terms.load("h200") and h20.terms == Terms.load("h20")
    asked = question(compute=h200, memory=h20, budget_usd_h=None, counts={h200.name: 4, h20.name: 4})
    for plan in (*(found := search(asked)).split, *found.whole):
        own = h200 if plan.setup.compute.hardware.name == h200.name else h20
        assert plan.setup.compute == own.terms and plan.setup.model_link == own.in_host


def test_devices_of_which_nobody_knows_what_joins_them_share_out_no_model():
    alone = replace(inputs.device("h100"), in_host=None)
    asked = question("llama-3-8b", compute=alone, memory=None)
    assert {plan.setup.n_model for plan in search(asked).whole} == {1}
    with pytest.raises(UserError, match="H100 with a known link between them"):
        search(question(compute=alone, memory=None))


# --- what must hold ---
budgets = st.floats(8, 200)
names = st.sampled_from(sorted(MODELS))


def best(asked):
    try:
        found = search(asked)
    except UserError:
        return 0.0
    return max(found.split_score, found.whole_score)


@few
@given(names, budgets, st.floats(1, 2), st.sampled_from([None, 0.05, 0.1, 0.5]))
def test_a_larger_budget_is_never_worse(model, budget, more, slo):
    asked = question(model, budget_usd_h=budget, slo_s=slo)
    assert best(replace(asked, budget_usd_h=more * budget)) >= best(asked) * (1 - 1e-9)


def split_score(asked):
    try:
        return search(asked).split_score
    except UserError:
        return 0.0


@few
@given(names, st.floats(0.5, 12), st.floats(0.2, 1))
def test_cheaper_memory_devices_never_make_splitting_worse(model, usd_h, factor):
    asked = question(model, memory=inputs.device("h20", usd_h))
    cheaper = replace(asked, memory=inputs.device("h20", factor * usd_h))
    assert split_score(cheaper) >= split_score(asked) * (1 - 1e-9)


@few
@given(names, st.floats(1, 100), st.floats(0.1, 1))
def test_a_slower_link_and_a_tighter_slo_are_never_better(model, gb_s, factor):
    asked = question(model, link=LinkTerms(16.5e-6, gb_s * 1e9), slo_s=0.1)
    slower = replace(asked, link=LinkTerms(16.5e-6, factor * gb_s * 1e9))
    assert split_score(slower) <= split_score(asked) * (1 + 1e-9)
    assert best(replace(asked, slo_s=0.1 * factor)) <= best(asked) * (1 + 1e-9)


@few
@given(
    st.sampled_from(["h100", "h200", "h20"]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from(["llama-3-8b", "llama-3-70b"]),
    st.floats(200, 20_000),
)
def test_equal_devices_with_enough_memory_are_not_split(name, n, model, context):
    device = sheet(name)
    asked = question(
        model, compute=device, memory=device, budget_usd_h=None, counts={device.name: n},
        workload=CONVERSATION.at_context(context),
    )  # fmt: skip
    try:
        found = search(asked)
    except UserError as error:
        assert "not enough for one copy" in str(error) or "room for one request" in str(error)
        return
    assert found.gain <= 1 + 1e-9 and verdict(found).reason == "equal devices"


@few
@given(names, budgets, st.sampled_from([0.03, 0.1, None]), st.sampled_from([None, 10, 300]))
def test_every_plan_is_within_money_memory_and_slo(model, budget, slo, most_requests):
    asked = question(model, budget_usd_h=budget, slo_s=slo, most_requests=most_requests)
    try:
        found = search(asked)
    except UserError as error:
        assert "\n" not in str(error)
        return
    for plan in (*found.split[:40], *found.whole[:40]):
        assert plan.usd_h <= budget + 1e-6 and plan.n_rows >= plan.setup.n_batches
        assert plan.n_rows * asked.workload.context <= plan.n_slots
        assert slo is None or plan.tpot_p99_s <= slo
        assert most_requests is None or plan.copies * plan.n_rows <= most_requests
        assert plan.tpot_p50_s <= plan.tpot_p99_s


def test_as_many_copies_as_there_are_devices_are_a_plan():
    h100 = inputs.device("h100")
    limits = {"memory": None, "budget_usd_h": None, "counts": {h100.name: 200}, "most_requests": 4000}
    asked = question("llama-3-8b", **limits)
    assert max(plan.copies for plan in search(asked).whole if plan.setup.n_model == 1) == 200


@settings(max_examples=3, deadline=None)
@given(
    names, st.booleans(), st.sampled_from([None, 0.1]), st.lists(st.floats(0.3, 9), min_size=2, max_size=5)
)
def test_questions_searched_together_find_what_each_finds_alone(model, with_prefill, slo, prices):
    asked = question(model, slo_s=slo, with_prefill=with_prefill, budget_usd_h=30.0)
    several = [asked.at_memory_price(usd_h) for usd_h in prices]
    several += [replace(asked, most_requests=60), replace(asked, workload=LONGER), replace(asked, slo_s=1e-3)]
    for one, found in zip(several, search_all(several), strict=True):
        planner_search._known.cache_clear()
        try:
            alone = search(one)
        except UserError as error:
            assert isinstance(found, UserError) and str(found) == str(error)
            continue
        assert (found.split, found.whole) == (alone.split, alone.whole)
        for plan in (*alone.split[:3], *alone.whole[:1]):  # and what each plan is by itself
            assert evaluate(one, plan.setup, plan.copies, plan.n_prefill) == plan


# --- reasons ---
def test_each_reason_where_it_is_the_reason():
    def reason(**changes):
        said = verdict(search(question(slo_s=0.1, **({"workload": LONGER} | changes))))
        assert "\n" not in said.line and said.splits == (said.reason == "split")
        return said.reason, said.line

    assert reason()[0] == "split"
    why, line = reason(link=LinkTerms(33.3e-6, 15e9, is_rendezvous=True))
    assert why == "link" and "GB/s on" in line
    why, line = reason(most_requests=32)
    assert why == "batch too small" and "at most 32 at once" in line
    why, line = reason(memory=inputs.device("h20", 8.0))
    assert why == "prices" and "splitting pays from $" in line
    assert reason(memory=inputs.device("h100"))[0] == "equal devices"
    assert reason(memory=None)[0] == "one device"
    why, line = reason(config=MODELS["llama-65b"])
    assert why == "dead zone" and "NVIDIA H20 alone" in line


def test_the_break_even_price_is_a_border():
    asked = question(memory=inputs.device("h20", 8.0), workload=LONGER)
    price = break_even_usd_h(asked)
    for usd_h, pays in ((price, True), (1.02 * price, False)):
        assert (search(replace(asked, memory=inputs.device("h20", usd_h))).gain >= LEAST_GAIN) == pays


def test_the_least_link_is_a_border():
    asked = question()
    plan = search(asked).split[0]
    least = least_link_bytes_s(asked, plan)

    def tokens_s(bytes_s):
        return (
            plan.n_rows
            / step_cost(
                replace(plan.setup, link=FHBN._replace(bytes_s=bytes_s)), plan.n_rows, asked.workload.context
            ).step_s
        )

    assert least <= 45.7e9
    assert tokens_s(least) >= 0.95 * plan.tokens_s > tokens_s(0.98 * least)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_usd_h": 9.0}, r"\$9 an hour: not enough for one copy of the weights, 141 GB; .* \$22.12"),
        ({"slo_s": 0.001}, r"no plan meets tpot=1 ms: the least is \d+\.\d ms, by .* unsplit with 1 request"),
        ({"workload": CONVERSATION.at_context(1e7)}, "no plan has room for one request of 10,000,000 tokens"),
        ({"budget_usd_h": None, "counts": {"NVIDIA H100": 1}}, "1 × NVIDIA H100: not enough for one copy"),
    ],
)
def test_what_cannot_be_says_what_it_takes(changes, message):
    with pytest.raises(UserError, match=message):
        search(question(**changes))


def test_a_budget_needs_prices():
    with pytest.raises(UserError, match="H200: its price is not known"):
        question(memory=inputs.device("h200"))


# --- sweeps ---
def test_a_sweep_has_its_border_where_the_better_way_changes():
    asked = question(slo_s=0.1, workload=LONGER)
    for name in sweeps.VARIABLES:
        found = sweeps.sweep(asked, name)
        assert len(found.points) > 3 and found.unit == "tokens for a dollar"
        for border in found.borders:
            sides = [p for p in found.points if abs(p.x - border) <= 0.6 * border]
            assert {(p.split or 0) > (p.whole or 0) for p in sides} == {True, False}
    link = sweeps.sweep(asked, "link")
    assert link.now == pytest.approx(45.7) and len(link.borders) == 1 and 5 < link.borders[0] < 45
    assert all(p.whole == link.points[0].whole == max(p.by_device.values()) for p in link.points)
    ways = dict(figures._ways(link))
    assert list(ways) == ["split", "unsplit, NVIDIA H100", "unsplit, NVIDIA H20"]
    assert ways["split"] == [p.split for p in link.points]
    assert sweeps.pareto(asked).points[-1].split >= sweeps.pareto(asked).points[0].whole


def test_a_sweep_that_cannot_be_says_why():
    with pytest.raises(UserError, match="must be one of price, link, context, batch, ratio"):
        sweeps.sweep(question(), "colour")
    with pytest.raises(UserError, match="two kinds of device"):
        sweeps.sweep(question(memory=None), "link")
    with pytest.raises(UserError, match="needs a budget"):
        sweeps.sweep(question(budget_usd_h=None, counts={"NVIDIA H100": 4, "NVIDIA H20": 4}), "price")
