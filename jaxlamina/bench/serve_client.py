"""One request to an OpenAI-compatible server, streamed, with the time at which each piece of its answer came.

Knows HTTP and OpenAI's chunks, and of vLLM `ignore_eos` and `/tokenize`; nothing of when requests are sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np

from jaxlamina.bench.loads import Size
from jaxlamina.bench.prompts import PASSAGE
from jaxlamina.bench.serve_metrics import TimedAnswer
from jaxlamina.errors import UserError
from jaxlamina.server.client import authorization

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Where a server does not say what its tokens are: words that are a token each in most vocabularies.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "was", "for", "that"),
    *("on", "as", "with", "be", "by", "at", "from", "it"),
)
ANY_TOKEN_IDS = range(20, 60)
"""That any vocabulary has: for a server without a tokenizer, such as of a shape alone."""
_CONNECT_S = 30.0
# A connection is not used again after so long: one that the server is about to close would fail its next
# request.
_KEPT_S = 1.0

Prompt = str | list[int]


@dataclass(frozen=True)
class Target:
    """Where requests go and what they have in common. ``silence_s``: a server that says nothing for so long
    is given up. ``gives_ids``: each token is told, also one without text, which a server may keep to itself
    otherwise (vLLM's `return_token_ids`)."""

    base_url: str  # without "/v1"
    endpoint: str  # a key of `PATHS`
    model: str
    api_key: str | None = None
    ignore_eos: bool = False
    silence_s: float = 600.0
    gives_ids: bool = False

    def body(self, prompt: Prompt, n_output: int) -> dict[str, Any]:
        common: dict[str, Any] = {
            "model": self.model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            common["ignore_eos"] = True
        if self.gives_ids:
            common["return_token_ids"] = True
        if self.endpoint == "chat":
            message = {"role": "user", "content": prompt}
            return common | {"messages": [message], "max_completion_tokens": n_output}
        return common | {"prompt": prompt, "max_tokens": n_output}


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_any(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def has_token(self) -> bool:
        """Maybe one without text. Not of a chunk that only begins a chat's message, which servers may send
        before they compute anything, or only says why the answer has ended."""
        if self.text or self.token_ids or (self.delta is not None and self.delta.has_any):
            return True
        return self.finish_reason is None and (self.delta is None or self.delta.role is None)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


def session(target: Target) -> aiohttp.ClientSession:
    """For any number of requests at once, to be closed by who asked for it."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=target.silence_s)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
    return aiohttp.ClientSession(
        headers=authorization(target.api_key), timeout=timeout, connector=connector, json_serialize=_json
    )


def _json(body: Any) -> str:
    return msgspec.json.encode(body).decode()


async def ask(
    http: aiohttp.ClientSession, target: Target, prompt: Prompt, size: Size, stream: Stream | None = None
) -> TimedAnswer:
    """Sends one request and reads its answer to the end. What goes wrong is in the answer's ``error``.
    ``stream``: a new one, for who looks at the answer meanwhile."""
    sent_s = time.perf_counter()
    stream = stream or Stream()
    try:
        url = target.base_url + PATHS[target.endpoint]
        async with http.post(url, json=target.body(prompt, size.n_output)) as response:
            if response.status != 200:
                raise RefusedByServer(f"status {response.status}: {_message(await response.read())}")
            async for line in response.content:
                stream.take(line, time.perf_counter())
        stream.check()
    except (RefusedByServer, aiohttp.ClientError, OSError, ValueError, msgspec.MsgspecError) as error:
        why = str(error) if isinstance(error, RefusedByServer) else _line(error)
        return TimedAnswer(size.n_prompt, 0, sent_s, end_s=time.perf_counter(), error=why)
    return stream.answer(size, sent_s)


class RefusedByServer(Exception):
    """The server has answered, but with an error."""


class Stream:
    """A server-sent stream of chunks, line by line."""

    def __init__(self) -> None:
        self.token_s: list[float] = []
        self._end_s: float | None = None
        self._is_whole = False
        self._usage: _Usage | None = None

    def take(self, line: bytes, now_s: float) -> None:
        if not line.startswith(b"data:"):
            return  # an empty line between events, a comment that keeps the connection alive
        data = line[5:].strip()
        if data == b"[DONE]":
            self._is_whole, self._end_s = True, self._end_s or now_s
            return
        chunk = _decode(data)
        if chunk.error is not None:
            raise RefusedByServer(_message(data))
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            if choice.has_token:
                self.token_s.append(now_s)
                self._end_s = now_s
            if choice.finish_reason is not None:
                self._is_whole, self._end_s = True, now_s

    def check(self) -> None:
        if not self._is_whole:
            raise RefusedByServer("the server broke off its answer")

    def answer(self, size: Size, sent_s: float) -> TimedAnswer:
        end_s = self._end_s
        assert end_s is not None
        usage = self._usage or _Usage(size.n_prompt, len(self.token_s))
        return TimedAnswer(
            usage.prompt_tokens,
            usage.completion_tokens,
            sent_s,
            tuple(self.token_s),
            end_s,
            usage=self._usage is not None,
        )


def _message(content: bytes) -> str:
    try:
        found = msgspec.json.decode(content)["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    except (msgspec.MsgspecError, KeyError, TypeError):
        return content.decode(errors="replace")[:200]


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


# --- before the clock runs ---


@dataclass(frozen=True)
class Served:
    """What a server says of itself. ``token_ids``: of some text, None where it does not tell;
    ``max_model_len`` too."""

    model: str
    max_model_len: int | None
    token_ids: Sequence[int] | None


async def look(base_url: str, model: str | None, api_key: str | None) -> Served:
    """Asks a server for its models and its tokens. ``UserError`` if it is not there, or does not have
    ``model`` (None: its first)."""
    target = Target(base_url, "completions", model or "", api_key, silence_s=_CONNECT_S)
    async with session(target) as http:
        try:
            async with http.get(base_url + "/v1/models") as response:
                content = await response.read()
                if response.status != 200:
                    raise UserError(f"{base_url} answers with status {response.status}: {_message(content)}")
                cards = msgspec.json.decode(content)["data"]
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
            raise UserError(f"{base_url} is no server of OpenAI's API: {_line(error)}") from None
        card = next((card for card in cards if model in (None, card["id"])), None)
        if card is None:
            names = ", ".join(repr(card["id"]) for card in cards)
            raise UserError(f"{base_url} does not serve {model!r}, but {names or 'no model'}")
        return Served(card["id"], card.get("max_model_len"), await _token_ids(http, base_url, card["id"]))


async def _token_ids(http: aiohttp.ClientSession, base_url: str, model: str) -> list[int] | None:
    try:
        async with http.post(base_url + "/tokenize", json={"model": model, "prompt": PASSAGE}) as response:
            found = msgspec.json.decode(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
        return None
    ids = found.get("tokens") if isinstance(found, dict) else None
    return ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None


def prompts(sizes: Sequence[Size], token_ids: Sequence[int] | None, *, seed: int) -> list[Prompt]:
    """A prompt for each size that shares no beginning with another but by chance: tokens drawn of
    ``token_ids``, exactly as many; or without them as many words, which is about as many tokens."""
    rng = np.random.default_rng(seed)
    if token_ids is None:
        return [" ".join(rng.choice(WORDS, size.n_prompt)) for size in sizes]
    return [rng.choice(token_ids, size.n_prompt).tolist() for size in sizes]
