"""Every layout × kind of step, all its ranks in this process: real weights, real KV, and the logits that
unsplit execution gives."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from program_oracle import (
    KINDS,
    LAYOUTS,
    LIKE_OTHERS,
    N_SLOTS,
    OTHER_HEADS,
    Job,
    batches,
    book_of,
    capacities,
    job_of,
    model_of,
    parts_of,
    shape_of_parts,
)

from jaxlamina.ranks.attention_programs import AttentionProgram, step_inputs_of
from jaxlamina.ranks.model_side import ModelSide, receiver, shards_of
from jaxlamina.ranks.rank_kv import RankKV
from jaxlamina.ranks.wires import heads_on_worker
from jaxlamina.run.parts import Part, prompts_part
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.steps.batch import PrefillBatch
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.step import PromptPart, Step
from jaxlamina.transports.exchanges import first_difference
from jaxlamina.transports.local import CompiledPieces, LocalTransport, RankProgram, Together
from jaxlamina.workers.kv_pools import KVPools
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.workspace import shapes

DEVICE = jax.devices()[0]
PIECES = CompiledPieces()  # equal ones are of several layouts


class World:
    """All ranks of a layout."""

    def __init__(self, job: Job) -> None:
        self.job, self.layout, self.cluster = job, job.layout, job.cluster
        layers = [*zip(job.specs, job.n_query_heads, strict=True)]
        self.heads = {
            rank: [heads_on_worker(self.layout, *one, i) for one in layers]
            for i, rank in enumerate(self.layout.workers)
        }
        self.specs = {
            rank: [
                AttentionSpec(of.k, of.h, of.dtype, spec.scale, spec.window, spec.softcap)
                for spec, of in zip(job.specs, heads, strict=True)
            ]
            for rank, heads in self.heads.items()
        }
        self.pools = [
            KVPools(specs, n, DEVICE) for n, specs in zip(capacities(job), self.specs.values(), strict=False)
        ]
        self.book = book_of(job, self.pools)
        self.sides: dict[int, ModelSide] = {}
        for rank, model in job.models.items():
            shards = () if self.is_prefill(rank) else shards_of(self.cluster)
            known = self.layout, job.specs, 0 if shards else rank, shards
            self.sides[rank] = ModelSide(self.end(rank), model, *known)
            if self.layout.attends_locally and not self.is_prefill(rank):
                self.sides[rank].allocate(N_SLOTS, 0, None)

    def is_prefill(self, rank: int) -> bool:
        return rank in self.cluster.pools.prefill_ranks

    def run(self, parts: list[Part]) -> list[np.ndarray]:
        """Each part's logits."""
        shape = shape_of_parts(parts)
        jobs: list[tuple[RankProgram, Any]] = []
        several = shape.n_batches > 1 or self.cluster.shares_weights
        keeping: list[tuple[int, RankKV]] = []
        for rank, side in self.sides.items():
            is_prefill = self.is_prefill(rank)
            part = next((part for part in parts if part.shape.rank == (rank if is_prefill else 0)), None)
            if part is None or (rank and not is_prefill and not several):
                continue
            program, own_weights = side.compile_later(part.shape)()
            own: Any = [], [], ()
            if side.kv is not None:
                own = *side.kv.bound(), part.rows.local
                keeping.append((len(jobs), side.kv))
            jobs.append((program, (side.weights(own_weights), part.inputs, part.rows.at, *own)))  # type: ignore[arg-type]
        [front, *_] = jobs
        assert front[0].rank == 0
        if shape.prefills:
            n_words = self.job.models[0].split(1).traced.jaxpr.outvars[0].aval.shape[-1]
            likes = [jax.ShapeDtypeStruct((*part.shape.logits_of, n_words), np.float32) for part in parts[1:]]
            # Unchecked: what a LocalTransport makes is no program to call.
            intake: Any = inspect.unwrap(receiver)(
                self.end(0), likes, [part.shape.rank for part in parts[1:]]
            )
            jobs.append((intake, (np.zeros(1, np.int32),)))
        n_model = len(jobs)
        asked = self.layout.workers if plan_of(self.layout, shape, len(self.job.specs)).pool else ()
        for rank, kv, *slots in zip(asked, self.pools, *(part.rows.slots for part in parts), strict=False):
            known = self.end(rank), self.layout, self.specs[rank], self.heads[rank], shape
            inputs = step_inputs_of(self.layout, shape, self.specs[rank])
            program = self.end(rank).compile(
                AttentionProgram(*known).step, *shapes((kv.k, kv.v)), inputs, donate_argnums=(0, 1)
            )
            jobs.append((program, (kv.k, kv.v, [of for part in slots for of in part])))
        lists: dict[int, list[Any]] = {}
        for program, _ in jobs:
            lists.setdefault(program.rank, []).extend(program.exchanges())
        assert first_difference(lists, self.cluster.describe) is None
        programs, args = zip(*jobs, strict=True)
        results = Together(programs, PIECES).run(*args)
        for kv, (k, v, _) in zip(self.pools, results[n_model:], strict=False):
            kv.k, kv.v = k, v
        for i, of_rank in keeping:
            of_rank.take_back(*results[i][1:])
        logits = [results[0][0], *(results[n_model - 1] if shape.prefills else ())]
        return [np.asarray(x) for x in logits]

    def end(self, rank: int) -> Any:
        return LocalTransport(rank, self.cluster.n_ranks, DEVICE)


@cache
def whole_model(layout: str) -> UnsplitExecutor:
    _, model, params = model_of(layout)
    executor = UnsplitExecutor(model, params, n_slots=N_SLOTS, device=DEVICE)
    executor.prefill(batches()[-1])
    return executor


@cache
def unsplit(kind: str, n_prompts: int, layout: str = "") -> list[np.ndarray]:
    """What a step of that kind gives, each part of it by itself; ``layout``: if its model is another one."""
    rows, chunk, whole, _ = batches()
    executor = whole_model(layout)
    prompts = {
        "prefill": [PromptPart(whole)],
        "chunk": [PromptPart(chunk)],
        "scored": [PromptPart(chunk, scored=True)],
        "decode with chunk": [PromptPart(chunk)],
        "decode beside chunks": [PromptPart(chunk), PromptPart(whole, scored=True)][:n_prompts],
    }.get(kind, [])
    steps = [Step(rows)] if kind.startswith("decode") or kind == "staggered" else []
    found = [executor.run(step) for step in [*steps, *(Step(prompts=(prompt,)) for prompt in prompts)]]
    return [np.asarray(x) for of in found for x in (of.decodes, *of.prompts) if x is not None]


def _apart(stored: PrefillBatch) -> list[tuple[PrefillBatch, bool]]:
    """What rows follow, and what the chunk follows."""
    return [
        (PrefillBatch(*(x[part] for x in stored)), i > 0)
        for i, part in enumerate((slice(-1), slice(-1, None)))
    ]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in LAYOUTS]
)
def test_every_kind_of_step_gives_what_unsplit_execution_gives(layout: str) -> None:
    job = job_of(layout)
    world = World(job)
    *_, stored = batches()
    for prompts, on_workers in ((stored, False),) if not job.cluster.prefill_workers else _apart(stored):
        if on_workers and world.book.wishes.share is not None:
            world.book.wishes.share = lambda _: 0.0  # a prefill worker is to follow it
        world.run([prompts_part(world.book, prompts, q_first=job.q_first, scored=False)])
    n_kinds = 0
    for kind in KINDS:  # none of which writes where another reads
        parts = parts_of(job, kind, world.book)
        if parts is None:
            continue
        n_kinds += 1
        got = world.run(parts)
        if kind == "decode with chunk":
            got = [got[0][:-1], got[0][-1:]]
        other = layout if layout in OTHER_HEADS else ""
        for of_part, want in zip(got, unsplit(kind, len(parts) - 1, other), strict=True):
            np.testing.assert_allclose(of_part, want, rtol=0, atol=1e-4 * np.abs(want).max(), err_msg=kind)
    assert n_kinds >= 2
