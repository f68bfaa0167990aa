"""The metrics of a server, in Prometheus' format at /metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

ROUTES = ("/v1/classify", "/v1/batch", "/v1/explain", "/v1/models", "/v1/samples", "/healthz", "/metrics", "/")


class Metrics:
    """Counters and histograms of one server."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("dwindle_requests", "Requests answered", ["route", "status"], **options)
        self.seconds = Histogram("dwindle_request_seconds", "From first byte in to last byte out", ["route"], **options)
        sizes = (1, 2, 4, 8, 16, 32)
        self.batches = Histogram("dwindle_batch_images", "Images that ran together", buckets=sizes, **options)
        self.busy = Counter("dwindle_model_seconds", "Time the models ran", **options)
        self.dropped = Counter("dwindle_dropped_connections", "Connections closed on their client", ["why"], **options)
        self.waiting = Gauge("dwindle_waiting_images", "Images accepted and not yet answered", **options)

    def watch(self, waiting: Callable[[], float]) -> None:
        self.waiting.set_function(waiting)

    def ran(self, images: int, seconds: float) -> None:
        self.batches.observe(images)
        self.busy.inc(seconds)

    def answered(self, path: str, status: int, seconds: float) -> None:
        route = path if path in ROUTES else "other"  # a fixed set, so that clients cannot create labels
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def drop(self, why: str) -> None:
        self.dropped.labels(why).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
