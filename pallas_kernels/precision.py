"""How exactly products are taken. Knows dtypes only."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def exact(dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
    """The `precision` argument under which a product of this dtype is what the dtype says.

    By default an NVIDIA GPU rounds float32 operands to TF32 and a TPU to bfloat16: attention was off by 8e-4
    on an H200 where a CPU is right to 2e-5. Whoever asks for float32 wants float32; half precision is left
    alone.
    """
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
