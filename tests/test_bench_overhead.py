"""`bench overhead`: the same requests through engine, server and command line, all of them real."""

from __future__ import annotations

from pathlib import Path

import pytest
from benches import bench, refused
from checkpoint_examples import tiny_words_folder

from jaxlamina.bench.loads import Size
from jaxlamina.bench.overhead_bench import CaseTimes, Numbers, OverheadCase, cases_of, quartiles
from jaxlamina.bench.server_process import serving
from jaxlamina.errors import UserError


def test_layers_are_told_by_differences_within_an_attempt() -> None:
    times = CaseTimes(
        OverheadCase(Size(4, 2), 3),
        engine=[10.0, 20.0, 12.0],
        server=[13.0, 24.0, 14.0],
        command=[20.0, 29.0, 21.0],
        forward=[8.0, 16.0, 9.0],
        tokenise=[0.5, 0.5, 0.5],
        detokenise=[0.5, 0.5, 0.5],
        outside=[1.0, 2.0, 1.0],
        start=[4.0, 3.0, 4.0],
    )
    assert list(times.layers().values()) == [9.0, 2.0, 0.5, 0.5, 1.0, 2.0, 4.0, 3.0]
    found = times.to_dict()
    assert found["components"]["engine"] == {"q1_s": 11.0, "median_s": 12.0, "q3_s": 16.0}
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)


def test_numbers_of_a_server_are_read_from_its_metrics() -> None:
    head = "# HELP vllm:x what it is\n# TYPE vllm:x counter\n"
    name = "vllm:e2e_request_latency_seconds"

    def numbers(total: float, n: int, tokens: int, steps: int) -> Numbers:
        return Numbers(
            f'{head}{name}_bucket{{model_name="a b",le="1.0"}} 7\n{name}_sum{{model_name="a b"}} {total}\n'
            f'{name}_count{{model_name="a b"}} {n}.0\nvllm:generation_tokens_total{{model_name="a b"}} '
            f"{tokens}\n"
            f'jaxlamina:engine_steps_total{{model_name="a b"}} {steps}\n'
        )

    before, after = numbers(1.0, 2, 100, 50), numbers(7.0, 5, 160, 70)
    assert after.engine_latency_s(before) == 2.0
    assert after.batch(before) == 3.0
    assert after.engine_latency_s(after) is None and after.batch(after) is None


def test_cases_are_prompt_and_output_tokens() -> None:
    assert cases_of("256x128,1X2", 3) == [OverheadCase(Size(256, 128), 3), OverheadCase(Size(1, 2), 3)]
    for wrong in ("", "256", "0x3", "ax3", "1x2x3"):
        with pytest.raises(UserError, match="--case"):
            cases_of(wrong, 3)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--request-rate", "1,0"], "must be numbers above 0"),
        (["--request-rate", "1", "--dataset-name", "x"], "must be one of"),
        (["--case", "big"], "--case 'big'"),
    ],
)
def test_what_cannot_be_done_is_one_line(options: list[str], what: str) -> None:
    assert what in refused("overhead", *options)


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(UserError, match="the server ended: error: .*no-such-folder"),
        serving(["--model", "no-such-folder"], deadline_s=120),
    ):
        raise AssertionError("it does not start")


def test_every_layer_is_timed(tmp_path: Path) -> None:
    folder = tiny_words_folder(tmp_path, max_position_embeddings=64)
    options = ["--model", str(folder), "--case", "6x4", "--attempts", "1", "--copies", "2", "--no-warm-up"]
    options += ["--max-num-seqs", "2", "--max-model-len", "48", "--request-rate", "50", "--num-prompts", "3"]
    record, shown = bench("overhead", *options)
    [case] = record["cases"]
    assert (case["n_prompt"], case["n_output"], case["copies"], case["n_attempts"]) == (6, 4, 2, 1)
    components = {name: found["median_s"] for name, found in case["components"].items()}
    assert list(components) == ["forward", "engine", "server", "command"] and min(components.values()) > 0
    assert case["layers_s"]["engine: tokenise"] > 0 and case["layers_s"]["engine: detokenise"] > 0
    assert case["layers_s"]["server: HTTP, JSON, threads"] > 0
    assert sum(case["layers_s"].values()) == pytest.approx(components["command"])
    [load] = record["loads"]
    assert (load["n_requests"], load["n_failed"]) == (3, 0) and 1 <= load["batch"] <= 2
    assert 0 < load["engine_s"] < load["client_s"] and load["normalised_s"] > 0
    assert "where the time goes" in shown and "normalised latency" in shown
