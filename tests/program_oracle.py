"""The programs of every rank for layouts × kinds of step, traced in one process: what each exchanges, and a
hash of what it computes.

For changes that are to leave programs as they are. Write what one commit's programs are, and compare
another's with that:

    python tests/program_oracle.py --write /tmp/before.json
    python tests/program_oracle.py --compare /tmp/before.json

Programs with one hash are one graph of the same operators, exchanges included, whatever order or names they
were traced in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.kv.pool_book import PoolBook
from jaxlamina.models import ModelConfig, apply, random_params
from jaxlamina.ranks.apart import WHOLE
from jaxlamina.ranks.attention_programs import AttentionProgram, step_inputs_of
from jaxlamina.ranks.cluster_layout import layout_of, partition_of, wishes_of
from jaxlamina.ranks.model_side import ModelSide, receiver, shards_of, shared_out_of, traces
from jaxlamina.ranks.shards import shard_like, shard_model, shard_of
from jaxlamina.ranks.stages import Stages, stages_of
from jaxlamina.ranks.wires import heads_on_worker
from jaxlamina.run.parts import Part, mixed_part, prompts_part, rows_part
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.exchange import Exchange
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.transports import TracedEnd
from jaxlamina.transports.exchanges import first_difference
from jaxlamina.workers.model_worker import ModelWorker
from jaxlamina.workers.spec import AttentionSpec, specs_of
from jaxlamina.workers.workspace import pool_shapes
from pallas_kernels import compat

MODEL = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
BATCH, CONTEXT, TOKENS, N_SLOTS = 12, 16, 8, 512

LAYOUTS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "one worker, q first": {"q_first": True},
    "one worker, mini-batches": {"mini_batches": 2},
    "two workers by heads": {"dop": (1, 2), "q_first": True},
    "two workers by requests": {"dop": (1, 2), "partition": "requests"},
    "two workers by requests, q first": {"dop": (1, 2), "partition": "requests", "q_first": True},
    "three workers by tokens": {"dop": (1, 3), "partition": "tokens", "token_block": 4},
    "two copies, rotational": {"dop": (2, 1), "n_batches": 3},
    "two copies, fixed": {"dop": (2, 2), "n_batches": 2, "pipelining": "fixed"},
    "two copies, by requests": {"dop": (2, 2), "n_batches": 3, "partition": "requests"},
    "unequal heads": {"dop": (1, 2), "partition": "heads"},
    "unequal heads, q first, three workers": {"dop": (1, 3), "partition": "heads", "q_first": True},
    "unequal heads, mini-batches": {"dop": (1, 2), "partition": "heads", "mini_batches": 2},
    "unequal heads, two copies": {"dop": (2, 2), "partition": "heads", "n_batches": 3},
    "unequal heads, two shards": {"dop": (2, 3), "partition": "heads", "tensor_parallel": 2},
    "unequal heads, a prefill worker": {"dop": (1, 2), "partition": "heads", "prefill_workers": 1},
    "unequal heads beside a model rank's": {"dop": (1, 2), "partition": "heads", "local_attention": 0.4},
    "unequal heads beside shards'": {
        "dop": (2, 3),
        "partition": "heads",
        "tensor_parallel": 2,
        "local_attention": 0.3,
    },
    "two shards": {"dop": (2, 1), "tensor_parallel": 2},
    "two shards, by heads, q first": {"dop": (2, 2), "tensor_parallel": 2, "q_first": True},
    "two shards, by requests": {"dop": (2, 2), "tensor_parallel": 2, "partition": "requests"},
    "two shards, three workers by heads": {"dop": (2, 3), "tensor_parallel": 2},
    "three shards, which cannot share heads out": {"dop": (3, 1), "tensor_parallel": 3},
    "two stages": {"dop": (2, 1), "pipeline_parallel": 2},
    "two stages, by tokens": {"dop": (2, 2), "pipeline_parallel": 2, "partition": "tokens"},
    "a model rank's heads": {"local_attention": 0.5},
    "a model rank's heads, q first": {"local_attention": 0.5, "q_first": True},
    "a model rank's heads, mini-batches": {"local_attention": 0.5, "mini_batches": 2, "partition": "heads"},
    "a model rank's requests": {"local_attention": 0.5, "partition": "requests"},
    "a model rank's tokens": {"local_attention": 0.6, "partition": "tokens"},
    "a model rank's tokens, two workers": {
        "dop": (1, 2),
        "local_attention": 0.2,
        "partition": "tokens",
        "token_block": 4,
    },
    "all on the model rank": {"local_attention": 1},
    "stages' heads": {"dop": (2, 1), "pipeline_parallel": 2, "local_attention": 0.5},
    "stages' tokens": {"dop": (2, 2), "pipeline_parallel": 2, "partition": "tokens", "local_attention": 0.5},
    "shards' heads, three workers": {"dop": (2, 3), "tensor_parallel": 2, "local_attention": 0.25},
    "all on shards": {"dop": (2, 1), "tensor_parallel": 2, "local_attention": 1},
    "all on stages": {"dop": (2, 1), "pipeline_parallel": 2, "local_attention": 1},
    "no attention workers": {"dop": (1, 0), "local_attention": 1},
    "no attention workers, two shards": {"dop": (2, 0), "tensor_parallel": 2, "local_attention": 1},
    "no attention workers, two stages": {"dop": (2, 0), "pipeline_parallel": 2, "local_attention": 1},
    "a model rank's tokens beside a prefill worker": {
        "prefill_workers": 1,
        "local_attention": 0.5,
        "partition": "tokens",
    },
    "a prefill worker": {"prefill_workers": 1},
    "two prefill workers, by requests": {"dop": (1, 2), "prefill_workers": 2, "partition": "requests"},
}
OTHER_HEADS: dict[str, dict[str, Any]] = {
    "two shards, three workers by heads": {
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 4,
    },
    "shards' heads, three workers": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4},
    "unequal heads, q first, three workers": {
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 8,
    },
    "unequal heads, two shards": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4},
    "unequal heads beside a model rank's": {
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 8,
    },
    "unequal heads beside shards'": {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4},
} | {
    name: {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    for name in (
        "unequal heads", "unequal heads, mini-batches", "unequal heads, two copies",
        "unequal heads, a prefill worker",
    )
}  # fmt: skip
# What they are made of is in others, too: `test_layouts` runs them as slow tests.
LIKE_OTHERS = {
    "two workers by heads",  # as test_ranks' jobs, and three with shards
    "two workers by requests, q first",
    "two shards, by heads, q first",  # as with three workers, of whose heads a rank has some
    "unequal heads",  # as with three workers
    "unequal heads, mini-batches",
    "unequal heads, q first, three workers",  # as with two shards, and beside a model rank's
    "unequal heads, two copies",
    "unequal heads, a prefill worker",
    "unequal heads beside shards'",  # as those beside a model rank's, and those of two shards
    "two shards",  # as with three workers, and test_tensor_parallel's job
    "two shards, by requests",  # as two workers and two copies by requests
    "two shards, three workers by heads",  # as unequal heads with two shards
    "two stages",  # as "stages' tokens", and test_pipeline_parallel's job
    "two stages, by tokens",  # as "stages' tokens", whose workers have part of them
    "a model rank's tokens",  # as with two workers
    "a model rank's heads, q first",
    "a model rank's heads, mini-batches",
    "a model rank's requests",
    "all on the model rank",
    "stages' heads",
    "all on shards",
    "all on stages",
    "no attention workers",  # as shards and stages without any
    "two prefill workers, by requests",  # as one, and test_prefill_workers' job
}
KINDS = ("decode", "staggered", "prefill", "chunk", "scored", "decode with chunk", "decode beside chunks")


class OracleTransport:
    """An end whose exchanges are operators of a traced program, in the order of the trace as MPI has them;
    and which compiles nothing."""

    name, by_memory, traceable, why_not_by_memory = "oracle", False, False, ""
    is_one_program = True
    every, add_up = TracedEnd.every, TracedEnd.add_up

    def __init__(self, rank: int, n_ranks: int) -> None:
        self.rank, self.n_ranks, self.device, self.n_kept = rank, n_ranks, jax.devices()[0], 0

    def send(self, x: jax.Array, to: int, after: jax.Array | None = None) -> jax.Array:
        tie = jax.ShapeDtypeStruct((), jnp.float32)
        return _exchange("send", to, x, tie, *(() if after is None else (after,)))

    def recv(self, like: jax.ShapeDtypeStruct, source: int, after: jax.Array | None = None) -> jax.Array:
        return _exchange("recv", source, like, like, *(() if after is None else (after,)))

    def send_each(
        self, xs: Sequence[jax.Array], to: Sequence[int], after: jax.Array | None = None
    ) -> jax.Array:
        for x, rank in zip(xs, to, strict=True):
            after = self.send(x, rank, after)
        assert after is not None
        return after

    def recv_part(
        self, like: jax.ShapeDtypeStruct, source: int, of: int, after: jax.Array | None = None
    ) -> jax.Array:
        return self.recv(like, source, after)

    def send_part(self, x: jax.Array, to: int, of: int, after: jax.Array | None = None) -> jax.Array:
        return self.send(x, to, after)

    def recv_each(
        self, like: jax.ShapeDtypeStruct, sources: Sequence[int], after: jax.Array | None = None
    ) -> list[jax.Array]:
        return [self.recv(like, source, after) for source in sources]

    def swap_each(
        self,
        xs: Sequence[jax.Array],
        like: jax.ShapeDtypeStruct,
        with_: Sequence[int],
        after: jax.Array | None = None,
    ) -> list[jax.Array]:
        got = self.recv_each(like, with_, after)
        self.send_each(xs, with_, after)
        return got

    def swap_part(
        self, x: jax.Array, like: jax.ShapeDtypeStruct, with_: int, of: int, after: jax.Array | None = None
    ) -> jax.Array:
        return self.recv(like, with_, self.send(x, with_, after))

    def compile_later(
        self, function: Callable[..., Any], *args: Any, **options: Any
    ) -> Callable[[], TracedProgram]:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        found = TracedProgram.of(jax.make_jaxpr(function)(*shapes))
        return lambda: found

    def compile(self, function: Callable[..., Any], *args: Any, **options: Any) -> TracedProgram:
        return self.compile_later(function, *args)()

    def name_of(self, *what: object) -> None:
        return None

    def kept(self, name: str) -> None:
        return None

    def bind(self, tree: Any) -> Any:
        return tree

    unbind = bind


_EXCHANGE = compat.Primitive("oracle_exchange")
_EXCHANGE.def_abstract_eval(lambda *_, like, **__: jax.core.ShapedArray(like.shape, like.dtype))


def _exchange(op: str, peer: int, message: Any, like: Any, *after: jax.Array) -> jax.Array:
    sent = (message,) if op == "send" else ()
    what = Exchange(op, peer, tuple(message.shape), jnp.dtype(message.dtype).name)  # type: ignore[arg-type]
    result: jax.Array = _EXCHANGE.bind(
        *sent, *after, what=what, like=jax.ShapeDtypeStruct(like.shape, like.dtype)
    )
    return result


@dataclass(frozen=True, eq=False)
class TracedProgram:
    """``list``: what it exchanges, in order. Hashes are made when they are asked for, for they take as long as
    a trace."""

    jaxpr: Any
    list: tuple[Exchange, ...]

    @classmethod
    def of(cls, closed: Any) -> TracedProgram:
        return cls(closed, tuple(_exchanges(compat.open_jaxpr(closed)[0])))

    @cached_property
    def values(self) -> str:
        """A hash of what it computes from what."""
        return _graph(*compat.open_jaxpr(self.jaxpr), ties=False)[:20]

    @cached_property
    def hash(self) -> str:
        """Also of what waits for what."""
        return _graph(*compat.open_jaxpr(self.jaxpr), ties=True)[:20]

    def exchanges(self) -> tuple[Exchange, ...]:
        return self.list


def _exchanges(jaxpr: Any) -> Iterator[Exchange]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is _EXCHANGE:
            yield eqn.params["what"]
        for inner in compat.sub_jaxprs(eqn):
            yield from _exchanges(compat.open_jaxpr(inner)[0])


_ZERO = "a zero that waits"


def _graph(jaxpr: Any, consts: Sequence[Any], *, ties: bool) -> str:
    """Of what it computes from what, and of all its exchanges. Without ``ties`` nothing waits for what it is
    not made of: zeros that are there when something else is (`pallas_kernels.order`) are not seen."""
    known: dict[Any, str] = {v: f"input {i} {v.aval}" for i, v in enumerate(jaxpr.invars)}
    for v, value in zip(jaxpr.constvars, consts, strict=True):
        known[v] = _hash(str(v.aval), np.asarray(value).tobytes())

    def read(v: Any) -> str:
        return f"{v.val!r} {v.aval}" if isinstance(v, compat.Literal) else known[v]

    exchanges = []
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive is _EXCHANGE and not ties:
            operands = operands[: int(eqn.params["what"].op == "send")]
        elif not ties and (same := _untied(eqn, operands)):
            known[eqn.outvars[0]] = same
            continue
        params = [(name, _param(value, ties)) for name, value in sorted(eqn.params.items())]
        found = _hash(eqn.primitive.name, params, operands)
        for i, v in enumerate(eqn.outvars):
            known[v] = f"{found} {i}"
        if eqn.primitive is _EXCHANGE:
            exchanges.append(found)
    return _hash([read(v) for v in jaxpr.outvars], exchanges)


def _untied(eqn: Any, operands: Sequence[str]) -> str | None:
    """What an operator gives that only makes its operand wait; None for others."""
    if eqn.primitive.name == "population_count":
        return _ZERO
    if _ZERO not in operands:
        return None
    others = [
        x
        for x, v in zip(operands, eqn.invars, strict=True)
        if x != _ZERO and not isinstance(v, compat.Literal)
    ]
    if not others:
        return _ZERO
    return others[0] if eqn.primitive.name in ("add", "add_any") and len(others) == 1 else None


def _param(value: Any, ties: bool) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_param(x, ties) for x in value)}]"
    inner, consts = compat.open_jaxpr(value)
    return (
        _graph(inner, consts, ties=ties)
        if compat.is_jaxpr(value)
        else re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    )


def _hash(*what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


# ---- what is traced


@dataclass(frozen=True)
class Job:
    """A layout with the model's weights shared out over it."""

    cluster: Cluster
    layout: Layout
    specs: tuple[AttentionSpec, ...]
    n_query_heads: tuple[int, ...]
    models: dict[int, ModelWorker]  # by model rank and prefill worker

    @property
    def q_first(self) -> bool:
        return bool(self.cluster.q_first)


def model_of(layout: str) -> tuple[ModelConfig, Callable[..., Any], dict[str, jax.Array]]:
    """The model that a layout runs, and its weights."""
    config = ModelConfig.from_hf(MODEL | OTHER_HEADS.get(layout, {}))
    return config, partial(apply, config), random_params(config, seed=1)


@cache
def job_of(name: str) -> Job:
    cpu = {"model_platform": "cpu", "attention_platform": "cpu"}
    cluster = Cluster.load(None, {"transport": "mpi", "local_attention": 0, **cpu, **LAYOUTS[name]})
    config, fn, params = model_of(name)
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
    n = cluster.n_model
    shared = shared_out_of(cluster, fn, like)
    stages = Stages((), (frozenset(params),) * n)
    if cluster.pipeline_parallel > 1:
        stages = stages_of(traces(fn, like), like, n)
    partition = partition_of(cluster, (config.num_key_value_heads,))
    models = {}
    for rank in (*cluster.pools.model_ranks, *cluster.pools.prefill_ranks):
        own, own_shared = params, WHOLE
        if rank in cluster.pools.model_ranks:
            own_shared = shared
            own = shard_of({name: params[name] for name in stages.params[rank]}, shared, rank)
        own_fn, own_like = shard_model(fn, like, own_shared, rank), shard_like(like, own_shared)
        models[rank] = ModelWorker(own_fn, own, jax.devices()[0], own_like)
    sites = models[0].split(1).sites
    heads_over = shared.heads_over
    return Job(
        cluster,
        layout_of(cluster, partition, stages.ranks, heads_over=heads_over),
        specs_of(sites, "auto", heads_over),
        tuple(heads_over * site.q.shape[2] for site in sites),
        models,
    )


def capacities(job: Job) -> list[int]:
    """Slots of each attention worker, and last of the model ranks, if they keep any."""
    layout, b = job.layout, len(job.layout.workers)
    each = N_SLOTS if layout.by_heads else -(-N_SLOTS // b)
    return [each if layout.has_pool else 1] * b + [N_SLOTS] * layout.attends_locally


def book_of(job: Job, workers: Sequence[Any]) -> PoolBook:
    share, block = job.cluster.local_share, job.cluster.token_block
    wishes = wishes_of(job.layout, block, share)
    return PoolBook(workers, job.layout, (), N_SLOTS, 0, block, wishes, capacities(job))


@cache
def batches() -> tuple[DecodeBatch, PrefillBatch, PrefillBatch, PrefillBatch]:
    """What is stored before a step: its rows' tokens and the chunk's; and of the step the rows, the chunk, a
    whole prompt."""
    rng = np.random.default_rng(5)
    n_rows = BATCH + 1
    slots = rng.permutation(N_SLOTS).astype(np.int32)
    stored, new = slots[: n_rows * CONTEXT].reshape(n_rows, CONTEXT), slots[n_rows * CONTEXT :]

    def tokens(*shape: int) -> np.ndarray:
        return rng.integers(0, MODEL["vocab_size"], shape, dtype=np.int32)

    def prompts(own: np.ndarray, table: np.ndarray) -> PrefillBatch:
        b, t = own.shape
        lengths = np.full(b, table.shape[1], np.int32)
        positions = lengths[:, None] + np.arange(t, dtype=np.int32)
        return PrefillBatch(tokens(b, t), positions, np.full(b, t - 1, np.int32), own, table, lengths)

    lengths = np.full(BATCH, CONTEXT, np.int32)
    rows = DecodeBatch(tokens(BATCH, 1), lengths[:, None], stored[:BATCH], lengths, new[:BATCH])
    chunk = prompts(new[None, BATCH : BATCH + TOKENS], stored[BATCH:])
    whole = prompts(new[None, BATCH + TOKENS : BATCH + 2 * TOKENS], np.zeros((1, 0), np.int32))
    return rows, chunk, whole, prompts(stored, np.zeros((n_rows, 0), np.int32))


def parts_of(job: Job, kind: str, book: PoolBook) -> list[Part] | None:
    """A step of that kind; None where this layout has none of its own. What it follows is stored."""
    cluster, workers = job.cluster, job.cluster.pools.prefill_ranks
    rows, chunk, whole, _ = batches()
    if workers and kind in ("prefill", "chunk", "scored", "decode with chunk"):
        return None
    one_batch = job.layout.n_replicas == 1
    if kind == "staggered":
        n = cluster.n_batches_on("cpu")
        n = cluster.usual_n_batches if n in (1, "auto") else n
        return None if cluster.mini_batches > 1 else [rows_part(book, rows, q_first=False, n_batches=int(n))]
    if kind == "decode":
        n = cluster.mini_batches
        return [rows_part(book, rows, q_first=job.q_first and n == 1, mini_batches=n)] if one_batch else None
    if kind == "decode with chunk":
        return [mixed_part(book, rows, chunk, q_first=job.q_first)] if one_batch else None
    if kind == "decode beside chunks":
        if not workers:
            return None
        parts = [rows_part(book, rows, q_first=job.q_first)]
        prompts = (chunk, whole)
        for i, rank in enumerate(workers):
            parts.append(prompts_part(book, prompts[i], q_first=False, scored=i == 1, rank=rank))
        return parts
    batch = whole if kind == "prefill" else chunk
    return [prompts_part(book, batch, q_first=job.q_first, scored=kind == "scored")]


def shape_of(job: Job, kind: str) -> StepShape | None:
    """The bucket of a step of that kind; None where this layout has none of its own."""
    rows, chunk, *_ = batches()
    book = book_of(job, [])
    for batch in (rows, chunk):
        if batch is chunk and job.cluster.prefill_workers and book.wishes.share is not None:
            book.wishes.share = lambda _: 0.0  # a prefill worker is to follow it
        book.assume_stored(batch)
    parts = parts_of(job, kind, book)
    return None if parts is None else shape_of_parts(parts)


def shape_of_parts(parts: Sequence[Part]) -> StepShape:
    return msgspec.structs.replace(parts[0].shape, prefills=tuple(part.shape for part in parts[1:]))


def programs_of(layout: str, kind: str) -> dict[int, list[TracedProgram]] | str | None:
    """Each rank's programs of a step, one after another. Why there are none, where they cannot be; None for
    no such kind."""
    job = job_of(layout)
    try:
        shape = shape_of(job, kind)
        return None if shape is None else _programs(job, shape)
    except UserError as error:
        return f"refused: {error}"


def _programs(job: Job, shape: StepShape) -> dict[int, list[TracedProgram]]:
    cluster, found = job.cluster, dict[int, list[TracedProgram]]()
    several = shape.n_batches > 1 or cluster.shares_weights
    for rank, model in job.models.items():
        is_prefill = rank in cluster.pools.prefill_ranks
        part = shape.part_of(rank if is_prefill else 0)
        if part is None or (rank > 0 and not is_prefill and not several):
            continue
        shards = () if is_prefill else shards_of(cluster)
        transport: Any = OracleTransport(rank, cluster.n_ranks)
        side = ModelSide(transport, model, job.layout, job.specs, 0 if shards else rank, shards)
        if job.layout.attends_locally and not is_prefill:
            side.allocate(N_SLOTS, 0, None)
        program: Any = side.compile_later(part)()[0]
        found[rank] = [program]
    if shape.prefills:
        n_words = job.models[0].split(1).traced.jaxpr.outvars[0].aval.shape[-1]
        likes = [jax.ShapeDtypeStruct((*part.logits_of, n_words), jnp.float32) for part in shape.prefills]
        transport = OracleTransport(0, cluster.n_ranks)
        found[0].append(receiver(transport, likes, [part.rank for part in shape.prefills]))  # type: ignore[arg-type]
    asked = plan_of(job.layout, shape, len(job.specs)).pool
    for index, rank in enumerate(job.layout.workers if asked else ()):
        known = zip(job.specs, job.n_query_heads, strict=True)
        heads = [heads_on_worker(job.layout, spec, n, index) for spec, n in known]
        specs = [replace(spec, n_kv_heads=of.k) for spec, of in zip(job.specs, heads, strict=True)]
        pools = [pool_shapes(spec) for spec in specs]
        transport = OracleTransport(rank, cluster.n_ranks)
        traced = AttentionProgram(transport, job.layout, specs, heads, shape)
        args = pools, pools, step_inputs_of(job.layout, shape, specs)
        found[rank] = [transport.compile(traced.step, *args)]
    return found


def difference(programs: dict[int, list[TracedProgram]]) -> str | None:
    """Where the ranks' programs do not fit together, or wait for one another."""
    return first_difference({rank: [e for p in of for e in p.list] for rank, of in programs.items()})


def record() -> dict[str, Any]:
    """All layouts and kinds, as JSON has them."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        for kind in KINDS:
            programs = programs_of(layout, kind)
            if programs is not None:
                found[f"{layout}; {kind}"] = (
                    programs
                    if isinstance(programs, str)
                    else {
                        str(rank): [[program.hash, program.values, *map(str, program.list)] for program in of]
                        for rank, of in programs.items()
                    }
                )
            print(f"{layout}; {kind}: {'none' if programs is None else 'traced'}", file=sys.stderr)
    return found


def compared(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each program that is not what it was."""
    lines = [f"{case}: gone" for case in before if case not in after]
    for case, now in after.items():
        was = before.get(case)
        if was is None or isinstance(now, str) or isinstance(was, str):
            if was != now:
                lines.append(f"{case}: was {_kind(was)}, is {_kind(now)}")
            continue
        for rank in sorted(was.keys() | now.keys()):
            pairs = [
                [[x[i] if i < 2 else x[2:] for x in of.get(rank, ())] for of in (was, now)] for i in range(3)
            ]
            of_ties, of_values, of_exchanges = (before != after for before, after in pairs)
            what = "exchanges" if of_exchanges else "computes" if of_values else "waits for"
            if of_ties or of_values or of_exchanges:
                lines.append(f"{case}: rank {rank} differs in what it {what}")
    return lines


def _kind(found: Any) -> str:
    return found if isinstance(found, str) else "nothing" if found is None else "programs"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    given = parser.parse_args()
    found = record()
    if given.write:
        given.write.write_text(json.dumps(found, indent=1))
    if given.compare:
        lines = compared(json.loads(given.compare.read_text()), found)
        print("\n".join(lines) or f"the same programs in all {len(found)} cases")
        return bool(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
