"""The KV that a rank keeps: pools as its programs take them, or as plain arrays when tokens are moved.

An attention rank has one for its share of the memory pool, a model rank one for what it keeps itself. Knows
pools and a transport; not whose tokens they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt8, UInt64

from jaxlamina.kv.kept import KeptWanted, Lost
from jaxlamina.transports import Transport
from jaxlamina.workers.kv_pools import KVPools
from jaxlamina.workers.spec import AttentionSpec, ChannelScales
from jaxlamina.workers.workspace import shapes


class RankKV:
    """A `jaxlamina.kv.kv_worker.KVWorker`. ``like``: the pools' shapes, keys and values, whichever step has
    them."""

    def __init__(
        self,
        transport: Transport,
        specs: Sequence[AttentionSpec],
        n_slots: int,
        channel_scales: Sequence[ChannelScales] | None,
        n_host_slots: int,
    ) -> None:
        self._transport = transport
        self._pools = KVPools(
            specs, n_slots, transport.device, channel_scales=channel_scales, n_host_slots=n_host_slots
        )
        self._is_bound = False
        jax.block_until_ready((self._pools.k, self._pools.v))
        self.like: Any = shapes((self._pools.k, self._pools.v))

    @property
    def n_slots(self) -> int:
        return self._pools.n_slots

    def bound(self) -> tuple[Any, Any]:
        """Keys and values as a program takes them; it gives `take_back` what it makes of them."""
        if not self._is_bound:
            self._pools.k, self._pools.v = self._transport.bind((self._pools.k, self._pools.v))
            self._is_bound = True
        return self._pools.k, self._pools.v

    def take_back(self, k: Any, v: Any) -> None:
        self._pools.k, self._pools.v = k, v

    @property
    def plain(self) -> KVPools:
        """The pools as plain arrays."""
        if self._is_bound:
            self._pools.k, self._pools.v = self._transport.unbind((self._pools.k, self._pools.v))
            self._is_bound = False
        return self._pools

    def copy_slots(self, src: Int[np.ndarray, " n"], dst: Int[np.ndarray, " n"]) -> None:
        self.plain.copy_slots(src, dst)

    def move_out(self, slots: Int[np.ndarray, " n"], host_slots: Int[np.ndarray, " n"]) -> None:
        self.plain.move_out(slots, host_slots)

    def move_in(self, host_slots: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        self.plain.move_in(host_slots, slots)

    def forget_host(self, host_slots: Int[np.ndarray, " n"]) -> None:
        self.plain.forget_host(host_slots)

    def take_rows(self, slots: Int[np.ndarray, " n"], *, host: bool) -> Sequence[Any]:
        return self.plain.take_rows(slots, host=host)

    def put_rows(self, slots: Int[np.ndarray, " n"], rows: Sequence[Any]) -> None:
        self.plain.put_rows(slots, rows)

    def open_kept(self, name: str, wanted: KeptWanted) -> UInt64[np.ndarray, " places"]:
        return self.plain.open_kept(name, wanted)

    @property
    def n_behind(self) -> int:
        return self._pools.n_behind

    def take_lost(self, places: Int[np.ndarray, " n"]) -> Lost:
        return self._pools.take_lost(places)

    def keep(
        self, slots: Int[np.ndarray, " n"], places: Int[np.ndarray, " n"], marks: UInt64[np.ndarray, " n"]
    ) -> None:
        self.plain.keep(slots, places, marks)

    def bring(self, places: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]) -> None:
        self.plain.bring(places, slots)

    def kept_rows(self, places: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n row_bytes"]:
        return self._pools.kept_rows(places)

    def put_bytes(self, slots: Int[np.ndarray, " n"], rows: UInt8[np.ndarray, "n row_bytes"]) -> None:
        self.plain.put_bytes(slots, rows)


def own_scales(
    layers: Sequence[ChannelScales] | None, heads: Sequence[slice | Int[np.ndarray, " k"]]
) -> list[ChannelScales] | None:
    """Of each layer's ``[K, H]`` the rows of these KV heads."""
    if layers is None:
        return None
    return [
        ChannelScales(*(None if x is None else x[of_layer] for x in layer))
        for layer, of_layer in zip(layers, heads, strict=True)
    ]
