"""Single requests that are made to end or hold up a server: each is answered, and everybody else goes on.

A real server with a random model whose tokens are bytes, so that grammars can be followed.
"""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from checkpoint_examples import LLAMA, byte_tokenizer, host_params, write_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import ROOT, serving

from jaxlamina.bench.heavy import heavy_requests

TEMPLATE = str(ROOT / "tests" / "chat_with_tools.jinja")
PROMPT = {"prompt": "ab", "max_tokens": 3, "temperature": 0}
# Wanted of a quiet machine: 0.25 s. Before there was a bound it was minutes, or for ever.
STALL_S = 4.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = LLAMA | {"max_position_embeddings": 512}
    return write_folder(tmp_path_factory.mktemp("bytes"), hf, host_params(hf), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def server(folder):
    options = (
        "--served-model-name",
        "bytes",
        "--no-warm-up",
        "--no-split",
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "64",
    )
    with serving("--model", str(folder), *options, "--chat-template", TEMPLATE) as found:
        found.post("/v1/completions", PROMPT)  # compiled then
        yield found


def is_well(server):
    assert server.get("/health") == {"status": "ready"}
    found = server.post("/v1/completions", PROMPT)
    assert found["usage"]["completion_tokens"] == 3
    server.wait_until(lambda: server.metric("jaxlamina:kv_slots_used") == 0)


def schema(value):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def call(parameters):
    return {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2,
        "tools": [{"function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
    }


def nested(depth):
    begin, end = '{"type": "object", "properties": {"a": ', "}}"
    return Raw(begin * depth + '{"type": "integer"}' + end * depth)


class Raw(str):
    """JSON already: no ``json.dumps`` writes what is nested so deeply."""


def dumps(value):
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(k))}:{dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


# --- what a request's own work raises ---


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (schema({"type": "integer", "maximum": 100000000000000000000}), 200),
        (schema({"const": 10**30}), 200),
        (schema({"type": "number", "minimum": 1e300, "maximum": 1e308}), 400),
        ({"structured_outputs": {"json": '{"type": "integer", "maximum": 18446744073709551616}'}}, 200),
        ({"structured_outputs": {"json": '{"type": "integer", "minimum": 18446744073709551616}'}}, 400),
        ({"structured_outputs": {"json": '{"maximum": NaN}'}}, 400),
        ({"structured_outputs": {"json": '{"maximum": 1' + 5000 * "0" + "}"}}, 400),
        ({"structured_outputs": {"json": '{"a":' + 5000 * "[" + 5000 * "]" + "}"}}, 400),
        ({"structured_outputs": {"json": {"const": "\ud800"}}}, 400),
        ({"structured_outputs": {"json": {"type": "object", "properties": {"\ud800": {}}}}}, 400),
        ({"structured_outputs": {"regex": "\ud800"}}, 400),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, None),
        ({"structured_outputs": {"regex": "x(a{1000}){1000}"}}, None),
        ({"structured_outputs": {"choice": ["\udfff"]}}, 400),
        ({"structured_outputs": {"choice": ["a" * 300_000]}}, 400),
        ({"logit_bias": {"1" * 5000: 1}}, 400),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, 400),
        ({"bad_words": ["\ud800"]}, 400),
        ({"stop": "\ud800"}, 400),
        ({"prompt": ["a"] * 100, "n": 100, "temperature": 1}, 400),
    ],
)  # fmt: skip
def test_what_a_request_asks_for_is_its_own_affair(server, fields, status):
    found, answer = server.request("POST", "/v1/completions", PROMPT | fields)
    assert found == (status or found) and found in (200, 400), answer
    is_well(server)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (call({"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**64}}}), 200),
        (call(nested(600)), 400),
        (call(nested(5)), 200),
        (call({"properties": {"\ud800": {"const": "\udfff"}}}), 400),
    ],
)
def test_tools_are_too(server, body, status):
    found, answer = server.request("POST", "/v1/chat/completions", dumps(body).encode())
    assert found == status, answer
    is_well(server)


def test_choices_are_what_they_say(server):
    for choice in ('a "b"\n\\x{41}.*', "ü\u2028𐍈", "-^]$ #"):
        body = PROMPT | {"max_tokens": 40, "structured_outputs": {"choice": [choice, choice + choice]}}
        text = server.post("/v1/completions", body)["choices"][0]["text"]
        assert text in (choice, choice + choice)


# --- what is heavy ---


class Probe(threading.Thread):
    """Asks for /health and for a few tokens again and again: how long each took at most, while the block
    ran."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.over = server, threading.Event()
        self.health = self.answer = 0.0

    def run(self):
        while not self.over.is_set():
            self.health = max(self.health, self.timed("GET", "/health"))
            self.answer = max(self.answer, self.timed("POST", "/v1/completions", PROMPT))
            self.over.wait(0.01)

    def timed(self, *words):
        began = time.monotonic()
        assert self.server.request(*words, timeout=60)[0] == 200
        return time.monotonic() - began

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join(60)


# How each is answered; None: as its grammar's library likes.
STATUS = {
    "floats": 413,
    "some floats": 400,
    "negative tokens": 400,
    "empty messages": 400,
    "messages": 413,
    "brackets": 413,
    "biases": 400,
    "a long text": 400,
    "choices": 200,
    "more choices": 400,
    "properties": None,
    "an expression": 400,
}
HEAVY = {request.name: request for request in heavy_requests()}


def test_every_heavy_request_has_a_status():
    assert STATUS.keys() == HEAVY.keys()


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_request_holds_nobody_up(server, name):
    with Probe(server) as probe:
        found, answer = server.request("POST", HEAVY[name].path, HEAVY[name].body)
    assert found == (STATUS[name] or found) and found in (200, 400, 413), answer
    assert max(probe.health, probe.answer) < STALL_S, f"{probe.health:.1f} s, {probe.answer:.1f} s"
    is_well(server)


def test_many_commas_in_a_text_are_no_values(server):
    text = 'a, [{:"\\ ' * 80_000
    assert len(server.post("/tokenize", {"prompt": text})["tokens"]) == len(text)


def test_one_request_of_many_prompts_keeps_nobody_waiting(server):
    many = {"prompt": ["abc"] * 64, "max_tokens": 60, "ignore_eos": True}
    whole = threading.Thread(target=server.post, args=("/v1/completions", many))
    whole.start()
    server.wait_until(lambda: server.metric("vllm:num_requests_waiting") >= 50)
    server.post("/v1/completions", PROMPT)
    assert server.metric("vllm:num_requests_waiting") >= 30  # by far not all of it was done before
    whole.join(300)
    is_well(server)


# --- connections ---


@pytest.fixture(scope="module")
def strict(folder):
    with serving(
        "--model", str(folder), "--no-warm-up", "--client-timeout", "1", "--max-connections", "6"
    ) as found:
        yield found


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD[:60], HEAD + b'{"prompt"'])
def test_a_client_that_keeps_a_connection_waiting_loses_it(strict, sent):
    with connect(strict) as slow:
        slow.sendall(sent)
        assert slow.recv(1) == b""  # closed, and nothing was said
    assert strict.get("/health") == {"status": "ready"}


def test_a_head_that_trickles_has_no_more_time(strict):
    with connect(strict) as slow, pytest.raises(OSError):
        for byte in HEAD * 100:
            slow.sendall(bytes([byte]))
            time.sleep(0.1)
            slow.setblocking(False)
            try:
                if slow.recv(1) == b"":
                    raise OSError("closed")
            except BlockingIOError:
                slow.setblocking(True)


def test_an_answer_that_takes_long_is_waited_for(strict):
    body = PROMPT | {"max_tokens": 400, "ignore_eos": True}
    assert strict.post("/v1/completions", body)["usage"]["completion_tokens"] == 400


def test_one_connection_too_many_is_told_so(strict):
    held = [connect(strict) for _ in range(6)]
    try:
        with connect(strict) as late:
            answer = late.recv(1000)
        assert answer.startswith(b"HTTP/1.1 503") and b"6 connections are open" in answer
    finally:
        for connection in held:
            connection.close()
    strict.wait_until(lambda: strict.request("GET", "/health")[0] == 200)


# --- whatever the API's own document allows, and worse ---

FUZZED = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/batches")
odd_numbers = st.sampled_from(
    [-1, 0, 2**31, 2**53 + 1, 2**63, 2**64, -(10**30), 10**4000, 1e308, -0.0, 5e-324, 1.5]
)
odd_texts = st.sampled_from(
    ["", "\ud800", "a\udfff", "\x00", "9" * 5000, "{" * 200, "a|" * 500, "(a{99}){99}", "ß" * 3000]
)
small_values = st.recursive(
    st.one_of(st.none(), st.booleans(), odd_numbers, odd_texts, st.text(max_size=8), st.integers(0, 300)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
odd_values = st.one_of(
    small_values,
    st.tuples(small_values, st.sampled_from([3, 150, 1200])).map(lambda x: deep(*x)),
    st.tuples(small_values, st.sampled_from([20, 2000])).map(lambda x: [x[0]] * x[1]),
)
words = (
    "type",
    "properties",
    "items",
    "enum",
    "const",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
)
words += ("anyOf", "allOf", "$ref", "required", "additionalProperties", "minItems", "format", "multipleOf")
kinds = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "odd"])
schemas = st.recursive(
    st.fixed_dictionaries({"type": kinds}),
    lambda inner: st.dictionaries(st.sampled_from(words), st.one_of(inner, odd_values, st.lists(inner, max_size=3)), max_size=4),
    max_leaves=6,
)  # fmt: skip
structured = st.one_of(
    st.fixed_dictionaries({"json": schemas}),
    st.fixed_dictionaries({"json": schemas.map(json.dumps)}),
    st.fixed_dictionaries({"regex": st.one_of(odd_texts, st.text("ab|*+?(){}[]^$.\\19,", max_size=16))}),
    st.fixed_dictionaries({"choice": st.lists(st.text(max_size=5), max_size=5)}),
)
OWN = {
    "structured_outputs": structured,
    "response_format": schemas.map(lambda x: schema(x)["response_format"]),
    "parameters": schemas,
    "logit_bias": st.dictionaries(st.one_of(st.integers(0, 400).map(str), odd_texts), st.integers(-100, 100), max_size=4),
}  # fmt: skip
DEPTH = 4


def deep(value, depth):
    return Raw("[" * depth + dumps(value) + "]" * depth)


def of(document, part, name="", depth=0):
    """A strategy for what ``part`` of the document describes; now and then for anything else."""
    if name in OWN:
        return st.one_of(OWN[name], odd_values)
    if "$ref" in part:
        part = document["components"]["schemas"][part["$ref"].rpartition("/")[2]]
    if "anyOf" in part:
        return st.one_of([of(document, one, name, depth) for one in part["anyOf"]])
    kind = part.get("type")
    if kind == "object" and "properties" in part and depth < DEPTH:
        needed = set(part.get("required", ()))
        fields = {key: of(document, value, key, depth + 1) for key, value in part["properties"].items()}
        return st.fixed_dictionaries(
            {key: fields[key] for key in needed},
            optional={key: fields[key] for key in fields.keys() - needed},
        )
    if kind == "array" and depth < DEPTH:
        return st.lists(of(document, part.get("items", {}), "", depth + 1), max_size=3)
    if "enum" in part or "const" in part:
        return st.sampled_from(part.get("enum") or [part["const"]])
    plain = {
        "integer": st.integers(0, 300),
        "number": st.floats(-1, 2, allow_nan=False),
        "boolean": st.booleans(),
        "string": st.one_of(
            st.text(max_size=6), st.sampled_from(["user", "a b", "auto", "required", "bytes"])
        ),
        "null": st.none(),
    }.get(kind, odd_values)
    return st.one_of(plain, plain, plain, plain, odd_values)


@pytest.fixture(scope="module")
def bodies(server):
    document = server.get("/openapi.json")
    found = {}
    for path in FUZZED:
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        part = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        needed = {key: of(document, part["properties"][key], key) for key in part.get("required", ())}
        others = {
            key: of(document, value, key) for key, value in part["properties"].items() if key not in needed
        }
        found[path] = needed, others
    return found


def fuzz(server, bodies, n):
    @settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def run(data):
        path = data.draw(st.sampled_from(FUZZED))
        needed, others = bodies[path]
        names = (
            data.draw(st.lists(st.sampled_from(sorted(others)), max_size=5, unique=True)) if others else []
        )
        body = {name: data.draw(how) for name, how in needed.items()}
        body |= {name: data.draw(others[name]) for name in names}
        for name in ("max_tokens", "max_completion_tokens"):  # or one request takes as long as a hundred
            if isinstance(body.get(name), int | None) and path.startswith("/v1/c"):
                body[name] = data.draw(st.integers(0, 6))
        status, found = server.request("POST", path, dumps(body).encode())
        assert status < 500, (status, found)
        if status != 200:
            assert set(found["error"]) == {"message", "type", "param", "code"}, found

    run()
    assert server.get("/health") == {"status": "ready"}
    server.wait_until(lambda: server.metric("jaxlamina:kv_slots_used") == 0)
    assert server.metric("vllm:num_requests_running") == 0 and server.process.poll() is None
    assert not any("Traceback" in line for line in server.lines), "\n".join(server.lines[-60:])


def test_what_the_document_allows_and_worse(server, bodies):
    fuzz(server, bodies, 250)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_it(server, bodies):
    fuzz(server, bodies, 3000)
