"""Where attention is, by its shape alone: a product of two values over tokens, something in between, and a
product over those tokens again.

What lies between is not read like a recipe: which numbers it computes is for `prove` to say. Here it is only
found, with everything that it reads, and with q, k and v as far up as nothing but their layout was changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from pallas_kernels import compat
from splitter.block import variables
from splitter.find.facts import DotDims, Facts, From, View, computed, dot_dims, moved, view_of, widens


@dataclass(frozen=True)
class Region:
    """One attention, not proven yet. ``scores``: the position of the product of q and k; ``mix``: of the
    product with v; ``eqns``: of all that belongs to it; ``end``: its result. Views: q ``[T, N, H]``, k and v
    ``[T, K, H]``, out ``[T, N, H]``."""

    scores: int
    mix: int
    eqns: frozenset[int]
    end: Any
    q: View
    k: View
    v: View
    out: View

    @property
    def n_heads(self) -> int:
        return self.q.shape[0]

    @property
    def n_kv_heads(self) -> int:
        """K and V may be repeated differently: the heads of the one with more."""
        return max(self.k.shape[0], self.v.shape[0])


@dataclass(frozen=True)
class Problem:
    """What keeps a model from being cut: where, and why."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class _Refused(Exception):
    pass


def find_regions(facts: Facts) -> tuple[list[list[Region]], list[Problem]]:
    """Each attention as the ways in which it can be read (which operand is q), and what looks like one, or
    mixes tokens, and is none."""
    found, problems, ends, refused = [], [], set[Any](), set[int]()
    scores_of = _scores_of(facts, ends)
    for position in sorted(facts.live):
        eqn = facts.eqns[position]
        if not _is_mix(facts, eqn):
            continue
        of = _of_all(eqn, scores_of)
        if of and of <= refused:
            continue  # what they were used for elsewhere
        of -= refused
        try:
            if len(of) != 1:
                raise _Refused(
                    "a product over tokens whose weights are no scores of queries and keys: attention is "
                    "the only thing that may mix tokens"
                )
            readings = _readings(facts, scores_of, next(iter(of)), position)
        except _Refused as why:
            problems.append(Problem(compat.where(eqn), str(why)))
            refused |= of
            continue
        found.append(readings)
        if readings[0].end not in eqn.outvars:  # what follows was taken for scores
            ends.add(readings[0].end)
            scores_of = _scores_of(facts, ends)
    taken = {p for readings in found for p in readings[0].eqns}
    if not problems:
        problems += _left_over(facts, scores_of, taken)
    return found, problems


_ScoresOf = dict[Any, frozenset[int]]


def _scores_of(facts: Facts, ends: set[Any]) -> _ScoresOf:
    """The products of queries and keys that each value is made of, not beyond a product with values or
    ``ends``."""
    found: _ScoresOf = {}
    for position in sorted(facts.live):
        eqn = facts.eqns[position]
        of = _of_all(eqn, found)
        if eqn.primitive.name == "dot_general" and facts.of_tokens(eqn.outvars[0]) and _is_scores(facts, eqn):
            of = frozenset([position])
        if of and not _is_mix(facts, eqn):
            found.update((v, of) for v in eqn.outvars if v not in ends)
    return found


def _of_all(eqn: compat.JaxprEqn, scores_of: _ScoresOf) -> frozenset[int]:
    return frozenset[int]().union(*(scores_of.get(v, ()) for v in variables(eqn.invars)))


def _is_mix(facts: Facts, eqn: compat.JaxprEqn) -> bool:
    return (
        eqn.primitive.name == "dot_general"
        and facts.of_tokens(eqn.outvars[0])
        and _contracts_tokens(facts, eqn)
    )


def _token_dims(facts: Facts, eqn: compat.JaxprEqn, side: int) -> set[int]:
    return set(facts.learned.token_dims(eqn.invars[side]))


def _is_scores(facts: Facts, eqn: compat.JaxprEqn) -> bool:
    for side, dims in enumerate(dot_dims(eqn)):
        tokens = _token_dims(facts, eqn, side)
        if len(tokens) != 1 or not tokens <= set(dims.free) or not facts.of_tokens(eqn.invars[side]):
            return False
    return True


def _contracts_tokens(facts: Facts, eqn: compat.JaxprEqn) -> bool:
    return any(
        _token_dims(facts, eqn, side) & set(dims.contracted) for side, dims in enumerate(dot_dims(eqn))
    )


# What goes along a dimension.
_ALONG = {
    "cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis",
    "sort": "dimension",
}  # fmt: skip


def _left_over(facts: Facts, scores_of: _ScoresOf, taken: set[int]) -> Iterator[Problem]:
    said: set[frozenset[int]] = set()
    for position in sorted(facts.live - taken):
        eqn = facts.eqns[position]
        name = eqn.primitive.name
        of = scores_of.get(eqn.outvars[0], frozenset())
        if of and of not in said:
            said.add(of)
            first = facts.eqns[min(of)]
            yield Problem(
                compat.where(first),
                "a product of two values over tokens that is not followed by a softmax and a product with "
                f"values, or whose scores are used elsewhere too, at {compat.where(eqn)}",
            )
        elif not of and facts.of_tokens(eqn.outvars[0]) and _mixes(facts, eqn):
            yield Problem(compat.where(eqn), f"{name} mixes tokens: attention is the only thing that may")


def _mixes(facts: Facts, eqn: compat.JaxprEqn) -> bool:
    """Whether a token sees others outside of an attention. What weights make of tokens may be counted and
    sorted as integers, as routers do; whether a model's tokens keep to themselves then, is found by running
    it. Of the tokens' ids nothing may be: a run on random ones would rarely meet those that matter."""
    of_tokens = [v for v in eqn.invars if facts.of_tokens(v) and facts.learned.token_dims(v)]
    if all(is_routed(facts, v) for v in of_tokens):
        return False
    p, name = eqn.params, eqn.primitive.name
    results = [v for v in eqn.outvars if v in facts.readers or v in facts.learned.jaxpr.outvars]
    if name == "conv_general_dilated" or not all(map(facts.learned.token_dims, results)):
        return True
    tokens = set(facts.learned.token_dims(of_tokens[0]))
    if name in _ALONG:
        return p[_ALONG[name]] in tokens and not is_routed(facts, eqn.invars[0])
    if name.startswith("reduce_") and "axes" in p:
        return bool(tokens & set(p["axes"]))
    return any(not _is_at_place(facts, eqn, d) for d in tokens)


def is_routed(facts: Facts, v: Any) -> bool:
    """Integers that weights make of tokens."""
    return (
        facts.of_tokens(v)
        and From.PARAMS in facts.source[v]
        and np.dtype(compat.like_of(v).dtype).kind in "iub"
    )


def _is_at_place(facts: Facts, eqn: compat.JaxprEqn, d: int) -> bool:
    """Whether a result's element along the first operand's dimension ``d`` is the operand's at the same
    place: otherwise a token would see another. More places behind the last one are let be: nobody is
    shifted."""
    p, operand = eqn.params, eqn.invars[0]
    match eqn.primitive.name:
        case "slice":
            return not p["start_indices"][d]
        case "pad":
            return not p["padding_config"][d][0]
        case "rev":
            return d not in p["dimensions"]
        case "concatenate":
            return d != p["dimension"] or not any(facts.of_tokens(v) for v in eqn.invars[1:])
        case "dynamic_slice" | "dynamic_update_slice" as name:
            part = eqn.outvars[0] if name == "dynamic_slice" else eqn.invars[1]
            return facts.learned.dims(part)[d] == facts.learned.dims(operand)[d]
        case "gather" if facts.of_tokens(operand):
            return _are_own_places(facts, eqn.invars[1], p["dimension_numbers"].start_index_map, d)
        case name if name.startswith("scatter") and facts.of_tokens(operand):
            of = p["dimension_numbers"].scatter_dims_to_operand_dims
            return _are_own_places(facts, eqn.invars[1], of, d)
    return True


def _are_own_places(facts: Facts, indices: Any, of: Sequence[int], d: int) -> bool:
    """Whether of ``indices`` [..., len(of)], those of dimension ``d`` are each token's own place in the row,
    for as many tokens as there may be; or a router's, which may be any."""
    if d not in of or is_routed(facts, indices):
        return True
    dims = facts.learned.token_dims(indices)
    if not facts.only_positions(indices) or len(dims) != 1:
        return False
    at = np.arange(facts.max_len, dtype=np.int32)
    [value] = computed(facts, [indices], len(at))(at[None])
    return bool((np.moveaxis(np.asarray(value)[..., of.index(d)], dims[0], -1) == at).all())


def _readings(facts: Facts, scores_of: _ScoresOf, scores: int, mix: int) -> list[Region]:
    eqn = facts.eqns[mix]
    sides = [s for s in (0, 1) if scores in scores_of.get(eqn.invars[s], ())]
    if len(sides) != 1:
        raise _Refused("a product of scores with scores")
    eqns, end = _extent(facts, scores_of, scores, mix)
    by_token = [s for s in (0, 1) if len(facts.learned.token_dims(facts.eqns[scores].invars[s])) == 1]
    readings, why = [], ""
    for q_side in by_token:
        try:
            readings.append(_reading(facts, scores, mix, sides[0], q_side, eqns, end))
        except _Refused as refused:
            why = why or str(refused)
    if not readings:
        raise _Refused(why)
    return readings


def _extent(facts: Facts, scores_of: _ScoresOf, scores: int, mix: int) -> tuple[frozenset[int], Any]:
    """The equations from the scores to the result, and the result: where sums of weights are divided by after
    the product with v, that is beyond it."""
    own, end = {mix}, facts.eqns[mix].outvars[0]
    for _ in range(16):
        inside = _between(facts, scores_of, scores, own)
        leak = _leak(facts, inside, end)
        if leak is None:
            return frozenset(inside), end
        readers = facts.readers.get(end, [])
        if len(readers) != 1 or end in facts.learned.jaxpr.outvars:
            break
        [following] = readers
        eqn = facts.eqns[following]
        others = [v for v in variables(eqn.invars) if v is not end]
        if not all(scores in scores_of.get(v, ()) or facts.only_positions(v) for v in others):
            break
        own.add(following)
        end = eqn.outvars[0]
    raise _Refused(f"its scores are used elsewhere too, at {compat.where(facts.eqns[leak or mix])}")


def _between(facts: Facts, scores_of: _ScoresOf, scores: int, own: set[int]) -> set[int]:
    inside, stack = set(own), [v for p in own for v in variables(facts.eqns[p].invars)]
    while stack:
        v = stack.pop()
        position = facts.producer.get(v)
        if position is None or position in inside or scores not in scores_of.get(v, ()):
            continue
        inside.add(position)
        if position != scores:
            stack.extend(variables(facts.eqns[position].invars))
    return inside


def _leak(facts: Facts, inside: set[int], end: Any) -> int | None:
    """An equation outside that reads a value from inside."""
    results = set(variables(facts.learned.jaxpr.outvars))
    for p in inside:
        for v in facts.eqns[p].outvars:
            if v is end:
                continue
            if v in results:
                return p
            for reader in facts.readers.get(v, ()):
                if reader not in inside:
                    return reader
    return None


def _reading(
    facts: Facts, scores: int, mix: int, p_side: int, q_side: int, eqns: frozenset[int], end: Any
) -> Region:
    product, mixing = facts.eqns[scores], facts.eqns[mix]
    of_q, of_k = dot_dims(product)[q_side], dot_dims(product)[1 - q_side]
    of_p, of_v = dot_dims(mixing)[p_side], dot_dims(mixing)[1 - p_side]
    q_var, k_var, v_var = product.invars[q_side], product.invars[1 - q_side], mixing.invars[1 - p_side]
    n_tokens = facts.learned.lengths[0]
    for name, operand in (("queries", q_var), ("keys", k_var), ("values", v_var)):
        if not facts.of_tokens(operand):
            raise _Refused(
                f"its {name} are not made of the tokens (those of another sequence, or a parameter)"
            )
    groups = prod(_sizes(q_var, of_q.free)) // n_tokens
    if prod(_sizes(k_var, of_k.free)) != n_tokens:
        raise _Refused("its keys have a dimension that neither queries nor scores share")
    heads = prod(_sizes(q_var, of_q.batch)) * groups
    width = prod(_sizes(q_var, of_q.contracted))
    q = _stripped(facts, q_var, lambda x: _arranged(x, of_q, n_tokens), (heads, width))
    k = _stripped(facts, k_var, lambda x: _arranged(x, of_k, n_tokens).reshape(n_tokens, -1, width))
    # v's tokens are contracted, its own dimensions are free: as [T, heads, H]
    of_v = DotDims(of_v.batch, of_v.free, of_v.contracted)
    v = _stripped(
        facts,
        v_var,
        lambda x: _arranged(x, of_v, n_tokens).reshape(n_tokens, prod(_sizes(v_var, of_v.batch)), -1),
    )
    p_groups = prod(_sizes(mixing.invars[p_side], of_p.free)) // n_tokens
    if prod(_sizes(v_var, of_v.batch)) * p_groups != heads:
        raise _Refused("its values have other heads than its queries")
    if any(heads % x.shape[0] for x in (k, v)):
        raise _Refused("its queries' heads are no multiple of its keys' heads")
    out = _out_view(facts, mixing, p_side, end, heads, v.shape[1])
    return Region(scores, mix, eqns, end, q, k, v, out)


def _sizes(atom: Any, dims: Sequence[int]) -> list[int]:
    return [atom.aval.shape[d] for d in dims]


def _arranged(x: np.ndarray, dims: DotDims, n_tokens: int) -> np.ndarray:
    """An operand's elements as ``[T, batch…, other free…, contracted…]``."""
    tokens = [d for d in dims.free if x.shape[d] == n_tokens]
    if len(tokens) != 1:
        raise _Refused("an operand whose tokens are not one dimension")
    others = [d for d in dims.free if d not in tokens]
    return x.transpose(*tokens, *dims.batch, *others, *dims.contracted)


def _stripped(facts: Facts, operand: Any, arranged: Any, shape: tuple[int, ...] = ()) -> View:
    """The farthest variable up from an operand of which it is a mere view, as ``[T, *shape]``; without a
    ``shape`` as [T, K, H], heads that are repeated for groups of queries taken once."""
    best: View | None = None
    chain: list[compat.JaxprEqn] = []
    v = operand
    while True:
        labels = np.arange(prod(v.aval.shape)).reshape(v.aval.shape)
        for eqn in reversed(chain):
            found = moved(eqn, labels)
            assert found is not None
            labels = found
        own = arranged(labels)
        best = (view_of(v, own, shape) if shape else _once(v, own)) or best
        position = facts.producer.get(v)
        if position is None:
            break
        eqn = facts.eqns[position]
        if not facts.of_tokens(v) or not widens(eqn) or len(variables(eqn.invars)) != 1:
            break
        if moved(eqn, np.zeros(eqn.invars[0].aval.shape, np.int8)) is None:  # type: ignore[attr-defined]
            break
        chain.append(eqn)
        v = eqn.invars[0]
    if best is None:
        raise _Refused(f"an operand {operand.aval} cannot be read as [tokens, heads, head size]")
    return best


def _once(v: Any, labels: np.ndarray) -> View | None:
    """``labels``: [T, heads, H]."""
    heads, first = labels.shape[1], labels[:1, :, :1].ravel()
    n = len(dict.fromkeys(first.tolist()))
    if heads % n == 0:
        labels = labels.reshape(labels.shape[0], n, heads // n, -1)
        if not np.array_equal(labels, np.broadcast_to(labels[:, :, :1], labels.shape)):
            return None
        labels = labels[:, :, 0]
    return view_of(v, labels, labels.shape[1:])


def _out_view(facts: Facts, mixing: compat.JaxprEqn, p_side: int, end: Any, heads: int, width: int) -> View:
    """The result as ``[T, N, H]``."""
    both = dot_dims(mixing)
    [result] = mixing.outvars
    n_tokens = facts.learned.lengths[0]
    n_batch = len(both[0].batch)
    free = [*both[0].free, *both[1].free]
    of_p = [n_batch + i for i in range(len(both[0].free))]
    of_v = [n_batch + len(both[0].free) + i for i in range(len(both[1].free))]
    if p_side == 1:
        of_p, of_v = of_v, of_p
    shape = compat.like_of(result).shape
    tokens = [d for d in of_p if shape[d] == n_tokens]
    if len(tokens) != 1 or len(shape) != n_batch + len(free):
        raise _Refused("its weights have no one dimension of queries")
    order = [*tokens, *range(n_batch), *(d for d in of_p if d not in tokens), *of_v]
    arranged = [shape[d] for d in order]
    labels = np.arange(prod(shape)).reshape(arranged).transpose(np.argsort(order))
    v = result
    while v is not end:  # divisions, and views
        eqn = facts.eqns[next(p for p in facts.readers[v])]
        operand = eqn.invars.index(v)
        labels_after = moved(eqn, labels) if operand == 0 else None
        if labels_after is None:
            if compat.like_of(eqn.outvars[0]).shape != labels.shape:
                raise _Refused("what follows its product with values is not understood")
            labels_after = labels
        labels, [v] = labels_after, eqn.outvars
    view = view_of(end, np.argsort(labels, axis=None).reshape(arranged), (heads, width))
    if view is None:
        raise _Refused("its result cannot be read as [tokens, heads, head size]")
    return view


def reads(facts: Facts, region: Region) -> tuple[list[Any], list[Problem]]:
    """What a region reads besides q, k and v: known from places alone (masks, biases), or else a problem."""
    inside = {v for p in region.eqns for v in facts.eqns[p].outvars}
    product, mixing = facts.eqns[region.scores], facts.eqns[region.mix]
    own = {id(product), id(mixing)}
    leaves, problems = [], []
    for p in sorted(region.eqns):
        eqn = facts.eqns[p]
        if id(eqn) in own:
            continue
        for v in variables(eqn.invars):
            if v in inside:
                continue
            if facts.only_positions(v):
                leaves.append(v)
                continue
            kind = (
                "learned (a bias, a sink or a scale that is a parameter)"
                if From.TOKENS not in facts.source[v]
                else "computed from tokens (a mask of padding, a gate or a bias)"
            )
            problems.append(
                Problem(
                    compat.where(eqn),
                    f"{eqn.primitive.name} makes its scores of something besides q·k that is {kind}: "
                    f"{v.aval} from {facts.made_at(v)}",
                )
            )
    return list(dict.fromkeys(leaves)), problems
