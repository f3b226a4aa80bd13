"""`jaxlamina bench overhead`: its options, how the server that it measures is started, and how its results
look."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any

from rich.console import Console

from jaxlamina.bench.flags import AsJson, Seed, option
from jaxlamina.bench.lists import listed, number
from jaxlamina.bench.report import Columns, Part, progress, table, tell
from jaxlamina.bench.serve_cli import DRAWN
from jaxlamina.cli import model_options
from jaxlamina.errors import UserError
from jaxlamina.options import DEFAULT_MODEL, DEFAULT_SEQS, FIRST_COME
from jaxlamina.process.gpus import MEMORY_SHARE

_SERVER_S = 1800.0  # to compile everything
# Of a GPU's memory for each of the two processes that have the model.
_GPU_SHARE = "0.4"
COMPONENTS = {
    "forward": "forward passes alone",
    "engine": "engine (LLM.generate, text)",
    "server": "engine + server",
    "command": "engine + server + command line",
}
LOADS: Columns = (
    ("requests/s", lambda load: load["rate"], "g"),
    ("requests", lambda load: load["n_requests"], ""),
    ("failed", lambda load: load["n_failed"], ""),
    (
        "normalised latency, ms a token",
        lambda load: load["normalised_s"] and 1e3 * load["normalised_s"],
        ".1f",
    ),
    ("latency, s", lambda load: load["client_s"], ".2f"),
    ("of it engine, s", lambda load: load["engine_s"], ".2f"),
    ("batch", lambda load: load["batch"], ".2f"),
)


def overhead_command(
    model: model_options.Model = DEFAULT_MODEL,
    dtype: model_options.DType = "float32",
    case: Annotated[
        str, option("Prompt x output tokens, separated by commas, such as 256x128,1024x1024.")
    ] = "256x128",
    copies: Annotated[int, option("Equal requests in the batch that is timed.", min=1)] = 3,
    attempts: Annotated[int, option("Timed batches of each way; one more warms up.", min=1)] = 10,
    request_rate: Annotated[
        str, option("Also the server under Poisson arrivals: rates a second, such as 0.5,1,2.")
    ] = "",
    num_prompts: Annotated[
        int, option("Requests at each rate.", min=1, max=model_options.MOST_REQUESTS)
    ] = 32,
    dataset_name: Annotated[str, option(f"Their lengths: {', '.join(DRAWN)}.")] = "alpaca-like",
    max_num_seqs: model_options.MaxNumSeqs = None,
    max_model_len: model_options.MaxModelLen = None,
    no_warm_up: Annotated[
        bool, option("The server compiles each program when it first needs it.", "--no-warm-up")
    ] = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """What engine, server and command line add to the forward passes of a batch; latency by request rate."""
    path = model_options.find(model)
    os.environ.setdefault(MEMORY_SHARE, _GPU_SHARE)
    from jaxlamina import ranks
    from jaxlamina.bench import machine, overhead_bench
    from jaxlamina.bench.loads import drawn
    from jaxlamina.bench.server_process import serving

    cases, what = overhead_bench.cases_of(case, copies), "numbers above 0, such as 0.5,1,2"
    above = number(float, lambda rate: 0 < rate < math.inf)
    rates = listed("--request-rate", request_rate, above, what) if request_rate else []
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
    with ExitStack() as stack:
        with progress("starting the server (it compiles first)"):
            more = ["--no-warm-up"] if no_warm_up else []
            url = stack.enter_context(serving([*options, *more], deadline_s=_SERVER_S))
        given: dict[str, Any] = {"dtype": dtype, "max_num_seqs": max_num_seqs, "max_model_len": length}
        kept = model_options.CommandOptions(
            model=model, prefix_caching=False, scheduling_policy=FIRST_COME, **given
        )
        llm = model_options.load(Console(stderr=True), path, kept)
        layers = overhead_bench.Layers(llm, url, model)
        with progress() as on_progress:
            found = [layers.measure_case(c, attempts, on_progress) for c in cases]
            loads = []
            for rate in rates:
                on_progress(f"{num_prompts} requests at {rate:g} a second")
                loads.append(layers.measure_load(rate, sizes, seed=seed))
    record = {"model": model, "dtype": dtype, "accelerator": llm.model_device.device_kind}
    record |= {"max_num_seqs": max_num_seqs, "max_model_len": length, "seed": seed}
    record |= {"cases": [times.to_dict() for times in found], "loads": [asdict(load) for load in loads]}
    record |= {"dataset_name": dataset_name if rates else None}
    tell("overhead", record, where, _parts(record), as_json=as_json)


def _parts(record: dict[str, Any]) -> Iterator[Part]:
    yield f"{record['model']}, {record['dtype']}, {record['accelerator']}"
    for case in record["cases"]:
        components, whole_s = case["components"], case["components"]["command"]["median_s"]
        rows = [(name, components[key]) for key, name in COMPONENTS.items()]
        columns = _component_columns(components["forward"]["median_s"], case["n_output"])
        yield table(rows, columns, f"{case['case']} tokens, {case['n_attempts']} attempts")
        yield table(case["layers_s"].items(), _layer_columns(whole_s))
    if record["loads"]:
        yield table(record["loads"], LOADS, f"{record['dataset_name']}, Poisson arrivals")


def _component_columns(forward_s: float, n_output: int) -> Columns:
    return (
        ("a batch takes", lambda row: row[0], "<"),
        ("median ms", lambda row: 1e3 * row[1]["median_s"], ".1f"),
        ("quartiles", lambda row: f"{1e3 * row[1]['q1_s']:.1f}–{1e3 * row[1]['q3_s']:.1f}", ""),
        ("more than forward, ms", lambda row: 1e3 * (row[1]["median_s"] - forward_s), ".1f"),
        ("more", lambda row: row[1]["median_s"] / forward_s - 1, ".1%"),
        ("ms a token", lambda row: 1e3 * row[1]["median_s"] / n_output, ".2f"),
    )


def _layer_columns(whole_s: float) -> Columns:
    return (
        ("where the time goes", lambda row: row[0], "<"),
        ("ms", lambda row: 1e3 * row[1], ".2f"),
        ("of all", lambda row: row[1] / whole_s, ".1%"),
    )
