"""The Mosaic TPU backend of partial attention: one Pallas kernel that fetches each token's rows by its slot.

Requests (blocks of their queries, where these are many) are taken one after another, each in tiles of tokens.
While a tile is attended, the rows of the next, be it the next request's, come in by one DMA a token, and the
slot numbers of the one after that. Tiles past a request's end, or before its window, are never touched. Knows
arrays; who picks this backend is `dispatch`. Interpret mode runs it without a TPU.

A pool is read where it lies if it lies row by row, as XLA puts one whose head dim is a multiple of 128 and
whose KV heads are a power of two (from 2; int8 from 4). XLA puts others otherwise, and copies them for each
call. Seen in what XLA compiles for v4, v5e and v6e; never timed on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Float32, Int32

from pallas_kernels.precision import exact
from pallas_kernels.quantized import (
    ChannelQuantizedPool,
    Like,
    Pool,
    PoolLike,
    QuantizedPool,
    is_quantized,
    values_of,
)

# Mosaic takes no float16: "Only arguments with … bfloat16 or 32-bit element types are supported".
_DTYPES = ("bfloat16", "float32", "int8")
_BUFFER_BYTES = 4 << 20  # two tiles of keys and two of values, as float32, which they become
_ACCUMULATOR_BYTES = 1 << 20
_SUBLANES = 8


@dataclass(frozen=True)
class TpuShape:
    """What a kernel is compiled for."""

    n_items: int  # blocks of queries, of all requests
    blocks: int  # of a request
    R: int  # rows of a block: queries times G, padded
    K: int
    H: int
    T: int  # tokens of a tile
    tiles: int  # of a row of the slot table
    scale: float
    window: int | None
    softcap: float | None
    scaled: bool  # keys and values have scales a slot


class TpuInputs(NamedTuple):
    """A kernel's references in HBM, fetched by hand."""

    table: Any  # [B * tiles, 1, T] int32
    k: Any  # [S, K, H]
    v: Any
    k_scales: Any  # [B * tiles, K, T] float32, or None
    v_scales: Any


class Buffers(NamedTuple):
    """Two tiles of each input, and one semaphore a tile and kind."""

    table: Any
    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    table_sem: Any
    row_sem: Any


def supports(q: Float[Like, "B Tq N H"], k_pool: PoolLike, *, return_mass: bool = False) -> str | None:
    """None if this backend computes the case, else why not."""
    name = jnp.dtype(values_of(k_pool).dtype).name
    if name not in _DTYPES:
        return f"keys of {name}: a TPU computes in {', '.join(_DTYPES)}"
    if jnp.dtype(q.dtype).name not in _DTYPES[:2]:
        return f"queries of {jnp.dtype(q.dtype).name}: a TPU computes in {', '.join(_DTYPES[:2])}"
    if return_mass:
        return "attention mass is not returned"
    return None


def partial_attention(
    q: Float[Array, "B Tq N H"],
    k_pool: Pool,
    v_pool: Pool,
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    q_positions: Int32[Array, "B Tq"] | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    return_mass: bool = False,
    interpret: bool | pltpu.InterpretParams = False,
    tile_tokens: int | None = None,
    block_rows: int | None = None,
) -> tuple[Float32[Array, "B Tq N H"], Float32[Array, "B Tq N"]]:
    """As `pallas_kernels.partial_attention`. interpret: True, or `pltpu.InterpretParams`.

    tile_tokens and block_rows (rows of queries times G, a multiple of 8) are what fits if None.
    """
    reason = supports(q, k_pool, return_mass=return_mass)
    if reason is not None:
        raise ValueError(f"the mosaic_tpu backend does not do this case ({reason}): use backend xla")
    b, tq, n, h = q.shape
    n_slots, kv, _ = values_of(k_pool).shape
    if not b * tq * slot_table.shape[1] * n_slots:
        return jnp.zeros(q.shape, jnp.float32), jnp.full((b, tq, n), -jnp.inf)
    tile = tile_tokens or _tile_tokens(kv, h)
    tiles = pl.cdiv(slot_table.shape[1], tile)
    if q_positions is None:
        q_positions = lengths[:, None] + jnp.arange(tq, dtype=jnp.int32)
    dtype = _product_dtype(q, k_pool)
    if isinstance(k_pool, ChannelQuantizedPool):
        # Scales in bfloat16 queries would be rounded once more, to an error of 4e-3: these stay float32.
        q = q.astype(jnp.float32) * jnp.repeat(k_pool.scales, n // kv, axis=0)
    else:
        q = q.astype(dtype)
    queries, positions = _blocked(q, q_positions, kv, block_rows)
    shape = TpuShape(
        n_items=queries.shape[0], blocks=queries.shape[0] // b, R=queries.shape[2], K=kv, H=h, T=tile,
        tiles=tiles, scale=float(scale), window=window, softcap=softcap,
        scaled=isinstance(k_pool, QuantizedPool),
    )  # fmt: skip
    table = _tiled(jnp.clip(slot_table, 0, n_slots - 1).astype(jnp.int32), tile)
    arrays = [table.reshape(-1, 1, tile), values_of(k_pool), values_of(v_pool)]
    if isinstance(k_pool, QuantizedPool) and isinstance(v_pool, QuantizedPool):
        # A row of K scales is too narrow to be fetched by itself; XLA gathers them, 1 / H of the values'
        # bytes.
        for scales in (k_pool.scales, v_pool.scales):
            rows = scales[table].astype(jnp.float32)  # [B, tiles, T, K]
            arrays.append(jnp.swapaxes(rows, -1, -2).reshape(-1, kv, tile))
    run = _kernel(shape, dtype, (arrays[1].dtype, arrays[2].dtype), interpret)
    out, lse = run(*_work(shape, lengths, positions), queries, positions[..., None], *arrays)
    out, lse = _unblocked(out, b, tq, n), _unblocked(lse, b, tq, n)[..., 0]
    if isinstance(v_pool, ChannelQuantizedPool):
        out = out * jnp.repeat(v_pool.scales, n // kv, axis=0)
    return out, lse


def _tile_tokens(kv: int, h: int) -> int:
    padded = -(-kv // _SUBLANES) * _SUBLANES * -(-h // 128) * 128
    fits = [t for t in (128, 64, 32, 16) if 4 * t * padded * 4 <= _BUFFER_BYTES]
    return fits[0] if fits else 8


def _product_dtype(q: Array, k_pool: Pool) -> Any:
    """bfloat16 holds every int8 exactly, so that int8 pools are multiplied in the queries' own dtype."""
    return q.dtype if is_quantized(k_pool) else jnp.promote_types(q.dtype, values_of(k_pool).dtype)


def _blocked(
    q: Float[Array, "B Tq N H"], positions: Int32[Array, "B Tq"], kv: int, block_rows: int | None
) -> tuple[Float[Array, "items K R H"], Int32[Array, "items R"]]:
    """(q, positions) in blocks, -1 for padding rows."""
    b, tq, n, h = q.shape
    group = n // kv
    most = block_rows or max(_SUBLANES, _ACCUMULATOR_BYTES // (kv * max(h, 128) * 4))
    queries = max(1, most // group)  # of a block
    blocks = -(-tq // queries)
    queries = -(-tq // blocks)
    rows = -(-queries * group // _SUBLANES) * _SUBLANES
    gap = blocks * queries - tq
    q = jnp.pad(q, ((0, 0), (0, gap), (0, 0), (0, 0))).reshape(b * blocks, queries, kv, group, h)
    q = jnp.moveaxis(q, 1, 2).reshape(b * blocks, kv, queries * group, h)
    at = jnp.pad(positions.astype(jnp.int32), ((0, 0), (0, gap)), constant_values=-1).reshape(-1, queries)
    at = jnp.repeat(at, group, axis=1)
    pad = rows - queries * group
    return jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0))), jnp.pad(at, ((0, 0), (0, pad)), constant_values=-1)


def _unblocked(x: Float32[Array, "items K R X"], b: int, tq: int, n: int) -> Float32[Array, "B Tq N X"]:
    items, kv, _, width = x.shape
    group, blocks = n // kv, items // b
    queries = -(-tq // blocks)
    x = x[:, :, : queries * group].reshape(items, kv, queries, group, width)
    return jnp.moveaxis(x, 1, 2).reshape(b, blocks * queries, n, width)[:, :tq]


def _tiled(table: Int32[Array, "B C"], tile: int) -> Int32[Array, "B tiles tile"]:
    b, c = table.shape
    return jnp.pad(table, ((0, 0), (0, -c % tile))).reshape(b, -1, tile)


def _work(
    shape: TpuShape, lengths: Int32[Array, " B"], positions: Int32[Array, "items R"]
) -> tuple[Int32[Array, " items"], Int32[Array, " items"], Int32[Array, " items"]]:
    """Of each item: its first tile, its end in tokens (0: no work), the next item with work, or -1."""
    last = jnp.max(positions, axis=1)
    end = jnp.minimum(jnp.repeat(lengths.astype(jnp.int32), shape.blocks), last + 1)
    first = jnp.zeros_like(end)
    if shape.window is not None:
        earliest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=1)
        first = jnp.maximum(0, earliest - shape.window + 1)
    end = jnp.where(first < end, end, 0)
    number = jnp.arange(shape.n_items, dtype=jnp.int32)
    busy = jnp.where(end > 0, number, shape.n_items)
    at_or_after = jax.lax.cummin(busy, reverse=True)
    following = jnp.append(at_or_after[1:], shape.n_items)
    return first // shape.T, end, jnp.where(following == shape.n_items, -1, following)


def _kernel(
    shape: TpuShape, dtype: Any, pools: tuple[Any, Any], interpret: bool | pltpu.InterpretParams
) -> Callable[..., tuple[Array, Array]]:
    """The compiled-on-demand kernel: `(first, end, following, q, positions, table, k, v[, scales of
    each])`."""
    rows, width = shape.R, (shape.K, shape.H)

    def of_item(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *block), lambda i, *_: (i, *(0 for _ in block)))

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    n_inputs = 5 if shape.scaled else 3
    scales = [pltpu.VMEM((2, shape.K, shape.T), jnp.float32)] * (n_inputs - 3)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(shape.n_items,),
        in_specs=[of_item(shape.K, rows, shape.H), of_item(rows, 1), *[in_hbm] * n_inputs],
        out_specs=[of_item(shape.K, rows, shape.H), of_item(shape.K, rows, 1)],
        scratch_shapes=[
            pltpu.SMEM((1,), jnp.int32),  # tiles fetched so far
            pltpu.VMEM((shape.K, rows, 1), jnp.float32),  # running maximum
            pltpu.VMEM((shape.K, rows, 1), jnp.float32),  # running sum
            pltpu.SMEM((2, 1, shape.T), jnp.int32),
            pltpu.VMEM((2, shape.T, *width), pools[0]),
            pltpu.VMEM((2, shape.T, *width), pools[1]),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            *scales,
        ],
    )
    return pl.pallas_call(
        functools.partial(_program, shape, dtype),
        grid_spec=grid,
        out_shape=[
            jax.ShapeDtypeStruct((shape.n_items, shape.K, rows, shape.H), jnp.float32),
            jax.ShapeDtypeStruct((shape.n_items, shape.K, rows, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
    )


def _program(
    shape: TpuShape, dtype: Any, first: Any, end: Any, following: Any, q: Any, at: Any, *refs: Any
) -> None:
    n_inputs = 5 if shape.scaled else 3
    inputs = TpuInputs(*refs[:n_inputs], *(None,) * (5 - n_inputs))
    out, lse, turn, top, total, table, k, v, table_sem, row_sem, *scales = refs[n_inputs:]
    k_scales, v_scales = scales or (None, None)
    buffers = Buffers(table, k, v, k_scales, v_scales, table_sem, row_sem)
    fetch = Fetch(shape, inputs, buffers, first, end, following)
    item = pl.program_id(0)
    pl.when(item == 0)(lambda: _begin(fetch, turn))
    out[...] = jnp.zeros_like(out)
    top[...] = jnp.full_like(top, -jnp.inf)
    total[...] = jnp.zeros_like(total)

    def tile_step(tile: Array, turns: Array) -> Array:
        which = turns % 2
        after = fetch.next(item, tile)
        fetch.wait_table(*after, 1 - which)
        fetch.start_rows(*after, 1 - which)
        fetch.start_table(*fetch.next(*after), which)
        fetch.wait_rows(item, tile, which)
        _attend(shape, dtype, q, at, buffers, which, tile, end[item], out, top, total)
        return turns + 1

    tiles = pl.cdiv(end[item], shape.T)
    turn[0] = jax.lax.fori_loop(first[item], jnp.maximum(tiles, first[item]), tile_step, turn[0])
    nothing = total[...] == 0
    out[...] = jnp.where(nothing, 0.0, out[...] / jnp.where(nothing, 1.0, total[...]))
    lse[...] = jnp.where(nothing, -jnp.inf, jnp.log(jnp.where(nothing, 1.0, total[...])) + top[...])


def _begin(fetch: Fetch, turn: Any) -> None:
    """Starts the pipeline with the first item that has work."""
    turn[0] = 0
    place = fetch.first_place()
    fetch.start_table(*place, 0)
    fetch.wait_table(*place, 0)
    fetch.start_rows(*place, 0)
    fetch.start_table(*fetch.next(*place), 1)


class Fetch:
    """Copies of tiles from HBM. A place is (item, tile); item -1, after the last one, has nothing to copy."""

    def __init__(
        self, shape: TpuShape, inputs: TpuInputs, buffers: Buffers, first: Any, end: Any, following: Any
    ) -> None:
        self.shape, self.inputs, self.buffers = shape, inputs, buffers
        self.first, self.end, self.following = first, end, following

    def first_place(self) -> tuple[Array, Array]:
        item = jnp.where(self.end[0] > 0, 0, self.following[0])
        return item, self.first[jnp.maximum(item, 0)]

    def next(self, item: Array, tile: Array) -> tuple[Array, Array]:
        """The tile after a tile, of the same item or of the next that has work."""
        here = jnp.maximum(item, 0)
        more = (tile + 1) * self.shape.T < self.end[here]
        other = jnp.where(item < 0, -1, self.following[here])
        there = self.first[jnp.maximum(other, 0)]
        return jnp.where(more & (item >= 0), item, other), jnp.where(more & (item >= 0), tile + 1, there)

    def start_table(self, item: Array, tile: Array, which: Array | int) -> None:
        pl.when(item >= 0)(lambda: self._table(item, tile, which).start())

    def wait_table(self, item: Array, tile: Array, which: Array | int) -> None:
        pl.when(item >= 0)(lambda: self._table(item, tile, which).wait())

    def _row(self, item: Array, tile: Array) -> Array:
        return item // self.shape.blocks * self.shape.tiles + tile

    def _table(self, item: Array, tile: Array, which: Array | int) -> Any:
        row = self._row(item, tile)
        b = self.buffers
        return pltpu.make_async_copy(self.inputs.table.at[row], b.table.at[which], b.table_sem.at[which])

    def _tokens(self, item: Array, tile: Array) -> Array:
        return jnp.minimum(self.end[item] - tile * self.shape.T, self.shape.T)

    def _scales(self, item: Array, tile: Array, which: Array | int) -> list[Any]:
        if not self.shape.scaled:
            return []
        row, b = self._row(item, tile), self.buffers
        pairs = ((self.inputs.k_scales, b.k_scales), (self.inputs.v_scales, b.v_scales))
        return [pltpu.make_async_copy(x.at[row], y.at[which], b.row_sem.at[which]) for x, y in pairs]

    def start_rows(self, item: Array, tile: Array, which: Array | int) -> None:
        """One DMA a token and pool; its slot is in the table's buffer."""
        b = self.buffers

        def token(i: Array, _: None) -> None:
            slot = b.table[which, 0, i]
            for pool, buffer in ((self.inputs.k, b.k), (self.inputs.v, b.v)):
                pltpu.make_async_copy(pool.at[slot], buffer.at[which, i], b.row_sem.at[which]).start()

        def start() -> None:
            for copy in self._scales(item, tile, which):
                copy.start()
            jax.lax.fori_loop(0, self._tokens(item, tile), token, None)

        pl.when(item >= 0)(start)

    def wait_rows(self, item: Array, tile: Array, which: Array | int) -> None:
        """One wait a pool: a DMA semaphore counts bytes."""
        b, tokens = self.buffers, pl.ds(0, self._tokens(item, tile))
        for copy in self._scales(item, tile, which):
            copy.wait()
        for buffer in (b.k, b.v):
            rows = buffer.at[which, tokens]
            pltpu.make_async_copy(rows, rows, b.row_sem.at[which]).wait()


def _attend(
    shape: TpuShape,
    dtype: Any,
    q: Any,
    at: Any,
    buffers: Buffers,
    which: Array,
    tile: Array,
    end: Array,
    out: Any,
    top: Any,
    total: Any,
) -> None:
    """One tile of the online softmax: out (not yet divided), top and total are what they are so far."""
    position = tile * shape.T + jax.lax.broadcasted_iota(jnp.int32, (shape.R, shape.T), 1)
    seen = (position < end) & (position <= at[...])
    if shape.window is not None:
        seen &= position > at[...] - shape.window
    here = tile * shape.T + jax.lax.broadcasted_iota(jnp.int32, (shape.T, 1), 0) < end
    keys, values = buffers.k[which].astype(jnp.float32), buffers.v[which].astype(jnp.float32)
    for h in range(shape.K):
        scores = _product(q[h], keys[:, h].astype(q.dtype), (1, 1)) * shape.scale
        if shape.scaled:
            scores *= buffers.k_scales[which, h : h + 1]
        if shape.softcap is not None:
            scores = shape.softcap * jnp.tanh(scores / shape.softcap)
        scores = jnp.where(seen, scores, -jnp.inf)
        highest = jnp.maximum(top[h], jnp.max(scores, axis=1, keepdims=True))
        base = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights = jnp.exp(scores - base)
        shrink = jnp.exp(top[h] - base)
        total[h] = total[h] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        if shape.scaled:
            weights = jnp.where(seen, weights * buffers.v_scales[which, h : h + 1], 0.0)
        # What lies past the end in the buffer is left from other requests: it may be NaN.
        rows = jnp.where(here, values[:, h], 0.0).astype(dtype)
        out[h] = out[h] * shrink + _product(weights.astype(dtype), rows, (1, 0))
        top[h] = highest


def _product(x: Array, y: Array, over: tuple[int, int]) -> Array:
    """Matrices multiplied over an axis of each, in float32."""
    axes = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(x, y, axes, precision=exact(x.dtype), preferred_element_type=jnp.float32)
