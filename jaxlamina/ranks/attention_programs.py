"""The attention rank's programs: a whole step each, all layers' appends and partial attention, and all exchanges.

The pool's list of a step's plan (`jaxlamina.steps.plans`) is run here while the rank's one program is traced. Pools are donated,
one array a layer, so that each append is in place. The program is unrolled: in a loop over layers XLA copies the pools. Knows no
weight, no token and no request.

Source: Lamina 2025 §4.2.2: partial attention over earlier tokens runs while k and v are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlamina.ranks.layout import span
from jaxlamina.ranks.wires import Format, HeadsOf, message_of, pack_partial, sizes_of
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import PlannedBatch, plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import Append, Attend, Payload, Receive, Send, Swap, Task
from jaxlamina.transports import Transport
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import Pool, append, attention_with_own, decode_attention, partial_attention
from pallas_kernels.order import tied, zero_after


class SegmentInputs(NamedTuple):
    """The slots on this worker of a step's rows, or of a prompt's tokens, int32: R rows with up to C stored tokens, M new
    tokens."""

    slot_table: Any  # [R, C]
    lengths: Any  # [R]
    new_slots: Any  # [M], ≥ S for none
    q_positions: dict[int, Any]  # window -> [R, T], for tables that lost their positions

    def part(self, j: int, n: int) -> SegmentInputs:
        """The j-th of n equal parts of the rows and new tokens."""
        if n == 1:
            return self

        def cut(x: Any) -> Any:
            return x[j * (len(x) // n) : (j + 1) * (len(x) // n)]

        queries = {window: cut(x) for window, x in self.q_positions.items()}
        return SegmentInputs(cut(self.slot_table), cut(self.lengths), cut(self.new_slots), queries)


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
        self.t, self.layout, self.specs = transport, layout, specs
        self.heads = [
            HeadsOf(n, spec.n_kv_heads, spec.head_dim, spec.dtype)
            for spec, n in zip(specs, n_query_heads, strict=True)
        ]
        self.plan = plan_of(layout, shape, len(specs))
        self.formats = [Format(layout, batch) for batch in self.plan.batches]
        # Without a kernel of its own, attention gathers stored keys and values first, for which it needs no q: left to
        # itself XLA gathers those of all layers at the start, and keeps them.
        self.gathers = transport.device.platform == "cpu"

    def step(
        self, k_pools: list[Pool], v_pools: list[Pool], inputs: Sequence[SegmentInputs]
    ) -> tuple[list[Pool], list[Pool], jax.Array]:
        """The pools with the new tokens in them, and a float32 ``[1]`` that is there when all is sent. ``inputs``: of each of the
        step's segments (`StepShape.segments`)."""
        return _TracedStep(self, list(k_pools), list(v_pools), inputs).run()

    def adds_own(self, segment: StepShape) -> bool:
        """Whether new tokens are added here to what is attended, and not on the model rank."""
        return segment.kind == "decode" and self.layout.by_heads


_Operator = tuple[int, int, int]  # a batch's attention operator, or a part of it: (batch, layer, part)


class _TracedStep:
    """One step while it is traced. All exchanges are in one order by data: ``last`` is there when the last one is over."""

    def __init__(
        self,
        program: AttentionProgram,
        k_pools: list[Pool],
        v_pools: list[Pool],
        inputs: Sequence[SegmentInputs],
    ) -> None:
        self.p, self.t, self.k_pools, self.v_pools = program, program.t, k_pools, v_pools
        self.inputs, self.n_workers = inputs, len(program.layout.workers)
        self.q: dict[_Operator, list[jax.Array]] = {}  # of each segment that asks
        self.kv: dict[_Operator, jax.Array] = {}
        self.messages: dict[_Operator, jax.Array] = {}  # the last one that came
        self.q_messages: dict[_Operator, jax.Array] = {}
        self.before: dict[_Operator, jax.Array | None] = {}  # the last exchange before the first of them
        self.read: dict[_Operator, list[jax.Array]] = {}  # made of the pools as they were
        # Each with what it must wait for, if that is not what it was made of: a tie is a kernel of its own.
        self.answers: dict[_Operator, tuple[jax.Array, jax.Array]] = {}
        self.last: jax.Array | None = None

    def run(self) -> tuple[list[Pool], list[Pool], jax.Array]:
        tasks = self.p.plan.pool
        followers: list[Task | None] = [*tasks[1:], None]
        for task, following in zip(tasks, followers, strict=True):
            if isinstance(task, Attend):
                self._attend(task, following == Append(task.batch, task.layer, task.part))
            elif isinstance(task, Append):
                self._append(task)
            elif isinstance(task, Receive):
                like = self._like(task.payload)
                self._received(task.payload, self.t.recv_part(like, task.peer, self.n_workers, self.last))
            elif isinstance(task, Send):
                answer, after = self._answer(task.payload)
                self.last = self.t.send_part(answer, task.peer, self.n_workers, after)
            else:
                assert isinstance(task, Swap)
                answer, after = self._answer(task.send)
                like = self._like(task.receive)
                swapped = self.t.swap_part(answer, like, task.peer, self.n_workers, after)
                self._received(task.receive, swapped)
        assert self.last is not None, "a model without attention"
        return self.k_pools, self.v_pools, zero_after(self.last).reshape(1)

    def _like(self, payload: Payload) -> jax.ShapeDtypeStruct:
        return self.p.formats[payload.batch].message_like(payload.what, self.p.heads[payload.layer])

    def _received(self, payload: Payload, message: jax.Array) -> None:
        what, *of = payload
        operator: _Operator = tuple(of)  # type: ignore[assignment]
        self.before.setdefault(operator, self.last)
        self.last = self.messages[operator] = message
        arrays = self.p.formats[payload.batch].unpacked(message, what, self.p.heads[payload.layer])
        if "q" in what:
            self.q_messages[operator] = message
            self.q[operator] = arrays[:-1] if "kv" in what else arrays
        if "kv" in what:
            self.kv[operator] = arrays[-1]

    def _answer(self, payload: Payload) -> tuple[jax.Array, jax.Array | None]:
        answer, made_of = self.answers.pop((payload.batch, payload.layer, payload.part))
        return answer, None if made_of is self.last else self.last

    def _attend(self, task: Attend, then_append: bool) -> None:
        """Stored tokens are attended as soon as q is there, and only then are k and v stored: the pools are read and written in
        this order or XLA would keep two of each. Where the same kernel can do both, it does."""
        i, of = task.layer, (task.batch, task.layer, task.part)
        batch, spec = self.p.plan.batches[task.batch], self.p.specs[task.layer]
        segments = zip(batch.segments, self._inputs(batch, task.part), strict=True)
        asking = [(segment, inputs) for segment, inputs in segments if segment.kind != "prefill"]
        read, answers = [], []
        with span("attention", i, task.batch):
            for (segment, inputs), q in zip(asking, self.q[of], strict=True):
                stored = self._stored(of, inputs)
                if not self.p.adds_own(segment):
                    out, lse = _jitted(partial_attention, spec)(q, *stored)
                    read.append(out)
                    answers.append(pack_partial(out, lse))
                    continue
                is_alone, kv = len(batch.segments) == 1, self.kv[of]
                k, v = jnp.split((kv if is_alone else kv[: q.shape[0]])[:, None], 2, axis=2)
                if then_append and is_alone:
                    *given, q_positions = stored
                    kernel = _jitted(_decode_attention, spec)
                    self.k_pools[i], self.v_pools[i], out = kernel(
                        q, k, v, *given, inputs.new_slots, q_positions
                    )
                    self.kv.pop(of)  # stored
                else:
                    out = _jitted(attention_with_own, spec)(q, k, v, *stored)
                read.append(out)
                answers.append(out)
        adds_own = any(self.p.adds_own(segment) for segment, _ in asking)
        self.read[of] = read
        self.answers[of] = message_of(answers), (self.messages if adds_own else self.q_messages)[of]

    def _append(self, task: Append) -> None:
        i, of = task.layer, (task.batch, task.layer, task.part)
        if of not in self.kv:
            return
        batch = self.p.plan.batches[task.batch]
        slots = [inputs.new_slots for inputs in self._inputs(batch, task.part)]
        with span("attention", i, task.batch):
            after_reading = reduce(
                tied, self.read.get(of, ()), slots[0] if len(slots) == 1 else jnp.concatenate(slots)
            )
            k, v = jnp.split(self.kv.pop(of), 2, axis=1)
            self.k_pools[i], self.v_pools[i] = append(self.k_pools[i], self.v_pools[i], k, v, after_reading)

    def _inputs(self, batch: PlannedBatch, part: int) -> list[SegmentInputs]:
        """Of each segment of a batch, or of a part of it."""
        own = self.inputs[batch.first_segment : batch.first_segment + len(batch.segments)]
        return [inputs.part(batch.index, batch.of).part(part, batch.n_parts) for inputs in own]

    def _stored(self, of: _Operator, inputs: SegmentInputs) -> tuple[Any, ...]:
        """What a layer's kernels are told of the stored tokens: pools, slots, lengths, and where queries are."""
        i, before = of[1], self.before[of]
        window = self.p.specs[i].window
        q_positions = None if window is None else inputs.q_positions.get(window)
        table = inputs.slot_table
        if before is not None and self.p.gathers:
            table = tied(table, before)
        return self.k_pools[i], self.v_pools[i], table, inputs.lengths, q_positions


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


def step_inputs_of(
    layout: Layout, shape: StepShape, specs: Sequence[AttentionSpec]
) -> tuple[SegmentInputs, ...]:
    """The shapes of ``AttentionProgram.step``'s inputs."""
    return tuple(_segment_inputs_of(layout, segment, specs) for segment in shape.segments)


def _segment_inputs_of(layout: Layout, segment: StepShape, specs: Sequence[AttentionSpec]) -> SegmentInputs:
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    n, sizes = (
        (1, sizes_of(layout, segment)) if layout.by_heads else (segment.n_batches, sizes_of(layout, segment))
    )
    windows = sorted({spec.window for spec in specs if spec.window is not None and not layout.by_heads})
    return SegmentInputs(
        ints((n * sizes.rows, segment.context)),
        ints((n * sizes.rows,)),
        ints((n * sizes.new,)),
        {window: ints((n * sizes.rows, sizes.tokens)) for window in windows},
    )
