"""Augmentation of training images. It is the same for images that workers decode and for images on the device.

Every image has a row of uniform draws, made for the whole epoch at once, which decide its augmentation. In order: a
random crop, perhaps flipped; timm's RandAugment; jitter of brightness, contrast and saturation; an erased rectangle.
Only the resampling differs: a worker uses Pillow on the original image; `Resident` says what the device uses.

Shapes: B images of a batch, S the side of the model's images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import DwindleError
from .draws import seeded
from .images import Preprocess, resized_box

JITTER, ERASE, NOISE = slice(5, 8), slice(8, 13), slice(13, 15)  # draws by what they decide; 0 to 4 are the crop's
DRAWS = 16
WIDEST = 4 / 3  # largest ratio of a crop's width to its height, and of its height to its width
ERASED, ELONGATED = (0.02, 1 / 3), 1 / 0.3  # an erased rectangle's share of the image, and its largest aspect ratio
TIMMS_BOUND = 10  # timm's upper bound of a magnitude, unless the name sets another

Plan = tuple[tuple[Any, tuple, dict], ...]


@dataclass(frozen=True)
class Augment:
    """The settings of augmentation.

    size, mean, std, interpolation: as in `Preprocess`. randaugment: timm's name of a RandAugment. erase: probability of
    random erasing.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    min_scale: float = 0.08
    flip: bool = True
    jitter: float = 0.0
    randaugment: str | None = None
    erase: float = 0.0

    @classmethod
    def of(cls, preprocess: Preprocess, **settings: Any) -> Augment:
        """The settings with size, mean, std and interpolation of a `Preprocess`."""
        return cls(preprocess.size, preprocess.mean, preprocess.std, preprocess.interpolation, **settings)

    def __call__(self, image: Image.Image, draws: Tensor, *key: int) -> Tensor:
        """One image, augmented: (3, S, S). draws: (DRAWS,) for it. key: the seed of RandAugment's own draws."""
        u = draws[None]
        image = self._cropped(image, u)
        image = applied(self.plan(*key), image)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
        mean, std = (255 * torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        erase = self.erase if u[0, ERASE.start] < self.erase else 0.0  # for one image it is known beforehand
        return finished(x, u, Finish(self.jitter, erase, mean, std, torch.float32, noise(self.size, "cpu")))[0]

    def _cropped(self, image: Image.Image, u: Tensor) -> Image.Image:
        (x, y), (width, height) = (torch.stack(pair).flatten() for pair in boxes(u, self.min_scale, image.size))
        sides = torch.tensor([*image.size, *image.size])
        box = (torch.stack([x - width, y - height, x + width, y + height]).double() + 1) / 2 * sides
        image = resized_box(image, self.size, Image.Resampling[self.interpolation.upper()], tuple(box.tolist()))
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.flip and u[0, 4] < 0.5 else image

    def plan(self, *key: int) -> Plan:
        """The operations of RandAugment for the image of this key."""
        if self.randaugment is None:
            return ()
        with seeded(*key):
            return planner(self.randaugment, self.size, self.mean, self.interpolation)(())


def boxes(
    u: Tensor, min_scale: float, size: tuple[int, int] = (1, 1)
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Centres (x, y) and extents (width, height) of crops, (B,) each. Coordinates run from -1 to 1 over the image; an
    extent of 1 is the whole side.

    A box too wide or too high for the image is clamped; torchvision would draw again.
    """
    area = min_scale + (1 - min_scale) * u[:, 0]
    aspect = WIDEST ** (2 * u[:, 1] - 1)
    if size[0] == size[1]:
        width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    else:
        wide = size[0] / size[1]
        width, height = (area * aspect / wide).sqrt().clamp(max=1), (area / aspect * wide).sqrt().clamp(max=1)
        width = torch.minimum(width, WIDEST * height / wide)  # a piece of a long strip, not the whole strip squeezed
        height = torch.minimum(height, WIDEST * width * wide)
    x, y = (1 - width) * (2 * u[:, 2] - 1), (1 - height) * (2 * u[:, 3] - 1)
    return (x, y), (width, height)


@cache
def planner(name: str, size: int, mean: tuple[float, ...], interpolation: str) -> Any:
    """timm's RandAugment of that name, changed to make a plan: called with (), it returns the operations it drew.

    A magnitude above 10 is applied as it is; timm would clip it to 10. Posterize keeps at least one bit: from magnitude
    10 on timm would keep none, which is a black image and an error in Pillow.
    """
    from timm.data.auto_augment import rand_augment_transform

    settings = {"translate_const": int(size * 0.45), "interpolation": Image.Resampling[interpolation.upper()]}
    try:
        transform = rand_augment_transform(name, settings | {"img_mean": tuple(min(255, round(255 * m)) for m in mean)})
    except (AssertionError, ValueError, KeyError) as error:
        raise DwindleError(
            f"augment = {name}: timm knows no such RandAugment; give one such as rand-m9-mstd0.5-inc1."
        ) from error
    for op in transform.ops:
        if op.magnitude > TIMMS_BOUND and op.magnitude_max is None:
            op.magnitude_max = math.inf
        if op.name.startswith("Posterize"):
            op.level_fn = partial(_at_least_one_bit, op.level_fn)
        op.aug_fn = partial(_planned, op.aug_fn)
    return transform


def _at_least_one_bit(level: Any, magnitude: float, hparams: dict) -> tuple[int]:
    return (max(1, level(magnitude, hparams)[0]),)


def _planned(function: Any, plan: Plan, *args: Any, **kwargs: Any) -> Plan:
    """The plan with this call at its end."""
    return (*plan, (function, args, kwargs))


def applied(plan: Plan, image: Image.Image) -> Image.Image:
    """The image after the operations of a plan."""
    for function, args, kwargs in plan:
        image = function(image, *args, **kwargs)
    return image


class Finish(NamedTuple):
    """The settings of what comes after the crop and RandAugment."""

    jitter: float
    erase: float
    mean: Tensor  # (3, 1, 1), for pixels from 0 to 255
    std: Tensor
    dtype: torch.dtype
    field: Tensor  # `noise`


def finished(x: Tensor, u: Tensor, how: Finish) -> Tensor:
    """Cropped images x (B, 3, S, S) from 0 to 255, jittered, normalised and erased. u: (B, DRAWS) uniform draws."""
    if how.jitter:
        x = jittered(x, 1 + how.jitter * (2 * u[:, JITTER] - 1))
    x = normalised(x, how.mean, how.std, how.dtype)
    return erased(x, u, how.erase, how.field) if how.erase else x


def normalised(x: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    """(x - mean) / std in this dtype, with channels last."""
    return ((x - mean) / std).to(dtype, memory_format=torch.channels_last)


def jittered(x: Tensor, factors: Tensor) -> Tensor:
    """Images with brightness, contrast and saturation multiplied by factors (B, 3), one row for each image."""

    def grey(x: Tensor) -> Tensor:
        return (x * x.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(dim=1, keepdim=True)  # (B, 1, H, W)

    brightness, contrast, saturation = factors.view(-1, 3, 1, 1, 1).unbind(dim=1)
    x = (x * brightness).clamp(0, 255)
    level = grey(x).mean(dim=(2, 3), keepdim=True)
    x = (level + (x - level) * contrast).clamp(0, 255)
    level = grey(x)
    return (level + (x - level) * saturation).clamp(0, 255)


@cache
def noise(size: int, device: str) -> Tensor:
    """(3, 2S, 2S): Gaussian noise, of which an erased rectangle shows a part."""
    return torch.randn(3, 2 * size, 2 * size, generator=torch.Generator().manual_seed(0)).to(device)


def erased(x: Tensor, u: Tensor, often: float, field: Tensor) -> Tensor:
    """Normalised images after random erasing (Zhong et al., 2020) with DeiT's settings: a rectangle becomes noise.

    often: the probability for each image. field: `noise`.
    """
    side = x.shape[-1]
    chosen, share, long, down, right = u[:, ERASE].unbind(1)
    area = side**2 * (ERASED[0] + (ERASED[1] - ERASED[0]) * share)
    aspect = ELONGATED ** (2 * long - 1)
    height, width = (area * aspect).sqrt().round().clamp(max=side), (area / aspect).sqrt().round().clamp(max=side)
    line = torch.arange(side, device=x.device)
    top, left = (down * (side + 1 - height)).floor(), (right * (side + 1 - width)).floor()
    inside_y = (line >= top[:, None]) & (line < (top + height)[:, None])  # (B, S)
    inside_x = (line >= left[:, None]) & (line < (left + width)[:, None])
    inside = inside_y[:, :, None] & inside_x[:, None, :] & (chosen < often)[:, None, None]
    from_y, from_x = ((side * draw).long()[:, None] + line for draw in u[:, NOISE].unbind(1))
    shown = field[:, from_y[:, :, None], from_x[:, None, :]].transpose(0, 1)  # (B, 3, S, S)
    return torch.where(inside[:, None], shown.to(x.dtype), x)
