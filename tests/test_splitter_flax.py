"""Models of plain Flax that know nothing of this project: their attention is found, their cache stays where
KV lives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split_examples as ex
from flax import nnx
from flax_models import nnx_mha

from splitter import SplitError, split
from splitter.find import find_attention


@pytest.fixture(autouse=True)
def _float32_means_float32():
    """These models take products in JAX's default precision, which a GPU rounds differently per fusion."""
    with jax.default_matmul_precision("highest"):
        yield


B, LENGTH, LAYERS = 2, 10, 3


def decode_both(model, inputs_at, n_steps):
    """Decode split and unsplit, each on its own cache, asserting equal outputs and caches; the split
    model."""
    step, params, cache = ex.flax_step(model)
    unsplit = jax.jit(step)
    cut = split(step, params, cache, *inputs_at(0))
    mine = theirs = cache
    for t in range(n_steps):
        out, mine = ex.run_split(cut, params, mine, *inputs_at(t))
        want, theirs = unsplit(params, theirs, *inputs_at(t))
        for got, expected in ((out, want), (mine, theirs)):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)
    return cut


def test_flax_multi_head_attention_with_its_own_cache():
    model = ex.FlaxDecoder(LAYERS, ex.D, nnx.Rngs(0))
    model.init_cache(B, LENGTH)
    inputs_at = lambda t: (jnp.array([[t + 1], [2 * t + 3]], jnp.int32),)
    cut = decode_both(model, inputs_at, 5)
    assert cut.n == LAYERS and cut.n_programs == 3
    report = cut.report()
    # New keys and values cross, not the cache; the context is the residual; the cache stays on the attention
    # side.
    assert cut.sites[0].k.shape == (B, 1, 4, ex.D // 4)
    assert all(c.context_bytes == B * ex.D * 4 for c in report.cuts)
    assert len(report.state_outputs) == 2 * LAYERS and all("cached" in name for name in report.state_outputs)
    assert len(report.aux_outputs) == LAYERS and all("cache_index" in name for name in report.aux_outputs)


def test_a_gqa_model_with_scattered_cache_writes():
    model = ex.RaggedGqaDecoder(LAYERS, B, LENGTH, nnx.Rngs(0))
    inputs_at = lambda t: (jnp.array([[t + 1], [7]], jnp.int32), jnp.array([[t], [t + 3]], jnp.int32))
    cut = decode_both(model, inputs_at, 5)
    assert cut.n == LAYERS and cut.n_programs == 3
    assert cut.sites[0].k.shape[0] == B and np.prod(cut.sites[0].k.shape) == B * ex.K * ex.H
    for c in cut.report().cuts:
        assert c.context_bytes <= B * ex.D * 4 + B * 4
        assert not any("cache" in v.name for v in c.context)


def test_a_whole_prompt_through_flax_attention_with_a_mask():
    attention = nnx.MultiHeadAttention(num_heads=4, in_features=ex.D, decode=False, rngs=nnx.Rngs(0))
    graph, params = nnx.split(attention)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, 6, ex.D)), jnp.float32)
    lengths = jnp.array([6, 3])

    def apply(params, x, lengths):
        seen = jnp.arange(6)[None, None, None] < lengths[:, None, None, None]
        causal = nnx.make_causal_mask(jnp.ones((1, 6)))
        return nnx.merge(graph, params)(x, mask=nnx.combine_masks(causal, seen))

    cut = split(apply, params, x, lengths)
    assert cut.n == 1 and len(cut.sites[0].private) == 1
    np.testing.assert_allclose(
        ex.run_split(cut, params, x, lengths), apply(params, x, lengths), rtol=1e-5, atol=1e-6
    )


class WithoutCache(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, ex.D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, ex.D, decode=False, rngs=rngs)

    def __call__(self, tokens, positions):
        return self.attention(self.embed(tokens) + self.embed(positions))


def test_a_module_in_place_of_a_function_of_parameters_is_refused():
    model, tokens = WithoutCache(nnx.Rngs(0)), jnp.ones((1, 4), jnp.int32)
    with pytest.raises(SplitError, match=r"after WithoutCache is its parameters.* nnx\.split\(module\)"):
        split(model, tokens, tokens)
    graph, params = nnx.split(model)
    assert split(lambda params, *inputs: nnx.merge(graph, params)(*inputs), params, tokens, tokens).n == 1
    assert (
        split(lambda params, model, x: model(x, x), {}, model, tokens).n == 1
    )  # weights among the inputs are there


def test_a_cache_among_the_parameters_is_named():
    model = ex.FlaxDecoder(LAYERS, ex.D, nnx.Rngs(0))
    model.init_cache(B, LENGTH)
    with pytest.raises(
        SplitError, match=r"parameter params\S*cache\S*: if that is a cache, make it an input"
    ):
        split(lambda model, tokens: model(tokens), model, jnp.ones((B, 1), jnp.int32))


def test_a_loss_beside_the_logits_is_not_looked_at():
    fn, params = nnx_mha.build(0)

    @jax.jit
    def balance(logits):  # of all tokens: a number for each number of tokens
        return jnp.mean(jax.nn.softmax(logits), axis=(0, 1)).sum()

    def with_a_loss(params, tokens, positions):
        logits = fn(params, tokens, positions)
        return {"logits": logits, "loss": balance(logits)}["logits"]

    found = find_attention(with_a_loss, params, max_len=nnx_mha.MAX_LEN)
    assert len(found.sites) == len(find_attention(fn, params, max_len=nnx_mha.MAX_LEN).sites) > 0
