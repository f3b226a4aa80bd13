"""`jaxlamina bench simulation`: its options, and how its results look."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from jaxlamina.bench.flags import AsJson, Rounds, option
from jaxlamina.bench.report import Part, dim, progress, table, tell, verdict
from jaxlamina.cli import model_options
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.bench.simulation_bench import SimulationReport

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_SEQS = 8
LIMITS = {"output_per_s": 0.05, "tpot_s": 0.10}
_NAMES = {"output_per_s": "output tok/s", "ttft_s": "TTFT p50 (s)", "tpot_s": "TPOT p50 (s)", "seconds": "s"}


def simulation_command(
    model: model_options.Model = DEFAULT_MODEL,
    num_prompts: Annotated[
        int,
        option(
            "Requests: the first of the Azure conversation trace.", min=2, max=model_options.MOST_REQUESTS
        ),
    ] = 48,
    shorter: Annotated[float, option("Prompts and outputs are so many times shorter than the trace's.")] = 12,
    request_rate: Annotated[float, option("Requests a second, on average.")] = 1.0,
    max_num_seqs: model_options.MaxNumSeqs = None,
    rounds: Rounds = 3,
    cpu_time: Annotated[
        bool,
        option(
            "Count this process's CPU seconds, on a machine that others use; give it one core.", "--cpu-time"
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a slice of a trace, and simulate it with times that are fitted to steps of other sizes: how far
    apart the two are."""
    for name, value in (("shorter", shorter), ("request-rate", request_rate)):
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name} {value:g} must be above 0")
    found_model = model_options.find(model)
    from jaxlamina.bench import machine, simulation_bench
    from jaxlamina.planner import traces
    from jaxlamina.weights import open_checkpoint

    source = open_checkpoint(found_model)
    config = source.model.config
    if config is None:
        raise UserError("the planner knows no costs of a model of your own: name a checkpoint")
    where = machine.describe([])
    trace = simulation_bench.slice_of(traces.load("azure-conversation"), num_prompts, shorter, request_rate)
    with progress() as on_progress:
        found = simulation_bench.measure(
            source,
            config,
            trace,
            n_rounds=rounds,
            max_num_seqs=max_num_seqs or DEFAULT_SEQS,
            of_cpu=cpu_time,
            on_progress=on_progress,
        )
    record: dict[str, Any] = {"model": model, "shorter": shorter, "request_rate": request_rate}
    record |= {"max_num_seqs": max_num_seqs or DEFAULT_SEQS, "cpu_time": cpu_time} | found.to_dict()
    tell("simulation", record, where, _parts(record, found), as_json=as_json)


def _parts(record: dict[str, Any], found: SimulationReport) -> Iterator[Part]:
    seconds = "CPU seconds of this process" if record["cpu_time"] else "seconds"
    n_in, n_out = found.trace.n_prompt.mean(), found.trace.n_output.mean()
    yield (
        f"{record['model']}, float32, unsplit: {len(found.trace)} requests of the Azure conversation trace, "
        f"on average {n_in:.0f} prompt and {n_out:.0f} output tokens, {record['request_rate']:g} a second, "
        f"{len(found.rounds)} rounds, in {seconds}"
    )
    live, simulated = found.median(0), found.median(1)
    rows = [
        (_NAMES[name], getattr(live, name), getattr(simulated, name), found.error(name), found.spread(name))
        for name in _NAMES
    ]
    columns = (
        ("", lambda row: row[0], "<"),
        ("live", lambda row: row[1], ".3f"),
        ("simulated", lambda row: row[2], ".3f"),
        ("error", lambda row: row[3], "+.1%"),
        ("live runs differ by", lambda row: row[4], ".0%"),
    )
    yield table(rows, columns)
    for name, limit in LIMITS.items():
        yield f"{_NAMES[name]}: limit {limit:.0%}: {verdict(abs(found.error(name)) <= limit)}"
    yield dim(
        f"the steps that terms were fitted to: {found.fit_error:.0%} off in the median; each by terms fitted "
        f"to the others: {found.held_out_error:.0%}"
    )
    yield dim(
        f"with all steps 5% longer TPOT p50 is {found.tpot_of_5_percent:.0%} longer (simulated): requests "
        "wait for each other's prompts"
    )
