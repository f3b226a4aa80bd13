"""`bench heavy`: what is made of times, and a few heavy requests to a real server."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from benches import bench, refused
from checkpoint_examples import tiny_words_folder
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.bench.heavy import Heavy, heavy_requests
from jaxlamina.bench.heavy_bench import Span, _Round, effect
from jaxlamina.bench.server_process import serving
from jaxlamina.errors import UserError

REQUEST = Heavy("x", "/v1/completions", b"a" * 2**19)


def even(start_s: float, end_s: float, every_s: float) -> list[Span]:
    n = round((end_s - start_s) / every_s)
    return [(start_s + i * every_s, start_s + (i + 1) * every_s) for i in range(n)]


@given(st.floats(0.01, 0.1), st.floats(1.5, 20))
def test_others_that_are_slower_beside_it_are_seen(every_s: float, slower: float) -> None:
    rounds = [
        _Round((t, t + 10), (t + 10, t + 20), [("413", 2.0), ("400", 4.0), ("413", 3.0)]) for t in (0, 20, 40)
    ]
    texts = [
        span
        for t in (0, 20, 40)
        for span in even(t, t + 10, every_s) + even(t + 10, t + 20, every_s * slower)
    ]
    healths = [*even(0, 60, 0.5), (11.0, 14.0)]
    found = effect(REQUEST, rounds, texts, healths)
    # The piece that was on its way when a window began is the heavy request's, so it is seen to be no less.
    assert found.ratio == pytest.approx(slower) and found.mib == 0.5
    assert found.alone_itl_ms == pytest.approx(1e3 * every_s)
    assert found.beside_health_ms == pytest.approx(3000) and found.alone_health_ms == pytest.approx(500)
    assert found.statuses == {"413": 6, "400": 3} and found.answer_s == 3.0
    assert not found.is_met


def test_a_stall_that_outlasts_the_window_is_the_heavy_requests() -> None:
    texts = [*even(0, 9, 0.1), (9.0, 15.0), *even(15, 20, 0.1)]
    found = effect(REQUEST, [_Round((0, 10), (10, 14), [("200", 4.0)])], texts, even(0, 20, 0.1))
    assert found.beside_itl_ms > 1000 and found.alone_itl_ms == pytest.approx(100)
    assert not found.is_met


def test_a_window_without_text_says_nothing() -> None:
    with pytest.raises(UserError, match="choose a longer --window"):
        effect(REQUEST, [_Round((0, 1), (1, 2), [("200", 1.0)])], [(0.0, 5.0)], [])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=128)
    options = ["--model", str(folder), "--wait-for-all", "--no-split", "--max-num-seqs", "2"]
    with serving(options, deadline_s=240) as url:
        yield url


def words(server: str, only: str) -> list[str]:
    options = ["--base-url", server, "--window", "1.5", "--rounds", "1", "--output-len", "30", "--only", only]
    return ["heavy", *options]


def test_heavy_requests_take_their_turns(server: str) -> None:
    record, shown = bench(*words(server, "empty messages, floats"))
    assert [x["name"] for x in record["effects"]] == ["empty messages", "floats"]
    for x, status in zip(record["effects"], ("400", "413"), strict=True):
        assert x["statuses"].keys() <= {status, "closed"} and sum(x["statuses"].values()) >= 1
        figures = [x[k] for k in ("answer_s", "beside_itl_ms", "alone_itl_ms", "beside_health_ms", "ratio")]
        assert all(math.isfinite(f) and f > 0 for f in figures)
        assert x["is_met"] == (x["ratio"] <= 2 and x["beside_health_ms"] <= 250)
    assert {"device", "versions", "date"} <= record.keys() and "…" not in shown
    assert "empty messages" in shown and "/health ms" in shown


def test_a_wrong_name_is_one_line(server: str) -> None:
    assert "not one of floats, " in refused(*words(server, "nothing"))


def test_names_are_each_ones_own() -> None:
    names = [request.name for request in heavy_requests()]
    assert len(set(names)) == len(names) > 10
