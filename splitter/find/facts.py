"""What each value of a learned jaxpr derives from, and how its elements lie: the facts that matching acts
on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Flag
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat
from splitter.block import variables
from splitter.find.lengths import Learned


class From(Flag):
    """What a value is computed from; of nothing: a constant, or a token's place in the row. OUTSIDE: of what
    the body of a scan, a while or a cond is given."""

    NOTHING = 0
    TOKENS = 1
    PARAMS = 2
    POSITIONS = 4
    OUTSIDE = 8


@dataclass
class Facts:
    """Of the equations that the outputs need: who makes a variable, who reads it, what it derives from."""

    learned: Learned
    n_params: int
    max_len: int  # tokens that a row may have at most
    live: frozenset[int] = frozenset()
    producer: dict[Any, int] = field(default_factory=dict)
    readers: dict[Any, list[int]] = field(default_factory=dict)
    source: dict[Any, From] = field(default_factory=dict)
    of_row: set[Any] = field(default_factory=set)  # made of tokens' places, or of how many there are

    @classmethod
    def of(cls, learned: Learned, n_params: int, max_len: int) -> Facts:
        sources = [From.PARAMS] * n_params + [From.TOKENS, From.POSITIONS]
        return cls.of_sources(learned, sources, max_len, n_params)

    @classmethod
    def of_sources(cls, learned: Learned, sources: Sequence[From], max_len: int, n_params: int = 0) -> Facts:
        """``sources``: what each argument is computed from."""
        jaxpr = learned.jaxpr
        facts = cls(learned, n_params, max_len)
        for position, eqn in enumerate(jaxpr.eqns):
            facts.producer.update(dict.fromkeys(eqn.outvars, position))
        facts.live = frozenset(facts.needed(jaxpr.outvars))
        facts.source.update(dict.fromkeys(jaxpr.constvars, From.NOTHING))
        facts.source.update(zip(jaxpr.invars, sources, strict=True))
        facts.of_row = {v for v in (*jaxpr.constvars, *jaxpr.invars[-1:]) if learned.token_dims(v)}
        counted = {*learned.params, *(position for position, _ in learned.literals)}
        for position in sorted(facts.live):
            eqn = jaxpr.eqns[position]
            if position in counted or not facts.of_row.isdisjoint(variables(eqn.invars)):
                facts.of_row.update(eqn.outvars)
            for v in dict.fromkeys(variables(eqn.invars)):
                facts.readers.setdefault(v, []).append(position)
            of_all = From.NOTHING
            for v in variables(eqn.invars):
                of_all |= facts.source[v]
            facts.source.update(dict.fromkeys(eqn.outvars, of_all))
        return facts

    @property
    def eqns(self) -> Sequence[compat.JaxprEqn]:
        return self.learned.jaxpr.eqns

    def needed(self, wanted: Iterable[Any], stop: Collection[Any] = ()) -> list[int]:
        """Positions of the equations that ``wanted`` needs, in order, not beyond ``stop``."""
        found: set[int] = set()
        stack = [v for v in variables(wanted) if v not in stop]
        while stack:
            position = self.producer.get(stack.pop())
            if position is not None and position not in found:
                found.add(position)
                stack.extend(v for v in variables(self.learned.jaxpr.eqns[position].invars) if v not in stop)
        return sorted(found)

    def of_tokens(self, atom: Any) -> bool:
        return not isinstance(atom, compat.Literal) and From.TOKENS in self.source[atom]

    def only_positions(self, atom: Any) -> bool:
        """Whether a value is known from the tokens' places alone: no token and no parameter changes it."""
        others = From.TOKENS | From.PARAMS | From.OUTSIDE
        return isinstance(atom, compat.Literal) or not self.source[atom] & others

    def source_of(self, atom: Any) -> From:
        return From.NOTHING if isinstance(atom, compat.Literal) else self.source[atom]

    def made_at(self, v: Any) -> str:
        """Where in the user's code, for messages."""
        return compat.where(self.eqns[self.producer[v]]) if v in self.producer else "the function's arguments"


class DotDims(NamedTuple):
    """One operand's dimensions in a `dot_general`."""

    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]


def dot_dims(eqn: compat.JaxprEqn) -> tuple[DotDims, DotDims]:
    contracted, batch = eqn.params["dimension_numbers"]
    both = []
    for side in (0, 1):
        taken = {*map(int, contracted[side]), *map(int, batch[side])}
        free = tuple(d for d in range(eqn.invars[side].aval.ndim) if d not in taken)  # type: ignore[attr-defined]
        both.append(DotDims(tuple(map(int, batch[side])), tuple(map(int, contracted[side])), free))
    return both[0], both[1]


# --- Views: equations that only move elements ---


@dataclass(frozen=True)
class View:
    """A variable as ``[T, …]``: reshaped to ``sizes``, of which the one that is None is T, and its dimensions
    then in the order ``order``; ``shape`` is that of the result, without T."""

    source: Any
    sizes: tuple[int | None, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, x: Any, n: int) -> Any:
        """``x`` like ``source`` for n tokens -> ``[n, *shape]``."""
        return (
            x.reshape([n if s is None else s for s in self.sizes])
            .transpose(self.order)
            .reshape(n, *self.shape)
        )

    def back(self, y: Any, n: int, shape: tuple[int, ...]) -> Any:
        """``[n, *self.shape]`` as ``source``, which has ``shape``."""
        sizes = [n if self.sizes[d] is None else self.sizes[d] for d in self.order]
        return y.reshape(sizes).transpose(np.argsort(self.order)).reshape(shape)


def view_of(source: Any, labels: np.ndarray, shape: tuple[int, ...]) -> View | None:
    """The view whose element ``[t, …]`` is the source's element ``labels[t, …]``, numbered row by row, as
    ``[T, *shape]``; None where no reshape and transpose do that."""
    if labels.size != prod(source.aval.shape) or not labels.size:
        return None
    dims = [d for d in range(labels.ndim) if labels.shape[d] > 1]
    origin = labels.ravel()[0]
    strides = {d: int(np.take(labels, 1, axis=d).ravel()[0] - origin) for d in dims}
    expected = np.zeros(labels.shape, np.int64) + origin
    for d in dims:
        along = [1] * labels.ndim
        along[d] = -1
        expected = expected + strides[d] * np.arange(labels.shape[d]).reshape(along)
    if origin or not np.array_equal(expected, labels):
        return None
    outer_first = sorted(dims, key=lambda d: -strides[d])
    size = 1
    for d in reversed(outer_first):
        if strides[d] != size:
            return None
        size *= labels.shape[d]
    sizes = tuple(None if d == 0 else labels.shape[d] for d in outer_first)
    order = tuple(outer_first.index(d) for d in dims)
    return View(source, sizes, order, tuple(shape)) if 0 in dims else None


def moved(eqn: compat.JaxprEqn, x: np.ndarray) -> np.ndarray | None:
    """What an equation that only moves elements makes of an array like its first operand; None: it does
    more."""
    p = eqn.params
    match eqn.primitive.name:
        case "reshape" if p.get("dimensions") is None:
            return x.reshape(p["new_sizes"])
        case "transpose":
            return x.transpose(p["permutation"])
        case "squeeze":
            return x.reshape(compat.like_of(eqn.outvars[0]).shape)
        case "broadcast_in_dim":
            shape = [1] * len(p["shape"])
            for source, target in enumerate(p["broadcast_dimensions"]):
                shape[int(target)] = x.shape[source]
            return np.broadcast_to(x.reshape(shape), p["shape"])
        case "expand_dims":
            return x.reshape(compat.like_of(eqn.outvars[0]).shape)
        case "copy" | "copy_p" | "stop_gradient" | "optimization_barrier" | "sharding_constraint":
            return x
        case "rev":
            return np.flip(x, p["dimensions"])
        case "slice":
            steps = p["strides"] or [1] * x.ndim
            cut = zip(p["start_indices"], p["limit_indices"], steps, strict=True)
            return x[tuple(slice(*bounds) for bounds in cut)]
        case "convert_element_type":
            return x
    return None


def widens(eqn: compat.JaxprEqn) -> bool:
    """Whether an equation is a cast that loses nothing, or no cast."""
    if eqn.primitive.name != "convert_element_type":
        return True
    before, after = (compat.like_of(v).dtype for v in (eqn.invars[0], eqn.outvars[0]))
    return bool(np.dtype(before).kind in "fV" and np.dtype(before).itemsize <= np.dtype(after).itemsize)


# --- Numbers: what values are, for so many tokens ---


def computed(
    facts: Facts, wanted: Sequence[Any], n: int, given: Sequence[Any] = (), *, in_float32: bool = False
) -> Callable[..., list[Any]]:
    """A function of the row's positions ``[1, n]`` and the values of ``given`` that computes ``wanted`` for n
    tokens."""
    jaxpr = facts.learned.jaxpr
    positions = facts.needed(wanted, given)

    def run(row: Any, *values: Any) -> list[Any]:
        env = {v: facts.learned.const(i, n) for i, v in enumerate(jaxpr.constvars)}
        env[jaxpr.invars[-1]] = row
        env.update(zip(given, values, strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, compat.Literal):
                return env[atom]
            return _float32(np.asarray(atom.val)) if in_float32 else atom.val

        for p in positions:
            args = [read(a) for a in facts.eqns[p].invars]
            outs = facts.learned.run(p, args, n, _float32_parameters if in_float32 else None)
            env.update(zip(facts.eqns[p].outvars, outs, strict=True))
        return [read(a) for a in wanted]

    return run


def _float32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if _is_small_float(x.dtype) else x


def _is_small_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4)


def _float32_parameters(params: dict[str, Any]) -> dict[str, Any]:
    """An equation's parameters with float32 for smaller floats, so that what is proven is not its
    rounding."""

    def of(value: Any) -> Any:
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(map(of, value))
        is_type = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
        return np.dtype(np.float32) if is_type and _is_small_float(value) else value

    return {k: of(v) for k, v in params.items()}
