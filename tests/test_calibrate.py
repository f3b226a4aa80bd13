"""`bench calibrate` on this CPU: what it measures, and the file that the planner takes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import pytest

from jaxlamina.bench import calibrate_bench
from jaxlamina.cli.main import main
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.models.config_files import model_config
from jaxlamina.planner.calibration import DeviceCalibration
from jaxlamina.planner.costs import Deployment, step_cost

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.slow  # it measures, and starts two ranks of each transport
def test_this_device_is_measured_and_the_planner_takes_the_file(tmp_path, monkeypatch, capsys):
    few = calibrate_bench.CalibrationSizes("float32", None, 16, (1, 4), ((2, 64),))
    monkeypatch.setattr(calibrate_bench, "ON_CPU", few)
    shape, out = tmp_path / "tiny.json", tmp_path / "here.json"
    shape.write_text(json.dumps(TINY))
    assert main(["bench", "calibrate", "--config", str(shape), "--rounds", "1", "--out", str(out)]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["versions"]["jax"] == jax.__version__
    found = DeviceCalibration.load(out)
    assert found.date[:2] == "20"
    assert found.terms.scaled_from is None
    assert "gloo" in found.links
    assert len(found.points) == 3
    assert found.terms.hardware.source["bandwidth_gb_s"].startswith("measured by jaxlamina bench calibrate")
    assert [row[1] > 0 for row in record["measured"]] == [True] * len(record["measured"])
    assert step_cost(Deployment(model_config(shape), found.terms), 4, 64).step_s > 0


@pytest.mark.parametrize(("name", "what"), [("none/x.json", "there is no such folder"), ("", "is a folder")])
@pytest.mark.parametrize("command", [["bench", "calibrate"], ["bench", "predict"]])
def test_a_file_that_cannot_be_written_is_said_before_minutes_go_by(tmp_path, capsys, command, name, what):
    assert main([*command, "--out", str(tmp_path / name)]) == 2
    assert what in capsys.readouterr().err


def test_a_model_of_ones_own_has_no_price(capsys):
    assert main(["bench", "calibrate", "--config", "plain_llama:llama_8b"]) == 2
    assert "operators of which no price is known" in capsys.readouterr().err


@pytest.mark.parametrize("how", [{"dop": (2, 0), "tensor_parallel": 2}, {"dop": (2, 1)}])
def test_ranks_that_do_not_split_its_steps_are_refused(how):
    ranks = SimpleNamespace(cluster=Cluster(**how), device=jax.devices()[0])
    with pytest.raises(UserError, match="^bench calibrate splits .* none for unsplit steps alone$"):
        calibrate_bench.measure("llama", model_config("llama-3-8b"), group=ranks)


def test_attention_by_one_of_our_own_kernels():
    left_out: dict[str, str] = {}
    few = calibrate_bench.CalibrationSizes("float32", None, 16, (1,), ((2, 64),))
    shape = model_config("smollm2-135m")
    [point] = calibrate_bench._kernels(shape, few, 1, left_out, lambda _: None)
    assert (point.tokens, point.kv_heads, point.head_dim, point.element_bytes) == (128, 3, 64, 4)
    assert point.us > 0
    assert not left_out
