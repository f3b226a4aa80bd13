"""Batches at a real server where something is wrong: with a line, with the folder, with the disk, with the
server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from batch_requests import client_of, line, results, start, submit, wait
from checkpoint_examples import tiny_words_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlamina.server.batch_files import Line, Results, Starts
from jaxlamina.server.files import Files, new_id, write_json


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


def words(i: int, n_tokens: int) -> dict:
    return {"prompt": f"w{i} w5", "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}


def text_of(result: dict) -> str:
    return result["response"]["body"]["choices"][0]["text"]


def _openai(body: dict) -> dict:
    return {k: v for k, v in body.items() if k != "ignore_eos"} | {"extra_body": {"ignore_eos": True}}


# --- the disk ---


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of half a MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip(f"a file system of its own needs root: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path):
    with open(path, "wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass


def test_a_full_disk_ends_a_batch_for_good_and_leaves_no_part_of_an_upload(tiny, small_disk):
    with start(tiny, small_disk) as server, client_of(server) as client:
        free = shutil.disk_usage(small_disk).free
        with pytest.raises(openai.APIStatusError) as error:
            client.files.create(file=("large.jsonl", b"x" * 2**20), purpose="batch")
        assert error.value.status_code == 507 and "no room" in error.value.message
        assert shutil.disk_usage(small_disk).free == free and not list((small_disk / "files").iterdir())
        batch = submit(client, [line(str(i), **words(i % 60, 20)) for i in range(400)])
        server.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)
        fill(small_disk / "ballast")
        batch = wait(client, batch)
        assert batch.status == "failed" and batch.errors.data[0].code == "io_error"
        n_done = batch.request_counts.completed
        assert 2 <= n_done < 400
        with pytest.raises(openai.APIStatusError) as error:
            client.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        assert error.value.status_code == 507 and [x.id for x in client.batches.list()] == [batch.id]
        assert any(f"{batch.id} is failed" in text for text in server.lines)
        server.process.kill()
        server.finish()
    (small_disk / "ballast").unlink()
    with start(tiny, small_disk) as server, client_of(server) as client:
        server.wait_until(lambda: client.batches.retrieve(batch.id).output_file_id)
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "failed" and batch.errors.data[0].code == "io_error"
        assert len(results(client, batch.output_file_id)) == n_done
        assert server.metric("vllm:generation_tokens_total") == 0


# --- what the folder holds ---


def state(input_id: str, **more) -> dict:
    now = int(time.time())
    return {
        "id": new_id("batch"),
        "object": "batch",
        "endpoint": "/v1/completions",
        "errors": None,
        "input_file_id": input_id,
        "completion_window": "24h",
        "status": "in_progress",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + 3600,
        "request_counts": {"total": 3, "completed": 1, "failed": 0},
        "metadata": None,
    } | more


def facts(file_id: str) -> dict:
    return {
        "id": file_id,
        "object": "file",
        "bytes": 1,
        "created_at": 1,
        "filename": "a",
        "purpose": "batch",
        "status": "processed",
    }


def result(custom_id: str) -> bytes:
    response = {"status_code": 200, "request_id": "1", "body": {"choices": []}}
    return (
        json.dumps({"id": "1", "custom_id": custom_id, "response": response, "error": None}).encode() + b"\n"
    )


N_TOKENS = 300  # of a line; the server has room for three such


@pytest.fixture(scope="module")
def damaged(tiny, tmp_path_factory):
    """A server over a folder with every kind of damage, and what is in it."""
    tmp_path = tmp_path_factory.mktemp("damaged")
    files, batches = tmp_path / "files", tmp_path / "batches"
    files.mkdir()
    batches.mkdir()
    whole, gone, broken = new_id("file"), new_id("file"), new_id("file")
    write_json(files / f"{whole}.json", facts(whole))
    lines = [line(str(i), **words(i, 3)) for i in range(3)]
    long_key = '{"custom_id": "key", "method": "POST", "url": "/v1/completions", "body": {"prompt": "w1", "logit_bias": {"%s": 1}}}'
    raw = "".join(json.dumps(x) + "\n" for x in lines) + long_key % ("1" * 5000) + "\n"
    (files / whole).write_text(raw)
    write_json(files / f"{gone}.json", facts(gone))  # its content is not there
    (files / f"{broken}.json").write_text('{"id": ')
    (files / broken).write_text("x")
    (files / f"{new_id('file')}.new").write_text("an upload that a power cut ended")

    damaged, without = state(whole), state(gone)
    for one in (damaged, without):
        write_json(batches / f"{one['id']}.json", one)
    (batches / f"{damaged['id']}.output.jsonl").write_bytes(
        result("0") + b'{"custom_id"\0 ' * 3 + b"\n" + b"[1]\n" + result("1")[:-9]
    )
    (batches / f"{damaged['id']}.starts").write_bytes(b"+0\n\xff\xff\n+" + b"9" * 99 + b"\n+")
    (batches / f"{without['id']}.output.jsonl").write_bytes(result("0"))
    bad = {
        new_id("batch"): content for content in (b"", b"{}", b"[" * 100_000, b'{"id": NaN}', b"\xff\xfe\0")
    }
    for name, content in bad.items():
        (batches / f"{name}.json").write_bytes(content)

    room = ("--kv-slots", str(3 * (N_TOKENS + 4)), "--no-enable-prefix-caching")
    with start(tiny, tmp_path, *room) as server:
        yield server, (files, batches, whole, gone, broken, damaged["id"], without["id"], bad)


def test_damaged_files_are_set_aside_and_batches_end(damaged):
    """The server starts, lists what is whole, and no batch waits for ever."""
    server, (files, batches, whole, gone, broken, damaged_id, without_id, bad) = damaged
    with client_of(server) as client:
        assert {damaged_id, without_id} <= (listed := {x.id for x in client.batches.list()})
        assert not listed & set(bad)
        batch = wait(client, client.batches.retrieve(damaged_id))
        assert batch.status == "completed" and batch.request_counts.completed == 3
        assert set(results(client, batch.output_file_id)) == {"0", "1", "2"}
        wrong = results(client, batch.error_file_id)
        assert wrong["key"]["response"]["status_code"] in (400, 500)
        batch = wait(client, client.batches.retrieve(without_id))
        assert batch.status == "failed" and batch.errors.data[0].code == "file_not_found"
        assert set(results(client, batch.output_file_id)) == {"0"}
        listed = {x.id for x in client.files.list()}
        assert whole in listed and not {gone, broken} & listed
        for name in (gone, broken):
            for call in (client.files.content, client.files.retrieve, client.files.delete):
                with pytest.raises(openai.NotFoundError):
                    call(name)
        for name in bad:
            assert (batches / f"{name}.json.damaged").exists()
            assert any(f"{name}.json cannot be used" in text for text in server.lines)
        assert (files / f"{broken}.json.damaged").exists() and not list(files.glob("*.new"))
        # The input may go while a batch runs.
        batch = submit(client, [line(str(i), **words(i, 20)) for i in range(40)])
        server.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 1)
        client.files.delete(batch.input_file_id)
        batch = wait(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 40)


@settings(max_examples=60)
@given(
    outputs=st.binary(max_size=60),
    errors=st.binary(max_size=60),
    starts=st.binary(max_size=60),
    cut=st.booleans(),
)
def test_whatever_is_in_a_batchs_files_it_goes_on(outputs, errors, starts, cut):
    """Whole results stay, once; the next ones are lines of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = result("kept")
        (folder / "b.output.jsonl").write_bytes(outputs + b"\n" + good + (b"" if cut else errors))
        (folder / "b.error.jsonl").write_bytes(errors)
        (folder / "b.starts").write_bytes(starts)
        with Results(folder, "b") as results_, Starts(folder, "b") as starts_:
            assert "kept" in results_.done
            one = Line("new", 10**6, 1)
            assert starts_.deaths(one) == 0
            starts_.say(Starts.BEGUN, one)
            results_.add("new", 200, {})
        lines_ = [json.loads(x) for x in (folder / "b.output.jsonl").read_bytes().splitlines()]
        assert [x["custom_id"] for x in lines_].count("kept") == 1 and lines_[-1]["custom_id"] == "new"
        assert Results(folder, "b").done >= {"kept", "new"}
        assert Starts(folder, "b").deaths(one) == 1


def test_facts_that_cannot_be_read_now_are_no_damage(tmp_path):
    files = Files(tmp_path)
    found = files.add(io.BytesIO(b"x"), "a", "batch")
    path = tmp_path / f"{found['id']}.json"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(first_free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        for call in (lambda: files.find(found["id"]), files.all, lambda: files.delete(found["id"])):
            with pytest.raises(OSError, match="Too many open files"):
                call()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert path.exists() and files.find(found["id"]) == found and files.all() == [found]


def test_a_slow_disk_holds_up_nobody_but_who_asks_for_files(tiny, tmp_path):
    """Facts that are a named pipe are read once somebody writes into it."""
    files = tmp_path / "kept" / "files"
    files.mkdir(parents=True)
    slow = new_id("file")
    (files / slow).write_text("x")
    pipe = files / f"{slow}.json"
    os.mkfifo(pipe)
    with start(tiny, tmp_path / "kept") as server, ThreadPoolExecutor() as other:
        for path in ("", f"/{slow}", f"/{slow}/content"):
            asked = other.submit(server.request, "GET", f"/v1/files{path}")
            with open(pipe, "wb") as writer:  # waits for the reader
                assert server.get("/health") == {"status": "ready"} and not asked.done()
                writer.write(json.dumps(facts(slow)).encode())
            status, found = asked.result()
            found = found if path else found["data"][0]
            assert status == 200 and found == (b"x" if "content" in path else facts(slow))


# --- many batches ---


def test_many_batches_have_few_files_open_and_those_that_wait_can_be_cancelled(tiny, tmp_path):
    folder = tmp_path / "kept"
    with start(tiny, folder) as server, client_of(server) as client:

        def n_open() -> int:
            found = 0
            for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    found += os.readlink(link).startswith(str(folder))
            return found

        server.post("/pause", {})
        first = submit(client, [line(str(i), **words(i, 3)) for i in range(5)])
        how = {"input_file_id": first.input_file_id, "endpoint": "/v1/completions"}
        batches = [first, *(client.batches.create(**how, completion_window="24h") for _ in range(29))]
        statuses = ["in_progress"] * 16 + ["validating"] * 14
        server.wait_until(lambda: [client.batches.retrieve(x.id).status for x in batches] == statuses)
        assert n_open() == 16 * 4 + 1  # and the folder's lock
        last = wait(client, client.batches.cancel(batches.pop().id))
        assert (last.status, last.output_file_id) == ("cancelled", None)
        server.post("/resume", {})
        for batch in batches:
            batch = wait(client, batch)
            assert (batch.status, batch.request_counts.completed) == ("completed", 5)
        server.wait_until(lambda: n_open() == 1)


# --- who goes first ---


def test_a_chat_goes_before_batch_lines_and_they_still_end_as_alone(damaged):
    """Three lines have all the room that a chat needs; nobody says a priority or a policy."""
    server, _ = damaged
    n_tokens, n_prompt = N_TOKENS, 450
    with client_of(server) as client:
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "w9 " * n_prompt}], "max_tokens": 3}
        client.chat.completions.create(**ask)  # compiled then
        batch = submit(client, [line(str(i), **words(i, n_tokens)) for i in range(3)])
        n_before = server.metric("vllm:num_preemptions_total")
        server.wait_until(lambda: server.metric("jaxlamina:kv_slots_used") > 3 * (n_tokens + 4) - n_prompt)
        assert server.metric("vllm:num_preemptions_total") == n_before
        assert client.chat.completions.create(**ask).usage.completion_tokens == 3
        assert client.batches.retrieve(batch.id).request_counts.completed == 0
        assert server.metric("vllm:num_preemptions_total") > n_before
        batch = wait(client, batch)
        found = results(client, batch.output_file_id)
        for i in range(3):
            alone = client.completions.create(model="tiny", **_openai(words(i, n_tokens)))
            assert text_of(found[str(i)]) == alone.choices[0].text


# --- pauses ---


def test_a_pause_that_ends_requests_ends_no_line_of_a_batch(tiny, tmp_path):
    lines = [line(str(i), **words(i, 200)) for i in range(6)]
    with start(tiny, tmp_path / "kept") as server, client_of(server) as client:
        batch = submit(client, lines)
        server.wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
        for _ in range(2):  # the second one ends lines that wait
            assert server.post("/pause?mode=abort", {})["status"] == "paused"
        starts = tmp_path / "kept" / "batches" / f"{batch.id}.starts"
        server.wait_until(lambda: starts.read_bytes().count(b"+") >= 6)
        server.post("/resume", {})
        batch = wait(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 6)
        found = results(client, batch.output_file_id)
        alone = client.completions.create(model="tiny", **_openai(words(5, 200)))
        assert text_of(found["5"]) == alone.choices[0].text


def test_a_batch_expires_while_its_lines_stand_still(tiny, tmp_path):
    folder = tmp_path / "kept"
    (folder / "files").mkdir(parents=True)
    (folder / "batches").mkdir()
    input_id = new_id("file")
    write_json(folder / "files" / f"{input_id}.json", facts(input_id))
    raw = "".join(json.dumps(line(str(i), **words(i % 60, 1500))) + "\n" for i in range(400))
    (folder / "files" / input_id).write_text(raw)
    left = state(input_id, expires_at=int(time.time()) + 6)
    write_json(folder / "batches" / f"{left['id']}.json", left)
    with start(tiny, folder) as server, client_of(server) as client:
        server.post("/pause", {})
        batch = wait(client, client.batches.retrieve(left["id"]))
        assert batch.status == "expired" and batch.request_counts.total == 400
        batch = submit(client, [line("a", **words(1, 2))])  # the rows are free again
        server.post("/resume", {})
        assert wait(client, batch).status == "completed"


# --- four strikes ---


def test_a_line_that_was_begun_when_the_server_died_four_times_is_reported(tiny, tmp_path):
    """Three lines whose first token takes long are begun together. The next servers have them one at a time,
    so that only one of them was begun at all deaths."""
    folder = tmp_path / "kept"
    slow = {"prompt": "w1 " * 1000, "max_tokens": 2, "temperature": 0}
    lines = [line(name, **slow, seed=i) for i, name in enumerate("abc")]
    options = ("--max-num-batched-tokens", "16", "--no-enable-prefix-caching")
    begun: list[bytes] = []
    for death in range(4):
        with start(tiny, folder, *options) as server, client_of(server) as client:
            batch = submit(client, lines) if not death else batch  # noqa: F821 (of the first server)
            starts = folder / "batches" / f"{batch.id}.starts"
            n_wanted = 3 + death
            server.wait_until(lambda: starts.exists() and starts.read_bytes().count(b"+") >= n_wanted)  # noqa: B023
            server.process.send_signal(signal.SIGKILL)
            assert server.finish() == -signal.SIGKILL
            begun.append(starts.read_bytes())
    assert [marks.count(b"+") for marks in begun] == [3, 4, 5, 6] and b"=" not in begun[-1]
    with start(tiny, folder, *options) as server, client_of(server) as client:
        batch = wait(client, batch)
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
        [wrong] = results(client, batch.error_file_id).values()
        assert wrong["response"]["status_code"] == 500
        assert "ended 4 times" in wrong["response"]["body"]["error"]["message"]
        assert len(results(client, batch.output_file_id)) == 2
        assert not starts.exists()
