"""Terms and links from measurements: least squares of relative errors, within bounds. Deterministic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxlamina.planner.hardware import Hardware
from jaxlamina.planner.points import ExchangePoint, KernelPoint, ProductPoint, StepPoint
from jaxlamina.planner.terms import LinkTerms, Terms

_PULL = 0.001  # to where numbers began, of their logarithms: for those that the evidence says nothing of
_SCALE = 0.02  # of relative errors: from here on they count less than squared
_TERMS: dict[str, tuple[float, float, float]] = {  # (least, start, most); rates as shares of the data sheet's
    "product_bytes_s": (0.1, 0.9, 1.5),
    "product_flop_s": (0.05, 0.7, 1.5),
    "attention_bytes_s": (0.1, 0.9, 1.5),
    "product_knee": (1.0, 2.0, 10.0),
    "product_fixed_s": (1e-7, 5e-6, 1e-3),
    "slice_fixed_s": (1e-7, 2e-5, 1e-3),
    "attention_fixed_s": (1e-7, 1e-5, 1e-3),
    "step_fixed_s": (1e-7, 1e-4, 1e-2),
    "attention_step_s": (1e-7, 4e-5, 1e-2),
    "combine_fixed_s": (1e-7, 5e-6, 1e-3),
    "attention_row_bytes": (32.0, 256.0, 2048.0),
    "attention_token_bytes": (1.0, 32.0, 512.0),
}
_LINK: dict[str, tuple[float, float, float]] = {
    "fixed_s": (1e-7, 1e-5, 1e-2),
    "bytes_s": (1e8, 2e11, 5e12),
}


@dataclass(frozen=True)
class Fitted:
    terms: Terms
    links: Mapping[str, LinkTerms]


@dataclass(frozen=True)
class Evidence:
    """What terms are fitted to. ``rendezvous``: of the links that the measurements name, those whose two ends
    meet."""

    hardware: Hardware
    steps: Sequence[StepPoint]
    kernels: Sequence[KernelPoint] = ()
    products: Sequence[ProductPoint] = ()
    exchanges: Sequence[ExchangePoint] = ()
    product_tile: int = 64
    rendezvous: frozenset[str] = field(default=frozenset({"nccl", "gloo", "mpi"}))

    @property
    def links(self) -> list[str]:
        used = {point.transport for point in self.steps if point.dop is not None and point.share < 1}
        return sorted(used | {point.link for point in self.exchanges})


def fit(evidence: Evidence, start: Fitted | None = None) -> Fitted:
    """Terms that the evidence says nothing of stay where they began, at ``start`` if there is one. Logarithms
    are what is searched, so that a number may go anywhere between its bounds."""
    from scipy.optimize import least_squares

    bounds = [*_TERMS.values(), *(bound for _ in evidence.links for bound in _LINK.values())]
    low, usual, high = (np.log([bound[i] for bound in bounds]) for i in range(3))
    first = usual if start is None else np.clip(_logs(evidence, start), low, high)

    def errors(logs: np.ndarray) -> np.ndarray:
        found = _errors(evidence, _fitted(evidence, np.exp(logs)))
        return np.array([*found, *(_PULL * (logs - usual))])

    how: dict[str, Any] = {"loss": "soft_l1", "f_scale": _SCALE, "xtol": 1e-6, "ftol": 1e-7}
    return _fitted(evidence, np.exp(least_squares(errors, first, bounds=(low, high), **how).x))


def sums(points: Sequence[StepPoint], found: Fitted) -> Fitted:
    """With a link for XLA's sums, fitted to ``points`` of sharded models; all else stays."""
    from scipy.optimize import least_squares

    evidence = Evidence(found.terms.hardware, points)

    def fitted(logs: np.ndarray) -> Fitted:
        fixed_s, bytes_s = map(float, np.exp(logs))
        return Fitted(found.terms, {**found.links, "sharded": LinkTerms(fixed_s, bytes_s)})

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.array(_errors(evidence, fitted(logs)))

    first, low, high = (np.log([bound[i] for bound in _LINK.values()]) for i in (1, 0, 2))
    return fitted(least_squares(errors, first, bounds=(low, high), xtol=1e-6, ftol=1e-7).x)


def _logs(evidence: Evidence, found: Fitted) -> np.ndarray:
    """What `_fitted` makes of these, the other way round."""
    whole = _whole(evidence)
    terms = [getattr(found.terms, name) / whole.get(name, 1.0) for name in _TERMS]
    usual = LinkTerms(_LINK["fixed_s"][1], _LINK["bytes_s"][1])
    links = [x for name in evidence.links for x in found.links.get(name, usual)[:2]]
    return np.log(np.maximum([*terms, *links], 1e-12))


def _whole(evidence: Evidence) -> dict[str, float]:
    """What rates are shares of."""
    flop_s, bytes_s = evidence.hardware.rates()
    return {"product_bytes_s": bytes_s, "product_flop_s": flop_s, "attention_bytes_s": bytes_s}


def _fitted(evidence: Evidence, numbers: np.ndarray) -> Fitted:
    whole = _whole(evidence)
    terms: dict[str, Any] = {
        name: float(x) * whole.get(name, 1.0) for name, x in zip(_TERMS, numbers, strict=False)
    }
    links, rest = {}, numbers[len(_TERMS) :].reshape(-1, len(_LINK))
    for name, (fixed_s, link_bytes_s) in zip(evidence.links, rest, strict=True):
        links[name] = LinkTerms(float(fixed_s), float(link_bytes_s), name in evidence.rendezvous)
    return Fitted(Terms(evidence.hardware, product_tile=evidence.product_tile, **terms), links)


def _errors(evidence: Evidence, found: Fitted) -> list[float]:
    """Relative errors, as logarithms."""
    pairs = [
        (1e3 * point.predicted(found.terms, found.links).step_s, point.measured_ms)
        for point in evidence.steps
    ]
    pairs += [(point.predicted_us(found.terms), point.us) for point in evidence.kernels]
    pairs += [(point.predicted_us(found.terms), point.us) for point in evidence.products]
    pairs += [(point.predicted_us(found.links), point.us) for point in evidence.exchanges]
    return [float(np.log(predicted / was)) for predicted, was in pairs]
