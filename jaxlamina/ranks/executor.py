"""Rank 0's executor: steps as whole programs over real ranks, with the same interface as `LocalExecutor`.

Gives every step its bucket, has all ranks compile it before its first run and compares what they will exchange, tells the
attention ranks which slots the step is about, and starts its own program. Knows the model and the memory pool's layout;
what KV looks like is the attention ranks' affair, and how tensors travel the transport's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxlamina.control import messages as m
from jaxlamina.errors import UserError
from jaxlamina.ranks.group import PREPARE_DEADLINE_S, Group
from jaxlamina.ranks.memory_pool import RemotePool
from jaxlamina.ranks.model_programs import Layout, ModelProgram, indices_of, inputs_of
from jaxlamina.ranks.wires import PlacedIndices
from jaxlamina.transports import Program, Transport
from jaxlamina.transports.exchanges import first_difference
from jaxlamina.workers.batch import DecodeBatch, PrefillBatch
from jaxlamina.workers.calibration import channel_scales
from jaxlamina.workers.kv_pools import Slots, as_slots
from jaxlamina.workers.model_worker import ModelFn, ModelWorker, Params
from jaxlamina.workers.partition import checked_partition
from jaxlamina.workers.programs import Programs
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.streamed import with_streamed_products
from jaxlamina.workers.workspace import LargestStep
from splitter import SplitModel, SplitReport


class RanksExecutor:
    """A model worker in this process, attention workers in others.

    - ``group``: as `jaxlamina.ranks.join` gives it; its cluster says partition, transport and deadlines.
    - ``kv_slots``: tokens whose KV is kept; None: as many as fit, between ``least_slots`` and ``most_slots``.
    - ``kv_dtype``, ``n_host_slots``, ``calibration_tokens``, ``largest``: as of `LocalExecutor`.

    Attributes for steps from now on: ``q_first``, whether q is sent before k and v are computed; ``n_batches``, as how
    many staggered batches a decode step runs (Lamina 2025 §4.3), where its rows can be cut so; q goes with k and v there.

    ``UserError`` for what cannot be; a rank that fails ends this process (`jaxlamina.ranks.group.Failing`).
    """

    def __init__(
        self,
        model: ModelFn,
        params: Params,
        *,
        group: Group,
        kv_slots: int | None,
        most_slots: int,
        least_slots: int,
        largest: LargestStep,
        kv_dtype: str = "auto",
        n_host_slots: int = 0,
        calibration_tokens: np.ndarray | None = None,
    ) -> None:
        self.group = group
        self.programs = Programs()
        self.model = ModelWorker(model, params, group.device, self.programs)
        one_row = self.model.split(1)
        self.report: SplitReport = one_row.report()
        self.specs = tuple(AttentionSpec.of(site, kv_dtype) for site in one_row.sites)
        cluster = group.cluster
        checked_partition(cluster.partition, len(group.workers), [spec.n_kv_heads for spec in self.specs])
        self.layout = Layout(group.workers, cluster.partition)
        self.q_first = pays_q_first(group.transport) if cluster.q_first is None else cluster.q_first
        self.n_batches = cluster.n_batches
        scales = None
        if kv_dtype == "int8-channel":
            known = model, self.model.params, self.specs, calibration_tokens
            scales = channel_scales(*known, n_positions=largest.context)
        setup = m.Setup(
            layers=tuple(
                _layer(spec, site.q.shape[2]) for spec, site in zip(self.specs, one_row.sites, strict=True)
            ),
            partition=cluster.partition,
            token_block=cluster.token_block,
            kv_slots=kv_slots,
            most_slots=most_slots,
            least_slots=least_slots,
            largest=(largest.batch, largest.context, largest.prompt),
            n_host_slots=n_host_slots,
            channel_scales=None if scales is None else tuple(tuple(map(_array, pair)) for pair in scales),  # type: ignore[misc]
        )
        self.n_slots = self._allocate(setup)
        self.pool = RemotePool(
            group, self.layout, self.specs, self.n_slots, n_host_slots, cluster.token_block
        )
        self._weights: dict[int, Any] = {}  # by id, as programs take them
        self._programs: dict[m.StepShape, tuple[Program, Any]] = {}
        self.prepare_s = 0.0  # spent on compiling, all ranks side by side

    @property
    def device(self) -> jax.Device:
        """Where logits are."""
        return self.group.device

    def decode(self, batch: DecodeBatch) -> jax.Array:
        """One token more for each row: logits ``[B, V]`` float32."""
        return self._step("decode", batch, (batch.tokens, batch.positions))

    def prefill(self, batch: PrefillBatch) -> jax.Array:
        """Prompts or what follows stored tokens, KV stored: logits ``[B, V]`` after each row's last token."""
        kind = "chunk" if batch.has_earlier else "prefill"
        return self._step(kind, batch, (batch.tokens, batch.positions, batch.logits_at))

    def copy_slots(self, src: Slots, dst: Slots) -> None:
        """Slot ``src[i]``'s KV of all layers also into ``dst[i]``; no slot may be in both."""
        self._check_current()
        self.pool.copy_slots(as_slots(src), as_slots(dst))

    def move_out(self, slots: Slots, host_slots: Slots) -> None:
        """Copies the KV of ``slots`` into the host's ``host_slots``; ``UserError`` if there are none."""
        self._check_current()
        self.pool.move_out(as_slots(slots), as_slots(host_slots))

    def move_in(self, host_slots: Slots, slots: Slots) -> None:
        """Brings the host's ``host_slots`` back into ``slots``, and empties them."""
        self._check_current()
        self.pool.move_in(as_slots(host_slots), as_slots(slots))

    def release(self, slots: Slots) -> None:
        """``slots`` are nobody's now. Need not be called; it keeps several workers balanced."""
        self.pool.release(as_slots(slots))

    def exchanges(self, shape: m.StepShape) -> tuple[m.Exchange, ...]:
        """What this rank's program of a prepared bucket exchanges, in order."""
        return self._programs[shape][0].exchanges()

    def _step(
        self, kind: str, batch: DecodeBatch | PrefillBatch, inputs: tuple[np.ndarray, ...]
    ) -> jax.Array:
        self._check_current()
        n_batches = self._n_batches_of(kind, len(batch.tokens))
        shape, arrays, at = self.pool.plan(kind, batch, self.q_first, n_batches)
        program, weights = self._prepared(shape)
        ticket = self.group.begin_step(shape)
        self.group.owed = f"step {self.group.n_steps} ({shape})"
        for rank, of_worker in zip(self.group.workers, arrays, strict=True):
            self.group.send(rank, m.Step(self.group.n_steps, self._epoch, shape, of_worker))
        own = self.group.transport.bind(jax.device_put((inputs, at), self.device))
        logits: jax.Array = self.group.transport.unbind(program(weights, *own))
        self.group.owed = None
        self.group.watch.until(ticket, logits)
        return logits

    def _n_batches_of(self, kind: str, batch: int) -> int:
        """Staggered batches of a step: ``n_batches`` where that leaves equal ones, of a row at least, to a decode."""
        return self.n_batches if kind == "decode" and batch % self.n_batches == 0 else 1

    def _check_current(self) -> None:
        if self._epoch != self.group.epoch:
            raise UserError(
                "the ranks hold another model's KV since this one was made: one model a group at a time"
            )

    def _prepared(self, shape: m.StepShape) -> tuple[Program, Any]:
        """A bucket's program, compiled on all ranks and found to match before anyone runs it."""
        if shape in self._programs:
            return self._programs[shape]
        began = time.perf_counter()
        self.group.broadcast(m.Prepare(shape))
        split = self.model.split(shape.batch_each, shape.tokens)
        weights = tuple(self._bound(split, i) for i in range(split.n + 1))
        self.programs.compiled(str(shape))
        traced = ModelProgram(self.group.transport, self.layout, split, self.specs, shape)
        args = _lifted(weights), inputs_of(shape), indices_of(self.layout, shape)
        try:
            step = with_streamed_products(_with_lifted(traced.step, weights), self.device)
            program = self.group.transport.compile(step, *args)
        finally:  # the others' answers are taken in whatever happens here, or they would be taken for the next ones
            answers = [
                self.group.receive(rank, m.Prepared, PREPARE_DEADLINE_S) for rank in self.group.workers
            ]
        lists = {0: program.exchanges()}
        lists |= {rank: answer.exchanges for rank, answer in zip(self.group.workers, answers, strict=True)}
        difference = first_difference(lists, self.group.cluster.describe)
        if difference is not None:
            raise UserError(f"the ranks' programs of {shape} do not match, so none is run: {difference}")
        self._programs[shape] = program, _lifted(weights)
        self.prepare_s += time.perf_counter() - began
        return self._programs[shape]

    def _bound(self, split: SplitModel, i: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Slice i's weights; buckets share those that are parameters as they are, and not views of stacked ones."""
        found = []
        for x in split.slice_params(i, self.model.params):
            key = id(x)
            if key not in self._weights:
                array = x if x.ndim else x.reshape(1)
                # x is kept too, or its id could be another's later
                self._weights[key] = x, self.group.transport.bind(jax.device_put(array, self.device))
            found.append(self._weights[key])
        return tuple(found)

    def _allocate(self, setup: m.Setup) -> int:
        """Slots that all attention ranks have room for. What they held for a model before this one is gone."""
        self.group.epoch += 1
        self._epoch = self.group.epoch
        self.group.broadcast(setup)
        found = [self.group.receive(r, m.SlotsFound, PREPARE_DEADLINE_S).n_slots for r in self.group.workers]
        n_slots = min(found)
        self.group.broadcast(m.Allocate(n_slots))
        for rank in self.group.workers:
            self.group.receive(rank, m.Allocated, PREPARE_DEADLINE_S)
        return n_slots


def pays_q_first(transport: Transport) -> bool:
    """Whether sending q by itself gains more than one message more costs, as measured (docs/benchmarks.md): between
    accelerators over XLA's collectives it does; between ranks on CPUs, and by MPI through hosts' memory, it does not."""
    return transport.name == "xla" and transport.device.platform != "cpu"


Weights = tuple[
    tuple[tuple[jax.Array, jax.Array], ...], ...
]  # of each slice: (as the model has it, as programs take it)


def _lifted(weights: Weights) -> tuple[tuple[jax.Array, ...], ...]:
    return tuple(tuple(bound for _, bound in of_slice) for of_slice in weights)


def _with_lifted(step: Callable[..., jax.Array], weights: Weights) -> Callable[..., jax.Array]:
    """``step`` for weights of which those without dimensions have got one: a program takes no others."""
    flat = [[own.ndim == 0 for own, _ in of_slice] for of_slice in weights]

    def run(given: Any, inputs: Any, at: PlacedIndices | None) -> jax.Array:
        lowered = tuple(
            tuple(x.reshape(()) if scalar else x for x, scalar in zip(xs, scalars, strict=True))
            for xs, scalars in zip(given, flat, strict=True)
        )
        return step(lowered, inputs, at)

    return run


def _layer(spec: AttentionSpec, n_query_heads: int) -> m.Layer:
    return m.Layer(
        n_query_heads,
        spec.n_kv_heads,
        spec.head_dim,
        spec.dtype.name,
        spec.scale,
        spec.window,
        spec.softcap,
        spec.kv,
    )


def _array(x: Any) -> m.Array | None:
    return None if x is None else m.Array.of(x)
