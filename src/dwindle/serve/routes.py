"""The routes of the API. A request is read within limits, given to the batcher, and answered in JSON."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from ..files import photographs
from .bodies import is_json, parsed
from .limits import Refused
from .models import PASSES
from .schema import ANSWER, BATCH, BATCH_BODY, ERRORS, EXPLAINED, HEALTH, IMAGE_BODY, MODELS, SAMPLES
from .service import Pending, Service

log = logging.getLogger("dwindle.serve")
LONGEST = (1 << 63) - 1  # the largest whole number in a request

Budget = Annotated[
    float | None,
    Query(gt=0, le=1, allow_inf_nan=False, description="Share of the static cost; by itself what it was trained to."),
]
Top = Annotated[int, Query(ge=1, le=100, description="How many classes to name.")]
Name = Annotated[str | None, Query(max_length=200, description="Which model; by itself the first served.")]

api = APIRouter()


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@api.post("/v1/classify", openapi_extra=IMAGE_BODY, responses=ANSWER | ERRORS)
async def classify(request: Request, budget: Budget = None, top: Top = 5, model: Name = None) -> Response:
    """Classify one image, sent as it is or as base64 in JSON."""
    service = service_of(request)
    async with service.time_limit(request) as pending:
        service.batcher.check(1)
        async with service.bodies.read(request, service.limits.one_body) as body:
            with service.batcher.place_for(1):
                image, settings = await _settings(service, request, body, budget, top, model)
                return JSONResponse(await service.answer(pending, image, *settings))


@api.post("/v1/batch", openapi_extra=BATCH_BODY, responses=BATCH | ERRORS)
async def batch(request: Request) -> Response:
    """Classify several images, each with its own budget. One that fails gets its error, the others their answer."""
    service = service_of(request)
    limits = service.limits
    async with service.time_limit(request) as pending:
        service.batcher.check(1)
        async with service.bodies.read(request, limits.body) as body:
            items = (await service.in_thread(parsed, body, limits)).get("images")
            if not isinstance(items, list) or not 1 <= len(items) <= limits.images:
                raise Refused(422, f"'images' must be a list of 1 to {limits.images} objects with an 'image' each.")
            with service.batcher.place_for(len(items)):
                pending.limit.reschedule(None)  # each image has a time limit of its own
                results = await asyncio.gather(*(_one_of_batch(service, pending, item) for item in items))
                return JSONResponse({"results": results})


async def _one_of_batch(service: Service, pending: Pending, item: Any) -> dict[str, Any]:
    """The answer for one of the images, or its error."""
    try:
        if not isinstance(item, dict):
            raise Refused(422, "Each of 'images' must be an object with an 'image' in base64.")
        settings = _checked(item.get("budget"), item.get("top", 5), item.get("model"))
        async with asyncio.timeout_at(pending.until):
            return await service.answer(pending, _image_of(item), *settings)
    except Exception as error:
        refusal = service.too_late if isinstance(error, TimeoutError) else _refusal(error)
        return {"error": refusal.message, "status": refusal.status}


@api.post("/v1/explain", openapi_extra=IMAGE_BODY, responses=EXPLAINED | ERRORS)
async def explain(request: Request, budget: Budget = None, top: Top = 5, model: Name = None) -> Response:
    """What happened to every patch of one image; what the page draws."""
    service = service_of(request)
    passes = min(PASSES, service.limits.waiting)  # an explanation costs as much as so many images
    async with service.time_limit(request) as pending:
        service.batcher.check(passes)
        async with service.bodies.read(request, service.limits.one_body) as body:
            with service.batcher.place_for(passes):
                image, (budget, top, model) = await _settings(service, request, body, budget, top, model)
                served = service.model_named(model)
                operating_point = served.operating_point(budget)
                pixels, picture = await service.decoded(
                    pending, served, image, lambda part: (served.pixels(part), _data_url(part))
                )
                explanation = await service.batcher.alone(
                    lambda: served.explain(pixels, operating_point, top), passes, pending.gone
                )
                return JSONResponse(explanation | {"budget": budget, "seen": picture})


@api.get("/v1/models", responses=MODELS | ERRORS)
async def list_models(request: Request) -> Response:
    """What is served, the default first, and what budgets each can be given."""
    return JSONResponse({"models": [served.about() for served in service_of(request).models]})


@api.get("/v1/samples", responses=SAMPLES | ERRORS)
async def list_samples() -> Response:
    """Photographs that come with the package."""
    return JSONResponse({"samples": [path.stem for path in photographs()]})


@api.get("/healthz", responses=HEALTH)
async def healthz(request: Request) -> Response:
    """200 while requests are taken, 503 once the server is going down."""
    batcher = service_of(request).batcher
    ok = batcher.alive and not batcher.closing
    return JSONResponse({"status": "ok" if ok else "closing"}, 200 if ok else 503)


@api.get("/metrics", include_in_schema=False)
async def prometheus(request: Request) -> Response:
    metrics = service_of(request).metrics
    return Response(metrics.text(), media_type=metrics.content_type)


async def _settings(service: Service, request: Request, body: bytearray, *query: Any) -> tuple[Any, Any]:
    """The image, and its budget, top and model: those of the body where it is JSON, else those of the query."""
    if not is_json(request):
        return body, query
    values = await service.in_thread(parsed, body, service.limits)
    own = (values.get(name, value) for name, value in zip(("budget", "top", "model"), query))
    return _image_of(values), _checked(*own)


def _image_of(values: dict[str, Any]) -> Any:
    """The image in base64, out of a JSON object."""
    if not isinstance(text := values.get("image"), (str, memoryview)):
        raise Refused(422, "'image' must be a string: the bytes of an image in base64.")
    return text


def _checked(budget: Any, top: Any, model: Any) -> tuple[float | None, int, str | None]:
    """The settings of a JSON body, if they are valid."""
    for name, value in (("budget", budget), ("top", top)):
        if isinstance(value, int) and abs(value) > LONGEST:
            raise Refused(400, f"'{name}' is a number of more than 64 bits; send a smaller one.")
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if budget is not None and not (number and 0 < budget <= 1):  # NaN fails both comparisons
        raise Refused(422, "'budget' must be a number above 0 and up to 1: a share of the static cost.")
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= 100:
        raise Refused(422, "'top' must be a whole number from 1 to 100.")
    if model is not None and not isinstance(model, str):
        raise Refused(422, "'model' must be the name of a model; GET /v1/models lists them.")
    return budget, top, model


def _data_url(image: Any) -> str:
    """The image as a JPEG in a data URL."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _refusal(error: Exception) -> Refused:
    """The error as the client is told it. One that is not foreseen is logged."""
    if isinstance(error, Refused):
        return error
    log.error("unforeseen error", exc_info=error)
    return Refused(500, "The server failed on this request; its log says why.")
