"""Nothing is lost: supervised servers whose processes are killed or stopped while clients stream.

Scenarios are data (tests/faults/): real processes, a small model, and answers compared with those before the
fault, byte by byte but for ids and times.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import sys
import threading
import time
import tomllib
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from checkpoint_examples import tiny_words_folder
from serving import WORDS_TEMPLATE, Server

FOLDER = Path(__file__).parent / "faults"
DEADLINE_S = 150
ON_CPUS = ("--set", "model_platform=cpu", "--set", "attention_platform=cpu")
N = 120
SOAK_S = float(os.environ.get("SOAK_S", "120"))  # of load with faults
LONG = {"max_tokens": N, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
# (path, body): streams of several kinds, and answers in one piece.
REQUESTS = {
    "greedy": ("/v1/completions", {"prompt": "w1 w2 w3", "temperature": 0, "stream": True, **LONG}),
    "seeded": ("/v1/completions", {"prompt": "w4 w5", "seed": 5, "stream": True, **SAMPLED, **LONG}),
    "whole": ("/v1/completions", {"prompt": "w7 w8 w9", "temperature": 0, **LONG}),
    "penalties": (
        "/v1/completions",
        {"prompt": "w9", "seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.2, "stream": True}
        | SAMPLED
        | LONG,
    ),
    "two of two": (
        "/v1/completions",
        {"prompt": ["w1", "w2 w3"], "n": 2, "seed": 8, "stream": True, **SAMPLED, "max_tokens": 60}
        | {"ignore_eos": True},
    ),
    "logprobs": (
        "/v1/completions",
        {"prompt": "w5", "temperature": 0, "logprobs": 2, "stream": True, "max_tokens": 60}
        | {"ignore_eos": True},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "w1 w4"}], "temperature": 0, "stream": True, **LONG},
    ),
    "response": (
        "/v1/responses",
        {"input": "w6 w2", "temperature": 0, "stream": True, "max_output_tokens": 60, "ignore_eos": True},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_words_folder(folder, max_position_embeddings=2048)


class Supervised(Server):
    """`jaxlamina … serve --supervise` on a port; `wait_for` reads its stderr."""

    @classmethod
    def of(cls, job, model, options):
        of_model = ("--model", str(model), "--max-num-seqs", "16", "--max-model-len", "512", "--no-warm-up")
        of_model += ("--chat-template", WORDS_TEMPLATE)
        words = [sys.executable, "-m", "jaxlamina", *job, *(("--",) if job else ()), "serve", "--supervise"]
        server = cls.start([*words, "--port", "0", *of_model, *options], start_new_session=True)
        server.port = int(server.wait_for("serving ").rpartition(":")[2])
        server.wait_for("ready: ")
        return server


def children(pid):
    """All processes below one."""
    found, left = [], [pid]
    while left:
        for task in Path(f"/proc/{left.pop()}/task").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                new = [int(x) for x in (task / "children").read_text().split()]
                found += new
                left += new
    return found


def words_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def find(whom, supervisor):
    """The process that a scenario names."""
    if whom == "supervisor":
        return supervisor
    below = children(supervisor)
    if whom == "starter":
        return next(pid for pid in below if "launch.local" in words_of(pid))
    if whom == "server":
        return next(pid for pid in below if "serve" in words_of(pid))
    rank = whom.removeprefix("rank ")
    for pid in below:
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            names = (b"JAXLAMINA_RANK", b"OMPI_COMM_WORLD_RANK")
            if "launch" in words_of(pid) and any(n + b"=" + rank.encode() in variables for n in names):
                return pid
    raise AssertionError(f"no {whom} among {below}")


def plain(text):
    """Without what differs between two answers: their ids, when they were made, and the last digits of
    log-probabilities, which go by who else is in a batch."""
    text = re.sub(r"-\d+\.\d{5,}(e-\d+)?", lambda found: f"{float(found[0]):.3f}", text)
    text = re.sub(r'"(created|created_at)":\d+', r'"\1":0', text)
    return re.sub(r"\b(cmpl-|chatcmpl-|resp_|msg_)?[0-9a-f]{32}\b", r"\1ID", text)


class Asked(threading.Thread):
    """A request by a client of its own; ``events`` of a stream as they come, or the whole."""

    def __init__(self, port, path, body):
        super().__init__(daemon=True)
        self.port, self.path, self.body = port, path, body
        self.events, self.key, self.status, self.broke = [], "", 0, False
        self.start()

    def run(self):
        try:
            self.ask("POST", self.path, json.dumps(self.body))
        except (OSError, http.client.HTTPException):
            self.broke = True

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            self.status, self.key = answer.status, answer.getheader("x-request-id", "")
            if not answer.getheader("content-type", "").startswith("text/event-stream"):
                self.events = [answer.read().decode()]
                return
            event = ""
            for line in answer:
                event += re.sub(r"^id: \d+\n", "", line.decode())
                if event.endswith("\n\n"):
                    self.events.append(event)
                    event = ""
            self.broke = bool(event) or not self.ends
        finally:
            connection.close()

    @property
    def ends(self):
        last = self.events[-1] if self.events else ""
        return last == "data: [DONE]\n\n" or "response.completed" in last or "response.incomplete" in last

    def goes_on(self, port):
        """Asks a new supervisor for the rest."""
        self.port, self.broke = port, False
        had, self.events = self.events, []
        self.ask("GET", f"/v1/requests/{self.key}/stream?from={len(had)}")
        self.events = had + self.events

    @property
    def said(self):
        return [plain(event) for event in self.events]


def answers(port):
    asked = {name: Asked(port, *request) for name, request in REQUESTS.items()}
    for one in asked.values():
        one.join(DEADLINE_S)
    return asked


def wait_until(holds, deadline_s=DEADLINE_S):
    until = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.005)


SCENARIOS = {path.stem: tomllib.loads(path.read_text()) for path in sorted(FOLDER.glob("*.toml"))}


def marks(scenario):
    return [getattr(pytest.mark, name) for name in ("slow", "mpi") if scenario.get(name)]


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(s)) for n, s in SCENARIOS.items()])
def test_nothing_is_lost(name, tiny, tmp_path):
    scenario = SCENARIOS[name]
    options = [word.format(folder=tmp_path) for word in scenario["options"]]
    job = [*scenario["job"], *(ON_CPUS if scenario["job"] else ())]
    start = [job, tiny, options]
    started = [Supervised.of(*start)]
    try:
        server = started[0]
        expected = {name: one.said for name, one in answers(server.port).items()}
        assert all(expected.values())
        n_before = 0
        asked = {name: Asked(server.port, *request) for name, request in REQUESTS.items()}
        for event in scenario["events"]:
            wait_until(partial(is_time_for, event, server, asked["greedy"]))
            if "signal" in event:
                os.kill(find(event["whom"], server.process.pid), getattr(signal, event["signal"]))
            if event.get("whom") == "supervisor":
                server.process.wait(20)
            if "start" in event:
                n_before = len(started)
                server = Supervised.of(*start)
                started.append(server)
        for one in asked.values():
            one.join(DEADLINE_S)
            assert not one.is_alive()
            if n_before and one.broke and one.key:  # its supervisor was killed: it asks the next one
                one.goes_on(server.port)
        if not n_before:
            assert {name: one.said for name, one in asked.items()} == expected
        else:  # who had no answer yet knows no key to ask for
            known = {name: one.said for name, one in asked.items() if one.key}
            assert len(known) >= 5 and known == {name: expected[name] for name in known}
        check = scenario["check"]
        assert len(restarts(server)) == check["recoveries"]
        if "cause" in check:
            assert check["cause"] in restarts(server)[-1]
        if check["recoveries"]:
            own = server.get("/metrics").decode()
            n = sum(
                float(x) for x in re.findall(r"^jaxlamina:recoveries_total\{.*\} (\S+)$", own, re.MULTILINE)
            )
            assert n == check["recoveries"]
            assert (
                float(re.search(r"^jaxlamina:recovery_stall_seconds_count (\S+)$", own, re.MULTILINE)[1]) >= 1
            )
            assert float(re.search(r"^jaxlamina:resumed_requests_total (\S+)$", own, re.MULTILINE)[1]) >= 1
        below = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0, "\n".join(server.lines)
        assert below
        wait_until(lambda: not any(words_of(pid) for pid in below), 20)
    finally:
        for one in started:
            one.close()


def is_time_for(event, server, stream):
    if len(stream.events) < event.get("after_tokens", 0):
        return False
    n = event.get("after_recoveries", 0)
    return not n or (len(restarts(server)) >= n and serves_below(server))


def restarts(server):
    return [line for line in server.lines if "it is started again" in line]


def serves_below(server):
    return any("serve" in words_of(pid) for pid in children(server.process.pid))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "job", [[], ["launch", "--local-attention", "0", "--dop", "1,1", "--transport", "xla"]]
)
def test_random_faults_under_load(job, tiny, tmp_path):
    """Some minutes of clients that ask again and again, and every 13 seconds a process that is killed or
    stopped: every answer is the one that it was, and the supervisor does not grow."""
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

        clients = [threading.Thread(target=client, args=(name,), daemon=True) for name in REQUESTS]
        for one in clients:
            one.start()
        sizes, n_faults = [], 0
        until = time.monotonic() + SOAK_S
        while time.monotonic() < until and not wrong:
            time.sleep(rng.uniform(6, 20))
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
        over.set()
        for one in clients:
            one.join(DEADLINE_S)
        assert not wrong
        assert len(restarts(server)) >= n_faults // 2 and min(n_answers.values()) >= 2
        assert max(sizes) < sizes[0] + 100_000  # answers are kept for a while, 64 MiB of them at most
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0
        print(
            f"{n_faults} faults, {len(restarts(server))} recoveries, {sum(n_answers.values())} answers, kB: {sizes}"
        )
    finally:
        server.close()
