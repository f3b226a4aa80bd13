"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}} with a status.

Knows how pydantic and FastAPI report bad input; nothing of endpoints.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from jaxlamina.errors import UserError

_NAMED_FIRST = re.compile(r"(\w+)(?:=|\.\w)")  # how `SamplingParams` names the field that is wrong
_LONGEST_MESSAGE = 1000
# What pydantic calls members of a union where it says in which one something is wrong. In ours strings are
# first.
_MEMBER = re.compile(r"(constrained-)?str\Z|(list|dict)\[")
_log = logging.getLogger("uvicorn.error")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.type = status, param, code, type

    def body(self) -> dict[str, Any]:
        message = str(self)
        if len(message) > _LONGEST_MESSAGE:
            message = message[:_LONGEST_MESSAGE] + " …"
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, type="service_unavailable", code="service_unavailable")


def of_user_error(error: UserError) -> ApiError:
    named = _NAMED_FIRST.match(str(error))
    return refused(str(error), named[1] if named else None)


def of_os_error(error: OSError) -> ApiError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ApiError(507, "the server has no room left for this on its disk", type="insufficient_storage")
    return ApiError(500, f"internal error ({type(error).__name__})", type="internal_error")


def of_failure(error: Exception) -> ApiError:
    """For whatever a request's own work raised: what it asked for (400), or a fault of ours (500), which is
    logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return of_user_error(error)
    if isinstance(error, OSError):
        return of_os_error(error)
    if isinstance(error, RecursionError):
        return refused("the request is nested too deeply")
    _log.error("a request failed", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__})", type="internal_error")


def of_validation(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's findings. Of a field that may be a string or something else, the one that is
    about what the value is most like."""
    first = errors[0]
    *field, last = first.get("loc") or ("",)
    if last in ("str", "constrained-str"):
        first = max((e for e in errors if [*e["loc"][: len(field)]] == field), key=_likeness)
    where = [part for part in map(str, first.get("loc", ())) if part != "body" and not _MEMBER.match(part)]
    message = str(first.get("msg", "malformed"))
    if first.get("type") == "json_invalid":
        return refused(f"the body is not JSON: {first.get('ctx', {}).get('error', message)}")
    if not where:
        return refused("the body must be a JSON object, sent with Content-Type: application/json")
    path = ".".join(where)
    return refused(f"{path}: {message}", where[0])


def _likeness(error: Any) -> tuple[bool, int, list[int]]:
    """Greater for a value of the right kind that is too long or the like, and then for one that is right up
    to a later place."""
    loc = error["loc"]
    is_kind = not error["type"].endswith(("_type", "_parsing"))
    return is_kind, len(loc), [part for part in loc if isinstance(part, int)]


def of_status(status: int, detail: object) -> ApiError:
    """For what the framework refuses by itself: unknown routes, methods, bodies it cannot read."""
    words = {404: "there is no such route", 405: "this route does not take that method"}
    known = detail == HTTPStatus(status).phrase and status in words
    type_ = "not_found_error" if status == 404 else "invalid_request_error"
    return ApiError(status, words[status] if known else str(detail), type=type_)


class JsonResponse(Response):
    """JSON in ASCII: a message may quote what a client sent, and that may be no UTF-8 (lone surrogates)."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def response(error: ApiError, headers: dict[str, str] | None = None) -> JsonResponse:
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"} | (headers or {})
    return JsonResponse(error.body(), error.status, headers)
