"""What each equation of a traced model depends on, and where the attention operators take their operands
from.

The analysis returns facts; `slices` acts on them. A cache write in front of a recognised
`jax.nn.dot_product_attention` is folded into the operator here, so that the cut ships the new keys and values
and not the whole cache. Knows nothing of devices or of how slices run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pallas_kernels import compat
from pallas_kernels.compat import Atom, Var
from splitter.block import variables
from splitter.mincut import CutGraph, Op
from splitter.operator import attention_p
from splitter.trace import SplitError, Traced

# Operators that only move or relabel elements. A cache write may sit behind some of them.
_LAYOUT = frozenset(
    {
        "transpose",
        "reshape",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "rev",
    }
)
_CACHE_WRITES = {"dynamic_update_slice": 1, "scatter": 2}  # position of the new values among the operands

# Views of stacked weights: done once at load time. Anything else (a cast, a transpose) would copy the
# weights.
_VIEWS = frozenset({"slice", "squeeze", "reshape"})

# Cheap to run again in a slice instead of carrying the result: no products, gathers, sorts or control flow.
_CHEAP = _LAYOUT | frozenset(
    [
        "abs",
        "add",
        "add_any",
        "and",
        "atan2",
        "ceil",
        "clamp",
        "concatenate",
        "cos",
        "cosh",
        "div",
        "eq",
        "erf",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "iota",
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
        "not",
        "nextafter",
        "or",
        "pad",
        "pow",
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
        "slice",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
        "reduce_max",
        "reduce_min",
        "reduce_sum",
        "argmax",
        "cumsum",
    ]
)


@dataclass(frozen=True)
class Dependence:
    """What a value derives from: parameters, inputs, attention outputs up to `level`, attention-side
    state."""

    params: bool = False
    inputs: bool = False
    level: int = -1
    state: bool = False

    def __or__(self, other: Dependence) -> Dependence:
        return Dependence(
            self.params or other.params,
            self.inputs or other.inputs,
            max(self.level, other.level),
            self.state or other.state,
        )


@dataclass(frozen=True)
class SiteRegion:
    """One attention operator among the equations.

    region: positions of the equations that make it up: cache writes and layout changes folded in, the
    operator last. q, k, v: the variables it is sent. private: operands the attention side has or derives from
    inputs (cache, masks). state: results besides the output that others read (the updated cache).
    """

    position: int
    region: tuple[int, ...]
    q: Atom
    k: Atom
    v: Atom
    out: Var
    private: tuple[Var, ...]
    state: tuple[Var, ...]


@dataclass
class Analysis:
    """The facts about a traced model that cutting and slicing need; see the field comments."""

    traced: Traced
    producer: dict[Var, int] = field(default_factory=dict)  # variable -> its equation's position
    consumers: dict[Var, list[int]] = field(default_factory=dict)
    depends: dict[Var, Dependence] = field(default_factory=dict)
    regions: list[SiteRegion] = field(default_factory=list)
    in_region: dict[int, int] = field(default_factory=dict)  # equation position -> site number
    view: set[Var] = field(default_factory=set)  # variables that are views of parameters
    cheap: set[int] = field(default_factory=set)  # positions of recomputable equations
    kinds: tuple[str, ...] = ()  # per output: "final", "aux" or "state"

    @property
    def eqns(self) -> Sequence[compat.JaxprEqn]:
        return self.traced.jaxpr.eqns

    def dep(self, atom: Atom) -> Dependence:
        return Dependence() if isinstance(atom, compat.Literal) else self.depends[atom]


def analyse(traced: Traced, *, recompute: bool = True) -> Analysis:
    """Find dependences, attention regions and recomputable equations of a traced model.

    recompute: whether cheap values that derive from inputs and parameters alone may be computed again in a
    slice instead of being carried.

    Raises:
      SplitError: an attention operator's mask, bias or cache depends on weights or activations, or a result
      mixes
        attention outputs with attention-side state.
    """
    a = Analysis(traced)
    jaxpr = traced.jaxpr
    for position, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            a.producer[v] = position
        for v in set(variables(eqn.invars)):
            a.consumers.setdefault(v, []).append(position)
    writes = [_folded(a, site) for site in traced.sites]
    for number, (region, *_) in enumerate(writes):
        a.in_region.update(dict.fromkeys(region, number))
    _flow(a)
    outputs = set(variables(jaxpr.outvars))
    for number, (site, folded) in enumerate(zip(traced.sites, writes, strict=True)):
        a.regions.append(_region(a, number, site, folded, outputs))
    if recompute:
        _mark_cheap(a)
    a.kinds = tuple(
        _output_kind(a, v, name) for v, name in zip(jaxpr.outvars, traced.output_names, strict=True)
    )
    return a


Folded = tuple[tuple[int, ...], Atom, Atom, Atom]  # the equations of a site, and its q, new k, new v


def _folded(a: Analysis, site: int) -> Folded:
    """The equations folded into a site, and its q, new k, new v."""
    eqn = a.eqns[site]
    q, k, v = eqn.invars[:3]
    region = {site}
    if eqn.primitive is not attention_p:
        new = []
        for operand in (k, v):
            chain, fresh = _cache_write(a, operand)
            region.update(chain)
            new.append(fresh)
        k, v = new
    return tuple(sorted(region)), q, k, v


def _cache_write(a: Analysis, operand: Atom) -> tuple[list[int], Atom]:
    """Walk up from a key or value operand to a write into a cache; what was written, or the operand
    itself."""
    chain, v = [], operand
    while not isinstance(v, compat.Literal) and v in a.producer:
        position = a.producer[v]
        eqn = a.eqns[position]
        name = eqn.primitive.name
        chain.append(position)
        if name in _CACHE_WRITES and _is_given(a, eqn.invars[0]):
            return chain, eqn.invars[_CACHE_WRITES[name]]
        if name not in _LAYOUT:
            break
        v = eqn.invars[0]
    return [], operand


def _is_given(a: Analysis, atom: Atom) -> bool:
    """Whether a value is an input of the model, perhaps in another layout; not a parameter, not computed."""
    v = atom
    while not isinstance(v, compat.Literal) and v in a.producer:
        eqn = a.eqns[a.producer[v]]
        if eqn.primitive.name not in _LAYOUT | _VIEWS:
            return False
        v = eqn.invars[0]
    return v in set(a.traced.jaxpr.invars[a.traced.n_params :])


def _flow(a: Analysis) -> None:
    """Dependences of every variable, in one pass forward."""
    jaxpr, n = a.traced.jaxpr, a.traced.n_params
    a.depends.update(dict.fromkeys(jaxpr.constvars, Dependence()))
    a.depends.update(dict.fromkeys(jaxpr.invars[:n], Dependence(params=True)))
    a.depends.update(dict.fromkeys(jaxpr.invars[n:], Dependence(inputs=True)))
    a.view.update(jaxpr.invars[:n])
    site_number = {p: i for i, p in enumerate(a.traced.sites)}
    for position, eqn in enumerate(jaxpr.eqns):
        if position in site_number:
            out = Dependence(params=True, inputs=True, level=site_number[position])
        else:
            out = Dependence()
            for atom in eqn.invars:
                out |= a.dep(atom)
            if position in a.in_region:
                out = Dependence(inputs=True, state=True)
        for v in eqn.outvars:
            a.depends[v] = out
        if eqn.primitive.name in _VIEWS and len(eqn.invars) == 1 and eqn.invars[0] in a.view:
            a.view.update(eqn.outvars)


def _region(a: Analysis, number: int, site: int, folded: Folded, outputs: set[Var]) -> SiteRegion:
    region, q, k, v = folded
    inside = {w for p in region for w in a.eqns[p].outvars}
    sent = {x for x in (q, k, v) if not isinstance(x, compat.Literal)}
    private: dict[Var, None] = {}
    for p in region:
        for x in variables(a.eqns[p].invars):
            if x not in inside and x not in sent:
                private[x] = None
    for x in private:
        d = a.dep(x)
        if d.params or d.level >= 0 or d.state:
            raise SplitError(
                f"attention {number} at {compat.where(a.eqns[site])}: an operand besides q, k and v "
                f"({x.aval}) depends "
                "on weights, activations or another attention's cache; only inputs (masks, positions, a "
                f"cache of its own) can live on the attention side{_as_parameter(a, x)}"
            )
    out = a.eqns[site].outvars[0]
    state = tuple(
        w
        for p in region
        for w in a.eqns[p].outvars
        if w is not out and (w in outputs or any(c not in region for c in a.consumers.get(w, ())))
    )
    return SiteRegion(site, region, q, k, v, out, tuple(private), state)


def _as_parameter(a: Analysis, value: Var) -> str:
    """What to do where a value derives from parameters alone, as from a cache that was not taken out of
    them."""
    if a.dep(value).level >= 0 or a.dep(value).state:
        return ""
    invars, names, seen, stack = a.traced.jaxpr.invars, [], set(), [value]
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in a.producer:
            stack.extend(variables(a.eqns[a.producer[v]].invars))
        elif v in invars[: a.traced.n_params]:
            names.append(a.traced.param_names[invars.index(v)])
    return (
        f". It derives from the parameter {min(names)}: if that is a cache, make it an input, "
        "split(fn, params, cache, …)"
    )


def _mark_cheap(a: Analysis) -> None:
    expensive: set[Var] = set()
    for position, eqn in enumerate(a.eqns):
        deps = [a.dep(x) for x in eqn.invars]
        derives = all(d.level < 0 and not d.state for d in deps) and position not in a.in_region
        if (
            derives
            and eqn.primitive.name in _CHEAP
            and not eqn.effects
            and not any(x in expensive for x in variables(eqn.invars))
        ):
            a.cheap.add(position)
        else:
            expensive.update(eqn.outvars)


def _output_kind(a: Analysis, atom: Atom, name: str) -> str:
    d = a.dep(atom)
    if d.state and d.level >= 0:
        raise SplitError(
            f"{name} mixes an attention output with the attention side's cache; return the two apart, or "
            "keep the cache's updates inside the model's cache variables"
        )
    return "state" if d.state else "final" if d.level >= 0 else "aux"


def cut_graph(a: Analysis) -> tuple[CutGraph, list[Var], list[int]]:
    """The plain-data graph that the minimum cuts work on.

    Returns the graph, the variable behind each value number, and the equation position behind each operator
    number. Left out: what derives from parameters alone, the attention regions themselves, and equations that
    no q, k, v or final output needs.
    """
    jaxpr = a.traced.jaxpr
    finals = [v for v, kind in zip(jaxpr.outvars, a.kinds, strict=True) if kind == "final"]
    wanted = [x for r in a.regions for x in (r.q, r.k, r.v)] + finals
    needed: set[int] = set()
    stack = variables(wanted)
    while stack:
        position = a.producer.get(stack.pop())
        if position is None or position in needed or position in a.in_region:
            continue
        needed.add(position)
        stack.extend(variables(a.eqns[position].invars))

    number: dict[Var, int] = {}
    free = {v for v, d in a.depends.items() if not d.inputs and d.level < 0}

    def numbers(atoms: Iterable[Atom]) -> tuple[int, ...]:
        return tuple(number.setdefault(v, len(number)) for v in variables(atoms) if v not in free)

    inputs = numbers(jaxpr.invars[a.traced.n_params :])
    ops, positions = [], []
    for position in sorted(needed):
        eqn = a.eqns[position]
        if all(v in free for v in eqn.outvars):
            continue
        level = a.depends[eqn.outvars[0]].level
        ops.append(Op(numbers(eqn.invars), numbers(eqn.outvars), level, position in a.cheap))
        positions.append(position)
    site_reads = tuple(numbers((r.q, r.k, r.v)) for r in a.regions)
    site_writes = tuple(numbers((r.out,))[0] for r in a.regions)
    outputs = numbers(finals)
    names = list(number)
    graph = CutGraph(
        ops=tuple(ops),
        value_bytes=tuple(compat.nbytes(v.aval) for v in names),
        inputs=inputs,
        site_reads=site_reads,
        site_writes=site_writes,
        outputs=outputs,
    )
    return graph, names, positions
