"""Which executor runs a model, and where: this process's devices or a job's ranks; what must fit there is
checked first.

Knows options, devices and memory; no prompt and no request.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.kv.placement import LocalShare, chosen_partition, why_chosen
from jaxlamina.models.causal_lm import CausalLM
from jaxlamina.options import DEFAULT_SEQS, LLMOptions, WorkerOptions, definitions
from jaxlamina.run.local import LocalExecutor
from jaxlamina.run.modelled import ModelledSteps
from jaxlamina.run.sharded import ShardedExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.workers.calibration import Calibration
from jaxlamina.workers.capacity import (
    check_host_slots,
    check_largest_step,
    check_weights,
    is_accelerator,
    resolve_slots,
    slots_that_fit,
    spread_over,
)
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.workspace import LargestStep, tree_bytes

if TYPE_CHECKING:
    from jaxlamina.ranks import Group
    from jaxlamina.run.ranks import RanksExecutor


@dataclass(frozen=True)
class ModelPlace:
    """Where a model is run: devices of this process, the attention workers' all one or one each, or a job's
    ranks. ``sharing``: devices that share out a model which is not split."""

    model_device: jax.Device
    attention_devices: Sequence[jax.Device]
    n_workers: int
    partition: str
    group: Group | None = None
    sharing: Sequence[jax.Device] = ()

    @classmethod
    def of(
        cls,
        options: LLMOptions,
        devices: Sequence[jax.Device] | None,
        group: Group | None,
        kv_heads: Sequence[int],
    ) -> ModelPlace:
        """``UserError`` for devices and options that do not go together."""
        n = options.attention_workers
        if not options.split and (n != 1 or options.local_attention):
            name = "attention_workers" if n != 1 else "local_attention"
            raise UserError(f"{name}={getattr(options, name)} needs the model split: leave out split=False")
        if options.tensor_parallel > 1 and group is None:
            return cls._sharing_out(options, devices)
        if group is None:
            model_device, *attention_devices = _devices(devices, options.split, n)
            known = n, kv_heads, options.local_attention
            chosen = chosen_partition(options.partition, *known)
            _say_why(options.partition, chosen, *known)
            return cls(model_device, attention_devices, n, chosen)
        from jaxlamina.ranks.cluster_layout import partition_of

        _check_unused(options, devices)
        n, chosen = len(group.workers), partition_of(group.cluster, kv_heads)
        _say_why(group.cluster.partition, chosen, n, kv_heads, group.cluster.local_share)
        return cls(group.device, [group.device], n, chosen, group)

    @classmethod
    def _sharing_out(cls, options: LLMOptions, devices: Sequence[jax.Device] | None) -> ModelPlace:
        n, there = options.tensor_parallel, list(jax.local_devices() if devices is None else devices)
        if options.split:
            raise UserError(
                f"tensor_parallel={n} in one process is for a model that is not split: give split=False, or "
                "start ranks, whose cluster file says it"
            )
        if len(there) < n:
            raise UserError(f"tensor_parallel={n} needs as many devices, and there are {len(there)}: {there}")
        return cls(there[0], there[:1], 1, "heads", sharing=there[:n])

    @property
    def compute_pool(self) -> str:
        """The model's device, or those that share it out, as people are told."""
        return ", ".join(map(str, self.sharing or [self.model_device]))

    @property
    def attention_pool(self) -> str:
        """The memory pool, as people are told."""
        if self.group is None:
            return str(self.attention_devices[0])
        keepers = self.group.workers or self.group.cluster.pools.model_ranks
        ranks = ", ".join(f"rank {rank}" for rank in keepers)
        return f"{ranks} by {self.group.cluster.transport}"

    @property
    def shares_weights(self) -> bool:
        """Whether no device is to have all weights, if several have some."""
        return bool(self.sharing) or (self.group is not None and self.group.cluster.shares_weights)

    @property
    def load_device(self) -> jax.Device:
        """Where weights are read to."""
        if self.sharing:  # none of them is to have all
            return jax.local_devices(backend="cpu")[0]
        return self.model_device if self.group is None else self.group.load_device

    def begin_memory(self) -> None:
        """Has another thread give the model's device something to hold. JAX takes most of an accelerator's
        memory then, which took a GPU 0.9 s."""

        def hold() -> None:
            with suppress(jax.errors.JaxRuntimeError):  # whoever wants it next hears of it
                jax.block_until_ready(jax.device_put(np.zeros(1, np.uint8), self.model_device))

        if self.group is None and is_accelerator(self.model_device):
            threading.Thread(target=hold, name="device memory", daemon=True).start()

    @property
    def has_device_each(self) -> bool:
        return len(self.attention_devices) == self.n_workers


@dataclass(frozen=True)
class ExecutorMaker:
    """Makes the executor of a model whose requests have ``length`` tokens at most; ``dtype``: "float32" or
    "bfloat16"."""

    place: ModelPlace
    model: CausalLM
    dtype: str
    options: LLMOptions
    length: int

    @property
    def n_seqs(self) -> int:
        return self.options.max_num_seqs or DEFAULT_SEQS

    @property
    def _largest(self) -> LargestStep:
        return LargestStep(self.n_seqs, self.length, self.length)

    @property
    def _slots(self) -> tuple[int, int]:
        """Of what KV is kept for, the most that could be used, and the least that does."""
        least = 2 if self.options.max_model_len is None else self.length
        return self.n_seqs * self.length, least

    @property
    def _specs(self) -> list[AttentionSpec]:
        dtype, kv_dtype = jnp.dtype(self.dtype), self.options.kv_dtype
        return [AttentionSpec(heads, size, dtype, 1.0, None, None, kv_dtype) for heads, size in self.model.kv]

    @cached_property
    def modelled(self) -> ModelledSteps | None:
        """As `ModelledSteps.of`."""
        of = self.options
        return ModelledSteps.of(self.place, self.model, self.dtype, self._specs, of.split, of.calibration)

    def check(self, weights: bool = True) -> None:
        """``UserError`` for steps, KV or ``weights`` that memory does not hold: before anything is
        allocated."""
        place, options = self.place, self.options
        check_largest_step(self._largest, self.model.vocab_size)
        specs = self._specs
        if place.group is None and options.host_kv_slots != "auto":
            check_host_slots(options.host_kv_slots, specs)
        if place.group is None and options.kv_slots is not None:  # and again by the executor, beside weights
            on = spread_over(place.n_workers, place.attention_devices[0], place.model_device)
            each = place.attention_devices if place.has_device_each else on
            resolve_slots(options.kv_slots, specs, place.sharing or each)
        if weights:
            n_bytes = tree_bytes(self.model.like(self.dtype))
            check_weights(n_bytes, self.dtype, place.load_device)

    def make(
        self, params: Mapping[str, jax.Array], calibration: Calibration, recording: bool = False
    ) -> LocalExecutor | UnsplitExecutor | RanksExecutor:
        """``recording``: over ranks, one that can record decode steps on all of them."""
        place, options = self.place, self.options
        fn = self.model.fn
        most, least = self._slots
        kv: dict[str, Any] = {
            "kv_dtype": options.kv_dtype,
            "calibration": calibration,
            "n_host_slots": None if options.host_kv_slots == "auto" else options.host_kv_slots,
            "largest": self._largest,
        }
        if place.group is not None:
            from jaxlamina.run.ranks import RanksExecutor
            from jaxlamina.run.recording import RecordingExecutor

            kind = RecordingExecutor if recording else RanksExecutor
            kv |= {"kv_slots": options.kv_slots, "most_slots": most, "least_slots": least}
            kv["modelled"] = self.modelled
            return kind(fn, params, group=place.group, source=self.model, **kv)
        n_slots = options.kv_slots or partial(slots_that_fit, most=most, least=least)
        name = self.model.name
        if place.sharing:
            return ShardedExecutor(fn, params, devices=place.sharing, n_slots=n_slots, name=name, **kv)
        if not options.split:
            return UnsplitExecutor(fn, params, device=place.model_device, n_slots=n_slots, name=name, **kv)
        return LocalExecutor(
            fn,
            params,
            model_device=place.model_device,
            attention_device=place.attention_devices[0],
            attention_devices=place.attention_devices if place.has_device_each else None,
            attention_workers=place.n_workers,
            partition=place.partition,
            local_share=options.local_attention,
            q_first=options.q_first,
            n_slots=n_slots,
            **kv,
        )


def _devices(devices: Sequence[jax.Device] | None, split: bool, n_workers: int) -> list[jax.Device]:
    """The model worker's device, then one for all attention workers or one for each of them."""
    given = list(jax.local_devices() if devices is None else devices)
    if not given or (devices is not None and len(given) not in (1, 2, 1 + n_workers)):
        each = f", or {1 + n_workers}: one for each attention worker" if n_workers > 1 else ""
        raise UserError(
            f"devices={given} must be one device, or two: the model worker's and the attention worker's{each}"
        )
    if not split or len(given) == 1:
        return [given[0], given[0]]
    return given[: 1 + n_workers] if len(given) > n_workers else given[:2]


def _say_why(
    asked: str, chosen: str, n_workers: int, kv_heads: Sequence[int], local_share: LocalShare
) -> None:
    """Where the partition was left open, what it came to."""
    if why := why_chosen(asked, chosen, n_workers, kv_heads, local_share):
        print(f"note: {why}", file=sys.stderr, flush=True)


def _check_unused(options: LLMOptions, devices: object) -> None:
    """``UserError`` for what a cluster says."""
    given = [name for name, d in definitions(WorkerOptions).items() if getattr(options, name) != d.default]
    given += [] if devices is None else ["devices"]
    if given:
        raise UserError(f"{given[0]} is what the cluster says, for a model over ranks: leave it out")
