"""What the engine's decode steps take by the planner's cost model, beside what they took.

Asked for by `/metrics` and the dashboard; nothing is computed on a step's way. Knows the engine and
`jaxlamina.run.modelled`; nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxlamina.engine.engine import Engine
from jaxlamina.run.modelled import ModelledSteps

if TYPE_CHECKING:
    from jaxlamina.llm import LLM


@dataclass
class StepPredictor:
    """For the engine's thread."""

    modelled: ModelledSteps
    _before: tuple[float, int] = (0.0, 0)
    _ratio: float | None = None

    @classmethod
    def of(cls, llm: LLM) -> StepPredictor | None:
        """None for what no cost is known of (`ModelledSteps.of`)."""
        return None if llm.modelled is None else cls(llm.modelled)

    def step_s(self, engine: Engine) -> float | None:
        """Of the rows that run now; None while none does."""
        rows = engine.scheduler.decoding()
        if not rows:
            return None
        context = sum(request.n_tokens for request in rows) / len(rows)
        local = engine.executor.local_attention() or {}
        share = None if local.get("share") is None else float(local["share"])
        return self.modelled.step_s(len(rows), context, engine.executor.latest_n_batches, share)

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
