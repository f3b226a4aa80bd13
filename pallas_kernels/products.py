"""Products of few rows with large weights, on Hopper: the weights are streamed once, at the rate memory gives
them.

A decode step multiplies B rows (the batch) by every weight. With so few rows the time is that of reading the
weights, and each call also pays for starting, filling its pipeline and ending. So one kernel takes all
products of the same rows (gate and up, keys and values), and every CTA owns columns of one of them and, where
there are fewer tiles than multiprocessors, a stretch of K. Knows arrays; which products are taken so is the
caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from pallas_kernels import compat
from pallas_kernels.mosaic_gpu import multiprocessors

FEWEST_ROWS, MOST_ROWS = 32, 128  # where this beats XLA's choice on an H200; it does for none below and above
_ROWS = 64  # of one tensor-core instruction
_LINE = 64  # elements of 16 bits in 128 bytes, the width of a swizzled tile
_SHARED_BYTES = 200 * 1024
_REGISTERS = 200  # of accumulators in one thread, at most


@dataclass(frozen=True)
class ProductTuning:
    """How one kernel is laid out."""

    columns: int = 128  # of a CTA's tile, by two warpgroups of half as many each
    depth: int = 128  # along K of one stage
    parts: int = 1  # of K, summed afterwards
    stages: int = 4

    def __post_init__(self) -> None:
        if self.columns % 32 or self.depth % _LINE or self.stages < 2:
            raise ValueError(f"columns in 32s, depth in {_LINE}s and two stages at least: {self}")


def padded_rows(n_rows: int) -> int:
    """Rows as the tensor cores take them."""
    return -(-n_rows // _ROWS) * _ROWS


def supports(n_rows: int, dtype: jax.typing.DTypeLike, weights: Sequence[tuple[int, int]]) -> str | None:
    """None if ``stream_products`` does rows of this type by weights ``[N, K]``, else why not."""
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        return f"{jnp.dtype(dtype).name} is not a type of 16 bits"
    if any(n % 128 or k % 128 or k < 256 for n, k in weights):
        return f"weights {list(weights)} are not of whole tiles of 128"
    if len({k for _, k in weights}) > 1:
        return "weights differ in K"
    if tuning_for(n_rows, weights) is None:
        return f"{n_rows} rows are too many"
    return None


def tuning_for(
    n_rows: int, weights: Sequence[tuple[int, int]], n_multiprocessors: int = 132
) -> ProductTuning | None:
    """The layout for these shapes, None if there is none; the rules are what was measured
    (docs/benchmarks.md).

    Tiles of 128 columns where they are enough for all multiprocessors, else of 64 and as many parts of K as
    fill one wave: a part costs its float32 sums another trip through memory.
    """
    rows, (widths, depths) = padded_rows(n_rows), zip(*weights, strict=True)
    wide = sum(widths) // 128 >= n_multiprocessors * 3 // 4
    for columns in (128, 64) if wide else (64, 128):
        n_tiles = sum(widths) // columns
        for depth in (128, 64):
            stages = _SHARED_BYTES // ((rows + columns) * depth * 2)
            fits = [
                parts
                for parts in (1, 2, 4, 8)
                if depths[0] % (parts * depth) == 0
                and depths[0] // (parts * depth) >= 2
                and (parts == 1 or n_tiles * parts <= n_multiprocessors)
            ]
            if rows * columns // 256 <= _REGISTERS and stages >= 3 and fits:
                return ProductTuning(columns, depth, fits[-1], min(stages, depths[0] // (fits[-1] * depth)))
    return None


def stream_products(
    x: Float[Array, "B D"],
    weights: Sequence[Float[Array, "_ D"]],
    *,
    dtype: jax.typing.DTypeLike | None = None,
    tuning: ProductTuning | None = None,
) -> tuple[Float[Array, "B _"], ...]:
    """``x w^T`` for every w, all of the same 16-bit type, in ``dtype``.

    Accumulated in float32; ``dtype`` is x's unless given.

    Raises ``ValueError`` if the shapes are not ones that ``supports`` allows.
    """
    shapes = [(w.shape[0], w.shape[1]) for w in weights]
    reason = supports(x.shape[0], x.dtype, shapes)
    if reason is not None:
        raise ValueError(f"these products cannot be streamed: {reason}")
    known = tuning or tuning_for(x.shape[0], shapes, multiprocessors())
    assert known is not None
    n_rows, rows = x.shape[0], padded_rows(x.shape[0])
    out_type = jnp.dtype(dtype or x.dtype)
    stored = out_type if known.parts == 1 else jnp.dtype(jnp.float32)
    padded = jnp.pad(x, ((0, rows - n_rows), (0, 0)))
    outs = _call(known, stored.name, padded, tuple(weights))
    summed = (out[0] if known.parts == 1 else out.sum(0).astype(out_type) for out in outs)
    return tuple(out[:n_rows] for out in summed)


@partial(jax.jit, static_argnums=(0, 1))
def _call(tuning: ProductTuning, stored: str, x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    t, (rows, k) = tuning, x.shape
    n_steps, half = k // (t.parts * t.depth), t.columns // 2
    tiles = [w.shape[0] // t.columns for w in weights]
    transforms = (plgpu.TilingTransform((8, _LINE)), plgpu.SwizzleTransform(128))

    def kernel(x_ref: Any, *refs: Any) -> None:
        w_refs, out_refs = refs[: len(weights)], refs[len(weights) :]
        cta, group = lax.axis_index("cta"), lax.axis_index("warpgroup")
        tile, part = cta // t.parts, cta % t.parts
        # Rows of a weight are whole powers of two apart: CTAs that all began at its first columns would meet
        # in the same memory channels.
        turn = cta * 5 % n_steps
        first = 0
        for w_ref, out_ref, n in zip(w_refs, out_refs, tiles, strict=True):

            @pl.when((tile >= first) & (tile < first + n))
            def _product(w_ref: Any = w_ref, out_ref: Any = out_ref, first: int = first) -> None:
                def epilogue(run: Any) -> None:
                    @partial(pl.run_scoped, acc=plgpu.ACC((rows, half), jnp.float32))
                    def _(acc: Any) -> None:
                        run(acc)
                        at = pl.ds((tile - first) * t.columns + group * half, half)
                        compat.store_to_gpu(out_ref.at[part, :, at], acc[...].astype(out_ref.dtype))

                def step(_: Any, x_tile: Any, w_tile: Any, acc: Any) -> Any:
                    mine = w_tile.at[pl.ds(group * half, half)]
                    plgpu.wgmma(acc, x_tile, compat.transposed_ref(mine))
                    plgpu.wgmma_wait(1)
                    return acc

                def block(n_rows: int, row: Any) -> Any:
                    return plgpu.BlockSpec(
                        (n_rows, t.depth),
                        lambda s: (row, part * n_steps + (s + turn) % n_steps),
                        transforms=transforms,
                        memory_space=plgpu.SMEM,
                        delay_release=1,
                    )

                plgpu.emit_pipeline_warp_specialized(
                    step,
                    grid=(n_steps,),
                    memory_registers=40,
                    in_specs=[block(rows, 0), block(t.columns, tile - first)],
                    wg_axis="warpgroup",
                    num_compute_wgs=2,
                    max_concurrent_steps=t.stages,
                    compute_context=epilogue,
                )(x_ref, w_ref)

            first += n

    out_type = tuple(jax.ShapeDtypeStruct((t.parts, rows, w.shape[0]), stored) for w in weights)
    return tuple(
        plgpu.kernel(
            kernel,
            out_type=out_type,
            grid=(sum(tiles) * t.parts,),
            grid_names=("cta",),
            num_threads=3,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        )(x, *weights)
    )
