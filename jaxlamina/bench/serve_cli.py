"""`jaxlamina bench serve`: options in, a report and one last line of JSON out. Knows how results look.

Options and results have vLLM's names.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxlamina.bench.server_options import ApiKey, BaseUrl, Host, Port, ServedModel, address
from jaxlamina.cli import model_options
from jaxlamina.console.tables import print_table, print_where
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.bench.loads import Size
    from jaxlamina.bench.serve_bench import Load, Measured
    from jaxlamina.bench.serve_client import Served, Target

DATASETS = ("random", "sharegpt-like", "alpaca-like", "azure-conversation", "trace")
_SHOWN_ERRORS = 5


def serve_command(
    base_url: BaseUrl = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    model: ServedModel = None,
    api_key: ApiKey = None,
    dataset_name: Annotated[str, typer.Option(help=", ".join(DATASETS) + ".")] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="The trace: CSV with TIMESTAMP,ContextTokens,GeneratedTokens.")
    ] = None,
    speedup: Annotated[float, typer.Option(help="The trace's arrivals come so much faster.")] = 1.0,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests; of a trace the first ones.")] = 1000,
    input_len: model_options.InputLen = 1024,
    output_len: model_options.OutputLen = 128,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second; inf: all at once. A trace has its own arrivals.")
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distribution between arrivals: 1 Poisson, less comes in bursts."
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at the server at most; others wait here, untimed.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Have outputs as long as asked for (vLLM, JaxLamina).")
    ] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    percentile_metrics: Annotated[
        str, typer.Option(help="Metrics shown: some of ttft,tpot,itl,e2el.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles of them.")] = "50,90,99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Also requests a second within limits in ms: --goodput ttft:200 tpot:50."),
    ] = None,
    more_goodput: Annotated[
        list[str] | None, typer.Argument(metavar="NAME:MS", help="More limits, after --goodput's first.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that the server may say nothing in an answer.")
    ] = 600.0,
    save_result: Annotated[
        Path | None, typer.Option(help="A JSON file for the results, with every request's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON on stdout.")] = False,
) -> None:
    """Load an OpenAI-compatible server and time its streamed answers: TTFT, TPOT, ITL, throughput, goodput."""
    from jaxlamina.bench import loads, machine, serve_client, serve_metrics

    names = serve_metrics.parse_names("--percentile-metrics", percentile_metrics)
    percentiles = serve_metrics.parse_percentiles("--metric-percentiles", metric_percentiles)
    if more_goodput and not goodput:
        raise UserError(f"what is {more_goodput[0]!r}? this command takes options alone")
    limits_ms = serve_metrics.parse_goodput([*(goodput or []), *(more_goodput or [])])
    if endpoint not in serve_client.PATHS:
        raise UserError(f"--endpoint {endpoint!r} must be {' or '.join(serve_client.PATHS)}")
    _check_dataset(dataset_name, dataset_path, speedup, request_rate)
    url = address(base_url, host, port)
    served = asyncio.run(serve_client.look(url, model, api_key))
    target = serve_client.Target(url, endpoint, served.model, api_key, ignore_eos, timeout)
    if dataset_path is not None:
        sizes, arrive_s = loads.read_trace(dataset_path)
        arrive_s = [at_s / speedup for at_s in arrive_s]
    else:
        if dataset_name == "random":
            sizes = [loads.Size(input_len, output_len)] * num_prompts
        else:
            sizes = loads.drawn(dataset_name, num_prompts, seed=seed, most_tokens=served.max_model_len)
        arrive_s = loads.arrivals(num_prompts, request_rate, burstiness, seed=seed)
    load, n_too_long = _load(served, target, sizes, arrive_s, num_prompts, max_concurrency, seed)
    where = machine.describe(["aiohttp"])
    measured = _run(target, load)
    result = serve_metrics.summary(
        measured.answers, measured.duration_s, names=names, percentiles=percentiles, limits_ms=limits_ms
    )
    record = {
        "bench": "serve",
        "base_url": url,
        "endpoint": endpoint,
        "model": served.model,
        "dataset_name": dataset_name,
        "num_prompts": len(load.sizes),
        "num_too_long": n_too_long,
        "request_rate": None if dataset_path is not None or math.isinf(request_rate) else request_rate,
        "burstiness": burstiness,
        "speedup": speedup if dataset_path is not None else None,
        "max_concurrency": max_concurrency,
        "goodput_limits_ms": limits_ms or None,
        "seed": seed,
        "latest_ms": 1e3 * measured.latest_s,
        **result,
        "errors": dict(serve_metrics.errors(measured.answers)),
        **where.to_dict(),
    }
    if save_result is not None:
        _save(save_result, record | _each(measured, load))
    if not as_json:
        _show(Console(highlight=False), record, measured, load, names, percentiles, where)
    print(json.dumps(record))
    if not result["completed"]:
        raise UserError(f"no request was answered: {serve_metrics.errors(measured.answers)[0][0]}")


def _check_dataset(name: str, path: Path | None, speedup: float, rate: float) -> None:
    if name not in DATASETS:
        raise UserError(f"--dataset-name {name!r} must be one of {', '.join(DATASETS)}")
    if (name == "trace") != (path is not None):
        raise UserError("--dataset-path goes with --dataset-name trace, and each needs the other")
    if name == "trace" and math.isfinite(rate):
        raise UserError("a trace has its own arrivals: leave out --request-rate, or change them by --speedup")
    if not (speedup > 0 and math.isfinite(speedup)):
        raise UserError(f"--speedup {speedup:g} must be above 0")


def _load(
    served: Served,
    target: Target,
    sizes: list[Size],
    arrive_s: list[float],
    n: int,
    max_concurrency: int | None,
    seed: int,
) -> tuple[Load, int]:
    """The first ``n`` requests that the server has room for, and how many before them it has none for."""
    from jaxlamina.bench import serve_bench, serve_client

    kept: list[int] = []
    n_too_long = 0
    for i, size in enumerate(sizes):
        if len(kept) == n:
            break
        if served.max_model_len is not None and size.n_tokens > served.max_model_len:
            n_too_long += 1
        else:
            kept.append(i)
    if not kept:
        raise UserError(f"every request is longer than the {served.max_model_len} tokens the server takes")
    chosen = [sizes[i] for i in kept]
    ids = served.token_ids if target.endpoint == "completions" else None
    prompts = serve_client.prompts(chosen, ids, seed=seed)
    first_s = arrive_s[kept[0]]
    return serve_bench.Load(
        chosen, prompts, [arrive_s[i] - first_s for i in kept], max_concurrency
    ), n_too_long


def _run(target: Target, load: Load) -> Measured:
    from jaxlamina.bench import serve_bench, serve_client

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("trying one request", total=None)
        n_failed = 0

        def on_answer(answer: Any) -> None:
            nonlocal n_failed
            n_failed += answer.error is not None
            what = f"requests, {n_failed} failed" if n_failed else "requests"
            progress.update(task, description=what, advance=1)

        async def both() -> Measured:
            [prompt] = serve_client.prompts(load.sizes[:1], _ids(load), seed=2**31)
            await serve_bench.try_out(target, prompt, load.sizes[0])
            progress.update(task, description="requests", total=len(load.sizes))
            return await serve_bench.run(target, load, on_answer)

        return asyncio.run(both())


def _ids(load: Load) -> list[int] | None:
    first = load.prompts[0]
    return None if isinstance(first, str) else first


def _each(measured: Measured, load: Load) -> dict[str, Any]:
    """Every request's numbers, as vLLM's detailed results have them."""
    answers = measured.answers
    return {
        "arrivals": list(load.arrive_s),
        "input_lens": [a.n_prompt for a in answers],
        "output_lens": [a.n_output for a in answers],
        "ttfts": [None if a.error else a.ttft_s for a in answers],
        "itls": [a.itl_s for a in answers],
        "e2els": [None if a.error else a.e2el_s for a in answers],
        "errors_by_request": [a.error for a in answers],
    }


def _save(path: Path, record: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write --save-result {path}: {error}") from None


def _show(
    out: Console,
    record: dict[str, Any],
    measured: Measured,
    load: Load,
    names: list[str],
    percentiles: list[float],
    where: Any,
) -> None:
    from jaxlamina.bench import loads, serve_metrics

    n_in, n_out = loads.means(load.sizes)
    print_where(out, where)
    out.print(
        f"{record['model']} at {record['base_url']}, {record['endpoint']}: {record['num_prompts']} requests "
        f"({record['dataset_name']}), asked for {n_in:.0f} prompt and {n_out:.0f} output tokens each on average",
        soft_wrap=True,
    )
    rows = [
        ("completed / failed", f"{record['completed']} / {record['failed']}"),
        ("duration", f"{record['duration']:.2f} s"),
        ("tokens in / out", f"{record['total_input_tokens']:,} / {record['total_output_tokens']:,}"),
        ("requests", f"{record['request_throughput']:.3f} /s"),
        ("output tokens", f"{record['output_throughput']:.1f} /s"),
        ("all tokens", f"{record['total_token_throughput']:.1f} /s"),
        ("most requests at once", f"{record['max_concurrent_requests']}"),
        ("normalised latency", f"{_ms(record['mean_normalized_latency_ms'])} ms a token"),
    ]
    if "request_goodput" in record:
        limits = ", ".join(f"{name} ≤ {ms:g} ms" for name, ms in record["goodput_limits_ms"].items())
        rows.append((f"goodput ({limits})", f"{record['request_goodput']:.3f} requests/s"))
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    print_table(out, table)
    table = Table(title="ms", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    keys = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    for key in keys:
        table.add_column(key, justify="right", no_wrap=True)
    for name in names:
        values = [_ms(record[f"{key}_{name}_ms"]) for key in keys]
        table.add_row(name.upper(), *values)
    print_table(out, table)
    titles = "; ".join(f"{name.upper()}: {serve_metrics.TITLES[name]}" for name in names)
    out.print(titles, style="dim", soft_wrap=True)
    _show_notes(out, record, measured)


def _show_notes(out: Console, record: dict[str, Any], measured: Measured) -> None:
    from jaxlamina.bench import serve_metrics

    if record["num_too_long"]:
        out.print(f"left out: {record['num_too_long']} requests longer than the server takes", style="yellow")
    if any(a.error is None and not a.usage for a in measured.answers):
        out.print("the server does not say how many tokens there were: pieces were counted", style="yellow")
    out.print(f"requests were begun at most {record['latest_ms']:.1f} ms late by this client", style="dim")
    for text, n in serve_metrics.errors(measured.answers)[:_SHOWN_ERRORS]:
        out.print(f"{n} failed: {text}", style="red", markup=False, soft_wrap=True)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
