"""Predicted steps beside measured ones: errors, leave-one-out, and how far measurements of one step are from
each other. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxlamina.planner.calibration import DeviceCalibration
from jaxlamina.planner.fit import Evidence, Fitted, fit
from jaxlamina.planner.hardware import Hardware
from jaxlamina.planner.points import MeasuredPoints, StepPoint

MEDIAN_AIM, WORST_AIM = 0.025, 0.10
LOSS_AIM = 0.03
"""What a chosen layout may take longer than the best one."""


@dataclass(frozen=True)
class Predicted:
    """``was_fitted``: the terms were calibrated on this point, among others."""

    point: StepPoint
    ms: float
    was_fitted: bool

    @property
    def error(self) -> float:
        """Relative; above 0: predicted to take longer than it did."""
        return self.ms / self.point.measured_ms - 1

    @property
    def is_held_out(self) -> bool:
        """Whether it is one of those that the aims are about."""
        return not self.was_fitted and not self.point.left_out


@dataclass(frozen=True)
class Errors:
    """Of several points, sizes of relative errors."""

    name: str
    n: int
    median: float
    worst: float

    @classmethod
    def of(cls, name: str, found: Sequence[Predicted]) -> Errors:
        sizes = [abs(one.error) for one in found]
        return cls(name, len(sizes), statistics.median(sizes), max(sizes))

    @property
    def met(self) -> bool:
        return self.median <= MEDIAN_AIM and self.worst <= WORST_AIM


@dataclass(frozen=True)
class Repeated:
    """One step that several tables have. ``apart``: the longest over the shortest, less 1."""

    name: str
    ms: tuple[float, ...]

    @property
    def apart(self) -> float:
        return max(self.ms) / min(self.ms) - 1


@dataclass(frozen=True)
class Ranking:
    """Layouts of one model, batch and context on so many devices: (name, measured ms, predicted ms) each."""

    name: str
    layouts: tuple[tuple[str, float, float], ...]

    @property
    def chosen(self) -> tuple[str, float, float]:
        """What the planner would take: the layout that is predicted to be fastest."""
        return min(self.layouts, key=lambda one: one[2])

    @property
    def best(self) -> tuple[str, float, float]:
        return min(self.layouts, key=lambda one: one[1])

    @property
    def loss(self) -> float:
        """How much longer than the best measured one the chosen one was measured to take, relative."""
        return self.chosen[1] / self.best[1] - 1

    @property
    def agrees(self) -> bool:
        return self.loss <= LOSS_AIM


def rankings(found: Sequence[Predicted], with_left_out: bool = False) -> list[Ranking]:
    """Of each (model, batch, context) with measurements of two or more layouts on the same number of devices,
    messages going the same way. Unsplit copies that share out the requests are a layout, too, where a step of
    one of them was measured. Measured several times: the median."""
    counted = [one for one in found if with_left_out or not one.point.left_out]
    counted = [one for one in counted if one.point.device == "h200"]
    alone = [one for one in counted if one.point.dop is None and one.point.tensor_parallel == 1]
    split = [one for one in counted if one.point.dop is not None or one.point.tensor_parallel > 1]
    cases: dict[tuple[Any, ...], dict[str, list[Predicted]]] = {}
    for one in split:
        point = one.point
        key = (*_case(point), point.rows, point.n_devices, point.transport)
        cases.setdefault(key, {}).setdefault(_layout(point), []).append(one)
    for (*case, rows, n, _), layouts in cases.items():
        copies = [one for one in alone if _case(one.point) == tuple(case) and n * one.point.rows == rows]
        if copies:
            layouts[f"{n} unsplit copies"] = copies
    return [
        Ranking(
            f"{model}, B {rows} x {context}{f', {chunk} prompt tokens' if chunk else ''}, {n} GPUs, {way}",
            tuple((name, _median(each), each[0].ms) for name, each in layouts.items()),
        )
        for (model, context, chunk, _, rows, n, way), layouts in cases.items()
        if len(layouts) > 1
    ]


def _case(point: StepPoint) -> tuple[Any, ...]:
    return point.model_name, point.context, point.chunk, point.chunk_stored


def _layout(point: StepPoint) -> str:
    share = f", x = {point.share:.3g}" if 1e-3 < point.share < 1 else ""
    dop = "" if point.dop is None else "DOP ({}, {}), ".format(*point.dop)
    batches = f", {point.n_batches} batches" if point.n_batches > 1 else ""
    return f"{dop}{point.layout}{share}{batches}"


def _median(found: Sequence[Predicted]) -> float:
    return statistics.median(one.point.measured_ms for one in found)


def evidence_of(measured: MeasuredPoints, device: str = "h200") -> Evidence:
    """What the calibration of the package is fitted to."""
    known = measured.kernels, measured.products, measured.exchanges
    return Evidence(Hardware.load(device), measured.calibrating, *known)


def predicted(measured: MeasuredPoints, calibration: DeviceCalibration) -> list[Predicted]:
    """All points. Those of another device than the calibration's by its scaled terms."""
    fitted = {id(point) for point in measured.used}
    by_device: dict[str, DeviceCalibration] = {}
    found = []
    for point in measured.steps:
        if point.device not in by_device:
            hardware = Hardware.load(point.device)
            same = hardware == calibration.terms.hardware
            by_device[point.device] = calibration if same else calibration.scaled(hardware)
        here = by_device[point.device]
        if point.dop is None or point.share == 1 or point.transport in here.links:
            step_s = point.predicted(here.terms, here.links).step_s
            found.append(Predicted(point, 1e3 * step_s, id(point) in fitted))
    return found


def leave_one_out(
    measured: MeasuredPoints,
    calibration: DeviceCalibration,
    group_of: Callable[[StepPoint], str],
    on_progress: Callable[[str], object] = lambda _: None,
) -> list[Errors]:
    """Of each group the errors of all its counted points by terms that were fitted to the calibrating points
    of the others. A group whose link no other group has cannot be predicted so, and is left out."""
    evidence, found = evidence_of(measured), []
    start = Fitted(calibration.terms, calibration.links)
    for name in dict.fromkeys(group_of(point) for point in measured.counted):
        on_progress(f"without {name}")
        others = replace(evidence, steps=[p for p in evidence.steps if group_of(p) != name])
        terms = fit(others, start)
        known = DeviceCalibration(terms.terms, terms.links, "", {}, "")
        mine = tuple(point for point in measured.counted if group_of(point) == name)
        group = predicted(replace(measured, steps=mine), known)
        if group:
            found.append(Errors.of(name, group))
    return found


def repeated(measured: MeasuredPoints) -> list[Repeated]:
    """Steps of which several tables have a counted measurement, which host whichever."""
    groups: dict[str, list[float]] = {}
    for point in measured.counted:
        groups.setdefault(str(point), []).append(point.measured_ms)
    return [Repeated(name, tuple(ms)) for name, ms in groups.items() if len(ms) > 1]


def record(found: Sequence[Predicted]) -> list[dict[str, Any]]:
    return [
        {
            "point": str(one.point),
            "table": one.point.table,
            "measured_ms": one.point.measured_ms,
            "predicted_ms": one.ms,
            "error": one.error,
            "calibrated_on": one.was_fitted,
            "left_out": one.point.left_out,
        }
        for one in found
    ]
