"""What failures of devices cost: how often a job ends, and how long until it writes again.

Whoever dies, the runtime starts its whole job again (docs/reliability.md). So a job of n devices fails n
times as often as one. Each failure costs the time until it is noticed, the time until the job is ready again,
and the time until its KV is back. Failures are independent and come at a constant rate. Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from jaxlamina.errors import UserError
from jaxlamina.options import KV_RETURN_GB_S, NOTICE_S, START_S
from jaxlamina.planner import roofline
from jaxlamina.planner.costs import Deployment

MOST_S = 1e12  # of any time, which is femtoseconds for the simulator


@dataclass(frozen=True)
class FailureRate:
    """``mtbf_hours``: mean time between failures of one device. The job stands still for ``notice_s`` +
    ``start_s`` after a failure; then KV comes back from host memory at ``kv_gb_s`` (GB/s of each device that
    holds some). ``seed``: of random times.

    ``UserError`` for numbers that cannot be.
    """

    mtbf_hours: float
    notice_s: float = NOTICE_S
    start_s: float = START_S
    kv_gb_s: float = KV_RETURN_GB_S
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("mtbf_hours", "kv_gb_s"):
            if not 0 < getattr(self, name) <= MOST_S / 3600:
                raise UserError(
                    f"{name}={getattr(self, name):g} must be above 0 and {MOST_S / 3600:.0e} at most"
                )
        for name in ("notice_s", "start_s"):
            if not 0 <= getattr(self, name) <= MOST_S:
                raise UserError(f"{name}={getattr(self, name):g} must be at least 0 and {MOST_S:.0e} at most")

    @property
    def downtime_s(self) -> float:
        """From a failure until the job is ready, without KV."""
        return self.notice_s + self.start_s

    def every_s(self, n_devices: int, return_s: float = 0.0) -> float:
        """Mean time between failures of a job. ``return_s``: until its KV is back after one. ``UserError``
        where it would hardly ever write."""
        found, recovery_s = 3600 * self.mtbf_hours / n_devices, self.downtime_s + return_s
        if found <= recovery_s:
            kv = f" with KV at kv_return_gb_s={self.kv_gb_s:g}" if return_s else ""
            raise UserError(
                f"mtbf_hours={self.mtbf_hours:g}: a job of {n_devices} device{'s' if n_devices > 1 else ''} "
                f"fails every {found:.3g} s, and starts again{kv} in {recovery_s:.3g} s: take a longer one"
            )
        return found

    def times(self, n_devices: int, return_s: float = 0.0) -> Iterator[tuple[float, int]]:
        """Without end: (seconds, which device) of each failure, in order. ``return_s``: as of `every_s`."""
        drawn, at_s, every_s = random.Random(self.seed), 0.0, self.every_s(n_devices, return_s)
        while True:
            at_s += drawn.expovariate(1 / every_s)
            yield at_s, drawn.randrange(n_devices)

    def return_s(self, setup: Deployment, n_tokens: float) -> float:
        """Until so many tokens' KV is back: every device that holds some copies its part."""
        holds = setup.n_attention if setup.has_pool else 0
        if not setup.has_pool or setup.layout.attends_locally:
            holds += setup.n_model
        n_bytes = n_tokens * roofline.kv_bytes_per_token(setup.config, setup.kv_bytes)
        return n_bytes / (holds * self.kv_gb_s * 1e9)

    def available(self, setup: Deployment, n_prefill: int, n_tokens: float) -> float:
        """The share of time in which a job with so many stored tokens writes: it does if there was no failure
        for as long as a recovery takes, which is e^(-recovery / time between failures)."""
        return_s = self.return_s(setup, n_tokens)
        every_s = self.every_s(setup.n_model + setup.n_attention + n_prefill, return_s)
        return math.exp(-(self.downtime_s + return_s) / every_s)
