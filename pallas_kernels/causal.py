"""Causal attention of a chunk of tokens over itself: whole prompts, or what follows stored tokens.

On an NVIDIA GPU cuDNN's flash attention where it serves, through `jax.nn.dot_product_attention`; on a CPU the
native kernels, to which a chunk is a pool in order; else XLA in blocks of queries. Knows arrays only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32, Shaped

from pallas_kernels import compat
from pallas_kernels.dispatch import candidates, compute_capability, default_device, forced_backend, why_not
from pallas_kernels.xla import scores_of, visible, weigh

# Rows of queries scored at a time, so that a long prompt needs T * _Q_BLOCK scores a head at once and not T *
# T.
_Q_BLOCK = 512


def check_heads(q: Float[Array, "... N H"], k: Shaped[Array, "... K H"], v: Shaped[Array, "... K H"]) -> None:
    """ValueError where q does not fit keys and values."""
    if k.shape != v.shape:
        raise ValueError(f"{k.shape=} must equal {v.shape=}")
    if q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"{q.shape=} must have the head dim of {k.shape=} and a multiple of its heads"
            " (both are [..., heads, head dim])"
        )


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Causal self-attention of whole prompts, in q's dtype: query t sees keys max(0, t - window + 1) .. t.

    Right-padded prompts need no mask: pads come after every real token and only pads see them. Raises
    ValueError where heads or head dims do not fit.
    """
    check_heads(q, k, v)
    if _cudnn_serves(q, k, v, softcap):
        return _cudnn(q, k, v, None, scale, window)
    return _blocks_for(q, k)(q, k, v, None, scale, window, softcap)[0].astype(q.dtype)


def causal_partial(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    lengths: Int32[Array, " B"] | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Float32[Array, "B T N H"], Float32[Array, "B T N"]]:
    """`causal_attention` as a partial, to be combined by lse with attention over tokens before the chunk:
    (out, lse).

    lengths: keys past them are not seen, and queries past them give unspecified numbers; T each if None.
    Positions are within the chunk. Raises ValueError where heads or head dims do not fit.
    """
    check_heads(q, k, v)
    if _cudnn_serves(q, k, v, softcap):
        out, lse = _cudnn(q, k, v, lengths, scale, window, return_residual=True)
        return out.astype(jnp.float32), lse.astype(jnp.float32)
    return _blocks_for(q, k)(q, k, v, lengths, scale, window, softcap)


def _cudnn_serves(q: Array, k: Array, v: Array, softcap: float | None) -> bool:
    """Whether cuDNN's flash attention takes the case on the device this is traced for."""
    device = default_device()
    return (
        forced_backend() != "xla"
        and compute_capability(device) >= (8, 0)
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
        and softcap is None
        and compat.has_cudnn()
    )


def _cudnn(
    q: Array, k: Array, v: Array, lengths: Array | None, scale: float, window: int | None, **options: Any
) -> Any:
    return jax.nn.dot_product_attention(
        q, k, v,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
        **options,
    )  # fmt: skip


def _blocks_for(q: Array, k: Array) -> Callable[..., tuple[Array, Array]]:
    like = jax.ShapeDtypeStruct(k.shape[1:], k.dtype)
    native = (
        forced_backend() in (None, "native")
        and "native" in candidates(default_device())
        and why_not("native", q, like, return_mass=False) is None
    )
    return _native if native else _in_blocks


def _native(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Array, Array]:
    from pallas_kernels import cpu

    b, t = q.shape[:2]
    ends = jnp.full((b,), t, jnp.int32) if lengths is None else jnp.maximum(lengths, 1)
    # Queries past the end stand at the last token: with a window they might see nothing.
    positions = jnp.minimum(jnp.arange(t, dtype=jnp.int32), ends[:, None] - 1)
    slots = jnp.arange(b * t, dtype=jnp.int32).reshape(b, t)

    run = jax.custom_jvp(
        lambda q, k, v: cpu.partial_attention(
            q, jax.lax.collapse(k, 0, 2), jax.lax.collapse(v, 0, 2), slots, ends, positions,
            scale=scale, window=window, softcap=softcap,
        )
    )  # fmt: skip
    in_blocks = partial(_in_blocks, lengths=lengths, scale=scale, window=window, softcap=softcap)
    run.defjvp(lambda given, tangents: jax.jvp(in_blocks, given, tangents))
    out, lse = run(q, k, v)
    return out, lse


def _in_blocks(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Array, Array]:
    b, t = q.shape[:2]
    ends = jnp.full((1,), t) if lengths is None else jnp.maximum(lengths, 1)
    last = ends[:, None] - 1

    def block(q_block: Array, first: Array | int) -> tuple[Array, Array]:
        rows = q_block.shape[1]
        # Queries past the end stand at the last token: with a window they might see nothing.
        at = jnp.minimum(first + jnp.arange(rows), last)
        seen = visible(t, None, at, window)[:, None, None]  # [B or 1, 1, 1, T, C]
        scores = jnp.where(seen, scores_of(q_block, k, scale, softcap), -jnp.inf)  # [B, K, G, T, C]
        lse = jax.nn.logsumexp(scores, axis=-1)
        return weigh(jax.nn.softmax(scores, axis=-1), v), jnp.moveaxis(lse.reshape(b, -1, rows), 1, 2)

    if t <= _Q_BLOCK:
        return block(q, 0)
    n_blocks = math.ceil(t / _Q_BLOCK)
    padded = jnp.pad(q, ((0, 0), (0, n_blocks * _Q_BLOCK - t), (0, 0), (0, 0)))
    blocks = jnp.moveaxis(padded.reshape(b, n_blocks, _Q_BLOCK, *q.shape[2:]), 1, 0)
    out, lse = jax.lax.map(lambda args: block(*args), (blocks, jnp.arange(n_blocks) * _Q_BLOCK))
    out, lse = (jnp.moveaxis(x, 0, 1).reshape(b, -1, *x.shape[3:])[:, :t] for x in (out, lse))
    return out, lse
