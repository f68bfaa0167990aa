"""The bodies of requests: read within one memory limit for all of them, and JSON parsed within bounds."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from .limits import Limits, Refused

SLOW = 2.0  # seconds after which an incomplete body may be given up for others
LONG = 512  # bytes beyond which a string in JSON is taken for an image
QUOTES = ESCAPES = 64  # escaped quotes in a string of JSON, and backslashes in a row; an image has none


class Body:
    """A body that is being read, or held in memory."""

    def __init__(self) -> None:
        self.data, self.size = bytearray(), 0
        self.began = time.monotonic()
        self.patience = asyncio.timeout(None)
        self.given_up = False


class Bodies:
    """All bodies that are in memory."""

    def __init__(self, limits: Limits) -> None:
        self.most, self.held = limits.bodies, 0
        self.coming: dict[Body, None] = {}  # bodies that are being read, the oldest first

    @asynccontextmanager
    async def read(self, request: Request, most: int) -> AsyncIterator[bytearray]:
        """The body, of at most so many bytes. It counts as held for as long as the context lasts."""
        body = Body()
        try:
            await self._fill(body, request, most)
            yield body.data
        finally:
            self.held -= body.size

    async def _fill(self, body: Body, request: Request, most: int) -> None:
        """Read the request into the body, or refuse it."""
        too_much = Refused(413, f"The request has more than the {most} bytes allowed; send a smaller image.")
        headers = request.headers
        encoded = headers.get("content-encoding", "identity").lower() != "identity"
        if encoded or headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise Refused(415, "The body has a Content-Encoding or Transfer-Encoding; send it as it is, or in chunks.")
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > most:
            raise too_much
        try:
            async with body.patience:
                self.coming[body] = None
                async for chunk in request.stream():
                    if body.given_up:  # the timeout is set, but this chunk came before it
                        raise TimeoutError
                    if len(body.data) + len(chunk) > most:
                        raise too_much
                    self._make_room(body, len(chunk))
                    body.data += chunk
        except TimeoutError:
            raise Refused(
                503, "The request came too slowly for a server that has much to read; try again.", 2
            ) from None
        except ClientDisconnect:
            raise Refused(400, "The connection ended before the request did; send it again.") from None
        finally:
            self.coming.pop(body, None)

    def _make_room(self, body: Body, size: int) -> None:
        """Make room for so many bytes of a body, by giving up incomplete bodies that have been slow."""
        now = time.monotonic()
        while self.held + size > self.most:
            others = (other for other in self.coming if other is not body and other.size)
            slow = next((other for other in others if now - other.began > SLOW), None)
            if slow is None:
                raise Refused(503, "The server has too much to read at once; try again shortly.", 1)
            self.coming.pop(slow)
            slow.given_up = True
            slow.patience.reschedule(asyncio.get_running_loop().time())
            self.held -= slow.size
            slow.data, slow.size = bytearray(), 0
        self.held += size
        body.size += size


def is_json(request: Request) -> bool:
    """Whether the body is said to be JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def parsed(body: bytearray, limits: Limits) -> dict[str, Any]:
    """The body as a JSON object, in which each long string is a view of the body.

    The number of Python objects is bounded: everything except long strings has at most `limits.settings` bytes.
    """
    invalid = Refused(422, "The body is not valid JSON; send an object with an 'image' in base64.")
    try:
        text, strings = _without_long_strings(body, limits)
        value = json.loads(
            text.decode("utf-8-sig"),
            parse_int=_whole,
            object_hook=lambda pairs: {
                key: strings.get(item, item) if isinstance(item, str) else item for key, item in pairs.items()
            },
        )
    except (ValueError, RecursionError):
        raise invalid from None
    if not isinstance(value, dict):
        raise Refused(422, "The body must be a JSON object with an 'image' in base64.")
    return value


def _whole(digits: str) -> int:
    """The number, or one just above 64 bits in place of a longer one. Python refuses to parse thousands of digits, and
    then the other images of a batch would get no answer."""
    return int(digits) if len(digits) <= 20 else -(1 << 64) if digits[0] == "-" else 1 << 64


def _without_long_strings(body: bytearray, limits: Limits) -> tuple[bytes, dict[str, memoryview]]:
    """The JSON with a short name in place of each long string, and the strings by these names."""
    too_much = Refused(422, f"The JSON has more than {limits.settings} bytes beside its images; send images only.")
    secret, whole = secrets.token_hex(8), memoryview(body)  # so that no client can guess a name
    text, strings, at = bytearray(), dict[str, memoryview](), 0
    while (begin := body.find(b'"', at)) >= 0:
        end = _end_of_string(body, begin + 1)
        long = end - begin > LONG
        if len(text) + (begin if long else end) - at > limits.settings:
            raise too_much
        if long:
            name = f"{secret}{len(strings)}"
            strings[name] = whole[begin + 1 : end]
            text += body[at : begin + 1] + name.encode() + b'"'
        else:
            text += body[at : end + 1]
        at = end + 1
    if len(text) + len(body) - at > limits.settings:
        raise too_much
    return bytes(text + body[at:]), strings


def _end_of_string(body: bytearray, at: int) -> int:
    """The position of the quote that ends the string whose text begins at `at`."""
    for _ in range(QUOTES):
        at = body.find(b'"', at)
        if at < 0:
            break
        before = body[max(at - ESCAPES, 0) : at]
        escapes = len(before) - len(before.rstrip(b"\\"))
        if escapes == ESCAPES:
            break
        if escapes % 2 == 0:
            return at
        at += 1
    raise ValueError("a string without an end")
