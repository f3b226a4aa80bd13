"""What a simulated run gave: times of requests, the batch over time, and how busy pools were. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxlamina.planner.costs import Deployment, StepCost
from jaxlamina.planner.traces import tpot_s

SHARES = (50, 99)


class OverTime(NamedTuple):
    """From each moment (seconds) until the next: requests that decode, slots in use, requests that wait."""

    at_s: Float[np.ndarray, " N"]
    batch: Int[np.ndarray, " N"]
    slots: Int[np.ndarray, " N"]
    waiting: Int[np.ndarray, " N"]

    def mean(self, name: str, until_s: float, from_s: float = 0.0) -> float:
        """Over time."""
        spans = np.diff(np.clip(self.at_s, from_s, until_s), append=until_s)
        return float((getattr(self, name) * spans).sum() / max(until_s - from_s, 1e-12))


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """Times are seconds after the trace's first arrival, in the trace's order. ``decoding``: seconds of all
    decode steps, and how long pools were busy in them; ``prefill_s``: of steps that computed prompts alone.
    ``down_s``: after failures, until the job was ready; ``kv_return_s``: in which kept KV came back then.
    ``host_s``: in which steps waited for the host, and devices had nothing to do.
    """

    setup: Deployment
    arrival_s: Float[np.ndarray, " R"]
    first_s: Float[np.ndarray, " R"]
    end_s: Float[np.ndarray, " R"]
    n_prompt: Int[np.ndarray, " R"]
    n_output: Int[np.ndarray, " R"]
    n_preemptions: int
    n_decode_steps: int
    n_prompt_steps: int
    n_kv_slots: int
    n_slots_left: int  # in use at the end
    decoding: StepCost
    prefill_s: float
    n_failures: int
    down_s: float
    kv_return_s: float
    host_s: float
    over_time: OverTime

    @property
    def ttft_s(self) -> Float[np.ndarray, " R"]:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> Float[np.ndarray, " M"]:
        return tpot_s(self.end_s - self.first_s, self.n_output)

    @property
    def seconds(self) -> float:
        """Until the last request's end."""
        return float(self.end_s.max())

    @property
    def output_per_s(self) -> float:
        return float(self.n_output.sum()) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return len(self.end_s) / self.seconds

    @property
    def mean_batch(self) -> float:
        """Requests that got a token, per decode step."""
        n_first = len(self.n_output)
        return float(self.n_output.sum() - n_first) / max(1, self.n_decode_steps)

    @property
    def bubbles(self) -> dict[str, float]:
        """By pool: the share of decode steps' time in which its devices compute nothing, waits for the host
        left out."""
        step_s = max(self.decoding.step_s, 1e-300)
        found = {"model": 1 - self.decoding.model_busy_s / step_s}
        if self.setup.is_split:
            found["attention"] = 1 - self.decoding.attention_busy_s / step_s
        return found

    def shares(self, name: str) -> dict[str, float] | None:
        """p50 and p99 of "ttft_s" or "tpot_s"; None without any."""
        values = getattr(self, name)
        if not len(values):
            return None
        found = np.percentile(values, SHARES)
        return {f"p{share}": float(value) for share, value in zip(SHARES, found, strict=True)}

    def to_dict(self) -> dict[str, Any]:
        """All but the times of single requests and the run over time."""
        names = (
            "seconds", "output_per_s", "requests_per_s", "mean_batch", "bubbles", "n_preemptions",
            "n_decode_steps", "n_prompt_steps", "n_kv_slots", "n_slots_left", "prefill_s",
            "n_failures", "down_s", "kv_return_s", "host_s",
        )  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        found |= {"n_requests": len(self.end_s), "decode_s": self.decoding.step_s}
        found |= {"exchange_s": self.decoding.exchange_s}
        found |= {f"mean_{name}": self.over_time.mean(name, self.seconds) for name in ("slots", "waiting")}
        found |= {"most_waiting": int(self.over_time.waiting.max(initial=0))}
        return found | {name: self.shares(name) for name in ("ttft_s", "tpot_s")}
