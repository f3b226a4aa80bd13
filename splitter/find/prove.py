"""What a region computes, found from its equations and proven by its numbers.

The factor and the soft cap of scores are read from the equations; which tokens see which is read from the
masks' values, for as many tokens as the model may have. Then the region is run on random q, k and v, in
float32, for several lengths and sizes of scores, and must give what causal attention of that factor, cap and
window gives: whatever equations it is written in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from pallas_kernels import compat
from splitter.block import variables
from splitter.find.facts import Facts, computed, moved
from splitter.find.places import POINTWISE
from splitter.find.reach import COMPARED, largest_compared
from splitter.find.regions import Region

_SPREADS = (0.5, 6.0, 60.0)  # standard deviations of scores that a region is tried with
_EXPONENT = 80.0  # of which float32 knows the exponential, and of its negative
_MOST_PAIRS = 1 << 27  # of tokens, whose masks are looked at at once
_LOOKED_AT_WHOLE = 1024  # tokens at most for which a mask is looked at for all, however it is made
_NO_SCORE = 6e4  # what clips or compares scores from here on only tells hidden ones
_FIRST_POSITION = 7  # positions are given from here on, too: masks may go by differences alone


class Refuted(Exception):
    """A region is not attention as the runtime knows it; the text says why."""


class Meaning(NamedTuple):
    """What a region computes: causal attention of scores ``scale * q·k``, capped, within a window."""

    scale: float
    window: int | None
    softcap: float | None


class Mask(NamedTuple):
    """Which tokens see which, as the masks' values say: ``visible`` of each mask, and the sets of values that
    hidden ones have; ``window`` None: all earlier tokens."""

    window: Any  # int, or None
    visible: tuple[Any, ...]
    hidden: frozenset[tuple[Any, ...]]


def meaning(facts: Facts, region: Region, leaves: Sequence[Any], max_len: int) -> Meaning:
    """Raises `Refuted`."""
    least = dict.fromkeys(x for x in (_least(facts, v) for v in leaves) if x is not None)
    grids = tuple(v for v in least if len(facts.learned.token_dims(v)) == 2)
    if not grids:
        raise Refuted("there is no mask: every token sees all others (only causal attention can be served)")
    _same_everywhere(facts, [v for v in least if v not in grids], max_len)
    trial = _Trial(facts, region, grids, max_len)
    mask = _mask(trial)
    scale, softcap = _scoring(facts, region)
    found = Meaning(scale, mask.window, softcap)
    _compare(trial, found, mask)
    return found


_SMALL = 160  # tokens for which a region and its masks are run together


class _Trial:
    """A region and its masks as functions of positions, compiled once for each number of tokens."""

    def __init__(self, facts: Facts, region: Region, grids: tuple[Any, ...], max_len: int) -> None:
        self.facts, self.region, self.grids, self.max_len = facts, region, grids, max_len
        self.sources = tuple(dict.fromkeys(view.source for view in (region.q, region.k, region.v)))
        self._compiled: dict[tuple[int, bool | None], Callable[..., Any]] = {}

    def inputs(self, n: int, seed: int = 0) -> dict[Any, np.ndarray]:
        """Random q, k and v, as their sources are."""
        rng = np.random.default_rng(seed)
        return {
            s: rng.standard_normal(self.facts.learned.shape_at(s, n)).astype(np.float32) for s in self.sources
        }

    def masks(self, n: int, first: int = 0) -> list[np.ndarray]:
        """Each ``[T, T]``, for n tokens from position ``first`` on."""
        row = (np.arange(n, dtype=np.int32) + first)[None]
        _, found = self._run(n, row, self.inputs(n) if n <= _SMALL else None)
        if not all(is_same for _, is_same in found):
            raise Refuted("its mask or bias is not the same for all heads")
        return [mask for mask, _ in found]

    def result(self, n: int, given: Mapping[Any, np.ndarray]) -> np.ndarray:
        [out], _ = self._run(n, np.arange(n, dtype=np.int32)[None], given)
        return out

    def result_within(self, grids: Sequence[np.ndarray], given: Mapping[Any, np.ndarray]) -> np.ndarray:
        """The region's result for tokens that these masks ``[T, T]`` are of, in place of its own."""
        learned, n = self.facts.learned, len(grids[0])
        full = []
        for v, x in zip(self.grids, grids, strict=True):
            dims, shape = learned.token_dims(v), learned.shape_at(v, n)
            one_head = [n if d in dims else 1 for d in range(len(shape))]
            full.append(np.broadcast_to(x.reshape(one_head), shape))
        args = (np.arange(n, dtype=np.int32)[None], *given.values(), *full)
        if (n, None) not in self._compiled:
            known = (*self.sources, *self.grids)
            run = computed(self.facts, [self.region.end], n, known, in_float32=True)
            self._compiled[n, None] = on_host(run, *args)
        [out] = self._compiled[n, None](*args)
        return np.asarray(out)

    def _run(self, n: int, row: np.ndarray, given: Mapping[Any, np.ndarray] | None) -> Any:
        """The region's result, if q, k and v are ``given``; and each mask, and whether it is of all heads."""
        args = (row, *(given.values() if given else ()))
        key = n, given is not None
        if key not in self._compiled:
            wanted = [*([self.region.end] if given else ()), *self.grids]
            run = computed(self.facts, wanted, n, self.sources if given else (), in_float32=True)

            def run_both(*args: Any) -> Any:
                found = run(*args)
                grids = [
                    self._of_each_head(v, x)
                    for v, x in zip(self.grids, found[-len(self.grids) :], strict=True)
                ]
                return found[: -len(self.grids)], [(x[0], (x == x[0]).all()) for x in grids]

            self._compiled[key] = on_host(run_both, *args)
        return self._compiled[key](*args)

    def _of_each_head(self, v: Any, x: Any) -> Any:
        """``[heads, T, T]``"""
        x = jnp.moveaxis(x, self.facts.learned.token_dims(v), (-2, -1))
        return x.reshape(-1, *x.shape[-2:])


# --- Masks ---


def _least(facts: Facts, leaf: Any) -> Any | None:
    """The smallest variable that a mask, factor or bias is broadcast from; None for a number that is written
    there."""
    v = leaf
    while len(facts.learned.token_dims(v)) >= 2:
        position = facts.producer.get(v)
        if position is None:
            break
        eqn = facts.eqns[position]
        if eqn.primitive.name not in (
            "broadcast_in_dim",
            "convert_element_type",
            "reshape",
            "squeeze",
            "expand_dims",
        ):
            break
        if isinstance(eqn.invars[0], compat.Literal):
            return None
        if len(facts.learned.token_dims(eqn.invars[0])) == 1:
            break
        v = eqn.invars[0]
    return v


def _same_everywhere(facts: Facts, others: Sequence[Any], max_len: int) -> None:
    """Refuses a factor or bias of scores, no mask, that depends on a token's place or on how many there are:
    were it only far from the row's beginning, running a few tokens would not show it."""
    learned, wanted = facts.learned, []
    for v in others:
        needed = facts.needed([v])
        of_places = closure_inputs(facts, v) or learned.token_dims(v)
        if of_places or any(
            p in learned.params or (p, i) in learned.literals for p in needed for i in range(3)
        ):
            wanted.append(v)
            if max_len**2 > _MOST_PAIRS and any(
                len(learned.token_dims(x)) > 1 for p in needed for x in facts.eqns[p].outvars
            ):
                raise Refuted(
                    f"its scores have a factor or bias that takes too much memory for {max_len} tokens"
                )
    if not wanted:
        return
    known: dict[Any, np.ndarray] = {}
    for n in (learned.lengths[0], max_len):
        row = np.arange(n, dtype=np.int32)[None]
        for v, x in zip(wanted, on_host(computed(facts, wanted, n), row)(row), strict=True):
            first = x[
                tuple(slice(0, 1) if d in learned.token_dims(v) else slice(None) for d in range(x.ndim))
            ]
            if not (x == known.setdefault(v, first)).all():
                raise Refuted(
                    "its scores have a factor or bias that depends on a token's place, or on how many there "
                    f"are (made at {facts.made_at(v)})"
                )


def on_host(run: Callable[..., Any], *like: Any) -> Callable[..., Any]:
    """Compiled for a CPU, for accelerators round products; quickly, for it runs once or twice."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        compiled = jax.jit(run).lower(*like).compile(compat.COMPILED_QUICKLY)
    return lambda *args: jax.tree.map(np.asarray, compiled(*args))


def _mask(trial: _Trial) -> Mask:
    n = _enough(trial)
    values, mask, flip = trial.masks(n), None, False
    for flip in (False, True):
        mask = _read_mask([x.T for x in values] if flip else values)
        if mask is not None:
            break
    if mask is None:
        raise Refuted(_how_it_differs(values))
    near = min(n, _SMALL)
    again = _read_mask([x.T if flip else x for x in trial.masks(near, _FIRST_POSITION)])
    if again is None or again.window != min(mask.window, near):
        raise Refuted("its mask depends on where the positions begin")
    return mask._replace(window=None) if mask.window == n else mask


def _enough(trial: _Trial) -> int:
    """How many tokens a mask must be looked at with to know it for all that there may be."""
    n = trial.max_len
    if n > _LOOKED_AT_WHOLE:
        most = largest_compared(trial.facts, trial.grids)
        n = n if most is None else min(int(max(96, 2 * most + 8)), n)
    if n * n > _MOST_PAIRS:
        raise Refuted(
            f"its mask would have to be looked at for {n} tokens, which takes too much memory: give a "
            "smaller max_model_len"
        )
    return n


def _read_mask(values: Sequence[np.ndarray]) -> Mask | None:
    """Of grids [query, key]; None where what sees what is not causal."""
    n = len(values[0])
    same = np.ones((n, n), bool)
    visible = tuple(x[0, 0] for x in values)
    for x, own in zip(values, visible, strict=True):
        same &= x == own
    window = int(same[-1].sum())
    if not window or not np.array_equal(same, causal(n, window)):
        return None
    hidden = set[tuple[Any, ...]]()
    for at in range(0, n, 512):  # not all rows at once, which takes many times the masks' memory
        rows = slice(at, at + 512)
        columns = [x[rows][~same[rows]] for x in values]
        kinds = [np.unique(column) for column in columns]
        if any(len(k) > 16 for k in kinds):
            return None
        codes = sum(
            np.searchsorted(k, c) * 32**i for i, (k, c) in enumerate(zip(kinds, columns, strict=True))
        )
        _, firsts = np.unique(np.asarray(codes), return_index=True)
        hidden |= {tuple(_item(c[first]) for c in columns) for first in firsts}
    if any(len(set(k)) > 16 for k in zip(*hidden, strict=True)):
        return None
    return Mask(window, tuple(map(_item, visible)), frozenset(hidden))


def _item(x: Any) -> Any:
    return x.item() if hasattr(x, "item") else x


def causal(n: int, window: int | None) -> Bool[np.ndarray, "T T"]:
    """Which of n tokens sees which."""
    behind = np.arange(n)[:, None] - np.arange(n)[None, :]
    return (behind >= 0) & (behind < (window or n))


def _how_it_differs(values: Sequence[np.ndarray]) -> str:
    n = len(values[0])
    same = np.ones((n, n), bool)
    for x in values:
        same &= x == x[n - 1, n - 1]
    if same.all():
        return "its mask hides nothing: every token sees all others (only causal attention can be served)"
    if any(len(np.unique(x[np.tril_indices(n)])) > 2 for x in values):
        return (
            "something that depends on the distance of tokens is added to its scores (as ALiBi does): the "
            "attention kernels have no such bias"
        )
    seen = np.all([x == x.max() for x in values], axis=0)
    if seen.diagonal(-1).all() and not np.triu(seen, 1).any() and not seen.diagonal()[1:].any():
        return "its mask hides each token from itself: causal attention sees the token's own key, too"
    ahead = np.triu(same, 1)
    if ahead.any():
        t, s = divmod(int(ahead.argmax()), n)
        return (
            f"its mask is not causal: the token at place {t} sees the one at {s} (a prefix-LM or "
            "bidirectional mask cannot be served)"
        )
    return "its mask is neither causal nor causal within a window"


# --- Scores ---


def _scoring(facts: Facts, region: Region) -> tuple[float, float | None]:
    """Factor and cap, from the equations between the product and the softmax. Where they are another thing,
    the numbers will not agree."""
    states: dict[Any, tuple[float, float | None]] = {facts.eqns[region.scores].outvars[0]: (1.0, None)}
    exponent = 1.0
    last: tuple[float, float | None] = (1.0, None)
    for p in sorted(region.eqns - {region.scores}):
        eqn = facts.eqns[p]
        name = eqn.primitive.name
        if name == "exp2":
            exponent = float(np.log(2.0))
        of = [a for a in variables(eqn.invars) if a in states]
        if len(of) != 1 or p == region.mix or name in ("exp", "exp2", "reduce_max", "reduce_sum", "argmax"):
            continue
        after = _scored(facts, eqn, of[0], states[of[0]])
        if after is not None:
            states[eqn.outvars[0]] = last = after
    scale, cap = last
    return scale * exponent, None if cap is None else cap * exponent


def _scored(
    facts: Facts, eqn: compat.JaxprEqn, x: Any, state: tuple[float, float | None]
) -> tuple[float, float | None] | None:
    """scale and cap after an equation of scores: ``cap`` -1 while a tanh waits for its factor."""
    scale, cap = state
    name = eqn.primitive.name
    if name in ("max", "min", "clamp", *COMPARED):
        limits = [number(facts, a) for a in eqn.invars if a is not x]
        if any(c is not None and abs(c) < _NO_SCORE for c in limits):
            raise Refuted(f"its scores are clipped, or compared with a number, at {compat.where(eqn)}")
    if name == "tanh":
        return (scale, 1.0) if cap is None else None
    if name == "neg":
        return -scale, cap
    if name in ("mul", "div"):
        other = eqn.invars[1] if eqn.invars[0] is x else eqn.invars[0]
        factor = number(facts, other)
        if factor is None:
            return state
        if name == "div":
            if eqn.invars[0] is not x or factor == 0:
                return None
            factor = 1.0 / factor
        # cap * tanh(scale * s / cap) times a factor
        return scale * factor, None if cap is None else cap * factor
    if name in ("add", "sub", "select_n", "max", "min", "convert_element_type", "stop_gradient") or (
        len(eqn.invars) == 1 and moved(eqn, np.zeros(x.aval.shape, np.int8)) is not None
    ):
        return state
    return None


def number(facts: Facts, atom: Any) -> float | None:
    """The one number that a value is everywhere, if it is known while tracing."""
    if isinstance(atom, compat.Literal):
        return float(np.asarray(atom.val)) if np.ndim(atom.val) == 0 else None
    v = atom
    while facts.producer.get(v) is not None:
        eqn = facts.eqns[facts.producer[v]]
        if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze"):
            break
        if isinstance(eqn.invars[0], compat.Literal):
            return float(np.asarray(eqn.invars[0].val))
        v = eqn.invars[0]
    if (
        not facts.only_positions(v)
        or facts.learned.token_dims(v)
        or facts.learned.jaxpr.invars[-1] in closure_inputs(facts, v)
    ):
        return None
    row = np.zeros((1, 1), np.int32)
    [x] = on_host(computed(facts, [v], facts.learned.lengths[0]), row)(row)
    flat = np.unique(np.asarray(x, np.float32))
    return float(flat[0]) if flat.size == 1 and isfinite(flat[0]) else None


def closure_inputs(facts: Facts, v: Any) -> set[Any]:
    """The function's arguments that a value needs."""
    found = {v}
    for p in facts.needed([v]):
        found.update(variables(facts.eqns[p].invars))
    return found & set(facts.learned.jaxpr.invars)


# --- Numbers ---


def _compare(trial: _Trial, found: Meaning, mask: Mask) -> None:
    near = min(_enough(trial), _SMALL)
    if found.window is not None:
        near = max(near, min(found.window + 5, trial.max_len))
    heads = trial.region.n_heads
    at = None
    if near > _SMALL and _treats_places_alike(trial):
        at = np.concatenate([np.arange(_SMALL // 2), np.arange(near - _SMALL // 2, near)])
    elif near**2 * heads > _MOST_PAIRS:
        raise Refuted(
            f"its window of {found.window} tokens for {heads} heads takes too much memory to be looked at"
        )
    met = set[tuple[Any, ...]]()
    for n in (3, near if at is None else _SMALL):
        for values in (trial.masks(n), [x.T for x in trial.masks(n)]):
            own = _read_mask(values)
            if own is not None and own.visible == mask.visible:
                met |= own.hidden
                break
        _compare_at(trial, found, causal(n, found.window))
    if at is not None:
        grids = [x[np.ix_(at, at)] for x in trial.masks(near)]
        seen = causal(near, found.window)[np.ix_(at, at)]
        hides = np.any([x != own for x, own in zip(grids, mask.visible, strict=True)], axis=0)
        met |= {tuple(map(_item, values)) for values in zip(*(x[hides] for x in grids), strict=True)}
        _compare_at(trial, found, seen, grids)
    if not mask.hidden <= met:
        raise Refuted("its mask has other values for more tokens")


def _treats_places_alike(trial: _Trial) -> bool:
    """Whether nothing but masks tells a region's places apart: then some of a row's tokens, with what the
    masks say of these, show what all of them would."""
    region, eqns = trial.region, trial.facts.eqns
    names = {eqns[p].primitive.name for p in region.eqns - {region.scores, region.mix}}
    return names <= POINTWISE | {"reshape", "reduce_max", "reduce_sum", "reduce_and", "reduce_or", "argmax"}


def _compare_at(
    trial: _Trial, found: Meaning, seen: Bool[np.ndarray, "T T"], grids: Sequence[np.ndarray] = ()
) -> None:
    """Of tokens of which each sees those of ``seen``, by the region's own masks or by these ``grids``."""
    region, n = trial.region, len(seen)
    views = (region.q, region.k, region.v)
    width = region.q.shape[1]
    for spread in _SPREADS:
        each = (spread / (abs(found.scale) * width**0.5)) ** 0.5 if found.scale else 1.0
        given = {
            s: x if s is region.v.source else x * np.float32(each) for s, x in trial.inputs(n, seed=n).items()
        }
        q, k, v = (view.of(given[view.source], n) for view in views)
        expected, highest = attention_of(q, k, v, found, seen)
        result = trial.result_within(grids, given) if grids else trial.result(n, given)
        got = region.out.of(result, n)
        # A softmax without its maximum taken off is none where an exponential is no number of float32; where
        # it is one, it is compared.
        beyond = np.abs(highest) > _EXPONENT
        if not np.isfinite(got[beyond]).all():
            expected, got = expected[~beyond], got[~beyond]
        tolerance = 1e-5 * (1 + spread) * max(1.0, float(np.abs(v).max()))
        if not np.allclose(got, expected, rtol=0, atol=tolerance):
            raise Refuted(
                "what it computes is not softmax attention of its queries, keys and values: on random ones "
                f"it differs by {float(np.abs(got - expected).max()):.2g} from causal attention with scale "
                f"{found.scale:.6g}, soft cap {found.softcap}, window {found.window}"
            )


def attention_of(
    q: Float[np.ndarray, "T N H"],
    k: Float[np.ndarray, "T K H"],
    v: Float[np.ndarray, "T K H"],
    found: Meaning,
    seen: Bool[np.ndarray, "T T"],
) -> tuple[Float[np.ndarray, "T N H"], Float[np.ndarray, "T N"]]:
    """In float64; and each row's highest score."""
    heads = q.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) * found.scale
    if found.softcap is not None:
        scores = found.softcap * np.tanh(scores / found.softcap)
    scores = np.where(seen, scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - highest)
    out = np.einsum("nts,snh->tnh", weights / weights.sum(axis=-1, keepdims=True), v)
    return out, highest[..., 0].T
