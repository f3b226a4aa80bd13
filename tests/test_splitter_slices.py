"""Split equals unsplit, what crosses the cuts, the order inside a slice, and how many programs there are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split_examples as ex

from pallas_kernels import compat
from splitter import SplitError, split, trace


@pytest.fixture(autouse=True)
def _float32_means_float32():
    """These models take products in JAX's default precision, which a GPU rounds differently per fusion."""
    with jax.default_matmul_precision("highest"):
        yield


TOKENS = jnp.array([[1, 2, 3], [90, 5, 6]], jnp.int32)
POSITIONS = jnp.array([[0, 1, 2], [4, 5, 6]], jnp.int32)
B, T = TOKENS.shape
RESIDUAL_BYTES = B * T * ex.D * 4
MODELS = {
    "llama": ex.llama,
    "parallel": ex.parallel_llama,
    "value-residual": ex.value_residual_llama,
    "shared-kv": ex.shared_kv_llama,
}


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_split_equals_unsplit_to_the_bit(name, recompute):
    params = ex.llama_params(4)
    model = split(MODELS[name], params, TOKENS, POSITIONS, recompute=recompute)
    assert model.n == 4 and len(model.slices) == 5
    got = ex.run_split(model, params, TOKENS, POSITIONS)
    np.testing.assert_array_equal(got, MODELS[name](params, TOKENS, POSITIONS))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_split_equals_unsplit_in_half_precision(dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), ex.llama_params(3))
    model = split(ex.llama, params, TOKENS, POSITIONS)
    got = ex.run_split(model, params, TOKENS, POSITIONS)
    np.testing.assert_array_equal(got, ex.llama(params, TOKENS, POSITIONS))


def test_the_context_of_a_llama_is_the_residual_and_positions():
    model = split(ex.llama, ex.llama_params(4), TOKENS, POSITIONS)
    for cut in model.report().cuts:
        assert [v.shape for v in cut.context if v.name != "positions"] == [(B, T, ex.D)]
        assert cut.context_bytes <= RESIDUAL_BYTES + POSITIONS.nbytes


def test_without_recompute_the_rotary_values_are_carried():
    params = ex.llama_params(3)
    carried = split(ex.llama, params, TOKENS, POSITIONS, recompute=False).report().cuts[1]
    lean = split(ex.llama, params, TOKENS, POSITIONS).report().cuts[1]
    assert carried.context_bytes >= lean.context_bytes
    assert {v.name for v in lean.context} >= {"positions"}


def test_a_parallel_block_needs_its_normalised_input_after_attention():
    """The MLP is free to run after attention: the cut takes the residual and the normalised x, or just the
    residual."""
    cuts = split(ex.parallel_llama, ex.llama_params(2), TOKENS, POSITIONS).report().cuts
    assert all(c.context_bytes <= 2 * RESIDUAL_BYTES + POSITIONS.nbytes for c in cuts)


def test_value_residuals_and_shared_kv_are_carried():
    params, kv_bytes = ex.llama_params(4), B * T * ex.K * ex.H * 4
    cut = split(ex.value_residual_llama, params, TOKENS, POSITIONS).report().cuts[1]
    assert cut.context_bytes == RESIDUAL_BYTES + POSITIONS.nbytes + kv_bytes
    cut = split(ex.shared_kv_llama, params, TOKENS, POSITIONS).report().cuts[0]
    assert cut.context_bytes == RESIDUAL_BYTES + POSITIONS.nbytes + 2 * kv_bytes


def test_report_counts_what_the_pools_exchange():
    report = split(ex.llama, ex.llama_params(3), TOKENS, POSITIONS).report()
    per_token_and_layer = (2 * ex.N + 2 * ex.K) * ex.H * 4
    assert report.exchanged_bytes_per_token == 3 * per_token_and_layer
    assert report.n_tokens == B * T and report.n_slices == 4
    assert "4 slices" in report.line()


@pytest.mark.parametrize("n_layers", [3, 12])
def test_three_programs_serve_any_depth(n_layers):
    model = split(ex.llama, ex.llama_params(n_layers), TOKENS, POSITIONS)
    assert model.n_programs == 3
    assert len({id(s.program) for s in model.slices[1:-1]}) == 1
    assert len({id(s.operator) for s in model.sites}) == 1


def test_slices_that_differ_are_not_shared():
    """A layer with another constant, and one with another width, must not get its neighbour's program."""

    def uneven(params, tokens, positions):
        x = params["embed"][tokens]
        for i, layer in enumerate(params["layers"]):
            x = ex.llama_layer(x, layer, positions) * (2.0 if i == 1 else 1.0)
        return x

    params = ex.llama_params(4)
    model = split(uneven, params, TOKENS, POSITIONS)
    assert model.n_programs > 3
    got = ex.run_split(model, params, TOKENS, POSITIONS)
    np.testing.assert_array_equal(got, uneven(params, TOKENS, POSITIONS))


def test_closed_over_arrays_that_differ_are_told_apart():
    """Equal code over different constants is one program with other arguments, and the results differ."""
    gains = [np.full(ex.D, g, np.float32) for g in (1.0, 2.0, 3.0)]

    def scaled(params, tokens, positions):
        x = params["embed"][tokens]
        for gain, layer in zip(gains, params["layers"], strict=True):
            x = ex.llama_layer(x * jnp.asarray(gain), layer, positions)
        return x

    params = ex.llama_params(3)
    model = split(scaled, params, TOKENS, POSITIONS)
    got = ex.run_split(model, params, TOKENS, POSITIONS)
    np.testing.assert_array_equal(got, scaled(params, TOKENS, POSITIONS))


def test_q_comes_first_and_kv_wait_for_the_tie():
    """q_part reads the q weights and not k's or v's; k and v change with the tie, the context's meaning does
    not."""
    params = ex.llama_params(3)
    model = split(ex.llama, params, TOKENS, POSITIONS)
    weights = model.slice_params(0, params)
    context = model.first_context(TOKENS, POSITIONS)
    jaxpr = jax.make_jaxpr(lambda w: model.slices[0].q_part(w, context, None)[0])(weights)
    inner, _ = compat.open_jaxpr(jaxpr)
    read = {v for eqn in inner.eqns for v in eqn.invars if not isinstance(v, compat.Literal)}
    shapes = [v.aval.shape for v in inner.invars if v in read]
    assert (ex.D, ex.N * ex.H) in shapes and (ex.D, ex.K * ex.H) not in shapes

    _, rest = model.slices[0].q_part(weights, context, None)
    plain = model.slices[0].kv_part(weights, rest, None)
    zero = model.slices[0].kv_part(weights, rest, jnp.float32(0))
    jax.tree.map(np.testing.assert_array_equal, plain, zero)
    k, v, _ = model.slices[0].kv_part(weights, rest, jnp.float32(jnp.nan))
    assert np.isnan(k).all() and np.isnan(v).all()


def test_a_fused_qkv_projection_still_ties_k_and_v():
    def fused(params, x):
        for w in params:
            q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], 3 * ex.N, ex.H), 3, axis=2)
            from splitter import attention

            x = x + attention(q, k, v).reshape(x.shape)
        return x

    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(ex.D, 3 * ex.D)), jnp.float32) for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(2, 3, ex.D)), jnp.float32)
    model = split(fused, params, x)
    np.testing.assert_array_equal(ex.run_split(model, params, x), fused(params, x))
    weights = model.slice_params(0, params)
    _, rest = model.slices[0].q_part(weights, model.first_context(x), None)
    k, v, _ = model.slices[0].kv_part(weights, rest, jnp.float32(jnp.nan))
    assert np.isnan(k).all() and np.isnan(v).all()


def test_outputs_without_attention_go_to_slice_0_and_are_listed():
    def counted(params, tokens, positions):
        return {"logits": ex.llama(params, tokens, positions), "next": positions[:, -1] + 1, "same": tokens}

    params = ex.llama_params(2)
    model = split(counted, params, TOKENS, POSITIONS)
    assert model.report().aux_outputs == ("output['next']", "output['same']")
    got, want = ex.run_split(model, params, TOKENS, POSITIONS), counted(params, TOKENS, POSITIONS)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_each_slice_fits_its_neighbour():
    params = ex.llama_params(3, abstract=True)
    model = split(ex.llama, params, TOKENS, POSITIONS)
    context, out = model.first_context(TOKENS, POSITIONS), None
    for i in range(model.n):
        weights = model.slice_params(i, params)
        q, rest = jax.eval_shape(model.slices[i].q_part, weights, context, out)
        k, v, context = jax.eval_shape(model.slices[i].kv_part, weights, rest, None)
        site = model.sites[i]
        assert [(x.shape, x.dtype) for x in (q, k, v)] == [
            (x.shape, x.dtype) for x in (site.q, site.k, site.v)
        ]
        out = site.out
    logits = jax.eval_shape(model.slices[model.n].final, model.slice_params(model.n, params), context, out)
    assert logits.shape == (B, T, ex.V)


def test_parts_compose_into_one_jit_and_into_many():
    params = ex.llama_params(3)
    model = split(ex.llama, params, TOKENS, POSITIONS)
    want = jax.jit(ex.llama)(params, TOKENS, POSITIONS)
    got = jax.jit(lambda p, t, x: ex.run_split(model, p, t, x, tie=jnp.float32(0)))(params, TOKENS, POSITIONS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_two_batches_can_be_interleaved():
    """The caller owns the loop: batch 1 runs its slice while batch 0 waits for attention."""
    params = ex.llama_params(3)
    model = split(ex.llama, params, TOKENS, POSITIONS)
    batches = [(TOKENS, POSITIONS), (TOKENS + 1, POSITIONS)]
    contexts = [model.first_context(*b) for b in batches]
    outs: list = [None, None]
    for i in range(model.n):
        weights = model.slice_params(i, params)
        sent = []
        for b in range(2):
            q, rest = model.slices[i].q_part(weights, contexts[b], outs[b])
            k, v, contexts[b] = model.slices[i].kv_part(weights, rest, None)
            sent.append((q, k, v))
        outs = [model.sites[i].attend(*x)[0] for x in sent]
    last = model.slice_params(model.n, params)
    for b, inputs in enumerate(batches):
        got = model.slices[model.n].final(last, contexts[b], outs[b])
        np.testing.assert_array_equal(got, ex.llama(params, *inputs))


def test_gradients_flow_through_the_slices():
    params = ex.llama_params(2)
    model = split(ex.llama, params, TOKENS, POSITIONS)
    loss = lambda run: lambda p: jnp.mean(run(p) ** 2)
    want = jax.grad(loss(lambda p: ex.llama(p, TOKENS, POSITIONS)))(params)
    got = jax.grad(loss(lambda p: ex.run_split(model, p, TOKENS, POSITIONS)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)


def test_unsplit_evaluation_with_an_attention_of_the_callers():
    params = ex.llama_params(2)
    traced = trace(ex.llama, params, TOKENS, POSITIONS)
    np.testing.assert_array_equal(traced.eval(params, TOKENS, POSITIONS), ex.llama(params, TOKENS, POSITIONS))
    seen = []
    out = traced.eval(
        params, TOKENS, POSITIONS, attend=lambda i, q, k, v: seen.append((i, k.shape)) or jnp.zeros_like(q)
    )
    assert seen == [(0, (B, T, ex.K, ex.H)), (1, (B, T, ex.K, ex.H))]
    assert not np.allclose(out, ex.llama(params, TOKENS, POSITIONS))


def test_another_structure_than_traced_is_an_error():
    params = ex.llama_params(2)
    model = split(ex.llama, params, TOKENS, POSITIONS)
    with pytest.raises(SplitError, match="structure"):
        model.slice_params(0, {"embed": params["embed"]})
    with pytest.raises(SplitError, match="structure"):
        model.first_context(TOKENS)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_slice_needs_no_parameters_but_those_it_reads(stacked):
    """Read whole or in views of stacked ones; the others may be shapes alone."""
    params = ex.llama_params(3)
    given, fn = (ex.stacked(params), ex.scanned_llama) if stacked else (params, ex.llama)
    model = split(fn, given, TOKENS, POSITIONS)
    leaves, tree = jax.tree.flatten(given)
    for i in range(model.n + 1):
        read = model.params_read(i)
        part = [x if n in read else jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in enumerate(leaves)]
        pairs = zip(model.slice_params(i, tree.unflatten(part)), model.slice_params(i, given), strict=True)
        assert all(isinstance(x, jax.Array) and (x == y).all() for x, y in pairs)
        less = [x if n in read[1:] else jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in enumerate(leaves)]
        abstract = model.slice_params(i, tree.unflatten(less))
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in abstract)
    if not stacked:
        assert set().union(*map(model.params_read, range(model.n + 1))) == set(range(len(leaves)))


def test_a_large_input_is_not_carried_past_its_last_use():
    """Inputs stay in the context to the end only while they are small beside it."""

    def model(params, x, mask):
        from splitter import attention

        y = attention(x, x, x)
        y = attention(y * 2, x, x) + mask.sum()
        return attention(y @ params, y, y).sum()

    x = jnp.ones((1, 3, 2, 8))
    cuts = split(model, jnp.eye(8), x, jnp.ones((4,))).report().cuts
    assert x.nbytes in [v.size_bytes for v in cuts[0].context]
    assert cuts[-1].context_bytes < x.nbytes
