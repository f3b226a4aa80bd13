"""Single requests that are made to keep a server busy: bodies as large as it takes, and larger. Data.

What they are after: reading JSON, checking values one by one, tokenising, compiling grammars.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MIB = 2**20
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Heavy:
    name: str
    path: str
    body: bytes


def heavy_requests() -> list[Heavy]:
    """Every one, for a server with any model. About 60 MiB."""

    def of(name: str, path: str, body: bytes | dict[str, Any]) -> Heavy:
        return Heavy(name, path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def asks(**fields: Any) -> dict[str, Any]:
        return {"prompt": "ab", "max_tokens": 3, "temperature": 0} | fields

    def choices(n: int) -> dict[str, Any]:
        return asks(structured_outputs={"choice": [f"{i:x}" for i in range(n)]})

    properties = {"properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": properties}}
    message = b'{"role":"user","content":"a"},'
    return [
        of("floats", _COMPLETIONS, b'{"prompt":[' + b"1.5," * (15 * MIB // 4) + b"1]}"),
        of("some floats", _COMPLETIONS, b'{"prompt":[' + b"1.5," * 500_000 + b"1]}"),
        of("negative tokens", "/detokenize", b'{"tokens":[' + b"-1," * 200_000 + b"1]}"),
        of("empty messages", _CHAT, b'{"messages":[' + b"{}," * 100_000 + b"{}]}"),
        of("messages", _CHAT, b'{"messages":[' + message * 300_000 + b"{}]}"),
        of("brackets", _COMPLETIONS, b'{"prompt":' + b"[" * (15 * MIB)),
        of("biases", _COMPLETIONS, {"prompt": "a", "logit_bias": dict.fromkeys(range(100_000), "x")}),
        of("a long text", "/tokenize", {"prompt": 'a,"[{\\' * MIB}),
        of("choices", _COMPLETIONS, choices(40_000)),
        of("more choices", _COMPLETIONS, choices(100_000)),
        of("properties", _COMPLETIONS, asks(response_format=schema)),
        of("an expression", _COMPLETIONS, asks(structured_outputs={"regex": "a|" * MIB})),
    ]
