"""Tables of the command line in a narrow terminal or a pipe: every number and every name is whole."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich import box
from rich.console import Console
from rich.table import Table

from jaxlamina.bench import loads, serve_metrics
from jaxlamina.bench.machine import Machine
from jaxlamina.bench.report import show
from jaxlamina.bench.serve_bench import Load, Measured
from jaxlamina.bench.serve_cli import parts
from jaxlamina.bench.serve_metrics import TimedAnswer, Wanted
from jaxlamina.cli.main import main
from jaxlamina.console.tables import print_table

CELLS = st.text("0123456789.,%–ab", min_size=1, max_size=14)


def printed(width: int, show) -> str:
    out = Console(file=io.StringIO(), width=width, highlight=False)
    show(out)
    assert out.width == width
    return out.file.getvalue()


@given(st.integers(1, 100), st.integers(1, 12), st.data())
def test_no_cell_is_cut_at_any_width(width: int, n_columns: int, data) -> None:
    rows = data.draw(st.lists(st.lists(CELLS, min_size=n_columns, max_size=n_columns), max_size=4))
    names = [f"c{i}" for i in range(n_columns)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right", no_wrap=bool(i % 2))
    for row in rows:
        table.add_row(*row)
    lines = [line.split() for line in printed(width, lambda out: print_table(out, table)).splitlines()]
    assert [line for line in lines if line and not set("".join(line)) <= set("─ ")] == [names, *rows]


def test_the_latencies_of_bench_serve_fit_80_columns() -> None:
    times = (120.0, 190.0, 200.0)
    answers = [TimedAnswer(1024, 3, 0.0, times, times[-1]) for _ in range(4)]
    wanted = Wanted(list(serve_metrics.TITLES), [50.0, 90.0, 99.0], {})
    measured = Measured(answers, 2000.0, 0.0)
    load = Load([loads.Size(1024, 10)] * 4, ["x"] * 4, [0.0] * 4, None)
    record = {"model": "m", "base_url": "u", "endpoint": "e", "num_prompts": 4, "dataset_name": "random"}
    record |= {**wanted.of(answers, 2000.0), "num_too_long": 0, "latest_ms": 0.0, "host_ms": 9.87}
    where = Machine("a machine", 1, 1.0, 0.0, "2026-01-01", {})
    text = printed(80, lambda out: show(out, where, parts(record, measured, load, wanted)))
    assert "…" not in text
    [line] = [line for line in text.splitlines() if line.lstrip().startswith("TTFT ")]
    assert len(line) <= 80 and len(re.findall(r"\d+\.\d\d\b", line)) == 6, line


@pytest.mark.parametrize(
    "arguments", [["plan"], ["plan", "--mode", "stages"], ["split", "llama-3-8b"], ["doctor"]], ids=" ".join
)
def test_tables_in_a_pipe_are_whole(capsys, monkeypatch, arguments) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    main(arguments)
    assert "…" not in capsys.readouterr().out.replace("…\n", "")


def test_schedule_says_all_that_a_pool_idles(capsys) -> None:
    assert (
        main(["schedule", "--mode", "none", "--layers", "2", "--slice-ms", "1", "--attention-ms", "1"]) == 0
    )
    [line] = [line for line in capsys.readouterr().out.splitlines() if "attention pool" in line]
    busy, exchanging, idle, within, at_ends = (float(x) for x in re.findall(r"[\d.]+(?= %)", line))
    assert idle == pytest.approx(within + at_ends, abs=0.11) and at_ends > 0
    assert busy + exchanging + idle == pytest.approx(100, abs=0.2)
