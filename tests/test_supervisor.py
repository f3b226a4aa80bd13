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
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from checkpoint_examples import tiny_words_folder
from serving import ROOT, environment
from supervised import (
    ON_CPUS,
    Asked,
    Supervised,
    children,
    continuation,
    find,
    is_there,
    plain,
    restarts,
    wait_until,
    words_of,
)

from jaxlamina.errors import UserError
from jaxlamina.server.files import Folder
from jaxlamina.server.settings import Settings
from jaxlamina.supervisor.changes import Change, JobCommand, Workers
from jaxlamina.supervisor.run import supervise
from jaxlamina.supervisor.settings import Supervision

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
    with supervised(tiny, "--api-key", "secret", "--journal", str(folder), "--dashboard") as found:
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


def test_events_of_several_choices_are_asked_for_by_choice(server):
    asked = Asked(server.port, "/v1/completions", LONG | {"prompt": ["w1", "w2"], "stream": True}, KEY)
    asked.join(60)
    assert asked.ends
    of_each = [[event for event in asked.events if continuation(event) == i] for i in range(2)]
    path = f"/v1/requests/{asked.key}/stream"
    for from_, headers in (("?from=7,190", {}), ("", {"Last-Event-ID": "7,190"})):
        _, rest = ask(server, path + from_, headers=KEY | headers)
        ids, rest = zip(*(event.split("\n", 1) for event in rest.decode().split("\n\n")[:-1]), strict=True)
        found = [[f"{event}\n\n" for event in rest if continuation(event) == i] for i in range(2)]
        assert found == [of_each[0][7:], of_each[1][190:]] and rest[-1] == "data: [DONE]"
        assert ids[-1] == f"id: {len(of_each[0])},{len(of_each[1])}"
    _, all_of_it = ask(server, path)
    assert all_of_it.count(b"data: ") == len(asked.events)
    status, answer = ask(server, f"{path}?from=1,2,3")
    assert status == 400 and "2 choices" in answer["error"]["message"]


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
        ("/v1/models/a%3Fb%23c%5Cd", None, 404, "a?b#c"),
        ("/v1/models%3F", None, 404, "no such route"),
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
    with httpx.Client(base_url=server.url, headers=KEY) as client:
        assert client.get("/v1/files/?a=b").headers["location"] == "/v1/files?a=b"
        unwell = {"Host": "a/v1/models?", "Authorization": ""}
        assert client.get("/x", headers=unwell).status_code == 404
    assert ask(server, "/tokenize", {"prompt": "w1 w2"})[1]["count"] == 2
    assert ask(server, "/health", headers={})[1] == {"status": "ready", "recoveries": 0}
    _, metrics = ask(server, "/metrics")
    for name in ("vllm:num_requests_running", "jaxlamina:recovery_stall_seconds_count", "jaxlamina:kv_slots"):
        assert name in metrics.decode()


def test_what_the_job_was_never_asked_is_passed_on_once_it_can_be(server):
    """As many calls at once as need new connections, while nobody listens where the job does."""
    [path] = {w for pid in children(server.process.pid) for w in words_of(pid) if w.endswith("/1.sock")}
    away = f"{path}.away"
    os.rename(path, away)
    try:
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(ask, server, "/tokenize", {"prompt": f"w{n} w2"}) for n in range(12)]
            time.sleep(1)
            os.rename(away, path)
            found = [one.result() for one in asked]
    finally:
        if os.path.exists(away):
            os.rename(away, path)
    assert [(status, body["count"]) for status, body in found] == [(200, 2)] * 12
    assert ask(server, "/health", headers={})[1] == {"status": "ready", "recoveries": 0}


def test_the_dashboard_is_the_supervisors_and_its_numbers_the_jobs(server):
    assert ask(server, "/dashboard", headers={})[0] == 200
    assert ask(server, "/dashboard/state", headers={})[0] == 401
    status, found = ask(server, "/dashboard/state?after=0")
    assert status == 200 and found["server"]["state"] == "ready" and found["samples"]
    assert found["supervisor"]["status"] == "ready" and found["supervisor"]["starts"] == 1
    assert ask(server, "/dashboard/state?after=soon")[0] == 400
    status, found = ask(server, "/dashboard/record", method="POST")
    assert status == 400 and "--pool-metrics-interval" in found["error"]["message"]


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


@pytest.mark.parametrize("supervise", ["--no-supervise", "--supervise"])
def test_a_socket_that_cannot_be_is_one_line(tiny, tmp_path, supervise):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "socket", tmp_path / "file"):
        words = ["serve", supervise, "--uds", str(path), "--model", str(tiny), "--no-warm-up"]
        how = {"env": environment(), "capture_output": True, "text": True, "timeout": 60, "cwd": ROOT}
        done = subprocess.run([sys.executable, "-m", "jaxlamina", *words], check=False, **how)
        assert done.returncode == 2 and done.stderr.startswith(f"error: cannot serve at {path}: ")
        assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "file").exists()


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


RANKS = ("launch", "--dop", "1,1", *ON_CPUS, "--transport")


@pytest.mark.parametrize(
    ("job", "after_s"),
    [
        ((), 0.0),
        *(pytest.param((), s, marks=pytest.mark.slow) for s in (1.0, 2.5)),
        *(pytest.param((*RANKS, "xla", "--"), s, marks=pytest.mark.slow) for s in (0.0, 1.0, 2.0, 4.0)),
        *(
            pytest.param((*RANKS, "mpi", "--"), s, marks=[pytest.mark.slow, pytest.mark.mpi])
            for s in (0.0, 1.0, 2.0, 4.0)
        ),
    ],
)
def test_one_that_is_asked_to_end_while_its_job_starts_ends_well(tiny, job, after_s):
    """Wherever the start is then."""
    words = [sys.executable, "-m", "jaxlamina", *job, "serve", "--supervise", "--port", "0"]
    how = ("--model", str(tiny), "--max-num-seqs", "4", "--max-model-len", "64")
    with contextlib.closing(Supervised.start([*words, *how], start_new_session=True)) as server:
        server.wait_for("serving ")
        time.sleep(after_s)
        below = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0, "\n".join(server.lines)
        assert not any("error" in line or "Traceback" in line for line in server.lines), server.lines
        wait_until(lambda: not any(words_of(pid) for pid in below), 20)


def test_a_supervisor_holds_the_folder_of_files(tiny, tmp_path):
    """Its job does not, since a spare takes over before the job before it has let go of anything."""
    words = [sys.executable, "-m", "jaxlamina", "serve", "--supervise", "--port", "0", "--model", str(tiny)]
    with contextlib.closing(Folder(tmp_path)):
        done = subprocess.run(
            [*words, "--files-dir", str(tmp_path)],
            check=False, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment(),
        )  # fmt: skip
    assert done.returncode == 2
    assert f"error: {tmp_path} is in use by another server" in done.stderr
    with supervised(tiny, "--files-dir", str(tmp_path)), pytest.raises(UserError, match="in use"):
        Folder(tmp_path)


def test_a_folder_too_deep_for_sockets_is_refused_before_a_start(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    command = JobCommand(("false",))
    with pytest.raises(UserError, match="set TMPDIR to a shorter one"), socket.socket() as listener:
        supervise(command, Settings(), Supervision(), listener, lambda: None, None)
    assert not list(deep.iterdir())


def test_a_job_that_cannot_start_ends_its_supervisor(tiny):
    """With the job's line and code."""
    words = [sys.executable, "-m", "jaxlamina", "serve", "--supervise", "--port", "0", "--model", str(tiny)]
    done = subprocess.run(
        [*words, "--max-model-len", "100000"],
        check=False, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: --max-model-len 100000 must be at least 2 and at most 2048" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "started again" not in done.stderr and "Traceback" not in done.stderr


POISON = """
import os
import signal

from jaxlamina.engine.policies import Fifo


class Poisoned(Fifo):
    def rank(self, request):
        if len(request.prompt_token_ids) == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().rank(request)
"""


def test_an_option_of_supervisors_is_refused_without_one(tiny):
    words = [
        sys.executable,
        "-m",
        "jaxlamina",
        "serve",
        "--journal",
        "j",
        "--port",
        "0",
        "--model",
        str(tiny),
    ]
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": ROOT, "env": environment()}
    done = subprocess.run(words, check=False, **how)
    assert done.returncode == 2 and done.stderr.startswith("error: --journal is for a supervised server")


def test_a_socket_in_place_of_a_port(tiny, tmp_path):
    """Over ranks, where a supervisor is there without being asked for; and a second signal ends all at once."""
    path = tmp_path / "socket"
    on_cpus = ["--set", "model_platform=cpu", "--set", "attention_platform=cpu"]
    words = ["launch", *on_cpus, "--", "serve", "--uds", str(path), "--model", str(tiny), "--no-warm-up"]
    server = Supervised.start([sys.executable, "-m", "jaxlamina", *words], None)
    try:
        assert server.wait_for("serving ").endswith(f" at unix:{path}")
        server.wait_for("ready: ")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://job") as client:
            assert client.post("/v1/completions", json=LONG, timeout=60).status_code == 200
            change = {"instruction": "scale", "attention": -2}  # this host asks, and may
            assert "is no job" in client.post("/v1/fault_tolerance/apply", json=change).text
            below = children(server.process.pid)
            with client.stream(
                "POST", "/v1/completions", json=LONG | {"stream": True, "max_tokens": 2000}
            ) as s:
                next(s.iter_lines())
                server.process.send_signal(signal.SIGINT)
                time.sleep(0.5)
                server.process.send_signal(signal.SIGTERM)
                assert server.finish(20) == 128 + signal.SIGTERM
        assert not path.exists() and not any(os.path.exists(f"/proc/{pid}") for pid in below)
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_request_that_ends_the_job_each_time_is_given_up(tiny, tmp_path):
    (tmp_path / "poison.py").write_text(POISON)
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    server = Supervised.of([], tiny, ["--scheduling-policy", "poison:Poisoned"], variables)
    with contextlib.closing(server):
        streams = [
            Asked(
                server.port, "/v1/completions", LONG | {"prompt": f"w{n}", "stream": True, "max_tokens": 480}
            )
            for n in (2, 3)
        ]
        wait_until(lambda: all(len(stream.events) > 20 for stream in streams))
        asked = Asked(server.port, "/v1/completions", LONG | {"prompt": "w1 " * 13})
        asked.join(200)
        assert asked.status == 500 and "job_ended" in asked.events[0]
        wait_until(lambda: len(restarts(server)) == 4)
        for stream in streams:
            stream.join(200)
            assert stream.status == 200 and not any('"error"' in event for event in stream.events)
        other = Asked(server.port, "/v1/completions", LONG)
        other.join(60)
        assert other.status == 200


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_request_that_goes_on_is_not_why_the_job_ends(tiny):
    """However often."""
    with supervised(tiny) as server:
        body = LONG | {"stream": True, "max_tokens": 400}
        expected = Asked(server.port, "/v1/completions", body)
        expected.join(60)
        asked = Asked(server.port, "/v1/completions", body)
        for n in range(6):
            wait_until(lambda n=n: len(restarts(server)) >= n and asked.events)
            had = len(asked.events)
            wait_until(lambda had=had: len(asked.events) > had or not asked.is_alive())
            wait_until(lambda: is_there("server", server))
            os.kill(find("server", server.process.pid), signal.SIGKILL)
            wait_until(lambda n=n: len(restarts(server)) > n)
        asked.join(60)
        assert asked.said == expected.said


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_newcomers_after_a_fault_cut_off_nobody(tiny):
    """Where as many run as may at once: whoever comes while the job starts, is asked of it first."""
    body = LONG | {"stream": True, "max_tokens": 480}
    with supervised(tiny, "--max-concurrent-requests", "2") as server:
        streams = [Asked(server.port, "/v1/completions", body) for _ in range(2)]
        wait_until(lambda: all(len(stream.events) > 5 for stream in streams))
        os.kill(find("server", server.process.pid), signal.SIGKILL)
        newcomers = [Asked(server.port, "/v1/completions", body) for _ in range(2)]
        for asked in (*streams, *newcomers):
            asked.join(100)
        for stream in streams:
            assert stream.ends and len(stream.events) == 482
        assert all(asked.status == 429 or asked.ends for asked in newcomers)


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


# --- changes, as operators ask for them ---


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (b"{", "no change"),
        (b"[]", "no change"),
        ({"instruction": "explode"}, "explode"),
        ({"instruction": "restart", "speed": 1}, "speed"),
        ({"instruction": "scale"}, "how many workers more"),
        ({"instruction": "restart", "attention": 1}, "restart changes no numbers"),
        ({"instruction": "restart", "timeout": 0}, "timeout=0"),
        ({"instruction": "scale", "attention": 1}, "one process has no workers to add"),
    ],
)
def test_a_change_that_cannot_be_is_refused(server, change, says):
    status, found = ask(server, "/v1/fault_tolerance/apply", change)
    assert status == 400 and says in found["error"]["message"]
    assert ask(server, "/v1/fault_tolerance/status")[1]["status"] == "ready"


def scale(*options):
    words = [sys.executable, "-m", "jaxlamina", "scale", "--attention", "1", *options]
    how = {"capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(words, check=False, cwd=ROOT, env=environment(), **how)


def test_changes_need_the_key(server):
    assert ask(server, "/v1/fault_tolerance/apply", {"instruction": "restart"}, {})[0] == 401
    own = f"http://127.0.0.1:{server.port}"
    for options, says in (
        (("--url", own), "API key is missing"),
        (("--url", own, "--api-key", "secret"), "one process has no workers"),
        (("--url", "http://127.0.0.1:1"), "no answer from http://127.0.0.1:1"),
        (("--url", "nowhere"), "no answer from nowhere"),
    ):
        done = scale(*options)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_a_job_of_so_many_workers():
    job = JobCommand(("python", "-m", "launch.local", "--set", 'dop="1,2"', "--", "serve"), Workers(1, 2, 0))
    more = job.after(Change("scale", attention=1, prefill=1))
    assert more.workers == Workers(1, 3, 1) and str(more.workers) == "DOP (1, 3) and 1 prefill workers"
    assert more.words[-2:] == ("--", "serve")
    assert more.words[3:9] == ("--set", 'dop="1,2"', "--set", 'dop="1,3"', "--set", "prefill_workers=1")
    assert job.after(Change("restart")) is job
    assert job.after(Change("scale", attention=-2)).workers == Workers(1, 0, 0)
    of_starter = replace(job, has_starter=True)
    assert of_starter.after(Change("restart", stop_first=True)) is of_starter
    for change, says in (
        (Change("restart"), "restart with stop_first"),
        (Change("scale", attention=1, stop_first=True), "said in --starter"),
    ):
        with pytest.raises(ValueError, match=says):
            of_starter.after(change)
    for change in (Change("scale", attention=-3), Change("scale", model=-1), Change("scale", prefill=-1)):
        with pytest.raises(ValueError, match="is no job"):
            job.after(change)
    with pytest.raises(ValueError, match=r"DOP \(1, 1000002\) is more than 1024 processes of one host"):
        job.after(Change("scale", attention=10**6))
    assert job.on_each_host("a.module", "kept_kv_folder=/dev/shm/x") == (
        *("python", "-m", "launch.local", "--set", 'dop="1,2"', "--set", "kept_kv_folder=/dev/shm/x"),
        *("--module", "a.module"),
    )


NO_START = """
from pathlib import Path

from jaxlamina.engine.policies import Fifo

if Path(__file__).with_name("broken").exists():
    raise RuntimeError("a policy that cannot be")


class Breaking(Fifo):
    pass
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_does_not_start_any_more_is_given_up(tiny, tmp_path):
    """After five failed starts, where --recovery-timeout is over by then; and its clients hear so."""
    (tmp_path / "breaking.py").write_text(NO_START)
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    options = ["--scheduling-policy", "breaking:Breaking", "--recovery-timeout", "1"]
    server = Supervised.of([], tiny, options, variables)
    with contextlib.closing(server):
        stream = Asked(server.port, "/v1/completions", LONG | {"stream": True, "max_tokens": 480})
        wait_until(lambda: len(stream.events) > 20)
        (tmp_path / "broken").touch()
        os.kill(find("server", server.process.pid), signal.SIGKILL)
        stream.join(200)
        assert '"error"' in stream.events[-2] and stream.events[-1] == "data: [DONE]\n\n"
        assert server.finish(120) not in (0, None)
        assert len(restarts(server)) == 5, server.lines
        assert any("5 times in a row before it was ready; it is given up" in line for line in server.lines)
