"""`jaxlamina bench overhead`: options in, tables and one last line of JSON out. Knows how results look, and how the server
that it measures is started.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jaxlamina.cli import model_options
from jaxlamina.console.tables import print_table, print_where
from jaxlamina.errors import UserError
from jaxlamina.options import DEFAULT_MODEL, DEFAULT_SEQS, FIRST_COME
from jaxlamina.process.gpus import MEMORY_SHARE

_SERVER_S = 1800.0  # to compile everything
# Of a GPU's memory for each of the two processes that have the model.
_GPU_SHARE = "0.4"


def overhead_command(
    model: model_options.Model = DEFAULT_MODEL,
    dtype: model_options.DType = "float32",
    case: Annotated[
        str, typer.Option(help="Prompt x output tokens, separated by commas, such as 256x128,1024x1024.")
    ] = "256x128",
    copies: Annotated[int, typer.Option(min=1, help="Equal requests in the batch that is timed.")] = 3,
    attempts: Annotated[int, typer.Option(min=1, help="Timed batches of each way; one more warms up.")] = 10,
    request_rate: Annotated[
        str, typer.Option(help="Also the server under Poisson arrivals: rates a second, such as 0.5,1,2.")
    ] = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = 32,
    dataset_name: Annotated[
        str, typer.Option(help="Their lengths: sharegpt-like, alpaca-like or azure-conversation.")
    ] = "alpaca-like",
    max_num_seqs: model_options.MaxNumSeqs = None,
    max_model_len: model_options.MaxModelLen = None,
    no_warm_up: Annotated[
        bool, typer.Option("--no-warm-up", help="The server compiles each program when it first needs it.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON on stdout.")] = False,
) -> None:
    """What engine, server and command line add to the forward passes of a batch; latency by request rate."""
    path = model_options.find(model)
    os.environ.setdefault(MEMORY_SHARE, _GPU_SHARE)
    from jaxlamina import ranks
    from jaxlamina.bench import machine, overhead_bench
    from jaxlamina.bench.loads import drawn
    from jaxlamina.bench.server_process import serving

    cases, rates = overhead_bench.cases_of(case, copies), _rates(request_rate)
    if ranks.current() is not None:
        raise UserError("bench overhead starts a server of its own, in one process: run it without launch")
    # A prompt cut to the token may be some tokens longer once it was text.
    longest = max(c.size.n_tokens for c in cases) + 16
    sizes = drawn(dataset_name, num_prompts, seed=seed, most_tokens=max_model_len) if rates else []
    length = max_model_len or max([longest, *(size.n_tokens for size in sizes)])
    max_num_seqs = max_num_seqs or DEFAULT_SEQS
    options = ["--model", model, "--dtype", dtype, "--max-num-seqs", str(max_num_seqs)]
    options += ["--max-model-len", str(length), "--no-enable-prefix-caching"]
    where = machine.describe(["aiohttp", "fastapi", "uvicorn"])
    console = Console(stderr=True)
    with ExitStack() as stack:
        with console.status("starting the server (it compiles first)"):
            more = ["--no-warm-up"] if no_warm_up else []
            url = stack.enter_context(serving([*options, *more], deadline_s=_SERVER_S))
        given: dict[str, Any] = {"dtype": dtype, "max_num_seqs": max_num_seqs, "max_model_len": length}
        kept = model_options.CommandOptions(
            model=model, prefix_caching=False, scheduling_policy=FIRST_COME, **given
        )
        llm = model_options.load(console, path, kept)
        layers = overhead_bench.Layers(llm, url, model)
        with console.status("starting") as status:
            found = [layers.measure_case(c, attempts, status.update) for c in cases]
            loads = []
            for rate in rates:
                status.update(f"{num_prompts} requests at {rate:g} a second")
                loads.append(layers.measure_load(rate, sizes, seed=seed))
    record = {
        "bench": "overhead",
        "model": model,
        "dtype": dtype,
        "accelerator": llm.model_device.device_kind,
        "max_num_seqs": max_num_seqs,
        "max_model_len": length,
        "cases": [times.to_dict() for times in found],
        "dataset_name": dataset_name if rates else None,
        "seed": seed,
        "loads": [asdict(load) for load in loads],
        **where.to_dict(),
    }
    if not as_json:
        _show(Console(highlight=False), record, where)
    print(json.dumps(record))


def _rates(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [0.0]
    if not all(0 < rate < float("inf") for rate in found):
        raise UserError(f"--request-rate {text!r} must be numbers above 0, such as 0.5,1,2")
    return found


def _show(out: Console, record: dict[str, Any], where: Any) -> None:
    print_where(out, where)
    out.print(f"{record['model']}, {record['dtype']}, {record['accelerator']}", soft_wrap=True)
    for case in record["cases"]:
        title = f"{case['case']} tokens, {case['n_attempts']} attempts"
        print_table(out, _components(title, case))
        print_table(out, _layers(case))
    if record["loads"]:
        print_table(out, _loads(record))


def _components(title: str, case: dict[str, Any]) -> Table:
    names = {
        "forward": "forward passes alone",
        "engine": "engine (LLM.generate, text)",
        "server": "engine + server",
        "command": "engine + server + command line",
    }
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("a batch takes", no_wrap=True)
    for name in ("median ms", "quartiles", "more than forward, ms", "more", "ms a token"):
        table.add_column(name, justify="right", no_wrap=True)
    forward_s = case["components"]["forward"]["median_s"]
    for key, name in names.items():
        q1, median, q3 = (case["components"][key][k] for k in ("q1_s", "median_s", "q3_s"))
        table.add_row(
            name,
            f"{1e3 * median:.1f}",
            f"{1e3 * q1:.1f}–{1e3 * q3:.1f}",
            f"{1e3 * (median - forward_s):.1f}",
            f"{(median - forward_s) / forward_s:.1%}",
            f"{1e3 * median / case['n_output']:.2f}",
        )
    return table


def _layers(case: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("where the time goes", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("of all", justify="right", no_wrap=True)
    whole_s = case["components"]["command"]["median_s"]
    for name, seconds in case["layers_s"].items():
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / whole_s:.1%}")
    return table


def _loads(record: dict[str, Any]) -> Table:
    table = Table(title=f"{record['dataset_name']}, Poisson arrivals", box=box.SIMPLE_HEAD, pad_edge=False)
    names = (
        "requests/s",
        "requests",
        "failed",
        "normalised latency, ms a token",
        "latency, s",
        "of it engine, s",
    )
    for name in (*names, "batch"):
        table.add_column(name, justify="right", no_wrap=True)
    for load in record["loads"]:
        values = [load["client_s"], load["engine_s"], load["batch"]]
        shown = ["–" if value is None else f"{value:.2f}" for value in values]
        normalised_s = load["normalised_s"]
        normalised = "–" if normalised_s is None else f"{1e3 * normalised_s:.1f}"
        table.add_row(f"{load['rate']:g}", f"{load['n_requests']}", f"{load['n_failed']}", normalised, *shown)
    return table
