"""The control channel over real sockets: forming the group, who else may connect, messages, addresses."""

from __future__ import annotations

import queue
import re
import resource
import signal
import socket
import threading
import time

import msgspec
import numpy as np
import pytest
from control_group import (
    CONFIG,
    SHAPE,
    VERSIONS,
    Group,
    frame,
    free_address,
)

from jaxlamina.errors import UserError
from jaxlamina.job.control import client as client_module
from jaxlamina.job.control import door as door_module
from jaxlamina.job.control import frames, sockets
from jaxlamina.job.control.channel import ControlError
from jaxlamina.job.control.door import HELLO_BYTES, MOST_GUESTS
from jaxlamina.job.control.messages import (
    PROTOCOL,
    Admitted,
    Array,
    Bye,
    Challenge,
    Fault,
    Prepare,
    Prepared,
    PutRows,
    Refused,
    Rows,
    StepShape,
    TakeRows,
    encode,
)

CHALLENGE = Challenge(PROTOCOL, bytes(32))


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
    with server._changed:
        assert server._changed.wait_for(lambda: 1 in server._members, 5)
    other = group.join(server.address, 2, config=config, versions=versions)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^rank 2 \(attention worker 1\) on .*" + re.escape(said)) as error:
        server.gather(10)
    assert time.monotonic() - began < 5, "it need not wait for the deadline"
    with pytest.raises(UserError) as theirs:
        fine.client()
    assert str(theirs.value) == str(error.value)
    with pytest.raises(UserError) as theirs:  # it is told the name, and no value of rank 0's
        other.client()
    assert str(theirs.value) == re.sub(
        r" is .* there and .* on (rank 0 \(.*?\));",
        r" is not the same on \1, which has written both;",
        str(error.value),
    )
    assert said.partition(" is ")[0] in str(theirs.value)


def test_all_that_have_connected_are_told_why(group, monkeypatch):
    """Also those that rank 0 has not heard yet when it gives up, as on a busy host."""
    read = door_module.decode_any_hello

    def slowly(body):
        time.sleep(0.05)
        return read(body)

    monkeypatch.setattr(door_module, "decode_any_hello", slowly)
    server = group.server(9)
    ranks = {rank: group.bare(server.address) for rank in range(8, 0, -1)}
    ranks[8].sock.sendall(ranks[8].hello(8, CONFIG | {"max_num_seqs": 9}))
    for rank in range(1, 8):
        ranks[rank].sock.sendall(ranks[rank].hello(rank))
    with pytest.raises(UserError, match="max_num_seqs is 9 there and 8 on rank 0"):
        server.gather(10)
    for rank in ranks.values():
        message = rank.said()
        assert isinstance(message, Refused) and "max_num_seqs is not the same on rank 0" in message.reason


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
    said = f"a process was started as rank {rank}, "
    with pytest.raises(UserError, match=said + r"but beside rank 0 .* this group has ranks 1 to 2"):
        server.gather(10)
    with pytest.raises(UserError, match=said + "which is none of the group"):
        joining.client()


def test_a_rank_of_another_protocol_is_told_so(group):
    server = group.server(2)
    rank = group.bare(server.address)
    rank.sock.sendall(rank.hello(1, protocol=99, colour="blue"))
    with pytest.raises(
        UserError, match=f"rank 1 speaks control protocol 99, rank 0 .* speaks {PROTOCOL}: install"
    ) as error:
        server.gather(10)
    assert rank.said() == Refused(str(error.value))


def test_a_rank_of_a_protocol_without_a_proof_is_told_so_and_ends_nothing(group):
    server = group.server(2)
    rank = group.bare(server.address)
    hello = {"type": "Hello", "protocol": 7, "rank": 1, "job": "a word"}
    rank.sock.sendall(frame(msgspec.msgpack.encode(hello)))
    assert rank.said() == Refused(
        f"rank 1 speaks control protocol 7, rank 0 (model worker 0) speaks {PROTOCOL}: install the same "
        "version of jaxlamina on all hosts"
    )
    joining = group.join(server.address, 1)
    server.gather(10)
    joining.client()


def test_a_hello_with_a_field_that_is_not_known(group):
    server = group.server(2)
    rank = group.bare(server.address)
    rank.sock.sendall(rank.hello(1, colour="blue"))
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
    "oversized": b"JXLc" + (HELLO_BYTES + 1).to_bytes(4, "big"),
    "nested": frame(b"\x81\xa1a" + b"\x91" * 60_000),
    "nested hello": frame(b"\x82\xa4type\xa5Hello\xa1x" + b"\x91" * 60_000 + b"\xc0"),
    "half a header": b"JXLc\x05",
    "nothing": b"",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_strangers_do_not_keep_the_group_from_forming(group, garbage):
    server = group.server(2)
    sock = group.bare(server.address).sock
    sock.sendall(garbage)
    if garbage[:4] == b"JXLc"[: len(garbage)] and len(garbage) < 8:
        sock.shutdown(socket.SHUT_WR)
    assert sock.recv(100) == b"", "it is dropped, and gets no answer"
    joining = group.join(server.address, 1)
    server.gather(10)
    joining.client()
    assert group.faults.empty()


STRANGERS = {
    "another job's": (1, CONFIG, b"another job's secret"),
    "no secret": (1, CONFIG, b""),
    "no secret, another configuration": (1, CONFIG | {"dop": "1,1"}, b""),
    "another job's, no such rank": (7, CONFIG, b"x"),
}


@pytest.mark.parametrize(("rank", "config", "secret"), STRANGERS.values(), ids=STRANGERS)
def test_a_process_of_no_job_or_another_is_turned_away_alone(group, rank, config, secret):
    server = group.server(2)
    stranger = group.join(server.address, rank, config=config, secret=secret)
    with pytest.raises(UserError, match="is of another job") as error:
        stranger.client()
    assert "JAXLAMINA_JOB" in str(error.value) and "job_secret_file" in str(error.value)
    assert ("without a proof" in str(error.value)) == bool(secret)
    assert not any(f" {value!r} " in str(error.value) for value in CONFIG.values())
    joining = group.join(server.address, 1)
    server.gather(10)
    joining.client()
    assert group.faults.empty()


def test_a_rank_with_a_secret_does_not_take_rank_0_without_one_for_its_own(group):
    server = group.server(2, secret=b"")
    with pytest.raises(UserError, match="without a proof that it is of this job: .*is of another job"):
        group.join(server.address, 1).client()


def test_without_a_secret_nobody_can_end_the_start_and_what_does_not_fit_is_said(group):
    """Ranks that were started by hand: one of another configuration is as good as a stranger."""
    notes: queue.SimpleQueue[str] = queue.SimpleQueue()
    server = group.server(3, secret=b"", on_refused=notes.put)
    for _ in range(9):
        wrong = group.join(server.address, 2, secret=b"", config=CONFIG | {"max_num_seqs": 9})
        with pytest.raises(UserError, match="max_num_seqs is not the same on rank 0") as error:
            wrong.client()
        assert "8" not in str(error.value)
    assert notes.qsize() == 3 and "max_num_seqs is 9 there and 8 on rank 0" in notes.get()
    assert len(server._strangers) == 3
    ranks = [group.join(server.address, rank, secret=b"") for rank in (1, 2)]
    server.gather(10)
    for rank in ranks:
        rank.client()


def test_what_did_not_fit_is_in_the_line_of_a_rank_that_is_missing(group):
    server = group.server(2, secret=b"")
    group.join(server.address, 1, secret=b"", config=CONFIG | {"max_num_seqs": 9})
    with pytest.raises(
        UserError, match="did not start within 1 s: .*max_num_seqs is 9 there and 8 on rank 0"
    ):
        server.gather(1)


def test_hundreds_of_strangers_make_no_thread_and_keep_nobody_out(group):
    server = group.server(2)
    n_threads = threading.active_count()
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 300
    crowd = [group.raw(server.address) for _ in range(min(1500, room))]
    for sock in crowd:
        sock.sendall(b"JXLc" + HELLO_BYTES.to_bytes(4, "big"))
    assert threading.active_count() == n_threads
    joining = group.join(server.address, 1)
    server.gather(20)
    joining.client()
    assert threading.active_count() <= n_threads + 6 and len(server._door._guests) <= MOST_GUESTS
    assert len(server._strangers) <= 3


def test_a_stranger_that_says_nothing_holds_nobody_up(group):
    server = group.server(2)
    silent = group.raw(server.address)
    joining = group.join(server.address, 1)
    server.gather(5)
    joining.client()
    assert silent.fileno() >= 0


def test_strangers_are_named_when_a_rank_is_missing(group):
    server = group.server(2)
    sock = group.bare(server.address).sock
    sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    assert sock.recv(100) == b""
    with pytest.raises(
        UserError, match=r"but for 127\.0\.0\.1:\d+ \(the stream is none of JaxLamina's: b'SSH-2.0"
    ):
        server.gather(0.2)


def test_messages_in_small_pieces_and_many_at_once(group):
    server = group.server(2)
    rank = group.bare(server.address)
    sock = rank.sock
    for byte in rank.hello(1):
        sock.sendall(bytes([byte]))
    server.gather(10)
    answers = [Prepared(StepShape("decode", b, 1, 16), (), 0.25) for b in range(1, 40)]
    stream = b"".join(map(rank.sealed, answers))
    for at in range(0, 400, 7):
        sock.sendall(stream[at : at + 7])
        time.sleep(0.0005)
    sock.sendall(stream[at + 7 :])
    assert [server.receive(1, Prepared, 5) for _ in answers] == answers


def test_a_message_in_the_same_packet_as_hello_is_not_lost(group):
    server = group.server(3)
    rank = group.bare(server.address)
    rank.sock.sendall(rank.hello(1) + rank.sealed(Fault(1, "rank 1: no such file")))
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
    """Both ways at once, each larger than any socket's buffer: nobody may wait for the other to read
    first."""
    server = group.server(2, heartbeat_s=1)
    process = group.process("client", server.address, 1, heartbeat_s=1)
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
    monkeypatch.setattr(frames, "LARGEST_BYTES", 1000)
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


def test_a_quiet_group_stays(group):
    server = group.server(2, heartbeat_s=0.5)
    joining = group.join(server.address, 1, heartbeat_s=0.5)
    server.gather(5)
    client = joining.client()
    time.sleep(2.5)  # what counts as silent, and a second more
    server.send(1, Bye())
    assert client.receive(1) == Bye()
    assert group.faults.empty() and joining.faults.empty()


def test_each_side_may_have_its_own_heartbeat(group):
    server = group.server(2, heartbeat_s=30)
    joining = group.join(server.address, 1, heartbeat_s=0.5)
    server.gather(5)
    client = joining.client()
    time.sleep(2.5)
    server.send(1, Prepare(SHAPE))
    assert client.receive(1) == Prepare(SHAPE)
    assert joining.faults.empty()


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
        (frame(encode(Bye())), "said Bye instead of Challenge"),
        (frame(encode(CHALLENGE)), "did not say within 0.3 s that it takes this rank in"),
        (frame(encode(CHALLENGE)) + frame(encode(Admitted())), "said Admitted without a proof"),
        (
            frame(encode(CHALLENGE)) + frame(encode(Refused("run x"))),
            "without a proof that it is of this job",
        ),
        (frame(encode(Challenge(PROTOCOL, b"short"))), "a nonce has 32 bytes, not 5"),
        (frame(encode(CHALLENGE))[:-1], "did not say within 0.3 s that it takes this rank in"),
        (None, "has gone: it closed its control connection"),
    ],
    ids=["ssh", "other message", "no answer", "no proof", "refused", "short nonce", "cut off", "closed"],
)
def test_something_else_listens_at_rank_0s_address(group, monkeypatch, answer, said):
    monkeypatch.setattr(client_module, "_RANK_0_FIRST_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        joining = group.join(sockets.address_text(listener.getsockname()), 1, deadline_s=0.3)
        sock, _ = listener.accept()
        with sock:
            if answer is None:
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
