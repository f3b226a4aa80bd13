"""Tensor parallelism among model ranks: each holds a share of every large weight, and all compute every
slice.

`shard_model` makes a shard of the model of the whole one: a function like it, of this rank's stretches of the
weights, in which each value that lies apart (`jaxlamina.ranks.apart`) is this rank's stretch of it, and
exchanges with the other shards are operators. It is cut and run as any model is, and its attentions have this
shard's heads alone. A value that is needed whole comes of all shards' columns; of a product that is shared
out along K each has a part of the sum; of an embedding each looks up what is among its rows. What comes last,
the logits, the first shard alone needs. Weights of which something else is read stay whole everywhere.

Where heads cannot be shared out, each shard has all attentions whole, and the first of them, the leader,
talks to the attention workers and passes their answers on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlamina.errors import UserError
from jaxlamina.ranks.apart import (
    HEADS_AXIS,
    SharedOut,
    apart_in,
    column_axis,
    free_axis,
    is_one,
    looks_up_rows,
    of_a_stretch,
    operand_of,
    shape_of,
)
from jaxlamina.transports import Sent, Transport
from jaxlamina.workers.model_worker import Like, ModelFn, trace_step
from pallas_kernels import compat
from pallas_kernels.order import tied, zero_after
from splitter.block import Block, Read, Rule, as_it_is, together
from splitter.operator import attention_p

_sum_p = compat.Primitive("sum_of_shards")
_sum_p.def_abstract_eval(lambda part: part)
_gather_p = compat.Primitive("columns_of_shards")


@_gather_p.def_abstract_eval
def _gathered_like(own: Any, *, axis: int, n: int, to_first: bool) -> Any:
    del to_first
    return compat.ShapedArray((*own.shape[:axis], n * own.shape[axis], *own.shape[axis + 1 :]), own.dtype)


def shard_of(params: dict[str, jax.Array], shared: SharedOut, index: int) -> dict[str, jax.Array]:
    """What the shard of this index holds: its stretch of each parameter that is shared out, others whole."""

    def own(name: str, x: jax.Array) -> jax.Array:
        if name not in shared.axes:
            return x
        size = x.shape[shared.axes[name]] // shared.n
        return jax.lax.slice_in_dim(x, index * size, (index + 1) * size, axis=shared.axes[name])

    return {name: own(name, x) for name, x in params.items()}


def shard_like(like: Mapping[str, Any], shared: SharedOut) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of any shard's parameters."""

    def own(name: str, x: Any) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        if name in shared.axes:
            shape[shared.axes[name]] //= shared.n
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    return {name: own(name, x) for name, x in like.items()}


def shard_model(model: ModelFn, like: Mapping[str, Like], shared: SharedOut, index: int) -> ModelFn:
    """The shard of this index of ``model``, whose parameters are like ``like``; it takes its own
    (`shard_of`). ``UserError``, when it is traced, if that reads a weight that is shared out in another way
    than by products and lookups of rows."""
    if shared.n == 1:
        return model

    def shard(params: Mapping[str, jax.Array], tokens: Any, positions: Any, logits_at: Any) -> jax.Array:
        of_all = logits_at is None and tokens.shape[1] > 1
        traced = trace_step(model, like, *tokens.shape, of_all=of_all)
        inputs = [tokens, positions, *([] if logits_at is None else [logits_at])]
        weights = traced.jaxpr.invars[: traced.n_params]
        axes = {
            v: shared.axes[name] for v, name in zip(weights, sorted(like), strict=True) if name in shared.axes
        }
        rule = _Shard(traced.jaxpr, axes, shared, index).rule
        args = [*traced.consts, *(params[name] for name in sorted(like)), *inputs]
        outs = Block.of(traced.jaxpr)(args, otherwise=rule)
        logits: jax.Array = jax.tree.unflatten(traced.out_tree, outs)
        return logits

    return shard


class _Shard:
    """How one shard runs a model's equations. ``axes``: of weights, as the jaxpr has them, along which
    dimension they are shared out. Columns of the same rows are one exchange."""

    def __init__(self, jaxpr: Any, axes: Mapping[Any, int], shared: SharedOut, index: int) -> None:
        self._n, self._index, self._by_heads, self._axes = shared.n, index, shared.by_heads, axes
        columns: set[Any] = set()
        sums: set[Any] = set()
        for eqn in jaxpr.eqns:
            for operand, v in enumerate(eqn.invars):
                if is_one(v, axes):
                    axis = free_axis(eqn, operand)
                    if axis is None:
                        raise UserError(
                            f"a weight that is shared out is read by {eqn.primitive.name} too: take fewer "
                            f"shards"
                        )
                    (columns if axis == axes[v] else sums).add(v)
        self._columns, self._sums = columns, sums
        self._apart = apart_in(jaxpr, columns, sums, shared.n, shared.by_heads).axis
        groups: dict[Any, list[compat.JaxprEqn]] = {}
        last = None  # of what is exchanged, its outvar
        for eqn in jaxpr.eqns:
            mine = [n for n, v in enumerate(eqn.invars) if is_one(v, columns)]
            if mine and eqn.primitive.name == "dot_general" and eqn.outvars[0] not in self._apart:
                key = (eqn.invars[1 - mine[0]], mine[0], eqn.outvars[0].aval.dtype)
                groups.setdefault(key, []).append(eqn)
            if eqn.primitive is attention_p or any(is_one(v, axes) for v in eqn.invars):
                last = eqn.outvars[0]
        self._together = together(groups.values(), self._whole)
        # Nothing of what follows is shared out. A product that is exchanged together with earlier ones is not
        # what comes last.
        self._last = next((g[0] for g in groups.values() if [e.outvars[0] for e in g] == [last]), None)

    @property
    def rule(self) -> Rule:
        return self._run

    def _run(self, eqn: compat.JaxprEqn, read: Read) -> Sequence[Any]:
        if self._by_heads and eqn.primitive is attention_p:
            return [self._attention(eqn, read)]
        if any(is_one(v, self._sums) for v in eqn.invars):
            return [self._summed(eqn, read)]
        if looks_up_rows(eqn) and is_one(eqn.invars[0], self._axes):
            return [self._looked_up(eqn, read)]
        is_apart = eqn.outvars[0] in self._apart
        if any(is_one(v, self._columns) for v in eqn.invars):
            return as_it_is(eqn, read) if is_apart else self._together(eqn, read)
        if not is_apart:
            return as_it_is(eqn, read)
        axis = self._apart[eqn.outvars[0]]
        n_dims = len(shape_of(eqn.outvars[0]))
        own = [
            # What has other dimensions is the same for every stretch.
            read(v) if is_one(v, self._apart) or len(shape_of(v)) != n_dims else self._own(read(v), axis)
            for v in eqn.invars
        ]
        return compat.bind_eqn(eqn, own, of_a_stretch(eqn, axis, self._n))

    def _attention(self, eqn: compat.JaxprEqn, read: Read) -> jax.Array:
        """Of this shard's heads."""
        qkv = [read(v) if is_one(v, self._apart) else self._own(read(v), HEADS_AXIS) for v in eqn.invars]
        [out] = compat.bind_eqn(eqn, qkv)
        return out if eqn.outvars[0] in self._apart else self._gathered(out, HEADS_AXIS)

    def _whole(self, group: Sequence[compat.JaxprEqn], read: Read) -> list[jax.Array]:
        """Every shard's columns."""
        own = [as_it_is(eqn, read)[0] for eqn in group]
        axis = column_axis(group[0], self._columns)
        every = self._gathered(jnp.concatenate(own, axis=axis), axis, to_first=group[0] is self._last)
        parts, found, start = jnp.split(every, self._n, axis=axis), [], 0
        for x in own:
            end = start + x.shape[axis]
            pieces = [jax.lax.slice_in_dim(p, start, end, axis=axis) for p in parts]
            found.append(jnp.concatenate(pieces, axis=axis))
            start = end
        return found

    def _summed(self, eqn: compat.JaxprEqn, read: Read) -> jax.Array:
        """A product of which each shard has a part of the sum."""
        operand, weight = operand_of(eqn, self._sums)
        contracted, _ = eqn.params["dimension_numbers"]
        given = eqn.invars[1 - operand]
        operands = [read(weight)] * 2
        own = (
            read(given) if is_one(given, self._apart) else self._own(read(given), contracted[1 - operand][0])
        )
        operands[1 - operand] = own
        return _sum_p.bind(compat.bind_eqn(eqn, operands)[0])  # type: ignore[no-any-return]

    def _looked_up(self, eqn: compat.JaxprEqn, read: Read) -> jax.Array:
        """Of rows that others have zeros, and the sum of all."""
        table, rows = (read(v) for v in eqn.invars)
        n_all = shape_of(eqn.invars[0])[0]
        own = jnp.clip(rows, 0, n_all - 1) - self._index * (n_all // self._n)
        [found] = compat.bind_eqn(eqn, [table, jnp.clip(own, 0, len(table) - 1)])
        is_here = (own >= 0) & (own < len(table))
        return _sum_p.bind(jnp.where(is_here, found, jnp.zeros_like(found)))  # type: ignore[no-any-return]

    def _gathered(self, own: jax.Array, axis: int, to_first: bool = False) -> jax.Array:
        return _gather_p.bind(own, axis=axis, n=self._n, to_first=to_first)  # type: ignore[no-any-return]

    def _own(self, value: Any, axis: int) -> Any:
        """This shard's stretch of it; all of what is the same for every one."""
        if jnp.ndim(value) == 0 or value.shape[axis] == 1:
            return value
        size = value.shape[axis] // self._n
        return jax.lax.slice_in_dim(value, self._index * size, (self._index + 1) * size, axis=axis)


class Shards:
    """A replica's ranks that share its weights out, as this rank's programs exchange among them."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport, self.ranks = transport, tuple(ranks)

    @property
    def index(self) -> int:
        """Which of them this is."""
        return self.ranks.index(self._transport.rank)

    def run(
        self, eqn: compat.JaxprEqn, x: jax.Array, after: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """What an exchange gives that a shard's model has for an operator (`EXCHANGES`), and what is there
        when it is over; ``x``: this rank's operand."""
        if eqn.primitive is _sum_p:
            return self._transport.add_up(x, self.ranks, after)
        axis, like = eqn.params["axis"], jax.ShapeDtypeStruct(x.shape, x.dtype)
        if not eqn.params["to_first"]:
            parts, last = self._transport.every(x, self.ranks, after)
        elif self.index:
            tie = self._transport.send_part(x, self.ranks[0], len(self.ranks) - 1, after)
            return jnp.zeros(shape_of(eqn.outvars[0]), x.dtype), tie
        else:
            found = self._transport.recv_each(like, self.ranks[1:], after)
            parts, last = [x, *found], found[-1]
        return jnp.concatenate(parts, axis=axis), last


EXCHANGES = (_sum_p.name, _gather_p.name)


def needing(xs: Sequence[jax.Array]) -> jax.Array:
    """A float32 0 that is there when every element of ``xs`` is."""
    return sum((zero_after(x.sum()) for x in xs), jnp.zeros((), jnp.float32))


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
