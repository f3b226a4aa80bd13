"""What devices do under load: from traces made up, from this process's own, and over ranks
(`test_launch_ranks` as a user)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_models import MODELS

from jaxlamina import LLM, SamplingParams
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.profiling.under_load import LoadObserver, OneWindow, UnderLoad, device_events, observed
from jaxlamina.weights.sources import InMemoryModel

MS = 1_000_000


def test_a_device_that_runs_dry_during_launches_is_seen_idle():
    """Steps of 5 ms, each launched while the one before it runs, as far as the host sees; 1.9 ms between them
    are idle."""
    events = [("gemm", 7 * MS * i, 7 * MS * i + 5_100_000) for i in range(10)]
    found = observed("here", (0, 70 * MS), events)
    assert found.share("idle_ns") == pytest.approx(0.2714, abs=1e-4)
    assert (found.n_gaps, found.longest_gap_ns) == (10, 1_900_000)
    assert found.kernels == (("gemm", 51 * MS, 10),)


def test_an_exchange_behind_computation_costs_nothing():
    events = [
        ("ncclDevKernel_SendRecv", 0, 4 * MS),
        ("fusion_3", 1 * MS, 2 * MS),
        ("mail_take_kernel", 5 * MS, 6 * MS),
        ("fusion_3", 6 * MS, 9 * MS),
    ]
    found = observed("here", (0, 10 * MS), events)
    assert (found.compute_ns, found.exchange_ns, found.idle_ns) == (4 * MS, 4 * MS, 2 * MS)
    assert ("fusion_3", 4 * MS, 2) in found.kernels


@given(
    st.lists(st.tuples(st.sampled_from(["a", "nccl"]), st.integers(0, 60), st.integers(1, 9)), max_size=12),
    st.integers(0, 20),
    st.integers(1, 60),
)
def test_all_of_the_time_is_one_of_the_three(spans: list[tuple[str, int, int]], begin: int, length: int):
    window = begin, begin + length
    events = [(name, a, a + n) for name, a, n in spans if a + n > window[0] and a < window[1]]
    found = observed("here", window, events, launch_ns=0)
    at = range(*window)
    computing = {t for name, a, b in events for t in range(a, b) if name == "a"}
    busy = {t for _, a, b in events for t in range(a, b)}
    assert found.compute_ns == sum(t in computing for t in at)
    assert found.idle_ns == sum(t not in busy for t in at)
    assert found.compute_ns + found.exchange_ns + found.idle_ns == found.window_ns == length


def rows(on_cpu: bool) -> list[Any]:
    plane, line = ("/host:CPU", "tf_XLAEigen/1") if on_cpu else ("/device:GPU:0", "Stream #13(Compute)")
    return [
        ("/host:CPU", "python", "jaxlamina.begin", 100, 5, {}),
        (plane, line, "before", 0, 50, {"hlo_op": "before"}),
        (plane, line, "kernel", 200, 50, {"hlo_op": "add.1"}),
        ("/host:CPU", "python", "something", 210, 5, {}),
        (plane, line, "after", 500, 50, {"hlo_op": "after"}),
        ("/host:CPU", "python", "jaxlamina.end", 300, 5, {}),
    ]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_events_between_the_marks(on_cpu: bool):
    name = "add.1" if on_cpu else "kernel"
    assert device_events(rows(on_cpu), on_cpu) == ((100, 300), [(name, 200, 250)])
    with pytest.raises(UserError, match="not both marks"):
        device_events(rows(on_cpu)[:-1], on_cpu)


@pytest.fixture(scope="module")
def llm() -> LLM:
    config = ModelConfig.from_hf(MODELS["llama"])
    return LLM(
        InMemoryModel(config, random_params(config, seed=1)), split=False, max_num_seqs=2, max_model_len=64
    )


def generate(llm: LLM, n: int) -> None:
    llm.generate(
        {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)
    )


def test_a_window_of_this_process(llm: LLM):
    generate(llm, 40)
    observer = LoadObserver(llm.engine)
    observer.begin()
    generate(llm, 40)
    found = observer.end()
    [(name, own)] = found.ranks
    assert name == "this process" and not own.error
    assert 0 < own.compute_ns < own.window_ns and own.exchange_ns == 0 and 0 < own.share("idle_ns") < 1
    # The last decode step is launched ahead of a token that ends it, or is not.
    assert found.n_prefill_steps == 1 and found.n_decode_steps in (39, 40) and found.n_prompt_tokens in (1, 3)
    assert found.lines()[0].startswith(
        f"{found.seconds:.2f} s under load: {found.n_decode_steps} decode steps"
    )
    told = found.to_dict()
    assert told["ranks"][0]["idle"] == own.share("idle_ns") and told["wait_s"] <= told["seconds"]


def test_one_window_is_recorded_once_in_its_time(llm: LLM):
    now = {"s": 0.0}
    found: list[UnderLoad] = []
    window = OneWindow(llm.engine, 10.0, 5.0, found.append, clock=lambda: now["s"])
    steps: list[float] = []

    def before_step() -> None:
        now["s"] += 1.0
        steps.append(now["s"])
        window.before_step()

    llm.engine.before_step = before_step
    try:
        generate(llm, 30)
    finally:
        llm.engine.before_step = None
    # Begun before step 11, ended before step 16, and not again.
    assert len(steps) > 25 and len(found) == 1
    assert found[0].n_decode_steps == 5


def test_a_profiler_in_use_is_said_and_nothing_else(llm: LLM, caplog: pytest.LogCaptureFixture):
    other = LoadObserver(llm.engine)
    other.begin()
    try:
        found: list[UnderLoad] = []
        window = OneWindow(llm.engine, 0.0, 0.0, found.append)
        window.before_step()
        assert "could not be recorded" in caplog.text and not found
        window.before_step()
        generate(llm, 3)
    finally:
        ended = other.end()
    assert not ended.ranks[0][1].error
