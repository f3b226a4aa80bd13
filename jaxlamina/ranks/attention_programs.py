"""The attention rank's programs: a whole step each, all layers' appends and partial attention, and all
exchanges.

The pool's list of a step's plan (`jaxlamina.steps.plans`) is run here while the rank's one program is traced.
What is done with the KV is `jaxlamina.ranks.stored`'s. The program is unrolled: in a loop over layers XLA
copies the pools. Knows no weight, no token and no request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from jaxlamina.kv.planned_rows import SegmentSlots
from jaxlamina.process import kept_programs
from jaxlamina.ranks.stored import Asked, StoredKV, slots_like
from jaxlamina.ranks.wires import (
    Format,
    HeadsOf,
    Links,
    answer_of,
    heads_on_worker,
    links_of_worker,
    pack_partial,
    put_together,
    sizes_of,
)
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import Append, Attend, Payload, Receive, Send, Swap, Task
from jaxlamina.transports import TracedEnd
from jaxlamina.transports.local import CompiledPieces, LocalTransport, Together
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.workspace import LargestStep, pool_shapes
from pallas_kernels import Pool
from pallas_kernels.order import zero_after


class AttentionProgram:
    """Traces one bucket's step. ``specs`` and ``heads`` are of this worker: what `heads_on_worker` gives."""

    def __init__(
        self,
        transport: TracedEnd,
        layout: Layout,
        specs: Sequence[AttentionSpec],
        heads: Sequence[HeadsOf],
        shape: StepShape,
    ) -> None:
        self.t, self.layout, self.specs, self.heads = transport, layout, specs, heads
        self.plan = plan_of(layout, shape, len(specs))
        self.formats = [Format(layout, batch) for batch in self.plan.batches]
        # Without a kernel of its own, attention gathers stored keys and values first, for which it needs no
        # q: left to itself XLA gathers those of all layers at the start, and keeps them.
        self.gathers = transport.device.platform == "cpu" and transport.is_one_program

    def step(
        self, k_pools: list[Pool], v_pools: list[Pool], inputs: Sequence[SegmentSlots]
    ) -> tuple[list[Pool], list[Pool], Float32[jax.Array, " 1"]]:
        """The pools with the new tokens in them, and an array that is there when all is sent. ``inputs``: of
        each of the step's segments (`StepShape.segments`)."""
        return _AttentionStep(self, k_pools, v_pools, inputs).run()

    def links(self, payload: Payload, replica: int) -> Links:
        """With which model ranks this worker exchanges which of its heads."""
        heads = self.heads[payload.layer]
        return links_of_worker(self.layout, self.t.rank, replica, heads)

    def n_alike(self, payload: Payload) -> int:
        """How many workers' messages are alike, and may be one exchange (`Transport.send_each`)."""
        n, heads = len(self.layout.workers), self.heads[payload.layer]
        return 1 if self.layout.by_heads and heads.of % n else n

    def adds_own(self, segment: StepShape) -> bool:
        """Whether new tokens are added here to what is attended, and not on the model rank."""
        return segment.kind == "decode" and self.layout.by_heads


_Operator = tuple[int, int, int]  # a batch's attention operator, or a part of it: (batch, layer, part)


class _AttentionStep:
    """One step while it is traced. All exchanges are in one order by data: ``last`` is there when the last
    one is over."""

    def __init__(
        self,
        program: AttentionProgram,
        k_pools: list[Pool],
        v_pools: list[Pool],
        inputs: Sequence[SegmentSlots],
    ) -> None:
        self.p, self.t = program, program.t
        self.kv = StoredKV(program.specs, k_pools, v_pools, inputs)
        self.q: dict[_Operator, list[jax.Array]] = {}  # of each segment that asks
        self.new: dict[_Operator, jax.Array] = {}  # keys and values to be stored
        self.messages: dict[_Operator, jax.Array] = {}  # the last one that came
        self.q_messages: dict[_Operator, jax.Array] = {}
        self.before: dict[_Operator, jax.Array | None] = {}  # the last exchange before the first of them
        # Each with what it must wait for, if that is not what it was made of: a tie is a kernel of its own.
        self.answers: dict[_Operator, tuple[list[jax.Array], jax.Array]] = {}
        self.last: jax.Array | None = None

    def run(self) -> tuple[list[Pool], list[Pool], jax.Array]:
        tasks = self.p.plan.pool
        followers: list[Task | None] = [*tasks[1:], None]
        for task, following in zip(tasks, followers, strict=True):
            if isinstance(task, Attend):
                self._attend(task, following == Append(task.batch, task.layer, task.part))
            elif isinstance(task, Append):
                new = self.new.pop((task.batch, task.layer, task.part))
                self.kv.append(task, self.p.plan.batches[task.batch], new)
            elif isinstance(task, Receive):
                likes, messages = self._likes(task.payload, task.peer), list[jax.Array]()
                n = self.p.n_alike(task.payload)
                for rank, like in likes:
                    after = messages[-1] if messages else self.last
                    messages.append(self.t.recv_part(like, rank, n, after))
                self._received(task.payload, task.peer, messages)
            elif isinstance(task, Send):
                n = self.p.n_alike(task.payload)
                for rank, answer, after in self._answers(task.payload, task.peer):
                    self.last = self.t.send_part(answer, rank, n, after)
            else:
                assert isinstance(task, Swap)
                before, messages = self.last, []
                answers = self._answers(task.send, task.peer)
                likes, n = self._likes(task.receive, task.peer), self.p.n_alike(task.send)
                for (rank, answer, after), (_, like) in zip(answers, likes, strict=True):
                    self.last = self.t.swap_part(answer, like, rank, n, after)
                    messages.append(self.last)
                self.last = before
                self._received(task.receive, task.peer, messages)
        done = jnp.zeros(1) if self.last is None else zero_after(self.last).reshape(1)
        return self.kv.k, self.kv.v, done

    def _likes(self, payload: Payload, replica: int) -> list[tuple[int, jax.ShapeDtypeStruct]]:
        message_like = self.p.formats[payload.batch].message_like
        return [(rank, message_like(payload.what, heads)) for rank, heads in self.p.links(payload, replica)]

    def _received(self, payload: Payload, replica: int, messages: Sequence[jax.Array]) -> None:
        """All of a replica's ranks' messages: this worker's heads."""
        what, *of = payload
        operator: _Operator = tuple(of)  # type: ignore[assignment]
        self.before.setdefault(operator, self.last)
        self.last = self.messages[operator] = message = messages[-1]
        unpacked, links = self.p.formats[payload.batch].unpacked, self.p.links(payload, replica)
        of_links = [unpacked(x, what, heads) for x, (_, heads) in zip(messages, links, strict=True)]
        arrays = put_together(of_links, "kv" in what)
        if "q" in what:
            self.q_messages[operator] = message
            self.q[operator] = arrays[:-1] if "kv" in what else arrays
        if "kv" in what:
            self.new[operator] = arrays[-1]

    def _answers(self, payload: Payload, replica: int) -> Iterator[tuple[int, jax.Array, jax.Array | None]]:
        """For each of a replica's ranks, which it is for, its answer and what this must wait for."""
        answers, made_of = self.answers.pop((payload.batch, payload.layer, payload.part))
        for rank, heads in self.p.links(payload, replica):
            yield rank, answer_of(answers, heads), None if made_of is self.last else self.last

    def _attend(self, task: Attend, then_append: bool) -> None:
        """Stored tokens are attended as soon as q is there, and only then are k and v stored."""
        of = task.batch, task.layer, task.part
        batch = self.p.plan.batches[task.batch]
        segments = zip(batch.segments, self.kv.slots(batch, task.part), strict=True)
        asking = [(segment, slots) for segment, slots in segments if self.p.layout.asks(segment)]
        asked = [
            Asked(q, slots, self.p.adds_own(segment))
            for (segment, slots), q in zip(asking, self.q[of], strict=True)
        ]
        answers = self.kv.attend(
            task,
            asked,
            self.new.get(of),
            then_append=then_append,
            gather_after=self.before[of] if self.p.gathers else None,
        )
        adds_own = any(of_segment.adds_own for of_segment in asked)
        packed = [pack_partial(*answer) if isinstance(answer, tuple) else answer for answer in answers]
        self.answers[of] = packed, (self.messages if adds_own else self.q_messages)[of]


def step_inputs_of(
    layout: Layout, shape: StepShape, specs: Sequence[AttentionSpec]
) -> tuple[SegmentSlots, ...]:
    """The shapes of ``AttentionProgram.step``'s inputs."""
    return tuple(_segment_inputs_of(layout, segment, specs) for segment in shape.segments)


def _segment_inputs_of(layout: Layout, segment: StepShape, specs: Sequence[AttentionSpec]) -> SegmentSlots:
    n, sizes = 1 if layout.by_heads else segment.n_batches, sizes_of(layout, segment)
    return slots_like(layout, segment, specs, n * sizes.rows, n * sizes.new)


def attention_workspace_bytes(
    specs: Sequence[AttentionSpec], n_query_heads: Sequence[int], device: jax.Device, largest: LargestStep
) -> int:
    """What a layer's attention of the largest step takes beside KV on one worker of such heads, its messages
    counted; found by compiling it, once on this host."""
    name = kept_programs.name_of(device, "attention workspace", tuple(specs), tuple(n_query_heads), largest)
    return kept_programs.number(name, lambda: _workspace_bytes(specs, n_query_heads, device, largest))


def _workspace_bytes(
    specs: Sequence[AttentionSpec], n_query_heads: Sequence[int], device: jax.Device, largest: LargestStep
) -> int:
    b, c, t = largest.batch, largest.context, largest.prompt
    half = -(-t // 2)  # of a prompt whose first half is stored: there are never more scores than that
    steps = [StepShape("decode", b, 1, c), StepShape("prefill", 1, t, 0), StepShape("chunk", 1, half, half)]
    layout, found = Layout((1,), "heads"), []
    for spec, n in dict.fromkeys(zip(specs, n_query_heads, strict=True)):
        pools = [pool_shapes(spec)]
        for shape in steps:
            end = LocalTransport(1, 2, device)
            program = AttentionProgram(end, layout, [spec], [heads_on_worker(layout, spec, n, 0)], shape)
            inputs = step_inputs_of(layout, shape, [spec])
            traced = end.compile_later(program.step, pools, pools, inputs, donate_argnums=(0, 1))()
            messages = (e for e in traced.exchanges() if e.op == "recv")
            n_bytes = sum(math.prod(e.shape) * jnp.dtype(e.dtype).itemsize for e in messages)
            found.append(Together([traced], CompiledPieces()).workspace_bytes() + n_bytes)
    return max(found)
