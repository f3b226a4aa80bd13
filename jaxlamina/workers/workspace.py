"""What a step needs beside weights and KV: asked of the compiled programs themselves. Knows bytes, not
models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import make_pool

# Slots of the pools that programs are compiled with to ask: a program's workspace does not depend on them.
_SOME_SLOTS = 64


@dataclass(frozen=True)
class LargestStep:
    """The largest step that will be run: rows of a decode batch, earlier tokens a row, tokens of a prompt."""

    batch: int
    context: int
    prompt: int

    def __post_init__(self) -> None:
        if min(self.batch, self.context) < 1 or self.prompt < 2:
            raise ValueError(f"{self} must have a batch and a context of 1 and a prompt of 2 at least")


def program_bytes(function: jax.stages.Wrapped, *args: Any) -> int:
    """Bytes that jitted ``function`` takes beside its arguments (arrays or shapes): temporary, and new
    results."""
    analysis = function.lower(*args).compile().memory_analysis()
    if analysis is None:
        return 0
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.temp_size_in_bytes + max(0, new))


def shapes(x: Any) -> Any:
    """The shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), x)


def placed(x: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """The same, of arrays that lie as ``sharding`` says; None: on one device."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=sharding), x
    )


def tree_bytes(x: Any) -> int:
    """Bytes of a tree of arrays or shapes."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(x))


def pool_shapes(spec: AttentionSpec) -> Any:
    """A pool of one layer's K, or V, as shapes."""
    size = spec.n_kv_heads, spec.head_dim
    scales = jnp.ones(size, jnp.float32) if spec.by_channel else None
    return jax.eval_shape(lambda: make_pool(_SOME_SLOTS, *size, spec.kv_dtype, channel_scales=scales))


def ints(*shape: int) -> Int32[jax.ShapeDtypeStruct, " ..."]:
    """An input of integers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)
