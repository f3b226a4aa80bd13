"""All ranks in one process: a rank's program is cut at its exchanges into pieces, and those that are equal
are compiled once.

A piece is what a rank computes between two exchanges. Equal layers have equal pieces, so a few compiled ones
serve any number of layers, as slices do; and pieces on different devices run side by side. Messages are
handed over: by `jax.device_put`, or as they are on one device.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxlamina.steps.exchange import Exchange
from jaxlamina.transports import Transport, compiler_options
from jaxlamina.workers.workspace import program_bytes
from pallas_kernels import compat
from splitter.block import Block, variables
from splitter.program import canonical

_send_p = compat.Primitive("local_send")
_send_p.multiple_results = True
_send_p.def_abstract_eval(lambda x, *, to: [])
_recv_p = compat.Primitive("local_recv")
_recv_p.def_abstract_eval(lambda *, source, like: jax.core.ShapedArray(like.shape, like.dtype))


class HandedOver:
    """What was sent and not yet received, by (sender, receiver)."""

    def __init__(self) -> None:
        self.waiting: defaultdict[tuple[int, int], deque[jax.Array]] = defaultdict(deque)
        self.n_moved = 0

    def put(self, source: int, to: int, x: jax.Array) -> None:
        self.waiting[source, to].append(x)
        self.n_moved += 1

    def take(self, source: int, to: int) -> jax.Array | None:
        if not self.waiting[source, to]:
            return None
        self.n_moved += 1
        return self.waiting[source, to].popleft()


class LocalTransport(Transport):
    """One rank's end. Sends give no tie: pieces run in the order they were traced in. ``after`` is not
    needed."""

    name, is_one_program = "local", False

    def __init__(self, rank: int, n_ranks: int, device: jax.Device, compiled: CompiledPieces) -> None:
        self.rank, self.n_ranks, self.device, self._compiled = rank, n_ranks, device, compiled

    # --- traced ---
    def send(self, x: jax.Array, to: int, after: jax.Array | None = None) -> None:
        _send_p.bind(x, to=to)

    def recv(self, like: jax.ShapeDtypeStruct, source: int, after: jax.Array | None = None) -> jax.Array:
        found: jax.Array = _recv_p.bind(source=source, like=jax.ShapeDtypeStruct(like.shape, like.dtype))
        return found

    def send_each(self, xs: Sequence[jax.Array], to: Sequence[int], after: jax.Array | None = None) -> None:
        for x, rank in zip(xs, to, strict=True):
            self.send(x, rank)

    # --- programs ---
    def compile_later(  # type: ignore[override]  # a program that `run_together` runs, and nobody calls
        self,
        function: Callable[..., Any],
        *args: Any,
        donate_argnums: Sequence[int] = (),
        behind: bool = False,
        keep: tuple[str, Any] | None = None,
    ) -> Callable[[], CutProgram]:
        with jax.default_device(self.device):  # kernels are picked by it
            traced = jax.make_jaxpr(function, return_shape=True)(*args)
        n_leaves = [len(jax.tree.leaves(arg)) for arg in args]
        donated = [n for n in donate_argnums for _ in range(n_leaves[n])]
        starts = [sum(n_leaves[:n]) for n in range(len(args))]
        given_away = {starts[n] + i for n in set(donated) for i in range(n_leaves[n])}
        program = CutProgram(self.rank, self.device, traced, given_away, self._compiled)
        return lambda: program


class _Piece(NamedTuple):
    """Equations between exchanges. ``donated``: of its arguments; ``drops``: what nobody reads after it."""

    block: Block
    donated: tuple[int, ...]
    key: str
    drops: tuple[Any, ...]


@dataclass(frozen=True)
class _Message:
    """An exchange: ``sent`` goes to the peer, or what comes is ``received``."""

    peer: int
    sent: Any = None
    received: Any = None
    drops: tuple[Any, ...] = ()


class CompiledPieces:
    """Pieces as programs, those that are equal once for each device."""

    def __init__(self, on_compile: Callable[[str], None] = lambda what: None) -> None:
        self._jitted: dict[tuple[str, jax.Device], Any] = {}
        self._ahead: dict[tuple[str, jax.Device], Any] = {}
        self._on_compile = on_compile

    def run(self, piece: _Piece, device: jax.Device, args: Sequence[Any], what: str) -> Sequence[Any]:
        """``what``: the program whose piece it is, as compilations are counted by."""
        found = self._ahead.get((piece.key, device)) or self.jitted(piece, device, what)
        outs: Sequence[Any] = found(*args)
        return outs

    def jitted(self, piece: _Piece, device: jax.Device, what: str) -> Any:
        key = piece.key, device
        if key not in self._jitted:
            self._on_compile(what)
            self._jitted[key] = jax.jit(lambda *args: piece.block(args), donate_argnums=piece.donated)
        return self._jitted[key]

    def compile(self, piece: _Piece, device: jax.Device, what: str, *, behind: bool) -> None:
        """Before it is run; in any thread."""
        key = piece.key, device
        if key not in self._ahead:
            lowered = self.jitted(piece, device, what).lower(*_likes(piece, device))
            self._ahead[key] = lowered.compile(compiler_options=compiler_options(device, behind=behind))

    def n_bytes(self, piece: _Piece, device: jax.Device, what: str) -> int:
        """What a piece takes beside its arguments."""
        return program_bytes(self.jitted(piece, device, what), *_likes(piece, device))


def _likes(piece: _Piece, device: jax.Device) -> list[jax.ShapeDtypeStruct]:
    on = SingleDeviceSharding(device)
    return [compat.like_of(v).update(sharding=on) for v in piece.block.invars]


class CutProgram:
    """A rank's program as pieces and messages in order; `run_together` runs it. ``what``: its name, for
    counts."""

    what = ""

    def __init__(
        self, rank: int, device: jax.Device, traced: Any, donated: set[int], compiled: CompiledPieces
    ) -> None:
        closed, shapes = traced
        self.rank, self.device, self._compiled = rank, device, compiled
        jaxpr, consts = compat.open_jaxpr(closed)
        self._tree = jax.tree.structure(shapes)
        self._invars, self._outvars = jaxpr.invars, jaxpr.outvars
        self._consts = dict(zip(jaxpr.constvars, jax.device_put(list(consts), device), strict=True))
        self.steps = _cut(jaxpr, {jaxpr.invars[i] for i in donated})

    @property
    def pieces(self) -> list[_Piece]:
        return [step for step in self.steps if isinstance(step, _Piece)]

    def exchanges(self) -> tuple[Exchange, ...]:
        found = []
        for step in self.steps:
            if isinstance(step, _Message):
                op, v = ("recv", step.received) if step.sent is None else ("send", step.sent)
                found.append(Exchange(op, step.peer, tuple(v.aval.shape), jnp.dtype(v.aval.dtype).name))  # type: ignore[arg-type]
        return tuple(found)

    def compile(self, *, behind: bool = False) -> None:
        for piece in self.pieces:
            self._compiled.compile(piece, self.device, self.what, behind=behind)

    def workspace_bytes(self) -> int:
        """What the largest piece takes beside its arguments."""
        return max(
            (self._compiled.n_bytes(piece, self.device, self.what) for piece in self.pieces), default=0
        )

    def run(
        self, args: Sequence[Any], mail: HandedOver, devices: Mapping[int, jax.Device]
    ) -> Generator[None, None, Any]:
        """Its result, in the end; until then it gives way whenever it waits for a message. ``devices``: by
        rank."""
        values = self._consts | dict(zip(self._invars, jax.tree.leaves(args), strict=True))
        for step in self.steps:
            if isinstance(step, _Piece):
                outs = self._compiled.run(
                    step, self.device, [values[v] for v in step.block.invars], self.what
                )
                values.update(zip(step.block.outvars, outs, strict=True))
            elif step.sent is not None:
                there = devices[step.peer]
                x = values[step.sent]
                mail.put(self.rank, step.peer, x if there == self.device else jax.device_put(x, there))
            else:
                while (came := mail.take(step.peer, self.rank)) is None:
                    yield
                values[step.received] = came
            for v in step.drops:
                del values[v]
        found = [v.val if isinstance(v, compat.Literal) else values[v] for v in self._outvars]
        return jax.tree.unflatten(self._tree, found)


def run_together(programs: Sequence[tuple[CutProgram, Sequence[Any]]]) -> list[Any]:
    """Each program's result, in their order. A rank may have several."""
    mail = HandedOver()
    devices = {program.rank: program.device for program, _ in programs}
    running = {i: program.run(args, mail, devices) for i, (program, args) in enumerate(programs)}
    results: dict[int, Any] = {}
    while running:
        n_moved, n_running = mail.n_moved, len(running)
        for i, one in list(running.items()):
            try:
                next(one)
            except StopIteration as end:
                results[i] = end.value
                del running[i]
        if mail.n_moved == n_moved and len(running) == n_running:
            waiting = sorted({programs[i][0].rank for i in running})
            raise RuntimeError(f"ranks {waiting} wait for one another")
    return [results[i] for i in range(len(programs))]


def _cut(jaxpr: Any, donated: set[Any]) -> tuple[_Piece | _Message, ...]:
    """A program's pieces and messages in order, without what nobody reads."""
    groups: list[tuple[list[Any], Any]] = [([], None)]  # equations, and the exchange after them
    for eqn in _read_by_somebody(jaxpr):
        if eqn.primitive in (_send_p, _recv_p):
            groups[-1] = groups[-1][0], eqn
            groups.append(([], None))
        else:
            groups[-1][0].append(eqn)
    last_read: dict[Any, int] = {}
    for n, (eqns, exchange) in enumerate(groups):
        last_read.update((v, 2 * n) for eqn in eqns for v in variables(eqn.invars))
        last_read.update((v, 2 * n + 1) for v in variables([] if exchange is None else exchange.invars))
    last_read.update((v, 2 * len(groups)) for v in variables(jaxpr.outvars))
    steps: list[_Piece | _Message] = []
    for n, (eqns, exchange) in enumerate(groups):
        if eqns:
            made = [v for eqn in eqns for v in eqn.outvars]
            given = list(
                dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in set(made))
            )
            kept = [v for v in made if last_read.get(v, 0) > 2 * n]
            drops = tuple(v for v in given if last_read[v] == 2 * n)
            at = _given_away(given, kept, donated & set(drops), donated)
            block = Block(tuple(given), tuple(eqns), tuple(kept))
            steps.append(_Piece(block, at, canonical(block, extra=at), drops))
        if exchange is not None and exchange.primitive is _send_p:
            [v] = exchange.invars
            drops = (v,) if last_read.get(v) == 2 * n + 1 else ()
            steps.append(_Message(exchange.params["to"], sent=v, drops=drops))
        elif exchange is not None:
            steps.append(_Message(exchange.params["source"], received=exchange.outvars[0]))
    return tuple(steps)


def _given_away(
    given: Sequence[Any], kept: Sequence[Any], may: set[Any], donated: set[Any]
) -> tuple[int, ...]:
    """Arguments of a piece whose memory one of its results can have. Such a result may be given away by a
    later piece."""
    free, at = list(kept), []
    for i, v in enumerate(given):
        like = next((r for r in free if (r.aval.shape, r.aval.dtype) == (v.aval.shape, v.aval.dtype)), None)
        if v in may and like is not None:
            free.remove(like)
            donated.add(like)
            at.append(i)
    return tuple(at)


def _read_by_somebody(jaxpr: Any) -> list[Any]:
    wanted, kept = set(variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive in (_send_p, _recv_p) or wanted & set(eqn.outvars):
            kept.append(eqn)
            wanted.update(variables(eqn.invars))
    return kept[::-1]
