"""`jaxlamina bench breakdown`: its options, and how its results look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxlamina.bench.flags import AsJson, Case, Config, DType, Figure, Layers, Staggered, option, shape_of
from jaxlamina.bench.report import Columns, Part, dim, progress, table, tell, warning
from jaxlamina.console.figures import check_figure
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.bench.breakdown_bench import Breakdown
    from jaxlamina.job.roles import Pool
    from jaxlamina.transports.scopes import Kind


def breakdown_command(
    config: Config = "llama-3-8b",
    case: Case = "16x4096,64x4096,160x4096",
    dtype: DType = "bfloat16",
    layers: Layers = None,
    staggered: Staggered = "",
    steps: Annotated[int, option("Steps recorded of each case and way.", min=1, max=1000)] = 8,
    timeline: Annotated[
        Path | None, option("Write all ranks' spans for Perfetto: a .json or .json.gz.")
    ] = None,
    figure: Figure = None,
    as_json: AsJson = False,
) -> None:
    """Record where a step's time goes on each rank: `jaxlamina launch --dop 1,1 -- bench breakdown
    --staggered 2`."""
    shape = shape_of(config, layers)
    from jaxlamina import ranks
    from jaxlamina.bench import breakdown_bench, breakdown_figure, machine, step_bench, step_ways
    from jaxlamina.profiling import perfetto

    weights, cases = step_bench.dtype_of(dtype), step_ways.cases_of(case)
    n_batches = step_ways.numbers_of(staggered)
    check_figure(figure)
    if timeline is not None:
        perfetto.check(timeline, "--timeline")
    group = ranks.current()
    if group is None:
        raise UserError(
            "there are no ranks to record: start them with `jaxlamina launch … -- bench breakdown`"
        )
    where = machine.describe(["mpi4jax", "mpi4py"])
    with progress() as on_progress:
        source = step_bench.source_of(shape)
        found = breakdown_bench.measure(
            source, cases, group=group, dtype=weights, n_steps=steps, staggered=n_batches,
            on_progress=on_progress,
        )  # fmt: skip
    record = step_bench.job_of(config, source.model, dtype, group)
    record |= {"results": [x.to_dict() for x in found]}
    title = "{model}, {n_layers} layers, {dtype}; {job}; {accelerator}".format(**record)
    tell("breakdown", record, where, [title, *_parts(found)], as_json=as_json)
    if timeline is not None:
        perfetto.write({str(x): x.timeline for x in found}, timeline)
    if figure is not None:
        breakdown_figure.draw(found, f"{title}, {where.line()}", figure)


def _parts(found: Sequence[Breakdown]) -> Iterator[Part]:
    rows = [(x, pool) for x in found for pool in x.timeline.pools]
    yield table(rows, _columns(rows[0][1]), section=lambda row: row[0].case)
    yield dim(
        "ms a step and share of it, a pool's ranks' mean. bubble: its devices idle, or in an exchange whose "
        "other end has not come. other: operators of no slice, layer or exchange. untraced: without the "
        "profiler, with the time between steps."
    )
    alone = sum(x.timeline.n_unmatched for x in found)
    if alone:
        yield warning(f"{alone} exchanges were found on one end only: their waiting counts as exchange")


def _columns(first: Pool) -> Columns:
    """Of rows of a `Breakdown` and a pool; what both pools have is shown with the ``first``."""

    def share(row: tuple[Breakdown, Pool], *kinds: Kind) -> str:
        timeline = row[0].timeline
        ranks = timeline.ranks_of(row[1])
        ms, shares = timeline.ms(ranks), timeline.shares(ranks)
        return f"{sum(ms[kind] for kind in kinds):.2f} {sum(shares[kind] for kind in kinds):4.0%}"

    return (
        ("case", lambda row: str(row[0].case), "<"),
        ("way", lambda row: row[0].way if row[1] == first else "", "<"),
        ("pool", lambda row: f"{row[1]} × {len(row[0].timeline.ranks_of(row[1]))}", "<"),
        ("ms a step", lambda row: f"{row[0].timeline.step_ms:.2f}" if row[1] == first else "", ""),
        ("its work", lambda row: share(row, "model", "attention"), ""),
        ("exchange", lambda row: share(row, "exchange"), ""),
        ("other", lambda row: share(row, "other"), ""),
        ("bubble", lambda row: share(row, "bubble"), ""),
        ("untraced ms", lambda row: f"{row[0].untraced_ms:.2f}" if row[1] == first else "", ""),
    )
