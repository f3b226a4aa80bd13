"""Decode steps as the planner predicts them, beside what they take, in a server's metrics and state."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from checkpoint_examples import tiny_words_folder
from serving import serving
from test_models import MODELS

from jaxlamina import LLM, SamplingParams
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.planner.calibration import DeviceCalibration
from jaxlamina.planner.costs import Deployment, LinkTerms, Terms, step_cost
from jaxlamina.planner.hardware import Hardware
from jaxlamina.server.predicted import StepPredictor
from jaxlamina.weights.sources import InMemoryModel

RATIO = "jaxlamina:measured_over_predicted_step"
YEAR = "made up, 2026"
CPU = Hardware(
    "two cores",
    memory_gib=8,
    bandwidth_gb_s=20,
    tflops_bf16=0.1,
    source={"memory_gib": YEAR, "bandwidth_gb_s": YEAR, "tflops_bf16": YEAR},
)
TERMS = Terms(CPU, 20e9, 1e11, 20e9, 1e-4, 1e-5, 1e-3)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "cpu.json"
    DeviceCalibration(TERMS, {"gloo": LinkTerms(1e-4, 1e9, True)}, "a CPU", {}, "2026-11-26").save(path)
    return path


def made(split: bool, calibration: Path | None) -> LLM:
    config = ModelConfig.from_hf(MODELS["llama"])
    model = InMemoryModel(config, random_params(config, seed=1))
    known = {} if calibration is None else {"calibration": str(calibration)}
    return LLM(model, split=split, max_num_seqs=4, max_model_len=64, **known)


def test_a_step_of_the_rows_that_run_and_what_steps_took(calibration: Path):
    llm = made(False, calibration)
    predictor = StepPredictor.of(llm)
    assert predictor is not None and predictor.step_s(llm.engine) is None  # no row runs
    asked: list[dict[str, float]] = []
    engine = llm.engine
    engine.before_step = lambda: asked.append(predictor.numbers(engine))
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [1] * n} for n in (5, 9, 13)], params, use_tqdm=False)
    engine.before_step = None
    # Predictions are those of the planner for as many rows of that many stored tokens, in float32.
    alone = Deployment(llm.config, TERMS, kv_bytes=4.0, weight_bytes=4.0)
    likely = {step_cost(alone, 3, 9 + n + ahead).step_s for n in range(20) for ahead in (0, 1)}
    found = [numbers["predicted_step_s"] for numbers in asked if numbers]
    assert len(found) > 10 and set(found) <= likely
    measured = engine.stats.decode_s / engine.stats.n_decode_steps
    last = asked[-1]["measured_over_predicted"]
    assert 0.02 * measured < last * found[-1] < 50 * measured


def test_what_no_cost_is_known_of_has_no_prediction(calibration: Path, tmp_path: Path):
    assert StepPredictor.of(made(False, None)) is None  # a CPU that nobody measured
    assert StepPredictor.of(made(True, calibration)) is None  # two workers on one device take turns
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(UserError, match="is no calibration"):
        made(False, tmp_path / "wrong.json")


def test_a_servers_metrics_and_page_have_it(calibration: Path, tmp_path: Path):
    tiny = tiny_words_folder(tmp_path, max_position_embeddings=2048)
    options = ("--model", str(tiny), "--no-split", "--dashboard", "--calibration", str(calibration))
    body = {"prompt": "a b c", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    is_seen = threading.Event()
    found: dict[str, float] = {}
    predicted: list[float] = []
    with serving(*options) as server:
        assert "predicted_step" not in server.get("/metrics").decode()

        def ask() -> None:
            while not is_seen.is_set():
                server.post("/v1/completions", body)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            until = time.monotonic() + 60
            while not (RATIO in found and predicted):
                assert time.monotonic() < until, (found, predicted)
                lines = server.get("/metrics").decode().splitlines()
                found |= {
                    line.partition("{")[0]: float(line.rpartition(" ")[2])
                    for line in lines
                    if line.startswith("jaxlamina:")
                }
                samples = server.get("/dashboard/state")["samples"]
                predicted = [ms for x in samples if (ms := x["predicted_step_ms"]) is not None]
        finally:
            is_seen.set()
            asking.join()
    assert found["jaxlamina:predicted_step_seconds"] > 1e-3 and min(predicted) > 1  # once a step
    assert found[RATIO] > 0
