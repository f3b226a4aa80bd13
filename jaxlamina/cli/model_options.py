"""Options of definitions (`jaxlamina.options`) as options of commands; and the loading of the model that they
say.

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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jaxlamina.console.progress import bar
from jaxlamina.errors import UserError
from jaxlamina.options import (
    DEFAULT_SEQS,
    FIRST_COME,
    SERVER_POLICY,
    Definition,
    LLMOptions,
    ModelOptions,
    WorkerOptions,
    definitions,
    option,
)
from jaxlamina.process.gpus import MEMORY_SHARE
from jaxlamina.process.user_code import check_module

if TYPE_CHECKING:
    from jaxlamina.llm import LLM


def _auto_or_number(text: Any) -> str | int:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} must be a whole number or auto") from None


def as_typer(definition: Definition) -> Any:
    """An option's flags, range and help, as typer takes them."""
    more = definition.option
    flags = () if more.flag is None else (more.flag,)
    if definition.kind is bool and not flags:
        name = definition.name.replace("_", "-")
        flags = (f"--{name}/--no-{name}",)
    how: dict[str, Any] = {"help": more.help, "metavar": more.metavar}
    if definition.kind is int and definition.words:
        how |= {"parser": _auto_or_number, "metavar": "N|auto"}
    elif not more.above:
        how |= {"min": more.least, "max": more.most}
    return typer.Option(*flags, **how)


def parsed_dop(text: str, least_attention: int = 1) -> tuple[int, int]:
    """Of ``--dop``: model workers and attention workers. ``UserError`` for anything else."""
    words = text.split(",")
    if len(words) == 2 and all(word.strip().isdecimal() for word in words):
        a, b = map(int, words)
        if a and b >= least_attention:
            return a, b
    alone = "" if least_attention else " or 1,0"
    raise UserError(f"--dop {text!r} must be model workers, attention workers, such as 1,2{alone}")


def _annotation(definition: Definition) -> Any:
    kind: Any = definition.option.flag_type or definition.kind or str
    if kind is int and definition.words:
        kind = Any
    elif definition.may_be_none:
        kind = kind | None
    return Annotated[kind, as_typer(definition)]


_MODEL = definitions(ModelOptions)
# Of what is planned for or simulated.
TraceName = Annotated[
    str,
    typer.Option(
        help="azure-conversation, azure-code, kimi-conversation, a .csv or .jsonl file, or a .json file of "
        "`bench serve --save-result`."
    ),
]
MemoryDevice = Annotated[
    str | None, typer.Option(help="The device of attention workers; left out: as --compute.")
]
LinkGbS = Annotated[
    float | None,
    typer.Option(
        "--link-gb-s",
        help="Between the pools, one way. Default: up to 8 devices of one kind are in one host, as "
        "calibrated; others have NCCL's share of the network.",
    ),
]
LinkUs = Annotated[
    float | None, typer.Option("--link-us", help="An empty message between the pools, one way.")
]
AsRun = Annotated[
    bool,
    typer.Option(
        "--as-run/--at-best",
        help="How devices that share out an unsplit model sum: as it runs here, by XLA, or at their best.",
    ),
]
MtbfHours = Annotated[
    float | None,
    typer.Option(
        "--mtbf-hours", help="Mean time between failures of one device. Each has the whole job start again."
    ),
]
NoticeS = Annotated[float, typer.Option("--notice-s", help="With --mtbf-hours: until a failure is noticed.")]
StartS = Annotated[
    float,
    typer.Option(
        "--start-s", help="With --mtbf-hours: until the job is ready again; with a spare about 0.4."
    ),
]
KvReturnGbS = Annotated[
    float,
    typer.Option(
        "--kv-return-gb-s",
        help="With --mtbf-hours: at which kept KV comes back to each device that holds some.",
    ),
]
# Options of models that benches have as well.
Model = Annotated[str, as_typer(_MODEL["model"])]
Revision = Annotated[str | None, as_typer(_MODEL["revision"])]
DType = Annotated[str, as_typer(_MODEL["dtype"])]
MaxModelLen = Annotated[int | None, as_typer(_MODEL["max_model_len"])]
MaxNumSeqs = Annotated[int | None, as_typer(_MODEL["max_num_seqs"])]
MaxNumBatchedTokens = Annotated[Any, as_typer(_MODEL["max_num_batched_tokens"])]
TpotSloMs = Annotated[float | None, as_typer(_MODEL["tpot_slo_ms"])]
KvSlots = Annotated[int | None, as_typer(_MODEL["kv_slots"])]
KvHeadroom = Annotated[float | None, as_typer(_MODEL["kv_headroom"])]
MixedSteps = Annotated[bool, as_typer(_MODEL["mixed_steps"])]
PromptBatchTokens = Annotated[int | None, as_typer(_MODEL["prompt_batch_tokens"])]
SchedulingPolicy = Annotated[str | None, as_typer(_MODEL["scheduling_policy"])]
AsyncScheduling = Annotated[bool, as_typer(_MODEL["async_scheduling"])]
Split = Annotated[bool, as_typer(definitions(WorkerOptions)["split"])]
TensorParallel = Annotated[int, as_typer(definitions(WorkerOptions)["tensor_parallel"])]
# Options of several benches.
MOST_REQUESTS, MOST_TOKENS = 10**6, 10**7
"""Of a bench's load, which is made before it is sent."""
InputLen = Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Prompt tokens of random requests.")]
OutputLen = Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Output tokens of random requests.")]


@dataclass(frozen=True)
class CommandOptions(ModelOptions, WorkerOptions):
    """The options of every command that loads a model to write with. A command has them as one parameter, by
    `with_options`; what they mean is `LLM`'s."""

    chat_template: str | None = option(
        None, "A file with a chat template, or the template, in place of the model's own."
    )

    def find(self) -> str | Path:
        """As `find`."""
        return find(self.model, self.revision, self.load_format)

    def of_llm(self, *, default_seqs: int, default_policy: str = FIRST_COME) -> dict[str, Any]:
        """`LLM`'s own arguments among them. ``default_seqs``: sequences at once, where --max-num-seqs is left
        out; ``default_policy``: who goes first, where --scheduling-policy is."""
        text = self.calibration_file and text_of(Path(self.calibration_file), "--calibration-file")
        return self.only(LLMOptions) | {
            "revision": None,  # `find` has looked at it
            "calibration_tokens": text,
            "max_num_seqs": self.max_num_seqs or default_seqs,
            "scheduling_policy": self.scheduling_policy or default_policy,
        }


_CONTEXT = "context"  # a parameter by which typer hands on what was said and by whom


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each option of its parameters that are dataclasses of options, after the
    command's own flags. An option that the command has itself is the command's, one of two of them the
    first's; a parameter's default says other defaults."""
    signature = inspect.signature(command, eval_str=True)
    parameters = signature.parameters
    taken: dict[str, Any] = {
        p.name: p.annotation for p in parameters.values() if dataclasses.is_dataclass(p.annotation)
    }
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values() if p.name not in taken]
    of: dict[str, list[Definition]] = {}
    for name, kind in taken.items():
        known = {*parameters, *(d.name for found in of.values() for d in found)}
        of[name] = [d for d in definitions(kind).values() if d.name not in known]
    flags = [
        inspect.Parameter(
            d.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(parameters[name].default, d.name, d.default),
            annotation=_annotation(d),
        )
        for name, found in of.items()
        for d in found
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        context = given.pop(_CONTEXT)
        if given.get("url") is not None:
            why = "is of a model in this process, and the server at --url has its own: leave one out"
            refuse_given(context, why, *(d.name for found in of.values() for d in found))
        if "revision" in given:
            given["revision"] = revision_of(context)
        made = {
            name: getattr(kind, "of_flags", kind)(**{d.name: _value(d, given.pop(d.name)) for d in of[name]})
            for name, kind in taken.items()
        }
        command(**given, **made)

    context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    every = (context, *own, *flags)
    run.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    del run.__wrapped__  # type: ignore[attr-defined]  # else typer reads the command's own
    return run


def _value(definition: Definition, given: Any) -> Any:
    """Of what stands on the command line, which gives an empty list for none."""
    if given == [] or given is None:
        return definition.default if given == [] else None
    return given if definition.option.read is None else definition.option.read(given)


def revision_of(context: typer.Context) -> str | None:
    """The model's revision: one that a cluster file says is of its own model, not of one that the command
    says."""
    if (_said_by(context, "model"), _said_by(context, "revision")) == ("COMMANDLINE", "DEFAULT_MAP"):
        return None
    found: str | None = context.params["revision"]
    return found


def _said_by(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return "" if source is None else source.name


def refuse_given(context: typer.Context, why: str, *names: str) -> None:
    """`UserError` for an option that stands on the command line and has no effect there. ``why``: what it is
    of, and what to do."""
    for name in names:
        if _said_by(context, name) == "COMMANDLINE":
            raise UserError(f"--{name.replace('_', '-')} {why}")


def check_of_failures(context: typer.Context, mtbf_hours: float | None, *more: str) -> None:
    """`UserError` for an option of failures where there are none."""
    if mtbf_hours is None:
        why = "is of failures that come by chance: add --mtbf-hours, or leave it out"
        refuse_given(context, why, "notice_s", "start_s", "kv_return_gb_s", *more)


def check_over_ranks(context: typer.Context) -> None:
    """`UserError` for an option of a command whose say is the cluster file's, where it is over ranks."""
    for definition in (*definitions(WorkerOptions).values(), _MODEL["gpu_memory_utilization"]):
        if _said_by(context, definition.name) == "COMMANDLINE":
            [param] = [p for p in context.command.params if p.name == definition.name]
            off = context.params[definition.name] is False and param.secondary_opts
            flag = (off or param.opts)[0]
            raise UserError(
                f"{context.command.name}'s {flag} is for one process; over ranks the cluster says it: leave "
                "it out"
            )


def find(model: str, revision: str | None = None, load_format: str = "auto") -> str | Path:
    """The model's files, fetched if they must be: before JAX is imported, so that a wrong name is an error at
    once. A function that makes a model stays as it is named; its module must be there."""
    from jaxlamina import model_files

    if model_files.is_code(model):
        if revision is not None or load_format != "auto":
            given = "--revision" if revision is not None else f"--load-format {load_format}"
            raise UserError(
                f"{given} is for models that are read from files, and {model} is a function: leave it out"
            )
        check_module(model)
        return model
    look_up = model_files.find_shape if load_format == "dummy" else model_files.find
    return look_up(model, revision)


def load(
    console: Console,
    path: str | Path,
    options: CommandOptions,
    *,
    default_seqs: int = DEFAULT_SEQS,
    default_policy: str = SERVER_POLICY,
    weights: tuple[str, str | None] | None = None,
    **more: Any,
) -> LLM:
    """The model at ``path``, as `find` found it, over this process's ranks where it leads some. ``weights``:
    the model, and its revision, that the weights are taken from, where that is another one.
    ``default_seqs`` and ``default_policy``: as of `CommandOptions.of_llm`; ``more``: what else `LLM` is
    given."""
    of_llm = options.of_llm(default_seqs=default_seqs, default_policy=default_policy) | more
    template = None if options.chat_template is None else _template(options.chat_template)
    if options.gpu_memory_utilization is not None:  # JAX looks at it when it first asks for a GPU
        os.environ[MEMORY_SHARE] = str(options.gpu_memory_utilization)
    with console.status("starting JAX"):
        from jaxlamina import ranks
        from jaxlamina.llm import LLM
        from jaxlamina.weights.sources import ModelSource, OtherWeights, open_source
    group = ranks.current()
    if group is not None:
        most = group.cluster.max_num_seqs or DEFAULT_SEQS
        of_llm |= {"group": group, "max_num_seqs": options.max_num_seqs or min(default_seqs, most)}
    model: str | Path | ModelSource = path
    if weights is not None:
        model = OtherWeights(open_source(path, options.load_format, None), *weights)
    with bar(console, "reading weights", in_bytes=True) as on_load:
        llm = LLM(model, on_load=on_load, **of_llm)
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
