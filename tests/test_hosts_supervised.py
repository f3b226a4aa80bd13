"""A supervised server whose ranks are on two hosts: what happens to the other host, to the starter and to the
cable between them, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from certificates import certificate
from checkpoint_examples import tiny_words_folder
from launch_hosts import Hosts, why_no_hosts
from serving import ROOT, environment
from supervised import (
    ON_CPUS,
    REQUESTS,
    Asked,
    Supervised,
    answers,
    children,
    restarts,
    starter,
    wait_until,
    words_of,
)

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
# All attention is on the other host; a host is lost after three heartbeats.
CLUSTER = {"heartbeat_s": 1, "start_deadline_s": 15, "step_deadline_s": 20, "local_attention": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture
def hosts(tmp_path):
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    with Hosts(tmp_path) as found:
        yield found


def job(hosts, *slots, **changes):
    settings = CLUSTER | {"control": f"{hosts.addresses[0]}:29400"} | changes
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["launch", "--transport", "mpi", *ON_CPUS, *words, "--starter", starter(hosts, *slots)]


@contextlib.contextmanager
def running(hosts, tiny, *options, slots=(1, 1), **changes):
    """The server, what it answers undisturbed, and the same requests under way again."""
    variables = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    server = Supervised.of(job(hosts, *slots, **changes), tiny, options, variables)
    try:
        expected = {name: one.said for name, one in answers(server.port).items()}
        assert all(expected.values())
        asked = {name: Asked(server.port, *request) for name, request in REQUESTS.items()}
        wait_until(lambda: len(asked["greedy"].events) >= 30)
        yield server, expected, asked
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0, "\n".join(server.lines)
        wait_until(lambda: not ranks(hosts, 1), 10)
        assert not list(hosts.memory.glob("jaxlamina-*")), "what is kept goes with the server"
    finally:
        server.close()


def ranks(hosts, side):
    return [pid for pid in hosts.pids(side) if "launch" in words_of(pid)]


# Tokens where KV was kept. The request for log-probabilities begins anew, with 200 tokens at most. Of each of the twelve
# other sequences all is found that was kept, each 16 steps, but for those that were being written.
MOST_AGAIN = 200 + 12 * 32


def n_recomputed(server):
    metrics = server.get("/metrics").decode()
    [n] = re.findall(r"^jaxlamina:recomputed_tokens_total (\S+)$", metrics, re.MULTILINE)
    return float(n)


def all_go_on(server, expected, asked):
    for one in asked.values():
        one.join(150)
    assert {name: one.said for name, one in asked.items()} == expected, "\n".join(server.lines)
    assert len(restarts(server)) >= 1, server.lines


@pytest.mark.timeout(240)
def test_a_rank_that_is_killed_on_the_other_host(hosts, tiny):
    with running(hosts, tiny) as (server, expected, asked):
        [rank] = ranks(hosts, 1)
        assert rank not in children(server.process.pid), "nobody here can wait for it"
        os.kill(rank, signal.SIGKILL)
        all_go_on(server, expected, asked)
        assert ["exit code 3" in line for line in restarts(server)] == [True]


@pytest.mark.timeout(240)
def test_a_starter_that_is_killed(hosts, tiny):
    """The other host's ranks end by themselves; what they kept of the KV is found."""
    with running(hosts, tiny) as (server, expected, asked):
        assert list(hosts.memory.glob("jaxlamina-kv-*/worker0.kv"))
        [rank] = ranks(hosts, 1)
        began = time.monotonic()
        [mpirun] = [pid for pid in children(server.process.pid) if Path(words_of(pid)[0]).name == "mpirun"]
        os.kill(mpirun, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{rank}/exe").exists(), 10)
        print(f"the other host's rank was gone {time.monotonic() - began:.1f} s after mpirun was")
        all_go_on(server, expected, asked)
        assert n_recomputed(server) <= MOST_AGAIN


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("partition", "n_copies"), [("requests", 1), ("heads", 1), ("heads", 0)])
def test_a_host_that_is_lost_with_its_memory(hosts, tiny, tmp_path, partition, n_copies):
    """It has one of two attention workers, and comes back with nothing: its worker's KV was copied, or not. By
    heads all that ranks open themselves is TLS."""
    how = {"dop": "1,2", "partition": partition, "kv_replicas": n_copies}
    if partition == "heads" and shutil.which("openssl") is not None:
        how |= zip(("control_certfile", "control_keyfile"), certificate(tmp_path, "job"), strict=True)
    with running(hosts, tiny, slots=(2, 1), **how) as (server, expected, asked):
        wait_until(lambda: len(asked["greedy"].events) >= 140)
        for pid in hosts.pids(1):
            os.kill(pid, signal.SIGKILL)
        assert len(list(hosts.memory.rglob("*.kv"))) == 1 + n_copies
        shutil.rmtree(hosts.memory)
        hosts.memory.mkdir()
        all_go_on(server, expected, asked)
        n = n_recomputed(server)
        print(f"{n:.0f} tokens were computed again")
        assert n <= MOST_AGAIN if n_copies else n >= 1200


@pytest.mark.timeout(400)
@pytest.mark.parametrize("out_s", [8, 60])
def test_a_cable_that_drops_all_packets(hosts, tiny, out_s):
    """It is noticed by heartbeats, starts fail while it is out, and one does not once it is back."""
    with running(hosts, tiny) as (server, expected, asked):
        hosts.cut()
        began = time.monotonic()
        wait_until(lambda: restarts(server), 30)
        print(f"noticed and ended after {time.monotonic() - began:.1f} s")
        time.sleep(max(0, out_s - (time.monotonic() - began)))
        hosts.mend()
        all_go_on(server, expected, asked)
        print(f"{time.monotonic() - began:.1f} s, {len(restarts(server))} starts")


@pytest.mark.timeout(120)
def test_a_first_rank_that_is_started_elsewhere_is_said(hosts, tiny):
    """Within the deadline, and with what to do; whatever the starter does, nothing of it is left."""
    words = [sys.executable, "-m", "jaxlamina", "launch", *ON_CPUS, "--set", "start_deadline_s=5"]
    words += ["--starter", "sh -c 'sleep 77'", "--", "serve", "--port", "0", "--model", str(tiny)]
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": ROOT, "env": environment()}
    done = subprocess.run(words, check=False, **how)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith(
        "error: rank 0 (model worker 0): has not begun on this host within 5 s: "
    ), done.stderr
    assert "started again" not in done.stderr
