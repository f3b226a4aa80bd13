"""Split execution in one process: one model worker and one or several attention workers, each on a device.

The same plans and the same programs as over ranks, in one order and in pieces (`jaxlamina.transports.local`):
only q, k, v go over and only attention output comes back. With both on one device q, k and v are one message;
on two, q is sent before k and v are computed (Lamina 2025, §4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.kv.kept import KeptFound, KeptWanted, Lost
from jaxlamina.kv.kv_worker import KVWorker
from jaxlamina.kv.placement import Held, checked_partition
from jaxlamina.kv.pool_book import PoolBook
from jaxlamina.process.compile_counts import Programs
from jaxlamina.ranks.attention_programs import AttentionProgram, attention_workspace_bytes, step_inputs_of
from jaxlamina.ranks.cluster_layout import wishes_of
from jaxlamina.ranks.model_side import ModelSide, model_workspace_bytes
from jaxlamina.ranks.rank_kv import own_scales
from jaxlamina.ranks.wires import heads_on_worker
from jaxlamina.run.executor import Capabilities, Executor, StepLogits
from jaxlamina.run.parts import Part, mixed_part, prompts_part, rows_part
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.step import Step
from jaxlamina.transports.local import CompiledPieces, LocalTransport, RankProgram, Together
from jaxlamina.workers import capacity
from jaxlamina.workers.calibration import Calibration, channel_scales
from jaxlamina.workers.capacity import HowManySlots, resolve_host_slots, resolve_slots, spread_over
from jaxlamina.workers.kv_pools import KVPools, Slots, as_slots
from jaxlamina.workers.model_worker import ModelFn, ModelWorker, Params
from jaxlamina.workers.spec import AttentionSpec, bucket_cut, windows_of
from jaxlamina.workers.workspace import LargestStep, shapes
from splitter import SplitReport


class LocalExecutor(Executor):
    """Runs steps slice by slice over a model worker and one or several attention workers.

    - ``n_slots``: tokens whose KV is kept, or how to find that out (`capacity.slots_that_fit`, partly
      applied).
    - ``q_first``: send q before k and v are computed, at one call more a layer; by default where the workers
      are on different devices.
    - ``kv_dtype``: "auto" as the model's, "int8" with a scale a slot and KV head, "int8-channel" with fixed
      scales a channel, found as ``calibration`` says, "int8-channel-asymmetric" with fixed zero points, too.
    - ``attention_workers``, ``partition``: how many, and whether they share out "heads", "requests" or
      "tokens". They are on ``attention_devices``, or on ``attention_device`` and as many others as there are.
    - ``local_share``: of the KV, what the model worker keeps and attends to itself (`Layout.local_share`); by
      requests or tokens the share that new tokens are placed by.
    - ``n_host_slots``: room in host memory for the KV of as many tokens, for ``move_out`` and ``move_in``.
      None: what `capacity.host_slots_that_pay` says.
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
        local_share: float = 0.0,
        token_block: int = 16,
        n_host_slots: int | None = 0,
        calibration: Calibration | None = None,
        largest: LargestStep | None = None,
    ) -> None:
        self.programs = Programs()
        self.model = ModelWorker(model, params, model_device)
        one_row = self.model.split(1)
        self.report: SplitReport = one_row.report()
        self.specs = tuple(AttentionSpec.of(site, kv_dtype) for site in one_row.sites)
        kv_heads = [spec.n_kv_heads for spec in self.specs]
        checked_partition(partition, attention_workers, kv_heads, local_share)
        devices = attention_devices or spread_over(attention_workers, attention_device, model_device)
        if len(devices) != attention_workers:
            raise UserError(f"{attention_workers=} must be as many as attention devices, {len(devices)}")
        b = attention_workers
        self.layout = Layout(tuple(range(1, b + 1)), partition, local_share=local_share)
        keeps_kv = self.layout.attends_locally
        self.q_first = set(devices) != {model_device} if q_first is None else q_first
        self._n_query_heads = [site.q.shape[2] for site in one_row.sites]
        self._pieces = CompiledPieces(self.programs.compiled)
        end: Any = LocalTransport(0, b + 1, model_device)
        self._side = ModelSide(end, self.model, self.layout, self.specs, 0)
        workspace = partial(self._workspace_bytes, devices, largest)
        keepers = [*devices, model_device] if keeps_kv else devices
        self.n_slots = resolve_slots(n_slots, self.specs, keepers, workspace)
        self.n_host_slots = resolve_host_slots(n_host_slots, self.specs, keepers, self.n_slots)
        known = model, self.model.params, self.specs, calibration
        scales = channel_scales(*known, n_positions=largest.context if largest else 1024)
        known_heads = [*zip(self.specs, self._n_query_heads, strict=True)]
        self._heads = [[heads_on_worker(self.layout, *one, w) for one in known_heads] for w in range(b)]
        self._own_specs = [
            [replace(spec, n_kv_heads=of.k) for spec, of in zip(self.specs, heads, strict=True)]
            for heads in self._heads
        ]
        by_heads = self.layout.by_heads
        each = [self.n_slots if by_heads else -(-self.n_slots // b)] * b
        each = each if self.layout.has_pool else [1] * b
        self.pools = tuple(
            KVPools(
                self._own_specs[w],
                n,
                device,
                channel_scales=own_scales(
                    scales, [np.asarray(self.layout.heads_of_worker(w, of.of)) for of in self._heads[w]]
                ),
                n_host_slots=self.n_host_slots,
            )
            for w, (n, device) in enumerate(zip(each, devices, strict=True))
        )
        workers: list[KVWorker] = [*self.pools] if self.layout.has_pool else []
        if keeps_kv:
            self._side.allocate(self.n_slots, self.n_host_slots, scales)
            assert self._side.kv is not None
            workers.append(self._side.kv)
            each.append(self.n_slots)
        # Taken now: a step gives the pools away, and another thread may ask meanwhile.
        self._pools_like = [shapes((kv.k, kv.v)) for kv in self.pools]
        sizes = self.n_slots, self.n_host_slots, token_block
        wishes = wishes_of(self.layout, token_block, local_share)
        self.book = PoolBook(workers, self.layout, windows_of(self.specs), *sizes, wishes, each)
        self._of_model: dict[StepShape, tuple[RankProgram, Any]] = {}
        self._steps: dict[StepShape, tuple[Together, Any, Sequence[KVPools]]] = {}

    @property
    def device(self) -> jax.Device:
        return self.model.device

    @property
    def kv(self) -> KVPools:
        """The first attention worker's."""
        return self.pools[0]

    @property
    def capabilities(self) -> Capabilities:
        # A GPU tries kernels out for programs that pieces are called by.
        on_cpu = not capacity.is_accelerator(self.device)
        return Capabilities(
            bucket_cut=bucket_cut(self.specs, self.pools[0].device, whole_steps=False),
            places_tokens=not self.layout.by_heads,
            compiles_behind=self.layout.by_heads and on_cpu,
            batches_prompts=self.layout.by_heads,
            prompt_batch_tokens=capacity.prompt_batch_tokens(self.device) if self.layout.by_heads else 0,
            rounds_kv=any(spec.rounds for spec in self.specs),
        )

    def run(self, step: Step) -> StepLogits:
        """A prompt alongside rows goes through the slices with them, which reads weights once for both. What
        else there is of prompts runs after them."""
        parts = step.apart if step.alongside is None else [step]
        return StepLogits.joined([self._run(part) for part in parts])

    def _run(self, step: Step) -> StepLogits:
        part = self._part(step)
        self.on_launch()  # also where it is to be compiled first
        together, weights, asked = self._step_of(part.shape)
        given = jax.device_put((part.inputs, part.rows.at), self.device)
        own: tuple[Any, ...] = [], [], ()
        if self._side.kv is not None:
            own = *self._side.kv.bound(), jax.device_put(part.rows.local, self.device)
        stored = [
            (kv.k, kv.v, jax.device_put(slots, kv.device))
            for kv, slots in zip(asked, part.rows.slots, strict=False)
        ]
        bound = self._side.weights(weights)
        (logits, *of_model), *pools = together.run((bound, *given, *own), *stored)
        if self._side.kv is not None:
            self._side.kv.take_back(*of_model)
        for kv, (k, v, _) in zip(asked, pools, strict=True):
            kv.k, kv.v = k, v
        if step.decodes is None:
            return StepLogits(None, (logits,))
        return StepLogits(logits[:-1], (logits[-1:],)) if step.prompts else StepLogits(logits)

    def _part(self, step: Step) -> Part:
        if step.alongside is not None:
            return mixed_part(self.book, step.decodes, step.alongside, q_first=self.q_first)  # type: ignore[arg-type]
        if step.decodes is not None:
            return rows_part(self.book, step.decodes, q_first=self.q_first)
        [prompt] = step.prompts
        return prompts_part(self.book, prompt.batch, q_first=self.q_first, scored=prompt.scored)

    def put_weights(self, params: Params) -> None:
        self._side.put_weights(params)

    def compile_later(self, step: Step, *, behind: bool = False) -> Callable[[], Any] | None:
        """All pieces of the step. None where they depend on where tokens lie."""
        assert not behind or self.capabilities.compiles_behind
        if not self.layout.by_heads:
            return None
        parts = step.apart if step.alongside is None else [step]
        found = [self._step_of(self._part(part).shape)[0] for part in parts]

        def run() -> None:
            for together in found:
                together.compile(behind=behind)

        return run

    def _step_of(self, shape: StepShape) -> tuple[Together, Any, Sequence[KVPools]]:
        """A step's programs, the weights, and the pools that it asks."""
        # The model's is the same whatever is stored elsewhere, and so are its pieces that hold no attention.
        known = shape if self.layout.attends_locally else shape.without_context
        if known not in self._of_model:
            found: Any = self._side.compile_later(shape)()
            self._of_model[known] = found
        if shape not in self._steps:
            program, weights = self._of_model[known]
            asked = self.pools if plan_of(self.layout, shape, len(self.specs)).pool else ()
            of_pool = [self._attention(w, shape) for w in range(len(asked))]
            together = Together([program, *of_pool], self._pieces, f"slices and attention, {shape}")
            self._steps[shape] = together, weights, asked
        return self._steps[shape]

    def _attention(self, w: int, shape: StepShape) -> RankProgram:
        end = LocalTransport(w + 1, len(self.pools) + 1, self.pools[w].device)
        specs = self._own_specs[w]
        known = end, self.layout, specs, self._heads[w], shape
        inputs = step_inputs_of(self.layout, shape, specs)
        step = AttentionProgram(*known).step
        return end.compile_later(step, *self._pools_like[w], inputs, donate_argnums=(0, 1))()

    def held(self) -> list[Held]:
        return self.book.held()

    def copy_slots(self, src: Slots, dst: Slots) -> None:
        self.book.copy_slots(as_slots(src), as_slots(dst))

    def move_out(self, slots: Slots, host_slots: Slots) -> None:
        self.book.move_out(as_slots(slots), as_slots(host_slots))

    def move_in(self, host_slots: Slots, slots: Slots) -> None:
        self.book.move_in(as_slots(host_slots), as_slots(slots))

    def rehearse_moves(self, n: int) -> None:
        self.book.rehearse_moves(n)

    def open_kept(self, wanted: KeptWanted) -> KeptFound:
        return self.book.open_kept(wanted._replace(n_sharing=len(self.layout.workers)))

    def keepers_of(self, slots: Slots) -> np.ndarray:
        return self.book.keepers_of(as_slots(slots))

    @property
    def n_behind(self) -> int:
        return self.book.n_behind

    def take_lost(self, places: Slots) -> Lost:
        return self.book.take_lost(as_slots(places))

    def keep(self, slots: Slots, places: Slots, marks: np.ndarray) -> None:
        self.book.keep(as_slots(slots), as_slots(places), marks)

    def bring(self, places: Slots, slots: Slots) -> None:
        self.book.bring(as_slots(places), as_slots(slots))

    def release(self, slots: Slots) -> None:
        self.book.release(as_slots(slots))

    def assume_stored(self, batch: DecodeBatch | PrefillBatch) -> None:
        self.book.assume_stored(batch)

    def _workspace_bytes(
        self, devices: Sequence[jax.Device], largest: LargestStep | None, device: jax.Device
    ) -> int:
        """What the largest step needs on ``device``; 0 where nobody said how large, and on a host."""
        if largest is None or not capacity.is_accelerator(device):
            return 0
        found = 0
        if device in devices:
            found += attention_workspace_bytes(self.specs, self._n_query_heads, device, largest)
        if device == self.model.device:
            found += model_workspace_bytes(self.model, self.specs, device, largest)
        return found
