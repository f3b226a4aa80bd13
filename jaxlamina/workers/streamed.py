"""A function's products with large weights, taken by `pallas_kernels.stream_products` where that is faster.

Works on the jaxpr of a whole decode step, so that products of the same rows become one kernel; the model is as its
author wrote it. Knows nothing of slices, exchanges or attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels import compat
from pallas_kernels.products import FEWEST_ROWS, MOST_ROWS, stream_products, supports

_SMALL_BYTES = 1 << 20  # a weight that is not worth a kernel of its own kind


def streams_products(device: jax.Device) -> bool:
    """Whether ``device`` is one that `stream_products` was made for and measured on: Hopper."""
    return device.platform == "gpu" and str(getattr(device, "compute_capability", "")).startswith("9.")


def with_streamed_products(function: Callable[..., Any], device: jax.Device) -> Callable[..., Any]:
    """``function``, a decode step to be jitted, with its products by large weights streamed where ``device`` can.

    Results differ from the function's as two matrix products of the same precision differ.
    """
    return _rewritten(function) if streams_products(device) else function


def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        jaxpr, consts = compat.open_jaxpr(closed)
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        return jax.tree.unflatten(jax.tree.structure(shapes), _evaluate(jaxpr, values))

    return run


@dataclass(frozen=True)
class _Product:
    """A `dot_general` of rows by a whole weight ``[N, K]``."""

    position: int
    eqn: compat.JaxprEqn

    @property
    def rows(self) -> Any:
        return self.eqn.invars[0]

    @property
    def weight(self) -> Any:
        return self.eqn.invars[1]

    @property
    def result(self) -> Any:
        return self.eqn.outvars[0]


def products(jaxpr: Any) -> list[list[_Product]]:
    """The products that can be streamed, those of the same rows together, in the order of their first."""
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    groups: dict[Any, list[_Product]] = {}
    for position, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "dot_general" or not _is_product(eqn, arguments):
            continue
        product = _Product(position, eqn)
        groups.setdefault((product.rows, product.result.aval.dtype), []).append(product)
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


def _evaluate(jaxpr: Any, values: dict[Any, Any]) -> list[Any]:
    groups = products(jaxpr)
    at = {group[0].position: group for group in groups}
    taken = {product.position for group in groups for product in group}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, compat.Literal) else values[atom]

    for position, eqn in enumerate(jaxpr.eqns):
        if position in at:
            group = at[position]
            x = read(group[0].rows)
            with compat.context_of(eqn):
                outs = stream_products(
                    x.reshape(-1, x.shape[-1]),
                    [read(p.weight) for p in group],
                    dtype=group[0].result.aval.dtype,
                )
            for product, out in zip(group, outs, strict=True):
                values[product.result] = out.reshape(product.result.aval.shape)
        elif position not in taken:
            values.update(zip(eqn.outvars, compat.bind_eqn(eqn, [read(a) for a in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]
