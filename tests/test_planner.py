"""Hardware tables, traces, the papers' formulas, and `jaxlamina reproduce`: ours beside what is printed."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.cli.main import main
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, abstract_params
from jaxlamina.models.config_files import configs_dir, model_config, model_names
from jaxlamina.planner import reproduction, roofline, traces
from jaxlamina.planner.comparison import ComparedRow, Printed
from jaxlamina.planner.hardware import Hardware, Rates, hardware_names

LONG = "equal-cost"  # a minute of searches
ALL = [
    pytest.param(paper, item, marks=[pytest.mark.slow] if item == LONG else [])
    for paper, module in reproduction.PAPERS.items()
    for item in module.ITEMS
]
H100 = Hardware.load("h100")


# --- hardware ---
def test_every_device_is_read_and_those_of_both_papers_are_there():
    devices = {name: Hardware.load(name) for name in hardware_names()}
    assert devices.keys() >= {"h100", "h20", "tpu-v6e", "a100-80g", "rtx-3090", "rx-7900-xtx", "arc-a770"}
    assert len({device.name for device in devices.values()}) == len(devices)
    for device in devices.values():
        numbers = {f.name for f in dataclasses.fields(device)} - {"name", "source"}
        assert device.source.keys() == {key for key in numbers if getattr(device, key) is not None}


def test_rates_have_their_units():
    assert H100.rates(2) == Rates(2 * 989e12, 2 * 3.35e12)
    assert H100.rates(1, "fp8").flop_s == 1979e12
    with pytest.raises(UserError, match="Arc A770.*tflops_bf16"):
        Hardware.load("arc-a770").rates()
    with pytest.raises(UserError, match="A100 40 GB: price_usd_h is not known"):
        Hardware.load("a100-40g").known("price_usd_h")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("memory_gib = 96", 'colour = "red"\nmemory_gib = 96'),
            "unknown key 'colour'; known: bandwidth_gb_s",
        ),
        (("memory_gib = 96\n", ""), "memory_gib is missing"),
        (("memory_gib = 96", "memory_gib = -96"), "memory_gib=-96 must be a number above 0"),
        (("memory_gib = 96", "memory_gib = inf"), "memory_gib=inf must be"),
        (("memory_gib = 96", "memory_gib = 1e300"), "memory_gib=1e+300 must be"),
        (("memory_gib = 96", "memory_gib = true"), "memory_gib=True must be"),
        (("memory_gib = 96", 'memory_gib = "96 GB"'), "memory_gib='96 GB' must be"),
        (('name = "NVIDIA H20"', "name = 20"), "name=20 must be"),
        (("tflops_bf16 = 148", "tflops_bf16 = 148\ntflops_fp8 = 296"), "tflops_fp8=296 has no source"),
        (("Lamina 2025, Table 1 (96 GB), 2025", "a page"), "memory_gib=96 has no source with a year"),
        (("tflops_bf16 = 148\n", ""), "'tflops_bf16', which is no number of this file"),
        (("[source]", "[source]\nmemory_gib = 1\n[other]"), "unknown key 'other'"),
        (("[source]", "source = 3\n[other]"), "unknown key 'other'"),
        (("memory_gib = 96", "memory_gib ="), "is not TOML"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path, change, message):
    text = (configs_dir() / "hardware" / "h20.toml").read_text()
    assert change[0] in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(*change, 1))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        Hardware.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_users_own_file_and_names_that_are_not_there(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((configs_dir() / "hardware" / "h20.toml").read_text())
    assert Hardware.load(path) == Hardware.load("H20")
    with pytest.raises(UserError, match="no device 'h2000'; known: a100-40g, .*or give a .toml file"):
        Hardware.load("h2000")
    with pytest.raises(UserError, match=r"cannot read .*none\.toml"):
        Hardware.load(tmp_path / "none.toml")


# --- traces ---
@pytest.mark.parametrize("name", traces.NAMES)
def test_the_packages_traces_are_whole_and_in_order(name):
    trace = traces.load(name)
    assert trace.arrival_us[0] == 0 and (np.diff(trace.arrival_us) >= 0).all()
    assert 3400e6 < trace.arrival_us[-1] < 3600e6  # an hour
    assert trace.n_prompt.min() > 0 and trace.n_output.min() > 0
    assert len(trace) == len(trace.n_prompt) == len(trace.n_output) > 8000


def test_the_traces_are_small_and_say_where_they_are_from():
    folder = Path(traces.__file__).parent / "data"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_500_000
    text = (folder / "README.md").read_text()
    assert (
        all(f"`{name}.npz`" in text for name in traces.NAMES) and "CC-BY 4.0" in text and "Apache-2.0" in text
    )
    with pytest.raises(UserError, match="no trace 'kimi-ta'"):
        traces.load("kimi-ta")


def test_a_jsonl_trace_is_read_in_order_of_time_and_kept_whole(tmp_path):
    source, kept = tmp_path / "trace.jsonl", tmp_path / "kept.npz"
    lines = [(27482, 6955, 52), (3000, 10, 20), (3000, 5, 6), (9000, 7, 0)]
    keys = ("timestamp", "input_length", "output_length")
    source.write_text(
        "".join(json.dumps(dict(zip(keys, line, strict=True)) | {"hash_ids": [1]}) + "\n\n" for line in lines)
    )
    trace = traces.read(source)
    assert trace.arrival_us.tolist() == [0, 0, 24_482_000]
    assert trace.n_prompt.tolist() == [10, 5, 6955] and trace.n_output.tolist() == [20, 6, 52]
    traces.save(trace, kept)
    with np.load(kept) as arrays:
        assert np.cumsum(arrays["gap_us"]).tolist() == trace.arrival_us.tolist()


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        "[1]",
        "3",
        '{"timestamp": 1, "input_length": 2}',
        '{"timestamp": 1, "input_length": 2, "output_length": 2.5}',
        '{"timestamp": NaN, "input_length": 2, "output_length": 2}',
        '{"timestamp": 1e999, "input_length": 2, "output_length": 2}',
        '{"timestamp": 1, "input_length": "2", "output_length": 2}',
        '{"timestamp": 1, "input_length": true, "output_length": 2}',
        '{"timestamp": 1, "input_length": 99999999999999999999, "output_length": 2}',
    ],
)
def test_a_wrong_line_of_a_jsonl_trace_is_named(tmp_path, line):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=r"trace\.jsonl, line 2: .*timestamp"):
        traces.read(file)


def test_a_trace_is_no_longer_than_can_be_counted(tmp_path):
    file = tmp_path / "trace.jsonl"
    line = '{{"timestamp": {}, "input_length": 1, "output_length": 1}}\n'
    file.write_text(line.format(-4e15) + line.format(4e15))
    with pytest.raises(UserError, match=r"trace\.jsonl: its requests come over more than 4\.6e\+12 seconds"):
        traces.read(file)
    file.write_text(line.format(0) + line.format(4e15))
    with pytest.raises(UserError, match="of a trace are too long"):
        traces.first(traces.read(file), 400)


# --- formulas ---
def test_parameters_are_those_of_the_model_itself():
    small = {"model_type": "qwen2", "head_dim": 64} | {
        key: value
        for key, value in model_config("smollm2-135m").to_hf().items()
        if key not in ("model_type", "architectures", "attention_bias", "mlp_bias")
    }
    others = [small, small | {"model_type": "qwen3", "attention_bias": True}]
    others.append(small | {"model_type": "llama", "attention_bias": True, "mlp_bias": True})
    others.append(small | {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False})
    for config in (*map(model_config, model_names()), *map(ModelConfig.from_hf, others)):
        assert roofline.n_params(config) == sum(
            leaf.size for leaf in abstract_params(config, "bfloat16").values()
        )
    tied = model_config("smollm2-135m")
    assert roofline.n_step_params(tied) == roofline.n_params(tied)


def test_units_by_hand():
    """LLaMA-3-70B: 8 KV heads of 128 in 80 layers, 8 queries on each."""
    config = model_config("llama-3-70b")
    assert roofline.kv_bytes_per_token(config) == 2 * 2 * 80 * 1024 == 327_680
    assert roofline.exchanged_bytes(config, 1) == (2 + 2 / 8) * 2 * 8192 * 80
    assert (
        roofline.attention_intensity(config) == 8
        and roofline.attention_intensity(model_config("llama-7b")) == 1
    )
    rates = Rates(1e15, 1e12)
    assert roofline.attention_time_s(config, 3, 1000, rates) == pytest.approx(3 * 1000 * 327_680 / 1e12)
    n = roofline.n_step_params(config)
    assert n == 70_553_706_496 - 128_256 * 8192
    assert roofline.model_time_s(config, 1, rates) == pytest.approx(2 * (n + 2 * 8192) / 1e12)
    assert roofline.model_time_s(config, 10_000, rates) == pytest.approx(2 * n * 10_000 / 1e15)
    assert roofline.arithmetic_intensity(config, 1) == pytest.approx(1, rel=1e-3)
    assert (
        roofline.batch_that_fits(config, 8192, 80e9) == 29 and roofline.batch_that_fits(config, 8192, -1) == 0
    )


BATCH, CONTEXT = st.integers(1, 4096), st.integers(1, 1 << 17)
SHAPES = st.sampled_from([model_config(name) for name in ("llama-13b", "llama-3-70b", "opt-30b")])
RATES = st.builds(Rates, st.floats(1e12, 1e16), st.floats(1e10, 1e13))


@given(SHAPES, BATCH, BATCH, CONTEXT, CONTEXT, RATES)
def test_times_grow_with_batch_and_context_and_fall_with_devices(config, batch, more, length, longer, rates):
    twice = Rates(2 * rates.flop_s, 2 * rates.bytes_s)
    model = [roofline.model_time_s(config, b, rates) for b in (batch, batch + more)]
    attention = [roofline.attention_time_s(config, b, length, rates) for b in (batch, batch + more)]
    assert model[0] <= model[1] and attention[0] < attention[1]
    assert attention[0] < roofline.attention_time_s(config, batch, length + longer, rates)
    assert roofline.model_time_s(config, batch, twice) == pytest.approx(model[0] / 2)
    assert roofline.attention_time_s(config, batch, length, twice) == pytest.approx(attention[0] / 2)


@given(SHAPES, BATCH, BATCH, CONTEXT, RATES)
def test_utilisation_is_a_share_that_grows_and_bandwidths_follow(config, batch, more, length, rates):
    low, high = (roofline.roofline_mfu(config, b, rates) for b in (batch, batch + more))
    assert 0 < low <= high * (1 + 1e-9) and high <= 1 + 1e-9
    needs = [roofline.least_bandwidth_2024(config, share, rates) for share in (low, high)]
    assert 0 < needs[0] <= needs[1] * (1 + 1e-9)
    # Without attention and with all of the time for it, the papers' two formulas are one.
    at_once = roofline.least_bandwidth_2025(config, batch, length, rates, Rates(1e40, 1e40), slowdown=1.0)
    assert at_once == pytest.approx(needs[0])
    later = roofline.least_bandwidth_2025(config, batch, length, rates, rates)
    assert roofline.least_bandwidth_2025(config, batch, length, rates, rates, slowdown=0.4) == pytest.approx(
        later / 2
    )
    assert roofline.least_bandwidth_2025(config, batch, length + 1, rates, rates) <= later


@given(SHAPES, CONTEXT, st.floats(0, 1e15))
def test_the_batch_that_fits_fits_and_one_more_does_not(config, length, memory):
    batch, each = (
        roofline.batch_that_fits(config, length, memory),
        length * roofline.kv_bytes_per_token(config),
    )
    assert batch * each <= memory * (1 + 1e-9) and (batch + 1) * each >= memory * (1 - 1e-9)


def test_a_model_that_no_formula_knows_is_refused():
    plain = model_config("llama-7b").to_hf()
    windows = ModelConfig.from_hf(plain | {"model_type": "mistral", "sliding_window": 64})
    experts = ModelConfig.from_hf(plain | {"model_type": "mixtral", "sliding_window": None})
    granite = ModelConfig.from_hf(plain | {"model_type": "granite"})
    for config, what in (
        (windows, "sliding windows"),
        (experts, "experts"),
        (granite, "not known to the planner"),
    ):
        with pytest.raises(UserError, match=what):
            roofline.model_time_s(config, 1, H100.rates())
        with pytest.raises(UserError, match=what):
            roofline.attention_time_s(config, 1, 1, H100.rates())


# --- ours beside what is printed ---
@pytest.mark.parametrize(
    ("text", "sense", "ours", "agrees"),
    [
        ("9.04", "=", 9.0449, True),
        ("9.04", "=", 9.0451, False),
        ("0.63", "=", 0.625, True),
        ("219", "=", 218.75, True),
        ("219", "=", 219.6, False),
        ("30", "about", 34, True),
        ("30", "about", 36, False),
        ("20", "<", 19.9, True),
        ("20", "<", 20.0, False),
        ("80", ">", 80.1, True),
    ],
)
def test_what_agrees_within_the_printed_rounding(text, sense, ours, agrees):
    assert Printed(text, "here", f"it is {text}", sense).agrees(ours) == agrees


def test_a_difference_without_a_reason_cannot_be_made():
    printed = Printed("5", "here", "5 of them")
    for row in ((7.0, "formula", printed), (5.0, "formula", printed, "why not"), (None, None, printed)):
        with pytest.raises(AssertionError):
            ComparedRow("x", "", *row)
    with pytest.raises(AssertionError):
        Printed("6", "here", "5 of them")


# Items whose every printed number is reached, within its rounding, by formula or trace.
REACHED = {
    "lamina-2024": {"table-2", "table-4"},
    "lamina-2025": {"table-1", "table-2", "table-5"},
}
DIFFER = {
    ("lamina-2024", "table-1"): 2,
    ("lamina-2024", "table-3"): 13,
    ("lamina-2024", "figure-3"): 1,
    ("lamina-2024", "figure-4"): 2,
    ("lamina-2024", "figure-5"): 1,
    ("lamina-2024", "figure-6"): 0,
    ("lamina-2025", "table-3"): 4,
    ("lamina-2025", "table-4"): 0,
    ("lamina-2025", "figure-2"): 1,
    ("lamina-2025", "figure-3"): 0,
    ("lamina-2025", "figure-4"): 10,
    ("lamina-2025", "figure-10"): 3,
    ("lamina-2025", "figure-11"): 1,
    ("lamina-2025", "equal-cost"): 0,
}


@pytest.mark.parametrize(("paper", "item"), ALL)
def test_which_printed_numbers_are_reached(paper, item):
    found = reproduction.reproduce(paper, item)
    assert sum(row.agrees is False for row in found.rows) == DIFFER.get((paper, item), 0)
    assert (item in REACHED[paper]) == ((paper, item) not in DIFFER)
    if item in REACHED[paper]:
        assert any(row.agrees for row in found.rows if row.how == "formula")
    assert {row.how for row in found.rows} <= {"formula", "trace", "calculated", "given", None}
    assert all(re.search(r"Table \d|Figure \d|§\d", row.printed.where) for row in found.rows if row.printed)


def test_table_4_comes_from_the_traces_to_the_digit():
    rows = reproduction.reproduce("lamina-2025", "table-4").rows
    ours = [row for row in rows if row.ours is not None]
    assert len(ours) == 9 and all(row.how == "trace" and row.agrees for row in ours)
    assert [row.shown.replace(",", "") for row in ours] == [row.printed.text for row in ours]


def test_table_3s_printed_values_follow_from_an_mfu_that_can_be():
    rows = [
        row for row in reproduction.reproduce("lamina-2024", "table-3").rows if "MFU at which" in row.what
    ]
    shares = [[row.ours for row in rows[i : i + 4]] for i in (0, 4, 8)]
    assert len(rows) == 12 and all(0 < low < high < 100 for of in shares for low, high in pairwise(of))


# --- the command ---
def output(capsys, *words):
    assert main(["reproduce", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("paper", "item"), ALL)
def test_an_item_is_printed_with_every_number_and_reason(capsys, monkeypatch, paper, item):
    monkeypatch.setenv("COLUMNS", "200")
    text = output(capsys, paper, item)
    found = reproduction.reproduce(paper, item)
    assert f"{paper} {item}: {found.title}" in text
    for row in found.rows:
        assert row.shown in text and row.reason in text
        assert row.printed is None or row.printed.text in text
    assert all(remark in text for remark in found.remarks)
    [made] = json.loads(output(capsys, paper, item, "--json"))
    assert made == json.loads(json.dumps({"paper": paper, "item": item, **found.to_dict()}))


def test_the_list_names_what_is_not_there_yet_and_what_it_needs(capsys):
    text = output(capsys)
    assert (
        all(item in text for item in (one.values[1] for one in ALL))
        and "figure-12: " in text
        and "the planner's search" in text
    )
    assert "figure-17" not in output(capsys, "lamina-2025")
    listed = json.loads(output(capsys, "--json"))
    assert (
        listed["lamina-2025"]["table-4"] is None and "two kinds of GPU" in listed["lamina-2025"]["figure-12"]
    )


def test_all_items_of_a_paper(capsys):
    made = json.loads(output(capsys, "lamina-2024", "--all", "--json"))
    assert [one["item"] for one in made] == list(reproduction.PAPERS["lamina-2024"].ITEMS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lamina-2023"], "no paper 'lamina-2023' here; known: lamina-2024, lamina-2025"),
        (["lamina-2025", "table-9"], "lamina-2025 has no item 'table-9' here; known: table-1"),
        (
            ["lamina-2025", "figure-12"],
            "lamina-2025 figure-12 .* is not reproduced yet: it needs measurements",
        ),
        (["lamina-2025", "table-4", "--all"], "--all takes every item"),
        (["lamina-2025", "--all", "--figure", "x.svg"], "--figure draws one item"),
        (["lamina-2025", "figure-2", "--figure", "x.gif"], "must end in .svg"),
        (["lamina-2025", "figure-2", "--figure", "none/x.svg"], "there is no such folder"),
        (["lamina-2025", "table-4", "--figure", "x.svg"], "lamina-2025 table-4 is numbers alone"),
    ],
)
def test_bad_words_are_one_line(capsys, words, message):
    assert main(["reproduce", *words]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_a_figure_says_what_its_axes_are_and_whose_the_curves_are(tmp_path, capsys):
    path = tmp_path / "x.svg"
    output(capsys, "lamina-2025", "figure-4", "--figure", str(path))
    assert path.read_text().startswith("<?xml") and path.stat().st_size > 10_000
    found = reproduction.reproduce("lamina-2025", "figure-4")
    assert "GB/s" in found.axes.y and all(len(c.x) == len(c.y) > 50 for c in found.curves)


def test_the_planner_loads_no_jax():
    program = (
        "import sys\nfrom jaxlamina.planner import figures, reproduction\n"
        "reproduction.reproduce('lamina-2025', 'table-3')\nassert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
