"""The HTTP surface. Requests are read within limits, handed to the batcher, and answered in JSON."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .. import __version__
from .batching import Batcher
from .limits import Limits, Refused, authorised, decode, from_base64
from .metrics import Headers, Metrics
from .models import Served
from .schema import ANSWER, BATCH, BATCH_BODY, ERRORS, EXPLAINED, HEALTH, IMAGE_BODY, MODELS, SAMPLES

log = logging.getLogger("dwindle.serve")
WORKERS = 4  # batches that may run at the same time on a CPU
PAGE = {
    "": ("index.html", "text/html"),
    "app.js": ("app.js", "text/javascript"),
    "style.css": ("style.css", "text/css"),
}

Budget = Annotated[
    float | None,
    Query(gt=0, le=1, allow_inf_nan=False, description="Share of the static cost; by itself what it was trained to."),
]
Top = Annotated[int, Query(ge=1, le=100, description="How many classes to name.")]
Name = Annotated[str | None, Query(max_length=200, description="Which model; by itself the first served.")]


def create_app(models: Sequence[Served], limits: Limits | None = None, token: str | None = None) -> FastAPI:
    """`models`: the first is the one asked by default. token: required of every request under /v1, and of /metrics."""
    limits = limits or Limits()
    by_name = {served.name: served for served in models}
    metrics = Metrics()
    cores = torch.get_num_threads()
    on_cpu = all(served.device.type == "cpu" for served in models)
    batcher = Batcher(limits, metrics.ran, min(cores, WORKERS) if on_cpu else 1, cores)
    metrics.watch(lambda: batcher.admitted)
    decoding = ThreadPoolExecutor(max(os.cpu_count() or 1, 1), "dwindle-decode")

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batcher.close)
        decoding.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="Dwindle", version=__version__, lifespan=life, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.add_middleware(Headers, metrics=metrics)
    app.state.batcher = batcher

    async def guard(request: Request) -> None:  # plain functions are called in another thread, which takes longer
        if not authorised(request.headers.get("authorization"), token):
            raise Refused(401, "A bearer token is required: send the header 'Authorization: Bearer ...'.")

    guarded = [Depends(guard)]

    def chosen(name: str | None) -> Served:
        if name is None:
            return models[0]
        if name not in by_name:
            raise Refused(404, f"There is no model of that name; served are {', '.join(by_name)}.")
        return by_name[name]

    async def in_thread(call: Any, *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(decoding, call, *given)

    async def one_image(request: Request, budget: float | None, top: int, name: str | None) -> tuple[bytes, Any]:
        """The image's bytes and its settings: the body's own where it is JSON, else the query's."""
        body = await _body(request, max(limits.bytes * 4 // 3 + 4096, limits.bytes), limits.upload_seconds)
        if not _is_json(request):
            return body, (budget, top, name)
        given = _parsed(body)
        settings = (given.get("budget", budget), given.get("top", top), given.get("model", name))
        return _image_of(given, limits), _checked(*settings)

    @app.post("/v1/classify", dependencies=guarded, openapi_extra=IMAGE_BODY, responses=ANSWER | ERRORS)
    async def classify(request: Request, budget: Budget = None, top: Top = 5, model: Name = None) -> Response:
        """Classify one image, sent as it is or as base64 in JSON."""
        batcher.admit(1)
        try:
            data, (budget, top, model) = await one_image(request, budget, top, model)
            return JSONResponse(await answer(data, budget, top, model))
        finally:
            batcher.dismiss(1)

    async def answer(data: bytes, budget: float | None, top: int, model: str | None) -> dict[str, Any]:
        served = chosen(model)
        dial = served.dial(budget)
        image = await in_thread(lambda: served.prepare(decode(data, limits)))
        return await batcher.classify(served, image, dial, top) | {"budget": budget}

    @app.post("/v1/batch", dependencies=guarded, openapi_extra=BATCH_BODY, responses=BATCH | ERRORS)
    async def batch(request: Request) -> Response:
        """Classify several images, each with its own budget. One that fails gets its error, the others their answer."""
        batcher.admit(1)  # the request itself, while it is read
        try:
            given = _parsed(await _body(request, limits.body, limits.upload_seconds))
        finally:
            batcher.dismiss(1)
        items = given.get("images")
        if not isinstance(items, list) or not 1 <= len(items) <= limits.images:
            raise Refused(422, f"'images' must be a list of 1 to {limits.images} objects with an 'image' each.")
        batcher.admit(len(items))

        async def each(item: Any) -> dict[str, Any]:
            try:
                if not isinstance(item, dict):
                    raise Refused(422, "Each of 'images' must be an object with an 'image' in base64.")
                settings = _checked(item.get("budget"), item.get("top", 5), item.get("model"))
                return await answer(_image_of(item, limits), *settings)
            except Refused as refusal:
                return {"error": refusal.message, "status": refusal.status}

        try:
            return JSONResponse({"results": await asyncio.gather(*map(each, items))})
        finally:
            batcher.dismiss(len(items))

    @app.post("/v1/explain", dependencies=guarded, openapi_extra=IMAGE_BODY, responses=EXPLAINED | ERRORS)
    async def explain(request: Request, budget: Budget = None, top: Top = 5, model: Name = None) -> Response:
        """What happened to every patch of one image; what the page draws."""
        batcher.admit(1)
        try:
            data, (budget, top, model) = await one_image(request, budget, top, model)
            served = chosen(model)
            dial = served.dial(budget)
            photo = await in_thread(decode, data, limits)
            image = await in_thread(served.prepare, photo)
            seen = await in_thread(lambda: _data_url(served.preprocess.seen(photo)))
            told = await batcher.alone(lambda: served.explain(image, dial, top))
            return JSONResponse(told | {"budget": budget, "seen": seen})
        finally:
            batcher.dismiss(1)

    @app.get("/v1/models", dependencies=guarded, responses=MODELS | ERRORS)
    async def list_models() -> Response:
        """What is served, the default first, and what budgets each can be given."""
        return JSONResponse({"models": [served.about() for served in models]})

    samples = {path.stem: path for path in sorted(_assets("assets", "photos").glob("*.jpg"))}

    @app.get("/v1/samples", responses=SAMPLES | ERRORS)
    async def list_samples() -> Response:
        """Photographs that come with the package."""
        return JSONResponse({"samples": list(samples)})

    def sample_route(path: Path) -> Any:
        async def sample() -> Response:
            return Response(path.read_bytes(), media_type="image/jpeg")

        return sample

    for stem, path in samples.items():  # one route for each: no part of a request becomes a path
        app.add_api_route(f"/samples/{stem}.jpg", sample_route(path), include_in_schema=False)

    @app.get("/healthz", responses=HEALTH)
    async def healthz() -> Response:
        """200 while requests are taken, 503 once the server is going down."""
        going = batcher.closing
        ok = batcher.alive and not going
        return JSONResponse({"status": "ok" if ok else "closing"}, 200 if ok else 503)

    @app.get("/metrics", dependencies=guarded, include_in_schema=False)
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    def page_route(name: str, kind: str) -> Any:
        content = _assets("serve", "page", name).read_text()

        async def page() -> Response:
            return Response(content, media_type=kind)

        return page

    for route, (name, kind) in PAGE.items():
        app.add_api_route(f"/{route}", page_route(name, kind), include_in_schema=False)

    _say_errors(app)
    return app


def _assets(*parts: str) -> Path:
    return Path(str(files("dwindle"))).joinpath(*parts)


async def _body(request: Request, most: int, seconds: float) -> bytes:
    """As much of the body as is allowed, within the time it is allowed."""
    too_much = Refused(413, f"The request has more than the {most} bytes allowed; send a smaller image.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_much

    async def read() -> bytes:
        got = bytearray()
        async for chunk in request.stream():
            got += chunk
            if len(got) > most:
                raise too_much
        return bytes(got)

    try:
        return await asyncio.wait_for(read(), seconds)
    except TimeoutError:
        raise Refused(408, f"The request did not arrive within {seconds:g} seconds; send it again.") from None
    except ClientDisconnect:
        raise Refused(400, "The connection ended before the request did; send it again.") from None


def _is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(422, "The body is not valid JSON; send an object with an 'image' in base64.") from None
    if not isinstance(given, dict):
        raise Refused(422, "The body must be a JSON object with an 'image' in base64.")
    return given


def _image_of(given: dict[str, Any], limits: Limits) -> bytes:
    if not isinstance(text := given.get("image"), str):
        raise Refused(422, "'image' must be a string: the bytes of an image in base64.")
    return from_base64(text, limits)


def _checked(budget: Any, top: Any, model: Any) -> tuple[float | None, int, str | None]:
    """Settings out of a JSON body."""
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool) and math.isfinite(budget)
    if budget is not None and not (number and 0 < budget <= 1):
        raise Refused(422, "'budget' must be a number above 0 and up to 1: a share of the static cost.")
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= 100:
        raise Refused(422, "'top' must be a whole number from 1 to 100.")
    if model is not None and not isinstance(model, str):
        raise Refused(422, "'model' must be the name of a model; GET /v1/models lists them.")
    return budget, top, model


def _data_url(image: Any) -> str:
    held = io.BytesIO()
    image.save(held, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()


def _say_errors(app: FastAPI) -> None:
    """Every error is {"error": one sentence}."""

    def said(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse({"error": message}, status, headers)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return said(error.status, error.message, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return said(422, f"'{first['loc'][-1]}' in the {first['loc'][0]}: {first['msg']}.")

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        known = {404: "There is nothing at this address.", 405: "This address does not take that method."}
        headers = dict(error.headers) if error.headers else None
        return said(error.status_code, known.get(error.status_code, str(error.detail)), headers)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        log.error("unforeseen error", exc_info=error)
        return said(500, "The server failed on this request; its log says why.")
