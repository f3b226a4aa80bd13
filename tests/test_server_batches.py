"""Files and batches: OpenAI's client against a real server, and a server that is killed in the middle of a
batch."""

from __future__ import annotations

import openai
import pytest
from batch_requests import client_of, line, results, start, submit, wait
from checkpoint_examples import tiny_words_folder

from jaxlamina.cli.main import main


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def server(tiny, folder):
    with start(tiny, folder) as found:
        yield found


def test_a_batch_runs_each_line_and_says_which_were_wrong(server):
    with client_of(server) as client:
        lines = [
            line(f"a{i}", prompt=f"w{i} w2", max_tokens=4, temperature=0, model="tiny") for i in range(9)
        ]
        lines += [line("long", prompt="w1 " * 600), line("other", prompt="w1", model="gpt-5")]
        lines += [
            line("penalty", prompt="w1", presence_penalty=5),
            line("streamed", prompt="w1", stream=True),
        ]
        batch = wait(client, submit(client, lines))
        assert batch.status == "completed" and batch.metadata == {"for": "a test"}
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (13, 9, 4)
        right, wrong = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert set(right) == {f"a{i}" for i in range(9)}
        for i in range(9):
            body = right[f"a{i}"]["response"]["body"]
            alone = client.completions.create(model="tiny", prompt=f"w{i} w2", max_tokens=4, temperature=0)
            assert body["choices"][0]["text"] == alone.choices[0].text
        codes = {name: x["response"]["status_code"] for name, x in wrong.items()}
        assert codes == {"long": 400, "other": 404, "penalty": 400, "streamed": 400}
        assert wrong["penalty"]["response"]["body"]["error"]["param"] == "presence_penalty"
        assert batch.id in [x.id for x in client.batches.list()]
        purposes = {x.id: x.purpose for x in client.files.list()}
        assert purposes[batch.input_file_id] == "batch" and purposes[batch.output_file_id] == "batch_output"
        assert client.files.delete(batch.output_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.output_file_id)


def test_chats_and_files_that_are_wrong(server):
    chat = "/v1/chat/completions"
    message = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 3}
    with client_of(server) as client:
        batch = wait(
            client, submit(client, [line("a", chat, **message), b"", line("b", chat, **message)], chat)
        )
        assert batch.status == "completed" and batch.error_file_id is None
        assert len(results(client, batch.output_file_id)) == 2
        bad = [
            b"{",
            b"[]",
            line("a", prompt="w1"),
            line("a", prompt="w1"),
            line("", prompt="w1"),
            line("c", chat),
        ]
        batch = wait(client, submit(client, bad))
        assert batch.status == "failed" and batch.output_file_id is None
        found = {error.line: error.message for error in batch.errors.data}
        assert set(found) == {1, 2, 4, 5, 6} and "not JSON" in found[1] and "same custom_id" in found[4]
        assert wait(client, submit(client, [])).errors.data[0].code == "empty_file"
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            submit(client, [line("a", prompt="w1")], "/v1/embeddings")
        with pytest.raises(openai.NotFoundError, match="no file"):
            client.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("a", b"{}"), purpose="fine-tune")


def test_a_cancelled_batch_gives_what_it_has(server):
    with client_of(server) as client:
        lines = [line(str(i), prompt=f"w{i % 60}", max_tokens=100, ignore_eos=True) for i in range(400)]
        batch = submit(client, lines)
        server.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)
        # Meanwhile a request of a client's own is not held up.
        assert client.completions.create(model="tiny", prompt="w1", max_tokens=2).choices[0].text
        assert client.batches.retrieve(batch.id).status == "in_progress"
        client.batches.cancel(batch.id)
        batch = wait(client, batch)
        assert batch.status == "cancelled" and 2 <= batch.request_counts.completed < 400
        assert len(results(client, batch.output_file_id)) == batch.request_counts.completed
        server.wait_until(lambda: server.metric("jaxlamina:kv_slots_used") == 0)
        with pytest.raises(openai.BadRequestError, match="cancelled already"):
            client.batches.cancel(batch.id)
        assert wait(client, submit(client, [line("a", prompt="w1", max_tokens=1)])).status == "completed"


@pytest.mark.parametrize("how", ["kill", pytest.param("terminate", marks=pytest.mark.slow)])
def test_a_batch_goes_on_after_a_restart_and_no_line_is_run_twice(tiny, tmp_path, how):
    n_lines, n_tokens = 40, 40
    lines = [
        line(f"line {i}", prompt=f"w{i} w5", max_tokens=n_tokens, temperature=0, ignore_eos=True)
        for i in range(n_lines)
    ]
    with start(tiny, tmp_path / "kept") as server, client_of(server) as client:
        batch = submit(client, lines)
        server.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3)
        if how == "kill":
            server.process.kill()
        else:
            server.process.terminate()
        assert server.finish() == (0 if how == "terminate" else -9)
    kept = tmp_path / "kept" / "batches" / f"{batch.id}.output.jsonl"
    first = kept.read_text().splitlines()
    assert 3 <= len(first) < n_lines
    if how == "kill":  # in the middle of a line
        kept.write_text(kept.read_text() + '{"id": "batch_req_')
    with start(tiny, tmp_path / "kept") as server, client_of(server) as client:
        batch = wait(client, client.batches.retrieve(batch.id))
        assert batch.status == "completed" and batch.request_counts.completed == n_lines
        again = client.files.content(batch.output_file_id).text.splitlines()
        assert again[: len(first)] == first and len(again) == n_lines
        assert server.metric("vllm:generation_tokens_total") == (n_lines - len(first)) * n_tokens
        found = results(client, batch.output_file_id)
        assert set(found) == {f"line {i}" for i in range(n_lines)}
        alone = client.completions.create(
            model="tiny", prompt="w7 w5", max_tokens=n_tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        assert found["line 7"]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text


def test_a_folder_has_one_server(server, folder, tiny, capsys):
    assert main(["serve", "--model", str(tiny), "--port", "0", "--files-dir", str(folder)]) == 2
    assert "in use by another server" in capsys.readouterr().err
