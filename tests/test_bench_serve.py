"""`bench serve`: what is made of times, how streams of different servers are read, and a load on a real
server."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_examples import tiny_words_folder
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from jaxlamina.bench.cli import app
from jaxlamina.bench.loads import Size
from jaxlamina.bench.serve_client import RefusedByServer, Stream, Target, prompts
from jaxlamina.bench.serve_metrics import (
    TITLES,
    TimedAnswer,
    Wanted,
    errors,
    keeps,
    most_at_once,
    parse_goodput,
    parse_percentiles,
    samples_ms,
    summary,
)
from jaxlamina.bench.server_process import serving
from jaxlamina.cli.main import main
from jaxlamina.errors import UserError

AT_ONCE = 3  # what the tests' server takes


# --- what is made of times ---


@st.composite
def answers(draw: st.DrawFn) -> TimedAnswer:
    sent_s = draw(st.floats(0, 1e4))
    n_prompt = draw(st.integers(1, 5000))
    if draw(st.booleans()):
        return TimedAnswer(
            n_prompt, 0, sent_s, end_s=sent_s + draw(st.floats(0, 100)), error=draw(st.sampled_from("ab"))
        )
    gaps = draw(st.lists(st.floats(0, 50), min_size=1, max_size=20))
    times = tuple((sent_s + np.cumsum(gaps)).tolist())
    n_output = draw(st.integers(len(times), 3 * len(times)))
    return TimedAnswer(n_prompt, n_output, sent_s, times, times[-1])


@given(st.lists(answers(), max_size=20), st.floats(0.1, 1e4))
def test_a_summary_is_of_the_answers_without_an_error(found: list[TimedAnswer], duration_s: float) -> None:
    good = [a for a in found if a.error is None]
    s = summary(found, duration_s, percentiles=(50, 100))
    assert (s["completed"], s["failed"]) == (len(good), len(found) - len(good))
    assert s["total_output_tokens"] == sum(a.n_output for a in good)
    assert s["total_token_throughput"] * duration_s == pytest.approx(
        sum(a.n_prompt + a.n_output for a in good)
    )
    assert s == summary(good, duration_s, percentiles=(50, 100)) | {"failed": s["failed"]}
    for name in TITLES:
        values = samples_ms(found, name)
        if not values:
            assert s[f"mean_{name}_ms"] is None and s[f"p50_{name}_ms"] is None
            continue
        assert s[f"p100_{name}_ms"] == pytest.approx(max(values))
        assert s[f"p50_{name}_ms"] == pytest.approx(s[f"median_{name}_ms"])
        assert min(values) <= s[f"mean_{name}_ms"] + 1e-6 and s[f"mean_{name}_ms"] <= max(values) + 1e-6


def test_metrics_of_one_answer_are_their_definitions() -> None:
    answer = TimedAnswer(7, 5, sent_s=10.0, token_s=(10.5, 10.6, 10.9), end_s=11.3)
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.e2el_s == pytest.approx(1.3)
    assert answer.tpot_s == pytest.approx((1.3 - 0.5) / 4)
    assert answer.itl_s == pytest.approx([0.1, 0.3])
    assert answer.normalised_s == pytest.approx(1.3 / 5)
    assert TimedAnswer(7, 1, 10.0, (10.5,), 10.5).tpot_s is None
    assert samples_ms([TimedAnswer(7, 1, 10.0, (10.5,), 10.5)], "tpot") == []


@given(
    st.lists(answers(), max_size=20),
    st.dictionaries(st.sampled_from(["ttft", "tpot", "e2el"]), st.floats(1, 1e5)),
)
def test_goodput_counts_requests_within_all_limits(
    found: list[TimedAnswer], limits: dict[str, float]
) -> None:
    good = [a for a in found if a.error is None]
    s = summary(found, 4.0, limits_ms=limits)
    kept = [
        a for a in good if all(max([0.0, *samples_ms([a], name)]) <= limit for name, limit in limits.items())
    ]
    assert [a for a in good if keeps(a, limits)] == kept
    assert s.get("request_goodput") == (len(kept) / 4.0 if limits else None)
    looser = {name: math.inf for name in limits}
    assert summary(found, 4.0, limits_ms=looser).get("request_goodput", len(good) / 4.0) == len(good) / 4.0


@given(st.lists(answers(), max_size=12))
def test_most_at_once_is_met_at_a_beginning(found: list[TimedAnswer]) -> None:
    at_beginnings = [sum(o.sent_s <= a.sent_s < o.end_s for o in found) for a in found]
    lasting = [a for a in found if a.end_s > a.sent_s]
    assert most_at_once(lasting) == max(
        [0, *(n for n, a in zip(at_beginnings, found, strict=True) if a in lasting)]
    )


def test_errors_are_counted_the_most_frequent_first() -> None:
    found = [TimedAnswer(1, 0, 0.0, error=text) for text in "abbb"] + [TimedAnswer(1, 1, 0.0, (1.0,), 1.0)]
    assert errors(found) == [("b", 3), ("a", 1)]


def test_options_are_read_as_vllm_writes_them() -> None:
    wanted = Wanted.parse("ttft, itl,ttft", "50,99.9", [])
    assert (wanted.names, wanted.percentiles, wanted.limits_ms) == (["ttft", "itl"], [50.0, 99.9], {})
    assert parse_goodput(["ttft:200", "tpot:50"]) == {"ttft": 200.0, "tpot": 50.0}
    assert parse_goodput(["ttft:200,tpot:50 e2el:1e4"]) == {"ttft": 200.0, "tpot": 50.0, "e2el": 1e4}
    for wrong in (["ttft"], ["itl:3"], ["ttft:-1"], ["ttft:x"], ["ttft:nan"]):
        with pytest.raises(UserError, match="--goodput"):
            parse_goodput(wrong)
    for wrong_text in ("", "0", "101", "x", "nan"):
        with pytest.raises(UserError, match="must be numbers"):
            parse_percentiles(wrong_text)
    with pytest.raises(UserError, match="'tftt' is not one of"):
        Wanted.parse("tftt", "50", [])


# --- streams ---


def read(*events: Any) -> Stream:
    stream = Stream()
    for i, event in enumerate(events):
        data = event if isinstance(event, str) else "data: " + json.dumps(event)
        stream.take(data.encode() + b"\n", float(i))
        stream.take(b"\n", float(i))
    return stream


def test_a_chat_stream_is_timed_by_its_tokens() -> None:
    stream = read(
        ": keep-alive",
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None},
        {"choices": [{"index": 0, "delta": {"reasoning_content": "so"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": ""}}]},
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "far"}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}},
        "data: [DONE]",
    )
    stream.check()
    answer = stream.answer(Size(8, 2), sent_s=-1.0)
    assert answer == TimedAnswer(9, 3, -1.0, (2.0, 3.0, 4.0, 5.0), 6.0)


def test_a_server_that_counts_no_tokens_has_its_pieces_counted() -> None:
    chunks = [{"choices": [{"text": t, "finish_reason": None}]} for t in ("a", "", "b")]
    answer = read(*chunks, "data: [DONE]").answer(Size(8, 3), sent_s=0.0)
    assert (answer.n_prompt, answer.n_output, answer.usage) == (8, 3, False)
    assert (answer.token_s, answer.end_s) == ((0.0, 1.0, 2.0), 2.0), "a token need not have text"


def test_an_answer_without_text_ends_with_its_only_token() -> None:
    answer = read({"choices": [{"text": "", "finish_reason": "length"}]}).answer(Size(8, 1), sent_s=-2.0)
    assert (answer.ttft_s, answer.e2el_s, answer.tpot_s, answer.itl_s) == (2.0, 2.0, None, [])
    assert keeps(answer, {"tpot": 1.0})


def test_an_answer_of_which_only_the_end_is_told_keeps_no_limit_of_its_tokens() -> None:
    chunks = [
        ": keep-alive",
        {"choices": [{"text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 6}},
    ]
    answer = read(*chunks, "data: [DONE]").answer(Size(8, 6), sent_s=-2.0)
    assert (answer.n_output, answer.ttft_s, answer.tpot_s) == (6, 3.0, None)
    assert keeps(answer, {"ttft": 3000.0}) and not keeps(answer, {"tpot": 1e9})
    assert samples_ms([answer], "tpot") == samples_ms([answer], "itl") == []


def test_streams_that_fail_are_refused() -> None:
    with pytest.raises(RefusedByServer, match="broke off"):
        read({"choices": [{"text": "a"}]}).check()
    with pytest.raises(RefusedByServer, match="too hot"):
        read({"error": {"message": "too hot", "code": 500}})


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**32))
def test_prompts_have_their_length_and_differ(lengths: list[int], seed: int) -> None:
    sizes = [Size(n, 1) for n in lengths]
    made = prompts(sizes, range(100, 10_000), seed=seed)
    assert [len(p) for p in made] == lengths and all(100 <= i < 10_000 for p in made for i in p)
    assert [len(p.split()) for p in prompts(sizes, None, seed=seed) if isinstance(p, str)] == lengths
    assert len({tuple(p) for p in made if len(p) > 5}) == sum(n > 5 for n in lengths)


def test_a_body_is_what_its_endpoint_takes() -> None:
    completion = Target("http://x", "completions", "m", ignore_eos=True).body([1, 2], 5)
    assert (
        completion["prompt"] == [1, 2] and completion["max_tokens"] == 5 and completion["ignore_eos"] is True
    )
    chat = Target("http://x", "chat", "m").body("hello", 5)
    assert chat["messages"][0]["content"] == "hello" and chat["max_completion_tokens"] == 5
    assert "ignore_eos" not in chat and chat["stream_options"] == {"include_usage": True}


# --- a real server ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=128)
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    options = [
        "--model",
        str(folder),
        "--served-model-name",
        "tiny",
        "--no-warm-up",
        "--chat-template",
        template,
    ]
    options += ["--max-num-seqs", "4", "--max-concurrent-requests", str(AT_ONCE), "--api-key", "secret"]
    with serving(options, deadline_s=240) as url:
        yield url


def bench(server: str, *options: str) -> Any:
    words = ["serve", "--base-url", server + "/v1/", "--api-key", "secret", *options]
    return CliRunner().invoke(app, words)


def record_of(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_a_load_of_completions_is_timed(server: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--num-prompts", "7", "--input-len", "6", "--output-len", "5", "--ignore-eos"]
    words += [
        "--max-concurrency",
        str(AT_ONCE),
        "--metric-percentiles",
        "99.9,50",
        "--save-result",
        str(file),
    ]
    result = bench(server, *words, "--goodput", "ttft:1e9", "tpot:1e9")
    record = record_of(result)
    assert record["bench"] == "serve" and record["model"] == "tiny" and record["request_rate"] is None
    assert (record["completed"], record["failed"]) == (7, 0)
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (7 * 6, 7 * 5)
    assert record["max_concurrent_requests"] <= AT_ONCE
    assert record["request_goodput"] == record["request_throughput"] == pytest.approx(7 / record["duration"])
    assert 0 < record["mean_ttft_ms"] < record["mean_e2el_ms"] <= record["p99.9_e2el_ms"]
    assert {"device", "versions", "date", "load"} <= record.keys() and "aiohttp" in record["versions"]
    saved = json.loads(file.read_text())
    assert saved["output_lens"] == [5] * 7 and [len(itl) for itl in saved["itls"]] == [4] * 7
    assert {name: saved[name] for name in record} == record
    assert (
        "ITL: inter-token latency" in result.stdout
        and "…" not in result.stdout
        and "goodput (ttft ≤ 1e+09 ms" in result.stdout
    )


def test_a_trace_is_played_at_its_own_times(server: str, tmp_path: Path) -> None:
    file, saved = tmp_path / "trace.csv", tmp_path / "result.json"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0000000,4000,44\n"
        "2023-11-16 18:15:46.5000000,3,4\n2023-11-16 18:15:47.5000000,9,2\n2023-11-16 18:15:48.5000000,5,1\n"
    )
    words = ["--dataset-name", "trace", "--dataset-path", str(file), "--speedup", "10", "--num-prompts", "2"]
    result = bench(server, *words, "--ignore-eos", "--save-result", str(saved))
    record = record_of(result)
    assert (record["completed"], record["num_too_long"]) == (2, 1) and record["duration"] >= 0.1
    assert "left out: 1 requests longer" in result.stdout
    found = json.loads(saved.read_text())
    assert found["arrivals"] == pytest.approx([0.0, 0.1])
    assert (found["input_lens"], found["output_lens"]) == ([3, 9], [4, 2])


def test_chats_arrive_at_a_rate(server: str) -> None:
    words = [
        "--endpoint",
        "chat",
        "--num-prompts",
        "4",
        "--input-len",
        "8",
        "--output-len",
        "3",
    ]
    words += ["--request-rate", "50", "--burstiness", "0.5", "--ignore-eos", "--max-concurrency", "2"]
    record = record_of(bench(server, *words, "--percentile-metrics", "tpot", "--json"))
    assert (record["completed"], record["total_input_tokens"], record["total_output_tokens"]) == (4, 32, 12)
    assert "p90_tpot_ms" in record and "p90_ttft_ms" not in record


def test_what_was_measured_is_told_though_it_cannot_be_saved(server: str) -> None:
    result = bench(
        server, "--num-prompts", "1", "--input-len", "4", "--output-len", "2", "--save-result", "/dev/full"
    )
    assert isinstance(result.exception, UserError) and "cannot write --save-result" in str(result.exception)
    assert json.loads(result.stdout.splitlines()[-1])["completed"] == 1


def test_failed_requests_are_counted_and_shown(server: str) -> None:
    words = ["--num-prompts", "12", "--input-len", "6", "--output-len", "100", "--ignore-eos"]
    result = bench(server, *words)
    record = record_of(result)
    assert record["failed"] > 0 and record["completed"] >= AT_ONCE
    assert record["completed"] + record["failed"] == 12
    [(text, n)] = record["errors"].items()
    assert "429" in text and n == record["failed"] and f"{n} failed: {text}" in result.stdout


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--model", "other"], "does not serve 'other', but 'tiny'"),
        (["--endpoint", "embeddings"], "--endpoint 'embeddings' must be completions or chat"),
        (["--endpoint", "chat", "--token-ids"], "--token-ids is of --endpoint completions"),
        (["--input-len", "4000"], "longer than the 128 tokens"),
        (["--dataset-name", "trace"], "--dataset-path goes with"),
        (
            ["--dataset-name", "alpaca"],
            "must be one of random, sharegpt-like, alpaca-like, azure-conversation, azure-code, kimi",
        ),
        (["--speedup", "0"], "--speedup 0 must be above 0"),
        (["--request-rate", "0"], "must be above 0"),
        (["tpot:50"], "takes options alone"),
        (["--speedup", "2"], "--speedup is of --dataset-name trace"),
        (["--burstiness", "2"], "--burstiness is of arrivals at a --request-rate"),
        (["--dataset-name", "sharegpt-like", "--input-len", "9"], "--input-len is of --dataset-name random"),
        (["--dataset-name", "trace", "--dataset-path", "x.csv", "--burstiness", "2"], "trace has its own"),
        (["--dataset-name", "trace", "--dataset-path", "x.csv", "--output-len", "2"], "--output-len is of"),
        (["--save-result", "/"], "--save-result '/' is a folder"),
        (["--save-result", "/nowhere/x.json"], "there is no such folder"),
        (["--api-key", "a\nb"], "the API key has signs"),
        (["--api-key", "sk-→"], "the API key has signs"),
        (["--api-key", "wrong"], "answers with status 401"),
    ],
)
def test_what_cannot_be_done_is_one_line(server: str, options: list[str], what: str) -> None:
    result = bench(server, *options)
    assert isinstance(result.exception, UserError)
    assert what in str(result.exception) and "\n" not in str(result.exception)


@pytest.fixture(scope="module")
def of_shape(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a shape alone: random weights and no tokenizer, so that no token has any text."""
    folder = tiny_words_folder(tmp_path_factory.mktemp("shape"), max_position_embeddings=64)
    options = ["--model", str(folder / "tiny.toml"), "--load-format", "dummy", "--no-warm-up"]
    with serving([*options, "--max-num-seqs", "4"], deadline_s=240) as url:
        yield url


LOAD = ["--num-prompts", "5", "--input-len", "6", "--output-len", "7", "--ignore-eos"]


def test_tokens_of_a_server_without_a_tokenizer_are_timed_one_by_one(of_shape: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    record = record_of(bench(of_shape, *LOAD, "--token-ids", "--save-result", str(file)))
    assert (record["completed"], record["token_ids"]) == (5, True)
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (5 * 6, 5 * 7)
    saved = json.loads(file.read_text())
    assert [len(itl) for itl in saved["itls"]] == [6] * 5
    for ttft, itls, e2el in zip(saved["ttfts"], saved["itls"], saved["e2els"], strict=True):
        assert 0 < ttft < e2el and sum(itls) <= e2el - ttft + 1e-9


def test_a_saved_result_is_simulated_beside_what_was_measured(
    of_shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    words = [*LOAD, "--token-ids", "--request-rate", "50", "--save-result", str(file)]
    record = record_of(bench(of_shape, *words))
    capsys.readouterr()
    simulate = ["simulate", "--model", "llama-3-8b", "--trace", str(file)]
    assert main([*simulate, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # The server said what its host had to do, and that is simulated unless something else is asked for.
    assert record["host_ms"] > 0 and found["host_ms"] == pytest.approx(record["host_ms"])
    assert main([*simulate, "--host-ms", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_ms"] == 0
    assert (found["n_requests"], found["n_left_out"]) == (5, 0)
    shown = {
        "output_throughput",
        *(f"{s}_{m}_ms" for s in ("mean", "p50", "p90", "p99") for m in ("tpot", "ttft")),
    }
    assert found["compared"].keys() == shown
    for name, one in found["compared"].items():
        assert one["measured"] == pytest.approx(record[name])
        assert one["error"] == pytest.approx(one["simulated"] / one["measured"] - 1)
    assert found["compared"]["p50_tpot_ms"]["simulated"] == pytest.approx(1e3 * found["tpot_s"]["p50"])
    for options in (["--speedup", "2"], ["--hours", "0.001"]):  # another load
        assert main([*simulate, "--json", *options]) == 0
        assert "compared" not in json.loads(capsys.readouterr().out)
    again = record_of(bench(of_shape, "--dataset-name", "trace", "--dataset-path", str(file), "--token-ids"))
    assert (again["completed"], again["total_input_tokens"]) == (5, 5 * 6)


def test_a_server_without_a_tokenizer_names_the_option(of_shape: str) -> None:
    for endpoint in ("completions", "chat"):
        error = bench(of_shape, *LOAD, "--endpoint", endpoint).exception
        assert isinstance(error, UserError) and "\n" not in str(error)
        assert "this model has no tokenizer" in str(error) and "--token-ids" in str(error)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    result = CliRunner().invoke(app, ["serve", "--port", port])
    assert isinstance(result.exception, UserError) and "is no server of OpenAI's API" in str(result.exception)
