"""The model rank's programs: a whole step each, all its slices and all exchanges, no Python between layers.

A rank that is one stage of a pipeline takes a step over from the stage before and hands it on to the next. Made of the
splitter's parts; what is sent where is the transport's and the wire's. Holds no weights: they are arguments. Knows no KV
and no slot. What a step of a bucket is called is `StepShape`'s affair.

Source: Lamina 2025 §4.2.2 (q first, then k and v; partial attention meanwhile); Lamina 2024 §5.6 (a chunk of a prompt
alongside a decode step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from jaxlamina.ranks.contexts import likes_of, not_had, recv_arrays, row_axis, send_arrays
from jaxlamina.ranks.layout import Layout, Tie, span
from jaxlamina.ranks.staggered_step import FRONT, StaggeredStep
from jaxlamina.ranks.wires import (
    HeadsOf,
    HeadsWire,
    MixedWire,
    PlacedIndices,
    PlacedWire,
    pack,
    packed_like,
    unpack,
    with_own,
)
from jaxlamina.steps.shape import StepShape
from jaxlamina.transports import Transport
from jaxlamina.workers.model_worker import Context, combined
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import causal_attention, causal_partial
from pallas_kernels.order import tied, zero_after
from splitter import SplitModel


class ModelProgram:
    """Traces one bucket's step on one replica or stage. ``step`` is the function to compile; ``model`` is cut for one
    staggered batch, or for a step's rows and a chunk's tokens. ``ends``: the model cut for those that logits are of, if its
    last slice is run for other rows than the rest."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        model: SplitModel,
        specs: Sequence[AttentionSpec],
        shape: StepShape,
        replica: int = 0,
        ends: SplitModel | None = None,
    ) -> None:
        self.t, self.layout, self.model, self.specs, self.shape = transport, layout, model, specs, shape
        self.replica, self.ends = replica, ends
        self.sizes = layout.sizes(shape)
        run = {"decode": self._decode, "prefill": self._prefill, "chunk": self._chunk}[shape.kind]
        self._run: Callable[..., tuple[Any, Context, Tie]] = run

    def step(
        self,
        weights: Sequence[tuple[jax.Array, ...]],
        inputs: tuple[jax.Array, ...],
        at: Any,
    ) -> jax.Array:
        """Logits ``[B, V]`` after each row's last token, or ``[B, T, V]`` ``of_all``; on a rank that is not rank 0 a ``[1]`` that is there when all
        is sent. ``weights``: each slice's, of other ranks' slices none. ``inputs``: tokens and positions ``[B, T]``, and
        for more than one token a row ``logits_at [B]``, unless logits are of all.

        With a chunk of T tokens alongside: logits ``[B + 1, V]``, the chunk's last; tokens and positions ``[B + T, 1]``,
        ``logits_at [1]`` within the chunk. ``at``: `PlacedIndices`, of the rows and of the chunk if there is one."""
        if self.shape.n_batches > 1:
            return StaggeredStep(self, weights, inputs, at).run()
        if self.shape.chunk is not None:
            return self._with_chunk(weights, inputs, at)
        wire = self._wire(at)
        n = self.model.n
        own = self.layout.slices_on(self.replica, n + 1)
        context, out, tie = self._begun(own.start, inputs)
        out, context, tie = self._run(wire, weights, range(own.start, min(own.stop, n)), context, out, tie)
        if own.stop <= n:
            return self._handed_on(own.stop, context, out, tie)
        with span("slice", n):
            logits = self.model.slices[n].final(weights[n], context, out)
            logits = logits if self.shape.of_all else logits[:, -1]
        if self.replica == FRONT:
            return tied(logits, tie)
        return zero_after(self.t.send(logits.astype(jnp.float32), FRONT, after=tie)).reshape(1)

    @property
    def logits_like(self) -> jax.ShapeDtypeStruct:
        """One staggered batch's logits, as a rank gets them that did not run the last slice."""
        n_words = self.model.traced.jaxpr.outvars[0].aval.shape[-1]
        return jax.ShapeDtypeStruct((*self.shape.logits_of, n_words), jnp.float32)

    # --- from stage to stage ---
    def _begun(self, i: int, inputs: tuple[jax.Array, ...]) -> tuple[Context, Any, Tie]:
        """Slice i's context and the attention output before it: the model's inputs, or what the stage before hands on."""
        first = self.model.first_context(*inputs)
        if i == 0:
            return first, None, None
        known = dict(zip(self.model.slices[0].context_vars, first, strict=True))
        wanted = not_had(self.model.slices, i, ())
        likes = [*likes_of(wanted), self.model.sites[i - 1].out]
        (*values, out), tie = recv_arrays(self.t, likes, self.layout.model_rank(i - 1), None)
        known.update(zip(wanted, values, strict=True))
        return tuple(known[v] for v in self.model.slices[i].context_vars), tied(out, tie), tie

    def _handed_on(self, i: int, context: Context, out: jax.Array, tie: Tie) -> jax.Array:
        """The next stage gets slice i's context and the attention output before it; rank 0 waits for the last one's logits."""
        known = dict(zip(self.model.slices[i].context_vars, context, strict=True))
        arrays = [known[v] for v in not_had(self.model.slices, i, ())]
        arrays.append(out.astype(self.model.sites[i - 1].out.dtype))
        tie = send_arrays(self.t, arrays, self.layout.model_rank(i), tie)
        assert tie is not None
        if self.replica != FRONT:
            return zero_after(tie).reshape(1)
        return self.t.recv(self.logits_like, self.layout.model_rank(self.model.n), after=tie)

    # --- the slices of one rank: layers, and what came before them ---
    def _decode(
        self, wire: Any, weights: Any, layers: range, context: Context, out: Any, tie: Tie
    ) -> tuple[Any, Context, Tie]:
        if self.shape.mini_batches > 1:
            return self._streamed(wire, weights, layers, context, out, tie)
        answers: list[Any] = [tie]
        for i in layers:
            q, k, v, context, tie = self._send(wire, i, weights[i], context, out, answers[-1])
            if isinstance(wire, HeadsWire):
                like = self.heads(i).out_like(self.sizes)
                answers = self.t.recv_each(like, self.layout.workers, after=tie)
            else:
                answers = self._partials(i, tie)
            out = _rows_out(wire, answers, q, k, v, self.specs[i])
        return out, context, None

    def _streamed(
        self, wire: HeadsWire, weights: Any, layers: range, context: Context, out: Any, tie: Tie
    ) -> tuple[Any, Context, Tie]:
        """`_decode` with each layer's messages in parts of the requests (Lamina 2024 §5.2.1): a part is sent before the
        answer to the one before it is asked for, so that a worker has it when it is done with that."""
        n, to = self.shape.mini_batches, self.layout.workers
        for i in layers:
            part, like = self.model.slices[i], self.heads(i).out_like(self.sizes.part(n))
            with span("slice", i):
                q, rest = part.q_part(weights[i], context, out)
                k, v, context = part.kv_part(weights[i], rest)
            messages = [
                [pack(*pair) for pair in zip(wire.q_parts(of_q), wire.kv_parts(of_k, of_v), strict=True)]
                for of_q, of_k, of_v in zip(*(jnp.split(x, n) for x in (q, k, v)), strict=True)
            ]
            tie = self.t.send_each(messages[0], to, after=tie)
            outs = []
            for following in [*messages[1:], None]:
                if following is not None:
                    tie = self.t.send_each(following, to, after=tie)
                answers = self.t.recv_each(like, to, after=tie)
                tie = answers[-1]
                outs.append(wire.whole_out(answers))
            out = jnp.concatenate(outs)
        return out, context, None

    def _prefill(
        self, wire: Any, weights: Any, layers: range, context: Context, out: Any, tie: Tie
    ) -> tuple[Any, Context, Tie]:
        """Whole prompts: their attention needs nothing that is stored, so k and v go and nothing comes."""
        for i in layers:
            part = self.model.slices[i]
            q, rest = part.q_part(weights[i], context, out)
            k, v, context = part.kv_part(weights[i], rest)
            tie = self.t.send_each(wire.kv_parts(k, v), self.layout.workers, after=tie)
            out = causal_attention(q, k, v, **self.specs[i].scoring)
        return out, context, tie

    def _chunk(
        self, wire: Any, weights: Any, layers: range, context: Context, out: Any, tie: Tie
    ) -> tuple[Any, Context, Tie]:
        """What follows stored tokens: each layer's attention is its own partial and the stored tokens'."""
        answers: list[Any] = [tie]
        for i in layers:
            q, k, v, context, tie = self._send(wire, i, weights[i], context, out, answers[-1])
            own = causal_partial(q, k, v, **self.specs[i].scoring)
            answers = self._partials(i, tie)
            out = combined((own, wire.partial(answers)), self.specs[i])
        return out, context, None

    def _with_chunk(self, weights: Any, inputs: tuple[jax.Array, ...], at: Any) -> jax.Array:
        """A decode step and a chunk of a prompt. All but attention works row by row, so each of the chunk's tokens is a row
        of the slices, beside the requests' new tokens; the last slice has the rows that logits are wanted of."""
        assert self.ends is not None
        tokens, positions, logits_at = inputs
        n, sizes = self.shape.batch, self.layout.mixed_sizes(self.shape)
        rows_at, chunk_at = (None, None) if at is None else at
        wire = MixedWire(self._wire(rows_at), self._wire(chunk_at), n, sizes.asks)
        context = self.model.first_context(tokens, positions)
        out: Any = None
        last: Tie = None
        for i, spec in enumerate(self.specs):
            q, k, v, context, tie = self._send(wire, i, weights[i], context, out, last)
            likes = sizes.answer_likes(self.heads(i), self.layout.by_heads)
            answers = self.t.recv_each(packed_like(*likes), self.layout.workers, after=tie)
            last = answers[-1]
            rows, *stored = zip(*(unpack(answer, *likes) for answer in answers), strict=True)
            (q, q_chunk), (k, k_chunk), (v, v_chunk) = (wire.cut(x) for x in (q, k, v))
            if sizes.asks:
                own = causal_partial(q_chunk, k_chunk, v_chunk, **spec.scoring)
                chunk: Any = combined((own, wire.chunk.partial(*stored)), spec)
            else:
                chunk = causal_attention(q_chunk, k_chunk, v_chunk, **spec.scoring)
            out = wire.joined(_rows_out(wire.rows, rows, q, k, v, spec), chunk)
        wanted = jnp.concatenate([jnp.arange(n), n + logits_at])
        final = self.ends.slices[self.ends.n]
        with span("slice", self.ends.n):
            context = tuple(
                _rows_at(x, v.aval, wanted) for x, v in zip(context, final.context_vars, strict=True)
            )
            return final.final(weights[-1], context, out[wanted])[:, -1]

    def _wire(self, at: PlacedIndices | None) -> HeadsWire | PlacedWire:
        return HeadsWire(len(self.layout.workers)) if at is None else PlacedWire(at)

    def _send(
        self, wire: Any, i: int, weights: Any, context: Context, out: Any, last: Tie
    ) -> tuple[Any, Any, Any, Context, Tie]:
        """A slice: q to the workers, after all answers of the last layer, then k and v, which need what the send of q gave:
        all of a step's exchanges are in one order, by data."""
        part, to = self.model.slices[i], self.layout.workers
        # Almost always q is made of the answers; it is not where a model has attentions side by side.
        after = None if last is None or part.program.q_needs(-1) else last
        with span("slice", i):
            q, rest = part.q_part(weights, context, out)
        if not self.shape.q_first:
            with span("slice", i):
                k, v, context = part.kv_part(weights, rest)
            pairs = zip(wire.q_parts(q), wire.kv_parts(k, v), strict=True)
            return q, k, v, context, self.t.send_each([pack(*pair) for pair in pairs], to, after)
        tie = self.t.send_each(wire.q_parts(q), to, after)
        with span("slice", i):
            k, v, context = part.kv_part(weights, rest, tie)
        parts = wire.kv_parts(k, v)
        if not len(parts[0]):
            return q, k, v, context, tie
        return q, k, v, context, self.t.send_each(parts, to)

    def _partials(self, i: int, tie: Tie) -> list[jax.Array]:
        return self.t.recv_each(self.heads(i).partial_like(self.sizes), self.layout.workers, after=tie)

    def heads(self, i: int) -> HeadsOf:
        """Layer i's heads on one attention worker."""
        return self.layout.heads(self.specs[i], self.model.sites[i].q.shape[2])


def _rows_out(wire: Any, answers: Sequence[jax.Array], q: Any, k: Any, v: Any, spec: AttentionSpec) -> Any:
    """Attention output of a decode step's rows."""
    if isinstance(wire, HeadsWire):
        return wire.whole_out(answers)
    return with_own(wire.partial(answers), q, k, v, spec)


def _rows_at(x: jax.Array, like: Any, rows: jax.Array) -> jax.Array:
    """``rows`` of what a slice of more rows has in place of ``like``; what has no rows as it is."""
    axis = row_axis(x, like)
    return x if axis is None else jnp.take(x, rows, axis=axis, mode="clip")


def inputs_of(shape: StepShape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What ``ModelProgram.step`` takes as ``inputs``."""
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    if shape.chunk is not None:
        return ints((shape.model_rows, 1)), ints((shape.model_rows, 1)), ints((1,))
    tokens = ints((shape.batch, shape.tokens))
    if shape.kind == "decode" or shape.of_all:
        return tokens, tokens
    return tokens, tokens, ints((shape.batch,))


def indices_of(layout: Layout, shape: StepShape) -> Any:
    """What ``ModelProgram.step`` takes as ``at``."""
    if layout.by_heads:
        return None
    if shape.chunk is not None:
        rows = msgspec.structs.replace(shape, chunk=None)
        return indices_of(layout, rows), indices_of(layout, shape.chunk)
    b = len(layout.workers)
    n = shape.n_batches
    sizes = ((b, n * shape.rows), (b, shape.batch), (b, n * shape.new))
    return PlacedIndices(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in sizes))  # type: ignore[arg-type]
