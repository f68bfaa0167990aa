"""The bodies of requests: read within a memory for all of them, and JSON without surprises in it."""

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

SLOW = 2.0  # seconds after which a body that is not here whole gives way to others
LONG = 512  # bytes from which a string of JSON is taken for an image
QUOTES = ESCAPES = 64  # inside of one string of JSON, and one after the other; an image has none


class Body:
    def __init__(self) -> None:
        self.data, self.size = bytearray(), 0
        self.began = time.monotonic()
        self.patience = asyncio.timeout(None)
        self.given_up = False


class Bodies:
    """All that lie in memory."""

    def __init__(self, limits: Limits) -> None:
        self.most, self.held = limits.bodies, 0
        self.coming: dict[Body, None] = {}  # the oldest first

    @asynccontextmanager
    async def read(self, request: Request, most: int) -> AsyncIterator[bytearray]:
        """The body, if it is allowed to be that large. It counts for as long as the context lasts."""
        body = Body()
        try:
            await self._fill(body, request, most)
            yield body.data
        finally:
            self.held -= body.size

    async def _fill(self, body: Body, request: Request, most: int) -> None:
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
                    if body.given_up:  # the chunk was there before it was told
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
        """By giving up those that have come for long and are not here yet."""
        now = time.monotonic()
        while self.held + size > self.most:
            slow = next((one for one in self.coming if one is not body and one.size and now - one.began > SLOW), None)
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
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def parsed(body: bytearray, limits: Limits) -> dict[str, Any]:
    """A JSON object, in which a long string is a view of the body.

    What becomes Python objects is bounded: all that is not a long string has at most `limits.settings` bytes.
    """
    wrong = Refused(422, "The body is not valid JSON; send an object with an 'image' in base64.")
    try:
        text, strings = _without_long_strings(body, limits)
        given = json.loads(
            text.decode("utf-8-sig"),
            parse_int=_whole,
            object_hook=lambda found: {
                key: strings.get(value, value) if isinstance(value, str) else value for key, value in found.items()
            },
        )
    except (ValueError, RecursionError):
        raise wrong from None
    if not isinstance(given, dict):
        raise Refused(422, "The body must be a JSON object with an 'image' in base64.")
    return given


def _whole(digits: str) -> int:
    """Of a number longer than 64 bits only that it is: Python reads none of thousands of digits, and what stands beside
    it shall have its answer."""
    return int(digits) if len(digits) <= 20 else -(1 << 64) if digits[0] == "-" else 1 << 64


def _without_long_strings(body: bytearray, limits: Limits) -> tuple[bytes, dict[str, memoryview]]:
    """JSON in which a name stands for each long string, and what stands for what."""
    too_much = Refused(422, f"The JSON has more than {limits.settings} bytes beside its images; send images only.")
    secret, whole = secrets.token_hex(8), memoryview(body)  # no name can be guessed
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
