"""One rank of `bench exchange`: compiles and runs ping-pong programs as it is asked to.

A program holds all its round trips in one loop, so Python is in none of them. Rank 0 sends an array and gets
it back; rank 1 receives it and sends it on. Knows its transport; nothing of other transports, or of what the
times are for.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax

from jaxlamina.bench.exchange_ranks import serve
from jaxlamina.job.cluster import Cluster
from jaxlamina.transports import Program, Transport

# Run right before what is timed, so that both ranks begin that together.
N_LEADING_TURNS = 2


def ping_pong(t: Transport, like: jax.ShapeDtypeStruct, n_turns: int) -> Any:
    """A function of one array like ``like`` and of a float32 ``[1]``; at rank 0 the array comes back from
    rank 1."""
    peer = 1 - t.rank

    def lead(x: jax.Array, after: jax.Array) -> tuple[jax.Array, jax.Array]:
        def turn(y: jax.Array, _: None) -> tuple[jax.Array, None]:
            return t.recv(like, peer, t.send(y, peer)), None

        return lax.scan(turn, x, None, length=n_turns)[0], after

    def follow(x: jax.Array, after: jax.Array) -> tuple[jax.Array, jax.Array]:
        def turn(carry: tuple[jax.Array, jax.Array], _: None) -> Any:
            got = t.recv(like, peer, carry[1])
            return (got, t.send(got, peer)), None

        got, tie = lax.scan(turn, (x, after[0]), None, length=n_turns)[0]
        return got, jnp.reshape(tie, (1,))

    return lead if t.rank == 0 else follow


class Bench:
    """This rank's programs, by size."""

    def __init__(self) -> None:
        self._programs: dict[int, tuple[Program, Program, Any]] = {}

    def prepare(self, t: Transport, request: dict[str, Any]) -> dict[str, Any]:
        """Compiles for ``size_bytes`` and ``n_turns``. What its short program exchanges, and how much the
        long one."""
        n = request["size_bytes"] // 4
        like = jax.ShapeDtypeStruct((n,), jnp.float32)
        pattern = np.arange(n, dtype=np.float32) if t.rank == 0 else np.zeros(n, np.float32)
        args = (t.bind(jnp.asarray(pattern)), t.bind(jnp.zeros((1,))))
        short, long = (t.compile(ping_pong(t, like, m), *args) for m in (N_LEADING_TURNS, request["n_turns"]))
        self._programs[request["size_bytes"]] = short, long, args
        return {"exchanges": msgspec.to_builtins(short.exchanges()), "n_exchanges": len(long.exchanges())}

    def time(self, t: Transport, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds of one run, and whether the array is what rank 0 had."""
        short, long, args = self._programs[request["size_bytes"]]
        jax.block_until_ready(short(*args))
        began = time.perf_counter()
        out = jax.block_until_ready(long(*args))
        seconds = time.perf_counter() - began
        got = np.asarray(t.unbind(out[0]))
        return {"seconds": seconds, "right": bool((got == np.arange(len(got), dtype=np.float32)).all())}


def main(cluster: Cluster, rank: int) -> int:
    bench = Bench()
    return serve({"prepare": bench.prepare, "time": bench.time}, cluster, rank)
