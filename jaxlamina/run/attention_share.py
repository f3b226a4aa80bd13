"""The share of attention that stays on model ranks: what is wanted, by what it is chosen, and what people are
told of it.

The choice is `jaxlamina.run.balance`'s, and where tokens go `jaxlamina.kv.wishes`'s; here are the times that
the choice begins with, and the words for the log and for metrics. Knows layout, attention's shapes and how
many tokens lie where; no step, no slot and no program.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxlamina.job.group import Group
from jaxlamina.kv.wishes import Wishes
from jaxlamina.ranks.model_side import ModelSide
from jaxlamina.run.balance import LINKS, Balance, Speeds
from jaxlamina.run.modelled import ModelledSteps
from jaxlamina.run.set_up import KVRoom
from jaxlamina.steps.layout import Layout
from jaxlamina.workers.capacity import is_accelerator
from jaxlamina.workers.spec import AttentionSpec

_SAY_EACH_S = 10.0
_USUAL_BYTES_PER_S = 1e10  # at which a host reads KV, where it was not measured
_log = logging.getLogger("uvicorn.error")  # the server's log


def speeds_of(
    group: Group,
    side: ModelSide,
    room: KVRoom,
    n_query_heads: Sequence[int],
    modelled: ModelledSteps | None,
) -> Speeds:
    """Attention's times as measured, or where they were not, as predicted, or where nothing is known, as if
    memory were read at a rate that any host has: then only how the two pools' compare counts. Exchanges' as
    predicted, or else as they were measured elsewhere."""
    transport, specs = group.transport, side.specs
    predicted = None if modelled is None else modelled.speeds
    how = "memory" if transport.by_memory else "nccl" if transport.name == "xla" else "mpi"
    fixed_s, bytes_per_s = LINKS[how if is_accelerator(transport.device) else "cpu"]
    row_bytes = sum(
        n * (spec.head_dim * spec.dtype.itemsize + 4 * (spec.head_dim + 1))
        for n, spec in zip(n_query_heads, specs, strict=True)
    )
    usual_s = sum(spec.slot_bytes for spec in specs) / _USUAL_BYTES_PER_S
    measured = not room.shared_host and room.remote_token_s > 0
    own_s = side.seconds_per_token() + room.local_token_s if measured else 0.0
    if predicted is not None:
        found = replace(predicted, shared_host=room.shared_host)
        there_s = room.remote_token_s / len(group.workers)
        return replace(found, local_s=own_s, remote_s=there_s) if own_s else found
    return Speeds(
        local_s=own_s or usual_s,
        remote_s=(room.remote_token_s if own_s else usual_s) / len(group.workers),
        exchange_s=len(specs) * fixed_s,
        row_s=row_bytes / bytes_per_s,
        shared_host=room.shared_host,
    )


class AttentionShare:
    """``balance``: where the share follows the load; ``modelled``: what predicts it until it is measured.

    ``is_alone``: all new tokens stay on model ranks for now, whatever the load (`stay_alone`).
    """

    def __init__(
        self,
        layout: Layout,
        specs: Sequence[AttentionSpec],
        balance: Balance | None,
        modelled: ModelledSteps | None,
    ) -> None:
        self._layout, self._specs, self._balance, self._modelled = layout, specs, balance, modelled
        self.is_alone = False
        self._said, self._say_after_s = (0, 0), 0.0

    def stay_alone(self, alone: bool) -> bool:
        """Only where the share follows the load."""
        self.is_alone = alone and self._balance is not None
        return self.is_alone

    def wanted(self, n_tokens: float) -> float:
        """Where it follows the load: of so many tokens that a step attends to."""
        assert self._balance is not None
        return 1.0 if self.is_alone else self._balance.share(n_tokens)

    def say(self, wishes: Wishes, n_batches: int) -> None:
        """To the log, when the share that is wanted has changed by a twentieth, or what steps go as; not more
        often than each ten seconds."""
        now = time.monotonic()
        assert self._balance is not None
        n = wishes.n_local + wishes.n_remote
        wanted = self.wanted(n)
        said = round(20 * wanted), n_batches
        if not n or said == self._said or now < self._say_after_s:
            return
        self._said, self._say_after_s = said, now + _SAY_EACH_S
        speeds = self._balance.speeds
        why = "both pools are one host's cores"
        by = "measured" if self._balance.is_measured() or self._modelled is None else "predicted"
        if not speeds.shared_host:
            here_ns, there_ns = (1e9 * x for x in (speeds.local_s, speeds.remote_s))
            exchange_us = 1e6 * speeds.exchange_s
            why = (
                f"a token's attention takes {here_ns:.0f} ns there and {there_ns:.0f} on attention workers, "
                f"a step's exchanges {exchange_us:.0f} µs"
            )
        _log.info(
            "attention: %.0f %% of %d tokens on model workers, %.0f %% wanted, %d batch(es), slices %s: %s",
            100 * wishes.n_local / n, n, 100 * wanted, n_batches, by, why,
        )  # fmt: skip

    def state(self, wishes: Wishes) -> dict[str, Any] | None:
        """As `jaxlamina.run.ranks.RanksExecutor.local_attention` has it."""
        if not self._layout.attends_locally:
            return None
        if self._layout.by_heads:
            n_heads = [spec.n_kv_heads for spec in self._specs]
            share = sum(map(self._layout.local_heads, n_heads)) / max(1, sum(n_heads))
            return {"partition": "heads", "share": share, "wanted": share}
        n = wishes.n_local + wishes.n_remote
        found = {
            "partition": self._layout.partition,
            "share": wishes.n_local / n if n else None,
            "wanted": None if wishes.share is None else wishes.share(n),
            "n_local_tokens": int(wishes.n_local),
            "n_remote_tokens": int(wishes.n_remote),
        }
        if self._balance is None:
            return found
        before = None if self._modelled is None else "prediction"
        by = "measurement" if self._balance.is_measured() else before
        return found | {"by": by} | self._balance.state()
