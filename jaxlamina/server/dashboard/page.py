"""The page's files, which hold no data: any browser may have them. What is drawn comes from
`jaxlamina.server.dashboard.STATE`.

Plain Starlette, imported without JAX: a supervisor serves the page while its job is down.
"""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from jaxlamina.server.dashboard import PAGE

STATIC = Path(__file__).with_name("static")
_KINDS = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    return [
        Route(PAGE, _page, include_in_schema=False),
        Route(f"{PAGE}/", _without_slash, include_in_schema=False),  # from which relative addresses are wrong
        Route(f"{PAGE}/static/{{name}}", _file, include_in_schema=False),
    ]


async def _page(_: Request) -> Response:
    return _answer(STATIC / "index.html")


async def _without_slash(_: Request) -> Response:
    return RedirectResponse("../dashboard")


async def _file(request: Request) -> Response:
    found = {path.name: path for path in STATIC.iterdir()}.get(request.path_params["name"])
    if found is None:
        raise HTTPException(404)
    return _answer(found)


def _answer(path: Path) -> Response:
    return FileResponse(path, media_type=_KINDS[path.suffix], headers=_HEADERS)
