"""A decode step of several staggered batches, as one model rank runs it: the schedule's order, made a program.

While attention is computed for one batch, slices run for the others. A batch's slices may be on several replicas; then its
context goes from one to the next. q goes with k and v; an answer that falls together with a message is one exchange with it.
Traced inside a model rank's program (`model_programs`); what is sent where is the transport's and the wire's.

Source: Lamina 2025 §4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxlamina.ranks.contexts import likes_of, not_had, recv_arrays, row_axis, send_arrays
from jaxlamina.ranks.layout import Tie, schedule_of, span
from jaxlamina.ranks.wires import HeadsWire, PlacedIndices, PlacedWire, pack, with_own
from jaxlamina.schedules import Exchange, Migration, Operator, SliceRun
from pallas_kernels.order import tied, zero_after
from splitter.slices import Slice

if TYPE_CHECKING:
    from jaxlamina.ranks.model_programs import ModelProgram

FRONT = 0  # the rank that wants the logits


class StaggeredStep:
    """One step while it is traced: what there is of each batch so far."""

    def __init__(
        self,
        program: ModelProgram,
        weights: Sequence[tuple[jax.Array, ...]],
        inputs: Sequence[jax.Array],
        at: PlacedIndices | None,
    ) -> None:
        self.p, self.t, self.model, self.weights = program, program.t, program.model, weights
        self.workers, self.sizes = program.layout.workers, program.sizes
        self.schedule = schedule_of(program.layout, program.shape, len(program.specs))
        n = program.shape.n_batches
        # Each batch's contexts so far, by the model's variables; inputs every replica has.
        first = self.model.slices[0].context_vars
        self.known: list[dict[Any, Any]] = [
            dict(zip(first, self.model.first_context(*_rows(inputs, j, n)), strict=True)) for j in range(n)
        ]
        self.wires = [self._wire(at, j) for j in range(n)]
        # q, k and v: until they are sent, or where a new token's attention over itself is the model ranks', until it is used.
        self.sent: dict[Operator, tuple[Any, Any, Any]] = {}
        self.answers: dict[Operator, list[jax.Array]] = {}
        self.logits: dict[int, jax.Array] = {}
        # Of batches whose last slice waits for the others': its context, and the attention output before it.
        self.lasts: dict[int, tuple[Any, Any]] = {}
        self.tie: Tie = None

    def run(self) -> jax.Array:
        """Rank 0: logits ``[B, V]``. Others: a float32 ``[1]`` that is there when all is sent."""
        for item in self.schedule.replica_program(self.p.replica):
            if isinstance(item, SliceRun):
                with span("slice", item.slice, item.batch):
                    self._slice(item.batch, item.slice)
            elif isinstance(item, Exchange):
                self._exchange(item)
            else:
                self._migrate(item)
        return self._collected() if self.p.replica == FRONT else self._delivered()

    def _slice(self, j: int, i: int) -> None:
        part, known = self.model.slices[i], self.known[j]
        context = tuple(known[v] for v in part.context_vars)
        out = self._out(Operator(j, i - 1)) if i else None
        if i == self.model.n:
            if self.p.ends is None:
                self.logits[j] = part.final(self.weights[i], context, out)[:, -1]
            else:
                self.lasts[j] = context, out
            return
        q, rest = part.q_part(self.weights[i], context, out)
        k, v, context = part.kv_part(self.weights[i], rest)
        known.update(zip(self.model.slices[i + 1].context_vars, context, strict=True))
        self.sent[Operator(j, i)] = q, k, v

    def _exchange(self, item: Exchange) -> None:
        messages = [] if item.send is None else self._messages(item.send)
        if item.receive is None:
            self.tie = self.t.send_each(messages, self.workers, after=self.tie)
            return
        like = self._answer_like(item.receive)
        if messages:
            answers = self.t.swap_each(messages, like, self.workers, after=self.tie)
        else:
            answers = self.t.recv_each(like, self.workers, after=self.tie)
        self.tie = answers[-1]
        self.answers[item.receive] = answers

    def _messages(self, of: Operator) -> list[jax.Array]:
        by_heads = self.p.layout.by_heads
        q, k, v = self.sent.pop(of) if by_heads else self.sent[of]
        wire = self.wires[of.batch]
        return [pack(*pair) for pair in zip(wire.q_parts(q), wire.kv_parts(k, v), strict=True)]

    def _answer_like(self, of: Operator) -> jax.ShapeDtypeStruct:
        heads = self.p.heads(of.layer)
        by_heads = self.p.layout.by_heads
        return heads.out_like(self.sizes) if by_heads else heads.partial_like(self.sizes)

    def _out(self, of: Operator) -> Any:
        wire, answers = self.wires[of.batch], self.answers.pop(of)
        if isinstance(wire, HeadsWire):
            return wire.whole_out(answers)
        return with_own(wire.partial(answers), *self.sent.pop(of), self.p.specs[of.layer])

    def _wire(self, at: PlacedIndices | None, j: int) -> Any:
        if at is None:
            return HeadsWire(len(self.workers))
        return PlacedWire(PlacedIndices(*(jnp.split(x, self.p.shape.n_batches, axis=1)[j] for x in at)))

    # --- what goes between replicas ---
    def _migrate(self, item: Migration) -> None:
        """A batch's context, of which the next replica is sent what it has not had: not the inputs, nor what was in the
        contexts of slices that it ran. With it go q, k and v where their attention over themselves is the model ranks'."""
        j, i = item.batch, item.slice
        slices, of = self.model.slices, Operator(j, i - 1)
        wanted = not_had(slices, i, (k for k in range(i) if self.schedule.replica_of(j, k) == item.target))
        by_heads = self.p.layout.by_heads
        if self.p.replica == item.source:
            arrays = [self.known[j][v] for v in wanted] + ([] if by_heads else [*self.sent.pop(of)])
            self.tie = send_arrays(self.t, arrays, item.target, self.tie)
            return
        site = self.model.sites[of.layer]
        likes = likes_of(wanted) + ([] if by_heads else [site.q, site.k, site.v])
        arrays, self.tie = recv_arrays(self.t, likes, item.source, self.tie)
        self.known[j].update(zip(wanted, arrays[: len(wanted)], strict=True))
        if not by_heads:
            q, k, v = arrays[len(wanted) :]
            self.sent[of] = q, k, v

    def _collected(self) -> jax.Array:
        """All batches' logits as the step's rows: a batch has every n-th. Those of other replicas' batches come last."""
        n, last = self.p.shape.n_batches, self.model.n
        if self.p.ends is not None:
            return tied(self._ended(self.p.ends.slices[last]), self.tie)
        for j in range(n):
            owner = self.schedule.replica_of(j, last)
            if owner != FRONT:
                self.logits[j] = self.tie = self.t.recv(self.p.logits_like, owner, after=self.tie)
        found = jnp.stack([self.logits[j] for j in range(n)], axis=1).reshape(self.p.shape.batch, -1)
        return tied(found, self.tie)

    def _ended(self, final: Slice) -> jax.Array:
        """All batches' last slice as one, which reads its weights, the longest of all, once."""
        contexts, outs = zip(*(self.lasts[j] for j in range(self.p.shape.n_batches)), strict=True)
        with span("slice", self.model.n):
            context = tuple(
                _joined(xs, v.aval)
                for xs, v in zip(zip(*contexts, strict=True), final.context_vars, strict=True)
            )
            out = jnp.stack(outs, axis=1).reshape(-1, *outs[0].shape[1:])
            return final.final(self.weights[-1], context, out)[:, -1]

    def _delivered(self) -> jax.Array:
        for j in sorted(self.logits):
            self.tie = self.t.send(self.logits[j].astype(jnp.float32), FRONT, after=self.tie)
        assert self.tie is not None
        return zero_after(self.tie).reshape(1)


def _joined(xs: Sequence[jax.Array], like: Any) -> jax.Array:
    """What `_rows` has cut, as a slice of all rows has it; what has no rows as it is."""
    axis = row_axis(xs[0], like)
    return xs[0] if axis is None else jnp.stack(xs, axis=axis + 1).reshape(like.shape)


def _rows(arrays: Sequence[jax.Array], j: int, n: int) -> list[jax.Array]:
    """The j-th of n staggered batches' rows: every n-th, so that padding, which comes last, is shared out."""
    return [x[j::n] for x in arrays]
