"""`bench breakdown` over real ranks: every rank is on the timeline with what it does and nothing else. No
time is judged."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benches import refused
from checkpoint_examples import tiny_words_folder
from rank_jobs import run_job

from jaxlamina.bench.breakdown_bench import check
from jaxlamina.bench.step_ways import StepCase
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from launch.local import free_ports

ROOT = Path(__file__).resolve().parents[1]
SHAPE = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
N_STEPS, CASE = 3, "6x16"
KINDS = {"model", "attention", "exchange", "other", "bubble"}


def breakdown(
    tmp_path: Path,
    transport: str,
    dop: tuple[int, int],
    n_batches: int,
    tensor_parallel: int = 1,
    local_attention: float = 0,
    **options: str,
) -> Any:
    """The command's stdout, its last line as JSON, and the events of the timeline."""
    shape, timeline = tmp_path / "config.json", tmp_path / "timeline.json.gz"
    shape.write_text(json.dumps(SHAPE))
    control, coordinator = (f"127.0.0.1:{port}" for port in free_ports(2))
    keys: dict[str, Any] = {
        "control": control, "coordinator": coordinator, "n_batches": n_batches, "tensor_parallel": tensor_parallel, "model_platform": "cpu",
        "attention_platform": "cpu", "local_attention": local_attention,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "jaxlamina",
        "launch",
        f"--dop={dop[0]},{dop[1]}",
        f"--transport={transport}",
    ]
    command += [part for name, value in keys.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    command += ["--", "bench", "breakdown", f"--config={shape}", f"--case={CASE}", "--dtype=float32"]
    command += [f"--staggered={n_batches}"] if n_batches > 1 else []
    command += [f"--steps={N_STEPS}", f"--timeline={timeline}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    return done.stdout, json.loads(done.stdout.strip().splitlines()[-1]), events


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, Any]:
    """A figure's file, which is there where matplotlib is, and what `breakdown` gives."""
    folder = tmp_path_factory.mktemp("two workers")
    svg = folder / "breakdown.svg"
    options = {"figure": str(svg)} if importlib.util.find_spec("matplotlib") else {}
    return svg, *breakdown(folder, "xla", (1, 2), 2, **options)


@pytest.mark.parametrize(
    ("transport", "dop", "n_batches", "tensor_parallel"),
    [
        ("xla", (1, 2), 2, 1),
        pytest.param("xla", (1, 1), 2, 1, marks=pytest.mark.slow),
        pytest.param("xla", (2, 1), 3, 1, marks=pytest.mark.slow),
        pytest.param("xla", (2, 1), 2, 2, marks=pytest.mark.slow),
        pytest.param("mpi", (1, 1), 2, 1, marks=[pytest.mark.mpi, pytest.mark.slow]),
        pytest.param("mpi", (2, 1), 3, 1, marks=[pytest.mark.mpi, pytest.mark.slow]),
    ],
)
def test_every_rank_is_on_the_timeline_with_its_own_work(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    transport: str,
    dop: tuple[int, int],
    n_batches: int,
    tensor_parallel: int,
) -> None:
    if dop == (1, 2):
        _, _, record, events = request.getfixturevalue("two_workers")
    else:
        _, record, events = breakdown(tmp_path, transport, dop, n_batches, tensor_parallel)
    a, b = dop
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names) == list(range(a + b + 1)) and names[a + b] == "steps"
    assert ["model worker" in names[r] for r in range(a + b)] == [True] * a + [False] * b

    spans = [e for e in events if e["ph"] == "X" and e["pid"] < a + b]
    staggered = f"{n_batches} staggered"
    of_step = defaultdict(set)
    for e in spans:
        own = "model" if e["pid"] < a else "attention"
        assert e["cat"] in {own, "exchange", "other", "bubble"}
        what = e["args"]["of"], e["args"]["step"]
        of_step[(*what, e["cat"])].add((e["args"].get("index"), e["args"].get("batch")))
        of_step[(*what, "by rank", e["pid"])].add(e["cat"])
    n_layers = SHAPE["num_hidden_layers"]
    for way, n in (("one batch", 1), (staggered, n_batches)):
        for k in range(N_STEPS):
            of = f"B 6, 16 tokens, {way}", k
            # one replica runs all batches' last slice as one
            ends = range(n if a > tensor_parallel else 1)
            slices = {(i, j) for i in range(n_layers) for j in range(n)} | {(n_layers, j) for j in ends}
            assert of_step[(*of, "model")] == slices
            assert of_step[(*of, "attention")] == {(i, j) for i in range(n_layers) for j in range(n)}
            for rank in range(a + b):
                takes_part = n > 1 or tensor_parallel > 1 or rank == 0 or rank >= a
                own = {"model" if rank < a else "attention", "exchange"}
                found = of_step[(*of, "by rank", rank)]
                assert own <= found if takes_part else found == {"bubble"}
    check_lines(events, a + b)
    check_record(record, dop, n_batches)


@pytest.mark.parametrize("transport", ["xla", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.slow])])
def test_steps_that_cannot_be_recorded_end_no_job(transport: str) -> None:
    [found] = run_job(transport, 1, [("recorded", {"model": "llama"})], unreadable=True)
    there, here = found["errors"]
    assert there == "rank 1 (attention worker 0): the trace is torn" and "cannot be recorded" in here
    assert found["same"] and found["attention"] > 0, found
    ranks = found["under_load"]["ranks"]
    assert [r["rank"] for r in ranks] == ["rank 0 (model worker 0)", "rank 1 (attention worker 0)"]
    for rank in ranks:
        assert rank["error"] == "" and 0 < rank["compute"] < 1 and 0 < rank["idle"] < 1, rank
        assert rank["compute"] + rank["exchange"] + rank["idle"] == pytest.approx(1)
    assert all(rank["exchange"] > 0 for rank in ranks), ranks
    assert found["under_load"]["n_decode_steps"] >= 7


def test_profile_of_what_is_being_written(tmp_path: Path) -> None:
    """`generate --profile`: the text of one process without, and both ranks' spans of its steps."""
    tiny_folder = tiny_words_folder(tmp_path, max_position_embeddings=32)
    timeline, texts = tmp_path / "steps.json", []
    launch = ("launch", "--dop=1,1", f"--model={tiny_folder}", "--local-attention", "0", "--")
    for first, more in (((), ()), (launch, (f"--profile={timeline}",))):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "jaxlamina", *first),
                *("generate", "w3 w5 w8", "w1", f"--model={tiny_folder}", "--max-tokens=8", "--ignore-eos"),
                *more,
            ],
            check=False, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        texts.append(done.stdout)
    assert texts[0] == texts[1] and texts[0].count("\n") == 2
    assert "model pool, of " in done.stderr and "attention pool, of " in done.stderr
    events = json.loads(timeline.read_text())["traceEvents"]
    kinds = {(e["pid"], e["cat"]) for e in events if e["ph"] == "X"}
    assert {(0, "model"), (0, "exchange"), (1, "attention"), (1, "exchange")} <= kinds


def test_a_share_of_attention_is_the_model_ranks_own_work(tmp_path: Path) -> None:
    _, record, events = breakdown(tmp_path, "xla", (1, 1), 2, local_attention=0.5)
    check_lines(events, 2)
    for x in record["results"]:
        for pool in ("model", "attention"):
            assert x["pools"][pool]["shares"]["attention"] > 0, x["pools"]
        assert x["n_unmatched_exchanges"] == 0


def test_without_attention_workers_all_work_is_model_ranks(tmp_path: Path) -> None:
    _, record, events = breakdown(tmp_path, "xla", (2, 0), 1, tensor_parallel=2, local_attention=1)
    check_lines(events, 2)
    [found] = record["results"]
    assert [*found["pools"]] == ["model"] and found["n_unmatched_exchanges"] == 0
    shares = found["pools"]["model"]["shares"]
    assert min(shares[kind] for kind in ("model", "attention", "exchange")) > 0
    with pytest.raises(UserError, match=r"--staggered .* of which dop=\(2, 0\) has none: leave it out"):
        check(Cluster(dop=(2, 0), tensor_parallel=2), [StepCase(12, 16)], [2])


def check_lines(events: list[dict[str, Any]], n_ranks: int) -> None:
    """Each rank's spans fill the steps, without overlap."""
    whole = sum(e["dur"] for e in events if e["ph"] == "X" and e["pid"] == n_ranks)
    for rank in range(n_ranks):
        line = sorted(
            (e["ts"], e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, 1)
        )
        assert all(at + took <= after + 1e-2 for (at, took), (after, _) in pairwise(line))
        assert sum(took for _, took in line) == pytest.approx(whole, rel=1e-6)


def check_record(record: dict[str, Any], dop: tuple[int, int], n_batches: int) -> None:
    assert record["bench"] == "breakdown" and record["n_layers"] == 3
    assert [x["n_batches"] for x in record["results"]] == [1, n_batches]
    for x in record["results"]:
        assert x["n_steps"] == N_STEPS and x["n_unmatched_exchanges"] == 0 and x["untraced_ms"] > 0
        assert [r["pool"] for r in x["ranks"]] == ["model"] * dop[0] + ["attention"] * dop[1]
        for of in (*x["pools"].values(), *x["ranks"]):
            assert set(of["shares"]) == set(of["ms"]) == KINDS
            assert sum(of["shares"].values()) == pytest.approx(1) and min(of["shares"].values()) >= 0
            assert sum(of["ms"].values()) == pytest.approx(x["step_ms"])
        assert x["pools"]["model"]["shares"]["attention"] == x["pools"]["attention"]["shares"]["model"] == 0
        assert (
            x["pools"]["model"]["shares"]["model"] > 0 and x["pools"]["attention"]["shares"]["attention"] > 0
        )
        # With one batch the pool has nothing to do while slices run, and waits for them.
        assert x["pools"]["attention"]["shares"]["bubble"] > 0


def test_the_table_and_the_figure(two_workers: tuple[Path, Any, Any, Any]) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install matplotlib")
    svg, out, record, _ = two_workers
    assert len(record["results"][0]["ranks"]) == 3
    rows = [line for line in out.splitlines() if "attention × 2" in line]
    for row, result in zip(rows, record["results"], strict=True):
        ms = result["pools"]["attention"]["ms"]
        for kind in ("attention", "exchange", "bubble"):
            assert f"{ms[kind]:.2f}" in row
    assert "B 6, 16 tokens" in out and "2 staggered" in out
    assert xml.etree.ElementTree.parse(svg).getroot().tag.endswith("svg")
    for drawn in ("2 staggered", "exchange", "bubble", "ms a step"):
        assert f"<!-- {drawn} -->" in svg.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no ranks to record: start them with `jaxlamina launch"),
        (["--case", "64"], "requests x stored tokens"),
        (["--staggered", "1"], "numbers of at least 2"),
        (["--dtype", "int4"], "must be one of"),
        (["--timeline", "trace.txt"], "must end in .json or .json.gz"),
        (["--timeline", "/nowhere/trace.json"], "no such folder"),
        (["--figure", "x.jpeg"], "must end in .svg, .png or .pdf"),
    ],
)
def test_bad_options_are_found_before_anything_starts(options: list[str], message: str) -> None:
    assert message in refused("breakdown", *options)


def test_batches_that_a_job_cannot_run() -> None:
    case = [StepCase(12, 16)]
    check(Cluster(dop=(2, 1), n_batches=3), case, [3])
    check(Cluster(dop=(2, 1), n_batches=4, pipelining="fixed"), case, [2, 3, 4])
    check(Cluster(dop=(1, 1)), case, [2, 3])
    with pytest.raises(UserError, match="rotate 3 batches over 2 model workers; take --staggered 3"):
        check(Cluster(dop=(2, 1), n_batches=3), case, [4])
    with pytest.raises(UserError, match="of 3 model workers some would idle; take at least 3"):
        check(Cluster(dop=(3, 1), n_batches=3), case, [2])
    with pytest.raises(UserError, match="12 requests cannot be cut into 5"):
        check(Cluster(), case, [5])


@pytest.mark.parametrize(("n_cases", "n_ways"), [(1, 1), (1, 2), (3, 2)])
def test_nothing_of_the_figure_lies_outside_of_it(
    n_cases: int, n_ways: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = pytest.importorskip(
        "matplotlib", reason="the figure needs matplotlib: pip install matplotlib"
    )
    from types import SimpleNamespace

    from matplotlib.figure import Figure

    from jaxlamina.bench import breakdown_figure
    from jaxlamina.transports.scopes import KINDS

    ms = dict(zip(KINDS, (4.0, 3.0, 1.0, 0.5, 2.0), strict=True))
    pools = ["model", "attention"]
    timeline = SimpleNamespace(step_ms=10.5, pools=pools, ms=lambda ranks: ms, ranks_of=lambda pool: [0])
    found = [
        SimpleNamespace(case=f"B {64 + case}, 4,096 tokens", way=way, timeline=timeline)
        for case in range(n_cases)
        for way in ("one batch", "2 staggered")[:n_ways]
    ]
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    title = "llama-3-8b, 32 layers, bfloat16; DOP 1,1, xla by memory, heads; NVIDIA H200; JAX 0.11.2, Linux, 2026-11-21"
    breakdown_figure.draw(found, title, tmp_path / "figure.png")  # type: ignore[arg-type]
    [figure] = figures
    assert matplotlib and (tmp_path / "figure.png").stat().st_size > 5000
    figure.draw_without_rendering()
    for part in (figure._suptitle, *figure.legends, *(t for axes in figure.axes for t in axes.texts)):
        box = part.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height, (
            part
        )
