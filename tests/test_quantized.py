"""int8 pools: what they hold reads back within half a scale, nothing clips by rounding, and appends are in
place."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import pallas_kernels as pk
from pallas_kernels import cpu, reference
from pallas_kernels.quantized import dequantise, quantise, quantise_channels, store, values_of

ROWS = hnp.arrays(
    np.float32,
    st.sampled_from([(1, 1, 1), (1, 2, 3), (2, 1, 8), (3, 2, 9)]),  # each is compiled
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_quantised_rows_read_back_within_half_a_scale(rows: np.ndarray) -> None:
    values, scales = (np.asarray(x) for x in quantise(jnp.asarray(rows)))
    assert values.dtype == np.int8 and scales.dtype == jnp.bfloat16
    absmax = np.abs(rows.astype(np.float64)).max(-1)
    by = scales.astype(np.float64)
    # Rounded up, and by less than one step of bfloat16; rows too small for that take the smallest scale there
    # is.
    assert np.all(by >= absmax / 127 * (1 - 2**-23))
    assert np.all(by <= np.maximum(absmax / 127 * (1 + 2**-7), 2.0**-126))
    assert np.all((by == 0) == (absmax == 0))
    assert np.all(np.abs(values.astype(np.int64)) <= 127)  # -128 is an overflow that wrapped
    error = np.abs(values * by[..., None] - rows.astype(np.float64))
    assert np.all(error <= by[..., None] / 2 * (1 + 2**-14))


@pytest.mark.parametrize("seed", range(3))
def test_the_largest_value_never_clips(seed: int) -> None:
    """Every bfloat16 and float32 near one as the largest of its row: it takes step 127 or a lower one, never
    128."""
    rng = np.random.default_rng(seed)
    largest = np.concatenate([np.linspace(1, 2, 5000), rng.uniform(1e-6, 1e6, 5000)]).astype(np.float32)
    values, scales = quantise(jnp.asarray(largest)[:, None, None])
    by = np.asarray(scales, np.float64)[:, 0]
    assert np.all(largest / by <= 127 * (1 + 2**-22))
    assert np.asarray(values).min() >= 126
    want_values, want_scales = reference.quantise(largest[:, None, None])
    assert np.mean(want_scales[:, 0] == by) > 0.99  # the division's last bit may carry over a step
    assert np.abs(np.asarray(values, np.float64) - want_values).max() <= 1


def test_zero_and_tiny_rows() -> None:
    rows = jnp.asarray([[[0.0, 0.0]], [[-0.0, 0.0]], [[2.0**-126, 0.0]], [[1.0, -1.0]]])
    values, scales = quantise(rows)
    assert np.asarray(scales, np.float32)[:2].tolist() == [[0], [0]]
    read = np.asarray(dequantise(pk.QuantizedPool(values, scales)))
    assert np.isfinite(read).all() and not read[:2].any()
    assert values[3].tolist() in ([[127, -127]], [[126, -126]])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_overflow_reads_back_as_one(bad: float) -> None:
    """It stays its own request's trouble, and is not a number that looks right."""
    pool = pk.make_pool(3, 2, 4, jnp.int8)
    rows = np.ones((1, 2, 4), np.float32)
    rows[0, 1, 2] = bad
    pool, _ = pk.append(pool, pool, jnp.asarray(rows), jnp.asarray(rows), jnp.asarray([1]))
    read = np.asarray(dequantise(pool))
    assert not np.isfinite(read[1, 1]).any()
    np.testing.assert_allclose(read[1, 0], 1, rtol=1e-2)
    assert not read[[0, 2]].any()


@pytest.mark.skipif(cpu.loaded().library is None, reason=cpu.loaded().reason or "")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("n_slots", [0, 5, 3000, 200_000])  # below and above what is in large pages
def test_a_pool_in_large_pages_is_empty_and_is_written_in_place(dtype: Any, n_slots: int) -> None:
    like = partial(pk.make_pool, n_slots, 2, 16, dtype)
    make = jax.jit(partial(like, zeros_of=cpu.zeros))
    for _ in range(2):  # the second one may be where the first was
        pool = make()
        expected = like()
        for found, zeros in zip(jax.tree.leaves(pool), jax.tree.leaves(expected), strict=True):
            assert (found.shape, found.dtype) == (zeros.shape, zeros.dtype) and not np.asarray(found).any()
        if n_slots:
            rows, at = jnp.ones((1, 2, 16), jnp.float32), values_of(pool).unsafe_buffer_pointer()
            (pool,) = jax.jit(
                lambda pool, rows: (store(pool, rows, jnp.asarray([n_slots - 1])),), donate_argnums=0
            )(pool, rows)
            assert values_of(pool).unsafe_buffer_pointer() == at
            np.testing.assert_allclose(dequantise(pool)[-1], rows[0], rtol=1e-2)
            pool = jax.jit(lambda pool: jax.tree.map(jnp.ones_like, pool), donate_argnums=0)(pool)
        del pool


def test_channel_scales_use_the_whole_range_of_each_channel() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 2, 8)) * np.logspace(-2, 2, 8)
    rows[:, 0, 3] = 0
    scales = pk.channel_scales_of(jnp.asarray(rows, jnp.float32))
    assert scales.shape == (2, 8) and scales[0, 3] == 1
    values = np.asarray(quantise_channels(jnp.asarray(rows), scales))
    top = np.abs(values.astype(int)).max(0)
    assert top[0, 3] == 0 and np.all(np.delete(top.ravel(), 3) == 127)
    error = np.abs(values * np.asarray(scales, np.float64) - rows)
    assert np.all(error <= np.asarray(scales) / 2 * (1 + 1e-4))


def test_channels_saturate_outside_their_calibration() -> None:
    scales = jnp.full((1, 3), 0.01)
    values = quantise_channels(jnp.asarray([[[5.0, -5.0, 0.5]]]), scales)
    assert values.tolist() == [[[127, -127, 50]]]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), m=st.integers(0, 6), form=st.sampled_from(["int8", "channel", "zeros"]))
def test_append_matches_reference(seed: int, m: int, form: str) -> None:
    rng = np.random.default_rng(seed)
    scales = None if form == "int8" else jnp.asarray(rng.uniform(0.01, 0.05, (2, 4)), jnp.float32)
    zeros = jnp.asarray(rng.normal(size=(2, 4)), jnp.float32) if form == "zeros" else None
    pools = [pk.make_pool(7, 2, 4, jnp.int8, channel_scales=scales, channel_zeros=zeros) for _ in range(2)]
    new = [jnp.asarray(rng.normal(size=(m, 2, 4)), jnp.bfloat16) for _ in range(2)]
    slots = jnp.asarray(np.append(rng.permutation(7), [7, 2**31 - 1, -1])[rng.permutation(10)[:m]], jnp.int32)
    got = pk.append(*pools, *new, slots)
    want = reference.append(*pools, *new, slots)
    step = 0.05 if form != "int8" else np.abs(np.asarray(new, np.float64)).max(initial=0) / 100
    for have, expect in zip(got, want, strict=True):
        # The same number of steps, or one more or less where float64 falls on the other side of a tie.
        np.testing.assert_allclose(reference.dequantise(have), expect, atol=step)
        untouched = np.setdiff1d(np.arange(7), np.asarray(slots))
        assert (reference.dequantise(have)[untouched] == (0 if zeros is None else zeros)).all()


@pytest.mark.parametrize("form", ["int8", "channel"])
def test_decode_writes_the_donated_pools_in_place(form: str) -> None:
    b, k, h, n_slots = 3, 2, 16, 500
    scales = jnp.ones((k, h)) if form == "channel" else None
    pools: list[Any] = [pk.make_pool(n_slots, k, h, jnp.int8, channel_scales=scales) for _ in range(2)]
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pools)]
    new = jnp.ones((b, 1, k, h))
    table, lengths = jnp.zeros((b, 4), jnp.int32), jnp.full((b,), 2, jnp.int32)
    step = jax.jit(partial(pk.decode_attention, scale=0.35), donate_argnums=(3, 4))
    args = (jnp.ones((b, 1, 4, h)), new, new, *pools, table, lengths, jnp.arange(b))
    text = step.lower(*args).compile().as_text() or ""
    assert not [line for line in text.splitlines() if f"[{n_slots}," in line and " copy(" in line]
    k_pool, v_pool, _ = step(*args)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves([k_pool, v_pool])] == where


def test_an_int8_pool_is_about_half_of_bfloat16() -> None:
    def n_bytes(dtype: Any, **options: Any) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(pk.make_pool(1000, 8, 128, dtype, **options)))

    assert n_bytes(jnp.int8) <= 0.51 * n_bytes(jnp.bfloat16)
    assert n_bytes(jnp.int8, channel_scales=jnp.ones((8, 128))) <= 0.505 * n_bytes(jnp.bfloat16)


def test_the_error_of_attention_over_int8_is_small() -> None:
    """Gaussian KV: int8 moves the result by about one part in a hundred, whichever the form."""
    rng = np.random.default_rng(0)
    k, v, q = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((64, 2, 64), (64, 2, 64), (1, 1, 4, 64))
    )
    table, lengths = jnp.arange(64)[None], jnp.asarray([64])
    want, _ = reference.partial_attention(q, k, v, table, lengths, scale=0.125)
    for scales in ((None, None), (pk.channel_scales_of(k), pk.channel_scales_of(v))):
        pools = [pk.make_pool(64, 2, 64, jnp.int8, channel_scales=s) for s in scales]
        pools = list(pk.append(*pools, k, v, jnp.arange(64)))
        out, _ = pk.partial_attention(q, *pools, table, lengths, scale=0.125)
        error = np.linalg.norm(np.asarray(out) - want, axis=-1) / np.linalg.norm(want, axis=-1)
        assert 1e-4 < error.max() < 3e-2


def random_pools(rng: np.random.Generator, n: int, k: int, h: int, *, of_keys: bool = True) -> list[Any]:
    """Pools with zero points far from 0, full of values about them."""
    pools = []
    for has_zeros in (of_keys, True):
        zeros = jnp.asarray(rng.normal(size=(k, h)) * 3, jnp.float32)
        pool = pk.make_pool(
            n,
            k,
            h,
            jnp.int8,
            channel_scales=jnp.full((k, h), 0.02),
            channel_zeros=zeros if has_zeros else None,
        )
        values = jnp.asarray(rng.integers(-127, 128, (n, k, h)), jnp.int8)
        pools.append(pool._replace(values=values))
    return pools


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_zero_points_are_seen_to_outside_of_kernels(window: int | None, softcap: float | None) -> None:
    """Partials with their lse, and decode steps, are those over what the pools stand for; a row without
    stored tokens too."""
    rng = np.random.default_rng(0)
    pools = random_pools(rng, 44, 2, 8, of_keys=softcap is None)
    q = jnp.asarray(rng.normal(size=(3, 2, 4, 8)), jnp.float32)
    table = jnp.asarray(rng.permutation(40)[:36].reshape(3, 12), jnp.int32)
    lengths = jnp.asarray([12, 0, 7])
    how: Any = {"scale": 0.35, "window": window, "softcap": softcap}
    got = pk.partial_attention(q, *pools, table, lengths, **how)
    floats = [jnp.asarray(reference.dequantise(pool), jnp.float32) for pool in pools]
    want = pk.partial_attention(q, *floats, table, lengths, **how)
    for have, expect in zip(got, want, strict=True):
        np.testing.assert_allclose(have, expect, rtol=2e-5, atol=2e-5)
    q, new = q[:, :1], [jnp.asarray(rng.normal(size=(3, 1, 2, 8)), jnp.float32) for _ in range(2)]
    for read_first in (False, True):
        step = partial(pk.decode_attention, **how, read_first=read_first)
        *after, out = step(q, *new, *pools, table, lengths, jnp.asarray([40, 41, 99]))
        want_out = step(q, *new, *floats, table, lengths, jnp.asarray([40, 41, 99]))[-1]
        np.testing.assert_allclose(out, want_out, rtol=2e-5, atol=2e-5)
        assert jax.tree.structure(after) == jax.tree.structure(pools)
        stored = reference.append(*pools, *(x[:, 0] for x in new), [40, 41, 99])
        for have, expect in zip(after, stored, strict=True):
            np.testing.assert_allclose(reference.dequantise(have), expect, atol=0.021)


@pytest.mark.usefixtures("unchecked")
def test_pools_that_cannot_be_are_named() -> None:
    pools = random_pools(np.random.default_rng(0), 4, 2, 8)
    with pytest.raises(ValueError, match=r"softcap=3\.0 must be None where keys have zero points"):
        pk.partial_attention(
            jnp.ones((1, 1, 2, 8)), *pools, jnp.zeros((1, 2), int), jnp.ones(1, int), scale=1.0, softcap=3.0
        )
    with pytest.raises(ValueError, match=r"channel_zeros must be \[KV heads, head dim\] = \(2, 8\)"):
        pk.make_pool(4, 2, 8, jnp.int8, channel_scales=jnp.ones((2, 8)), channel_zeros=jnp.ones(8))
    with pytest.raises(ValueError, match="must be int8"):
        pk.make_pool(4, 2, 8, jnp.bfloat16, channel_scales=jnp.ones((2, 8)))
    with pytest.raises(ValueError, match=r"\[KV heads, head dim\] = \(2, 8\)"):
        pk.make_pool(4, 2, 8, jnp.int8, channel_scales=jnp.ones((8,)))
