"""Where every rank but rank 0 begins: it joins the job, takes up its part, and works until rank 0 says
goodbye.

Knows which part a rank has; what is done in it is `model_rank`'s and `attention_rank`'s.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from jaxlamina.errors import UserError
from jaxlamina.exit_codes import FAILED
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control.channel import ControlClient, hello_of
from jaxlamina.job.control.messages import Meets
from jaxlamina.job.group import (
    FIRST_EXCHANGE,
    RANK_0_FIRST_S,
    Failing,
    Watch,
    first_line,
    leave,
    start_jax,
    versions,
)
from jaxlamina.job.secret import secret_of
from jaxlamina.job.tls import tls_of
from jaxlamina.process import jax_cache
from jaxlamina.ranks.attention_rank import AttentionRank
from jaxlamina.transports import Transport, open_transport

if TYPE_CHECKING:
    from jaxlamina.ranks.model_rank import ModelRank


def serve(cluster: Cluster, rank: int) -> int:
    """A rank that is not rank 0, until that says goodbye. Its exit code; what went wrong is one line on
    stderr."""
    failing = Failing(cluster, rank)
    client: ControlClient | None = None
    transport: Transport | None = None
    try:
        role = _role(cluster, rank)
        jax_cache.keep_programs()
        device_of = start_jax(cluster, rank)
        hello = hello_of(rank, cluster.as_config(), versions())
        client = ControlClient(
            cluster.control,
            hello,
            secret=secret_of(cluster, os.environ),
            tls=tls_of(cluster),
            deadline_s=cluster.start_deadline_s,
            heartbeat_s=cluster.heartbeat_s,
            on_fault=failing.because_of,
            describe=cluster.describe,
        )
        failing.tell = lambda line: client.close(fault=line)
        watch = Watch(cluster.step_deadline_s, failing.of_own, lambda: transport.where() if transport else "")
        ticket = watch.begin(FIRST_EXCHANGE, cluster.start_deadline_s + RANK_0_FIRST_S)
        device = device_of()
        transport = open_transport(
            cluster.transport,
            rank,
            cluster.n_ranks,
            device,
            cluster.peer_memory,
            on_meet=lambda: client.send(Meets()),
        )
        watch.watchdog.done(ticket)
        role(cluster, rank, transport, client, watch).run()
        failing.over = True
        client.close()
        leave(cluster)
        return 0
    except UserError as error:
        failing.of_own(str(error))
    except Exception as error:  # noqa: BLE001 (whatever it is, the others must know)
        if client is not None and transport is None:
            time.sleep(RANK_0_FIRST_S)  # where one has not come to the first exchange, rank 0 says which
        failing.of_own(first_line(error))
    return FAILED


def _role(cluster: Cluster, rank: int) -> type[AttentionRank | ModelRank]:
    if cluster.role(rank).pool == "attention":
        return AttentionRank
    # Brings Flax, without which attention ranks start sooner.
    from jaxlamina.ranks.model_rank import ModelRank

    return ModelRank
