"""What `bench simulation` fits to single steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxlamina.bench.simulation_bench import DECODES, PROMPTS, MeasuredStep, fitted, held_out_errors
from jaxlamina.models.config_files import model_config
from jaxlamina.planner.costs import Deployment, Terms, prefill_s, step_cost
from jaxlamina.planner.hardware import Hardware

MODEL = model_config("llama-3-8b")
STEPS = [*((n, n * context) for n, context in DECODES), *((0, n) for n in PROMPTS)]


def test_rows_that_take_longer_than_prompts_tokens_are_fitted_apart():
    """Steps of a machine with 20 ms a step and 15 ms a row beside its arithmetic: the planner's costs by the
    fitted terms are these again."""
    terms = Terms(Hardware.load("h200"), 1e30, 2e12, 1e10, 0.0, 0.0, 20e-3, row_fixed_s=15e-3)
    machine = Deployment(MODEL, terms, kv_bytes=4, weight_bytes=4)

    def seconds(setup: Deployment, n_rows: int, n: int) -> float:
        return step_cost(setup, n_rows, n / n_rows).step_s if n_rows else prefill_s(setup, n)

    steps = [MeasuredStep(n_rows, n, seconds(machine, n_rows, n)) for n_rows, n in STEPS]
    found = replace(machine, compute=fitted(MODEL, steps))
    for n_rows, n in [*STEPS, (3, 600), (0, 100)]:
        assert seconds(found, n_rows, n) == pytest.approx(seconds(machine, n_rows, n), rel=1e-3)
    assert max(held_out_errors(MODEL, steps)) < 1e-3
