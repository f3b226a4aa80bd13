"""An attention rank's life: it is told what the model's attention is like, finds room for KV, and runs a
program a step.

A message is taken in while the program of the one before it runs, and its own launched behind it. Holds KV
and nothing else: no weight, no token, no request. Which slots are whose is rank 0's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from jaxlamina.job.control.channel import ControlClient
from jaxlamina.job.group import Watch
from jaxlamina.ranks.attention_programs import AttentionProgram, attention_workspace_bytes, step_inputs_of
from jaxlamina.ranks.cluster_layout import layout_of
from jaxlamina.ranks.remote_worker import SlotTables
from jaxlamina.ranks.served_rank import ServedRank
from jaxlamina.ranks.wires import heads_on_worker
from jaxlamina.steps.layout import Layout
from jaxlamina.steps.shape import StepShape
from jaxlamina.transports import Program, Transport
from jaxlamina.workers.capacity import (
    check_host_slots,
    check_slots,
    host_slots_that_pay,
    is_accelerator,
    slots_that_fit,
)
from jaxlamina.workers.kv_pools import KVPools
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from jaxlamina.workers.workspace import LargestStep, shapes


@dataclass
class _Layers:
    """What Setup said, as this rank needs it: its own heads."""

    specs: list[AttentionSpec]
    n_query_heads: list[int]
    layout: Layout

    @classmethod
    def of(cls, setup: m.Setup, layout: Layout) -> _Layers:
        specs, heads = [], []
        for layer in setup.layers:
            whole = AttentionSpec(
                layer.n_kv_heads, layer.head_dim, np.dtype(jnp.dtype(layer.dtype)), layer.scale,
                layer.window, layer.softcap, layer.kv,
            )  # fmt: skip
            of = heads_on_worker(layout, whole, layer.n_query_heads)
            specs.append(replace(whole, n_kv_heads=of.k))
            heads.append(of.n)
        return cls(specs, heads, layout)


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
        self._kv: KVPools | None = None
        self._pools_like: Any = ()  # their shapes, whichever step has them
        self._bound = False  # whether the pools are as programs take them
        self._tables = SlotTables()
        self._handlers |= {
            m.Setup: self._on_setup,
            m.Allocate: self._on_allocate,
            m.RunStep: self._on_step,
            m.CopySlots: lambda x: self._pools().copy_slots(_slots(x.src), _slots(x.dst)),
            m.MoveOut: lambda x: self._pools().move_out(_slots(x.slots), _slots(x.host_slots)),
            m.MoveIn: lambda x: self._pools().move_in(_slots(x.host_slots), _slots(x.slots)),
            m.ForgetHost: lambda x: self._pools().forget_host(_slots(x.host_slots)),
            m.TakeRows: self._on_take,
            m.PutRows: lambda x: self._pools().put_rows(_slots(x.slots), [rows.numpy() for rows in x.rows]),
        }

    # --- memory ---
    def _on_setup(self, setup: m.Setup) -> None:
        # What there was of a model before this one goes before this one's KV comes.
        self._forget_programs()
        self._kv, self._bound, self._tables = None, False, SlotTables()
        self._epoch += 1
        layout = layout_of(self._cluster, setup.partition, setup.stages)
        self._setup, self._layers = setup, _Layers.of(setup, layout)
        n_slots = self._find_slots(setup, self._layers)
        self._client.send(m.SlotsFound(n_slots, self._find_host_slots(setup, self._layers, n_slots)))

    def _find_slots(self, setup: m.Setup, layers: _Layers) -> int:
        """Slots of the whole memory pool, as far as this worker's memory goes. ``UserError`` if its share of
        those that were asked for does not fit."""
        device, share = self._transport.device, 1.0 if layers.layout.by_heads else 1 / len(self._workers)

        def needs_bytes(_: jax.Device) -> int:
            largest = LargestStep(*setup.largest)
            if not is_accelerator(device):
                return 0
            return attention_workspace_bytes(layers.specs, layers.n_query_heads, device, largest)

        check_host_slots(setup.n_host_slots or 0, layers.specs, share=share)
        if setup.kv_slots is not None:
            check_slots(setup.kv_slots, layers.specs, device, share=share, workspace_bytes=needs_bytes)
            return setup.kv_slots
        most, least = setup.most_slots, setup.least_slots
        return slots_that_fit(
            layers.specs, device, most, least, share=share, workspace_bytes=needs_bytes(device)
        )

    def _find_host_slots(self, setup: m.Setup, layers: _Layers, n_slots: int) -> int:
        """The other workers may be on the same host, and any worker may have to keep all of what waits."""
        if setup.n_host_slots is not None:
            return setup.n_host_slots
        device, n_workers = self._transport.device, len(self._workers)
        return host_slots_that_pay(layers.specs, [device], n_slots, n_sharing=n_workers)

    def _on_allocate(self, message: m.Allocate) -> None:
        assert self._setup is not None and self._layers is not None
        n_workers = 1 if self._layers.layout.by_heads else len(self._workers)
        scales = self._setup.channel_scales
        index = self._workers.index(self._rank)
        self._kv = KVPools(
            self._layers.specs,
            -(-message.n_slots // n_workers),
            self._transport.device,
            channel_scales=None if scales is None else [self._scales(layer, index) for layer in scales],
            n_host_slots=message.n_host_slots,
        )
        jax.block_until_ready((self._kv.k, self._kv.v))
        self._pools_like = shapes((self._kv.k, self._kv.v))
        self._client.send(m.Allocated())

    def _scales(self, layer: tuple[m.Array | None, ...], index: int) -> ChannelScales:
        """This worker's rows of a layer's ``[K, H]``."""
        assert self._layers is not None
        b = len(self._workers) if self._layers.layout.by_heads else 1
        own = (None if x is None else jnp.asarray(np.split(x.numpy(), b)[index % b]) for x in layer)
        return ChannelScales(*own)

    # --- programs ---
    def _compile_later(self, part: StepShape, behind: bool) -> Callable[[], tuple[Program, Any]]:
        assert self._layers is not None and self._kv is not None
        specs, layout = self._layers.specs, self._layers.layout
        traced = AttentionProgram(self._transport, layout, specs, self._layers.n_query_heads, part)
        args = *self._pools_like, step_inputs_of(layout, part, specs)
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
        pools = jax.tree.map(lambda x: (x.shape, str(x.dtype)), self._pools_like)
        return self._transport.name_of("attention", self._layers, pools, part, behind)

    def _on_step(self, step: m.RunStep) -> None:
        assert self._kv is not None
        ticket = self._begin(step)
        self._bind()
        inputs = self._transport.bind(self._tables.slots_from(step))
        kv = self._kv
        program, _ = self._programs[step.shape]
        kv.k, kv.v, done = self._recorder.run(program, kv.k, kv.v, inputs)
        self._launched(ticket, done)

    def _bind(self) -> None:
        if not self._bound:
            assert self._kv is not None
            self._kv.k, self._kv.v = self._transport.bind((self._kv.k, self._kv.v))
            self._bound = True

    def _pools(self) -> KVPools:
        """The pools as plain arrays."""
        assert self._kv is not None
        if self._bound:
            self._kv.k, self._kv.v = self._transport.unbind((self._kv.k, self._kv.v))
            self._bound = False
        return self._kv

    # --- tokens that go from worker to worker ---
    def _on_take(self, message: m.TakeRows) -> None:
        rows = self._pools().take_rows(_slots(message.slots), host=message.host)
        self._client.send(m.Rows(tuple(map(m.Array.of, rows))))


def _slots(array: m.Array) -> np.ndarray:
    return array.numpy().astype(np.int64)
