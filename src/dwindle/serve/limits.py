"""What a server gives to its clients: bytes, pixels, seconds and places. And how it says no."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

from ..errors import DwindleError


@dataclass(frozen=True)
class Limits:
    """Of a server. The defaults hold on two cores."""

    # Of one request
    bytes: int = 10 << 20  # of one image, encoded
    pixels: int = 25_000_000  # of one image, as it is and as it is resized; known from its header, before decoding
    images: int = 32  # in one request
    together: int = 48 << 20  # bytes of all images of one request, encoded
    settings: int = 64 << 10  # bytes of a JSON body beside its images
    seconds: float = 30.0  # from the first byte of a request to its answer
    upload_seconds: float = 15.0  # of these, for the body to arrive
    head_seconds: float = 10.0  # and for the request line and its headers
    head_bytes: int = 16 << 10  # of the request line and its headers
    head_fields: int = 100  # headers
    body_patience: float = 5.0  # seconds in which a body may come at any pace
    body_rate: int = 16 << 10  # bytes a second that it must have come at, on average, from then on

    # Of all together
    waiting: int = 256  # images accepted and not yet answered; beyond it 429
    connections: int = 512  # open; beyond it the one that the server has waited for longest is closed
    bodies: int = 256 << 20  # bytes of all bodies that lie in memory; beyond it 503
    decoded: int = 1 << 30  # bytes of all images that are being decoded and resized; beyond it they wait in line

    # Of a connection
    idle_seconds: float = 10.0  # between two requests
    taking_seconds: float = 30.0  # for a client to take its answer
    pipelined: int = 8  # requests sent before the first of them is answered

    # Of a batch
    batch: int = 32  # images that run together
    linger: float = 0.004  # seconds the first of a batch waits for company
    linger_busy: float = 0.06  # the same while other batches run and more images are on their way: cores are not idle

    @property
    def one_body(self) -> int:
        """Bytes of a request with one image: base64 takes 4 for 3."""
        return self.bytes * 4 // 3 + self.settings

    @property
    def body(self) -> int:
        """Bytes of a request with many."""
        return min(self.together, self.images * self.bytes) * 4 // 3 + self.settings


class Refused(Exception):
    """A request that gets an answer other than 200, in one sentence."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after

    @property
    def headers(self) -> dict[str, str]:
        retry = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return retry | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def checked_token(token: str | None) -> str | None:
    """A token that can be sent in a header (RFC 6750). None: everyone may ask."""
    if token is None:
        return None
    if not re.fullmatch(r"[!-~]+", token):
        given = "is empty" if not token else "holds a space, a control character or one that is not ASCII"
        raise DwindleError(
            f"DWINDLE_TOKEN {given}; set it to letters, digits and signs of ASCII without spaces, or unset it to serve "
            "everyone."
        )
    return token


def authorised(header: str | None, token: str | None) -> bool:
    """Compared in a time that does not tell how much of it was right."""
    if token is None:
        return True
    kind, _, given = (header or "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), token.encode())
    return kind.lower() == "bearer" and right
