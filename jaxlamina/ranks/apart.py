"""What of a model its ranks can hold apart when they share out its weights: columns, heads and parts of sums.

A product with a weight ``[N, K]`` gives columns that do not need each other. Columns that go through
operators that keep them apart (element by element, or per head) to another product, which sums over them,
need not be exchanged: that weight is shared out along K (Shoeybi et al., Megatron-LM, §3). Nor do heads need
each other in attention: q, k and v go into it, and its output comes out of it, by heads.

Knows jaxprs; no rank, no slice and no layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from jax.lax import GatherScatterMode

from pallas_kernels import compat
from pallas_kernels.cpu import rotation_p
from splitter import Traced
from splitter.block import variables
from splitter.operator import attention_p

HEADS_AXIS = 2
"""Of q, k, v and of attention's output."""

# Operators of which each element of the result follows from the elements at its place.
_ELEMENT_WISE = frozenset(
    [
        *("abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos"),
        *("div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow"),
        *("is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter"),
        *("not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square"),
        *("stop_gradient", "sub", "tan", "tanh", "xor"),
    ]
)


_REDUCTIONS = frozenset(["reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"])


class SharedOut(NamedTuple):
    """How ``n`` ranks share a model out. ``axes``: by parameter's name, of a flat dict, along which dimension
    it is; others are whole. ``by_heads``: whether each rank has its share of all attentions' heads, else
    ``why_not``."""

    axes: Mapping[str, int]
    n: int = 1
    by_heads: bool = False
    why_not: str = ""

    @property
    def heads_over(self) -> int:
        """How many ranks have a share of the heads."""
        return self.n if self.by_heads else 1


WHOLE = SharedOut({})


def shared_out(traced: Iterable[Traced], params: Iterable[str], n: int) -> SharedOut:
    """Over ``n`` ranks: those parameters whose dimension ``n`` divides, that in every traced function only
    products and lookups of rows read, all in the same way."""
    names, traced = sorted(params), list(traced)  # as a dict is flattened
    why_not = next(filter(None, (_why_not_by_heads(t, n) for t in traced)), "")
    every = [_axes_of(t, names, n, not why_not) for t in traced]
    common = {name for found in every for name in found}
    axes = {
        name: every[0][name]
        for name in common
        if all(found.get(name) == every[0].get(name) for found in every)
    }
    return SharedOut(axes, n, not why_not, why_not)


def _why_not_by_heads(traced: Traced, n: int) -> str:
    for i, place in enumerate(traced.sites):
        eqn = traced.jaxpr.eqns[place]
        if eqn.primitive is not attention_p:
            return f"attention {i} is a {eqn.primitive.name}, whose operands may belong to no head"
        n_heads, n_kv_heads = (shape_of(v)[HEADS_AXIS] for v in eqn.invars[:2])
        if n_kv_heads % n:
            return (
                f"attention {i} has {n_kv_heads} KV heads for {n_heads}, which {n} ranks cannot share equally"
            )
    return ""


def _axes_of(traced: Traced, params: Sequence[str], n: int, by_heads: bool) -> dict[str, int]:
    names = dict(zip(traced.jaxpr.invars[: traced.n_params], params, strict=True))
    reads: dict[Any, list[compat.JaxprEqn]] = {v: [] for v in names}
    for eqn in traced.jaxpr.eqns:
        for v in variables(eqn.invars):
            if v in names:
                reads[v].append(eqn)
    outputs = set(variables(traced.jaxpr.outvars))
    axes: dict[Any, int] = {}
    for v, eqns in reads.items():
        found = {free_axis(eqn, eqn.invars.index(v)) for eqn in eqns}
        axis = next(iter(found)) if len(found) == 1 and v not in outputs else None
        if axis is not None and v.aval.shape[axis] % n == 0:
            axes[v] = axis
    ends = {v for v, axis in axes.items() if v.aval.shape[1 - axis] % n == 0}
    found_ends = apart_in(traced.jaxpr, set(axes), ends, n, by_heads).ends
    of_sums = Counter(operand_of(end, ends)[1] for end in found_ends)
    return {names[v]: 1 - axis if of_sums[v] == len(reads[v]) else axis for v, axis in axes.items()}


def free_axis(eqn: compat.JaxprEqn, operand: int) -> int | None:
    """The one dimension of a matrix that a product keeps, if ``eqn`` is such a product of it; or the first
    one, if it looks up rows."""
    if looks_up_rows(eqn) and operand == 0:
        return 0
    if eqn.primitive.name != "dot_general":
        return None
    contracted, batch = eqn.params["dimension_numbers"]
    shape = shape_of(eqn.invars[operand])
    if len(shape) != 2 or any(batch) or len(contracted[operand]) != 1:
        return None
    return 1 - int(contracted[operand][0])


def looks_up_rows(eqn: compat.JaxprEqn) -> bool:
    """Whether it takes rows of a matrix by their numbers, and of a number that is none the nearest row."""
    if eqn.primitive.name != "gather":
        return False
    how, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    last = len(shape_of(eqn.outvars[0])) - 1
    by_row = (how.offset_dims, how.collapsed_slice_dims, how.start_index_map) == ((last,), (0,), (0,))
    is_batched = how.operand_batching_dims or how.start_indices_batching_dims
    nearest = eqn.params["mode"] in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
    return by_row and not is_batched and nearest and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])


def operand_of(eqn: compat.JaxprEqn, weights: Container[Any]) -> tuple[int, Any]:
    """Which of a product's operands is one of ``weights``, and it."""
    return next((n, v) for n, v in enumerate(eqn.invars) if is_one(v, weights))


def is_one(atom: Any, of: Container[Any]) -> bool:
    return not isinstance(atom, compat.Literal) and atom in of


class LiesApart(NamedTuple):
    """``axis``: of each value that lies apart, the dimension along which it does, in as many equal stretches
    as there are ranks; ``ends``: products that sum over such a dimension."""

    axis: Mapping[Any, int]
    ends: Sequence[compat.JaxprEqn]


class _Flow(NamedTuple):
    """A value that lies apart."""

    axis: int
    sources: frozenset[int]  # places of the products and attentions that it is made of


def apart_in(jaxpr: Any, columns: Container[Any], ends: Container[Any], n: int, by_heads: bool) -> LiesApart:
    """What of a function lies apart on ``n`` ranks, each of which has its stretch of the weights: those of
    ``columns`` along what their products keep, those of ``ends`` along what is summed over. With ``by_heads``
    each has its share of every attention's heads."""
    whole: set[int] = set()  # places of products and attentions whose results are used in other ways
    while True:
        flows, found, others = _apart_but(jaxpr, columns, ends, n, by_heads, whole)
        if not others:
            return LiesApart({v: flow.axis for v, flow in flows.items()}, found)
        whole |= others


def _apart_but(
    jaxpr: Any,
    columns: Container[Any],
    ends: Container[Any],
    n: int,
    by_heads: bool,
    whole: Container[int],
) -> tuple[Mapping[Any, _Flow], list[compat.JaxprEqn], set[int]]:
    """What lies apart, but for results at the places ``whole``; products that end it; and at which places
    results are used in a way that needs them whole."""
    flows: dict[Any, _Flow] = {}
    found: list[compat.JaxprEqn] = []
    others: set[int] = set()
    for place, eqn in enumerate(jaxpr.eqns):
        read = {v: flows[v] for v in variables(eqn.invars) if v in flows}
        sources = frozenset().union(*(flow.sources for flow in read.values()))
        if by_heads and eqn.primitive is attention_p:
            for flow in read.values():
                others |= flow.sources if flow.axis != HEADS_AXIS else set()
            if place not in whole:
                flows[eqn.outvars[0]] = _Flow(HEADS_AXIS, frozenset([place]))
        elif read and _is_end(eqn, ends, flows):
            found.append(eqn)
        elif read and (axes := _through(eqn, {v: flow.axis for v, flow in read.items()}, n)):
            flows |= {v: _Flow(axis, sources) for v, axis in zip(eqn.outvars, axes, strict=True)}
        else:
            others |= sources
            is_product = eqn.primitive.name == "dot_general" and any(is_one(v, columns) for v in eqn.invars)
            if is_product and place not in whole:
                flows[eqn.outvars[0]] = _Flow(column_axis(eqn, columns), frozenset([place]))
    used = {v for eqn in jaxpr.eqns for v in variables(eqn.invars)}
    for v, flow in flows.items():
        if v not in used or v in jaxpr.outvars:
            others |= flow.sources
    return flows, found, others


def column_axis(eqn: compat.JaxprEqn, weights: Container[Any]) -> int:
    """A product keeps its left operand's dimension first."""
    return 0 if operand_of(eqn, weights)[0] == 0 else len(shape_of(eqn.outvars[0])) - 1


def _is_end(eqn: compat.JaxprEqn, ends: Container[Any], flows: Mapping[Any, _Flow]) -> bool:
    """Whether it is a product with one of ``ends`` that sums over what lies apart."""
    if eqn.primitive.name != "dot_general" or not any(is_one(v, ends) for v in eqn.invars):
        return False
    operand, _ = operand_of(eqn, ends)
    contracted, _ = eqn.params["dimension_numbers"]
    flow = flows.get(eqn.invars[1 - operand])
    return flow is not None and tuple(contracted[1 - operand]) == (flow.axis,)


def _through(eqn: compat.JaxprEqn, axes: Mapping[Any, int], n: int) -> list[int] | None:
    """Along which dimension each result lies apart, if operands do along ``axes`` and no stretch of it needs
    another one; None if one may."""
    name, p, out = eqn.primitive.name, eqn.params, shape_of(eqn.outvars[0])
    if len(set(axes.values())) != 1:
        return None
    axis, given = next(iter(axes.values())), shape_of(next(iter(axes)))
    if name in _ELEMENT_WISE:
        return [axis] if _is_element_wise(eqn, axis) else None
    if name == "concatenate":
        return [axis] if p["dimension"] != axis else None
    found: int | None = None
    if name == "transpose":
        found = tuple(p["permutation"]).index(axis)
    elif name == "reshape" and p.get("dimensions") is None:
        found = _reshaped(axis, given, out, n)
    elif name == "squeeze":
        found = axis - sum(i < axis for i in p["dimensions"])
    elif name in _REDUCTIONS and axis not in p["axes"]:
        found = axis - sum(i < axis for i in p["axes"])
    elif name == "broadcast_in_dim" and out[p["broadcast_dimensions"][axis]] == given[axis]:
        found = p["broadcast_dimensions"][axis]
    elif _keeps(eqn, axis, axes):
        found = axis
    return None if found is None else [found] * len(eqn.outvars)


def _keeps(eqn: compat.JaxprEqn, axis: int, apart: Container[Any]) -> bool:
    """Whether it leaves a dimension where it is, and all of it."""
    name, p = eqn.primitive.name, eqn.params
    if eqn.primitive is rotation_p:  # of rows, heads, and a head's elements
        return axis == 1 and is_one(eqn.invars[0], apart)
    if name == "slice":
        return shape_of(eqn.invars[0])[axis] == shape_of(eqn.outvars[0])[axis]
    if name == "pad":
        return tuple(p["padding_config"][axis]) == (0, 0, 0)
    return name == "split" and bool(p["axis"] != axis)


def _reshaped(axis: int, given: Sequence[int], out: Sequence[int], n: int) -> int | None:
    """The dimension whose n equal stretches have the elements of those of ``axis``: as many elements are in
    the dimensions before it.

    >>> _reshaped(2, (5, 1, 12), (5, 1, 4, 3), 2), _reshaped(2, (5, 1, 4, 3), (5, 12), 2)
    (2, 1)
    >>> _reshaped(2, (5, 1, 12), (5, 1, 3, 4), 2) is None
    True
    """
    before = [1, *accumulate(out, lambda a, b: a * b)]
    places = (i for i, size in enumerate(out) if before[i] == prod(given[:axis]) and size % n == 0)
    return next(places, None)


def _is_element_wise(eqn: compat.JaxprEqn, axis: int) -> bool:
    """Whether each of its result's elements follows from its operands' at the same place."""
    out = shape_of(eqn.outvars[0])
    # Along other dimensions an operand of one element is every element's.
    sizes = {shape[axis] for a in eqn.invars if (shape := shape_of(a))}
    return all(len(shape_of(a)) in (0, len(out)) for a in eqn.invars) and sizes <= {1, out[axis]}


def of_a_stretch(eqn: compat.JaxprEqn, axis: int, n: int) -> dict[str, Any]:
    """The parameters in which an equation that keeps stretches apart, its result's along ``axis``, differs
    where there is one of ``n`` alone."""
    names = {"reshape": "new_sizes", "broadcast_in_dim": "shape", "slice": "limit_indices"}
    name = names.get(eqn.primitive.name)
    if name is None:
        return {}
    sizes = list(eqn.params[name])
    sizes[axis] //= n
    return {name: tuple(sizes)}


def shape_of(atom: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = atom.aval.shape
    return shape
