"""Which scope an instruction of a compiled program was traced in: ``slice.3.batch.0`` and the like, from its HLO text.

Pure text in, plain data out. Knows the names that ranks' programs give (`jaxlamina.ranks.layout.span`,
`jaxlamina.transports.SPAN`), and no JAX, no clock and no event.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["model", "attention", "exchange", "other", "bubble"]
KINDS: tuple[Kind, ...] = ("model", "attention", "exchange", "other", "bubble")

_KIND_OF: dict[str, Kind] = {"slice": "model", "attention": "attention"}
_SCOPE = re.compile(r"(?:^|/)(?:(slice|attention)\.(\d+)\.batch\.(\d+)|exchange)(?=/|$)")
_HEADER = re.compile(r"(?:ENTRY\s+)?%?([\w.\-]+)\s.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT\s+)?%?([\w.\-]+) = (.*)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(
    r"[,\s](?:calls|to_apply|body|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_COMPUTES = re.compile(r"\s(?:dot|fusion|custom-call|convolution|call)\(")
_FUSION = re.compile(r"\sfusion\(")
# Instructions of one slice or layer are within so many stretches between exchanges, or it is one of a function that was
# lowered once: it then has the names of its first call, whoever calls it.
_MOST_STRETCHES = 3


class Scope(NamedTuple):
    """What an operator is for. ``number``: of the slice or layer; -1 for exchanges, and for what has no scope ("other")."""

    kind: Kind
    number: int = -1
    batch: int = -1


EXCHANGE, OTHER = Scope("exchange"), Scope("other")


class _Line(NamedTuple):
    own: Scope | None
    is_fusion: bool
    called: tuple[str, ...]


def module_name(hlo: str) -> str:
    """The name that a program's events carry as their module."""
    found = re.match(r"HloModule ([\w.\-]+)", hlo)
    if not found:
        raise ValueError("the text must be of a compiled program: compiled.as_text() of a jitted function")
    return found[1]


def scope_in(op_name: str) -> Scope | None:
    """The innermost scope in a path such as ``jit(step)/slice.3.batch.0/dot_general``."""
    found = list(_SCOPE.finditer(op_name))
    if not found:
        return None
    last = found[-1]
    return Scope(_KIND_OF[last[1]], int(last[2]), int(last[3])) if last[1] else EXCHANGE


def scopes_of(hlo: str) -> dict[str, Scope]:
    """Instruction name -> scope, for all instructions that have one, whichever computation they are in.

    One without a scope in its own metadata has that of what it calls: a fusion the commonest in it, any other call the
    only one (what it calls has events of its own). ``ValueError`` if ``hlo`` is no HLO module.
    """
    module_name(hlo)
    computations: dict[str, dict[str, _Line]] = {}
    for name, line in _lines(hlo):
        here = computations.setdefault(name, {})
        if found := _INSTRUCTION.match(line):
            here[found[1]] = _read(found[2])
    known: dict[str, Counter[Scope]] = {}
    scopes = {}
    for lines in computations.values():
        for name, read in lines.items():
            scope = read.own or _of_called(read, computations, known)
            if scope is not None:
                scopes[name] = scope
    return scopes


def entry_of(hlo: str) -> list[str]:
    """The entry computation's instructions in the order in which they are run."""
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.MULTILINE)
    assert entry is not None, "no entry computation"
    found = (_INSTRUCTION.match(line) for computation, line in _lines(hlo) if computation == entry[1])
    return [x[1] for x in found if x]


def by_stretch(
    entry: Sequence[str], scopes: Mapping[str, Scope], exchanges: Container[str]
) -> dict[str, Scope]:
    """``scopes`` with those instructions put right that have the name of another slice or layer, since their function was
    lowered once for all: they are of what else is computed between the same two exchanges."""
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
    """Computing instructions that have no name at all: XLA made them out of others, as it turns products round on a CPU."""
    found = (_INSTRUCTION.match(line) for _, line in _lines(hlo))
    return {x[1] for x in found if x and _COMPUTES.search(x[2]) and not _OP_NAME.search(x[2])}


def by_neighbours(
    entry: Sequence[str], scopes: Mapping[str, Scope], exchanges: Container[str], without: Container[str]
) -> dict[str, Scope]:
    """``scopes``, and one for each of the entry's instructions in ``without`` that has none: that of the slice (of the layer,
    where there is no slice) at work before it since the last exchange, or else after it until the next."""
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
    within: dict[str, list[str]] = {}
    starts: dict[str, tuple[str, ...]] = {}
    for computation, line in _lines(hlo):
        if found := _INSTRUCTION.match(line):
            within.setdefault(computation, []).append(found[1])
            if " async-start(" in line:
                starts[found[1]] = _read(found[2]).called
    return {name: [x for c in called for x in within.get(c, ())] for name, called in starts.items()}


def _lines(hlo: str) -> Iterator[tuple[str, str]]:
    """(computation, line of it)."""
    current = None
    for line in hlo.splitlines():
        if line[:1].isspace():
            if current is not None:
                yield current, line
        else:
            found = None if line.startswith("HloModule") else _HEADER.match(line)
            current = found[1] if found else None


def _read(text: str) -> _Line:
    op_name = _OP_NAME.search(text)
    called = [
        name.strip().lstrip("%")
        for found in _CALLED.finditer(text)
        for name in found[1].strip("{}").split(",")
        if name.strip()
    ]
    return _Line(scope_in(op_name[1]) if op_name else None, bool(_FUSION.search(text)), tuple(called))


def _of_called(
    line: _Line, computations: dict[str, dict[str, _Line]], known: dict[str, Counter[Scope]]
) -> Scope | None:
    inside: Counter[Scope] = Counter()
    for name in line.called:
        inside += _inside(name, computations, known)
    if not inside or (len(inside) > 1 and not line.is_fusion):
        return None
    return max(inside, key=lambda scope: (inside[scope], scope))


def _inside(
    name: str, computations: dict[str, dict[str, _Line]], known: dict[str, Counter[Scope]]
) -> Counter[Scope]:
    """How many instructions of each scope a computation has, with all that it calls."""
    if name not in known:
        found: Counter[Scope] = Counter()
        for line in computations.get(name, {}).values():
            if line.own is not None:
                found[line.own] += 1
            for called in line.called:
                found += _inside(called, computations, known)
        known[name] = found
    return known[name]
