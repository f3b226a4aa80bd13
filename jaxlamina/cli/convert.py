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
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        from jaxlamina.weights import convert as convert_

        task = progress.add_task("converting", total=None, visible=False)

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            progress.update(task, completed=done_bytes, total=total_bytes, visible=True)

        folder = convert_(source, target, to=to, dtype=dtype, progress=on_progress)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    console.print(
        f"wrote {folder} ({to}, {dtype}, {size / 1e6:,.1f} MB)", highlight=False, markup=False, soft_wrap=True
    )
