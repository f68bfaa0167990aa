"""The limits of a server for its clients: bytes, pixels, seconds and places; and how it refuses a request."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

from ..errors import DwindleError


@dataclass(frozen=True)
class Limits:
    """The limits of a server. The defaults are meant for two cores."""

    # Limits of one request
    bytes: int = 10 << 20  # bytes of one image, encoded
    pixels: int = (
        25_000_000  # pixels of one image, as it is and as it is resized; its header tells them before decoding
    )
    images: int = 32  # images in one request
    together: int = 48 << 20  # bytes of all images of one request, encoded
    settings: int = 64 << 10  # bytes of a JSON body beside its images
    seconds: float = 30.0  # from the first byte of a request to its answer
    upload_seconds: float = 15.0  # of these, seconds for the body to arrive
    head_seconds: float = 10.0  # of these, seconds for the request line and its headers
    head_bytes: int = 16 << 10  # bytes of the request line and its headers
    head_fields: int = 100  # headers
    body_patience: float = 5.0  # seconds in which a body may come at any rate
    body_rate: int = 16 << 10  # bytes a second at which a body must come after that, on average

    # Limits of all requests together
    waiting: int = 256  # images accepted and not yet answered; beyond it 429
    connections: int = 512  # open connections; beyond it one that the server has waited for long is closed
    bodies: int = 256 << 20  # bytes of all bodies in memory; beyond it 503
    decoded: int = 1 << 30  # bytes of all images that are being decoded and resized; beyond it images wait

    # Limits of a connection
    idle_seconds: float = 10.0  # seconds between two requests
    taking_seconds: float = 30.0  # seconds for a client to read its answer
    pipelined: int = 8  # requests sent before the first of them is answered

    # Limits of a batch
    batch: int = 32  # images that run together
    linger: float = 0.004  # seconds that the first image of a batch waits for others
    linger_busy: float = 0.06  # the same while other batches keep the cores busy and more images are being decoded

    @property
    def one_body(self) -> int:
        """The bytes of a request with one image. Base64 takes 4 bytes for 3."""
        return self.bytes * 4 // 3 + self.settings

    @property
    def body(self) -> int:
        """The bytes of a request with many images."""
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
    """The token, if it can be sent in a header (RFC 6750). None: the server answers everyone."""
    if token is None:
        return None
    if not re.fullmatch(r"[!-~]+", token):
        fault = "is empty" if not token else "holds a space, a control character or one that is not ASCII"
        raise DwindleError(
            f"DWINDLE_TOKEN {fault}; set it to letters, digits and signs of ASCII without spaces, or unset it to serve "
            "everyone."
        )
    return token


def authorised(header: str | None, token: str | None) -> bool:
    """Whether an Authorization header has the token. The time this takes does not tell how much of it was right."""
    if token is None:
        return True
    scheme, _, sent = (header or "").partition(" ")
    right = hmac.compare_digest(sent.strip().encode(), token.encode())
    return scheme.lower() == "bearer" and right
