"""The attention rank's programs: a whole step each, all layers' appends and partial attention, and all exchanges.

Pools are donated, one array a layer, so that each append is in place. The program is unrolled: in a loop over layers XLA
copies the pools. Knows no weight, no token and no request.

Source: Lamina 2025 §4.2.2: partial attention over earlier tokens runs while k and v are on their way. §5: prompts' k and v
are taken in between what model workers send; here within the decode step, after each layer's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlamina.ranks.layout import Layout, schedule_of, span
from jaxlamina.ranks.wires import HeadsOf, Sizes, pack, pack_partial, packed_like, unpack
from jaxlamina.schedules import AttentionRun, Exchange, Operator
from jaxlamina.steps.shape import StepShape
from jaxlamina.transports import Transport
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import Pool, append, attention_with_own, decode_attention, partial_attention
from pallas_kernels.order import tied, zero_after


class StepInputs(NamedTuple):
    """A step's slots on this worker, int32: R rows with up to C stored tokens, M new tokens."""

    slot_table: Any  # [R, C]
    lengths: Any  # [R]
    new_slots: Any  # [M], ≥ S for none
    q_positions: dict[int, Any]  # window -> [R, T], for tables that lost their positions
    chunk: StepInputs | None = None  # of the chunk alongside
    prefills: tuple[StepInputs, ...] = ()  # of prefill workers' parts

    def part(self, j: int, n: int) -> StepInputs:
        """The j-th of n staggered batches' rows and new tokens."""

        def cut(x: Any) -> Any:
            return x[j * (len(x) // n) : (j + 1) * (len(x) // n)]

        queries = {window: cut(x) for window, x in self.q_positions.items()}
        return StepInputs(cut(self.slot_table), cut(self.lengths), cut(self.new_slots), queries)


class AttentionProgram:
    """Traces one bucket's step. ``specs`` are of this worker: its own heads."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        specs: Sequence[AttentionSpec],
        n_query_heads: Sequence[int],
        shape: StepShape,
    ) -> None:
        self.t, self.layout, self.specs, self.shape = transport, layout, specs, shape
        self.n_query_heads = n_query_heads
        self.sizes: Sizes = layout.sizes(shape)
        self.prefills = [
            AttentionProgram(transport, layout, specs, n_query_heads, part) for part in shape.prefills
        ]
        # Without a kernel of its own, attention gathers stored keys and values first, for which it needs no q: left to
        # itself XLA gathers those of all layers at the start, and keeps them.
        self._gathers = transport.device.platform == "cpu"

    def step(
        self, k_pools: list[Pool], v_pools: list[Pool], inputs: StepInputs
    ) -> tuple[list[Pool], list[Pool], jax.Array]:
        """The pools with the new tokens in them, and a float32 ``[1]`` that is there when all is sent."""
        k_pools, v_pools = list(k_pools), list(v_pools)
        if self.shape.n_batches > 1:
            return self._staggered(k_pools, v_pools, inputs)
        last: jax.Array | None = None
        for i in range(len(self.specs)):
            k_pools[i], v_pools[i], last = self.layer(i, k_pools[i], v_pools[i], inputs, last)
            k_pools[i], v_pools[i], last = self._taken_in(i, k_pools[i], v_pools[i], inputs, last)
        assert last is not None, "a model without attention"
        return k_pools, v_pools, zero_after(last).reshape(1)

    def layer(
        self, i: int, k_pool: Pool, v_pool: Pool, inputs: StepInputs, last: jax.Array | None
    ) -> tuple[Pool, Pool, jax.Array]:
        """One layer of what is one batch, without that of prefill workers beside it; the last array is there when all is
        sent, or came."""
        heads = self._heads(i)
        if self.shape.kind == "prefill":
            kv = self._recv(i, heads.kv_like(self.sizes), last)
            return *self._append(k_pool, v_pool, kv, inputs.new_slots), kv
        answer = self._answer
        if self.shape.chunk is not None:
            answer = self._answer_with_chunk
        elif self.shape.mini_batches > 1:
            answer = self._answer_in_parts
        return answer(i, heads, k_pool, v_pool, inputs, last)

    def _taken_in(
        self, i: int, k_pool: Pool, v_pool: Pool, inputs: StepInputs, last: jax.Array
    ) -> tuple[Pool, Pool, jax.Array]:
        """One layer of what prefill workers compute meanwhile; to come after the layer's answers, for which model ranks
        wait."""
        for program, part in zip(self.prefills, inputs.prefills, strict=True):
            k_pool, v_pool, last = program.layer(i, k_pool, v_pool, part, last)
        return k_pool, v_pool, last

    def _answer(
        self, i: int, heads: HeadsOf, k_pool: Pool, v_pool: Pool, inputs: StepInputs, last: jax.Array | None
    ) -> tuple[Pool, Pool, jax.Array]:
        """One layer: stored tokens are attended as soon as q is there, and only then are k and v stored: the pools are
        read and written in this order or XLA would keep two of each."""
        q, kv = self._receive(i, heads.q_like(self.sizes), heads.kv_like(self.sizes), last)
        with span("attention", i):
            k_pool, v_pool, answer, after = self._attend(i, k_pool, v_pool, q, kv, inputs, last)
        b = len(self.layout.workers)
        return k_pool, v_pool, self.t.send_part(answer, self._peer(i), b, after)

    def _answer_in_parts(
        self, i: int, heads: HeadsOf, k_pool: Pool, v_pool: Pool, inputs: StepInputs, last: jax.Array | None
    ) -> tuple[Pool, Pool, jax.Array]:
        """`_answer` by mini-batches: while one is attended to, the next one's message comes and the last one's answer goes."""
        n, b, peer = self.shape.mini_batches, len(self.layout.workers), self._peer(i)
        likes = heads.q_like(self.sizes.part(n)), heads.kv_like(self.sizes.part(n))
        message = tie = self._recv(i, packed_like(*likes), last)
        for j in range(n):
            following = self._recv(i, packed_like(*likes), tie) if j + 1 < n else None
            q, kv = unpack(message, *likes)
            with span("attention", i):
                given = k_pool, v_pool, q, kv, inputs.part(j, n), tie
                k_pool, v_pool, answer, _ = self._attend(i, *given)
            tie = self.t.send_part(answer, peer, b, after=tie if following is None else following)
            message = message if following is None else following
        return k_pool, v_pool, tie

    def _answer_with_chunk(
        self, i: int, heads: HeadsOf, k_pool: Pool, v_pool: Pool, inputs: StepInputs, last: jax.Array | None
    ) -> tuple[Pool, Pool, jax.Array]:
        """One layer of a decode step and a chunk of a prompt: both are attended to, and then both are stored."""
        assert inputs.chunk is not None
        spec, sizes, chunk = self.specs[i], self.layout.mixed_sizes(self.shape), inputs.chunk
        q_likes = sizes.q_likes(heads)
        message, kv = self._receive(i, packed_like(*q_likes), sizes.kv_like(heads), last)
        assert kv is not None, "a chunk without tokens"
        q, *q_chunk = unpack(message, *q_likes)
        with span("attention", i):
            of_rows, of_chunk = (self._stored(i, k_pool, v_pool, part, last) for part in (inputs, chunk))
            if self._adds_new:
                k, v = jnp.split(kv[: sizes.rows.new, None], 2, axis=2)
                read = [_jitted(attention_with_own, spec)(q, k, v, *of_rows)]
                answers = list(read)
            else:
                out, lse = _jitted(partial_attention, spec)(q, *of_rows)
                read, answers = [out], [pack_partial(out, lse)]
            for x in q_chunk:
                out, lse = _jitted(partial_attention, spec)(x, *of_chunk)
                read.append(out)
                answers.append(pack_partial(out, lse))
            slots = reduce(tied, read, jnp.concatenate([inputs.new_slots, chunk.new_slots]))
            k_pool, v_pool = self._append(k_pool, v_pool, kv, slots)
        b = len(self.layout.workers)
        return k_pool, v_pool, self.t.send_part(pack(*answers), self._peer(i), b, after=kv)

    def _staggered(
        self, k_pools: list[Pool], v_pools: list[Pool], inputs: StepInputs
    ) -> tuple[list[Pool], list[Pool], jax.Array]:
        """A decode step of n batches in turn, as the schedule has it."""
        n, b = self.shape.n_batches, len(self.layout.workers)
        parts = [inputs.part(j, n) for j in range(n)]
        messages: dict[Operator, jax.Array] = {}
        # Each with what it must wait for, if that is not what it was made of: a tie is a kernel of its own.
        answers: dict[Operator, tuple[jax.Array, jax.Array]] = {}
        n_sent = [0] * len(self.specs)  # each layer's answers
        last: jax.Array | None = None

        def answer_of(operator: Operator) -> tuple[jax.Array, jax.Array | None]:
            answer, made_of = answers.pop(operator)
            return answer, None if made_of is last else last

        for item in schedule_of(self.layout, self.shape, len(self.specs)).pool_program():
            if isinstance(item, AttentionRun):
                i, heads = item.layer, self._heads(item.layer)
                message = messages.pop(item.operator)
                q, kv = unpack(message, heads.q_like(self.sizes), heads.kv_like(self.sizes))
                given = k_pools[i], v_pools[i], q, kv if self.sizes.new else None, parts[item.batch]
                with span("attention", i, item.batch):
                    k_pools[i], v_pools[i], answer, _ = self._attend(i, *given, last)
                answers[item.operator] = answer, message
            elif item.send is None:
                assert item.receive is not None
                answer, after = answer_of(item.receive)
                last = self.t.send_part(answer, item.replica, b, after=after)
            else:
                like = self._message_like(item.send.layer)
                if item.receive is None:
                    last = self.t.recv_part(like, item.replica, b, after=last)
                else:
                    answer, after = answer_of(item.receive)
                    last = self.t.swap_part(answer, like, item.replica, b, after=after)
                messages[item.send] = last
            if isinstance(item, Exchange) and item.receive is not None:
                i = item.receive.layer
                n_sent[i] += 1
                if n_sent[i] == n:
                    assert last is not None
                    k_pools[i], v_pools[i], last = self._taken_in(i, k_pools[i], v_pools[i], inputs, last)
        assert last is not None, "a model without attention"
        return k_pools, v_pools, zero_after(last).reshape(1)

    def _heads(self, i: int) -> HeadsOf:
        spec = self.specs[i]
        return HeadsOf(self.n_query_heads[i], spec.n_kv_heads, spec.head_dim, spec.dtype)

    def _message_like(self, i: int) -> jax.ShapeDtypeStruct:
        heads = self._heads(i)
        return packed_like(heads.q_like(self.sizes), heads.kv_like(self.sizes))

    def _attend(
        self,
        i: int,
        k_pool: Pool,
        v_pool: Pool,
        q: jax.Array,
        kv: jax.Array | None,
        inputs: StepInputs,
        last: jax.Array | None,
    ) -> tuple[Pool, Pool, jax.Array, jax.Array | None]:
        """The pools with the new tokens, the answer, and what else must be there before it is sent."""
        spec, stored = self.specs[i], self._stored(i, k_pool, v_pool, inputs, last)
        if self._adds_new:
            assert kv is not None
            *given, q_positions = stored
            k, v = jnp.split(kv[:, None], 2, axis=2)
            return *_jitted(_decode_attention, spec)(q, k, v, *given, inputs.new_slots, q_positions), None
        out, lse = _jitted(partial_attention, spec)(q, *stored)
        if kv is not None:
            k_pool, v_pool = self._append(k_pool, v_pool, kv, tied(inputs.new_slots, out))
        return k_pool, v_pool, pack_partial(out, lse), kv

    def _stored(
        self, i: int, k_pool: Pool, v_pool: Pool, inputs: StepInputs, last: jax.Array | None
    ) -> tuple[Any, ...]:
        """What a layer's kernels are told of the stored tokens: pools, slots, lengths, and where queries are."""
        spec = self.specs[i]
        q_positions = None if spec.window is None else inputs.q_positions.get(spec.window)
        table = inputs.slot_table
        if last is not None and self._gathers:
            table = tied(table, last)
        return k_pool, v_pool, table, inputs.lengths, q_positions

    @property
    def _adds_new(self) -> bool:
        """Whether a decode step's new tokens are added here to what is attended, and not on the model rank."""
        return self.shape.kind == "decode" and self.layout.by_heads

    def _receive(
        self, i: int, q_like: jax.ShapeDtypeStruct, kv_like: jax.ShapeDtypeStruct, last: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        has_new = kv_like.shape[0] > 0
        if not self.shape.q_first:
            q, kv = unpack(self._recv(i, packed_like(q_like, kv_like), last), q_like, kv_like)
            return q, kv if has_new else None
        q = self._recv(i, q_like, last)
        return q, self._recv(i, kv_like, q) if has_new else None

    def _recv(self, i: int, like: jax.ShapeDtypeStruct, after: jax.Array | None) -> jax.Array:
        return self.t.recv_part(like, self._peer(i), len(self.layout.workers), after)

    def _peer(self, i: int) -> int:
        """The rank that layer i's q, k and v come from."""
        return self.shape.rank or self.layout.model_rank(i)

    def _append(self, k_pool: Pool, v_pool: Pool, kv: jax.Array, slots: jax.Array) -> tuple[Pool, Pool]:
        k, v = jnp.split(kv, 2, axis=1)
        return append(k_pool, v_pool, k, v, slots)


# For ranks stored tokens are read first: k and v may still be on their way.
_decode_attention = partial(decode_attention, read_first=True)


@cache
def _jitted(function: Callable[..., Any], spec: AttentionSpec) -> Any:
    """One of the kernels for layers of one kind, its last argument the queries' positions; jitted, so that it is traced and
    lowered once."""

    def attend(*given: Any) -> Any:
        *arrays, q_positions = given
        return function(*arrays, q_positions=q_positions, **spec.scoring)

    return jax.jit(attend)


def step_inputs_of(layout: Layout, shape: StepShape, specs: Sequence[AttentionSpec]) -> StepInputs:
    """The shapes of ``AttentionProgram.step``'s inputs."""
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    sizes, n = layout.sizes(shape), shape.n_batches
    windows = sorted({spec.window for spec in specs if spec.window is not None})
    queries: dict[int, Any] = (
        {} if layout.by_heads else {w: ints((n * sizes.rows, sizes.tokens)) for w in windows}
    )
    return StepInputs(
        ints((n * sizes.rows, shape.context)),
        ints((n * sizes.rows,)),
        ints((n * sizes.new,)),
        queries,
        None if shape.chunk is None else step_inputs_of(layout, shape.chunk, specs),
        tuple(step_inputs_of(layout, part, specs) for part in shape.prefills),
    )
