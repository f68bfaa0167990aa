"""Checks before the routes: the token and the Host name of a request; and the headers of every answer."""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import time
from collections.abc import Collection
from typing import Any

from .limits import Refused, authorised
from .metrics import Metrics

log = logging.getLogger("dwindle.serve")
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
    "cross-origin-embedder-policy": "require-corp",
    "cache-control": "no-store",
}
EXTRA = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


def answer(refusal: Refused) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """The headers and the body of a refusal that is sent without a route."""
    body = json.dumps({"error": refusal.message}).encode()
    own = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    return [(name.lower().encode(), value.encode()) for name, value in own.items()], body


class Guard:
    """ASGI middleware around all routes: it checks names and tokens, adds headers to every answer, and counts it."""

    def __init__(self, app: Any, metrics: Metrics, token: str | None = None, hosts: Hosts | None = None) -> None:
        """token: None serves everyone. hosts: None accepts any name."""
        self.app, self.metrics, self.token, self.hosts = app, metrics, token, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = scope.get("state", {}).get("arrived", time.monotonic()), 0

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = message | {"headers": [*message.get("headers", []), *EXTRA]}
            await send(message)

        try:
            if refusal := self._refusal(scope):
                await _send(refusal, sending)
            else:  # HEAD is handled as GET, and uvicorn leaves the body out
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                await self.app(scope | {"method": method}, receive, sending)
        except Exception as error:
            log.error("unforeseen error", exc_info=error)
            if status:  # a part of the answer is sent already
                raise
            await _send(Refused(500, "The server failed on this request; its log says why."), sending)
        finally:
            self.metrics.answered(scope["path"], status or 500, time.monotonic() - begin)

    def _refusal(self, scope: Any) -> Refused | None:
        """Why the request is refused, by its name or its token; None: it is not."""
        headers, path = scope["headers"], scope["path"]
        if self.hosts and (refusal := self.hosts.refusal(headers, scope["http_version"])):
            return refusal
        if path == "/metrics" or path.startswith("/v1"):
            header = next((value.decode("latin-1") for name, value in headers if name == b"authorization"), None)
            if not authorised(header, self.token):
                return Refused(401, "A bearer token is required: send the header 'Authorization: Bearer ...'.")
        return None


async def _send(refusal: Refused, send: Any) -> None:
    """Send the refusal as an answer."""
    headers, body = answer(refusal)
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Hosts:
    """The names in Host headers that a server accepts.

    Any page can make a browser resolve the page's own name to this server (DNS rebinding), and read its answers. The
    browser then sends that name, which is refused. An IP address cannot be abused in this way.
    """

    def __init__(self, bound: Collection[str] = (), allowed: Collection[str] = ()) -> None:
        """bound: the addresses that the server listens on. allowed: further names; `*` allows all."""
        self.allowed = {name.lower().rstrip(".") for name in allowed}
        self.names = self.allowed | {name.lower().rstrip(".") for name in (*bound, "localhost")}
        self.addresses = {address for name in bound if (address := _address(name))}

    def serves(self, name: str) -> bool:
        """Whether the name or address is one of this server."""
        if name in self.names or "*" in self.names:
            return True
        address = _address(name)
        if address is None:
            return False
        everywhere = any(bound.is_unspecified for bound in self.addresses)
        return address.is_loopback or address in self.addresses or everywhere

    def refusal(self, headers: list[tuple[bytes, bytes]], version: str) -> Refused | None:
        named = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if not named and version == "1.0":  # a load balancer, which may send no Host; browsers always do
            return None
        name = _name(named[0]) if len(named) == 1 else None
        if name is None:
            return Refused(400, "The request needs one Host header with the name of this server.")
        if not self.serves(name):
            return Refused(421, "The server is not known by this Host; start it with --allow-host and the name.")
        for origin in (value.decode("latin-1") for key, value in headers if key == b"origin"):
            scheme, _, rest = origin.partition("://")
            own = rest.lower() == named[0].lower() and scheme in ("http", "https")
            if not own and _name(rest) not in self.allowed and "*" not in self.allowed:
                return Refused(403, "The request comes from a page of another server; allow it with --allow-host.")
        return None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that the name is; None: it is another name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _name(host: str) -> str | None:
    """The name in a Host header, without its port; None: the header is not valid."""
    found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?", host.lower())
    return (found[1] or found[2]).rstrip(".") if found else None
