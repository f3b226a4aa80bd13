"""What a model rank has of the model: weights on its device, and its whole-step programs as it compiles them.

Rank 0's executor has one, and so has every other model rank (`model_rank`). Knows no request, and no other
rank but by what the transport sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Shaped

from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from jaxlamina.kv.placement import PlacedIndices
from jaxlamina.kv.pool_book import SegmentSlots
from jaxlamina.models.causal_lm import CausalLM
from jaxlamina.ranks.attention_programs import attention_workspace_bytes
from jaxlamina.ranks.attention_speed import seconds_per_token
from jaxlamina.ranks.kv_room import slots_found
from jaxlamina.ranks.model_programs import ModelProgram, indices_of, inputs_of, local_slots_of
from jaxlamina.ranks.rank_kv import RankKV, own_scales
from jaxlamina.ranks.shards import FollowerEnd, LeaderEnd, ShardEnd, needing, with_shards
from jaxlamina.ranks.wires import local_spec
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import Logits
from jaxlamina.transports import Program, TracedEnd, Transport
from jaxlamina.transports.local import CompiledPieces, LocalTransport, Together
from jaxlamina.workers.model_worker import Like, ModelFn, ModelWorker, trace_step
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from jaxlamina.workers.streamed import Filled, with_streamed_products
from jaxlamina.workers.workspace import LargestStep
from pallas_kernels.order import zero_after
from splitter import SplitModel, Traced

_POOLS = (3, 4)  # of `ModelProgram.step`'s arguments


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
        this replica's weights, if several do; ``source``: what ``model`` is the function of; where it has
        a name, its programs are kept on disk."""
        self.transport, self.model = transport, model
        self.layout, self.specs = layout, specs
        self.replica, self.shards = replica, tuple(shards)
        self.kv: RankKV | None = None  # what this rank keeps of the KV, once there is room for it
        self._weights: dict[int, Any] = {}  # by id, as programs take them
        self._model_name = None if source is None else source.name
        self._made_of = _likes(model.like), _likes(model.params)

    def compile_later(self, shape: StepShape, behind: bool = False) -> Callable[[], tuple[Program, Any]]:
        """Traces the program of a bucket on this rank; the call that comes back gives it, to be called with
        the weights and what else `ModelProgram.step` takes, and the weights."""
        split = self.model.split(shape.model_rows, shape.tokens, of_all=shape.of_all)
        ends = self._ends(shape)
        own = self.layout.slices_on(self.replica, split.n + 1)
        weights = tuple(self._bound(split, i) if i in own else () for i in range(split.n + 1))
        traced = ModelProgram(self._end(), self.layout, split, self.specs, shape, self.replica, ends)
        args = self._likes(_lifted(weights), shape)
        step = _with_lifted(traced.step, weights)
        if self.shards:
            step = self._of_shards(step, split)
        step = with_streamed_products(step, self.transport.device, partial(_filled, shape))
        keep = self._keep(shape, behind, [split.sources(i) for i in own])
        how: dict[str, Any] = {"behind": behind, "keep": keep, "donate_argnums": _POOLS}
        compiles, given = self.transport.compile_later(step, *args, **how), args[0]
        return lambda: (compiles(), given)

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
            return of_kv + model_workspace_bytes(self.model, self.specs, device, largest)

        return slots_found(setup, self.layout, self.own_specs, device, workspace_bytes, n_sharing)

    @property
    def _own_query_heads(self) -> list[int]:
        sites = self.model.split(1).sites
        layers = self.layout.local_layers(self.replica, len(self.specs))
        return [
            sites[i].q.shape[2] * own.n_kv_heads // self.specs[i].n_kv_heads
            for i, own in zip(layers, self.own_specs, strict=True)
        ]

    def seconds_per_token(self) -> float:
        """`jaxlamina.ranks.attention_speed.seconds_per_token` of it."""
        return 0.0 if self.kv is None else seconds_per_token(self.kv, self.own_specs, self._own_query_heads)

    def allocate(self, n_slots: int, n_host_slots: int, scales: Sequence[ChannelScales] | None) -> None:
        """Takes the memory for it. ``scales``: of each of the model's layers, all its heads'."""
        layers = self.layout.local_layers(self.replica, len(self.specs))
        of_layers = None if scales is None else [scales[i] for i in layers]
        heads = [
            slice(self.specs[i].n_kv_heads - own.n_kv_heads, None)
            for i, own in zip(layers, self.own_specs, strict=True)
        ]
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
        weights: Any,
        inputs: Any,
        at: Sequence[PlacedIndices],
        slots: Sequence[SegmentSlots],
    ) -> Any:
        """Calls a program, and keeps what it makes of this rank's KV. Its logits, as it gives them."""
        given = self.transport.bind((inputs, at))
        if self.kv is None or not slots:
            logits, _, _ = call(weights, *given, [], [], ())
            return logits
        logits, k, v = call(weights, *given, *self.kv.bound(), self.transport.bind(tuple(slots)))
        self.kv.keep(k, v)
        return logits

    def kept(self, shape: StepShape, behind: bool = False) -> tuple[Program, Any] | None:
        """What `compile_later`'s call gives, from an earlier process; in any thread."""
        name = self._name(shape, behind)
        found = None if name is None else self.transport.kept(name)
        if found is None:
            return None
        program, sources = found
        weights = [tuple(self._source(x) for x in of_slice) for of_slice in sources]
        own = self.layout.slices_on(self.replica, len(self.specs) + 1)
        return program, tuple(weights[i - own.start] if i in own else () for i in range(len(self.specs) + 1))

    def _source(self, source: Any) -> jax.Array:
        """One of a slice's parameters, as `SplitModel.sources` says, as programs take it."""
        if isinstance(source, int):
            return self._lift(self.model.params[sorted(self.model.like)[source]])[1]
        return self._lift(jnp.asarray(source))[1]

    def _name(self, shape: StepShape, behind: bool) -> str | None:
        if self._model_name is None:
            return None
        pools = None if self.kv is None else jax.tree.map(lambda x: (x.shape, str(x.dtype)), self.kv.like)
        sides = self.layout, self.specs, self.replica, self.shards, pools
        return self.transport.name_of("model", self._model_name, self._made_of, *sides, shape, behind)

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

    def _end(self) -> TracedEnd | ShardEnd:
        if not self.shards:
            return self.transport
        leader, *followers = self.shards
        if self.transport.rank == leader:
            return LeaderEnd(self.transport, followers)
        return FollowerEnd(self.transport, leader)

    def _of_shards(self, step: Callable[..., Any], split: SplitModel) -> Callable[..., Any]:
        """The step on this rank's share of the weights; on others than the leader it gives no logits."""
        slices = (split.slice_params(i, dict(self.model.like)) for i in range(split.n + 1))
        whole = tuple(
            tuple(jax.ShapeDtypeStruct(x.shape or (1,), x.dtype) for x in of_slice) for of_slice in slices
        )
        run = with_shards(step, whole, self.transport, self.shards)
        if self.transport.rank == self.shards[0]:
            return run

        def follow(*args: Any) -> Any:
            logits, *pools = run(*args)
            return needing([logits]).reshape(1), *pools

        return follow

    def _bound(self, split: SplitModel, i: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Slice i's weights; buckets share those that are parameters as they are, and not views of stacked
        ones."""
        found = []
        for x in split.slice_params(i, {**self.model.like, **self.model.params}):
            found.append(self._lift(x))
        return tuple(found)

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


def model_workspace_bytes(
    model: ModelWorker, specs: Sequence[AttentionSpec], device: jax.Device, largest: LargestStep
) -> int:
    """What slices of the largest step take beside weights, found by compiling them."""
    end: Any = LocalTransport(0, 2, device)
    side = ModelSide(end, model, Layout((1,), "heads"), specs, 0)
    steps = [StepShape("decode", largest.batch, 1, 1), StepShape("prefill", 1, largest.prompt, 0)]
    programs: list[Any] = [side.compile_later(shape)()[0] for shape in steps]
    return max(Together([program], CompiledPieces()).workspace_bytes() for program in programs)


def send_parameters(transport: Transport, params: dict[str, jax.Array], to: int) -> Shaped[jax.Array, " 1"]:
    """``params``, of this rank's device, to rank ``to``, who runs `receive_parameters`. An array that is
    there when all is sent."""

    def program(params: dict[str, jax.Array]) -> jax.Array:
        tie: jax.Array | None = None
        for name in sorted(params):
            tie = transport.send(params[name], to, tie)
        assert tie is not None
        return tie.reshape(1)

    given = transport.bind(params)
    done: jax.Array = transport.unbind(transport.compile(program, given)(given))
    return done


def receive_parameters(
    transport: Transport, like: dict[str, jax.ShapeDtypeStruct], source: int
) -> dict[str, jax.Array]:
    """What ``source`` sends by `send_parameters`."""
    names = sorted(like)
    program = receiver(transport, [like[name] for name in names], [source] * len(names))
    start = transport.bind(jax.device_put(jnp.zeros(1, jnp.int32), transport.device))
    return dict(zip(names, transport.unbind(program(start)), strict=True))


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


def traces(model: ModelFn, like: Mapping[str, Like]) -> list[Traced]:
    """The model as a decode step and as a prefill: what both read only by products can be shared out."""
    return [trace_step(model, like, 1, n_tokens) for n_tokens in (1, 2)]
