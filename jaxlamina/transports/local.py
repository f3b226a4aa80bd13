"""All ranks in one process: their programs of a step are put in one order, and run as compiled pieces.

The order is found once: each program goes on until it waits for a message, and round again. Between devices
a message is a `jax.device_put`, and a piece is what a rank computes between two of them; calls come back
before they are done, so that pieces on different devices run side by side. On one device a message is the
value that was sent, so that a piece can be several layers, slices and attention. Equal pieces are compiled
once, so a few compiled ones serve any number of layers, as slices do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxlamina.process.turns import between_parts
from jaxlamina.steps.exchange import Exchange
from jaxlamina.transports import Transport, compiler_options
from jaxlamina.workers.workspace import program_bytes
from pallas_kernels import compat
from splitter.block import Block, variables
from splitter.program import canonical

# Rounds over all programs in one call, where they are on one device of such a platform: a round is a layer,
# or half of one if q goes first. A call takes a CPU 0.1 ms and more, so with 30 layers 62 calls added a
# quarter to a small model's step, 11 or 4 a tenth, and one adds what cannot be told from noise. It takes as
# long to compile as unsplit; of more layers equal pieces are compiled once. On other platforms pieces end at
# every exchange: calls are queued while an accelerator computes, and the model's pieces serve all contexts,
# which are many there (`Buckets.default`).
_ROUNDS_A_CALL: Mapping[str, int] = {"cpu": 40}

_send_p = compat.Primitive("local_send")
_send_p.multiple_results = True
_send_p.def_abstract_eval(lambda x, *, to: [])
_recv_p = compat.Primitive("local_recv")
_recv_p.def_abstract_eval(lambda *, source, like: jax.core.ShapedArray(like.shape, like.dtype))


class LocalTransport(Transport):
    """One rank's end. Sends give no tie: pieces run in the order they were traced in. ``after`` is not
    needed."""

    name, is_one_program = "local", False

    def __init__(self, rank: int, n_ranks: int, device: jax.Device) -> None:
        self.rank, self.n_ranks, self.device = rank, n_ranks, device

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
    def compile_later(  # type: ignore[override]  # a program that `Together` runs, and nobody calls
        self,
        function: Callable[..., Any],
        *args: Any,
        donate_argnums: Sequence[int] = (),
        behind: bool = False,
        keep: tuple[str, Any] | None = None,
    ) -> Callable[[], RankProgram]:
        with jax.default_device(self.device):  # kernels are picked by it
            traced = jax.make_jaxpr(function, return_shape=True)(*args)
        n_leaves = [len(jax.tree.leaves(arg)) for arg in args]
        donated = [n for n in donate_argnums for _ in range(n_leaves[n])]
        starts = [sum(n_leaves[:n]) for n in range(len(args))]
        given_away = {starts[n] + i for n in set(donated) for i in range(n_leaves[n])}
        program = RankProgram(self.rank, self.device, traced, given_away)
        return lambda: program


class _Piece(NamedTuple):
    """Equations that are one call. ``donated``: of its arguments; ``drops``: what nobody reads after it."""

    device: jax.Device
    block: Block
    donated: tuple[int, ...]
    key: str
    drops: tuple[Any, ...]


class _Move(NamedTuple):
    """A message to another device."""

    device: jax.Device
    sent: Any
    received: Any
    drops: tuple[Any, ...]


class CompiledPieces:
    """Pieces as programs, those that are equal once for each device."""

    def __init__(self, on_compile: Callable[[str], None] = lambda what: None) -> None:
        self._jitted: dict[tuple[str, jax.Device], Any] = {}
        self._ahead: dict[tuple[str, jax.Device], Any] = {}
        self._on_compile = on_compile

    def run(self, piece: _Piece, args: Sequence[Any], what: str) -> Sequence[Any]:
        """``what``: the step whose piece it is, as compilations are counted by."""
        found = self._ahead.get((piece.key, piece.device)) or self.jitted(piece, what)
        outs: Sequence[Any] = found(*args)
        return outs

    def jitted(self, piece: _Piece, what: str) -> Any:
        key = piece.key, piece.device
        if key not in self._jitted:
            self._on_compile(what)
            self._jitted[key] = jax.jit(lambda *args: piece.block(args), donate_argnums=piece.donated)
        return self._jitted[key]

    def compile(self, piece: _Piece, what: str, *, behind: bool) -> None:
        """Before it is run; in any thread."""
        key = piece.key, piece.device
        if key not in self._ahead:
            between_parts()
            lowered = self.jitted(piece, what).lower(*_likes(piece))
            between_parts()
            self._ahead[key] = lowered.compile(compiler_options=compiler_options(piece.device, behind=behind))

    def n_bytes(self, piece: _Piece, what: str) -> int:
        """What a piece takes beside its arguments."""
        return program_bytes(self.jitted(piece, what), *_likes(piece))


def _likes(piece: _Piece) -> list[jax.ShapeDtypeStruct]:
    on = SingleDeviceSharding(piece.device)
    return [compat.like_of(v).update(sharding=on) for v in piece.block.invars]


class RankProgram:
    """A rank's program as it was traced, exchanges among its equations, without what nobody reads."""

    def __init__(self, rank: int, device: jax.Device, traced: Any, donated: set[int]) -> None:
        closed, shapes = traced
        self.rank, self.device = rank, device
        jaxpr, consts = compat.open_jaxpr(closed)
        self.tree = jax.tree.structure(shapes)
        self.invars, self.outvars, self.eqns = jaxpr.invars, jaxpr.outvars, _read_by_somebody(jaxpr)
        self.donated = {jaxpr.invars[i] for i in donated}
        self.consts = dict(zip(jaxpr.constvars, jax.device_put(list(consts), device), strict=True))

    def exchanges(self) -> tuple[Exchange, ...]:
        found = []
        for eqn in self.eqns:
            if eqn.primitive in (_send_p, _recv_p):
                is_send = eqn.primitive is _send_p
                [v] = eqn.invars if is_send else eqn.outvars
                op, peer = ("send", eqn.params["to"]) if is_send else ("recv", eqn.params["source"])
                found.append(Exchange(op, peer, tuple(v.aval.shape), jnp.dtype(v.aval.dtype).name))  # type: ignore[arg-type]
        return tuple(found)


class Together:
    """Ranks' programs of one step as pieces and messages in one order. A rank may have several programs; what
    goes to a rank that has none is not sent. ``what``: the step's name, for counts."""

    def __init__(self, programs: Sequence[RankProgram], compiled: CompiledPieces, what: str = "") -> None:
        self._compiled, self._what = compiled, what
        self._trees = [program.tree for program in programs]
        self._consts = {v: x for program in programs for v, x in program.consts.items()}
        self._invars = [v for program in programs for v in program.invars]
        order = _Order(programs)
        self._results = [order.renamed(program.outvars) for program in programs]
        read_at_last = [v for of_program in self._results for v in variables(of_program)]
        donated = {v for program in programs for v in program.donated}
        self._steps = _cut(order.steps, read_at_last, donated)

    @property
    def pieces(self) -> list[_Piece]:
        """In the order of their calls."""
        return [step for step in self._steps if isinstance(step, _Piece)]

    def compile(self, *, behind: bool = False) -> None:
        for piece in self.pieces:
            self._compiled.compile(piece, self._what, behind=behind)

    def workspace_bytes(self) -> int:
        """What the largest piece takes beside its arguments."""
        return max((self._compiled.n_bytes(piece, self._what) for piece in self.pieces), default=0)

    def run(self, *args: Sequence[Any]) -> list[Any]:
        """Each program's result. ``args``: each program's."""
        values = self._consts | dict(zip(self._invars, jax.tree.leaves(args), strict=True))
        for step in self._steps:
            if isinstance(step, _Piece):
                outs = self._compiled.run(step, [values[v] for v in step.block.invars], self._what)
                values.update(zip(step.block.outvars, outs, strict=True))
            else:
                values[step.received] = jax.device_put(values[step.sent], step.device)
            for v in step.drops:
                del values[v]
        return [
            jax.tree.unflatten(
                tree, [v.val if isinstance(v, compat.Literal) else values[v] for v in of_program]
            )
            for tree, of_program in zip(self._trees, self._results, strict=True)
        ]


@dataclass
class _Run:
    """Equations, one after another, that become a piece."""

    device: jax.Device
    eqns: list[Any] = field(default_factory=list)

    @property
    def made(self) -> list[Any]:
        return [v for eqn in self.eqns for v in eqn.outvars]

    @property
    def reads(self) -> list[Any]:
        """What was made before."""
        made = set(self.made)
        read = (v for eqn in self.eqns for v in variables(eqn.invars))
        return list(dict.fromkeys(v for v in read if v not in made))


@dataclass
class _Message:
    """``device``: of the receiver; ``received``: None until it is."""

    device: jax.Device | None
    sent: Any
    received: Any = None

    @property
    def reads(self) -> list[Any]:
        return [self.sent]


class _Order:
    """Of programs' equations and messages. ``same``: of what is received on the device where it was made,
    what that is."""

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self.steps: list[_Run | _Message] = []
        self.same: dict[Any, Any] = {}
        self._mail: defaultdict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self._devices = {program.rank: program.device for program in programs}
        n_a_call = _ROUNDS_A_CALL.get(programs[0].device.platform)
        self._cuts_all = n_a_call is None
        left = [(program, deque(program.eqns)) for program in programs]
        n_before, n_rounds = -1, 0
        while (n_left := sum(len(eqns) for _, eqns in left)) != n_before:
            if n_rounds % (n_a_call or 1) == 0:
                self.steps.append(_Run(programs[0].device))
            for program, eqns in left:
                self._go_on(program, eqns)
            n_before, n_rounds = n_left, n_rounds + 1
        if n_left:
            waiting = sorted({program.rank for program, eqns in left if eqns})
            raise RuntimeError(f"ranks {waiting} wait for one another")

    def renamed(self, atoms: Iterable[Any]) -> list[Any]:
        return [a if isinstance(a, compat.Literal) else self.same.get(a, a) for a in atoms]

    def _go_on(self, program: RankProgram, eqns: deque[Any]) -> None:
        """Until it waits, or others may go on within the piece: what was sent need not be kept for long."""
        rank, here, has_handed_over = program.rank, program.device, False
        while eqns:
            eqn = eqns[0]
            if eqn.primitive is _send_p:
                self._send(rank, eqn.params["to"], *self.renamed(eqn.invars))
                has_handed_over = not self._is_cut(rank, eqn.params["to"])
            elif has_handed_over:
                return
            elif eqn.primitive is not _recv_p:
                self._run_on(here).append(eqn.replace(invars=self.renamed(eqn.invars)))
            elif not self._receive(eqn.params["source"], rank, *eqn.outvars):
                return
            eqns.popleft()

    def _run_on(self, device: jax.Device) -> list[Any]:
        last = self.steps[-1]
        if not isinstance(last, _Run) or last.device != device:
            last = _Run(device)
            self.steps.append(last)
        return last.eqns

    def _send(self, rank: int, to: int, sent: Any) -> None:
        message = _Message(self._devices.get(to), sent)
        self._mail[rank, to].append(message)
        if message.device not in (None, self._devices[rank]):
            self.steps.append(message)
        self._end_piece(rank, to)

    def _receive(self, source: int, rank: int, received: Any) -> bool:
        """Whether it has come."""
        mail = self._mail[source, rank]
        if source in self._devices:
            if not mail:
                return False
            message = mail.popleft()
            if message.device == self._devices[source]:
                self.same[received] = message.sent
            else:
                message.received = received
        self._end_piece(rank, source)
        return True

    def _end_piece(self, rank: int, peer: int) -> None:
        """Where they exchange, if it is cut there."""
        if self._is_cut(rank, peer):
            self.steps.append(_Run(self._devices[rank]))

    def _is_cut(self, rank: int, peer: int) -> bool:
        return self._cuts_all or self._devices.get(peer) != self._devices[rank]


def _cut(
    steps: Sequence[_Run | _Message], read_at_last: Iterable[Any], donated: set[Any]
) -> list[_Piece | _Move]:
    """What is run and moved, in order."""
    steps = [step for step in steps if (step.eqns if isinstance(step, _Run) else step.received is not None)]
    reads = [step.reads for step in steps]
    last_read = {v: n for n, of_step in enumerate(reads) for v in of_step}
    last_read |= dict.fromkeys(read_at_last, len(steps))
    found: list[_Piece | _Move] = []
    for n, (step, given) in enumerate(zip(steps, reads, strict=True)):
        drops = tuple(v for v in given if last_read[v] == n)
        if isinstance(step, _Message):
            found.append(_Move(step.device, step.sent, step.received, drops))
            continue
        kept = [v for v in step.made if last_read.get(v, -1) > n]
        at = _given_away(given, kept, donated & set(drops), donated)
        block = Block(tuple(given), tuple(step.eqns), tuple(kept))
        found.append(_Piece(step.device, block, at, canonical(block, extra=at), drops))
    return found


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
