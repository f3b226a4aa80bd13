"""`bench throughput`: a full queue in this process, over ranks, and beside transformers' continuous
batching."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benches import bench, refused
from checkpoint_examples import tiny_words_folder
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import ROOT, TRANSPORTS

from jaxlamina.bench.loads import Size
from jaxlamina.bench.peers import flash_attention
from jaxlamina.bench.throughput_bench import ALONE, OURS, PADDED, TRANSFORMERS, Run, ThroughputReport
from jaxlamina.bench.throughput_peers import heading, needed_blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=64)


def test_all_requests_are_served_to_their_full_length(folder: Path) -> None:
    options = ["--model", str(folder), "--dataset-name", "alpaca-like", "--max-model-len", "40"]
    options += ["--num-prompts", "6", "--max-num-seqs", "4", "--rounds", "2", "--one-at-a-time", "3"]
    record, shown = bench("throughput", *options, "--max-num-batched-tokens", "8")
    assert record["bench"] == "throughput" and record["results"].keys() == {OURS, ALONE}
    n_in, n_out = record["mean_lengths"]
    for run in record["results"][OURS]:
        assert (run["n_requests"], run["n_prompt"], run["n_output"]) == (6, round(6 * n_in), round(6 * n_out))
        assert 1 < run["batch"] <= 4 and run["n_preemptions"] == 0
        assert run["output_per_s"] == pytest.approx(run["n_output"] / run["seconds"])
    assert [run["n_requests"] for run in record["results"][ALONE]] == [3, 3]
    median, low, high = record["ratios"][ALONE]
    assert low <= median <= high
    assert "ours is" in shown and "limit 3" not in shown, "the limit is of another load"
    assert {"device", "versions", "date", "load"} <= record.keys()


def test_a_steady_run_ends_when_no_request_waits(folder: Path) -> None:
    options = ["--config", str(folder / "config.json"), "--dataset-name", "random", "--input-len", "7"]
    options += ["--output-len", "10", "--max-num-seqs", "4", "--kv-present", "--steady", "--rounds", "2"]
    record, _ = bench("throughput", *options, "--num-prompts", "11")
    for run in record["results"][OURS]:  # four, and another four; when the last three begin, none waits
        assert run["n_requests"] == 8 and run["batch"] > 3.5 and run["most_at_once"] == 4
        assert 76 <= run["n_output"] <= 86 and run["n_prompt"] == 7 * 7  # without the first four
    assert "ask for more" in refused("throughput", *options, "--num-prompts", "4")
    options[options.index("10")] = "1"
    found = refused("throughput", *options, "--num-prompts", "4")
    assert "ask for more" in found, "requests that are done in their first step waited no more"


def test_a_padded_kv_cache_of_the_same_bytes_has_smaller_batches(folder: Path) -> None:
    options = ["--model", str(folder), "--dataset-name", "alpaca-like", "--max-model-len", "40"]
    options += ["--num-prompts", "12", "--max-num-seqs", "8", "--kv-slots", "120", "--padded"]
    record, shown = bench("throughput", *options)
    [token], [padded] = record["results"][OURS], record["results"][PADDED]
    assert record["kv_slots"] == 120 and token["n_output"] == padded["n_output"]
    assert padded["batch"] < token["batch"] and padded["n_preemptions"] == 0
    assert record["ratios"].keys() == {PADDED} and "KV of 120 tokens" in shown


def test_a_shape_with_random_weights_is_served_unsplit(folder: Path) -> None:
    options = ["--config", str(folder / "config.json"), "--layers", "1", "--no-split", "--json"]
    options += ["--max-num-seqs", "2"]
    options += ["--dataset-name", "random", "--input-len", "5", "--output-len", "3", "--num-prompts", "2"]
    record, shown = bench("throughput", *options)
    assert len(shown.splitlines()) == 1
    assert record["n_layers"] == 1 and not record["split"] and record["mean_lengths"] == [5, 3]


def test_a_model_of_ones_own_is_named_and_single_tokens_are_counted() -> None:
    options = ["--model", "plain_models:soft_cap_window", "--dataset-name", "random", "--input-len", "5"]
    record, _ = bench("throughput", *options, "--output-len", "1", "--num-prompts", "3", "--no-split")
    assert record["model"] == "plain_models:soft_cap_window"
    [run] = record["results"][OURS]
    assert run["most_at_once"] == run["batch"] == 3


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--config", "llama-3-8b", "--model", "x"], "give one"),
        (["--config", "llama-3-8b", "--compare", "vllm"], "must be transformers"),
        (["--config", "llama-3-8b", "--dataset-name", "sonnet"], "must be one of"),
        (["--config", "llama-3-8b", "--one-at-a-time", "33"], "at most --num-prompts 32"),
        (["--config", "llama-3-8b", "--dataset-name", "random", "--input-len", "9000"], "9128 tokens"),
        (["--layers", "1"], "--layers is for --config"),
        (["--input-len", "9"], "--input-len is of --dataset-name random"),
        (
            ["--dataset-name", "alpaca-like", "--output-len", "128"],
            "--output-len is of --dataset-name random",
        ),
        (["--steady", "--padded"], "leave one out"),
    ],
)
def test_what_cannot_be_done_is_one_line(options: list[str], what: str) -> None:
    assert what in refused("throughput", *options)


def run(seconds: float) -> Run:
    return Run(1, 0, 100, seconds)


def test_ratios_are_of_rounds_where_ways_took_turns() -> None:
    runs = {OURS: [run(1.0), run(2.0)], TRANSFORMERS: [run(4.0), run(4.0)]}
    assert ThroughputReport(runs=runs).ratio(TRANSFORMERS) == (3.0, 2.0, 4.0)
    runs[TRANSFORMERS] = [run(2.0), run(6.0)]
    assert ThroughputReport(runs=runs).ratio(TRANSFORMERS) == (2.5, 2.0, 3.0)
    assert ThroughputReport(runs=runs, in_turns=False).ratio(TRANSFORMERS) == pytest.approx((2.25, 1.5, 3.0))


@given(
    st.lists(st.builds(Size, st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=9),
    st.integers(1, 9),
)
def test_pages_hold_any_requests_at_once(sizes: list[Size], at_once: int) -> None:
    pages = [-(-(size.n_prompt + size.n_output) // 256) for size in sizes]
    assert needed_blocks(sizes, at_once) > max(sum(pages[i : i + at_once]) for i in range(len(pages)))


def test_a_heading_says_what_is_not_the_peers_best() -> None:
    assert heading("sdpa", "gpu") == "sdpa, its slow way"
    assert heading("flash_attention_2", "gpu") == "flash_attention_2" and heading("sdpa", "cpu") == "sdpa"
    report = ThroughputReport(headings={TRANSFORMERS: "sdpa, its slow way"})
    assert (
        report.heading(TRANSFORMERS) == "transformers (sdpa, its slow way)" and report.heading(OURS) == OURS
    )


def test_flash_attention_is_asked_for_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("transformers.utils.import_utils")
    assert flash_attention() is None  # on this CPU
    monkeypatch.setattr(utils, "is_flash_attn_3_available", lambda kernels_fallback_ok=False: False)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: True)  # older ones take no argument
    assert flash_attention() == "flash_attention_2"
    monkeypatch.setattr(
        utils, "is_flash_attn_3_available", lambda kernels_fallback_ok=False: kernels_fallback_ok
    )
    assert flash_attention() == "flash_attention_3"


def test_what_the_device_does_is_recorded_of_one_more_run(folder: Path) -> None:
    options = ["--model", str(folder), "--dataset-name", "random", "--input-len", "6", "--output-len", "40"]
    options += ["--num-prompts", "4", "--max-num-seqs", "2", "--profile-s", "5", "--no-split"]
    record, shown = bench("throughput", *options)
    found = record["under_load"]
    [rank] = found["ranks"]
    assert rank["rank"] == "this process" and 0 < rank["idle"] < 1 and found["n_decode_steps"] > 3
    assert rank["compute"] + rank["exchange"] + rank["idle"] == pytest.approx(1)
    assert "s under load: " in shown and "this process: compute " in shown
    [run] = record["results"][OURS]
    assert 0 < run["wait_s"] < run["seconds"] and "exposed_s" not in run


@pytest.mark.slow
def test_transformers_serves_the_same_requests(folder: Path) -> None:
    for package in ("torch", "transformers"):
        pytest.importorskip(package)
    options = ["--model", str(folder), "--dataset-name", "random", "--input-len", "6", "--output-len", "4"]
    options += ["--num-prompts", "3", "--max-num-seqs", "2", "--compare", "transformers"]
    record, shown = bench("throughput", *options)
    assert record["left_out"] == {} and record["in_turns"] and record["same_tokens"] == 3
    [theirs] = record["results"][TRANSFORMERS]
    assert theirs["n_output"] == 12 and theirs["seconds"] > 0 and record["ratios"][TRANSFORMERS][0] > 0
    assert "the same tokens as transformers: 3 of 3" in shown


@pytest.mark.slow
def test_the_demo_model_beside_transformers() -> None:
    for package in ("torch", "transformers"):
        pytest.importorskip(package)
    options = ["--dataset-name", "alpaca-like", "--num-prompts", "4", "--max-num-seqs", "4"]
    options += ["--max-model-len", "128", "--compare", "transformers", "--one-at-a-time", "4"]
    record, _ = bench("throughput", *options)
    assert record["results"].keys() == {OURS, ALONE, TRANSFORMERS} and record["same_tokens"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_over_ranks(folder: Path, transport: str) -> None:
    words = ["launch", "--dop", "1,1", "--transport", transport, "--", "bench", "throughput", "--json"]
    words += ["--model", str(folder), "--dataset-name", "random", "--input-len", "6", "--output-len", "4"]
    words += ["--num-prompts", "3", "--max-num-seqs", "2"]
    found = subprocess.run(
        [sys.executable, "-m", "jaxlamina", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    record = json.loads(found.stdout.splitlines()[-1])
    assert record["job"] == "(1, 1)" and record["results"][OURS][0]["n_output"] == 12
