"""Nothing is lost: supervised servers whose processes are killed or stopped while clients stream.

Scenarios are data (tests/faults/): real processes, a small model, and answers compared with those before the
fault, byte by byte but for ids and times.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from checkpoint_examples import tiny_words_folder
from fault_runs import ON_ONE_GPU, Run, fill, limit_memory, small_disk, why_no_small_disk
from fault_scenarios import SCENARIOS
from msgspec.structs import replace
from serving import ROOT
from supervised import (
    DEADLINE_S,
    ON_CPUS,
    REQUESTS,
    Asked,
    N,
    Supervised,
    answers,
    find,
    policy_once,
    restarts,
    wait_until,
    words_of,
)

SOAK_S = float(os.environ.get("SOAK_S", "120"))  # of load with faults
RANKS = ["launch", "--dop", "1,2", "--transport", "xla", "--local-attention", "0", *ON_CPUS]
FAULT_EVERY_S = float(os.environ.get("FAULT_EVERY_S", "13"))  # on average

ON_GPUS = (
    *("server-killed", "server-spins", "spare-takes-over", "attention-worker-killed", "mpi-rank-killed"),
    *("prefill-worker-killed", "attention-worker-of-two-by-two-killed", "replica-killed"),
    *("replicas-of-int8-attention-worker-killed", "mpi-spare-takes-over"),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_words_folder(folder, max_position_embeddings=2048)


def marks(scenario):
    return [getattr(pytest.mark, name) for name in ("slow", "mpi") if getattr(scenario, name)]


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(s)) for n, s in SCENARIOS.items()])
def test_nothing_is_lost(name, tiny, tmp_path):
    with contextlib.ExitStack() as cleanups:
        Run(SCENARIOS[name], tiny, tmp_path, cleanups).run()


@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.timeout(4 * DEADLINE_S)
@pytest.mark.parametrize("name", ON_GPUS)
def test_nothing_is_lost_on_a_gpu(name, tiny, tmp_path):
    """Of one model on one GPU: kept KV, and answers, as on CPUs. Who is the first to notice may be another."""
    scenario = SCENARIOS[name]
    scenario = replace(scenario, check=replace(scenario.check, cause=""))
    with contextlib.ExitStack() as cleanups:
        Run(scenario, tiny, tmp_path, cleanups, ON_ONE_GPU).run()


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_server_that_gets_no_more_memory_is_started_again(tiny):
    """The program of a long prompt is not compiled yet, and the host gives nothing for it."""
    server = Supervised.of([], tiny, [])
    long = "/v1/completions", {"prompt": "w1 w2 w3 " * 150, "temperature": 0, "max_tokens": 5}
    try:
        expected = {name: one.said for name, one in answers(server.port).items()}
        asked = {name: Asked(server.port, *request) for name, request in REQUESTS.items()}
        wait_until(lambda: len(asked["greedy"].events) >= 30)
        pid = find("server", server.process.pid)
        limit_memory(pid, spare=False)
        asked["long"] = Asked(server.port, *long)
        for one in asked.values():
            one.join(DEADLINE_S)
        said = {name: one.said for name, one in asked.items()}
        assert asked["long"].status == 200 and said.pop("long") and said == expected
        assert len(restarts(server)) == 1
    finally:
        server.close()


@pytest.mark.skipif(why_no_small_disk() is not None, reason=why_no_small_disk() or "")
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("job", [[], pytest.param(RANKS, marks=pytest.mark.slow)], ids=["one", "ranks"])
def test_a_server_whose_memory_for_kept_kv_is_full_goes_on(job, tiny, tmp_path):
    """Without keeping, which it says once; and a fault then costs time alone."""
    with contextlib.ExitStack() as cleanups:
        cleanups.enter_context(small_disk(tmp_path / "kept"))
        server = Supervised.of(job, tiny, ["--kept-kv-folder", str(tmp_path / "kept")])
        cleanups.callback(server.close)

        def counted(name):
            metrics = server.get("/metrics").decode()
            return float(re.search(rf"^jaxlamina:{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)[1])

        def says_full():
            return [line for line in server.lines if "the memory for kept KV is full" in line]

        # Long ones: they still write when the fault comes.
        requests = {
            name: (path, body | {key: N for key in ("max_tokens", "max_output_tokens") if key in body})
            for name, (path, body) in REQUESTS.items()
        }
        asked = {name: Asked(server.port, *request) for name, request in requests.items()}
        wait_until(lambda: len(asked["greedy"].events) >= 60)
        assert not says_full() and counted("kept_kv_lost_tokens_total") == 0
        fill(tmp_path / "kept")
        wait_until(lambda: len(asked["greedy"].events) >= 120)
        # Another thread writes, and so finds out.
        wait_until(lambda: counted("kept_kv_lost_tokens_total") > 50)
        wait_until(says_full)
        assert 1 <= len(says_full()) <= (2 if job else 1) and not restarts(server), "\n".join(server.lines)
        assert "No space left on device" in says_full()[0]
        os.kill(find("server" if not job else "rank 1", server.process.pid), signal.SIGKILL)
        for one in asked.values():
            one.join(DEADLINE_S)
        assert len(restarts(server)) == 1, "\n".join(server.lines)
        assert counted("recomputed_tokens_total") > 600
        said = {name: one.said for name, one in asked.items()}
        assert said == {name: one.said for name, one in answers(server.port, requests).items()}


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_supervisor_that_gets_no_more_memory_refuses_what_it_cannot_take(tiny, tmp_path):
    """Far more clients come than it has memory for: each is answered in whole, or told to come again."""
    server = Supervised.of([], tiny, ["--journal", str(tmp_path)])
    try:
        expected = {name: one.said for name, one in answers(server.port).items()}
        asked = [(name, Asked(server.port, *request)) for name, request in REQUESTS.items()]
        wait_until(lambda: all(one.events for name, one in asked if one.body.get("stream")))
        limit_memory(server.process.pid, spare=True)
        for _ in range(48):
            asked += [(name, Asked(server.port, *request)) for name, request in REQUESTS.items()]
        time.sleep(5)
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        for _, one in asked:
            one.join(DEADLINE_S)
        taken = [(name, one.said) for name, one in asked if one.status != 503]
        assert all(said == expected[name] for name, said in taken)
        assert len(REQUESTS) < len(taken) < len(asked)
        assert server.process.poll() is None and not restarts(server)
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_supervisor_that_has_used_up_its_reserve_loses_nothing(tiny, tmp_path):
    """Bodies come in that it has let in before, and that it has no memory for. It goes on, or the next one
    does."""
    how = [], tiny, ["--journal", str(tmp_path)]
    server = Supervised.of(*how)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"
    with contextlib.ExitStack() as cleanups:
        cleanups.callback(server.close)
        expected = {name: one.said for name, one in answers(server.port).items()}
        to = "127.0.0.1", server.port
        bodies = [cleanups.enter_context(socket.create_connection(to, timeout=10)) for _ in range(30)]
        for body in bodies:
            body.sendall(head + b"1")
        asked = {name: Asked(server.port, *request) for name, request in REQUESTS.items()}
        wait_until(lambda: all(one.events for one in asked.values() if one.body.get("stream")))
        limit_memory(server.process.pid, spare=True)
        for body in bodies:
            with contextlib.suppress(OSError):
                body.sendall(b"1" * 3_000_000)
        time.sleep(3)
        has_ended = server.process.poll() is not None
        if has_ended:
            server = Supervised.of(*how)
            cleanups.callback(server.close)
        else:
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        n_broke = 0
        for name, one in asked.items():
            one.join(DEADLINE_S)
            n_broke += one.broke
            if one.broke and one.key:
                one.goes_on(server.port)
            # Whose client does not know its key has been told nothing yet.
            assert one.said == expected[name] or not one.key, name
        assert sum(bool(one.key) for one in asked.values()) >= 6
        print(f"{has_ended=}, {n_broke} connections broke")


FAULTY = policy_once("Faulty", "fault", 'raise RuntimeError("a policy\'s own fault")')


@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_server_whose_engine_has_failed_is_started_again(tiny, tmp_path):
    """It answers, and says that it takes no requests any more."""
    (tmp_path / "faulty_policy.py").write_text(FAULTY)
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    options = ["--scheduling-policy", "faulty_policy:Faulty"]
    server = Supervised.of([], tiny, options, variables)
    try:
        expected = {name: one.said for name, one in answers(server.port).items()}
        asked = {name: Asked(server.port, *request) for name, request in REQUESTS.items()}
        wait_until(lambda: len(asked["greedy"].events) >= 30)
        (tmp_path / "fault").touch()
        for one in asked.values():
            one.join(DEADLINE_S)
        assert {name: one.said for name, one in asked.items()} == expected
        assert ["a policy's own fault" in line for line in restarts(server)] == [True]
        metrics = server.get("/metrics").decode()
        assert 'jaxlamina:recoveries_total{cause="failed"} 1.0' in metrics
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(900 + 2 * SOAK_S)
@pytest.mark.parametrize(
    "job", [[], ["launch", "--local-attention", "0", "--dop", "1,1", "--transport", "xla"]]
)
def test_random_faults_under_load(job, tiny, tmp_path):
    """Some minutes of clients that ask again and again, and every 13 seconds a process that is killed or
    stopped: every answer is the one that it was, and the supervisor does not grow. What is printed at the end
    compares answers a second with those before the faults."""
    rng = random.Random(7)
    options = ["--stuck-after", "5", "--journal", str(tmp_path)]
    server = Supervised.of([*job, *(ON_CPUS if job else ())], tiny, options)
    whom = ["rank 0", "rank 1", "starter"] if job else ["server"]
    try:
        expected = {name: one.said for name, one in answers(server.port).items()}
        over, wrong, n_answers = threading.Event(), [], Counter()

        def client(name):
            while not over.is_set():
                one = Asked(server.port, *REQUESTS[name])
                one.join(DEADLINE_S)
                n_answers[name] += 1
                if one.is_alive() or one.said != expected[name]:
                    wrong.append((name, one.status, one.said[-2:]))

        ready = []  # whether the job was, every so often

        def look():
            while not over.is_set():
                ready.append(server.request("GET", "/health")[0] == 200)
                time.sleep(0.2)

        clients = [threading.Thread(target=client, args=(name,), daemon=True) for name in REQUESTS]
        for one in clients:
            one.start()
        time.sleep(SOAK_S / 10)
        quiet_rate = n_answers.total() / (SOAK_S / 10)
        n_answers.clear()
        watching = threading.Thread(target=look, daemon=True)
        watching.start()
        sizes, n_faults = [], 0
        began = time.monotonic()
        while time.monotonic() < began + SOAK_S and not wrong:
            time.sleep(FAULT_EVERY_S * rng.uniform(0.5, 1.5))
            # A stopped process of a job that is only starting is not looked for before --start-timeout.
            is_ready = server.request("GET", "/health")[0] == 200
            number = rng.choice([signal.SIGKILL, signal.SIGSTOP]) if is_ready else signal.SIGKILL
            with contextlib.suppress(StopIteration, AssertionError, ProcessLookupError):
                chosen = find(rng.choice(whom), server.process.pid)
                if number == signal.SIGKILL or "launch.local" not in words_of(chosen):
                    os.kill(chosen, number)
                    n_faults += 1
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            sizes.append(int(re.search(r"VmRSS:\s+(\d+)", status)[1]))
        took_s = time.monotonic() - began
        rate = n_answers.total() / took_s
        over.set()
        for one in (*clients, watching):
            one.join(DEADLINE_S)
        assert not wrong
        stalls = re.search(r"jaxlamina:recovery_stall_seconds_sum (\S+)", server.get("/metrics").decode())
        still = float(stalls[1]) / took_s / len(clients)  # of a client's time
        assert len(restarts(server)) >= n_faults // 2 and min(n_answers.values()) >= 2
        assert max(sizes) < sizes[0] + 100_000  # answers are kept for a while, 64 MiB of them at most
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0
        share = sum(ready) / len(ready)
        print(
            f"{n_faults} faults, {len(restarts(server))} recoveries, {n_answers.total()} answers; ready "
            f"{share:.3f} of the time, streams stood still for {still:.3f} of it; answers a second "
            f"{rate / quiet_rate:.3f} of those before, {rate / quiet_rate / (1 - still):.3f} of what that allows; "
            f"kB: {sizes}"
        )
    finally:
        server.close()
