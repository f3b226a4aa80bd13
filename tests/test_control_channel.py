"""The control channel over real sockets, its ranks in processes of their own where they are killed or stopped."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxlamina.control import client as client_module
from jaxlamina.control import frames, sockets
from jaxlamina.control.channel import ControlClient, ControlError, ControlServer, hello_of
from jaxlamina.control.frames import LARGEST_BYTES, FrameReader
from jaxlamina.control.messages import (
    Array,
    Bye,
    Fault,
    Hello,
    Pong,
    Prepare,
    Prepared,
    PutRows,
    Refused,
    Rows,
    StepShape,
    TakeRows,
    Welcome,
    decode,
    encode,
)
from jaxlamina.errors import UserError

RANK = Path(__file__).with_name("control_rank.py")
CONFIG: dict[str, Any] = {"dop": "1,2", "kv_dtype": "auto", "max_num_seqs": 8, "window": None, "scale": 0.5}
VERSIONS = {"jax": "1.2.3", "jaxlamina": "0.1.0"}
SHAPE = StepShape("decode", 8, 1, 256)


def frame(body: bytes) -> bytes:
    return b"".join(frames.frame(body))


def describe(rank: int) -> str:
    return "rank 0 (model worker 0)" if rank == 0 else f"rank {rank} (attention worker {rank - 1})"


class Faults(queue.Queue):
    """What on_fault was called with."""

    def __call__(self, rank: int, line: str) -> None:
        self.put((rank, line))

    def only(self, timeout: float = 5) -> tuple[int, str]:
        fault = self.get(timeout=timeout)
        time.sleep(0.05)
        assert self.empty(), "told twice"
        return fault


class Group:
    """Rank 0 in this process, the others in threads, in processes, or as bare sockets; all are ended at the end."""

    def __init__(self) -> None:
        self.faults = Faults()
        self._ends: list[Callable[[], Any]] = []

    def server(self, n_ranks: int, address: str = "127.0.0.1:0", **options: Any) -> ControlServer:
        options = {"describe": describe, "versions": VERSIONS, "on_fault": self.faults} | options
        server = ControlServer(address, n_ranks, options.pop("config", CONFIG), **options)
        self._ends.append(lambda: server.close(wait_s=0.2))
        return server

    def join(self, address: str, rank: int, **options: Any) -> Joining:
        joining = Joining(address, rank, **options)
        self._ends.append(joining.close)
        return joining

    def process(self, end: str, address: str, number: int, **options: Any) -> Process:
        process = Process(end, address, number, **options)
        self._ends.append(process.close)
        return process

    def raw(self, address: str) -> socket.socket:
        host, port = sockets.parse_address(address)
        sock = socket.create_connection((host, port), timeout=5)
        self._ends.append(sock.close)
        return sock

    def close(self) -> None:
        for end in reversed(self._ends):
            end()


class Joining:
    """A client that is being made in a thread, as it takes until the group is formed."""

    def __init__(self, address: str, rank: int, hello: Hello | None = None, **options: Any) -> None:
        self.faults = Faults()
        self._made: queue.Queue[ControlClient | Exception] = queue.Queue()
        self._client: ControlClient | None = None
        hello = hello or hello_of(rank, options.pop("config", CONFIG), options.pop("versions", VERSIONS))
        options = {"deadline_s": 10, "on_fault": self.faults, "describe": describe} | options

        def make() -> None:
            try:
                self._made.put(ControlClient(address, hello, **options))
            except (UserError, ControlError) as error:
                self._made.put(error)

        threading.Thread(target=make, daemon=True).start()

    def client(self) -> ControlClient:
        made = self._made.get(timeout=20)
        if isinstance(made, Exception):
            raise made
        self._client = made
        return made

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class Process:
    """tests/control_rank.py; the lines it prints, as they come."""

    def __init__(self, end: str, address: str, number: int, **options: Any) -> None:
        options = {"config": CONFIG} | options
        command = [sys.executable, str(RANK), end, address, str(number), json.dumps(options)]
        environment = os.environ | {"PYTHONPATH": str(RANK.parents[1])}
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.popen.stdout:
            self.lines.put(line.rstrip("\n"))

    def line(self, timeout: float = 20) -> str:
        return self.lines.get(timeout=timeout)

    def send(self, number: int) -> None:
        os.kill(self.popen.pid, number)

    def wait(self, timeout: float = 10) -> int:
        return self.popen.wait(timeout)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.send(signal.SIGKILL)
        self.popen.wait()
        self._reader.join()
        self.popen.stdin.close()
        self.popen.stdout.close()


@pytest.fixture
def group():
    group = Group()
    yield group
    group.close()


@pytest.fixture
def pair(group):
    """A formed group of two in this process: rank 0's end, rank 1's end, and what on_fault of rank 1 got."""
    server = group.server(2, heartbeat_s=0.2)
    joining = group.join(server.address, 1, heartbeat_s=0.2)
    server.gather(10)
    return server, joining.client(), joining.faults


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sockets.address_text(sock.getsockname())


def said_by(sock: socket.socket) -> Any:
    """The next message on a bare socket, heartbeats left out; None when the other side closes."""
    reader = FrameReader()
    sock.settimeout(5)
    while True:
        data = sock.recv(1)  # a byte a time: nothing of what follows is taken
        if not data:
            return None
        reader.feed(data)
        for body in reader.bodies():
            message = decode(body)
            if type(message).__name__ not in ("Ping", "Pong"):
                return message


# Forming the group


def test_ranks_may_come_in_any_order_and_before_rank_0(group):
    address = free_address()
    late, early = None, group.process("client", address, 2)
    time.sleep(0.7)  # it is trying by now
    server = group.server(3, address, epoch=4)
    time.sleep(0.3)
    late = group.process("client", address, 1)
    server.gather(20)
    assert [early.line(), late.line()] == ["welcome 4"] * 2
    server.broadcast(Prepare(SHAPE))
    for rank in (2, 1):
        assert server.receive(rank, Prepared, 5) == Prepared(SHAPE, (), 0.5)
    server.close()
    assert [early.line(), late.line(), early.wait(), late.wait()] == ["bye", "bye", 0, 0]
    assert group.faults.empty()


def test_ranks_that_do_not_start_are_named_to_everyone(group):
    server = group.server(4)
    there = group.process("client", server.address, 2)
    while not server._members:
        time.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        server.gather(0.5)
    assert 0.5 <= time.monotonic() - began < 2.5
    line = str(error.value)
    assert line.startswith(
        "rank 1 (attention worker 0) and rank 3 (attention worker 2) did not start within 0.5 s: "
        f"nothing came to {server.address}"
    )
    assert there.line() == f"error: {line}"
    assert there.wait() == 2
    assert group.faults.empty()


@pytest.mark.parametrize(
    ("config", "versions", "said"),
    [
        (CONFIG | {"kv_dtype": "int8"}, VERSIONS, "kv_dtype is 'int8' there and 'auto' on rank 0"),
        (CONFIG | {"window": 5, "scale": 1.5}, VERSIONS, "window is 5 there and None on rank 0"),
        (CONFIG | {"further": True}, VERSIONS, "further is True there and not set on rank 0"),
        (
            {k: v for k, v in CONFIG.items() if k != "dop"},
            VERSIONS,
            "dop is not set there and '1,2' on rank 0",
        ),
        (CONFIG, VERSIONS | {"jax": "1.2.4"}, "another version: jax is '1.2.4' there and '1.2.3' on rank 0"),
    ],
)
def test_a_rank_with_another_configuration_or_version_ends_the_start(group, config, versions, said):
    server = group.server(3)
    fine = group.join(server.address, 1)
    other = group.join(server.address, 2, config=config, versions=versions)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^rank 2 \(attention worker 1\) on .*" + re.escape(said)) as error:
        server.gather(10)
    assert time.monotonic() - began < 5, "it need not wait for the deadline"
    for rank in (fine, other):
        with pytest.raises(UserError) as theirs:
            rank.client()
        assert str(theirs.value) == str(error.value)


def test_the_same_configuration_survives_the_wire(group):
    config = CONFIG | {"half": 0.1, "whole": 1.0, "yes": True, "text": "a: ü"}
    server = group.server(2, config=config)
    joining = group.join(server.address, 1, config=dict(reversed(config.items())))
    server.gather(5)
    assert joining.client().epoch == 0


def test_two_ranks_that_claim_one_number(group):
    server = group.server(3)
    first = group.process("client", server.address, 1)
    while not server._members:
        time.sleep(0.01)
    second = group.process("client", server.address, 1)
    with pytest.raises(
        UserError, match=r"two processes were started as rank 1 \(attention worker 0\)"
    ) as error:
        server.gather(20)
    for process in (first, second):
        assert f"process {process.popen.pid} on {socket.gethostname()}" in str(error.value)
        assert process.line() == f"error: {error.value}"
        assert process.wait() == 2


@pytest.mark.parametrize("rank", [0, 3, -1, 2**40])
def test_a_rank_that_the_group_has_not(group, rank):
    server = group.server(3)
    joining = group.join(server.address, rank)
    said = rf"a process was started as rank {rank}, but beside rank 0 .* this group has ranks 1 to 2"
    with pytest.raises(UserError, match=said):
        server.gather(10)
    with pytest.raises(UserError, match=said):
        joining.client()


def test_a_rank_of_another_protocol_is_told_so(group):
    server = group.server(2)
    sock = group.raw(server.address)
    hello = {"type": "Hello", "protocol": 99, "rank": 1, "colour": "blue"}
    sock.sendall(frame(msgspec.msgpack.encode(hello)))
    with pytest.raises(
        UserError, match="rank 1 speaks control protocol 99, rank 0 .* speaks 1: install"
    ) as error:
        server.gather(10)
    assert said_by(sock) == Refused(str(error.value))


def test_a_hello_with_a_field_that_is_not_known(group):
    server = group.server(2)
    hello = msgspec.msgpack.decode(encode(hello_of(1, CONFIG, VERSIONS))) | {"colour": "blue"}
    group.raw(server.address).sendall(frame(msgspec.msgpack.encode(hello)))
    with pytest.raises(UserError, match=r"rank 1 \(attention worker 0\) said what cannot be read: .*colour"):
        server.gather(10)


def test_a_rank_that_ends_before_the_others_came_is_named_at_once(group):
    server = group.server(3)
    process = group.process("client", server.address, 1)
    while not server._members:
        time.sleep(0.01)
    process.send(signal.SIGKILL)
    began = time.monotonic()
    said = rf"rank 1 \(attention worker 0\) has gone: it .* \(process {process.popen.pid} on "
    with pytest.raises(UserError, match=said):
        server.gather(20)
    assert time.monotonic() - began < 3
    assert group.faults.empty()


def test_a_later_process_is_refused_and_the_group_goes_on(group, pair):
    server, client, faults = pair
    with pytest.raises(UserError, match="two processes were started as rank 1"):
        group.join(server.address, 1).client()
    with pytest.raises(UserError, match="was started as rank 5"):
        group.join(server.address, 5).client()
    server.send(1, Prepare(SHAPE))
    assert client.receive(5) == Prepare(SHAPE)
    assert group.faults.empty() and faults.empty()


def test_rank_0_that_ends_before_it_gathers(group):
    server = group.server(3)
    joining = group.join(server.address, 1)
    while not server._members:
        time.sleep(0.01)
    server.close()
    with pytest.raises(UserError, match=r"rank 0 \(model worker 0\) ended before all ranks had started"):
        joining.client()


# Who else may connect


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(1000),
    "no message": frame(b"\xc1\xc1"),
    "another message": frame(encode(Bye())),
    "oversized": b"JXLc" + (1 << 21).to_bytes(4, "big"),
    "half a header": b"JXLc\x05",
    "nothing": b"",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_strangers_do_not_keep_the_group_from_forming(group, garbage):
    server = group.server(2)
    sock = group.raw(server.address)
    sock.sendall(garbage)
    if garbage[:4] == b"JXLc"[: len(garbage)] and len(garbage) < 8:
        sock.shutdown(socket.SHUT_WR)
    assert sock.recv(100) == b"", "it is dropped, and gets no answer"
    joining = group.join(server.address, 1)
    server.gather(10)
    joining.client()
    assert group.faults.empty()


def test_a_stranger_that_says_nothing_holds_nobody_up(group):
    server = group.server(2)
    silent = group.raw(server.address)
    joining = group.join(server.address, 1)
    server.gather(5)
    joining.client()
    assert silent.fileno() >= 0


def test_strangers_are_named_when_a_rank_is_missing(group):
    server = group.server(2)
    sock = group.raw(server.address)
    sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    assert sock.recv(100) == b""
    with pytest.raises(
        UserError, match=r"but for 127\.0\.0\.1:\d+ \(the stream is none of JaxLamina's: b'SSH-2.0"
    ):
        server.gather(0.2)


@pytest.mark.parametrize(
    ("bytes_", "said"),
    [
        (b"\r\n\r\n", "sent what cannot be read (the stream is none of JaxLamina's"),
        (frame(b"\xc1"), "sent what cannot be read (not a message of control protocol 1"),
        (
            b"JXLc" + (LARGEST_BYTES + 1).to_bytes(4, "big"),
            f"is larger than the {LARGEST_BYTES} allowed",
        ),
        (frame(encode(Bye()))[:-3], "closed its control connection in the middle of a message"),
        (b"", "closed its control connection (process"),
    ],
    ids=["garbage", "no message", "oversized", "cut off", "closed"],
)
def test_a_rank_that_turns_bad_is_the_first_bad_news(group, bytes_, said):
    server = group.server(3)
    bad, other = group.raw(server.address), group.join(server.address, 2)
    bad.sendall(frame(encode(hello_of(1, CONFIG, VERSIONS))))
    server.gather(10)
    assert said_by(bad) == Welcome(0)
    client = other.client()
    bad.sendall(bytes_)
    bad.shutdown(socket.SHUT_WR)
    rank, line = group.faults.only()
    assert rank == 1
    assert line.startswith("rank 1 (attention worker 0) has gone: it ")
    assert said in line and f"(process {os.getpid()} on {socket.gethostname()})" in line
    assert other.faults.only() == (rank, line)
    for call in (
        lambda: server.receive(2, Prepared, 5),
        lambda: server.send(2, Bye()),
        lambda: client.receive(5),
    ):
        with pytest.raises(ControlError) as error:
            call()
        assert (error.value.rank, error.value.line, str(error.value)) == (rank, line, line)


def test_messages_in_small_pieces_and_many_at_once(group):
    server = group.server(2)
    sock = group.raw(server.address)
    for byte in frame(encode(hello_of(1, CONFIG, VERSIONS))):
        sock.sendall(bytes([byte]))
    server.gather(10)
    answers = [Prepared(StepShape("decode", b, 1, 16), (), 0.25) for b in range(1, 40)]
    stream = b"".join(frame(encode(m)) for m in answers)
    for at in range(0, 400, 7):
        sock.sendall(stream[at : at + 7])
        time.sleep(0.0005)
    sock.sendall(stream[at + 7 :])
    assert [server.receive(1, Prepared, 5) for _ in answers] == answers


def test_a_message_in_the_same_packet_as_hello_is_not_lost(group):
    server = group.server(3)
    sock = group.raw(server.address)
    sock.sendall(
        frame(encode(hello_of(1, CONFIG, VERSIONS))) + frame(encode(Fault(1, "rank 1: no such file")))
    )
    with pytest.raises(UserError, match="^rank 1: no such file$"):
        server.gather(10)


# Messages between ranks


def test_messages_keep_their_order_both_ways(pair):
    server, client, _ = pair
    for n in range(1, 300):
        server.send(1, Prepare(StepShape("decode", n, 1, 16)))
        client.send(Prepared(StepShape("chunk", n, 1, 16), (), 0.0))
    assert [client.receive(5).shape.batch for _ in range(1, 300)] == list(range(1, 300))
    assert [server.receive(1, Prepared, 5).shape.batch for _ in range(1, 300)] == list(range(1, 300))


def test_an_answer_that_does_not_come_has_a_deadline(pair):
    server, client, _ = pair
    for call, said in (
        (
            lambda: server.receive(1, Prepared, 0.2),
            r"^rank 1 \(attention worker 0\) sent no Prepared within 0\.2 s",
        ),
        (
            lambda: client.receive(0.2),
            r"^rank 0 \(model worker 0\) at 127\.0\.0\.1:\d+ sent nothing within 0\.2 s$",
        ),
    ):
        began = time.monotonic()
        with pytest.raises(ControlError, match=said):
            call()
        assert 0.2 <= time.monotonic() - began < 1.5


def test_an_answer_of_another_kind_is_an_error(pair):
    server, client, _ = pair
    client.send(Rows(()))
    with pytest.raises(ControlError, match="sent Rows instead of Prepared"):
        server.receive(1, Prepared, 5)


def test_large_messages_cross_while_heartbeats_go_on(group):
    """Both ways at once, each larger than any socket's buffer: nobody may wait for the other to read first."""
    server = group.server(2, heartbeat_s=0.5)
    process = group.process("client", server.address, 1, heartbeat_s=0.5)
    server.gather(20)
    assert process.line() == "welcome 0"
    many = Array.of(np.arange(8_000_000, dtype=np.int32))
    for _ in range(3):
        server.send(1, TakeRows(many))  # it answers with twice as much while the next arrives
        server.send(1, PutRows(many, (many, many)))
    for _ in range(3):
        rows = server.receive(1, Rows, 30).rows
        np.testing.assert_array_equal(rows[1].numpy(), many.numpy())
    total = many.numpy().sum()
    assert [process.line() for _ in range(3)] == [f"rows {total} {total}"] * 3
    assert group.faults.empty()


def test_a_message_that_is_too_large_is_refused_by_the_sender(pair, monkeypatch):
    server, client, _ = pair
    monkeypatch.setattr("jaxlamina.control.server.frame", lambda body: frames.frame(body, largest_bytes=1000))
    with pytest.raises(ValueError, match="larger than the 1000 that may be sent"):
        server.send(1, TakeRows(Array.of(np.zeros(1000))))
    server.send(1, Prepare(SHAPE))
    assert client.receive(5) == Prepare(SHAPE), "nothing of it has left"


def test_sends_from_many_threads_do_not_mix(pair):
    server, client, _ = pair
    slots = Array.of(np.zeros(30_000, np.int64))
    threads = [
        threading.Thread(target=lambda: [client.send(Rows((slots,))) for _ in range(20)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert all(server.receive(1, Rows, 10).rows[0] == slots for _ in range(80))
    for thread in threads:
        thread.join()


def test_a_quiet_group_stays(pair, group):
    server, client, faults = pair
    time.sleep(2)  # ten heartbeats, three times what counts as silent
    server.send(1, Bye())
    assert client.receive(1) == Bye()
    assert group.faults.empty() and faults.empty()


def test_each_side_may_have_its_own_heartbeat(group):
    server = group.server(2, heartbeat_s=30)
    joining = group.join(server.address, 1, heartbeat_s=0.1)
    server.gather(5)
    client = joining.client()
    time.sleep(1)
    server.send(1, Prepare(SHAPE))
    assert client.receive(1) == Prepare(SHAPE)
    assert joining.faults.empty()


# Bad news


def test_a_killed_rank_is_known_to_all_at_once(group):
    server = group.server(3)
    victim = group.process("client", server.address, 1)
    survivor = group.process("client", server.address, 2)
    server.gather(20)
    assert [victim.line(), survivor.line()] == ["welcome 0"] * 2
    told: queue.Queue[ControlError] = queue.Queue()

    def wait_for_the_survivor() -> None:
        try:
            server.receive(2, Prepared, 60)
        except ControlError as error:
            told.put(error)

    threading.Thread(target=wait_for_the_survivor, daemon=True).start()
    time.sleep(0.1)
    victim.send(signal.SIGKILL)
    began = time.monotonic()
    rank, line = group.faults.only()
    assert rank == 1
    assert re.match(rf"rank 1 \(attention worker 0\) has gone: it .*\(process {victim.popen.pid} on ", line)
    assert told.get(timeout=1).line == line
    assert survivor.line() == f"fault 1 {line}"
    assert survivor.wait() == 3
    assert time.monotonic() - began < 3


def test_a_killed_rank_0_is_known_to_the_others(group):
    address = free_address()
    server = group.process("server", address, 3)
    clients = [group.join(address, rank) for rank in (1, 2)]
    assert [server.line(), server.line()] == [f"listening {address}", "gathered"]
    ends = [c.client() for c in clients]
    server.send(signal.SIGKILL)
    for joined in clients:
        rank, line = joined.faults.only(3)
        assert rank == 0
        assert line.startswith(f"rank 0 (model worker 0) at {address} has gone: it ")
    with pytest.raises(ControlError, match="has gone"):
        ends[1].receive(None)
    with pytest.raises(ControlError, match="has gone"):
        ends[1].send(Rows(()))


def test_a_stopped_rank_is_found_by_its_silence(group):
    server = group.server(3, heartbeat_s=0.2)
    stopped = group.process("client", server.address, 2)
    other = group.join(server.address, 1)
    server.gather(20)
    assert stopped.line() == "welcome 0"
    time.sleep(0.5)
    stopped.send(signal.SIGSTOP)
    began = time.monotonic()
    rank, line = group.faults.only()
    assert 0.3 < time.monotonic() - began < 2
    assert (rank, "rank 2 (attention worker 1) has gone: it was silent for 0.6 s" in line) == (2, True)
    assert other.faults.only() == (rank, line)


def test_a_stopped_rank_0_is_found_by_its_silence(group):
    address = free_address()
    server = group.process("server", address, 2)
    joining = group.join(address, 1, heartbeat_s=0.2)
    joining.client()
    server.send(signal.SIGSTOP)
    rank, line = joining.faults.only()
    assert (rank, line) == (0, f"rank 0 (model worker 0) at {address} has gone: it was silent for 0.6 s")


def test_sending_to_a_stopped_rank_does_not_wait_for_ever(group):
    server = group.server(2, heartbeat_s=0.3)
    process = group.process("client", server.address, 1)
    server.gather(20)
    process.send(signal.SIGSTOP)
    began = time.monotonic()
    many = Array.of(np.zeros(4_000_000))
    with pytest.raises(ControlError, match=r"rank 1 \(attention worker 0\)"):
        for _ in range(10):
            server.send(1, PutRows(many, (many,)))
    assert time.monotonic() - began < 5
    assert group.faults.only()[0] == 1


def test_a_job_that_is_stopped_as_a_whole_goes_on(group):
    """Ctrl-Z under mpirun, fg later: all were silent, and nobody has gone."""
    address = free_address()
    ranks = [
        group.process("server", address, 2, heartbeat_s=0.2),
        group.process("client", address, 1, heartbeat_s=0.2),
    ]
    assert [ranks[0].line(), ranks[0].line(), ranks[1].line()] == [
        f"listening {address}",
        "gathered",
        "welcome 0",
    ]
    time.sleep(0.3)
    for rank in ranks:
        rank.send(signal.SIGSTOP)
    time.sleep(2)
    for rank in ranks:
        rank.send(signal.SIGCONT)
        time.sleep(0.1)
    time.sleep(1)
    ranks[0].popen.stdin.close()
    said = ranks[0].line()
    assert said.startswith("answers ") and int(said.split()[1]) > 10
    assert ranks[1].line() == "bye"
    assert [rank.wait() for rank in ranks] == [0, 0]


def test_a_rank_tells_its_own_fault_to_all_others(group):
    server = group.server(4)
    joinings = [group.join(server.address, rank) for rank in (1, 2, 3)]
    server.gather(10)
    clients = [joining.client() for joining in joinings]
    line = "rank 2 (attention worker 1): out of memory"
    clients[1].close(fault=line)
    assert group.faults.only() == (2, line)
    assert joinings[0].faults.only() == joinings[2].faults.only() == (2, line)
    assert joinings[1].faults.empty(), "it knows"
    clients[0].close(fault="rank 1: a consequence")
    with pytest.raises(ControlError) as error:
        server.receive(1, Prepared, 5)
    assert error.value.line == line, "the first is the one that counts"


def test_rank_0_tells_its_own_fault(group, pair):
    server, client, faults = pair
    server.close(fault="rank 0 (model worker 0): no logits", wait_s=0.2)
    assert faults.only() == (0, "rank 0 (model worker 0): no logits")
    with pytest.raises(ControlError, match="no logits"):
        client.receive(5)
    assert group.faults.empty()


def test_a_rank_that_leaves_unasked_has_gone(group, pair):
    _, client, _ = pair
    client.close()
    rank, line = group.faults.only()
    assert rank == 1 and "has gone: it closed its control connection (process" in line


def test_after_bye_everyone_may_go(group, pair):
    server, client, faults = pair
    closing = threading.Thread(target=server.close)
    closing.start()
    assert client.receive(5) == Bye()
    client.close()
    closing.join(timeout=3)
    assert not closing.is_alive()
    with pytest.raises(ControlError, match="has ended the group"):
        client.receive(5)
    with pytest.raises(ControlError, match="has closed the control channel"):
        server.send(1, Bye())
    server.close()
    assert group.faults.empty() and faults.empty()
    with socket.create_server(sockets.parse_address(server.address)):
        pass  # the port is free again


def test_on_fault_may_close_the_channel(group):
    closed: queue.Queue[float] = queue.Queue()

    def on_fault(rank: int, line: str) -> None:
        began = time.monotonic()
        server.close(wait_s=5)
        closed.put(time.monotonic() - began)

    server = group.server(2, on_fault=on_fault)
    sock = group.raw(server.address)
    sock.sendall(frame(encode(hello_of(1, CONFIG, VERSIONS))))
    server.gather(10)
    sock.close()
    assert closed.get(timeout=3) < 1


# Addresses


@pytest.mark.parametrize(
    "address", ["", "7070", "host:", ":7070", "host:x", "host:70000", "host:-1", "host:¹"]
)
def test_an_address_that_is_none(group, address):
    with pytest.raises(UserError, match=r"must be HOST:PORT"):
        group.server(2, address)
    with pytest.raises(UserError, match=r"must be HOST:PORT"):
        group.join(address, 1).client()


def test_addresses_that_cannot_be_listened_on(group):
    server = group.server(2)
    with pytest.raises(
        UserError, match=rf"{server.address} cannot be listened on: another process listens there"
    ):
        group.server(2, server.address)
    with pytest.raises(UserError, match="it is no address of this host: name the host that rank 0 runs on"):
        group.server(2, "192.0.2.1:7070")
    with pytest.raises(UserError, match=r"host no-such-host\.invalid is not known here"):
        group.server(2, "no-such-host.invalid:7070")


@pytest.mark.parametrize(
    ("address", "why"),
    [(None, "Connection refused"), ("no-such-host.invalid:7070", "(not known|name resolution|No address)")],
)
def test_a_rank_0_that_is_not_reached(group, address, why):
    address = address or free_address()
    began = time.monotonic()
    said = rf"^rank 0 \(model worker 0\) was not reached at {re.escape(address)} within 0\.4 s \(.*{why}"
    with pytest.raises(UserError, match=said):
        group.join(address, 1, deadline_s=0.4).client()
    assert time.monotonic() - began < 5


def test_ipv6(group):
    try:
        server = group.server(2, "[::1]:0")
    except UserError as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert server.address.startswith("[::1]:")
    joining = group.join(server.address, 1)
    server.gather(5)
    joining.client()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            b"SSH-2.0-OpenSSH_9.6\r\n",
            "has gone: it sent what cannot be read (the stream is none of JaxLamina's",
        ),
        (frame(encode(Bye())), "said Bye instead of Welcome"),
        (frame(encode(Pong())), "was reached, but did not say within 0.3 s that all ranks are there"),
        (None, "has gone: it closed its control connection"),
    ],
    ids=["ssh", "another message", "no Welcome", "closed"],
)
def test_something_else_listens_at_rank_0s_address(group, monkeypatch, answer, said):
    monkeypatch.setattr(client_module, "_RANK_0_FIRST_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        joining = group.join(sockets.address_text(listener.getsockname()), 1, deadline_s=0.3)
        sock, _ = listener.accept()
        with sock:
            if answer is None:
                assert isinstance(said_by(sock), Hello)
                sock.shutdown(socket.SHUT_RDWR)
            else:
                sock.sendall(answer)
            with pytest.raises(UserError, match=re.escape(said)):
                joining.client()
    assert joining.faults.empty(), "it was never in the group"


def test_a_connection_to_oneself_is_not_rank_0(monkeypatch):
    """TCP connects a socket to itself where it tries a free port of its own host for long enough."""

    def to_itself(address: tuple, timeout: float) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.connect(address)
        return sock

    monkeypatch.setattr(socket, "create_connection", to_itself)
    with pytest.raises(UserError, match="nothing listens there"):
        sockets.connect(free_address(), 0.3, "rank 0")
