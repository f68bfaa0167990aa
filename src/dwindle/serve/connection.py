"""A connection of uvicorn's HTTP protocol that bounds the bytes, the seconds and the places of its client.

Nothing else can bound a request that is incomplete: neither its route nor its token has been checked by then.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .guard import EXTRA, answer
from .limits import Limits, Refused
from .metrics import Metrics

ACCEPTED_AT_ONCE, BACKLOG = 16, 4096  # connections accepted at a time, and those that wait to be accepted
FILES = 128  # files that may be open besides connections
SLICE = 4096  # bytes of a head that are parsed between two checks of its size
SWEEP = 0.5  # seconds between two checks for connections whose time is over
CHUNK = 256  # bytes that the chunks of a body must have on average, after the first thousand
log = logging.getLogger("dwindle.serve.connection")  # not uvicorn's, which logs every malformed request
log.setLevel(logging.ERROR)


class Phase(enum.Enum):
    """What a connection waits for."""

    IDLE = "no request has begun"
    HEAD = "a request line and headers are coming"
    BODY = "a body is coming"
    OURS = "the request is here, and the server has to answer"
    CLOSING = "everything is written, and the client has to read it"


class Connections:
    """All open connections. If there are too many, one that the server has waited for longest is closed.

    It is one of the peer for whose connections the server waits most: a flood from one peer takes no place from others.
    """

    def __init__(self, limits: Limits, dropped: Callable[[str], None]) -> None:
        self.limits, self.dropped = limits, dropped
        self.open: set[Connection] = set()
        self.waited_for: dict[str, dict[Connection, None]] = {}  # connections by peer, the one waited for longest first
        self.timer: asyncio.TimerHandle | None = None

    def protocol(self, **options: Any) -> Connection:
        """A new connection; uvicorn calls this for each."""
        return Connection(self, **options)

    def add(self, connection: Connection) -> None:
        self.open.add(connection)
        self.wait_for(connection)
        if self.timer is None:
            self.timer = connection.loop.call_later(SWEEP, self.sweep, connection.loop)
        if len(self.open) > self.limits.connections:
            most = max(self.waited_for.values(), key=len)  # not empty: it has the new connection at least
            next(iter(most)).drop("full", Refused(503, "The server has too many connections; try again.", 1))

    def remove(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.forget(connection)

    def wait_for(self, connection: Connection) -> None:
        self.forget(connection)
        if connection in self.open:
            self.waited_for.setdefault(connection.peer, {})[connection] = None

    def forget(self, connection: Connection) -> None:
        if waited_for := self.waited_for.get(connection.peer):
            waited_for.pop(connection, None)
            if not waited_for:
                del self.waited_for[connection.peer]

    def sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self.open):
            connection.check_time(now)
        self.timer = loop.call_later(SWEEP, self.sweep, loop) if self.open else None


class Connection(HttpToolsProtocol):
    """One connection: uvicorn's protocol, and the limits of its client."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.logger = log
        self.all_connections, self.limits = connections, connections.limits
        self.peer = ""
        self.phase, self.since = Phase.IDLE, self.loop.time()
        self.blocked_since: float | None = None  # when the client stopped reading what is written
        self.ignoring = False  # whether everything else that comes is ignored
        self.close_after_body = False  # whether it closes when the current body is complete
        self.arrived = 0.0  # the time of the first byte of the request
        self.read = self.begin = 0  # bytes read in all, and those read up to the piece in which the request begins
        self.head_size = self.fields = self.body = self.chunks = 0  # of this request
        self.refusal: Refused | None = None

    # Methods that uvicorn and its parser call.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, DelayedClose(self, transport)))
        self.peer = _peer(self.client)
        self.all_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.all_connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.ignoring:
            piece = data[at:] if self.phase is Phase.BODY else data[at : at + SLICE]
            at += len(piece)
            self.read += len(piece)
            super().data_received(piece)
            if self.read - self.begin - self.body > self._framing():
                self.all_connections.dropped("malformed")
                self.refuse(self._too_long())
            elif self.body > self.limits.body and not self._answering():
                self._close()  # the client has its answer, and still sends

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.arrived, self.begin = self.loop.time(), self.read
        self.head_size = self.fields = self.body = self.chunks = 0
        self._enter(Phase.HEAD)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header of the head, or one after a body in chunks."""
        self.fields += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        ahead = len(self.pipeline) + self._answering()
        if ahead >= self.limits.pipelined:
            self._stop(Refused(429, "Too many requests before an answer.", 1))
        self.scope["state"] |= {"arrived": self.arrived, "gone": self.transport.is_closing}
        super().on_headers_complete()
        if self.parser.should_upgrade():  # to a protocol that is not supported; the parser reads no further
            self.cycle.keep_alive, self.ignoring = False, True
        self._enter(Phase.BODY)

    def on_chunk_header(self) -> None:
        self.chunks += 1
        if self.chunks > 1000 + self.body // CHUNK:
            self._stop(Refused(400, "The chunks of the body are too small; send larger ones."))

    def on_body(self, body: bytes) -> None:
        self.body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._enter(Phase.OURS if self._answering() else Phase.IDLE)
        if self.close_after_body:
            self._close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.phase is Phase.OURS and not self._answering():
            self._enter(Phase.IDLE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.blocked_since = self.loop.time()
        self.all_connections.wait_for(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.blocked_since = None
        self._enter(self.phase)

    def send_400_response(self, msg: str) -> None:
        self.refuse(self.refusal or Refused(400, "This is not HTTP as it is written; send the request anew."))

    # Ending connections that exceed a limit.

    def check_time(self, now: float) -> None:
        """Drop the connection if the time of its phase is over. Called every SWEEP seconds."""
        if self.transport.is_closing() and self.phase is not Phase.CLOSING:
            self._enter(Phase.CLOSING)
        elif now >= self._due():
            self.drop("slow", Refused(408, "The request did not arrive in time; send it again."))

    def drop(self, why: str, refusal: Refused) -> None:
        """End the connection, with an answer if the client can take one. why: the label in the metrics."""
        self.all_connections.dropped(why)
        if self.blocked_since is not None or self.phase is Phase.CLOSING:
            self.transport.abort()  # the client reads nothing
        elif self.phase is Phase.IDLE and (why == "slow" or self.cycle is not None):
            self._close()  # the client would take an answer for that to its next request
        else:
            self.refuse(refusal)

    def refuse(self, refusal: Refused) -> None:
        """Answer with the refusal, unless an answer has begun, and read no further."""
        if self.ignoring:
            return
        is_next = self.phase is Phase.BODY and not self.pipeline
        if self._answering() and not is_next:
            self.ignoring = True
            self.cycle.keep_alive = False  # closes once the requests before it are answered
            return
        if self.phase is Phase.BODY and self.cycle.response_started:
            self._close()
            return
        headers, body = answer(refusal)
        lines = (name + b": " + value for name, value in [*headers, *EXTRA, (b"connection", b"close")])
        self.transport.write(STATUS_LINE[refusal.status] + b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self._close()

    def _close(self) -> None:
        self.ignoring = True
        self.transport.close()
        self._enter(Phase.CLOSING)

    def _due(self) -> float:
        """The time at which this phase must be over."""
        limits = self.limits
        if self.blocked_since is not None:
            return self.blocked_since + limits.taking_seconds
        if self.phase is Phase.OURS or (self._answering() and self.phase in (Phase.IDLE, Phase.HEAD)):
            return float("inf")  # answering has its own time limit
        return (
            self.since
            + {
                Phase.IDLE: limits.idle_seconds,
                Phase.HEAD: limits.head_seconds,
                Phase.BODY: min(limits.upload_seconds, limits.body_patience + self.body / limits.body_rate),
                Phase.CLOSING: limits.taking_seconds,
            }[self.phase]
        )

    def _enter(self, phase: Phase) -> None:
        self.phase, self.since = phase, self.loop.time()
        if phase is Phase.OURS and self.blocked_since is None:
            self.all_connections.forget(self)
        else:
            self.all_connections.wait_for(self)

    def _answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _framing(self) -> float:
        """The bytes a request may have beside its body: its head, the sizes of chunks, and the headers after them."""
        if self.phase is Phase.HEAD:
            return self.limits.head_bytes
        return 3 * self.limits.head_bytes + self.body // 8 if self.phase is Phase.BODY else float("inf")

    def _count(self, size: int) -> None:
        """Add bytes to the size of the head, and stop a request whose head is too large."""
        self.head_size += size
        if self.head_size > self.limits.head_bytes or self.fields > self.limits.head_fields:
            self._stop(self._too_long())

    def _too_long(self) -> Refused:
        most = f"{self.limits.head_bytes} bytes or {self.limits.head_fields} headers"
        return Refused(431, f"The request line and headers have more than the {most} allowed; send less.")

    def _stop(self, refusal: Refused) -> None:
        """Refuse the request from within a callback of the parser, which an exception ends."""
        self.refusal = refusal
        self.all_connections.dropped("malformed")
        raise refusal


class DelayedClose:
    """A transport that closes only after the current body: a client that still sends would lose an earlier answer."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self.connection, self.transport = connection, transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def close(self) -> None:
        if self.connection.phase is Phase.BODY and not self.connection.ignoring:
            self.connection.close_after_body = True
        else:
            self.transport.close()


def _peer(client: tuple[str, int] | None) -> str:
    """The peer that a client counts as: its IPv4 address, or its /64 network of IPv6, which one host may have."""
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def served_by(app: FastAPI, limits: Limits, metrics: Metrics) -> uvicorn.Server:
    """The uvicorn server of the application, with connections bounded by `limits`."""
    connections = Connections(replace(limits, connections=_places(limits.connections)), metrics.drop)
    config = uvicorn.Config(
        app,
        http=cast(Any, connections.protocol),  # it is called as a class would be
        loop="asyncio",
        ws="none",
        proxy_headers=False,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=round(limits.idle_seconds),
        timeout_graceful_shutdown=round(limits.seconds),
        backlog=ACCEPTED_AT_ONCE,
    )
    return Server(config)


class Server(uvicorn.Server):
    """uvicorn with a longer queue of connections that wait to be accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a longer queue. The configured backlog stays small, because asyncio also accepts that many
        connections at once before it serves those it has."""
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)


def _places(wanted: int) -> int:
    """The number of connections that the limit of open files allows, after raising it as far as possible. Beyond it
    the server could accept nobody."""
    try:
        import resource
    except ImportError:  # Windows
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(min(wanted, soft - FILES), 1)
