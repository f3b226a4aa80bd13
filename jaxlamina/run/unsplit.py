"""Unsplit execution, to compare with: one program a step, weights and KV on one device.

Same kernels, same KV slots, same batches as split execution; what differs is that nothing is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.kv.kept import WHOLE, KeptFound, KeptWanted, Lost
from jaxlamina.process import kept_programs
from jaxlamina.process.compile_counts import Programs
from jaxlamina.ranks.contexts import context_at
from jaxlamina.run.executor import Capabilities, Executor, StepLogits
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch, with_chunk
from jaxlamina.steps.step import Step
from jaxlamina.transports import compiler_options
from jaxlamina.workers import capacity
from jaxlamina.workers.calibration import Calibration, channel_scales
from jaxlamina.workers.capacity import HowManySlots, resolve_host_slots, resolve_slots
from jaxlamina.workers.kv_pools import KVPools, Slots, as_slots
from jaxlamina.workers.model_worker import ModelFn, ModelWorker, Params, trace_step
from jaxlamina.workers.spec import AttentionSpec, bucket_cut
from jaxlamina.workers.streamed import Filled, with_streamed_products
from jaxlamina.workers.whole_model import (
    Attend,
    attend_in_pools,
    filled,
    prompt_attention,
    prompt_logits,
)
from jaxlamina.workers.workspace import LargestStep, ints, placed, pool_shapes, program_bytes
from pallas_kernels import Pool, decode_attention
from pallas_kernels.order import tied
from splitter import SplitReport


class UnsplitExecutor(Executor):
    """Runs whole steps as single jitted calls; interface and KV options as ``LocalExecutor``. ``name``:
    `CausalLM.name` of ``model``; with one, programs that are compiled ahead are kept on disk."""

    def __init__(
        self,
        model: ModelFn,
        params: Params,
        *,
        n_slots: HowManySlots | int,
        device: jax.Device,
        kv_dtype: str = "auto",
        n_host_slots: int | None = 0,
        calibration: Calibration | None = None,
        largest: LargestStep | None = None,
        name: Hashable | None = None,
    ) -> None:
        self.programs = Programs()
        self._device = device
        self._model, self._worker = model, self._made_worker(model, params)
        one_row = self._worker.split(1)
        self.report: SplitReport = one_row.report()
        self.specs = tuple(AttentionSpec.of(site, kv_dtype) for site in one_row.sites)

        self._decode = self._jitted(self._traced_decode)
        self._mixed = self._jitted(self._traced_mixed, _filled_beside_rows)
        self._prefill = self._jitted(self._traced_prefill, filled)
        self._prefill_all = self._jitted(partial(self._traced_prefill, of_all=True), filled)
        self._compiled: dict[tuple[Any, ...], Any] = {}  # before their steps, by sizes
        weights = [(n, x.shape, str(x.dtype), str(x.sharding)) for n, x in sorted(self.params.items())]
        made_of = None if name is None else (type(self).__name__, name, weights, self.specs)

        def needs_bytes(_: jax.Device) -> int:
            if largest is None or not capacity.is_accelerator(device):
                return 0
            known = made_of and kept_programs.name_of(device, "workspace", made_of, largest)
            return kept_programs.number(known, lambda: self.workspace_bytes(largest))

        self.n_slots = resolve_slots(n_slots, self.specs, self._devices, needs_bytes)
        self.n_host_slots = resolve_host_slots(n_host_slots, self.specs, self._devices, self.n_slots)
        known = model, self.params, self.specs, calibration
        scales = channel_scales(*known, n_positions=largest.context if largest else 1024)
        self.kv = KVPools(
            self.specs,
            self.n_slots,
            device,
            channel_scales=scales,
            n_host_slots=self.n_host_slots,
            sharding=self._pool_sharding,
        )
        pools = kept_programs.kinds((self.kv.k, self.kv.v))
        self._made_of = made_of and (*made_of, pools)

    # What differs where several devices share out the work (`jaxlamina.run.sharded`).

    @property
    def _devices(self) -> Sequence[jax.Device]:
        return [self._device]

    @property
    def _pool_sharding(self) -> jax.sharding.Sharding | None:
        return None

    def _made_worker(self, model: ModelFn, params: Params) -> ModelWorker:
        return ModelWorker(model, params, self._device)

    def _jitted(self, step: Callable[..., Any], *filled: Callable[..., Filled | None]) -> Any:
        return jax.jit(with_streamed_products(step, self._device, *filled), donate_argnums=(1, 2))

    def _given(self, tokens: Any) -> jax.Array:
        """Tokens where programs take them: one program, from wherever."""
        return jax.device_put(tokens, self._device)

    def _decode_kernel(self, spec: AttentionSpec) -> Callable[..., Any]:
        """`decode_attention` for layers of one kind."""
        return partial(decode_attention, **spec.scoring)

    def _prompt_kernel(self, spec: AttentionSpec) -> Callable[..., Any]:
        """The same of prompts."""
        return partial(prompt_attention, spec)

    @property
    def device(self) -> jax.Device:
        return self._device

    @property
    def params(self) -> dict[str, jax.Array]:
        return self._worker.params

    def put_weights(self, params: Params) -> None:
        self._worker.put(params)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            bucket_cut=bucket_cut(self.specs, self.device),
            compiles_behind=True,
            batches_prompts=True,
            prompt_batch_tokens=capacity.prompt_batch_tokens(self.device),
            rounds_kv=any(spec.rounds for spec in self.specs),
        )

    def run(self, step: Step) -> StepLogits:
        """A prompt alongside rows is in their program, which reads weights once for both; within it there are
        logits of each of the prompt's tokens. What else there is of prompts runs after them."""
        parts = step.apart if step.alongside is None else [step]
        return StepLogits.joined([self._run(part) for part in parts])

    def _run(self, step: Step) -> StepLogits:
        program = self._compiled.get(_sizes(step)) or self._program(step)
        inputs = self._inputs(step)
        self.on_launch()
        self.kv.k, self.kv.v, *logits = program(*inputs)
        return StepLogits(None if step.decodes is None else logits.pop(0), tuple(logits))

    def _program(self, step: Step) -> Any:
        if step.decodes is None:
            return self._prefill_all if step.prompts[0].scored else self._prefill
        return self._mixed if step.prompts else self._decode

    def compile_later(self, step: Step, *, behind: bool = False) -> Callable[[], Any]:
        assert len(step.apart) == 1 or step.alongside is not None, "one program"
        sizes, options = _sizes(step), compiler_options(self.device, behind=behind)
        made_of = self._made_of and (self._made_of, self._device.id, sizes, options)
        program = kept_programs.later(
            made_of and kept_programs.name_of(self._device, made_of),
            lambda: self._program(step).lower(*self._inputs(step)),
            self._devices,
            options,
            lambda: self.programs.compiled(_label_of(step)),
        )

        def run() -> None:
            self._compiled[sizes] = program()

        return run

    def _inputs(self, step: Step) -> tuple[Any, ...]:
        known = self.params, self.kv.k, self.kv.v
        if step.decodes is None:
            return *known, *step.prompts[0].batch
        batch = step.decodes._replace(tokens=self._given(step.decodes.tokens))
        if step.alongside is None:
            return *known, *batch
        return *known, *with_chunk(batch, step.alongside), batch, step.alongside

    def copy_slots(self, src: Slots, dst: Slots) -> None:
        self.kv.copy_slots(as_slots(src), as_slots(dst))

    def move_out(self, slots: Slots, host_slots: Slots) -> None:
        self.kv.move_out(as_slots(slots), as_slots(host_slots))

    def move_in(self, host_slots: Slots, slots: Slots) -> None:
        self.kv.move_in(as_slots(host_slots), as_slots(slots))

    def open_kept(self, wanted: KeptWanted) -> KeptFound:
        wanted = wanted.of_layout(WHOLE + "()")
        marks = self.kv.open_kept("worker0", wanted)
        return KeptFound(("worker0",), (len(marks),), wanted.identity, marks)

    def keepers_of(self, slots: Slots) -> np.ndarray:
        return np.zeros(len(slots), np.intp)

    @property
    def n_behind(self) -> int:
        return self.kv.n_behind

    def take_lost(self, places: Slots) -> Lost:
        return self.kv.take_lost(as_slots(places))

    def keep(self, slots: Slots, places: Slots, marks: np.ndarray) -> None:
        self.kv.keep(as_slots(slots), as_slots(places), marks)

    def bring(self, places: Slots, slots: Slots) -> None:
        self.kv.bring(as_slots(places), as_slots(slots))

    def workspace_bytes(self, largest: LargestStep) -> int:
        """What the largest step takes beside weights and KV, found by compiling it."""
        b, c, t = largest.batch, largest.context, largest.prompt
        pools = [placed(pool_shapes(spec), self._pool_sharding) for spec in self.specs]
        weights = {name: placed(x, x.sharding) for name, x in self.params.items()}
        known = weights, pools, pools
        decode = ints(b, 1), ints(b, 1), ints(b, c), ints(b), ints(b)
        prefill = ints(1, t), ints(1, t), ints(1), ints(1, t), ints(1, 0), ints(1)
        return max(
            program_bytes(self._decode, *known, *decode), program_bytes(self._prefill, *known, *prefill)
        )

    def _traced_decode(
        self,
        params: Params,
        k_pools: list[Pool],
        v_pools: list[Pool],
        tokens: jax.Array,
        positions: jax.Array,
        slot_table: jax.Array,
        lengths: jax.Array,
        new_slots: jax.Array,
    ) -> tuple[list[Pool], list[Pool], jax.Array]:
        self.programs.compiled(_label(slot_table.shape))
        k_pools, v_pools = list(k_pools), list(v_pools)
        given = slot_table, lengths, new_slots
        attend = attend_in_pools(self._decode_kernel, self.specs, k_pools, v_pools, *given)
        traced = trace_step(self._model, self.params, *tokens.shape)
        with jax.default_device(self.device):  # kernels are picked by it
            logits = traced.eval(params, tokens, positions, attend=attend)
        return k_pools, v_pools, logits[:, -1]

    def _traced_prefill(
        self,
        params: Params,
        k_pools: list[Pool],
        v_pools: list[Pool],
        tokens: jax.Array,
        positions: jax.Array,
        logits_at: jax.Array,
        slots: jax.Array,
        slot_table: jax.Array,
        lengths: jax.Array,
        of_all: bool = False,
    ) -> tuple[list[Pool], list[Pool], jax.Array]:
        (n, n_tokens), context = tokens.shape, slot_table.shape[1]
        self.programs.compiled(_label(None, (n, n_tokens, context), of_all))
        k_pools, v_pools = list(k_pools), list(v_pools)
        given = slots, slot_table, lengths
        attend = attend_in_pools(self._prompt_kernel, self.specs, k_pools, v_pools, *given)
        known = self._model, self.params, self.device, attend
        logits = prompt_logits(*known, params, tokens, positions, logits_at, of_all=of_all)
        return k_pools, v_pools, logits

    def _traced_mixed(
        self,
        params: Params,
        k_pools: list[Pool],
        v_pools: list[Pool],
        tokens: jax.Array,
        positions: jax.Array,
        batch: DecodeBatch,
        chunk: PrefillBatch,
    ) -> tuple[list[Pool], list[Pool], jax.Array, jax.Array]:
        """tokens, positions: as of `with_chunk`, a row each."""
        n = len(batch.tokens)
        self.programs.compiled(
            _label(batch.slot_table.shape, (*chunk.tokens.shape, chunk.slot_table.shape[1]))
        )
        pools = list(k_pools), list(v_pools)
        rows_given = batch.slot_table, batch.lengths, batch.new_slots
        of_rows = attend_in_pools(self._decode_kernel, self.specs, *pools, *rows_given)
        chunk_given = chunk.slots, chunk.slot_table, chunk.lengths
        of_chunk = attend_in_pools(self._prompt_kernel, self.specs, *pools, *chunk_given)

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            rows_out = of_rows(i, q[:n], k[:n], v[:n])
            # only once the rows have read the pools is more written to them, or XLA would keep two of each
            q, k, v = (tied(x[n:].swapaxes(0, 1), rows_out) for x in (q, k, v))
            return jnp.concatenate([rows_out, of_chunk(i, q, k, v).swapaxes(0, 1)])

        wanted = jnp.concatenate([jnp.arange(n), n + chunk.logits_at])
        with jax.default_device(self.device):
            logits = self._logits_at(params, tokens, positions, attend, wanted)
        return *pools, logits[:n], logits[n:]

    def _logits_at(
        self, params: Params, tokens: jax.Array, positions: jax.Array, attend: Attend, rows: jax.Array
    ) -> jax.Array:
        """``[len(rows), V]``: of those rows alone is the last slice computed, which has the vocabulary."""
        whole, ends = self._worker.split(len(tokens)), self._worker.split(len(rows))
        context: Sequence[Any] = whole.first_context(tokens, positions)
        out: Any = None
        for i, part in enumerate(whole.slices[:-1]):
            weights = whole.slice_params(i, params)
            q, rest = part.q_part(weights, context, out)
            k, v, context = part.kv_part(weights, rest, None)
            out = attend(i, q, k, v)
        final = ends.slices[-1]
        weights, context = ends.slice_params(ends.n, params), context_at(rows, context, final)
        logits: jax.Array = final.final(weights, context, out[rows])
        return logits[:, -1]


def _filled_beside_rows(*args: Any) -> Filled | None:
    tokens, _, batch, chunk = args[3:]
    return Filled.of(tokens, chunk.logits_at, len(batch.tokens))


def _label(
    rows: tuple[int, ...] | None, prompts: tuple[int, int, int] | None = None, of_all: bool = False
) -> str:
    """What a program is for. ``rows``: how many, and their context; ``prompts``: how many, the tokens of each
    and those before."""
    said = [] if rows is None else [f"whole step, batch {rows[0]}, context {rows[1]}"]
    if prompts is not None:
        n, n_tokens, context = prompts
        what = f"whole prefill {n} × {n_tokens}" if rows is None else f"with {n_tokens}"
        said.append(f"{what} tokens{f' after {context}' * bool(context)}")
    return ", ".join(said + ["logits of all"] * of_all)


def _label_of(step: Step) -> str:
    rows = None if step.decodes is None else step.decodes.slot_table.shape
    if not step.prompts:
        return _label(rows)
    part = step.prompts[0]
    return _label(rows, (*part.batch.tokens.shape, part.batch.slot_table.shape[1]), part.scored)


def _sizes(step: Step) -> tuple[Any, ...]:
    """What tells a step's program from others."""
    parts: list[Any] = [] if step.decodes is None else [step.decodes]
    parts += [part.batch for part in step.prompts]
    scored = any(part.scored for part in step.prompts)
    return scored, *((type(part), part.tokens.shape, part.slot_table.shape) for part in parts)
