"""What loads are made of: drawn lengths, traces, arrivals."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.bench import serve_cli
from jaxlamina.bench.loads import DRAWN, Size, arrivals, drawn, means, read_trace, sizes_in
from jaxlamina.errors import UserError
from jaxlamina.planner import traces

# FineInfer, section 4.1
PUBLISHED = {"sharegpt-like": (161.31, 337.99), "alpaca-like": (19.31, 58.45)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_drawn_lengths_have_the_published_means(name: str) -> None:
    sizes = drawn(name, 100_000, seed=3)
    assert means(sizes) == pytest.approx(PUBLISHED[name], rel=0.02)
    assert min(min(size) for size in sizes) >= 4 and max(max(size) for size in sizes) <= 1024


@pytest.mark.parametrize("name", traces.NAMES)
def test_lengths_are_drawn_from_all_of_a_trace(name: str) -> None:
    known = sizes_in(traces.load(name))
    found = drawn(name, 3000, seed=1)
    assert set(found) <= set(known) and len({known.index(size) > len(known) // 2 for size in found}) == 2
    assert means(found) == pytest.approx(means(known), rel=0.1)


def test_the_command_line_knows_their_names() -> None:
    assert serve_cli.DRAWN == DRAWN


@given(
    st.sampled_from(DRAWN),
    st.integers(1, 50),
    st.integers(0, 2**32),
    st.one_of(st.none(), st.integers(1000, 4096)),
)
def test_draws_are_as_many_reproducible_and_short_enough(
    name: str, n: int, seed: int, most: int | None
) -> None:
    sizes = drawn(name, n, seed=seed, most_tokens=most)
    assert len(sizes) == n and sizes == drawn(name, n, seed=seed, most_tokens=most)
    assert most is None or all(size.n_prompt + size.n_output <= most for size in sizes)


def test_a_limit_that_nothing_meets_is_said() -> None:
    with pytest.raises(UserError, match="at most 7 tokens"):
        drawn("sharegpt-like", 3, seed=0, most_tokens=7)


@given(
    st.integers(0, 200),
    st.floats(1e-3, 1e4) | st.just(math.inf),
    st.floats(1e-2, 1e2),
    st.integers(0, 2**32),
)
def test_arrivals_begin_at_zero_and_rise(n: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrivals(n, rate, burstiness, seed=seed)
    assert len(times) == n and times[:1] == [0.0][:n]
    assert all(a <= b for a, b in pairwise(times)) and all(map(math.isfinite, times))
    assert times == arrivals(n, rate, burstiness, seed=seed)
    if math.isinf(rate):
        assert times == [0.0] * n


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(burstiness: float) -> None:
    gaps = np.diff(arrivals(200_000, 8.0, burstiness, seed=1))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, math.inf)])
def test_impossible_rates_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(UserError, match="must be above 0"):
        arrivals(3, rate, burstiness)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.9000000,374,44\n"
        "2023-11-17 00:00:01.4000000,5,6\n2023-11-17 00:00:00.1500001,396,109\n"
        "2023-11-17 00:00:02.0000000,12,0\n",
        encoding="utf-8-sig",
    )
    sizes, times = read_trace(file)
    assert sizes == [Size(374, 44), Size(396, 109), Size(5, 6)]
    assert times == pytest.approx([0.0, 0.25, 1.5])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,374\n", "line 2: KeyError"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,4\nyesterday,1,2\n", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,4\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46\n", "line 2: TypeError"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
        ("", "has no request"),
    ],
)
def test_a_wrong_trace_is_named(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=what):
        read_trace(file)
    with pytest.raises(UserError, match="cannot read"):
        read_trace(tmp_path / "none.csv")
