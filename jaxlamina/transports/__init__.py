"""How tensors go from rank to rank inside the ranks' programs.

A rank's program is traced once a bucket, and calls these functions where something is sent or received; what
they lower to is the transport's affair: MPI calls (`mpi`) or XLA collectives that match across different
programs (`xla`). Knows arrays and ranks; nothing of models, KV or what is sent.

Both ends of a pair must exchange in the same order. Neither transport may count on the order of the trace:
XLA orders by data alone, so every exchange takes an ``after`` on which it truly depends, and gives something
for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import combinations
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from jaxlamina.errors import UserError
from jaxlamina.process import kept_programs
from jaxlamina.process.turns import between_parts
from jaxlamina.steps.exchange import Exchange

TRANSPORTS = ("mpi", "xla")
# The scope that operators of an exchange are traced in, for timelines.
SPAN = "exchange"

Like = jax.Array | jax.ShapeDtypeStruct
# What a send leaves: a 0 that is there only once the send has begun. None where sends are in the order of the
# trace.
Sent = Float32[jax.Array, ""] | None


@runtime_checkable
class Program(Protocol):
    """A rank's compiled program: called with this rank's own arrays it gives this rank's own."""

    def __call__(self, *args: Any) -> Any: ...

    def exchanges(self) -> tuple[Exchange, ...]:
        """What it sends and receives, in order, as the compiled program has it."""
        ...

    def hlo(self) -> str:
        """The text of the compiled program, whose instructions' names are those of its events in a trace."""
        ...


P = TypeVar("P", bound=Program)


@runtime_checkable
class TracedEnd(Protocol):
    """One rank's end of all exchanges, for programs while they are traced. A transport says how one message
    is sent and received; those of several are one after another, where it knows no better way."""

    rank: int
    device: jax.Device
    # Whether a rank's step is one program of XLA's, which keeps no order but that of data.
    is_one_program: bool

    def send(self, x: jax.Array, to: int, after: jax.Array | None = None) -> Sent:
        """Sends ``x`` once ``after`` is there. Its tie."""
        ...

    def recv(self, like: jax.ShapeDtypeStruct, source: int, after: jax.Array | None = None) -> jax.Array:
        """What rank ``source`` sends next, asked for once ``after`` is there."""
        ...

    def send_each(self, xs: Sequence[jax.Array], to: Sequence[int], after: jax.Array | None = None) -> Sent:
        """Sends ``xs[i]``, all alike, to rank ``to[i]``: one message to several workers, who meet it by
        ``recv_part``. As ``send``."""
        for x, rank in zip(xs, to, strict=True):
            after = self.send(x, rank, after)
        assert after is not None, "nothing is sent"
        return after

    def recv_part(
        self, like: jax.ShapeDtypeStruct, source: int, of: int, after: jax.Array | None = None
    ) -> jax.Array:
        """One of the ``of`` parts that ``source`` sends by ``send_each``."""
        return self.recv(like, source, after)

    def send_part(self, x: jax.Array, to: int, of: int, after: jax.Array | None = None) -> Sent:
        """One of the ``of`` parts that ``to`` gets by ``recv_each``. As ``send``."""
        return self.send(x, to, after)

    def recv_each(
        self, like: jax.ShapeDtypeStruct, sources: Sequence[int], after: jax.Array | None = None
    ) -> list[jax.Array]:
        """What each of ``sources`` sends by ``send_part``, all alike."""
        return [self.recv(like, source, after) for source in sources]

    def swap_each(
        self,
        xs: Sequence[jax.Array],
        like: jax.ShapeDtypeStruct,
        with_: Sequence[int],
        after: jax.Array | None = None,
    ) -> list[jax.Array]:
        """A send and a receive that fall together, as one: ``xs[i]``, all alike, to rank ``with_[i]``, and
        what each of them sends, an array like ``like``. They meet it by ``swap_part``."""
        got = self.recv_each(like, with_, after)
        self.send_each(xs, with_, after)
        return got

    def swap_part(
        self, x: jax.Array, like: jax.ShapeDtypeStruct, with_: int, of: int, after: jax.Array | None = None
    ) -> jax.Array:
        """Sends ``x`` and gives what ``with_`` sends: one of the ``of`` ends of its ``swap_each``."""
        return self.recv(like, with_, self.send(x, with_, after))

    def every(
        self, x: jax.Array, ranks: Sequence[int], after: jax.Array | None = None
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """What each of ``ranks``, of which this is one, gives here as ``x``, all alike, and what came last:
        each pair swaps theirs, pairs in one order on all."""
        like, found = jax.ShapeDtypeStruct(x.shape, x.dtype), {self.rank: x}
        for a, b in combinations(ranks, 2):
            if self.rank == a:
                [after] = self.swap_each([x], like, [b], after=after)
                found[b] = after
            elif self.rank == b:
                after = self.swap_part(x, like, a, 1, after=after)
                found[a] = after
        return [found[r] for r in ranks], after

    def add_up(
        self, x: jax.Array, ranks: Sequence[int], after: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The sum of them, as `every`."""
        parts, after = self.every(x, ranks, after)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        # In the ranks' order, so that it is the same on all.
        return reduce(jnp.add, [part.astype(wide) for part in parts]).astype(x.dtype), after


@runtime_checkable
class Transport(TracedEnd, Protocol):
    """One rank's end, and what makes programs of it."""

    name: str
    n_ranks: int
    # Whether a step's messages are written into the receiver's memory, so that nobody waits for the other
    # end.
    by_memory: bool = False
    # Why some go another way all the same, if they were to go so.
    why_not_by_memory: str = ""
    # Whether a trace shall name every kernel of programs compiled from now on: see `compiler_options`.
    traceable: bool = False
    # Programs that were found on disk, and not traced.
    n_kept: int = 0

    def compile(
        self, function: Callable[..., Any], *args: Any, donate_argnums: Sequence[int] = ()
    ) -> Program:
        """``function`` as a program of this rank for arguments like ``args`` (arrays or shapes). No array of
        it is 0-d."""
        return self.compile_later(function, *args, donate_argnums=donate_argnums)()

    def compile_later(
        self,
        function: Callable[..., Any],
        *args: Any,
        donate_argnums: Sequence[int] = (),
        behind: bool = False,
        keep: tuple[str, Any] | None = None,
    ) -> Callable[[], Program]:
        """``compile`` in two: this traces, and the call that it gives compiles, in any thread. ``behind``:
        while others run. ``keep``: the name (`name_of`) under which the program is kept on disk, and a
        note."""
        ...

    def compiled(
        self,
        lowered: jax.stages.Lowered,
        options: Any,
        keep: tuple[str, Any] | None,
        program: Callable[[jax.stages.Compiled], P],
    ) -> P:
        """For ``compile_later``: what ``program`` makes of what was lowered, once that is compiled; kept on
        disk where ``keep`` says so."""
        if keep is None:
            compiled, can_be_kept = lowered.compile(compiler_options=options), False
        else:
            compiled, can_be_kept = kept_programs.compiled(lowered, self.device, options)
        between_parts()
        made = program(compiled)
        if keep is not None and can_be_kept:
            name, note = keep
            kept_programs.save(name, compiled, (made.exchanges(), note))
        return made

    def from_disk(
        self,
        name: str,
        devices: Sequence[jax.Device],
        program: Callable[[jax.stages.Compiled, tuple[Exchange, ...]], P],
    ) -> tuple[P, Any] | None:
        """For ``kept``, of a program for ``devices``."""
        found = kept_programs.load(name, devices)
        if found is None:
            return None
        self.n_kept += 1
        compiled, (exchanges, note) = found
        return program(compiled, exchanges), note

    def name_of(self, *what: object) -> str | None:
        """As `kept_programs.name_of`, of a program of this rank that exchanges; None where it is good for one
        run only."""
        return None

    def kept(self, name: str) -> tuple[Program, Any] | None:
        """The program that was kept under that name, and its note."""
        return None

    def where(self) -> str:
        """How far the exchanges of the program that the device is at have come, with layer and batch, for
        somebody who waits for it; "" where that leaves no mark, as calls of MPI and collectives do not. From
        any thread, within half a second, or it is not waited for."""
        return ""

    def bind(self, tree: Any) -> Any:
        """Arrays of this rank's device as a program takes them; for those that outlive a step."""
        return tree

    def unbind(self, tree: Any) -> Any:
        """Arrays as a program takes or gives them, as plain arrays on this rank's device: the same memory."""
        return tree


def open_transport(
    name: str,
    rank: int,
    n_ranks: int,
    device: jax.Device,
    peer_memory: bool = True,
    on_meet: Callable[[], None] = lambda: None,
) -> Transport:
    """The transport that a cluster file names. ``peer_memory``: whether GPUs of one host may write into each
    other's. ``on_meet``: called before it first waits for the other ranks. ``UserError`` where its package or
    its start-up is missing."""
    if name == "mpi":
        from jaxlamina.transports.mpi import MpiTransport

        return MpiTransport(rank, n_ranks, device, on_meet)
    if name == "xla":
        from jaxlamina.transports.xla import XlaTransport

        return XlaTransport(rank, n_ranks, device, peer_memory, on_meet)
    raise UserError(f"transport={name!r} must be one of {', '.join(TRANSPORTS)}")


def compiler_options(
    device: jax.Device, traceable: bool = False, behind: bool = False
) -> dict[str, Any] | None:
    """XLA's options for a step's program. Kernels within a CUDA graph are in a trace without the instruction
    that they are of, so a program that is to be traced has no such graphs. One that is compiled ``behind``
    steps that run tries no kernels out: XLA does so in memory that a step may still be using
    (docs/findings.md)."""
    if device.platform != "gpu":
        return None
    options: dict[str, Any] = {"xla_gpu_enable_command_buffer": ""} if traceable else {}
    if behind:
        options |= {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return options or None
