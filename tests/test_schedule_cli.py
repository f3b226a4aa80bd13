"""`jaxlamina schedule`: the table, the figure, and one line for what cannot be planned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxlamina.cli.main import main
from jaxlamina.steps.schedules import Durations, gantt, make_schedule

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "dumb")


def schedule(capsys, *arguments):
    """The table as {row: [percent, …]} and the line below it."""
    assert main(["schedule", *arguments]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    rows = {}
    for line in table:
        if line.rstrip().endswith("%"):
            name, *_ = re.split(r"\s{2,}", line.strip())
            rows[name] = [float(number) for number in re.findall(r"([\d.]+) %", line)]
    return rows, last


def test_the_table_is_about_the_steady_state(capsys):
    # 3 batches, 9 slices of 1 ms over 2 replicas: 27 half milliseconds and one for beginning anew
    # (test_schedules).
    rows, last = schedule(capsys)
    assert last == "a decode step every 14.000 ms, 214.3 batch steps a second"
    assert rows == {
        "replica 0": [100, 0, 0, 0, 0],
        "replica 1": [92.9, 0, 7.1, 0, 7.1],
        "attention pool": [85.7, 0, 14.3, 0, 14.3],
    }
    assert schedule(capsys, "--steps", "1") == (rows, last)


def test_one_batch_alone(capsys):
    rows, last = schedule(capsys, "--mode", "none", "--layers", "3", "--head-ms", "4")
    assert last == "a decode step every 8.500 ms, 117.6 batch steps a second"
    assert rows == {
        "replica 0": [82.4, 0, 17.6, 17.6, 0],
        "attention pool": [17.6, 0, 82.4, 23.5, 58.8],
    }


def test_a_pipeline_is_balanced_by_the_time_of_slices(capsys):
    # 9 slices, the last of 4 ms: the first 6 and the others take as long.
    rows, last = schedule(capsys, "--mode", "stages", "--head-ms", "4")
    assert list(rows) == ["stage 0", "stage 1", "attention pool"]
    assert rows["stage 0"][0] == rows["stage 1"][0] > 50
    as_given = ["--batches", "4", "--replicas", "2"]
    assert schedule(capsys, "--mode", "stages", "--head-ms", "4", *as_given) == (rows, last)
    alone, _ = schedule(capsys, "--mode", "stages", "--batches", "1", "--replicas", "3", "--layers", "2")
    assert {name: row[0] for name, row in alone.items()} == dict.fromkeys([*rows, "stage 2"], 25)


def test_a_share_of_attention_on_the_model_worker(capsys):
    # Two batches, 8 layers. A layer takes each batch the slice and what is kept here, 1 + 0.5 ms, while the
    # pool has 0.5 ms.
    base = ["--batches", "2", "--attention-ms", "1"]
    rows, last = schedule(capsys, *base, "--local-share", "0.5")
    assert last.startswith("a decode step every 26.000 ms")
    assert rows == {"replica 0": [100, 0, 0, 0, 0], "attention pool": [30.8, 0, 69.2, 57.7, 11.5]}
    # 2 batches are what there is with a share, and one copy of the model runs them in all of these modes.
    assert schedule(capsys, "--attention-ms", "1", "--local-share", "0.5") == (rows, last)
    assert schedule(capsys, "--attention-ms", "1", "--local-share", "0.5", "--mode", "fixed") == (rows, last)
    assert schedule(capsys, *base, "--local-share", "0") == schedule(capsys, *base)
    alone = ["--mode", "none", "--attention-ms", "4"]
    times = [schedule(capsys, *alone, "--local-share", x)[1].split()[4] for x in ("0", "0.25", "0.5", "1")]
    assert times == ["41.000", "33.000", "25.000", "41.000"]  # 9 slices, and 8 times the longer part


def test_all_attention_on_the_model_worker_leaves_the_pool_idle(capsys):
    rows, last = schedule(capsys, "--local-share", "1", "--exchange-ms", "0.1", "--batches", "2")
    assert last.startswith("a decode step every 26.000 ms")  # 18 slices and 16 operators
    assert rows == {"replica 0": [100, 0, 0, 0, 0], "attention pool": [0, 0, 100, 0, 100]}


def test_stages_keep_shares(capsys):
    rows, _ = schedule(capsys, "--mode", "stages", "--local-share", "0.5")
    plain, _ = schedule(capsys, "--mode", "stages")
    assert list(rows) == list(plain) and rows["stage 0"][0] > 50
    assert rows["attention pool"][0] < plain["attention pool"][0]


def test_every_duration_counts(capsys):
    base = ["--batches", "2", "--attention-ms", "1"]
    times = [schedule(capsys, *base, *more)[1].split()[4] for more in (
        [], ["--slice-ms", "2"], ["--attention-ms", "2"], ["--first-ms", "2"], ["--head-ms", "2"],
        ["--exchange-ms", "0.1"], ["--layers", "9"], ["--mode", "fixed", "--replicas", "2"],
    )]  # fmt: skip
    assert times[0] == "18.000" and "18.000" not in times[1:]
    rows, _ = schedule(capsys, *base, "--exchange-ms", "0.1")
    assert all(row[1] > 0 for row in rows.values())


def test_the_figure(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install matplotlib")
    first, again = tmp_path / "a.svg", tmp_path / "b.svg"
    for file in (first, again):
        assert main(["schedule", "--layers", "3", "--steps", "1", "--gantt", str(file)]) == 0
        assert f"wrote {file}" in capsys.readouterr().err.replace("\n", "")
    assert first.read_bytes() == again.read_bytes()
    texts = [element.text for element in ElementTree.parse(first).iter() if element.tag.endswith("text")]
    assert "rotational: 3 batches over 2 model replicas, 3 layers, 1 decode step" in texts
    assert {"replica 0", "replica 1", "attention pool", "ms", "idle"} <= set(texts)
    # Each slice on its replica, each operator on the pool.
    runs = [f"{batch}{k}" for batch in "ABC" for k in (*range(4), *range(3))]
    heads = [f"{batch}3" for batch in "ABC"]
    shown = [t.replace(" head", "3") for t in texts if re.fullmatch(r"[ABC](\d| head)", t)]
    assert sorted(shown) == sorted(runs) and set(heads) <= set(shown)


def test_the_figure_shows_every_run_in_its_place(tmp_path):
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install matplotlib")
    from matplotlib.axes import Axes

    drawn = []
    real = Axes.broken_barh

    def spy(self, xranges, yrange, **options):
        drawn.extend((round(yrange[0] + yrange[1] / 2), *span, options["facecolor"]) for span in xranges)
        return real(self, xranges, yrange, **options)

    schedule = make_schedule("rotational", 3, 2, Durations(2e-3, 1e-3, t_exchange_s=5e-4), n_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Axes, "broken_barh", spy)
        gantt.draw(schedule, "title", tmp_path / "a.png")
    colors = [color for color, _ in gantt._COLORS]
    rows = [*schedule.replicas, schedule.attention]
    want = [
        (y, 1e3 * r.start_s, 1e3 * (r.end_s - r.start_s), colors[r.batch])
        for y, row in enumerate(rows)
        for r in row
    ]
    assert sorted(bar for bar in drawn if bar[3] in colors) == sorted(want)
    assert len([bar for bar in drawn if bar[3] == gantt._EXCHANGE]) == 2 * len(schedule.exchanges)


def test_the_figure_shows_what_is_kept_on_replicas(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install matplotlib")
    for share, n_rows in (("0.5", 2), ("1", 1)):
        file = tmp_path / f"{share}.svg"
        assert (
            main(["schedule", "--layers", "3", "--steps", "1", "--local-share", share, "--gantt", str(file)])
            == 0
        )
        capsys.readouterr()
        texts = [element.text for element in ElementTree.parse(file).iter() if element.tag.endswith("text")]
        assert "attention, kept here" in texts and ("attention pool" in texts) == (n_rows == 2)
        shown = sorted(t for t in texts if re.fullmatch(r"[AB]\d", t))
        slices = [f"{batch}{k}" for batch in "AB" for k in range(3)]
        assert shown == sorted(slices + n_rows * slices)
        title = next(t for t in texts if t.startswith("rotational"))
        assert f"{100 * float(share):g} % of attention on the replica, 3 layers" in title


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local-share", "1.5"], "--local-share 1.5 must be a share of attention, from 0 to 1"),
        (["--local-share", "nan"], "--local-share nan must be a share of attention, from 0 to 1"),
        (
            ["--local-share", "0.5", "--batches", "3"],
            "--local-share 0.5 of the KV is kept on the model rank that runs",
        ),
        (["--local-share", "0.5", "--mode", "fixed", "--replicas", "2"], "2 copies of the model are not one"),
        (["--mode", "striped"], "--mode striped must be one of none, fixed, rotational, stages"),
        (["--batches", "1"], "n_batches=1 must be at least 2 with --mode rotational"),
        (["--mode", "none", "--batches", "3"], "n_batches=3 must be 1 with --mode none"),
        (["--replicas", "5"], "n_replicas=5 must be 2 with --mode rotational"),
        (["--mode", "stages", "--replicas", "10"], "n_stages=10 must be within 1 … 9, the slices"),
        (["--slice-ms", "0"], "--slice-ms 0 must be a finite time above 0"),
        (["--attention-ms", "nan"], "--attention-ms nan must be a finite time above 0"),
        (["--head-ms", "-1"], "--head-ms -1 must be a finite time above 0"),
        (["--exchange-ms", "-1"], "--exchange-ms -1 must be a finite time at least 0"),
        (["--gantt", "x.jpeg"], "must end in .svg, .png or .pdf"),
        (["--gantt", "/nowhere/x.svg"], "no such folder"),
        (["--gantt", "x.svg", "--batches", "9"], "draws up to 8 batches, not 9"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert main(["schedule", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_file_that_cannot_be_written(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install matplotlib")
    folder = tmp_path / "taken.svg"
    folder.mkdir()
    assert main(["schedule", "--gantt", str(folder)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_without_matplotlib_the_table_is_still_there(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    rows, _ = schedule(capsys)
    assert rows
    assert main(["schedule", "--gantt", "x.svg"]) == 2
    assert capsys.readouterr().err == "error: --gantt needs matplotlib: pip install matplotlib\n"


def test_scheduling_starts_no_jax():
    program = (
        "import sys; from jaxlamina.cli.main import main; assert main(['schedule']) == 0; "
        "bad = {'jax', 'flax', 'matplotlib'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT, timeout=60)
