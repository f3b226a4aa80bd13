"""`jaxlamina plan`: what it prints, draws and writes, and one line for what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxlamina.cli import examine
from jaxlamina.cli.main import main
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.models.config_files import model_config
from jaxlamina.planner import inputs
from jaxlamina.planner.calibration import DeviceCalibration, for_device
from jaxlamina.planner.cluster_file import cluster_toml
from jaxlamina.planner.costs import Deployment
from jaxlamina.planner.hardware import Hardware, hardware_names
from jaxlamina.planner.search import search

ROOT = Path(__file__).resolve().parents[1]
PAPER = ["--model", "llama3-70b", "--trace", "azure-conversation", "--compute", "h100", "--memory", "h20"]
PAPER += ["--budget", "45", "--slo", "tpot=100", "--context", "2500"]
FHBN = ["--link-us", "16.5", "--link-gb-s", "45.7"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")


def plan(capsys, *words):
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_and_the_json_say_the_same(capsys):
    found = plan(capsys, *PAPER, *FHBN)
    assert main(["plan", *PAPER, *FHBN]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == found["line"] and found["line"].startswith("split: 2 × NVIDIA H100 + ")
    assert found["splits"] and found["gain"] > 1.02 and found["model"] == "llama-3-70b"
    split = [one for one in found["plans"] if one["split"]]
    whole = [one for one in found["plans"] if not one["split"]]
    assert len(split) == 3 and {one["plan"] for one in whole} == {
        "4 × NVIDIA H100 unsplit",
        "2 times 4 × NVIDIA H20 unsplit",
    }
    for one in found["plans"]:
        assert one["usd_h"] <= 45 and one["tpot_p99_ms"] <= 100
        for shown in (f"{one['tokens_s']:,.0f}", f"{one['kv_tokens']:,}", f"{one['usd_h']:.2f}"):
            assert shown in text
        assert (one["least_link_gb_s"] is None) == (not one["split"])
    assert all(note in text for note in found["notes"]) and "NVIDIA H20: scaled from NVIDIA H200" in text


def test_plans_are_simulated_beside_the_formula(capsys):
    """With few requests at once, so that it is quick."""
    words = [
        "--model",
        "llama-3-8b",
        "--compute",
        "h100",
        "--memory",
        "h20",
        "--budget",
        "12",
        "--batch",
        "6",
    ]
    assert "simulated" not in plan(capsys, *words)["plans"][0]
    found = plan(capsys, *words, "--simulate")
    for one in found["plans"]:
        simulated = one["simulated"]
        assert 0.9 < simulated["tpot_p50_ms"] / one["tpot_p50_ms"] < 1.1, one
        assert 0.7 * one["tokens_s"] < simulated["tokens_s"] < 1.1 * one["tokens_s"], one
        assert simulated["mean_batch"] <= one["requests"]
    assert any(note.startswith("simulated: the order of these") for note in found["notes"])


def test_bursts_of_short_answers_are_simulated_for_long_enough(capsys):
    """Prompts of azure-code fill 15,000 tokens of a step here, and take no time."""
    words = ["--trace", "azure-code", "--devices", "h100=1", "--batch", "200", "--simulate"]
    [one] = plan(capsys, *words)["plans"]
    simulated = one["simulated"]
    assert simulated["tokens_s"] == pytest.approx(one["tokens_s"], rel=0.05)
    # By Little's law, but for first tokens: all that is counted is of the same time.
    writes = simulated["tokens_s"] * simulated["tpot_p50_ms"] / 1e3
    assert simulated["mean_batch"] == pytest.approx(writes, rel=0.15)


def test_the_first_requests_are_stretched_to_what_all_are(capsys, tmp_path):
    """Else these would ask for a tenth of the trace's mean context."""
    path = tmp_path / "grows.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + 450 * "2026-01-01 00:00:00,100,600\n"
        + 450 * "2026-01-01 00:00:01,7000,600\n"
    )
    words = ("--model", "smollm2-135m", "--devices", "h100=1", "--batch", "40", "--simulate", "--trace")
    [one] = plan(capsys, *words, str(path))["plans"]
    assert one["simulated"]["tpot_p50_ms"] == pytest.approx(one["tpot_p50_ms"], rel=0.02)


def test_it_says_dont_split_and_why(capsys):
    found = plan(capsys, *PAPER)
    assert not found["splits"] and found["reason"] == "link"
    assert found["line"].startswith("don't split (link): the link has 36 GB/s, and splitting pays from ")
    found = plan(capsys, *PAPER[:4], "--devices", "h200=4")
    assert found["reason"] == "equal devices" and "take 2 times 2 × NVIDIA H200 unsplit" in found["line"]
    # Where devices are at hand, unsplit ones of both kinds work beside each other.
    found = plan(capsys, "--devices", "h20=2,h100=2")
    assert "H100 unsplit beside 2 × NVIDIA H20" in found["line"].replace("2 times 1 ×", "2 ×")
    found = plan(capsys, "--devices", "h200=1")
    assert found["reason"] == "one device"


def test_small_traces_and_long_contexts_are_told_or_simulated(capsys, tmp_path):
    alone = ("--model", "smollm2-135m", "--devices", "H100=1", "--price", "H100=3", "--simulate", "--trace")
    few = tmp_path / "few.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    few.write_text(head + "".join(f"2026-01-01 00:00:0{i},20,30\n" for i in range(3)))
    found = plan(capsys, *alone, str(few), "--batch", "2")
    assert found["plans"][0]["usd_h"] == 3 and found["plans"][0]["simulated"]["tokens_s"] > 0
    toml = tmp_path / "cluster.toml"
    longer = plan(capsys, *alone, str(few), "--batch", "2", "--context", "9000", "--toml", str(toml))
    assert any("made for 8,192 tokens" in note for note in longer["notes"])
    assert "made for 8,192 tokens" in toml.read_text()
    line = "2026-01-01 00:00:00,20,30\n"
    few.write_text(head + 500 * line)
    at_once_s = plan(capsys, *alone, str(few), "--batch", "2")["plans"][0]["simulated"]["tokens_s"]
    assert at_once_s == pytest.approx(found["plans"][0]["simulated"]["tokens_s"], rel=0.1)
    # Of a trace in which few requests fit, these alone are simulated.
    few.write_text(head + "2026-01-01 00:00:00,20,2000\n" + "2026-01-01 00:00:01,4000000,1\n" * 399)
    assert plan(capsys, *alone, str(few), "--batch", "2")["plans"][0]["simulated"]["mean_batch"] > 0.1
    few.write_text(head + "2026-01-01 00:00:00,20,1\n")
    assert main(["plan", *alone, str(few)]) == 2
    assert "has two tokens: there is no time per token" in capsys.readouterr().err


def test_two_devices_of_one_name_are_told_apart(capsys, tmp_path):
    other = tmp_path / "cheap.toml"
    own = ROOT / "configs" / "hardware" / "h100.toml"
    other.write_text(own.read_text().replace("price_usd_h = ", "price_usd_h = 1", 1))
    assert main(["plan", "--compute", "h100", "--memory", str(other), "--budget", "45"]) == 2
    assert "describes another 'NVIDIA H100': give its file another name" in capsys.readouterr().err
    other.write_text(own.read_text().replace('"NVIDIA H100"', '"NVIDIA\\nH100"', 1))
    assert main(["plan", "--devices", f"{other}=1"]) == 2
    assert r"name='NVIDIA\nH100' must be the device's name, in one line" in capsys.readouterr().err
    other.write_text(own.read_text())
    assert main(["plan", "--devices", f"h100=3,{other}=1"]) == 2
    assert "names NVIDIA H100 twice: say how many there are in all" in capsys.readouterr().err


def test_fewer_devices_do_where_many_fail_too_often(capsys):
    words = ("--model", "llama-3-8b", "--devices", "h100=4,h20=4", "--batch", "8", "--mtbf-hours")
    found = plan(capsys, *words, "0.05")
    assert found["plans"]
    assert main(["plan", *words, "0.001"]) == 2
    assert "a job of 1 device fails every" in capsys.readouterr().err


def test_a_model_is_shared_out_where_all_its_products_are(capsys):
    """13,824 columns of LLaMA-13B over five devices would be whole on each."""
    found = plan(capsys, "--model", "llama-13b", "--devices", "h100=5", "--batch", "1")
    assert {one["plan"] for one in found["plans"] if not one["split"]} == {"4 × NVIDIA H100 unsplit"}
    with pytest.raises(UserError, match="13824 or 32000 columns are not shared out evenly over 5"):
        Deployment(model_config("llama-13b"), for_device("h200").terms, n_model=5, tensor_parallel=5,
                   model_link=inputs.device("h200").in_host)  # fmt: skip


def test_prices_link_context_and_batch_are_taken(capsys):
    base = plan(capsys, *PAPER, *FHBN)
    dear = plan(capsys, *PAPER, *FHBN, "--price", "h20=8", "--price", "h100=11.06")
    assert base["splits"] and dear["reason"] == "prices"
    assert plan(capsys, *PAPER, *FHBN, "--batch", "16")["reason"] == "batch too small"
    assert plan(capsys, *PAPER, *FHBN, "--context", "5000")["context"] == 5000
    with_prompts = plan(capsys, *PAPER, *FHBN, "--with-prefill")
    assert with_prompts["plans"][0]["tokens_per_usd"] < base["plans"][0]["tokens_per_usd"]


def test_figures_and_borders(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install matplotlib")
    drawn, pareto = tmp_path / "link.svg", tmp_path / "pareto.svg"
    words = ["--what-if", "link", str(drawn), "--pareto", str(pareto)]
    assert main(["plan", *PAPER, *FHBN, *words, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [one["variable"] for one in found["sweeps"]] == ["link", "tpot"]
    [border] = found["sweeps"][0]["borders"]
    assert 30 < border < 46 and err.replace("\n", "").count("wrote") == 2
    for path in (drawn, pareto):
        assert ElementTree.parse(path).getroot().tag.endswith("svg") and path.stat().st_size > 10_000
    assert main(["plan", *PAPER, *FHBN, "--what-if", "link", str(drawn)]) == 0
    assert f"border by link: {border:.3g}" in capsys.readouterr().out


def test_the_cluster_file_is_taken_as_it_is(capsys, tmp_path):
    path = tmp_path / "cluster.toml"
    found = plan(capsys, *PAPER, *FHBN, "--toml", str(path))
    cluster, best = Cluster.load(path), found["plans"][0]
    assert list(cluster.dop) == best["dop"] and cluster.tensor_parallel == best["tensor_parallel"]
    assert (cluster.n_batches, cluster.partition) == (best["n_batches"], best["partition"])
    assert cluster.max_num_seqs == best["requests"] and cluster.load_format == "dummy"
    assert path.read_text().startswith(f"# jaxlamina plan: {found['line']}\n")
    # `launch` reads it, and gets as far as the command that it is to run.
    done = subprocess.run(
        [sys.executable, "-m", "jaxlamina", "launch", "--config", str(path), "--", "sing"],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "sing" in done.stderr and "generate" in done.stderr


def test_without_a_split_plan_the_unsplit_one_is_a_job_without_attention_workers(capsys, tmp_path):
    path = tmp_path / "cluster.toml"
    plan(capsys, "--model", "llama-3-8b", "--devices", "h200=1", "--toml", str(path))
    assert Cluster.load(path).dop == (1, 0)


def test_every_plan_is_one_that_a_cluster_file_can_say(tmp_path):
    """So `search` and `Cluster` agree on what goes together."""
    from jaxlamina.models.config_files import model_config
    from jaxlamina.planner.costs import LinkTerms
    from jaxlamina.planner.question import Question

    path = tmp_path / "cluster.toml"
    for model, memory in (("llama-3-8b", "h20"), ("llama-3-70b", "mi300x")):
        devices = [inputs.device("h100"), inputs.device(memory, 3.0)]
        work = inputs.workload("azure-conversation")
        question = Question(
            model_config(model), work, *devices, LinkTerms(1e-5, 4e10), 60.0, with_prefill=True
        )
        seen, shares_on_shards = set(), 0
        for one in search(question).split:
            setup = one.setup
            shares_on_shards += setup.tensor_parallel > 1 and setup.local_share > 0
            kind = (setup.n_model, setup.n_batches, setup.partition, setup.local_share > 0, one.n_prefill)
            if kind in seen:
                continue
            seen.add(kind)
            path.write_text(cluster_toml(one, model, "…"))
            cluster = Cluster.load(path)
            assert cluster.n_replicas == setup.n_replicas and cluster.local_share == setup.local_share
            if cluster.n_replicas > 1:
                assert cluster.pipelining_mode == setup.mode
        assert len(seen) > 5 and shares_on_shards
        for one in search(question).whole:
            path.write_text(cluster_toml(one, model, "…"))
            cluster = Cluster.load(path)
            assert cluster.dop == (one.setup.n_model, 0) and cluster.local_share == 1
            assert cluster.tensor_parallel == one.setup.tensor_parallel


# --- this machine ---
def machine(monkeypatch, *kinds, platform="gpu"):
    found = [{"platform": platform, "kind": kind, "name": kind} for kind in kinds]
    monkeypatch.setattr(examine, "jax_devices", lambda: (found, ""))


def test_a_machine_without_accelerators_is_told_what_is_known(capsys, monkeypatch):
    machine(monkeypatch, "cpu", platform="cpu")
    assert main(["plan"]) == 0
    assert capsys.readouterr().out.startswith("don't split (one device): this machine has no accelerator")
    assert plan(capsys)["reason"] == "one device"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--toml", "cluster.toml"],
            "--toml is of a plan, and this machine has no accelerator to plan for: say",
        ),
        (["--what-if", "link", "link.svg"], "--what-if is of a plan"),
        (["--pareto", "pareto.svg"], "--pareto is of a plan"),
        (["--simulate"], "--simulate is of a plan"),
        (["--model", "nonsense"], "no model shape 'nonsense'"),
        (["--slo", "foo=3"], "must be tpot=MILLISECONDS"),
        (["--price", "z=1"], "no device 'z'"),
        (["--trace", "nope"], "no trace 'nope'"),
        (["--context", "0"], "a mean context of 0 tokens"),
        (["--link-us", "-1"], "--link-us -1 must be within"),
        (["--mtbf-hours", "0"], "--mtbf-hours 0 must be above 0"),
        (["--calibration", "none.json"], "cannot read none.json"),
    ],
)
def test_a_machine_without_accelerators_refuses_what_has_no_effect(
    capsys, monkeypatch, tmp_path, words, message
):
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install matplotlib")
    machine(monkeypatch, "cpu", platform="cpu")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    [line] = err.splitlines()
    assert message in line and not out and not list(tmp_path.iterdir())


def test_a_hosts_worth_of_equal_devices_is_in_one_host(capsys):
    within, of_two_kinds, of_two_hosts = (
        plan(capsys, "--devices", devices)["notes"][1] for devices in ("h200=8", "h200=4,h20=4", "h200=9")
    )
    assert "within a host" in within and "NCCL" in of_two_kinds and "NCCL" in of_two_hosts


def test_a_file_is_not_written_twice(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib: pip install matplotlib")
    path = tmp_path / "same.svg"
    again = f"{tmp_path}/../{tmp_path.name}/same.svg"
    assert main(["plan", *PAPER, "--what-if", "link", str(path), "--toml", again]) == 2
    assert f"--what-if and --toml are both {again!r}: name two files" in capsys.readouterr().err
    assert not path.exists()


def test_a_machine_with_gpus_is_planned_for(capsys, monkeypatch):
    machine(monkeypatch, *["NVIDIA H200"] * 2)
    found = plan(capsys)
    assert found["reason"] == "equal devices" and "within a host" in found["notes"][1]
    machine(monkeypatch, "NVIDIA H100 80GB HBM3")
    assert plan(capsys)["reason"] == "one device"
    machine(monkeypatch, "Unheard-of 9000")
    assert main(["plan"]) == 2
    assert "'Unheard-of 9000' is not in configs/hardware" in capsys.readouterr().err
    monkeypatch.setattr(examine, "jax_devices", lambda: (None, "no driver"))
    assert main(["plan"]) == 2
    assert "JAX cannot start (no driver)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5 lite", "tpu-v5e"),
        ("cpu", None),
    ],
)
def test_devices_are_known_by_what_jax_calls_them(kind, name):
    assert inputs.matching(kind) == name


# --- inputs ---
def test_a_calibration_of_ones_own_is_taken_before_the_packages(capsys, tmp_path):
    path = tmp_path / "mine.json"
    known = for_device("h20")
    terms = replace(known.terms, scaled_from=None, product_flop_s=2 * known.terms.product_flop_s)
    replace(known, terms=terms, device="an H20 here", date="2027-01-01").save(path)
    given = inputs.device("h20", given=DeviceCalibration.load(path))
    assert given.terms == terms and given.origin == "NVIDIA H20: measured on an H20 here (2027-01-01)"
    without, found = (plan(capsys, *PAPER, *words) for words in ((), ("--calibration", str(path))))
    assert "NVIDIA H20: measured on an H20 here" in found["notes"][0]
    by_plan = [{one["plan"]: one["model_ms"] for one in each["plans"]} for each in (without, found)]
    alone = next(name for name in by_plan[0] if name.endswith("H20 unsplit"))
    assert by_plan[1].get(alone, 0) < by_plan[0][alone]
    assert main(["plan", *PAPER, "--calibration", "none.json"]) == 2
    assert "cannot read none.json" in capsys.readouterr().err


def test_links_say_where_they_are_from():
    h100, h20, h200 = (inputs.device(name) for name in ("h100", "h20", "h200"))
    linked = inputs.link_between(h100, h20)
    assert linked.link.bytes_s == pytest.approx(35.5e9) and "NCCL" in linked.note
    assert linked.link.is_rendezvous  # both ends of a collective meet
    assert "NVIDIA H200: 400 Gbit/s is assumed" in inputs.link_between(h100, h200).note
    assert inputs.link_between(h200, h200, same_host=True).link == for_device("h200").link("memory")
    given = inputs.link_between(h100, h20, 10.0, 0.0)
    assert tuple(given.link)[:2] == (0.0, 10e9) and given.note.endswith("as given")


def test_terms_are_marked_as_scaled():
    for name in hardware_names():
        hardware = Hardware.load(name)
        if hardware.tflops_bf16 or hardware.tflops_fp16:
            device = inputs.device(name)
            measured_here = name == "h200"
            assert device.terms.scaled_from == (None if measured_here else "NVIDIA H200")
            said = "measured on NVIDIA H200" if measured_here else "scaled from NVIDIA H200"
            assert inputs.terms_note(device).startswith(f"{hardware.name}: {said} (2026-11-21")
            assert (device.in_host is None) == (hardware.chip_link_gb_s is None)
    with pytest.raises(UserError, match="Arc A770"):
        inputs.device("arc-a770")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compute", "h1000", "--budget", "9"], "no device 'h1000'; known: a100-40g"),
        ([*PAPER, "--model", "llama-9"], "no model shape 'llama-9'; known: llama-13b"),
        (
            [*PAPER, "--trace", "sharegpt"],
            "no trace 'sharegpt' comes with the package: take one of azure-conv",
        ),
        ([*PAPER, "--trace", "nowhere.csv"], "cannot read the trace nowhere.csv"),
        ([*PAPER, "--budget", "5"], "$5 an hour: not enough for one copy of the weights, 141 GB"),
        ([*PAPER, "--budget", "nan"], "--budget nan must be dollars an hour, above 0"),
        ([*PAPER, "--slo", "tpot=1"], "no plan meets tpot=1 ms: the least is"),
        ([*PAPER, "--slo", "ttft=1"], "must be tpot=MILLISECONDS"),
        ([*PAPER, "--slo", "tpot=x"], "must be a number of milliseconds above 0"),
        ([*PAPER, "--price", "h20"], "must be DEVICE=DOLLARS"),
        ([*PAPER, "--price", "h2000=1"], "no device 'h2000'"),
        ([*PAPER, "--link-gb-s", "0"], "--link-gb-s 0 must be within 0.001"),
        ([*PAPER, "--link-us", "inf"], "--link-us inf must be within 0"),
        ([*PAPER, "--price", "h20=1e300"], "within 0.001"),
        (["--devices", "h100=9999999"], "must be names with numbers"),
        ([*PAPER, "--context", "0"], "a mean context of 0 tokens must be within 1 …"),
        ([*PAPER, "--what-if", "colour", "x.svg"], "must be one of price, link, context, batch, ratio"),
        ([*PAPER, "--what-if", "link", "x.gif"], "--what-if 'x.gif' must end in .svg"),
        ([*PAPER, "--pareto", "none/x.svg"], "--pareto 'none/x.svg': there is no such folder"),
        ([*PAPER, "--toml", "none/x.toml"], "--toml 'none/x.toml': there is no such folder"),
        (["--compute", "h100"], "say --budget, dollars an hour; or what there is, by --devices"),
        (["--budget", "9"], "--budget needs --compute and --memory"),
        (["--memory", "h20"], "--memory needs --compute"),
        (["--compute", "h100", "--memory", "h200", "--budget", "40"], "H200: its price is not known"),
        (["--compute", "arc-a770", "--budget", "9"], "neither tflops_bf16 nor tflops_fp16 is known"),
        (["--devices", "h100=x"], "must be names with numbers, such as h100=2,h20=4"),
        (["--devices", "h100=1,h20=1,h200=1"], "has 3 kinds of device"),
        (["--devices", "h100=2,h100=3"], "names h100 twice: say how many there are in all"),
        (["--devices", "h100=3,H100=1"], "names h100 twice: say how many there are in all"),
        (["--devices", "h100=2", "--compute", "h20"], "leave out --compute and --memory"),
        (["--devices", "h100=1", "--price", "mi300x=3"], "no such device in the question; has h100"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("error: ") and message in line and captured.out == ""
    assert not list(tmp_path.iterdir())


def test_planning_loads_no_jax():
    program = (
        "import sys; from jaxlamina.cli.main import main; "
        f"assert main(['plan', *{PAPER!r}]) == 0; "
        "bad = {'jax', 'flax', 'matplotlib'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=ROOT,
                          timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("don't split (link)")
