"""How parameters go from one rank to another: in parcels, so that a few small programs send any number of
them, and the sender needs room for one parcel beside its own.

Knows parameters' names and shapes, and what a transport sends; nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxlamina.ranks.model_side import receiver
from jaxlamina.transports import Program, Transport
from jaxlamina.workers.model_worker import Like

MOST_BYTES = 2**30  # of a parcel, unless one parameter is larger
_Likes = tuple[tuple[tuple[int, ...], str], ...]  # a parcel's shapes and dtypes, which its program is of


def parcels(like: Mapping[str, Like]) -> Iterator[list[str]]:
    """The names of parameters that go together, the same at both ends: those of one shape follow each other,
    so that most parcels of a large model are alike."""
    parcel: list[str] = []
    left = MOST_BYTES
    for name in sorted(like, key=lambda name: (like[name].shape, str(like[name].dtype), name)):
        n_bytes = like[name].size * like[name].dtype.itemsize
        if parcel and n_bytes > left:
            yield parcel
            parcel, left = [], MOST_BYTES
        parcel.append(name)
        left -= n_bytes
    if parcel:
        yield parcel


class ParcelSender:
    """To rank ``to``, whose `ParcelReceiver` takes in what there is of each `send`."""

    def __init__(self, transport: Transport, to: int) -> None:
        self._transport, self._to = transport, to
        self._programs: dict[_Likes, Program] = {}

    def send(self, like: Mapping[str, Like], of: Callable[[Sequence[str]], Mapping[str, jax.Array]]) -> None:
        """Parameters like these, which ``of`` gives parcel by parcel; returns when all are sent."""
        for names in parcels(like):
            found = of(names)
            xs = [jax.device_put(found[name], self._transport.device) for name in names]
            del found
            done = self._transport.unbind(self._program(xs)(self._transport.bind(xs)))
            jax.block_until_ready(done)

    def _program(self, xs: Sequence[jax.Array]) -> Program:
        def program(xs: Sequence[jax.Array]) -> jax.Array:
            tie: jax.Array | None = None
            for x in xs:
                tie = self._transport.send(x, self._to, tie)
            assert tie is not None
            return tie.reshape(1)

        key = _likes(xs)
        if key not in self._programs:
            self._programs[key] = self._transport.compile(program, xs)
        return self._programs[key]


class ParcelReceiver:
    """From rank ``source``'s `ParcelSender`."""

    def __init__(self, transport: Transport, source: int) -> None:
        self._transport, self._source = transport, source
        self._programs: dict[_Likes, Program] = {}

    def receive(self, like: Mapping[str, Like]) -> dict[str, jax.Array]:
        """Parameters like these, on this rank's device."""
        found: dict[str, jax.Array] = {}
        start = self._transport.bind(jax.device_put(jnp.zeros(1, jnp.int32), self._transport.device))
        for names in parcels(like):
            likes = [jax.ShapeDtypeStruct(like[name].shape, like[name].dtype) for name in names]
            xs = self._transport.unbind(self._program(likes)(start))
            found |= zip(names, jax.block_until_ready(xs), strict=True)
        return found

    def _program(self, likes: Sequence[jax.ShapeDtypeStruct]) -> Program:
        key = _likes(likes)
        if key not in self._programs:
            self._programs[key] = receiver(self._transport, likes, [self._source] * len(likes))
        return self._programs[key]


def _likes(xs: Sequence[Like]) -> _Likes:
    return tuple((tuple(x.shape), str(x.dtype)) for x in xs)
