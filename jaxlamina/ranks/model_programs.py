"""The model rank's programs: a whole step each, all slices and all exchanges, no Python between layers.

Made of the splitter's parts; what is sent where is the transport's and the wire's. Holds no weights: they are arguments.
Knows no KV and no slot. What a step of a bucket is called is `StepShape`'s affair.

Source: Lamina 2025 §4.2.2 (q first, then k and v; partial attention meanwhile).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxlamina.control.messages import StepShape
from jaxlamina.ranks.wires import (
    HeadsOf,
    HeadsWire,
    PlacedIndices,
    PlacedWire,
    Sizes,
    pack,
    with_own,
)
from jaxlamina.schedules import Exchange, Operator, Schedule, SliceRun, make_schedule
from jaxlamina.transports import Transport
from jaxlamina.workers.model_worker import Context, combined
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import causal_attention, causal_partial
from splitter import SplitModel

Tie = jax.Array | None


@dataclass(frozen=True)
class Layout:
    """How the memory pool is laid out, as both kinds of rank need it."""

    workers: tuple[int, ...]  # their ranks
    partition: str

    @property
    def by_heads(self) -> bool:
        return self.partition == "heads" or len(self.workers) == 1

    def sizes(self, shape: StepShape) -> Sizes:
        """Of one staggered batch, which a step of one batch is too."""
        if self.by_heads:
            return Sizes(shape.batch_each, shape.batch_each * shape.tokens, shape.tokens)
        return Sizes(shape.rows, shape.new, shape.tokens)

    def heads(self, spec: AttentionSpec, n_query_heads: int) -> HeadsOf:
        """One layer's heads on each worker."""
        b = len(self.workers) if self.by_heads else 1
        return HeadsOf(n_query_heads // b, spec.n_kv_heads // b, spec.head_dim, spec.dtype)


@cache
def schedule_of(shape: StepShape, n_layers: int) -> Schedule:
    """The order of a step of several staggered batches, of which both kinds of rank make their programs."""
    return make_schedule("fixed", shape.n_batches, n_layers, n_replicas=1)


class ModelProgram:
    """Traces one bucket's step. ``step`` is the function to compile; ``model`` is cut for one staggered batch."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        model: SplitModel,
        specs: Sequence[AttentionSpec],
        shape: StepShape,
    ) -> None:
        self.t, self.layout, self.model, self.specs, self.shape = transport, layout, model, specs, shape
        self.sizes = layout.sizes(shape)
        run = {"decode": self._decode, "prefill": self._prefill, "chunk": self._chunk}[shape.kind]
        self._run: Callable[..., tuple[Any, Context, Tie]] = run

    def step(
        self,
        weights: Sequence[tuple[jax.Array, ...]],
        inputs: tuple[jax.Array, ...],
        at: PlacedIndices | None,
    ) -> jax.Array:
        """Logits ``[B, V]`` after each row's last token. ``inputs``: tokens and positions ``[B, T]``, and for more than
        one token a row ``logits_at [B]``."""
        if self.shape.n_batches > 1:
            return self._staggered(weights, inputs, at)
        wire = HeadsWire(len(self.layout.workers)) if at is None else PlacedWire(at)
        context = self.model.first_context(*inputs)
        out, context, tie = self._run(wire, weights, context)
        logits = self.model.slices[self.model.n].final(weights[-1], context, out)[:, -1]
        return logits if tie is None else logits + tie.astype(logits.dtype)

    def _decode(self, wire: Any, weights: Any, context: Context) -> tuple[Any, Context, Tie]:
        out: Any = None
        answers: list[Any] = [None]
        for i, spec in enumerate(self.specs):
            q, k, v, context, tie = self._send(wire, i, weights[i], context, out, answers[-1])
            if isinstance(wire, HeadsWire):
                like = self._heads(i).out_like(self.sizes)
                answers = self.t.recv_each(like, self.layout.workers, after=tie)
                out = wire.whole_out(answers)
            else:
                answers = self._partials(i, tie)
                out = with_own(wire.partial(answers), q, k, v, spec)
        return out, context, None

    def _staggered(
        self,
        weights: Sequence[tuple[jax.Array, ...]],
        inputs: tuple[jax.Array, ...],
        at: PlacedIndices | None,
    ) -> jax.Array:
        """A decode step as n batches in turn, as the schedule has it: while attention is computed for one, slices run for
        the others. q goes with k and v; an answer that falls together with a message is one exchange with it."""
        n, to = self.shape.n_batches, self.layout.workers
        contexts = [self.model.first_context(*_part(inputs, j, n)) for j in range(n)]
        wires = [self._wire_of(at, j) for j in range(n)]
        sent: dict[Operator, tuple[Any, Any, Any]] = {}
        outs: dict[Operator, Any] = {}
        logits: dict[int, jax.Array] = {}
        tie: Tie = None
        for item in schedule_of(self.shape, len(self.specs)).replica_program(0):
            if isinstance(item, SliceRun):
                j, i = item.batch, item.slice
                part, given = (
                    self.model.slices[i],
                    (weights[i], contexts[j], outs.pop(Operator(j, i - 1), None)),
                )
                if i == self.model.n:
                    logits[j] = part.final(*given)[:, -1]
                    continue
                q, rest = part.q_part(*given)
                k, v, contexts[j] = part.kv_part(weights[i], rest)
                sent[Operator(j, i)] = q, k, v
                continue
            assert isinstance(item, Exchange)  # one replica: no context goes anywhere
            messages = [] if item.send is None else self._messages(wires[item.send.batch], sent[item.send])
            if item.receive is None:
                tie = self.t.send_each(messages, to, after=tie)
                continue
            like = self._answer_like(item.receive.layer)
            if messages:
                answers = self.t.swap_each(messages, like, to, after=tie)
            else:
                answers = self.t.recv_each(like, to, after=tie)
            tie = answers[-1]
            outs[item.receive] = self._out(wires, item.receive, answers, sent.pop(item.receive))
        return jnp.stack([logits[j] for j in range(n)], axis=1).reshape(self.shape.batch, -1)

    def _messages(self, wire: Any, sent: tuple[Any, Any, Any]) -> list[jax.Array]:
        q, k, v = sent
        return [pack(*pair) for pair in zip(wire.q_parts(q), wire.kv_parts(k, v), strict=True)]

    def _wire_of(self, at: PlacedIndices | None, j: int) -> HeadsWire | PlacedWire:
        """Staggered batch j's."""
        n = self.shape.n_batches
        if at is None:
            return HeadsWire(len(self.layout.workers))
        return PlacedWire(PlacedIndices(*(jnp.split(x, n, axis=1)[j] for x in at)))

    def _answer_like(self, i: int) -> jax.ShapeDtypeStruct:
        heads = self._heads(i)
        return heads.out_like(self.sizes) if self.layout.by_heads else heads.partial_like(self.sizes)

    def _out(
        self, wires: Sequence[Any], of: Operator, answers: list[jax.Array], sent: tuple[Any, Any, Any]
    ) -> Any:
        wire = wires[of.batch]
        if isinstance(wire, HeadsWire):
            return wire.whole_out(answers)
        return with_own(wire.partial(answers), *sent, self.specs[of.layer])

    def _prefill(self, wire: Any, weights: Any, context: Context) -> tuple[Any, Context, Tie]:
        """Whole prompts: their attention needs nothing that is stored, so k and v go and nothing comes."""
        out, tie = None, None
        for i, spec in enumerate(self.specs):
            part = self.model.slices[i]
            q, rest = part.q_part(weights[i], context, out)
            k, v, context = part.kv_part(weights[i], rest)
            tie = self.t.send_each(wire.kv_parts(k, v), self.layout.workers, after=tie)
            out = causal_attention(q, k, v, **spec.scoring)
        return out, context, tie

    def _chunk(self, wire: Any, weights: Any, context: Context) -> tuple[Any, Context, Tie]:
        """What follows stored tokens: each layer's attention is its own partial and the stored tokens'."""
        out: Any = None
        answers: list[Any] = [None]
        for i, spec in enumerate(self.specs):
            q, k, v, context, tie = self._send(wire, i, weights[i], context, out, answers[-1])
            own = causal_partial(q, k, v, **spec.scoring)
            answers = self._partials(i, tie)
            out = combined((own, wire.partial(answers)), spec)
        return out, context, None

    def _send(
        self, wire: Any, i: int, weights: Any, context: Context, out: Any, last: Tie
    ) -> tuple[Any, Any, Any, Context, Tie]:
        """A slice: q to the workers, after all answers of the last layer, then k and v, which need what the send of q gave:
        all of a step's exchanges are in one order, by data."""
        part, to = self.model.slices[i], self.layout.workers
        # Almost always q is made of the answers; it is not where a model has attentions side by side.
        after = None if last is None or part.program.q_needs(-1) else last
        q, rest = part.q_part(weights, context, out)
        if not self.shape.q_first:
            k, v, context = part.kv_part(weights, rest)
            pairs = zip(wire.q_parts(q), wire.kv_parts(k, v), strict=True)
            return q, k, v, context, self.t.send_each([pack(*pair) for pair in pairs], to, after)
        tie = self.t.send_each(wire.q_parts(q), to, after)
        k, v, context = part.kv_part(weights, rest, tie)
        if not self.sizes.new:
            return q, k, v, context, tie
        return q, k, v, context, self.t.send_each(wire.kv_parts(k, v), to)

    def _partials(self, i: int, tie: Tie) -> list[jax.Array]:
        return self.t.recv_each(self._heads(i).partial_like(self.sizes), self.layout.workers, after=tie)

    def _heads(self, i: int) -> HeadsOf:
        return self.layout.heads(self.specs[i], self.model.sites[i].q.shape[2])


def _part(arrays: Sequence[jax.Array], j: int, n: int) -> list[jax.Array]:
    """The j-th of n staggered batches' rows: every n-th, so that padding, which comes last, is shared out."""
    return [x[j::n] for x in arrays]


def inputs_of(shape: StepShape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What ``ModelProgram.step`` takes as ``inputs``."""
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens = ints((shape.batch, shape.tokens))
    return (tokens, tokens) if shape.kind == "decode" else (tokens, tokens, ints((shape.batch,)))


def indices_of(layout: Layout, shape: StepShape) -> PlacedIndices | None:
    """What ``ModelProgram.step`` takes as ``at``."""
    if layout.by_heads:
        return None
    b = len(layout.workers)
    n = shape.n_batches
    sizes = ((b, n * shape.rows), (b, shape.batch), (b, n * shape.new))
    return PlacedIndices(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in sizes))  # type: ignore[arg-type]
