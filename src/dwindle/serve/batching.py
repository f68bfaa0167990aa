"""Dynamic batching: images of several requests run as one batch, in a few threads that run the models.

An image's result does not depend on its batch (a law of the packed layout), so that any images may share one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import DwindleError
from .limits import Limits, Refused
from .models import Served


@dataclass
class Job:
    """An image to classify, or another function (`call`) to run in a thread of the models."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future
    served: Served | None = None
    image: Tensor | None = None
    operating_point: float | None = None
    top: int = 5
    call: Callable[[], Any] | None = None
    images: int = 1  # images that it counts as
    gone: Callable[[], bool] = lambda: False  # whether its client has left
    arrived: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> tuple | None:
        """The batch key: jobs of the same key can share a batch. None: the job runs alone."""
        if self.served is None or self.image is None:
            return None
        return self.served.name, self.served.group(self.operating_point), tuple(self.image.shape)

    def answer(self, value: Any) -> None:
        """Give the future its result, or its exception, from any thread."""

        def settle() -> None:
            if self.future.done():  # its time limit has ended it
                return
            if isinstance(value, BaseException):
                self.future.set_exception(value)
            else:
                self.future.set_result(value)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(settle)


class Batcher:
    """A bounded queue, and threads that run its jobs in batches.

    Batches that run at the same time divide the cores among them: a batch on one core never waits for another core.
    """

    def __init__(
        self, limits: Limits, ran: Callable[[int, float], None] | None = None, workers: int = 1, cores: int = 1
    ) -> None:
        self.limits, self.ran, self.cores = limits, ran, cores
        self.jobs: deque[Job] = deque()
        self.wake = threading.Condition()
        self.closing = False
        self.admitted = 0  # images accepted and not yet answered
        self.busy = 0  # batches that are running
        self.running = 0  # images in these batches
        named = [f"dwindle-models-{number}" for number in range(workers)]
        self.threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in named]
        for thread in self.threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self.threads)

    @contextmanager
    def place_for(self, images: int) -> Iterator[None]:
        """Count so many images as waiting while the context lasts."""
        self.admit(images)
        try:
            yield
        finally:
            self.dismiss(images)

    def admit(self, images: int) -> None:
        """Count images as waiting, before they are decoded. Each must be `dismiss`ed later, also after an error."""
        self.check(images)
        self.admitted += images

    def check(self, images: int) -> None:
        """Refuse images for which there is no place. Called before a body is read, which may take long."""
        if self.closing:
            raise Refused(503, "The server is shutting down; ask another one.", retry_after=5)
        if self.admitted + images > self.limits.waiting:
            raise Refused(429, f"{self.admitted} images are waiting already; try again shortly.", retry_after=1)

    def dismiss(self, images: int) -> None:
        self.admitted -= images

    async def classify(
        self,
        served: Served,
        image: Tensor,
        operating_point: float | None,
        top: int,
        gone: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """The answer for an image, which may share its batch."""
        return await self._put(Job(*_loop_and_future(), served, image, operating_point, top, gone=gone))

    async def alone(self, call: Callable[[], Any], images: int = 1, gone: Callable[[], bool] = lambda: False) -> Any:
        """The result of a function that runs alone in a thread of the models."""
        return await self._put(Job(*_loop_and_future(), call=call, images=images, gone=gone))

    async def _put(self, job: Job) -> Any:
        with self.wake:
            self.jobs.append(job)
            self.wake.notify()
        return await job.future  # a caller that stops waiting cancels it

    def close(self) -> None:
        """Finish the jobs that were accepted, then stop the threads."""
        with self.wake:
            self.closing = True
            self.wake.notify_all()
        end = time.monotonic() + self.limits.seconds
        for thread in self.threads:
            thread.join(max(end - time.monotonic(), 0))

    def _work(self) -> None:
        """The loop of a thread: run batches until the batcher closes."""
        while batch := self._next():
            begin = time.monotonic()
            torch.set_num_threads(max(self.cores // self.busy, 1))
            self._run(batch)
            with self.wake:
                self.busy -= 1
                self.running -= _images(batch)
                self.wake.notify()  # a batch that waits for more images may have no reason left
            if self.ran:
                self.ran(len(batch), time.monotonic() - begin)

    def _next(self) -> list[Job]:
        """The next batch, as soon as it should run. Empty: the batcher is closed."""
        with self.wake:
            while not self.closing or self.jobs:
                if not self.jobs:
                    self.wake.wait()
                elif (left := self._linger()) > 0:
                    self.wake.wait(left)  # then check again: another thread may have taken the jobs
                else:
                    self.busy += 1
                    batch = self._take()
                    self.running += _images(batch)
                    if self.jobs:
                        self.wake.notify()  # there is work for another thread
                    return batch
            return []

    def _linger(self) -> float:
        """Seconds that the first job still waits for others to share its batch."""
        if len(self.jobs) >= self.limits.batch or self.closing:
            return 0.0
        coming = self.busy > 0 and self.admitted > self.running + _images(self.jobs)  # others are being decoded
        patience = self.limits.linger_busy if coming else self.limits.linger
        return self.jobs[0].arrived + patience - time.monotonic()

    def _take(self) -> list[Job]:
        """Take the first job, and those after it that can share its batch."""
        first = self.jobs.popleft()
        if first.key is None:
            return [first]
        batch, others = [first], list[Job]()
        while self.jobs and len(batch) < self.limits.batch:
            job = self.jobs.popleft()
            (batch if job.key == first.key else others).append(job)
        self.jobs.extendleft(reversed(others))
        return batch

    def _run(self, batch: list[Job]) -> None:
        """Run a batch and answer its jobs. If it fails, each job runs alone."""
        for job in batch:
            if job.gone():
                job.answer(Refused(400, "The client left before its answer."))
        batch = [job for job in batch if not (job.future.done() or job.gone())]
        if not batch:
            return
        try:
            values = self._values(batch)
        except Exception as error:
            if len(batch) == 1:
                batch[0].answer(_as_refusal(error))
                return
            for job in batch:  # one job may have failed the whole batch
                self._run([job])
            return
        for job, value in zip(batch, values):
            job.answer(value)

    @staticmethod
    def _values(batch: list[Job]) -> list[Any]:
        """The results of the jobs of a batch."""
        first = batch[0]
        if first.call is not None:
            return [first.call()]
        assert first.served is not None
        images = torch.stack([job.image for job in batch if job.image is not None])
        out = first.served.run(images, [job.operating_point for job in batch])
        answers = first.served.answers(out, max(job.top for job in batch))
        return [answer | {"top": answer["top"][: job.top]} for answer, job in zip(answers, batch)]


def _images(jobs: Iterable[Job]) -> int:
    """How many images the jobs count as."""
    return sum(job.images for job in jobs)


def _loop_and_future() -> tuple[asyncio.AbstractEventLoop, asyncio.Future]:
    loop = asyncio.get_running_loop()
    return loop, loop.create_future()


def _as_refusal(error: Exception) -> Exception:
    """The error as the client is told it; one that is not foreseen stays as it is."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, DwindleError):
        return Refused(422, str(error))
    return error
