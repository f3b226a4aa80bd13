"""Decode steps, kernels and exchanges that were measured and are kept with the package
(`data/measured-steps.json`), each with the table that it is from. What they are compared with, and what terms
are fitted to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jaxlamina.models.config_files import model_config
from jaxlamina.planner.costs import Deployment, StepCost, step_cost
from jaxlamina.planner.terms import LinkTerms, Terms

SPREAD_LIMIT = 0.03
"""Of a point's rounds: the median distance from their median, relative. Above it a point does not repeat
itself, and is not counted."""


@dataclass(frozen=True)
class StepPoint:
    """A decode step of ``rows`` requests with ``context`` stored tokens each, as it was measured, in ms: each
    round, or a median alone. ``dop``: model workers and attention workers; None: unsplit on one device.
    ``left_out``: why it is shown but not counted; empty: it is. ``later``: measured when the package's terms
    were there already, and never fitted to."""

    table: str
    date: str
    device: str
    model: str
    layers: int
    rows: int
    context: int
    ms: tuple[float, ...]
    dop: tuple[int, int] | None = None
    transport: str = "memory"
    partition: Literal["heads", "requests", "tokens"] = "heads"
    share: float = 0.0
    n_batches: int = 1
    q_first: bool = False
    tensor_parallel: int = 1
    chunk: int = 0
    chunk_stored: int = 0
    host: str = ""
    read_tb_s: float | None = None
    left_out: str = ""
    later: bool = False
    element_bytes: int = 2

    @property
    def measured_ms(self) -> float:
        return statistics.median(self.ms)

    @property
    def spread(self) -> float:
        """Of its rounds; 0 where there is a median alone."""
        return statistics.median(abs(x - self.measured_ms) for x in self.ms) / self.measured_ms

    @property
    def model_name(self) -> str:
        """With its layers, where these are not all."""
        whole = model_config(self.model).num_hidden_layers == self.layers
        return self.model if whole else f"{self.model}, {self.layers} layers"

    @property
    def n_devices(self) -> int:
        """Devices that it ran on; one that held no KV and computed nothing is one of them."""
        return self.tensor_parallel if self.dop is None else sum(self.dop)

    @property
    def is_sharded(self) -> bool:
        """Whether devices of one process shared out the model, whose sums are XLA's."""
        return self.dop is None and self.tensor_parallel > 1

    @property
    def layout(self) -> str:
        """What kind of layout it is of, as leave-one-out has them."""
        if self.dop is None:
            return "unsplit" if self.tensor_parallel == 1 else "unsplit, tensor parallel"
        if self.share == 1:
            return "all on the model worker"
        kinds = ["split", *(["q first"] if self.q_first else [])]
        kinds += [] if self.partition == "heads" else [f"by {self.partition}"]
        kinds += ["a share local"] if self.share > 1e-3 else []
        kinds += ["staggered"] if self.n_batches > 1 else []
        kinds += ["tensor parallel"] if self.tensor_parallel > 1 else []
        return ", ".join(kinds)

    def __str__(self) -> str:
        found = [self.model_name, f"B {self.rows} x {self.context}"]
        found += [] if self.dop is None else ["DOP ({}, {})".format(*self.dop)]
        found += [] if self.dop is None or self.share == 1 else [self.transport]
        found += [self.layout]
        found += [f"x = {self.share:.3g}"] if 1e-3 < self.share < 1 else []
        found += [f"{self.n_batches} batches"] if self.n_batches > 1 else []
        found += [f"{self.chunk} prompt tokens"] if self.chunk else []
        return ", ".join(found)

    def setup(self, terms: Terms, links: Mapping[str, LinkTerms]) -> Deployment:
        """The instance that ran it, of devices with these terms."""
        config = _shape(self.model, self.layers)
        sizes: dict[str, Any] = dict.fromkeys(("kv_bytes", "weight_bytes"), self.element_bytes)
        if self.dop is None or self.share == 1:
            n = self.tensor_parallel
            link = links.get("memory")
            if self.is_sharded:
                link = links.get("sharded", link)
            return Deployment(config, terms, n_model=n, tensor_parallel=n, model_link=link, **sizes)
        n_model, n_attention = self.dop
        return Deployment(
            config, terms, terms, links[self.transport], n_model, n_attention, self.tensor_parallel,
            self.partition, self.share, self.n_batches, q_first=self.q_first, **sizes,
        )  # fmt: skip

    def predicted(self, terms: Terms, links: Mapping[str, LinkTerms]) -> StepCost:
        return step_cost(self.setup(terms, links), self.rows, self.context, self.chunk, self.chunk_stored)


@dataclass(frozen=True)
class KernelPoint:
    """One layer's decode attention over ``tokens`` stored tokens. ``planned``: with its plan."""

    table: str
    tokens: int
    kv_heads: int
    head_dim: int
    us: float
    planned: bool = False
    element_bytes: int = 2

    def predicted_us(self, terms: Terms) -> float:
        attended_s = terms.attention_s(self.tokens, self.element_bytes * self.kv_heads * self.head_dim)
        return 1e6 * (float(attended_s) + self.planned * terms.attention_step_s)


@dataclass(frozen=True)
class ProductPoint:
    """``rows`` rows times ``weights`` numbers of matrices, two bytes each, in one kernel."""

    table: str
    rows: int
    weights: int
    us: float

    def predicted_us(self, terms: Terms) -> float:
        return 1e6 * float(terms.product_s(self.weights, self.rows, 2))


@dataclass(frozen=True)
class ExchangePoint:
    """A tensor's way to another rank and back inside a program."""

    bytes: int
    link: str
    us: float

    def predicted_us(self, links: Mapping[str, LinkTerms]) -> float:
        return 2e6 * float(links[self.link].message_s(self.bytes))


@dataclass(frozen=True)
class MeasuredPoints:
    """``calibrating``: every third counted point in the file's order, from the third on: the rule that is
    there before any result. Points that came later are none of them, but for those of XLA's sums: every third
    of these calibrates the sums alone (``calibrating_sums``)."""

    steps: tuple[StepPoint, ...]
    kernels: tuple[KernelPoint, ...]
    products: tuple[ProductPoint, ...]
    exchanges: tuple[ExchangePoint, ...]

    @property
    def counted(self) -> tuple[StepPoint, ...]:
        return tuple(point for point in self.steps if not point.left_out)

    @property
    def calibrating(self) -> tuple[StepPoint, ...]:
        return tuple(point for point in self.counted if not point.later)[2::3]

    @property
    def calibrating_sums(self) -> tuple[StepPoint, ...]:
        return tuple(point for point in self.counted if point.later and point.is_sharded)[2::3]

    @property
    def used(self) -> tuple[StepPoint, ...]:
        """All that the package's calibration was fitted to."""
        return (*self.calibrating, *self.calibrating_sums)


@cache
def measured() -> MeasuredPoints:
    """What comes with the package."""
    found = json.loads((Path(__file__).parent / "data" / "measured-steps.json").read_text(encoding="utf-8"))
    steps = [
        point_of({**found["defaults"], **_fields_of(table), **point})
        for table in found["tables"]
        for point in table["points"]
    ]
    return MeasuredPoints(
        tuple(steps),
        tuple(KernelPoint(**point) for point in found["kernels"]),
        tuple(ProductPoint(**point) for point in found["products"]),
        tuple(ExchangePoint(**point) for point in found["exchanges"]),
    )


def _fields_of(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "points"}


def point_of(fields: dict[str, Any]) -> StepPoint:
    """From its fields in the file; not counted if its rounds are too far apart."""
    fields = dict(fields)
    ms, dop = fields.pop("ms"), fields.pop("dop", None)
    rounds = tuple(ms) if isinstance(ms, list) else (ms,)
    point = StepPoint(ms=rounds, dop=None if dop is None else tuple(dop), **fields)
    if point.spread > SPREAD_LIMIT and not point.left_out:
        return replace(point, left_out=f"its rounds differ by more than {SPREAD_LIMIT:.0%}")
    return point


@cache
def _shape(name: str, n_layers: int) -> Any:
    return model_config(name).with_layers(n_layers)
