"""How much KV a rank has room for, and the messages by which rank 0 moves what it keeps.

The same for attention ranks and for model ranks that keep a share. Knows memory and messages; no program.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.job.control import messages as m
from jaxlamina.job.control.channel import ControlClient
from jaxlamina.job.control.faults import ControlError
from jaxlamina.kv.kept import KeptWanted
from jaxlamina.ranks.kv_copies import RankCopies
from jaxlamina.ranks.rank_kv import RankKV
from jaxlamina.steps.layout import Layout
from jaxlamina.workers.capacity import (
    check_host_slots,
    check_slots,
    host_slots_that_pay,
    is_accelerator,
    slots_that_fit,
    slots_up_to,
)
from jaxlamina.workers.spec import AttentionSpec, ChannelScales


def slots_found(
    setup: m.Setup,
    layout: Layout,
    specs: Sequence[AttentionSpec],
    device: jax.Device,
    workspace_bytes: Callable[[], int],
    n_sharing: int,
) -> m.SlotsFound:
    """Slots on ``device`` for KV of ``specs``: where both pools keep tokens, this rank's own; else of the
    whole pool, as far as its memory goes. And host slots, where ``n_sharing`` ranks may be on one host.
    ``UserError`` if its share of what was asked for does not fit."""
    of_rank = layout.attends_locally and not layout.by_heads
    share = 1.0 if layout.by_heads or of_rank else 1 / len(layout.workers)

    def needs_bytes(_: jax.Device) -> int:
        return workspace_bytes() if is_accelerator(device) else 0

    check_host_slots(setup.n_host_slots or 0, specs, share=share)
    if setup.kv_slots is None:
        needed = needs_bytes(device)
        least = 0 if of_rank else setup.least_slots
        n_slots = slots_that_fit(specs, device, setup.most_slots, least, share=share, workspace_bytes=needed)
    elif of_rank:
        n_slots = slots_up_to(setup.kv_slots, specs, device, needs_bytes)
    else:
        check_slots(setup.kv_slots, specs, device, share=share, workspace_bytes=needs_bytes)
        n_slots = setup.kv_slots
    n_host_slots = setup.n_host_slots
    if n_host_slots is None:
        n_host_slots = host_slots_that_pay(specs, [device], n_slots, n_sharing=n_sharing)
    return m.SlotsFound(n_slots, n_host_slots, platform.node(), device.platform)


def moving_handlers(
    client: ControlClient, kv: Callable[[], RankKV], copies: RankCopies
) -> dict[type, Callable[[Any], None]]:
    """What a rank does at rank 0's messages about its KV's slots."""

    def take(message: m.TakeRows) -> None:
        rows = kv().take_rows(_slots(message.slots), host=message.host)
        client.send(m.Rows(tuple(map(m.Array.of, rows))))

    def open_kept(message: m.OpenKept) -> None:
        wanted = KeptWanted(
            message.folder, message.identity, message.n_places, message.n_sharing, message.ahead
        )
        pools = kv().plain
        found = copies.open_kept(pools, message.name, wanted, message.copy_at)
        kept = pools.kept

        def told(n: int) -> None:
            with suppress(ControlError):  # rank 0 has gone: what is on its way is written all the same
                client.send(m.KeptSoFar(n, *map(m.Array.of, kept.take_lost())))

        kept.on_written = told
        client.send(m.KeptMarks(m.Array.of(found)))

    def take_kept(message: m.TakeKept) -> None:
        client.send(m.Rows((m.Array.of(kv().kept_rows(_slots(message.places))),)))

    return {
        m.OpenKept: open_kept,
        m.Keep: lambda x: kv().keep(_slots(x.slots), _slots(x.places), x.marks.numpy()),
        m.Bring: lambda x: kv().bring(_slots(x.places), _slots(x.slots)),
        m.TakeKept: take_kept,
        m.PutBytes: lambda x: kv().put_bytes(_slots(x.slots), x.rows.numpy()),
        m.CopySlots: lambda x: kv().copy_slots(_slots(x.src), _slots(x.dst)),
        m.MoveOut: lambda x: kv().move_out(_slots(x.slots), _slots(x.host_slots)),
        m.MoveIn: lambda x: kv().move_in(_slots(x.host_slots), _slots(x.slots)),
        m.ForgetHost: lambda x: kv().forget_host(_slots(x.host_slots)),
        m.TakeRows: take,
        m.PutRows: lambda x: kv().put_rows(_slots(x.slots), [rows.numpy() for rows in x.rows]),
    }


def scales_of(setup: m.Setup | m.SetupPrompts) -> list[ChannelScales] | None:
    """Of each layer, all its heads'; None for KV that has none."""
    if setup.channel_scales is None:
        return None
    return [
        ChannelScales(*(None if x is None else jnp.asarray(x.numpy()) for x in layer))
        for layer in setup.channel_scales
    ]


def _slots(array: m.Array) -> np.ndarray:
    return array.numpy().astype(np.int64)
