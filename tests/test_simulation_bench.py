"""What `bench simulation` fits to single steps."""

from __future__ import annotations

import pytest

from jaxlamina.bench.simulation_bench import DECODES, PROMPTS, MeasuredStep, fitted, held_out_errors
from jaxlamina.models.config_files import model_config
from jaxlamina.planner import roofline

MODEL = model_config("llama-3-8b")
STEPS = [*((n, n * context) for n, context in DECODES), *((0, n) for n in PROMPTS)]


def test_rows_that_take_longer_than_prompts_tokens_are_fitted_apart():
    """Steps of a machine with 20 ms a step, 8 ms a prompt's token and 23 ms a row."""
    token_s = 8e-3
    width = MODEL.num_hidden_layers * MODEL.num_attention_heads * MODEL.head_dim
    pair_s = token_s * width / roofline.n_step_params(MODEL)  # of a prompt's token with another one
    steps = [
        MeasuredStep(n_rows, n, 20e-3 + (23e-3 * n_rows if n_rows else token_s * n + pair_s * n**2))
        for n_rows, n in STEPS
    ]
    terms = fitted(MODEL, steps)
    assert terms.step_fixed_s == pytest.approx(20e-3) and terms.row_fixed_s == pytest.approx(15e-3)
    assert 2 * roofline.n_step_params(MODEL) / terms.product_flop_s == pytest.approx(token_s)
    assert max(held_out_errors(MODEL, steps)) < 1e-4  # a stored token takes no time, which no term can say
