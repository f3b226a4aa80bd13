"""Ranks of one transport on this host, each a process that answers requests: what `bench exchange` measures on.

The starting process has `Ranks`; each rank runs `serve`. Requests and answers are lines of JSON over a TCP connection of
their own, so that a rank that waits for one takes no processor time. Knows how ranks start and end; nothing of what they
measure. Imports no JAX before a rank's platform is set.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxlamina.errors import UserError

_JOB = "JAXLAMINA_EXCHANGE_JOB"
_ROOT = Path(__file__).resolve().parents[2]
# Eager sends up to 1 MiB, and ranks that yield while they wait: see the note at the launcher's own options.
_OPEN_MPI = (
    *("--oversubscribe", "--bind-to", "none"),
    *("--mca", "btl_vader_eager_limit", "1048576", "--mca", "mpi_yield_when_idle", "1"),
)

Handler = Callable[[Any, dict[str, Any]], Any]


class RankError(RuntimeError):
    """A rank failed, ended or was late; the message says which and why."""


class Ranks:
    """``n_ranks`` processes that run ``command``, a program that calls `serve`, over one transport. A context manager.

    platforms: rank 0's and the others' JAX platform; None is JAX's choice. environment: set for all ranks over this
    process's own. ``devices``: what each rank's is called. Raises `UserError` where the transport's starter is missing, `RankError` if a rank does not come
    within ``deadline_s``.
    """

    def __init__(
        self,
        transport: str,
        n_ranks: int,
        command: Sequence[str],
        *,
        platforms: tuple[str | None, str | None] = ("cpu", "cpu"),
        environment: Mapping[str, str] | None = None,
        deadline_s: float = 120.0,
    ) -> None:
        self.transport, self.n_ranks = transport, n_ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[_Lines] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._listener = socket.create_server(("127.0.0.1", 0))
        try:
            self._start(command, platforms, environment or {})
            self._accept(deadline_s)
            self.devices: list[str] = self.ask({"do": "join"}, deadline_s)
        except BaseException:
            self.close(grace_s=0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], deadline_s: float = 120.0) -> list[Any]:
        """Sends every rank the request and gives their answers, by rank. `RankError` ends all ranks."""
        until = time.monotonic() + deadline_s
        try:
            for line in self._lines:
                line.send(request)
            answers = [self._answer(rank, until) for rank in range(self.n_ranks)]
        except (OSError, RankError) as error:
            told = f"{error}{self._tail()}"
            self.close(grace_s=0)
            raise RankError(told) from None
        failed = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if "error" in a]
        if failed:
            self.close()
            raise RankError("; ".join(failed))
        return [answer["value"] for answer in answers]

    def close(self, grace_s: float = 20.0) -> None:
        """Lets the ranks end; those that have not within ``grace_s`` are killed."""
        for line in self._lines:
            try:
                line.send({"do": "end"})
            except OSError:  # it has ended
                pass
        until = time.monotonic() + grace_s
        for process in self._processes:
            try:
                process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.terminate()  # mpirun passes it on to its ranks
        for process in self._processes:
            try:
                # Ranks of jax.distributed take no notice of SIGTERM; mpirun needs a while to end its own.
                process.wait(10 if self.transport == "mpi" else 0.5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for lines in self._lines:
            lines.close()
        self._processes, self._lines = [], []
        self._listener.close()
        self._log.close()

    def _start(
        self, command: Sequence[str], platforms: tuple[str | None, str | None], environment: Mapping[str, str]
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        job = {
            "address": self._listener.getsockname(),
            "transport": self.transport,
            "n_ranks": self.n_ranks,
            "coordinator": coordinator,
            "platforms": platforms,
        }
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        common = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # Other transports' ranks share the GPUs.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **environment,
            _JOB: json.dumps(job),
        }
        if self.transport == "mpi":
            if shutil.which("mpirun") is None:
                raise UserError("transport 'mpi' needs mpirun: apt-get install openmpi-bin libopenmpi-dev")
            as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
            argv = ("mpirun", "-n", str(self.n_ranks), *as_root, *_OPEN_MPI, *command)
            self._processes.append(self._popen(argv, common))
            return
        for rank in range(self.n_ranks):
            own = {"JAXLAMINA_RANK": str(rank), "JAXLAMINA_LOCAL_RANK": str(rank)}
            self._processes.append(self._popen(command, common | own))

    def _popen(self, argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )

    def _accept(self, deadline_s: float) -> None:
        found: dict[int, _Lines] = {}
        until = time.monotonic() + deadline_s
        self._listener.settimeout(0.2)
        while len(found) < self.n_ranks:
            ended = [p.returncode for p in self._processes if p.poll() is not None]
            if ended or time.monotonic() > until:
                missing = ", ".join(str(rank) for rank in range(self.n_ranks) if rank not in found)
                why = (
                    f"ended with exit code {ended[0]}" if ended else f"did not start within {deadline_s:g} s"
                )
                raise RankError(f"rank {missing} {why}{self._tail()}")
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._lines.append(_Lines(connection))
            found[self._lines[-1].receive(until)["rank"]] = self._lines[-1]
        self._lines = [found[rank] for rank in range(self.n_ranks)]

    def _answer(self, rank: int, until: float) -> dict[str, Any]:
        try:
            return self._lines[rank].receive(until)
        except TimeoutError:
            raise RankError(f"rank {rank} did not answer in time") from None
        except EOFError:
            raise RankError(f"rank {rank} ended") from None

    def _tail(self) -> str:
        """The end of what the ranks wrote."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        text = self._log.read().decode(errors="replace").strip()
        return f"\n{text}" if text else ""


class _Lines:
    """JSON, one value a line, over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""

    def send(self, value: Any) -> None:
        self._socket.settimeout(30)
        self._socket.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, until: float | None = None) -> Any:
        """The next value. `TimeoutError` at ``until``, by the monotonic clock; `EOFError` if the other side is gone."""
        while b"\n" not in self._buffer:
            self._socket.settimeout(None if until is None else max(until - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        self._socket.close()


def serve(handlers: Mapping[str, Handler]) -> None:
    """A rank's life: answers each request with ``handlers[request["do"]](transport, request)``, until told to end.

    A handler that raises answers with its error. The process ends at once if the starting one is gone.
    """
    job = json.loads(os.environ[_JOB])
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["JAXLAMINA_RANK"])
    lines = _Lines(socket.create_connection(tuple(job["address"]), timeout=30))
    lines.send({"rank": rank})
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, requests), daemon=True).start()
    transport = None
    while (request := requests.get())["do"] != "end":
        try:
            if request["do"] == "join":
                transport, value = _join(job, rank)
            else:
                value = handlers[request["do"]](transport, request)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this rank's answer)
            traceback.print_exc()
            lines.send({"error": " ".join(f"{type(error).__name__}: {error}".split())})
        else:
            lines.send({"value": value})


def _read(lines: _Lines, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        while True:
            request = lines.receive()
            requests.put(request)
            if request["do"] == "end":
                return
    except Exception:  # noqa: BLE001 (an exchange may wait for ever: nothing but the end helps)
        os._exit(1)


def _join(job: Mapping[str, Any], rank: int) -> tuple[Any, str]:
    """The transport, and what this rank's device is called."""
    from jaxlamina.job.cluster import Cluster

    cluster = Cluster(
        dop=(1, job["n_ranks"] - 1),
        transport=job["transport"],
        coordinator=job["coordinator"],
        model_platform=job["platforms"][0],
        attention_platform=job["platforms"][1],
        peer_memory=os.environ.get("JAXLAMINA_PEER_MEMORY") != "0",
    )
    platform = cluster.platform(rank)
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = platform if platform == "cpu" else f"{platform},cpu"
    from jaxlamina.job.group import start_jax
    from jaxlamina.transports import open_transport

    device = start_jax(cluster, rank)()
    transport = open_transport(cluster.transport, rank, cluster.n_ranks, device, cluster.peer_memory)
    return transport, device.device_kind


def command_of(module: str) -> tuple[str, ...]:
    """Runs a module of this project by this interpreter."""
    return (sys.executable, "-P", "-m", module)
