"""A split model as plain data for drawing: its operations for grouping, and which group runs in which slice.

The one place of the drawings that reads jaxprs. Knows nothing of layout or SVG.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pallas_kernels import compat
from splitter.block import variables
from splitter.draw.groups import Bundle, DrawnGroup, Flow, Operation, group_operations
from splitter.draw.text import human_bytes, shape_text
from splitter.slices import SplitModel

Q, KV = "q", "kv"


@dataclass(frozen=True)
class Value:
    """One array: its bytes, what it is, and a name for people."""

    size_bytes: int
    shape: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} {self.shape}, {human_bytes(self.size_bytes)}"


class ModelView:
    """The groups of a split model and the values between them, by number."""

    def __init__(self, model: SplitModel) -> None:
        self.model = model
        self.report = model.report()
        self.a = model.analysis
        self.jaxpr = model.traced.jaxpr
        self.eqns = model.traced.jaxpr.eqns
        self.number: dict[Any, int] = {}
        for v in (*self.jaxpr.constvars, *self.jaxpr.invars, *(w for e in self.eqns for w in e.outvars)):
            self.number.setdefault(v, len(self.number))
        self.variable = list(self.number)
        self.operands = [self._closure(r.private) for r in self.a.regions]
        self.flow = self._flow()
        self.groups: tuple[DrawnGroup, ...] = group_operations(self.flow)
        self.group_of = {v: g for g in range(len(self.groups)) for v in self.writes(g)}

    # --- what a drawing asks ---

    def part(self, i: int, part: str) -> list[int]:
        """Groups that run in one part of slice i, in order."""
        return [g for g, group in enumerate(self.groups) if (i, part) in group.place]

    def weights(self, i: int) -> set[str]:
        """Parameters that slice i reads."""
        return {w for part in (Q, KV) for g in self.part(i, part) for w in self.groups[g].weights}

    def reads(self, g: int) -> list[int]:
        own = self.writes(g)
        found = dict.fromkeys(v for i in self.groups[g].members for v in self.flow.operations[i].reads)
        return [v for v in found if v not in own]

    def writes(self, g: int) -> set[int]:
        return {v for i in self.groups[g].members for v in self.flow.operations[i].writes}

    def numbers(self, atoms: Iterable[Any]) -> list[int]:
        return [self.number[v] for v in variables(atoms)]

    def context(self, i: int) -> list[int]:
        """The values slice i starts from besides parameters and attention's output."""
        return self.numbers(self.model.slices[i].context_vars)

    def finals(self) -> list[tuple[int, str]]:
        """The last slice's outputs and their names."""
        traced = self.model.traced
        rows = zip(traced.jaxpr.outvars, self.a.kinds, traced.output_names, strict=True)
        return [(n, name) for v, kind, name in rows if kind == "final" for n in self.numbers([v])]

    def value(self, n: int) -> Value:
        v = self.variable[n]
        name = self.input_names.get(n)
        if name is None and n in self.group_of:
            name = self.groups[self.group_of[n]].title
        return Value(compat.nbytes(v.aval), shape_text(str(v.aval.dtype), v.aval.shape), name or "value")

    @cached_property
    def input_names(self) -> dict[int, str]:
        traced = self.model.traced
        return {
            self.number[v]: name
            for v, name in zip(self.jaxpr.invars[traced.n_params :], traced.input_names, strict=True)
        }

    @cached_property
    def programs(self) -> tuple[int, ...]:
        """For each slice the number of its program, by first appearance."""
        seen: dict[int, int] = {}
        return tuple(seen.setdefault(id(s.program), len(seen)) for s in self.model.slices)

    @cached_property
    def bytes_of_weights(self) -> dict[str, int]:
        traced = self.model.traced
        named = zip(traced.param_names, self.jaxpr.invars, strict=False)
        sizes = {name: compat.nbytes(v.aval) for name, v in named}
        for n, name in self.flow.weights.items():
            sizes.setdefault(name, compat.nbytes(self.variable[n].aval))
        return sizes

    def explain(self, g: int) -> str:
        """A group for hovering over: its parameters, its equations, and how often it runs."""
        group = self.groups[g]
        lines = [group.title + (f": {group.detail}" if group.detail else "")]
        for w in group.weights:
            lines.append(f"parameter {w}, {human_bytes(self.bytes_of_weights[w])}")
        shown = [self._equation(i) for i in group.members[:10]]
        more = len(group.members) - len(shown)
        lines += [*shown, *([f"… and {more} more equations"] if more else [])]
        if (times := len(group.place)) > 1:
            lines.append(f"cheap: computed again in {times} places rather than carried")
        return "\n".join(lines)

    def _equation(self, i: int) -> str:
        eqn = self.eqns[i]
        avals = [shape_text(str(v.aval.dtype), v.aval.shape) for v in eqn.outvars]
        stack = compat.name_stack(eqn)
        return f"{eqn.primitive.name} → {', '.join(avals)}" + (f"  ({stack})" if stack else "")

    # --- the flow ---

    def _closure(self, wanted: Sequence[Any]) -> set[int]:
        """Positions of all equations that `wanted` derives from, up to the attention operators."""
        found: set[int] = set()
        stack = variables(wanted)
        while stack:
            position = self.a.producer.get(stack.pop())
            if position is None or position in found or position in self.a.in_region:
                continue
            found.add(position)
            stack.extend(variables(self.eqns[position].invars))
        return found

    def _places(self) -> list[frozenset[tuple[int, str]]]:
        places: list[set[tuple[int, str]]] = [set() for _ in self.eqns]
        for s in self.model.slices:
            for k, position in enumerate(s.eqn_positions):
                places[position].add((s.index, Q if k < s.n_q_eqns else KV))
        return [frozenset(p) for p in places]

    def _bundles(self, places: Sequence[frozenset[Any]]) -> dict[int, Bundle]:
        """What is not part of a slice, by what it is for; the last of these that applies."""
        sites: dict[int, tuple[int, ...]] = {}
        for i, positions in enumerate(self.operands):
            for p in positions:
                sites[p] = (*sites.get(p, ()), i)
        outputs = list(zip(self.jaxpr.outvars, self.a.kinds, strict=True))
        loaded = self._closure([v for s in self.model.slices for v in s.param_vars])
        aux, state = (self._closure([v for v, k in outputs if k == kind]) for kind in ("aux", "state"))
        masks = "from the inputs: masks, positions, caches"
        bundle: dict[int, Bundle] = {}
        for positions, title in (
            (set(range(len(self.eqns))), ("unused", "Unused", "no output needs these")),
            (state, ("state", "Attention's state", "outputs made of the updated caches")),
            (aux, ("aux", "Other outputs", "that depend on no attention")),
            (loaded, ("load", "Views of weights", "taken once, at load time")),
        ):
            bundle |= {p: Bundle(*title) for p in positions if not places[p]}
        bundle |= {p: Bundle("operands", "Own operands", masks, i) for p, i in sites.items() if not places[p]}
        sites_of = self.a.in_region.items()
        return bundle | {
            p: Bundle("attention", "Attention", self.model.sites[i].name, i) for p, i in sites_of
        }

    def _flow(self) -> Flow:
        places = self._places()
        bundles = self._bundles(places)
        operations = tuple(
            Operation(
                name=eqn.primitive.name,
                reads=tuple(self.numbers(eqn.invars)),
                writes=tuple(self.number[v] for v in eqn.outvars),
                place=places[p],
                scope=compat.name_stack(eqn),
                bundle=bundles.get(p),
            )
            for p, eqn in enumerate(self.eqns)
        )
        weights = self._weights()
        free, touched = set(), set(weights)
        for v, n in self.number.items():
            d = self.a.depends.get(v)
            if d is None or not (d.inputs or d.level >= 0 or d.state):
                free.add(n)
                if d is not None and d.params:
                    touched.add(n)
        for op in operations:
            if touched & set(op.reads):
                touched.update(op.writes)
        rest = [(v, n) for v, n in self.number.items() if n not in touched | free]
        given = frozenset(n for v, n in rest if self.a.depends[v].level < 0)
        outputs = frozenset(self.numbers(self.jaxpr.outvars))
        return Flow(operations, weights, frozenset(free), given, outputs)

    def _weights(self) -> dict[int, str]:
        """Value -> name of the parameter it is, or is a view of: `params['layers']['q'][3]`."""
        traced = self.model.traced
        names = {
            self.number[v]: name
            for v, name in zip(self.jaxpr.invars[: traced.n_params], traced.param_names, strict=True)
        }
        if not traced.n_params:  # a model whose weights are closed over
            matrices = [v for v in self.jaxpr.constvars if len(v.aval.shape) > 1]
            names = {self.number[v]: f"constant {k}" for k, v in enumerate(matrices)}
        for eqn in self.eqns:
            if not eqn.invars or isinstance(eqn.invars[0], compat.Literal):
                continue
            read = self.number[eqn.invars[0]]
            if read in names and eqn.outvars[0] in self.a.view:
                starts = eqn.params.get("start_indices")
                is_part = starts and eqn.invars[0].aval.shape != eqn.outvars[0].aval.shape
                names[self.number[eqn.outvars[0]]] = names[read] + (f"[{starts[0]}]" if is_part else "")
        return names
