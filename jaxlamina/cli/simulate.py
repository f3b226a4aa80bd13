"""`jaxlamina simulate`: a trace on pools that need not be there, and how its results look.

Knows options and tables; `jaxlamina.simulator` runs it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxlamina.cli import model_options
from jaxlamina.errors import UserError
from jaxlamina.options import (
    DEFAULT_SEQS,
    FIRST_COME,
    KV_RETURN_GB_S,
    NOTICE_S,
    PROMPT_BATCH_TOKENS,
    START_S,
)

# Of rank 0 of a split server, 8B over two H100: 9.8 s of 18.3 in which it did not wait, 1,931 programs. Other
# loads and hosts are within 10 % by it (docs/benchmarks.md).
_HOST_MS = 5.1

_PIPELINING = ("rotational", "fixed")
_OF_ATTENTION_WORKERS = (
    "memory",
    "partition",
    "local_share",
    "batches",
    "pipelining",
    "link_gb_s",
    "link_us",
)

if TYPE_CHECKING:
    from jaxlamina.planner.costs import Deployment
    from jaxlamina.planner.traces import Trace
    from jaxlamina.simulator import Compared, Failure, SimulatedRun


def simulate(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="A name in configs/models, or a .toml or config.json file.")
    ] = "llama-3-8b",
    trace: model_options.TraceName = "azure-conversation",
    hours: Annotated[
        float | None, typer.Option(help="So much of the trace, again and again if it is shorter.")
    ] = None,
    speedup: Annotated[float, typer.Option(help="The trace's arrivals come so much faster.")] = 1.0,
    compute: Annotated[
        str, typer.Option(help="The device of model workers: a name in configs/hardware or a .toml.")
    ] = "h200",
    memory: model_options.MemoryDevice = None,
    dop: Annotated[
        str, typer.Option(help="Model workers, attention workers: 1,2; 1,0 for an unsplit model.")
    ] = "1,0",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Model workers that share weights out.")] = 1,
    partition: Annotated[
        str, typer.Option(help="How KV is shared out among attention workers: heads, requests or tokens.")
    ] = "heads",
    local_share: Annotated[
        float, typer.Option("--local-share", help="Share of the KV that model workers keep, from 0 to 1.")
    ] = 0.0,
    batches: Annotated[int, typer.Option(min=1, max=32, help="Staggered batches of a step.")] = 1,
    pipelining: Annotated[
        str,
        typer.Option(
            help="Over several copies of the model staggered batches go around (rotational; one more than "
            "copies), or each stays on its copy (fixed)."
        ),
    ] = "rotational",
    as_run: model_options.AsRun = True,
    link_gb_s: model_options.LinkGbS = None,
    link_us: model_options.LinkUs = None,
    max_num_seqs: model_options.MaxNumSeqs = None,
    max_num_batched_tokens: model_options.MaxNumBatchedTokens = "auto",
    tpot_slo_ms: model_options.TpotSloMs = None,
    kv_slots: model_options.KvSlots = None,
    kv_headroom: model_options.KvHeadroom = None,
    async_scheduling: model_options.AsyncScheduling = True,
    mixed_steps: model_options.MixedSteps = False,
    prompt_batch_tokens: model_options.PromptBatchTokens = None,
    padding: Annotated[
        bool,
        typer.Option(
            "--padding/--no-padding",
            help="A step's requests, and a prompt's tokens, cost as many as a GPU has programs for.",
        ),
    ] = True,
    host_ms: Annotated[
        float | None,
        typer.Option(
            "--host-ms",
            min=0,
            help="What the host has to do for each program that it launches, while devices compute if "
            "--async-scheduling. By itself what --trace's server said, if it is such a load; else "
            f"{_HOST_MS} where a model is split, as measured for 8B, and 0 where it is not.",
        ),
    ] = None,
    scheduling_policy: model_options.SchedulingPolicy = None,
    failure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="S,POOL,S",
            help="At so many seconds a worker of the model or attention pool dies, and all wait for so many "
            "seconds, such as 3600,attention,40; may be repeated.",
        ),
    ] = None,
    mtbf_hours: model_options.MtbfHours = None,
    notice_s: model_options.NoticeS = NOTICE_S,
    start_s: model_options.StartS = START_S,
    kv_return_gb_s: model_options.KvReturnGbS = KV_RETURN_GB_S,
    seed: Annotated[int, typer.Option(min=0, help="Of failures' random times.")] = 0,
    kept_kv: Annotated[
        bool, typer.Option("--kept-kv/--no-kept-kv", help="KV outlives a failure in host memory.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout, no tables.")] = False,
) -> None:
    """Serve a trace of requests on pools that need not be there: the engine's scheduler with modelled times.
    Reports throughput, latencies, the batch, and how much of the time pools wait."""
    from rich.console import Console

    from jaxlamina import simulator
    from jaxlamina.console.progress import bar
    from jaxlamina.planner.failures import FailureRate
    from jaxlamina.planner.traces import AnsweredTrace

    model_options.check_of_failures(context, mtbf_hours, "seed")
    pools = model_options.parsed_dop(dop, least_attention=0)
    if not pools[1]:
        why = "is of attention workers, of which --dop says none: leave it out"
        model_options.refuse_given(context, why, *_OF_ATTENTION_WORKERS)
    setup = _setup(
        model,
        compute,
        memory,
        pools,
        tensor_parallel,
        partition,
        local_share,
        batches,
        pipelining,
        as_run,
        link_gb_s,
        link_us,
    )
    load = _load(trace, hours, speedup)
    answered = load if isinstance(load, AnsweredTrace) else None
    if answered is None and Path(trace).suffix == ".json":
        note = "not beside what was measured: with --hours or --speedup it is another load"
        Console(stderr=True).print(note, style="yellow", highlight=False, soft_wrap=True)
    if prompt_batch_tokens is None:
        in_host = link_gb_s is link_us is None and setup.memory == setup.compute
        by_memory = in_host and partition == "heads" and setup.n_model == 1
        prompt_batch_tokens = PROMPT_BATCH_TOKENS if by_memory or not setup.is_split else 0
    by_server = None if answered is None else answered.host_ms
    if host_ms is None:
        host_ms = by_server if by_server is not None else _HOST_MS * setup.is_split
    policy = simulator.ServingPolicy(
        scheduling_policy=scheduling_policy or FIRST_COME,
        max_num_seqs=max_num_seqs or DEFAULT_SEQS,
        max_num_batched_tokens=max_num_batched_tokens,
        tpot_slo_ms=tpot_slo_ms,
        mixed_steps=mixed_steps,
        prompt_batch_tokens=prompt_batch_tokens,
        async_scheduling=async_scheduling,
        kv_headroom=kv_headroom,
        kv_slots=kv_slots,
        kept_kv=kept_kv,
        buckets=simulator.gpu_buckets(setup, max_num_seqs or DEFAULT_SEQS, load) if padding else None,
        host_s=host_ms / 1e3,
    )
    failures = [_failure(text) for text in failure or []]
    rate = None if mtbf_hours is None else FailureRate(mtbf_hours, notice_s, start_s, kv_return_gb_s, seed)
    with bar(Console(stderr=True), "requests", line_every_s=10) as on_progress:
        run = simulator.simulate(setup, load, policy, failures=failures, rate=rate, on_progress=on_progress)
    beside = {} if answered is None else simulator.compared(answered, run)
    if as_json:
        asked = {"model": model, "trace": trace, "hours": hours, "speedup": speedup, "compute": compute}
        record = asked | {"memory": memory, "dop": dop, "host_ms": 1e3 * policy.host_s} | run.to_dict()
        if answered is not None:
            each = {name: one._asdict() | {"error": one.error} for name, one in beside.items()}
            record |= {"compared": each, "n_left_out": answered.n_left_out}
        print(json.dumps(record))
        return
    title = f"{model}, {trace}, {_pools(setup)}"
    _show(title, run, beside, answered.n_left_out if answered else 0, host_ms)


def _setup(
    model: str,
    compute: str,
    memory: str | None,
    dop: tuple[int, int],
    tensor_parallel: int,
    partition: str,
    local_share: float,
    batches: int,
    pipelining: str,
    as_run: bool,
    link_gb_s: float | None,
    link_us: float | None,
) -> Deployment:
    from jaxlamina.kv.placement import PARTITIONS
    from jaxlamina.models.config_files import model_config
    from jaxlamina.planner import inputs
    from jaxlamina.planner.costs import Deployment

    if partition not in PARTITIONS:
        raise UserError(f"{partition=} must be one of {', '.join(PARTITIONS)}")
    if not 0 <= local_share <= 1:
        raise UserError(f"{local_share=} must be from 0 to 1")
    if pipelining not in _PIPELINING:
        raise UserError(f"{pipelining=} must be one of {', '.join(_PIPELINING)}")
    config, of_compute = model_config(inputs.model_name(model)), inputs.device(compute)
    n_model, n_attention = dop
    sums = of_compute.in_host if n_attention else of_compute.sums(as_run)
    of_shards = {"tensor_parallel": tensor_parallel, "model_link": sums}
    if not n_attention:
        if n_model > tensor_parallel == 1:
            raise UserError(
                f"--dop {n_model},0 has {n_model} copies of the model, and no attention workers that these "
                f"could have in common: take --tensor-parallel {n_model}, or --dop 1,0 for one of them"
            )
        return Deployment(config, of_compute.terms, n_model=n_model, **of_shards)  # type: ignore[arg-type]
    of_memory = inputs.device(memory or compute)
    same_host = inputs.in_one_host(of_compute, of_memory, n_model + n_attention)
    linked = inputs.link_between(of_compute, of_memory, link_gb_s, link_us, same_host)
    return Deployment(
        config,
        of_compute.terms,
        of_memory.terms,
        linked.link,
        n_model=n_model,
        n_attention=n_attention,
        partition=partition,  # type: ignore[arg-type]
        local_share=local_share,
        n_batches=batches,
        mode=pipelining,  # type: ignore[arg-type]
        **of_shards,  # type: ignore[arg-type]
    )


def _failure(text: str) -> Failure:
    from jaxlamina.simulator import Failure

    words = text.split(",")
    try:
        at_s, pool, downtime_s = words
        return Failure(float(at_s), pool.strip(), float(downtime_s))  # type: ignore[arg-type]
    except ValueError:
        raise UserError(f"--failure {text!r} must be seconds, pool, seconds, such as 3600,model,40") from None


def _load(name: str, hours: float | None, speedup: float) -> Trace:
    """An `AnsweredTrace` where it is a load that a server has answered, as it was."""
    from jaxlamina.planner import traces

    if not (speedup > 0 and math.isfinite(speedup)):
        raise UserError(f"--speedup {speedup:g} must be above 0")
    found = traces.named(name)
    if found.arrival_us[-1] > traces.MOST_US * speedup:
        raise UserError(f"--speedup {speedup:g}: the last request would never come; give a larger one")
    if speedup != 1:
        found = traces.Trace((found.arrival_us / speedup).astype(int), found.n_prompt, found.n_output)
    return found if hours is None else traces.repeated(found, 3600 * hours)


def _pools(setup: Deployment) -> str:
    compute, memory = setup.compute.hardware.name, setup.memory
    if memory is None:
        return f"{setup.n_model} × {compute}, unsplit"
    batches = f", {setup.n_batches} staggered batches" if setup.n_batches > 1 else ""
    return f"{setup.n_model} × {compute} and {setup.n_attention} × {memory.hardware.name}{batches}"


def _show(
    title: str, run: SimulatedRun, beside: dict[str, Compared], n_left_out: int, host_ms: float
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from jaxlamina.console.tables import print_table

    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in _rows(run, host_ms):
        table.add_row(name, value)
    out: Any = Console()
    print_table(out, table)
    if beside:
        print_table(out, _beside(beside))
    if n_left_out:
        what = f"left out: {n_left_out:,} requests that failed, or have no output"
        out.print(what, style="yellow", highlight=False, soft_wrap=True)
    note = "simulated: the engine's scheduler, times of steps by the planner's costs, of terms "
    out.print(f"{note}{_terms(run.setup)}", style="dim", highlight=False, soft_wrap=True)


def _beside(numbers: dict[str, Compared]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title="beside what bench serve measured", box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("measured", "simulated", "error"):
        table.add_column(heading, justify="right")
    for name, one in numbers.items():
        error = "–" if one.error is None else f"{one.error:+.1%}"
        table.add_row(_title(name), f"{one.measured:,.2f}", f"{one.simulated:,.2f}", error)
    return table


def _title(name: str) -> str:
    if name == "output_throughput":
        return "output tok/s"
    statistic, metric, unit = name.split("_")
    return f"{metric.upper()} {statistic} ({unit})"


def _terms(setup: Deployment) -> str:
    every = [terms for terms in (setup.compute, setup.memory) if terms is not None]
    said = (
        f"{t.hardware.name}: {f'scaled from {t.scaled_from}' if t.scaled_from else 'measured'}" for t in every
    )
    return "; ".join(dict.fromkeys(said))


def _rows(run: SimulatedRun, host_ms: float) -> Iterator[tuple[str, str]]:
    yield "requests", f"{len(run.end_s):,}"
    yield "seconds", f"{run.seconds:,.1f}"
    yield "requests/s", f"{run.requests_per_s:,.3f}"
    yield "output tok/s", f"{run.output_per_s:,.1f}"
    for name, of, digits in (("TTFT", run.shares("ttft_s"), 1), ("TPOT", run.shares("tpot_s"), 2)):
        yield (
            f"{name} p50, p99 (ms)",
            "–" if of is None else ", ".join(f"{1e3 * x:,.{digits}f}" for x in of.values()),
        )
    yield "batch, mean over steps", f"{run.mean_batch:,.1f}"
    yield "decode steps", f"{run.n_decode_steps:,}"
    yield "prompts and chunks", f"{run.n_prompt_steps:,}"
    mean_slots = run.over_time.mean("slots", run.seconds)
    yield "KV slots, mean used", f"{run.n_kv_slots:,}, {mean_slots / run.n_kv_slots:.1%}"
    waiting = run.over_time.mean("waiting", run.seconds)
    yield "waiting, mean, most", f"{waiting:,.2f}, {int(run.over_time.waiting.max(initial=0)):,}"
    yield "preempted", f"{run.n_preemptions:,}"
    for pool, share in run.bubbles.items():
        yield f"bubbles, {pool} pool", f"{share:.1%}"
    if host_ms:
        yield "host (ms a program), waited for", f"{host_ms:.1f}, {run.host_s / run.seconds:.1%}"
    if run.n_failures:
        yield "failures", f"{run.n_failures:,}"
        yield "down (s), share", f"{run.down_s:,.1f}, {run.down_s / run.seconds:.2%}"
        yield "KV comes back (s)", f"{run.kv_return_s:,.1f}"
