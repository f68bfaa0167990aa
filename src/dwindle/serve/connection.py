"""A connection, as uvicorn speaks HTTP on it, with what its client may take: bytes, seconds, and a place.

Before a request is whole nothing else can bound it: neither a route nor a token has been asked.
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

ACCEPTED, KNOCKING = 16, 4096  # connections: let in at a time, and before they are
FILES = 128  # open besides connections
SLICE = 4096  # bytes of a head that are read between two looks at how many there are
SWEEP = 0.5  # seconds between two looks for those whose time is over
CHUNK = 256  # bytes that the chunks of a body have on average, but for the first thousand
log = logging.getLogger("dwindle.serve.connection")  # apart from uvicorn's, which tells of every wrong request
log.setLevel(logging.ERROR)


class Phase(enum.Enum):
    IDLE = "no request has begun"
    HEAD = "a request line and headers are coming"
    BODY = "a body is coming"
    OURS = "the request is here, and the server has to answer"
    CLOSING = "all is said, and the client has to take it"


class Connections:
    """All that are open. Where there are too many, the one that has been waited for longest goes.

    It is looked for where most are waited for: nobody loses a place to a flood from elsewhere.
    """

    def __init__(self, limits: Limits, dropped: Callable[[str], None]) -> None:
        self.limits, self.dropped = limits, dropped
        self.open: set[Connection] = set()
        self.waited_for: dict[str, dict[Connection, None]] = {}  # by peer; the longest first
        self.timer: asyncio.TimerHandle | None = None

    def protocol(self, **given: Any) -> Connection:
        """What uvicorn calls for each connection."""
        return Connection(self, **given)

    def add(self, connection: Connection) -> None:
        self.open.add(connection)
        self.wait_for(connection)
        if self.timer is None:
            self.timer = connection.loop.call_later(SWEEP, self.sweep, connection.loop)
        if len(self.open) > self.limits.connections:
            most = max(self.waited_for.values(), key=len)  # the new one at least
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
            connection.look(now)
        self.timer = loop.call_later(SWEEP, self.sweep, loop) if self.open else None


class Connection(HttpToolsProtocol):
    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.logger = log
        self.all, self.limits = connections, connections.limits
        self.peer = ""
        self.phase, self.since = Phase.IDLE, self.loop.time()
        self.stuck: float | None = None  # since when the client takes nothing of what was written
        self.deaf = False  # what else comes is of no interest
        self.last = False  # closes with the end of the body that is coming
        self.arrived = 0.0  # the first byte of the request
        self.read = self.begin = 0  # bytes: all, and when the piece was in which the request begins
        self.told = self.fields = self.body = self.chunks = 0  # of this request
        self.refusal: Refused | None = None

    # What uvicorn and its parser call

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Lingering(self, transport)))
        self.peer = _peer(self.client)
        self.all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.all.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.deaf:
            piece = data[at:] if self.phase is Phase.BODY else data[at : at + SLICE]
            at += len(piece)
            self.read += len(piece)
            super().data_received(piece)
            if self.read - self.begin - self.body > self._framing():
                self.all.dropped("malformed")
                self.refuse(self._too_long())
            elif self.body > self.limits.body and not self._answering():
                self._close()  # it has its answer, and sends on

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.arrived, self.begin = self.loop.time(), self.read
        self.told = self.fields = self.body = self.chunks = 0
        self._enter(Phase.HEAD)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of a head, or after a body in chunks."""
        self.fields += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        ahead = len(self.pipeline) + self._answering()
        if ahead >= self.limits.pipelined:
            self._stop(Refused(429, "Too many requests before an answer.", 1))
        self.scope["state"] |= {"arrived": self.arrived, "gone": self.transport.is_closing}
        super().on_headers_complete()
        if self.parser.should_upgrade():  # to nothing that is spoken here; the parser reads no further
            self.cycle.keep_alive, self.deaf = False, True
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
        if self.last:
            self._close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.phase is Phase.OURS and not self._answering():
            self._enter(Phase.IDLE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stuck = self.loop.time()
        self.all.wait_for(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stuck = None
        self._enter(self.phase)

    def send_400_response(self, msg: str) -> None:
        self.refuse(self.refusal or Refused(400, "This is not HTTP as it is written; send the request anew."))

    # What happens to those that take too much

    def look(self, now: float) -> None:
        """Called now and then."""
        if self.transport.is_closing() and self.phase is not Phase.CLOSING:
            self._enter(Phase.CLOSING)
        elif now >= self._due():
            self.drop("slow", Refused(408, "The request did not arrive in time; send it again."))

    def drop(self, why: str, refusal: Refused) -> None:
        self.all.dropped(why)
        if self.stuck is not None or self.phase is Phase.CLOSING:
            self.transport.abort()  # it would take no words
        elif self.phase is Phase.IDLE and (why == "slow" or self.cycle is not None):
            self._close()  # it would take any words for the answer to its next request
        else:
            self.refuse(refusal)

    def refuse(self, refusal: Refused) -> None:
        """Say so, unless an answer has begun, and read no further."""
        if self.deaf:
            return
        its_turn = self.phase is Phase.BODY and not self.pipeline
        if self._answering() and not its_turn:
            self.deaf = True
            self.cycle.keep_alive = False  # once those before it are answered
            return
        if self.phase is Phase.BODY and self.cycle.response_started:
            self._close()
            return
        headers, body = answer(refusal)
        lines = (name + b": " + value for name, value in [*headers, *EXTRA, (b"connection", b"close")])
        self.transport.write(STATUS_LINE[refusal.status] + b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self._close()

    def _close(self) -> None:
        self.deaf = True
        self.transport.close()
        self._enter(Phase.CLOSING)

    def _due(self) -> float:
        """When this phase must be over."""
        limits = self.limits
        if self.stuck is not None:
            return self.stuck + limits.taking_seconds
        if self.phase is Phase.OURS or (self._answering() and self.phase in (Phase.IDLE, Phase.HEAD)):
            return float("inf")  # the answer has its own limit
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
        if phase is Phase.OURS and self.stuck is None:
            self.all.forget(self)
        else:
            self.all.wait_for(self)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _framing(self) -> float:
        """Bytes that a request may have beside its body: its head; the sizes of chunks, and headers that follow."""
        if self.phase is Phase.HEAD:
            return self.limits.head_bytes
        return 3 * self.limits.head_bytes + self.body // 8 if self.phase is Phase.BODY else float("inf")

    def _count(self, size: int) -> None:
        self.told += size
        if self.told > self.limits.head_bytes or self.fields > self.limits.head_fields:
            self._stop(self._too_long())

    def _too_long(self) -> Refused:
        most = f"{self.limits.head_bytes} bytes or {self.limits.head_fields} headers"
        return Refused(431, f"The request line and headers have more than the {most} allowed; send less.")

    def _stop(self, refusal: Refused) -> None:
        """In a call of the parser's, which ends its work when an exception comes through."""
        self.refusal = refusal
        self.all.dropped("malformed")
        raise refusal


class Lingering:
    """A transport that is not closed while a body comes: an answer given before its end would be lost."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self.connection, self.transport = connection, transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def close(self) -> None:
        if self.connection.phase is Phase.BODY and not self.connection.deaf:
            self.connection.last = True
        else:
            self.transport.close()


def _peer(client: tuple[str, int] | None) -> str:
    """Who counts as one: an IPv4 address, or the network that an IPv6 host has for itself."""
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def served_by(app: FastAPI, limits: Limits, metrics: Metrics) -> uvicorn.Server:
    """uvicorn, with connections that are bounded as `limits` says."""
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
        backlog=ACCEPTED,
    )
    return Server(config)


class Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The backlog is also how many asyncio lets in at once, before it looks at those who are in. More may knock."""
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(KNOCKING)


def _places(wanted: int) -> int:
    """As many connections as there may be open files, some left over: beyond them nobody would be let in at all."""
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
