"""A model rank other than rank 0, or a prefill worker: it gets its weights from rank 0, and runs its part of
steps: its replica's of staggered ones, or its shard's or stage's of all; a prefill worker its chunks of
prompts.

Holds weights, and of the KV only what `model_side` and `own_pace` say; no request. Logits go to rank 0 inside
its programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Int32

from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from jaxlamina.job.control.channel import ControlClient, ControlError
from jaxlamina.job.group import Watch
from jaxlamina.kv.placement import PlacedIndices
from jaxlamina.models.causal_lm import of_origin
from jaxlamina.ranks.apart import WHOLE
from jaxlamina.ranks.cluster_layout import layout_of
from jaxlamina.ranks.kv_room import moving_handlers, scales_of
from jaxlamina.ranks.model_side import ModelSide, shards_of, shared_out_of
from jaxlamina.ranks.own_pace import PromptWorker
from jaxlamina.ranks.parcels import ParcelReceiver
from jaxlamina.ranks.rank_kv import RankKV
from jaxlamina.ranks.remote_worker import SlotTables
from jaxlamina.ranks.served_rank import ServedRank
from jaxlamina.ranks.shards import shard_like, shard_model
from jaxlamina.steps.shape import StepShape
from jaxlamina.transports import Program, Transport
from jaxlamina.workers.capacity import check_weights
from jaxlamina.workers.model_worker import ModelFn, ModelWorker
from jaxlamina.workers.spec import specs_of
from jaxlamina.workers.workspace import tree_bytes

_INPUTS = ("tokens", "positions", "logits_at")


class ModelRank(ServedRank):
    """One replica, shard or stage of the model as a process, or all of it for prompts alone."""

    kind = "a model rank"

    def __init__(
        self, cluster: Cluster, rank: int, transport: Transport, client: ControlClient, watch: Watch
    ) -> None:
        super().__init__(cluster, rank, transport, client, watch)
        self._prefill_rank = rank if cluster.role(rank).pool == "prefill" else 0
        self._side: ModelSide | None = None
        self._handlers |= {
            m.SetupModel: self._on_setup,
            m.NewWeights: self._on_new_weights,
            m.Setup: self._on_setup_kv,
            m.Allocate: self._on_allocate,
            m.RunStep: self._on_step,
            m.SetupPrompts: self._on_setup_prompts,
            m.Compute: self._on_compute,
        }
        self._handlers |= moving_handlers(client, self._kv, self._copies)
        self._setup: m.Setup | None = None
        self._weights = ParcelReceiver(transport, 0)
        self._function: ModelFn
        self._prompts: PromptWorker | None = None  # of a prefill worker at its own pace
        self._tables = SlotTables()

    def _on_setup(self, setup: m.SetupModel) -> None:
        self._forget_programs()
        self._side = self._prompts = None  # another model's weights go first
        self._epoch += 1
        source = of_origin(setup.origin)
        function, like = source.fn, dict(source.like(jnp.dtype(setup.dtype)))
        shards = () if self._prefill_rank else shards_of(self._cluster)
        shared = shared_out_of(self._cluster, function, like) if shards else WHOLE
        of_shard = shard_like(like, shared)
        own = {name: of_shard[name] for name in setup.params}
        check_weights(tree_bytes(own), setup.dtype, self._transport.device)
        params = self._weights.receive(own)
        self._function = own_model = shard_model(function, like, shared, self._rank)
        model = ModelWorker(own_model, params, self._transport.device, of_shard)
        specs = specs_of(model.split(1).sites, setup.kv_dtype, shared.heads_over)
        replica = 0 if shards else self._rank
        how = setup.partition, setup.stages, setup.local_share, setup.heads_over
        layout = layout_of(self._cluster, *how)
        self._side = ModelSide(self._transport, model, layout, specs, replica, shards, source)
        self._client.send(m.ModelReady())

    def _on_new_weights(self, _: m.NewWeights) -> None:
        assert self._side is not None
        params = self._weights.receive(self._side.model.params)
        with self._tracing:
            self._side.put_weights(params)
        self._client.send(m.ModelReady())

    # --- the share of the KV that is kept here ---
    def _on_setup_kv(self, setup: m.Setup) -> None:
        assert self._side is not None
        self._setup, self._tables = setup, SlotTables()
        self._client.send(self._side.slots_found(setup, self._cluster.n_ranks))

    def _on_allocate(self, message: m.Allocate) -> None:
        assert self._side is not None and self._setup is not None
        self._side.allocate(message.n_slots, message.n_host_slots, scales_of(self._setup))
        self._client.send(m.Allocated(self._side.seconds_per_token() if message.measure else 0.0))

    def _kv(self) -> RankKV:
        assert self._side is not None and self._side.kv is not None
        return self._side.kv

    # --- prompts at this rank's own pace ---
    def _on_setup_prompts(self, setup: m.SetupPrompts) -> None:
        assert self._side is not None
        side = self._side
        known = side.transport, self._function, side.model, side.layout, side.specs
        self._prompts = PromptWorker(*known, setup.n_slots, scales_of(setup), side.made_of)
        self._client.send(m.Allocated())

    def _on_compute(self, message: m.Compute) -> None:
        assert self._prompts is not None
        what = f"chunk {message.chunk} of a prompt ({message.tokens.shape[1]} tokens after {message.start})"
        ticket, done = self._prompts.compute(
            message.tokens.numpy(),
            message.positions.numpy(),
            message.logits_at.numpy(),
            message.start,
            scored=message.scored,
            before_compiling=lambda: self._compiles(message.chunk),
            begin=lambda: self._watch.begin(what),
        )
        self._last = done
        self._watch.until(ticket, done, lambda _: self._say_computed(message.chunk))

    def _compiles(self, chunk: int) -> None:
        self._client.send(m.Compiles(chunk))
        if self._last is not None:  # no program may run meanwhile
            self._last.block_until_ready()

    def _say_computed(self, chunk: int) -> None:
        with suppress(ControlError):  # the job is over, which another thread finds out, too
            self._client.send(m.Computed(chunk))

    def _compile_later(self, part: StepShape, behind: bool) -> Callable[[], tuple[Program, Any]]:
        assert self._side is not None
        if part.ready:
            assert self._prompts is not None
            return self._prompts.compile_later(part, behind)
        return self._side.compile_later(part, behind)

    def _kept(self, part: StepShape, behind: bool) -> tuple[Program, Any] | None:
        assert self._side is not None
        if part.ready:
            assert self._prompts is not None
            return self._prompts.kept(part, behind)
        return self._side.kept(part, behind)

    def _on_step(self, step: m.RunStep) -> None:
        ticket = self._begin(step)
        part = self._part(step.shape)
        program, weights = self._programs[part]
        assert self._side is not None
        inputs, at = jax.device_put(_given(step.segments), self._transport.device)
        if part.ready:
            assert self._prompts is not None
            sent = self._prompts.send(partial(self._recorder.run, program), at)
            self._launched(ticket, self._transport.unbind(sent))
            return
        slots = self._tables.slots_from(step) if step.tables else ()
        run = self._side.run(partial(self._recorder.run, program), weights, inputs, at, slots)
        self._launched(ticket, self._transport.unbind(run))

    def _part(self, shape: StepShape) -> StepShape:
        part = shape.part_of(self._prefill_rank)
        assert part is not None, "told of a step that others run"
        return part


def told_replica(
    inputs: tuple[Int[np.ndarray, " _ ..."], ...], at: Sequence[PlacedIndices], n_segments: int = 1
) -> tuple[dict[str, m.Array], ...]:
    """A step's arrays as a message to a model rank: of each segment, the inputs with the first one's."""
    n = max(n_segments, len(at))
    segments = [dict(zip(_INPUTS, inputs, strict=False)), *({} for _ in range(n - 1))]
    segments[: len(at)] = [own | of._asdict() for own, of in zip(segments, at, strict=False)]
    return tuple({name: m.Array.of(np.asarray(x, np.int32)) for name, x in own.items()} for own in segments)


def _given(
    segments: Sequence[dict[str, m.Array]],
) -> tuple[tuple[Int32[np.ndarray, " _ ..."], ...], tuple[PlacedIndices, ...]]:
    """What a program takes of that."""
    first, fields = segments[0], PlacedIndices._fields
    inputs = tuple(first[name].numpy() for name in _INPUTS if name in first)
    at = (PlacedIndices(*(own[f].numpy() for f in fields)) for own in segments if "rows" in own)  # type: ignore[arg-type]
    return inputs, tuple(at)
