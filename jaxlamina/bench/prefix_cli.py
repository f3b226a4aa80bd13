"""`jaxlamina bench prefix`: its options, and how its results look."""

from __future__ import annotations

from typing import Annotated

from jaxlamina.bench.flags import AsJson, option
from jaxlamina.bench.report import Part, progress, tell, verdict, warning
from jaxlamina.cli.model_options import find
from jaxlamina.options import MODEL_HELP


def prefix_command(
    model: Annotated[str, option(MODEL_HELP)] = "smollm2-135m-instruct",
    shared: Annotated[int, option("Tokens that both prompts begin with.", min=1)] = 1000,
    own: Annotated[int, option("Tokens of each prompt after them.", min=1)] = 16,
    rounds: Annotated[int, option("Timed pairs of requests; one more compiles.", min=1)] = 5,
    no_split: Annotated[bool, option("One program a step.", "--no-split")] = False,
    as_json: AsJson = False,
) -> None:
    """Time to the first token of two float32 requests that share most of their prompt."""
    path = find(model)
    from jaxlamina.bench import machine, prefix_bench

    where = machine.describe()
    with progress("loading, compiling and timing"):
        times = prefix_bench.measure(
            str(path), n_shared_tokens=shared, n_own_tokens=own, n_rounds=rounds, split=not no_split
        )
    record, limit = times.to_dict(), prefix_bench.RATIO_LIMIT
    lines: list[Part] = [
        f"{name} request: {record[f'{name}_median_s']:.4f} s to its first token, {n} prompt tokens computed"
        for name, n in (("first", times.n_computed_first), ("second", times.n_computed_second))
    ]
    same = "the same tokens as" if times.same_tokens else "OTHER TOKENS THAN"
    is_met = verdict(times.ratio <= limit)
    lines.append(f"second / first: {times.ratio:.3f} (limit {limit}: {is_met}); {same} without a cache")
    if not times.n_cached_tokens:
        lines.append(warning("nothing was cached, so nothing is said of a cache: take a longer --shared"))
    tell("prefix", record, where, lines, as_json=as_json)
