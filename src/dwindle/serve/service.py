"""What the requests of a server share: its models, and the places, threads and memory that images are given."""

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
from .pictures import Larger, Memory, from_base64, look

WORKERS = 4  # batches that may run, and large images be decoded, at the same time on a CPU
LARGE = 1 << 22  # pixels; an image counts as one more for each of these


@dataclass(frozen=True)
class Asked:
    """A request: when its time is over, what ends it then, and whether somebody still waits for the answer."""

    until: float
    limit: asyncio.Timeout
    gone: Callable[[], bool]


class Service:
    """`models`: the first is the one that answers when a request names none."""

    def __init__(self, models: Sequence[Served], limits: Limits, metrics: Metrics) -> None:
        self.models, self.limits, self.metrics = models, limits, metrics
        self.by_name = {served.name: served for served in models}
        cores = torch.get_num_threads()
        on_cpu = all(served.device.type == "cpu" for served in models)
        self.batcher = Batcher(limits, metrics.ran, min(cores, WORKERS) if on_cpu else 1, cores)
        metrics.watch(lambda: self.batcher.admitted)
        self.bodies = Bodies(limits)
        self.late = Refused(504, f"No answer within {limits.seconds:g} seconds; the server is busy, try again.", 2)
        # Large images wait for each other, and small ones do not wait for them. A thread may keep the memory it used.
        many, few = os.cpu_count() or 1, min(os.cpu_count() or 1, WORKERS)
        self.decoding = ThreadPoolExecutor(many, "dwindle-small")
        self.decoding_large = ThreadPoolExecutor(few, "dwindle-large")
        self.memory, self.memory_large = Memory(limits.decoded // 4), Memory(limits.decoded * 3 // 4)

    async def close(self) -> None:
        await asyncio.to_thread(self.batcher.close)
        for pool in (self.decoding, self.decoding_large):
            pool.shutdown(wait=False, cancel_futures=True)

    def chosen(self, name: str | None) -> Served:
        if name is None:
            return self.models[0]
        if name not in self.by_name:
            raise Refused(404, f"There is no model of that name; served are {', '.join(self.by_name)}.")
        return self.by_name[name]

    @asynccontextmanager
    async def in_time(self, request: Request) -> AsyncIterator[Asked]:
        """All that is done for a request, from its first byte on."""
        state = request.scope.get("state", {})
        until = state.get("arrived", time.monotonic()) + self.limits.seconds
        try:
            async with asyncio.timeout_at(until) as limit:
                yield Asked(until, limit, state.get("gone", lambda: False))
        except TimeoutError:
            raise self.late from None

    async def in_thread(self, call: Any, *given: Any, pool: ThreadPoolExecutor | None = None) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool or self.decoding, call, *given)

    async def seen(self, asked: Asked, served: Served, image: Any, use: Callable[[Image.Image], Any]) -> Any:
        """What `use` makes of the part of an image that the model sees. image: its bytes, or a string in base64."""
        limits = self.limits

        def made(memory: Memory, expected: int) -> Any:
            if asked.gone():
                raise Refused(400, "The client left before its answer.")
            data = image if isinstance(image, bytearray) else from_base64(image, limits)
            part = served.preprocess.seen
            return look(data, limits, lambda photo: use(part(photo)), served.preprocess, memory, asked.until, expected)

        try:
            return await self.in_thread(made, self.memory, LARGE)
        except Larger as found:
            with self.batcher.place_for(min(found.pixels // LARGE, limits.waiting - 1)):
                return await self.in_thread(made, self.memory_large, limits.pixels, pool=self.decoding_large)

    async def answer(
        self, asked: Asked, image: Any, budget: float | None, top: int, model: str | None
    ) -> dict[str, Any]:
        """The classes of one image."""
        served = self.chosen(model)
        operating_point = served.operating_point(budget)
        pixels = await self.seen(asked, served, image, served.pixels)
        return await self.batcher.classify(served, pixels, operating_point, top, asked.gone) | {"budget": budget}
