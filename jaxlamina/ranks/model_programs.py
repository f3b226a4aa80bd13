"""A model rank's programs: a whole step each, all its slices and all exchanges, no Python between layers.

A rank's list of a step's plan (`jaxlamina.steps.plans`) is run here while its one program is traced. Made of
the splitter's parts; what a message holds is the wire's affair, how it travels the transport's, and what is
done with the KV that the rank itself may keep `jaxlamina.ranks.stored`'s. Holds no weights and no KV: they
are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from jaxlamina.kv.placement import PlacedIndices
from jaxlamina.kv.planned_rows import SegmentSlots
from jaxlamina.ranks.cluster_layout import Tie, scope
from jaxlamina.ranks.contexts import context_at, likes_of, not_had, recv_arrays, row_axis, send_arrays
from jaxlamina.ranks.shards import EXCHANGES, ShardEnd, Shards
from jaxlamina.ranks.stored import Asked, StoredKV, Unended, slots_like
from jaxlamina.ranks.wires import Links, Wire, links_of_rank, local_spec
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import PlannedBatch, plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import (
    FRONT,
    Append,
    Attend,
    HandOver,
    Logits,
    Payload,
    Receive,
    RunSlice,
    Send,
    Swap,
)
from jaxlamina.transports import TracedEnd
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import Pool, compat
from pallas_kernels.order import tied, zero_after
from splitter import SplitModel
from splitter.block import Read


class ModelProgram:
    """Traces what one model rank does of a step. ``step`` is the function to compile; ``model`` is cut for
    one batch of the plan, ``ends`` for the rows that its last slice is run for, if these are others."""

    def __init__(
        self,
        transport: TracedEnd | ShardEnd,
        layout: Layout,
        model: SplitModel,
        specs: Sequence[AttentionSpec],
        shape: StepShape,
        rank: int = FRONT,
        ends: SplitModel | None = None,
        shards: Shards | None = None,
    ) -> None:
        """``shards``: the ranks that share out the replica's weights, of which ``model`` is this one's shard,
        if several do."""
        self.t, self.layout, self.model, self.specs, self.shape = transport, layout, model, specs, shape
        self.rank, self.ends, self.shards = rank, ends, shards
        # Others do the same, for the sake of what they exchange.
        self.wants_logits = rank == FRONT and (shards is None or shards.index == 0)
        self.plan = plan_of(layout, shape, model.n)
        self._local_layers = layout.local_layers(rank, model.n)

    def step(
        self,
        weights: Sequence[tuple[jax.Array, ...]],
        inputs: tuple[Int32[jax.Array, " _ ..."], ...],
        at: tuple[PlacedIndices, ...],
        k_pools: Sequence[Pool] = (),
        v_pools: Sequence[Pool] = (),
        slots: Sequence[SegmentSlots] = (),
    ) -> tuple[Float[jax.Array, " _ ..."], Sequence[Pool], Sequence[Pool]]:
        """Logits ``[B, V]`` after each row's last token, or ``[B, T, V]`` ``of_all``; on a rank that is not
        rank 0 a ``[1]`` that is there when all is sent. ``weights``: each slice's, of other ranks' slices
        none. ``inputs``: tokens and positions ``[B, T]``, and for more than one token a row ``logits_at
        [B]``, unless logits are of all.

        With a chunk of T tokens alongside: logits ``[B + 1, V]``, the chunk's last; tokens and positions ``[B
        + T, 1]``, ``logits_at [1]`` within the chunk. ``at``: of the rows, and of the chunk if there is one;
        empty by heads.

        And the pools of the KV that this rank keeps, with the new tokens in them: of its own layers
        (`Layout.local_layers`), none where it keeps none; ``slots``: of the rows, and of the chunk."""
        own = [local_spec(self.layout, self.specs[i]) for i in self._local_layers]
        kv = StoredKV(own, k_pools, v_pools, slots, self._local_layers.start)
        logits = _ModelStep(self, weights, inputs, at, kv).run()
        return logits, kv.k, kv.v

    @property
    def to_ranks(self) -> TracedEnd:
        """What goes from model rank to model rank goes by this. A shard of the weights has no such
        messages."""
        assert isinstance(self.t, TracedEnd)
        return self.t

    @property
    def logits_like(self) -> Float32[jax.ShapeDtypeStruct, "... V"]:
        """One batch's logits, as a rank gets them that did not run the last slice."""
        n_words = self.model.traced.jaxpr.outvars[0].aval.shape[-1]
        return jax.ShapeDtypeStruct((*self.shape.logits_of, n_words), jnp.float32)

    def links(self, i: int) -> Links:
        """With which attention workers this rank exchanges which of layer i's heads."""
        site = self.model.sites[i]
        index = self.shards.index if self.shards is not None and self.layout.heads_over > 1 else 0
        n_each = site.q.shape[2] // site.k.shape[2]
        return links_of_rank(self.layout, self.rank, self.rank + index, self.specs[i], n_each)


_Operator = tuple[int, int]  # a batch's attention operator: (batch, layer)


class _ModelStep:
    """One step while it is traced: what there is of each batch so far.

    All of a rank's exchanges are in one order by data: XLA keeps no other. ``tie`` is there when the last one
    is over, and the next one needs it, unless its message is made of what that one brought."""

    def __init__(
        self,
        program: ModelProgram,
        weights: Sequence[tuple[jax.Array, ...]],
        inputs: Sequence[jax.Array],
        at: Sequence[PlacedIndices],
        kv: StoredKV,
    ) -> None:
        self.p, self.t, self.model = program, program.t, program.model
        self.weights, self.inputs, self.kv = weights, inputs, kv
        self.tasks = program.plan.model[program.rank]
        batches = program.plan.batches
        self.wires = [Wire(program.layout, batch, _of_batch(at, batch)) for batch in batches]
        # Each batch's contexts so far, by the model's variables; inputs every rank has.
        first = self.model.slices[0].context_vars
        given = inputs if program.shape.chunk is None else inputs[:2]
        self.known: list[dict[Any, Any]] = [
            dict(zip(first, self.model.first_context(*_rows(given, batch)), strict=True)) for batch in batches
        ]
        self.rest: dict[_Operator, Any] = {}
        self.q: dict[_Operator, Any] = {}
        self.new: dict[_Operator, tuple[Any, Any]] = {}  # keys and values
        self.own: dict[_Operator, list[Any]] = {}
        self.local: dict[_Operator, list[Any]] = {}  # what this rank's own KV answers
        self.own_new: dict[_Operator, jax.Array] = {}  # of `new` what it may keep, until that is stored
        self.answers: dict[_Operator, list[list[jax.Array]]] = {}
        self.outs: dict[_Operator, Any] = {}
        self.logits: dict[tuple[int, ...], jax.Array] = {}
        self.tie: Tie = None
        self.rules = {} if program.shards is None else dict.fromkeys(EXCHANGES, self._among_shards)
        # What attention outputs, and messages, are made of: the last exchange among it.
        self.out_of: dict[_Operator, Tie] = {}
        self.made_of: dict[Any, Tie] = {}
        self.run_task: dict[type, Callable[[Any], None]] = {
            RunSlice: self._run_slice,
            Attend: self._attend,
            Append: self._append,
            Send: self._send,
            Receive: self._receive,
            Swap: self._swap,
            HandOver: self._hand_over,
            Logits: self._end,
        }

    def run(self) -> jax.Array:
        for task in self.tasks:
            self.run_task[type(task)](task)
        if not self.p.wants_logits:
            return jnp.zeros(1) if self.tie is None else zero_after(self.tie).reshape(1)
        found = [self.logits[key] for key in sorted(self.logits)]  # a staggered batch has every n-th row
        logits = found[0] if len(found) == 1 else jnp.stack(found, axis=1).reshape(self.p.shape.batch, -1)
        is_last = any(self.made_of[key] is self.tie for key in self.logits)
        return logits if is_last else tied(logits, self.tie)

    # --- slices and attention ---
    def _run_slice(self, task: RunSlice) -> None:
        j, i = of = task.batch, task.index
        part = self.model.slices[i]
        with scope("slice", i, j):
            if task.piece != "kv":
                needs_out = i > 0 and part.program.q_needs(
                    -1
                )  # not where a model has attentions side by side
                self.made_of[of] = self.out_of.get((j, i - 1)) if needs_out else None
                before, out = self.tie, self._out(j, i - 1)
                self.q[of], self.rest[of] = part.q_part(
                    self.weights[i], self._context(j, i), out, rules=self.rules
                )
                if self.tie is not before:  # what is exchanged among shards in here, q is made of
                    self.made_of[of] = self.tie
            if task.piece != "q":
                after_q = [self.made_of[of]] if task.piece == "kv" else []
                k, v, context = part.kv_part(self.weights[i], self.rest.pop(of), *after_q, rules=self.rules)
                self.new[of] = k, v
                self.known[j].update(zip(self.model.slices[i + 1].context_vars, context, strict=True))

    def _attend(self, task: Attend) -> None:
        """While attention workers do their part: after what was sent last, and before the next exchange, by
        data: a GPU would wait for an answer first, or send late."""
        of, wire = (task.batch, task.layer), self.wires[task.batch]
        q, (k, v) = self.q[of], self.new[of]
        self.own[of] = wire.own(q, k, v, self.p.specs[task.layer])
        batch = self._whole(task.batch)
        if not batch.local:
            return
        queries, self.own_new[of] = wire.local(q, k, v, self.p.links(task.layer))
        asked_of = [
            s for s in zip(batch.segments, self.kv.slots(batch), strict=True) if s[0].kind != "prefill"
        ]
        # Over stages another rank may put the parts together.
        waits = batch.asks and not self.p.layout.by_heads and not self.p.layout.stages
        asked = [
            Asked(tied(x, self.tie), slots, adds_own, waits and segment.kind == "decode")
            for (x, adds_own), (segment, slots) in zip(queries, asked_of, strict=True)
        ]
        self.local[of] = self.kv.attend(task, asked, self.own_new[of], then_append=True)
        if self.tie is not None and self.local[of]:
            [first, *_] = self.local[of]
            self.tie = first.done if isinstance(first, Unended) else jax.tree.leaves(first)[0]

    def _append(self, task: Append) -> None:
        of = task.batch, task.layer
        self.kv.append(task, self._whole(task.batch), self.own_new.pop(of))

    def _whole(self, j: int) -> PlannedBatch:
        """Its messages may go in parts: what is done here is not."""
        return replace(self.p.plan.batches[j], n_parts=1)

    def _out(self, j: int, layer: int) -> Any:
        """The attention output that a slice goes on from; None before the first one."""
        of = j, layer
        if layer < 0 or of in self.outs:
            return self.outs.get(of)
        qkv = self.q.get(of), *self.new.get(of, (None, None))  # on the rank that adds their own attention
        known = self.answers.get(of, []), qkv, self.own.get(of, []), self.local.get(of, [])
        self.outs[of] = self.wires[j].out(*known, self.p.links(layer), self.p.specs[layer])
        return self.outs[of]

    def _end(self, task: Logits) -> None:
        n, (first, *_) = self.model.n, task.batches
        final = (self.p.ends or self.model).slices[n]
        with scope("slice", n, first):
            contexts = [self._context(j, n) for j in task.batches]
            outs = [self._out(j, n - 1) for j in task.batches]
            context, out = contexts[0], outs[0]
            if len(outs) > 1:
                by_variable = zip(zip(*contexts, strict=True), final.context_vars, strict=True)
                context = tuple(_joined(xs, compat.like_of(v)) for xs, v in by_variable)
                out = jnp.stack(outs, axis=1).reshape(-1, *out.shape[1:])
            if self.p.shape.chunk is not None:  # of its tokens only the one that logits are wanted of
                n_rows = self.p.shape.batch
                wanted = jnp.concatenate([jnp.arange(n_rows), n_rows + self.inputs[2]])
                context, out = context_at(wanted, context, final), out[wanted]
            before, made_of = self.tie, self.out_of.get((task.batches[-1], n - 1))
            logits = final.final(self.weights[n], context, out, rules=self.rules)
        self.logits[task.batches] = logits if self.p.shape.of_all else logits[:, -1]
        self.made_of[task.batches] = made_of if self.tie is before else self.tie

    def _context(self, j: int, i: int) -> tuple[Any, ...]:
        return tuple(self.known[j][v] for v in self.model.slices[i].context_vars)

    # --- exchanges ---
    def _among_shards(self, eqn: compat.JaxprEqn, read: Read) -> list[jax.Array]:
        assert self.p.shards is not None
        value, self.tie = self.p.shards.run(eqn, read(eqn.invars[0]), self.tie)
        return [value]

    def _send(self, task: Send) -> None:
        payload = task.payload
        if payload.what == "logits":
            of = (payload.batch,)
            logits = self.logits.pop(of).astype(jnp.float32)
            self.tie = self.p.to_ranks.send(logits, task.peer, after=self._after(of))
            return
        messages, workers = self._messages(payload), self._workers(payload)
        self.tie = self._after_all(payload)
        for _, some in _alike(messages):
            self.tie = self.t.send_each(messages[some], workers[some], after=self.tie)
        self._sent(payload)

    def _receive(self, task: Receive) -> None:
        payload = task.payload
        if payload.what == "logits":
            received = self.p.to_ranks.recv(self.p.logits_like, task.peer, after=self.tie)
            self.logits[payload.batch,] = self.made_of[payload.batch,] = self.tie = received
            return
        likes, workers, answers = self._answers_like(payload), self._workers(payload), list[jax.Array]()
        for like, some in _alike(likes):
            answers += self.t.recv_each(like, workers[some], after=answers[-1] if answers else self.tie)
        self._received(payload, answers)

    def _swap(self, task: Swap) -> None:
        messages, likes = self._messages(task.send), self._answers_like(task.receive)
        workers, answers = self._workers(task.send), list[jax.Array]()
        for like, some in _alike(likes):
            after = answers[-1] if answers else self._after_all(task.send)
            answers += self.t.swap_each(messages[some], like, workers[some], after=after)
        self._received(task.receive, answers)

    def _workers(self, payload: Payload) -> list[int]:
        return [worker for worker, _ in self.p.links(payload.layer)]

    def _messages(self, payload: Payload) -> list[jax.Array]:
        what, j, layer, part = payload
        k, v = (None, None) if what == "q" else self.new[j, layer]
        return self.wires[j].messages(what, self.q[j, layer], k, v, part, self.p.links(layer))

    def _answers_like(self, payload: Payload) -> list[jax.ShapeDtypeStruct]:
        message_like = self.wires[payload.batch].format.message_like
        return [message_like("out", heads) for _, heads in self.p.links(payload.layer)]

    def _received(self, payload: Payload, answers: list[jax.Array]) -> None:
        of = payload.batch, payload.layer
        self.answers.setdefault(of, []).append(answers)
        self.tie = self.out_of[of] = answers[-1]

    def _sent(self, payload: Payload) -> None:
        """k and v that are computed after q was sent need that."""
        if payload.what == "q":
            self.made_of[payload.batch, payload.layer] = self.tie

    def _after_all(self, payload: Payload) -> Tie:
        return self._after((payload.batch, payload.layer))

    def _after(self, of: Any) -> Tie:
        """What a message must wait for, if that is not what it was made of."""
        return None if self.made_of.get(of) is self.tie else self.tie

    # --- from rank to rank ---
    def _hand_over(self, task: HandOver) -> None:
        """The next rank is sent what it has not had of the context: not the inputs, nor what was in the
        contexts of slices that it ran."""
        j, i = task.batch, task.slice
        of = j, i - 1
        ran = (t.index for t in self.p.plan.model[task.target] if isinstance(t, RunSlice) and t.batch == j)
        wanted = not_had(self.model.slices, i, [k for k in ran if k < i])
        site = self.model.sites[i - 1]
        if self.p.rank == task.source:
            arrays, after = [self.known[j][v] for v in wanted], self.tie
            arrays += jax.tree.leaves(self.local[of]) if task.local else []
            if task.carries == "out":
                arrays.append(self._out(*of).astype(site.out.dtype))
                after = None if self.out_of.get(of) is self.tie else self.tie
            elif task.carries == "qkv":
                arrays += [self.q[of], *self.new[of]]
            self.tie = send_arrays(self.p.to_ranks, arrays, task.target, after)
            return
        carried = {"out": [site.out], "qkv": [site.q, site.k, site.v], "nothing": []}[task.carries]
        local = self.wires[j].local_answers_like(site.q, self.p.links(i - 1)) if task.local else []
        likes = likes_of(wanted) + jax.tree.leaves(local) + carried
        arrays, self.tie = recv_arrays(self.p.to_ranks, likes, task.source, self.tie)
        self.known[j].update(zip(wanted, arrays, strict=False))
        if task.local:
            n = len(jax.tree.leaves(local))
            answers = arrays[len(wanted) : len(wanted) + n]
            self.local[of] = jax.tree.unflatten(jax.tree.structure(local), answers)
        if task.carries == "out":
            self.outs[of], self.out_of[of] = tied(arrays[-1], self.tie), self.tie
        elif task.carries == "qkv":
            self.q[of], k, v = arrays[-3:]
            self.new[of] = k, v


def _alike(likes: Sequence[Any]) -> list[tuple[Any, slice]]:
    """Messages that are one exchange: all, if they are alike, else each by itself."""
    if len({(like.shape, like.dtype) for like in likes}) == 1:
        return [(likes[0], slice(None))]
    return [(like, slice(i, i + 1)) for i, like in enumerate(likes)]


def _of_batch(at: Sequence[PlacedIndices], batch: PlannedBatch) -> list[PlacedIndices]:
    """Of each segment of a batch."""
    if batch.of == 1:
        return list(at)
    return [PlacedIndices(*(jnp.split(x, batch.of, axis=1)[batch.index] for x in of)) for of in at]


def _rows(arrays: Sequence[jax.Array], batch: PlannedBatch) -> Sequence[jax.Array]:
    """A staggered batch's rows: every n-th, so that padding, which comes last, is shared out."""
    return arrays if batch.of == 1 else [x[batch.index :: batch.of] for x in arrays]


def _joined(xs: Sequence[jax.Array], like: jax.ShapeDtypeStruct) -> jax.Array:
    """What `_rows` has cut, as a slice of all rows has it; what has no rows as it is."""
    axis = row_axis(xs[0], like)
    return xs[0] if axis is None else jnp.stack(xs, axis=axis + 1).reshape(like.shape)


def inputs_of(shape: StepShape) -> tuple[Int32[jax.ShapeDtypeStruct, " _ ..."], ...]:
    """What ``ModelProgram.step`` takes as ``inputs``."""
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    if shape.chunk is not None:
        return ints((shape.model_rows, 1)), ints((shape.model_rows, 1)), ints((1,))
    tokens = ints((shape.batch, shape.tokens))
    if shape.kind == "decode" or shape.of_all:
        return tokens, tokens
    return tokens, tokens, ints((shape.batch,))


def local_slots_of(
    layout: Layout, shape: StepShape, specs: Sequence[AttentionSpec]
) -> tuple[SegmentSlots, ...]:
    """What ``ModelProgram.step`` takes as ``slots``: of all rows and new tokens, in their order."""
    if not layout.attends_locally or shape.rank:
        return ()
    return tuple(
        slots_like(layout, segment, specs, segment.batch, segment.batch * segment.tokens)
        for segment in shape.segments
    )


def indices_of(layout: Layout, shape: StepShape) -> tuple[PlacedIndices, ...]:
    """What ``ModelProgram.step`` takes as ``at``."""
    if layout.by_heads:
        return ()
    b, ints = len(layout.workers), partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    sizes = [(s.n_batches * s.rows, s.batch, s.n_batches * s.new) for s in shape.segments]
    return tuple(PlacedIndices(*(ints((b, n)) for n in of_segment)) for of_segment in sizes)  # type: ignore[arg-type]
