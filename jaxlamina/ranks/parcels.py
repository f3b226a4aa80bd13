"""How parameters go from one rank to another: in parcels, so that a few small programs send any number of
them, and the sender needs room for one parcel beside its own.

Knows parameters' names and shapes, and what a transport sends; nothing of models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlamina.ranks.model_side import receiver
from jaxlamina.transports import Program, Transport
from jaxlamina.workers.model_worker import Like
from jaxlamina.workers.workspace import tree_bytes

MOST_BYTES = 2**30  # of a parcel, unless one parameter is larger


def parcels(like: Mapping[str, Like]) -> Iterator[list[str]]:
    """The names of parameters that go together, the same at both ends: those of one shape follow each other,
    so that most parcels of a large model are alike."""
    parcel: list[str] = []
    left = MOST_BYTES
    for name in sorted(like, key=lambda name: (like[name].shape, str(like[name].dtype), name)):
        n_bytes = tree_bytes(like[name])
        if parcel and n_bytes > left:
            yield parcel
            parcel, left = [], MOST_BYTES
        parcel.append(name)
        left -= n_bytes
    if parcel:
        yield parcel


class _End(ABC):
    """Of two that send and take in parcels: its transport, the other's rank, and a program for each kind."""

    def __init__(self, transport: Transport, other: int) -> None:
        self._transport, self._other = transport, other
        self._programs: dict[tuple[Any, ...], Program] = {}

    def _program(self, like: Sequence[Like]) -> Program:
        kind = tuple((tuple(x.shape), str(x.dtype)) for x in like)
        if kind not in self._programs:
            self._programs[kind] = self._made(like)
        return self._programs[kind]

    @abstractmethod
    def _made(self, like: Sequence[Like]) -> Program: ...


class ParcelSender(_End):
    """To rank ``other``, whose `ParcelReceiver` takes in what there is of each `send`."""

    def send(self, like: Mapping[str, Like], of: Callable[[Sequence[str]], Mapping[str, jax.Array]]) -> None:
        """Parameters like these, which ``of`` gives parcel by parcel; returns when all are sent."""
        for names in parcels(like):
            found = of(names)
            xs = [jax.device_put(found[name], self._transport.device) for name in names]
            del found
            done = self._transport.unbind(self._program(xs)(self._transport.bind(xs)))
            jax.block_until_ready(done)

    def _made(self, like: Sequence[Like]) -> Program:
        def program(xs: Sequence[jax.Array]) -> jax.Array:
            tie: jax.Array | None = None
            for x in xs:
                tie = self._transport.send(x, self._other, tie)
            assert tie is not None
            return tie.reshape(1)

        return self._transport.compile(program, like)


class ParcelReceiver(_End):
    """From rank ``other``'s `ParcelSender`."""

    def receive(self, like: Mapping[str, Like]) -> dict[str, jax.Array]:
        """Parameters like these, on this rank's device."""
        found: dict[str, jax.Array] = {}
        start = self._transport.bind(jax.device_put(jnp.zeros(1, jnp.int32), self._transport.device))
        for names in parcels(like):
            xs = self._transport.unbind(self._program([like[name] for name in names])(start))
            found |= zip(names, jax.block_until_ready(xs), strict=True)
        return found

    def _made(self, like: Sequence[Like]) -> Program:
        likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
        return receiver(self._transport, likes, [self._other] * len(likes))
