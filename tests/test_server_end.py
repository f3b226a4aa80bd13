"""A server's life from its start to its end: compiled before it is ready, drained before it ends, also over
ranks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from checkpoint_examples import tiny_words_folder
from serving import ROOT, STARTED, WORDS_TEMPLATE, environment, serving

from jaxlamina import LLM, SamplingParams, UserError
from jaxlamina.run.executor import WrappedExecutor
from jaxlamina.server.async_engine import AsyncEngine, Prompt, Unavailable
from jaxlamina.server.metrics import Metrics
from jaxlamina.server.pieces import HEADER
from jaxlamina.server.run import App
from jaxlamina.server.settings import Settings

LONG = {"prompt": "w1 w2 w3", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


class Stream(threading.Thread):
    """A request whose events are read as they come; ``begun`` with the first."""

    def __init__(self, server, body):
        super().__init__(daemon=True)
        self.server, self.body = server, body | {"stream": True}
        self.begun, self.events = threading.Event(), []
        self.start()
        assert self.begun.wait(60)

    def run(self):
        from jaxlamina.server.client import Client

        try:
            for event in Client(self.server.url).stream("/v1/completions", self.body):
                self.events.append(event)
                self.begun.set()
        except ValueError as error:
            self.events.append(str(error))
        self.begun.set()


def test_running_requests_are_finished_and_new_ones_refused(tiny):
    with serving("--model", str(tiny), "--no-warm-up", "--shutdown-timeout", "120", before=STARTED) as server:
        stream = Stream(server, LONG)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.request("GET", "/health")[0] == 503)
        status, found = server.request("POST", "/v1/completions", {"prompt": "w1"})
        assert status == 503 and found["error"]["code"] == "service_unavailable", found
        assert server.request("GET", "/health")[1]["status"] == "draining"
        assert server.finish(120) == 0
        stream.join(10)
    written = "".join(c["text"] for event in stream.events for c in event["choices"])
    assert len(written.split()) == 400 and stream.events[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("Traceback" in line for line in server.lines), server.lines


def test_programs_that_are_compiled_behind_are_not_waited_for(tiny):
    with serving("--model", str(tiny), "--uvicorn-log-level", "info", before=STARTED) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.finish(120) == 0
    assert not any("compiled all" in line for line in server.lines), server.lines
    assert not any("Traceback" in line or "Fatal" in line for line in server.lines), server.lines


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_what_is_not_finished_in_time_is_told_so(tiny, how):
    with serving("--model", str(tiny), "--no-warm-up", "--shutdown-timeout", "0.3", before=STARTED) as server:
        stream = Stream(server, LONG)
        began = time.monotonic()
        server.process.send_signal(how)
        assert server.finish(60) == 0 and time.monotonic() - began < 30
        stream.join(10)
    assert "shut down before this request was finished" in stream.events[-1]
    assert not any("Traceback" in line for line in server.lines), server.lines


def test_it_answers_before_all_is_compiled(tiny):
    """What comes then, whole and in the same words as later; and it says how far it is."""
    options = ("--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    with serving("--model", str(tiny), *options, ready=False, before=STARTED) as server:
        server.wait_for("ready: ")
        body = {"prompt": "w1 w2", "max_tokens": 8, "temperature": 0, "logprobs": 1}
        before = server.post("/v1/completions", body)["choices"][0]
        server.wait_for("INFO:     compiled all 6 programs")
        said = [line for line in server.lines if "ready: " in line or "compiled all" in line]
        assert "ready: " in said[0] and "compiled all" in said[1]
        assert server.post("/v1/completions", body)["choices"][0]["text"] == before["text"]
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0
    assert not any("Traceback" in line for line in server.lines), server.lines


def test_it_waits_for_all_where_told(tiny):
    options = (
        "--max-model-len",
        "64",
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "16",
        "--wait-for-all",
    )
    with serving(
        "--model", str(tiny), "--chat-template", WORDS_TEMPLATE, *options, ready=False, before=STARTED
    ) as server:
        status, found = server.request("GET", "/health")
        if status == 503:  # it may be ready by now
            assert found["status"] == "starting" and 0 <= found["compiled"] <= found["of"] == 3
            status, found = server.request("POST", "/v1/completions", {"prompt": "w1"})
            assert status == 503 and "compiled" in found["error"]["message"]
        server.wait_for("ready: ")
        assert server.get("/health") == {"status": "ready"}
        body = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 4}
        assert server.post("/v1/chat/completions", body)["usage"]["completion_tokens"] == 4
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0


@pytest.mark.slow
def test_a_start_that_is_interrupted_ends_well(tiny):
    options = ("--max-num-seqs", "16")  # hundreds of programs
    with serving("--model", str(tiny), *options, ready=False, before=STARTED) as server:
        assert server.request("GET", "/health")[0] == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.finish(90) == 0


TAKES_ALL = """
import os, signal, time
from jaxlamina.engine.policies import Fifo

class TakesAll(Fifo):
    def __init__(self):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except SystemExit:
            print("taken", flush=True)
"""


def test_a_start_ends_well_though_its_end_is_taken_for_something_else(tiny, tmp_path):
    (tmp_path / "takes_all.py").write_text(TAKES_ALL)
    words = [sys.executable, "-m", "jaxlamina", "serve", "--port", "0", "--model", str(tiny)]
    done = subprocess.run(
        [*words, "--scheduling-policy", "takes_all:TakesAll", "--no-warm-up"],
        check=False, capture_output=True, text=True, timeout=60, cwd=ROOT,
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "taken\n"), done.stderr
    assert "ready: " not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.slow]), "xla"])
def test_rank_0_serves(tiny, transport):
    llm = LLM(str(tiny), max_num_seqs=2, max_model_len=64)
    [wanted] = llm.generate("w1 w2 w3", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    on_cpus = ("--set", "model_platform=cpu", "--set", "attention_platform=cpu", "--set", "max_model_len=64")
    on_cpus += ("--local-attention", "0")  # or attention workers would have nothing to do
    launch = ("launch", "--dop", "1,1", "--transport", transport, "--model", str(tiny), *on_cpus, "--")
    options = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--shutdown-timeout", "20")
    options += ("--pool-metrics-interval", "0.05")
    with serving(*options, before=("-m", "jaxlamina", *launch)) as server:
        ranks = children(server.process.pid)
        found = server.post("/v1/completions", LONG | {"max_tokens": 12})
        assert found["choices"][0]["text"] == wanted.text and found["model"] == str(tiny)
        only = server.post("/v1/completions", LONG | {"max_tokens": 3, "allowed_token_ids": [5]})
        assert only["choices"][0]["text"].split() == ["w5"] * 3
        check_pools(server)
        stream = Stream(server, LONG | {"max_tokens": 50})
        server.process.send_signal(signal.SIGTERM)
        assert server.finish(90) == 0, server.lines
        stream.join(10)
    assert stream.events[-1]["choices"][0]["finish_reason"] == "length", stream.events[-1]
    assert ranks and not any(Path(f"/proc/{pid}/exe").exists() for pid in ranks)


def test_what_the_device_does_under_load_is_told_once(tiny):
    options = ("--no-split", "--max-num-seqs", "2", "--max-model-len", "64", "--no-warm-up")
    with serving(
        "--model", str(tiny), *options, "--profile-after", "0.05", "--profile-s", "0.1", before=STARTED
    ) as server:
        told = "INFO:     under load: "
        until = time.monotonic() + 60
        while not (found := [line for line in server.lines if line.startswith(told)]):
            assert time.monotonic() < until, server.lines
            server.post("/v1/completions", LONG | {"max_tokens": 40})
        [rank] = json.loads(found[0].removeprefix(told))["ranks"]
        assert rank["error"] == "" and 0 < rank["idle"] < 1 and rank["exchange"] == 0
        assert any(" s under load: " in line for line in server.lines)
        server.post("/v1/completions", LONG | {"max_tokens": 40})
        assert sum(line.startswith(told) for line in server.lines) == 1


def test_when_a_rank_is_killed_clients_are_told(tiny):
    """Where nobody starts it again: by an event of the stream, not by a connection that is cut."""
    on_cpus = (
        "--set",
        "model_platform=cpu",
        "--set",
        "attention_platform=cpu",
        "--set",
        "max_model_len=2048",
    )
    launch = ("launch", "--dop", "1,1", "--transport", "xla", "--model", str(tiny), *on_cpus, "--")
    options = ("--max-num-seqs", "2", "--no-warm-up", "--no-supervise")
    with serving(*options, before=("-m", "jaxlamina", *launch)) as server:
        server.post("/v1/completions", LONG | {"max_tokens": 2})
        [rank] = [pid for pid in children(server.process.pid) if told(pid, "JAXLAMINA_RANK") == "1"]
        stream = Stream(server, LONG | {"max_tokens": 2000})
        os.kill(rank, signal.SIGKILL)
        assert server.finish(90) != 0
        stream.join(10)
    assert "the engine has failed: " in stream.events[-1] and "rank 1" in stream.events[-1], stream.events[-1]


def told(pid, name):
    """A variable that a launcher gave one of its ranks."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(x.partition("=")[::2] for x in variables).get(name) if b"launch" in words else None


def check_pools(server):
    """A decode step was recorded while the answer was written: both pools worked, and their parts make up the
    step."""
    assert server.metric("jaxlamina:pool_recordings_total") > 0
    pools = ("model", "attention")
    of = {
        pool: {
            part: server.metric("jaxlamina:pool_step_seconds", pool=pool, part=part)
            for part in (pool, "exchange", "other", "bubble")
        }
        for pool in pools
    }
    assert all(of[pool][pool] > 0 for pool in pools)
    assert sum(of["model"].values()) == pytest.approx(sum(of["attention"].values()))
    for pool in pools:
        share = server.metric("jaxlamina:pool_bubble_share", pool=pool)
        assert share == pytest.approx(of[pool]["bubble"] / sum(of[pool].values()))


def children(pid):
    """All processes below one."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children(child)]
    return found


class Broken(RuntimeError):
    pass


class Failing(WrappedExecutor):
    """Runs so many steps of rows, and no more."""

    def __init__(self, executor, why, after=0):
        super().__init__(executor)
        self.why, self.n_left = why, after

    def run(self, step):
        self.n_left -= step.decodes is not None
        if self.n_left < 0:
            raise Broken(self.why)
        return super().run(step)


def test_when_the_engine_fails_everybody_hears_of_it(tiny):
    llm = LLM(str(tiny), max_num_seqs=2, max_model_len=64)
    llm.engine.executor = Failing(llm.executor, "the device is gone", after=5)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    async def ask(engine):
        events = []
        answers = await engine.submit([Prompt([1, 2, 3])], params)
        with pytest.raises(Unavailable, match="the device is gone"):
            async for _, event in answers:
                events.append(event)
        answers.close()
        return len(events)

    async def scenario():
        engine = AsyncEngine(llm.engine, Metrics("tiny"), prepare=lambda stopped: None, max_concurrent=9)
        engine.start()
        assert await engine.started()
        counts = await asyncio.gather(ask(engine), ask(engine), ask(engine))  # the third waits for a row
        assert max(counts) >= 5
        assert engine.state == "failed" and "Broken: the device is gone" in engine.reason
        for late in (engine.submit([Prompt([1])], params), engine.ask(lambda _: 0, 5)):
            with pytest.raises(Unavailable, match="the device is gone"):
                await late
        await engine.drain(5)
        assert await engine.stop(5) and engine.state == "failed"

    asyncio.run(scenario())


def test_a_caller_that_leaves_frees_its_slots_and_the_others_go_on(tiny):
    llm = LLM(str(tiny), max_num_seqs=4, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    async def scenario():
        engine = AsyncEngine(llm.engine, Metrics("tiny"), prepare=lambda stopped: None, max_concurrent=9)
        engine.start()
        await engine.started()
        stays = await engine.submit([Prompt([1, 2, 3])], params)
        leaves = await engine.submit([Prompt([4, 5]), Prompt([6, 7])], params)
        n = 0
        async for _, _event in leaves:
            n += 1
            if n == 3:
                break
        leaves.close()
        leaves.close()  # said twice
        steps = await engine.ask(lambda e: e.stats.n_steps, 60)
        running = await engine.ask(lambda e: len(e.scheduler.running), 60)
        assert running == 1 and steps < 60  # the others' slots are free before the next step
        events = [event async for _, event in stays]
        assert len(events) == 60 and events[-1].output is not None
        assert (await engine.ask(lambda e: e.kv_stats()["kv_slots_used"], 60)) == 0
        await engine.ask(lambda e: e.check_integrity(), 60)
        assert engine.n_open == 0
        await engine.stop(60)
        assert engine.state == "stopped"
        with pytest.raises(Unavailable, match="shutting down"):
            await engine.submit([Prompt([1])], params)

    asyncio.run(scenario())


def test_a_port_in_use_and_a_model_that_is_not_there_are_one_line(tiny, capsys):
    from jaxlamina.cli.main import main

    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["serve", "--model", str(tiny), "--port", str(other.getsockname()[1])]) == 2
    assert main(["serve", "--model", "no-such-model", "--port", "0"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: cannot serve at 127.0.0.1:") and "unknown model" in second


def test_a_model_that_cannot_be_run_ends_the_server(tiny):
    llm = LLM(str(tiny), max_num_seqs=1, max_model_len=32)

    llm.engine.executor = Failing(llm.executor, "no such kernel")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(UserError, match="cannot be run: Broken: no such kernel"),
    ):
        App(llm, Settings(("tiny",)), lambda n_done, n_all: None, lambda: None).run(listener)


def test_a_spares_server_leaves_its_folder_alone_before_its_turn(tiny, tmp_path):
    """Another server writes there until then; what that has left is found."""
    llm, ready = LLM(str(tiny), max_num_seqs=2, max_model_len=64), threading.Event()
    socket_path, folder = tmp_path / "job.sock", tmp_path / "files"
    settings = Settings(
        ("tiny",), uds=str(socket_path), supervisor="s", files_dir=folder, warm_up=False, dashboard=False
    )
    app = App(llm, settings, lambda n_done, n_all: None, ready.set)
    half_written = folder / "files" / "file-1.new"
    half_written.touch()
    state = {
        "id": f"batch-{1:032x}", "endpoint": "/v1/completions", "input_file_id": f"file-{1:032x}", "status": "completed",
        "created_at": 1, "expires_at": 2, "request_counts": {"total": 0, "completed": 0, "failed": 0}, "object": "batch",
    }  # fmt: skip
    (folder / "batches" / f"{state['id']}.json").write_text(json.dumps(state))
    assert half_written.exists()
    thread = threading.Thread(target=app.run, daemon=True)
    thread.start()
    try:
        assert ready.wait(60) and not half_written.exists()
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket_path)), base_url="http://job"
        ) as client:
            found = client.get("/v1/batches", headers={HEADER: "s"}, timeout=60).json()
        assert [batch["id"] for batch in found["data"]] == [state["id"]]
    finally:
        app.end()
        thread.join(60)
    assert not thread.is_alive()
