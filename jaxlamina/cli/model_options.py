"""Options that say which model a command loads and how it is kept, where several commands have them; and its loading.

Knows `LLM`'s options; nothing of what a command does with the model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jaxlamina.cli.progress import bar
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.llm import LLM

DEFAULT_MODEL = "smollm2-135m-instruct"

Model = Annotated[
    str,
    typer.Option(help="A name (smollm2-135m-instruct), a Hugging Face folder, a .gguf or an orbax folder."),
]
LoadFormat = Annotated[
    str,
    typer.Option(
        help="auto, or dummy: random weights, of the shape that --model's config.json, or its name in configs/models, says."
    ),
]
Split = Annotated[
    bool,
    typer.Option("--split/--no-split", help="Two workers, or each step one program to compare with."),
]
DType = Annotated[str, typer.Option(help="Weights and KV: float32 or bfloat16.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of a request, prompt included.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")]
KvDtype = Annotated[str, typer.Option(help="KV: auto (as --dtype), int8, or int8-channel (fixed scales).")]
Partition = Annotated[
    str, typer.Option(help="What several attention workers share out: heads, requests or tokens.")
]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        help="Who goes first: fifo, priority, chat-first, shortest-remaining, or package.module:Class."
    ),
]
KvManager = Annotated[
    str, typer.Option(help="KV: token, or padded as a contiguous KV cache is, to compare with.")
]
KvHeadroom = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Share of what running requests may still write that has room when another is let in. Default: as others wrote.",
    ),
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1,
        help="Share of a GPU's memory that is taken, for weights, KV and all else. Default: JAX's, 0.75.",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help="A file with a chat template, or the template, in place of the model's own."),
]


def load(
    console: Console,
    model: str,
    *,
    chat_template: str | None = None,
    gpu_memory_utilization: float | None = None,
    **options: Any,
) -> LLM:
    """The model, over this process's ranks where it leads some."""
    if gpu_memory_utilization is not None:  # JAX looks at it when it first asks for a GPU
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(gpu_memory_utilization)
    with console.status("starting JAX"):
        from jaxlamina import ranks
        from jaxlamina.llm import LLM
    group = ranks.current()
    if group is not None:
        options |= {"group": group}
    with bar(console, "reading weights", in_bytes=True) as on_load:
        llm = LLM(model, on_load=on_load, **options)
    if chat_template is not None:
        if llm.tokenizer is None:
            raise UserError("--chat-template needs a model with a tokenizer")
        llm.tokenizer.chat_template = _template(chat_template)
    return llm


def _template(text: str) -> str:
    from jaxlamina.chat_template import variables_of

    path = Path(text)
    try:
        if "{" not in text:
            text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the chat template {path}: {error}") from None
    variables_of(text)  # says so now if it is none
    return text
