"""`jaxlamina bench split` and `bench decode`: options in, tables and one last line of JSON out.

The other commands have modules of their own. Knows how results look, nothing of how they are measured.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from jaxlamina.bench.breakdown_cli import breakdown_command
from jaxlamina.bench.exchange_cli import exchange_command
from jaxlamina.bench.heavy_cli import heavy_command
from jaxlamina.bench.kernels_cli import kernels_command
from jaxlamina.bench.overhead_cli import overhead_command
from jaxlamina.bench.prefix_cli import prefix_command
from jaxlamina.bench.serve_cli import serve_command
from jaxlamina.bench.start_cli import start_command
from jaxlamina.bench.step_cli import step_command
from jaxlamina.bench.throughput_cli import throughput_command
from jaxlamina.cli.model_options import AsyncScheduling, find
from jaxlamina.console.command import HELP, Command, add
from jaxlamina.console.tables import print_table, print_where
from jaxlamina.errors import UserError
from jaxlamina.models.config_files import model_config
from jaxlamina.options import MODEL_HELP

app = typer.Typer(
    no_args_is_help=True,
    **HELP,
    help="Measure what the project claims. Every bench ends with one line of JSON on stdout.",
)

JsonOption = Annotated[bool, typer.Option("--json", help="Only the line of JSON on stdout, no tables.")]


add(app, "breakdown", breakdown_command)
add(app, "exchange", exchange_command)
add(app, "heavy", heavy_command)
add(app, "kernels", kernels_command)
add(app, "overhead", overhead_command)
add(app, "prefix", prefix_command)
add(app, "serve", serve_command)
add(app, "start", start_command)
add(app, "step", step_command)
add(app, "throughput", throughput_command)


@app.callback()
def _bench() -> None:
    """Keeps `bench` a group of commands."""


@app.command("split", cls=Command)
def split_command(
    config: Annotated[
        str, typer.Option(help="A model shape: a name in configs/models, or a config.json.")
    ] = "llama-2-70b",
    layers: Annotated[str, typer.Option(help="Layer counts, separated by commas.")] = "8,32,80",
    batch: Annotated[int, typer.Option(min=1, help="Requests in the decode step that is split.")] = 8,
    dtype: Annotated[str, typer.Option(help="Weights: bfloat16 or float32.")] = "bfloat16",
    every_slice: Annotated[
        bool,
        typer.Option("--every-slice", help="Also compile every slice on its own: what sharing saves. Slow."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time tracing, splitting and compiling of a model shape, by number of layers. No weights are allocated."""
    shape = model_config(config)
    from jaxlamina.bench import machine, split_bench

    counts = _counts("--layers", layers)
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"--dtype {dtype!r} must be bfloat16 or float32")
    where = machine.describe()
    console = Console(stderr=True)
    with console.status("starting") as status:
        found = split_bench.measure(
            shape, counts, batch_size=batch, dtype=dtype, every_slice=every_slice, on_progress=status.update
        )
    record = {
        "bench": "split",
        "config": config,
        "batch": batch,
        "dtype": dtype,
        "limits": {"split_s": split_bench.SPLIT_LIMIT_S, "n_programs": split_bench.PROGRAMS_LIMIT},
        "results": [times.to_dict() for times in found],
        **where.to_dict(),
    }
    if not as_json:
        _show_split(Console(), record, found, where)
    print(json.dumps(record))


def _show_split(out: Console, record: dict[str, Any], found: list[Any], where: Any) -> None:
    print_where(out, where)
    table = Table(
        title=f"{record['config']}, decode step of {record['batch']} requests, {record['dtype']}, abstract weights",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    names = ("layers", "weights", "equations", "trace s", "split s", "slices", "programs", "compile s")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    each = any(t.every_slice_s is not None for t in found)
    if each:
        table.add_column("each s", justify="right", no_wrap=True)
    for t in found:
        row = [
            f"{t.n_layers}",
            f"{t.n_params / 1e9:.1f} B",
            f"{t.n_eqns}",
            f"{t.trace_s:.2f}",
            f"{t.split_s:.2f}",
        ]
        row += [f"{t.n_slices}", f"{t.n_programs}", f"{t.compile_s:.2f}"]
        table.add_row(*row, *([f"{t.every_slice_s:.1f}"] if each else []))
    print_table(out, table)
    for t in found:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, _, seconds in t.programs)
        out.print(f"compiled at {t.n_layers} layers: {parts}", style="dim", soft_wrap=True)
    last = max(found, key=lambda t: t.n_layers)
    limits = record["limits"]
    out.print(
        f"context at a cut: {_range(*last.context_bytes)} B; "
        f"exchanged with the memory pool: {last.exchanged_bytes_per_token:,.0f} B a token at {last.n_layers} layers",
        soft_wrap=True,
    )
    out.print(
        f"at {last.n_layers} layers: split in {last.split_s:.2f} s (limit {limits['split_s']:g} s: "
        f"{_verdict(last.split_s <= limits['split_s'])}), {last.n_programs} programs (limit {limits['n_programs']}: "
        f"{_verdict(last.n_programs <= limits['n_programs'])})",
        soft_wrap=True,
    )
    first = min(found, key=lambda t: t.n_layers)
    if first is not last:
        out.print(
            f"compile time at {last.n_layers} over {first.n_layers} layers: {last.compile_s / first.compile_s:.2f} "
            "(1 is flat)",
            soft_wrap=True,
        )


@app.command("decode", cls=Command)
def decode_command(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2-135m-instruct",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,32",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 224,
    tokens: Annotated[int, typer.Option(min=1, help="Decode steps after the prompts' own pass.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; one more warms up.")] = 5,
    peers: Annotated[
        str,
        typer.Option(help="auto (all that are installed), or some of split,unsplit,transformers,llama.cpp."),
    ] = "auto",
    async_scheduling: AsyncScheduling = True,
    as_json: JsonOption = False,
) -> None:
    """Time greedy float32 decoding: this project split and unsplit, beside transformers and llama.cpp.

    Only decode steps are timed; the prompts' own pass and turning tokens into text are not. Peers take turns in one
    run, each in a process of its own.
    """
    path = find(model)
    from jaxlamina.bench import decode_bench, machine
    from jaxlamina.bench import peers as peers_
    from jaxlamina.bench.prompts import encoder_of
    from jaxlamina.weights import open_checkpoint

    batches = _counts("--batch", batch)
    names, left_out = peers_.chosen(peers)
    where = machine.describe(peers_.PACKAGES)
    checkpoint = open_checkpoint(path)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        report = decode_bench.measure(
            model,
            checkpoint.config,
            names,
            batches=batches,
            n_prompt=prompt,
            n_steps=tokens,
            n_rounds=rounds,
            encode=encoder_of(checkpoint),
            left_out=left_out,
            async_scheduling=async_scheduling,
            on_progress=lambda what, done, total: progress.update(
                task, description=what, completed=done, total=total
            ),
        )
    if not as_json:
        _show_decode(Console(), report, where)
    print(json.dumps({"bench": "decode", "dtype": "float32", **report.to_dict(), **where.to_dict()}))


def _show_decode(out: Console, report: Any, where: Any) -> None:
    from jaxlamina.bench.peers import TITLES

    def title(peer: str) -> str:
        return TITLES.get(peer, peer)

    print_where(out, where)
    table = Table(
        title=f"{report.model}, float32, greedy: prompt {report.n_prompt_tokens} ({report.prompt_kind}), "
        f"{report.n_steps} decode steps, median of {report.n_rounds} interleaved rounds",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("peer", no_wrap=True)
    for name in ("tokens/s", "range", "ms/step", "% roof", "same", "prefill"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, r in enumerate(report.results):
        new_batch = i == 0 or report.results[i - 1].batch != r.batch
        if new_batch and i:
            table.add_section()
        speeds = r.rounds_tokens_per_s
        table.add_row(
            f"{r.batch}" if new_batch else "",
            title(r.peer),
            f"{r.tokens_per_s:.1f}",
            f"{min(speeds):.1f}–{max(speeds):.1f}",
            f"{r.ms_per_step:.2f}",
            f"{r.of_roofline:.0%}",
            "–" if r.same_tokens is None else f"{r.same_tokens}/{r.batch}",
            f"{r.prefill_s:.2f} s",
        )
    print_table(out, table)
    out.print(
        "% roof: of the roofline below; same: rows with the first peer's tokens exactly; "
        "prefill: the prompts' own pass, not in tokens/s",
        style="dim",
    )
    bandwidth, rate = report.read_bandwidth_bytes_per_s, report.matmul_flop_per_s
    out.print(
        f"measured here: memory reads {bandwidth / 1e9:.1f} GB/s, float32 matrix products {rate / 1e9:.0f} GFLOP/s"
    )
    for batch, n_bytes in report.step_bytes.items():
        out.print(
            f"roofline at batch {batch}: {report.roofline(batch):.1f} tokens/s, the lower of {n_bytes / 1e6:,.0f} MB "
            f"a step to read ({report.read_limit(batch):.1f}) and {report.step_flop[batch] / 1e9:.2f} GFLOP "
            f"({report.matmul_limit(batch):.1f})",
            soft_wrap=True,
        )
    for ratio in report.ratios:
        out.print(
            f"batch {ratio.batch}: {title(ratio.ours)} is {ratio.ratio:.2f} × {title(ratio.peer)} "
            f"({ratio.lowest:.2f}–{ratio.highest:.2f} over the rounds)",
            soft_wrap=True,
        )
    for peer, note in report.notes.items():
        out.print(f"{title(peer)}: {note}", style="dim", soft_wrap=True)
    for peer, why in report.left_out.items():
        out.print(f"left out: {title(peer)}, {why}", style="yellow", soft_wrap=True)


def _counts(option: str, text: str) -> list[int]:
    """Positive whole numbers separated by commas, each once, in the order given."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(
            f"{option} {text!r} must be whole numbers of at least 1 separated by commas, e.g. 1,8,32"
        )
    return list(dict.fromkeys(numbers))


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _verdict(met: bool) -> str:
    return "met" if met else "missed"
