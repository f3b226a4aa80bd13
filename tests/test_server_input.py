"""Whatever a client sends, the server answers in OpenAI's form, goes on, and leaves nothing behind.

A real server with a model of 64 words. What is sent comes from the server's own OpenAPI document.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import closing
from urllib.parse import quote

import pytest
from checkpoint_examples import tiny_words_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import WORDS_TEMPLATE, serving

from jaxlamina.server.parameters import sampling_params
from jaxlamina.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
    TokenizeRequest,
)
from jaxlamina.server.responses import ResponsesRequest

KEY = "a key"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
EXAMPLES = 60
BODIES = {
    "/v1/completions": {"prompt": "w1 w2", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 2},
    "/v1/responses": {"input": "w1 w2", "max_output_tokens": 2},
    "/tokenize": {"prompt": "w1 w2"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/batches": {"input_file_id": "file-" + 32 * "0", "endpoint": "/v1/completions"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=64)
    options = ("--max-num-seqs", "4", "--served-model-name", "tiny", "--api-key", KEY, "--max-body-mib", "1")
    limits = ("--max-concurrent-requests", "3", "--chat-template", WORDS_TEMPLATE)
    limits += ("--scheduling-policy", "fifo")  # which does not look at priorities
    with serving("--model", str(folder), "--no-warm-up", *options, *limits) as found:
        yield found


@pytest.fixture(scope="module")
def document(server):
    return server.get("/openapi.json")


def check(server, status, found):
    """An answer, or an error in OpenAI's form that is the client's."""
    if status >= 400:
        assert status < 500 and set(found) == {"error"}, (status, found)
        error = found["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], found
        assert "Traceback" not in error["message"]
    else:
        assert status == 200, (status, found)
    assert server.process.poll() is None


def send(server, path, body, **headers):
    status, found = server.request("POST", path, body, AUTHORIZED | headers)
    check(server, status, found)
    return status, found


# --- malformed input ---

numbers = st.one_of(
    st.integers(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from([2**31, 2**63, 2**64, -1, 10**400, 1e308, 5e-324]),
)
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), numbers, st.text(), st.sampled_from(["", "w1", "\ud800", "\x00", "tiny"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def fields_of(document, path):
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    return sorted(document["components"]["schemas"][name]["properties"])


@settings(max_examples=EXAMPLES)
@given(data=st.data())
@pytest.mark.parametrize("path", BODIES)
def test_any_value_in_any_field(server, document, path, data):
    names = data.draw(
        st.lists(st.sampled_from(fields_of(document, path)), min_size=1, max_size=3, unique=True)
    )
    body = BODIES[path] | {name: data.draw(values) for name in names} | {"stream": False}
    send(server, path, json.dumps(body).encode())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_null_in_any_field_is_as_if_it_were_not_there(server, document, path):
    nulls = dict.fromkeys(fields_of(document, path)) | BODIES[path]
    assert send(server, path, nulls)[0] == send(server, path, nulls | {"seed": -1})[0] == 200


def test_null_is_the_default():
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for kind, base in (
        (CompletionRequest, {"prompt": "x"}),
        (ChatCompletionRequest, chat),
        (ResponsesRequest, {"input": "x"}),
        (TokenizeRequest, {"prompt": "x"}),
    ):
        nulls = {name: None for name in kind.model_fields if name not in base}
        found = kind.model_validate(base | nulls)
        assert found == kind(**base) and found.model_fields_set == {*base}
    assert StreamOptions(include_usage=None) == StreamOptions()
    with pytest.raises(ValueError, match="prompt"):
        CompletionRequest(prompt=None)


def test_seeds_below_zero():
    seeds = {seed: sampling_params(CompletionRequest(prompt="x", seed=seed)).seed for seed in (-1, -2, 0, 7)}
    assert seeds == {-1: None, -2: 2**64 - 2, 0: 0, 7: 7}
    assert sampling_params(CompletionRequest(prompt="x", seed=-(2**63))).seed == 2**63


@settings(max_examples=EXAMPLES)
@given(raw=st.one_of(st.binary(max_size=64), values.map(json.dumps).map(str.encode)))
@pytest.mark.parametrize("path", BODIES)
def test_any_body(server, path, raw):
    send(server, path, raw)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "the body"),
        (b"{", "not JSON"),
        (b'{"prompt": NaN}', "prompt"),
        (b'{"prompt": "w1", "temperature": NaN}', "temperature"),
        (b'{"prompt": "w1", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "w1", "max_tokens": 1' + 5000 * b"0" + b"}", "body"),
        (b'{"prompt": "\xff\xfe"}', "body"),
        (b'{"prompt": "\\ud800"}', "Unicode"),
        (b'{"prompt": ' + 100_000 * b"[" + 100_000 * b"]" + b"}", ""),
        (b'{"prompt": []}', "empty"),
        (b'{"prompt": ""}', "empty"),
        (b'{"prompt": [1, 64]}', "vocabulary"),
        (b'{"prompt": [[1], [-1]]}', "vocabulary"),
        (b'{"prompt": "w1", "n": 0}', "n:"),
        (b'{"prompt": "w1", "n": 5}', "5 sequences"),
        (b'{"prompt": "w1", "n": 2, "temperature": 0}', "temperature=0"),
        (b'{"prompt": "w1", "best_of": 2, "n": 3}', "best_of"),
        (b'{"prompt": "w1", "stream_options": {"include_usage": true}}', "stream_options"),
        (b'{"prompt": "w1", "prompt_logprobs": 21}', "prompt_logprobs"),
        (b'{"prompt": "w1", "priority": 1}', "priority=1 would change nothing"),
        (b'{"prompt": "w1", "suffix": "w2"}', "suffix"),
        (b'{"prompt": "w1", "stop": ["a"' + 16 * b', "a"' + b"]}", "stop: List should have at most 16 items"),
        (b'{"prompt": "w1", "stop": [""]}', "stop.0: String should have at least 1 character"),
        (b'{"prompt": "w1", "stop": ""}', "stop: String should have at least 1 character"),
        (b'{"prompt": "w1", "stop": 5}', "stop: Input should be a valid string"),
        (b'{"prompt": ["x"' + 1024 * b', "x"' + b"]}", "prompt: List should have at most 1024 items"),
        (b'{"prompt": [[1, "a"]]}', "prompt.0.1: Input should be a valid integer"),
        (b'{"prompt": ["a", 1]}', "prompt.1: Input should be a valid string"),
        (b'{"prompt": 5}', "prompt: Input should be a valid string"),
        (b'{"prompt": "w1", "model": 5, "n": 0}', "model: Input should be a valid string"),
    ],
)
def test_what_is_wrong_is_said(server, raw, says):
    status, found = send(server, "/v1/completions", raw)
    assert status == 400 and says in found["error"]["message"], found


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "w1"}], "chat_template_kwargs": {"messages": 1}}, None),
        ({"messages": [{"role": "user", "content": "w1"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "w1"}], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "w1"}], "tools": [{"function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "w1"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        (
            {"messages": [{"role": "user", "content": "w1"}], "truncate_prompt_tokens": 65},
            "truncate_prompt_tokens",
        ),
        ({"messages": [{"role": "user", "content": "w1"}], "structured_outputs": {}}, None),
        ({"messages": [{"role": "user", "content": "w1"}], "allowed_token_ids": [64]}, "allowed_token_ids"),
        (
            {"messages": [{"role": "user", "content": "w1"}], "allowed_token_ids": [-1] * 100_000},
            "allowed_token_ids",
        ),
    ],
)
def test_a_chat_that_is_wrong(server, body, param):
    status, found = send(server, "/v1/chat/completions", body)
    assert status == 400 and (param is None or found["error"]["param"] == param), found


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"type": "text", "text": "a"}] * 257, "List should have at most 256 items"),
        ([{"type": "text", "text": "a"}, {"text": "a"}], "1.type: Field required"),
        (5, "Input should be a valid string"),
    ],
)
def test_content_that_is_wrong(server, content, says):
    _, found = send(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    joint = "." if says[0].isdecimal() else ": "
    assert found["error"]["message"].startswith(f"messages.0.content{joint}{says}"), found


def test_a_response_to_nothing(server):
    _, found = send(server, "/v1/responses", {"input": []})
    assert found["error"]["message"].startswith("input: List should have at least 1 item"), found


def test_fields_nobody_knows_are_ignored(server):
    body = BODIES["/v1/completions"] | {"no_such_field": {"a": 1}, "user": "me"}
    assert send(server, "/v1/completions", body)[0] == 200


@settings(max_examples=30)
@given(path=st.text(max_size=20), method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH"]))
def test_any_route(server, path, method):
    quoted = "/" + quote(path, errors="surrogatepass")
    status, found = server.request(method, quoted, headers=AUTHORIZED)
    if status != 200:
        check(server, status, found)


def test_a_method_that_is_not_there_gets_those_that_are(server):
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("PATCH", "/v1/files/x", headers=AUTHORIZED)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Allow")) == (405, "DELETE, GET"), answer.read()


def test_ids_lead_nowhere_else(server):
    for path in (
        "/v1/files/..%2f..%2fetc%2fpasswd/content",
        "/v1/files/lock",
        "/v1/batches/..",
        "/v1/models/x",
    ):
        status, found = server.request("GET", path, headers=AUTHORIZED)
        assert status == 404 and "error" in found


def test_what_is_no_http_ends_only_its_own_connection(server):
    for raw in (b"\x00\xff" * 50, b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(raw)
            assert connection.recv(64).startswith(b"HTTP/1.1 4")
    assert server.get("/health") == {"status": "ready"}


# --- limits and the key ---


def test_a_body_that_is_too_large(server):
    body = {"prompt": "w1 " * 400_000}
    assert send(server, "/v1/completions", body)[0] == 413
    # Sent in chunks, its length is not known before.
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode() + f"{len(raw):x}\r\n".encode() + raw + b"\r\n0\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "given_key", [None, "Bearer wrong", "Basic YTpi", f"bearer{KEY}", "Bearer ", "Bearer \xff"]
)
def test_v1_needs_the_key(server, given_key):
    headers = {} if given_key is None else {"Authorization": given_key}
    keyed = [("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/v1/nothing")]
    keyed += [("POST", path) for path in ("/reset_prefix_cache", "/pause", "/resume", "/update_weights")]
    for method, path in (*keyed, ("GET", "/server_info"), ("GET", "/is_paused")):
        status, found = server.request(method, path, headers=headers)
        assert status == 401 and found["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/ping", "/load", "/metrics", "/version"):
        assert server.request("GET", path, headers=headers)[0] == 200


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
def test_the_scheme_of_a_key_has_no_case(server, scheme):
    assert server.request("GET", "/v1/models", headers={"Authorization": f"{scheme} {KEY}"})[0] == 200


def test_more_requests_than_allowed_get_429(server):
    body = {"prompt": "w1", "max_tokens": 60, "ignore_eos": True}
    found = []

    def ask(barrier):
        barrier.wait(60)
        found.append(send(server, "/v1/completions", body))

    for _ in range(10):  # until they do meet
        barrier = threading.Barrier(12)
        threads = [threading.Thread(target=ask, args=(barrier,)) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        codes = {answer["error"]["code"] if status == 429 else status for status, answer in found}
        if len(codes) > 1:
            break
    assert codes == {200, "rate_limit_exceeded"}
    assert send(server, "/v1/completions", body)[0] == 200


def test_nothing_is_left_behind(server):
    """After all that is above, run last."""
    server.wait_until(lambda: server.metric("jaxlamina:kv_slots_used") == 0)
    assert server.get("/health") == {"status": "ready"}
    assert not any("Traceback" in line for line in server.lines), "\n".join(server.lines[-40:])
