"""The MPI transport: mpi4jax inside the program. Any hosts, and pools of different platforms.

MPI calls of one program happen in the order of the trace (mpi4jax's ordered effects), so receives need no
``after``. A send gives no value that a computation could wait for, so a call of this rank with itself, which
MPI orders after the send, does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlamina.errors import UserError
from jaxlamina.process import kept_programs
from jaxlamina.steps.exchange import Exchange
from jaxlamina.transports import SPAN, Sent, Transport, compiler_options
from jaxlamina.transports.exchanges import mpi_exchanges
from jaxlamina.transports.mpi_places import MpiPlaces
from pallas_kernels import compat
from pallas_kernels.order import tied

_log = logging.getLogger("jaxlamina")
# MPI has no such types: their bits travel.
_BITS = {1: jnp.uint8, 2: jnp.uint16}
_ITS_OWN = {
    np.dtype(t)
    for t in ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
}


class MpiTransport(Transport):
    """A rank of MPI_COMM_WORLD. Knows no device but its own; MPI moves tensors through the hosts' memory
    unless it was built for GPUs."""

    name = "mpi"
    is_one_program = True

    def __init__(
        self, rank: int, n_ranks: int, device: jax.Device, on_meet: Callable[[], None] = lambda: None
    ) -> None:
        self.rank, self.n_ranks, self.device = rank, n_ranks, device
        on_meet()  # MPI begins where it is imported
        try:
            import mpi4jax
            from mpi4py import MPI
        except ImportError as error:
            raise UserError(
                f"transport='mpi' needs mpi4jax and Open MPI ({error}): make mpi, or transport='xla'"
            ) from error
        self._mpi, self._sum = mpi4jax, MPI.SUM
        self._world, self._self = MPI.COMM_WORLD.Clone(), MPI.COMM_SELF
        found = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        if found != (rank, n_ranks):
            raise UserError(
                f"MPI says rank {found[0]} of {found[1]}, the cluster rank {rank} of {n_ranks}: start the "
                f"ranks with mpirun -n {n_ranks}"
            )
        self._places = self._of_any_process()

    def _of_any_process(self) -> MpiPlaces | None:
        try:
            return MpiPlaces(self.device, [self._world, self._self])
        except (ImportError, AttributeError, LookupError) as error:  # another mpi4jax, or no native library
            _log.info("programs that call MPI are compiled anew in each process: %s", error)
            return None

    def send(self, x: jax.Array, to: int, after: jax.Array | None = None) -> Sent:
        return self.send_each([x], [to], after)

    def recv(self, like: jax.ShapeDtypeStruct, source: int, after: jax.Array | None = None) -> jax.Array:
        with jax.named_scope(SPAN):
            got = self._mpi.recv(self._place(like), source=source, comm=self._world)
        return self._unwired(got, like)

    def _place(self, like: jax.ShapeDtypeStruct) -> jax.Array:
        """An array as MPI writes one like ``like``."""
        dtype = np.dtype(like.dtype)
        return jnp.zeros(like.shape, dtype if dtype in _ITS_OWN else _BITS[dtype.itemsize])

    def _unwired(self, got: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        return got if np.dtype(like.dtype) in _ITS_OWN else lax.bitcast_convert_type(got, like.dtype)

    def _wire(self, x: jax.Array) -> jax.Array:
        """``x`` in a type that MPI has."""
        dtype = np.dtype(x.dtype)
        return x if dtype in _ITS_OWN else lax.bitcast_convert_type(x, _BITS[dtype.itemsize])

    def send_each(self, xs: Sequence[jax.Array], to: Sequence[int], after: jax.Array | None = None) -> Sent:
        for x, rank in zip(xs, to, strict=True):
            with jax.named_scope(SPAN):
                self._mpi.send(self._wire(tied(x, after)), dest=rank, comm=self._world)
        return self._mpi.allreduce(jnp.zeros((), jnp.float32), op=self._sum, comm=self._self)

    def swap_each(
        self,
        xs: Sequence[jax.Array],
        like: jax.ShapeDtypeStruct,
        with_: Sequence[int],
        after: jax.Array | None = None,
    ) -> list[jax.Array]:
        return [self.swap_part(x, like, rank, 1, after) for x, rank in zip(xs, with_, strict=True)]

    def swap_part(
        self, x: jax.Array, like: jax.ShapeDtypeStruct, with_: int, of: int, after: jax.Array | None = None
    ) -> jax.Array:
        """One call at both ends: a link carries both messages at a time, and neither end waits for the other
        however large they are."""
        with jax.named_scope(SPAN):
            got = self._mpi.sendrecv(
                self._wire(tied(x, after)), self._place(like), source=with_, dest=with_, comm=self._world
            )
        return self._unwired(got, like)

    def compile_later(
        self,
        function: Callable[..., Any],
        *args: Any,
        donate_argnums: Sequence[int] = (),
        behind: bool = False,
        keep: tuple[str, Any] | None = None,
    ) -> Callable[[], MpiProgram]:
        here = jax.sharding.SingleDeviceSharding(self.device)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), args)
        options = compiler_options(self.device, self.traceable, behind)
        lowered = jax.jit(function, donate_argnums=tuple(donate_argnums)).lower(*shapes)
        if self._places is not None:
            self._places.put_into(lowered)

        def made(compiled: jax.stages.Compiled) -> MpiProgram:
            return MpiProgram(compiled, mpi_exchanges(compiled.as_text() or "", self.rank))

        return lambda: self.compiled(lowered, options, keep, made)

    def name_of(self, *what: object) -> str | None:
        if self._places is None:
            return None  # a program has its communicators' addresses
        made_for = self.name, self.rank, self._places.made_by, self.traceable
        return kept_programs.name_of(self.device, made_for, *what)

    def kept(self, name: str) -> tuple[MpiProgram, Any] | None:
        return self.from_disk(name, [self.device], MpiProgram)

    def bind(self, tree: Any) -> Any:
        return jax.device_put(tree, self.device)

    def unbind(self, tree: Any) -> Any:
        return tree


class MpiProgram:
    """A compiled program whose calls of MPI are in order, also with those of other programs."""

    def __init__(self, compiled: jax.stages.Compiled, exchanges: tuple[Exchange, ...]) -> None:
        self._compiled, self._call = compiled, compat.with_effects(compiled)
        self._exchanges = exchanges

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def exchanges(self) -> tuple[Exchange, ...]:
        return self._exchanges

    def hlo(self) -> str:
        return self._compiled.as_text() or ""
