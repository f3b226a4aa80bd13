"""What a model rank has of the model: weights on its device, and its whole-step programs as it compiles them.

Rank 0's executor has one, and so has every other model rank (`model_rank`). Knows no request, and no other
rank but by what the transport sends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from jaxlamina.kv.placement import PlacedIndices
from jaxlamina.kv.planned_rows import SegmentSlots
from jaxlamina.models.causal_lm import CausalLM
from jaxlamina.process import kept_programs
from jaxlamina.ranks.apart import WHOLE, SharedOut, shared_out
from jaxlamina.ranks.attention_programs import attention_workspace_bytes
from jaxlamina.ranks.attention_speed import seconds_per_token
from jaxlamina.ranks.kv_room import slots_found
from jaxlamina.ranks.model_programs import ModelProgram, indices_of, inputs_of, local_slots_of
from jaxlamina.ranks.rank_kv import RankKV, own_scales
from jaxlamina.ranks.shards import FollowerEnd, LeaderEnd, ShardEnd, Shards
from jaxlamina.ranks.wires import local_spec
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import FRONT, Logits, RunSlice, Task
from jaxlamina.transports import Program, TracedEnd, Transport
from jaxlamina.transports.local import CompiledPieces, LocalTransport, Together
from jaxlamina.workers.model_worker import Like, ModelFn, ModelWorker, Params, trace_step
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from jaxlamina.workers.streamed import Filled, with_streamed_products
from jaxlamina.workers.workspace import LargestStep
from pallas_kernels.order import tied, zero_after
from splitter import SplitModel, Traced

_POOLS = (3, 4)  # of `ModelProgram.step`'s arguments

OwnWeights = Callable[[], Any]
"""What finds a program's weights, as it takes them, among those that there are now."""


class ModelSide:
    """``compile_later`` traces a bucket's program, and gives a call that does the rest in any thread."""

    def __init__(
        self,
        transport: Transport,
        model: ModelWorker,
        layout: Layout,
        specs: Sequence[AttentionSpec],
        replica: int,
        shards: Sequence[int] = (),
        source: CausalLM | None = None,
    ) -> None:
        """``replica``: which one this is, or which stage of a pipeline; ``shards``: the ranks that share out
        this replica's weights, if several do, and ``model`` is this one's shard; ``specs``: of all heads;
        ``source``: what ``model`` is the function of; where it has a name, its programs are kept on disk."""
        self.transport, self.model = transport, model
        self.layout, self.specs = layout, specs
        self.replica, self.shards = replica, tuple(shards)
        self.kv: RankKV | None = None  # what this rank keeps of the KV, once there is room for it
        self._weights: dict[int, Any] = {}  # by id, as programs take them
        self._taken: dict[OwnWeights, Any] = {}  # what they have found
        self._binding = threading.Lock()  # other threads trace programs, too
        name = None if source is None else source.name
        # What says which model this is, to processes to come; None where nothing does.
        self.made_of = None if name is None else (name, _likes(model.like), _likes(model.params))

    def compile_later(
        self, shape: StepShape, behind: bool = False
    ) -> Callable[[], tuple[Program, OwnWeights]]:
        """Traces the program of a bucket on this rank; the call that comes back gives it, to be called with
        the weights and what else `ModelProgram.step` takes, and what `weights` are asked for by."""
        split = self.model.split(shape.model_rows, shape.tokens, of_all=shape.of_all)
        ends = self._ends(shape)
        own = self.layout.slices_on(self.replica, split.n + 1)
        with self._binding:
            weights = self._bound(split, own)
        shards = Shards(self.transport, self.shards) if self.shards else None
        known = self.layout, split, self.specs, shape, self.replica, ends, shards
        traced = ModelProgram(self._end(), *known)
        args = self._likes(_lifted(weights), shape)
        step = _with_lifted(traced.step, weights)
        if fed := self.fed_in(shape):
            step = _with_tokens_of_front(step, self.transport, fed)
        step = with_streamed_products(step, self.transport.device, partial(_filled, shape))
        keep = self._keep(shape, behind, [split.sources(i) for i in own])
        how: dict[str, Any] = {"behind": behind, "keep": keep, "donate_argnums": _POOLS}
        compiles = self.transport.compile_later(step, *args, **how)
        return lambda: (compiles(), lambda: _lifted(self._bound(split, own)))

    def weights(self, own: OwnWeights) -> Any:
        """A program's weights, as it takes them."""
        with self._binding:
            if own not in self._taken:
                self._taken[own] = own()
            return self._taken[own]

    def put_weights(self, params: Params) -> None:
        """Programs take these from now on (`ModelWorker.put`): their arguments, so none is compiled anew."""
        with self._binding:
            self._taken.clear()
            self._weights.clear()
            self.model.put(params)

    # --- what this rank keeps of the KV ---
    @property
    def own_specs(self) -> list[AttentionSpec]:
        """Of each layer whose KV this rank keeps a share of, that share."""
        layers = self.layout.local_layers(self.replica, len(self.specs))
        return [local_spec(self.layout, self.specs[i]) for i in layers]

    def slots_found(self, setup: m.Setup, n_sharing: int) -> m.SlotsFound:
        """Room for it beside the weights; `jaxlamina.ranks.kv_room.slots_found`."""
        largest, device = LargestStep(*setup.largest), self.transport.device

        def workspace_bytes() -> int:
            of_kv = attention_workspace_bytes(self.own_specs, self._own_query_heads, device, largest)
            n_shards = self.layout.heads_over
            known = "model workspace", self.made_of, self.specs, largest, n_shards
            name = None if self.made_of is None else kept_programs.name_of(device, *known)
            return of_kv + kept_programs.number(
                name, lambda: model_workspace_bytes(self.model, self.specs, device, largest, n_shards)
            )

        return slots_found(setup, self.layout, self.own_specs, device, workspace_bytes, n_sharing)

    @property
    def _own_query_heads(self) -> list[int]:
        sites = self.model.split(1).sites
        layers = self.layout.local_layers(self.replica, len(self.specs))
        return [
            sites[i].q.shape[2] // sites[i].k.shape[2] * own.n_kv_heads
            for i, own in zip(layers, self.own_specs, strict=True)
        ]

    def seconds_per_token(self) -> float:
        """`jaxlamina.ranks.attention_speed.seconds_per_token` of it."""
        return 0.0 if self.kv is None else seconds_per_token(self.kv, self.own_specs, self._own_query_heads)

    def allocate(self, n_slots: int, n_host_slots: int, scales: Sequence[ChannelScales] | None) -> None:
        """Takes the memory for it. ``scales``: of each of the model's layers, all its heads'."""
        layers = self.layout.local_layers(self.replica, len(self.specs))
        of_layers = None if scales is None else [scales[i] for i in layers]
        index = self.shards.index(self.transport.rank) if self.layout.heads_over > 1 else 0
        heads = [np.asarray(self.layout.own_heads(index, self.specs[i].n_kv_heads)) for i in layers]
        own = own_scales(of_layers, heads)
        self.kv = RankKV(self.transport, self.own_specs, n_slots, own, n_host_slots)

    def _likes(self, weights: Any, shape: StepShape) -> tuple[Any, ...]:
        """What a program is called with."""
        slots = local_slots_of(self.layout, shape, self.specs) if self.own_specs else ()
        pools = self.kv.like if self.kv is not None and slots else ([], [])
        return weights, inputs_of(shape), indices_of(self.layout, shape), *pools, slots

    def run(
        self,
        call: Callable[..., Any],
        own: OwnWeights,
        inputs: Any,
        at: Sequence[PlacedIndices],
        slots: Sequence[SegmentSlots],
    ) -> Any:
        """Calls a program, and keeps what it makes of this rank's KV. Its logits, as it gives them."""
        given, weights = self.transport.bind((inputs, at)), self.weights(own)
        if self.kv is None or not slots:
            logits, _, _ = call(weights, *given, [], [], ())
            return logits
        logits, k, v = call(weights, *given, *self.kv.bound(), self.transport.bind(tuple(slots)))
        self.kv.take_back(k, v)
        return logits

    def kept(self, shape: StepShape, behind: bool = False) -> tuple[Program, OwnWeights] | None:
        """What `compile_later`'s call gives, from an earlier process; in any thread."""
        name = self._name(shape, behind)
        found = None if name is None else self.transport.kept(name)
        if found is None:
            return None
        program, sources = found
        return program, partial(self._from, sources)

    def _from(self, sources: Sequence[tuple[Any, ...]]) -> tuple[tuple[jax.Array, ...], ...]:
        weights = [tuple(self._source(x) for x in of_slice) for of_slice in sources]
        own = self.layout.slices_on(self.replica, len(self.specs) + 1)
        return tuple(weights[i - own.start] if i in own else () for i in range(len(self.specs) + 1))

    def _source(self, source: Any) -> jax.Array:
        """One of a slice's parameters, as `SplitModel.sources` says, as programs take it."""
        if isinstance(source, int):
            return self._lift(self.model.params[sorted(self.model.like)[source]])[1]
        return self._lift(jnp.asarray(source))[1]

    def _name(self, shape: StepShape, behind: bool) -> str | None:
        if self.made_of is None:
            return None
        pools = None if self.kv is None else kept_programs.kinds(self.kv.like)
        sides = self.layout, self.specs, self.replica, self.shards, pools
        return self.transport.name_of("model", self.made_of, *sides, shape, behind)

    def _keep(
        self, shape: StepShape, behind: bool, sources: Sequence[tuple[Any, ...]]
    ) -> tuple[str, Any] | None:
        """The program's name, and where each slice's weights are found again; None where some are views of
        others."""
        name = self._name(shape, behind)
        has_views = any(source is None for of_slice in sources for source in of_slice)
        return None if name is None or has_views else (name, sources)

    def _ends(self, shape: StepShape) -> SplitModel | None:
        """The model cut for the rows that the last slice is run for at once, if these are not those of other
        slices."""
        if shape.chunk is not None:
            return self.model.split(shape.batch + 1)
        tasks = plan_of(self.layout, shape, len(self.specs)).model[self.replica]
        together = any(isinstance(task, Logits) and len(task.batches) > 1 for task in tasks)
        return self.model.split(shape.batch) if together else None

    def fed_in(self, shape: StepShape) -> tuple[int, ...]:
        """Model ranks that get the tokens of a step's rows from rank 0 within their programs, since they read
        them: the host need not know them when it launches the step."""
        if shape.kind != "decode" or shape.rank:
            return ()
        if self.shards:
            return self.shards[1:]
        split = self.model.split(shape.model_rows, shape.tokens, of_all=shape.of_all)
        tokens = split.traced.jaxpr.invars[split.traced.n_params]
        readers = {i for i, one in enumerate(split.slices) if tokens in one.context_vars}
        return tuple(
            rank
            for rank, tasks in plan_of(self.layout, shape, split.n).model.items()
            if rank != FRONT and any(_slice_of(task, split.n) in readers for task in tasks)
        )

    def _end(self) -> TracedEnd | ShardEnd:
        if not self.shards or self.layout.heads_over > 1:
            return self.transport
        leader, *followers = self.shards
        if self.transport.rank == leader:
            return LeaderEnd(self.transport, followers)
        return FollowerEnd(self.transport, leader)

    def _bound(self, split: SplitModel, own: Container[int]) -> Weights:
        """Each slice's weights, of those in ``own``; buckets share those that are parameters as they are, and
        not views of stacked ones."""
        params = {**self.model.like, **self.model.params}
        return tuple(
            tuple(map(self._lift, split.slice_params(i, params))) if i in own else ()
            for i in range(split.n + 1)
        )

    def _lift(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = id(x)
        if key not in self._weights:
            array = x if x.ndim else x.reshape(1)
            # x is kept too, or its id could be another's later
            self._weights[key] = x, self.transport.bind(jax.device_put(array, self.transport.device))
        return self._weights[key]


Weights = tuple[
    tuple[tuple[jax.Array, jax.Array], ...], ...
]  # of each slice: (as the model has it, as programs take it)


def _likes(params: Mapping[str, Like]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple((name, tuple(x.shape), str(x.dtype)) for name, x in sorted(params.items()))


def _lifted(weights: Weights) -> tuple[tuple[jax.Array, ...], ...]:
    return tuple(tuple(bound for _, bound in of_slice) for of_slice in weights)


def _filled(shape: StepShape, _: Any, inputs: Sequence[Any], *rest: Any) -> Filled | None:
    """Of the arguments of `ModelProgram.step`. Rows of one token each may all be requests."""
    if len(inputs) < 3:
        return None
    tokens, _, logits_at = inputs
    return Filled.of(tokens, logits_at, 0 if shape.chunk is None else shape.batch)


def _with_lifted(step: Callable[..., Any], weights: Weights) -> Callable[..., Any]:
    """``step`` for weights of which those without dimensions have got one: a program takes no others."""
    flat = [[own.ndim == 0 for own, _ in of_slice] for of_slice in weights]

    def run(given: Any, *others: Any) -> Any:
        lowered = tuple(
            tuple(x.reshape(()) if scalar else x for x, scalar in zip(xs, scalars, strict=True))
            for xs, scalars in zip(given, flat, strict=True)
        )
        return step(lowered, *others)

    return run


def _slice_of(task: Task, n: int) -> int | None:
    """The slice that a task runs."""
    return n if isinstance(task, Logits) else task.index if isinstance(task, RunSlice) else None


def _with_tokens_of_front(
    step: Callable[..., Any], transport: Transport, to: Sequence[int]
) -> Callable[..., Any]:
    """``step`` on tokens that rank 0 has been given, on ranks ``to`` as well. What it exchanges follows from
    these."""

    def run(weights: Any, inputs: Any, *others: Any) -> Any:
        tokens, *rest = inputs
        # Whole pieces of 16 bytes, which go by memory where others do.
        like = jax.ShapeDtypeStruct((-(-tokens.size // 4), 4), jnp.int32)
        if transport.rank == FRONT:
            message = jnp.pad(tokens.reshape(-1), (0, 4 * like.shape[0] - tokens.size)).reshape(like.shape)
            tie: jax.Array | None = None
            for rank in to:
                tie = transport.send(message, rank, tie)
            tokens = tied(tokens, tie)
        else:
            tokens = transport.recv(like, FRONT).reshape(-1)[: tokens.size].reshape(tokens.shape)
        return step(weights, (tokens, *rest), *others)

    return run


def model_workspace_bytes(
    model: ModelWorker,
    specs: Sequence[AttentionSpec],
    device: jax.Device,
    largest: LargestStep,
    n_shards: int = 1,
) -> int:
    """What slices of the largest step take beside weights, found by compiling them. ``model`` may be one of
    ``n_shards``; ``specs``: of all heads."""
    end: Any = LocalTransport(0, n_shards + 1, device)
    layout = Layout((n_shards,), "heads", heads_over=n_shards)
    side = ModelSide(end, model, layout, specs, 0, range(n_shards) if n_shards > 1 else ())
    steps = [StepShape("decode", largest.batch, 1, 1), StepShape("prefill", 1, largest.prompt, 0)]
    programs: list[Any] = [side.compile_later(shape)()[0] for shape in steps]
    return max(Together([program], CompiledPieces()).workspace_bytes() for program in programs)


def receiver(transport: Transport, likes: Sequence[jax.ShapeDtypeStruct], sources: Sequence[int]) -> Program:
    """A program that takes an int32 ``[1]`` and gives an array like each of ``likes``, received from
    ``sources`` one after another."""

    def program(start: jax.Array) -> list[jax.Array]:
        last, found = start, []
        for like, source in zip(likes, sources, strict=True):
            last = transport.recv(like, source, zero_after(last))
            found.append(last)
        return found

    return transport.compile(program, jax.ShapeDtypeStruct((1,), jnp.int32))


def shards_of(cluster: Cluster) -> tuple[int, ...]:
    """The model ranks that share out the weights; none if each has them all."""
    return tuple(cluster.pools.model_ranks) if cluster.tensor_parallel > 1 else ()


def shared_out_of(cluster: Cluster, model: ModelFn, like: Mapping[str, Like]) -> SharedOut:
    """How the cluster's model ranks share a model's weights out."""
    n = cluster.tensor_parallel
    return shared_out(traces(model, like), like, n) if n > 1 else WHOLE


def traces(model: ModelFn, like: Mapping[str, Like]) -> list[Traced]:
    """The model as a decode step and as a prefill: what both read only by products can be shared out."""
    return [trace_step(model, like, 1, n_tokens) for n_tokens in (1, 2)]
