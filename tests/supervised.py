"""Supervised servers as real processes, clients that stream, and what their answers are compared by.

Knows processes below a supervisor and HTTP; nothing of faults.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shlex
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from serving import WORDS_TEMPLATE, Server

from jaxlamina.bench.job_processes import began, words_of
from jaxlamina.process.descendants import descendants as children
from launch.commands import IN_MEMORY, OPEN_MPI

DEADLINE_S = 150
ON_CPUS = ("--set", "model_platform=cpu", "--set", "attention_platform=cpu")
# As many as fit: clients on a busy machine read behind, and streams are to run yet when a fault comes.
N = 480
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def requests_of(n_tokens: int) -> dict[str, tuple[str, dict]]:
    """(path, body): streams of several kinds, and answers in one piece; the long ones of so many tokens."""
    long = {"max_tokens": n_tokens, "ignore_eos": True}
    return {
        "greedy": ("/v1/completions", {"prompt": "w1 w2 w3", "temperature": 0, "stream": True, **long}),
        "seeded": ("/v1/completions", {"prompt": "w4 w5", "seed": 5, "stream": True, **SAMPLED, **long}),
        "whole": ("/v1/completions", {"prompt": "w7 w8 w9", "temperature": 0, **long}),
        "penalties": (
            "/v1/completions",
            {"prompt": "w9", "seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.2, "stream": True}
            | SAMPLED
            | long,
        ),
        "two of two": (
            "/v1/completions",
            {"prompt": ["w1", "w2 w3"], "n": 2, "seed": 8, "stream": True, **SAMPLED, "max_tokens": 200}
            | {"ignore_eos": True},
        ),
        "prompts": (
            "/v1/completions",
            {"prompt": ["w1 w5", "w2"], "seed": 9, "stream": True, **SAMPLED, "max_tokens": 200}
            | {"ignore_eos": True},
        ),
        "logprobs": (
            "/v1/completions",
            {"prompt": "w5", "temperature": 0, "logprobs": 2, "stream": True, "max_tokens": 200}
            | {"ignore_eos": True},
        ),
        "chat": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "w1 w4"}], "temperature": 0, "stream": True, **long},
        ),
        "response": (
            "/v1/responses",
            {"input": "w6 w2", "temperature": 0, "stream": True, "max_output_tokens": 200}
            | {"ignore_eos": True},
        ),
    }


REQUESTS = requests_of(N)


class Supervised(Server):
    """`jaxlamina … serve --supervise` on a port; `wait_for` reads its stderr."""

    @classmethod
    def of(cls, job, model, options, variables=None):
        of_model = ("--model", str(model), "--max-num-seqs", "16", "--max-model-len", "512", "--no-warm-up")
        of_model += ("--chat-template", WORDS_TEMPLATE)
        words = [sys.executable, "-m", "jaxlamina", *job, *(("--",) if job else ()), "serve", "--supervise"]
        words += ["--port", "0", *of_model, *options]
        server = cls.start(words, variables, start_new_session=True)
        server.port = int(server.wait_for("serving ").rpartition(":")[2])
        server.wait_for("ready: ")
        return server


def find(whom, supervisor, apart_from=()):
    """The process that a scenario names; none of ``apart_from``."""
    if whom == "supervisor":
        return supervisor
    below = set(children(supervisor)) - set(apart_from)
    below = sorted(below, key=began)  # of two jobs the one that runs
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

    def __init__(self, port, path, body, headers=()):
        super().__init__(daemon=True)
        self.headers = {"Content-Type": "application/json", **dict(headers)}
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
            connection.request(method, path, body, self.headers)
            answer = connection.getresponse()
            self.status, self.key = answer.status, answer.getheader("x-request-id", "")
            if not answer.getheader("content-type", "").startswith("text/event-stream"):
                self.events = [answer.read().decode()]
                return
            event = ""
            for line in answer:
                event += re.sub(r"^id: [\d,]+\n", "", line.decode())
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
        prompts = self.body.get("prompt")
        n_choices = self.body.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
        of_each = Counter(map(continuation, had))
        counts = [of_each[i] for i in range(n_choices)] if n_choices > 1 else [len(had)]
        path = f"/v1/requests/{self.key}/stream?from="
        if n_choices > 1 and had:
            self.ask("GET", f"{path}{len(had)}")
            assert self.status == 400, "in what order events came the new supervisor cannot know"
            self.events = []
        self.ask("GET", path + ",".join(map(str, counts)))
        self.events = had + self.events

    @property
    def said(self):
        """Each continuation's events in order; among each other they come as steps and prefill workers go."""
        return sorted((plain(event) for event in self.events), key=continuation)


def continuation(event):
    found = re.search(r'"choices":\[\{"index":(\d+)', event)
    return 1000 if found is None else int(found[1])


def answers(port, requests=REQUESTS):
    asked = {name: Asked(port, *request) for name, request in requests.items()}
    for one in asked.values():
        one.join(DEADLINE_S)
    return asked


def wait_until(holds, deadline_s=DEADLINE_S):
    until = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.005)


def policy_once(name, marker, does):
    """A module with a policy that ``does`` so once in the engine's thread, when a file ``marker`` is beside
    it."""
    return f"""
from pathlib import Path

from jaxlamina.engine.policies import Fifo


class {name}(Fifo):
    @property
    def preemptive(self):
        marker = Path(__file__).with_name({marker!r})
        if marker.exists():
            marker.unlink()
            {does}
        return False
"""


def starter(hosts, *slots):
    """Words that start so many ranks on each host, by an mpirun on the first one, which is the supervisor's as
    far as files and processes go."""
    reach = ("--mca", "plm_rsh_agent", str(hosts.agent), "-x", "JAX_PLATFORMS", "-x", "XLA_FLAGS")
    mpirun = ("mpirun", "-n", str(sum(slots)), "--hostfile", str(hosts.hostfile(*slots)))
    return shlex.join(hosts.on_first(*mpirun, "--allow-run-as-root", *OPEN_MPI, *IN_MEMORY, *reach))


def restarts(server):
    return [line for line in server.lines if "it is started again" in line]


def is_there(whom, server, apart_from=()):
    with contextlib.suppress(StopIteration, AssertionError):
        return find(whom, server.process.pid, apart_from)
