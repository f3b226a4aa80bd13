"""`jaxlamina bench choice`: its options, and how its results look."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxlamina.bench.flags import AsJson, Config, DType, Layers, RoundsOfEach, WayS, option, shape_of
from jaxlamina.bench.report import Columns, Part, dim, left_out, progress, table, tell
from jaxlamina.errors import UserError
from jaxlamina.process.gpus import n_gpus

if TYPE_CHECKING:
    from jaxlamina.bench.choice_bench import Candidate, ChoiceCase, ChoiceReport
    from jaxlamina.planner.question import Question

_NO_SLO = "none"


def choice_command(
    devices: Annotated[
        str, option("What this machine has, as `jaxlamina plan` takes it, of one kind: h200=4.")
    ],
    config: Config = "llama-3-8b",
    layers: Layers = None,
    dtype: DType = "bfloat16",
    traces: Annotated[
        str, option("Traces, separated by commas: azure-conversation, azure-code, kimi-conversation.")
    ] = "azure-conversation,azure-code,kimi-conversation",
    slos: Annotated[
        str, option("Limits of TPOT in ms, separated by commas; none: without. Each with each trace.")
    ] = _NO_SLO,
    batch: Annotated[int | None, option("Requests at once, at most.", min=1)] = None,
    calibration: Annotated[
        Path | None, option("A file of `bench calibrate`, as `jaxlamina plan` takes it.")
    ] = None,
    split_plans: Annotated[
        int, option("Measure the best split plans of so many different pools.", min=0)
    ] = 1,
    within: Annotated[
        float,
        option(
            "Leave out what is predicted to be worse than the first choice by more than this.", min=0, max=1
        ),
    ] = 0.3,
    rounds: RoundsOfEach = 3,
    way_s: WayS = 900.0,
    as_json: AsJson = False,
) -> None:
    """Whether the planner takes the layout that is fastest here: all unsplit plans for this machine's devices
    and the best split ones, each measured at its own batch. Random weights, equal lengths."""
    shape = shape_of(config, layers)
    if isinstance(shape, str):
        raise UserError("the planner knows no costs of a model of your own: name a shape")
    from jaxlamina.bench import choice_bench, machine
    from jaxlamina.bench.step_bench import dtype_of

    dtype_of(dtype)
    n_there = n_gpus(os.environ)
    on_gpus = n_there > 0
    questions, n = _questions(shape, devices, traces, slos, batch, calibration)
    if on_gpus and n > n_there:
        raise UserError(f"--devices {devices}: there are {n_there}")
    words = ["--config", config, "--dtype", dtype, "--rounds", str(rounds)]
    words += [] if layers is None else ["--layers", str(layers)]
    where = machine.describe()
    with progress() as on_progress:
        on_progress("planning")
        cases, alone = [], dict[str, str]()
        for name, question in questions.items():
            try:
                cases.append(choice_bench.case_of(name, question, split_plans, within))
            except UserError as error:
                alone[name] = str(error)
        found = choice_bench.measure(
            cases,
            words,
            n_devices=n,
            on_gpus=on_gpus,
            way_s=way_s,
            left_out=alone,
            on_progress=on_progress,
        )
    record: dict[str, Any] = {"model": config, "n_layers": layers, "dtype": dtype, "devices": devices}
    parts = _parts(found, f"{config}, {dtype}, {devices}")
    tell("choice", record | {"on_gpus": on_gpus} | found.to_dict(), where, parts, as_json=as_json)
    if not any(case.measured for case in found.cases):
        raise typer.Exit(1)


def _questions(
    shape: Any, devices: str, trace: str, slo: str, batch: int | None, calibration: Path | None
) -> tuple[dict[str, Question], int]:
    """By their names, and how many devices there are."""
    from jaxlamina.planner import inputs
    from jaxlamina.planner.calibration import DeviceCalibration
    from jaxlamina.planner.question import Question

    counts = inputs.counts(devices)
    if len(counts) != 1:
        raise UserError(f"--devices {devices!r} must be of one kind, such as h200=4: this machine's")
    [(name, n)] = counts.items()
    if n < 2:
        raise UserError("with one device there is nothing to choose")
    given = None if calibration is None else DeviceCalibration.load(calibration)
    one = inputs.device(name, given=given)
    link = inputs.link_between(one, one, same_host=True).link
    limits = {
        text.strip(): None if text.strip() == _NO_SLO else inputs.tpot_s(text.strip(), f"--slos {slo}")
        for text in slo.split(",")
    }
    found = {}
    for of in (text.strip() for text in trace.split(",")):
        load = inputs.workload(of)
        for text, limit in limits.items():
            case = of if limit is None else f"{of}, TPOT {text} ms"
            found[case] = Question(
                shape,
                load,
                one,
                one,
                link,
                counts={one.name: n},
                slo_s=limit,
                most_requests=batch,
                as_run=True,
            )
    return found, n


def _parts(found: ChoiceReport, title: str) -> Iterator[Part]:
    from jaxlamina.planner.prediction import LOSS_AIM

    rows = [(case, one) for case in found.cases for one in case.candidates]
    columns: Columns = (
        ("case", lambda row: row[0].name, "<"),
        ("plan", lambda row: row[1].name, "<"),
        ("requests each", lambda row: row[1].step.batch, ""),
        ("context", lambda row: row[1].step.context, ","),
        ("predicted, ms", lambda row: row[1].predicted_ms, ".2f"),
        ("measured, ms", lambda row: row[1].measured_ms, ".2f"),
        ("error", lambda row: row[1].error, "+.1%"),
        ("predicted tok/s", lambda row: row[1].predicted_tokens_s, ",.0f"),
        ("measured tok/s", lambda row: row[1].measured_tokens_s, ",.0f"),
        ("", _mark, "<"),
    )
    yield table(rows, columns, title=title, section=lambda row: row[0].name)
    several = [(case, one, way) for case, one in rows if len(one.ways_ms) > 1 for way in one.ways_ms]
    if several:
        of_ways: Columns = (
            ("case", lambda row: row[0].name, "<"),
            ("plan", lambda row: row[1].name, "<"),
            ("way", lambda row: row[2], "<"),
            ("measured, ms", lambda row: row[1].ways_ms[row[2]], ".2f"),
        )
        yield table(
            several,
            of_ways,
            title="Of plans with two ways the faster counts",
            section=lambda row: row[0].name,
        )
    counted = [case for case in found.cases if case.is_counted]
    for case in counted:
        yield f"{case.name}: the first choice, {case.chosen.name}, is {_said_of(case)}"
    n_agree = sum(case.agrees for case in counted)
    yield (
        f"the first choice meets the limit, and is the measured best or within {LOSS_AIM:.0%} of it, in "
        f"{n_agree} of {len(counted)} cases"
    )
    lacking = [case.chosen.measured_ms is None for case in found.cases if not case.is_counted]
    for of_chosen, what in ((True, "their first choice"), (False, "no other plan")):
        if n := lacking.count(of_chosen):
            yield dim(f"cases that are not counted: {n}, of which {what} was{' not' * of_chosen} measured")
    yield from left_out(found.left_out)


def _mark(row: tuple[ChoiceCase, Candidate]) -> str:
    case, one = row
    words = ["first choice"] if one is case.chosen else []
    words += ["best"] if one is case.best else []
    words += ["above the limit"] if case.is_late(one) else []
    return ", ".join(words)


def _said_of(case: ChoiceCase) -> str:
    """Of the first choice of a case that is counted."""
    best = case.best
    if case.loss is None:
        return "above the limit, " + ("as all are" if best is None else f"and {best.name} is not")
    assert best is not None
    return "the best" if best is case.chosen else f"{case.loss:.1%} below {best.name}"
