"""`jaxlamina bench predict`: the planner's cost model beside the steps that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxlamina.bench.flags import AsJson, option
from jaxlamina.bench.report import Columns, Part, dim, progress, table, tell, verdict
from jaxlamina.console.outputs import check_output

if TYPE_CHECKING:
    from jaxlamina.planner.calibration import DeviceCalibration
    from jaxlamina.planner.prediction import Errors, Predicted, Ranking, Repeated

POINTS: Columns = (
    ("step", lambda one: str(one.point), "<"),
    ("host", lambda one: one.point.host, ""),
    ("measured, ms", lambda one: one.point.measured_ms, ".2f"),
    ("predicted, ms", lambda one: one.ms, ".2f"),
    ("error", lambda one: one.error, "+.1%"),
    ("calibrated on", lambda one: "yes" if one.was_fitted else "", "<"),
)
RANKINGS: Columns = (
    ("case", lambda one: one.name, "<"),
    ("layouts", lambda one: len(one.layouts), ""),
    ("predicted to be fastest", lambda one: one.chosen[0], "<"),
    ("measured, ms", lambda one: one.chosen[1], ".2f"),
    ("measured fastest", lambda one: one.best[0] if one.loss else "", "<"),
    ("longer", lambda one: one.loss, ".1%"),
)
ERRORS: Columns = (
    ("points", lambda errors: errors.name, "<"),
    ("number", lambda errors: errors.n, ""),
    ("median error", lambda errors: errors.median, ".1%"),
    ("worst", lambda errors: errors.worst, ".1%"),
)


def predict_command(
    calibration: Annotated[
        Path | None, option("A file of `bench calibrate`. Default: the package's, of an H200.")
    ] = None,
    leave_one_out: Annotated[
        bool, option("Also fit anew without each model, and without each kind of layout.")
    ] = True,
    out: Annotated[
        Path | None,
        option("First fit anew to the package's points, and write the calibration into this file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the planner's predictions with all decode steps that were measured on GPUs and are in the docs.

    Nothing is measured, and no device is needed. Some of the points calibrated the terms: tables
    say which, and how many."""
    from jaxlamina.bench import machine
    from jaxlamina.planner import prediction
    from jaxlamina.planner.points import measured

    known = measured()
    where = machine.describe(("numpy", "scipy"))
    with progress() as on_progress:
        used = _calibration(calibration, out, on_progress)
        found = prediction.predicted(known, used)
        groups: dict[str, list[Errors]] = {}
        if leave_one_out:
            groups = {
                "model": prediction.leave_one_out(known, used, lambda p: p.model_name, on_progress),
                "layout": prediction.leave_one_out(known, used, lambda p: p.layout, on_progress),
            }
    repeated = prediction.repeated(known)
    summary = list(_summary(found))
    ranked = {"counted": prediction.rankings(found), "all": prediction.rankings(found, with_left_out=True)}
    record = {
        "calibration": used.to_dict(),
        "points": prediction.record(found),
        "errors": [asdict(errors) for errors in summary],
        "leave_one_out": {name: [asdict(errors) for errors in each] for name, each in groups.items()},
        "repeated": [{"step": one.name, "ms": one.ms, "apart": one.apart} for one in repeated],
        "rankings": {
            name: [
                {
                    "case": one.name,
                    "layouts": one.layouts,
                    "chosen": one.chosen[0],
                    "best": one.best[0],
                    "loss": one.loss,
                }
                for one in each
            ]
            for name, each in ranked.items()
        },
    }
    tell("predict", record, where, _parts(found, summary, groups, repeated, ranked, used), as_json=as_json)


def _calibration(given: Path | None, out: Path | None, on_progress: object) -> DeviceCalibration:
    from jaxlamina.errors import UserError
    from jaxlamina.planner import calibration, prediction
    from jaxlamina.planner.fit import fit, sums
    from jaxlamina.planner.points import measured

    if out is None:
        return (
            calibration.DeviceCalibration.load(given) if given is not None else calibration.for_device("h200")
        )
    if given is not None:
        raise UserError("--out writes what is fitted to the package's points: leave --calibration out")
    check_output(out, "--out")
    assert callable(on_progress)
    on_progress("fitting")
    known = measured()
    found = sums(known.calibrating_sums, fit(prediction.evidence_of(known)))
    dates = sorted(point.date for point in known.used)
    versions = {"jax": "0.11.2", "python": "3.12.3"}
    points = tuple(dict.fromkeys(f"{point.table}: {point}" for point in known.used))
    when = f"{dates[0]} to {dates[-1]}"
    made = calibration.DeviceCalibration(found.terms, found.links, "NVIDIA H200", versions, when, points)
    made.save(out)
    return made


def _summary(found: Sequence[Predicted]) -> Iterator[Errors]:
    from jaxlamina.planner.prediction import Errors

    groups = {
        "held out": [one for one in found if one.is_held_out],
        "calibrated on": [one for one in found if one.was_fitted],
        "shown, not counted": [one for one in found if one.point.left_out],
    }
    yield from (Errors.of(name, group) for name, group in groups.items() if group)


def _parts(
    found: Sequence[Predicted],
    summary: Sequence[Errors],
    groups: dict[str, list[Errors]],
    repeated: Sequence[Repeated],
    ranked: dict[str, list[Ranking]],
    used: DeviceCalibration,
) -> Iterator[Part]:
    from jaxlamina.planner.prediction import LOSS_AIM, MEDIAN_AIM, WORST_AIM

    terms = used.terms
    scaled = f", scaled from {terms.scaled_from}" if terms.scaled_from else ""
    yield f"terms of {terms.hardware.name}{scaled}, measured {used.date}"
    for name in dict.fromkeys(one.point.table for one in found):
        mine = [one for one in found if one.point.table == name]
        [why] = {one.point.left_out for one in mine} if len({o.point.left_out for o in mine}) == 1 else {""}
        yield table(mine, POINTS, f"{name}, {mine[0].point.date}" + (f"\nnot counted: {why}" if why else ""))
    yield table(summary, ERRORS, "errors")
    held_out = summary[0]
    yield f"median at most {MEDIAN_AIM:.1%}, {verdict(held_out.median <= MEDIAN_AIM)}"
    yield f"worst at most {WORST_AIM:.0%}, {verdict(held_out.worst <= WORST_AIM)}"
    for name, each in groups.items():
        yield table(each, ERRORS, f"fitted without this {name}, all its points")
    yield table(ranked["counted"], RANKINGS, "which of the measured layouts is taken, counted points")
    for kind, cases in ranked.items():
        within, best = sum(one.agrees for one in cases), sum(not one.loss for one in cases)
        yield (
            f"{kind} points: {len(cases)} cases with two layouts or more on as many GPUs; the one that is "
            f"predicted to be fastest is it in {best}, and within {LOSS_AIM:.0%} of it in {within}"
        )
    rows = sorted(repeated, key=lambda one: -one.apart)
    columns: Columns = (
        ("one step in several tables", lambda one: one.name, "<"),
        ("ms", lambda one: ", ".join(f"{ms:.2f}" for ms in one.ms), "<"),
        ("longest / shortest - 1", lambda one: one.apart, ".1%"),
    )
    yield table(rows, columns, "how far measurements are from each other")
    yield dim("host: a number for each machine that was measured on")
