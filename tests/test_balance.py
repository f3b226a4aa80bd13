"""Which share of the attention model ranks keep, from times: against the arithmetic that it is made of, and in a
simulated load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.kv.pool_book import PoolBook
from jaxlamina.kv.wishes import Wishes
from jaxlamina.models.config_files import model_config
from jaxlamina.planner.calibration import for_device
from jaxlamina.planner.costs import Deployment
from jaxlamina.run.balance import Balance, Speeds
from jaxlamina.run.modelled import ModelledSteps
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.layout import Layout

US, LAYERS = 1e-6, 32
# An H200 and an 8B model's layer: attention of 160 rows of 4,096 tokens takes 610 µs, an exchange 14.
H200 = Speeds(610 * US * LAYERS / (160 * 4096), 610 * US * LAYERS / (160 * 4096), 14 * US * LAYERS)
SLICES_US = {
    (160, 1): 213, (160, 2): 2 * 165, (64, 1): 152, (64, 2): 2 * 150,
    (512, 1): 600, (512, 2): 2 * 310,  # where products, and not reading weights, take the time
}  # fmt: skip


def taught(speeds: Speeds, numbers: tuple[int, ...] = (1, 2)) -> Balance:
    """It has seen some steps with all attention on the model rank, and staggered ones that slices are waited
    for in."""
    balance = Balance(speeds, numbers)
    for (n_rows, n), slices_us in SLICES_US.items():
        balance.took(n_rows, n, 0.0, 1.0 if n > 1 else 0.0, slices_us * US * LAYERS)
    return balance


@pytest.mark.parametrize(
    ("n_rows", "context", "numbers", "share", "n_batches", "us_a_layer"),
    [
        (160, 4096, (1,), 0.51, 1, 525),
        (160, 4096, (1, 2), 0.51, 1, 525),  # 484 at 0.25 as two, which is not enough of a gain
        (512, 4096, (1, 2), 0.35, 2, 1300),  # both batches exchange
        (64, 4096, (1,), 0.53, 1, 280),
        (64, 16384, (1,), 0.51, 1, 647),
    ],
)
def test_the_share_is_where_both_sides_take_the_same_time(
    n_rows: int, context: int, numbers: tuple[int, ...], share: float, n_batches: int, us_a_layer: float
) -> None:
    best = taught(H200, numbers).best(n_rows, n_rows * context)
    assert best.n_batches == n_batches and best.share == pytest.approx(share, abs=0.01)
    assert best.step_s is not None
    assert best.step_s / US / LAYERS == pytest.approx(us_a_layer, rel=0.01)


def test_a_light_load_stays_where_the_model_is() -> None:
    balance = taught(H200)
    assert balance.best(64, 64 * 128).share == 1.0
    shares = [balance.best(64, 64 * n).share for n in (16, 256, 4096, 16384)]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1.0 and shares[-1] < 0.6


def test_pools_that_are_one_hosts_cores_share_nothing() -> None:
    assert taught(replace(H200, shared_host=True)).best(160, 160 * 4096).share == 1.0


def test_a_slow_pool_gets_what_it_can_do_meanwhile() -> None:
    """A host's memory beside a GPU: a twentieth of its rate."""
    slow = replace(H200, remote_s=20 * H200.local_s)
    best = taught(slow).best(160, 160 * 4096)
    assert best.n_batches == 1 and 0.95 < best.share < 0.97
    four = replace(H200, remote_s=H200.local_s / 3)  # three workers
    assert taught(four, (1,)).best(160, 160 * 4096).share == pytest.approx(0.27, abs=0.01)


positive = st.floats(1e-9, 1e-4)


@given(
    positive, positive, st.floats(0, 1e-2), st.floats(1e-4, 0.1), st.floats(1e-4, 0.1), st.integers(1, 10**6)
)
def test_never_worse_than_either_end(
    local_s: float, remote_s: float, exchange_s: float, one_s: float, two_s: float, n_tokens: int
) -> None:
    balance = Balance(Speeds(local_s, remote_s, exchange_s), (1, 2))
    balance.took(8, 1, 0.0, 0.0, one_s)
    balance.took(8, 2, 0.0, 1e-9, two_s)
    best = balance.best(8, n_tokens)
    assert 0 <= best.share <= 1 and best.step_s is not None
    ends = [balance.predicted_s(8, 1, n_tokens, 0), balance.predicted_s(8, 1, 0, n_tokens)]
    assert best.step_s <= min(s for s in ends if s is not None) * 1.02 + 1e-9


def test_a_step_goes_as_it_is_predicted_to_be_shortest_where_tokens_are() -> None:
    balance = taught(H200)
    n = 160 * 4096
    for _ in range(8):  # each is tried first
        balance.n_batches(160, n / 4, n * 3 / 4, (1, 2))
    assert balance.n_batches(160, n / 4, n * 3 / 4, (1, 2)) == 2
    assert balance.n_batches(160, n / 2, n / 2, (1, 2)) == 1
    assert balance.n_batches(160, n, 0, (1, 2)) == 1  # nothing is to be waited for
    assert balance.state()["steps"]


def test_a_kind_of_step_that_cannot_pay_is_not_tried() -> None:
    """Each has to be compiled."""
    n = 160 * 4096

    def seen(n_local: float, n_remote: float) -> set[int]:
        balance = Balance(H200, (1, 2))
        for n_rows in (64, 160):
            balance.took(n_rows, 1, 0.0, 0.0, SLICES_US[n_rows, 1] * US * LAYERS)
        return {balance.n_batches(160, n_local, n_remote, (1, 2)) for _ in range(9)}

    assert seen(n / 2, n / 2) == {1}  # 213 + 319 µs a layer; two batches take 2 * 152 + 305 at least
    assert seen(n / 4, 3 * n / 4) == {1, 2}


def test_only_one_batch_may_be_predicted() -> None:
    """So the other is tried, and what is predicted of the one is what it could be shorter than."""
    balance = Balance(Speeds(1e-8, 1e-8, 1e-4), (1, 2), lambda n_rows, n: 1e-3 if n == 1 else None)
    assert {balance.n_batches(8, 1e2, 1e2, (1, 2)) for _ in range(9)} == {1, 2}
    slow = Balance(Speeds(1e-8, 1e-8, 1e-1), (1, 2), lambda n_rows, n: 1e-3 if n == 1 else None)
    assert {slow.n_batches(8, 1e2, 1e2, (1, 2)) for _ in range(9)} == {1}


@pytest.mark.parametrize("partition", ["tokens", "requests"])
def test_pools_stay_even_while_requests_come_and_go(partition: str) -> None:
    """Ten minutes of a step each tenth of a second: in the median step busy times differ by a tenth at most,
    though nothing is ever moved."""
    rng, n_slots, width = np.random.default_rng(0), 20_000, 400
    speeds = Speeds(4e-6, 4e-6, 1e-4)
    balance = Balance(speeds)
    wishes = Wishes(1, 16 if partition == "tokens" else None, balance.share)
    layout = Layout((1,), partition, local_share=0.5)
    book = PoolBook([], layout, (), n_slots, 0, 16, wishes, [n_slots, n_slots])  # no worker: none can move
    free, running, apart = list(range(n_slots)), [], []
    for _ in range(6000):
        for _ in range(rng.poisson(0.25)):
            slots = [free.pop() for _ in range(int(rng.integers(20, 240)))]
            running.append((slots, len(slots) + int(rng.geometric(1 / 60))))
            if len(running) > 48:
                free += running.pop()[0]
                continue
            new = np.asarray(slots, np.int32)[None]
            none = np.zeros((1, 0), np.int32), np.zeros(1, np.int32)
            zeros = np.zeros_like(new)
            book.plan("prefill", PrefillBatch(zeros, zeros + np.arange(new.size), none[1], new, *none), False)
        if not running:
            continue
        table, lengths = np.zeros((len(running), width), np.int32), np.zeros(len(running), np.int32)
        new = np.zeros(len(running), np.int32)
        for row, (slots, _) in enumerate(running):
            table[row, : len(slots)], lengths[row], new[row] = slots, len(slots), free.pop()
            slots.append(int(new[row]))
        tokens = np.zeros((len(running), 1), np.int32)
        book.plan("decode", DecodeBatch(tokens, lengths[:, None], table, lengths, new), False)
        local, remote = wishes.n_local * speeds.local_s, wishes.n_remote * speeds.remote_s + speeds.exchange_s
        balance.took(balance._n_rows, 1, wishes.n_local, wishes.n_remote, 2e-3 + max(local, remote))
        if lengths.sum() > 1000:
            apart.append(abs(local - remote) / max(local, remote))
        ended = [row for row in running if len(row[0]) >= min(row[1], width)]
        running = [row for row in running if len(row[0]) < min(row[1], width)]
        for slots, _ in ended:
            book.release(np.asarray(slots))
            free += slots
    assert len(apart) > 3000
    assert np.median(apart) <= 0.1, np.percentile(apart, [10, 50, 90])


@pytest.mark.parametrize(("predicted_us", "first"), [(200, 2), (900, 1)])
def test_slices_are_as_predicted_until_they_are_seen(predicted_us: int, first: int) -> None:
    """The first prediction of staggered slices makes them the shortest step, the second far too long."""
    slices_us = {1: 400, 2: predicted_us}
    balance = Balance(H200, (1, 2), lambda n_rows, n: slices_us[n] * US * LAYERS)
    n_rows, n_tokens = 160, 160 * 4096
    assert not balance.is_measured()
    assert balance.best(n_rows, n_tokens).n_batches == first
    where = n_rows, 0.4 * n_tokens, 0.6 * n_tokens
    assert balance.n_batches(*where, possible=(1, 2)) == first
    # What is measured overrides: staggered slices of 900, and of 200.
    measured_us = 900 if first == 2 else 200
    for _ in range(8):
        n = balance.n_batches(*where, possible=(1, 2))
        local, remote = 0.4 * n_tokens * H200.local_s, 0.6 * n_tokens * H200.remote_s + H200.exchange_s
        slices = {1: 400, 2: measured_us}[n] * US * LAYERS
        balance.took(*where[:1], n, *where[1:], slices + (max(local, remote) if n == 1 else local))
    assert balance.is_measured(n_rows)
    assert balance.n_batches(*where, possible=(1, 2)) == 1
    assert balance.best(n_rows, n_tokens).n_batches == 1


def test_a_prediction_is_corrected_by_what_other_steps_took() -> None:
    balance = Balance(H200, (1,), lambda n_rows, n: n_rows * US * LAYERS)
    balance.took(64, 1, 0.0, 0.0, 2 * 64 * US * LAYERS)  # twice as long as predicted
    step_s = balance.predicted_s(128, 1, 0.0, 0.0)
    assert step_s == pytest.approx(2 * 128 * US * LAYERS)
    assert balance.state()["steps"][0]["predicted_slices_s"] == pytest.approx(64 * US * LAYERS)


def test_predicted_times_are_near_those_that_were_measured() -> None:
    """The planner's cost model of H200s beside the numbers above, of up to 160 requests."""
    known = for_device("h200")
    terms, link = known.terms, known.links["memory"]
    setup = Deployment(model_config("llama-3-8b"), terms, terms, link, n_attention=1, partition="tokens")
    modelled = ModelledSteps(setup)
    speeds = modelled.speeds
    assert speeds is not None and not speeds.shared_host
    assert speeds.local_s == pytest.approx(H200.local_s, rel=0.05)
    assert speeds.remote_s == pytest.approx(H200.remote_s, rel=0.05)
    assert speeds.exchanges_s(64) == pytest.approx(H200.exchanges_s(64), rel=0.2)
    for (n_rows, n), slices_us in SLICES_US.items():
        if n_rows <= 160:
            assert modelled.slices_s(n_rows, n) == pytest.approx(slices_us * US * LAYERS, rel=0.15)
    # At 160 requests it begins where the measured times come to as well.
    balance = Balance(speeds, (1, 2), modelled.slices_s)
    of_measured = taught(H200).best(160, 160 * 4096)
    balance.n_batches(160, 1.0, 1.0, (1,))
    best = balance.best(160, 160 * 4096)
    assert best.n_batches == of_measured.n_batches and best.share == pytest.approx(
        of_measured.share, abs=0.05
    )
