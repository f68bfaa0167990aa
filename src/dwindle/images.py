"""One image: decoded safely, and brought into the form a model wants."""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from .errors import DwindleError, brief, unknown
from .settings import Above0, ImageSize, Within, check_fields

if TYPE_CHECKING:
    from .model import AdaptiveViT

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # Pillow's rarer decoders are slow to ask and less safe
MAX_PIXELS = 89_478_485  # where Pillow begins to warn of a decompression bomb; here it is an error
BAND = 1 << 19  # pixels laid over white at once

Transform = Callable[[Image.Image], Any]


def load_image(source: str | os.PathLike | bytes, what: str | None = None) -> Image.Image:
    """Decode a file or its bytes to upright RGB. `what` names the source in errors."""
    what = what or ("in the bytes given" if isinstance(source, bytes) else f"'{os.fspath(source)}'")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                big = f"{image.width}x{image.height} pixels, more than the {MAX_PIXELS} that are safe"
                raise DwindleError(f"The image {what} has {big}; shrink it first.")
            return upright(image)
    except (DwindleError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise DwindleError(f"There is no file {what}; check the path.") from error
    except UnidentifiedImageError as error:  # its own words name an object in memory, where there is no file
        raise DwindleError(
            f"Cannot decode the image {what}: it is damaged or none of {', '.join(FORMATS)}; replace it."
        ) from error
    except Exception as error:  # damaged bytes, or metadata alone, may make a decoder raise anything
        raise DwindleError(f"Cannot decode the image {what}: {error}; replace or remove it.") from error


def upright(image: Image.Image) -> Image.Image:
    """Decoded, turned as its EXIF says, in RGB. May be the image itself, changed."""
    ImageOps.exif_transpose(image, in_place=True)
    image.load()
    if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion clips at 255 instead of scaling
        wide = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        return _over_white(image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    """In bands: Pillow composes with Python's lock held, and whatever else runs would wait for the whole."""
    whole, rows = Image.new("RGB", image.size), max(BAND // image.width, 1)
    for top in range(0, image.height, rows):
        part = image.crop((0, top, image.width, min(top + rows, image.height)))
        whole.paste(Image.alpha_composite(Image.new("RGBA", part.size, "white"), part).convert("RGB"), (0, top))
    return whole


def resized_middle(image: Image.Image, short: int, size: int, filter: Image.Resampling) -> Image.Image:
    """The middle square of an image whose short side was resized: torchvision's Resize and CenterCrop, bit for bit.

    What the crop leaves out is not resampled where Pillow gives the same pixels without it.
    """
    least = min(image.size)
    wide, high = (short if side == least else int(short * side / least) for side in image.size)
    left, top = (round((side - size) / 2) for side in (wide, high))
    if (wide, high) != image.size:
        across, down = _part(image.width, wide, left, size), _part(image.height, high, top, size)
        few = (across.pixels, down.pixels)
        if image.mode != "RGB" or filter == Image.Resampling.NEAREST or _down_first(image, few, (wide, high)):
            image = image.resize((wide, high), filter)
        else:
            image = image.resize(few, filter, (across.begin, down.begin, across.end, down.end))
            left, top = left - across.first, top - down.first
    return image.crop((left, top, left + size, top + size))


class _Part(NamedTuple):
    """Along one side: the first pixel to make, how many, and what of the source they lie on."""

    first: int
    pixels: int
    begin: float
    end: float


def _part(side: int, resized: int, first: int, count: int) -> _Part:
    """Of a side that is resized; the whole of it where a part could differ.

    Pillow places the pixels of a part by the part's own edges, kept as float32. Where a pixel is a whole number of
    2^-k of the source's, these and all sums are exact, and a pixel's weights are those it has in the whole.
    """
    steps = resized // math.gcd(side, resized)
    if steps & (steps - 1) or side * steps >= 1 << 24:
        return _Part(0, resized, 0, side)
    return _Part(first, count, first * side / resized, (first + count) * side / resized)


def _down_first(image: Image.Image, *targets: tuple[int, int]) -> bool:
    """Whether Pillow may resize columns before rows for one of these: it rounds between, so order counts. Since 13."""
    return any(0 < image.height - high > 2 * (image.width - wide) for wide, high in targets)


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """How a model wants its images. Saved beside it."""

    size: ImageSize = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[Above0, Above0, Above0] = (0.229, 0.224, 0.225)
    interpolation: Literal["bicubic", "bilinear", "lanczos", "nearest"] = "bicubic"
    crop_pct: Annotated[float, Within(0.1, 1)] = 0.875  # the image is resized to size / crop_pct, which has an end

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, vit: Any) -> Preprocess:
        """What a timm model was trained with; the defaults, at the model's own size, for any other."""
        cfg = getattr(vit, "pretrained_cfg", None) or {}
        size = getattr(getattr(vit, "patch_embed", None), "img_size", None)
        size = size or getattr(getattr(vit, "config", None), "image_size", None) or cfg.get("input_size") or cls.size
        kept = {k: cfg[k] for k in ("mean", "std", "interpolation", "crop_pct") if cfg.get(k)}
        return cls(size=size if isinstance(size, int) else size[-1], **kept)

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
        """Short side to size/crop_pct (no resampling if it is that already), centre crop, normalise."""
        from torchvision import transforms as t

        return t.Compose([self.seen, t.ToTensor(), t.Normalize(self.mean, self.std)])

    def seen(self, image: Image.Image) -> Image.Image:
        """The part of an image that the model sees in evaluation, as an image."""
        short, filter = round(self.size / self.crop_pct), Image.Resampling[self.interpolation.upper()]
        return resized_middle(image, short, self.size, filter)

    def normalised(self, pixels_BHWC: Tensor) -> Tensor:
        """What `eval_transform` makes of images whose `seen` pixels (uint8) these are: (B, C, height, width)."""
        x = pixels_BHWC.permute(0, 3, 1, 2).to(torch.get_default_dtype(), memory_format=torch.contiguous_format)
        mean, std = (x.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return x.div_(255).sub_(mean).div_(std)

    def train_transform(
        self,
        randaugment: str | None = "rand-m9-mstd0.5-inc1",
        color_jitter: float = 0.4,
        reprob: float = 0.25,
        min_scale: float = 0.08,
    ) -> Transform:
        """DeiT's augmentation. As there, timm leaves `color_jitter` out when `randaugment` is given."""
        from timm.data import create_transform

        transform = create_transform(
            self.size,
            is_training=True,
            auto_augment=randaugment,
            color_jitter=color_jitter,
            re_prob=reprob,
            re_mode="pixel",
            scale=(min_scale, 1.0),
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
        )
        for step in transform.transforms:
            for op in getattr(step, "ops", []):
                op.magnitude_max = 9.99  # at 10 timm posterises to 0 bits, which Pillow 13 refuses
        return transform


def preprocess_of(model: AdaptiveViT) -> Preprocess:
    """What the checkpoint says; else what the backbone was trained with."""
    saved = getattr(model, "extra", {}).get("preprocess")
    return Preprocess.from_dict(saved) if saved else Preprocess.of(model.vit)
