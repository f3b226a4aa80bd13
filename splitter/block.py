"""Blocks of a jaxpr's equations, and the one way to run them: each equation by the rule of its primitive, or
as it is.

Knows nothing of cuts, and not what rules are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax

from pallas_kernels import compat

Read = Callable[[Any], Any]
"""The value of an equation's operand, a literal or a variable that is computed already."""
Rule = Callable[[compat.JaxprEqn, Read], Sequence[Any]]
"""An equation's results."""


def as_it_is(eqn: compat.JaxprEqn, read: Read) -> list[Any]:
    """The rule of an equation that has none of its own."""
    return compat.bind_eqn(eqn, [read(a) for a in eqn.invars])


@dataclass(frozen=True)
class Block:
    """Equations in order, the variables they start from and those they yield."""

    invars: tuple[Any, ...]
    eqns: tuple[compat.JaxprEqn, ...]
    outvars: tuple[Any, ...]

    @classmethod
    def of(cls, jaxpr: Any) -> Block:
        """All of a jaxpr, from its constants and then its arguments."""
        return cls((*jaxpr.constvars, *jaxpr.invars), tuple(jaxpr.eqns), tuple(jaxpr.outvars))

    def __call__(
        self,
        args: Sequence[Any],
        rules: Mapping[str, Rule] = MappingProxyType({}),
        otherwise: Rule = as_it_is,
    ) -> list[Any]:
        """The values of ``outvars``. ``rules``: by a primitive's name; equations of other primitives go by
        ``otherwise``."""
        env = dict(zip(self.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, compat.Literal) else env[atom]

        for eqn in self.eqns:
            outs = rules.get(eqn.primitive.name, otherwise)(eqn, read)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in self.outvars]


def together(
    groups: Iterable[Sequence[compat.JaxprEqn]],
    rule: Callable[[Sequence[compat.JaxprEqn], Read], Sequence[Any]],
) -> Rule:
    """A rule that runs each group of equations where its first one is; equations of no group are run as they
    are.

    ``rule(group, read)`` gives one result per equation. What a group reads must be there before its first
    equation.
    """
    group_of = {eqn.outvars[0]: group for group in groups for eqn in group}
    made: dict[Any, Any] = {}

    def run(eqn: compat.JaxprEqn, read: Read) -> Sequence[Any]:
        [v] = eqn.outvars
        if v not in group_of:
            return as_it_is(eqn, read)
        if v not in made:
            group = group_of[v]
            made.update(zip((e.outvars[0] for e in group), rule(group, read), strict=True))
        return [made.pop(v)]

    return run


def run_by_rules(
    function: Callable[..., Any],
    like: Sequence[Any],
    args: Sequence[Any],
    rules_of: Callable[[Any], Mapping[str, Rule]],
) -> Any:
    """``function``, traced for arguments like ``like``, of ``args``; ``rules_of`` its jaxpr are the rules."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*like)
    jaxpr, consts = compat.open_jaxpr(closed)
    outs = Block.of(jaxpr)([*consts, *jax.tree.leaves(args)], rules_of(jaxpr))
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those that are no literals."""
    return [a for a in atoms if not isinstance(a, compat.Literal)]
