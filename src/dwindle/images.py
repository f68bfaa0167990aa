"""One image: decoded safely, and brought into the form a model wants."""

from __future__ import annotations

import dataclasses
import io
import os
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from .errors import DwindleError, unknown

if TYPE_CHECKING:
    from .model import AdaptiveViT

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # Pillow's rarer decoders are slow to ask and less safe
MAX_PIXELS = 89_478_485  # where Pillow begins to warn of a decompression bomb; here it is an error

Transform = Callable[[Image.Image], Any]


def load_image(source: str | os.PathLike | bytes, what: str | None = None) -> Image.Image:
    """Decode a file or its bytes to upright RGB. `what` names the source in errors."""
    what = what or ("in the bytes given" if isinstance(source, bytes) else f"'{os.fspath(source)}'")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                big = f"{image.width}x{image.height} pixels, more than the {MAX_PIXELS} that are safe"
                raise DwindleError(f"The image {what} has {big}; shrink it first.")
            return _to_rgb(ImageOps.exif_transpose(image))
    except DwindleError:
        raise
    except FileNotFoundError as error:
        raise DwindleError(f"There is no file {what}; check the path.") from error
    except UnidentifiedImageError as error:  # its own words name an object in memory, where there is no file
        raise DwindleError(
            f"Cannot decode the image {what}: it is damaged or none of {', '.join(FORMATS)}; replace it."
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise DwindleError(f"Cannot decode the image {what}: {error}; replace or remove it.") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion clips at 255 instead of scaling
        wide = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """How a model wants its images. Saved beside it."""

    size: int = 224
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bicubic"
    crop_pct: float = 0.875

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(self.mean))  # JSON gives lists
        object.__setattr__(self, "std", tuple(self.std))
        if self.interpolation not in (known := ("bicubic", "bilinear", "lanczos", "nearest")):
            raise unknown("interpolation", self.interpolation, known)
        if self.size < 1 or not 0 < self.crop_pct <= 1:
            raise DwindleError(f"{self} needs a size above 0 and a crop_pct above 0 and up to 1.")

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
            raise DwindleError(f"preprocess is {values!r}, not settings by name; the checkpoint is damaged.")
        known = [f.name for f in dataclasses.fields(cls)]
        if wrong := [key for key in values if key not in known]:
            raise unknown("preprocess setting", wrong[0], known)
        return cls(**values)

    def eval_transform(self) -> Transform:
        """Short side to size/crop_pct (no resampling if it is that already), centre crop, normalise."""
        from torchvision import transforms as t

        return t.Compose([*self._crop(), t.ToTensor(), t.Normalize(self.mean, self.std)])

    def seen(self, image: Image.Image) -> Image.Image:
        """The part of an image that the model sees in evaluation, as an image."""
        for step in self._crop():
            image = step(image)
        return image

    def normalised(self, pixels_BHWC: Tensor) -> Tensor:
        """What `eval_transform` makes of images whose `seen` pixels (uint8) these are: (B, C, height, width)."""
        x = pixels_BHWC.permute(0, 3, 1, 2).to(torch.get_default_dtype(), memory_format=torch.contiguous_format)
        mean, std = (x.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return x.div_(255).sub_(mean).div_(std)

    def _crop(self) -> list[Transform]:
        from torchvision import transforms as t

        resize = t.Resize(round(self.size / self.crop_pct), t.InterpolationMode(self.interpolation))
        return [resize, t.CenterCrop(self.size)]

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
