"""The Triton backend of partial attention, for NVIDIA GPUs before Hopper while JAX has it, and for float32
KV.

One program takes up to 64 queries of a KV head through 512 tokens' slots; `combine` of all such parts follows
in XLA. A second kernel gives each slot's attention mass, once the log-sum-exp of a query is known. Knows
arrays; who picks this backend is `dispatch`. `interpret=True` runs the kernels in Pallas's interpreter.

Source: Lamina 2025 §4.2.2; split-KV as in flash decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels.precision import exact
from pallas_kernels.quantized import ChannelQuantizedPool, Like, Pool, PoolLike, QuantizedPool, values_of

_PART_TOKENS = 512
_LOG2E = math.log2(math.e)
_LOWEST = -1e30  # instead of a maximum of -inf, which must not be subtracted from itself
_DTYPES = ("bfloat16", "float16", "float32", "int8")


@dataclass(frozen=True)
class _Spec:
    """What a kernel is compiled for. Rows are queries of a KV head, R of them a program."""

    B: int
    K: int
    H: int
    C: int
    R: int
    row_groups: int
    tile_tokens: int
    scale: float
    window: int | None
    softcap: float | None
    slot_scales: bool

    @property
    def width(self) -> int:
        """Triton's arrays have powers of two elements a side."""
        return pl.next_power_of_2(self.H)

    @property
    def n_parts(self) -> int:
        return max(1, -(-self.C // _PART_TOKENS))


def supports(q: Float[Like, "B Tq N H"], k_pool: PoolLike, *, return_mass: bool = False) -> str | None:
    """None if this backend computes the case, else why not."""
    del return_mass
    name = jnp.dtype(values_of(k_pool).dtype).name
    if name not in _DTYPES:
        return f"keys of {name} are not among {', '.join(_DTYPES)}"
    if not 16 <= q.shape[-1] <= 256:
        return f"head dim {q.shape[-1]} is not within 16 … 256"
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
    interpret: bool = False,
) -> tuple[Float32[Array, "B ..."], ...]:
    """As `pallas_kernels.partial_attention`."""
    b, tq, n, h = q.shape
    values = values_of(k_pool)
    kv, g = values.shape[1], n // values.shape[1]
    if slot_table.shape[1] == 0:  # nothing is stored; a kernel wants something to point at
        slot_table = jnp.zeros((b, 1), jnp.int32)
    if isinstance(k_pool, ChannelQuantizedPool):
        q = q.astype(jnp.float32) * jnp.repeat(k_pool.scales, g, axis=0)
    dtype = _product_dtype(q.dtype, values.dtype)
    rows = min(64, max(16, pl.next_power_of_2(g * tq)))
    groups = -(-g * tq // rows)
    spec = _Spec(
        b, kv, h, slot_table.shape[1], rows, groups, 16 if dtype == jnp.float32 else 32,
        float(scale), window, softcap, isinstance(k_pool, QuantizedPool),
    )  # fmt: skip
    at = lengths[:, None] + jnp.arange(tq) if q_positions is None else q_positions
    end = jnp.minimum(lengths, jnp.max(at, axis=1) + 1)
    first = jnp.zeros_like(end) if window is None else jnp.maximum(0, jnp.min(at, axis=1) - window + 1)
    operands = _Operands(
        bounds=jnp.stack([first, end], axis=1).astype(jnp.int32),
        positions=_pad(jnp.repeat(at, g, axis=1), 1, groups * rows).astype(jnp.int32),
        q=_rows(q.astype(dtype), spec),
        table=slot_table.astype(jnp.int32),
        k=values,
        v=values_of(v_pool),
        k_scales=k_pool.scales if isinstance(k_pool, QuantizedPool) else None,
        v_scales=v_pool.scales if isinstance(v_pool, QuantizedPool) else None,
    )
    out, lse = _attend(spec, operands, interpret)
    if isinstance(v_pool, ChannelQuantizedPool):
        out = out * v_pool.scales[None, :, None, :]
    result = _queries(out[..., : g * tq, :], tq), _queries(lse[..., : g * tq, None], tq)[..., 0]
    if not return_mass:
        return result
    return *result, _mass(spec, operands, lse, g * tq, interpret)


@dataclass(frozen=True)
class _Operands:
    """The kernels' inputs; scales are None where the pool has none a slot."""

    bounds: Int32[Array, "B 2"]  # first position, and past the last
    positions: Int32[Array, "B rows"]
    q: Float[Array, "B K rows width"]
    table: Int32[Array, "B C"]
    k: Shaped[Array, "S K H"]
    v: Shaped[Array, "S K H"]
    k_scales: Float[Array, "S K"] | None
    v_scales: Float[Array, "S K"] | None

    def arrays(self, with_values: bool) -> list[Array]:
        keys = [self.bounds, self.positions, self.q, self.table, self.k, self.k_scales]
        return [x for x in (*keys, *((self.v, self.v_scales) if with_values else ())) if x is not None]


def _product_dtype(q: Any, pool: Any) -> Any:
    if pool != jnp.int8:
        return pool
    return q if q in (jnp.bfloat16, jnp.float16) else jnp.float32


def _pad(x: Array, axis: int, size: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def _rows(q: Float[Array, "B Tq N H"], spec: _Spec) -> Float[Array, "B K rows width"]:
    """A KV head's queries together, padded with zeros."""
    b, tq, n, h = q.shape
    rows = jnp.moveaxis(q.reshape(b, tq, spec.K, n // spec.K, h), 1, 2).reshape(b, spec.K, -1, h)
    return _pad(_pad(rows, 2, spec.row_groups * spec.R), 3, spec.width)


def _queries(rows: Float32[Array, "B K GTq X"], tq: int) -> Float32[Array, "B Tq N X"]:
    b, k, m, x = rows.shape
    return jnp.moveaxis(rows.reshape(b, k, tq, m // tq, x), 1, 2).reshape(b, tq, -1, x)


class _Tile:
    """A tile of tokens in a kernel: which slots, and the scores of the program's queries with their keys."""

    def __init__(self, spec: _Spec, refs: dict[str, Any], b: Any, head: Any, group: Any) -> None:
        self.spec, self.refs, self.b, self.head, self.group = spec, refs, b, head, group
        rows = pl.ds(group * spec.R, spec.R)
        self.q = refs["q"][b, head, rows, :]
        self.row_positions = refs["positions"][b, rows]
        self.first, self.end = refs["bounds"][b, 0], refs["bounds"][b, 1]

    def slots(self, start: Any) -> tuple[Array, Array]:
        """Positions `[tokens]`, and their slots; past the end the last token's again."""
        at = start + jnp.arange(self.spec.tile_tokens, dtype=jnp.int32)
        known = jnp.maximum(jnp.minimum(at, self.end - 1), 0)
        return at, self.refs["table"][jnp.full_like(known, self.b), known]

    def read(self, name: str, slots: Array) -> Array:
        """Rows `[tokens, width]` of this KV head."""
        from jax.experimental.pallas import triton as plgpu

        shape = (self.spec.tile_tokens, self.spec.width)
        dims = lax.broadcasted_iota(jnp.int32, shape, 1)
        index = lax.broadcast_in_dim(slots, shape, (0,)), jnp.full(shape, self.head, jnp.int32)
        if self.spec.width == self.spec.H:
            return plgpu.load(self.refs[name].at[*index, dims])
        kept = dims < self.spec.H
        known = jnp.minimum(dims, self.spec.H - 1)
        return plgpu.load(self.refs[name].at[*index, known], mask=kept, other=0)

    def scale(self, name: str, slots: Array) -> Array:
        return self.refs[name][slots, jnp.full_like(slots, self.head)].astype(jnp.float32)

    def scores(self, at: Array, slots: Array) -> Array:
        """`[R, tokens]` in natural units, -inf where a query does not see a token."""
        s = self.spec
        k = self.read("k", slots).astype(self.q.dtype)
        x = _dot(self.q, k, (((1,), (1,)), ((), ()))) * s.scale
        if s.slot_scales:
            x = x * self.scale("k_scales", slots)[None, :]
        if s.softcap is not None:
            x = s.softcap * jnp.tanh(x / s.softcap)
        seen = (at[None, :] < self.end) & (at[None, :] <= self.row_positions[:, None])
        if s.window is not None:
            seen &= at[None, :] > self.row_positions[:, None] - s.window
        return jnp.where(seen, x, -jnp.inf)


def _dot(a: Array, b: Array, dims: Any) -> Array:
    return lax.dot_general(a, b, dims, precision=exact(a.dtype), preferred_element_type=jnp.float32)


def _place(spec: _Spec) -> tuple[Any, Any, Any, Any]:
    """This program's part, KV head, group of queries and request."""
    part, head_group, b = (pl.program_id(i) for i in range(3))
    return part, head_group // spec.row_groups, head_group % spec.row_groups, b


def _attend(
    spec: _Spec, operands: _Operands, interpret: bool
) -> tuple[Float32[Array, "B K rows H"], Float32[Array, "B K rows"]]:
    """(out, lse), natural units."""
    names = _names(spec, with_values=True)

    def kernel(*refs: Any) -> None:
        *inputs, out_ref, lse_ref = refs
        part, head, group, b = _place(spec)
        tile = _Tile(spec, dict(zip(names, inputs, strict=True)), b, head, group)
        start = jnp.maximum(part * _PART_TOKENS, tile.first)
        stop = jnp.minimum((part + 1) * _PART_TOKENS, tile.end)

        def step(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc, top, mass = carry
            at, slots = tile.slots(start + i * spec.tile_tokens)
            # in log2 units; tokens past the part are the next part's
            x = jnp.where((at < stop)[None, :], tile.scores(at, slots) * _LOG2E, -jnp.inf)
            higher = jnp.maximum(jnp.maximum(top, jnp.max(x, axis=1)), _LOWEST)
            shrink, p = jnp.exp2(top - higher), jnp.exp2(x - higher[:, None])
            mass = mass * shrink + jnp.sum(p, axis=1)
            if spec.slot_scales:
                p = p * tile.scale("v_scales", slots)[None, :]
            v = tile.read("v", slots).astype(tile.q.dtype)
            out = _dot(p.astype(v.dtype), v, (((1,), (0,)), ((), ())))
            return acc * shrink[:, None] + out, higher, mass

        n = jnp.maximum(stop - start + spec.tile_tokens - 1, 0) // spec.tile_tokens
        empty = (
            jnp.zeros((spec.R, spec.width), jnp.float32),
            jnp.full((spec.R,), -jnp.inf, jnp.float32),
            jnp.zeros((spec.R,), jnp.float32),
        )
        acc, top, mass = lax.fori_loop(0, n, step, empty)
        share = jnp.where(mass > 0, 1 / jnp.where(mass > 0, mass, 1.0), 0.0)
        rows = pl.ds(group * spec.R, spec.R)
        out_ref[part, b, head, rows, :] = acc * share[:, None]
        lse_ref[part, b, head, rows] = jnp.where(mass > 0, (top + jnp.log2(mass)) / _LOG2E, -jnp.inf)

    shape = (spec.n_parts, spec.B, spec.K, spec.row_groups * spec.R)
    outs, lses = _call(
        spec,
        kernel,
        (
            jax.ShapeDtypeStruct((*shape, spec.width), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        operands.arrays(with_values=True),
        interpret,
    )
    top = jnp.maximum(jnp.max(lses, axis=0), _LOWEST)
    weights = jnp.exp(lses - top)
    mass = jnp.sum(weights, axis=0)
    share = weights / jnp.where(mass > 0, mass, 1.0)
    return jnp.einsum("PBKR,PBKRH->BKRH", share, outs)[..., : spec.H], jnp.log(mass) + top


def _mass(
    spec: _Spec, operands: _Operands, lse: Float32[Array, "B K rows"], n_rows: int, interpret: bool
) -> Float32[Array, "B C"]:
    """Each slot's attention mass, summed over queries and heads."""
    names = (*_names(spec, with_values=False), "lse")

    def kernel(*refs: Any) -> None:
        *inputs, mass_ref = refs
        by_name = dict(zip(names, inputs, strict=True))
        part, head, group, b = _place(spec)
        tile = _Tile(spec, by_name, b, head, group)
        rows = group * spec.R + jnp.arange(spec.R, dtype=jnp.int32)
        known = by_name["lse"][b, head, pl.ds(group * spec.R, spec.R)]
        kept = (rows < n_rows) & (known > -jnp.inf)

        def step(i: Any, _: Any) -> None:
            start = part * _PART_TOKENS + i * spec.tile_tokens
            at, slots = tile.slots(start)
            x = tile.scores(at, slots) - jnp.where(kept, known, 0.0)[:, None]
            seen = kept[:, None] & (at[None, :] >= tile.first)
            p = jnp.where(seen, jnp.exp2(jnp.where(seen, x, 0.0) * _LOG2E), 0.0)
            mass_ref[b, head * spec.row_groups + group, pl.ds(start, spec.tile_tokens)] = jnp.sum(p, axis=0)

        lax.fori_loop(0, _PART_TOKENS // spec.tile_tokens, step, None)

    shape = jax.ShapeDtypeStruct((spec.B, spec.K * spec.row_groups, spec.n_parts * _PART_TOKENS), jnp.float32)
    arrays = [*operands.arrays(with_values=False), lse]
    (mass,) = _call(spec, kernel, (shape,), arrays, interpret)
    return jnp.sum(mass, axis=1)[:, : spec.C]


def _names(spec: _Spec, with_values: bool) -> tuple[str, ...]:
    keys = ("bounds", "positions", "q", "table", "k", *(("k_scales",) if spec.slot_scales else ()))
    values = ("v", *(("v_scales",) if spec.slot_scales else ())) if with_values else ()
    return keys + values


def _call(
    spec: _Spec, kernel: Any, out_shape: tuple[Any, ...], arrays: list[Array], interpret: bool
) -> list[Array]:
    from jax.experimental.pallas import triton as plgpu

    whole = partial(pl.BlockSpec, memory_space=pl.ANY) if interpret else lambda: pl.no_block_spec
    run = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(spec.n_parts, spec.K * spec.row_groups, spec.B),
        in_specs=[whole() for _ in arrays],
        out_specs=tuple(whole() for _ in out_shape),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="partial_attention",
    )
    return list(run(*arrays))
