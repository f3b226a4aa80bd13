"""What failures of devices cost: by formula, and simulated."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import question
from test_simulator import ROWS, UNSPLIT, check_whole, trace_of

from jaxlamina.cli.main import main
from jaxlamina.errors import UserError
from jaxlamina.planner import roofline
from jaxlamina.planner.costs import LinkTerms
from jaxlamina.planner.failures import FailureRate
from jaxlamina.planner.search import search
from jaxlamina.simulator import ServingPolicy, simulate

SPLIT = dataclasses.replace(
    UNSPLIT,
    memory=UNSPLIT.compute,
    link=LinkTerms(1e-5, 5e10),
    n_model=1,
    n_attention=2,
    partition="requests",
)


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    n_slots=st.integers(104, 200),
    setup=st.sampled_from([UNSPLIT, SPLIT]),
    mtbf_s=st.floats(0.3, 20),
    downtime_s=st.tuples(st.floats(0, 0.02), st.floats(0, 0.05)),
    kv_gb_s=st.floats(0.01, 10),
    seed=st.integers(0, 1 << 30),
    kept_kv=st.booleans(),
    is_async=st.booleans(),
)
def test_no_request_is_lost(rows, n_slots, setup, mtbf_s, downtime_s, kv_gb_s, seed, kept_kv, is_async):
    """Requests in = requests out with all their tokens, slots back to zero; at once or step by step."""
    trace = trace_of(rows)
    rate = FailureRate(mtbf_s / 3600, *downtime_s, kv_gb_s, seed)
    # Rarer than a recovery of all KV takes: else it is refused (below).
    recovery_s = rate.downtime_s + rate.return_s(setup, n_slots)
    mtbf_s += (setup.n_model + setup.n_attention) * recovery_s
    rate = dataclasses.replace(rate, mtbf_hours=mtbf_s / 3600)
    policy = ServingPolicy(
        max_num_seqs=4, max_num_batched_tokens=7, kv_slots=n_slots, kept_kv=kept_kv, async_scheduling=is_async
    )
    fast, slow = (simulate(setup, trace, policy, rate=rate, one_by_one=alone) for alone in (False, True))
    check_whole(fast, trace)
    assert fast.end_s.tolist() == slow.end_s.tolist() and fast.n_failures == slow.n_failures
    without = simulate(setup, trace, policy)
    check_whole(without, trace)
    assert fast.down_s <= fast.n_failures * rate.downtime_s + 1e-9
    if not fast.n_failures:
        assert fast.end_s.tolist() == without.end_s.tolist() and not fast.kv_return_s
    assert kept_kv or not fast.kv_return_s


@pytest.mark.parametrize("setup", [UNSPLIT, SPLIT], ids=["unsplit", "split"])
def test_the_formula_is_what_many_failures_come_to(setup):
    """20 minutes with a failure a minute or more often: the share of time in which the job is up."""
    rate = FailureRate(0.05, notice_s=1.0, start_s=9.0, kv_gb_s=1e6)
    trace = trace_of([(0, 100, 20_000)] * 16)
    run = simulate(setup, trace, ServingPolicy(max_num_seqs=4), rate=rate)
    check_whole(run, trace)
    n = setup.n_model + setup.n_attention
    assert run.n_failures == pytest.approx(run.seconds * n / 180, rel=0.4) and run.n_failures > 1
    assert rate.available(setup, 0, 0) == pytest.approx(math.exp(-10 * n / 180))
    assert 1 - run.down_s / run.seconds == pytest.approx(rate.available(setup, 0, 0), abs=0.07)


def test_kept_kv_comes_back_at_its_rate_or_is_computed_again():
    trace = trace_of([(0, 4000, 2000)] * 4)
    rate = FailureRate(5 / 3600, notice_s=1.0, start_s=0.5, kv_gb_s=1.0, seed=4)  # one in about five seconds
    returned, quick, computed = (
        simulate(UNSPLIT, trace, ServingPolicy(kept_kv=kept_kv), rate=dataclasses.replace(rate, kv_gb_s=gb_s))
        for kept_kv, gb_s in ((True, 1.0), (True, 100.0), (False, 1.0))
    )
    assert returned.n_failures and returned.kv_return_s > 50 * quick.kv_return_s > computed.kv_return_s == 0
    assert returned.seconds > quick.seconds and computed.prefill_s > quick.prefill_s
    a_token = roofline.kv_bytes_per_token(UNSPLIT.config, 2.0)
    assert rate.return_s(UNSPLIT, 1000) == pytest.approx(1000 * a_token / 1e9)
    assert rate.return_s(SPLIT, 1000) == pytest.approx(1000 * a_token / 2e9)  # two attention workers
    shared = dataclasses.replace(SPLIT, partition="tokens", local_share=0.5)
    assert rate.return_s(shared, 1000) == pytest.approx(1000 * a_token / 3e9)


def test_times_are_of_all_devices_and_of_a_seed():
    rate = FailureRate(1.0, seed=3)
    times = list(itertools.islice(rate.times(4), 4000))
    assert times == list(itertools.islice(rate.times(4), 4000)) and times == sorted(times)
    assert times[-1][0] / 4000 == pytest.approx(900, rel=0.05) and {i for _, i in times} == {0, 1, 2, 3}
    assert times != list(itertools.islice(FailureRate(1.0, seed=4).times(4), 4000))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtbf_hours": 0}, "mtbf_hours=0 must be above 0 and 3e.08 at most"),
        ({"kv_gb_s": math.nan}, "kv_gb_s=nan"),
        ({"start_s": -1}, "start_s=-1 must be at least 0 and 1e.12 at most"),
        ({"start_s": 1e300}, "1e.12 at most"),
        ({"mtbf_hours": 1e300}, "3e.08 at most"),
        ({"mtbf_hours": 0.008}, r"a job of 3 devices fails every 9.6 s, and starts again in 10.1 s"),
    ],
)
def test_what_cannot_be_is_said(changes, message):
    with pytest.raises(UserError, match=message):
        next(FailureRate(**({"mtbf_hours": 1.0} | changes)).times(3))


def test_jobs_that_would_not_get_their_kv_back_are_refused(capsys):
    rate = ("--mtbf-hours", "0.02", "--kv-return-gb-s", "0.001")
    pools = ("--hours", "0.02", "--dop", "1,1")
    assert main(["simulate", *pools, *rate]) == 2
    assert "starts again with KV at --kv-return-gb-s 0.001 in" in capsys.readouterr().err
    assert main(["plan", "--devices", "h200=1", "--batch", "9", *rate]) == 2
    assert "starts again with KV at --kv-return-gb-s 0.001 in" in capsys.readouterr().err
    assert main(["simulate", "--failure", "10,model,1e300"]) == 2
    assert "downtime_s=1e+300 must be at least 0 and 1e+12 at most" in capsys.readouterr().err


def test_plans_cost_more_with_failures_and_larger_ones_the_most():
    asked = question("llama-3-8b")
    rate = FailureRate(200.0)
    found = search(asked)
    known = {(p.setup, p.copies): p for p in (*found.split, *found.whole)}
    with_failures = search(dataclasses.replace(asked, failures=rate))
    compared = 0
    for plan in (*with_failures.split, *with_failures.whole):
        other = known[plan.setup, plan.copies]
        n = plan.setup.n_model + plan.setup.n_attention
        least_s = rate.downtime_s + rate.return_s(plan.setup, 0)
        assert plan.available < math.exp(-least_s * n / (200 * 3600))
        if plan.n_rows == other.n_rows:
            compared += 1
            assert plan.tokens_s == pytest.approx(plan.available * other.tokens_s)
            assert plan.tokens_per_usd < other.tokens_per_usd and plan.tpot_p50_s == other.tpot_p50_s
    assert compared > 50


def test_the_commands(capsys):
    rate = ("--mtbf-hours", "0.02", "--start-s", "8", "--kv-return-gb-s", "2")
    load = ("--hours", "0.1", "--compute", "h200")
    assert main(["simulate", *load, *rate, "--seed", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["n_failures"] >= 1 and found["down_s"] <= 9 * found["n_failures"] and found["kv_return_s"] > 0
    )
    assert main(["simulate", *load, *rate]) == 0
    assert "KV comes back (s)" in capsys.readouterr().out
    pools = ("--compute", "h100", "--memory", "h20", "--budget", "45")
    assert main(["plan", *pools, "--mtbf-hours", "500"]) == 0
    shown = capsys.readouterr().out
    assert "availability" in shown
    assert main(["plan", *pools, "--json"]) == 0
    assert all(one["available"] is None for one in json.loads(capsys.readouterr().out)["plans"])
