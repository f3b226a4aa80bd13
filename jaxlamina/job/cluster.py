"""How a job is spread over ranks: DOP, transport, partition, addresses, deadlines and the model, read from
TOML.

Every rank reads the same file; rank 0 compares what they read (`as_config`). Pure Python on plain data. Knows
nothing of how ranks are started, of MPI or of devices.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxlamina.errors import UserError
from jaxlamina.job.roles import Pools, Role
from jaxlamina.options import LOCAL_ATTENTION, ModelOptions, definitions, option, seconds

Platform = Literal["cpu", "cuda", "tpu"]

# Commands that rank 0 can run with the other ranks behind it.
COMMANDS = ("generate", "serve", "bench")

# In the environment of a job's ranks: a secret that no other process has, from whoever starts them.
JOB = "JAXLAMINA_JOB"

# How a rank reaches rank 0, and where it finds the secret and certificates, may differ from host to host; all
# else must be the same.
_TLS = ("control_certfile", "control_keyfile", "control_cafile")
_OWN = ("control", "job_secret_file", *_TLS)

# What is about attention workers, and the values that go without any.
_OF_ATTENTION_WORKERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "local_attention": ((1, "auto"), "leaves KV to attention workers"),
    "partition": (("heads", "auto"), "is what attention workers share out"),
    "n_batches": ((1, None, "auto"), "staggers batches, while attention workers attend to others"),
    "mini_batches": ((1,), "cuts up messages to attention workers"),
    "prefill_workers": ((0,), "would send prompts to attention workers"),
    "kv_replicas": ((0,), "copies what attention workers keep"),
}


def _address(default: str, name: str, help: str) -> Any:
    return option(default, help, check=lambda text: address(name, text))


def _check_dop(dop: Any) -> None:
    if not (isinstance(dop, tuple) and len(dop) == 2):
        raise UserError(f"{dop=} must be two numbers, model workers and attention workers")
    Pools(*dop)


@dataclass(frozen=True)
class Cluster(ModelOptions):
    """One job's ranks: the options of the model and these. Each is a key of the TOML file; a key left out has
    the default.

    Raises `UserError` for a value of another type or out of range, naming the field, and for two that do not
    go together.
    """

    dop: tuple[int, int] = option(
        (1, 1),
        "Model workers, each with the whole model unless `tensor_parallel` or `pipeline_parallel` says "
        "otherwise, and attention workers. Ranks 0 … a - 1, then b more. `a,0`: the unsplit model over its "
        "model workers, which keep all KV.",
        check=_check_dop,
    )
    transport: Literal["mpi", "xla"] = option(
        "xla",
        "`xla`: XLA collectives over NCCL, ICI or Gloo (jax.distributed), one platform; `mpi`: mpi4jax, any "
        "mixture.",
    )
    partition: Literal["auto", "heads", "requests", "tokens"] = option(
        "auto",
        "What attention workers share out: `heads`, `requests` or `tokens`; `auto`: heads where the model's "
        "KV heads divide evenly, else tokens, which a line on stderr says. By `heads` there may be as many "
        "workers as KV heads; their numbers of heads differ by one where they do not divide.",
    )
    local_attention: float | Literal["auto"] = option(
        "auto",
        LOCAL_ATTENTION + "`auto`: the share at which a step is predicted to be shortest, by tokens unless "
        "`partition` says otherwise; it follows the load. 0 where model workers are copies, have "
        "`mini_batches`, or share out weights by `tensor_parallel`; with these and `partition` `heads`: "
        "the share by which every device attends to as much.",
        least=0,
        most=1,
        rule="from 0 to 1, or 'auto'",
    )
    token_block: int = option(16, "Under `tokens`: tokens in a row that one worker keeps.", least=1)
    n_batches: int | Literal["auto"] | None = option(
        None,
        "Staggered batches of a decode step, at least as many as copies of the model: while attention is "
        "computed for one, "
        "model workers run slices of the others. `auto`: tries one batch, and one batch more than there are "
        "copies (with a "
        "pipeline, two for each stage), on the steps that come, and keeps the faster; only where all KV "
        "that a step can "
        "read is at least half of the weights, since each staggered batch reads them again, or messages go "
        "by `mpi`, whose links may be slow. Left out: `auto` where ranks have "
        "accelerators; 1 on CPUs alone, or with several copies one more than those; 1 with `mini_batches`.",
        least=1,
    )
    mini_batches: int = option(
        1,
        "A batch's messages of each layer in so many parts of its requests, so that one travels while "
        "another is attended to (Lamina 2024 §5.2.1, streaming); with one batch and partition `heads`.",
        least=1,
    )
    tensor_parallel: int = option(
        1, "As many as model workers: they share out every large weight, instead of each having all.", least=1
    )
    pipeline_parallel: int = option(
        1,
        "As many as model workers: each has the weights of some slices in a row and runs those; not "
        "together with `tensor_parallel`.",
        least=1,
    )
    prefill_workers: int = option(
        0,
        "So many ranks more, on `model_platform`, that compute prompts and nothing else; each has the whole "
        "model.",
        least=0,
    )
    prefill_pace: Literal["own", "step"] = option(
        "own",
        "How prefill workers compute prompts. `own`: at their own pace; attention workers take in what is "
        "computed, so that decode steps never wait for it. Each keeps the KV of one prompt of "
        "`max_model_len` tokens. A prompt of which a beginning of `prefill_chunk` tokens or more is cached "
        "goes as with `step`. "
        "`step`: a chunk of `max_num_batched_tokens` beside each decode step, layer by layer with it.",
    )
    prefill_chunk: int = option(
        2048, "Tokens of a prompt that a prefill worker computes at once at its own pace.", least=2
    )
    local_prefill_tokens: int = option(
        64,
        "What a prompt lacks after stored tokens, if it is no more than so many, is computed by model "
        "workers, several such prompts in a step, though there are prefill workers: these would compute the "
        "whole prompt again, one at a time. 0: prefill workers compute all prompts.",
        least=0,
    )
    pipelining: Literal["auto", "rotational", "fixed"] = option(
        "auto",
        "Of copies of the model: `rotational`: a batch's slices on each model worker in turn, one batch "
        "more than model "
        "workers; `fixed`: a batch stays on its model worker; `auto`: rotational where the numbers allow it.",
    )
    kv_replicas: int = option(
        0,
        "1: what each attention worker keeps of its KV by content (`kept_kv_folder`) is also kept on another "
        "rank's host, where there is one, and comes from there when its own host is lost.",
        least=0,
        most=1,
    )
    peer_memory: bool = option(
        True,
        "With `xla`: GPUs of one host write messages into each other's memory where they can (Hopper and "
        "later, in one container); false: all goes by NCCL.",
    )
    q_first: bool | None = option(
        None,
        "True: q leaves before k and v are computed; false: all together; left out: as measured best.",
    )
    control: str = _address("127.0.0.1:29400", "control", "Where rank 0 listens for control messages.")
    coordinator: str = _address(
        "127.0.0.1:29401", "coordinator", "Where rank 0 serves `jax.distributed`, with `xla`."
    )
    job_secret_file: str | None = option(
        None,
        "A file, readable by its user alone, with a secret of 16 bytes or more by which all ranks "
        "of a job know each other; its path may differ from host to host. Left out: what `JAXLAMINA_JOB` in "
        "the environment says, as `jaxlamina launch` sets it for each job.",
    )
    control_certfile: str | None = option(
        None,
        "A certificate in PEM form: connections that ranks open themselves, for control messages and copies "
        "of KV, are TLS with it. All ranks have one or none; its path may differ from host to host. Tensors "
        "are not encrypted.",
    )
    control_keyfile: str | None = option(
        None, "The key of `control_certfile`, without a passphrase. Left out: it is in the same file."
    )
    control_cafile: str | None = option(
        None,
        "Certificates of who has signed the other ranks'. Left out: `control_certfile`, which is then all "
        "ranks' own one.",
    )
    start_deadline_s: float = seconds(
        120.0,
        "Until all ranks have come, and again until all have made their first exchange; a rank that has not "
        "is named, and the job ends.",
        above=True,
    )
    step_deadline_s: float = seconds(
        60.0,
        "For one step. The time counts from when the step was begun, or from the end of the step before it "
        "if that is later. "
        "After it every rank reports where it is, and the job ends. Where messages go by GPUs' memory the "
        "line names the "
        "exchange that the rank's device is at, with its layer and staggered batch; calls of MPI and "
        "collectives leave no mark that a host could read, so there it names the step and its peers alone.",
        above=True,
    )
    heartbeat_s: float = seconds(
        5.0,
        "Between signs of life on a control connection: how soon a lost host is noticed.",
        above=True,
    )
    model_platform: Platform | None = option(None, "`cpu`, `cuda` or `tpu`; left out: JAX's choice.")
    attention_platform: Platform | None = option(None, "As `model_platform`, of attention workers.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_combination()

    def _check_combination(self) -> None:
        if self.n_attention == 0:
            self._check_unsplit()
        self._check_pipelining()
        if self.control_certfile is None and (self.control_keyfile or self.control_cafile):
            raise UserError("control_keyfile and control_cafile go with control_certfile: give that, too")
        if self.kv_replicas and self.kept_kv_slots == 0:
            raise UserError(
                f"kv_replicas={self.kv_replicas} copies KV that is kept, and kept_kv_slots=0 keeps none: "
                "leave one of them out"
            )
        if self.transport == "xla":
            if not self.is_one_platform:
                raise UserError(
                    f"transport='xla' needs one platform for both pools, not model_platform="
                    f"{self.model_platform!r} and attention_platform={self.attention_platform!r}: make them "
                    "the same, or take transport='mpi'"
                )
            if self.control == self.coordinator:
                raise UserError(f"control and coordinator are both {self.control!r}: take two ports")

    def _check_unsplit(self) -> None:
        for name, (possible, what) in _OF_ATTENTION_WORKERS.items():
            if (value := getattr(self, name)) not in possible:
                raise UserError(
                    f"{name}={value!r} {what}, of which dop={self.dop} has none: leave {name} out"
                )
        if (a := self.n_model) > 1 and self.tensor_parallel == self.pipeline_parallel == 1:
            raise UserError(
                f"dop={self.dop} has {a} copies of the model, and no attention workers that these could have "
                f"in common: take tensor_parallel={a}, or {a} jobs of dop=(1, 0)"
            )

    def _check_pipelining(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel"):
            if (value := getattr(self, name)) not in (1, self.n_model):
                raise UserError(
                    f"{name}={value} must be 1, or {self.n_model}: all model workers of dop={self.dop}"
                )
        if self.tensor_parallel > 1 and self.pipeline_parallel > 1:
            raise UserError(
                f"tensor_parallel={self.tensor_parallel} and pipeline_parallel={self.pipeline_parallel} are "
                f"two ways for the same model workers to share out the weights: take one of them"
            )
        if self.pipeline_parallel > 1 and self.pipelining != "auto":
            raise UserError(
                f"pipelining={self.pipelining!r} is about several copies of the model, of which there is "
                f"one with pipeline_parallel={self.pipeline_parallel}: leave it out"
            )
        if self.local_attention not in (0, "auto") and (reason := self.why_not_local):
            raise UserError(f"local_attention={self.local_attention:g} {reason}")
        a, n = self.n_replicas, self.n_batches
        if self.mini_batches > 1:
            self._check_mini_batches()
        if n is None or n == "auto":
            return
        if n < a:
            raise UserError(
                f"dop={self.dop} has {a} model workers for n_batches={n} staggered batches, so some would "
                f"idle: take n_batches={a + 1}, tensor_parallel={a} or pipeline_parallel={a}"
            )
        if self.pipelining == "rotational" and n != a + 1:
            raise UserError(
                f"pipelining='rotational' runs one batch more than there are model workers, {a + 1} for "
                f"dop={self.dop}, not n_batches={n}"
            )

    @property
    def why_not_local(self) -> str | None:
        """Why model workers cannot keep a share of the KV, and what to do instead; None if they can."""
        if self.n_replicas > 1:
            return (
                f"keeps KV on the model worker that runs a request's slices, and with {self.n_replicas} "
                "copies of the model that is not one: take local_attention=0"
            )
        if self.tensor_parallel > 1 and self.partition not in ("auto", "heads"):
            return (
                f"with tensor_parallel={self.tensor_parallel} is some of each model worker's own KV heads, "
                f"which partition={self.partition!r} keeps together: take partition='heads', or "
                "local_attention=0"
            )
        if self.tensor_parallel > 1 and self.prefill_workers:
            return (
                "would have prefill workers send some heads of each prompt to model workers: take "
                "prefill_workers=0, or local_attention=0"
            )
        if self.prefill_workers and self.local_attention == 1:
            return (
                "leaves attention workers no KV, and prefill workers reach only them: take "
                "prefill_workers=0, or a share below 1"
            )
        if self.prefill_workers and self.partition == "heads":
            return (
                "would have prefill workers send some heads of each prompt to model workers: take "
                "partition='tokens', or local_attention=0"
            )
        return None

    @property
    def local_share(self) -> float | Literal["auto"]:
        """``local_attention``, or where it is "auto": 1 without attention workers; 0 where model workers
        cannot keep any KV, or where it does not follow the load: with messages in parts, which are of all
        tokens, and on shards of the model, unless heads are asked for by name."""
        if self.n_attention == 0:
            return 1.0
        if self.local_attention != "auto":
            return self.local_attention
        is_fixed = self.mini_batches > 1 or (self.tensor_parallel > 1 and self.partition != "heads")
        return 0.0 if self.why_not_local or is_fixed else "auto"

    def _check_mini_batches(self) -> None:
        said = f"mini_batches={self.mini_batches} cuts up the messages of one batch"
        if self.n_batches not in (None, 1) or self.n_model > 1:
            raise UserError(
                f"{said}, on a model worker with all weights: take n_batches=1, or mini_batches=1"
            )
        shared = self.n_attention > 1 or self.local_share not in (0, 1)
        if shared and self.partition not in ("auto", "heads"):
            raise UserError(
                f"{said} of which each worker has all tokens: take partition='heads', or mini_batches=1"
            )

    @property
    def pipelining_mode(self) -> Literal["rotational", "fixed", "stages"]:
        """Which model worker runs a slice of a staggered batch: see ``pipelining``; "stages": who has its
        weights."""
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
        if self.n_attention == 0:
            return 1
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

        ``dop`` is a pair, or text such as "1,2". Raises `UserError`, naming the file, for one that cannot be
        read, an unknown key (with the known ones) and a bad value.
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
    def is_one_platform(self) -> bool:
        """Whether all ranks have devices of the same kind, as far as the file says it."""
        return self.n_attention == 0 or self.model_platform == self.attention_platform

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
        """The platform of a rank's pool, prefill workers' that of model workers; None leaves the choice to
        JAX."""
        return self.attention_platform if self.role(rank).pool == "attention" else self.model_platform

    def as_config(self) -> dict[str, str | int | float | bool | None]:
        """What must be the same on every rank, as flat data: every field but those of `_OWN`."""
        values = dataclasses.asdict(self) | {"dop": ",".join(map(str, self.dop))}
        return {name: value for name, value in values.items() if name not in _OWN}


def fields() -> tuple[str, ...]:
    """The keys of a cluster file."""
    return tuple(definitions(Cluster))


def address(name: str, text: str) -> tuple[str, int]:
    """Host and port of "host:port" ("[::1]:29400" for IPv6). Raises `UserError`, naming the field
    ``name``."""
    host, colon, port = text.rpartition(":")
    is_host = host and not any(letter.isspace() for letter in host)
    if not colon or not is_host or not port.isdecimal() or not 0 < int(port) < 65536:
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
    """TOML's values as the fields want them: a pair for a list, or for text such as "1,2"."""
    plain = dict(values)
    dop = plain.get("dop")
    if isinstance(dop, str):
        pools = Pools.parse(dop)
        plain["dop"] = (pools.n_model, pools.n_attention)
    elif isinstance(dop, list):
        plain["dop"] = tuple(dop)
    return plain
