"""Servers that are paused, and that get other weights, while clients stream: alone, and below a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading

import numpy as np
import pytest
from checkpoint_examples import tiny_words_folder
from serving import serving
from starlette.requests import Request
from supervised import ON_CPUS, Asked, Supervised, find, restarts, wait_until

from jaxlamina import LLM
from jaxlamina.models import random_params
from jaxlamina.models.config_files import model_config
from jaxlamina.server.api_keys import ApiKeys
from jaxlamina.server.async_engine import AsyncEngine
from jaxlamina.server.errors import ApiError
from jaxlamina.server.gate import check_may_operate
from jaxlamina.server.metrics import Metrics
from jaxlamina.server.protocol import WeightsRequest
from jaxlamina.server.replacing import Replacing
from jaxlamina.supervisor.changes import JobCommand
from jaxlamina.weights.safetensors_io import write_safetensors

LONG = {"prompt": "w1 w2 w3", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 12}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of two models that differ in their weights."""
    a = tiny_words_folder(tmp_path_factory.mktemp("a"), max_position_embeddings=2048)
    b = tmp_path_factory.mktemp("b") / "model"
    shutil.copytree(a, b)
    for weights in b.glob("*.safetensors*"):
        weights.unlink()
    params = random_params(model_config(b / "tiny.toml"), 7, "float32")
    shapes = {name: tuple(x.shape) for name, x in params.items()}
    write_safetensors(b, shapes, iter(params.items()), np.dtype("float32"), 10**9)
    return a, b


@pytest.fixture(scope="module")
def server(folders):
    options = ("--max-num-seqs", "4", "--max-model-len", "512", "--no-warm-up")
    with serving("--model", str(folders[0]), *options) as found:
        ask(found, LONG)  # compiles
        yield found


def ask(server, body):
    return server.post("/v1/completions", body)["choices"][0]["text"]


def begin(server, body=LONG):
    """A stream, of which some tokens have come."""
    asked = Asked(server.port, "/v1/completions", body | {"stream": True})
    wait_until(lambda: len(asked.events) > 5)
    return asked


def text(asked):
    asked.join(60)
    assert asked.events[-1] == "data: [DONE]\n\n", asked.events[-2:]
    found = [json.loads(event.removeprefix("data: ")) for event in asked.events[:-1]]
    return "".join(x["choices"][0]["text"] for x in found)


def is_still(asked, seconds=0.4):
    """Nothing comes for so long."""
    n = len(asked.events)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: len(asked.events) > n, seconds)
    return len(asked.events) == n


def paused(server, mode, more=""):
    return server.post(f"/pause?mode={mode}{more}", None)


@pytest.mark.parametrize("more", ["", "&clear_cache=true"])
def test_requests_stand_still_and_go_on(server, more):
    expected = ask(server, LONG)
    asked = begin(server)
    assert paused(server, "keep", more) == {"status": "paused"}
    is_still(asked, 0.1)  # what was on its way
    late = Asked(server.port, "/v1/completions", SHORT)
    assert is_still(asked) and not asked.ends and late.is_alive()
    assert server.get("/is_paused") == {"is_paused": True}
    assert server.get("/health") == {"status": "ready", "paused": True}
    assert server.metric("jaxlamina:paused") == 1 and server.metric("vllm:num_requests_waiting") >= 1
    assert server.post("/resume", None) == {"status": "running"}
    assert text(asked) == expected
    late.join(60)
    assert late.status == 200 and server.get("/health") == {"status": "ready"}


def test_requests_are_finished_before_a_pause(server):
    expected = ask(server, LONG)
    asked = begin(server)
    paused(server, "wait")
    asked.join(5)
    assert text(asked) == expected
    late = Asked(server.port, "/v1/completions", SHORT)
    late.join(0.5)
    assert late.is_alive()
    server.post("/resume", None)
    late.join(60)
    assert late.status == 200


def test_requests_are_ended_by_a_pause(server):
    asked = begin(server)
    paused(server, "abort")
    asked.join(60)
    assert "aborted" in asked.events[-2] and asked.events[-1] == "data: [DONE]\n\n"
    server.post("/resume", None)
    assert ask(server, SHORT)


def test_weights_change_while_clients_stream(server, folders):
    a, b = map(str, folders)
    of_a, n = ask(server, LONG), server.metric("jaxlamina:weight_updates_total")
    asked = begin(server)
    found = server.post("/update_weights", {"model": b})
    assert found == {"status": "updated", "model": b, "revision": None}
    mixed = text(asked)
    of_b = ask(server, LONG)
    assert len({mixed, of_a, of_b}) == 3 and mixed.split()[:4] == of_a.split()[:4]
    paused(server, "keep")
    server.post("/update_weights", {"model": a, "keep_kv": True})
    assert server.get("/is_paused") == {"is_paused": True}  # as it was
    server.post("/resume", None)
    server.post("/reset_prefix_cache", None)
    assert ask(server, LONG) == of_a
    assert server.metric("jaxlamina:weight_updates_total") == n + 2


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/pause?mode=never", None, "mode"),
        ("/pause?clear_cache=2", None, "clear_cache"),
        ("/update_weights", b"{", "not JSON"),
        ("/update_weights", {}, "model"),
        ("/update_weights", {"model": "none"}, "unknown model"),
        ("/update_weights", {"model": "os:getcwd"}, "is a function"),
        ("/update_weights", {"model": "smollm2-135m-instruct"}, "is another model"),
        ("/update_weights", {"model": "\0"}, "unknown model"),
    ],
)
def test_what_is_wrong_is_said(server, path, body, says):
    status, found = server.request("POST", path, body)
    assert status == 400 and says in found["error"]["message"], found
    assert server.get("/is_paused") == {"is_paused": False} and ask(server, SHORT)


@pytest.mark.parametrize(
    ("host", "key", "may"), [("127.0.0.1", None, True), ("10.0.0.7", None, False), ("10.0.0.7", "k", True)]
)
def test_who_may_operate(host, key, may):
    """With a key, whoever has passed the gate."""
    request = Request({"type": "http", "client": (host, 4711), "headers": []})
    with contextlib.nullcontext() if may else pytest.raises(ApiError, match="this host alone"):
        check_may_operate(request, ApiKeys(key, None))


def test_one_change_at_a_time(folders, monkeypatch):
    llm = LLM(folders[0], max_num_seqs=2, max_model_len=64)
    began, goes_on, load = threading.Event(), threading.Event(), llm.load_weights

    def slow(*asked):
        began.set()
        assert goes_on.wait(30)
        return load(*asked)

    monkeypatch.setattr(llm, "load_weights", slow)

    async def scenario():
        engine = AsyncEngine(llm.engine, Metrics("tiny"), prepare=lambda stopped: None, max_concurrent=9)
        engine.start()
        await engine.started()
        replacing = Replacing(llm, engine)
        first = asyncio.create_task(replacing(WeightsRequest(model=str(folders[1]))))
        await asyncio.to_thread(began.wait, 30)
        with pytest.raises(ApiError, match="being changed already") as refused:
            await replacing(WeightsRequest(model=str(folders[1])))
        assert refused.value.status == 409
        goes_on.set()
        assert (await first)["status"] == "updated"
        assert await engine.stop(30)

    asyncio.run(scenario())
    assert llm.engine.n_weight_updates == 1


# --- below a supervisor ---


def test_a_command_of_other_weights():
    words = ("jaxlamina", "serve", "--model", "a", "--revision=1")
    job = JobCommand((*words, "--uds"), has_starter=True).of_weights("b", "2")
    assert job.words == (*words, "--weights=b", "--weights-revision=2", "--uds") and job.has_starter
    assert job.of_weights("c", None).words == (*words, "--weights=c", "--uds")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "job", [[], pytest.param(["launch", *ON_CPUS], marks=pytest.mark.slow)], ids=["one process", "ranks"]
)
def test_a_supervised_job_is_started_again_as_it_was_changed(folders, tmp_path, job):
    """With its new weights, its own tokenizer and end tokens, and paused."""
    a, b = folders
    bare = shutil.copytree(b, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"eos_token_id": [*range(64)]}))
    options = ("--journal", str(tmp_path / "journal"))
    with contextlib.closing(Supervised.of(job, a, options)) as server:
        of_a = ask(server, LONG)
        asked = begin(server)
        assert server.request("POST", "/update_weights", {"model": "none"})[0] == 400
        assert server.post("/update_weights", {"model": str(bare)})["status"] == "updated"
        mixed = text(asked)
        of_b, may_end = ask(server, LONG), ask(server, SHORT | {"ignore_eos": False})
        assert len({mixed, of_a, of_b}) == 3
        asked = begin(server, LONG | {"max_tokens": 480})
        pause = threading.Thread(target=server.post, args=("/pause?mode=wait", None), daemon=True)
        pause.start()
        wait_until(lambda: "paused" in server.get("/health"))
        assert pause.is_alive()  # so it waits yet
        text(asked)
        pause.join(60)
        assert server.post("/resume", None) == {"status": "running"}
        asked = begin(server)
        assert server.post("/pause?mode=keep", None) == {"status": "paused"}
        os.kill(find("server", server.process.pid), signal.SIGKILL)
        wait_until(lambda: len(restarts(server)) == 1)
        wait_until(lambda: server.request("GET", "/health")[0] == 200, 60)
        assert server.get("/health") == {"status": "ready", "recoveries": 1, "paused": True}
        assert server.get("/is_paused") == {"is_paused": True} and is_still(asked)
        assert server.post("/resume", None) == {"status": "running"}
        assert text(asked) == of_b
        assert ask(server, LONG) == of_b
        assert ask(server, SHORT | {"ignore_eos": False}) == may_end
        [card] = server.get("/v1/models")["data"]
        assert card["id"] == str(a)  # requests call it as before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_spare_has_the_new_weights(folders):
    a, b = folders
    with contextlib.closing(Supervised.of([], a, ("--spare", "1"))) as server:

        def stands_by(n):
            return sum("a spare stands by" in line for line in server.lines) == n

        wait_until(lambda: stands_by(1), 120)
        of_a = ask(server, LONG)
        server.post("/update_weights", {"model": str(b)})
        of_b = ask(server, LONG)
        wait_until(lambda: stands_by(2), 120)
        os.kill(find("server", server.process.pid), signal.SIGKILL)
        wait_until(lambda: len(restarts(server)) == 1)
        assert ask(server, LONG) == of_b != of_a
