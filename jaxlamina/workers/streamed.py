"""A function's products with large weights, taken by `pallas_kernels.stream_products` where that is faster.

Works on the jaxpr of a whole decode step, so that products of the same rows become one kernel; the model is
as its author wrote it. Knows nothing of slices, exchanges or attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels import compat
from pallas_kernels.products import FEWEST_ROWS, MOST_ROWS, stream_products, supports
from splitter.block import Read, Rule, run_by_rules, together

_SMALL_BYTES = 1 << 20  # a weight that is not worth a kernel of its own kind


def streams_products(device: jax.Device) -> bool:
    """Whether ``device`` is one that `stream_products` was made for and measured on: Hopper."""
    return device.platform == "gpu" and str(getattr(device, "compute_capability", "")).startswith("9.")


def with_streamed_products(function: Callable[..., Any], device: jax.Device) -> Callable[..., Any]:
    """``function``, a decode step to be jitted, with its products by large weights streamed where ``device``
    can.

    Results differ from the function's as two matrix products of the same precision differ.
    """

    def run(*args: Any) -> Any:
        return run_by_rules(function, args, args, _rules)

    return run if streams_products(device) else function


def _rules(jaxpr: Any) -> dict[str, Rule]:
    return {"dot_general": together(products(jaxpr), _streamed)}


def _streamed(group: Sequence[compat.JaxprEqn], read: Read) -> list[Any]:
    x = read(group[0].invars[0])
    likes: list[Any] = [eqn.outvars[0].aval for eqn in group]
    with compat.context_of(group[0]):
        weights = [read(eqn.invars[1]) for eqn in group]
        outs = stream_products(x.reshape(-1, x.shape[-1]), weights, dtype=likes[0].dtype)
    return [out.reshape(like.shape) for out, like in zip(outs, likes, strict=True)]


def products(jaxpr: Any) -> list[list[compat.JaxprEqn]]:
    """The products that can be streamed, each a `dot_general` of rows by a whole weight ``[N, K]``: those of
    the same rows together, in the order of their first."""
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    groups: dict[Any, list[compat.JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and _is_product(eqn, arguments):
            groups.setdefault((eqn.invars[0], eqn.outvars[0].aval.dtype), []).append(eqn)
    return list(groups.values())


def _is_product(eqn: compat.JaxprEqn, arguments: set[Any]) -> bool:
    x: Any
    w: Any
    x, w = eqn.invars
    if isinstance(x, compat.Literal) or isinstance(w, compat.Literal) or w not in arguments:
        return False
    contracted = (((x.aval.ndim - 1,), (1,)), ((), ()))
    if w.aval.ndim != 2 or _as_tuples(eqn.params["dimension_numbers"]) != contracted:
        return False
    if x.aval.dtype != w.aval.dtype or compat.nbytes(w.aval) < _SMALL_BYTES:
        return False
    n_rows = math.prod(x.aval.shape[:-1])
    return FEWEST_ROWS <= n_rows <= MOST_ROWS and supports(n_rows, x.aval.dtype, [w.aval.shape]) is None


def _as_tuples(numbers: Any) -> Any:
    (a, b), (c, d) = numbers
    return (tuple(a), tuple(b)), (tuple(c), tuple(d))
