"""What /metrics says, and the headers every response gets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

ROUTES = ("/v1/classify", "/v1/batch", "/v1/explain", "/v1/models", "/v1/samples", "/healthz", "/metrics", "/")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Metrics:
    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        parts: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("dwindle_requests", "Requests answered", ["route", "status"], **parts)
        self.seconds = Histogram("dwindle_request_seconds", "From first byte in to last byte out", ["route"], **parts)
        sizes = (1, 2, 4, 8, 16, 32)
        self.batches = Histogram("dwindle_batch_images", "Images that ran together", buckets=sizes, **parts)
        self.busy = Counter("dwindle_model_seconds", "Time the models ran", **parts)
        self.waiting = Gauge("dwindle_waiting_images", "Images accepted and not yet answered", **parts)

    def watch(self, waiting: Callable[[], float]) -> None:
        self.waiting.set_function(waiting)

    def ran(self, images: int, seconds: float) -> None:
        self.batches.observe(images)
        self.busy.inc(seconds)

    def answered(self, path: str, status: int, seconds: float) -> None:
        route = path if path in ROUTES else "other"  # a fixed set: no client can make labels up
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Headers:
    """ASGI middleware: security headers on every response, and a count of it."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics
        self.extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 500

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = message | {"headers": [*message.get("headers", []), *self.extra]}
            await send(message)

        try:
            await self.app(scope, receive, sending)
        finally:
            self.metrics.answered(scope["path"], status, time.perf_counter() - begin)
