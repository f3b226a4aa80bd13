"""What every HTTP request passes before it reaches an endpoint: the key, the server's state, the body's size.

Plain ASGI, so that an endpoint sees by itself when its client goes away.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxlamina.server.errors import ApiError, response, unavailable
from jaxlamina.server.files import MAX_FILE_BYTES
from jaxlamina.server.pieces import PATH

_UPLOADS = "/v1/files"
_KEYED = ("/server_info", "/reset_prefix_cache")
_FORM_BYTES = 64 * 1024  # of an upload, beside the file


class Gate:
    """``why_not()``: why the server takes no request now, or None. What is outside of ``/v1`` needs no key,
    but what tells of the server's options or throws away what it has stored."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int, why_not: Callable[[], str | None]
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes
        self._why_not = why_not

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._refusal(scope)
        if error is not None:
            await response(error)(scope, receive, send)
            return
        await self._app(scope, self._limited(scope, receive), send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if scope["path"].startswith(("/v1/", f"{PATH}/", *_KEYED)):
            if self._key is not None:
                scheme, _, given = headers.get("authorization", "").partition(" ")
                right = hmac.compare_digest(given.encode("latin-1"), self._key)
                if not right or scheme.lower() != "bearer":
                    return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            # What needs the engine.
            if scope["method"] == "POST" and (reason := self._why_not()) is not None:
                return unavailable(reason)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._limit(scope):
            return _too_large(self._limit(scope))
        return None

    def _limit(self, scope: Scope) -> int:
        return MAX_FILE_BYTES + _FORM_BYTES if scope["path"] == _UPLOADS else self._max_body_bytes

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        limit, taken = self._limit(scope), 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                error = _too_large(limit)
                raise HTTPException(error.status, str(error))
            return message

        return counted


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request's body is too large: at most {limit} bytes", code="request_too_large")
