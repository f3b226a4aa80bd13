"""What a model rank has of the model: weights on its device, and its whole-step programs as it compiles them.

Rank 0's executor has one, and so has every other model rank (`model_rank`). Knows no request, and no other
rank but by what the transport sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Shaped

from jaxlamina.job.cluster import Cluster
from jaxlamina.kv.placement import PlacedIndices
from jaxlamina.models.causal_lm import CausalLM
from jaxlamina.ranks.model_programs import ModelProgram, indices_of, inputs_of
from jaxlamina.ranks.shards import FollowerEnd, LeaderEnd, ShardEnd, needing, with_shards
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.plans import plan_of
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.tasks import Logits
from jaxlamina.transports import Program, TracedEnd, Transport
from jaxlamina.workers.model_worker import Like, ModelFn, ModelWorker, trace_step
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.streamed import with_streamed_products
from pallas_kernels.order import zero_after
from splitter import SplitModel, Traced


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
        self._weights: dict[int, Any] = {}  # by id, as programs take them
        self._model_name = None if source is None else source.name
        self._made_of = _likes(model.like), _likes(model.params)

    def compile_later(self, shape: StepShape, behind: bool = False) -> Callable[[], tuple[Program, Any]]:
        """Traces the program of a bucket on this rank; the call that comes back gives it, to be called with
        the weights, inputs and ``at`` (`ModelProgram.step`), and the weights."""
        split = self.model.split(shape.model_rows, shape.tokens, of_all=shape.of_all)
        ends = self._ends(shape)
        own = self.layout.slices_on(self.replica, split.n + 1)
        weights = tuple(self._bound(split, i) if i in own else () for i in range(split.n + 1))
        traced = ModelProgram(self._end(), self.layout, split, self.specs, shape, self.replica, ends)
        args = _lifted(weights), inputs_of(shape), indices_of(self.layout, shape)
        step = _with_lifted(traced.step, weights)
        if self.shards:
            step = self._of_shards(step, split)
        step = with_streamed_products(step, self.transport.device)
        keep = self._keep(shape, behind, [split.sources(i) for i in own])
        compiles, given = self.transport.compile_later(step, *args, behind=behind, keep=keep), args[0]
        return lambda: (compiles(), given)

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
        sides = self.layout, self.specs, self.replica, self.shards
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

    def _of_shards(self, step: Callable[..., jax.Array], split: SplitModel) -> Callable[..., jax.Array]:
        """The step on this rank's share of the weights; on others than the leader it gives no logits."""
        slices = (split.slice_params(i, dict(self.model.like)) for i in range(split.n + 1))
        whole = tuple(
            tuple(jax.ShapeDtypeStruct(x.shape or (1,), x.dtype) for x in of_slice) for of_slice in slices
        )
        run = with_shards(step, whole, self.transport, self.shards)
        if self.transport.rank == self.shards[0]:
            return run
        return lambda *args: needing([run(*args)]).reshape(1)

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


def _with_lifted(step: Callable[..., jax.Array], weights: Weights) -> Callable[..., jax.Array]:
    """``step`` for weights of which those without dimensions have got one: a program takes no others."""
    flat = [[own.ndim == 0 for own, _ in of_slice] for of_slice in weights]

    def run(given: Any, inputs: Any, at: tuple[PlacedIndices, ...]) -> jax.Array:
        lowered = tuple(
            tuple(x.reshape(()) if scalar else x for x, scalar in zip(xs, scalars, strict=True))
            for xs, scalars in zip(given, flat, strict=True)
        )
        return step(lowered, inputs, at)

    return run


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
