"""What a served load would take: the engine's own scheduler, allocator and headroom under a modelled clock.

Knows times of steps by the planner's costs; computes no token and imports no JAX.
"""

from jaxlamina.simulator.compared import Compared, compared
from jaxlamina.simulator.results import SimulatedRun
from jaxlamina.simulator.simulation import Failure, ServingPolicy, gpu_buckets, simulate

__all__ = [
    "Compared",
    "Failure",
    "ServingPolicy",
    "SimulatedRun",
    "compared",
    "gpu_buckets",
    "simulate",
]
