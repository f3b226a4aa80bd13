"""Seals of control frames: a stream that was changed in any way is refused, in both directions, and so is what
real ranks of another job have said; and the file of a job's secret."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from control_group import SECRET, SHAPE, Group, frame
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import sockets
from jaxlamina.job.control.channel import ControlError
from jaxlamina.job.control.frames import FrameError, FrameReader
from jaxlamina.job.control.messages import Bye, Prepare, Prepared, encode
from jaxlamina.job.control.seals import Seals
from jaxlamina.job.secret import secret_of

NONCES = bytes(range(32)), bytes(range(32, 64))
BODIES = st.lists(st.binary(max_size=60), min_size=1, max_size=5)
DOWN = st.booleans()  # from rank 0, or to it


def ends(secret=SECRET, nonces=NONCES, epoch=lambda: 0):
    of_rank_0, of_rank = nonces
    return Seals.of_rank_0(secret, of_rank_0, of_rank, epoch), Seals.of_rank(secret, of_rank, of_rank_0)


def sealed(sealing, bodies):
    found = []
    for body in bodies:
        found.append(b"".join(sealing.frame(body)))
        sealing.sent()
    return found


def both(down, **how):
    """Who seals, and who opens it."""
    rank_0, rank = ends(**how)
    return (rank_0.sealing, rank.unsealing) if down else (rank.sealing, rank_0.unsealing)


def taken(unsealing, stream):
    """What is let through; why no more is, "" where the stream is at its end, or cut off there."""
    reader, found = FrameReader(), []
    reader.feed(stream)
    try:
        for frame in reader.frames():
            found.append(bytes(unsealing.body(frame)))
    except FrameError as error:
        return found, str(error)
    return found, "" if reader.is_between_frames else "cut off"


@given(BODIES, DOWN)
def test_a_correct_stream_passes(bodies, down):
    sealing, unsealing = both(down)
    assert taken(unsealing, b"".join(sealed(sealing, bodies))) == (bodies, "")


@given(BODIES, DOWN, st.data())
def test_any_flipped_bit_ends_it(bodies, down, data):
    sealing, unsealing = both(down)
    frames = [bytearray(frame) for frame in sealed(sealing, bodies)]
    at = data.draw(st.integers(0, len(frames) - 1))
    bit = data.draw(st.integers(0, 8 * len(frames[at]) - 1))
    frames[at][bit // 8] ^= 1 << bit % 8
    found, why = taken(unsealing, b"".join(frames))
    assert found == bodies[:at] and why


@given(BODIES, DOWN, st.data())
def test_any_repetition_gap_or_other_order_ends_it(bodies, down, data):
    sealing, unsealing = both(down)
    frames = sealed(sealing, bodies)
    order = data.draw(st.lists(st.integers(0, len(frames) - 1), max_size=8))
    n = next((i for i, number in enumerate(order) if i != number), len(order))
    found, why = taken(unsealing, b"".join(frames[i] for i in order))
    assert found == bodies[:n]
    assert why == (
        "" if n == len(order) else f"message {order[n]} came again or out of order: message {n} was due"
    )


@given(BODIES, DOWN, st.data())
def test_what_is_cut_off_does_not_pass(bodies, down, data):
    sealing, unsealing = both(down)
    frames = sealed(sealing, bodies)
    stream = b"".join(frames)
    end = data.draw(st.integers(0, len(stream)))
    whole = [i for i in range(len(frames) + 1) if len(b"".join(frames[:i])) <= end][-1]
    assert taken(unsealing, stream[:end])[0] == bodies[:whole]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_an_earlier_epoch_is_refused(epochs):
    left = iter(epochs)
    sealing, unsealing = both(True, epoch=lambda: next(left))
    found, why = taken(unsealing, b"".join(sealed(sealing, [b"x"] * len(epochs))))
    n = next((i for i in range(1, len(epochs)) if epochs[i] < epochs[i - 1]), len(epochs))
    assert len(found) == n and unsealing.epoch == epochs[n - 1]
    late = (
        ""
        if n == len(epochs)
        else f"a message of epoch {epochs[n]} came, and the job is in epoch {epochs[n - 1]}"
    )
    assert why == late


@pytest.mark.parametrize(
    "other",
    [
        both(True, secret=b"another secret"),
        both(True, secret=b""),
        both(True, nonces=(NONCES[0], bytes(32))),
        both(True, nonces=(bytes(32), NONCES[1])),
        both(False),
    ],
    ids=["secret", "no secret", "the rank's nonce", "rank 0's nonce", "the rank's own words"],
)
def test_what_others_have_sealed_is_refused(other):
    _, unsealing = both(True)
    found, why = taken(unsealing, sealed(other[0], [b"x"])[0])
    assert found == [] and "its proof does not fit" in why


def test_ranks_follow_the_epoch_of_rank_0():
    now = [0]
    rank_0, rank = ends(epoch=lambda: now[0])
    for epoch in (0, 4):
        now[0] = epoch
        assert taken(rank.unsealing, sealed(rank_0.sealing, [b"x"])[0]) == ([b"x"], "")
        assert taken(rank_0.unsealing, sealed(rank.sealing, [b"x"])[0]) == ([b"x"], "")
        assert rank_0.unsealing.epoch == epoch


# Real ends


@pytest.fixture
def group():
    group = Group()
    yield group
    group.close()


class Relay:
    """Somebody on the way between a rank and rank 0: hears all and can say anything. ``heard``: to rank 0, and
    from it."""

    def __init__(self, address):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = sockets.address_text(self._listener.getsockname())
        self._target = sockets.parse_address(address)
        self.heard = [bytearray(), bytearray()]
        self.ends = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        rank, _ = self._listener.accept()
        rank_0 = socket.create_connection(self._target)
        self.ends = [rank_0, rank]
        for way, source in enumerate((rank, rank_0)):
            threading.Thread(target=self._pass_on, args=(way, source), daemon=True).start()

    def _pass_on(self, way, source):
        try:
            while data := source.recv(65536):
                self.heard[way] += data
                self.ends[way].sendall(data)
            self.ends[way].shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self):
        for sock in (self._listener, *self.ends):
            sock.close()


@pytest.fixture
def relayed(group):
    """A job of two whose messages go over somebody else, and that somebody."""
    relays = []

    def make():
        server = group.server(2)
        relay = Relay(server.address)
        relays.append(relay)
        joining = group.join(relay.address, 1)
        server.gather(10)
        client = joining.client()
        server.send(1, Prepare(SHAPE))
        assert client.receive(5) == Prepare(SHAPE)
        client.send(Prepared(SHAPE, (), 0.5))
        server.receive(1, Prepared, 5)
        return server, client, relay, joining.faults

    yield make
    for relay in relays:
        relay.close()


def frames_in(stream):
    """Where each frame of a recorded stream ends."""
    reader, whole = FrameReader(), bytes(stream)
    reader.feed(whole)
    sizes = [len(frame.body) + (8 if frame.seal is None else 36) for frame in reader.frames()]
    return [whole[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]


def test_the_secret_does_not_travel(relayed):
    _, _, relay, _ = relayed()
    for heard in relay.heard:
        assert len(heard) > 100 and SECRET not in heard and SECRET.hex().encode() not in heard


def test_a_rank_of_an_earlier_job_is_not_let_in_by_what_it_said(group, relayed):
    _, _, relay, _ = relayed()
    notes = []
    server = group.server(2, on_refused=notes.append)
    bare = group.bare(server.address)
    bare.sock.sendall(relay.heard[0])
    assert "is of another job" in bare.said().reason
    joining = group.join(server.address, 1)
    server.gather(10)
    joining.client()
    assert len(notes) == 1 and "is of another job" in notes[0]


def test_an_earlier_rank_0_is_not_obeyed(group, relayed):
    _, _, relay, _ = relayed()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        joining = group.join(sockets.address_text(listener.getsockname()), 1)
        sock, _ = listener.accept()
        with sock:
            sock.sendall(relay.heard[1])
            with pytest.raises(UserError, match="does not know this job's secret .*its proof does not fit"):
                joining.client()


@pytest.mark.parametrize("to_rank_0", [True, False])
@pytest.mark.parametrize("earlier", [True, False], ids=["of an earlier job", "of this job"])
def test_what_is_said_again_on_the_way_ends_the_connection(group, relayed, to_rank_0, earlier):
    """The bytes of real messages, put between the real ones of the same direction."""
    _, _, recorded, _ = relayed()
    _, _, relay, faults_of_rank = relayed()
    way, faults = (0, group.faults) if to_rank_0 else (1, faults_of_rank)
    relay.ends[way].sendall(frames_in((recorded if earlier else relay).heard[way])[-1])
    rank, line = faults.only()
    assert rank == way ^ 1 and "has gone: it sent what cannot be read (message " in line
    assert ("its proof does not fit" if earlier else "came again or out of order") in line


def test_somebody_on_the_way_cannot_end_a_job_well(group, relayed):
    """A Bye without a proof is no Bye."""
    _, client, relay, faults = relayed()
    relay.ends[1].sendall(frame(encode(Bye())))
    assert "a message without a proof" in faults.only()[1]
    with pytest.raises(ControlError, match="without a proof"):
        client.receive(5)


def test_an_answer_for_the_model_before_is_refused(relayed):
    server, client, _, _ = relayed()
    client.send(Prepared(SHAPE, (), 0.5))
    until = time.monotonic() + 5
    while server._members[1].inbox.empty() and time.monotonic() < until:
        time.sleep(0.01)
    server.epoch += 1
    with pytest.raises(ControlError, match="sent Prepared of epoch 0, and the job is in epoch 1"):
        server.receive(1, Prepared, 5)


# The file


def write(folder, content=b"0123456789abcdef\n", mode=0o600):
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return Cluster(job_secret_file=str(path))


def test_a_secret_is_of_the_file_or_of_the_environment(tmp_path):
    assert secret_of(Cluster(), {}) == b""
    assert secret_of(Cluster(), {"JAXLAMINA_JOB": "word"}) == b"word"
    assert secret_of(write(tmp_path), {"JAXLAMINA_JOB": "word"}) == b"0123456789abcdef"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610])
def test_a_file_that_others_may_read_or_change_is_refused(tmp_path, mode):
    cluster = write(tmp_path, mode=mode)
    with pytest.raises(UserError, match=f"chmod 600 {tmp_path}/secret"):
        secret_of(cluster, {})


@pytest.mark.parametrize("content", [b"", b"123456789012345 \n", b"x" * 70_000])
def test_a_secret_too_short_or_too_long_is_refused(tmp_path, content):
    with pytest.raises(UserError, match="must hold 16 to 65536 bytes"):
        secret_of(write(tmp_path, content), {})


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (
        ("pipe", "is no file"),
        ("none", "No such file"),
        (".", "[Ii]s a directory|is no file"),
    ):
        with pytest.raises(UserError, match=why):
            secret_of(Cluster(job_secret_file=str(tmp_path / name)), {})


def test_ranks_may_have_the_file_at_different_places(tmp_path):
    one, other = Cluster(job_secret_file="/a"), Cluster(job_secret_file="/b")
    assert one.as_config() == other.as_config() == Cluster().as_config()
