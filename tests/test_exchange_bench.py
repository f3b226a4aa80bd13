"""`bench exchange` with real ranks and tiny arrays: that it measures what it says, in the form it says. No
time is judged."""

from __future__ import annotations

import xml.etree.ElementTree
from typing import Any

import pytest
from benches import bench, refused
from typer.testing import CliRunner

from jaxlamina.bench import exchange_bench
from jaxlamina.bench.cli import app
from jaxlamina.bench.exchange_bench import ExchangePeer, ExchangeReport, Point
from jaxlamina.bench.exchange_cli import _parts, _title
from jaxlamina.bench.exchange_ranks import RankError
from jaxlamina.bench.machine import Machine
from jaxlamina.bench.report import show
from jaxlamina.errors import UserError

TRANSPORTS = (pytest.param("mpi", marks=pytest.mark.mpi), "xla")


def report(kind: str, round_trip_us: float, size_bytes: int, limit: float = 450e9) -> ExchangeReport:
    points = [Point("xla", size_bytes, 10, (round_trip_us, 3 * round_trip_us, round_trip_us))]
    return ExchangeReport({"xla": [kind, kind]}, points, 3, "the link, as given", limit, {"mpi": "no mpirun"})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_round_trips_of_real_ranks(transport):
    seen: list[str] = []
    found = exchange_bench.measure(
        [ExchangePeer.parse(transport)],
        [4096, 256],
        n_rounds=3,
        link_bytes_per_s=1e9,
        on_progress=seen.append,
    )
    assert [(p.peer, p.size_bytes, len(p.rounds_us)) for p in found.points] == [
        (transport, 4096, 3),
        (transport, 256, 3),
    ]
    for p in found.points:
        assert min(p.rounds_us) > 0 and p.n_turns >= 4
        assert p.bytes_per_s == pytest.approx(p.size_bytes / (p.round_trip_us / 2e6))
    assert found.devices == {transport: ["cpu", "cpu"]} and not found.left_out and not found.on_gpus
    assert (found.limit, found.limit_bytes_per_s) == ("the link, as given", 1e9)
    assert seen[0] == f"{transport}: starting two ranks" and seen[-1] == "round 3 of 3: 256 B"


def test_what_comes_back_changed_is_no_measurement(monkeypatch):
    ask = exchange_bench.Ranks.ask

    def wrong(ranks: Any, request: Any, deadline_s: float = 120.0) -> Any:
        answers = ask(ranks, request, deadline_s)
        if request["do"] == "time":
            answers[0]["right"] = False
        return answers

    monkeypatch.setattr(exchange_bench.Ranks, "ask", wrong)
    with pytest.raises(RankError, match="xla: what came back was not what was sent, at 4 KiB"):
        exchange_bench.measure([ExchangePeer.parse("xla")], [4096], n_rounds=1)


def test_a_peer_that_cannot_start_is_left_out_with_its_reason():
    bad = ExchangePeer.parse("xla:PYTHONHOME=/nowhere")
    found = exchange_bench.measure([bad, ExchangePeer.parse("xla")], [4096], n_rounds=1)
    assert [p.peer for p in found.points] == ["xla"]
    assert "rank 0, 1 ended with exit code 1" in found.left_out[bad.label]
    said = refused("exchange", "--transport", bad.label, "--platform", "cpu")
    assert said.startswith(f"no transport could be measured: {bad.label}: rank")


def test_the_command_prints_a_table_draws_and_ends_in_json(tmp_path):
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install matplotlib")
    svg = tmp_path / "exchange.svg"
    arguments = ["exchange", "--transport", "xla", "--sizes", "4K,64K", "--rounds", "2", "--platform", "cpu"]
    record, shown = bench(*arguments, "--figure", str(svg))
    assert record["bench"] == "exchange" and record["aims"] == [] and record["n_rounds"] == 2
    assert [p["size_bytes"] for p in record["points"]] == [4096, 65536]
    assert record["limit"] == "one core's memory copies" and record["limit_bytes_per_s"] > 1e8
    assert any("4 KiB" in text and "xla" in text for text in shown.splitlines()[:-1])
    assert "jax" in record["versions"]
    assert xml.etree.ElementTree.parse(svg).getroot().tag.endswith("svg")
    for drawn in ("xla", "round trip, µs", "one way, GB/s"):
        assert f"<!-- {drawn} -->" in svg.read_text()
    assert len(bench(*arguments, "--json")[1].splitlines()) == 1


def test_variables_of_a_peer():
    peer = ExchangePeer.parse("xla:NCCL_PROTO=LL128;XLA_FLAGS=--a=1 --b=2")
    assert peer.transport == "xla"
    assert peer.environment == (("NCCL_PROTO", "LL128"), ("XLA_FLAGS", "--a=1 --b=2"))
    for text in ("tcp", "xla:NCCL_PROTO", "mpi:=3"):
        with pytest.raises(UserError, match="--transport"):
            ExchangePeer.parse(text)


def test_sizes():
    assert exchange_bench.SIZES_BYTES[0] == 4 * 2**10 and exchange_bench.SIZES_BYTES[-1] == 64 * 2**20
    assert exchange_bench.parse_sizes("4K, 1MiB,12,4k") == [4096, 2**20, 12]
    assert [exchange_bench.size_text(n) for n in (12, 4096, 2**20, 3 * 2**19)] == [
        "12 B",
        "4 KiB",
        "1 MiB",
        "1536 KiB",
    ]
    for text in ("", "5", "2", "1G", "4K;8K"):
        with pytest.raises(UserError, match="--sizes"):
            exchange_bench.parse_sizes(text)


def test_platforms(monkeypatch):
    assert exchange_bench.platforms("cuda,cpu") == ("cuda", "cpu")
    assert exchange_bench.platforms("cuda") == ("cuda", "cuda")
    for text in ("gpu", "cpu,cpu,cpu", ""):
        with pytest.raises(UserError, match="--platform"):
            exchange_bench.platforms(text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert exchange_bench.platforms("auto") == ("cpu", "cpu")
    with pytest.raises(UserError, match="one platform for all ranks"):
        exchange_bench.measure([ExchangePeer.parse("xla")], platform=("cuda", "cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figure", "x.jpeg"], "must end in .svg, .png or .pdf"),
        (["--figure", "/nowhere/x.svg"], "no such folder"),
        (["--sizes", "3"], "multiples of 4 bytes"),
        (["--transport", "nccl"], "must be mpi or xla"),
        (["--platform", "tpu"], "must be auto, cpu, cuda"),
    ],
)
def test_bad_options_are_found_before_anything_starts(options, message):
    assert message in refused("exchange", *options)


@pytest.mark.parametrize("link", ["inf", "nan", "0"])
def test_a_link_has_a_rate(link):
    ended = CliRunner().invoke(app, ["exchange", "--link", link])
    assert ended.exit_code == 2 and "Invalid value for '--link'" in ended.output


def test_the_limit_is_that_of_the_gpus():
    assert exchange_bench._limit(None, ["NVIDIA H200", "NVIDIA H200"]) == ("NVLink of a H200, one way", 450e9)
    assert exchange_bench._limit(None, ["NVIDIA H200", "cpu"])[0] == "one core's memory copies"
    assert exchange_bench._limit(7e9, ["NVIDIA H200"] * 2) == ("the link, as given", 7e9)
    assert exchange_bench._limit(None, ["NVIDIA H20"] * 2) == ("NVLink of a H20, one way", 450e9)
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GH200 480GB"):
        assert exchange_bench._limit(None, [kind] * 2)[0].startswith("NVLink of a ")
    for kind in (
        "NVIDIA H100 PCIe",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA H100 NVL",
        "NVIDIA L40S",
        "NVIDIA A800",
    ):
        limit, rate = exchange_bench._limit(None, [kind] * 2)
        points = [Point("xla", size, 10, (10.0,)) for size in (4096, 64 * 2**20)]
        found = ExchangeReport({"xla": [kind] * 2}, points, 3, limit, rate, {}).aims()
        assert [aim["size_bytes"] for aim in found] == [4096], "a host's copies are no aim of a link"


def test_aims_are_those_of_xla_between_gpus(capsys):
    from rich.console import Console

    assert report("cpu", 10, 4096).aims() == []
    (small,) = report("NVIDIA H200", 19.5, 4096).aims()
    assert small["met"] and small["value"] == 19.5
    (large,) = report("NVIDIA H200", 2e6 * 64 * 2**20 / 300e9, 64 * 2**20).aims()
    assert not large["met"] and large["value"] == pytest.approx(300 / 450)
    where = Machine("some processor", 2, 1.0, 0.0, "2026-01-01T00:00:00", {"jax": "0.11.2"})
    assert "NVIDIA H200, JAX 0.11.2, 2026-01-01" in _title(report("NVIDIA H200", 1, 4096), where)
    assert "some processor" in _title(report("cpu", 1, 4096), where)
    show(Console(width=100), where, _parts(report("NVIDIA H200", 19.5, 4096)))
    shown = capsys.readouterr().out
    assert "round trip of at most 20 µs: 19.5, met" in shown and "left out: mpi: no mpirun" in shown
    assert "19.5–58.5" in shown
