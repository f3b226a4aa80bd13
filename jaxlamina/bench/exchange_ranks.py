"""Ranks of one transport on this host, each a process that answers requests: what `bench exchange` measures
on.

The starting process has `Ranks`; each rank runs `serve`. Requests and answers are lines of JSON over a TCP
connection of their own, so that a rank that waits for one takes no processor time. Knows how ranks are asked;
how they are started is `launch`'s business, and what they measure the module's that they run.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from jaxlamina.cli.launch import environment as our_environment
from jaxlamina.cli.launch import starter
from jaxlamina.job.cluster import Cluster

_ADDRESS = "JAXLAMINA_EXCHANGE_ADDRESS"
_END_S = 15.0  # for `launch` to end what does not end by itself

Handler = Callable[[Any, dict[str, Any]], Any]


class RankError(RuntimeError):
    """A rank failed, ended or was late; the message says which and why."""


class Ranks:
    """``n_ranks`` processes over one transport that run ``module``, whose ``main(cluster, rank)`` calls
    `serve`. A context manager.

    platforms: rank 0's and the others' JAX platform; None is JAX's choice. environment: set for all ranks
    over this process's own. ``devices``: what each rank's is called. Raises `RankError` if a rank does not
    come within ``deadline_s``.
    """

    def __init__(
        self,
        transport: str,
        n_ranks: int,
        module: str,
        *,
        platforms: tuple[str | None, str | None] = ("cpu", "cpu"),
        environment: Mapping[str, str] | None = None,
        deadline_s: float = 120.0,
    ) -> None:
        self.n_ranks = n_ranks
        self._lines: list[_Lines] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Other transports' ranks share the GPUs.
        variables = {**our_environment(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **(environment or {})}
        keys = {
            "dop": (1, n_ranks - 1),
            "transport": transport,
            "model_platform": platforms[0],
            "attention_platform": platforms[1],
            "peer_memory": variables.get("JAXLAMINA_PEER_MEMORY") != "0",
        }
        given = {key: json.dumps(value) for key, value in keys.items() if value is not None}
        words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        host, port = self._listener.getsockname()
        self._launcher = subprocess.Popen(
            starter([*words, "--module", module]), env={**variables, _ADDRESS: f"{host}:{port}"},
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
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
        """Lets the ranks end; those that have not within ``grace_s`` are ended."""
        for line in self._lines:
            with suppress(OSError):  # it has ended
                line.send({"do": "end"})
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(grace_s)
        for line in self._lines:
            line.close()  # without which a rank ends
        self._launcher.terminate()
        try:
            self._launcher.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        self._lines = []
        self._listener.close()
        self._log.close()

    def _accept(self, deadline_s: float) -> None:
        found: dict[int, _Lines] = {}
        until = time.monotonic() + deadline_s
        self._listener.settimeout(0.2)
        while len(found) < self.n_ranks:
            code = self._launcher.poll()
            if code is not None or time.monotonic() > until:
                missing = ", ".join(str(rank) for rank in range(self.n_ranks) if rank not in found)
                late = f"did not start within {deadline_s:g} s"
                why = late if code is None else f"ended with exit code {code}"
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
        """The next value. `TimeoutError` at ``until``, by the monotonic clock; `EOFError` if the other side
        is gone."""
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


def serve(handlers: Mapping[str, Handler], cluster: Cluster, rank: int) -> int:
    """A rank's life: answers each request with ``handlers[request["do"]](transport, request)``, until told to
    end.

    A handler that raises answers with its error. The process ends at once if the starting one is gone. Gives
    0, for `main`.
    """
    host, _, port = os.environ[_ADDRESS].rpartition(":")
    lines = _Lines(socket.create_connection((host, int(port)), timeout=30))
    lines.send({"rank": rank})
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, requests), daemon=True).start()
    transport = None
    while (request := requests.get())["do"] != "end":
        try:
            if request["do"] == "join":
                transport, value = _join(cluster, rank)
            else:
                value = handlers[request["do"]](transport, request)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this rank's answer)
            traceback.print_exc()
            lines.send({"error": " ".join(f"{type(error).__name__}: {error}".split())})
        else:
            lines.send({"value": value})
    return 0


def _read(lines: _Lines, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        while True:
            request = lines.receive()
            requests.put(request)
            if request["do"] == "end":
                return
    except Exception:  # noqa: BLE001 (an exchange may wait for ever: nothing but the end helps)
        os._exit(1)


def _join(cluster: Cluster, rank: int) -> tuple[Any, str]:
    """The transport, and what this rank's device is called."""
    from jaxlamina.job.group import start_jax
    from jaxlamina.transports import open_transport

    device = start_jax(cluster, rank)()
    transport = open_transport(cluster.transport, rank, cluster.n_ranks, device, cluster.peer_memory)
    return transport, device.device_kind
