"""TLS between ranks (`jaxlamina.job.tls`): the control channel by it, and who is not let in."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time

import numpy as np
import pytest
from certificates import certificate
from control_group import SHAPE, Group, free_address

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import sockets
from jaxlamina.job.control.messages import Array, Prepare, PutRows, Rows
from jaxlamina.job.tls import tls_of

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
CONTENT = b"what a control message says"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder):
    return certificate(folder, "authority")


def tls(files, authority=None):
    ca = None if authority is None else str(authority[0])
    return tls_of(Cluster(control_certfile=str(files[0]), control_keyfile=str(files[1]), control_cafile=ca))


@pytest.fixture(scope="module")
def own(folder, authority):
    """Of rank 0 and of another rank, by one authority."""
    return [tls(certificate(folder, name, by=authority), authority) for name in ("rank 0", "rank 1")]


@pytest.fixture(scope="module")
def strange(folder):
    """One certificate for all ranks, as of another job."""
    return tls(certificate(folder, "strange"))


@pytest.fixture
def group():
    group = Group()
    yield group
    group.close()


def relayed(address, heard):
    """An address on the way to another one; ``heard`` is what passes there, in both directions."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(source, sink):
        while data := source.recv(1 << 16):
            heard.extend(data)
            sink.sendall(data)
        with contextlib.suppress(OSError):  # it has ended, too
            sink.shutdown(socket.SHUT_WR)

    def run():
        to = sockets.parse_address(address)
        with listener, listener.accept()[0] as near, socket.create_connection(to) as far:
            back = threading.Thread(target=pass_on, args=(far, near), daemon=True)
            back.start()
            pass_on(near, far)
            back.join(10)

    threading.Thread(target=run, daemon=True).start()
    return sockets.address_text(listener.getsockname())


@pytest.mark.parametrize("has_tls", [False, True])
def test_who_is_on_the_way_reads_nothing(group, own, has_tls):
    ours, theirs = own if has_tls else (None, None)
    heard = bytearray()
    server = group.server(2, tls=ours)
    joining = group.join(relayed(server.address, heard), 1, tls=theirs)
    server.gather(10)
    client = joining.client()
    server.send(1, PutRows(Array.of(np.arange(3)), (Array.of(np.frombuffer(CONTENT, np.uint8)),)))
    assert client.receive(10).rows[0].numpy().tobytes() == CONTENT
    assert (CONTENT in heard, b"Hello" in heard) == ((False, False) if has_tls else (True, True))
    server.close(wait_s=0.2)


def test_both_ends_send_large_messages_at_once(group, own):
    """Heartbeats in between; records of TLS and messages do not end together."""
    n, size = 12, 3_000_001
    server = group.server(2, tls=own[0], heartbeat_s=0.2)
    joining = group.join(server.address, 1, tls=own[1], heartbeat_s=0.2)
    server.gather(10)
    client = joining.client()
    slots, noise = Array.of(np.arange(2)), np.random.default_rng(1).integers(0, 255, size, np.uint8)

    def give():
        for i in range(n):
            client.send(Rows((Array.of(np.roll(noise, i)),)))

    def take(found):
        found += [client.receive(60) for _ in range(n)]

    taken = []
    threads = [threading.Thread(target=give), threading.Thread(target=take, args=(taken,))]
    for thread in threads:
        thread.start()
    for i in range(n):
        server.send(1, PutRows(slots, (Array.of(np.roll(noise, -i)),)))
    for i in range(n):
        assert (server.receive(1, Rows, 60).rows[0].numpy() == np.roll(noise, i)).all()
    for thread in threads:
        thread.join(60)
    for i, message in enumerate(taken):
        assert (message.rows[0].numpy() == np.roll(noise, -i)).all()
    time.sleep(0.5)  # heartbeats alone
    server.send(1, Prepare(SHAPE))
    assert client.receive(10) == Prepare(SHAPE)
    server.close(wait_s=0.2)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("own", None, r"speaks TLS, and this rank has no control_certfile: give all ranks one, or none"),
        (None, "own", r"this rank speaks TLS, and rank 0 .* has no control_certfile"),
        ("own", "strange", r"has a certificate that control_cafile here does not know"),
        ("own", "half", r"does not take this rank's TLS \(.*UNKNOWN_CA\): its control_cafile must know"),
    ],
)
def test_who_does_not_fit_is_told_so_in_a_line_and_disturbs_nobody(
    group, own, strange, folder, authority, ours, theirs, said
):
    half = tls(certificate(folder, "half"), authority)  # it knows rank 0, and rank 0 does not know it
    of = {None: None, "own": own[1], "strange": strange, "half": half}
    server = group.server(2, tls=own[0] if ours else None)
    wrong = group.join(server.address, 1, tls=of[theirs])
    with pytest.raises(UserError, match=said) as error:
        wrong.client()
    assert "\n" not in str(error.value)
    right = group.join(server.address, 1, tls=own[1] if ours else None)
    server.gather(10)
    right.client()
    server.close(wait_s=0.2)


def test_junk_instead_of_a_handshake_is_turned_away_and_named(group, own):
    server = group.server(2, tls=own[0])
    junk, silent = group.raw(server.address), group.raw(server.address)
    assert b"Challenge" in junk.recv(1000) and b"Challenge" in silent.recv(1000)
    junk.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
    junk.settimeout(5)
    while junk.recv(1000):  # an alert, and the end
        pass
    with pytest.raises(UserError, match=r"did not start within .*its TLS: "):
        server.gather(0.2)


def test_a_rank_0_that_ends_tells_a_rank_that_it_has_not_let_in(group, own):
    address = free_address()
    server = group.server(3, address, tls=own[0])
    joining = group.join(address, 1, tls=own[1])
    with pytest.raises(UserError, match="did not start"):
        server.gather(0.5)
    with pytest.raises(UserError, match=r"rank 2 .* did not start"):
        joining.client()


def test_files_that_cannot_be_used_are_one_line(folder, authority):
    own, key = (str(file) for file in authority)
    other = str(certificate(folder, "other")[1])
    locked = certificate(folder, "locked", "-passout", "pass:xyz")
    for given, said in (
        ({"control_certfile": f"{own}.not"}, r"control_certfile .*\.not: No such file"),
        ({"control_certfile": own, "control_keyfile": other}, "KEY_VALUES_MISMATCH; they must be"),
        ({"control_certfile": own}, "PEM.*; they must be a certificate and its own key"),
        ({"control_certfile": str(locked[0]), "control_keyfile": str(locked[1])}, "without a passphrase"),
        (
            {"control_certfile": own, "control_keyfile": key, "control_cafile": key},
            "control_cafile .*must hold",
        ),
        ({"control_keyfile": key}, "go with control_certfile"),
    ):
        with pytest.raises(UserError, match=said) as error:
            tls_of(Cluster(**given))
        assert "\n" not in str(error.value)
    assert tls_of(Cluster()) is None
    one = {"control_certfile": own, "control_keyfile": key}
    assert Cluster(**one).as_config() == Cluster().as_config()
