"""One rank of `test_transports`: each scenario traces a program for its rank, runs it and says what it has
seen.

What a rank sends is made from its own number, so a right value at another rank can only have come over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from compile_events import compile_events
from jax import lax

from jaxlamina.bench.exchange_ranks import serve
from jaxlamina.job.cluster import Cluster
from jaxlamina.transports import Transport
from pallas_kernels.order import tied

DTYPES = ("float32", "bfloat16", "int8", "int32", "uint8", "float16")
SHAPE = (5, 3, 7)


def like(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def others(t: Transport) -> list[int]:
    return [rank for rank in range(t.n_ranks) if rank != t.rank]


def values(rank: int, shape: tuple[int, ...], dtype: Any, salt: int = 0) -> np.ndarray:
    """Any finite values of the type, another set for each rank."""
    rng = np.random.default_rng([rank, salt, *shape])
    dtype = np.dtype(jnp.dtype(dtype))
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    return (rng.standard_normal(shape) * 50).astype(dtype)


def run(
    t: Transport, function: Callable[..., Any], *args: Any, times: int = 1
) -> tuple[list[np.ndarray], Any]:
    """Compiles and runs; its results here, and its exchanges as the message that ranks send each other."""
    program = t.compile(function, *args)
    for _ in range(times):
        out = jax.block_until_ready(t.unbind(program(*args)))
    return [np.asarray(x) for x in jax.tree.leaves(out)], msgspec.to_builtins(program.exchanges())


def same(found: Any, wanted: Any) -> bool:
    found, wanted = np.asarray(found), np.asarray(wanted)
    return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


def dtypes(t: Transport, request: dict[str, Any]) -> Any:
    """Rank 0 sends each other rank an array of each type, which sends another one back."""
    kinds = [jnp.dtype(name) for name in DTYPES]

    def lead(*xs: jax.Array) -> Any:
        got, tie = [], None
        for rank in others(t):
            for x in xs:
                tie = t.send(x, rank, tie)
                got.append(t.recv(like(SHAPE, x.dtype), rank, tie))
                tie = got[-1]
        return got

    def follow(*xs: jax.Array) -> Any:
        got, tie = [], None
        for x in xs:
            got.append(t.recv(like(SHAPE, x.dtype), 0, tie))
            tie = t.send(x, 0, got[-1])
        return got, jnp.reshape(tie, (1,))

    mine = [jnp.asarray(values(t.rank, SHAPE, kind)) for kind in kinds]
    got, exchanges = run(t, lead if t.rank == 0 else follow, *mine)
    senders = others(t) if t.rank == 0 else [0]
    wanted = [values(rank, SHAPE, kind) for rank in senders for kind in kinds]
    names = [f"{kind.name} of rank {rank}" for rank in senders for kind in kinds]
    right = [same(a, b) for a, b in zip(got, wanted, strict=False)]
    return {"wrong": [n for n, ok in zip(names, right, strict=True) if not ok], "exchanges": exchanges}


def order(t: Transport, request: dict[str, Any]) -> Any:
    """Six arrays of one shape, from rank 0 to the last, which uses the last of them first."""
    n, last = 6, t.n_ranks - 1

    def lead(x: jax.Array) -> Any:
        tie = None
        for i in range(n):
            # the later, the sooner it can be computed
            y = x + i
            for _ in range(n - i):
                y = jnp.sin(y) @ jnp.eye(8, dtype=y.dtype)
            tie = t.send(y * 0 + i, last, tie)
        return jnp.reshape(tie, (1,))

    def follow(x: jax.Array) -> Any:
        got: list[jax.Array] = []
        for _ in range(n):
            got.append(t.recv(like((8, 8)), 0, got[-1] if got else None))
        return [y + 10 * got[-1] for y in reversed(got)]

    def idle(x: jax.Array) -> Any:
        return x + 1

    program = {0: lead, last: follow}.get(t.rank, idle)
    got, exchanges = run(t, program, jnp.ones((8, 8)), times=3)
    return {"got": [float(y[0, 0]) for y in got if y.ndim == 2], "exchanges": exchanges}


def sums(t: Transport, request: dict[str, Any]) -> Any:
    """What ranks add up, one sum after another, of two types; the sums that are wrong."""
    shapes = [((64, 1024), "bfloat16"), ((8, 24), "float32"), ((3, 8), "bfloat16")]
    ranks = range(t.n_ranks)
    given = [[values(rank, *of, salt=i) for rank in ranks] for i, of in enumerate(shapes)]

    def program(*xs: jax.Array) -> Any:
        found, last = [], None
        for x in xs:
            total, last = t.add_up(x, ranks, last)
            found.append(total)
        return found

    got, exchanges = run(t, program, *(jnp.asarray(x[t.rank]) for x in given), times=5)
    wanted = [sum(x.astype(np.float32) for x in of_all).astype(of_all[0].dtype) for of_all in given]
    wrong = [str(shape) for shape, a, b in zip(shapes, got, wanted, strict=True) if not same(a, b)]
    return {"wrong": wrong, "exchanges": exchanges}


def each(t: Transport, request: dict[str, Any]) -> Any:
    """Rank 0 sends each other rank its own array, of its own rows, and gets one of each, in turns of a
    loop."""
    turns, shape = int(request["turns"]), (4, 6)

    def lead(x: jax.Array) -> Any:
        def turn(carry: Any, _: None) -> Any:
            total, after = carry
            tie = t.send_each([total + rank for rank in others(t)], others(t), after)
            got = t.recv_each(like(shape), others(t), tie)
            return (total + sum(rank * y for rank, y in zip(others(t), got, strict=True)), got[-1]), None

        return lax.scan(turn, (x, x), None, length=turns)[0][0]

    def follow(x: jax.Array) -> Any:
        def turn(carry: Any, _: None) -> Any:
            kept, after = carry
            got = t.recv_part(like(shape), 0, t.n_ranks - 1, after)
            tie = t.send_part(got * 2, 0, t.n_ranks - 1, got)
            return (kept + got, tie), None

        kept, tie = lax.scan(turn, (x, jnp.zeros(())), None, length=turns)[0]
        return kept, jnp.reshape(tie, (1,))

    x = np.full(shape, t.rank, np.float32)
    got, exchanges = run(t, lead if t.rank == 0 else follow, jnp.asarray(x))
    return {"got": got[0].tolist(), "exchanges": exchanges}


def again(t: Transport, request: dict[str, Any]) -> Any:
    """A program with donated state that is called many times, its results given to the next call; and how
    often something was traced or compiled for that. ``request["keeps"]``: on disk, and read from there."""
    peer = (t.rank + 1) % 2

    def lead(x: jax.Array, state: jax.Array) -> Any:
        tie = t.send(x + state, peer)
        return t.recv(like((4,)), peer, tie), state + 1

    def follow(x: jax.Array, state: jax.Array) -> Any:
        got = t.recv(like((4,)), peer)
        tie = t.send(got * 2, peer, got)
        return got, state + 1 + tie

    if t.rank > 1:
        return None
    x, state = jnp.full((4,), 1.0), t.bind(jnp.zeros((4,)))
    name = t.name_of("again") if request.get("keeps") else None
    if name is not None and (found := t.kept(name)):
        program, _ = found
    else:
        function, keep = lead if t.rank == 0 else follow, name and (name, None)
        program = t.compile_later(function, x, state, donate_argnums=(1,), keep=keep)()
    seen, n_compiling = list[float](), 0
    for _ in range(5):
        with compile_events() as events:
            out, state = program(x, state)
        n_compiling += len(events)
        x = t.unbind(out)
        seen.append(float(x[0]))
    of_state = float(np.asarray(t.unbind(state))[0])
    return {"seen": seen, "state": of_state, "n_compiling": n_compiling, "n_kept": t.n_kept}


def after(t: Transport, request: dict[str, Any]) -> Any:
    """What a send waits for must not change what it sends, be it a tensor, of any values, or a number."""
    kinds = [jnp.dtype(name) for name in DTYPES]

    def lead(x: jax.Array, *xs: jax.Array) -> Any:
        tie = jnp.zeros(())
        for y in xs:
            tie = t.send(y, 1, x[2] + tie if request["number"] else x + tie)
        return jnp.reshape(tie, (1,))

    def follow(x: jax.Array, *xs: jax.Array) -> Any:
        got: list[jax.Array] = []
        for y in xs:
            got.append(t.recv(like(SHAPE, y.dtype), 0, got[-1] if got else x))
        return got

    sent = [values(0, SHAPE, kind) for kind in kinds]
    if t.rank > 1:
        return None
    x = jnp.asarray([np.nan, np.inf, 2.0], jnp.float32)
    got, _ = run(t, lead if t.rank == 0 else follow, x, *(jnp.asarray(y) for y in sent))
    return [k.name for k, y, z in zip(kinds, got, sent, strict=False) if t.rank == 1 and not same(y, z)]


def lists(t: Transport, request: dict[str, Any]) -> Any:
    """Compiles a program, runs nothing: ``case`` says what is the matter with the last rank's."""
    case, last = request["case"], t.n_ranks - 1

    def lead(x: jax.Array) -> Any:
        tie = t.send_each([x] * last, others(t))
        got = t.recv_each(like((2, 8)), others(t), tie)
        return jnp.reshape(tie, (1,)) if case == "unused" else sum(got[1:], got[0])

    def follow(x: jax.Array) -> Any:
        bad = case if t.rank == last else "none"
        wanted = like((3 if bad == "shape" else 2, 8), jnp.int8 if bad == "dtype" else x.dtype)
        got = t.recv_part(wanted, 0, last)
        tie = t.send_part(got.astype(x.dtype)[:2], 0, last, got)
        if bad == "more":
            tie = t.send_part(x, 0, last, tie)
        return jnp.reshape(tie, (1,))

    program = t.compile(lead if t.rank == 0 else follow, jnp.ones((2, 8)))
    return msgspec.to_builtins(program.exchanges())


def narrow(t: Transport, request: dict[str, Any]) -> Any:
    """Float32 messages there and back, whose ties are wanted in bfloat16 only."""
    n = t.n_ranks - 1

    def lead(x: jax.Array, y: jax.Array) -> Any:
        y = y + t.send(x, 1).astype(y.dtype)
        y = y + t.send_each([x] * n, others(t), x).astype(y.dtype)
        got = t.recv_each(like((2, 8)), others(t), y[0])
        return y, sum(got[1:], got[0])

    def follow(x: jax.Array, y: jax.Array) -> Any:
        after = t.recv(like((2, 8)), 0) if t.rank == 1 else x
        got = t.recv_part(like((2, 8)), 0, n, after)
        return y + t.send_part(got * 3, 0, n, got).astype(y.dtype), after

    x = jnp.asarray(values(0, (2, 8), "float32"))
    got, exchanges = run(t, lead if t.rank == 0 else follow, x, jnp.ones((4,), jnp.bfloat16))
    right = same(got[0], np.ones((4,), jnp.bfloat16))
    if t.rank == 0:
        right &= bool(np.allclose(got[1], 3 * n * np.asarray(x), rtol=1e-6, atol=0))
    elif t.rank == 1:
        right &= same(got[1], x)
    return {"right": right, "exchanges": exchanges}


def q_first(t: Transport, request: dict[str, Any]) -> Any:
    """Rank 0 sends q, does long work, sends k and v; rank 1 says when each was there, from the start it gave.

    Rank 1's receives are programs of their own, one after the other, so that it can look at its clock
    between. ``request["tie"]``: whether k and v depend on the send of q, or q's on them, as in a step without
    Q-first.
    """
    size, n_turns = 512, int(request["turns"])

    def work(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, n_turns, lambda _, y: jnp.tanh(y @ w), x)

    def lead(x: jax.Array, w: jax.Array) -> Any:
        x = tied(x, t.recv(like((1,)), 1))
        q = x[:8] @ w
        if request["tie"]:
            tie = t.send(q, 1)
            kv = work(tied(x, tie), w)
        else:
            kv = work(x, w)
            tie = t.send(tied(q, kv), 1)
        return jnp.reshape(t.send(kv, 1, tie), (1,))

    x = jnp.asarray(values(0, (size, size), "float32") / 50)
    w = jnp.asarray(values(1, (size, size), "float32") / 50 / size**0.5)
    if t.rank == 0:
        program, alone = t.compile(lead, x, w), jax.jit(work)
        jax.block_until_ready(alone(x, w))
        began = time.monotonic()
        jax.block_until_ready(alone(x, w))
        work_s = time.monotonic() - began
        for _ in range(request["rounds"]):
            jax.block_until_ready(program(x, w))
        return {"work_s": work_s, "exchanges": msgspec.to_builtins(program.exchanges())}
    if t.rank > 1:
        return None
    go = t.compile(lambda x: jnp.reshape(t.send(x, 0), (1,)), jnp.ones((1,)))
    first = t.compile(lambda x: t.recv(like((8, size)), 0, x), jnp.ones((1,)))
    second = t.compile(lambda x: t.recv(like((size, size)), 0, x), jnp.ones((1,)))
    arrivals = []
    for _ in range(request["rounds"]):
        time.sleep(0.05)  # rank 0 is waiting by then
        began = time.monotonic()
        jax.block_until_ready(go(jnp.ones((1,))))
        q = jax.block_until_ready(t.unbind(first(jnp.ones((1,)))))
        q_s = time.monotonic() - began
        kv = jax.block_until_ready(t.unbind(second(jnp.ones((1,)))))
        arrivals.append((q_s, time.monotonic() - began))
    right = np.allclose(q, x[:8] @ w, rtol=1e-4) and np.allclose(
        kv, jax.jit(work)(x, w), rtol=1e-2, atol=1e-2
    )
    three = [e for p in (go, first, second) for e in p.exchanges()]
    return {"arrivals_s": arrivals, "right": bool(right), "exchanges": msgspec.to_builtins(three)}


def hang(t: Transport, request: dict[str, Any]) -> Any:
    """Rank 0 waits for what rank 1 never sends."""
    if t.rank == 0:
        run(t, lambda x: t.recv(like((4,)), 1, x), jnp.ones((1,)))
    return "idle"


def main(cluster: Cluster, rank: int) -> int:
    scenarios = (dtypes, order, sums, each, again, after, lists, narrow, q_first, hang)
    return serve({f.__name__: f for f in scenarios}, cluster, rank)
