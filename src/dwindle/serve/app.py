"""The HTTP surface: the API, the page, the photographs to try, and how errors are told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..files import packaged, photographs
from ..version import __version__
from .guard import Guard, Hosts
from .limits import Limits, Refused
from .metrics import Metrics
from .models import Served
from .routes import LONGEST, api
from .service import Service

PAGE = {
    "": ("index.html", "text/html"),
    "app.js": ("app.js", "text/javascript"),
    "style.css": ("style.css", "text/css"),
}


def create_app(
    models: Sequence[Served],
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Hosts | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """`models`: the first is the one asked by default. token: required of every request under /v1, and of /metrics.
    hosts: the names it may be asked under; None: any."""
    metrics = metrics or Metrics()
    service = Service(models, limits or Limits(), metrics)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(
        title="Dwindle", version=__version__, lifespan=life, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.add_middleware(Guard, metrics=metrics, token=token, hosts=hosts)
    app.state.service = service
    app.include_router(api)
    for path in photographs():  # one route for each: no part of a request becomes a path
        _give(app, f"/samples/{path.name}", path.read_bytes(), "image/jpeg")
    for route, (name, kind) in PAGE.items():
        _give(app, f"/{route}", packaged("serve", "page", name).read_text(), kind)
    _say_errors(app)
    return app


def _give(app: FastAPI, route: str, content: str | bytes, kind: str) -> None:
    """What this address always gives."""

    async def given() -> Response:
        return Response(content, media_type=kind)

    app.add_api_route(route, given, include_in_schema=False)


def _too_long(number: str) -> bool:
    """Whether text is a whole number of more than 64 bits."""
    digits = number.strip().lstrip("+-").lstrip("0")
    return digits.isdecimal() and (len(digits) > len(str(LONGEST)) or int(digits) > LONGEST)


def _say_errors(app: FastAPI) -> None:
    """Every error is {"error": one sentence}."""

    def answered(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse({"error": message}, status, headers)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return answered(error.status, error.message, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        number = str(first.get("input", "")) if first["loc"][-1] in ("budget", "top") else ""
        status = 400 if _too_long(number) else 422
        return answered(status, f"'{first['loc'][-1]}' in the {first['loc'][0]}: {first['msg']}.")

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        known = {404: "There is nothing at this address.", 405: "This address does not take that method."}
        headers = dict(error.headers) if error.headers else None
        return answered(error.status_code, known.get(error.status_code, str(error.detail)), headers)
