"""Options, each defined once: name, type, default, range and help.

What `LLM` takes, the command line's flags, the cluster file's keys and the tables of the docs are all made
from these definitions; so an option is added here, and where it is used. Plain Python: knows no JAX, no
command line and no file.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jaxlamina.errors import UserError

POLICY_NAMES = ("fifo", "fcfs", "priority", "chat-first", "shortest-remaining")  # fcfs: vLLM's name of fifo
SERVER_POLICY = "chat-first"
"""What servers take where nobody chooses: chats and batches meet there, and somebody waits for a chat."""
FIRST_COME = "fifo"
"""Who goes first where nobody else waits for an answer."""
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_SEQS = 32
"""Sequences decoded at once where nobody says."""
PROMPT_BATCH_TOKENS = 512
"""Of short prompts in one call on an accelerator, which takes as long to read the weights as to multiply them
with some 300 tokens (docs/findings.md)."""
NOTICE_S, START_S, KV_RETURN_GB_S = 0.05, 10.0, 18.0
"""What a failure costs where nobody says: until it is noticed, until the job is ready again, and how fast KV
comes back. Of one process with a GPU and no spare, the 8B shape with weights drawn at random: 0.02 to 0.05,
6.4 to 9.7 and 17 to 20 on three hosts with H100s or H200s (docs/reliability.md)."""
FILES_HELP = (
    "A name (smollm2-135m-instruct), a Hugging Face folder, a .gguf, an orbax folder, or org/name of the "
    "Hugging Face Hub (org/name:file.gguf for a GGUF)"
)
MODEL_HELP = f"{FILES_HELP}; or package.module:build, a function of yours that returns a jaxlamina.FlaxModel."


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its name, type and default.

    - ``least``, ``most``: the range of a number; ``above``: ``least`` itself is too little.
    - ``rule``: what a value must be, in words, where the type and the range do not say it well.
    - ``choices``: words, of which it must be one where the annotation cannot say them.
    - ``check``: raises `UserError` for a value that type and range allow and that is none all the same.
    - ``flag``: the command line's name, where it is another: "--enable-x/--no-enable-x". ``flag_type``: its
      type there, where it is another, of which ``read`` makes the value; ``metavar``: how help shows it.
    """

    help: str
    least: float | None = None
    most: float | None = None
    above: bool = False
    rule: str = ""
    choices: tuple[str, ...] = ()
    check: Callable[[Any], None] | None = None
    flag: str | None = None
    flag_type: Any = None
    read: Callable[[Any], Any] | None = None
    metavar: str | None = None

    def holds(self, value: float) -> bool:
        """Whether a number is in the range."""
        if not math.isfinite(value):
            return False
        if self.least is not None and (value < self.least or (self.above and value == self.least)):
            return False
        return self.most is None or value <= self.most

    @property
    def range_text(self) -> str:
        """ "at least 1", "from 0 to 1": what a number must be."""
        if self.rule or self.least is None:
            return self.rule
        least = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
        return least if self.most is None else f"{least}, and {self.most:g} at most"


def option(default: Any, help: str, **how: Any) -> Any:
    """A dataclass's field that is an option; ``how``: the fields of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **how)})


MOST_S = 30 * 24 * 3600
"""Seconds that anything may wait for: the system's timers take no number at all."""


def seconds(default: float, help: str, *, least: float = 0, above: bool = False) -> Any:
    """A field that is an option of so many seconds: at most 30 days."""
    beginning = f"above {least:g}" if above else f"at least {least:g}"
    rule = f"a number of seconds {beginning}, and {MOST_S} (30 days) at most"
    return option(default, help, least=least, most=MOST_S, above=above, rule=rule)


@dataclass(frozen=True)
class Definition:
    """An option with its name, annotation and default."""

    name: str
    annotation: Any
    default: Any
    option: Option

    @property
    def kind(self) -> type | None:
        """The plain type of its values; None for words alone."""
        if self.option.choices:
            return None
        return next((k for k in _parts(self.annotation) if k is not type(None) and isinstance(k, type)), None)

    @property
    def words(self) -> tuple[str, ...]:
        """Words that it may be."""
        literals = (k for k in _parts(self.annotation) if typing.get_origin(k) is Literal)
        return self.option.choices + tuple(word for k in literals for word in typing.get_args(k))

    @property
    def may_be_none(self) -> bool:
        return type(None) in _parts(self.annotation)

    def checked(self, value: Any) -> Any:
        """``value``, a whole number as a float where that is the type. `UserError` if it cannot be the
        option's."""
        if (value is None and self.may_be_none) or (isinstance(value, str) and value in self.words):
            return value
        wrong = f"{self.name}={value!r} must be"
        if self.kind is None and self.words:
            raise UserError(f"{wrong} one of {', '.join(self.words)}")
        if self.kind is not None and not _is_a(value, self.kind):
            said = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
            raise UserError(f"{wrong} {self.option.rule or said[self.kind]}")
        if self.kind is float:
            value = float(value)
        if self.kind in (int, float) and not self.option.holds(value):
            raise UserError(f"{self.name}={value!r} must be {self.option.range_text}")
        if self.option.check is not None:
            self.option.check(value)
        return value


def _parts(annotation: Any) -> tuple[Any, ...]:
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if is_union else (annotation,)


def _is_a(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is type(value)
    kinds = {int: numbers.Integral, float: numbers.Real}
    return isinstance(value, kinds.get(kind, kind))


_annotations = functools.cache(typing.get_type_hints)  # a millisecond, and all that is given is checked


def definitions(kind: type) -> dict[str, Definition]:
    """Of a dataclass its fields that are options, by name: its own, then those of its bases."""
    hints, fields = _annotations(kind), {field.name: field for field in dataclasses.fields(kind)}
    names = dict.fromkeys(name for base in kind.__mro__ for name in inspect.get_annotations(base))
    found = (fields[name] for name in names if name in fields and "option" in fields[name].metadata)
    return {f.name: Definition(f.name, hints[f.name], f.default, f.metadata["option"]) for f in found}


class Options:
    """The base of dataclasses of options: holds them to their definitions. `UserError` names the first that
    is wrong."""

    def __post_init__(self) -> None:
        for name, definition in definitions(type(self)).items():
            object.__setattr__(self, name, definition.checked(getattr(self, name)))

    def only(self, kind: type) -> dict[str, Any]:
        """The options that ``kind`` has, too."""
        return {name: getattr(self, name) for name in definitions(type(self)) if name in definitions(kind)}


def described(kind: type) -> str:
    """Lines of a docstring: each option and its help."""
    return "\n".join(f"    - ``{d.name}``: {d.option.help}" for d in definitions(kind).values())


def table(kind: type) -> Iterator[str]:
    """Lines of a table in Markdown: key, default as TOML has it, and help."""
    yield "| key | default | |"
    yield "|---|---|---|"
    for d in definitions(kind).values():
        default = "" if d.default is None else f"`{_as_toml(d.default)}`"
        yield f"| `{d.name}` | {default} | {d.option.help} |"


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def check_policy_name(name: str) -> None:
    """``UserError`` for what cannot name a policy; whether a class is there is seen when it is loaded."""
    module, _, cls = name.partition(":")
    if name not in POLICY_NAMES and not (module and cls):
        raise UserError(
            f"scheduling_policy={name!r} must be one of {', '.join(POLICY_NAMES)}, or a class: "
            "package.module:Class"
        )


def _check_model(name: str) -> None:
    if not name:
        raise UserError("model='' must be a name, a folder or a file")


@dataclass(frozen=True)
class EngineOptions(Options):
    """How a model is kept and its requests are served: of `LLM`, of commands and of cluster files."""

    revision: str | None = option(None, "A branch, tag or commit, of a model of the Hugging Face Hub.")
    load_format: Literal["auto", "dummy"] = option(
        "auto",
        "auto, or dummy: random weights, of the shape that the model's config.json, or its name in "
        "configs/models, says.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Weights and KV: float32, bfloat16, or auto: the model's own, but float32 on CPUs."
    )
    quantization: Literal["auto", "gguf", "none"] = option(
        "auto",
        "gguf: a GGUF's matrices of Q4_0, Q4_1 and Q8_0 stay as they are stored and are decoded while they "
        "are multiplied with, in float32; none: all are decoded when they are read; auto: gguf where native "
        "kernels do it, on CPUs. The same tokens either way.",
    )
    max_model_len: int | None = option(
        None,
        "Tokens of a request, prompt included. Default: the model's, or less if KV does not fit.",
        least=2,
    )
    max_num_seqs: int | None = option(
        None,
        f"Sequences decoded at once. Default: {DEFAULT_SEQS}; of generate, as many as it is to write; of "
        "chat, 4.",
        least=1,
    )
    max_num_batched_tokens: int | Literal["auto"] | None = option(
        "auto",
        "Prompt tokens computed in one step; longer prompts come in chunks, between which running "
        "requests get tokens. auto: while others write, as many as the cost model says tpot_slo_ms allows, "
        "corrected by what steps take, and 2048 at most; always 2048 with prefill workers, and where no cost "
        "is known. None, in Python alone: prompts are computed whole.",
        least=1,
        rule="at least 1, 'auto' or None",
    )
    tpot_slo_ms: float | None = option(
        None,
        "Of max_num_batched_tokens=auto: the milliseconds that a step with prompt tokens may take while "
        "others write. Default: 5 decode steps' time.",
        least=0,
        above=True,
    )
    mixed_steps: bool = option(
        False,
        "Compute prompts in the programs of decode steps, which read weights once for both; more programs "
        "to compile. Prefill workers compute prompts beside decode steps whatever it says.",
    )
    prompt_batch_tokens: int | None = option(
        None,
        "Tokens, padding included, of several short prompts that are computed in one call, which reads "
        "weights once for all; 0: each prompt is a call of its own. Default: "
        f"{PROMPT_BATCH_TOKENS} on accelerators of one process, and with one model worker where messages go "
        "by memory; 0 otherwise, with prefill workers, and where attention workers share requests or tokens.",
        least=0,
    )
    async_scheduling: bool = option(
        True,
        "Launch each step before the tokens of the one before it are looked at; the same tokens either way.",
    )
    prefix_caching: bool = option(
        True,
        "Start prompts from KV that others left; or never.",
        flag="--enable-prefix-caching/--no-enable-prefix-caching",
    )
    kv_slots: int | None = option(
        None,
        "Tokens whose KV is kept, of all requests together. Default: as many as could be used, as far as "
        "memory goes.",
        least=1,
    )
    kv_dtype: Literal["auto", "int8", "int8-channel", "int8-channel-asymmetric"] = option(
        "auto",
        "KV: auto (as dtype), int8 (a scale a token and head), int8-channel (fixed scales) or "
        "int8-channel-asymmetric (and fixed zero points): half the bytes of bfloat16, and not quite the "
        "same tokens.",
    )
    host_kv_slots: int | Literal["auto"] = option(
        "auto",
        "Tokens whose KV may wait in host memory when there is no room. auto: beside accelerators as many "
        "as there is room for on them, in a quarter of free host memory at most; on CPUs none.",
        least=0,
        rule="0 (none) or more, or 'auto'",
    )
    kept_kv_slots: int | Literal["auto"] | None = option(
        None,
        "Tokens whose KV is also kept in host memory, by content: a prompt that begins with them goes on "
        "after them. auto: as many as each worker has slots, in a quarter of free memory at most; "
        "the default where there is a folder. What was kept there with another number is not gone on with.",
        least=0,
        rule="0 (none) or more, or 'auto'",
    )
    kept_kv_folder: str | None = option(
        None,
        "Where, for a later process of the same model and workers to find it: a folder of files in memory, "
        "as below /dev/shm. Default: memory of the process; with --supervise it outlives the server.",
    )
    scheduling_policy: str | None = option(
        None,
        "Who goes first: fifo, priority, chat-first, shortest-remaining, or package.module:Class, a class "
        f"of yours, also of a module in the current folder. Default: {FIRST_COME}; of servers, "
        f"{SERVER_POLICY}.",
        check=check_policy_name,
    )
    kv_manager: Literal["token", "padded"] = option(
        "token", "KV: token, or padded as a contiguous KV cache is, to compare with."
    )
    kv_headroom: float | None = option(
        None,
        "Share of what running requests may still write that has room when another is let in. Default: as "
        "others wrote.",
        least=0,
        most=1,
        rule="from 0 to 1, or None",
    )
    calibration: str | None = option(
        None,
        "What `bench calibrate` wrote of this kind of device, a file on rank 0's host: by it decode steps "
        "are predicted. n_batches and local_attention of a job over ranks, where they are auto, begin as "
        "predicted and go on as measured; a server has predictions in /metrics and at /dashboard. Default: "
        "what the planner knows of the device, if any.",
        metavar="FILE",
    )
    check_model: bool = option(
        True,
        "Of a FlaxModel: run it as it is and cut, on a few random tokens, before it is served, and refuse "
        "it if they differ.",
    )
    seed: int = option(0, "Requests without a seed of their own get theirs from it.", least=0)

    @property
    def keeps_kv(self) -> bool:
        """Whether KV is kept by content: where somebody says how much, or where and not how much."""
        return bool(self.kept_kv_slots or (self.kept_kv_slots is None and self.kept_kv_folder))


LOCAL_ATTENTION = (
    "The share of the KV that model workers keep and attend to themselves while attention workers attend to "
    "the rest: from 0, none, to 1, all: the unsplit model. By heads it is made of whole KV heads; by "
    "requests or tokens new tokens go to either side. "
)


@dataclass(frozen=True)
class WorkerOptions(Options):
    """How the workers of one process are laid out. Over ranks the cluster file says it."""

    split: bool = option(
        True, "Two workers; or each step one program, to compare with.", flag="--split/--no-split"
    )
    attention_workers: int = option(1, "Workers that share the KV.", least=1)
    tensor_parallel: int = option(
        1,
        "With --no-split: devices of this process that share out the model, its weights and its KV heads.",
        least=1,
    )
    partition: Literal["auto", "heads", "requests", "tokens"] = option(
        "auto",
        "What several attention workers share out: heads, requests or tokens; auto: heads where they "
        "divide evenly, else tokens.",
    )
    q_first: bool | None = option(
        None,
        "Send q before k and v are computed; or all together. Default: q first where the workers' devices "
        "differ.",
    )
    local_attention: float = option(0.0, LOCAL_ATTENTION + "One process has no auto.", least=0, most=1)


@dataclass(frozen=True)
class LLMOptions(EngineOptions, WorkerOptions):
    """What `LLM` takes beside a model and objects."""

    compilation_cache: bool = option(True, "Keep compiled programs on disk for the next process.")
    use_tqdm_on_load: bool = option(True, "Show a bar while weights are read, where stderr is a terminal.")


@dataclass(frozen=True)
class ModelOptions(EngineOptions):
    """Options of commands and of cluster files: which model, which of its files, and how JAX runs it."""

    model: str = option(DEFAULT_MODEL, MODEL_HELP, check=_check_model)
    calibration_file: str | None = option(
        None,
        "A text, on rank 0's host, from which int8-channel and int8-channel-asymmetric KV finds its "
        "scales. Default: random tokens.",
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of a GPU's memory that is taken, for weights, KV and all else. Default: JAX's, 0.75.",
        least=0,
        most=1,
        above=True,
    )
