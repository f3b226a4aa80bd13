"""What the GPU gate runs, as data: models, groups of cases that share processes, and how far figures may be
off.

A case is a way to run a model (one process or ranks, dtypes, what a step is made of) and what is done with it
(`HOWS`). Every token is given, not drawn, so that cases are held to the same numbers: the log-probabilities
of a whole sequence at once in float32. Knows no device and runs nothing.

How far off is derived from what rounding alone does (`NOISE`), as measured on a CPU before any GPU was asked:
the model in bfloat16, a whole sequence at once, and float32 with int8 KV, step by step. A token may be off by
twice the largest that was seen there, all tokens' root mean square by twice that one, and a mean over n
tokens by four times that one by sqrt(n). Int8 is granted 1 % of perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16"]
KvDtype = Literal["auto", "int8", "int8-channel", "int8-channel-asymmetric"]
# decode: every token by a decode step, from an empty context. long: the same of windows of 1,024 tokens.
# chunks: prompts in chunks, then decode steps. together: as chunks, those of all rows in one call. mixed: each
# prompt's chunks in the steps in which earlier rows are decoded. moves: as chunks, and midway KV is copied,
# moved to the host, and back into other slots. tokens: the engine, greedy, from a pool too small for all.
HOWS = ("decode", "long", "chunks", "together", "mixed", "moves", "tokens")
DEMO = "smollm2-135m-instruct"


def _heads(head_dim: int, n_kv: int, group: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 384,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": n_kv * group,
        "num_key_value_heads": n_kv,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


# Random models, by head dim, KV heads and query heads per KV head.
MODELS: Mapping[str, dict[str, Any]] = {
    "h128k8g4": _heads(128, 8, 4),  # of the 8B and 70B shapes
    "h64k3g3": _heads(64, 3, 3),  # of the demo model
    "h96k2g3": _heads(96, 2, 3),
    "h80k4g1": _heads(80, 4, 1),
    "h112k5g7": _heads(112, 5, 7),
    "h256k1g8": _heads(256, 1, 8),
    "h16k6g2": _heads(16, 6, 2),
    "h128k13g1": _heads(128, 13, 1),  # of a quarter of the 33B shape: groups of heads overlap
    "window": _heads(64, 2, 4, model_type="mistral", sliding_window=24),
}


@dataclass(frozen=True)
class Size:
    """Rows and tokens of windows; of the first ``few`` rows ``prompt`` tokens come in chunks where a case has
    prompts."""

    rows: int
    tokens: int
    few: int
    prompt: int
    chunk: int
    written: int = 32  # tokens after each prompt of "tokens"


SIZES: Mapping[str, Mapping[str, Size]] = {
    "full": {"demo": Size(20, 256, 4, 160, 64), "random": Size(40, 160, 4, 100, 32)},
    "small": {"demo": Size(3, 20, 3, 13, 5, 6), "random": Size(3, 28, 3, 17, 6, 6)},
}
# Rows and tokens of windows of "long", and their perplexity by transformers on a CPU, in float32.
LONG: Mapping[str, tuple[int, int]] = {"full": (20, 1024), "small": (1, 12)}
LONG_PERPLEXITY: Mapping[tuple[int, int], float] = {(20, 1024): 23.2289, (1, 12): 363.9104}


@dataclass(frozen=True)
class Case:
    """``at``: attributes of the executor for this case; ``llm``: options of `LLM`, by which an executor is
    made. ``own``: the demo model's weights in a function of its user's (`plain_llama`). ``covers``: of
    `WANTED`."""

    name: str
    how: str
    model: str = "demo"
    dtype: Dtype = "bfloat16"
    kv_dtype: KvDtype = "auto"
    own: bool = False
    at: Mapping[str, Any] = field(default_factory=dict)
    llm: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    covers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.how not in HOWS or (self.model != "demo" and self.model not in MODELS):
            raise ValueError(f"{self} has a way or a model that there is none of")

    def size(self, scale: str) -> Size:
        return SIZES[scale]["demo" if self.model == "demo" else "random"]

    @property
    def same_as(self) -> tuple[str, ...]:
        """What a case that computes the same another way has in common with this one."""
        after_prompts = "prompts" if self.how in ("chunks", "together", "mixed", "moves") else self.how
        return after_prompts, self.model, self.dtype, self.kv_dtype


@dataclass(frozen=True)
class Group:
    """Cases one after another in one job. ``cluster``: of ranks; None: one process. ``n_gpus``: that it
    needs. ``alone``: its ranks' kernels wait for one another, so no other group is to have the GPUs
    meanwhile."""

    name: str
    cases: tuple[Case, ...]
    cluster: Mapping[str, Any] | None = None
    n_gpus: int = 1
    alone: bool = False

    @property
    def n_ranks(self) -> int:
        if self.cluster is None:
            return 1
        return sum(self.cluster.get("dop", (1, 1))) + self.cluster.get("prefill_workers", 0)


def _cases(*rows: tuple[str, dict[str, Any]], **common: Any) -> tuple[Case, ...]:
    return tuple(Case(name, **{**common, **of}) for name, of in rows)


UNSPLIT = {"split": False}
OFF, ON = {"q_first": False}, {"q_first": True}
SMALL_POOL = {"kv_slots": 112, "host_kv_slots": 256}

_UNSPLIT = _cases(
    ("f32", {"how": "decode", "dtype": "float32"}),
    ("f32 long", {"how": "long", "dtype": "float32"}),
    ("f32 moves", {"how": "moves", "dtype": "float32", "covers": ("moves",)}),
    ("f32 together", {"how": "together", "dtype": "float32", "covers": ("unsplit", "prompts together")}),
    ("f32 int8", {"how": "decode", "dtype": "float32", "kv_dtype": "int8"}),
    ("f32 int8-channel", {"how": "decode", "dtype": "float32", "kv_dtype": "int8-channel"}),
    ("f32 asymmetric", {"how": "decode", "dtype": "float32", "kv_dtype": "int8-channel-asymmetric"}),
    ("f32 tokens", {"how": "tokens", "dtype": "float32", "llm": UNSPLIT | SMALL_POOL}),
    llm=UNSPLIT,
    covers=("unsplit",),
)
_UNSPLIT_BF16 = _cases(
    ("bf16", {"how": "decode"}),
    ("bf16 long", {"how": "long"}),
    ("bf16 chunks", {"how": "chunks"}),
    ("bf16 together", {"how": "together", "covers": ("unsplit", "prompts together")}),
    ("bf16 mixed", {"how": "mixed", "covers": ("unsplit", "mixed steps")}),
    ("bf16 tokens", {"how": "tokens", "engine": {"mixed_steps": True}}),
    ("bf16 int8", {"how": "decode", "kv_dtype": "int8"}),
    ("bf16 int8 chunks", {"how": "chunks", "kv_dtype": "int8"}),
    ("bf16 int8 together", {"how": "together", "kv_dtype": "int8"}),
    ("bf16 int8 long", {"how": "long", "kv_dtype": "int8"}),
    ("bf16 int8-channel", {"how": "decode", "kv_dtype": "int8-channel"}),
    ("bf16 int8-channel moves", {"how": "moves", "kv_dtype": "int8-channel", "covers": ("moves",)}),
    llm=UNSPLIT,
    covers=("unsplit",),
)
_LOCAL = _cases(
    ("f32", {"how": "decode", "dtype": "float32"}),
    ("f32 tokens", {"how": "tokens", "dtype": "float32", "llm": SMALL_POOL}),
    ("bf16", {"how": "decode"}),
    ("bf16 q first", {"how": "decode", "at": ON, "covers": ("local", "q first")}),
    ("bf16 together", {"how": "together", "covers": ("local", "prompts together")}),
    ("bf16 moves", {"how": "moves", "covers": ("local", "moves")}),
    ("bf16 int8", {"how": "decode", "kv_dtype": "int8"}),
    ("bf16 int8-channel", {"how": "decode", "kv_dtype": "int8-channel"}),
    covers=("local",),
)


def _partitions(model: str, kv_dtype: KvDtype, *ways: str) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{way} of {model}{'' if kv_dtype == 'auto' else ' ' + kv_dtype}",
            "moves",
            model,
            kv_dtype=kv_dtype,
            llm={"attention_workers": 2, "partition": way},
            covers=("local", way),
        )
        for way in ways
    )


def _random(*names: str) -> tuple[Case, ...]:
    found: list[Case] = []
    for name in names:
        for dtype, kv_dtype in (
            ("float32", "auto"),
            ("bfloat16", "auto"),
            ("bfloat16", "int8"),
            ("bfloat16", "int8-channel"),
        ):
            # One executor serves decode steps from nothing and those after prompts.
            words = f"{name} {dtype}{'' if kv_dtype == 'auto' else ' ' + kv_dtype}"
            how = "decode" if dtype == "float32" else "chunks"
            found.append(
                Case(words, how, name, dtype, kv_dtype, llm=UNSPLIT, covers=("unsplit", "head dims"))  # type: ignore[arg-type]
            )
    return tuple(found)


def _ranks(transport: str) -> tuple[Case, ...]:
    """Of one model rank and one attention rank."""
    return _cases(
        ("f32", {"how": "decode", "dtype": "float32"}),
        ("f32 tokens", {"how": "tokens", "dtype": "float32", "llm": SMALL_POOL}),
        ("bf16 q with k, v", {"how": "decode", "at": OFF, "covers": (transport, "q with k, v")}),
        ("bf16 q first", {"how": "decode", "at": ON, "covers": (transport, "q first")}),
        ("bf16 staggered", {"how": "decode", "at": {"n_batches": 2}, "covers": (transport, "staggered")}),
        ("bf16 mini-batches", {"how": "decode", "at": {"mini_batches": 2}, "covers": (transport, "mini-batches")}),
        ("bf16 mixed", {"how": "mixed", "at": OFF, "covers": (transport, "mixed steps")}),
        ("bf16 moves", {"how": "moves", "at": OFF, "covers": (transport, "moves")}),
        ("bf16 long", {"how": "long", "at": OFF}),
        ("int8", {"how": "decode", "kv_dtype": "int8", "at": OFF}),
        ("int8 staggered", {"how": "decode", "kv_dtype": "int8", "at": {"n_batches": 2}, "covers": (transport, "staggered")}),
        ("int8 moves", {"how": "moves", "kv_dtype": "int8", "at": OFF, "covers": (transport, "moves")}),
        ("int8-channel", {"how": "decode", "kv_dtype": "int8-channel", "at": OFF}),
        ("asymmetric", {"how": "decode", "kv_dtype": "int8-channel-asymmetric", "at": OFF}),
        ("f32 mixed", {"how": "mixed", "dtype": "float32", "at": OFF, "covers": (transport, "mixed steps")}),
        ("f32 chunks", {"how": "chunks", "dtype": "float32", "at": OFF}),
        ("bf16 chunks", {"how": "chunks", "at": OFF}),
        ("f32 together", {"how": "together", "dtype": "float32", "at": OFF, "covers": (transport, "prompts together")}),
        ("bf16 together", {"how": "together", "at": OFF, "covers": (transport, "prompts together")}),
        covers=(transport,),
    )  # fmt: skip


def _only(cases: tuple[Case, ...], *names: str) -> tuple[Case, ...]:
    found = tuple(case for case in cases if case.name in names)
    assert len(found) == len(names), names
    return found


def _of_three(what: str, **options: Any) -> tuple[Case, ...]:
    """Of a job of three ranks."""
    return _cases(
        ("f32", {"how": "decode", "dtype": "float32"}),
        ("bf16", {"how": "moves"}),
        ("int8", {"how": "chunks", "kv_dtype": "int8"}),
        model="h128k8g4",
        covers=("ranks by mpi", what),
        **options,
    )


def _share(way: str, *names: str) -> tuple[Case, ...]:
    """A share of the KV on the model rank, by memory."""
    cases = _cases(
        ("f32", {"how": "decode", "dtype": "float32"}),
        ("f32 tokens", {"how": "tokens", "dtype": "float32", "llm": SMALL_POOL}),
        ("bf16", {"how": "decode", "at": OFF}),
        ("bf16 q first", {"how": "decode", "at": ON, "covers": ("q first", "local share")}),
        ("bf16 staggered", {"how": "decode", "at": {"n_batches": 2}, "covers": ("staggered", "local share")}),
        ("bf16 mixed", {"how": "mixed", "at": OFF, "covers": ("mixed steps", "local share")}),
        ("bf16 moves", {"how": "moves", "at": OFF, "covers": ("moves", "local share")}),
        ("int8", {"how": "chunks", "kv_dtype": "int8", "at": OFF}),
        ("int8-channel", {"how": "decode", "kv_dtype": "int8-channel", "at": OFF}),
        ("8B's heads", {"how": "moves", "model": "h128k8g4", "at": OFF}),
        ("8B's heads staggered", {"how": "decode", "model": "h128k8g4", "at": {"n_batches": 2}}),
        covers=("local share", way) if way in ("heads", "requests", "tokens") else ("local share",),
    )
    return _only(cases, *names) if names else cases


_MPI = {"transport": "mpi"}
_BY_MEMORY = {"transport": "xla"}
_OWN = _cases(
    ("f32", {"how": "decode", "dtype": "float32"}),
    ("f32 tokens", {"how": "tokens", "dtype": "float32", "llm": SMALL_POOL}),
    ("bf16 chunks", {"how": "chunks"}),
    ("bf16 moves", {"how": "moves"}),
    ("bf16 int8", {"how": "decode", "kv_dtype": "int8"}),
    own=True,
    covers=("own model",),
)
# The most telling first: what does not fit into the time is left out, and said.
GROUPS: tuple[Group, ...] = (
    Group("ranks by memory", _ranks("ranks by memory"), {"transport": "xla"}, n_gpus=2, alone=True),
    Group(
        "share by tokens",
        _share("tokens"),
        _BY_MEMORY | {"local_attention": 0.5, "partition": "tokens"},
        n_gpus=2,
        alone=True,
    ),
    Group(
        "share by heads",
        _share("heads", "f32", "bf16", "bf16 staggered", "bf16 moves", "int8", "8B's heads"),
        _BY_MEMORY | {"local_attention": 0.34, "partition": "heads"},
        n_gpus=2,
        alone=True,
    ),
    Group(
        "share by requests",
        _share("requests", "f32", "bf16 moves", "int8", "8B's heads"),
        _BY_MEMORY | {"local_attention": 0.5, "partition": "requests"},
        n_gpus=2,
        alone=True,
    ),
    Group(
        "share that follows the load",
        _share("auto", "f32 tokens", "bf16 mixed"),
        _BY_MEMORY | {"local_attention": "auto"},
        n_gpus=2,
        alone=True,
    ),
    Group(
        "all local", _share("all", "f32", "bf16"), _BY_MEMORY | {"local_attention": 1}, n_gpus=2, alone=True
    ),
    Group(
        "share, two stages",
        _of_three("local share"),
        _MPI | {"dop": (2, 1), "pipeline_parallel": 2, "local_attention": 0.5, "partition": "tokens"},
    ),
    Group(
        "ranks by nccl",
        _only(
            _ranks("ranks by nccl"),
            *("f32", "bf16 q with k, v", "bf16 q first", "bf16 staggered", "bf16 mixed"),
            *("int8", "int8-channel", "f32 mixed", "f32 chunks", "bf16 chunks"),
        ),
        {"transport": "xla", "peer_memory": False},
        n_gpus=2,
        alone=True,
    ),
    Group("unsplit, float32", _UNSPLIT),
    Group("unsplit, bfloat16", _UNSPLIT_BF16),
    Group("local", _LOCAL),
    Group(
        "local, partitions",
        (
            *_partitions("h128k8g4", "auto", "heads", "requests", "tokens"),
            *_partitions("h128k8g4", "int8", "heads", "requests", "tokens"),
            *_partitions("h64k3g3", "int8-channel", "requests", "tokens"),
        ),
    ),
    *(Group(f"head dims {i + 1}", _random(*list(MODELS)[i::3])) for i in range(3)),
    Group(
        "ranks by mpi",
        _only(
            _ranks("ranks by mpi"),
            *("f32", "bf16 q with k, v", "bf16 q first", "bf16 staggered", "int8", "int8-channel"),
        ),
        _MPI,
    ),
    Group(
        "prefill worker",
        _cases(
            ("bf16", {"how": "mixed"}),
            ("bf16 tokens", {"how": "tokens", "dtype": "float32"}),
            covers=("ranks by mpi", "prefill worker"),
        ),
        _MPI | {"prefill_workers": 1},
    ),
    Group(
        "prefill worker by memory",
        _cases(
            ("f32 tokens", {"how": "tokens", "dtype": "float32", "llm": SMALL_POOL}),
            ("bf16 tokens", {"how": "tokens"}),
            covers=("ranks by memory", "prefill worker"),
        ),
        _BY_MEMORY | {"prefill_workers": 1, "prefill_chunk": 8, "local_prefill_tokens": 0},
        n_gpus=3,
        alone=True,
    ),
    Group(
        "tensor parallel by memory",
        _cases(
            ("f32", {"how": "decode", "dtype": "float32"}),
            ("f32 chunks", {"how": "chunks", "dtype": "float32"}),
            ("bf16 q with k, v", {"how": "moves", "at": OFF}),
            ("bf16 q first", {"how": "decode", "at": ON}),
            (
                "bf16 staggered",
                {"how": "decode", "at": {"n_batches": 2}, "covers": ("tensor parallel", "staggered")},
            ),
            ("bf16 mixed", {"how": "mixed", "at": OFF}),
            ("int8", {"how": "chunks", "kv_dtype": "int8"}),
            model="h128k8g4",
            covers=("ranks by memory", "tensor parallel"),
        ),
        _BY_MEMORY | {"dop": (2, 1), "tensor_parallel": 2},
        n_gpus=3,
        alone=True,
    ),
    Group(
        "share, tensor parallel",
        _cases(
            ("f32", {"how": "decode", "dtype": "float32"}),
            ("bf16 moves", {"how": "moves", "at": OFF}),
            ("bf16 staggered", {"how": "decode", "at": {"n_batches": 2}}),
            ("int8", {"how": "chunks", "kv_dtype": "int8"}),
            model="h128k8g4",
            covers=("ranks by memory", "tensor parallel", "local share"),
        ),
        _BY_MEMORY | {"dop": (2, 1), "tensor_parallel": 2, "local_attention": 0.5, "partition": "heads"},
        n_gpus=3,
        alone=True,
    ),
    Group(
        "no attention workers, two shards",
        _cases(
            ("f32", {"how": "decode", "dtype": "float32"}),
            ("f32 tokens", {"how": "tokens", "dtype": "float32", "llm": SMALL_POOL}),
            ("bf16 moves", {"how": "moves"}),
            ("bf16 mixed", {"how": "mixed"}),
            ("int8", {"how": "chunks", "kv_dtype": "int8"}),
            model="h128k8g4",
            covers=("ranks by memory", "tensor parallel", "no attention workers"),
        ),
        _BY_MEMORY | {"dop": (2, 0), "tensor_parallel": 2, "local_attention": 1},
        n_gpus=2,
        alone=True,
    ),
    Group("tensor parallel", _of_three("tensor parallel"), _MPI | {"dop": (2, 1), "tensor_parallel": 2}),
    Group(
        "pipeline parallel",
        _of_three("pipeline parallel"),
        _MPI | {"dop": (2, 1), "pipeline_parallel": 2},
    ),
    *(
        Group(f"ranks, {way}", _of_three(way), _MPI | {"dop": (1, 2), "partition": way})
        for way in ("heads", "requests", "tokens")
    ),
    Group("own model", _OWN),
    Group("own model, ranks", _only(_OWN, "f32", "bf16 chunks", "bf16 int8"), _MPI | {"dop": (1, 2)}),
    Group(
        "own model, tensor parallel",
        _only(_OWN, "f32", "f32 tokens"),
        _MPI | {"dop": (2, 1), "tensor_parallel": 2},
    ),
    Group(
        "rotation",
        _cases(
            ("bf16", {"how": "decode", "model": "h128k8g4", "at": {"n_batches": 3}}),
            covers=("ranks by mpi", "staggered", "rotation"),
        ),
        _MPI | {"dop": (2, 1), "n_batches": 3},
    ),
)
# What issue and documentation name; every one is covered by a case.
WANTED = (
    "unsplit", "local", "ranks by memory", "ranks by nccl", "ranks by mpi", "q first", "q with k, v", "staggered",
    "mini-batches", "mixed steps", "prefill worker", "tensor parallel", "pipeline parallel", "rotation", "heads",
    "requests", "tokens", "moves", "head dims", "own model", "local share", "prompts together", "no attention workers",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """``relative``: of the perplexity's difference from float32's, by that one; ``rms``, ``token``: of
    tokens' log-probabilities, root mean square and largest; ``unsplit``: as ``relative``, from the same run
    unsplit."""

    relative: float
    rms: float
    token: float
    unsplit: float


# Of a token's log-probability, by rounding alone: root mean square and largest. The demo model's over 2,040
# tokens in bfloat16, over 380 with int8 KV; of four random models the largest.
NOISE: Mapping[tuple[str, str], tuple[float, float]] = {
    ("demo", "bfloat16"): (0.062, 1.8),
    ("demo", "int8"): (0.057, 0.75),
    ("demo", "int8-channel"): (0.089, 0.64),
    ("demo", "int8-channel-asymmetric"): (0.089, 0.64),
    ("random", "bfloat16"): (0.056, 0.32),
    ("random", "int8"): (0.047, 0.21),
    ("random", "int8-channel"): (0.081, 0.55),
}
_EXACT = 2e-4, 1e-3  # of float32: sums in another order
_LEAST = 1e-4  # of a mean: what is known of the reference


def noise_of(case: Case) -> tuple[float, float]:
    """Of a token's log-probability: root mean square and largest."""
    kind = "demo" if case.model == "demo" else "random"
    parts = [_EXACT] + [NOISE[kind, x] for x in (case.dtype, case.kv_dtype) if (kind, x) in NOISE]
    return math.hypot(*(rms for rms, _ in parts)), sum(largest for _, largest in parts)


def limits_of(case: Case, n_tokens: int) -> Limits:
    """What a case's figures of ``n_tokens`` may be at most."""
    rms, largest = noise_of(case)
    mean = max(_LEAST, 4 * rms / math.sqrt(max(1, n_tokens)))
    granted = 0.01 if case.kv_dtype != "auto" else 0.0
    return Limits(max(granted, mean), 2 * rms, 2 * largest, mean)


def margin_of(case: Case) -> float:
    """By how much a token that is written may have been likelier, in the reference, than the one that is
    written here."""
    return 10 * noise_of(case)[0]
