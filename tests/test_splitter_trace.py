"""Tracing: what is inlined or unrolled, what is refused and with which words, and the operator itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split_examples as ex

from splitter import SplitError, attention, split, trace


@pytest.fixture(autouse=True)
def _float32_means_float32():
    """These models take products in JAX's default precision, which a GPU rounds differently per fusion."""
    with jax.default_matmul_precision("highest"):
        yield


TOKENS = jnp.array([[1, 2, 3]], jnp.int32)
POSITIONS = jnp.array([[0, 1, 2]], jnp.int32)


def wrapped(wrap):
    def model(params, tokens, positions):
        x = params["embed"][tokens]
        for layer in params["layers"]:
            x = wrap(ex.llama_layer)(x, layer, positions)
        return x @ params["embed"].T

    return model


def custom_derivative(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda *xs: (f(*xs), xs), lambda xs, ct: jax.vjp(f, *xs)[1](ct))
    return g


def custom_tangent(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda xs, ts: jax.jvp(f, xs, ts))
    return g


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        custom_derivative,
        custom_tangent,
        lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
    ],
)
def test_nested_constructs_are_inlined(wrap):
    model, params = wrapped(wrap), ex.llama_params(2)
    cut = split(model, params, TOKENS, POSITIONS)
    assert cut.n == 2
    np.testing.assert_allclose(
        ex.run_split(cut, params, TOKENS, POSITIONS), model(params, TOKENS, POSITIONS), rtol=1e-6, atol=1e-6
    )


def test_a_scan_over_layers_is_unrolled_into_equal_slices():
    params = ex.llama_params(4)
    cut = split(ex.scanned_llama, ex.stacked(params), TOKENS, POSITIONS)
    assert cut.n == 4 and cut.n_programs == 3
    got = ex.run_split(cut, ex.stacked(params), TOKENS, POSITIONS)
    np.testing.assert_allclose(got, ex.llama(params, TOKENS, POSITIONS), rtol=1e-5, atol=1e-5)
    # The layer's weights are sliced out at load time: the slice takes [D, N*H], not the stack of all layers.
    stacks = {x.shape for x in jax.tree.leaves(ex.stacked(params)["layers"])}
    shapes = [x.shape for x in cut.slice_params(2, ex.stacked(params))]
    assert (ex.D, ex.N * ex.H) in shapes and not stacks & set(shapes)


def test_a_reversed_scan_with_outputs():
    def model(params, tokens, positions):
        def body(x, layer):
            x = ex.llama_layer(x, layer, positions)
            return x, x.sum()

        return jax.lax.scan(body, params["embed"][tokens], params["layers"], reverse=True)

    params = ex.stacked(ex.llama_params(3))
    cut = split(model, params, TOKENS, POSITIONS)
    got, want = ex.run_split(cut, params, TOKENS, POSITIONS), model(params, TOKENS, POSITIONS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_a_scan_without_attention_stays_whole():
    def model(params, tokens, positions):
        y = ex.llama(params, tokens, positions)
        return jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros_like(y[0, 0]), y[0])[0]

    params = ex.llama_params(2)
    traced = trace(model, params, TOKENS, POSITIONS)
    assert [e.primitive.name for e in traced.jaxpr.eqns].count("scan") == 1
    got = ex.run_split(split(traced), params, TOKENS, POSITIONS)
    np.testing.assert_array_equal(got, model(params, TOKENS, POSITIONS))


def test_no_attention_is_an_error_that_says_what_to_call():
    def nothing(params, x):
        return x @ params

    with pytest.raises(SplitError, match=r"no attention operator found in .*nothing.*splitter\.attention"):
        split(nothing, jnp.ones((4, 4)), jnp.ones((2, 4)))


@pytest.mark.parametrize("construct", ["while", "cond"])
def test_attention_in_data_dependent_control_flow_says_where(construct):
    def model(params, tokens, positions):
        x = params["embed"][tokens]
        layer = params["layers"][0]
        if construct == "while":
            x = jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: ex.llama_layer(x, layer, positions), x)
        else:
            x = jax.lax.cond(x.sum() < 3, lambda x: ex.llama_layer(x, layer, positions), lambda x: x, x)
        return x

    with pytest.raises(SplitError, match=rf"inside `{construct}` at .*test_splitter_trace\.py:\d+.*model"):
        split(model, ex.llama_params(1), TOKENS, POSITIONS)


def test_a_mask_that_depends_on_activations_is_refused():
    def model(params, x):
        q = (x @ params).reshape(1, 3, 2, 4)
        return jax.nn.dot_product_attention(q, q, q, bias=(x @ params).mean() * jnp.ones((1, 2, 3, 3)))

    with pytest.raises(SplitError, match="besides q, k and v"):
        split(model, jnp.ones((8, 8)), jnp.ones((1, 3, 8)))


def random_qkv(seed=0, batch=2, tokens=5):
    rng = np.random.default_rng(seed)
    make = lambda heads: jnp.asarray(rng.normal(size=(batch, tokens, heads, ex.H)), jnp.float32)
    return make(ex.N), make(ex.K), make(ex.K)


def dense_attention(q, k, v, window=None, softcap=None):
    """float64, written out."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * np.tanh(s / softcap)
    t = np.arange(q.shape[1])
    seen = (t[None, :] <= t[:, None]) & (t[None, :] > t[:, None] - (window or q.shape[1]))
    s = np.where(seen, s, -np.inf)
    w = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", w / w.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"softcap": 1.5}])
def test_the_operator_is_causal_attention(options):
    q, k, v = random_qkv()
    np.testing.assert_allclose(attention(q, k, v, **options), dense_attention(q, k, v, **options), atol=1e-5)


def test_the_operator_compiles_batches_and_differentiates():
    q, k, v = random_qkv()
    want = dense_attention(q, k, v)
    np.testing.assert_allclose(jax.jit(attention)(q, k, v), want, atol=1e-5)
    one = lambda q, k, v: attention(q[None], k[None], v[None])[0]
    np.testing.assert_allclose(jax.vmap(one)(q, k, v), want, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(one, in_axes=(0, None, None))(q, k[0], v[0])[0], want[0], atol=1e-5)

    f = lambda q, k, v: attention(q, k, v)[..., 0].sum()
    for argument, grad in enumerate(jax.grad(f, argnums=(0, 1, 2))(q, k, v)):
        step = 1e-5 * np.random.default_rng(1).normal(size=grad.shape)
        args = [np.asarray(x, np.float64) for x in (q, k, v)]
        args[argument] = args[argument] + step
        difference = dense_attention(*args)[..., 0].sum() - want[..., 0].sum()
        np.testing.assert_allclose(np.sum(grad * step), difference, rtol=1e-2, atol=1e-9)


def test_vmap_over_a_model_keeps_the_operator():
    params = ex.llama_params(2)
    each = jax.vmap(lambda p, t, pos: ex.llama(p, t[None], pos[None])[0], in_axes=(None, 0, 0))
    tokens, positions = jnp.tile(TOKENS, (2, 1)), jnp.tile(POSITIONS, (2, 1))
    cut = split(each, params, tokens, positions)
    assert cut.n == 2
    np.testing.assert_allclose(
        ex.run_split(cut, params, tokens, positions), each(params, tokens, positions), rtol=1e-5, atol=1e-5
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "shapes, match",
    [
        (((2, 3, 4, 8), (2, 3, 3, 8), (2, 3, 3, 8)), "multiple of K"),
        (((2, 3, 4, 8), (2, 3, 2, 8), (2, 4, 2, 8)), "k, v"),
        (((3, 4, 8), (3, 2, 8), (3, 2, 8)), r"\[B, T, N, H\]"),
    ],
)
def test_operands_that_do_not_fit(shapes, match):
    with pytest.raises(ValueError, match=match):
        attention(*(jnp.zeros(s) for s in shapes))
    with pytest.raises(ValueError, match="window=0"):
        attention(*random_qkv(), window=0)
