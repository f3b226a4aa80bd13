"""A simulated run beside what a server measured for the same requests. Names are those of `jaxlamina bench
serve`'s results, and so are definitions. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxlamina.planner.traces import AnsweredTrace
from jaxlamina.simulator.results import SimulatedRun

_PERCENTILES = (50, 90, 99)


class Compared(NamedTuple):
    """A number of both."""

    measured: float
    simulated: float

    @property
    def error(self) -> float | None:
        """Simulated over measured, less 1. None beside a measured 0, or nearly so."""
        ratio = self.simulated / self.measured if self.measured else math.inf
        return ratio - 1 if math.isfinite(ratio) else None


def compared(answered: AnsweredTrace, run: SimulatedRun) -> dict[str, Compared]:
    """By name: output tokens a second, and TPOT and TTFT in ms. Without TPOT where no request has two tokens.
    ``run``: of this trace."""
    found = {"output_throughput": Compared(answered.output_per_s, run.output_per_s)}
    for name in ("tpot", "ttft"):
        both = [1e3 * getattr(one, f"{name}_s") for one in (answered, run)]
        if not len(both[0]):
            continue
        found[f"mean_{name}_ms"] = Compared(*(float(values.mean()) for values in both))
        for p in _PERCENTILES:
            found[f"p{p}_{name}_ms"] = Compared(*(float(np.percentile(values, p)) for values in both))
    return found
