"""The HTTP application: the API, the page, sample photographs, and error answers."""

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
    """The application that serves these models.

    models: the first answers requests that name none. token: required by /v1 and /metrics. hosts: the names in Host
    headers that are accepted; None: any.
    """
    metrics = metrics or Metrics()
    service = Service(models, limits or Limits(), metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(
        title="Dwindle", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.add_middleware(Guard, metrics=metrics, token=token, hosts=hosts)
    app.state.service = service
    app.include_router(api)
    for path in photographs():  # one route for each: no part of a request becomes a path
        _add_file(app, f"/samples/{path.name}", path.read_bytes(), "image/jpeg")
    for route, (name, kind) in PAGE.items():
        _add_file(app, f"/{route}", packaged("serve", "page", name).read_text(), kind)
    _add_error_handlers(app)
    return app


def _add_file(app: FastAPI, route: str, content: str | bytes, kind: str) -> None:
    """Add a route that always answers with this content."""

    async def answer() -> Response:
        return Response(content, media_type=kind)

    app.add_api_route(route, answer, include_in_schema=False)


def _too_long(number: str) -> bool:
    """Whether the text is a whole number of more than 64 bits."""
    digits = number.strip().lstrip("+-").lstrip("0")
    return digits.isdecimal() and (len(digits) > len(str(LONGEST)) or int(digits) > LONGEST)


def _add_error_handlers(app: FastAPI) -> None:
    """Make every error answer {"error": one sentence}."""

    def error_answer(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse({"error": message}, status, headers)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return error_answer(error.status, error.message, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        number = str(first.get("input", "")) if first["loc"][-1] in ("budget", "top") else ""
        status = 400 if _too_long(number) else 422
        return error_answer(status, f"'{first['loc'][-1]}' in the {first['loc'][0]}: {first['msg']}.")

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        known = {404: "There is nothing at this address.", 405: "This address does not take that method."}
        headers = dict(error.headers) if error.headers else None
        return error_answer(error.status_code, known.get(error.status_code, str(error.detail)), headers)
