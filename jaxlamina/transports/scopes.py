"""Which scope an instruction of a compiled program was traced in: ``slice.3.batch.0`` and the like, from its
HLO text.

Pure text in, plain data out. Knows the names that ranks' programs give
(`jaxlamina.ranks.cluster_layout.scope`, `jaxlamina.transports.SPAN`), and no JAX, no clock and no event.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Literal, NamedTuple

from jaxlamina.transports.hlo import Instruction, Module, read_module

Kind = Literal["model", "attention", "exchange", "other", "bubble"]
KINDS: tuple[Kind, ...] = ("model", "attention", "exchange", "other", "bubble")

_KIND_OF: dict[str, Kind] = {"slice": "model", "attention": "attention"}
_SCOPE = re.compile(r"(?:^|/)(?:(slice|attention)\.(\d+)\.batch\.(\d+)|exchange)(?=/|$)")
_CALLED = ("calls", "to_apply", "body", "branch_computations", "called_computations")
_COMPUTES = {"dot", "fusion", "custom-call", "convolution", "call"}
# Instructions of one slice or layer are within so many stretches between exchanges, or it is one of a
# function that was lowered once: it then has the names of its first call, whoever calls it.
_MOST_STRETCHES = 3


class Scope(NamedTuple):
    """What an operator is for. ``number``: of the slice or layer; -1 for exchanges, and for what has no scope
    ("other")."""

    kind: Kind
    number: int = -1
    batch: int = -1


EXCHANGE, OTHER = Scope("exchange"), Scope("other")


def module_name(hlo: str) -> str:
    """The name that a program's events carry as their module."""
    return read_module(hlo).name


def scope_in(op_name: str) -> Scope | None:
    """The innermost scope in a path such as ``jit(step)/slice.3.batch.0/dot_general``."""
    found = list(_SCOPE.finditer(op_name))
    if not found:
        return None
    last = found[-1]
    return Scope(_KIND_OF[last[1]], int(last[2]), int(last[3])) if last[1] else EXCHANGE


def scopes_of(hlo: str) -> dict[str, Scope]:
    """Instruction name -> scope, for all instructions that have one, whichever computation they are in.

    One without a scope in its own metadata has that of what it calls: a fusion the commonest in it, any other
    call the only one (what it calls has events of its own). ``ValueError`` if ``hlo`` is no HLO module.
    """
    module = read_module(hlo)
    known: dict[str, Counter[Scope]] = {}
    return {
        i.name: scope
        for i in module.instructions()
        if (scope := scope_in(i.op_name or "") or _of_called(i, module, known)) is not None
    }


def entry_of(hlo: str) -> list[str]:
    """The entry computation's instructions in the order in which they are run."""
    module = read_module(hlo)
    return [i.name for i in module.computations[module.entry]]


def by_stretch(
    entry: Sequence[str], scopes: Mapping[str, Scope], exchanges: Container[str]
) -> dict[str, Scope]:
    """``scopes`` with those instructions put right that have the name of another slice or layer, since their
    function was lowered once for all: they are of what else is computed between the same two exchanges."""
    stretches = [[n for n in names if n in scopes] for names in _stretches(entry, exchanges)]
    spread = Counter(scope for names in stretches for scope in {scopes[n] for n in names})
    found = dict(scopes)
    for names in stretches:
        here = {scopes[n] for n in names}
        for n in names:
            if spread[scopes[n]] > _MOST_STRETCHES:
                alike = (scope for scope in here if scope.kind == scopes[n].kind)
                found[n] = min(alike, key=lambda scope: (spread[scope], scope))
    return found


def nameless(hlo: str) -> set[str]:
    """Computing instructions that have no name at all: XLA made them out of others, as it turns products
    round on a CPU."""
    return {i.name for i in read_module(hlo).instructions() if i.opcode in _COMPUTES and i.op_name is None}


def by_neighbours(
    entry: Sequence[str], scopes: Mapping[str, Scope], exchanges: Container[str], without: Container[str]
) -> dict[str, Scope]:
    """``scopes``, and one for each of the entry's instructions in ``without`` that has none: that of the
    slice (of the layer, where there is no slice) at work before it since the last exchange, or else after it
    until the next."""
    found = dict(scopes)
    for names in _stretches(entry, exchanges):
        kinds = {scopes[n].kind for n in names if n in scopes}
        kind = "model" if "model" in kinds else "attention"
        here = [scopes[n] for n in names if n in scopes and scopes[n].kind == kind]
        at = here[0] if here else None
        for n in names:
            if n in scopes:
                at = scopes[n] if scopes[n].kind == kind else at
            elif n in without and at is not None:
                found[n] = at
    return found


def _stretches(entry: Sequence[str], exchanges: Container[str]) -> list[list[str]]:
    """The entry's instructions between exchanges."""
    found: list[list[str]] = [[]]
    for name in entry:
        if name in exchanges:
            found.append([])
        else:
            found[-1].append(name)
    return found


def started_by(hlo: str) -> dict[str, list[str]]:
    """What each ``async-start`` runs: that is one event, of the start's name."""
    module = read_module(hlo)
    return {
        i.name: [x.name for name in i.called(*_CALLED) for x in module.computations.get(name, ())]
        for i in module.instructions()
        if i.opcode == "async-start"
    }


def _of_called(i: Instruction, module: Module, known: dict[str, Counter[Scope]]) -> Scope | None:
    inside: Counter[Scope] = Counter()
    for name in i.called(*_CALLED):
        inside += _inside(name, module, known)
    if not inside or (len(inside) > 1 and i.opcode != "fusion"):
        return None
    return max(inside, key=lambda scope: (inside[scope], scope))


def _inside(name: str, module: Module, known: dict[str, Counter[Scope]]) -> Counter[Scope]:
    """How many instructions of each scope a computation has, with all that it calls."""
    if name not in known:
        found: Counter[Scope] = Counter()
        for i in module.computations.get(name, ()):
            if (own := scope_in(i.op_name or "")) is not None:
                found[own] += 1
            for called in i.called(*_CALLED):
                found += _inside(called, module, known)
        known[name] = found
    return known[name]
