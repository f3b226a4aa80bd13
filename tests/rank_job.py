"""One rank of `test_ranks`: attention ranks serve; rank 0 runs `rank_scenarios`, and prints one line of JSON
for each.

    python rank_job.py '{"cluster": {…}, "scenarios": [["greedy", {"model": "llama"}], …]}'

With ``"hold": {"step": 12, "how": "sleep", "note": FILE}`` the attention ranks hold up that step for ever.
With ``"behind": [first, last]`` they run each of these steps only once they have been told of what comes
after it; with ``"slow": [first, last, seconds]`` each of these takes them so long; with ``"hold_prompts": FOLDER``
prefill workers begin with a chunk only once a file there says so; with ``"unreadable":
true`` their first recording cannot be read; with ``"parcel_bytes": n`` weights go in parcels of so many at most. After each step they note, with ``"frozen": FOLDER``, how much
Python's collections leave out, and model ranks but rank 0, with ``"weigh": FOLDER``, what arrays they hold.
Hundreds of these processes are started: what only rank 0 or only model ranks need, only these import.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from jaxlamina import ranks
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from launch.roles import place


def held_bytes() -> int:
    """Of all this process's arrays on its device, each memory counted once."""
    gc.collect()
    parts = [shard.data for x in jax.live_arrays() for shard in x.addressable_shards]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in parts}.values())


def hold(step: int, how: str, note: str) -> None:
    """Holds up a step of this attention rank for ever, before its program is run, and notes when."""
    from jaxlamina.ranks.attention_rank import AttentionRank

    on_step = AttentionRank._on_step

    def held(self: AttentionRank, message: Any) -> None:
        if message.step == step:
            Path(note).write_text(f"{os.getpid()} {time.monotonic()}")
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
        on_step(self, message)

    AttentionRank._on_step = held  # type: ignore[method-assign]


def stay_behind(first: int, last: int) -> None:
    """Has this attention rank run each of these steps when the next message is there, which rank 0 can send
    only without the step's tokens; else the job fails."""
    from jaxlamina.ranks.attention_rank import AttentionRank

    on_step = AttentionRank._on_step

    def behind(self: AttentionRank, message: Any) -> None:
        until = time.monotonic() + 60
        while first <= message.step <= last and self._client._inbox.empty():
            if time.monotonic() > until:
                raise UserError(
                    f"nothing was told of step {message.step + 1} before step {message.step} was run"
                )
            time.sleep(1e-3)
        on_step(self, message)

    AttentionRank._on_step = behind  # type: ignore[method-assign]


def slow(first: int, last: int, seconds: float) -> None:
    """Has this attention rank take so long for each of these steps."""
    from jaxlamina.ranks.attention_rank import AttentionRank

    on_step = AttentionRank._on_step

    def later(self: AttentionRank, message: Any) -> None:
        if first <= message.step <= last:
            time.sleep(seconds)
        on_step(self, message)

    AttentionRank._on_step = later  # type: ignore[method-assign]


def hold_prompts(folder: str) -> None:
    """Has this prefill worker begin with a chunk at its own pace only once a file of the chunk's number is
    there."""
    from jaxlamina.ranks.model_rank import ModelRank

    on_compute = ModelRank._on_compute

    def held(self: ModelRank, message: Any) -> None:
        until = time.monotonic() + 60
        while not (Path(folder) / f"{message.chunk}").exists():
            if time.monotonic() > until:
                raise UserError(f"nobody let chunk {message.chunk} go")
            time.sleep(1e-3)
        on_compute(self, message)

    ModelRank._on_compute = held  # type: ignore[method-assign]


def frozen(folder: str) -> None:
    """Has this attention rank note with each step how many objects it has left out of Python's collections; a
    fork's imports were left out before."""
    from jaxlamina.ranks.attention_rank import AttentionRank

    on_step, before = AttentionRank._on_step, gc.get_freeze_count()

    def noted(self: AttentionRank, message: Any) -> None:
        (Path(folder) / f"{self._rank}").write_text(f"{gc.get_freeze_count() - before}")
        on_step(self, message)

    AttentionRank._on_step = noted  # type: ignore[method-assign]


def unreadable() -> None:
    """Has this attention rank's first trace be none."""
    from jaxlamina.profiling.collect import Recorder

    take = Recorder.take

    def torn(self: Recorder) -> m.Recorded:
        Recorder.take = take  # type: ignore[method-assign]
        take(self)
        raise UserError("the trace is torn")

    Recorder.take = torn  # type: ignore[method-assign]


def weigh(folder: str) -> None:
    from jaxlamina.ranks.model_rank import ModelRank

    on_step = ModelRank._on_step

    def weighed(self: ModelRank, message: Any) -> None:
        on_step(self, message)
        (Path(folder) / f"{self._rank}").write_text(f"{held_bytes()}")

    ModelRank._on_step = weighed  # type: ignore[method-assign]


def elsewhere(rank: int) -> None:
    """Each rank says that it is on a host of its own, and exchanges are thought to cost nothing: so that a
    tiny model's attention is shared by measured times, too."""
    from jaxlamina.run import balance

    platform.node = lambda: f"host {rank}"
    balance.LINKS["cpu"] = 1e-12, 1e15
    balance._LEAST_GAIN = -1.0


def main() -> int:
    job = json.loads(sys.argv[1])
    cluster = Cluster.load(None, job["cluster"])
    rank = place(os.environ).rank
    if "elsewhere" in job:
        elsewhere(rank)
    if "parcel_bytes" in job:
        from jaxlamina.ranks import parcels

        parcels.MOST_BYTES = job["parcel_bytes"]
    if rank > 0:
        if "hold" in job:
            hold(**job["hold"])
        if "weigh" in job:
            weigh(job["weigh"])
        if "slow" in job:
            slow(*job["slow"])
        if "hold_prompts" in job:
            hold_prompts(job["hold_prompts"])
        if "frozen" in job:
            frozen(job["frozen"])
        if "unreadable" in job:
            unreadable()
        if "behind" in job:
            stay_behind(*job["behind"])
        return ranks.serve(cluster, rank)
    from rank_scenarios import SCENARIOS

    group = ranks.join(cluster, 0)
    for name, options in job["scenarios"]:
        began = time.perf_counter()
        found = SCENARIOS[name](group, **options)
        print(json.dumps({"scenario": name, "s": round(time.perf_counter() - began, 1), **found}), flush=True)
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
