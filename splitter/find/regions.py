"""Where attention is, by its shape alone: a product of two values over tokens, something in between, and a
product over those tokens again.

What lies between is not read like a recipe: which numbers it computes is for `prove` to say. Here it is only
found, with everything that it reads, and with q, k and v as far up as nothing but their layout was changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from pallas_kernels import compat
from splitter.block import variables
from splitter.find.facts import DotDims, Facts, From, View, computed, dot_dims, moved, view_of, widens
from splitter.find.lengths import Count, Learned
from splitter.find.places import POINTWISE, row_indices
from splitter.operator import attention_p
from splitter.trace import INLINE


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


# What goes along dimensions, and the parameter that names them; beside the sums and maxima of `reduce_…`.
_ALONG = {
    "cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis",
    "sort": "dimension", "top_k": "axis", "approx_top_k": "reduction_dimension", "split": "axis",
    "unstack": "axis",
    "rev": "dimensions", "argmax": "axes", "argmin": "axes", "reduce": "dimensions",
}  # fmt: skip
# What moves no token, or is told of elsewhere.
_APART = POINTWISE | {
    "reshape", "stack", "mulhi", "layout_constraint", attention_p.name,
    "sharding_constraint", "reshard", "mesh_cast", "shard_map",
}  # fmt: skip


_DECIDES = "a value of some tokens decides for all tokens, and those of other requests: use jnp.where"


def _is_pred(body: Facts) -> bool:
    """Whether a body's result is a truth of tokens, without their dimension: when a while ends."""
    [v] = body.learned.jaxpr.outvars
    return body.of_tokens(v) and v.aval.dtype == bool and not v.aval.shape


def _left_over(facts: Facts, scores_of: _ScoresOf, taken: set[int]) -> Iterator[Problem]:
    said: set[frozenset[int]] = set()
    for position in sorted(facts.live - taken):
        eqn = facts.eqns[position]
        of = scores_of.get(eqn.outvars[0], frozenset())
        if of and of not in said:
            said.add(of)
            first = facts.eqns[min(of)]
            yield Problem(
                compat.where(first),
                "a product of two values over tokens that is not followed by a softmax and a product with "
                f"values, or whose scores are used elsewhere too, at {compat.where(eqn)}",
            )
        elif not of:
            yield from _mixing(facts, position)


def _mixing(facts: Facts, position: int, caller: str = "") -> Iterator[Problem]:
    """Where a token sees others outside of an attention, in an equation or within it."""
    eqn = facts.eqns[position]
    name = eqn.primitive.name
    here = _place(eqn, caller)
    of_tokens = [v for v in eqn.invars if facts.of_tokens(v) and facts.learned.token_dims(v)]
    if not of_tokens:
        return
    if name in ("scan", "while", "cond", *INLINE):
        by_token = name == "scan" and isinstance(facts.learned.params_of(position)["length"], Count)
        if by_token and compat.scan_counts(eqn)[1] and not all(is_routed(facts, v) for v in of_tokens):
            yield Problem(
                here,
                "a scan over tokens carries a value from one to the next: attention is the only thing that "
                "may mix tokens",
            )
        if name == "cond" and facts.of_tokens(eqn.invars[0]):
            yield Problem(here, _DECIDES)
        for body, indices in _bodies(facts, position):
            for inner in sorted(body.live):
                if _counts_tokens(body, inner) and indices.isdisjoint(body.eqns[inner].outvars):
                    yield Problem(
                        _place(body.eqns[inner], here),
                        f"tokens are numbered or counted within a {name}: take positions from the argument",
                    )
                yield from _mixing(body, inner, here)
            if name == "while" and len(body.learned.jaxpr.outvars) == 1 and _is_pred(body):
                yield Problem(here, _DECIDES)
    elif _mixes(facts, position, of_tokens):
        yield Problem(here, f"{name} mixes tokens: attention is the only thing that may")


def _place(eqn: compat.JaxprEqn, caller: str) -> str:
    """Where an equation is in the user's code; what a library holds within a body counts as its caller's."""
    where = compat.where(eqn)
    return where if " (" in where else caller or where


def _bodies(facts: Facts, position: int) -> Iterator[tuple[Facts, frozenset[Any]]]:
    """What runs within an equation, and its values that are indices into the row."""
    eqn, p = facts.eqns[position], facts.eqns[position].params
    sources = [facts.source_of(v) | From.OUTSIDE for v in eqn.invars]
    bodies = facts.learned.bodies(position)
    calls: list[tuple[Learned, list[From], int, int]]
    match eqn.primitive.name:
        case "scan":
            n_consts, n_carry = compat.scan_counts(eqn)
            calls = [(bodies[0], sources, n_consts, n_carry)]
        case "while":
            [in_round] = facts.learned.bodies(position, "body_jaxpr")
            given, n_consts = sources[p["cond_nconsts"] :], p["body_nconsts"]
            calls = [(in_round, given, n_consts, len(given) - n_consts)]
        case "cond":
            calls = [(body, sources[1:], 0, 0) for body in bodies]
        case _:
            calls = [(bodies[0], sources, 0, 0)]
    marked = row_indices(facts)
    for learned, given, first, n_carry in calls:
        body = _settled(facts, learned, given, first, n_carry)
        of = zip(learned.jaxpr.outvars, eqn.outvars, strict=True)
        results = [inner for inner, v in of if v in marked and not isinstance(inner, compat.Literal)]
        yield body, row_indices(body, results)
        if eqn.primitive.name == "while":  # its condition sees the state as it is in any round
            state = [body.source[v] for v in learned.jaxpr.invars[first:]]
            [goes_on] = facts.learned.bodies(position, "cond_jaxpr")
            of_cond = sources[: p["cond_nconsts"]] + state
            yield _settled(facts, goes_on, of_cond, 0, 0), frozenset()


def _settled(facts: Facts, learned: Learned, sources: Sequence[From], first: int, n_carry: int) -> Facts:
    """A body whose ``n_carry`` first results are its arguments from ``first`` on in the next round."""
    while True:
        body = Facts.of_sources(learned, sources, facts.max_len)
        after = list(sources)
        for i, v in enumerate(learned.jaxpr.outvars[:n_carry], first):
            after[i] |= body.source_of(v)
        if after == sources:
            return body
        sources = after


def _counts_tokens(facts: Facts, position: int) -> bool:
    """Whether an equation makes something of the places in a row, or of how many tokens there are. Outside of
    bodies, `places` makes these of the tokens' positions."""
    eqn, learned = facts.eqns[position], facts.learned
    name, tokens = eqn.primitive.name, learned.token_dims(eqn.outvars[0])
    return (
        any((position, i) in learned.literals for i in range(len(eqn.invars)))
        or (name == "iota" and eqn.params["dimension"] in tokens)
        or (name in _ALONG and not facts.of_tokens(eqn.outvars[0]) and eqn.params[_ALONG[name]] in tokens)
    )


def _mixes(facts: Facts, position: int, of_tokens: Sequence[Any]) -> bool:
    """Whether a token sees others, or what is not known to keep them apart is done to ``of_tokens``, operands
    with a dimension of tokens. What weights make of tokens may be counted and sorted as integers, as routers
    do; whether a model's tokens keep to themselves then, is found by running it. Of the tokens' ids nothing
    may be: a run on random ones would rarely meet those that matter."""
    eqn, learned = facts.eqns[position], facts.learned
    if all(is_routed(facts, v) for v in of_tokens):
        return False
    p, name, operand = learned.params_of(position), eqn.primitive.name, eqn.invars[0]
    results = [v for v in eqn.outvars if v in facts.readers or v in learned.jaxpr.outvars]
    if not all(map(learned.token_dims, results)):
        return True
    if name in _APART:
        return False
    tokens = set(learned.token_dims(of_tokens[0]))
    if name in _ALONG or (name.startswith("reduce_") and "axes" in p):
        along = p.get(_ALONG.get(name, "axes"), -1)
        n_dims = len(learned.dims(operand))
        dims = {d % n_dims for d in (along if isinstance(along, tuple | list) else (along,))}
        return bool(tokens & dims) and not is_routed(facts, operand)
    match name:
        case "dot_general":
            return _contracts_tokens(facts, eqn)
        case "ragged_dot" | "ragged_dot_general":
            return bool(learned.token_dims(eqn.invars[1]))
        case "fft":
            return max(tokens) >= len(learned.dims(operand)) - len(p["fft_lengths"])
        case "gather" if not facts.of_tokens(operand):
            return False
        case _ if name == "gather" or name.startswith("scatter"):
            tokens = set(learned.token_dims(operand))
    return len(tokens) > 1 or any(not _is_at_place(facts, eqn, p, d) for d in tokens)


def is_routed(facts: Facts, v: Any) -> bool:
    """Integers that weights make of tokens."""
    return (
        facts.of_tokens(v)
        and From.PARAMS in facts.source[v]
        and np.dtype(compat.like_of(v).dtype).kind in "iub"
    )


def _is_at_place(facts: Facts, eqn: compat.JaxprEqn, p: Mapping[str, Any], d: int) -> bool:
    """Whether a result's element along the first operand's dimension ``d`` is the operand's at the same
    place: otherwise a token would see another. More places behind the last one are let be: nobody is
    shifted. ``p``: the equation's parameters, of any number of tokens."""
    operand, dims = eqn.invars[0], facts.learned.dims
    match eqn.primitive.name:
        case "slice":
            return p["start_indices"][d] == 0
        case "pad":
            return p["padding_config"][d][0] == 0
        case "tile":
            return bool(p["reps"][d] == 1)
        case "concatenate":
            return d != p["dimension"] or not any(facts.of_tokens(v) for v in eqn.invars[1:])
        case "dynamic_slice":
            return dims(eqn.outvars[0])[d] == dims(operand)[d]
        case "dynamic_update_slice":
            return dims(eqn.invars[1])[d] == dims(operand)[d]
        case "gather":
            return _are_own_places(facts, eqn.invars[1], p["dimension_numbers"].start_index_map, d)
        case name if name.startswith("scatter"):
            of = p["dimension_numbers"].scatter_dims_to_operand_dims
            return _are_own_places(facts, eqn.invars[1], of, d)
        case name if name.startswith("reduce_window"):
            return p["window_dimensions"][d] == p["window_strides"][d] == 1 and p["padding"][d] == (0, 0)
    return False


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
