"""Tensor parallelism among model ranks: each holds a share of every large weight, and all compute every
slice.

A product with a weight ``[N, K]`` gives columns that do not need each other, so a rank with N / a of the rows
computes its columns and the ranks exchange them: nothing of the model has to be known, and every value after
a product is whole on every rank. Weights of which something else is read, such as an embedding that is looked
up, stay whole everywhere. The first of the ranks, the leader, talks to the attention workers and passes their
answers on.

Knows jaxprs and ranks; no slice and no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp

from jaxlamina.errors import UserError
from jaxlamina.transports import Sent, Transport
from pallas_kernels import compat
from pallas_kernels.order import tied, zero_after
from splitter import Traced
from splitter.block import Read, Rule, as_it_is, run_by_rules, together, variables

_Axes = dict[str, int]


def shard_axes(traced: Iterable[Traced], params: Iterable[str], n_shards: int) -> _Axes:
    """By parameter's name, of a flat dict, along which dimension it can be shared out: of every traced
    function, those that only products read, all along the same free dimension, which ``n_shards`` must
    divide."""
    names = sorted(params)  # as a dict is flattened
    every = [_axes_of(t, names, n_shards) for t in traced]
    common = {name for found in every for name in found}
    return {
        name: every[0][name]
        for name in common
        if all(found.get(name) == every[0].get(name) for found in every)
    }


def _axes_of(traced: Traced, params: Sequence[str], n_shards: int) -> _Axes:
    names = dict(zip(traced.jaxpr.invars[: traced.n_params], params, strict=True))
    axes: dict[str, set[int | None]] = {}
    for eqn in traced.jaxpr.eqns:
        for operand, v in enumerate(eqn.invars):
            if not isinstance(v, compat.Literal) and v in names:
                axes.setdefault(names[v], set()).add(_free_axis(eqn, operand, n_shards))
    outputs = {names[v] for v in variables(traced.jaxpr.outvars) if v in names}
    found = {name: next(iter(of)) for name, of in axes.items() if len(of) == 1 and name not in outputs}
    return {name: axis for name, axis in found.items() if axis is not None}


def _free_axis(eqn: compat.JaxprEqn, operand: int, n_shards: int) -> int | None:
    """The one dimension of a matrix that a product keeps, if ``eqn`` is such a product of it."""
    if eqn.primitive.name != "dot_general":
        return None
    contracted, batch = eqn.params["dimension_numbers"]
    shape = eqn.invars[operand].aval.shape  # type: ignore[attr-defined]
    if len(shape) != 2 or any(batch) or len(contracted[operand]) != 1:
        return None
    axis = 1 - int(contracted[operand][0])
    return axis if shape[axis] % n_shards == 0 else None


def shard_of(params: dict[str, jax.Array], axes: _Axes, n_shards: int, index: int) -> dict[str, jax.Array]:
    """What the shard of this index holds: its stretch of each parameter in ``axes``, the others whole."""

    def own(name: str, x: jax.Array) -> jax.Array:
        if name not in axes:
            return x
        size = x.shape[axes[name]] // n_shards
        return jax.lax.slice_in_dim(x, index * size, (index + 1) * size, axis=axes[name])

    return {name: own(name, x) for name, x in params.items()}


def shard_like(like: dict[str, Any], axes: _Axes, n_shards: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of any shard's parameters."""

    def own(name: str, x: Any) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        if name in axes:
            shape[axes[name]] //= n_shards
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    return {name: own(name, x) for name, x in like.items()}


def with_shards(
    step: Callable[..., Any], whole: Any, transport: Transport, ranks: Sequence[int]
) -> Callable[..., Any]:
    """``step(weights, …)``, written for weights like ``whole``, for this rank's share of them.

    Products with weights that are shared out are taken of this rank's columns and exchanged among ``ranks``,
    those of the same rows together. ``UserError`` if the step reads such a weight in another way.
    """
    likes = jax.tree.leaves(whole)

    def run(weights: Any, *others: Any) -> Any:
        leaves = jax.tree.leaves(weights)

        def rules(jaxpr: Any) -> dict[str, Rule]:
            own = zip(jaxpr.invars[: len(likes)], leaves, likes, strict=True)
            shared = {v for v, x, like in own if x.shape != like.shape}
            return {"dot_general": _products(jaxpr, shared, transport, tuple(ranks))}

        return run_by_rules(step, (whole, *others), (weights, *others), rules)

    return run


def _products(jaxpr: Any, shared: set[Any], transport: Transport, ranks: tuple[int, ...]) -> Rule:
    """The rule of products with weights that are shared out: those of the same rows give one message to each
    other rank."""
    groups: dict[Any, list[compat.JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        if (operand := _weight(eqn, shared, len(ranks))) is not None:
            key = (eqn.invars[1 - operand], operand, eqn.outvars[0].aval.dtype)
            groups.setdefault(key, []).append(eqn)
    last: jax.Array | None = None

    def exchanged(group: Sequence[compat.JaxprEqn], read: Read) -> list[jax.Array]:
        nonlocal last
        own = [as_it_is(eqn, read)[0] for eqn in group]
        # A product keeps its left operand's dimension first.
        axis = 0 if _weight(group[0], shared, len(ranks)) == 0 else own[0].ndim - 1
        # All of a step's exchanges between shards are in one order by data: k and v, whose messages are
        # alike, could come to be taken for each other.
        parts, last = _gathered(jnp.concatenate(own, axis=axis), transport, ranks, last)
        found, start = [], 0
        for x in own:
            end = start + x.shape[axis]
            pieces = [jax.lax.slice_in_dim(p, start, end, axis=axis) for p in parts]
            found.append(jnp.concatenate(pieces, axis=axis))
            start = end
        return found

    return together(groups.values(), exchanged)


def _weight(eqn: compat.JaxprEqn, shared: set[Any], n_shards: int) -> int | None:
    """Which operand is a weight that is shared out."""
    mine = [n for n, a in enumerate(eqn.invars) if not isinstance(a, compat.Literal) and a in shared]
    if not mine:
        return None
    if len(mine) > 1 or _free_axis(eqn, mine[0], n_shards) is None:
        raise UserError(f"a weight that is shared out is read by {eqn.primitive.name} too: take fewer shards")
    return mine[0]


def needing(xs: Sequence[jax.Array]) -> jax.Array:
    """A float32 0 that is there when every element of ``xs`` is."""
    return sum((zero_after(x.sum()) for x in xs), jnp.zeros((), jnp.float32))


def _gathered(
    x: jax.Array, transport: Transport, ranks: tuple[int, ...], last: jax.Array | None
) -> tuple[list[jax.Array], jax.Array | None]:
    """Every rank's array, in the ranks' order, and what came last: each pair swaps theirs, pairs in one order
    on all."""
    like, found = jax.ShapeDtypeStruct(x.shape, x.dtype), {transport.rank: x}
    for a, b in combinations(ranks, 2):
        if transport.rank == a:
            [last] = transport.swap_each([x], like, [b], after=last)
            found[b] = last
        elif transport.rank == b:
            last = transport.swap_part(x, like, a, 1, after=last)
            found[a] = last
    return [found[rank] for rank in ranks], last


class LeaderEnd:
    """What the leader's programs send and receive by: what attention workers send is passed on to the other
    shards."""

    def __init__(self, inner: Transport, followers: Sequence[int]) -> None:
        self.inner, self.followers = inner, tuple(followers)

    def recv_each(
        self, like: jax.ShapeDtypeStruct, sources: Sequence[int], after: jax.Array | None = None
    ) -> list[jax.Array]:
        return self._passed_on(self.inner.recv_each(like, sources, after))

    def swap_each(
        self,
        xs: Sequence[jax.Array],
        like: jax.ShapeDtypeStruct,
        with_: Sequence[int],
        after: jax.Array | None = None,
    ) -> list[jax.Array]:
        return self._passed_on(self.inner.swap_each(xs, like, with_, after))

    def _passed_on(self, answers: list[jax.Array]) -> list[jax.Array]:
        tie: jax.Array | None = None
        for rank in self.followers:
            for answer in answers:
                tie = self.inner.send(answer, rank, tie)
        return [tied(answer, tie) for answer in answers]

    def send_each(self, xs: Sequence[jax.Array], to: Sequence[int], after: jax.Array | None = None) -> Sent:
        return self.inner.send_each(xs, to, after)


class FollowerEnd:
    """What another shard's programs send and receive by: it sends nothing to attention workers, and has their
    answers from the leader."""

    def __init__(self, inner: Transport, leader: int) -> None:
        self.inner, self.leader = inner, leader

    def recv_each(
        self, like: jax.ShapeDtypeStruct, sources: Sequence[int], after: jax.Array | None = None
    ) -> list[jax.Array]:
        found = []
        for _ in sources:
            after = self.inner.recv(like, self.leader, after)
            found.append(after)
        return found

    def swap_each(
        self,
        xs: Sequence[jax.Array],
        like: jax.ShapeDtypeStruct,
        with_: Sequence[int],
        after: jax.Array | None = None,
    ) -> list[jax.Array]:
        return self.recv_each(like, with_, self.send_each(xs, with_, after))

    def send_each(
        self, xs: Sequence[jax.Array], to: Sequence[int], after: jax.Array | None = None
    ) -> jax.Array:
        """Sends nothing; needs what would be sent, or XLA would take away the exchanges that it came by on
        this side."""
        del to
        return needing([*xs, *([] if after is None else [after])])


ShardEnd = LeaderEnd | FollowerEnd
