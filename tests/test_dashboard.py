"""The live page: its files, the numbers it draws against `/metrics` of real servers, and the page itself in a
browser without a window."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import threading
import time

import pytest
from browser import browsing, chromium
from checkpoint_examples import tiny_words_folder
from quick_to_compile import FLAGS
from serving import serving
from test_faults import Supervised, find
from test_timeline import two_ranks

from jaxlamina import LLM
from jaxlamina.job.roles import Pool
from jaxlamina.profiling.timeline import timeline
from jaxlamina.server.dashboard import PAGE, RECORD, STATE, WATCH
from jaxlamina.server.dashboard.gantt import gantt_of
from jaxlamina.server.dashboard.page import STATIC
from jaxlamina.server.run import App
from jaxlamina.server.settings import Settings

KEY = {"Authorization": "Bearer secret"}
QUICK = {"XLA_FLAGS": " ".join(FLAGS), "JAXLAMINA_API_KEY": "secret"}
FEW = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--no-warm-up", "--dashboard")
# (number of a sample, metric)
SAME = (
    ("n_running", "vllm:num_requests_running"),
    ("n_waiting", "vllm:num_requests_waiting"),
    ("n_generated_tokens", "vllm:generation_tokens_total"),
    ("n_prompt_tokens", "vllm:prompt_tokens_total"),
    ("n_preemptions", "vllm:num_preemptions_total"),
    ("n_steps", "jaxlamina:engine_steps_total"),
    ("kv_slots", "jaxlamina:kv_slots"),
    ("kv_slots_used", "jaxlamina:kv_slots_used"),
    ("kv_slots_cached", "jaxlamina:kv_slots_cached"),
    ("first_s", "vllm:time_to_first_token_seconds_sum"),
    ("n_first", "vllm:time_to_first_token_seconds_count"),
    ("next_s", "vllm:inter_token_latency_seconds_sum"),
    ("n_next", "vllm:inter_token_latency_seconds_count"),
)
needs_browser = pytest.mark.skipif(
    chromium() is None, reason="no Chromium: apt-get install chromium fonts-dejavu-core"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(tiny):
    """Over two ranks that both keep KV, with a key; steps are recorded when they are asked for."""
    of_job = ("--set", "model_platform=cpu", "--set", "attention_platform=cpu", "--set", "max_model_len=512")
    of_job += ("--local-attention", "0.5", "--partition", "tokens", "--no-supervise", "--model", str(tiny))
    launch = ("-m", "jaxlamina", "launch", "--dop", "1,1", "--transport", "xla", *of_job, "--")
    options = (*FEW, "--pool-metrics-interval", "3600")
    with serving(*options, before=launch, variables=QUICK) as found:
        yield found


@contextlib.contextmanager
def load(server, n=6, headers=KEY):
    """More clients than there are rows, one request after another, until the block is over."""
    over, statuses = threading.Event(), []

    def ask(i):
        body = {"prompt": "w1 w2 w3 " * (1 + i % 3), "max_tokens": 20 + 5 * i, "ignore_eos": True}
        while not over.is_set():
            with contextlib.suppress(OSError):
                statuses.append(server.request("POST", "/v1/completions", body, headers)[0])

    clients = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(n)]
    for client in clients:
        client.start()
    try:
        yield statuses
    finally:
        over.set()
        for client in clients:
            client.join(120)


def state(server, after=0.0, recorded_after=0.0, headers=KEY):
    status, found = server.request(
        "GET", f"{STATE}?after={after}&recorded_after={recorded_after}", None, headers
    )
    assert status == 200, found
    return found


def wait_for(read, holds, deadline_s=90):
    until = time.monotonic() + deadline_s
    while not holds(found := read()):
        assert time.monotonic() < until, found
        time.sleep(0.1)
    return found


# --- the page's files ---


def test_the_page_takes_nothing_from_elsewhere():
    files = {path.name: path.read_text() for path in STATIC.iterdir()}
    page = files["index.html"]
    assert set(re.findall(r'"dashboard/static/([^"]+)"', page)) <= set(files)
    for name, text in files.items():
        others = [
            url for url in re.findall(r"https?://[^\"' ]+", text) if not url.startswith("http://www.w3.org/")
        ]
        assert not others, (name, others)
    # What its Content-Security-Policy would not run.
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\bsrc=)", page)
    assert "innerHTML" not in "".join(files.values())


def test_a_server_without_the_option_has_no_page(tiny):
    llm = LLM(str(tiny), max_num_seqs=2, max_model_len=64)
    for dashboard in (False, True):
        settings = Settings(served_model_names=("tiny",), dashboard=dashboard, warm_up=False)
        app = App(llm, settings, lambda n_done, n_all: None, lambda: None)
        try:
            paths = {getattr(route, "path", "") for route in app.app.routes}
        finally:
            app.close()
        assert {PAGE, STATE, RECORD, WATCH} & paths == ({PAGE, STATE, RECORD, WATCH} if dashboard else set())


# --- its numbers ---


def test_lanes_fill_the_step_whose_length_is_the_median():
    found = timeline(two_ranks(n_steps=4))
    drawn = gantt_of(found, 12.0)
    assert drawn["at"] == 12.0 and drawn["step_ms"] == 10.0
    for lane, rank in zip(drawn["lanes"], (0, 1), strict=True):
        ends = [start + length for *_, start, length in lane["spans"]]
        assert [start for *_, start, _ in lane["spans"]] == [0.0, *ends[:-1]] and ends[-1] == 10_000.0
        ms = dict.fromkeys(drawn["kinds"], 0.0)
        for kind, _, _, _, length in lane["spans"]:
            ms[drawn["kinds"][kind]] += length / 1e3
        assert ms == pytest.approx(found.ms([rank]))


def test_the_state_needs_the_key_and_the_page_does_not(server):
    assert server.request("GET", PAGE)[0] == 200
    for method, path in (("GET", STATE), ("POST", RECORD), ("POST", WATCH)):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert server.request(method, path, None, headers)[0] == 401, path
    for path in ("/dashboard/static/../state.py", "/dashboard/static/none.js"):
        assert server.request("GET", path)[0] == 404
    assert server.request("GET", f"{STATE}?after=soon", None, KEY)[0] == 400


def test_the_numbers_are_those_of_the_metrics(server):
    with load(server) as statuses:
        # For a moment requests wait before any is admitted.
        found = wait_for(
            lambda: state(server),
            lambda x: x["samples"] and min(x["samples"][-1][n] for n in ("n_waiting", "n_running")) > 0,
        )
        running, waiting = (found["requests"][x] for x in ("running", "waiting"))
        assert (
            0 < len(running) <= 4
            and waiting
            and {r["max_tokens"] for r in running + waiting} <= {20 + 5 * i for i in range(6)}
        )
        first = found["samples"][-1]
        found = wait_for(
            lambda: state(server, first["t"]),
            lambda x: x["samples"] and x["samples"][-1]["n_generated_tokens"] > first["n_generated_tokens"],
        )
        assert all(sample["t"] > first["t"] for sample in found["samples"])
    assert set(statuses) == {200}
    time.sleep(0.6)  # until another sample may be taken
    found = state(server)
    last = found["samples"][-1]
    for number, metric in SAME:
        assert last[number] == pytest.approx(server.metric(metric)), metric
    assert last["n_generated_tokens"] > 100 and last["decode_s"] > 0 and last["predicted_step_ms"] is None
    assert found["server"]["state"] == "ready" and len(found["ranks"]) == 2
    # By tokens each worker holds some: together what requests and the prefix cache do, and what was freed since
    # the latest step.
    assert [held["pool"] for held in found["kv"]] == ["attention", "model"] and 0 < last["local_share"] < 1
    freed = sum(held["n_used"] for held in found["kv"]) - last["kv_slots_used"] - last["kv_slots_cached"]
    assert 0 <= freed <= 4 * 60 and all(held["n_used"] > 0 for held in found["kv"])


def test_samples_are_half_a_second_apart_however_many_pages_ask(server):
    began = time.time()
    while time.time() - began < 1.6:
        found = state(server, after=began)
    times = [sample["t"] for sample in found["samples"]]
    assert 2 <= len(times) <= 4 and min(b - a for a, b in itertools.pairwise(times)) > 0.45


def test_a_step_is_recorded_when_it_is_asked_for(server):
    before = state(server)
    assert before["pools"]["every_s"] == 3600
    with load(server):
        assert server.request("POST", RECORD, None, KEY) == (200, {"status": "due"})
        found = wait_for(
            lambda: state(server), lambda x: x["pools"]["n_recorded"] > before["pools"]["n_recorded"]
        )
    step = found["recordings"][-1]
    pools: list[Pool] = [lane["pool"] for lane in step["lanes"]]
    assert pools == ["model", "attention"] and step["step_ms"] > 0
    for lane in step["lanes"]:
        assert sum(length for *_, length in lane["spans"]) == pytest.approx(1e3 * step["step_ms"])
    assert not state(server, recorded_after=step["at"])["recordings"]
    for pool, seconds in found["pools"]["seconds"].items():
        for part, value in seconds.items():
            assert value == pytest.approx(server.metric("jaxlamina:pool_step_seconds", pool=pool, part=part))


def test_devices_are_watched_while_steps_run(server):
    with load(server):
        status, found = server.request("POST", f"{WATCH}?seconds=0.5", None, KEY)
    assert status == 200 and len(found["ranks"]) == 2 and found["n_decode_steps"] > 0
    for rank in found["ranks"]:
        assert rank["error"] == "" and rank["compute"] > 0
        assert rank["compute"] + rank["exchange"] + rank["idle"] == pytest.approx(1)
    assert server.request("POST", f"{WATCH}?seconds=100", None, KEY)[0] == 400


def test_one_process_says_what_it_has(tiny):
    """And what a cost model predicts, where there is one."""
    llm = LLM(str(tiny), split=False, max_num_seqs=2, max_model_len=64)
    settings = Settings(served_model_names=("tiny",), dashboard=True, warm_up=False)

    async def read():
        from jaxlamina.server.dashboard.state import DashboardState

        app = App(llm, settings, lambda n_done, n_all: None, lambda: None)
        app.engine.start()
        try:
            assert await app.engine.started()
            of_model = DashboardState(app.engine, app.metrics, "tiny", lambda: (0, 0), predict=lambda _: 12.5)
            with pytest.raises(ValueError, match="--pool-metrics-interval"):
                await of_model.record()
            return await of_model.read()
        finally:
            assert await app.engine.stop(30)
            app.close()

    found = asyncio.run(read())
    assert found["pools"] is None and found["ranks"] == [] and found["recordings"] == []
    assert found["kv"] == [{"pool": "model", "n_used": None, "n_slots": llm.executor.n_slots}]
    assert found["samples"][-1]["predicted_step_ms"] == 12.5


# --- the page ---


@needs_browser
def test_the_page_shows_a_load(server):
    with load(server), browsing() as page:
        page.open(f"{server.url}{PAGE}/")  # which leads to the page
        page.wait_for("!document.querySelector('#key-form').hidden")
        assert page.run("location.pathname") == PAGE
        page.call("Input.insertText", text="wrong")
        page.press("Enter", 13)
        page.wait_for("!document.querySelector('#key-error').hidden")
        page.call("Input.insertText", text="secret")
        page.press("Enter", 13)
        page.wait_for("document.querySelector('#tile-requests .value').innerText.trim() === '4'")
        assert page.run("localStorage.length") == 0 and "secret" not in page.run("document.cookie")
        page.wait_for("document.querySelectorAll('#charts path').length >= 4")
        page.wait_for("document.querySelectorAll('#requests tbody tr').length > 4")
        # A recorded step, drawn, and what it was made of.
        n = page.run("document.querySelectorAll('#recorded button').length")
        page.run("document.querySelector('#record').click()")
        page.wait_for(f"document.querySelectorAll('#recorded button').length > {n}")
        assert page.run("document.querySelectorAll('#lanes tbody tr').length") == 2
        painted = "document.querySelector('#gantt')"
        colors = page.run(
            f"new Set({painted}.getContext('2d').getImageData(0, 0, {painted}.width, {painted}.height).data).size"
        )
        assert colors > 10
        # Its line moves by itself, and by keys once it stands.
        at = f"Number({painted}.getAttribute('aria-valuenow'))"
        before = page.run(at)
        page.wait_for(f"{at} !== {before}")
        page.run("document.querySelector('#play').click(), document.querySelector('#gantt').focus()")
        before = page.run(at)
        page.press("End", 35)
        assert page.run(at) > before
        said = page.run(f"{painted}.getAttribute('aria-valuetext')")
        assert "rank 0 · model 0" in said and "rank 1 · attention 0" in said
        said = float(
            page.run("document.querySelector('#tile-kv .under').innerText").split(" of ")[1].replace(",", "")
        )
        assert said == server.metric("jaxlamina:kv_slots")
        # On a phone nothing is wider than the page.
        page.size(390, 844)
        page.wait_for("innerWidth === 390 && document.documentElement.scrollWidth <= 390")
    assert not [line for line in page.said if "401" not in line], page.said


@needs_browser
def test_a_prediction_is_drawn_only_where_there_is_one(server):
    """The page gets numbers of the real server; to the second one a prediction is added on the way."""
    adding = """
      const real = window.fetch;
      window.fetch = async (...asked) => {
        const answer = await real(...asked), found = await answer.clone().json();
        if (!found.samples) return answer;
        for (const sample of found.samples) sample.predicted_step_ms = 7.25;
        return new Response(JSON.stringify(found));
      };
    """
    for predicted in (False, True):
        with browsing() as page:
            page.open(f"{server.url}{PAGE}")
            page.wait_for("document.querySelector('#key')")
            page.call("Page.addScriptToEvaluateOnNewDocument", source=adding if predicted else "")
            page.run("sessionStorage.setItem('jaxlamina-key', 'secret'), location.reload()")
            page.wait_for("document.querySelector('#tile-step')")
            assert ("predicted 7.25 ms" in page.text("#tile-step")) == predicted
            drawn = "[...document.querySelectorAll('.legend li')].some((x) => !x.hidden && x.innerText.startsWith('predicted'))"
            assert page.run(drawn) == predicted


@pytest.mark.slow
def test_while_the_job_is_started_again_the_state_says_so(tiny):
    with contextlib.closing(
        Supervised.of([], tiny, ("--dashboard",), {"XLA_FLAGS": QUICK["XLA_FLAGS"]})
    ) as server:
        assert server.request("GET", PAGE)[0] == 200
        found = wait_for(lambda: state(server), lambda x: x.get("samples"))
        assert found["supervisor"]["status"] == "ready" and found["supervisor"]["recoveries"] == []
        with browsing() if chromium() else contextlib.nullcontext() as page:
            if page:
                page.open(f"{server.url}{PAGE}")
                page.wait_for("document.querySelector('#state').innerText === 'ready'")
            os.kill(find("server", server.process.pid), signal.SIGKILL)
            found = wait_for(lambda: state(server), lambda x: "server" not in x)
            assert found["supervisor"]["status"] in ("ready", "recovering")  # it may not have been seen yet
            if page:
                page.wait_for("document.querySelector('#banner').innerText.includes('started again')")
            found = wait_for(lambda: state(server), lambda x: "server" in x)
            assert [x["cause"] for x in found["supervisor"]["recoveries"]] == ["killed"]
            if page:
                page.wait_for("document.querySelector('#banner').hidden")
                page.wait_for("document.querySelectorAll('#recoveries tbody tr').length === 1")
