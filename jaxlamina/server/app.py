"""The FastAPI application: every route, and every error in OpenAI's form.

Knows HTTP; what is answered is the service's, the files' and the batches' affair.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI, Form, Query, Request, Response, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

import jaxlamina
from jaxlamina.engine.engine import Engine, PauseMode
from jaxlamina.server.api_keys import ApiKeys
from jaxlamina.server.async_engine import AsyncEngine, Unavailable
from jaxlamina.server.batches import Batches
from jaxlamina.server.bodies import BodyRoute, read
from jaxlamina.server.dashboard.routes import add_dashboard
from jaxlamina.server.dashboard.state import DashboardState
from jaxlamina.server.errors import (
    ApiError,
    JsonResponse,
    of_failure,
    of_os_error,
    of_status,
    of_validation,
    refused,
    response,
    unavailable,
)
from jaxlamina.server.files import Files, page
from jaxlamina.server.followed import FollowedAnswer
from jaxlamina.server.gate import Gate, check_may_operate
from jaxlamina.server.metrics import Metrics
from jaxlamina.server.pieces import HEADER, PATH, STEP_SECONDS, Follow
from jaxlamina.server.protocol import (
    BatchRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorAnswer,
    TokenizeRequest,
    TokenizeResponse,
    WeightsRequest,
)
from jaxlamina.server.responses import ResponsesRequest
from jaxlamina.server.service import Body, EventStream, Service
from jaxlamina.server.settings import Settings
from jaxlamina.server.waiting import EndingStream, unless_gone
from jaxlamina.server.workshop import in_thread

T = TypeVar("T")
Asked = TypeVar("Asked")
_METRICS_DEADLINE_S = 5.0
_PAUSE_S = 600.0
_ERRORS = {"4XX": "The request cannot be answered.", "5XX": "The server cannot answer now."}
_CLIENT_GONE = 499  # nobody reads it; the access log shows it
Page = Annotated[int, Query(ge=1, le=10_000)]


@dataclass
class Parts:
    """What routes answer with. ``progress``: programs compiled, of those that are there before the first
    request. ``info``: for ``/server_info``. ``dashboard``: where there is one."""

    settings: Settings
    engine: AsyncEngine
    service: Service
    metrics: Metrics
    files: Files
    batches: Batches
    progress: Callable[[], tuple[int, int]]
    info: dict[str, Any]
    dashboard: DashboardState | None
    update_weights: Callable[[WeightsRequest], Awaitable[dict[str, Any]]]


def make_app(parts: Parts, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    # What the document says of errors; they are made without it.
    errors: dict[int | str, dict[str, Any]] = {
        kind: {"model": ErrorAnswer, "description": whose} for kind, whose in _ERRORS.items()
    }
    app = FastAPI(title="JaxLamina", version=jaxlamina.__version__, lifespan=lifespan, responses=errors)
    app.router.route_class = BodyRoute
    keys = ApiKeys(parts.settings.api_key, parts.settings.api_key_file)
    app.add_middleware(
        Gate,
        keys=keys,
        max_body_bytes=parts.settings.max_body_bytes,
        why_not=lambda: _why_not(parts.engine),
        supervisor=parts.settings.supervisor,
    )
    _add_error_handlers(app)
    _add_completions(app, parts)
    _add_models(app, parts)
    _add_files(app, parts)
    _add_batches(app, parts)
    _add_status(app, parts)
    _add_changes(app, parts, keys)
    if parts.dashboard is not None:
        add_dashboard(app, parts.dashboard, keys, by_socket=parts.settings.uds is not None)
    return app


def _why_not(engine: AsyncEngine) -> str | None:
    try:
        engine.check_ready()
    except Unavailable as error:
        return str(error)
    return None


# --- errors ---


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return response(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        return response(of_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # of each method that there is the framework has a route
            same = (
                x for x in app.routes if isinstance(x, Route) and x.matches(request.scope)[0] != Match.NONE
            )
            headers["Allow"] = ", ".join(sorted({method for route in same for method in route.methods or ()}))
        return response(of_status(error.status_code, error.detail), headers)

    @app.exception_handler(ClientDisconnect)
    async def client_gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_GONE)

    @app.exception_handler(OSError)
    async def os_error(_: Request, error: OSError) -> Response:
        return response(of_os_error(error))

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> Response:
        return response(ApiError(500, f"internal error ({type(error).__name__})", type="internal_error"))


# --- completions ---


def _events(events: EventStream | FollowedAnswer, kind: str = "text/event-stream") -> Response:
    return EndingStream(events, events.close, media_type=kind, headers={"Cache-Control": "no-cache"})


async def _made(make: Callable[[Asked], T], body: Asked) -> T:
    """What ``make`` makes of a body, in a thread."""
    try:
        return await in_thread(make, body)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is this request's)
        raise of_failure(error) from None


def _add_completions(app: FastAPI, parts: Parts) -> None:
    async def answer(request: Request, body: Body) -> Response:
        if body.stream:
            return _events(await unless_gone(request, parts.service.stream(body)))
        found = await unless_gone(request, parts.service.whole(body))
        return await in_thread(JsonResponse, found)

    @app.post("/v1/completions", response_model=CompletionResponse)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body)

    @app.post("/v1/chat/completions", response_model=ChatCompletionResponse)
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        return await answer(request, body)

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        return await answer(request, body)

    kinds: dict[str, type[Body]] = {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/responses": ResponsesRequest,
    }

    async def followed(request: Request) -> Response:
        given = request.headers.get(HEADER, "").encode()
        if not hmac.compare_digest(given, (parts.settings.supervisor or "").encode()):
            raise HTTPException(404)
        line, _, raw = (await request.body()).partition(b"\n")
        try:
            follow = msgspec.json.decode(line, type=Follow)
        except msgspec.MsgspecError as error:
            raise refused(f"the line before the body is not a supervisor's: {error}") from None
        kind = kinds.get("/" + request.path_params["path"])
        if kind is None:
            raise HTTPException(404)
        body: Body = await in_thread(read, raw, kind)
        lines = await unless_gone(request, parts.service.followed(body, follow))
        return _events(lines, "application/x-ndjson")

    if parts.settings.supervisor is not None:
        app.add_route(f"{PATH}/{{path:path}}", followed, methods=["POST"], include_in_schema=False)

    @app.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest) -> Response:
        parts.service.check_model(body.model)
        tokens = await _made(parts.service.prompts.tokenize, body)
        length = parts.service.prompts.max_model_len
        return await in_thread(
            JsonResponse, {"count": len(tokens), "max_model_len": length, "tokens": tokens}
        )

    @app.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeRequest) -> Response:
        parts.service.check_model(body.model)
        return JsonResponse({"prompt": await _made(parts.service.prompts.detokenize, body)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return JsonResponse(parts.service.prompts.tokenizer_info())


# --- models, files, batches ---


def _add_models(app: FastAPI, parts: Parts) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        length = parts.service.prompts.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "jaxlamina",
            "root": parts.service.names[0],
            "parent": None,
            "max_model_len": length,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [card(name) for name in parts.service.names]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        parts.service.check_model(model)
        return JsonResponse(card(model))


def _add_files(app: FastAPI, parts: Parts) -> None:
    files = parts.files

    @app.post("/v1/files")
    async def upload(file: UploadFile, purpose: Annotated[str, Form()]) -> Response:
        return JsonResponse(await in_thread(files.add, file.file, file.filename or "", purpose))

    @app.get("/v1/files")
    async def listed(purpose: str | None = None, limit: Page = 10_000, after: str | None = None) -> Response:
        def made() -> Response:
            found = [facts for facts in files.all() if purpose is None or facts["purpose"] == purpose]
            return JsonResponse(page(found, limit, after))

        return await in_thread(made)

    @app.get("/v1/files/{file_id}")
    async def file(file_id: str) -> Response:
        return JsonResponse(await in_thread(files.find, file_id))

    @app.get("/v1/files/{file_id}/content")
    async def content(file_id: str) -> Response:
        await in_thread(files.find, file_id)
        return FileResponse(files.path(file_id), media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete(file_id: str) -> Response:
        await in_thread(files.delete, file_id)
        return JsonResponse({"id": file_id, "object": "file", "deleted": True})


def _add_batches(app: FastAPI, parts: Parts) -> None:
    @app.post("/v1/batches")
    async def create(body: BatchRequest) -> Response:
        return JsonResponse(parts.batches.create(body))

    @app.get("/v1/batches")
    async def listed(limit: Page = 20, after: str | None = None) -> Response:
        found = page(parts.batches.all(), limit, after)
        return await in_thread(JsonResponse, found)  # a batch that goes on meanwhile may be shown either way

    @app.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str) -> Response:
        return JsonResponse(parts.batches.find(batch_id))

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> Response:
        return JsonResponse(parts.batches.cancel(batch_id))


# --- the server itself ---


def _add_status(app: FastAPI, parts: Parts) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 once requests are taken; 503, with the reason, before that, while shutting down and after a
        failure."""
        reason = _why_not(parts.engine)
        found: dict[str, Any]
        if reason is None:
            found = {"status": "ready"} | ({"paused": True} if parts.engine.is_paused else {})
            return JsonResponse(found, headers={STEP_SECONDS: f"{parts.engine.step_s:.3f}"})
        found = {"status": parts.engine.state, "reason": reason}
        if parts.engine.state == "starting":
            found["compiled"], found["of"] = parts.progress()
        return JsonResponse(found, 503)

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        """As /health: SageMaker's name for it."""
        return await health()

    @app.get("/load")
    async def load() -> Response:
        return JsonResponse({"server_load": parts.engine.n_open})

    @app.get("/server_info")
    async def server_info() -> Response:
        return JsonResponse(parts.info | {"state": parts.engine.state})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        try:
            await parts.engine.ask(Engine.reset_prefix_cache, _METRICS_DEADLINE_S)
        except (TimeoutError, Unavailable) as error:
            raise unavailable(str(error) or "the engine is in a long step: try again") from None
        return JsonResponse({"status": "reset"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        try:
            numbers = await parts.engine.ask(parts.metrics.snapshot, _METRICS_DEADLINE_S)
        except (TimeoutError, Unavailable):  # in a long step, or over: the numbers from before
            numbers = None
        return Response(parts.metrics.text(numbers), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": jaxlamina.__version__})


def _add_changes(app: FastAPI, parts: Parts, keys: ApiKeys) -> None:
    """What operators and trainers ask for; the names are vLLM's."""

    def check(request: Request) -> None:
        check_may_operate(request, keys, by_socket=parts.settings.uds is not None)

    async def done(change: Awaitable[None]) -> Response:
        try:
            await change
        except TimeoutError:
            raise unavailable("not all requests have stopped in time; newcomers wait") from None
        except Unavailable as error:
            raise unavailable(str(error)) from None
        return JsonResponse({"status": "paused" if parts.engine.is_paused else "running"})

    @app.post("/pause")
    async def pause(request: Request, mode: PauseMode = "keep", clear_cache: bool = False) -> Response:
        check(request)
        return await done(parts.engine.pause(mode, clear_cache=clear_cache, deadline_s=_PAUSE_S))

    @app.post("/resume")
    async def resume(request: Request) -> Response:
        check(request)
        return await done(parts.engine.resume(_METRICS_DEADLINE_S))

    @app.get("/is_paused")
    async def is_paused() -> Response:
        return JsonResponse({"is_paused": parts.engine.is_paused})

    @app.post("/update_weights")
    async def update_weights(request: Request, body: WeightsRequest) -> Response:
        check(request)
        return JsonResponse(await parts.update_weights(body))
