"""A supervised server as its clients see it, when nothing dies; and how it gives up. What happens when something
dies is in test_faults.py."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from checkpoint_examples import tiny_words_folder
from serving import ROOT, environment
from test_faults import Asked, Supervised, children, find, plain, restarts, wait_until

LONG = {"prompt": "w1 w2 w3", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@contextlib.contextmanager
def supervised(tiny, *options):
    with contextlib.closing(Supervised.of([], tiny, options)) as server:
        yield server


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("journal")
    with supervised(tiny, "--api-key", "secret", "--journal", str(folder)) as found:
        yield found


def ask(server, path, body=None, headers=KEY, method=None):
    return server.request(method or ("GET" if body is None else "POST"), path, body, headers)


def test_a_request_can_be_asked_for_again(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(LONG | {"stream": True}), KEY | JSON)
    answer = connection.getresponse()
    key = answer.getheader("x-request-id")
    events = answer.read().decode().split("\n\n")[:-1]
    connection.close()
    assert f"cmpl-{key}" in events[0] and len(events) > 150
    _, found = ask(server, f"/v1/requests/{key}")
    assert found["status"] == "finished" and found["n_events"] == len(events) and found["n_tokens"] == 200
    for from_, headers in (("?from=150", {}), ("", {"Last-Event-ID": "150"})):
        _, rest = ask(server, f"/v1/requests/{key}/stream{from_}", headers=KEY | headers)
        wanted = [f"id: {n}\n{event}" for n, event in enumerate(events, 1)][150:]
        assert rest.decode().split("\n\n")[:-1] == wanted


JSON = {"Content-Type": "application/json"}


def test_an_answer_in_one_piece_can_be_asked_for_again(server):
    asked = Asked(server.port, "/v1/completions", LONG)
    asked.join(60)
    assert asked.status == 401  # it brings no key
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(LONG), KEY | JSON)
    answer = connection.getresponse()
    key, whole = answer.getheader("x-request-id"), json.loads(answer.read())
    connection.close()
    assert ask(server, f"/v1/requests/{key}")[1]["response"] == whole
    assert ask(server, f"/v1/requests/{key}/stream")[1] == whole


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", b"{", 400, "not JSON"),
        ("/v1/completions", {"prompt": "w1", "max_tokens": -1}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "w1", "model": "other"}, 404, "does not exist"),
        ("/v1/completions", b"x" * (17 * 2**20), 413, "too large"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/requests/none", None, 404, "no request 'none'"),
        ("/v1/requests/none/stream", None, 404, "no request"),
        ("/followed/v1/completions", b"{}\n{}", 404, "no such route"),
        ("/nothing", None, 404, "no such route"),
        ("/v1/files/file-0", None, 404, "file-0"),
    ],
)
def test_what_is_wrong_is_said_as_without_a_supervisor(server, path, body, status, says):
    found, answer = ask(server, path, body)
    assert (found, says in answer["error"]["message"]) == (status, True), answer


def test_a_wrong_place_in_a_stream_is_refused(server):
    _, answer = ask(server, "/v1/requests/none/stream?from=x")
    assert answer["error"]["message"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:  # no HTTP at all
        raw.sendall(b"\x00\xff" * 100)
        assert b"400" in raw.recv(4096)
    assert ask(server, "/health")[0] == 200


def test_all_else_is_passed_on(server):
    assert ask(server, "/v1/models")[1]["data"][0]["max_model_len"] == 512
    assert ask(server, "/v1/completions", method="GET")[0] == 405
    assert ask(server, "/tokenize", {"prompt": "w1 w2"})[1]["count"] == 2
    assert ask(server, "/health", headers={})[1] == {"status": "ready", "recoveries": 0}
    _, metrics = ask(server, "/metrics")
    for name in ("vllm:num_requests_running", "jaxlamina:recovery_stall_seconds_count", "jaxlamina:kv_slots"):
        assert name in metrics.decode()


def test_batches_are_passed_on(server):
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "w1", "max_tokens": 3},
    }
    mark = "x" * 30
    form = (
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{mark}\r\n'
        f'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n{json.dumps(line)}\n\r\n--{mark}--\r\n'
    )
    kind = {"Content-Type": f"multipart/form-data; boundary={mark}"}
    _, file = ask(server, "/v1/files", form.encode(), KEY | kind)
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    _, batch = ask(server, "/v1/batches", asked)
    wait_until(lambda: ask(server, f"/v1/batches/{batch['id']}")[1]["status"] == "completed", 60)
    _, batch = ask(server, f"/v1/batches/{batch['id']}")
    _, output = ask(server, f"/v1/files/{batch['output_file_id']}/content")
    assert json.loads(output if isinstance(output, bytes) else json.dumps(output))["custom_id"] == "a"


def test_a_request_ends_with_its_client(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps(LONG | {"stream": True, "max_tokens": 480}), KEY | JSON
    )
    answer = connection.getresponse()
    key = answer.getheader("x-request-id")
    answer.read1(200)
    answer.close()
    connection.close()
    wait_until(lambda: ask(server, f"/v1/requests/{key}")[0] == 404, 20)

    def n_running():
        _, metrics = ask(server, "/metrics")
        return [x for x in metrics.decode().splitlines() if x.startswith("vllm:num_requests_running{")]

    wait_until(lambda: n_running()[0].endswith(" 0.0"), 20)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_requests_of_another_model_do_not_go_on(tiny, tmp_path):
    options = ("--journal", str(tmp_path))
    with supervised(tiny, *options) as server:
        asked = Asked(server.port, "/v1/completions", LONG | {"stream": True})
        wait_until(lambda: len(asked.events) > 20)
        server.process.kill()
        asked.join(20)
    with supervised(tiny, *options, "--served-model-name", "other") as server:
        status, found = server.request("GET", f"/v1/requests/{asked.key}/stream")
        assert status == 410 and found["error"]["code"] == "other_model"
        assert any("0 requests go on, 1 of another model do not" in line for line in server.lines)


def test_running_requests_are_finished_at_its_end(tiny):
    with supervised(tiny) as server:
        expected = Asked(server.port, "/v1/completions", LONG)
        expected.join(60)
        asked = Asked(server.port, "/v1/completions", LONG | {"stream": True})
        wait_until(lambda: len(asked.events) > 5)
        below = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.request("POST", "/v1/completions", LONG)[0] == 503 or asked.ends)
        asked.join(60)
        assert asked.ends and len(asked.events) > 150
        assert server.finish() == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in below)


def test_a_job_that_cannot_start_ends_its_supervisor(tiny):
    """With the job's line and code."""
    words = [sys.executable, "-m", "jaxlamina", "serve", "--supervise", "--port", "0", "--model", str(tiny)]
    done = subprocess.run(
        [*words, "--max-model-len", "100000"],
        check=False, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: --max-model-len 100000 must be at least 2 and at most 2048" in done.stderr
    assert "started again" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_request_that_ends_the_job_each_time_is_given_up(tiny):
    with supervised(tiny) as server:
        asked = Asked(server.port, "/v1/completions", LONG | {"stream": True, "max_tokens": 400})
        for n in range(4):
            wait_until(lambda n=n: len(restarts(server)) >= n and asked.events)
            had = len(asked.events)
            wait_until(lambda had=had: len(asked.events) > had or not asked.is_alive())
            os.kill(find("server", server.process.pid), signal.SIGKILL)
            wait_until(lambda n=n: len(restarts(server)) > n)
        asked.join(60)
        assert "job_ended" in asked.events[-2] and asked.events[-1] == "data: [DONE]\n\n"
        began = time.monotonic()
        other = Asked(server.port, "/v1/completions", LONG)
        other.join(60)
        assert other.status == 200 and time.monotonic() - began < 60


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_requests_of_a_killed_supervisor_are_finished_without_their_clients(tiny, tmp_path):
    options = ("--journal", str(tmp_path))
    with supervised(tiny, *options) as server:
        whole = Asked(server.port, "/v1/completions", LONG)
        whole.join(60)
        asked = Asked(server.port, "/v1/completions", LONG | {"stream": True})
        wait_until(lambda: len(asked.events) > 20)
        server.process.kill()
        asked.join(20)
    with supervised(tiny, *options) as server:
        wait_until(lambda: server.get(f"/v1/requests/{asked.key}")["status"] == "finished", 60)
        assert plain(json.dumps(server.get(f"/v1/requests/{whole.key}/stream"))) == plain(
            json.dumps(json.loads(whole.events[0]))
        )
        had = len(asked.events)
        asked.goes_on(server.port)
        assert asked.ends and len(asked.events) > had
