"""Arrays that go from one model rank to another: a slice's context, and what its attention needs or gave.

Traced inside model ranks' programs. Knows the split model's variables and no schedule: who sends when is its
callers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from jaxlamina.ranks.cluster_layout import Tie
from jaxlamina.ranks.wires import pack, packed_like, unpack
from jaxlamina.transports import TracedEnd
from pallas_kernels import compat
from splitter.slices import Slice


def not_had(slices: Sequence[Slice], i: int, ran: Iterable[int]) -> list[compat.Var]:
    """Variables of slice i's context that a rank does not have which has the model's inputs and ``ran`` these
    slices."""
    had = set(slices[0].context_vars)
    for k in ran:
        had |= {*slices[k].context_vars, *slices[k + 1].context_vars}
    return [v for v in slices[i].context_vars if v not in had]


def likes_of(variables: Sequence[compat.Atom]) -> list[jax.ShapeDtypeStruct]:
    return [compat.like_of(v) for v in variables]


def row_axis(x: jax.Array, like: jax.ShapeDtypeStruct) -> int | None:
    """The axis of rows of what a slice of other rows has in place of ``like``; None for what has no rows."""
    axes = (axis for axis, (n, m) in enumerate(zip(x.shape, like.shape, strict=True)) if n != m)
    return next(axes, None)


def context_at(
    rows: Int32[jax.Array, " n"], context: Sequence[jax.Array], of: Slice
) -> tuple[jax.Array, ...]:
    """``rows`` of what a slice of more rows goes on from, as that slice ``of`` so many takes it; what has no
    rows as it is."""

    def taken(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        axis = row_axis(x, like)
        return x if axis is None else jnp.take(x, rows, axis=axis, mode="clip")

    return tuple(taken(x, compat.like_of(v)) for x, v in zip(context, of.context_vars, strict=True))


def send_arrays(t: TracedEnd, arrays: Sequence[jax.Array], to: int, after: Tie) -> Tie:
    """``arrays`` to rank ``to``, who takes them by `recv_arrays`. What is there when the last message is
    sent."""
    for line in _by_dtype(arrays):
        after = t.send(pack(*line), to, after=after)
    return after


def recv_arrays(
    t: TracedEnd, likes: Sequence[jax.ShapeDtypeStruct], source: int, after: Tie
) -> tuple[list[jax.Array], Tie]:
    """Arrays like ``likes``, and the last message."""
    found: dict[int, jax.Array] = {}
    for line in _by_dtype(list(enumerate(likes)), of=lambda pair: pair[1]):
        after = t.recv(packed_like(*(like for _, like in line)), source, after=after)
        arrays = unpack(after, *(like for _, like in line))
        found.update(zip((n for n, _ in line), arrays, strict=True))
    return [found[n] for n in range(len(likes))], after


def _by_dtype(xs: Sequence[Any], of: Callable[[Any], Any] = lambda x: x) -> list[list[Any]]:
    """Those of one dtype together, in the order of their first: a message is of one dtype."""
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(jnp.dtype(of(x).dtype), []).append(x)
    return list(groups.values())
