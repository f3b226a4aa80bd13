"""Unsplit execution over several devices of this process, to compare with: tensor parallelism by
`jax.sharding`.

Weights by columns and rows in turn, as Megatron-LM has them, so that a layer needs two sums; KV and attention
by heads. XLA places the products and the sums, from the arrays' shardings alone. Decode steps only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlamina.errors import UserError
from jaxlamina.run.executor import StepLogits
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.steps.step import Step
from jaxlamina.workers.model_worker import ModelFn, Params
from jaxlamina.workers.spec import AttentionSpec

_AXIS = "devices"
_BY_ROWS = ("o_proj", "down_proj")  # their inputs are shared out already
_WHOLE = ("embed_tokens",)  # rows of it are looked up
_HEADS = PartitionSpec(None, None, _AXIS)  # q, k, v [B, T, N, H]
_POOL = PartitionSpec(None, _AXIS)  # [S, K, H]


class ShardedExecutor(UnsplitExecutor):
    """Decode steps as `UnsplitExecutor`'s. `UserError` where the model's KV heads cannot be shared out
    evenly."""

    def __init__(
        self, model: ModelFn, params: Params, *, n_slots: int, devices: Sequence[jax.Device]
    ) -> None:
        super().__init__(
            model, params, n_slots=1, device=devices[0]
        )  # no device is to hold all KV, not even at first
        self.n_slots = n_slots
        n_heads = {spec.n_kv_heads for spec in self.specs}
        if any(n % len(devices) for n in n_heads):
            raise UserError(f"{n_heads} KV heads cannot be shared out over {len(devices)} devices")
        self._mesh = Mesh(np.array(devices), (_AXIS,))
        self.params = {name: self._put(x, _spec_of(name, x)) for name, x in self.params.items()}
        by_heads = NamedSharding(self._mesh, _POOL)
        whole: Any  # pools of plain arrays: there is no other kind here
        for whole in (self.kv.k, self.kv.v):
            whole[:] = [jnp.zeros((n_slots, *x.shape[1:]), x.dtype, device=by_heads) for x in whole]
        self._decode = jax.jit(self._traced_decode, donate_argnums=(1, 2))

    def run(self, step: Step) -> StepLogits:
        """``ValueError`` for prompts."""
        if step.decodes is None or step.prompts:
            raise ValueError("sharded execution, which is to compare with, runs decode steps alone")
        given = jax.tree.map(lambda x: self._put(x, PartitionSpec()), step.decodes)
        self.kv.k, self.kv.v, logits = self._decode(self.params, self.kv.k, self.kv.v, *given)
        return StepLogits(logits)

    def _put(self, x: Any, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(x, NamedSharding(self._mesh, spec))

    def _decode_kernel(self, spec: AttentionSpec) -> Callable[..., Any]:
        """Each device attends with its own heads."""
        whole = PartitionSpec()
        return jax.shard_map(
            super()._decode_kernel(spec),
            mesh=self._mesh,
            in_specs=(_HEADS, _HEADS, _HEADS, _POOL, _POOL, whole, whole, whole),
            out_specs=(_POOL, _POOL, _HEADS),
            check_vma=False,
        )


def _spec_of(name: str, x: jax.Array) -> PartitionSpec:
    """Of a weight ``[out, in]``."""
    if x.ndim < 2 or any(part in name for part in _WHOLE):
        return PartitionSpec()
    return PartitionSpec(None, _AXIS) if any(part in name for part in _BY_ROWS) else PartitionSpec(_AXIS)
