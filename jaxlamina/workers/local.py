"""Split execution in one process: the loop over slices, and what crosses between the two pools.

Knows one model worker and a pool of attention workers, and which device each is on. Only q, k, v go over and only
attention output comes back. With both on one device a slice is one call; on two, q is sent before k and v
are computed (Lamina 2025, §4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxlamina.errors import UserError
from jaxlamina.run.executor import Capabilities, Executor, StepLogits
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.step import PromptPart, Step
from jaxlamina.workers import capacity
from jaxlamina.workers.attention_pool import PlacedPool, attention_pool
from jaxlamina.workers.attention_worker import AttentionWorker, Partial, attention_workspace_bytes
from jaxlamina.workers.calibration import Calibration, channel_scales
from jaxlamina.workers.capacity import HowManySlots, resolve_host_slots, resolve_slots, spread_over
from jaxlamina.workers.kv_pools import Slots
from jaxlamina.workers.model_worker import (
    BoundModel,
    Context,
    ModelFn,
    ModelWorker,
    Params,
    PrefillSlice,
    combined,
)
from jaxlamina.workers.partition import checked_partition
from jaxlamina.workers.programs import Programs
from jaxlamina.workers.spec import AttentionSpec, bucket_cut
from jaxlamina.workers.workspace import LargestStep, ints
from pallas_kernels.order import zero_after
from splitter import SplitReport


class _Lowered:
    """Programs that have been lowered for arrays of some shapes on a device, each once, and are to be compiled."""

    def __init__(self, device: jax.Device, programs: dict[Any, Any] | None = None) -> None:
        self._sharding = SingleDeviceSharding(device)
        self._programs: dict[Any, Any] = {} if programs is None else programs  # by function and shapes

    def on(self, device: jax.Device) -> _Lowered:
        """The same programs, and more of another device."""
        return _Lowered(device, self._programs)

    def like(self, tree: Any) -> Any:
        """The shapes of a tree of arrays or shapes, on this device."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), tree)

    def shapes(self, function: Callable[..., Any], *args: Any) -> Any:
        """Those that ``function`` gives."""
        return self.like(jax.eval_shape(function, *args))

    def lower(self, function: Any, *args: Any) -> Any:
        """The shapes that jitted ``function`` gives; it is lowered if it has not been for such arguments."""
        leaves, tree = jax.tree.flatten(args)
        key = function, tree, *((x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves)
        if key not in self._programs:
            self._programs[key] = function.lower(*args)
        return self.like(self._programs[key].out_info)

    def compile(self) -> None:
        for lowered in self._programs.values():
            lowered.compile()


class LocalExecutor(Executor):
    """Runs steps slice by slice over a model worker and one or several attention workers.

    - ``n_slots``: tokens whose KV is kept, or how to find that out (`capacity.slots_that_fit`, partly applied).
    - ``q_first``: send q before k and v are computed, at one call more a layer; by default where the workers are
      on different devices.
    - ``kv_dtype``: "auto" as the model's, "int8" with a scale a slot and KV head, "int8-channel" with fixed
      scales a channel, found as ``calibration`` says, "int8-channel-asymmetric" with fixed zero points, too.
    - ``attention_workers``, ``partition``: how many, and whether they share out "heads", "requests" or "tokens".
      They are on ``attention_devices``, or on ``attention_device`` and as many others as there are.
    - ``n_host_slots``: room in host memory for the KV of as many tokens, for ``move_out`` and ``move_in``. None: what
      `capacity.host_slots_that_pay` says.
    - ``largest``: the largest step to come, whose workspace is left free where memory decides on ``n_slots``.
    """

    def __init__(
        self,
        model: ModelFn,
        params: Params,
        *,
        n_slots: HowManySlots | int,
        model_device: jax.Device,
        attention_device: jax.Device,
        q_first: bool | None = None,
        kv_dtype: str = "auto",
        attention_workers: int = 1,
        partition: str = "heads",
        attention_devices: Sequence[jax.Device] | None = None,
        token_block: int = 16,
        n_host_slots: int | None = 0,
        calibration: Calibration | None = None,
        largest: LargestStep | None = None,
    ) -> None:
        self.programs = Programs()
        self.model = ModelWorker(model, params, model_device, self.programs)
        one_row = self.model.split(1)
        self.report: SplitReport = one_row.report()
        specs = tuple(AttentionSpec.of(site, kv_dtype) for site in one_row.sites)
        checked_partition(partition, attention_workers, [spec.n_kv_heads for spec in specs])
        devices = attention_devices or spread_over(attention_workers, attention_device, model_device)
        if len(devices) != attention_workers:
            raise UserError(f"{attention_workers=} must be as many as attention devices, {len(devices)}")
        n_query_heads = [site.q.shape[2] for site in one_row.sites]
        workspace = partial(self._workspace_bytes, specs, n_query_heads, devices, largest)
        self.n_slots = resolve_slots(n_slots, specs, devices, workspace)
        self.n_host_slots = resolve_host_slots(n_host_slots, specs, devices, self.n_slots)
        known = model, self.model.params, specs, calibration
        scales = channel_scales(*known, n_positions=largest.context if largest else 1024)
        self.attention = attention_pool(
            specs,
            self.n_slots,
            devices,
            self.programs,
            model_device=model_device,
            partition=partition,
            token_block=token_block,
            channel_scales=scales,
            n_host_slots=self.n_host_slots,
        )
        self._apart = set(devices) != {model_device} or len(devices) > 1
        self.q_first = set(devices) != {model_device} if q_first is None else q_first
        self._zero_after = jax.jit(zero_after)
        self._combined = jax.jit(combined, static_argnums=1)

    @property
    def device(self) -> jax.Device:
        return self.model.device

    def run(self, step: Step) -> StepLogits:
        """One part after the other: here every slice is a call of its own, and attention workers are told of one at a time."""
        rows = None if step.decodes is None else self._decode(step.decodes)
        return StepLogits(rows, tuple(self._prefill(part) for part in step.prompts))

    def _decode(self, batch: DecodeBatch) -> jax.Array:
        model, attention = self.model.decode(len(batch.tokens)), self.attention
        context = model.first_context(*jax.device_put((batch.tokens, batch.positions), self.device))
        attention.begin_decode(batch)
        out = None
        for i, part in enumerate(model.slices):
            if self.q_first:
                q, rest = part.q_part(part.weights, context, out)
                q, tie = self._send_q(q)
                k, v, context = part.kv_part(part.weights, rest, tie)
            else:
                q, k, v, context = part.whole(part.weights, context, out)
                q = self._to_attention(q)
            out = self._to_model(attention.attend(i, q, self._kv_to_attention(k), self._kv_to_attention(v)))
        return model.final(model.final_weights, context, out)

    def _prefill(self, part: PromptPart) -> jax.Array:
        batch, of_all = part.batch, part.scored
        inputs = batch.tokens, batch.positions, *(() if of_all else (batch.logits_at,))
        model = self.model.prefill(*batch.tokens.shape, of_all=of_all)
        context = model.first_context(*jax.device_put(inputs, self.device))
        self.attention.begin_prefill(batch)
        if batch.has_earlier:
            out, context = self._after_stored(model, context)
        else:
            out, context = self._from_first(model, context)
        return model.final(model.final_weights, context, out)

    @property
    def capabilities(self) -> Capabilities:
        # A GPU tries kernels out for programs that slices are called by.
        on_cpu = not capacity.is_accelerator(self.device)
        return Capabilities(
            bucket_cut=bucket_cut(self.attention.specs, self.attention.workers[0].device, whole_steps=False),
            places_tokens=isinstance(self.attention, PlacedPool),
            compiles_behind=isinstance(self.attention, AttentionWorker) and on_cpu,
        )

    def compile_later(self, step: Step, *, behind: bool = False) -> Callable[[], Any] | None:
        """The programs of all slices and of attention. None with several attention workers."""
        assert not behind or self.capabilities.compiles_behind
        worker = self.attention
        if not isinstance(worker, AttentionWorker):
            return None
        found = _Lowered(self.device)
        if step.decodes is not None:
            self._lower_decode(found, worker, step.decodes)
        for part in step.prompts:
            self._lower_prefill(found, worker, part.batch, part.scored)
        return found.compile

    def _lower_decode(self, found: _Lowered, worker: AttentionWorker, batch: DecodeBatch) -> None:
        b = len(batch.tokens)
        model, at_worker = self.model.decode(b), found.on(worker.device)
        context, out = found.shapes(model.first_context, ints(b, 1), ints(b, 1)), None
        table = at_worker.like((batch.slot_table, batch.lengths, batch.new_slots))
        for i, part in enumerate(model.slices):
            if self.q_first:
                q, rest = found.lower(part.q_part, part.weights, context, out)
                tie = found.lower(self._zero_after, at_worker.like(q) if self._apart else q)
                k, v, context = found.lower(part.kv_part, part.weights, rest, tie)
            else:
                q, k, v, context = found.lower(part.whole, part.weights, context, out)
            *_, out = at_worker.lower(
                worker.attends[i], *worker.pools_like(i), *at_worker.like((q, k, v)), *table
            )
            out = found.like(out)
        found.lower(model.final, model.final_weights, context, out)

    def _lower_prefill(
        self, found: _Lowered, worker: AttentionWorker, batch: PrefillBatch, of_all: bool
    ) -> None:
        b, t = batch.tokens.shape
        model, at_worker = self.model.prefill(b, t, of_all=of_all), found.on(worker.device)
        inputs = (ints(b, t), ints(b, t)) if of_all else (ints(b, t), ints(b, t), ints(b))
        context = found.shapes(model.first_context, *inputs)
        table, slots = (
            at_worker.like((batch.slot_table, batch.lengths)),
            at_worker.like(batch.slots.reshape(-1)),
        )
        partials: Any = ()
        out = None
        for i, part in enumerate(model.slices):
            if batch.has_earlier:
                q, own, k, v, context = found.lower(part.chunk, part.weights, context, partials)
                stored = at_worker.lower(
                    worker.attends_stored[i], at_worker.like(q), *worker.pools_like(i), *table, None
                )
                partials = own, found.like(stored)
            else:
                out, k, v, context = found.lower(part.whole, part.weights, context, out)
            at_worker.lower(worker.stores, *worker.pools_like(i), *at_worker.like((k, v)), slots)
        if batch.has_earlier:
            last = worker.specs[-1]
            out = found.shapes(lambda x: combined(x, last), partials)
            found.lower(self._combined, partials, last)
        found.lower(model.final, model.final_weights, context, out)

    def _from_first(
        self, model: BoundModel[PrefillSlice], context: Context
    ) -> tuple[jax.Array | None, Context]:
        """The slices over whole prompts: their attention needs nothing that is stored."""
        out = None
        for i, part in enumerate(model.slices):
            out, k, v, context = part.whole(part.weights, context, out)
            self.attention.append(i, self._kv_to_attention(k), self._kv_to_attention(v))
        return out, context

    def _after_stored(
        self, model: BoundModel[PrefillSlice], context: Context
    ) -> tuple[jax.Array | None, Context]:
        """The slices over the rest of prompts: each layer's attention is its own partial and the stored tokens'."""
        partials: tuple[Partial, ...] = ()
        for i, part in enumerate(model.slices):
            q, own, k, v, context = part.chunk(part.weights, context, partials)
            stored = self.attention.attend_stored(i, self._to_attention(q))
            self.attention.append(i, self._kv_to_attention(k), self._kv_to_attention(v))
            partials = own, self._to_model(stored)
        return self._combined(partials, self.attention.specs[-1]), context

    def copy_slots(self, src: Slots, dst: Slots) -> None:
        self.attention.copy_slots(src, dst)

    def move_out(self, slots: Slots, host_slots: Slots) -> None:
        self.attention.move_out(slots, host_slots)

    def move_in(self, host_slots: Slots, slots: Slots) -> None:
        self.attention.move_in(host_slots, slots)

    def release(self, slots: Slots) -> None:
        self.attention.release(slots)

    def assume_stored(self, batch: DecodeBatch | PrefillBatch) -> None:
        if isinstance(self.attention, PlacedPool):
            self.attention.assume_stored(batch)

    def _send_q(self, q: jax.Array) -> tuple[Any, jax.Array]:
        """q at the attention workers, and the tie for k and v: a scalar that is there only once q is."""
        return self._to_attention(q), self._zero_after(q)

    def _to_attention(self, q: jax.Array) -> Any:
        return self.attention.send_q(q) if self._apart else q

    def _kv_to_attention(self, x: jax.Array) -> Any:
        return self.attention.send_kv(x) if self._apart else x

    def _to_model(self, x: Any) -> Any:
        return jax.device_put(x, self.model.device) if self._apart else x

    def _workspace_bytes(
        self,
        specs: tuple[AttentionSpec, ...],
        n_query_heads: Sequence[int],
        devices: Sequence[jax.Device],
        largest: LargestStep | None,
        device: jax.Device,
    ) -> int:
        """What the largest step needs on ``device``; 0 where nobody said how large, and on a host."""
        if largest is None or not capacity.is_accelerator(device):
            return 0
        found = 0
        if device in devices:
            found += attention_workspace_bytes(specs, n_query_heads, device, largest)
        if device == self.model.device:
            found += self.model.workspace_bytes(largest)
        return found
