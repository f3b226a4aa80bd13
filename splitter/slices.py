"""The splitter's last step: n cuts become n+1 slices (Lamina 2025, §4.2.1–4.2.2).

`split` gives a `SplitModel`: it hands out the parts of slices, and whoever runs them owns the loop. Slices
that are the same but for their parameters share one program. Knows nothing of pools, devices, requests or KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, tree_util
from jaxtyping import Shaped

from pallas_kernels import compat
from pallas_kernels.compat import Atom, Var
from splitter.analysis import Analysis, SiteRegion, analyse, cut_graph
from splitter.block import Block, variables
from splitter.mincut import Cut, plan_cuts
from splitter.operator import DEFAULT_OPERATORS, attention_p
from splitter.program import Arrays, SliceProgram, canonical, first_use
from splitter.report import SplitReport, make_report
from splitter.trace import SplitError, Traced, trace


@dataclass(frozen=True)
class AttentionSite:
    """One attention operator as the attention side sees it.

    q, k, v, out: what crosses. scale, window, softcap: of `splitter.attention`, None where
    the operator is another one. private: avals of the operands that live on the attention side.
    """

    index: int
    name: str
    kind: str
    q: Shaped[jax.ShapeDtypeStruct, "B T N H"]
    k: Shaped[jax.ShapeDtypeStruct, "*tokens K H"]
    v: Shaped[jax.ShapeDtypeStruct, "*tokens K H"]
    out: Shaped[jax.ShapeDtypeStruct, "B T N H"]
    scale: float | None
    window: int | None
    softcap: float | None
    private: tuple[jax.ShapeDtypeStruct, ...]
    operator: Callable[..., tuple[Array, Arrays]]

    def attend(
        self,
        q: Shaped[Array, "B T N H"],
        k: Shaped[Array, "*tokens K H"],
        v: Shaped[Array, "*tokens K H"],
        *private: Array,
    ) -> tuple[Array, Arrays]:
        """The operator as the model wrote it: `(output, state)`, state being e.g. the updated cache.

        Equal sites share `operator`, so a jit of it compiles once.
        """
        return self.operator(q, k, v, *private)


@dataclass(frozen=True)
class Slice:
    """One of the n+1 slices. `program` is shared among equal slices; the variables name its own place in the
    model."""

    index: int
    program: SliceProgram
    param_vars: tuple[Var, ...]
    context_vars: tuple[Var, ...]
    eqn_positions: tuple[int, ...]
    n_q_eqns: int

    @property
    def q_part(self) -> Callable[..., tuple[Array, Arrays]]:
        return self.program.q_part

    @property
    def kv_part(self) -> Callable[..., tuple[Array, Array, Arrays]]:
        return self.program.kv_part

    @property
    def final(self) -> Callable[..., Any]:
        return self.program.final


class SplitModel:
    """A model cut at its n attention operators into n+1 slices.

    A caller runs, for one batch: `context = first_context(*inputs)`; for each i < n, `slices[i].q_part`, send
    q, `slices[i].kv_part`, send k and v, receive the output; then `slices[n].final`. Nothing here does that
    for it, so that several batches can be interleaved.
    """

    def __init__(self, analysis: Analysis, cuts: Sequence[Cut], value_vars: Sequence[Var]) -> None:
        self.analysis = analysis
        self.traced = analysis.traced
        self.n = len(analysis.regions)
        self.cuts = tuple(cuts)
        builder = _Builder(analysis, [tuple(value_vars[v] for v in cut.context) for cut in cuts])
        self.slices: tuple[Slice, ...] = builder.slices
        self.sites: tuple[AttentionSite, ...] = _sites(analysis)

    @property
    def n_programs(self) -> int:
        """How many different programs the n+1 slices need."""
        return len({id(s.program) for s in self.slices})

    def slice_params(self, i: int, params: Any) -> Arrays:
        """Slice i's parameters in the order its program takes them; once, at load time.

        `params` is the model's pytree, of arrays or of `jax.ShapeDtypeStruct` (then so is the result); leaves
        that the slice does not read may be either. Views of stacked weights are taken here; constants of the
        trace are among the result.
        """
        flat, tree = tree_util.tree_flatten(params)
        if tree != self.traced.params_tree:
            raise SplitError(
                f"params have another structure than those traced: {tree} for {self.traced.params_tree}"
            )
        abstract = any(isinstance(flat[n], jax.ShapeDtypeStruct) for n in self.params_read(i))
        prologue = self._views(self.slices[i].param_vars)
        if abstract:
            return tuple(jax.eval_shape(lambda *xs: prologue(self._with_consts(xs)), *flat))
        return tuple(prologue(self._with_consts(flat)))

    def params_read(self, i: int) -> tuple[int, ...]:
        """Which of the model's parameters slice i reads: their places among the flattened pytree's leaves."""
        block = self._views(self.slices[i].param_vars)
        read = set(first_use(block.eqns, block.outvars))
        return tuple(n for n, v in enumerate(self.traced.jaxpr.invars[: self.traced.n_params]) if v in read)

    def sources(self, i: int) -> tuple[int | np.ndarray | None, ...]:
        """Where each of slice i's parameters (`slice_params`) comes from: the place of one of the model's
        among the flattened pytree's leaves, as int; a constant of the trace, as array; None: a view of
        either."""
        jaxpr, n = self.traced.jaxpr, self.traced.n_params
        known: dict[Var, int | np.ndarray] = {v: place for place, v in enumerate(jaxpr.invars[:n])}
        known.update(zip(jaxpr.constvars, (np.asarray(c) for c in self.traced.consts), strict=True))
        return tuple(known.get(v) for v in self.slices[i].param_vars)

    def first_context(self, *inputs: Any) -> Arrays:
        """Slice 0's context: those of the model's inputs that the slices read. Raises SplitError on other
        trees."""
        flat, tree = tree_util.tree_flatten(tuple(inputs))
        if tree != self.traced.inputs_tree:
            raise SplitError(
                f"inputs have another structure than those traced: {tree} for {self.traced.inputs_tree}"
            )
        given = dict(zip(self.traced.jaxpr.invars[self.traced.n_params :], flat, strict=True))
        return tuple(given[v] for v in self.slices[0].context_vars)

    def private_operands(self, *inputs: Any) -> tuple[Arrays, ...]:
        """Per site, the operands besides q, k, v (masks, positions, a cache), computed from the model's
        inputs.

        The attention side runs this once a step; it needs no weights. Jittable.
        """
        regions = self.analysis.regions
        block = self._closure([v for r in regions for v in r.private], with_params=False)
        values = iter(block(self._with_consts(tree_util.tree_leaves(tuple(inputs)))))
        return tuple(tuple(next(values) for _ in r.private) for r in regions)

    def aux_outputs(self, params: Any, *inputs: Any) -> Arrays:
        """The outputs that depend on no attention (counters, say): computed beside slice 0. Jittable."""
        block = self._closure(self._outputs_of("aux"), with_params=True)
        return tuple(block(self._with_consts(self.traced.flatten(params, inputs))))

    def state_outputs(self, states: Sequence[Arrays], *inputs: Any) -> Arrays:
        """The outputs made of the attention side's state (updated caches), from every site's `attend`
        state."""
        known = [v for r in self.analysis.regions for v in r.state]
        block = self._closure(self._outputs_of("state"), with_params=False, known=known)
        values = [x for state in states for x in state]
        return tuple(block((*values, *self._with_consts(tree_util.tree_leaves(tuple(inputs))))))

    def merge_outputs(self, final: Any, aux: Arrays = (), state: Arrays = ()) -> Any:
        """The model's whole output from what `final`, `aux_outputs` and `state_outputs` gave."""
        parts = {
            "final": iter(tree_util.tree_leaves(final)),
            "aux": iter(aux),
            "state": iter(state),
        }
        return tree_util.tree_unflatten(
            self.traced.out_tree, [next(parts[kind]) for kind in self.analysis.kinds]
        )

    def report(self) -> SplitReport:
        """Slices, contexts and exchanged bytes, as plain data that prints."""
        return self._report

    @cached_property
    def _report(self) -> SplitReport:
        return make_report(self)

    def _outputs_of(self, kind: str) -> list[Var]:
        return [v for v, k in zip(self.traced.jaxpr.outvars, self.analysis.kinds, strict=True) if k == kind]

    def _views(self, wanted: Sequence[Atom]) -> Block:
        """Parameters, constants and views of parameters as a block over all parameters."""
        return self._closure(wanted, with_params=True, with_inputs=False)

    def _closure(
        self,
        wanted: Sequence[Atom],
        *,
        with_params: bool,
        with_inputs: bool = True,
        known: Sequence[Var] = (),
    ) -> Block:
        """The equations that yield `wanted` from (known, constants, parameters and/or inputs)."""
        jaxpr, n = self.traced.jaxpr, self.traced.n_params
        invars = (
            *known,
            *jaxpr.constvars,
            *(jaxpr.invars[:n] if with_params else ()),
            *(jaxpr.invars[n:] if with_inputs else ()),
        )
        positions = _needed(self.analysis, wanted, set(invars))
        return Block(invars, tuple(jaxpr.eqns[p] for p in positions), tuple(wanted))

    def _with_consts(self, values: Sequence[Any]) -> Arrays:
        return (*(jnp.asarray(c) for c in self.traced.consts), *values)


def split(
    fn: Callable[..., Any] | Traced,
    *args: Any,
    recompute: bool = True,
    operators: Sequence[compat.Primitive] = DEFAULT_OPERATORS,
) -> SplitModel:
    """Cut a model at its attention operators.

    Args:
      fn: `fn(params, *inputs)`, any JAX function, with `args` = params and inputs, real or abstract; or what
      `trace`
        returned, and no args.
      recompute: compute cheap values of inputs and parameters again in a slice instead of carrying them.
      operators: primitives to cut at.

    Raises:
      SplitError: see `trace` and `analysis.analyse`.
    """
    traced = fn if isinstance(fn, Traced) else trace(fn, *args, operators=operators)
    analysis = analyse(traced, recompute=recompute)
    graph, value_vars, _ = cut_graph(analysis)
    return SplitModel(analysis, plan_cuts(graph), value_vars)


def _needed(a: Analysis, wanted: Sequence[Atom], given: set[Var]) -> list[int]:
    """Positions of the equations that compute `wanted` from `given`, in order."""
    found: set[int] = set()
    stack = variables(wanted)
    while stack:
        v = stack.pop()
        if v in given:
            continue
        assert v in a.producer, f"{v} is neither given nor computed"
        position = a.producer[v]
        if position not in found:
            assert position not in a.in_region, f"{v} comes from an attention operator that is not given"
            found.add(position)
            stack.extend(variables(a.eqns[position].invars))
    return sorted(found)


# A value is small beside a context when it is at most this fraction of it.
_SMALL = 16


def _extended(contexts: Sequence[tuple[Var, ...]], inputs: set[Var]) -> list[tuple[Var, ...]]:
    """Contexts in which what has lived through several cuts, and any input once carried, lives to the end.

    A model's last slices need positions no more; were they dropped there, slice n-1 would be a program of its
    own, compiled for the sake of a few bytes. What is not small beside the context it would join is dropped
    all the same.
    """
    extended = [contexts[0]] if contexts else []
    before: set[Var] = set()
    for context in contexts[1:]:
        previous = extended[-1]
        room = sum(compat.nbytes(v.aval) for v in context) // _SMALL
        lasting = [v for v in previous if v not in context and (v in inputs or v in before)]
        kept = [v for v in lasting if compat.nbytes(v.aval) <= room]
        extended.append((*context, *kept))
        before = set(previous)
    return extended


class _Builder:
    """Works out each slice's equations and arguments, last slice first: a context is ordered by its reader's
    use."""

    def __init__(self, a: Analysis, contexts: Sequence[tuple[Var, ...]]) -> None:
        self.a = a
        self.n = len(contexts)
        jaxpr, n_params = a.traced.jaxpr, a.traced.n_params
        self.fixed = {*jaxpr.constvars, *a.view}
        self.inputs = set(jaxpr.invars[n_params:])
        self.contexts = _extended(contexts, self.inputs)
        # A context is what its reader uses first, first; but what lives on keeps one order through all
        # slices, or two slices that read it in another order would not be the same program.
        carried = Counter(v for context in self.contexts for v in context)
        self.lasting = self.inputs | {v for v, n in carried.items() if n > 1}
        self.age = {v: -len(jaxpr.invars) + k for k, v in enumerate(jaxpr.invars)} | a.producer
        self.programs: dict[str, SliceProgram] = {}
        made: list[Slice] = []
        following: tuple[Var, ...] = ()
        for i in reversed(range(self.n + 1)):
            made.append(self._slice(i, following))
            following = made[-1].context_vars
        self.slices = tuple(reversed(made))

    def _slice(self, i: int, following: tuple[Var, ...]) -> Slice:
        a = self.a
        out = a.regions[i - 1].out if i else None
        given = self.inputs if out is None else {*self.contexts[i - 1], out}
        first_out: tuple[Atom, ...]
        second_out: tuple[Atom, ...] = ()
        if i == self.n:
            outvars = [v for v, kind in zip(a.traced.jaxpr.outvars, a.kinds, strict=True) if kind == "final"]
            q_positions = _needed(a, outvars, given | self.fixed)
            kv_positions: list[int] = []
            first_out = tuple(outvars)
        else:
            site = a.regions[i]
            q_positions = _needed(a, [site.q], given | self.fixed)
            second_out = (site.k, site.v, *following)
            done = {v for p in q_positions for v in a.eqns[p].outvars}
            kv_positions = _needed(a, second_out, given | self.fixed | done)
            first_out = (site.q,)
        q_eqns = tuple(a.eqns[p] for p in q_positions)
        kv_eqns = tuple(a.eqns[p] for p in kv_positions)
        used = first_use((*q_eqns, *kv_eqns), (*first_out, *second_out))
        params = tuple(v for v in used if v in self.fixed)
        # What only passes through is among second_out; the last slice is handed more than it reads.
        own = [v for v in used if v in given and v is not out]
        own += [v for v in self.contexts[i - 1] if v not in used] if i == self.n else []
        fresh = [v for v in own if v not in self.lasting]
        context = (*fresh, *sorted((v for v in own if v in self.lasting), key=self.age.__getitem__))
        start = (*params, *context) if out is None else (*params, *context, out)
        if i == self.n:
            return self._last(i, Block(start, q_eqns, first_out), params, context, tuple(q_positions))
        after_q = set(start) - set(params) | {v for e in q_eqns for v in e.outvars}
        rest = tuple(v for v in first_use(kv_eqns, second_out) if v in after_q)
        first = Block(start, q_eqns, (*first_out, *rest))
        second = Block((*params, *rest), kv_eqns, second_out)
        tied, tie_outputs = self._tied(rest, second, second_out[:2])
        program = self._program(
            canonical(first, second, extra=(len(params), out is None)),
            lambda: SliceProgram(len(params), first, second, tied=tied, tie_outputs=tie_outputs),
        )
        return Slice(i, program, params, context, (*q_positions, *kv_positions), len(q_positions))

    def _last(
        self,
        i: int,
        block: Block,
        params: tuple[Var, ...],
        context: tuple[Var, ...],
        positions: tuple[int, ...],
    ) -> Slice:
        traced, kinds = self.a.traced, self.a.kinds

        def unflatten(leaves: list[Any]) -> Any:
            values = iter(leaves)
            return tree_util.tree_unflatten(
                traced.out_tree, [next(values) if kind == "final" else None for kind in kinds]
            )

        program = self._program(
            canonical(block, extra=("final", len(params))),
            lambda: SliceProgram(len(params), block, None, unflatten=unflatten),
        )
        return Slice(i, program, params, context, positions, len(positions))

    def _program(self, key: str, make: Callable[[], SliceProgram]) -> SliceProgram:
        if key not in self.programs:
            self.programs[key] = make()
        return self.programs[key]

    def _tied(self, rest: tuple[Var, ...], block: Block, kv: tuple[Atom, ...]) -> tuple[frozenset[int], bool]:
        """Which members of `rest` to add the tie to, so that k and v depend on it; else the results
        themselves."""
        reached: dict[Atom, frozenset[int]] = {v: frozenset([i]) for i, v in enumerate(rest)}
        for eqn in block.eqns:
            uses = frozenset().union(*(reached.get(v, frozenset()) for v in variables(eqn.invars)))
            reached.update((v, uses) for v in eqn.outvars)
        floats = {i for i, v in enumerate(rest) if jnp.issubdtype(compat.like_of(v).dtype, jnp.inexact)}
        sources = [reached.get(v, frozenset()) & floats for v in kv]
        if all(sources):
            return frozenset().union(*sources), False
        return frozenset(), True


def _sites(a: Analysis) -> tuple[AttentionSite, ...]:
    operators: dict[str, Callable[..., tuple[Array, Arrays]]] = {}
    sites = []
    for i, region in enumerate(a.regions):
        eqn = a.eqns[region.position]
        block = _region_block(a, region)
        key = canonical(block)
        if key not in operators:
            operators[key] = _operator(block)
        own = eqn.params if eqn.primitive is attention_p else {}
        sites.append(
            AttentionSite(
                index=i,
                name=own.get("name") or compat.name_stack(eqn) or f"attention {i}",
                kind=eqn.primitive.name,
                q=compat.like_of(region.q),
                k=compat.like_of(region.k),
                v=compat.like_of(region.v),
                out=compat.like_of(region.out),
                scale=own.get("scale"),
                window=own.get("window"),
                softcap=own.get("softcap"),
                private=tuple(compat.like_of(v) for v in region.private),
                operator=operators[key],
            )
        )
    return tuple(sites)


def _region_block(a: Analysis, r: SiteRegion) -> Block:
    return Block((r.q, r.k, r.v, *r.private), tuple(a.eqns[p] for p in r.region), (r.out, *r.state))


def _operator(block: Block) -> Callable[..., tuple[Array, Arrays]]:
    def operator(*operands: Array) -> tuple[Array, Arrays]:
        out, *state = block(operands)
        return out, tuple(state)

    return operator
