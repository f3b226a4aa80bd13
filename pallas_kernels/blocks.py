"""Matrices that stay as GGUF files store them: rows of blocks of 32 numbers, decoded where they are used.

A matrix [N, K] is bytes ``[N, K / 32 * n_bytes]``. Of each block d and, of some formats, m are float16, and a
number is d q + m of an integer q. Decoded to float32 they are what `gguf.dequantize` gives, to the bit: d q
is exact. Knows arrays; nothing of files or models.
Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0, block_q4_1, block_q8_0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32, UInt8

from pallas_kernels import compat

BLOCK = 32
N_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Of a block, by format."""


def n_columns(form: str, n_bytes: int) -> int:
    """Numbers in a row of so many bytes."""
    return n_bytes // N_BYTES[form] * BLOCK


def dequantize(blocks: UInt8[Array, "*rows bytes"], form: str) -> Float32[Array, "*rows K"]:
    """The numbers of a matrix, or of some of its rows; an operation of its own in a jaxpr, so that who runs
    the jaxpr may use the blocks as they are. ValueError for a format that is not in ``N_BYTES``, or rows that
    are not whole blocks."""
    if form not in N_BYTES or blocks.shape[-1] % N_BYTES[form] or blocks.dtype != jnp.uint8:
        raise ValueError(f"{blocks.shape} of {blocks.dtype} are no rows of {form} blocks")
    found: Array = dequantize_p.bind(blocks, form=form)
    return found


def _decoded(blocks: UInt8[Array, "*rows bytes"], *, form: str) -> Float32[Array, "*rows K"]:
    each = blocks.reshape(*blocks.shape[:-1], -1, N_BYTES[form])

    def half(at: int) -> Array:
        return lax.bitcast_convert_type(each[..., at : at + 2], jnp.float16).astype(jnp.float32)[..., None]

    if form == "Q8_0":
        numbers = half(0) * lax.bitcast_convert_type(each[..., 2:], jnp.int8).astype(jnp.float32)
    else:
        packed = each[..., -BLOCK // 2 :]
        q = jnp.concatenate([packed & 15, packed >> 4], axis=-1).astype(jnp.float32)
        numbers = half(0) * q + half(2) if form == "Q4_1" else half(0) * (q - 8)
    return numbers.reshape(*blocks.shape[:-1], -1)


def _batched(args: Sequence[Array], dims: Sequence[int], *, form: str) -> tuple[Array, int]:
    return dequantize_p.bind(jnp.moveaxis(args[0], dims[0], 0), form=form), 0


def _abstract(blocks: Any, *, form: str) -> Any:
    return compat.ShapedArray((*blocks.shape[:-1], n_columns(form, blocks.shape[-1])), jnp.float32)


dequantize_p = compat.define_primitive("dequantize", run=_decoded, abstract=_abstract, batch=_batched)
