"""JSON bodies: read, bounded and checked off the event loop, so that nobody waits for another's large one.

Knows JSON, pydantic models and FastAPI's routes; nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response, params
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from jaxlamina.server.errors import ApiError, of_validation, refused
from jaxlamina.server.workshop import in_thread

Model = TypeVar("Model", bound=BaseModel)
# Numbers and strings of a body; a list or an object counts as four more, a key as three. No other thread runs
# Python while they are read: so many take about 0.02 s, and json.loads took seven times that.
MAX_VALUES = 2**19
_SMALL_BYTES = 16 * 1024  # read where it is: a thread would take longer


class BodyRoute(APIRoute):
    """A route whose JSON body, if it has one, FastAPI is given as the model that it asks for."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = self._model()
        if model is None:
            return handle

        async def read_first(request: Request) -> Response:
            if _is_json(request) and (raw := await request.body()):
                small = len(raw) <= _SMALL_BYTES
                body = read(raw, model) if small else await in_thread(read, raw, model)
                request = _Read(request, body)
            return await handle(request)

        return read_first

    def _model(self) -> type[BaseModel] | None:
        fields = [field.field_info for field in self.dependant.body_params]
        if len(fields) != 1 or isinstance(fields[0], params.Form):
            return None
        annotation = fields[0].annotation
        return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


class _Read(Request):
    """A request whose body has been read."""

    def __init__(self, request: Request, body: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._body = b"{}"
        self._read = body

    async def json(self) -> BaseModel:
        return self._read


def read(raw: bytes, model: type[Model]) -> Model:
    """``raw`` as a ``model``. `ApiError` if it is none."""
    _check_values(raw)
    try:
        value = from_json(raw)
    except ValueError as error:
        said = str(error)
        if said.startswith("recursion limit"):
            raise refused("the body is nested too deeply") from None
        if said.startswith("number out of range"):
            raise refused("the body is not JSON that can be read: a number has too many digits") from None
        if "hex escape" in said or "unicode" in said:  # half of a surrogate pair, or bytes that are not UTF-8
            said = f"its text is not Unicode: {said}"
        raise refused(f"the body is not JSON: {said}") from None
    return checked(value, model)


def checked(value: Any, model: type[Model]) -> Model:
    """JSON's ``value`` as a ``model``. `ApiError` if it is none."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise of_validation(
            error.errors(include_url=False, include_context=False, include_input=False)
        ) from None


def _check_values(raw: bytes) -> None:
    """`ApiError` for more than `MAX_VALUES`, by the commas and brackets outside of strings: hardly any
    work."""
    if _n_marks(raw) <= MAX_VALUES:
        return
    error = ApiError(
        413, f"the body has too many values: at most {MAX_VALUES} go in a request", code="request_too_large"
    )
    # Where a backslash is no other's, a quote after it is part of the string.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * MAX_VALUES or sum(map(_n_marks, plain.split(b'"')[::2])) > MAX_VALUES:
        raise error


def _n_marks(raw: bytes) -> int:
    return raw.count(b",") + 3 * raw.count(b":") + 4 * (raw.count(b"[") + raw.count(b"{"))


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind.startswith("application/") and kind.endswith(("/json", "+json"))
