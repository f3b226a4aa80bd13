"""What a planner is asked: a model, a load, devices with their prices, what joins them, and limits.

Pure; knows no device at hand, no file and no terminal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.models.config import ModelConfig
from jaxlamina.planner import roofline
from jaxlamina.planner.costs import Deployment, LinkTerms, Terms, prefill_s
from jaxlamina.planner.failures import FailureRate
from jaxlamina.planner.workload import Workload

MOST_IN_HOST = 8  # devices, between which products are summed


@dataclass(frozen=True)
class Device:
    """A kind of device, what one costs (None: not known), and what joins two of them in a host (None: not
    known, so that they cannot share out a model); ``in_process``: by which those of one process sum, None: as
    in a host. ``origin``: where the terms are from."""

    terms: Terms
    usd_h: float | None = None
    in_host: LinkTerms | None = None
    origin: str = ""
    in_process: LinkTerms | None = None

    @property
    def name(self) -> str:
        return self.terms.hardware.name

    def sums(self, as_run: bool) -> LinkTerms | None:
        """By which several share out an unsplit model: as this runtime has XLA sum, or at their best."""
        return (self.in_process if as_run else None) or self.in_host


@dataclass(frozen=True)
class Question:
    """What is asked for. ``budget_usd_h``: at most so much, and the best is the most tokens for the money.
    ``counts``: at most so many devices, by name; without a budget the best is the most tokens a second.

    ``most_requests``: never more at once, over all copies. ``ratio``: only plans with so many attention
    workers for each model worker. ``memory`` None: there is nothing to split onto.
    ``failures``: tokens are those of the time in which instances write.
    ``as_run``: unsplit models that devices share out sum as this runtime has XLA sum, and not at their best.
    """

    config: ModelConfig
    workload: Workload
    compute: Device
    memory: Device | None
    link: LinkTerms
    budget_usd_h: float | None = None
    counts: Mapping[str, int] | None = None
    slo_s: float | None = None
    most_requests: int | None = None
    with_prefill: bool = False
    ratio: float | None = None
    failures: FailureRate | None = None
    as_run: bool = False

    def __post_init__(self) -> None:
        if self.budget_usd_h is None and self.counts is None:
            raise UserError("say what there is: a budget, or devices")
        if self.budget_usd_h is not None:
            for device in self.devices:
                if device.usd_h is None:
                    raise UserError(f"{device.name}: its price is not known, which a budget needs")

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        memory = [] if self.memory is None or self.memory.name == self.compute.name else [self.memory]
        return (self.compute, *memory)

    @cached_property
    def instances(self) -> dict[Hashable, Any]:
        """What `jaxlamina.planner.candidates` knows of instances by their devices."""
        return {}

    def at_memory_price(self, usd_h: float) -> Question:
        """The same with another price of a memory device."""
        assert self.memory is not None
        return replace(self, memory=replace(self.memory, usd_h=usd_h))

    @property
    def is_priced(self) -> bool:
        """Whether the best is by money."""
        return self.budget_usd_h is not None

    def prompt_s(self, setup: Deployment, n_shards: int) -> float:
        """A prompt's mean time on so many of the setup's compute devices."""
        key = setup.compute.hardware.name, n_shards, setup.model_link
        if key not in self._prompts_s:
            alone = unsplit(self.config, setup.compute, setup.model_link, n_shards)
            self._prompts_s[key] = _mean_prefill_s(alone, self.workload.prompts)
        return self._prompts_s[key]

    @cached_property
    def _prompts_s(self) -> dict[tuple[str, int, LinkTerms | None], float]:
        return {}

    @cached_property
    def weight_bytes(self) -> float:
        return roofline.ELEMENT_BYTES * roofline.n_params(self.config)


@lru_cache(256)
def _mean_prefill_s(alone: Deployment, prompts: tuple[float, ...]) -> float:
    times_s = [prefill_s(alone, max(1, round(n))) for n in prompts]
    return sum(times_s) / len(times_s)


def unsplit(config: ModelConfig, terms: Terms, in_host: LinkTerms | None, n_shards: int = 1) -> Deployment:
    """A model whose weights so many devices of a host share out."""
    return Deployment(config, terms, n_model=n_shards, tensor_parallel=n_shards, model_link=in_host)
