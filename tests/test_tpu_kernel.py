"""The TPU kernel in interpret mode: its pipeline, its blocks, its memory. Numbers over all shapes:
test_attention_backends."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels as pk
from pallas_kernels import compat, reference, tpu
from pallas_kernels.quantized import make_pool


def batch(
    lengths: list[int], *, n: int = 4, k: int = 2, h: int = 16, tq: int = 1, seed: int = 0
) -> tuple[Any, ...]:
    """(q, k_pool, v_pool, slot_table, lengths), slots outside the lists being NaN."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    dealt = rng.permutation(total + 3)
    pools = rng.normal(size=(2, total + 3, k, h)).astype(np.float32)
    pools[:, dealt[total:]] = np.nan
    table = np.full((len(lengths), max(lengths) + 1), dealt[-1])
    taken = 0
    for row, length in enumerate(lengths):
        table[row, :length] = dealt[taken : taken + length]
        taken += length
    q = rng.normal(size=(len(lengths), tq, n, h)).astype(np.float32)
    arrays = (jnp.asarray(x) for x in (q, *pools))
    return *arrays, jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32)


def check(args: tuple[Any, ...], positions: Any = None, *, window: int | None = None, **options: Any) -> None:
    scoring: dict[str, Any] = {"scale": 0.25, "window": window}
    run = functools.partial(tpu.partial_attention, interpret=True, **scoring, **options)
    out, lse = jax.jit(run)(*args, positions)
    want = reference.partial_attention(*args, q_positions=positions, **scoring)
    np.testing.assert_allclose(out, want[0], atol=1e-5)
    np.testing.assert_allclose(lse, want[1], atol=1e-5)


@pytest.mark.parametrize("lengths", [[8, 16, 0, 0, 7], [0, 0, 9], [0], [1, 33]])
def test_tiles_of_ragged_requests(lengths: list[int]) -> None:
    """Lengths on, before and past a tile's edge, and empty requests first, last and in a row."""
    check(batch(lengths), tile_tokens=8)


def test_queries_in_blocks() -> None:
    """7 queries of 2 heads a group in blocks of 8 rows: the last block has padding, and starts at its own
    window."""
    args = batch([30, 0, 5], tq=7)
    positions = jnp.asarray([[3, 9, 9, 20, 25, 29, 40], [0] * 7, [0, 1, 2, 3, 4, 5, 6]], jnp.int32)
    check(args, positions, window=6, tile_tokens=8, block_rows=8)


def test_there_are_no_races() -> None:
    """Buffers are filled again only when they have been read, and read only when they are filled."""
    args = batch([20, 5, 0, 9])
    params = pltpu.InterpretParams(detect_races=True)
    run = functools.partial(tpu.partial_attention, scale=0.25, tile_tokens=8, interpret=params)
    assert not compat.has_tpu_race(lambda: run(*args, None))


def test_the_race_detector_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait for a tile's rows there is a race, and it is seen."""
    monkeypatch.setattr(tpu.Fetch, "wait_rows", lambda *_: None)
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    run = functools.partial(tpu.partial_attention, scale=0.25, tile_tokens=8, interpret=params)
    assert compat.has_tpu_race(lambda: run(*batch([20, 5]), None))


@pytest.mark.usefixtures("unchecked")
def test_only_tiles_that_are_seen_are_visited() -> None:
    """The walk over (item, tile): nothing past a request's end, nothing before its queries' window."""
    lengths = jnp.asarray([0, 17, 0, 8, 40], jnp.int32)
    positions = jnp.asarray([[0, -1], [17, -1], [0, -1], [3, 4], [40, -1]], jnp.int32)
    shape = tpu.TpuShape(5, 1, 2, 1, 16, 8, 5, 1.0, 6, None, False)
    first, end, following = tpu._work(shape, lengths, positions)
    fetch = tpu.Fetch(shape, None, None, first, end, following)  # type: ignore[arg-type]
    places, place = [], fetch.first_place()
    while place[0] >= 0:
        places.append((int(place[0]), int(place[1]), int(fetch._tokens(*place))))
        place = fetch.next(*place)
    # Request 1 at 17 sees 12 .. 16, request 3 at 3 and 4 sees 0 .. 4, request 4 at 40 sees 35 .. 39.
    assert places == [(1, 1, 8), (1, 2, 1), (3, 0, 5), (4, 4, 8)]


@pytest.mark.parametrize("form", ["bfloat16", "float32", "int8", "int8-channel"])
@pytest.mark.parametrize("n,k,h,tq", [(32, 8, 128, 1), (9, 3, 64, 1), (32, 32, 80, 1), (32, 8, 128, 300)])
def test_it_lowers_for_a_tpu(form: str, n: int, k: int, h: int, tq: int) -> None:
    """As far as that goes without one: to Mosaic's own program, and not by a fallback."""
    scales = jnp.ones((k, h)) if form == "int8-channel" else None
    dtype = jnp.dtype(form.partition("-")[0])
    pool = jax.eval_shape(lambda: make_pool(4096, k, h, dtype, channel_scales=scales))
    q = jax.ShapeDtypeStruct((8, tq, n, h), jnp.float32 if form == "float32" else jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((8, 200), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    run = functools.partial(pk.partial_attention, scale=0.1, window=100, softcap=30.0, backend="mosaic_tpu")
    text = compat.lowered_for_tpu(jax.jit(run), q, pool, pool, *rows)
    assert text.count("tpu_custom_call") == 1


def test_tiles_fit_their_buffers() -> None:
    for k, h in ((1, 64), (3, 64), (8, 128), (32, 128), (32, 256), (128, 256)):
        tile = tpu._tile_tokens(k, h)
        assert tile % 8 == 0 and tile >= 8
        assert tile == 8 or 4 * 4 * tile * max(k, 8) * max(h, 128) <= tpu._BUFFER_BYTES


def test_no_tokens_at_all() -> None:
    q, pool = jnp.ones((2, 1, 4, 16)), jnp.ones((3, 2, 16))
    out, lse = tpu.partial_attention(
        q, pool, pool, jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32), None, scale=1.0
    )
    assert not out.any() and np.all(np.asarray(lse) == -np.inf) and lse.shape == (2, 1, 4)


def test_what_it_does_not_do_is_named() -> None:
    args = batch([3])
    with pytest.raises(ValueError, match="mass is not returned.*use backend xla"):
        tpu.partial_attention(*args, None, scale=1.0, return_mass=True)
    half = [x.astype(jnp.float16) for x in args[:3]]
    with pytest.raises(ValueError, match="keys of float16"):
        tpu.partial_attention(*half, *args[3:], None, scale=1.0)
