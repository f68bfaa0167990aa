"""Decode one image safely, and bring it into the form that a model takes."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import stat
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor, nn

from ..core.registry import family_of
from ..errors import DwindleError, brief, unknown
from ..files import shown
from ..settings import Above0, ImageSize, Within, check_fields

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # Pillow's rarer decoders are slow to try and less safe
MAX_PIXELS = 89_478_485  # from here on Pillow warns of a decompression bomb; here it is an error
BAND = 1 << 19  # pixels that are composited over white at once
STRIP = 16  # an image is a strip if its long side is more than this many times the short one
REACH = 3  # pixels that the widest filter (Lanczos) reads on either side

Transform = Callable[[Image.Image], Any]


class CorruptImage(DwindleError):
    """An image is damaged, missing, too large, or its pixel values cannot be interpreted."""


def load_image(
    source: str | os.PathLike | bytes | bytearray | memoryview | Image.Image | np.ndarray, what: str | None = None
) -> Image.Image:
    """Decode a file, its bytes, a Pillow image or 8-bit pixels (height, width, 3) to upright RGB; the first of several
    pages or frames. `what` names the source in errors."""
    opened: Callable[[], Image.Image]
    if isinstance(source, bytes | bytearray | memoryview):
        what, opened = what or "in the bytes given", partial(open_file, io.BytesIO(source))
    elif isinstance(source, str | os.PathLike):
        what, opened = what or f"'{shown(os.fsdecode(source))}'", partial(open_file, source)
    elif isinstance(source, Image.Image):
        what, opened = what or "given", source.copy
    elif isinstance(source, np.ndarray):
        what, opened = what or "in the array given", partial(_of_pixels, source)
    else:
        raise DwindleError(
            f"Cannot take a {type(source).__name__} as an image; give a path, bytes, an image of Pillow's, or 8-bit "
            "pixels as an array (height, width, 3)."
        )
    try:
        with opened() as image:
            if image.width * image.height > MAX_PIXELS:
                big = f"{image.width}x{image.height} pixels, more than the {MAX_PIXELS} that are safe"
                raise CorruptImage(f"The image {what} has {big}; shrink it first.")
            return upright(image)
    except (DwindleError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise CorruptImage(f"There is no file {what}; check the path.") from error
    except UnidentifiedImageError as error:  # its own message would name an object in memory where there is no file
        raise CorruptImage(
            f"Cannot decode the image {what}: it is damaged or none of {', '.join(FORMATS)}; replace it."
        ) from error
    except Exception as error:  # damaged bytes, or metadata alone, may make a decoder raise anything
        raise CorruptImage(f"Cannot decode the image {what}: {error}; replace or remove it.") from error


def open_file(source: Any) -> Image.Image:
    """The Pillow image of a file. Only regular files are opened: a pipe would block, and a device has no end."""
    if not isinstance(source, io.BytesIO) and not stat.S_ISREG(os.stat(source).st_mode):
        raise ValueError("it is a folder, a pipe or a device, and no file")
    return Image.open(source, formats=FORMATS)


def _of_pixels(pixels: np.ndarray) -> Image.Image:
    is_image = pixels.ndim in (2, 3) and pixels.shape[2:] in ((), (1,), (3,), (4,))
    if pixels.dtype != np.uint8 or not is_image or not pixels.size:
        actual = f"its shape is {pixels.shape} and its type {pixels.dtype}"
        raise ValueError(f"{actual}, and 8-bit pixels (height, width, 3) were expected")
    return Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)


def upright(image: Image.Image) -> Image.Image:
    """The image decoded, rotated by its EXIF orientation, in RGB. It may be the same object, changed in place."""
    kind = image.format
    ImageOps.exif_transpose(image, in_place=True)
    image.load()
    if image.mode == "F":
        return _from_floats(np.asarray(image)).convert("RGB")
    if image.mode.startswith("I"):
        if kind == "TIFF" and image.mode == "I":
            raise ValueError("its numbers have 32 bits and nothing says which is white; save it with 8 or 16 bits")
        return _from_sixteen_bits(np.asarray(image)).convert("RGB")
    if image.has_transparency_data:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """A transparent image composited over white, a band of rows at a time, to save memory."""
    flat, rows = Image.new("RGB", image.size), max(1, BAND // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        flat.paste(Image.alpha_composite(Image.new("RGBA", band.size, "white"), band).convert("RGB"), (0, top))
    return flat


def _from_sixteen_bits(values: np.ndarray) -> Image.Image:
    """An 8-bit image of 16-bit values. (Pillow's own conversion clips at 255 instead of scaling.)"""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise ValueError(
            f"its numbers run from {low} to {high}, and 16 bits from 0 to 65535; save it with 8 or 16 bits"
        )
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))


def _from_floats(values: np.ndarray) -> Image.Image:
    """An 8-bit image of floats from 0 to 1."""
    low, high = float(values.min()), float(values.max())
    if not math.isfinite(low + high):
        raise ValueError("it holds values that are no numbers (NaN or infinite)")
    if low < 0 or high > 1:
        raise ValueError(f"its floats run from {low:g} to {high:g} and not from 0 to 1; save it with 8 or 16 bits")
    return Image.fromarray((values * 255 + 0.5).astype(np.uint8))


def resized_middle(image: Image.Image, short: int, size: int, filter: Image.Resampling) -> Image.Image:
    """The middle square of an image whose short side is resized: torchvision's Resize and CenterCrop, bit for bit.

    short: the resized short side. size: the square's side. What the crop leaves out is not resampled where Pillow gives
    the same pixels without it, nor in a strip (there pixels may differ), of which the crop leaves out nearly all.
    """
    least = min(image.size)
    wide, high = (short if side == least else int(short * side / least) for side in image.size)
    left, top = (round((side - size) / 2) for side in (wide, high))
    if max(image.size) > STRIP * least:
        across, down = _place(image.width, wide, left, size), _place(image.height, high, top, size)
        return resized_box(image, size, filter, (across.begin, down.begin, across.end, down.end))
    if (wide, high) != image.size:
        across, down = _part(image.width, wide, left, size), _part(image.height, high, top, size)
        few = (across.pixels, down.pixels)
        if image.mode != "RGB" or filter == Image.Resampling.NEAREST or _down_first(image, few, (wide, high)):
            image = image.resize((wide, high), filter)
        else:
            image = image.resize(few, filter, (across.begin, down.begin, across.end, down.end))
            left, top = left - across.first, top - down.first
    return image.crop((left, top, left + size, top + size))


def resized_box(
    image: Image.Image, size: int, filter: Image.Resampling, box: tuple[float, float, float, float]
) -> Image.Image:
    """A part of an image, resized to a square of this side. The cost does not depend on the rest of the image."""
    # The pixels that the filter reads are cropped first: Pillow keeps the box as float32, which is imprecise far from
    # the image's corner.
    corners = []
    for begin, end, side in zip(box[:2], box[2:], image.size):
        reach = math.ceil(REACH * max((end - begin) / size, 1)) + 1
        corners.append((max(math.floor(begin) - reach, 0), min(math.ceil(end) + reach, side)))
    (left, right), (top, bottom) = corners
    near = image.crop((left, top, right, bottom))
    placed = (box[0] - left, box[1] - top, min(box[2] - left, right - left), min(box[3] - top, bottom - top))
    return near.resize((size, size), filter, placed)


class _Part(NamedTuple):
    """Along one side: the first pixel to compute, how many, and which interval of the source they cover."""

    first: int
    pixels: int
    begin: float
    end: float


def _part(side: int, resized: int, first: int, count: int) -> _Part:
    """The part to resample along a side, or the whole side where resampling a part could give other pixels.

    Pillow places the pixels of a part by the part's own edges, kept as float32. Where a pixel's width in the source is
    a whole number of 2^-k, the edges and all sums are exact, and a pixel has the same weights as in the whole.
    """
    steps = resized // math.gcd(side, resized)
    if steps & (steps - 1) or side * steps >= 1 << 24:
        return _Part(0, resized, 0, side)
    return _place(side, resized, first, count)


def _place(side: int, resized: int, first: int, count: int) -> _Part:
    """The part of `count` pixels from `first` on, of a side that is resized."""
    return _Part(first, count, first * side / resized, (first + count) * side / resized)


def _down_first(image: Image.Image, *targets: tuple[int, int]) -> bool:
    """Whether Pillow (from 13 on) may resize columns before rows for one of these target sizes. It rounds in between,
    so the order changes pixels."""
    return any(0 < image.height - high > 2 * (image.width - wide) for wide, high in targets)


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """How a model's images are prepared; saved in its checkpoint."""

    size: ImageSize = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[Above0, Above0, Above0] = (0.229, 0.224, 0.225)
    interpolation: Literal["bicubic", "bilinear", "lanczos", "nearest"] = "bicubic"
    crop_pct: Annotated[float, Within(0.1, 1)] = 0.875  # the short side is resized to size / crop_pct; 0.1 bounds it

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocess:
        if not isinstance(values, dict):
            raise DwindleError(f"preprocess is {brief(values)}, not settings by name; the checkpoint is damaged.")
        known = [f.name for f in dataclasses.fields(cls)]
        if wrong := [key for key in values if key not in known]:
            raise unknown("preprocess setting", wrong[0], known)
        return cls(**values)

    def eval_transform(self) -> Transform:
        """The transform of evaluation: resize the short side to size / crop_pct (not resampled if it has that size),
        centre crop, normalise."""
        from torchvision import transforms as t

        return t.Compose([self.seen, t.ToTensor(), t.Normalize(self.mean, self.std)])

    def seen(self, image: Image.Image) -> Image.Image:
        """The part of an image that the model sees in evaluation, as an image."""
        short, filter = round(self.size / self.crop_pct), Image.Resampling[self.interpolation.upper()]
        return resized_middle(image, short, self.size, filter)

    def normalised(self, pixels_BHWC: Tensor) -> Tensor:
        """(B, C, height, width): the result of `eval_transform` for images whose `seen` pixels (uint8) are given."""
        x = pixels_BHWC.permute(0, 3, 1, 2).to(torch.get_default_dtype(), memory_format=torch.contiguous_format)
        mean, std = (x.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return x.div_(255).sub_(mean).div_(std)


def preprocess_of(model: nn.Module) -> Preprocess:
    """A model's preprocessing: its checkpoint's, else its family's."""
    extra: Any = getattr(model, "extra", {})
    return Preprocess.from_dict(extra.get("preprocess") or family_of(model).preprocess(model))
