"""What the page asks its server. Knows HTTP; what is answered is `state`'s affair."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request, Response

from jaxlamina.errors import UserError
from jaxlamina.server.api_keys import ApiKeys
from jaxlamina.server.async_engine import Unavailable
from jaxlamina.server.dashboard import RECORD, STATE, WATCH
from jaxlamina.server.dashboard.page import page_routes
from jaxlamina.server.dashboard.state import AlreadyWatching, DashboardState
from jaxlamina.server.errors import ApiError, JsonResponse, refused, unavailable
from jaxlamina.server.gate import check_may_operate

Since = Annotated[float, Query(ge=0)]
_IN_A_STEP = "the engine is in a long step: try again"


def add_dashboard(app: FastAPI, state: DashboardState, keys: ApiKeys, *, by_socket: bool) -> None:
    app.router.routes.extend(page_routes())

    @app.get(STATE)
    async def dashboard_state(after: Since = 0.0, recorded_after: Since = 0.0) -> Response:
        return JsonResponse(await state.read(after, recorded_after), headers={"Cache-Control": "no-store"})

    @app.post(RECORD)
    async def record(request: Request) -> Response:
        """Has the next decode step recorded; the state has it then."""
        check_may_operate(request, keys, by_socket=by_socket)
        try:
            await state.record()
        except ValueError as error:
            raise refused(str(error)) from None
        except (TimeoutError, Unavailable) as error:
            raise unavailable(str(error) or _IN_A_STEP) from None
        return JsonResponse({"status": "due"})

    @app.post(WATCH)
    async def watch(request: Request, seconds: Annotated[float, Query(ge=0.1, le=10)] = 1.0) -> Response:
        """What devices do in that time (`jaxlamina.profiling.under_load.UnderLoad`)."""
        check_may_operate(request, keys, by_socket=by_socket)
        try:
            return JsonResponse((await state.watch(seconds)).to_dict())
        except (AlreadyWatching, UserError) as error:
            raise ApiError(409, str(error), code="busy") from None
        except (TimeoutError, Unavailable) as error:
            raise unavailable(str(error) or _IN_A_STEP) from None
