"""`jaxlamina convert`: one checkpoint into another format, with a progress bar. Knows no format itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[
        str, typer.Argument(help="A model name, a Hugging Face folder, a .gguf or an orbax folder.")
    ],
    target: Annotated[Path, typer.Argument(help="The folder to make; it must not be there yet.")],
    to: Annotated[str, typer.Option(help="safetensors or orbax.")] = "safetensors",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Convert weights between formats: GGUF, safetensors or orbax in, safetensors or orbax out."""
    from rich.console import Console

    from jaxlamina.cli.progress import bar

    console = Console(stderr=True)
    with console.status("starting JAX"):
        from jaxlamina.weights import convert as convert_
    with bar(console, "converting", in_bytes=True) as on_progress:
        folder = convert_(source, target, to=to, dtype=dtype, progress=on_progress)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    console.print(
        f"wrote {folder} ({to}, {dtype}, {size / 1e6:,.1f} MB)", highlight=False, markup=False, soft_wrap=True
    )
