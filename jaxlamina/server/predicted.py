"""What the engine's decode steps take by the planner's cost model, beside what they took.

Asked for by `/metrics` and the dashboard; nothing is computed on a step's way. Knows the engine and the
planner; nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlamina.engine.engine import Engine
from jaxlamina.errors import UserError
from jaxlamina.planner import inputs
from jaxlamina.planner.calibration import DeviceCalibration, for_device
from jaxlamina.planner.costs import Deployment, step_cost
from jaxlamina.workers.spec import AttentionSpec


@dataclass
class StepPredictor:
    """For the engine's thread. ``deployment``: the server's, but for what changes with the load."""

    deployment: Deployment
    _before: tuple[float, int] = (0.0, 0)
    _ratio: float | None = None

    @classmethod
    def of(cls, llm: Any, calibration: Path | None) -> StepPredictor | None:
        """None for what no cost is known of: a user's own function, a model with experts or windows, a device
        that the planner does not know, unless ``calibration`` is of it, and layouts without a price.
        ``UserError`` for a calibration that cannot be read."""
        given = None if calibration is None else DeviceCalibration.load(calibration)
        known = inputs.matching(llm.model_device.device_kind)
        if llm.model.config is None or (known is None and given is None):
            return None
        try:
            terms = for_device(known, given) if known is not None else given
            assert terms is not None
            return cls(_deployment(llm, terms))
        except UserError:
            return None

    def step_s(self, engine: Engine) -> float | None:
        """Of the rows that run now; None while none does."""
        rows = engine.scheduler.decoding()
        if not rows:
            return None
        context = sum(request.n_tokens for request in rows) / len(rows)
        local = engine.executor.local_attention() or {}
        share = self.deployment.local_share if local.get("share") is None else float(local["share"])
        try:
            now = replace(self.deployment, n_batches=engine.executor.latest_n_batches, local_share=share)
            return step_cost(now, len(rows), context).step_s
        except UserError:
            return None

    def step_ms(self, engine: Engine) -> float | None:
        """For the dashboard."""
        step_s = self.step_s(engine)
        return None if step_s is None else 1e3 * step_s

    def numbers(self, engine: Engine) -> dict[str, float]:
        """For `Metrics`: the same, and the mean of the steps since this was called before over it; nothing
        while there is nothing to say."""
        step_s, stats = self.step_s(engine), engine.stats
        if step_s is None:
            return {}
        (seconds, n), self._before = self._before, (stats.decode_s, stats.n_decode_steps)
        if stats.n_decode_steps > n:
            self._ratio = (stats.decode_s - seconds) / (stats.n_decode_steps - n) / step_s
        more = {} if self._ratio is None else {"measured_over_predicted": self._ratio}
        return {"predicted_step_s": step_s} | more


def _deployment(llm: Any, known: DeviceCalibration) -> Deployment:
    config, group, specs = llm.model.config, llm.executor.group, llm.executor.specs
    sizes: dict[str, Any] = {"kv_bytes": _element_bytes(specs), "weight_bytes": np.dtype(llm.dtype).itemsize}
    if group is None:
        if llm.options.split:
            raise UserError("both workers are one device's, and take turns")
        n = llm.options.tensor_parallel
        return Deployment(
            config, known.terms, n_model=n, tensor_parallel=n, model_link=known.in_host, **sizes
        )
    cluster = group.cluster
    if cluster.pipeline_parallel > 1 or cluster.prefill_workers:
        raise UserError("stages and prefill workers have no price")
    partition: Literal["heads", "requests", "tokens"] = llm.place.partition
    return Deployment(
        config,
        known.terms,
        known.terms,
        known.link(group.link_name),
        n_model=cluster.n_model,
        n_attention=cluster.n_attention,
        tensor_parallel=cluster.tensor_parallel,
        partition=partition,
        mode=cluster.pipelining_mode,
        q_first=bool(cluster.q_first),
        **sizes,
    )


def _element_bytes(specs: tuple[AttentionSpec, ...]) -> float:
    """Of one element of KV, scales and all."""
    n_elements = sum(2 * spec.n_kv_heads * spec.head_dim for spec in specs)
    return sum(spec.slot_bytes for spec in specs) / n_elements
