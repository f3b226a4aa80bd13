"""An attention rank's life: it is told what the model's attention is like, finds room for KV, and runs a
program a step.

A message is taken in while the program of the one before it runs, and its own launched behind it. Holds KV
and nothing else: no weight, no token, no request. Which slots are whose is rank 0's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from jaxlamina.job.control.channel import ControlClient
from jaxlamina.job.group import Watch
from jaxlamina.process import kept_programs
from jaxlamina.ranks.attention_programs import AttentionProgram, attention_workspace_bytes, step_inputs_of
from jaxlamina.ranks.attention_speed import seconds_per_token
from jaxlamina.ranks.cluster_layout import layout_of
from jaxlamina.ranks.kv_room import moving_handlers, scales_of, slots_found
from jaxlamina.ranks.rank_kv import RankKV, own_scales
from jaxlamina.ranks.remote_worker import SlotTables
from jaxlamina.ranks.served_rank import ServedRank
from jaxlamina.ranks.wires import HeadsOf, heads_on_worker
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.shape import StepShape
from jaxlamina.transports import Program, Transport
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.workspace import LargestStep


@dataclass
class _Layers:
    """What Setup said, as this rank needs it: its own heads."""

    specs: list[AttentionSpec]
    heads: list[HeadsOf]
    layout: Layout
    n_kv_heads: list[int]  # of the model, each layer's

    @classmethod
    def of(cls, setup: m.Setup, layout: Layout, index: int) -> _Layers:
        """Of the worker of this index."""
        specs, heads = [], []
        for layer in setup.layers:
            whole = AttentionSpec(
                layer.n_kv_heads, layer.head_dim, np.dtype(jnp.dtype(layer.dtype)), layer.scale,
                layer.window, layer.softcap, layer.kv,
            )  # fmt: skip
            of = heads_on_worker(layout, whole, layer.n_query_heads, index)
            specs.append(replace(whole, n_kv_heads=of.k))
            heads.append(of)
        return cls(specs, heads, layout, [layer.n_kv_heads for layer in setup.layers])

    @property
    def n_query_heads(self) -> list[int]:
        return [of.n for of in self.heads]

    def own_heads(self, index: int) -> list[Int[np.ndarray, " k"]]:
        """The worker's of each layer's KV heads."""
        if not self.layout.by_heads:
            return [np.arange(k) for k in self.n_kv_heads]
        pooled = [np.asarray(self.layout.pooled_heads(k)) for k in self.n_kv_heads]
        return [heads[np.asarray(self.layout.heads_of_worker(index, len(heads)))] for heads in pooled]


class AttentionRank(ServedRank):
    """One worker of the memory pool as a process."""

    kind = "an attention rank"

    def __init__(
        self, cluster: Cluster, rank: int, transport: Transport, client: ControlClient, watch: Watch
    ) -> None:
        super().__init__(cluster, rank, transport, client, watch)
        self._workers = tuple(cluster.pools.attention_ranks)
        self._layers: _Layers | None = None
        self._setup: m.Setup | None = None
        self._kv: RankKV | None = None
        self._tables = SlotTables()
        self._handlers |= {
            m.Setup: self._on_setup,
            m.Allocate: self._on_allocate,
            m.RunStep: self._on_step,
        }
        self._handlers |= moving_handlers(client, self._pools, self._copies)

    # --- memory ---
    def _on_setup(self, setup: m.Setup) -> None:
        # What there was of a model before this one goes before this one's KV comes.
        self._forget_programs()
        self._kv, self._tables = None, SlotTables()
        self._epoch += 1
        how = setup.partition, setup.stages, setup.local_share, setup.heads_over
        layout = layout_of(self._cluster, *how)
        self._setup, self._layers = setup, _Layers.of(setup, layout, self._index)
        if not layout.has_pool:
            self._client.send(m.SlotsFound(0, 0))
            return
        known = self._layers.specs, self._layers.n_query_heads, self._transport.device
        workspace_bytes = partial(attention_workspace_bytes, *known, LargestStep(*setup.largest))
        # The other workers may be on the same host, and any worker may have to keep all of what waits.
        found = slots_found(setup, layout, known[0], known[2], workspace_bytes, len(self._workers))
        self._client.send(found)

    def _on_allocate(self, message: m.Allocate) -> None:
        assert self._setup is not None and self._layers is not None
        own = own_scales(scales_of(self._setup), self._layers.own_heads(self._index))
        self._kv = RankKV(self._transport, self._layers.specs, message.n_slots, own, message.n_host_slots)
        known = self._kv, self._layers.specs, self._layers.n_query_heads
        self._client.send(m.Allocated(seconds_per_token(*known) if message.measure else 0.0))

    @property
    def _index(self) -> int:
        return self._workers.index(self._rank)

    def _pools(self) -> RankKV:
        assert self._kv is not None
        return self._kv

    # --- programs ---
    def _compile_later(self, part: StepShape, behind: bool) -> Callable[[], tuple[Program, Any]]:
        assert self._layers is not None and self._kv is not None
        specs, layout = self._layers.specs, self._layers.layout
        traced = AttentionProgram(self._transport, layout, specs, self._layers.heads, part)
        args = *self._kv.like, step_inputs_of(layout, part, specs)
        name = self._name(part, behind)
        compiles = self._transport.compile_later(
            traced.step,
            *args,
            donate_argnums=(0, 1),
            behind=behind,
            keep=None if name is None else (name, None),
        )
        return lambda: (compiles(), None)  # the pools are another step's results each time

    def _kept(self, part: StepShape, behind: bool) -> tuple[Program, Any] | None:
        name = self._name(part, behind)
        return None if name is None else self._transport.kept(name)

    def _name(self, part: StepShape, behind: bool) -> str | None:
        assert self._layers is not None
        pools = kept_programs.kinds(self._pools().like)
        return self._transport.name_of("attention", self._layers, pools, part, behind)

    def _on_step(self, step: m.RunStep) -> None:
        kv = self._pools()
        ticket = self._begin(step)
        inputs = self._transport.bind(self._tables.slots_from(step))
        program, _ = self._programs[step.shape]
        *pools, done = self._recorder.run(program, *kv.bound(), inputs)
        kv.take_back(*pools)
        self._launched(ticket, done)
