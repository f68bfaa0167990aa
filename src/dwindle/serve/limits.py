"""What a request may ask for. Everything here is checked before work is spent on it."""

from __future__ import annotations

import base64
import binascii
import hmac
import io
import warnings
from dataclasses import dataclass

from PIL import Image

from ..images import upright

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


@dataclass(frozen=True)
class Limits:
    """Of a server. The defaults hold on two cores."""

    bytes: int = 10 << 20  # of one image, encoded
    pixels: int = 25_000_000  # of one image; read from its header, before decoding
    images: int = 32  # in one request
    together: int = 48 << 20  # bytes of all images of one request, encoded: it lies in memory until it is parsed
    waiting: int = 256  # images accepted and not yet answered; beyond it 429
    seconds: float = 30.0  # for an answer, the wait for its batch included
    upload_seconds: float = 15.0  # for the body to arrive
    batch: int = 32  # images that run together
    linger: float = 0.004  # seconds the first of a batch waits for company
    linger_busy: float = 0.06  # the same while other batches run and more images are on their way: cores are not idle

    @property
    def body(self) -> int:
        """Bytes of a JSON request: base64 takes 4 for 3."""
        return min(self.together, self.images * self.bytes) * 4 // 3 + self.images * 1024


class Refused(Exception):
    """A request that gets an answer other than 200, in one sentence."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


def decode(data: bytes, limits: Limits) -> Image.Image:
    """Bytes to an upright RGB image, after a look at its header."""
    if not data:
        raise Refused(422, "The request holds no image; send its bytes as the body, or as base64 in JSON.")
    if len(data) > limits.bytes:
        raise Refused(413, f"The image has {len(data)} bytes, more than the {limits.bytes} allowed; shrink it.")
    named = ", ".join(FORMATS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > limits.pixels:
                    size = f"{image.width} x {image.height} pixels"
                    raise Refused(413, f"The image is {size}, more than the {limits.pixels} allowed; shrink it.")
                return upright(image)
    except Refused:
        raise
    except Image.DecompressionBombError:
        raise Refused(413, f"The image has far more pixels than the {limits.pixels} allowed; shrink it.") from None
    except Exception as error:  # a decoder fed with hostile bytes may raise anything
        raise Refused(422, f"The body is no image that can be decoded; send one of {named}, whole.") from error


def from_base64(text: str, limits: Limits) -> bytes:
    if len(text) > limits.bytes * 4 // 3 + 4:
        raise Refused(413, f"The image has more than the {limits.bytes} bytes allowed; shrink it.")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(422, "The image is not valid base64; encode its bytes without line breaks.") from None


def authorised(header: str | None, token: str | None) -> bool:
    """Compared in a time that does not tell how much of it was right."""
    if token is None:
        return True
    kind, _, given = (header or "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), token.encode())
    return kind.lower() == "bearer" and right
