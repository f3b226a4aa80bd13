"""Unsplit execution over several devices of this process: tensor parallelism by `jax.sharding`, to compare
with.

Weights by columns and rows in turn, as Megatron-LM has them, so that a layer needs two sums; KV and attention
by heads. XLA places the products and the sums, from the arrays' shardings alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlamina.errors import UserError
from jaxlamina.run.executor import StepLogits
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.steps.step import Step
from jaxlamina.workers.model_worker import Like, ModelFn, ModelWorker, Params
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.streamed import Filled

_AXIS = "devices"
_BY_ROWS = ("o_proj", "down_proj")  # their inputs are shared out already
_WHOLE = ("embed_tokens",)  # rows of it are looked up
_EVERYWHERE = PartitionSpec()
_HEADS = PartitionSpec(None, None, _AXIS)  # q, k, v [B, T, N, H]
_POOL = PartitionSpec(None, _AXIS)  # [S, K, H]


class ShardedExecutor(UnsplitExecutor):
    """As `UnsplitExecutor`; logits are on the first of ``devices``. `UserError` where the model's KV heads
    cannot be shared out evenly, and for int8 KV, whose scales are not shared out here."""

    def __init__(
        self,
        model: ModelFn,
        params: Params,
        *,
        devices: Sequence[jax.Device],
        kv_dtype: str = "auto",
        **options: Any,
    ) -> None:
        if kv_dtype.startswith("int8"):
            raise UserError(f"kv_dtype={kv_dtype} is for one device: leave out tensor_parallel")
        self._mesh = Mesh(np.array(devices), (_AXIS,))
        super().__init__(model, params, device=devices[0], kv_dtype=kv_dtype, **options)

    def run(self, step: Step) -> StepLogits:
        return jax.tree.map(lambda x: x.addressable_data(0), super().run(step))

    @property
    def _devices(self) -> Sequence[jax.Device]:
        return list(self._mesh.devices.flat)

    @property
    def _pool_sharding(self) -> jax.sharding.Sharding:
        n_heads = {spec.n_kv_heads for spec in self.specs}
        if any(n % len(self._devices) for n in n_heads):
            raise UserError(
                f"tensor_parallel={len(self._devices)} shares out KV heads, and the model has "
                f"{', '.join(map(str, sorted(n_heads)))} of them: take a number that divides it"
            )
        return NamedSharding(self._mesh, _POOL)

    def _made_worker(self, model: ModelFn, params: Params) -> ModelWorker:
        def place(name: str, x: Like) -> NamedSharding:
            spec = _spec_of(name, x)
            shared_out = dict(enumerate(spec)).items()
            even = all(axis is None or x.shape[i] % self._mesh.size == 0 for i, axis in shared_out)
            return NamedSharding(self._mesh, spec if even else _EVERYWHERE)

        return ModelWorker(model, params, self._device, place=place)

    def _jitted(self, step: Callable[..., Any], *filled: Callable[..., Filled | None]) -> Any:
        """By XLA's products: ours are of one device. Every device has all logits: to take them to one device
        afterwards, JAX goes by the host's memory."""

        def with_logits_everywhere(*args: Any) -> Any:
            k_pools, v_pools, *logits = step(*args)
            return (
                k_pools,
                v_pools,
                *(jax.lax.with_sharding_constraint(x, self._everywhere) for x in logits),
            )

        return jax.jit(with_logits_everywhere, donate_argnums=(1, 2))

    @property
    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self._mesh, _EVERYWHERE)

    def _given(self, tokens: Any) -> jax.Array:
        return jax.device_put(tokens, self._everywhere)

    def _decode_kernel(self, spec: AttentionSpec) -> Callable[..., Any]:
        return self._by_heads(super()._decode_kernel(spec))

    def _prompt_kernel(self, spec: AttentionSpec) -> Callable[..., Any]:
        return self._by_heads(super()._prompt_kernel(spec))

    def _by_heads(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Each device attends with its own heads."""
        return jax.shard_map(
            kernel,
            mesh=self._mesh,
            in_specs=(_HEADS, _HEADS, _HEADS, _POOL, _POOL, _EVERYWHERE, _EVERYWHERE, _EVERYWHERE),
            out_specs=(_POOL, _POOL, _HEADS),
            check_vma=False,
        )


def _spec_of(name: str, x: Like) -> PartitionSpec:
    """Of a weight ``[out, in]``."""
    if x.ndim < 2 or any(part in name for part in _WHOLE):
        return _EVERYWHERE
    return PartitionSpec(None, _AXIS) if any(part in name for part in _BY_ROWS) else PartitionSpec(_AXIS)
