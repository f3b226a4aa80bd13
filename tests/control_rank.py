"""One end of a control channel in a process of its own, for tests/control_group.py.

    control_rank.py client ADDRESS RANK [JSON]     config, deadline_s, heartbeat_s
    control_rank.py server ADDRESS N_RANKS [JSON]

Prints a line for each thing that happens. A client answers Prepare, TakeRows and PutRows, and leaves at a
Bye. A server asks rank 1 again and again for a bucket, and ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from jaxlamina.errors import UserError
from jaxlamina.job.control.channel import ControlClient, ControlError, ControlServer, hello_of
from jaxlamina.job.control.messages import (
    Bye,
    Prepare,
    Prepared,
    PutRows,
    Rows,
    StepShape,
    TakeRows,
)

VERSIONS = {"jax": "1.2.3", "jaxlamina": "0.1.0"}
SECRET = b"the job's secret"


def say(*words: object) -> None:
    print(*words, flush=True)


def on_fault(rank: int, line: str) -> None:
    say("fault", rank, line)
    os._exit(3)


def client(address: str, rank: int, config: dict, deadline_s: float = 20.0, heartbeat_s: float = 5.0) -> int:
    channel = ControlClient(
        address,
        hello_of(rank, config, VERSIONS),
        secret=SECRET,
        deadline_s=deadline_s,
        heartbeat_s=heartbeat_s,
        on_fault=on_fault,
    )
    say("welcome", channel.epoch)
    while True:
        message = channel.receive(None)
        if isinstance(message, Bye):
            say("bye")
            channel.close()
            return 0
        if isinstance(message, Prepare):
            channel.send(Prepared(message.shape, (), 0.5))
        elif isinstance(message, TakeRows):
            channel.send(Rows((message.slots, message.slots)))
        elif isinstance(message, PutRows):
            say("rows", *[row.numpy().sum() for row in message.rows])
        else:
            say("unexpected", message)
            return 4


def server(
    address: str, n_ranks: int, config: dict, deadline_s: float = 20.0, heartbeat_s: float = 5.0
) -> int:
    channel = ControlServer(
        address,
        n_ranks,
        config,
        describe=lambda rank: f"rank {rank}",
        versions=VERSIONS,
        secret=SECRET,
        heartbeat_s=heartbeat_s,
        on_fault=on_fault,
    )
    say("listening", channel.address)
    channel.gather(deadline_s)
    say("gathered")
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    count = 0
    while not ended.is_set():
        channel.send(1, Prepare(StepShape("decode", 1, 1, 16)))
        channel.receive(1, Prepared, 60)
        count += 1
        time.sleep(0.01)
    channel.close()
    say("answers", count)
    return 0


def main() -> int:
    end, address, number = sys.argv[1:4]
    options = {"config": {}} | json.loads(sys.argv[4] if len(sys.argv) > 4 else "{}")
    try:
        return (client if end == "client" else server)(address, int(number), **options)
    except (UserError, ControlError) as error:
        say("error:", error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
