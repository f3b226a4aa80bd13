"""Values that tokens do not change: positions a model makes itself, tables it cuts to its length, masks,
constants.

A model that is traced for one row of T tokens numbers them 0 to T - 1. In a step, tokens stand at any
positions, so such a value is made of the step's positions instead: an iota becomes the positions, a table's
beginning becomes its rows at the positions. Where a value is an index into the row itself (which of the
tokens of this step?), it stays the token's place in the row. Knows nothing of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat
from splitter.block import variables
from splitter.find.facts import Facts, From, computed
from splitter.find.lengths import TOKENS, Count
from splitter.trace import SplitError

_SCATTERS = ("scatter", *(f"scatter-{how}" for how in ("add", "sub", "mul", "max", "min")))
# Which operand of it begins the indices.
_INDEXED = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2} | dict.fromkeys(_SCATTERS, 1)
# Through which an index into the row is made of others.
_MAKES_INDICES = frozenset(
    [
        "sort",
        "concatenate",
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "expand_dims",
        "convert_element_type",
        "add",
        "sub",
        "mul",
        "rem",
        "div",
        "select_n",
        "transpose",
        "gather",
        "slice",
        "max",
        "min",
        "clamp",
        "cumsum",
        "copy",
    ]
)
# Each element of a result along T comes of the operands' elements at the same token.
POINTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "ceil",
        "clamp",
        "complex",
        "conj",
        "copy",
        "cos",
        "cosh",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "imag",
        "integer_pow",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "population_count",
        "pow",
        "real",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
        "convert_element_type",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "optimization_barrier",
        "bessel_i0e",
        "bessel_i1e",
        "bitcast_convert_type",
        "clz",
        "device_put",
        "digamma",
        "igamma",
        "igammac",
        "lgamma",
        "name",
        "polygamma",
        "reduce_precision",
        "regularized_incomplete_beta",
        "zeta",
    ]
)


def row_indices(facts: Facts, results: Collection[Any] = ()) -> frozenset[Any]:
    """The variables that are, or make, indices into the row of tokens; ``results`` are known to."""
    marked: set[Any] = set(results)
    for p in sorted(facts.live, reverse=True):
        eqn = facts.eqns[p]
        name = eqn.primitive.name
        if name in _INDEXED and facts.learned.token_dims(eqn.invars[0]):
            marked.update(
                variables(eqn.invars[_INDEXED[name] : _INDEXED[name] + 1 if "slice" not in name else None])
            )
        if name in _MAKES_INDICES and marked.intersection(eqn.outvars):
            marked.update(v for v in variables(eqn.invars) if np.dtype(compat.like_of(v).dtype).kind in "iub")
    return frozenset(marked)


class Places:
    """The values without tokens of one step: ``row`` are its tokens' positions ``[1, n]``; ``known`` the
    parameters.

    ``table(v)``: values of ``v`` for as many tokens as there may be, where a step's cannot be computed by
    themselves.
    """

    def __init__(
        self,
        facts: Facts,
        indices: frozenset[Any],
        row: jax.Array,
        params: Sequence[Any],
        table: Callable[[Any], np.ndarray],
    ) -> None:
        self.facts, self.indices, self.row, self.table = facts, indices, row, table
        jaxpr = facts.learned.jaxpr
        self.n = row.shape[1]
        own = dict(zip(jaxpr.invars[: facts.n_params], params, strict=True))
        self._at_place: dict[Any, Any] = own | {jaxpr.invars[-1]: row}
        self._in_row: dict[Any, Any] = dict(self._at_place)
        self._const_number = {v: i for i, v in enumerate(jaxpr.constvars)}

    def read(self, atom: Any, position: int) -> Any:
        """What the equation at ``position`` reads."""
        if isinstance(atom, compat.Literal):
            return atom.val
        eqn = self.facts.eqns[position]
        as_index = atom in self.indices and (
            eqn.primitive.name in _INDEXED or self.indices.intersection(eqn.outvars)
        )
        return self._value(atom, in_row=bool(as_index))

    def _value(self, v: Any, *, in_row: bool) -> Any:
        dims = self.facts.learned.dims(v)
        if not in_row and all(d != TOKENS for d in dims):  # of no token in particular, or so many of each
            if v in self.facts.of_row and not self.facts.learned.token_dims(v):
                raise SplitError(
                    f"{self.facts.made_at(v)}: {v.aval} is made of all positions of a row, or of how many "
                    "tokens there are. Tokens of several rows are computed together, and a row piece by "
                    "piece: compute it of each token's own position"
                )
            in_row = True
        known = self._in_row if in_row else self._at_place
        if v not in known:
            self._compute(v, in_row)
        return known[v]

    def _compute(self, v: Any, in_row: bool) -> None:
        """Of everything that ``v`` needs first: chains may be longer than Python's stack."""
        known = self._in_row if in_row else self._at_place
        learned = self.facts.learned
        if v in self._const_number:
            number = self._const_number[v]
            value = learned.const(number, self.n)
            if not in_row:
                value = self._rows_of(learned.consts[number].values, v)
            known[v] = value
            return
        position = self.facts.producer[v]
        eqn = self.facts.eqns[position]
        found = None if in_row else self._by_place(eqn, position)
        if found is None:
            args = [
                a.val if isinstance(a, compat.Literal) else self._value(a, in_row=in_row) for a in eqn.invars
            ]
            found = learned.run(position, args, self.n)
        known.update(zip(eqn.outvars, found, strict=True))

    def _by_place(self, eqn: compat.JaxprEqn, position: int) -> list[Any] | None:
        """The results where they are not simply the equation's own of its operands at their places."""
        learned, name = self.facts.learned, eqn.primitive.name
        [out, *more] = eqn.outvars
        dims = learned.dims(out)
        tokens = learned.token_dims(out)
        operand_tokens = [learned.token_dims(a) for a in eqn.invars]
        if name == "iota":
            d = eqn.params["dimension"]
            if dims[d] != TOKENS:
                return None
            shape = learned.shape_at(out, self.n)
            return [jax.lax.broadcast_in_dim(self.row[0].astype(compat.like_of(out).dtype), shape, (d,))]
        if name in ("slice", "dynamic_slice") and len(tokens) == 1 and not operand_tokens[0]:
            return [self._rows_from(eqn, position, tokens[0])]
        if len(tokens) == 1 and _keeps_tokens_apart(eqn, tokens, operand_tokens, dims):
            return None
        if more or self.facts.source[out] != From.NOTHING:
            raise SplitError(
                f"{compat.where(eqn)}: {name} makes a value of the tokens' positions, or of a parameter cut "
                "to their number, that cannot be made for tokens at any positions: take positions from the "
                "argument"
            )
        return [self._rows_of(self.table(out), out)]

    def _rows_from(self, eqn: compat.JaxprEqn, position: int, d: int) -> Any:
        """A table's rows at the positions, for a slice that is its beginning."""
        operand = self._value(eqn.invars[0], in_row=True)
        learned = self.facts.learned
        shape = learned.shape_at(eqn.outvars[0], self.n)
        p = learned.params_of(position)
        if eqn.primitive.name == "slice":
            starts, steps = p["start_indices"], p["strides"] or (1,) * len(shape)
            if steps[d] != 1:
                raise SplitError(f"{compat.where(eqn)}: positions in steps of {steps[d]}")
        else:
            starts = [
                a.val if isinstance(a, compat.Literal) else self._value(a, in_row=True)
                for a in eqn.invars[1:]
            ]
        if isinstance(starts[d], Count) or (position, 1 + d) in learned.literals:
            raise SplitError(
                f"{compat.where(eqn)}: a table is cut from a row on that depends on how many tokens there "
                "are: take the rows at the tokens' positions"
            )
        rows = jnp.take(operand, self.row[0] + starts[d], axis=d, mode="clip")
        if eqn.primitive.name == "slice":
            cut = [slice(s, e, step) for s, e, step in zip(starts, p["limit_indices"], steps, strict=True)]
            return rows[tuple(slice(None) if i == d else c for i, c in enumerate(cut))]
        starts = [0 if i == d else s for i, s in enumerate(starts)]
        return jax.lax.dynamic_slice(rows, starts, shape)

    def _rows_of(self, table: np.ndarray, v: Any) -> Any:
        dims = self.facts.learned.dims(v)
        tokens = [i for i, d in enumerate(dims) if isinstance(d, Count)]
        if len(tokens) != 1 or dims[tokens[0]] != TOKENS:
            raise SplitError(
                f"{self.facts.made_at(v)}: a value of {v.aval} for all pairs of tokens is used outside of "
                "attention"
            )
        return jnp.take(jnp.asarray(table), self.row[0], axis=tokens[0], mode="clip")


def table_of(facts: Facts, v: Any, max_len: int) -> np.ndarray:
    """``v`` for ``max_len`` tokens. Raises SplitError if for fewer tokens it is not this table's
    beginning."""
    found = []
    for n in (facts.learned.lengths[0], max_len):
        run = computed(facts, [v], n)
        with jax.ensure_compile_time_eval():
            found.append(np.asarray(run(jnp.arange(n, dtype=jnp.int32)[None])[0]))
    short, long = found
    begin = tuple(slice(0, size) for size in short.shape)
    if not np.array_equal(long[begin], short):
        raise SplitError(
            f"{facts.made_at(v)}: what a token's place counts for depends on how many tokens follow it"
        )
    return long


# Primitives that do something along the dimensions of a parameter, and nothing along others.
_ALONG = {
    "concatenate": "dimension", "split": "axis", "rev": "dimensions", "cumsum": "axis", "cumprod": "axis",
    "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis", "argmax": "axes", "argmin": "axes",
    "sort": "dimension",
}  # fmt: skip


def _keeps_tokens_apart(
    eqn: compat.JaxprEqn, tokens: Sequence[int], of_operands: Sequence[Sequence[int]], dims: Sequence[Any]
) -> bool:
    """Whether each token's part of the result, whose dimension of tokens is ``tokens``, comes of the same
    token's part of the operands, of which these are ``of_operands``."""
    name, p = eqn.primitive.name, eqn.params
    if name in POINTWISE:
        return True
    if name == "reshape":
        return dims[tokens[0]] == TOKENS and len(of_operands[0]) == 1
    if name == "gather":
        return not of_operands[0]
    if name == "dot_general":
        return sum(map(bool, of_operands)) == 1
    if name == "tile":
        return all(p["reps"][d] == 1 for d in tokens)
    if name == "slice":
        return tuple(of_operands[0]) == tuple(tokens) and p["start_indices"][tokens[0]] == 0
    along = p.get(_ALONG.get(name, "axes" if name.startswith("reduce_") else ""), tokens)
    return not {*(along if isinstance(along, tuple | list) else (along,))} & {*of_operands[0]}
