"""Untrusted bytes to an image: checked before it is decoded, and with bounded time and memory meanwhile."""

from __future__ import annotations

import binascii
import io
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

from ..io.images import Preprocess, upright
from .limits import Limits, Refused

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
Bytes = bytes | bytearray
READS = 100_000  # reads of a file by its decoder; an ordinary image needs less than 5,000
SCANS = 32  # scans of a progressive JPEG with as many pixels as are allowed; 10 is usual
ESCAPED = {  # characters of base64 as JSON may escape them
    rb"\/": b"/",
    rb"\u002F": b"/",
    rb"\u002f": b"/",
    rb"\u002B": b"+",
    rb"\u002b": b"+",
    rb"\u003D": b"=",
    rb"\u003d": b"=",
}
PROFILES = 8  # colour profiles in a PNG; one is allowed

# Pillow's warnings about malformed images would fill the log. The filter is global, as a temporary one is not safe in
# threads.
warnings.filterwarnings("ignore", module=r"PIL\b")


class Memory:
    """The memory of all images that are being decoded. A thread that needs more than is free waits."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self.freed = threading.Condition()

    @contextmanager
    def hold(self, size: int, until: float) -> Iterator[None]:
        """Reserve so many bytes while the context lasts. until: the time at which waiting for them ends."""
        size = min(size, self.most)  # so that one image alone always fits
        with self.freed:
            if not self.freed.wait_for(lambda: self.held + size <= self.most, until - time.monotonic()):
                raise Refused(504, "There was no memory free for the image in time; the server is busy, try again.", 2)
            self.held += size
        try:
            yield
        finally:
            with self.freed:
                self.held -= size
                self.freed.notify_all()


class Reader(io.BytesIO):
    """A file in memory that raises when its decoder has read too often, or for too long.

    Decoders parse headers in Python, and an image can consist of nothing but headers.
    """

    def __init__(self, data: Bytes, until: float) -> None:
        super().__init__(data)
        self.left, self.until = READS, until

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ValueError("too much to read in this image")
        if time.monotonic() > self.until:
            raise Refused(504, "The image could not be decoded in time; the server is busy, try again.", 2)
        return super().read(size)


class Larger(Exception):
    """Raised for an image that has more pixels than expected, as it is or once it is resized."""

    def __init__(self, pixels: int) -> None:
        super().__init__(pixels)
        self.pixels = pixels


def decode(data: Bytes, limits: Limits) -> Image.Image:
    """The bytes as an upright RGB image, after its header is checked."""
    return read_image(data, limits, lambda image: image)


def read_image(
    data: Bytes,
    limits: Limits,
    use: Callable[[Image.Image], Any],
    preprocess: Preprocess | None = None,
    memory: Memory | None = None,
    until: float = float("inf"),
    expected: float = float("inf"),
) -> Any:
    """The result of `use` for the decoded image, which is freed afterwards.

    preprocess: how the image will be resized, which is bounded too. memory, until: what decoding may take, and the time
    at which it ends. expected: the number of pixels beyond which `Larger` is raised.
    """
    if not data:
        raise Refused(422, "The request holds no image; send its bytes as the body, or as base64 in JSON.")
    if len(data) > limits.bytes:
        raise Refused(413, f"The image has {len(data)} bytes, more than the {limits.bytes} allowed; shrink it.")
    if data.startswith(b"\x89PNG") and data.count(b"iCCP") > PROFILES:  # each may unpack to a thousand times its size
        raise Refused(413, f"The image has more than {PROFILES} colour profiles; save it anew.")
    try:
        with Image.open(Reader(data, until), formats=FORMATS) as image:
            if (pixels := _checked(image, data, limits, preprocess)) > expected:
                raise Larger(pixels)
            with (memory or Memory(limits.decoded)).hold(_bytes_of(image), until):
                return use(upright(image))
    except (Refused, Larger):
        raise
    except Image.DecompressionBombError:
        raise Refused(413, f"The image has far more pixels than the {limits.pixels} allowed; shrink it.") from None
    except Exception as error:  # a decoder fed with hostile bytes may raise anything
        formats = ", ".join(FORMATS)
        raise Refused(422, f"The body is no image that can be decoded; send one of {formats}, whole.") from error


def _checked(image: Image.Image, data: Bytes, limits: Limits, preprocess: Preprocess | None) -> int:
    """The number of pixels of the image, as it is or once it is resized, whichever is larger. Refuses too many."""
    size, pixels = f"{image.width} x {image.height} pixels", image.width * image.height
    if pixels > limits.pixels:
        raise Refused(413, f"The image is {size}, more than the {limits.pixels} allowed; shrink it.")
    resized = 0
    if preprocess is not None:
        short = round(preprocess.size / preprocess.crop_pct)
        long = short * max(image.size) // min(image.size)
        resized = short * long
        if resized > limits.pixels:
            raise Refused(
                413,
                f"The image is {size}, and {short} x {long} once its short side is that of the model, more than the "
                f"{limits.pixels} allowed; crop it.",
            )
    # Decoding goes over all pixels for each scan, and a scan may have only 40 bytes. Compressed data has no marker.
    scans = data.count(b"\xff\xda") if image.format in ("JPEG", "MPO") else 0
    if scans * pixels > SCANS * limits.pixels:
        raise Refused(413, f"The image is a JPEG of {scans} scans and {size}, too much to decode; save it anew.")
    return max(pixels, resized)


def _bytes_of(image: Image.Image) -> int:
    """About the bytes that decoding to upright RGB takes: Pillow's 4 bytes a pixel, for each copy on the way."""
    if image.mode.startswith("I"):
        copies = 10  # 16 bits a pixel, scaled in 64
    else:
        copies = 2 if image.mode == "RGB" and not image.info.get("progressive") else 4
    return 4 * copies * image.width * image.height


def from_base64(text: str | bytes | memoryview, limits: Limits) -> bytes:
    """The bytes that the text encodes. text: as it is in JSON, where characters may be escaped without need."""
    most = limits.bytes * 4 // 3 + 4
    if len(text) <= 2 * most:
        text = text.encode() if isinstance(text, str) else text
        for escaped, plain in ESCAPED.items():
            text = bytes(text).replace(escaped, plain)
    if len(text) > most:
        raise Refused(413, f"The image has more than the {limits.bytes} bytes allowed; shrink it.")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise Refused(422, "The image is not valid base64; encode its bytes without line breaks.") from None
