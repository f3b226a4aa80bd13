"""From a function to one flat jaxpr whose attention operators are plain to see.

`trace` makes the jaxpr, with nested `jit`, `remat`, custom derivatives and calls inlined, and a scan over
layers unrolled where its body holds an attention operator. Knows nothing of cuts, slices or weights' meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from pallas_kernels import compat
from splitter.block import Block, Read, as_it_is
from splitter.operator import DEFAULT_OPERATORS, marking


class SplitError(ValueError):
    """The function cannot be split; the message says where and why."""


# Calls whose body simply runs in place. For inference the custom derivative of a call is its plain body.
INLINE = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
     "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"}
)  # fmt: skip


IsWanted = Callable[[compat.JaxprEqn], bool]


@dataclass(frozen=True)
class Traced:
    """A function as one flat jaxpr.

    `jaxpr` takes the flattened parameters first (`n_params` of them), then the flattened inputs.
    `sites` are the positions of the attention operators among its equations.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    n_params: int
    params_tree: Any
    inputs_tree: Any
    out_tree: Any
    sites: tuple[int, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    param_names: tuple[str, ...]

    def eval(self, params: Any, *inputs: Any, attend: Callable[..., Any] | None = None) -> Any:
        """Run the function unsplit. `attend(i, q, k, v) -> out`, when given, stands in for attention operator
        i."""
        sites = count()

        def site(eqn: compat.JaxprEqn, read: Read) -> list[Any]:
            return [attend(next(sites), *(read(a) for a in eqn.invars[:3]))]  # type: ignore[misc]

        operators = () if attend is None else {self.jaxpr.eqns[i].primitive.name for i in self.sites}
        args = [*self.consts, *self.flatten(params, inputs)]
        return tree_util.tree_unflatten(
            self.out_tree, Block.of(self.jaxpr)(args, dict.fromkeys(operators, site))
        )

    def flatten(self, params: Any, inputs: Sequence[Any]) -> list[Any]:
        """Parameters and inputs as one flat list. Raises SplitError when a tree differs from the traced
        one."""
        p, p_tree = tree_util.tree_flatten(params)
        x, x_tree = tree_util.tree_flatten(tuple(inputs))
        if p_tree != self.params_tree or x_tree != self.inputs_tree:
            raise SplitError(
                f"arguments have another structure than those traced: parameters {p_tree} for "
                f"{self.params_tree}, inputs {x_tree} for {self.inputs_tree}"
            )
        return [*p, *x]


def trace(
    fn: Callable[..., Any], params: Any, *inputs: Any, operators: Sequence[Any] = DEFAULT_OPERATORS
) -> Traced:
    """Trace `fn(params, *inputs)` into one flat jaxpr with its attention operators marked.

    Args:
      fn: any JAX function of pytrees.
      params: its weights, arrays or `jax.ShapeDtypeStruct` (nothing is allocated for those).
      inputs: the rest of its arguments, likewise; for a decode step, shapes with one token a request.
      operators: the primitives to cut at.

    Raises:
      SplitError: `params` that hold no weight though `fn` does; no attention operator found, or one inside
      `while`, `cond` or another construct whose course
        depends on data; the message says where in the model.
    """
    with marking():
        closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(params, *inputs)
    wanted = frozenset(operators)
    _, consts = compat.open_jaxpr(closed)
    params_flat, params_tree = tree_util.tree_flatten(params)
    inputs_flat, inputs_tree = tree_util.tree_flatten(tuple(inputs))
    # No parameters at all are meant so: the function closes over its weights.
    if (
        params_flat
        and not any(map(_is_weight, params_flat))
        and any(jnp.ndim(c) > 1 and _is_weight(c) for c in consts)
    ):
        raise SplitError(
            f"the first argument after {_fn_name(fn)} is its parameters, and holds no floating-point array, "
            "while the function itself holds weights: call split(fn, params, *inputs); for a Flax NNX "
            "module, graph, params = nnx.split(module) and fn = lambda params, *inputs: nnx.merge(graph, "
            "params)(*inputs)"
        )
    avals = [jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.canonicalize_dtype(_dtype(x)))
             for x in (*params_flat, *inputs_flat)]  # fmt: skip
    flat, flat_consts = _flat(*compat.open_jaxpr(closed), avals, lambda eqn: eqn.primitive in wanted)
    sites = tuple(i for i, eqn in enumerate(flat.eqns) if eqn.primitive in wanted)
    if not sites:
        raise SplitError(
            f"no attention operator found in {_fn_name(fn)}: it must call splitter.attention, or "
            "jax.nn.dot_product_attention through the module (`jax.nn.dot_product_attention(…)`, not a "
            "name imported from it)"
        )
    return Traced(
        jaxpr=flat,
        consts=flat_consts,
        n_params=len(params_flat),
        params_tree=params_tree,
        inputs_tree=inputs_tree,
        out_tree=tree_util.tree_structure(out_shape),
        sites=sites,
        input_names=_input_names(fn, inputs),
        output_names=_leaf_names("output", out_shape),
        param_names=_leaf_names("params", params),
    )


def flattened(
    fn: Callable[..., Any], likes: Sequence[Any], is_wanted: IsWanted
) -> tuple[Any, tuple[Any, ...]]:
    """``fn`` of arrays as one flat jaxpr, and the values of its constants. An equation that ``is_wanted`` may
    not lie within a construct whose course depends on data (SplitError); a scan that holds one is
    unrolled. What the results do not need, such as a loss beside the logits, is left out."""
    inner, consts = compat.open_jaxpr(jax.make_jaxpr(fn)(*likes))
    return _flat(compat.without_dead(inner), consts, likes, is_wanted)


def _flat(
    inner: Any, consts: Sequence[Any], likes: Sequence[Any], is_wanted: IsWanted
) -> tuple[Any, tuple[Any, ...]]:
    def run(*args: Any) -> list[Any]:
        return _inline(inner, [*consts, *args], is_wanted)

    return compat.open_jaxpr(jax.make_jaxpr(run)(*likes))


def _is_weight(x: Any) -> bool:
    return jnp.issubdtype(_dtype(x), jnp.floating)


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _inline(jaxpr: Any, args: Sequence[Any], is_wanted: IsWanted) -> list[Any]:
    """``args``: the values of its constants, then its arguments."""

    def in_place(eqn: compat.JaxprEqn, read: Read) -> list[Any]:
        # One body; custom_vjp's forward and backward rules are callables, not jaxprs.
        inner, consts = compat.open_jaxpr(next(compat.sub_jaxprs(eqn)))
        with compat.called_by(eqn):
            return _inline(inner, [*consts, *map(read, eqn.invars)], is_wanted)

    def otherwise(eqn: compat.JaxprEqn, read: Read) -> list[Any]:
        if not _holds(eqn, is_wanted):
            return as_it_is(eqn, read)
        name = eqn.primitive.name
        if name == "scan":
            return _unroll(eqn, [read(a) for a in eqn.invars], is_wanted)
        raise SplitError(
            f"an attention operator lies inside `{name}` at {compat.where(eqn)}: how often it runs, or "
            "whether, is decided by data or by another construct that cannot be cut; take it out of there, "
            "or use a Python loop or jax.lax.scan over the layers"
        )

    return Block.of(jaxpr)(args, dict.fromkeys(INLINE, in_place), otherwise)


def _holds(eqn: compat.JaxprEqn, is_wanted: IsWanted) -> bool:
    """Whether an equation's nested jaxprs hold one that is wanted."""
    return any(
        is_wanted(inner_eqn) or _holds(inner_eqn, is_wanted)
        for sub in compat.sub_jaxprs(eqn)
        for inner_eqn in compat.open_jaxpr(sub)[0].eqns
    )


def _unroll(eqn: compat.JaxprEqn, operands: Sequence[Any], is_wanted: IsWanted) -> list[Any]:
    p = eqn.params
    body, body_consts = compat.open_jaxpr(p["jaxpr"])
    n_consts, n_carry = compat.scan_counts(eqn)
    length = p["length"]
    fixed, carry, xs = (
        operands[:n_consts],
        list(operands[n_consts : n_consts + n_carry]),
        operands[n_consts + n_carry :],
    )
    steps: list[Any] = [None] * length
    for i in reversed(range(length)) if p["reverse"] else range(length):
        # Static slices of stacked weights are views: the slicer moves them to load time.
        x = [jax.lax.index_in_dim(s, i, axis=0, keepdims=False) for s in xs]
        out = _inline(body, [*body_consts, *fixed, *carry, *x], is_wanted)
        carry, steps[i] = out[:n_carry], out[n_carry:]
    return [*carry, *(jnp.stack(ys) for ys in zip(*steps, strict=True))]


def _fn_name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _leaf_names(root: str, tree: Any) -> tuple[str, ...]:
    leaves = tree_util.tree_flatten_with_path(tree)[0]
    return tuple(root + tree_util.keystr(path) for path, _ in leaves)


def _input_names(fn: Any, inputs: Sequence[Any]) -> tuple[str, ...]:
    try:
        names = [n for n in inspect.signature(fn).parameters][1:]
    except (TypeError, ValueError):
        names = []
    names = [*names, *(f"input{i}" for i in range(len(names), len(inputs)))]
    return tuple(n for name, x in zip(names, inputs, strict=False) for n in _leaf_names(name, x))
