"""One worker's KV in a step's program while it is traced: layer by layer its stored tokens are attended to,
then new ones stored.

The same on an attention worker and on a model rank that keeps a share of the KV. Pools are donated, one array
a layer, so that each append is in place. Knows pools and slots; no message and no order of exchanges.

Source: Lamina 2025 §4.2.2: partial attention over earlier tokens runs while k and v are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from jaxlamina.kv.planned_rows import SegmentSlots
from jaxlamina.ranks.cluster_layout import scope
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import PlannedBatch
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import Append, Attend
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import (
    Pool,
    append,
    attention_with_own,
    begin_decode_attention,
    decode_attention,
    end_decode_attention,
    partial_attention,
)
from pallas_kernels.order import tied

Answer = Any
"""Attention output, the new token's own attention in it; a partial of the stored tokens; or `Unended`."""


class Asked(NamedTuple):
    """Of a segment of a batch: its queries, and whether their own tokens are attended to, too. ``waits``:
    partials over other tokens are to come, with which it is ended."""

    q: Float[jax.Array, "R T N H"]
    slots: SegmentSlots
    adds_own: bool
    waits: bool = False


@dataclass(frozen=True)
class Unended:
    """A decode step's rows' attention over stored tokens, to which others' partials and the new tokens are
    still to be added. ``done``: there once stored tokens have been attended to."""

    done: jax.Array
    end: Callable[[Sequence[Float32[jax.Array, "B 1 N H1"]]], Float[jax.Array, "B 1 N H"]]


class StoredKV:
    """``k``, ``v``: the pools as they are after what has been traced so far. ``specs``: of each layer, this
    worker's heads; ``inputs``: of each of the step's segments (`StepShape.segments`); ``first_layer``: the
    layer of the first pools."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        k_pools: Sequence[Pool],
        v_pools: Sequence[Pool],
        inputs: Sequence[SegmentSlots],
        first_layer: int = 0,
    ) -> None:
        self._first = first_layer
        self.specs, self.k, self.v, self.inputs = specs, list(k_pools), list(v_pools), inputs
        self._read: dict[tuple[int, int, int], list[jax.Array]] = {}  # made of the pools as they were
        self._stored: set[tuple[int, int, int]] = set()

    def slots(self, batch: PlannedBatch, part: int = 0) -> list[SegmentSlots]:
        """Of each segment of a batch, or of a part of it."""
        own = self.inputs[batch.first_segment : batch.first_segment + len(batch.segments)]
        return [inputs.part(batch.index, batch.of).part(part, batch.n_parts) for inputs in own]

    def attend(
        self,
        task: Attend,
        asked: Sequence[Asked],
        kv: Float[jax.Array, "M KV H"] | None,
        *,
        then_append: bool,
        gather_after: jax.Array | None = None,
    ) -> list[Answer]:
        """Of each that asks. Where the same kernel can store the new tokens, it does, if that is what
        follows. ``gather_after``: where stored tokens are gathered first, not before that is there."""
        i, of = task.layer - self._first, (task.batch, task.layer, task.part)
        spec, answers = self.specs[i], list[Answer]()
        self._read[of] = []
        with scope("attention", task.layer, task.batch):
            for q, slots, adds_own, waits in asked:
                stored = self._given(i, slots, gather_after)
                if waits and kv is not None and len(asked) == 1 and len(kv) == len(q):
                    answers.append(self._begin(task, q, kv, stored, slots.new_slots))
                    self._stored.add(of)
                    continue
                if not adds_own:
                    out, lse = _jitted(partial_attention, spec)(q, *stored)
                    self._read[of].append(out)
                    answers.append((out, lse))
                    continue
                assert kv is not None
                is_alone = len(asked) == 1 and len(kv) == len(q)
                k, v = jnp.split((kv if is_alone else kv[: len(q)])[:, None], 2, axis=2)
                if then_append and is_alone:
                    *given, q_positions = stored
                    kernel = _jitted(_decode_attention, spec)
                    self.k[i], self.v[i], out = kernel(q, k, v, *given, slots.new_slots, q_positions)
                    self._stored.add(of)
                else:
                    out = _jitted(attention_with_own, spec)(q, k, v, *stored)
                self._read[of].append(out)
                answers.append(out)
        return answers

    def _begin(
        self,
        task: Attend,
        q: Float[jax.Array, "B 1 N H"],
        kv: Float[jax.Array, "B KV H"],
        stored: tuple[Any, ...],
        new_slots: Int32[jax.Array, " B"],
    ) -> Unended:
        i = task.layer - self._first
        spec = self.specs[i]
        k, v = jnp.split(kv[:, None], 2, axis=2)
        begun = _jitted(begin_decode_attention, spec)(q, *stored)

        def end(others: Sequence[Float32[jax.Array, "B 1 N H1"]]) -> Float[jax.Array, "B 1 N H"]:
            with scope("attention", task.layer, task.batch):
                pools = self.k[i], self.v[i]
                self.k[i], self.v[i], out = _ended(spec)(begun, q, k, v, *pools, new_slots, list(others))
            return out

        return Unended(begun.done, end)

    def append(self, task: Append, batch: PlannedBatch, kv: Float[jax.Array, "M KV H"]) -> None:
        """Only once stored tokens have been read, or XLA would keep two of each pool."""
        i, of = task.layer - self._first, (task.batch, task.layer, task.part)
        if of in self._stored:
            return
        slots = [inputs.new_slots for inputs in self.slots(batch, task.part)]
        with scope("attention", task.layer, task.batch):
            to = slots[0] if len(slots) == 1 else jnp.concatenate(slots)
            after_reading: Int32[jax.Array, " M"] = reduce(tied, self._read.get(of, ()), to)
            k, v = jnp.split(kv, 2, axis=1)
            self.k[i], self.v[i] = append(self.k[i], self.v[i], k, v, after_reading)

    def _given(self, i: int, slots: SegmentSlots, gather_after: jax.Array | None) -> tuple[Any, ...]:
        """What a layer's kernels are told of the stored tokens: pools, slots, lengths, and where queries
        are."""
        window = self.specs[i].window
        q_positions = None if window is None else slots.q_positions.get(window)
        table = tied(slots.slot_table, gather_after)
        return self.k[i], self.v[i], table, slots.lengths, q_positions


def placed_windows(layout: Layout, specs: Sequence[AttentionSpec]) -> list[int]:
    """The windows whose queries are told where they are: by heads rows have all tokens, so that a query's
    place is known."""
    found = {spec.window for spec in specs if spec.window is not None}
    return [] if layout.by_heads else sorted(found)


def slots_like(
    layout: Layout, segment: StepShape, specs: Sequence[AttentionSpec], n_rows: int, n_new: int
) -> SegmentSlots:
    """The shapes of a segment's slots where so many rows are attended to, and tokens stored."""
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    queries = {window: ints((n_rows, segment.tokens)) for window in placed_windows(layout, specs)}
    return SegmentSlots(ints((n_rows, segment.context)), ints((n_rows,)), ints((n_new,)), queries)


# For ranks stored tokens are read first: k and v may still be on their way.
_decode_attention = partial(decode_attention, read_first=True)


@cache
def _ended(spec: AttentionSpec) -> Any:
    """What ends what `begin_decode_attention` began, for layers of one kind."""
    return jax.jit(partial(end_decode_attention, scale=spec.scale, softcap=spec.softcap))


@cache
def _jitted(function: Callable[..., Any], spec: AttentionSpec) -> Any:
    """One of the kernels for layers of one kind, its last argument the queries' positions; jitted, so that it
    is traced and lowered once."""

    def attend(*given: Any) -> Any:
        *arrays, q_positions = given
        return function(*arrays, q_positions=q_positions, **spec.scoring)

    return jax.jit(attend)
