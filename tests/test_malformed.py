"""Whatever comes to the ports of a supervised job is answered or refused, and harms nobody: malformed, cut off,
repeated and oversized messages to the supervisor, to the server below it and to rank 0's control port, with and
without the secrets."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from checkpoint_examples import tiny_words_folder
from control_group import Bare, frame, free_address
from supervised import ON_CPUS, Asked, Supervised, children, find, restarts, wait_until, words_of

from jaxlamina.job.control.frames import LARGEST_BYTES
from jaxlamina.job.control.messages import Bye, encode

N = int(os.environ.get("MALFORMED", "300"))  # messages to each port
KEY = "Authorization: Bearer secret"
LONG = {"prompt": "w1 w2 w3", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/requests/x/stream", "/v1/fault_tolerance/apply"]
PATHS += ["/health", "/metrics", "/followed/v1/completions", "/v1/files", "/", "/\x00", "/v1/" + "a" * 9000]
METHODS = ["POST", "GET", "PUT", "G\x01T"]
BODIES = [b"", b"{", b"[" * 5000, b'{"prompt": 1e999}', b'{"prompt": "w1", "max_tokens": 1}', b"\xff\xfe\x00"]
BODIES += [json.dumps({"prompt": "w1", "logit_bias": {str(i): 1 for i in range(3000)}}).encode()]
BODIES += [
    b'{"instruction": "scale", "attention": 9' + b"9" * 400 + b"}",
    b'{"instruction": "restart", "timeout": -1}',
]


def requests(rng, headers=()):
    """HTTP, more or less."""
    body = rng.choice(BODIES)
    length = rng.choice([len(body), len(body) + 5, 0, 10**15, -1, "x"])
    method, version = rng.choice(METHODS), rng.choice(["1.1", "1.0", "9.9"])
    lines = [f"{method} {rng.choice(PATHS)} HTTP/{version}"]
    lines += [
        "Host: x",
        f"Content-Length: {length}",
        *rng.sample([KEY, *headers], rng.randint(0, 1 + len(headers))),
    ]
    lines += rng.choice([[], ["X: " + "a" * 70_000], ["Transfer-Encoding: chunked"], ["Last-Event-ID: 9e9"]])
    whole = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
    kind = rng.random()
    if kind < 0.2:
        return rng.randbytes(rng.randint(1, 300))
    if kind < 0.4:
        return whole[: rng.randint(1, len(whole))]
    if kind < 0.5:
        at = rng.randrange(len(whole))
        return whole[:at] + rng.randbytes(3) + whole[at:]
    return whole * rng.choice([1, 1, 2])


def followed(rng, secret):
    """What a supervisor asks its server, more or less."""
    follow = {"key": "k", "created": 1, "seed": 2, "written": [[0, [5, 6]]], "n_cached": [[0, 1]]}
    name = rng.choice(sorted(follow))
    value = rng.choice([None, -1, 2**70, "x", [[0, [10**9]]], [[10**9, [1]]], [[0, [-1]]], [[]], {}])
    line = json.dumps(follow | {name: value}).encode()
    body = rng.choice([line, line[:7], b"", b"[" * 9000]) + b"\n" + rng.choice(BODIES)
    head = f"POST /followed{rng.choice(PATHS)} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += f"X-JaxLamina-Supervisor: {rng.choice([secret, secret, 'x', ''])}\r\nConnection: close\r\n\r\n"
    return head.encode("latin-1", "replace") + body


def of_control(rng, rank):
    """What a rank says, more or less, with the job's secret or without."""
    hello = rank.hello(rng.choice([0, 1, 2, 2**40]))
    whole = rng.choice([hello, hello + rank.sealed(Bye()), rank.sealed(Bye()), frame(encode(Bye()))])
    return rng.choice(
        [
            rng.randbytes(rng.randint(1, 100)),
            whole,
            whole * 3,
            whole[: rng.randint(1, len(whole))],
            frame(rng.randbytes(20)),
            b"JXLc" + (LARGEST_BYTES + 1).to_bytes(4, "big"),
            b"JXLc" + (2**20).to_bytes(4, "big") + b"x",
        ]
    )


def send(connect, message):
    """Sends it, and reads what comes for a moment; a port may close at any time."""
    with contextlib.suppress(OSError), connect() as connection:
        connection.settimeout(0.02)
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


def send_control(connect, rng, secret):
    with contextlib.suppress(OSError), connect() as connection:
        message = of_control(rng, Bare(connection, rng.choice([secret, b"", b"x"])))
        send(lambda: connection, message)


def over_tcp(port):
    return lambda: socket.create_connection(("127.0.0.1", port), timeout=5)


def over_unix(path):
    def connect():
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(5)
        connection.connect(path)
        return connection

    return connect


def resident_kb(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.timeout(1200)
def test_malformed_messages_harm_nobody(tmp_path):
    tiny = tiny_words_folder(tmp_path, max_position_embeddings=2048)
    control = free_address()
    job = ["launch", "--dop", "1,1", "--transport", "xla", "--local-attention", "0", *ON_CPUS]
    job += ["--set", f'control="{control}"']
    options = [
        "--api-key",
        "secret",
        "--max-model-len",
        "2048",
        "--max-concurrent-requests",
        "8",
        "--max-body-mib",
        "1",
    ]
    rng = random.Random(5)
    with contextlib.closing(Supervised.of(job, tiny, options)) as server:
        keyed = {"Authorization": "Bearer secret"}
        whole = {**LONG, "stream": False}
        expected = server.request("POST", "/v1/completions", whole, keyed)[1]["choices"][0]["text"]
        first = find("rank 0", server.process.pid)
        environment = Path(f"/proc/{first}/environ").read_bytes().decode().split("\0")
        secret, word = (
            next(x.partition("=")[2] for x in environment if x.startswith(f"JAXLAMINA_{name}="))
            for name in ("SUPERVISOR", "JOB")
        )
        words = next(words_of(pid) for pid in children(server.process.pid) if "--uds" in words_of(pid))
        below = over_unix(words[words.index("--uds") + 1])
        of_rank_0 = over_tcp(int(control.rpartition(":")[2]))
        before = {pid: (resident_kb(pid), len(files_of(pid))) for pid in (server.process.pid, first)}
        streams = []
        for _ in range(N):
            if not streams or not streams[-1].is_alive():
                streams.append(Asked(server.port, "/v1/completions", LONG, keyed))
            send(over_tcp(server.port), requests(rng))
            send(
                below,
                requests(rng, [f"X-JaxLamina-Supervisor: {secret}"])
                if rng.random() < 0.5
                else followed(rng, secret),
            )
            send_control(of_rank_0, rng, word.encode())
        for stream in streams:
            stream.join(60)
            assert text_of(stream) == expected
        assert restarts(server) == [] and server.process.poll() is None
        assert server.request("POST", "/v1/completions", whole, keyed)[1]["choices"][0]["text"] == expected
        wait_until(lambda: server.request("GET", "/health")[0] == 200, 20)
        for pid, (kb, n_files) in before.items():
            # Connections that are kept for a next request end by themselves.
            until = time.monotonic() + 60
            while len(found := files_of(pid)) > n_files + 5:
                assert time.monotonic() < until, (n_files, Counter(found))
                time.sleep(0.5)
            assert resident_kb(pid) < kb + 150_000
        assert faults_in(server.lines) == []


def files_of(pid):
    found = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(re.sub(r"\d+", "", os.readlink(file)))
    return found


def faults_in(lines):
    """What ended in a traceback, but for an answer to somebody who had gone, which the event loop calls an
    error."""
    found = [line for line in lines if "internal error" in line]
    for i, line in enumerate(lines):
        if "Exception in ASGI application" in line or (i == 0 and "Traceback" in line):
            rest = lines[i + 1 :]
            n = next((n for n, x in enumerate(rest) if re.match(r"(INFO|WARNING|ERROR):", x)), len(rest))
            end = [x for x in rest[:n] if x.strip()][-1:]
            found += [x for x in end if not x.endswith("the handler is closed")]
    return found


def text_of(stream):
    found = [json.loads(event[6:]) for event in stream.events if event.startswith("data: {")]
    return "".join(piece["choices"][0]["text"] for piece in found if piece["choices"])


def test_a_request_takes_two_files(tmp_path):
    """Its client's connection and one to the job. So 150 files, apart from 128 of the supervisor's own, do for
    11."""
    tiny = tiny_words_folder(tmp_path, max_position_embeddings=2048)
    with contextlib.ExitStack() as cleanups:
        limited = ["bash", "-c", 'ulimit -Sn 130; ulimit -Hn 150; exec "$@"', "--"]
        words = [
            "-m",
            "jaxlamina",
            "serve",
            "--supervise",
            "--port",
            "0",
            "--model",
            str(tiny),
            "--no-warm-up",
        ]
        server = Supervised.start([*limited, sys.executable, *words, "--max-connections", "12"], None)
        cleanups.callback(server.close)
        server.port = int(server.wait_for("serving ").rpartition(":")[2])
        server.wait_for("ready: ")
        with open(f"/proc/{server.process.pid}/limits") as limits:
            assert any(line.split()[:4] == ["Max", "open", "files", "150"] for line in limits)
        for _ in range(11):
            cleanups.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        status, found = server.request("GET", "/health")
        assert status == 503 and "11 connections are open already" in found["error"]["message"]
