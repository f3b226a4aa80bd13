"""Matrices that stay in GGUF's blocks: against the gguf package, and models of them against decoded ones."""

from __future__ import annotations

from functools import partial

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_examples import LLAMA, host_params
from native_levels import each_level  # noqa: F401  # a fixture
from rank_jobs import check_greedy, run_job
from test_weights_gguf import write_gguf

from jaxlamina import LLM, SamplingParams, UserError
from jaxlamina.models.causal_lm import of_origin
from jaxlamina.weights import open_checkpoint
from jaxlamina.weights.sources import OtherWeights
from jaxlamina.workers.model_worker import trace_step
from jaxlamina.workers.streamed import with_streamed_products
from pallas_kernels import blocks, cpu

FORMS = list(blocks.N_BYTES)
DEMO = "smollm2-135m-instruct"
native = pytest.mark.skipif(cpu.loaded().library is None, reason=f"no native kernels: {cpu.loaded().reason}")


def stored(shape, form, rng):
    """Blocks of numbers of many sizes, d's that are float16's smallest among them."""
    scales = 10.0 ** rng.uniform(-6, 2, (shape[0], shape[1] // 32, 1))
    numbers = (rng.standard_normal((*scales.shape[:2], 32)) * scales).astype(np.float32)
    kind = gguf.GGMLQuantizationType[form]
    found = gguf.quantize(numbers.reshape(shape), kind)
    return jnp.asarray(found), gguf.dequantize(found, kind)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_the_gguf_packages_to_the_bit(form):
    raw, want = stored((7, 96), form, np.random.default_rng(0))
    np.testing.assert_array_equal(jax.jit(partial(blocks.dequantize, form=form))(raw), want)
    np.testing.assert_array_equal(blocks.dequantize(raw[3], form), want[3])
    batched = jax.vmap(partial(blocks.dequantize, form=form), in_axes=1)(jnp.stack([raw, raw], 1))
    np.testing.assert_array_equal(batched, [want, want])
    assert blocks.n_columns(form, raw.shape[1]) == 96


def test_what_is_no_row_of_blocks_says_so():
    with pytest.raises(ValueError, match="no rows of Q4_1 blocks"):
        blocks.dequantize(jnp.zeros((2, 21), jnp.uint8), "Q4_1")
    with pytest.raises(ValueError, match="no rows of Q2_K blocks"):
        blocks.dequantize(jnp.zeros((2, 20), jnp.uint8), "Q2_K")


@native
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_rows", [1, 2, 3, 5, 8, 12, 13, 50])
def test_products_are_those_of_the_decoded_matrix_to_the_bit(level, form, n_rows):
    rng = np.random.default_rng(n_rows)
    for shape in [(3, 32), (70, 96), (33, 576)]:
        raw, decoded = stored(shape, form, rng)
        x = jnp.asarray(rng.standard_normal((n_rows, shape[1]), dtype=np.float32))
        found, want = jax.jit(cpu.products)(x, [raw, jnp.asarray(decoded)])
        np.testing.assert_array_equal(found, want)
        exact = np.asarray(x, np.float64) @ decoded.astype(np.float64).T
        size = np.abs(np.asarray(x, np.float64)) @ np.abs(decoded.astype(np.float64)).T
        assert (np.abs(found - exact) <= 1e-6 * size + 1e-30).all()


@pytest.fixture(scope="module")
def demo():
    return open_checkpoint(DEMO)


def test_only_what_has_to_be_is_decoded(demo):
    kept = demo.in_blocks()
    params = kept.load("float32")
    assert {name: (x.shape, x.dtype) for name, x in params.items()} == {
        name: (x.shape, x.dtype) for name, x in kept.model.like("float32").items()
    }
    assert sum(x.nbytes for x in params.values()) < 0.19 * sum(x.nbytes for x in demo.load().values())
    again = of_origin(kept.model.origin)  # as another rank makes it
    assert again.like("float32") == kept.model.like("float32") and again.name == kept.model.name


@native
def test_no_matrix_is_decoded_whole(demo):
    """Neither the vocabulary's table, which is both looked up and multiplied with, nor any other."""
    model = demo.in_blocks().model
    like = dict(model.like("float32"))
    ints = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    traced = trace_step(model.fn, like, 2, 1)

    def step(params, tokens):
        return traced.eval(params, tokens, tokens)

    text = jax.jit(with_streamed_products(step, jax.devices("cpu")[0])).lower(like, ints).compile().as_text()
    assert "f32[49152,576]" not in text and "f32[1536,576]" not in text and "f32[576,1536]" not in text


def of_blocks(folder, form, seed=1):
    """A small model's file whose matrices are of such blocks."""

    def kind(name, w):
        return gguf.GGMLQuantizationType["F32" if w.ndim == 1 else form]

    return str(write_gguf(folder / f"m{seed}.gguf", LLAMA, host_params(LLAMA, seed), quantise=kind))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", pytest.param(None, id=DEMO, marks=pytest.mark.slow)])
def test_a_model_writes_the_same_with_and_without(form, split, tmp_path):
    prompts = [{"prompt_token_ids": [5 + i, *range(2, 2 + n)]} for i, n in enumerate((4, 11, 6))]
    model = of_blocks(tmp_path, form) if form else DEMO
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=3, ignore_eos=True)
    outs = []
    for quantization in ("none", "gguf"):
        llm = LLM(
            model, split=split, quantization=quantization, dtype="float32", max_model_len=64, max_num_seqs=3
        )
        outs.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params)])
    assert [ids for ids, _ in outs[0]] == [ids for ids, _ in outs[1]]
    for (_, a), (_, b) in zip(*outs, strict=True):
        for one, other in zip(a, b, strict=True):
            assert one.keys() == other.keys()
            both = [(one[t].logprob, other[t].logprob) for t in one]
            assert max(abs(x - y) for x, y in both) < (0.0 if cpu.loaded().library else 2e-4) + 1e-9


def test_a_start_with_anothers_weights_writes_what_an_update_does(tmp_path):
    """With matrices as they are stored, and refused where those are of another form or model."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    how = {"quantization": "gguf", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 1}

    def tokens(llm):
        return llm.generate({"prompt_token_ids": [5, 2, 3]}, params)[0].outputs[0].token_ids

    first, other = of_blocks(tmp_path, "Q4_1"), of_blocks(tmp_path, "Q4_1", 2)
    llm = LLM(first, **how)
    before = tokens(llm)
    llm.update_weights(other)
    started = LLM(OtherWeights(open_checkpoint(first), other, None), **how)
    assert tokens(started) == tokens(llm) != before
    for wrong, says in (
        (of_blocks(tmp_path, "Q8_0", 3), "wrong shape|is another model"),
        (DEMO, "is another model"),
    ):
        with pytest.raises(UserError, match=says):
            LLM(OtherWeights(open_checkpoint(first), wrong, None), **how)


def test_auto_keeps_blocks_where_native_kernels_are_and_only_there(monkeypatch):
    def nbytes(**options):
        llm = LLM(DEMO, split=False, max_model_len=16, max_num_seqs=1, **options)
        return sum(x.nbytes for x in llm.executor.params.values())

    if cpu.loaded().library is not None:
        assert nbytes() < 110e6
    assert nbytes(dtype="bfloat16") > 260e6
    monkeypatch.setattr(cpu, "serves", lambda platform: False)
    assert nbytes() > 530e6


def test_what_cannot_stay_as_it_is_says_why(tmp_path):
    with pytest.raises(UserError, match="dtype is bfloat16; leave it out"):
        LLM(DEMO, quantization="gguf", dtype="bfloat16")
    with pytest.raises(UserError, match="no matrices of Q4_0, Q4_1 or Q8_0"):
        LLM("smollm2-135m", load_format="dummy", quantization="gguf")
    with pytest.raises(UserError, match="must be one of auto, gguf, none"):
        LLM(DEMO, quantization="awq")


def test_other_model_ranks_get_blocks_too(tmp_path):
    """Stages of a pipeline, each with some of the matrices."""
    scenario = "greedy", {"model": of_blocks(tmp_path, "Q4_1"), "n_tokens": 12, "quantization": "gguf"}
    check_greedy(run_job("xla", (2, 1), [scenario], pipeline_parallel=2)[0], n_tokens=12)
