"""A function of any number of tokens, learned from what it looks like for three.

A model that is traced for one row of T tokens has T in its shapes: of its arrays, of its iotas, of its
slices. Three traces of different T are compared equation by equation, and each size that differs is a + b·T:
two traces give a and b, the third confirms them. What differs in any other way is refused with its line. The
result runs for any number of tokens, one among them, without tracing the model again. Knows nothing of
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import jax
import numpy as np

from pallas_kernels import compat
from splitter.trace import SplitError

Lengths = tuple[int, int, int]


@dataclass(frozen=True)
class Count:
    """``a + b * T``: a size that depends on the number of tokens."""

    a: int
    b: int

    def at(self, n: int) -> int:
        return self.a + self.b * n


TOKENS = Count(0, 1)
Dim = int | Count


def size_at(dim: Dim, n: int) -> int:
    return dim.at(n) if isinstance(dim, Count) else dim


@dataclass(frozen=True)
class Table:
    """A constant whose size depends on the number of tokens: the values of the longest trace begin with those
    of the shorter ones. ``values``: for as many tokens as there may be."""

    values: np.ndarray
    shape: tuple[Dim, ...]

    def at(self, n: int) -> np.ndarray:
        return self.values[tuple(slice(0, size_at(d, n)) for d in self.shape)]


class _Differs(Exception):
    """Why the traces are not one function of T."""


@dataclass
class Learned:
    """A flat jaxpr of any number of tokens; its variables are those of the first trace.

    shapes: of each variable. params: of the equations in which a parameter depends on T, by position.
    literals: of operands that do, by (position, operand). consts: values, or tables.
    """

    jaxpr: Any
    lengths: Lengths
    shapes: dict[Any, tuple[Dim, ...]] = field(default_factory=dict)
    params: dict[int, dict[str, Any]] = field(default_factory=dict)
    literals: dict[tuple[int, int], Count] = field(default_factory=dict)
    consts: tuple[Any, ...] = ()

    def shape_at(self, atom: Any, n: int) -> tuple[int, ...]:
        return tuple(size_at(d, n) for d in self.dims(atom))

    def dims(self, atom: Any) -> tuple[Dim, ...]:
        return self.shapes.get(atom) or tuple(atom.aval.shape) if not isinstance(atom, compat.Literal) else ()

    def token_dims(self, atom: Any) -> tuple[int, ...]:
        """The dimensions whose size depends on T."""
        return tuple(i for i, d in enumerate(self.dims(atom)) if isinstance(d, Count))

    def run(
        self,
        position: int,
        args: Sequence[Any],
        n: int,
        as_other: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> list[Any]:
        """One equation, for n tokens; with the parameters that ``as_other`` makes of its own."""
        eqn = self.jaxpr.eqns[position]
        args = [
            np.asarray(self.literals[position, i].at(n), eqn.invars[i].aval.dtype)
            if (position, i) in self.literals
            else x
            for i, x in enumerate(args)
        ]
        changed = {k: _at(v, n) for k, v in self.params.get(position, {}).items()}
        return compat.bind_eqn(eqn, args, as_other(eqn.params | changed) if as_other else changed)

    def params_of(self, position: int) -> dict[str, Any]:
        """An equation's parameters, with sizes that depend on T as `Count`."""
        own: dict[str, Any] = self.jaxpr.eqns[position].params
        return own | self.params.get(position, {})

    def bodies(self, position: int, *names: str) -> list[Learned]:
        """The functions within an equation: those of the parameters ``names``, or all."""
        found, params = [], self.params_of(position)
        for value in [params[name] for name in names or params]:
            for leaf in value if isinstance(value, tuple | list) else (value,):
                if isinstance(leaf, _Body):
                    found.append(leaf.learned)
                elif compat.is_jaxpr(leaf):
                    jaxpr, consts = compat.open_jaxpr(leaf)
                    found.append(Learned(jaxpr, self.lengths, consts=consts))
        return found

    def varying(self, positions: Sequence[int] | None = None) -> tuple[Any, ...]:
        """What of the equations at ``positions``, or of all, depends on T, as something that prints the same
        where it is the same: of the first trace alone it cannot be told from a number that T happened to
        be."""
        positions = range(len(self.jaxpr.eqns)) if positions is None else positions
        found: list[Any] = []
        for place, p in enumerate(positions):
            params = sorted((k, _told(v)) for k, v in self.params.get(p, {}).items())
            literals = [(i, self.literals.get((p, i))) for i in range(len(self.jaxpr.eqns[p].invars))]
            if params or any(size for _, size in literals):
                found.append((place, params, literals))
        return tuple(found)

    def const(self, i: int, n: int) -> Any:
        value = self.consts[i]
        return value.at(n) if isinstance(value, Table) else value


def _at(value: Any, n: int) -> Any:
    """A learned parameter for n tokens."""
    if isinstance(value, Count):
        return value.at(n)
    if isinstance(value, _Body):
        return value.at(n)
    if isinstance(value, tuple):
        inner = [_at(v, n) for v in value]
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    return value


def _told(value: Any) -> Any:
    """A learned parameter, for `Learned.varying`: what does not depend on T is left to the jaxpr."""
    if isinstance(value, _Body):
        shapes = [value.learned.dims(v) for eqn in value.learned.jaxpr.eqns for v in eqn.outvars]
        return shapes, value.learned.varying()
    if isinstance(value, tuple | list):
        return [_told(v) for v in value]
    return value if isinstance(value, Count) else None


@dataclass(frozen=True)
class _Body:
    """A jaxpr within an equation, such as a scan's, some of whose sizes depend on T."""

    learned: Learned
    closed: bool

    def at(self, n: int) -> Any:
        jaxpr = self.learned.jaxpr
        likes = [jax.ShapeDtypeStruct(self.learned.shape_at(v, n), v.aval.dtype) for v in jaxpr.invars]

        def run(*args: Any) -> list[Any]:
            env = dict(zip(jaxpr.invars, args, strict=True))
            env |= {v: self.learned.const(i, n) for i, v in enumerate(jaxpr.constvars)}
            for position, eqn in enumerate(jaxpr.eqns):
                outs = self.learned.run(position, [_read(env, a) for a in eqn.invars], n)
                env.update(zip(eqn.outvars, outs, strict=True))
            return [_read(env, a) for a in jaxpr.outvars]

        found = jax.make_jaxpr(run)(*likes)
        return found if self.closed else compat.open_jaxpr(found)[0]


def _read(env: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, compat.Literal) else env[atom]


def learn(
    jaxprs: Sequence[Any],
    consts: Sequence[Sequence[Any]],
    lengths: Lengths,
    longest: Callable[[], Sequence[Any]],
) -> Learned:
    """What three flat jaxprs have in common as a function of T.

    ``consts``: of each. ``longest()``: the constants for as many tokens as there may be, looked at only if a
    constant's shape depends on T. Raises SplitError where the traces differ other than by sizes a + b·T.
    """
    found = Learned(jaxprs[0], lengths)
    try:
        _Comparison(found, jaxprs).all()
        found.consts = _consts(found, consts, longest)
    except _Differs as why:
        of = f"{lengths[0]}, {lengths[1]} and {lengths[2]}"
        raise SplitError(
            f"the model does something else for another number of tokens (traced for {of}): {why}"
        ) from None
    return found


class _Comparison:
    def __init__(self, found: Learned, jaxprs: Sequence[Any]) -> None:
        self.found, self.jaxprs = found, jaxprs
        self._at: compat.JaxprEqn | None = None  # what is being compared
        self.others: list[dict[Any, Any]] = [{}, {}]  # the first trace's variables -> the others'

    def _here(self) -> str:
        if self._at is None:
            return "its arguments or results"
        return f"{compat.where(self._at)} ({self._at.primitive.name})"

    def all(self) -> None:
        first, *others = self.jaxprs
        if len({len(j.eqns) for j in self.jaxprs}) > 1:
            self._say_where_eqns_part()
        self._bind((*first.constvars, *first.invars), [(*j.constvars, *j.invars) for j in others])
        for position, eqns in enumerate(zip(*(j.eqns for j in self.jaxprs), strict=True)):
            self._eqn(position, eqns)
        self._at = None
        for atoms in zip(*(j.outvars for j in self.jaxprs), strict=True):
            self._operand(atoms)

    def _say_where_eqns_part(self) -> None:
        for eqns in zip(*(j.eqns for j in self.jaxprs), strict=False):
            if len({e.primitive.name for e in eqns}) > 1:
                raise _Differs(
                    f"at {compat.where(eqns[0])} there is {' or '.join(e.primitive.name for e in eqns)}"
                )
        raise _Differs("it has more equations for some")

    def _bind(self, own: Sequence[Any], others: Sequence[Sequence[Any]]) -> None:
        for vs in zip(own, *others, strict=True):
            shapes = [v.aval.shape for v in vs]
            if len({len(s) for s in shapes}) > 1 or any(v.aval.dtype != vs[0].aval.dtype for v in vs[1:]):
                raise _Differs(f"at {self._here()}: {' or '.join(str(v.aval) for v in vs)}")
            self.found.shapes[vs[0]] = tuple(self._int(sizes) for sizes in zip(*shapes, strict=True))
            for env, v in zip(self.others, vs[1:], strict=True):
                env[vs[0]] = v

    def _eqn(self, position: int, eqns: Sequence[compat.JaxprEqn]) -> None:
        self._at = eqns[0]
        if len({e.primitive.name for e in eqns}) > 1:
            raise _Differs(f"at {self._here()} there is {' or '.join(e.primitive.name for e in eqns)}")
        for i, atoms in enumerate(zip(*(e.invars for e in eqns), strict=True)):
            size = self._operand(atoms)
            if isinstance(size, Count):
                self.found.literals[position, i] = size
        learned = {k: self._parameter([e.params[k] for e in eqns]) for k in eqns[0].params}
        changed = {k: v for k, v in learned.items() if v is not eqns[0].params[k]}
        if changed:
            self.found.params[position] = changed
        self._bind(eqns[0].outvars, [e.outvars for e in eqns[1:]])

    def _operand(self, atoms: Sequence[Any]) -> Count | None:
        first, *others = atoms
        if isinstance(first, compat.Literal):
            if not all(isinstance(a, compat.Literal) for a in others):
                raise _Differs(f"at {self._here()}")
            values = [np.asarray(a.val) for a in atoms]
            if all(np.array_equal(values[0], v, equal_nan=values[0].dtype.kind in "fc") for v in values[1:]):
                return None
            if values[0].ndim == 0 and values[0].dtype.kind in "iu":
                size = self._int([int(v) for v in values])
                return size if isinstance(size, Count) else None
            raise _Differs(
                f"a number at {self._here()} depends on how many tokens there are: "
                f"{[v.item() for v in values]}"
            )
        if any(env.get(first) is not a for env, a in zip(self.others, others, strict=True)):
            raise _Differs(f"at {self._here()}")
        return None

    def _parameter(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if all(v is first for v in values[1:]):
            return first
        if compat.is_jaxpr(first):
            return self._body(values)
        if isinstance(first, bool) or first is None or isinstance(first, str):
            pass
        elif isinstance(first, int | np.integer):
            size = self._int([int(v) for v in values])
            return first if not isinstance(size, Count) else size
        elif isinstance(first, tuple | list) and len({len(v) for v in values}) == 1:
            inner = [self._parameter(vs) for vs in zip(*values, strict=True)]
            if all(a is b for a, b in zip(inner, first, strict=True)):
                return first
            return type(first)(*inner) if hasattr(first, "_fields") else tuple(inner)
        elif isinstance(first, np.ndarray):
            if all(np.array_equal(first, v) for v in values[1:]):
                return first
            raise _Differs(f"at {self._here()}")
        elif is_dataclass(first) and all(type(v) is type(first) for v in values):
            names = [f.name for f in fields(first)]
            if all(all(_same(getattr(first, n), getattr(v, n)) for n in names) for v in values[1:]):
                return first
        elif callable(first) and all(type(v) is type(first) for v in values):
            return first  # a rule's own function, made anew in every trace
        if all(_same(first, v) for v in values[1:]):
            return first
        raise _Differs(f"at {self._here()}: {' or '.join(repr(v)[:60] for v in values)}")

    def _body(self, values: Sequence[Any]) -> Any:
        opened = [compat.open_jaxpr(v) for v in values]
        inner = Learned(opened[0][0], self.found.lengths)
        _Comparison(inner, [j for j, _ in opened]).all()

        def never() -> Sequence[Any]:
            raise _Differs(f"at {self._here()}: a constant inside")

        inner.consts = _consts(inner, [c for _, c in opened], never)
        varies = inner.params or inner.literals or any(map(inner.token_dims, inner.shapes))
        closed = values[0] is not opened[0][0]
        return _Body(inner, closed) if varies else values[0]

    def _int(self, values: Sequence[int]) -> Dim:
        x0, x1, x2 = values
        if x0 == x1 == x2:
            return x0
        t0, t1, t2 = self.found.lengths
        b, rest = divmod(x1 - x0, t1 - t0)
        a = x0 - b * t0
        if rest or a + b * t2 != x2:
            raise _Differs(
                f"at {self._here()}: {x0}, {x1} and {x2} for {t0}, {t1} and {t2} tokens is no a + b·T"
            )
        return Count(a, b)


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except ValueError:  # arrays
        return False


def _consts(
    found: Learned, consts: Sequence[Sequence[Any]], longest: Callable[[], Sequence[Any]]
) -> tuple[Any, ...]:
    values: list[Any] = []
    long: Sequence[Any] | None = None
    for i, (v, *of_each) in enumerate(zip(found.jaxpr.constvars, *consts, strict=True)):
        arrays = [x if _is_key(x) else np.asarray(x) for x in of_each]
        if not found.token_dims(v):
            if not all(a is arrays[0] or np.array_equal(arrays[0], a) for a in arrays[1:]):
                raise _Differs(f"a constant {v.aval} has other values")
            values.append(of_each[0])
            continue
        long = longest() if long is None else long
        table = Table(np.asarray(long[i]), found.shapes[v])
        for n, a in zip(found.lengths, arrays, strict=True):
            if not np.array_equal(table.at(n), a):
                raise _Differs(f"a constant {v.aval} for fewer tokens is not the beginning of one for more")
        values.append(table)
    return tuple(values)


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
