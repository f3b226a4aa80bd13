"""What a decode step takes on given pools: times of its tasks, which roofline terms and measured efficiencies
say, walked in the order that the plan of the step has (`jaxlamina.steps.plans`).

Pure: seconds from numbers. Nothing is run, and no array library is imported. A model with an operator that
cannot be priced raises (`roofline.check`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.models.config import ModelConfig
from jaxlamina.planner import roofline
from jaxlamina.planner.hardware import GIB
from jaxlamina.planner.task_times import Sides, TaskTimes, slice_weights
from jaxlamina.planner.terms import LinkTerms, Terms
from jaxlamina.planner.walk import Walked, walk
from jaxlamina.steps.layout import Layout, local_heads
from jaxlamina.steps.schedules import balanced
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import FRONT, POOL

__all__ = ["Deployment", "LinkTerms", "StepCost", "Terms", "kv_slots", "prefill_s", "step_cost", "step_costs"]

_FEWEST_AT_ONCE = 4  # steps that arrays are quicker for than one after the other


@dataclass(frozen=True)
class Deployment:
    """One instance of a model: on ``n_model`` model workers and ``n_attention`` attention workers; with none
    of them unsplit.

    A replica is ``tensor_parallel`` model workers, which share out weights and heads: each talks to the
    attention workers of its heads. ``kv_bytes`` and ``weight_bytes``: of one element. ``model_link``: between
    model workers; None: as ``link``. ``q_first``: q travels alone, before k and v are computed.
    ``mini_batches``: of one batch, parts in which its messages go. ``pipeline_parallel``: stages, of which
    each model worker is one.

    ``UserError`` for what no instance of the runtime can be.
    """

    config: ModelConfig
    compute: Terms
    memory: Terms | None = None
    link: LinkTerms | None = None
    n_model: int = 1
    n_attention: int = 0
    tensor_parallel: int = 1
    partition: Literal["heads", "requests", "tokens"] = "heads"
    local_share: float = 0.0
    n_batches: int = 1
    mode: Literal["fixed", "rotational"] = "rotational"
    kv_bytes: float = roofline.ELEMENT_BYTES
    weight_bytes: float = roofline.ELEMENT_BYTES
    model_link: LinkTerms | None = None
    q_first: bool = False
    mini_batches: int = 1
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        roofline.check(self.config)
        stages = self.pipeline_parallel
        if stages > 1 and (stages != self.n_model or self.tensor_parallel > 1 or not self.is_split):
            raise UserError(
                f"pipeline_parallel={stages} is of a split model, over as many model workers, without "
                "tensor_parallel"
            )
        if (self.n_attention > 0) != (self.memory is not None and self.link is not None):
            raise UserError("a setup has attention workers, their terms and a link, or none of these")
        if self.n_model % self.tensor_parallel:
            raise UserError(
                f"{self.n_model} model workers are no whole number of replicas of {self.tensor_parallel}"
            )
        if self.tensor_parallel > 1 and self.link_between_models is None:
            raise UserError(f"{self.tensor_parallel} shards of a model sum over a link: say model_link")
        k = self.config.num_key_value_heads
        if k % self.tensor_parallel:
            raise UserError(
                f"{k} KV heads are not shared out evenly over {self.tensor_parallel} model workers, and what "
                "then goes by their first one has no price here: take another tensor_parallel"
            )
        if not roofline.shared_out_evenly(self.config, self.tensor_parallel):
            raise UserError(
                f"products of {self.config.intermediate_size} or {self.config.vocab_size} columns are not "
                f"shared out evenly over {self.tensor_parallel} model workers, and each then keeps them "
                "whole, which has no price here: take another tensor_parallel"
            )
        if stages > self.config.num_hidden_layers:
            raise UserError(f"pipeline_parallel={stages} is more than the model's layers")
        if self.is_split and self.tensor_parallel not in (1, self.n_model):
            raise UserError(
                f"{self.n_model} model workers are copies of the model or share one out: tensor_parallel "
                f"must be 1 or {self.n_model}"
            )
        if not self.layout.by_heads or not self.has_pool:
            return
        kept = local_heads(k, self.n_attention, self.local_share, self.tensor_parallel)
        if kept is None or self.n_attention > k - kept:
            raise UserError(
                f"{k} KV heads with a share of {self.local_share:g} on model workers are too few for "
                f"{self.n_attention} attention workers: take partition='requests' or 'tokens'"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Without what is remembered: hashes of texts are each process's own."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def terms(self) -> tuple[Terms, ...]:
        """Of its kinds of device."""
        return tuple(dict.fromkeys(one for one in (self.compute, self.memory) if one is not None))

    @property
    def is_split(self) -> bool:
        return self.n_attention > 0

    @property
    def has_pool(self) -> bool:
        """Whether attention workers keep any KV."""
        return self.is_split and self.local_share < 1

    @property
    def n_replicas(self) -> int:
        return self.n_model // (self.tensor_parallel * self.pipeline_parallel)

    @cached_property
    def layout(self) -> Layout:
        """As the runtime's plans know it. Without a pool replicas have nothing to do with each other: then it
        is that of one of them."""
        if not self.has_pool:
            return Layout((), self.partition, mode=self.mode, local_share=1.0)
        workers = tuple(range(self.n_model, self.n_model + self.n_attention))
        n_stages = self.pipeline_parallel
        stages = balanced(slice_weights(self.config), n_stages) if n_stages > 1 else ()
        return Layout(
            workers, self.partition, self.n_replicas, "stages" if stages else self.mode, stages,
            self.local_share, self.tensor_parallel,
        )  # fmt: skip

    @cached_property
    def n_links(self) -> tuple[int, int]:
        """Workers that a shard talks to, and shards that a worker talks to: the most of any."""
        heads = self.config.num_key_value_heads
        if self.layout.by_heads:
            heads -= self.layout.local_heads(heads)
        links = self.layout.links(0, heads)
        of_shards, of_workers = Counter(link.rank for link in links), Counter(link.worker for link in links)
        return max(of_shards.values(), default=0), max(of_workers.values(), default=0)

    @cached_property
    def sides(self) -> Sides:
        return Sides.of(self)

    @cached_property
    def kind(self) -> int:
        """The same number for all setups that differ by `Sides` alone."""
        layout, model_link = self.layout, self.model_link
        how = None if self.link is None else self.link[2:]
        return _kind(
            (
                self.config, self.compute, self.memory, how, self.n_model, self.tensor_parallel,
                self.partition, layout.has_pool, layout.attends_locally, layout.by_heads, self.n_batches,
                self.mode, self.kv_bytes, self.weight_bytes, model_link and model_link[2:], self.q_first,
                self.mini_batches, self.pipeline_parallel,
            )
        )  # fmt: skip

    @property
    def link_between_models(self) -> LinkTerms | None:
        return self.model_link or self.link


_kinds: dict[Hashable, int] = {}


def _kind(key: Hashable) -> int:
    return _kinds.setdefault(key, len(_kinds))


class StepCost(NamedTuple):
    """Seconds of one decode step in the steady state. Busy times are means over a pool's devices, of which
    sums between shards are a part; what is left of ``step_s`` of each pool is exchange or idle."""

    step_s: float
    model_busy_s: float
    attention_busy_s: float
    exchange_s: float


def kv_slots(setup: Deployment, share_of_memory: float = 0.9) -> int:
    """Tokens whose KV fits into the instance: of ``share_of_memory`` of each device's memory, model workers'
    after the weights. Model workers' room counts where they keep a share; with shares of heads every token is
    on both sides, and the fuller side decides."""
    of_model, of_pool = pool_slots(setup, share_of_memory)
    if not setup.has_pool:
        return int(of_model)
    if not setup.layout.by_heads:
        return int(of_model * setup.layout.attends_locally + of_pool)
    k, n = setup.config.num_key_value_heads, setup.n_attention
    local = setup.layout.local_heads(k)
    of_workers = of_pool * k / n / -(-(k - local) // n)  # the one with most of them decides
    return int(min(of_model * k / local, of_workers) if local else of_workers)


def pool_slots(setup: Deployment, share_of_memory: float = 0.9) -> tuple[float, float]:
    """Whole tokens' KV, of all heads, that model workers have room for beside the weights, and the pool."""
    per_token = roofline.kv_bytes_per_token(setup.config, setup.kv_bytes)
    of_model = share_of_memory * setup.n_model * setup.compute.hardware.memory_gib * GIB
    of_model -= setup.n_replicas * setup.weight_bytes * roofline.n_params(setup.config)
    of_pool = 0.0
    if setup.memory is not None:
        of_pool = share_of_memory * setup.n_attention * setup.memory.hardware.memory_gib * GIB
    return max(0.0, of_model) / per_token, of_pool / per_token


@lru_cache(1 << 14)
def step_cost(
    setup: Deployment, n_rows: int, context: float, chunk_tokens: int = 0, chunk_stored: int = 0
) -> StepCost:
    """A decode step of ``n_rows`` requests (all replicas and staggered batches together) with ``context``
    stored tokens each on average, and ``chunk_tokens`` of a prompt alongside, of which ``chunk_stored``
    tokens are stored.

    The tasks of the step's plan are walked in their order, several steps in a row. As the runtime has it,
    a step with a prompt's tokens alongside is one batch with whole messages, and so is one of fewer rows than
    there are staggered batches or mini-batches. ``UserError`` where the runtime has no such plan."""
    if setup.n_batches > 1 and (chunk_tokens or n_rows < setup.n_batches):
        setup = replace(setup, n_batches=1)
    if setup.mini_batches > 1 and (chunk_tokens or n_rows < setup.mini_batches):
        setup = replace(setup, mini_batches=1)
    times = TaskTimes(setup, n_rows, context, chunk_tokens, chunk_stored)
    return StepCost(*_cost(setup, times, None))


def step_costs(asked: Sequence[tuple[Deployment, int, float]]) -> list[StepCost]:
    """`step_cost` of each (setup, rows, context), bit for bit. Steps of setups that are alike are walked
    together, as arrays: a search is mostly this."""
    alike: dict[int, list[int]] = {}
    for i, (setup, n_rows, _) in enumerate(asked):
        is_whole = n_rows >= max(setup.n_batches, setup.mini_batches)
        alike.setdefault(setup.kind if is_whole else -1, []).append(i)
    found: dict[int, StepCost] = {}
    for kind, places in alike.items():
        if kind < 0 or len(places) < _FEWEST_AT_ONCE:
            found.update((i, step_cost(*asked[i])) for i in places)
            continue
        setups, rows, contexts = zip(*(asked[i] for i in places), strict=True)
        sides = Sides.of_all(setups)
        times = TaskTimes(setups[0], np.array(rows, float), np.array(contexts, float), several=sides)
        numbers = _cost(setups[0], times, len(places))
        columns = (np.broadcast_to(n, len(places)).tolist() for n in numbers)
        found.update(zip(places, map(StepCost._make, zip(*columns, strict=True)), strict=True))
    return [found[i] for i in range(len(asked))]


def _cost(setup: Deployment, times: TaskTimes, n_at_once: int | None) -> tuple[Any, Any, Any, Any]:
    """`StepCost`'s numbers, or arrays of them."""
    works, (meets, ends) = times.works, times.ends()
    is_rendezvous = setup.link is not None and setup.link.is_rendezvous
    n_layers, shape = setup.config.num_hidden_layers, shape_of(setup, times.chunk_tokens > 0)
    found: Walked = walk(
        setup.layout, shape, n_layers, works | meets, ends, is_rendezvous, times.on_wire, n_at_once
    )
    model = [rank for rank in found.work_s if rank != POOL]
    n_models = len(set(setup.layout.stages)) or setup.layout.n_replicas
    model_s = sum(found.work_s[r] for r in model) / n_models
    return found.step_s, model_s, found.work_s.get(POOL, 0.0), found.messages_s[FRONT]


def shape_of(setup: Deployment, has_chunk: bool) -> StepShape:
    """A step's shape whose plan is that of any such step: of one row to a batch."""
    n, n_parts = (setup.n_batches, setup.mini_batches) if setup.has_pool else (1, 1)
    asked = int(setup.has_pool and not setup.layout.by_heads)
    chunk = StepShape("chunk", 1, 1, 1, asked, asked) if has_chunk else None
    how: dict[str, Any] = {"q_first": setup.q_first, "n_batches": n, "mini_batches": n_parts, "chunk": chunk}
    return StepShape("decode", max(n, n_parts), 1, 1, asked, asked, **how)


def prefill_s(setup: Deployment, n_tokens: int, n_stored: int = 0) -> float:
    """A prompt's ``n_tokens`` as a step of their own, after ``n_stored`` of it, whose attention is
    arithmetic."""
    times = TaskTimes(setup, 0, 0, n_tokens, n_stored)
    works, n_layers = times.works, setup.config.num_hidden_layers
    attention_s = n_layers * times.pairs_s(n_tokens * (n_stored + n_tokens / 2))
    slices_s = works["first whole"] + (n_layers - 1) * works["slice whole"] + works["last"]
    return float(setup.compute.step_fixed_s + slices_s + attention_s + times.moved_s)
