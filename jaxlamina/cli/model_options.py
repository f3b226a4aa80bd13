"""Options that say which model a command loads and how it is kept, each defined once; and its loading.

Knows `LLM`'s options; nothing of what a command does with the model.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from jaxlamina.console.progress import bar
from jaxlamina.errors import UserError
from jaxlamina.options import SERVER_POLICY
from jaxlamina.process.gpus import MEMORY_SHARE

if TYPE_CHECKING:
    from jaxlamina.llm import LLM

DEFAULT_MODEL = "smollm2-135m-instruct"
# Sequences decoded at once by commands that serve others.
SERVED_SEQS = 32
# Who goes first where nobody else waits for an answer.
FIRST_COME = "fifo"

# Options that other commands have, too.
MODEL_HELP = (
    "A name (smollm2-135m-instruct), a Hugging Face folder, a .gguf, an orbax folder, or org/name of the Hugging Face Hub "
    "(org/name:file.gguf for a GGUF)."
)
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Revision = Annotated[
    str | None, typer.Option(help="A branch, tag or commit, of a --model of the Hugging Face Hub.")
]
DType = Annotated[
    str,
    typer.Option(help="Weights and KV: float32, bfloat16, or auto: the model's own, but float32 on CPUs."),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of a request, prompt included.")]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Sequences decoded at once. Default: 32; of generate, as many as it is to write; of chat, 4.",
    ),
]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(min=1, help="Prompt tokens computed in one step; longer prompts come in chunks.")
]
KvSlots = Annotated[
    int | None, typer.Option(min=1, help="Tokens whose KV is kept, of all requests together.")
]
KvHeadroom = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Share of what running requests may still write that has room when another is let in. Default: as others wrote.",
    ),
]


Split = Annotated[
    bool,
    typer.Option("--split/--no-split", help="Two workers, or each step one program to compare with."),
]

# Options of several benches.
InputLen = Annotated[int, typer.Option(min=1, help="Prompt tokens of random requests.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Output tokens of random requests.")]


def _auto_or_number(text: str) -> str | int:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} must be a whole number or auto") from None


@dataclass(frozen=True)
class ModelOptions:
    """The options of every command that loads a model to write with: names, types, defaults and help. A command has them
    as one parameter, by `with_options`; what they mean is `LLM`'s."""

    model: Model = DEFAULT_MODEL
    revision: Revision = None
    load_format: Annotated[
        str,
        typer.Option(
            help="auto, or dummy: random weights, of the shape that --model's config.json, or its name in configs/models, says."
        ),
    ] = "auto"
    dtype: DType = "auto"
    max_model_len: MaxModelLen = None
    max_num_seqs: MaxNumSeqs = None
    max_num_batched_tokens: MaxNumBatchedTokens = 2048
    mixed_steps: Annotated[
        bool,
        typer.Option(
            "--mixed-steps", help="Compute prompts in the programs of decode steps; more programs to compile."
        ),
    ] = False
    kv_slots: KvSlots = None
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="KV: auto (as --dtype), int8, int8-channel (fixed scales) or int8-channel-asymmetric (and zero points)."
        ),
    ] = "auto"
    calibration_file: Annotated[
        Path | None,
        typer.Option(
            help="A text from which --kv-dtype int8-channel or int8-channel-asymmetric finds its scales. Default: random tokens."
        ),
    ] = None
    host_kv_slots: Annotated[
        Any,
        typer.Option(
            parser=_auto_or_number,
            metavar="N|auto",
            help="Tokens whose KV may wait in host memory when there is no room. auto: beside accelerators as many as there is "
            "room for on them, in a quarter of free host memory at most; on CPUs none.",
        ),
    ] = "auto"
    split: Split = True
    attention_workers: Annotated[int, typer.Option(help="Workers that share the KV.")] = 1
    partition: Annotated[
        str,
        typer.Option(
            help="What several attention workers share out: heads, requests or tokens; auto: heads where they divide evenly, "
            "else tokens."
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Start prompts from KV that others left; or never.",
        ),
    ] = True
    scheduling_policy: Annotated[
        str | None,
        typer.Option(
            help="Who goes first: fifo, priority, chat-first, shortest-remaining, or package.module:Class, a class of yours, "
            f"also of a module in the current folder. Default: {SERVER_POLICY}; of generate, {FIRST_COME}."
        ),
    ] = None
    kv_manager: Annotated[
        str, typer.Option(help="KV: token, or padded as a contiguous KV cache is, to compare with.")
    ] = "token"
    kv_headroom: KvHeadroom = None
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1,
            help="Share of a GPU's memory that is taken, for weights, KV and all else. Default: JAX's, 0.75.",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(help="A file with a chat template, or the template, in place of the model's own."),
    ] = None

    def find(self) -> Path:
        """As `find`."""
        return find(self.model, self.revision, self.load_format)

    def of_llm(self, *, default_seqs: int, default_policy: str = FIRST_COME) -> dict[str, Any]:
        """`LLM`'s own arguments among them, but the model. ``default_seqs``: sequences at once, where --max-num-seqs is left
        out; ``default_policy``: who goes first, where --scheduling-policy is."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("model", "revision", "gpu_memory_utilization", "chat_template", "calibration_file"):
            del options[name]
        options["prefix_caching"] = options.pop("enable_prefix_caching")
        text = self.calibration_file and text_of(self.calibration_file, "--calibration-file")
        return options | {
            "calibration_tokens": text,
            "max_num_seqs": self.max_num_seqs or default_seqs,
            "scheduling_policy": self.scheduling_policy or default_policy,
        }


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each field of its parameter ``options``, a `ModelOptions`, as an option, after the command's own."""
    signature = inspect.signature(command, eval_str=True)
    kinds = get_type_hints(ModelOptions, include_extras=True)
    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=kinds[field.name],
        )
        for field in dataclasses.fields(ModelOptions)
    ]
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "options"
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        options = ModelOptions(**{field.name: given.pop(field.name) for field in fields})
        command(**given, options=options)

    run.__signature__ = signature.replace(parameters=[*own, *fields])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *fields)}
    del run.__wrapped__  # type: ignore[attr-defined]  # else typer reads the command's own
    return run


def find(model: str, revision: str | None = None, load_format: str = "auto") -> Path:
    """The model's files, fetched if they must be: before JAX is imported, so that a wrong name is an error at once."""
    from jaxlamina import model_files

    look_up = model_files.find_shape if load_format == "dummy" else model_files.find
    return look_up(model, revision)


def load(
    console: Console,
    path: Path,
    options: ModelOptions,
    *,
    default_seqs: int = SERVED_SEQS,
    default_policy: str = SERVER_POLICY,
    **more: Any,
) -> LLM:
    """The model at ``path``, as `find` found it, over this process's ranks where it leads some. ``default_seqs`` and
    ``default_policy``: as of `ModelOptions.of_llm`; ``more``: what else `LLM` is given."""
    more = options.of_llm(default_seqs=default_seqs, default_policy=default_policy) | more
    template = None if options.chat_template is None else _template(options.chat_template)
    if options.gpu_memory_utilization is not None:  # JAX looks at it when it first asks for a GPU
        os.environ[MEMORY_SHARE] = str(options.gpu_memory_utilization)
    with console.status("starting JAX"):
        from jaxlamina import ranks
        from jaxlamina.llm import LLM
    group = ranks.current()
    if group is not None:
        seqs = options.max_num_seqs or min(default_seqs, group.cluster.max_num_seqs)
        more |= {"group": group, "max_num_seqs": seqs}
    with bar(console, "reading weights", in_bytes=True) as on_load:
        llm = LLM(path, on_load=on_load, **more)
    if template is not None:
        if llm.tokenizer is None:
            raise UserError("--chat-template needs a model with a tokenizer")
        llm.tokenizer.chat_template = template
    return llm


def text_of(path: Path, what: str) -> str:
    """What is in a text file; ``UserError`` says ``what`` cannot be read, and why."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {what} {path}: {error}") from None


def say_dtype(console: Console, llm: LLM) -> None:
    """The dtype and why, where nobody asked for it."""
    if llm.why_dtype:
        line = llm.why_dtype.replace("dtype=", "--dtype ")
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _template(text: str) -> str:
    from jaxlamina.text.chat_template import variables_of

    if "{" not in text:
        text = text_of(Path(text), "the chat template")
    variables_of(text)  # says so now if it is none
    return text
