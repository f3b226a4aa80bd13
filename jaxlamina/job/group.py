"""A process's membership of a job: its device, its transport, its line to the others, and how it ends when
one fails.

Rank 0 `join`s and has a `Group`, through which its executor reaches the attention ranks; every other rank
`serve`s. Knows what a rank is and when it is late; nothing of models or steps.
"""

from __future__ import annotations

import atexit
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any, TypeVar

import jax

from jaxlamina import __version__
from jaxlamina.errors import UserError
from jaxlamina.exit_codes import FAILED
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control.channel import ControlServer
from jaxlamina.job.control.messages import Compiles, Computed, Message
from jaxlamina.job.control.watchdog import Watchdog
from jaxlamina.job.secret import secret_of
from jaxlamina.job.tls import tls_of
from jaxlamina.process.gpus import visible_gpus
from jaxlamina.steps.shape import StepShape
from jaxlamina.transports import Transport, open_transport

# Programs are compiled on all ranks at once; the largest models take minutes.
PREPARE_DEADLINE_S = 900.0
FIRST_EXCHANGE = "the ranks' first exchange"
RANK_0_FIRST_S = 2.0  # given to rank 0, which knows who has not come to it
_SHUTDOWN_S = 10  # for ranks to leave jax.distributed together
_FAULT_S = 0.3  # for others to read why rank 0 ends: one that stands still never does
_SAY_FIRST_S = 1.0  # given to news of a rank that has gone, to come before its partners' programs fail of it

M = TypeVar("M")

_current: Group | None = None


def current() -> Group | None:
    """The group that this process joined as rank 0, if it did."""
    return _current


_Launched = tuple[int, Any, float, Callable[[float], None]]  # ticket, array, since when, on_done


class Watch:
    """Reports steps that are not done in time, which is since they were begun or the step before them was
    done: one that is launched ahead waits for it. A step's array is waited for by a thread, so nobody else
    need."""

    def __init__(
        self, deadline_s: float, on_late: Callable[[str], None], where: Callable[[], str] = lambda: ""
    ) -> None:
        """``where``: as of `Transport.where`."""
        self.watchdog = Watchdog(deadline_s, on_late, where=where)
        self._queue: queue.SimpleQueue[_Launched | threading.Event] = queue.SimpleQueue()
        self._on_late = on_late
        self._thread = threading.Thread(target=self._wait, name="step watch", daemon=True)
        self._thread.start()

    def begin(self, what: str, deadline_s: float | None = None) -> int:
        return self.watchdog.begin(what, deadline_s)

    def done(self, ticket: int) -> None:
        self.watchdog.done(ticket)

    def until(self, ticket: int, array: jax.Array, on_done: Callable[[float], None] = lambda _: None) -> None:
        """The step is done once ``array`` is there. ``on_done`` is then told its seconds, from the watch's
        thread: since now, or since the step before it was done."""
        self._queue.put((ticket, array, time.perf_counter(), on_done))

    def settle(self) -> None:
        """Waits until all steps are done. One that never is ends this process by its deadline."""
        settled = threading.Event()
        self._queue.put(settled)
        while self._thread.is_alive() and not settled.wait(0.1):
            pass

    def _wait(self) -> None:
        last = 0.0
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            ticket, array, since, on_done = item
            try:
                if not array.is_deleted():
                    array.block_until_ready()
            except Exception as error:  # noqa: BLE001 (whatever a program dies of)
                time.sleep(_SAY_FIRST_S)
                self._on_late(f"a step failed: {first_line(error)}")
                return
            self.watchdog.done(ticket)
            self.watchdog.restart()
            now = time.perf_counter()
            on_done(now - max(since, last))
            last = now


class OwnPaceChunks:
    """Chunks of prompts that prefill workers compute at their own pace. One that a worker neither computes
    nor compiles for within ``deadline_s`` is late, whatever steps go on meanwhile."""

    def __init__(self, watchdog: Watchdog, deadline_s: float) -> None:
        self._watchdog, self._deadline_s = watchdog, deadline_s
        self.n = 0  # that were begun
        self._at_work: dict[int, tuple[str, int]] = {}  # what it is, and the watchdog's ticket
        self._computed: queue.SimpleQueue[int] = queue.SimpleQueue()

    def begin(self, who: str) -> int:
        """The number of a chunk that ``who`` is about to be told of."""
        self.n += 1
        what = f"chunk {self.n} of a prompt, by {who},"
        self._at_work[self.n] = what, self._watchdog.begin(what, self._deadline_s, in_turn=False)
        return self.n

    def hear(self, message: Compiles | Computed) -> None:
        """What a worker says of one; in any thread, since nobody may be asking for it."""
        chunk = message.chunk
        if chunk not in self._at_work:
            return
        what, ticket = self._at_work.pop(chunk)
        self._watchdog.done(ticket)
        if isinstance(message, Compiles):
            seconds = PREPARE_DEADLINE_S + self._deadline_s
            self._at_work[chunk] = what, self._watchdog.begin(what, seconds, in_turn=False)
        else:
            self._computed.put(chunk)

    def computed(self, wait_s: float = 0.0) -> list[int]:
        """Those that are computed since this was asked last; waits for one for so long at most."""
        found: list[int] = []
        with suppress(queue.Empty):
            found.append(self._computed.get(timeout=wait_s) if wait_s else self._computed.get_nowait())
            while True:
                found.append(self._computed.get_nowait())
        return found


class Group:
    """Rank 0's side of a job. Made by `join`."""

    def __init__(self, cluster: Cluster, transport: Transport, device: jax.Device) -> None:
        self.cluster, self.transport, self.device = cluster, transport, device
        self.workers = tuple(cluster.pools.attention_ranks)
        self.replicas = tuple(range(1, cluster.n_model))  # model ranks but this one
        self.prefill_ranks = tuple(cluster.pools.prefill_ranks)
        self.n_steps = 0
        self.owed: str | None = None  # a step that the others were told of, until this rank has begun it
        self._closed = False
        self._failing = Failing(cluster, 0)
        self.control = ControlServer(
            cluster.control,
            cluster.n_ranks,
            cluster.as_config(),
            describe=cluster.describe,
            versions=versions(),
            heartbeat_s=cluster.heartbeat_s,
            on_fault=self._failing.because_of,
            on_refused=lambda line: print(f"note: refused: {line}", file=sys.stderr, flush=True),
            secret=secret_of(cluster, os.environ),
            tls=tls_of(cluster),
        )
        self._failing.tell = lambda line: self.control.close(fault=line, wait_s=_FAULT_S)
        self._failing.last_words = lambda line: self.last_words(line)
        self.last_words: Callable[[str], None] = lambda line: None  # before this process ends with its job
        self.watch = Watch(cluster.step_deadline_s, self._failing.of_own, self._where)
        self.chunks = OwnPaceChunks(self.watch.watchdog, cluster.step_deadline_s)
        self.control.on_chunk = self.chunks.hear

    def _where(self) -> str:
        return self.transport.where() if self.transport else self.not_come()

    def not_come(self) -> str:
        """Who is waited for at the first exchange: "" where the others are all there."""
        missing = [rank for rank in range(1, self.cluster.n_ranks) if rank not in self.control.met]
        who = " and ".join(map(self.cluster.describe, missing))
        return f"{who} did not come to it" if who else ""

    @property
    def load_device(self) -> jax.Device:
        """Where a model is loaded: this rank's device, but the host's memory where no rank is to have all of
        it."""
        return jax.local_devices(backend="cpu")[0] if self.cluster.shares_weights else self.device

    @property
    def link_name(self) -> str:
        """By what messages between model and attention workers go: "memory", "nccl", "gloo" or "mpi"."""
        if self.transport.by_memory:
            return "memory"
        if self.cluster.transport == "mpi":
            return "mpi"
        return "gloo" if self.device.platform == "cpu" else "nccl"

    @property
    def description(self) -> str:
        """DOP, and how messages travel."""
        how = self.cluster.transport + (" by memory" if self.transport.by_memory else "")
        return f"DOP {self.cluster.pools}, {how}"

    @property
    def epoch(self) -> int:
        """How many models there have been: of every message from now on."""
        return self.control.epoch

    def next_model(self) -> None:
        """What ranks answer for the model before this one is refused."""
        self.control.epoch += 1

    def gather(self) -> None:
        """Waits for all ranks. ``UserError`` that says which did not come, or came with another
        configuration."""
        self.control.gather(self.cluster.start_deadline_s)

    def send(self, rank: int, message: Message) -> None:
        self.control.send(rank, message)

    def receive(self, rank: int, kind: type[M], deadline_s: float | None = None) -> M:
        return self.control.receive(rank, kind, deadline_s or self.cluster.step_deadline_s)  # type: ignore[type-var]

    def begin_step(self, shape: StepShape, workers: Sequence[int]) -> int:
        """With these attention workers."""
        self.n_steps += 1
        others = (*self.model_ranks_in(shape), *workers)
        peers = " and ".join(self.cluster.describe(rank) for rank in others) or "no other rank"
        return self.watch.begin(f"step {self.n_steps} ({shape}) with {peers}")

    def model_ranks_in(self, shape: StepShape) -> tuple[int, ...]:
        """Model ranks but this one that take part in a step, and prefill workers that do."""
        found: list[int] = []
        for part in shape.parts:
            if part.rank:
                found.append(part.rank)
            elif part.n_batches > 1 or self.cluster.shares_weights:
                found += self.replicas
        return tuple(found)

    def leave_because(self, line: str) -> None:
        """Ends this rank's part with a reason, which the others get as bad news."""
        self._closed = self._failing.over = True
        self.control.close(fault=line, wait_s=_FAULT_S)

    def close(self) -> None:
        """Lets the other ranks go; by bad news if they wait for a step that this rank told them of and never
        began."""
        global _current
        if self._closed:
            return
        if self.owed is not None:
            self.leave_because(f"{self.cluster.describe(0)} left before {self.owed}")
            return
        self.watch.settle()  # a step may run that was launched ahead and that nobody wants
        self._closed = self._failing.over = True
        self.control.close()
        leave(self.cluster)
        if _current is self:
            _current = None


class Failing:
    """The end of a rank: one line on stderr, the others told, and out, since a program may wait for ever."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self._cluster, self._rank = cluster, rank
        self._lock = threading.Lock()
        self.tell: Callable[[str], Any] | None = None
        self.last_words: Callable[[str], None] = lambda line: None
        self.over = False

    def of_own(self, text: str) -> None:
        """This rank has something to report."""
        self._end(self._cluster.error_line(self._rank, text), told=False)

    def because_of(self, rank: int, line: str) -> None:
        """Another rank is gone, or reported something; the line names it."""
        del rank
        self._end(f"error: {line}", told=True)

    def _end(self, line: str, told: bool) -> None:
        with self._lock:
            if self.over:
                return
            self.over = True
            try:
                print(line, file=sys.stderr, flush=True)
            finally:
                self._tell_and_exit(line, told)

    def _tell_and_exit(self, line: str, told: bool) -> None:
        try:
            if self.tell is not None and not told:
                with suppress(Exception):  # they find out by themselves that this rank is gone
                    self.tell(line.removeprefix("error: "))
            with suppress(Exception):
                self.last_words(line.removeprefix("error: "))
        finally:
            os._exit(FAILED)


def join(cluster: Cluster, rank: int) -> Group:
    """Rank 0 opens its transport and waits for the others. ``UserError`` if they do not come."""
    global _current
    if rank != 0:
        raise UserError(f"{rank=} cannot lead: rank 0 does")
    if _current is not None:
        raise UserError("this process leads a job already: close it first")
    # The line to the others first, so that one that cannot start says so there.
    device_of = start_jax(cluster, rank)
    group = Group(cluster, None, None)  # type: ignore[arg-type]
    try:
        group.gather()
        _open(group, device_of)
    except BaseException as error:
        group.leave_because(f"{cluster.describe(0)}: {first_line(error)}")
        raise
    if why := group.transport.why_not_by_memory:
        print(f"note: not all messages go by GPUs' memory: {why}", file=sys.stderr, flush=True)
    _current = group
    atexit.register(group.close)  # a program that ends without it lets the others go too
    return group


def _open(group: Group, device_of: Callable[[], jax.Device]) -> None:
    """The transport of rank 0. Where that fails for want of a rank, it says which."""
    cluster = group.cluster
    ticket = group.watch.begin(FIRST_EXCHANGE, cluster.start_deadline_s)
    try:
        group.device = device_of()
        group.transport = open_transport(
            cluster.transport, 0, cluster.n_ranks, group.device, cluster.peer_memory
        )
    except UserError:
        raise
    except Exception as error:
        if not (missing := group.not_come()):
            raise
        raise RuntimeError(f"{FIRST_EXCHANGE} failed ({missing}): {first_line(error)}") from error
    group.watch.watchdog.done(ticket)


def start_jax(cluster: Cluster, rank: int) -> Callable[[], jax.Device]:
    """Settings that must precede JAX's first use; then, by calling the result, this rank's device."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_shard_autotuning" not in flags and cluster.platform(rank) != "cpu":
        # Ranks compile different programs: none may wait for another's part of one.
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()
    own = local_index(os.environ)

    def device() -> jax.Device:
        if cluster.transport == "xla":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(
                cluster.coordinator,
                num_processes=cluster.n_ranks,
                process_id=rank,
                local_device_ids=None if cluster.platform(rank) == "cpu" else [own],
                initialization_timeout=int(cluster.start_deadline_s),
                shutdown_timeout_seconds=_SHUTDOWN_S,
            )
        elif cluster.platform(rank) in (None, "cuda"):
            take_gpu(own)
        found = jax.local_devices()[0]
        jax.config.update("jax_default_device", found)  # kernels are picked by it
        return found

    return device


def leave(cluster: Cluster) -> None:
    """What this process joined of JAX's own; all ranks do so at the end, and wait for each other shortly."""
    if cluster.transport == "xla" and jax.distributed.is_initialized():
        with suppress(Exception):  # another rank has gone without it: nothing is left to be done together
            jax.distributed.shutdown()


def take_gpu(index: int) -> None:
    """Leaves this process the one GPU, before CUDA is first used: a device must have the number 0 of a lone
    process."""
    names = visible_gpus(os.environ)
    if names is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[index] if index < len(names) else ""


def local_index(environment: Mapping[str, str]) -> int:
    """Which of its host's accelerators this rank takes: what its starter says, or by its number on the
    host."""
    for name in (
        "JAXLAMINA_DEVICE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "JAXLAMINA_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "SLURM_LOCALID",
    ):
        if name in environment:
            return int(environment[name])
    return 0


def versions() -> dict[str, str]:
    """What must be the same on all ranks for their programs to match."""
    found = {"jaxlamina": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    return found | {name: metadata.version(name) for name in ("jax", "jaxlib")}


def first_line(error: BaseException) -> str:
    """An exception as one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
