"""The parts of a slice, as blocks of a flat jaxpr's equations, and what makes two blocks equal.

A part is a plain Python function of tuples of arrays, so a caller may jit it alone, with its neighbours, or
as part of a whole step. Knows nothing of cuts: it is told which equations to run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat
from splitter.block import Block, Rule, variables

Arrays = tuple[Any, ...]
_NO_RULES: Mapping[str, Rule] = MappingProxyType({})


def canonical(*blocks: Block, extra: Hashable = ()) -> str:
    """A fingerprint that two sequences of blocks share when they differ only in the names of their variables.

    Covers operators, their parameters, literals, shapes, dtypes, and the order of arguments and results.
    """
    names: dict[Any, int] = {}

    def atom(a: Any) -> Hashable:
        if isinstance(a, compat.Literal):
            value = np.asarray(a.val) if jnp.isscalar(a.val) or isinstance(a.val, np.ndarray) else a.val
            return ("literal", _constant(value), _text(a.aval))
        return (names.setdefault(a, len(names)), _text(a.aval))

    parts: list[Hashable] = [extra]
    for block in blocks:
        parts.append(tuple(atom(a) for a in block.invars))
        for eqn in block.eqns:
            parts.append(
                (
                    eqn.primitive.name,
                    tuple(atom(a) for a in eqn.invars),
                    tuple(atom(a) for a in eqn.outvars),
                    tuple((k, _parameter(v)) for k, v in sorted(eqn.params.items())),
                )
            )
        parts.append(tuple(atom(a) for a in block.outvars))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# A model has thousands of values of a few dozen shapes.
_text = lru_cache(maxsize=4096)(str)


def _parameter(value: Any) -> Hashable:
    """An equation's parameter as something that prints the same exactly when it means the same."""
    if compat.is_jaxpr(value):
        inner, consts = compat.open_jaxpr(value)
        return ("jaxpr", canonical(Block.of(inner)), tuple(_constant(c) for c in consts))
    if isinstance(value, tuple | list):
        return tuple(_parameter(v) for v in value)
    if isinstance(value, np.ndarray):
        return _constant(value)
    if callable(value) and not isinstance(value, type):
        return ("object", id(value))  # no telling what it does: equal only to itself
    return repr(value)


def _constant(value: Any) -> Hashable:
    try:
        array = np.asarray(value)
    except TypeError:  # e.g. a typed PRNG key
        return ("object", id(value))
    return (str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest())


class SliceProgram:
    """The code of a slice, shared by all slices that are the same but for their parameters.

    Every slice but the last has a `q_part` and a `kv_part`; the last has `final`. `q_part` computes q and
    only what q needs, so that "send q" can come between the two (Lamina 2025, §4.2.2). ``rules``: by a
    primitive's name, how its equations are run, where only the caller knows that.
    """

    def __init__(
        self,
        n_params: int,
        first: Block,
        second: Block | None,
        *,
        tied: frozenset[int] = frozenset(),
        tie_outputs: bool = False,
        unflatten: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.n_params = n_params
        self._first, self._second = first, second
        self._tied, self._tie_outputs = tied, tie_outputs
        self._unflatten = unflatten

    def q_part(
        self,
        params: Arrays,
        context: Arrays,
        attention_out: Any | None,
        rules: Mapping[str, Rule] = _NO_RULES,
    ) -> tuple[Any, Arrays]:
        """`(q, rest)` from the slice's parameters, its context and the last attention's output.

        attention_out is None for slice 0, whose context is the model's inputs. `rest` is what `kv_part` goes
        on from.
        """
        q, *rest = self._first(self._arguments(params, context, attention_out), rules)
        return q, tuple(rest)

    def q_needs(self, i: int) -> bool:
        """Whether q depends on argument ``i`` of `q_part`, parameters, context and attention output in a row
        (-1: that)."""
        wanted = set(variables(self._first.outvars[:1]))
        for eqn in reversed(self._first.eqns):
            if wanted & set(eqn.outvars):
                wanted.update(variables(eqn.invars))
        return self._first.invars[i] in wanted

    def kv_part(
        self,
        params: Arrays,
        rest: Arrays,
        tie: Any | None = None,
        rules: Mapping[str, Rule] = _NO_RULES,
    ) -> tuple[Any, Any, Arrays]:
        """`(k, v, context)`, the context being the next slice's.

        tie: what "send q" returned, a scalar that is 0 when the program runs, or None. k and v are made to
        depend on it: XLA keeps no other order than that of data, and would put the K and V products before
        the send.
        """
        assert self._second is not None, "the last slice has no kv_part"
        rest = tuple(_add_tie(x, tie) if i in self._tied else x for i, x in enumerate(rest))
        k, v, *context = self._second((*params, *rest), rules)
        if self._tie_outputs:
            k, v = _add_tie(k, tie), _add_tie(v, tie)
        return k, v, tuple(context)

    def final(
        self, params: Arrays, context: Arrays, attention_out: Any, rules: Mapping[str, Rule] = _NO_RULES
    ) -> Any:
        """The model's outputs, in their own structure; None for those that come from elsewhere
        (`merge_outputs`)."""
        assert self._unflatten is not None, "only the last slice has a final part"
        return self._unflatten(self._first(self._arguments(params, context, attention_out), rules))

    @staticmethod
    def _arguments(params: Arrays, context: Arrays, attention_out: Any | None) -> Arrays:
        return (*params, *context) if attention_out is None else (*params, *context, attention_out)


def _add_tie(x: Any, tie: Any | None) -> Any:
    """`x` unchanged in value, but dependent on `tie`: a barrier would be gone when XLA schedules."""
    return x if tie is None else x + jnp.asarray(tie).astype(x.dtype)


def first_use(eqns: Iterable[compat.JaxprEqn], outvars: Iterable[Any]) -> list[Any]:
    """Variables in the order in which equations, then results, read them."""
    order: dict[Any, None] = {}
    for eqn in eqns:
        order.update(dict.fromkeys(variables(eqn.invars)))
    order.update(dict.fromkeys(variables(outvars)))
    return list(order)
