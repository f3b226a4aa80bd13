"""`jaxlamina chat` and `jaxlamina batch`: as a user starts them, at a server and in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from checkpoint_examples import tiny_words_folder
from hypothesis import given
from hypothesis import strategies as st
from serving import ROOT, WORDS_TEMPLATE, environment, serving
from supervised import Supervised, find, wait_until

from jaxlamina.cli.batch_input import CHAT, COMPLETIONS, parse
from jaxlamina.cli.chat import SETTABLE
from jaxlamina.errors import UserError
from jaxlamina.server.client import Client, ServerError, authorization


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def server(tiny):
    options = ("--chat-template", WORDS_TEMPLATE, "--max-num-seqs", "4", "--api-key", "k")
    with serving("--model", str(tiny), "--served-model-name", "tiny", "--no-warm-up", *options) as found:
        yield found


@pytest.fixture
def start(tmp_path):
    """Starts a command line with a cache folder of its own."""
    begun = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxlamina", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(JAXLAMINA_CACHE=str(tmp_path / "cache"), JAXLAMINA_API_KEY="k"),
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def finish(process, text="", code=0):
    out, err = process.communicate(text, timeout=180)
    assert process.returncode == code, err
    return out.splitlines(), err


# --- chat ---


def test_a_conversation_with_a_server(server, start, tmp_path):
    saved = tmp_path / "saved.json"
    lines = [
        *("/set temperature=0", "/set max_tokens=3", "/set ignore_eos=true", "w1 w2", "/system w9", "w3"),
        *(f"/save {saved}", "/set max_tokens=-1", "w4", "/set max_tokens=2", "/set seed=", "/reset", "w5"),
        *("/nothing", "/set colour=red", "", "/help", "/exit", "w6"),
    ]
    out, err = finish(start("chat", "--url", server.url), "\n".join(lines))
    kept = json.loads(saved.read_text())
    assert kept["settings"] == {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    first, second = kept["messages"][2]["content"], kept["messages"][4]["content"]
    assert [m["role"] for m in kept["messages"]] == ["system", *["user", "assistant"] * 2]
    assert out[:2] == [first, second] and len(out) == 3 and len(out[2].split()) == 2
    for wrong in ("max_tokens", "there is no /nothing", "'colour' cannot be set"):
        assert f"error: {'the server says (400): ' if wrong == 'max_tokens' else ''}{wrong}" in err
    assert "/system TEXT" in err
    # What was said before is sent again, under the system message.
    body = {"messages": kept["messages"][:4], **kept["settings"]}
    status, again = server.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer k"})
    assert status == 200 and again["choices"][0]["message"]["content"] == second


def test_an_answer_is_stopped_and_the_conversation_goes_on(server, start):
    process = start("chat", "--url", server.url, "--max-tokens", "4000", "--temperature", "0")
    process.stdin.write("/set ignore_eos=true\nw1 w2\n")
    process.stdin.flush()
    assert process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    server.wait_until(lambda: server.metric("jaxlamina:kv_slots_used") == 0)
    out, err = finish(process, "/set max_tokens=2\nw3\n")
    assert len(out) == 2 and len(out[0].split()) < 4000 and len(out[1].split()) == 2, (out, err)


def test_results_of_batches_come_between_answers(server, start):
    lines = [
        "/set temperature=0",
        '/batch ["w1", "w2 w3"] [3, 4]',
        "/set max_tokens=300",
        "/set ignore_eos=true",
        "w7",
    ]
    process = start("chat", "--url", server.url)
    process.stdin.write("\n".join(lines) + "\n")
    process.stdin.flush()
    out, err = [], []
    while not any(line.startswith("[2] ") for line in out):
        process.stdin.write("\n")  # an empty line asks for nothing
        process.stdin.flush()
        out.append(process.stdout.readline().rstrip("\n"))
    more, err = finish(process)
    batch_id = next(word for word in err.split() if word.startswith("batch-")).rstrip(":")
    at = out.index(f"{batch_id}: 2 of 2 done")
    assert [line[:4] for line in out[at + 1 : at + 3]] == ["[1] ", "[2] "]
    answer = [line for i, line in enumerate(out + more) if i not in (at, at + 1, at + 2)]
    assert len(answer) == 1 and len(answer[0].split()) == 300  # in one piece


def test_leaving_while_a_batch_runs_is_asked_for_twice(server, start):
    lines = ["/set ignore_eos=true", '/batch ["w1 w2"] [4000]', "/exit", "/help", "/exit", "/exit", "w6"]
    out, err = finish(start("chat", "--url", server.url), "\n".join(lines))
    batch_id = next(word for word in err.split() if word.startswith("batch-")).rstrip(":")
    assert out == [] and err.count(f"still running: {batch_id}; /exit again leaves") == 2
    assert err.splitlines()[-1] == f"not waited for: {batch_id} (0 of 1 done); the server goes on with it"
    status, _ = server.request("POST", f"/v1/batches/{batch_id}/cancel", None, {"Authorization": "Bearer k"})
    assert status == 200


def test_a_conversation_in_this_process(tiny, start):
    options = (
        "--model",
        str(tiny),
        "--chat-template",
        WORDS_TEMPLATE,
        "--max-tokens",
        "3",
        "--temperature",
        "0",
    )
    out, err = finish(
        start("chat", *options), '/set ignore_eos=true\nw1 w2\nw3\n/batch ["w1"] [400]\n/exit\n'
    )
    assert [len(line.split()) for line in out] == [3, 3], err
    assert "(0 of 1 done); it ends with this chat" in err, (
        "a batch that still runs is not dropped without a word"
    )


def test_every_field_that_can_be_set_is_one_of_the_api():
    from jaxlamina.server.protocol import ChatCompletionRequest

    assert set(SETTABLE) <= set(ChatCompletionRequest.model_fields)


# --- batch ---


def test_batches_at_a_server_are_grouped_and_in_order(server, start, tmp_path):
    bodies = [{"prompt": f"w{i}", "max_tokens": 3} for i in range(6)]
    openai = {
        "custom_id": "mine",
        "method": "POST",
        "url": COMPLETIONS,
        "body": {"prompt": "w1", "max_tokens": 1},
    }
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*bodies, openai])))
    (tmp_path / "b.txt").write_text("w1 w2\n\nw3 w4\n")
    inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt"), '["w5", "w6 w7"] [2, 3]']
    out, _ = finish(start("batch", *inputs, "--url", server.url, "--max-tokens", "4"))
    heads = [i for i, line in enumerate(out) if line.startswith("batch-")]
    assert len(heads) == 3 and [out[i].partition(": ")[2] for i in heads] == [
        f"{n} of {n} done" for n in (7, 2, 2)
    ]
    names = [line.partition(" ")[0] for line in out[1:8]]
    assert names == [*(f"[a.jsonl:{i}]" for i in range(1, 7)), "[mine]"]
    assert [len(line.split()) - 1 for line in out[heads[2] + 1 :]] == [2, 3]
    out, _ = finish(start("batch", '["w1", "w1"] [2, 5000]', "--url", server.url, "--json"), code=1)
    right, wrong = map(json.loads, out)
    assert (right["input"], right["prompt"], right["custom_id"]) == ("list", "w1", "1")
    assert right["response"]["status_code"] == 200 and right["custom_id"] == "1"
    assert wrong["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.timeout(240)
def test_a_chat_and_a_batch_wait_for_a_server_that_is_started_again(tiny, start):
    server = Supervised.of([], tiny, ["--api-key", "k"])
    url = f"http://127.0.0.1:{server.port}"
    try:
        prompts = json.dumps([f"w{i} w1" for i in range(30)]), json.dumps([400] * 30)
        batch = start("batch", " ".join(prompts), "--url", url, "--json")
        client, said = Client(url, api_key="k"), []
        wait_until(lambda: any(one["request_counts"]["completed"] > 3 for one in listed(client)), 60)
        os.kill(find("server", server.process.pid), signal.SIGKILL)
        wait_until(lambda: said.append(server.request("GET", "/health")) or said[-1][0] != 200)
        chat = start("chat", "--url", url, "--max-tokens", "3")
        wait_until(lambda: said.append(server.request("GET", "/health")) or said[-1][0] == 200, 60)
        # Never why an earlier start has ended, or nothing.
        assert {one["reason"] for status, one in said if status != 200} == {"killed by SIGKILL"}
        out, err = finish(chat, "w1 w2\n")
        assert len(out) == 1 and "waiting: the server says (503): recovering: killed by SIGKILL" in err
        out, err = finish(batch)
        assert sorted(int(line["custom_id"]) for line in map(json.loads, out)) == list(range(1, 31))
        [one] = listed(client)
        assert one["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    finally:
        server.close()


def listed(client):
    return client.get("/v1/batches")["data"]


def test_results_of_several_inputs_can_be_joined_to_them(server, start, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(f"w1 {folder}\n\nw2 {folder}\n")
    inputs = [str(tmp_path / "one" / "a.txt"), str(tmp_path / "two" / "a.txt"), '["w5"]', '["w5"]']
    out, _ = finish(start("batch", *inputs, "--url", server.url, "--max-tokens", "1", "--json"))
    found = {line["custom_id"]: (line["input"], line["prompt"]) for line in map(json.loads, out)}
    assert found == {
        "a.txt:1": ("a.txt", "w1 one"),
        "a.txt:3": ("a.txt", "w2 one"),
        "a.txt#2:1": ("a.txt#2", "w1 two"),
        "a.txt#2:3": ("a.txt#2", "w2 two"),
        "list:1": ("list", "w5"),
        "list#2:1": ("list#2", "w5"),
    }


def test_an_interrupted_run_goes_on(tiny, start, tmp_path):
    prompts = json.dumps([f"w{i} w2" for i in range(40)]) + json.dumps([60] * 40)
    words = ("batch", prompts, "--model", str(tiny), "--max-num-seqs", "2", "--json")
    first = start(*words)
    until = time.monotonic() + 120
    while not (kept := [*(tmp_path / "cache").glob("batches/*/batches/*.output.jsonl")]) or (
        len(kept[0].read_text().splitlines()) < 3
    ):
        assert first.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    first.kill()
    first.wait()
    ids = {json.loads(line)["id"] for line in kept[0].read_text().splitlines() if line.endswith("}")}
    assert len(ids) < 40
    out, _ = finish(start(*words))
    found = [json.loads(line) for line in out]
    assert [x["custom_id"] for x in found] == [str(i) for i in range(1, 41)]
    assert ids <= {x["id"] for x in found}
    assert not any((tmp_path / "cache" / "batches").iterdir())


def test_what_batch_takes():
    def bodies(text, **options):
        found = parse(text, **({"chat": False, "defaults": {"max_tokens": 9}} | options))
        return found.endpoint, found.lines

    assert bodies('["a", "b"] [1, 2]') == (
        COMPLETIONS,
        {"1": {"max_tokens": 1, "prompt": "a"}, "2": {"max_tokens": 2, "prompt": "b"}},
    )
    assert bodies('["a"]', chat=True) == (
        CHAT,
        {"1": {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}},
    )
    assert bodies("a\n\n b ") == (
        COMPLETIONS,
        {n: {"max_tokens": 9, "prompt": t} for n, t in (("1", "a"), ("3", " b "))},
    )
    assert bodies('{"prompt": [1, 2], "max_tokens": 3}')[1] == {"1": {"prompt": [1, 2], "max_tokens": 3}}
    for sign in ("\u2028", "\u2029", "\x85"):
        line = json.dumps({"prompt": f"a{sign}b"}, ensure_ascii=False)
        assert bodies(f"\ufeff{line}\r\n")[1] == {"1": {"max_tokens": 9, "prompt": f"a{sign}b"}}
    assert bodies("a\x0cb\r\nc")[1].keys() == {"1", "2"}, "a line ends with a line"
    for text, says in {
        '["a", "b"] [1]': "it must be",
        '["a"] [0]': "it must be",
        '["a", 3]': "it must be",
        '["a"': "it must be",
        "[]": "no prompt",
        "\n": "no prompt",
        '{"prompt": 1': "line 1 is not JSON",
        '{"text": "a"}': "line 1 must have either",
        '{"prompt": "a"}\n{"messages": []}': "of one kind",
        '{"custom_id": "2", "body": {"prompt": "a"}}\nb': "line 2: another line",
    }.items():
        with pytest.raises(UserError, match=says):
            bodies(text)


@given(st.lists(st.tuples(st.text(), st.integers(1, 99)), min_size=1))
def test_any_two_lists_are_read_back(pairs):
    prompts, counts = zip(*pairs, strict=True)
    found = parse(f"{json.dumps(prompts)} {json.dumps(counts)}", chat=False, defaults={})
    assert [(body["prompt"], body["max_tokens"]) for body in found.lines.values()] == pairs
    assert [json.loads(line)["body"] for line in found.jsonl().splitlines()] == [*found.lines.values()]


# --- what both lean on ---


def test_servers_that_are_not_there_or_say_no_are_one_line(server, capsys):
    from jaxlamina.cli.main import main

    assert main(["batch", '["a"]', "--url", "localhost:1"]) == 2
    assert main(["batch", '["a"]', "--url", "http://127.0.0.1:1"]) == 2
    assert main(["batch", "no-such-file.txt"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "must be a server's address" in first and "cannot talk to http://127.0.0.1:1" in second
    assert third.startswith("error: cannot read no-such-file.txt")
    assert main(["batch", '["a"]', "--url", server.url, "--api-key", "é\nb"]) == 2
    assert "the API key has signs" in capsys.readouterr().err
    assert authorization(" sk-abc\r\n") == {"Authorization": "Bearer sk-abc"}
    with pytest.raises(ServerError, match=r"\(401\): the API key"):
        Client(f"{server.url}/v1/").post("/v1/completions", {"prompt": "w1"})


def test_the_clients_of_a_server_import_no_jax(server):
    program = (
        "import sys; from jaxlamina.cli.main import main; main(['chat', '--url', sys.argv[1], "
        "'--max-tokens', '3']); "
        "bad = {'jax', 'flax', 'numpy', 'tokenizers', 'fastapi', 'uvicorn'} & set(sys.modules); assert not "
        "bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, server.url],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        input="w1\n",
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAXLAMINA_API_KEY": "k"},
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
