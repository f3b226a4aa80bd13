"""HTTPS of real servers, with a certificate made by openssl: the project's client and plain `ssl`; clients that
keep a connection waiting; HTTP at the same port; below a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import shutil
import socket
import ssl
import subprocess
import sys
import time

import pytest
from certificates import certificate
from checkpoint_examples import tiny_words_folder
from serving import ROOT, WORDS_TEMPLATE, environment, serving
from supervised import Supervised

from jaxlamina.errors import UserError
from jaxlamina.server.client import Client
from jaxlamina.server.listening import DrainingServer, bound
from jaxlamina.server.tls import tls_context

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
PROMPT = {"prompt": "w1 w2", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def tiny(folder):
    return tiny_words_folder(folder, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def files(folder):
    return certificate(folder, "own")


def options(files):
    return ("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]))


@pytest.fixture(scope="module")
def server(tiny, files):
    template = ("--chat-template", WORDS_TEMPLATE)
    limits = ("--client-timeout", "1", "--max-connections", "6")
    with serving("--model", str(tiny), "--no-warm-up", *limits, *options(files), *template) as found:
        yield found


@pytest.fixture
def url(server, files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    return f"https://127.0.0.1:{server.port}"


@contextlib.contextmanager
def connected(server, files, **how):
    with socket.socket() as plain:
        for name, value in how.items():
            plain.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        plain.settimeout(30)
        plain.connect(("127.0.0.1", server.port))
        with ssl.create_default_context(cafile=files[0]).wrap_socket(
            plain, server_hostname="localhost"
        ) as tls:
            yield tls


def test_the_address_is_said_as_it_is(server):
    for word in ("serving ", "ready: "):
        assert f"https://127.0.0.1:{server.port}" in server.wait_for(word)


def test_our_client_verifies_and_gets_its_answers(url, server, monkeypatch):
    client = Client(url)
    assert client.get("/health") == {"status": "ready"}
    assert client.post("/v1/completions", PROMPT)["usage"]["completion_tokens"] == 3
    events = list(client.stream("/v1/completions", PROMPT | {"stream": True}))
    assert "".join(event["choices"][0]["text"] for event in events).count("w") == 3
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(UserError, match=r"is not trusted \(self.signed certificate\): .* SSL_CERT_FILE"):
        Client(url).get("/health")
    assert server.process.poll() is None


def test_chat_asks_over_https(url, files, monkeypatch):
    words = [sys.executable, "-m", "jaxlamina", "chat", "--url", url, "--max-tokens", "2"]
    of_it = {"input": "w1\n/exit\n", "capture_output": True, "text": True, "cwd": ROOT, "timeout": 60}
    done = subprocess.run(words, check=False, env=environment(SSL_CERT_FILE=str(files[0])), **of_it)
    assert done.returncode == 0 and "w" in done.stdout, done.stderr
    monkeypatch.delenv("SSL_CERT_FILE")
    done = subprocess.run(words, check=False, env=environment(), **of_it)
    assert done.returncode != 0 and "SSL_CERT_FILE" in done.stderr and "Traceback" not in done.stderr


def test_one_connection_takes_several_requests(server, files):
    context = ssl.create_default_context(cafile=files[0])
    connection = http.client.HTTPSConnection("localhost", server.port, timeout=30, context=context)
    with contextlib.closing(connection):
        used = []
        for _ in range(3):
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ready"}'
            used.append(connection.sock)
    assert used[0] is not None and used[0] is used[1] is used[2]


def test_plain_http_is_an_error_and_no_wait(server):
    began = time.monotonic()
    with pytest.raises(UserError, match="cannot talk to http://127"):
        Client(f"http://127.0.0.1:{server.port}").get("/health")
    assert time.monotonic() - began < 5
    assert not any("Traceback" in line for line in server.lines)


HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a handshake begins


@pytest.mark.parametrize("sent", [b"", HELLO, HELLO + bytes(100)], ids=["nothing", "a begin", "more"])
def test_a_handshake_that_does_not_go_on_has_its_time(server, sent):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        began = time.monotonic()
        slow.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(100):  # an alert at most
                pass
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le"])
def test_a_request_that_does_not_come_has_its_time(server, files, sent):
    with connected(server, files) as slow:
        began = time.monotonic()
        slow.sendall(sent)
        with contextlib.suppress(OSError):
            assert slow.recv(1) == b""
        assert 0.5 < time.monotonic() - began < 5


def asked_for_much(server, url, tls):
    """A file of 8 MiB, of which nobody has read anything yet."""
    client = Client(url)
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "w1"}}\n'
    content = line * (8 * MIB // len(line))
    key = client.upload(content, "x.jsonl", "batch")["id"]
    tls.sendall(f"GET /v1/files/{key}/content HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    return len(content)


def test_an_answer_that_is_not_taken_in_has_its_time(server, url, files):
    with connected(server, files, SO_RCVBUF=65536) as slow:
        size = asked_for_much(server, url, slow)
        time.sleep(3)
        n = 0
        with contextlib.suppress(OSError):
            while data := slow.recv(65536):
                n += len(data)
        assert n < size


def test_an_answer_that_is_taken_in_slowly_comes_whole(server, url, files):
    with connected(server, files, SO_RCVBUF=65536) as slow:
        size, n, pauses = asked_for_much(server, url, slow), 0, 0
        while data := slow.recv(65536):
            n += len(data)
            if n > pauses * MIB:
                pauses += 1
                time.sleep(0.4)  # in all longer than a client may keep still
        assert n > size and pauses >= 8


def test_handshakes_count_as_connections(server, url):
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(6)]
    try:
        time.sleep(0.2)
        with pytest.raises(UserError, match="cannot talk to"):
            Client(url).get("/health")
    finally:
        for connection in silent:
            connection.close()
    until = time.monotonic() + 10
    while True:
        with contextlib.suppress(UserError):
            assert Client(url).get("/health") == {"status": "ready"}
            return
        assert time.monotonic() < until


def test_it_ends_at_once_with_a_handshake_under_way(tiny, files):
    with serving("--model", str(tiny), "--no-warm-up", *options(files)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30):
            time.sleep(0.2)
            began = time.monotonic()
            server.process.terminate()
            assert server.finish() == 0 and time.monotonic() - began < 10
        assert not any("Traceback" in line for line in server.lines)


def test_files_that_are_none_are_one_line(tiny, files, folder):
    other = certificate(folder, "other")
    locked = certificate(folder, "locked", "-passout", "pass:xyz")
    no_pem = folder / "text"
    no_pem.write_text("no certificate")
    for chain, key, why in (
        (folder / "missing", files[1], "--ssl-certfile .*missing: there is no such file"),
        (files[0], folder / "missing", "--ssl-keyfile .*missing: there is no such file"),
        (files[0], other[1], "(?i)mismatch"),
        (files[0], None, "they must be a certificate and its own key"),
        (no_pem, files[1], "they must be a certificate and its own key"),
        (*locked, "without a passphrase"),
        (None, files[1], "goes with --ssl-certfile"),
    ):
        with pytest.raises(UserError, match=why) as error:
            tls_context(chain, key)
        assert "\n" not in str(error.value)
    for more in (options((folder / "missing", files[1])), (*options(files), "--uds", str(folder / "x"))):
        words = [sys.executable, "-m", "jaxlamina", "serve", "--model", str(tiny), *more]
        done = subprocess.run(
            words, check=False, env=environment(), capture_output=True, text=True, cwd=ROOT, timeout=60
        )
        assert done.returncode == 2 and done.stderr.startswith("error: --ssl-certfile"), done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_supervisor_takes_https_and_its_server_stays_below(tiny, files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    with contextlib.closing(Supervised.of([], tiny, options(files))) as server:
        url = f"https://127.0.0.1:{server.port}"
        assert url in server.wait_for("serving ") and url in server.wait_for("ready: ")
        assert Client(url).post("/v1/completions", PROMPT)["usage"]["completion_tokens"] == 3
        assert Client(url).get("/v1/fault_tolerance/status")
        with pytest.raises(UserError, match="cannot talk to"):
            Client(f"http://127.0.0.1:{server.port}").get("/health")


def test_asyncios_own_loop_does_the_same(files):
    """The servers above run on uvloop where it is installed."""
    import uvicorn

    from jaxlamina.server.connections import protocol

    async def app(scope, receive, send):
        assert scope["type"] == "http" and scope["scheme"] == "https"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def scenario():
        config = uvicorn.Config(app, http=protocol(8, 0.5), loop="asyncio", lifespan="off", log_config=None)
        server = DrainingServer(config, lambda: None, tls_context(*files))
        with bound("127.0.0.1", 0) as listener:
            listener.listen()
            port = listener.getsockname()[1]
            serving_it = asyncio.create_task(server._serve([listener]))
            context = ssl.create_default_context(cafile=files[0])
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            for _ in range(2):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            silent, own = await asyncio.open_connection("127.0.0.1", port)
            began = time.monotonic()
            assert await asyncio.wait_for(silent.read(), 5) == b"" and time.monotonic() - began < 3
            for one in (writer, own):
                one.close()
            server.should_exit = True
            await asyncio.wait_for(serving_it, 10)

    asyncio.run(scenario())
