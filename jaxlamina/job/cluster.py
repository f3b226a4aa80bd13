"""How a job is spread over ranks: DOP, transport, partition, addresses, deadlines and the model, read from TOML.

Every rank reads the same file; rank 0 compares what they read (`as_config`). Pure Python on plain data. Knows nothing
of how ranks are started, of MPI or of devices.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxlamina.errors import UserError
from jaxlamina.job.roles import Pools, Role
from jaxlamina.options import check_headroom, check_policy_name

Platform = Literal["cpu", "cuda", "tpu"]

# Commands that rank 0 can run with the other ranks behind it.
COMMANDS = ("generate", "serve", "bench")

# In the environment of a job's ranks: a word that no other process has, from whoever starts them.
JOB = "JAXLAMINA_JOB"

_AT_LEAST = {
    "token_block": 1,
    "n_batches": 1,
    "mini_batches": 1,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "prefill_workers": 0,
    "max_num_seqs": 1,
    "max_model_len": 2,
    "kv_slots": 1,
    "host_kv_slots": 0,
}
_SECONDS = ("start_deadline_s", "step_deadline_s", "heartbeat_s")
# How a rank reaches rank 0 may differ from host to host; all else must be the same.
_OWN = ("control",)


@dataclass(frozen=True)
class Cluster:
    """One job's ranks. Each field is a key of the TOML file; a key left out has the default.

    - ``dop``: (model workers, attention workers); ranks 0 … a - 1, then b more. Every model worker has the whole model,
      unless ``tensor_parallel`` is a: then each has a share of every large weight; or ``pipeline_parallel`` is a: then
      each has the weights of some slices in a row and runs those, one stage of a pipeline.
    - ``transport``: "mpi" (mpi4jax; any host, mixed platforms) or "xla" (jax.distributed; one platform).
    - ``partition``: what attention workers share out: "heads", "requests" or "tokens"; "auto": heads where the model's
      divide evenly, else tokens. ``token_block``: tokens in a row that one worker keeps under "tokens".
    - ``n_batches``: staggered batches of a decode step: while attention is computed for one, the model worker runs
      slices of the others. 1: none. At least as many as there are copies of the model. "auto": one, or one more than
      copies (of a pipeline two for each stage), whichever is measured to be faster. None: "auto" where ranks have
      accelerators; on CPUs alone the greater of the two for several copies and one else, for there measuring costs more than
      it gains. With ``mini_batches`` one.
    - ``mini_batches``: parts of a batch's requests whose messages go one by one, so that the next part is on its way, and
      the last part's answer, while attention is computed for one (Lamina 2024 §5.2.1, "streaming"). 1: none. Of one batch
      at a time, each of whose tokens is on all attention workers (partition "heads").
    - ``prefill_workers``: so many ranks more, after the attention workers, that compute prompts and nothing else, each with
      the whole model. 0: model workers compute them.
    - ``pipelining``: of several copies of the model: "rotational" (n batches on n - 1 model workers, a batch's slices on
      each in turn), "fixed" (a batch stays on its model worker), or "auto": rotational where the numbers allow it.
    - ``peer_memory``: GPUs of one host write messages into each other's memory, where they can ("xla" only); False: all
      goes by collectives.
    - ``q_first``: send q before k and v are computed; None lets the executor choose.
    - ``control``: host:port where rank 0 listens for control messages; ``coordinator``: host:port of jax.distributed,
      which rank 0 serves too ("xla" only).
    - ``start_deadline_s``: for all ranks to have come; ``step_deadline_s``: for one step; ``heartbeat_s``: between two
      signs of life of a connection.
    - ``model_platform``, ``attention_platform``: "cpu", "cuda" or "tpu"; None leaves the choice to JAX.
    - ``gpu_memory_utilization``: the share of its GPU's memory that each rank's JAX takes; None: JAX's own, 0.75.
    - ``calibration_file``: a text on rank 0's host, whose tokens are `jaxlamina.LLM`'s ``calibration_tokens``.
    - ``scheduling_policy``: None: the command's own, "chat-first" of a server and "fifo" of all else.
    - ``model`` and the rest: as of `jaxlamina.LLM`.

    Raises `UserError` for a value of another type or out of range, naming the field.
    """

    dop: tuple[int, int] = (1, 1)
    transport: Literal["mpi", "xla"] = "xla"
    partition: Literal["auto", "heads", "requests", "tokens"] = "auto"
    token_block: int = 16
    n_batches: int | Literal["auto"] | None = None
    mini_batches: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    prefill_workers: int = 0
    pipelining: Literal["auto", "rotational", "fixed"] = "auto"
    peer_memory: bool = True
    q_first: bool | None = None
    control: str = "127.0.0.1:29400"
    coordinator: str = "127.0.0.1:29401"
    start_deadline_s: float = 120.0
    step_deadline_s: float = 60.0
    heartbeat_s: float = 5.0
    model_platform: Platform | None = None
    attention_platform: Platform | None = None
    model: str = "smollm2-135m-instruct"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_num_seqs: int = 32
    max_model_len: int | None = None
    kv_slots: int | None = None
    kv_dtype: Literal["auto", "int8", "int8-channel", "int8-channel-asymmetric"] = "auto"
    calibration_file: str | None = None
    host_kv_slots: int | Literal["auto"] = "auto"
    scheduling_policy: str | None = None
    kv_manager: Literal["token", "padded"] = "token"
    kv_headroom: float | None = None
    gpu_memory_utilization: float | None = None

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(type(self)).items():
            _check_type(name, getattr(self, name), kind)
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise UserError(f"{name}={value} must be at least {least}")
        for name in _SECONDS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name}={value} must be a number of seconds above 0")
        for name in ("control", "coordinator"):
            address(name, getattr(self, name))
        if not self.model:
            raise UserError("model='' must be a name, a folder or a file")
        check_headroom(self.kv_headroom)
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise UserError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0, and 1 at most"
            )
        if self.scheduling_policy is not None:
            check_policy_name(self.scheduling_policy)
        self._check_combination()

    def _check_combination(self) -> None:
        self._check_pipelining()
        if self.transport == "xla":
            if self.model_platform != self.attention_platform:
                raise UserError(
                    f"transport='xla' needs one platform for both pools, not model_platform="
                    f"{self.model_platform!r} and attention_platform={self.attention_platform!r}: make them "
                    "the same, or take transport='mpi'"
                )
            if self.control == self.coordinator:
                raise UserError(f"control and coordinator are both {self.control!r}: take two ports")

    def _check_pipelining(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel"):
            if (value := getattr(self, name)) not in (1, self.n_model):
                raise UserError(
                    f"{name}={value} must be 1, or {self.n_model}: all model workers of dop={self.dop}"
                )
        if self.tensor_parallel > 1 and self.pipeline_parallel > 1:
            raise UserError(
                f"tensor_parallel={self.tensor_parallel} and pipeline_parallel={self.pipeline_parallel} are two ways for "
                "the same model workers to share out the weights: take one of them"
            )
        if self.pipeline_parallel > 1 and self.pipelining != "auto":
            raise UserError(
                f"pipelining={self.pipelining!r} is about several copies of the model, of which there is one with "
                f"pipeline_parallel={self.pipeline_parallel}: leave it out"
            )
        a, n = self.n_replicas, self.n_batches
        if self.mini_batches > 1:
            self._check_mini_batches()
        if n is None or n == "auto":
            return
        if n < a:
            raise UserError(
                f"dop={self.dop} has {a} model workers for n_batches={n} staggered batches, so some would idle: take "
                f"n_batches={a + 1}, tensor_parallel={a} or pipeline_parallel={a}"
            )
        if self.pipelining == "rotational" and n != a + 1:
            raise UserError(
                f"pipelining='rotational' runs one batch more than there are model workers, {a + 1} for dop={self.dop}, "
                f"not n_batches={n}"
            )

    def _check_mini_batches(self) -> None:
        said = f"mini_batches={self.mini_batches} cuts up the messages of one batch"
        if self.n_batches not in (None, 1) or self.n_model > 1:
            raise UserError(
                f"{said}, on a model worker with all weights: take n_batches=1, or mini_batches=1"
            )
        if self.n_attention > 1 and self.partition not in ("auto", "heads"):
            raise UserError(
                f"{said} of which each worker has all tokens: take partition='heads', or mini_batches=1"
            )

    @property
    def pipelining_mode(self) -> Literal["rotational", "fixed", "stages"]:
        """Which model worker runs a slice of a staggered batch: see ``pipelining``; "stages": who has its weights."""
        if self.pipeline_parallel > 1:
            return "stages"
        n = self.n_batches
        usual = self.n_replicas > 1 or self.pipelining == "rotational" if n is None else False
        rotates = (usual or n in ("auto", self.n_replicas + 1)) and self.pipelining != "fixed"
        return "rotational" if rotates else "fixed"

    @property
    def usual_n_batches(self) -> int:
        """Staggered batches by which no model worker idles, which "auto" compares with one batch."""
        return 2 * self.n_model if self.pipeline_parallel > 1 else self.n_replicas + 1

    def n_batches_on(self, platform: str) -> int | Literal["auto"]:
        """``n_batches``, or what that is where it is None and model workers have devices of ``platform``."""
        if self.n_batches is not None:
            return self.n_batches
        if self.mini_batches > 1:
            return 1
        if {platform, self.attention_platform or "cpu"} != {"cpu"}:
            return "auto"
        return self.usual_n_batches if self.n_replicas > 1 else 1

    @classmethod
    def load(cls, path: str | Path | None, changes: Mapping[str, Any] | None = None) -> Cluster:
        """From a TOML file (None: all defaults), with ``changes`` to single keys put over it.

        ``dop`` is a pair, or text such as "1,2". Raises `UserError`, naming the file, for one that cannot be read, an
        unknown key (with the known ones) and a bad value.
        """
        values = {} if path is None else _read(Path(path))
        where = "" if path is None else f"{path}: "
        _check_keys(values, where)
        _check_keys(changes or {}, "")
        try:
            return cls(**_plain(values | dict(changes or {})))
        except UserError as error:
            raise UserError(f"{where}{error}") from None

    @property
    def pools(self) -> Pools:
        return Pools(*self.dop, n_prefill=self.prefill_workers)

    @property
    def n_replicas(self) -> int:
        """How many times the model's weights are there."""
        return self.n_model // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def shares_weights(self) -> bool:
        """Whether no model worker has all weights, if there are several."""
        return self.n_replicas < self.n_model

    @property
    def n_model(self) -> int:
        return self.dop[0]

    @property
    def n_attention(self) -> int:
        return self.dop[1]

    @property
    def n_ranks(self) -> int:
        return self.pools.n_ranks

    def role(self, rank: int) -> Role:
        """What ``rank`` is. Raises `UserError` for one that is not of this cluster."""
        return self.pools.role(rank)

    def describe(self, rank: int) -> str:
        """A rank as messages name it: "rank 2 (attention worker 1)"."""
        role = self.role(rank)
        return f"rank {rank} ({role.pool} worker {role.index})"

    def error_line(self, rank: int, text: str) -> str:
        """The one line by which a rank says why it ends: "error: rank 2 (attention worker 1): …"."""
        return f"error: {self.describe(rank)}: {' '.join(text.split())}"

    def platform(self, rank: int) -> Platform | None:
        """The platform of a rank's pool, prefill workers' that of model workers; None leaves the choice to JAX."""
        return self.attention_platform if self.role(rank).pool == "attention" else self.model_platform

    def as_config(self) -> dict[str, str | int | float | bool | None]:
        """What must be the same on every rank, as flat data: every field but how rank 0 is reached."""
        values = dataclasses.asdict(self) | {"dop": ",".join(map(str, self.dop))}
        return {name: value for name, value in values.items() if name not in _OWN}


def fields() -> tuple[str, ...]:
    """The keys of a cluster file."""
    return tuple(field.name for field in dataclasses.fields(Cluster))


def address(name: str, text: str) -> tuple[str, int]:
    """Host and port of "host:port" ("[::1]:29400" for IPv6). Raises `UserError`, naming the field ``name``."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{name}={text!r} must be host:port, such as 127.0.0.1:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def change(text: str) -> tuple[str, Any]:
    """One "key=value" of a command line: the value as TOML, or as the text it is where that is no TOML."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{text!r} must be key=value, such as partition=tokens")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the cluster file {path}: {error.strerror}") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise UserError(f"{path} is not TOML: {error}") from None


def _check_keys(values: Mapping[str, Any], where: str) -> None:
    unknown = sorted(values.keys() - set(fields()))
    if unknown:
        raise UserError(f"{where}unknown key {unknown[0]!r}; known: {', '.join(fields())}")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """TOML's values as the fields want them: pairs for lists, floats for whole numbers."""
    plain = dict(values)
    dop = plain.get("dop")
    if isinstance(dop, str):
        pools = Pools.parse(dop)
        plain["dop"] = (pools.n_model, pools.n_attention)
    elif isinstance(dop, list):
        plain["dop"] = tuple(dop)
    for name in (*_SECONDS, "kv_headroom", "gpu_memory_utilization"):
        if type(plain.get(name)) is int:
            plain[name] = float(plain[name])
    return plain


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Holds a value against the field's annotation: a plain type, a Literal, one of these or None, or the pair."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        words_of = [word for k in kinds if typing.get_origin(k) is Literal for word in typing.get_args(k)]
        if value in words_of or (value is None and len(kinds) < len(typing.get_args(kind))):
            return
        kind = kinds[0]
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise UserError(f"{name}={value!r} must be one of {', '.join(choices)}")
    elif name == "dop":
        if not (isinstance(value, tuple) and len(value) == 2):
            raise UserError(f"{name}={value!r} must be two numbers, model workers and attention workers")
        Pools(*value)
    elif type(value) is not kind:
        words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise UserError(f"{name}={value!r} must be {words[kind]}")
