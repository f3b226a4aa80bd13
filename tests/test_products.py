"""Streamed products: against float64 on a GPU; what is grouped and laid out how, and that it lowers,
everywhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.models import abstract_params, apply, random_params
from jaxlamina.models.config_files import model_config
from jaxlamina.run import unsplit
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.workers import DecodeBatch, streamed
from jaxlamina.workers.streamed import HOPPER, kernels_for, products, with_streamed_products
from pallas_kernels import compat
from pallas_kernels.products import (
    ProductTuning,
    padded_rows,
    stream_products,
    supports,
    tuning_for,
)

BF16 = jnp.bfloat16
needs_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(kernels_for(jax.devices()[0]) is not HOPPER, reason="made for Hopper GPUs"),
]


def drawn(shape, seed, dtype=BF16):
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return jnp.asarray(values * shape[-1] ** -0.5 if seed else values, dtype)


def check(n_rows, shapes, dtype=BF16, out_dtype=None, tuning=None):
    x = drawn((n_rows, shapes[0][1]), 0, dtype)
    weights = [drawn(shape, i + 1, dtype) for i, shape in enumerate(shapes)]
    run = jax.jit(partial(stream_products, dtype=out_dtype, tuning=tuning))
    outs = run(x, weights)
    for out, w in zip(outs, weights, strict=True):
        want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        assert out.dtype == (out_dtype or dtype) and out.shape == want.shape
        # float32 sums, then one rounding to the result's type
        eps = float(jnp.finfo(out.dtype).eps)
        np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=eps, atol=1e-3)


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("n_rows", [1, 16, 64, 65, 160])
    @pytest.mark.parametrize(
        "shapes",
        [
            [(4096, 4096)],
            [(14336, 4096)] * 2,
            [(4096, 14336)],
            [(1024, 4096)] * 2,
            [(4096, 4096), (1024, 4096)],
        ],
        ids=["o", "gate-up", "down", "k-v", "q-k"],
    )
    def test_equals_float64(self, n_rows, shapes):
        check(n_rows, shapes)

    @pytest.mark.parametrize("out_dtype", [jnp.float32, BF16])
    def test_result_in_the_type_asked_for(self, out_dtype):
        check(8, [(4096, 2048)], out_dtype=out_dtype)

    def test_float16(self):
        check(8, [(4096, 2048)], dtype=jnp.float16)

    @pytest.mark.parametrize(
        "tuning",
        [ProductTuning(128, 64, 2, 8), ProductTuning(256, 128, 1, 2), ProductTuning(64, 128, 8, 4)],
        ids=str,
    )
    def test_every_layout(self, tuning):
        check(64, [(4096, 4096)], tuning=tuning)


def lowered(n_rows, shapes):
    struct = jax.ShapeDtypeStruct
    args = struct((n_rows, shapes[0][1]), BF16), [struct(s, BF16) for s in shapes]
    return jax.jit(stream_products).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "n_rows,shapes", [(1, [(14336, 4096)] * 2), (160, [(14336, 4096)] * 2), (64, [(1024, 4096), (256, 4096)])]
)
def test_lowers_for_a_gpu_without_one(n_rows, shapes):
    """Whole products, and the last by parts of K, whose sums are float32."""
    assert "mosaic_gpu" in lowered(n_rows, shapes)


WIDTHS = st.sampled_from([128, 1024, 4096, 11008, 14336, 128256])


@given(
    st.integers(1, 400), st.lists(WIDTHS, min_size=1, max_size=3), st.sampled_from([256, 4096, 11008, 14336])
)
def test_a_layout_fits_the_device_and_covers_the_products(n_rows, widths, k):
    shapes = [(n, k) for n in widths]
    tuning = tuning_for(n_rows, shapes)
    if tuning is None:
        assert supports(n_rows, BF16, shapes) is not None
        return
    assert all(n % tuning.columns == 0 for n in widths) and k % (tuning.parts * tuning.depth) == 0
    stage_bytes = 2 * (padded_rows(n_rows) + tuning.columns) * tuning.depth
    assert stage_bytes * tuning.stages <= 227 * 1024
    assert padded_rows(n_rows) * tuning.columns // 256 <= 200  # a thread has 255 registers
    assert tuning.stages >= 2
    tiles = sum(widths) // tuning.columns
    assert tuning.parts == 1 or tiles * tuning.parts <= 132  # parts of K only to fill one wave


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("shapes", "dtype", "why"),
    [
        ([(4096, 4096)], jnp.float32, "16 bits"),
        ([(4096, 4000)], BF16, "whole tiles"),
        ([(4096, 4096), (4096, 2048)], BF16, "differ in K"),
    ],
)
def test_what_cannot_be_streamed_says_why(shapes, dtype, why):
    assert why in supports(8, dtype, shapes)
    weights = [jnp.zeros(s, dtype) for s in shapes]
    with pytest.raises(ValueError, match=why):
        stream_products(jnp.zeros((8, shapes[0][1]), dtype), weights)


def step_of(n_layers, batch):
    config = model_config("llama-3-8b").with_layers(n_layers)
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    return partial(apply, config), (abstract_params(config, BF16), tokens, tokens)


def test_products_of_the_same_rows_are_one_kernel():
    function, args = step_of(
        2, 96
    )  # without native kernels, up to 64 rows are multiplied another way on a CPU
    jaxpr = compat.open_jaxpr(jax.make_jaxpr(function)(*args))[0]
    flat = [[eqn.invars[1].aval.shape for eqn in group] for group in products(jaxpr)]
    layer = [[(4096, 4096), (1024, 4096), (1024, 4096)], [(4096, 4096)], [(14336, 4096)] * 2, [(4096, 14336)]]
    assert flat == [*layer, *layer, [(128256, 4096)]]


@pytest.mark.parametrize("batch", [16, 136])
def test_batches_for_which_xla_is_faster_are_left_to_it(batch):
    function, args = step_of(2, batch)
    assert products(compat.open_jaxpr(jax.make_jaxpr(function)(*args))[0]) == []


def test_elsewhere_the_function_is_the_function(monkeypatch):
    monkeypatch.setattr(streamed.cpu, "loaded", lambda: streamed.cpu.NativeLibrary(None, "off"))
    function, _ = step_of(1, 64)
    assert with_streamed_products(function, jax.devices("cpu")[0]) is function


class TestStepOnHopper:
    pytestmark = needs_hopper

    def test_logits_of_a_step(self, monkeypatch):
        """A narrow model's step, by streamed products and by XLA's, against float32."""
        config = replace(
            model_config("llama-3-8b").with_layers(2),
            hidden_size=2048, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=4, vocab_size=8192,
        )  # fmt: skip
        halves = {n: a.astype(BF16) for n, a in random_params(config, 0, "float32").items()}
        rows = np.arange(64, dtype=np.int32)
        batch = DecodeBatch(rows[:, None], 0 * rows[:, None], rows[:, None], 0 * rows, rows)

        def logits(params):
            executor = UnsplitExecutor(partial(apply, config), params, n_slots=64, device=jax.devices()[0])
            return np.asarray(executor.decode(batch))

        want = logits({n: a.astype(jnp.float32) for n, a in halves.items()})
        calls = []
        monkeypatch.setattr(
            streamed.hopper, "stream_products", lambda *a, **k: calls.append(a) or stream_products(*a, **k)
        )
        got = logits(halves)
        assert len(calls) == 9
        monkeypatch.setattr(unsplit, "with_streamed_products", lambda function, *_: function)
        xla = logits(halves)
        assert len(calls) == 9
        assert np.abs(got - want).max() < 1.5 * np.abs(xla - want).max()
