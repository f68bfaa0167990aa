"""The addresses of the API. A request is read within limits, handed to the batcher, and answered in JSON."""

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
from .service import Asked, Service

log = logging.getLogger("dwindle.serve")
LONGEST = (1 << 63) - 1  # a whole number in a request

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
    async with service.in_time(request) as asked:
        service.batcher.check(1)
        async with service.bodies.read(request, service.limits.one_body) as body:
            with service.batcher.place_for(1):
                image, given = await _settings(service, request, body, budget, top, model)
                return JSONResponse(await service.answer(asked, image, *given))


@api.post("/v1/batch", openapi_extra=BATCH_BODY, responses=BATCH | ERRORS)
async def batch(request: Request) -> Response:
    """Classify several images, each with its own budget. One that fails gets its error, the others their answer."""
    service = service_of(request)
    limits = service.limits
    async with service.in_time(request) as asked:
        service.batcher.check(1)
        async with service.bodies.read(request, limits.body) as body:
            items = (await service.in_thread(parsed, body, limits)).get("images")
            if not isinstance(items, list) or not 1 <= len(items) <= limits.images:
                raise Refused(422, f"'images' must be a list of 1 to {limits.images} objects with an 'image' each.")
            with service.batcher.place_for(len(items)):
                asked.limit.reschedule(None)  # each has it for itself
                results = await asyncio.gather(*(_one_of_batch(service, asked, item) for item in items))
                return JSONResponse({"results": results})


async def _one_of_batch(service: Service, asked: Asked, item: Any) -> dict[str, Any]:
    """Its answer, or its error."""
    try:
        if not isinstance(item, dict):
            raise Refused(422, "Each of 'images' must be an object with an 'image' in base64.")
        given = _checked(item.get("budget"), item.get("top", 5), item.get("model"))
        async with asyncio.timeout_at(asked.until):
            return await service.answer(asked, _image_of(item), *given)
    except Exception as error:
        refusal = service.late if isinstance(error, TimeoutError) else _refusal(error)
        return {"error": refusal.message, "status": refusal.status}


@api.post("/v1/explain", openapi_extra=IMAGE_BODY, responses=EXPLAINED | ERRORS)
async def explain(request: Request, budget: Budget = None, top: Top = 5, model: Name = None) -> Response:
    """What happened to every patch of one image; what the page draws."""
    service = service_of(request)
    passes = min(PASSES, service.limits.waiting)  # it costs as much as so many images
    async with service.in_time(request) as asked:
        service.batcher.check(passes)
        async with service.bodies.read(request, service.limits.one_body) as body:
            with service.batcher.place_for(passes):
                image, (budget, top, model) = await _settings(service, request, body, budget, top, model)
                served = service.chosen(model)
                operating_point = served.operating_point(budget)
                pixels, picture = await service.seen(
                    asked, served, image, lambda part: (served.pixels(part), _data_url(part))
                )
                told = await service.batcher.alone(
                    lambda: served.explain(pixels, operating_point, top), passes, asked.gone
                )
                return JSONResponse(told | {"budget": budget, "seen": picture})


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
    """The image and its budget, top and model: the body's own where it is JSON, else the query's."""
    if not is_json(request):
        return body, query
    given = await service.in_thread(parsed, body, service.limits)
    own = (given.get(name, value) for name, value in zip(("budget", "top", "model"), query))
    return _image_of(given), _checked(*own)


def _image_of(given: dict[str, Any]) -> Any:
    if not isinstance(text := given.get("image"), (str, memoryview)):
        raise Refused(422, "'image' must be a string: the bytes of an image in base64.")
    return text


def _checked(budget: Any, top: Any, model: Any) -> tuple[float | None, int, str | None]:
    """Settings out of a JSON body."""
    for name, given in (("budget", budget), ("top", top)):
        if isinstance(given, int) and abs(given) > LONGEST:
            raise Refused(400, f"'{name}' is a number of more than 64 bits; send a smaller one.")
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if budget is not None and not (number and 0 < budget <= 1):  # not a number is in no order
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


def _refusal(error: Exception) -> Refused:
    """What a client is told of it."""
    if isinstance(error, Refused):
        return error
    log.error("unforeseen error", exc_info=error)
    return Refused(500, "The server failed on this request; its log says why.")
