"""A function's products with weights, taken by kernels of ours where those are faster: on Hopper by
`pallas_kernels.products`, on CPUs by the native ones.

Works on the jaxpr of a whole step, so that products of the same rows become one kernel; the model is as its
author wrote it. Knows nothing of slices, exchanges or attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import jax

from pallas_kernels import blocks, compat, cpu
from pallas_kernels import products as hopper
from splitter.block import Read, Rule, as_it_is, run_by_rules, together


class Kernels(NamedTuple):
    """What takes products. ``least_bytes``: of a weight that is worth it. ``blocks``: whether weights may be
    blocks of GGUF."""

    fewest_rows: int
    most_rows: float
    least_bytes: int
    supports: Callable[[int, Any, Sequence[tuple[int, int]]], str | None]
    run: Callable[..., Sequence[jax.Array]]
    blocks: bool = False


def _on_hopper(x: jax.Array, weights: Sequence[jax.Array], dtype: Any, n_rows: Any) -> Sequence[jax.Array]:
    return hopper.stream_products(x, weights, dtype=dtype)  # where padding takes no time


HOPPER = Kernels(hopper.FEWEST_ROWS, hopper.MOST_ROWS, 1 << 20, hopper.supports, _on_hopper)
NATIVE = Kernels(1, math.inf, 0, cpu.supports_products, cpu.products, blocks=True)


class Filled(NamedTuple):
    """How many rows of a step's ``tokens`` are no padding: those come first. Of which shape rows are."""

    shape: tuple[int, ...]
    n: Any  # int32, a number of the step's

    @classmethod
    def of(cls, tokens: Any, logits_at: Any, n_before: int = 0) -> Filled | None:
        """Of a prompt's tokens [1, T], or of a chunk's [n_before + T, 1] after rows of one token;
        ``logits_at`` [1] is its last token. None for several prompts."""
        return cls(tokens.shape, n_before + logits_at[0] + 1) if len(logits_at) == 1 else None


def kernels_for(device: jax.Device) -> Kernels | None:
    """What takes products on ``device``; None: XLA does."""
    if cpu.serves(device.platform):
        return NATIVE
    # what they were made for and measured on
    capability = str(getattr(device, "compute_capability", ""))
    return HOPPER if device.platform == "gpu" and capability.startswith("9.") else None


def with_streamed_products(
    function: Callable[..., Any],
    device: jax.Device,
    filled: Callable[..., Filled | None] = lambda *args: None,
) -> Callable[..., Any]:
    """``function``, a step to be jitted, with its products by weights streamed where ``device`` can.

    Results differ from the function's as two matrix products of the same precision differ. ``filled``, of the
    same arguments: rows beyond those may be given zeros.
    """
    kernels = kernels_for(device)
    if kernels is None:
        return function

    # The step's name is its program's, in logs and profiles.
    @wraps(function.func if isinstance(function, partial) else function)
    def run(*args: Any) -> Any:
        return run_by_rules(function, args, args, partial(_rules, kernels, filled(*args)))

    return run


def _rules(kernels: Kernels, filled: Filled | None, jaxpr: Any) -> Mapping[str, Rule]:
    weights = _Weights(jaxpr, kernels)
    streamed = partial(_streamed, kernels, filled, weights)
    rules = {"dot_general": together(products(jaxpr, kernels), streamed)}
    return {**rules, "gather": partial(_looked_up, weights)} if weights.decoded else rules


def _streamed(
    kernels: Kernels, filled: Filled | None, of: _Weights, group: Sequence[compat.JaxprEqn], read: Read
) -> list[Any]:
    x = read(group[0].invars[0])
    n_rows = filled.n if filled is not None and x.shape[:-1] == filled.shape else None
    likes: list[Any] = [eqn.outvars[0].aval for eqn in group]
    with compat.context_of(group[0]):
        weights = [read(of.stored(eqn.invars[1])) for eqn in group]
        outs = kernels.run(x.reshape(-1, x.shape[-1]), weights, likes[0].dtype, n_rows)
    return [out.reshape(like.shape) for out, like in zip(outs, likes, strict=True)]


def _looked_up(of: _Weights, eqn: compat.JaxprEqn, read: Read) -> list[Any]:
    """Rows of a table in blocks: those alone are decoded."""
    table: Any
    rows: Any
    table, rows = eqn.invars
    if table not in of.decoded or not _takes_rows(eqn.params, table.aval.shape, rows.aval.ndim):
        return as_it_is(eqn, read)
    stored = read(of.stored(table))
    taken = compat.bind_eqn(eqn, [stored, read(rows)], {"slice_sizes": (1, stored.shape[1])})
    return [blocks.dequantize(taken[0], of.decoded[table].params["form"])]


def _takes_rows(gather: Mapping[str, Any], shape: tuple[int, ...], ndim: int) -> bool:
    """Whether a gather takes whole rows of a table, none of them from outside it."""
    n, mode = gather["dimension_numbers"], gather["mode"]
    whole = gather["slice_sizes"] == (1, *shape[1:]) and n.collapsed_slice_dims == (0,)
    return whole and n.offset_dims == (ndim - 1,) and mode != jax.lax.GatherScatterMode.FILL_OR_DROP


class _Weights:
    """A jaxpr's weights: its arguments, and what is decoded of those that are blocks, if ``kernels`` take
    blocks."""

    def __init__(self, jaxpr: Any, kernels: Kernels) -> None:
        self._arguments = {*jaxpr.invars, *jaxpr.constvars}
        found = [eqn for eqn in jaxpr.eqns if eqn.primitive is blocks.dequantize_p and kernels.blocks]
        self.decoded = {eqn.outvars[0]: eqn for eqn in found if eqn.invars[0] in self._arguments}

    def __contains__(self, v: Any) -> bool:
        return v in self._arguments or v in self.decoded

    def stored(self, v: Any) -> Any:
        """The argument."""
        return self.decoded[v].invars[0] if v in self.decoded else v


def products(jaxpr: Any, kernels: Kernels = HOPPER) -> list[list[compat.JaxprEqn]]:
    """The products that can be streamed, each a `dot_general` of rows by a whole weight ``[N, K]``: those of
    the same rows together, in the order of their first."""
    weights = _Weights(jaxpr, kernels)
    groups: dict[Any, list[compat.JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and _is_product(eqn, weights, kernels):
            groups.setdefault((eqn.invars[0], eqn.outvars[0].aval.dtype), []).append(eqn)
    return list(groups.values())


def _is_product(eqn: compat.JaxprEqn, weights: _Weights, kernels: Kernels) -> bool:
    x: Any
    w: Any
    x, w = eqn.invars
    if isinstance(x, compat.Literal) or isinstance(w, compat.Literal) or w not in weights:
        return False
    contracted = (((x.aval.ndim - 1,), (1,)), ((), ()))
    if w.aval.ndim != 2 or _as_tuples(eqn.params["dimension_numbers"]) != contracted:
        return False
    if x.aval.dtype != w.aval.dtype or compat.nbytes(w.aval) < kernels.least_bytes:
        return False
    n_rows = math.prod(x.aval.shape[:-1])
    is_worth_it = kernels.fewest_rows <= n_rows <= kernels.most_rows
    return is_worth_it and kernels.supports(n_rows, x.aval.dtype, [w.aval.shape]) is None


def _as_tuples(numbers: Any) -> Any:
    (a, b), (c, d) = numbers
    return (tuple(a), tuple(b)), (tuple(c), tuple(d))
