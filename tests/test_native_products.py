"""Products with weights, rotations and the likeliest token by native code on CPUs: against float64, XLA and
numpy."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_levels import each_level  # noqa: F401  # a fixture

from jaxlamina.models import random_params
from jaxlamina.models.config import ModelConfig
from jaxlamina.models.decoder import apply
from jaxlamina.models.rope import _natively_rotated, _rotated
from jaxlamina.run import unsplit
from jaxlamina.run.local import LocalExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.sampling.sampler import _argmax
from jaxlamina.steps.buckets import Buckets
from jaxlamina.steps.step import PromptPart, Step
from jaxlamina.workers import DecodeBatch, PrefillBatch, streamed
from jaxlamina.workers.streamed import Filled, with_streamed_products
from pallas_kernels import compat, cpu

pytestmark = pytest.mark.skipif(
    cpu.loaded().library is None or jax.default_backend() != "cpu",
    reason=f"no native kernels: {cpu.loaded().reason}",
)
CPU = jax.devices("cpu")[0]
CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama", "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "vocab_size": 130,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    }
)  # fmt: skip


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def drawn(shape, rng, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape, dtype=np.float32), dtype)


# Few rows and many, whole tiles and rests of rows, of the weight's rows and along K.
ROWS = [1, 2, 5, 6, 7, 12, 13, 16, 31, 48, 49, 100]
SHAPES = [(64, 48), (192, 576), (67, 33), (1, 5), (3, 1), (16, 16)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n_rows", ROWS)
def test_products(level, n_rows, dtype, rng):
    for n, k in SHAPES:
        x, w = drawn((n_rows, k), rng, dtype), drawn((n, k), rng, dtype)
        [y] = jax.jit(partial(cpu.products, dtype=jnp.float32))(x, [w])
        want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T
        assert y.shape == (n_rows, n) and y.dtype == jnp.float32
        assert (np.abs(y - want) <= 3e-7 * math.sqrt(k + 16) * size).all(), (n, k)


@pytest.mark.parametrize("n_rows", [4, 40, 200])
def test_a_result_depends_on_its_row_and_weight_alone(n_rows, rng):
    """Whatever other weights are multiplied, and whatever rows are in the other places."""
    x, a, b = drawn((n_rows, 80), rng), drawn((50, 80), rng), drawn((130, 80), rng)
    together = cpu.products(x, [a, b])
    [alone] = cpu.products(x, [b])
    np.testing.assert_array_equal(together[1], alone)
    turned = jnp.roll(x, 3, axis=0)
    np.testing.assert_array_equal(jnp.roll(together[0], 3, axis=0), cpu.products(turned, [a])[0])


@pytest.mark.parametrize("n_rows", [0, 1, 9, 20, 60])
def test_padding_gives_zeros(n_rows, rng):
    x, w = drawn((60, 24), rng), drawn((40, 24), rng)
    x = x.at[n_rows:].set(jnp.nan)
    [y] = jax.jit(lambda x, w, n: cpu.products(x, [w], n_rows=n))(x, w, n_rows)
    assert (np.asarray(y[n_rows:]) == 0).all()
    np.testing.assert_allclose(y[:n_rows], x[:n_rows] @ w.T, atol=1e-4)


def test_many_calls_at_once(rng):
    """Independent products of one program, and programs of several threads."""
    from concurrent.futures import ThreadPoolExecutor

    x, ws = drawn((70, 64), rng), [drawn((90, 64), rng) for _ in range(12)]
    run = jax.jit(lambda x, ws: [cpu.products(x + i, [w])[0] for i, w in enumerate(ws)])
    want = [np.asarray((x + i) @ w.T) for i, w in enumerate(ws)]
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: jax.block_until_ready(run(x, ws)), range(24)):
            for y, z in zip(found, want, strict=True):
                np.testing.assert_allclose(y, z, atol=1e-3)


def test_what_is_no_product_of_weights_says_why():
    assert "type of weights" in cpu.supports_products(4, jnp.int8, [(4, 4)])
    assert "nothing" in cpu.supports_products(0, jnp.float32, [(4, 4)])
    assert cpu.supports_products(4, jnp.bfloat16, [(4, 4)]) is None


@pytest.mark.parametrize("half", [4, 10, 16, 19])
def test_rotation(level, half, rng):
    x = drawn((2, 5, 3, 40), rng)
    angles = drawn((2, 5, 1, half), rng)
    args = x, jnp.cos(angles), jnp.sin(angles)
    np.testing.assert_allclose(jax.jit(_natively_rotated)(*args), _rotated(*args), atol=1e-6)

    def loss(rotate, x):
        return (rotate(x, *args[1:]) ** 2 * jnp.arange(40.0)).sum()

    got, want = (jax.grad(partial(loss, rotate))(x) for rotate in (_natively_rotated, _rotated))
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("n_rows", [1, 3])
def test_the_likeliest_token_is_the_first_of_equal_ones(n_rows, rng):
    logits = np.round(rng.standard_normal((n_rows, 640)).astype(np.float32))  # many are equal
    np.testing.assert_array_equal(jax.jit(_argmax)(logits), logits.argmax(-1))
    np.testing.assert_array_equal(jax.jit(_argmax)(logits[:, :100]), logits[:, :100].argmax(-1))
    logits[:] = -np.inf
    assert (np.asarray(jax.jit(_argmax)(logits)) == 0).all()
    logits[:, 7] = np.nan
    found = np.asarray(jax.jit(_argmax)(logits))
    assert ((found >= 0) & (found < 640)).all()


def test_a_models_products_are_taken(rng):
    """Those of the same rows by one call: four of each layer, and the logits'."""
    params = random_params(CONFIG, 0, "float32")
    tokens = jnp.arange(3, dtype=jnp.int32)[:, None]
    step = partial(apply, CONFIG)
    jaxpr = compat.open_jaxpr(
        jax.make_jaxpr(with_streamed_products(step, CPU))(params, tokens, tokens, None)
    )[0]
    assert str(jaxpr).count("target_name=jaxlamina_products") == 4 * 3 + 1
    assert str(jaxpr).count(f"= {cpu.rotation_p.name} ") == 2 * 3
    want = apply(CONFIG, params, tokens, tokens, None)
    got = jax.jit(with_streamed_products(step, CPU))(params, tokens, tokens, None)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_of_padded_prompts_only_tokens_are_multiplied(monkeypatch):
    """By each way to run a model: a prompt of 9 tokens in a bucket of 32, alone and beside rows. Its padding,
    which gives zeros, changes nothing."""
    told: list[bool] = []

    def watched(x, weights, dtype=None, n_rows=None):
        told.append(n_rows is not None)
        return cpu.products(x, weights, dtype, n_rows)

    monkeypatch.setattr(streamed, "NATIVE", streamed.NATIVE._replace(run=watched))
    params, fn = random_params(CONFIG, 0, "float32"), partial(apply, CONFIG)
    buckets = Buckets((4,), (32,), (64,), prefills=False)
    prompt = PrefillBatch.build([range(9)], [range(9)], buckets, 64)
    rows = DecodeBatch.build([5, 6], [[*range(9), 20], [30]], buckets, 64)
    later = PrefillBatch.build([range(5)], [range(40, 45)], buckets, 64)
    steps = Step(prompts=(PromptPart(prompt),)), Step(rows, (PromptPart(later),))

    def logits(executor):
        found = [executor.run(step) for step in steps]
        return [np.asarray(found[0].prompts[0]), *(np.asarray(x[:2]) for x in (found[1][0], *found[1][1]))]

    unsplit_ = logits(UnsplitExecutor(fn, params, n_slots=64, device=CPU))
    # Beside rows the last slice (three products, and the logits') is of fewer rows.
    assert told == [*[True] * 12, False, *[True] * 9, *[False] * 4]
    told.clear()
    split = logits(LocalExecutor(fn, params, n_slots=64, model_device=CPU, attention_device=CPU))
    assert told == [*[True] * 12, False, *[True] * 9, *[False] * 4]
    monkeypatch.setattr(unsplit, "with_streamed_products", lambda function, *_: function)
    by_xla = logits(UnsplitExecutor(fn, params, n_slots=64, device=CPU))
    for a, b, c in zip(unsplit_, split, by_xla, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        np.testing.assert_allclose(a, c, atol=1e-5)


def test_rows_beyond_those_that_are_filled_give_zeros(rng):
    x, w = drawn((1, 10, 24), rng), drawn((40, 24), rng)

    def step(x, w, logits_at):
        last = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        return tuple(jax.lax.dot_general(y, w, (((2,), (1,)), ((), ()))) for y in (x, last))

    run = with_streamed_products(step, CPU, lambda x, _, at: Filled.of(x[:, :, 0], at))
    every, last = jax.jit(run)(x, w, jnp.array([6]))
    np.testing.assert_allclose(every[:, :7], (x @ w.T)[:, :7], atol=1e-4)
    assert (np.asarray(every[:, 7:]) == 0).all()
    np.testing.assert_allclose(last[:, 0], (x @ w.T)[:, 6], atol=1e-4)  # one row, of another shape


def test_how_many_rows_are_filled():
    tokens = jnp.zeros((1, 8), jnp.int32)
    found = Filled.of(tokens, jnp.array([4]))
    assert found.shape == (1, 8) and int(found.n) == 5
    assert int(Filled.of(jnp.zeros((11, 1), jnp.int32), jnp.array([4]), 3).n) == 8
    assert Filled.of(jnp.zeros((2, 8), jnp.int32), jnp.array([4, 5])) is None
