"""Copies of kept KV on other hosts: which rank holds whose, and that no copy says what it has not, whoever is
killed when."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import time

import numpy as np
import pytest
from certificates import certificate
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from jaxlamina.job.tls import tls_of
from jaxlamina.kv.copies import copy_holders
from jaxlamina.ranks import kv_copies
from jaxlamina.ranks.kv_copies import CopyHolder, Copying
from jaxlamina.workers.kept_kv import KeptKV

SECRET = b"of one job" * 3
ROW_BYTES, N_PLACES = 2**14, 200
HOW = {"secret": SECRET, "heartbeat_s": 5.0}


# --- which rank ---


@given(hosts=st.lists(st.sampled_from("abc"), min_size=1, max_size=9), n_model=st.integers(0, 4))
def test_a_copy_is_on_another_host(hosts, n_model):
    """Attention workers go first, and share copies out; only where all are on one host there is none."""
    others, keepers = list(range(len(hosts)))[:n_model], list(range(len(hosts)))[n_model:]
    found = copy_holders(hosts, keepers, others)
    for rank in keepers:
        elsewhere = [r for r in range(len(hosts)) if hosts[r] != hosts[rank]]
        assert (rank in found) == bool(elsewhere)
        if elsewhere:
            assert found[rank] in elsewhere
            assert (found[rank] in keepers) == any(r in keepers for r in elsewhere)
    named = {"a": "x", "b": "y", "c": "z"}
    assert copy_holders([named[host] for host in hosts], keepers, others) == found


def test_copies_are_shared_out():
    assert copy_holders("mabab", [1, 2, 3, 4], [0]) == {1: 2, 2: 3, 3: 4, 4: 1}
    assert copy_holders("maabb", [1, 2, 3, 4], [0]) == {1: 3, 2: 4, 3: 1, 4: 2}
    assert copy_holders("mmaa", [2, 3], [0, 1]) == {2: 0, 3: 1}
    assert copy_holders("ab", [1], [0]) == {1: 0}
    assert copy_holders("aaa", [1, 2], [0]) == {}


# --- rows ---


def own(folder, n_places=N_PLACES, identity="one"):
    return KeptKV(folder / "worker0.kv", ROW_BYTES, identity, n_places, 1)


def put(kept, places, first_mark):
    """Rows that their marks say."""
    marks = np.arange(first_mark, first_mark + len(places), dtype=np.uint64)
    kept.put(np.asarray(places), marks, [rows_of(marks)])


def rows_of(marks):
    return np.broadcast_to((marks % 251).astype(np.uint8)[:, None], (len(marks), ROW_BYTES))


def check_rows(kept, least=0):
    """That each mark has its row."""
    held = np.flatnonzero(kept.marks)
    assert len(held) >= least
    assert (kept.rows_at(held) == rows_of(kept.marks[held])).all()


def wait_until(holds, deadline_s=20):
    until = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.01)


def copy_of(folder):
    return KeptKV(folder / "worker0.copy.kv", ROW_BYTES, "one", N_PLACES, 1)


@pytest.fixture
def holder(tmp_path):
    folder = tmp_path / "other host"
    found = CopyHolder(folder, "127.0.0.1", n_sharing=1, **HOW)
    yield found
    found.close()


def copying(holder, secret=SECRET, **how):
    return Copying(holder.address, 1, secret, 5.0, "rank 2", wait_s=10, **how)


def begun(holder, kept):
    """As a rank does it; ``kept(n)`` opens its file, new with n places."""
    found = copying(holder)
    n = found.find("worker0", "one", ROW_BYTES)
    opened = kept(n or N_PLACES)
    found.begin(opened)
    return found, opened


def test_what_a_host_loses_comes_from_the_copy(holder, tmp_path):
    first, kept = begun(holder, lambda n: own(tmp_path, n))
    put(kept, range(20, 120), 1)
    put(kept, range(100, 150), 500)
    there = holder._guests["worker0"].kept
    wait_until(lambda: (there.marks == kept.marks).all())
    check_rows(there, 130)
    marks = kept.marks.copy()
    first.close()
    kept.close()
    (tmp_path / "worker0.kv").unlink()
    second, again = begun(holder, lambda n: own(tmp_path, n))
    assert (again.marks == marks).all()
    check_rows(again, 130)
    # And is copied on.
    put(again, range(10), 900)
    wait_until(lambda: (holder._guests["worker0"].kept.marks == again.marks).all())
    second.close()
    again.close()


def test_a_copy_that_was_lost_or_is_behind_is_made_again(holder, tmp_path):
    kept = own(tmp_path)
    put(kept, range(150), 1)
    first, _ = begun(holder, lambda n: kept)
    wait_until(lambda: (holder._guests["worker0"].kept.marks == kept.marks).all())
    first.close()
    wait_until(lambda: not holder._guests)
    put(kept, range(60), 700)  # while there was no connection
    second, _ = begun(holder, lambda n: kept)
    wait_until(lambda: (holder._guests["worker0"].kept.marks == kept.marks).all())
    check_rows(holder._guests["worker0"].kept, 150)
    second.close()
    kept.close()


def test_other_weights_take_the_place_of_a_copy(holder, tmp_path):
    first, kept = begun(holder, lambda n: own(tmp_path, n))
    put(kept, range(50), 1)
    second = copying(holder)
    assert second.find("worker0", "two", ROW_BYTES) == 0
    (tmp_path / "two").mkdir()
    other = own(tmp_path / "two", 30, "two")
    second.begin(other)
    put(other, range(30), 300)
    wait_until(lambda: (holder._guests["worker0"].kept.marks == other.marks).all())
    assert holder._guests["worker0"].kept.n_places == 30
    for one in (first, second, kept, other):
        one.close()


def hold(folder, address, stop):
    found = CopyHolder(folder, "127.0.0.1", n_sharing=1, **HOW)
    address.put(found.address)
    stop.wait()


def keep_for_ever(folder, address, ready):
    found = Copying(address, 1, SECRET, 5.0, "rank 2")
    kept = own(folder, found.find("worker0", "one", ROW_BYTES) or N_PLACES)
    found.begin(kept)
    n = 0
    while True:
        n += 1
        put(kept, range(n % 7, N_PLACES, 7), 1 + n * N_PLACES)
        ready.set()
        time.sleep(0.001)


@pytest.mark.parametrize("killed", ["keeper", "holder"])
def test_a_process_that_is_killed_leaves_no_place_that_says_what_it_has_not(killed, tmp_path):
    context = multiprocessing.get_context("spawn")
    address, stop, ready = context.Queue(), context.Event(), context.Event()
    (tmp_path / "a").mkdir()
    holds = context.Process(target=hold, args=(tmp_path / "b", address, stop), daemon=True)
    holds.start()
    at = address.get(timeout=60)
    keeps = context.Process(target=keep_for_ever, args=(tmp_path / "a", at, ready), daemon=True)
    keeps.start()
    try:
        assert ready.wait(60)
        time.sleep(0.5)
        os.kill({"keeper": keeps, "holder": holds}[killed].pid, signal.SIGKILL)
        time.sleep(0.2)
    finally:
        for process in (keeps, holds):
            process.kill()
            process.join(20)
    for kept in (own(tmp_path / "a"), copy_of(tmp_path / "b")):
        check_rows(kept, N_PLACES // 2)
        kept.close()


# --- strangers, and what does not fit ---


def test_who_does_not_know_the_secret_is_turned_away(holder):
    with pytest.raises(UserError, match="without a proof that it is of this job"):
        copying(holder, b"another secret")
    with pytest.raises(UserError, match="needs a secret"):
        CopyHolder(holder._folder, "127.0.0.1", b"", 5.0, 1)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_copies_by_tls(tmp_path):
    files = map(str, certificate(tmp_path, "job"))
    tls = tls_of(Cluster(**dict(zip(("control_certfile", "control_keyfile"), files, strict=True))))
    holder = CopyHolder(tmp_path / "other host", "127.0.0.1", n_sharing=1, tls=tls, **HOW)
    with pytest.raises(UserError, match="rank 2 .* speaks TLS, and this rank has no control_certfile"):
        copying(holder)
    found, kept = copying(holder, tls=tls), own(tmp_path)
    assert found.find("worker0", "one", ROW_BYTES) == 0
    found.begin(kept)
    put(kept, range(150), 1)
    wait_until(lambda: (holder._guests["worker0"].kept.marks == kept.marks).all())
    check_rows(holder._guests["worker0"].kept, 150)
    for one in (found, kept, holder):
        one.close()


ROWS = np.zeros((2, ROW_BYTES), np.uint8)
MARKS = np.ones(2, np.uint64)


@pytest.mark.parametrize(
    "message",
    [
        m.PutCopy(*map(m.Array.of, (np.asarray([0, N_PLACES]), MARKS, ROWS))),
        m.PutCopy(*map(m.Array.of, (np.asarray([-1, 0]), MARKS, ROWS))),
        m.PutCopy(*map(m.Array.of, (np.asarray([0, 1]), MARKS, ROWS[:, :8]))),
        m.PutCopy(*map(m.Array.of, (np.asarray([0, 1]), MARKS[:1], ROWS))),
        m.PutCopy(*map(m.Array.of, (np.asarray([0.0, 1.0]), MARKS, ROWS))),
        m.TakeKept(m.Array.of(np.asarray([N_PLACES]))),
        m.TakeKept(m.Array.of(np.zeros(2**15, np.int64))),
        m.OpenCopy("../worker0", "one", ROW_BYTES, N_PLACES),
        m.OpenCopy("worker0", "one", 0, N_PLACES),
        m.OpenCopy("worker0", "one", ROW_BYTES, -1),
        m.Bye(),
    ],
)
def test_what_does_not_fit_ends_its_connection_alone(holder, tmp_path, message, capsys):
    first, kept = begun(holder, lambda n: own(tmp_path, n))
    put(kept, range(100), 1)
    wait_until(lambda: (holder._guests["worker0"].kept.marks == kept.marks).all())
    first._connection.send(message)
    wait_until(lambda: not holder._guests)
    first.close()
    assert capsys.readouterr().err.startswith("note: a copy of another rank's KV is not kept any more: ")
    second, _ = begun(holder, lambda n: kept)
    check_rows(holder._guests["worker0"].kept, 100)
    second.close()
    kept.close()


def test_a_copy_without_memory_is_none(holder, tmp_path):
    """More places than a quarter of the memory has: the keeper is told, and goes on."""
    found = copying(holder)
    assert found.find("worker0", "one", ROW_BYTES) == 0
    assert len(found._opened(2**40)) == 0
    assert not list(holder._folder.glob("*.kv"))
    found.close()


def test_a_holder_that_is_not_there_is_said_in_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match="did not say within 0.3 s"):
            Copying(address, 1, SECRET, 5.0, "rank 2", wait_s=0.3)
    with pytest.raises(UserError, match="was not reached"):
        Copying(address, 1, SECRET, 5.0, "rank 2", wait_s=0.3)


def test_a_holder_that_stops_answering_is_said_in_time(holder, monkeypatch):
    monkeypatch.setattr(kv_copies, "_ANSWER_S", 0.3)
    monkeypatch.setattr(CopyHolder, "open", lambda *_: time.sleep(1) or np.empty(0, np.uint64))
    found = copying(holder)
    with pytest.raises(UserError, match="did not answer"):
        found.find("worker0", "one", ROW_BYTES)
    found.close()
