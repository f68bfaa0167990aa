"""The HTTP surface. Requests are read within limits, handed to the batcher, and answered in JSON."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from PIL import Image
from starlette.exceptions import HTTPException

from ..version import __version__
from .batching import Batcher
from .bodies import Bodies, is_json, parsed
from .guard import Guard, Hosts
from .limits import Limits, Refused
from .metrics import Metrics
from .models import PASSES, Served
from .pictures import Larger, Memory, from_base64, look
from .schema import ANSWER, BATCH, BATCH_BODY, ERRORS, EXPLAINED, HEALTH, IMAGE_BODY, MODELS, SAMPLES

log = logging.getLogger("dwindle.serve")
WORKERS = 4  # batches that may run, and large images be decoded, at the same time on a CPU
LARGE = 1 << 22  # pixels; an image counts as one more for each of these
LONGEST = (1 << 63) - 1  # a whole number in a request
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


@dataclass(frozen=True)
class Asked:
    """A request: when its time is over, what ends it then, and whether somebody still waits for the answer."""

    until: float
    limit: asyncio.Timeout
    gone: Callable[[], bool]


def create_app(
    models: Sequence[Served],
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Hosts | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """`models`: the first is the one asked by default. token: required of every request under /v1, and of /metrics.
    hosts: the names it may be asked under; None: any."""
    limits, metrics = limits or Limits(), metrics or Metrics()
    by_name = {served.name: served for served in models}
    cores = torch.get_num_threads()
    on_cpu = all(served.device.type == "cpu" for served in models)
    batcher = Batcher(limits, metrics.ran, min(cores, WORKERS) if on_cpu else 1, cores)
    metrics.watch(lambda: batcher.admitted)
    bodies = Bodies(limits)
    # Large images wait for each other, and small ones do not wait for them. Memory that a thread had may stay its own.
    many, few = os.cpu_count() or 1, min(os.cpu_count() or 1, WORKERS)
    decoding, decoding_large = ThreadPoolExecutor(many, "dwindle-small"), ThreadPoolExecutor(few, "dwindle-large")
    memory, memory_large = Memory(limits.decoded // 4), Memory(limits.decoded * 3 // 4)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batcher.close)
        for pool in (decoding, decoding_large):
            pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="Dwindle", version=__version__, lifespan=life, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.add_middleware(Guard, metrics=metrics, token=token, hosts=hosts)
    app.state.batcher = batcher

    def chosen(name: str | None) -> Served:
        if name is None:
            return models[0]
        if name not in by_name:
            raise Refused(404, f"There is no model of that name; served are {', '.join(by_name)}.")
        return by_name[name]

    late = Refused(504, f"No answer within {limits.seconds:g} seconds; the server is busy, try again.", 2)

    @asynccontextmanager
    async def in_time(request: Request) -> AsyncIterator[Asked]:
        """All that is done for a request, from its first byte on."""
        state = request.scope.get("state", {})
        until = state.get("arrived", time.monotonic()) + limits.seconds
        try:
            async with asyncio.timeout_at(until) as limit:
                yield Asked(until, limit, state.get("gone", lambda: False))
        except TimeoutError:
            raise late from None

    async def in_thread(call: Any, *given: Any, pool: ThreadPoolExecutor = decoding) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *given)

    async def seen(asked: Asked, served: Served, image: Any, use: Callable[[Image.Image], Any]) -> Any:
        """What `use` makes of the part of an image that the model sees. image: its bytes, or a string in base64."""

        def made(memory: Memory, expected: int) -> Any:
            if asked.gone():
                raise Refused(400, "The client left before its answer.")
            data = image if isinstance(image, bytearray) else from_base64(image, limits)
            part = served.preprocess.seen
            return look(data, limits, lambda photo: use(part(photo)), served.preprocess, memory, asked.until, expected)

        try:
            return await in_thread(made, memory, LARGE)
        except Larger as found:
            with batcher.place_for(min(found.pixels // LARGE, limits.waiting - 1)):
                return await in_thread(made, memory_large, limits.pixels, pool=decoding_large)

    async def settings(request: Request, body: bytearray, *query: Any) -> tuple[Any, Any]:
        """The image and its budget, top and model: the body's own where it is JSON, else the query's."""
        if not is_json(request):
            return body, query
        given = await in_thread(parsed, body, limits)
        own = (given.get(name, value) for name, value in zip(("budget", "top", "model"), query))
        return _image_of(given), _checked(*own)

    most_of_one = limits.bytes * 4 // 3 + limits.settings

    @app.post("/v1/classify", openapi_extra=IMAGE_BODY, responses=ANSWER | ERRORS)
    async def classify(request: Request, budget: Budget = None, top: Top = 5, model: Name = None) -> Response:
        """Classify one image, sent as it is or as base64 in JSON."""
        async with in_time(request) as asked:
            batcher.check(1)
            async with bodies.read(request, most_of_one) as body:
                with batcher.place_for(1):
                    image, given = await settings(request, body, budget, top, model)
                    return JSONResponse(await answer(asked, image, *given))

    async def answer(asked: Asked, image: Any, budget: float | None, top: int, model: str | None) -> dict[str, Any]:
        served = chosen(model)
        operating_point = served.operating_point(budget)
        pixels = await seen(asked, served, image, served.pixels)
        return await batcher.classify(served, pixels, operating_point, top, asked.gone) | {"budget": budget}

    @app.post("/v1/batch", openapi_extra=BATCH_BODY, responses=BATCH | ERRORS)
    async def batch(request: Request) -> Response:
        """Classify several images, each with its own budget. One that fails gets its error, the others their answer."""

        async def each(asked: Asked, item: Any) -> dict[str, Any]:
            try:
                if not isinstance(item, dict):
                    raise Refused(422, "Each of 'images' must be an object with an 'image' in base64.")
                given = _checked(item.get("budget"), item.get("top", 5), item.get("model"))
                async with asyncio.timeout_at(asked.until):
                    return await answer(asked, _image_of(item), *given)
            except Exception as error:
                refusal = late if isinstance(error, TimeoutError) else _told(error)
                return {"error": refusal.message, "status": refusal.status}

        async with in_time(request) as asked:
            batcher.check(1)
            async with bodies.read(request, limits.body) as body:
                items = (await in_thread(parsed, body, limits)).get("images")
                if not isinstance(items, list) or not 1 <= len(items) <= limits.images:
                    raise Refused(422, f"'images' must be a list of 1 to {limits.images} objects with an 'image' each.")
                with batcher.place_for(len(items)):
                    asked.limit.reschedule(None)  # each has it for itself
                    return JSONResponse({"results": await asyncio.gather(*(each(asked, item) for item in items))})

    @app.post("/v1/explain", openapi_extra=IMAGE_BODY, responses=EXPLAINED | ERRORS)
    async def explain(request: Request, budget: Budget = None, top: Top = 5, model: Name = None) -> Response:
        """What happened to every patch of one image; what the page draws."""
        passes = min(PASSES, limits.waiting)  # it costs as much as so many images
        async with in_time(request) as asked:
            batcher.check(passes)
            async with bodies.read(request, most_of_one) as body:
                with batcher.place_for(passes):
                    image, (budget, top, model) = await settings(request, body, budget, top, model)
                    served = chosen(model)
                    operating_point = served.operating_point(budget)
                    pixels, picture = await seen(
                        asked, served, image, lambda part: (served.pixels(part), _data_url(part))
                    )
                    told = await batcher.alone(lambda: served.explain(pixels, operating_point, top), passes, asked.gone)
                    return JSONResponse(told | {"budget": budget, "seen": picture})

    @app.get("/v1/models", responses=MODELS | ERRORS)
    async def list_models() -> Response:
        """What is served, the default first, and what budgets each can be given."""
        return JSONResponse({"models": [served.about() for served in models]})

    samples = {path.stem: path for path in sorted(_assets("assets", "photos").glob("*.jpg"))}

    @app.get("/v1/samples", responses=SAMPLES | ERRORS)
    async def list_samples() -> Response:
        """Photographs that come with the package."""
        return JSONResponse({"samples": list(samples)})

    def sample_route(path: Path) -> Any:
        content = path.read_bytes()

        async def sample() -> Response:
            return Response(content, media_type="image/jpeg")

        return sample

    for stem, path in samples.items():  # one route for each: no part of a request becomes a path
        app.add_api_route(f"/samples/{stem}.jpg", sample_route(path), include_in_schema=False)

    @app.get("/healthz", responses=HEALTH)
    async def healthz() -> Response:
        """200 while requests are taken, 503 once the server is going down."""
        going = batcher.closing
        ok = batcher.alive and not going
        return JSONResponse({"status": "ok" if ok else "closing"}, 200 if ok else 503)

    @app.get("/metrics", include_in_schema=False)
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


def _told(error: Exception) -> Refused:
    """What a client is told of it."""
    if isinstance(error, Refused):
        return error
    log.error("unforeseen error", exc_info=error)
    return Refused(500, "The server failed on this request; its log says why.")


def _too_long(number: str) -> bool:
    """Whether text is a whole number of more than 64 bits."""
    digits = number.strip().lstrip("+-").lstrip("0")
    return digits.isdecimal() and (len(digits) > len(str(LONGEST)) or int(digits) > LONGEST)


def _say_errors(app: FastAPI) -> None:
    """Every error is {"error": one sentence}."""

    def said(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse({"error": message}, status, headers)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return said(error.status, error.message, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        number = str(first.get("input", "")) if first["loc"][-1] in ("budget", "top") else ""
        status = 400 if _too_long(number) else 422
        return said(status, f"'{first['loc'][-1]}' in the {first['loc'][0]}: {first['msg']}.")

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        known = {404: "There is nothing at this address.", 405: "This address does not take that method."}
        headers = dict(error.headers) if error.headers else None
        return said(error.status_code, known.get(error.status_code, str(error.detail)), headers)
