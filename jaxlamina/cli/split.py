"""`jaxlamina split`: cut one decode step of a model shape and show the cuts. No weights are read or
allocated.

Knows how a report looks; the cutting and the drawing are the splitter's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxlamina.cli.model_options import Revision, find
from jaxlamina.console.outputs import check_output
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.models import ModelConfig
    from jaxlamina.models.causal_lm import CausalLM
    from splitter import SplitModel, SplitReport
    from splitter.find import FoundAttention


def split(
    model: Annotated[
        str,
        typer.Argument(
            help="A shape in configs/models (llama-3-8b), a .toml or config.json, or any model that "
            "generate takes, package.module:build among them."
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Requests in the decode step that is cut.")] = 1,
    dtype: Annotated[str, typer.Option(help="Weights and activations: float32 or bfloat16.")] = "float32",
    svg: Annotated[Path | None, typer.Option(help="Draw the partitioned graph into this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="The same as a page, details on hovering.")] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Of package.module:build, say how each attention was read, and where."
        ),
    ] = False,
    revision: Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as JSON on stdout.")] = False,
) -> None:
    """Cut a model at its attention operators and report the slices and what crosses each cut."""
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype {dtype!r} must be float32 or bfloat16")
    check_output(svg, "--svg")
    check_output(html, "--html")
    from rich.console import Console

    console = Console(stderr=True)
    path = _find(model, revision)
    with console.status("reading the model's shape"):
        from jaxlamina.models.causal_lm import built, decoder

        shape = built(path).model if isinstance(path, str) else decoder(_shape(path))
    dtype = shape.dtype or dtype
    if explain and not isinstance(path, str):
        raise UserError(
            "--explain is for a model of yours, package.module:build: ours calls splitter.attention itself"
        )
    with console.status(f"tracing and cutting {len(shape.kv)} layers"):
        parts = _cut(shape, batch, dtype)
        report = parts.report()
    found = _explained(shape) if explain else []
    if as_json:
        more = {"attention": [asdict(site) for site in found]} if explain else {}
        print(json.dumps({"model": model, "batch": batch, "dtype": dtype, **report.to_dict(), **more}))
    else:
        _show(
            Console(),
            report,
            title=f"{model}, one decode step of {batch} request{'s' * (batch > 1)}, {dtype}",
        )
        for site in found:
            print(site)
    if svg is not None or html is not None:
        from splitter.draw import to_html, to_svg

        for file, draw in ((svg, to_svg), (html, to_html)):
            if file is not None:
                _write(file, draw(parts))
                console.print(f"wrote {file}", highlight=False, markup=False, soft_wrap=True)


def _find(model: str, revision: str | None) -> str | Path:
    """The file that says the shape, or the folder or GGUF file with it; a function that makes the model as it
    is named. Before JAX is imported."""
    from jaxlamina import model_files
    from jaxlamina.models import config_files

    if model_files.is_code(model):
        return find(model, revision)
    if revision is None and (path := config_files.find_model(model)) is not None:
        return path
    try:
        return model_files.find(model, revision, weights=False)
    except UserError as error:
        if not str(error).startswith("unknown model"):
            raise
        raise UserError(f"{error}; known shapes: {', '.join(config_files.model_names())}") from None


def _shape(path: Path) -> ModelConfig:
    from jaxlamina.models import config_files

    if path.is_dir():
        path = path / "config.json"
    if path.suffix in (".toml", ".json"):
        return config_files.model_config(path)
    from jaxlamina.weights import open_checkpoint

    return open_checkpoint(path).config


def _cut(shape: CausalLM, batch: int, dtype: str) -> SplitModel:
    import jax
    import jax.numpy as jnp

    from splitter import split as split_

    step = jax.ShapeDtypeStruct((batch, 1), jnp.int32)  # tokens and positions, [B, T=1]
    return split_(shape.fn, dict(shape.like(dtype)), step, step)


def _explained(shape: CausalLM) -> Sequence[FoundAttention]:
    from splitter.find import FoundModel

    assert isinstance(shape.fn, FoundModel), "a user's own model"
    return shape.fn.sites


def _show(out: Any, report: SplitReport, title: str) -> None:
    from rich import box
    from rich.table import Table

    from jaxlamina.console.tables import print_table

    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("cuts", "q", "k, v", "attention output", "context"):
        table.add_column(name, justify="right", no_wrap=name != "context")
    table.add_column("of it", overflow="fold")
    for first, last, cut in _runs(report):
        values = "\n".join(f"{v.name} {v.dtype}{list(v.shape)}" for v in cut.context) or "nothing"
        row = (cut.q_bytes, cut.kv_bytes, cut.out_bytes, cut.context_bytes)
        table.add_row(
            f"{first}–{last}" if last > first else f"{first}", *(f"{n:,} B" for n in row), _plain(values)
        )
    print_table(out, table)
    out.print(report.line(), markup=False, highlight=False, soft_wrap=True)
    for what, names in (("no attention", report.aux_outputs), ("attention state", report.state_outputs)):
        if names:
            out.print(f"outputs that depend on {what}: {', '.join(names)}", markup=False, soft_wrap=True)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)  # shapes in square brackets are no markup


def _runs(report: SplitReport) -> list[tuple[int, int, Any]]:
    """Neighbouring cuts that are alike but for their names, as (first, last, one of them)."""
    runs: list[tuple[int, int, Any]] = []
    for i, cut in enumerate(report.cuts):
        alike = runs and _alike(runs[-1][2], cut)
        runs[-1:] = [(runs[-1][0], i, runs[-1][2])] if alike else [*runs[-1:], (i, i, cut)]
    return runs


def _alike(a: Any, b: Any) -> bool:
    def sizes(cut: Any) -> Any:
        values = [(v.name.rsplit("/", 1)[-1], v.shape, v.dtype) for v in cut.context]
        return values, cut.q_bytes, cut.kv_bytes, cut.out_bytes

    return sizes(a) == sizes(b)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
