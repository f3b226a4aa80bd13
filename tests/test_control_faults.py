"""Bad news on the control channel: ranks that are killed, stopped, late or wrong, in processes of their
own."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from control_group import (
    SHAPE,
    Group,
    frame,
    free_address,
)

from jaxlamina.job.control import sockets
from jaxlamina.job.control.channel import ControlError
from jaxlamina.job.control.connection import Connection, ConnectionEnded
from jaxlamina.job.control.frames import LARGEST_BYTES, FrameReader
from jaxlamina.job.control.messages import (
    PROTOCOL,
    Array,
    Bye,
    Fault,
    Prepare,
    Prepared,
    PutRows,
    Rows,
    TakeRows,
    Welcome,
    encode,
)
from jaxlamina.job.control.seals import Seals


@pytest.fixture
def group():
    group = Group()
    yield group
    group.close()


@pytest.fixture
def pair(group):
    """A formed group of two in this process: rank 0's end, rank 1's end, and what on_fault of rank 1 got."""
    server = group.server(2)
    joining = group.join(server.address, 1)
    server.gather(10)
    return server, joining.client(), joining.faults


@pytest.mark.parametrize(
    ("bytes_", "said"),
    [
        (b"\r\n\r\n", "sent what cannot be read (the stream is none of JaxLamina's"),
        (b"\xc1", f"sent what cannot be read (not a message of control protocol {PROTOCOL}"),
        (
            b"JXLc" + (LARGEST_BYTES + 1).to_bytes(4, "big"),
            f"is larger than the {LARGEST_BYTES} allowed",
        ),
        (
            frame(encode(Bye())),
            "sent what cannot be read (a message without a proof, where each must have one)",
        ),
        (frame(encode(Bye()))[:-3], "closed its control connection in the middle of a message"),
        (b"", "closed its control connection (process"),
    ],
    ids=["garbage", "no message", "oversized", "no proof", "cut off", "closed"],
)
def test_a_rank_that_turns_bad_is_the_first_bad_news(group, bytes_, said):
    server = group.server(3)
    bad, other = group.bare(server.address), group.join(server.address, 2)
    bad.sock.sendall(bad.hello(1))
    server.gather(10)
    assert bad.said() == Welcome(0)
    client = other.client()
    bad.sock.sendall(bad.sealed(bytes_) if bytes_ == b"\xc1" else bytes_)
    bad.sock.shutdown(socket.SHUT_WR)
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
    server = group.server(3, heartbeat_s=0.5)
    stopped = group.process("client", server.address, 2)
    other = group.join(server.address, 1)
    server.gather(20)
    assert stopped.line() == "welcome 0"
    time.sleep(0.5)
    stopped.send(signal.SIGSTOP)
    began = time.monotonic()
    rank, line = group.faults.only()
    assert 0.5 < time.monotonic() - began < 4
    assert (rank, "rank 2 (attention worker 1) has gone: it was silent for 1.5 s" in line) == (2, True)
    assert other.faults.only() == (rank, line)


def test_a_stopped_rank_0_is_found_by_its_silence(group):
    address = free_address()
    server = group.process("server", address, 2)
    joining = group.join(address, 1, heartbeat_s=0.5)
    joining.client()
    server.send(signal.SIGSTOP)
    rank, line = joining.faults.only()
    assert (rank, line) == (0, f"rank 0 (model worker 0) at {address} has gone: it was silent for 1.5 s")


def test_sending_to_a_stopped_rank_does_not_wait_for_ever(group):
    server = group.server(2, heartbeat_s=0.5)
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
        group.process("server", address, 2, heartbeat_s=0.5),
        group.process("client", address, 1, heartbeat_s=0.5),
    ]
    assert [ranks[0].line(), ranks[0].line(), ranks[1].line()] == [
        f"listening {address}",
        "gathered",
        "welcome 0",
    ]
    time.sleep(0.3)
    for rank in ranks:
        rank.send(signal.SIGSTOP)
    time.sleep(3)
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
    with pytest.raises(ControlError, match="no logits"):  # its other threads end of it, too
        server.receive(1, Bye, 5)
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
    time.sleep(0.2)
    assert closing.is_alive(), "rank 0 leaves last"
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
    rank = group.bare(server.address)
    rank.sock.sendall(rank.hello(1))
    server.gather(10)
    rank.sock.close()
    assert closed.get(timeout=3) < 1


def test_a_rank_that_sends_its_fault_does_not_get_it_back(pair, group):
    _, client, faults = pair
    client.send(Fault(1, "rank 1 (attention worker 0): out of memory"))
    assert group.faults.only() == (1, "rank 1 (attention worker 0): out of memory")
    time.sleep(0.1)
    assert faults.empty()


def test_on_fault_comes_before_anyone_sees_the_error(group):
    """Whoever sees the error may end the process: by then the others have been told, and on_fault is done."""
    done_at: dict[int, threading.Event] = {0: threading.Event(), 2: threading.Event()}

    def slowly(own_rank: int) -> Callable[[int, str], None]:
        def on_fault(rank: int, line: str) -> None:
            time.sleep(0.3)
            done_at[own_rank].set()

        return on_fault

    server = group.server(3, on_fault=slowly(0))
    joining = group.join(server.address, 2, on_fault=slowly(2))
    victim = group.process("client", server.address, 1)
    server.gather(20)
    client = joining.client()
    threads = []

    def until_error(rank: int, call: Callable[[], object]) -> None:
        def run() -> None:
            with pytest.raises(ControlError):
                while True:
                    call()
            seen[rank] = done_at[rank].is_set()

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()

    seen: dict[int, bool] = {}
    until_error(0, lambda: server.send(2, Prepare(SHAPE)))
    until_error(2, lambda: client.receive(5))
    victim.send(signal.SIGKILL)
    for thread in threads:
        thread.join(timeout=5)
    assert seen == {0: True, 2: True}


def test_a_rank_that_does_not_read_does_not_keep_bad_news_back(group):
    """A thread is in the middle of sending to a stopped rank when another dies; heartbeats would take
    minutes."""
    server = group.server(4, heartbeat_s=60)
    stopped, victim, other = (group.process("client", server.address, rank) for rank in (1, 2, 3))
    server.gather(20)
    assert [p.line() for p in (stopped, victim, other)] == ["welcome 0"] * 3
    stopped.send(signal.SIGSTOP)
    many = Array.of(np.zeros(4_000_000))
    ended: queue.Queue[ControlError] = queue.Queue()

    def send() -> None:
        try:
            while True:
                server.send(1, PutRows(many, (many,)))
        except ControlError as error:
            ended.put(error)

    threading.Thread(target=send, daemon=True).start()
    time.sleep(1)
    victim.send(signal.SIGKILL)
    rank, line = group.faults.only(timeout=4)
    assert rank == 2
    assert other.line() == f"fault 2 {line}"
    began = time.monotonic()
    server.close(wait_s=0.2)
    assert time.monotonic() - began < 5
    assert ended.get(timeout=3).line == line


def test_half_a_message_is_the_last_that_leaves():
    """After a send that was given up in the middle, nothing may follow: it would be read as the rest of that
    message."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as peer,
    ):
        sock, _ = listener.accept()
        ends: queue.Queue[str] = queue.Queue()
        seals = Seals.of_rank(b"", bytes(32), bytes(32))
        how = {"heartbeat_s": 60, "on_message": print, "on_end": ends.put}
        connection = Connection(sock, FrameReader(), seals, **how)
        thread = threading.Thread(target=connection.run, daemon=True)
        thread.start()
        many = Array.of(np.zeros(4_000_000))
        began = time.monotonic()
        with pytest.raises(ConnectionEnded, match="does not take what is sent"):
            connection.send(TakeRows(many), wait_s=0.3)
        assert 0.3 <= time.monotonic() - began < 2
        assert ends.get(timeout=2)
        with pytest.raises(ConnectionEnded):
            connection.send(Bye(), wait_s=0.3)
        thread.join(timeout=2)
        assert connection.wait_ended(2)
        got = b""
        while piece := peer.recv(1 << 20):
            got += piece
        whole = b"".join(Seals.of_rank(b"", bytes(32), bytes(32)).sealing.frame(encode(TakeRows(many))))
        assert whole.startswith(got) and len(got) < 32_000_000


def test_after_bye_the_end_of_the_connection_is_no_news(pair):
    server, client, faults = pair
    server.close(wait_s=0)
    assert client.receive(5) == Bye()
    with pytest.raises(ControlError, match="has ended the group"):
        client.receive(5)
    time.sleep(0.1)
    assert faults.empty()
