"""A saved result of `bench serve` as a trace, and what was measured beside what is simulated."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxlamina.bench.serve_metrics import TimedAnswer, summary
from jaxlamina.cli.main import main
from jaxlamina.errors import UserError
from jaxlamina.planner import traces
from jaxlamina.planner.workload import Workload
from jaxlamina.simulator import Compared

ROOT = Path(__file__).resolve().parents[1]
RESULT: dict[str, Any] = {
    "bench": "serve",
    "duration": 2.5,
    "max_concurrency": None,
    "arrivals": [0.5, 0.6, 0.9, 0.7],
    "input_lens": [900, 30, 40, 50],
    "output_lens": [0, 3, 5, 1],
    "ttfts": [None, 0.2, 0.1, 0.3],
    "e2els": [None, 0.8, 1.3, 0.3],
}
COLUMNS = ("arrivals", "input_lens", "output_lens", "ttfts", "e2els")


def written(folder: Path, **changed: Any) -> Path:
    file = folder / "result.json"
    file.write_text(json.dumps(RESULT | changed))
    return file


def one(**changed: Any) -> dict[str, Any]:
    """Columns of a request that is right, but for what is changed."""
    right = {"arrivals": 0.0, "input_lens": 9, "output_lens": 3, "ttfts": 0.1, "e2els": 0.2}
    return {name: [value] for name, value in (right | changed).items()}


def test_it_is_a_trace_of_the_requests_that_were_answered(tmp_path: Path) -> None:
    found = traces.answered(written(tmp_path))
    assert found.arrival_us.tolist() == [100_000, 200_000, 400_000]  # after the load's first
    assert (found.n_prompt.tolist(), found.n_output.tolist()) == ([30, 50, 40], [3, 1, 5])
    assert (found.n_left_out, found.seconds) == (1, 2.5)
    named = traces.named(str(tmp_path / "result.json"))
    assert isinstance(named, traces.AnsweredTrace) and named.e2el_s.tolist() == [0.8, 0.3, 1.3]
    assert Workload.of_trace("it", named).n_output == pytest.approx(3)


def test_metrics_are_those_of_bench_serve(tmp_path: Path) -> None:
    found = traces.answered(written(tmp_path))
    rows = zip(*(RESULT[name] for name in COLUMNS), strict=True)
    answers = [
        TimedAnswer(n, m, at, error="it failed")
        if ttft is None
        else TimedAnswer(n, m, at, (at + ttft,), at + e2el)
        for at, n, m, ttft, e2el in rows
    ]
    theirs = summary(answers, 2.5)
    assert found.output_per_s == pytest.approx(theirs["output_throughput"])
    assert 1e3 * found.tpot_s.mean() == pytest.approx(theirs["mean_tpot_ms"])
    assert 1e3 * found.ttft_s.mean() == pytest.approx(theirs["mean_ttft_ms"])


def test_the_table_has_both_and_says_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--trace", str(written(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "measured   simulated" in out and "TPOT p50 (ms)" in out and "TTFT p99 (ms)" in out
    assert "3.60" in out and "left out: 1 requests that failed, or have no output" in out
    assert main(["simulate", "--trace", str(written(tmp_path, **one(output_lens=1, ttfts=0)))]) == 0
    out = capsys.readouterr().out
    assert "TTFT p50" in out and "–" in out and "TPOT mean" not in out and "left out" not in out


@pytest.mark.parametrize("how", [("--speedup", "2"), ("--hours", "0.001")])
def test_another_load_is_not_beside_what_was_measured(tmp_path: Path, capsys: Any, how: tuple[str]) -> None:
    assert main(["simulate", "--trace", str(written(tmp_path)), *how]) == 0
    out, err = capsys.readouterr()
    assert "not beside what was measured: with --hours or --speedup it is another load" in err
    assert "measured   simulated" not in out


def test_an_error_is_beside_a_number_that_is_not_0() -> None:
    assert Compared(2.0, 3.0).error == pytest.approx(0.5)
    assert Compared(0.0, 3.0).error is None and Compared(5e-324, 3.0).error is None


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"bench": "step"}, "it is of bench 'step'"),
        ({"bench": None}, "it is no bench's result"),
        ({"e2els": None, "ttfts": 3}, "it has no list of ttfts, e2els"),
        ({"arrivals": [0.0]}, "lists differ in length"),
        ({name: [] for name in COLUMNS}, "no request was answered"),
        (one(ttfts=None, e2els=None), "no request was answered"),
        (one(arrivals=-1), "request 0: arrival -1 must be seconds"),
        (one(arrivals="0\n"), r"request 0: arrival '0\\n' must be seconds"),
        (one(arrivals=float("nan")), "request 0: arrival nan"),
        (one(arrivals=10**400), "request 0: arrival 1000"),
        (one(ttfts=None), "request 0: ttft None"),
        (one(ttfts=True), "request 0: ttft True"),
        (one(e2els=0.05), "request 0: e2el 0.05 must be seconds from 0.1"),
        (one(e2els=1e300), "request 0: e2el 1e"),
        (one(input_lens=2.5), "request 0: .* must be whole numbers"),
        (one(output_lens=1 << 40), "request 0: .* must be whole numbers"),
        ({"duration": 0}, "duration 0 must be seconds"),
        ({"host_ms": -1}, "host_ms -1 must be milliseconds"),
        ({"host_ms": "5"}, "host_ms '5' must be milliseconds"),
        ({"duration": [[0] * 99]}, "duration .* must be seconds"),
        ({"max_concurrency": 3}, "--max-concurrency held them back"),
        ({"max_concurrency": "3"}, "--max-concurrency held them back"),
    ],
)
def test_what_is_no_such_load_is_one_line(tmp_path: Path, changed: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what) as error:
        traces.named(str(written(tmp_path, **changed)))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500 + len(str(tmp_path))


def test_requests_that_were_not_held_back_have_arrived_when_it_says(tmp_path: Path) -> None:
    assert len(traces.answered(written(tmp_path, max_concurrency=4))) == 3


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[1]", "3", "null", "[" * 100_000, "1" * 5000, '{"bench": "serve"}', "\ud800"]
)
def test_a_file_that_is_no_result_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "result.json"
    file.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=r"result\.json: .*bench serve --save-result") as error:
        traces.named(str(file))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="cannot read the trace"):
        traces.named(str(tmp_path / "none.json"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from([*RESULT]), st.none() | st.integers(0, 3), JSON)
def test_a_spoilt_result_is_read_or_refused_in_one_line(
    tmp_path: Path, name: str, at: int | None, value: Any
) -> None:
    spoilt = copy.deepcopy(RESULT)
    if at is None or not isinstance(spoilt[name], list):
        spoilt[name] = value
    else:
        spoilt[name][at] = value
    file = tmp_path / "spoilt.json"
    file.write_text(json.dumps(spoilt))
    try:
        found = traces.answered(file)
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert len(found) + found.n_left_out == 4 and (found.arrival_us >= 0).all()
    assert (found.ttft_s <= found.e2el_s).all() and (found.tpot_s >= 0).all() and found.output_per_s > 0


def check_within_the_aims(capsys: Any, saved: str, *words: str, model: str = "llama-3-8b") -> None:
    """Of a load's file in docs/measurements."""
    file = ROOT / "docs/measurements" / saved
    how = ("--model", model, "--max-num-seqs", "64", "--json", *words)
    assert main(["simulate", "--trace", str(file), *how]) == 0
    compared = json.loads(capsys.readouterr().out)["compared"]
    assert abs(compared["output_throughput"]["error"]) < 0.05
    assert abs(compared["p50_tpot_ms"]["error"]) < 0.10


@pytest.mark.parametrize("rate", [4, 8, 12])
def test_a_load_that_an_h200_served_is_simulated_within_the_aims(rate: int, capsys: Any) -> None:
    """docs/benchmarks.md says how it was measured. No term was fitted to it, but that prompts are padded was
    seen there."""
    check_within_the_aims(capsys, f"served-h200-{rate}.json", "--compute", "h200")


@pytest.mark.parametrize("host", ["before", "quicker", "32-cores"])
@pytest.mark.parametrize("load", ["8", "12", "12-seed-31"])
def test_a_load_that_a_split_server_served_is_simulated_within_the_aims(
    host: str, load: str, capsys: Any
) -> None:
    """By what rank 0 had to do for a program in one of these nine: "quicker", 12."""
    saved = f"served-split-{host}-h100-{load}.json"
    check_within_the_aims(capsys, saved, "--compute", "h100", "--dop", "1,1")


@pytest.mark.parametrize("rate", [4, 8])
def test_so_is_another_model_with_what_its_server_said_of_its_host(rate: int, capsys: Any) -> None:
    """The host's 9.3 and 12.0 ms are by the server's own counters over that load."""
    saved = f"served-split-13b-h100-{rate}.json"
    check_within_the_aims(capsys, saved, "--compute", "h100", "--dop", "1,1", model="llama-2-13b")
