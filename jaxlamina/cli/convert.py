"""`jaxlamina convert`: one checkpoint into another format, with a progress bar. Knows no format itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxlamina.cli.model_options import Revision, find
from jaxlamina.options import FILES_HELP


def convert(
    source: Annotated[str, typer.Argument(help=f"{FILES_HELP}.")],
    target: Annotated[Path, typer.Argument(help="The folder to make; it must not be there yet.")],
    to: Annotated[str, typer.Option(help="safetensors or orbax.")] = "safetensors",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: the source's own, float32 if quantised.")
    ] = "auto",
    revision: Revision = None,
) -> None:
    """Convert weights between formats: GGUF, safetensors or orbax in, safetensors or orbax out."""
    from rich.console import Console

    from jaxlamina.console.progress import bar

    path = find(source, revision)
    console = Console(stderr=True)
    with console.status("starting JAX"):
        from jaxlamina.weights import convert as convert_
    with bar(console, "converting", in_bytes=True) as on_progress:
        folder = convert_(path, target, to=to, dtype=dtype, progress=on_progress)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    kept = json.loads((folder / "config.json").read_text(encoding="utf-8"))["torch_dtype"]
    console.print(
        f"wrote {folder} ({to}, {kept}, {size / 1e6:,.1f} MB)", highlight=False, markup=False, soft_wrap=True
    )
