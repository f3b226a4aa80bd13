"""What every HTTP request passes before it reaches an endpoint: the key, the server's state, the body's size.

Plain ASGI, so that an endpoint sees by itself when its client goes away.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from fastapi import HTTPException, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxlamina.server.api_keys import ApiKeys
from jaxlamina.server.dashboard import RECORD, STATE, WATCH
from jaxlamina.server.errors import ApiError, response, unavailable
from jaxlamina.server.files import MAX_FILE_BYTES
from jaxlamina.server.pieces import HEADER, PATH

_UPLOADS = "/v1/files"
OPERATED = ("/pause", "/resume", "/update_weights")
"""What changes a server for everybody: without a key, from its own host alone."""
_KEYED = ("/server_info", "/reset_prefix_cache", "/is_paused", STATE, RECORD, WATCH, *OPERATED)
_THIS_HOST = ("127.0.0.1", "::1")
_FORM_BYTES = 64 * 1024  # of an upload, beside the file


def check_may_operate(request: Request, keys: ApiKeys, *, by_socket: bool = False) -> None:
    """`ApiError` for who changes a server from elsewhere, where no key says who may. ``by_socket``: who
    reaches it is of this host, or a supervisor that has asked."""
    is_near = by_socket or (request.client is not None and request.client.host in _THIS_HOST)
    if not keys.are_needed and not is_near:
        reason = "changes are taken from this host alone, or with an API key: serve with --api-key"
        raise ApiError(403, reason, type="permission_error")


class Gate:
    """``why_not()``: why the server takes no request now, or None. What is outside of ``/v1`` needs no key,
    but what tells of the server's options or throws away what it has stored. ``supervisor``: what one proves
    itself by, who needs no key, and whose requests may be of any size: their bodies have passed its own gate,
    and with them comes what they have written."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        max_body_bytes: int,
        why_not: Callable[[], str | None],
        supervisor: str | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._supervisor = None if supervisor is None else supervisor.encode()
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
            if self._keys.are_needed and not self._may(headers):
                return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            # What needs the engine.
            if scope["method"] == "POST" and (reason := self._why_not()) is not None:
                return unavailable(reason)
        length, limit = headers.get("content-length", ""), self._limit(scope)
        if limit is not None and length.isdecimal() and int(length) > limit:
            return _too_large(limit)
        return None

    def _is_supervisors(self, headers: Headers) -> bool:
        given = headers.get(HEADER, "").encode("latin-1")
        return self._supervisor is not None and hmac.compare_digest(given, self._supervisor)

    def _may(self, headers: Headers) -> bool:
        """What comes by the supervisor has passed its gate."""
        if self._is_supervisors(headers):
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return self._keys.has(key.encode("latin-1")) and scheme.lower() == "bearer"

    def _limit(self, scope: Scope) -> int | None:
        if scope["path"].startswith(f"{PATH}/") and self._is_supervisors(Headers(scope=scope)):
            return None
        return MAX_FILE_BYTES + _FORM_BYTES if scope["path"] == _UPLOADS else self._max_body_bytes

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        limit, taken = self._limit(scope), 0
        if limit is None:
            return receive

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
