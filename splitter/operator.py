"""The attention operator: the point where a model is cut (Lamina 2025, §4.2.1).

Two primitives mark it in a jaxpr. `attention` is ours: a model calls it with the q, k, v of its own tokens.
And while a model is traced, `jax.nn.dot_product_attention` is replaced by a marked twin
(`marked_dot_product_attention`), because otherwise it is inlined without a trace; so models that know nothing
of this project are cut as well.

Both run, compile, differentiate and batch like any JAX function, so an unsplit model runs as it is. Knows
nothing of KV caches, slots or requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import ArrayLike, Float

from pallas_kernels import causal_attention, compat

_PLAIN_DPA = jax.nn.dot_product_attention
_patch_lock = threading.RLock()


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    name: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal self-attention over the T tokens given, as an operator the splitter can cut at.

    Args:
      q: rotary embedding applied.
      k, v: N a multiple of K. In a decode trace T is 1 and they hold the new token only: the
        earlier tokens are the attention worker's.
      scale: multiplies q·k; `H ** -0.5` when None.
      window: sliding window, each token sees the last `window` tokens, itself among them; None sees all.
      softcap: `c` makes a score s into `c * tanh(s / c)`.
      name: shown in reports, e.g. the layer's path.

    Returns:
      In q's dtype; softmax in float32.

    Raises:
      ValueError: shapes, dtypes or window do not fit.
    """
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(f"q must be [B, T, N, H] and k, v [B, T, K, H]: {q.shape=} {k.shape=} {v.shape=}")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"B, T, H must agree and N be a multiple of K: {q.shape=} {k.shape=}")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype: {q.dtype=} {k.dtype=} {v.dtype=}")
    return attention_p.bind(
        q, k, v,
        scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
        name=name,
    )  # fmt: skip


def _run_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    name: str | None,
) -> Float[Array, "B T N H"]:
    del name
    return causal_attention(q, k, v, scale=scale, window=window, softcap=softcap)


def _batch_attention(args: Sequence[Array], dims: Sequence[int | None], **params: Any) -> tuple[Array, int]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)

    def fold(x: Array, d: int | None) -> Array:
        x = jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        return x.reshape(size * x.shape[1], *x.shape[2:])

    out = attention_p.bind(*(fold(x, d) for x, d in zip(args, dims, strict=True)), **params)
    return out.reshape(size, -1, *out.shape[1:]), 0


attention_p = compat.define_primitive(
    "attention",
    run=_run_attention,
    abstract=lambda q, k, v, **_: compat.ShapedArray(q.shape, q.dtype),
    batch=_batch_attention,
)


# --- jax.nn.dot_product_attention, marked ---

_OPTIONAL = ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths")


def marked_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    **kwargs: Any,
) -> Any:
    """`jax.nn.dot_product_attention` that leaves a primitive in the jaxpr. Same arguments, same result.

    `return_residual=True` is left unmarked: its second result is no attention output.
    """
    if kwargs.get("return_residual"):
        return _PLAIN_DPA(query, key, value, bias, mask, **kwargs)
    kwargs.pop("return_residual", None)
    given = {"bias": bias, "mask": mask} | {n: kwargs.pop(n, None) for n in _OPTIONAL[2:]}
    names = tuple(n for n in _OPTIONAL if given[n] is not None)
    operands = [jnp.asarray(x) for x in (query, key, value, *(given[n] for n in names))]
    if isinstance(kwargs.get("local_window_size"), list):
        kwargs["local_window_size"] = tuple(kwargs["local_window_size"])
    return dot_product_attention_p.bind(
        *operands, names=names, vmaps=(), static=tuple(sorted(kwargs.items()))
    )


def _run_dot_product_attention(
    *operands: Array, names: tuple[str, ...], vmaps: tuple[Any, ...], static: tuple[tuple[str, Any], ...]
) -> Array:
    def plain(q: Array, k: Array, v: Array, *rest: Array) -> Array:
        options: dict[str, Any] = dict(zip(names, rest, strict=True)) | dict(static)
        return _PLAIN_DPA(q, k, v, **options)

    run: Callable[..., Array] = plain
    for dims in vmaps:
        run = jax.vmap(run, in_axes=dims)
    return run(*operands)


def _abstract_dot_product_attention(*avals: compat.ShapedArray, **params: Any) -> compat.ShapedArray:
    out = jax.eval_shape(
        lambda *xs: _run_dot_product_attention(*xs, **params),
        *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals),
    )
    return compat.ShapedArray(out.shape, out.dtype)


def _batch_dot_product_attention(
    args: Sequence[Array], dims: Sequence[int | None], *, vmaps: tuple[Any, ...], **params: Any
) -> tuple[Array, int]:
    return dot_product_attention_p.bind(*args, vmaps=(*vmaps, tuple(dims)), **params), 0


dot_product_attention_p = compat.define_primitive(
    "dot_product_attention",
    run=_run_dot_product_attention,
    abstract=_abstract_dot_product_attention,
    batch=_batch_dot_product_attention,
)


@contextmanager
def marking() -> Iterator[None]:
    """Within it, calls of `jax.nn.dot_product_attention` through the module leave a marker.

    Process-wide while it lasts, hence the lock; a function bound earlier by `from jax.nn import
    dot_product_attention` is out of reach.
    """
    with _patch_lock:
        before = jax.nn.dot_product_attention
        jax.nn.dot_product_attention = marked_dot_product_attention
        try:
            yield
        finally:
            jax.nn.dot_product_attention = before


DEFAULT_OPERATORS: tuple[compat.Primitive, ...] = (attention_p, dot_product_attention_p)
