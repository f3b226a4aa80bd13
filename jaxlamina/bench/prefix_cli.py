"""`jaxlamina bench prefix`: options in, a few lines and one last line of JSON out. Knows how results look."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from jaxlamina.cli.model_options import find
from jaxlamina.console.tables import print_where
from jaxlamina.options import MODEL_HELP


def prefix_command(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2-135m-instruct",
    shared: Annotated[int, typer.Option(min=1, help="Tokens that both prompts begin with.")] = 1000,
    own: Annotated[int, typer.Option(min=1, help="Tokens of each prompt after them.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Timed pairs of requests; one more compiles.")] = 5,
    no_split: Annotated[bool, typer.Option("--no-split", help="One program a step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON on stdout.")] = False,
) -> None:
    """Time to the first token of two float32 requests that share most of their prompt."""
    path = find(model)
    from jaxlamina.bench import machine, prefix_bench

    where = machine.describe()
    with Console(stderr=True).status("loading, compiling and timing"):
        times = prefix_bench.measure(
            str(path), n_shared_tokens=shared, n_own_tokens=own, n_rounds=rounds, split=not no_split
        )
    record = times.to_dict()
    if not as_json:
        out = Console()
        print_where(out, where)
        for name, seconds, n in (
            ("first", record["first_median_s"], times.n_computed_first),
            ("second", record["second_median_s"], times.n_computed_second),
        ):
            out.print(f"{name} request: {seconds:.4f} s to its first token, {n} prompt tokens computed")
        met = "met" if times.ratio <= prefix_bench.RATIO_LIMIT else "missed"
        same = "the same tokens as" if times.same_tokens else "OTHER TOKENS THAN"
        out.print(
            f"second / first: {times.ratio:.3f} (limit {prefix_bench.RATIO_LIMIT}: {met}); {same} without a cache"
        )
    print(json.dumps({"bench": "prefix", **record, **where.to_dict()}))
