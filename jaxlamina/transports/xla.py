"""The XLA transport: collectives that match across the ranks' different programs, over one flat axis of all
ranks.

Each rank jits its own `shard_map` over the same mesh of one device a process, with its own arguments. A
``ppermute`` from rank to rank in one program meets the one in the other: NCCL, ICI, or Gloo on CPU. XLA
deletes a collective whose result nothing uses, on one side alone, so every result here flows into the next
exchange or out of the program.

Between GPUs that reach each other's memory, messages of a decode step's size do not go by collectives: the
sender's own kernel writes them there (`mailbox`, `pallas_kernels.mail`), and neither end waits for the other
to come.

Source: DESIGN "Two different programs on one mesh".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int32, Shaped

from jaxlamina.errors import UserError
from jaxlamina.process import kept_programs
from jaxlamina.steps.exchange import Exchange
from jaxlamina.transports import SPAN, Like, Sent, Transport, compiler_options
from jaxlamina.transports.exchanges import xla_exchanges
from jaxlamina.transports.mailbox import Mailbox
from jaxlamina.transports.progress import Launches, Way, messages_of
from pallas_kernels.gpu.mail import Ring
from pallas_kernels.mail import add_up, adds, n_bytes, put, take
from pallas_kernels.order import tied, zero_after

AXIS = "ranks"


class XlaTransport(Transport):
    """A process of `jax.distributed`, of which each has one device. Arrays keep their leading dimension: a
    rank's ``[d, …]`` is its part of an array ``[n_ranks * d, …]`` of which no other rank has any part."""

    name = "xla"
    is_one_program = True

    def __init__(
        self,
        rank: int,
        n_ranks: int,
        device: jax.Device,
        peer_memory: bool = True,
        on_meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.n_ranks, self.device = rank, n_ranks, device
        firsts = {d.process_index: d for d in reversed(jax.devices(device.platform))}
        if len(firsts) != n_ranks or jax.process_index() != rank:
            raise UserError(
                f"jax.distributed says process {jax.process_index()} of {len(firsts)} on {device.platform}, "
                f"the cluster "
                f"rank {rank} of {n_ranks}: all ranks of transport='xla' must have one platform, and start "
                f"together"
            )
        firsts[rank] = device
        mesh = Mesh(np.array([firsts[r] for r in range(n_ranks)]), (AXIS,))
        self._mesh, self._spec = mesh, PartitionSpec(AXIS)
        self._sharding = NamedSharding(mesh, self._spec)
        self._kinds = tuple(d.device_kind for d in mesh.devices.flat)
        # XLA's CPU backend carries bfloat16 as float32; on others it may carry float32 as bfloat16 where no
        # more is wanted of it on this side, of which the other knows nothing. Bits are left as they are.
        on_cpu = device.platform == "cpu"
        self._bits = {jnp.dtype("bfloat16"): jnp.uint16} if on_cpu else {jnp.dtype("float32"): jnp.uint32}
        # The last send's tie, and the array that it was taken from.
        self._sent: tuple[Any, Any] = (None, None)
        # A 0 that XLA cannot know to be one, of the program that is being traced.
        self._unknown_zero: jax.Array | None = None
        self._mail: Mail | None = None
        self._table: Any = ()  # of the mailbox, as programs take it
        if n_ranks > 2:
            self._meet(on_meet)
        if peer_memory and device.platform == "gpu" and n_ranks > 1:
            box = Mailbox(rank, n_ranks, device, Ring(), self._gather)
            self.why_not_by_memory = box.why_not
            if box.peers:
                self._mail, self._table = Mail(box), self.bind(box.table)
        self.by_memory = self._mail is not None
        self.launches = Launches()

    def _gather(self, own: Shaped[np.ndarray, " k"]) -> Shaped[np.ndarray, "n_ranks k"]:
        """Every rank's array, all alike, as one."""
        program = self.compile(lambda x: lax.all_gather(x, AXIS), own)
        return np.asarray(self.unbind(program(own)))

    def _meet(self, on_meet: Callable[[], None]) -> None:
        """Runs one exchange of all ranks: the first makes what they talk through, and waits for all of them,
        while some of a job's programs are of a few ranks only."""
        ring = [(rank, (rank + 1) % self.n_ranks) for rank in range(self.n_ranks)]
        given = jnp.zeros(1, jnp.int32)
        program = self.compile(lambda x: lax.ppermute(x, AXIS, ring), given)
        on_meet()
        jax.block_until_ready(program(given))

    def send(self, x: jax.Array, to: int, after: jax.Array | None = None) -> Sent:
        if self._mail is not None and self._mail.carries(x, to):
            return self._mail.put(x, to, after)
        # Nobody sends to this rank here, so what it gets is zeros: the tie.
        return self._tie(self._permute(tied(x, after), self.rank, to))

    def recv(self, like: jax.ShapeDtypeStruct, source: int, after: jax.Array | None = None) -> jax.Array:
        if self._mail is not None and self._mail.carries(like, source):
            return self._mail.take(like, source, after)
        return self._permute(self._given(like, after), source, self.rank)

    def send_each(self, xs: Sequence[jax.Array], to: Sequence[int], after: jax.Array | None = None) -> Sent:
        if not self._are_all(len(xs), xs[0]):
            return super().send_each(xs, to, after)
        return self._tie(self._all_to_all(tied(self._rows(xs, to), after)))

    def recv_part(
        self, like: jax.ShapeDtypeStruct, source: int, of: int, after: jax.Array | None = None
    ) -> jax.Array:
        if not self._are_all(of, like):
            return self.recv(like, source, after)
        every = jax.ShapeDtypeStruct((self.n_ranks, *like.shape), like.dtype)
        return self._all_to_all(self._given(every, after))[source]

    def send_part(self, x: jax.Array, to: int, of: int, after: jax.Array | None = None) -> Sent:
        if not self._are_all(of, x):
            return self.send(x, to, after)
        return self._tie(self._all_to_all(self._rows([tied(x, after)], [to])))

    def recv_each(
        self, like: jax.ShapeDtypeStruct, sources: Sequence[int], after: jax.Array | None = None
    ) -> list[jax.Array]:
        if not self._are_all(len(sources), like):
            return _in_turn(lambda source, after: self.recv(like, source, after), sources, after)
        every = jax.ShapeDtypeStruct((self.n_ranks, *like.shape), like.dtype)
        rows = self._all_to_all(self._given(every, after))
        return [rows[source] for source in sources]

    def swap_each(
        self,
        xs: Sequence[jax.Array],
        like: jax.ShapeDtypeStruct,
        with_: Sequence[int],
        after: jax.Array | None = None,
    ) -> list[jax.Array]:
        if not self._are_all(len(xs), xs[0], like):
            known = dict(zip(with_, xs, strict=True))
            return _in_turn(lambda rank, after: self._swap(known[rank], like, rank, after), with_, after)
        rows = [self._as_sent(tied(x, after), like) for x in xs]
        got = self._all_to_all(self._rows(rows, with_))
        return [self._as_got(got[rank], xs[0].dtype, like) for rank in with_]

    def swap_part(
        self, x: jax.Array, like: jax.ShapeDtypeStruct, with_: int, of: int, after: jax.Array | None = None
    ) -> jax.Array:
        if not self._are_all(of, x, like):
            return self._swap(x, like, with_, after)
        got = self._all_to_all(self._rows([self._as_sent(tied(x, after), like)], [with_]))
        return self._as_got(got[with_], x.dtype, like)

    def add_up(
        self, x: jax.Array, ranks: Sequence[int], after: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        if self._mail is not None and self._mail.adds_up(x, [r for r in ranks if r != self.rank]):
            return (found := self._mail.add_up(x, ranks, self.rank, after)), found
        return super().add_up(x, ranks, after)

    def _rows(
        self, xs: Sequence[Shaped[jax.Array, "*m"]], to: Sequence[int]
    ) -> Shaped[jax.Array, " n_ranks *m"]:
        """``xs[i]`` as row ``to[i]`` of an all-to-all, zeros to the other ranks."""
        row_of, nothing = dict(zip(to, xs, strict=True)), jnp.zeros_like(xs[0])
        return jnp.stack([row_of.get(rank, nothing) for rank in range(self.n_ranks)])

    def _are_all(self, n_workers: int, *messages: Like) -> bool:
        """Whether one all-to-all of all ranks serves an exchange with so many workers: if there are several,
        and no model rank but one, which would have to take part, and not all of it goes by memory anyway."""
        by_memory = self._mail is not None and all(self._mail.carries_to_all(x) for x in messages)
        return 1 < n_workers == self.n_ranks - 1 and not by_memory

    def _swap(
        self, x: jax.Array, like: jax.ShapeDtypeStruct, peer: int, after: jax.Array | None
    ) -> jax.Array:
        if self._mail is not None and self._mail.carries(x, peer) and self._mail.carries(like, peer):
            return self._mail.take(like, peer, self._mail.put(x, peer, after))
        return self._as_got(self._permute_both(self._as_sent(tied(x, after), like), peer), x.dtype, like)

    def _permute_both(self, x: jax.Array, peer: int) -> jax.Array:
        pairs = [(self.rank, peer), (peer, self.rank)]
        return self._as_line(x, lambda line: lax.ppermute(line, AXIS, sorted(pairs)))

    def _as_sent(self, x: jax.Array, like: jax.ShapeDtypeStruct) -> Shaped[jax.Array, " n"]:
        """``x`` as a line of the longer of the two messages, since both ends of one collective have one
        shape: in its own dtype if that is the other's too, else as 16-bit pieces."""
        if x.dtype != like.dtype:
            x = lax.bitcast_convert_type(x, jnp.uint16)
        n = max(x.size, _pieces(like, x.dtype))
        return jnp.pad(x.reshape(-1), (0, n - x.size))

    def _as_got(self, line: Shaped[jax.Array, " n"], sent: np.dtype, like: jax.ShapeDtypeStruct) -> jax.Array:
        line = line[: _pieces(like, line.dtype)]
        if sent == like.dtype:
            return line.reshape(like.shape)
        n = jnp.dtype(like.dtype).itemsize // 2
        shape = like.shape if n == 1 else (*like.shape, n)
        return lax.bitcast_convert_type(line.reshape(shape), like.dtype)

    def _tie(self, result: jax.Array) -> Sent:
        """A 0 from what a send gave. From its bits: were it from its value, and that wanted in bfloat16 only,
        XLA would send a float32 message as bfloat16, and the receiver would not know."""
        tie = zero_after(result)
        self._sent = tie, result
        return tie

    def _given(self, like: jax.ShapeDtypeStruct, after: jax.Array | None) -> jax.Array:
        """What this rank puts into an exchange in which it only receives: it goes nowhere, and says when.

        Where there is an array of the right kind already, it is that one, and nothing has to be filled."""
        if after is None:
            # Not a constant: every rank running one program, an all-to-all of one constant is that constant,
            # and XLA for GPUs takes the exchange away.
            zero = self._unknown_zero
            return jnp.broadcast_to(jnp.int32(0) if zero is None else zero, like.shape).astype(like.dtype)
        tie, result = self._sent
        for known in (result if after is tie else None, after):
            if known is not None and (known.shape, known.dtype) == (like.shape, like.dtype):
                return known
        return jnp.broadcast_to(zero_after(after).astype(like.dtype), like.shape)

    def compile_later(
        self,
        function: Callable[..., Any],
        *args: Any,
        donate_argnums: Sequence[int] = (),
        behind: bool = False,
        keep: tuple[str, Any] | None = None,
    ) -> Callable[[], XlaProgram]:
        mail = self._mail

        def program(table: Any, *args: Any) -> Any:
            leaves = [x for x in jax.tree.leaves(args) if x.size]
            self._unknown_zero = zero_after(leaves[-1]) if leaves else None
            if mail is not None:
                mail.begin(table)
            return function(*args)

        mapped = jax.shard_map(
            program, mesh=self._mesh, in_specs=self._spec, out_specs=self._spec, check_vma=False
        )
        shapes = jax.tree.map(self._shape, (self._table, *args))
        jitted = jax.jit(mapped, donate_argnums=tuple(i + 1 for i in donate_argnums))
        options = compiler_options(self.device, self.traceable, behind)
        lowered, table = jitted.lower(*shapes), self._table

        def made(compiled: jax.stages.Compiled) -> XlaProgram:
            return XlaProgram(compiled, self, table, xla_exchanges(compiled.as_text() or "", self.rank))

        return lambda: self.compiled(lowered, options, keep, made)

    def name_of(self, *what: object) -> str | None:
        way = (() if self._mail is None else self._mail.way), self.traceable
        return kept_programs.name_of(self.device, self.rank, self._kinds, way, *what)

    def kept(self, name: str) -> tuple[XlaProgram, Any] | None:
        return self.from_disk(
            name,
            list(self._mesh.devices.flat),
            lambda compiled, exchanges: XlaProgram(compiled, self, self._table, exchanges),
        )

    def where(self) -> str:
        counts = {} if self._mail is None else self._mail.counts()
        return self.launches.where(counts, self.rank) if counts else ""

    def bind(self, tree: Any) -> Any:
        leaves, form = jax.tree.flatten(tree)
        # A step has hundreds of weights, bound once.
        if all(getattr(x, "sharding", None) is self._sharding for x in leaves):
            return tree
        # One call for all: each takes the host longer than a small array takes to arrive.
        unbound = [i for i, x in enumerate(leaves) if not self._is_bound(x)]
        own = jax.device_put([leaves[i] for i in unbound], self.device)
        for i, x in zip(unbound, own, strict=True):
            leaves[i] = jax.make_array_from_single_device_arrays(self._global(x.shape), self._sharding, [x])
        return jax.tree.unflatten(form, leaves)

    def unbind(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x.addressable_data(0), tree)

    def _permute(self, x: jax.Array, source: int, to: int) -> jax.Array:
        return self._as_line(x, lambda line: lax.ppermute(line, AXIS, [(source, to)]))

    def _all_to_all(self, rows: Shaped[jax.Array, " n_ranks *m"]) -> Shaped[jax.Array, " n_ranks *m"]:
        """Row r goes to rank r. One such is faster than a permute for each of several workers."""
        return self._as_line(rows, lambda line: lax.all_to_all(line, AXIS, 0, 0, tiled=True))

    def _as_line(self, x: jax.Array, exchange: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """``exchange`` of the bits of ``x`` in one dimension: of an array of several, each rank's XLA chooses
        for itself in which order they lie in memory, and that is how they travel (docs/findings.md)."""
        bits, line = self._bits.get(x.dtype, x.dtype), x.reshape(-1)
        with jax.named_scope(SPAN):
            if bits == x.dtype:
                return exchange(line).reshape(x.shape)
            return lax.bitcast_convert_type(exchange(lax.bitcast_convert_type(line, bits)), x.dtype).reshape(
                x.shape
            )

    def _global(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        assert shape, "an array of a program has a dimension at least"
        return (self.n_ranks * shape[0], *shape[1:])

    def _shape(self, x: Like | np.ndarray) -> jax.ShapeDtypeStruct:
        shape = x.shape if self._is_bound(x) else self._global(x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self._sharding)

    def _is_bound(self, x: object) -> TypeGuard[jax.Array]:
        return isinstance(x, jax.Array) and x.sharding == self._sharding


class Mail:
    """Messages through memory: which go that way, and how, in the program that is being traced."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._traced: jax.Array  # the table, as the program has it
        self._tags = count()

    @property
    def way(self) -> tuple[object, ...]:
        """All that decides which messages go by memory, and how."""
        return tuple(self._box.peers), self._box.is_complete, self._box.ring

    def counts(self) -> dict[Way, int]:
        """Of messages, while kernels run."""
        return self._box.counts()

    def carries(self, like: Like, peer: int) -> bool:
        """The same at both ends."""
        return peer in self._box.peers and self._box.ring.carries(n_bytes(like))

    def carries_to_all(self, like: Like) -> bool:
        """The same on all ranks."""
        return self._box.is_complete and self._box.ring.carries(n_bytes(like))

    def adds_up(self, like: Like, peers: Sequence[int]) -> bool:
        """The same on all of them."""
        return adds(like) and all(self.carries(like, peer) for peer in peers)

    def begin(self, table: Int32[jax.Array, "n_ranks fields"]) -> None:
        """A program is traced, which is given the table."""
        self._traced, self._tags = table, count()

    def put(self, x: jax.Array, to: int, after: jax.Array | None) -> Sent:
        with jax.named_scope(SPAN), jax.named_scope(f"put.{to}"):
            return put(x, self._traced, to, next(self._tags), self._box.ring, after)

    def take(self, like: jax.ShapeDtypeStruct, source: int, after: jax.Array | None) -> jax.Array:
        with jax.named_scope(SPAN), jax.named_scope(f"take.{source}"):
            return take(like, self._traced, source, next(self._tags), self._box.ring, after)

    def add_up(self, x: jax.Array, ranks: Sequence[int], rank: int, after: jax.Array | None) -> jax.Array:
        others = "-".join(str(r) for r in ranks if r != rank)
        with jax.named_scope(SPAN), jax.named_scope(f"sum.{others}"):
            return add_up(x, self._traced, tuple(ranks), rank, next(self._tags), self._box.ring, after)


def _in_turn(
    exchange: Callable[[int, jax.Array | None], jax.Array], ranks: Sequence[int], after: jax.Array | None
) -> list[jax.Array]:
    found = []
    for rank in ranks:
        found.append(after := exchange(rank, after))
    return found


def _pieces(like: Like, dtype: jax.typing.DTypeLike) -> int:
    """How many elements of ``dtype`` an array like ``like`` is."""
    return like.size * jnp.dtype(like.dtype).itemsize // jnp.dtype(dtype).itemsize


class XlaProgram:
    """A compiled program; arguments that are not bound yet are on the way in, results stay bound."""

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        transport: XlaTransport,
        table: Any,
        exchanges: tuple[Exchange, ...],
    ) -> None:
        self._compiled, self._transport, self._table = compiled, transport, table
        self._exchanges, self._messages = exchanges, messages_of(exchanges)

    def __call__(self, *args: Any) -> Any:
        if self._messages:
            self._transport.launches.add(self, self._messages)
        return self._compiled(self._table, *self._transport.bind(args))

    def exchanges(self) -> tuple[Exchange, ...]:
        return self._exchanges

    def hlo(self) -> str:
        return self._compiled.as_text() or ""
