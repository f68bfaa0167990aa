"""What the requests of a server share: its models, and the places, threads and memory for images."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import Request
from PIL import Image

from .batching import Batcher
from .bodies import Bodies
from .limits import Limits, Refused
from .metrics import Metrics
from .models import Served
from .pictures import Larger, Memory, from_base64, read_image

WORKERS = 4  # batches that run, and large images that are decoded, at the same time on a CPU
LARGE = 1 << 22  # pixels; a large image counts as one more image for each so many of them


@dataclass(frozen=True)
class Pending:
    """A request without an answer: when its time is over, the timeout that ends it, and whether its client has left."""

    until: float
    limit: asyncio.Timeout
    gone: Callable[[], bool]


class Service:
    """Models, batcher, threads and memory of a server. The first model answers requests that name none."""

    def __init__(self, models: Sequence[Served], limits: Limits, metrics: Metrics) -> None:
        self.models, self.limits, self.metrics = models, limits, metrics
        self.by_name = {served.name: served for served in models}
        cores = torch.get_num_threads()
        on_cpu = all(served.device.type == "cpu" for served in models)
        self.batcher = Batcher(limits, metrics.ran, min(cores, WORKERS) if on_cpu else 1, cores)
        metrics.watch(lambda: self.batcher.admitted)
        self.bodies = Bodies(limits)
        self.too_late = Refused(504, f"No answer within {limits.seconds:g} seconds; the server is busy, try again.", 2)
        # Large images have threads and memory of their own, so that small ones never wait for them. They are few,
        # because a thread may keep the memory it used.
        many, few = os.cpu_count() or 1, min(os.cpu_count() or 1, WORKERS)
        self.decoding = ThreadPoolExecutor(many, "dwindle-small")
        self.decoding_large = ThreadPoolExecutor(few, "dwindle-large")
        self.memory, self.memory_large = Memory(limits.decoded // 4), Memory(limits.decoded * 3 // 4)

    async def close(self) -> None:
        await asyncio.to_thread(self.batcher.close)
        for pool in (self.decoding, self.decoding_large):
            pool.shutdown(wait=False, cancel_futures=True)

    def model_named(self, name: str | None) -> Served:
        """The model of this name, or the first one."""
        if name is None:
            return self.models[0]
        if name not in self.by_name:
            raise Refused(404, f"There is no model of that name; served are {', '.join(self.by_name)}.")
        return self.by_name[name]

    @asynccontextmanager
    async def time_limit(self, request: Request) -> AsyncIterator[Pending]:
        """Limit the time of all that is done for a request, counted from its first byte."""
        state = request.scope.get("state", {})
        until = state.get("arrived", time.monotonic()) + self.limits.seconds
        try:
            async with asyncio.timeout_at(until) as limit:
                yield Pending(until, limit, state.get("gone", lambda: False))
        except TimeoutError:
            raise self.too_late from None

    async def in_thread(self, call: Any, *args: Any, pool: ThreadPoolExecutor | None = None) -> Any:
        """The result of a call that runs in a thread, by default one that decodes small images."""
        return await asyncio.get_running_loop().run_in_executor(pool or self.decoding, call, *args)

    async def decoded(self, pending: Pending, served: Served, image: Any, use: Callable[[Image.Image], Any]) -> Any:
        """The result of `use` for the part of an image that the model sees. image: bytes, or a string in base64."""
        limits = self.limits

        def decode(memory: Memory, expected: int) -> Any:
            if pending.gone():
                raise Refused(400, "The client left before its answer.")
            data = image if isinstance(image, bytearray) else from_base64(image, limits)
            crop = served.preprocess.seen
            return read_image(
                data, limits, lambda photo: use(crop(photo)), served.preprocess, memory, pending.until, expected
            )

        try:
            return await self.in_thread(decode, self.memory, LARGE)
        except Larger as larger:
            with self.batcher.place_for(min(larger.pixels // LARGE, limits.waiting - 1)):
                return await self.in_thread(decode, self.memory_large, limits.pixels, pool=self.decoding_large)

    async def answer(
        self, pending: Pending, image: Any, budget: float | None, top: int, model: str | None
    ) -> dict[str, Any]:
        """The answer for one image."""
        served = self.model_named(model)
        operating_point = served.operating_point(budget)
        pixels = await self.decoded(pending, served, image, served.pixels)
        return await self.batcher.classify(served, pixels, operating_point, top, pending.gone) | {"budget": budget}
