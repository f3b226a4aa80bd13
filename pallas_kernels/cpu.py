"""Partial attention and products with weights by native code on CPUs: each stored token and each weight is
read once, where it lies and as it is.

The library in `pallas_kernels/native` is made when the project is installed; without it XLA serves. It has
kernels for AVX-512, AVX2 and plain x86, or for NEON; the processor decides when the library is loaded. Knows
arrays only; who picks this backend is `dispatch`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32, UInt8

from pallas_kernels import compat, xla
from pallas_kernels.native import build
from pallas_kernels.quantized import (
    ChannelQuantizedPool,
    Like,
    Pool,
    PoolLike,
    QuantizedPool,
    values_of,
)

_ATTENTION, _PRODUCTS, _ROTATION = "jaxlamina_attention", "jaxlamina_products", "jaxlamina_rotation"
_ZEROS = "jaxlamina_zeros"
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8)


class NativeLibrary(NamedTuple):
    """The library, or why there is none, in one line."""

    library: ctypes.CDLL | None
    reason: str | None = None


@lru_cache(maxsize=1)
def loaded() -> NativeLibrary:
    """Loads the library and tells XLA where its function is, once a process."""
    chosen = os.environ.get(build.ENV_VAR, "")
    if chosen == "off":
        return NativeLibrary(None, f"{build.ENV_VAR}=off")
    if not build.LIBRARY.exists():
        return NativeLibrary(None, "the library is not built: python -m pallas_kernels.native.build")
    try:
        library = ctypes.CDLL(str(build.LIBRARY))
        library.jaxlamina_instructions.restype = ctypes.c_char_p
        # XLA takes functions for itself and for older versions. With a newer one it does not start at all.
        if library.jaxlamina_ffi_version() > compat.ffi_version():
            return NativeLibrary(
                None, "the library is built for a newer JAX: python -m pallas_kernels.native.build"
            )
        for target in (_ATTENTION, _PRODUCTS, _ROTATION, _ZEROS):
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    except Exception as error:  # noqa: BLE001 - of another system, JAX or version: XLA serves
        why = str(error).splitlines()[0]
        return NativeLibrary(
            None, f"the library cannot be used ({why}): python -m pallas_kernels.native.build"
        )
    if chosen and library.jaxlamina_instructions(chosen.encode()) is None:
        return NativeLibrary(None, f"{build.ENV_VAR}={chosen!r} is not an instruction set of this processor")
    return NativeLibrary(library)


def serves(platform: str) -> bool:
    """Whether programs for devices of that platform have native kernels."""
    return platform == "cpu" and loaded().library is not None


def instructions() -> str | None:
    """The name of the instruction set in use, None without the library."""
    library = loaded().library
    if library is None:
        return None
    name: bytes = library.jaxlamina_instructions(None)
    return name.decode()


def supports(q: Float[Like, "B Tq N H"], k_pool: PoolLike, *, return_mass: bool = False) -> str | None:
    """None where the case is computed, else why not."""
    dtype = values_of(k_pool).dtype
    if dtype not in _DTYPES:
        return f"KV is {dtype}"
    return loaded().reason


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
    """As `pallas_kernels.partial_attention`. There is nothing to interpret: the flag is every backend's."""
    del interpret
    b, t, n, h = q.shape
    c, k_values, v_values = slot_table.shape[1], values_of(k_pool), values_of(v_pool)
    if 0 in (b, t, c, len(k_values)) or k_values.dtype != v_values.dtype:
        return xla.partial_attention(
            q, k_pool, v_pool, slot_table, lengths, q_positions,
            scale=scale, window=window, softcap=softcap, return_mass=return_mass,
        )  # fmt: skip
    q = q.astype(jnp.float32) * scale
    if isinstance(k_pool, ChannelQuantizedPool):
        q = q * jnp.repeat(k_pool.scales, n // k_values.shape[1], axis=0)
    none = jnp.zeros((0, 0), jnp.int32)
    results = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((b, t, n, h), (b, t, n), (b, c) if return_mass else (0, 0))
    ]
    out, lse, mass = jax.ffi.ffi_call(_ATTENTION, results, vmap_method="sequential")(
        q,
        k_values,
        v_values,
        *(pool.scales if isinstance(pool, QuantizedPool) else none for pool in (k_pool, v_pool)),
        slot_table,
        lengths,
        none if q_positions is None else q_positions,
        window=np.int64(window or 0),
        softcap=np.float32(softcap or 0.0),
    )
    if isinstance(v_pool, ChannelQuantizedPool):
        out = out * jnp.repeat(v_pool.scales, n // k_values.shape[1], axis=0)
    return (out, lse, mass) if return_mass else (out, lse)


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Array:
    """In the memory's large pages from the start; where the library is (`serves`), of one device."""
    found: Array = jax.ffi.ffi_call(_ZEROS, jax.ShapeDtypeStruct(shape, dtype))()
    return found


def supports_products(
    n_rows: int, dtype: jax.typing.DTypeLike, weights: Sequence[tuple[int, int]]
) -> str | None:
    """None if ``products`` does rows of this type by weights ``[N, K]``, else why not."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"{jnp.dtype(dtype).name} is not a type of weights"
    if n_rows == 0 or any(0 in shape for shape in weights):
        return "there is nothing to multiply"
    return loaded().reason


def products(
    x: Float[Array, "B D"],
    weights: Sequence[Float[Array, "_ D"] | UInt8[Array, "_ bytes"]],
    dtype: jax.typing.DTypeLike | None = None,
    n_rows: Int32[Array, ""] | int | None = None,
) -> tuple[Float[Array, "B _"], ...]:
    """``x w^T`` for every w, in ``dtype``; x's unless given. Accumulated in float32. Bytes are rows of blocks
    (`pallas_kernels.blocks`). Of a weight's rows each result is computed by itself: it is the same whatever
    other weights are there. ``n_rows``: of x; those after them are padding, and give zeros."""
    likes = [jax.ShapeDtypeStruct((len(x), len(w)), jnp.float32) for w in weights]
    n = jnp.asarray(len(x) if n_rows is None else n_rows, jnp.int32)
    outs = jax.ffi.ffi_call(_PRODUCTS, likes, vmap_method="sequential")(x.astype(jnp.float32), n, *weights)
    return tuple(out.astype(dtype or x.dtype) for out in outs)


def rotate(
    x: Float32[Array, "B N H"], cos: Float32[Array, "B R"], sin: Float32[Array, "B R"]
) -> Float32[Array, "B N H"]:
    """x with the pairs (i, i + R) of its heads' first 2 R elements turned by a row's angles; the rest as it
    is."""
    found: Array = rotation_p.bind(x, cos, sin)
    return found


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found: Array = jax.ffi.ffi_call(_ROTATION, like, vmap_method="sequential")(x, cos, sin)
    return found


def _batch_rotation(args: Sequence[Array], dims: Sequence[int | None]) -> tuple[Array, int]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)

    def fold(x: Array, d: int | None) -> Array:
        x = jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        return x.reshape(size * x.shape[1], *x.shape[2:])

    out = rotation_p.bind(*(fold(x, d) for x, d in zip(args, dims, strict=True)))
    return out.reshape(size, -1, *out.shape[1:]), 0


rotation_p = compat.define_primitive(
    "rotation",
    run=_rotate,
    abstract=lambda x, *_: compat.ShapedArray(x.shape, x.dtype),
    batch=_batch_rotation,
)
"""`rotate` as an operator of its own: it is seen in a jaxpr that heads need not each other in it."""
