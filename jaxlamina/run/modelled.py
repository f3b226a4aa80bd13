"""What the planner's cost model says of the steps that an executor is to run: where `auto` begins, and what
`/metrics` compares steps with.

Knows the planner, and who runs a model where; no step and no clock. What was measured goes before it
(`jaxlamina.run.staggering`, `jaxlamina.run.balance`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.models.causal_lm import CausalLM
from jaxlamina.planner import inputs
from jaxlamina.planner.calibration import DeviceCalibration, for_device
from jaxlamina.planner.costs import Deployment, StepCost, prefill_s, step_cost
from jaxlamina.run.balance import Speeds
from jaxlamina.workers.spec import AttentionSpec

if TYPE_CHECKING:
    from jaxlamina.run.make import ModelPlace

_FEW, _MANY = 16, 64  # rows of the steps that an exchange's time is made of
_TOKENS = 4096  # of a row, over which attention's time is taken


@dataclass(frozen=True)
class ModelledSteps:
    """``deployment``: the executor's, but for what changes with the load: its share of local attention and
    its staggered batches. What prefill workers do beside a step is not in it. ``origin``: in words, where
    its terms are from."""

    deployment: Deployment
    origin: str = ""

    @classmethod
    def of(
        cls,
        place: ModelPlace,
        model: CausalLM,
        dtype: str,
        specs: Sequence[AttentionSpec],
        split: bool,
        calibration: str | None,
    ) -> ModelledSteps | None:
        """None for what no cost is known of: a user's own function, a model with experts or windows, a device
        that the planner does not know, unless ``calibration`` is of it, and layouts without a price.
        ``UserError`` for a calibration that cannot be read."""
        given = None if calibration is None else DeviceCalibration.load(Path(calibration))
        known = inputs.matching(place.model_device.device_kind)
        if model.config is None or (known is None and given is None):
            return None
        try:
            found = for_device(known, given) if known is not None else given
            assert found is not None
            sizes = {"kv_bytes": _element_bytes(specs), "weight_bytes": float(np.dtype(dtype).itemsize)}
            return cls(_deployment(place, model, found, split, sizes), found.origin)
        except UserError:
            return None

    def step_s(self, n_rows: int, context: float, n_batches: int, share: float | None = None) -> float | None:
        """Of a decode step; ``share``: of the KV on model workers, None: the deployment's."""
        cost = self._cost(n_rows, context, n_batches, share)
        return None if cost is None else cost.step_s

    def with_prompt_s(
        self, mixed: bool, n_rows: int, n_stored: int, n_prompt: int, prompt_stored: int
    ) -> float | None:
        """Of a step of ``n_rows`` with ``n_stored`` tokens together, and ``n_prompt`` tokens of a prompt
        after ``prompt_stored``: in one program, or one after the other."""
        try:
            if mixed and n_prompt:
                context = n_stored / n_rows
                return step_cost(self.deployment, n_rows, context, n_prompt, prompt_stored).step_s
            prompt_s = prefill_s(self.deployment, n_prompt, prompt_stored) if n_prompt else 0.0
        except UserError:
            return None
        decode_s = self.step_s(n_rows, n_stored / n_rows, 1)
        return None if decode_s is None else decode_s + prompt_s

    def by_n_batches(self, n_rows: int, context: float, numbers: Sequence[int]) -> Mapping[int, float] | None:
        """Seconds of a step by how many staggered batches; None where not all of them have a price."""
        found = {n: self.step_s(n_rows, context, n) for n in numbers}
        known = {n: seconds for n, seconds in found.items() if seconds is not None}
        return known if len(known) == len(found) else None

    def slices_s(self, n_rows: int, n_batches: int) -> float | None:
        """Of a step, what is left where nothing is stored; of staggered batches what the model worker is at,
        without waiting."""
        if n_batches == 1:
            return self.step_s(n_rows, 0, 1, 1.0)
        cost = self._cost(n_rows, 0, n_batches, 0.0)
        return None if cost is None else cost.model_busy_s + cost.exchange_s

    @cached_property
    def speeds(self) -> Speeds | None:
        """For `Balance`, as differences of steps; of pools that are not one host's cores."""
        few, many = (
            (self._cost(n, 0, 1, 0.0), self._cost(n, 0, 1, 1.0), n) for n in (_FEW, _MANY)
        )  # split, all on the model worker
        there, here = self._cost(_FEW, _TOKENS, 1, 0.0), self._cost(_FEW, _TOKENS, 1, 1.0)
        if few[0] is None or few[1] is None or many[0] is None or many[1] is None or not there or not here:
            return None
        n_tokens = _FEW * _TOKENS
        of_few, of_many = few[0].step_s - few[1].step_s, many[0].step_s - many[1].step_s
        row_s = max(0.0, (of_many - of_few) / (_MANY - _FEW))
        return Speeds(
            local_s=(here.step_s - few[1].step_s) / n_tokens,
            remote_s=(there.attention_busy_s - few[0].attention_busy_s) / n_tokens,
            exchange_s=max(0.0, of_few - _FEW * row_s),
            row_s=row_s,
        )

    def _cost(self, n_rows: int, context: float, n_batches: int, share: float | None) -> StepCost | None:
        return _step(self.deployment, n_rows, context, n_batches, share)


@lru_cache(1 << 12)
def _step(
    setup: Deployment, n_rows: int, context: float, n_batches: int, share: float | None
) -> StepCost | None:
    share = setup.local_share if share is None else share
    try:
        return step_cost(replace(setup, n_batches=n_batches, local_share=share), n_rows, context)
    except UserError:
        return None


def _deployment(
    place: ModelPlace, model: CausalLM, known: DeviceCalibration, split: bool, sizes: Mapping[str, Any]
) -> Deployment:
    group, config = place.group, model.config
    assert config is not None
    if group is None:
        if split:
            raise UserError("both workers are one device's, and take turns")
        n = len(place.sharing) or 1
        return Deployment(
            config, known.terms, n_model=n, tensor_parallel=n, model_link=known.in_process, **sizes
        )
    from jaxlamina.ranks.cluster_layout import local_share_of, q_first_of

    cluster = group.cluster
    if not cluster.is_one_platform:
        raise UserError("the other pool's devices are not known here")
    n, shards = cluster.n_model, cluster.tensor_parallel
    if cluster.n_attention == 0:
        sums = known.link(group.link_name) if shards > 1 else None
        how = {"pipeline_parallel": cluster.pipeline_parallel, **sizes}
        return Deployment(config, known.terms, n_model=n, tensor_parallel=shards, model_link=sums, **how)
    partition: Any = place.partition
    share = local_share_of(cluster, place.partition, model.kv_heads)
    return Deployment(
        config,
        known.terms,
        known.terms,
        known.link(group.link_name),
        n_model=n,
        n_attention=cluster.n_attention,
        tensor_parallel=shards,
        partition=partition,
        local_share=0.0 if isinstance(share, str) else share,
        mode="fixed" if cluster.pipelining_mode == "fixed" else "rotational",
        mini_batches=cluster.mini_batches,
        pipeline_parallel=cluster.pipeline_parallel,
        q_first=q_first_of(cluster, group.transport),
        **sizes,
    )


def _element_bytes(specs: Sequence[AttentionSpec]) -> float:
    """Of one element of KV, scales and all."""
    n_elements = sum(2 * spec.n_kv_heads * spec.head_dim for spec in specs)
    return sum(spec.slot_bytes for spec in specs) / n_elements
