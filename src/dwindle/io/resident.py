"""Images decoded once into device memory, and augmented there in batches.

Shapes: B images of a batch, S the side they are stored with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..errors import DwindleError
from .augment import Augment, Finish, applied, boxes, finished, noise, normalised
from .batches import draws
from .draws import generator_of
from .images import CorruptImage, resized_middle

if TYPE_CHECKING:
    from .datasets import Images

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_PCT = 0.875
RESAMPLED = ("bicubic", "bilinear")  # interpolations that resident images can have


class Resident:
    """A small data set decoded once into one uint8 tensor (n, 3, S, S) on the device, and augmented there in batches.

    S is `store`; by default the images' own side if all are squares of one size below `size`, else size / crop_pct. Of
    images that are not square the middle square is stored, and crops are taken from it. They are resampled by cubic
    convolution if S is below `size`, else bilinearly. Corrupt images that may be skipped are left out, or replaced as
    `loader` does.
    """

    def __init__(
        self,
        images: Images,
        size: int = 224,
        device: str | torch.device = "cpu",
        store: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        threads: int | None = None,
        crop_pct: float = CROP_PCT,
        interpolation: str = "bicubic",
        replace: bool = False,
    ):
        """replace: put another image in the place of a corrupt one, rather than leave it out."""
        if not len(images):
            raise DwindleError(f"'{images.name}' has no images to keep resident; choose another split or limit.")
        if interpolation not in RESAMPLED:
            raise DwindleError(
                f"interpolation = {interpolation}: images in device memory are resampled by {' or '.join(RESAMPLED)}; "
                "set resident=false."
            )
        images.warm()
        self.size, self.edge, self.num_classes = size, round(size / crop_pct), images.num_classes
        self.interpolation = interpolation
        width, height = images.sample().size
        native = store is None and width == height < size
        side = store or (width if native else self.edge)
        filter = Image.Resampling[interpolation.upper()]
        pixels = _decode(images, side, filter, native, progress, threads)
        if pixels is None:  # the first image is a small square, but not all have its size
            pixels = _decode(images, self.edge, filter, False, progress, threads)
        assert pixels is not None
        rows = _kept(images, pixels, replace)
        self.images = torch.from_numpy(pixels[rows]).to(device).permute(0, 3, 1, 2).contiguous()  # (n, 3, S, S)
        self.labels = torch.from_numpy(images.labels[rows]).to(device)
        self.corrupt = images.corrupt

    def __len__(self) -> int:
        return len(self.images)

    def batches(
        self,
        batch: int,
        train: bool = False,
        seed: int = 0,
        epoch: int = 0,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        min_scale: float = 0.35,
        flip: bool = True,
        jitter: float = 0.0,
        randaugment: str | None = None,
        erase: float = 0.0,
        dtype: torch.dtype = torch.float32,
        part: tuple[int, int] = (0, 1),
        compiled: bool = False,
    ) -> Batches:
        """Batches of (normalised images (B, 3, size, size), labels (B,)). Arguments are those of `Augment` and
        `loader`; part: (rank, world)."""
        colour = (tuple(mean), tuple(std), self.interpolation)
        how = Augment(self.size, *colour, min_scale, flip, jitter, randaugment, erase)
        return Batches(self, batch, train, seed, epoch, how, dtype, part, compiled)

    def view(self, rows: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
        """The images of these rows as evaluation prepares them: (B, 3, size, size), normalised."""
        device = self.images.device
        mean_, std_ = _scaled(mean, std, device)
        return normalised(self.crop(self.images[rows.to(device)].float()), mean_, std_, torch.float32)

    def crop(self, x: Tensor) -> Tensor:
        """The centre crop (B, 3, size, size) of stored images (B, 3, S, S) for evaluation; resampled only if S requires
        it. Pixels stay from 0 to 255."""
        side = x.shape[-1]
        target = self.size if side < self.size else min(side, self.edge)
        if target != side:
            x = F.interpolate(x, size=(target, target), mode=self.interpolation, antialias=True).clamp(0, 255)
        at = round((target - self.size) / 2)
        return x[..., at : at + self.size, at : at + self.size]

    def random_crop(self, x: Tensor, u: Tensor, min_scale: float, flip: bool) -> Tensor:
        """Random resized crops, perhaps flipped, in one resampling. u: at least (B, 5) uniform draws, which decide."""
        (cx, cy), (width, height) = boxes(u, min_scale)
        if flip:
            width = torch.where(u[:, 4] < 0.5, -width, width)
        line = (torch.arange(self.size, device=x.device) * 2 + 1) / self.size - 1
        at_x, at_y = cx[:, None] + width[:, None] * line, cy[:, None] + height[:, None] * line  # (B, size)
        if x.shape[-1] < self.size:  # upsampling: two small matrix products are several times as fast
            x, side = F.pad(x, (2, 2, 2, 2), mode="replicate"), x.shape[-1]
            return (_cubic(at_y, side) @ x @ _cubic(at_x, side).mT).clamp(0, 255)
        # The grid is built by hand, because affine_grid's matrix product loses precision to TF32.
        gx, gy = at_x[:, None, :].expand(-1, self.size, -1), at_y[:, :, None].expand(-1, -1, self.size)
        grid = torch.stack((gx, gy), dim=-1)  # (B, size, size, 2)
        return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False).clamp(0, 255)


def _cubic(at: Tensor, side: int) -> Tensor:
    """(B, 1, size, side + 4): weights of cubic convolution over a line of pixels with two more at either end.

    at: (B, size) places to sample, from -1 to 1 over the line.
    """
    pixel = ((at + 1) * side - 1) / 2
    far = (pixel[..., None] - torch.arange(-2, side + 2, device=at.device)).abs()
    a = -0.75  # Keys's parameter, the value of torch's grid_sample and interpolate
    near = ((a + 2) * far - (a + 3)) * far**2 + 1
    next_to = a * (((far - 5) * far + 8) * far - 4)
    return torch.where(far <= 1, near, torch.where(far < 2, next_to, 0.0))[:, None]


def _decode(
    images: Images,
    side: int,
    filter: Image.Resampling,
    strict: bool,
    progress: Callable[[int, int], None] | None,
    threads: int | None,
) -> np.ndarray | None:
    """All images as (n, side, side, 3) uint8; None if `strict` and one does not have that size already."""
    n = len(images)
    out = np.zeros((n, side, side, 3), dtype=np.uint8)

    def put(rows: range) -> bool:
        for i in rows:
            try:
                image = images.image(i)
            except CorruptImage as error:
                images.corrupt |= images.skipped(i, error)
                continue
            if strict and image.size != (side, side):
                return False
            out[i] = np.asarray(resized_middle(image, side, side, filter))
        return True

    parts = [range(at, min(at + 32, n)) for at in range(0, n, 32)]  # a task costs as much as a small image
    with ThreadPoolExecutor(threads or _threads()) as pool:
        for rows, fits in zip(parts, pool.map(put, parts)):
            if not fits:
                pool.shutdown(cancel_futures=True)
                return None
            if progress:
                progress(rows.stop, n)
    return out


def _threads() -> int:
    return min(16, os.cpu_count() or 1)


def _kept(images: Images, pixels: np.ndarray, replace: bool) -> Any:
    """The rows to keep: those that were decoded; with `replace` all, after pixels of other images replaced the bad."""
    bad = {i for i in range(len(images)) if images.row(i) in images.corrupt} if images.corrupt else set()
    if not bad:
        return slice(None)
    if not replace:
        good = [i for i in range(len(images)) if i not in bad]
        if not good:
            raise CorruptImage(f"None of the images of '{images.name}' can be read; give others.")
        return good
    for i in sorted(bad):
        other = next((j for j in images.instead_of(i) if j not in bad), None)
        if other is None:
            raise CorruptImage(f"None of the images like '{images.file(i)}' can be read; give others.")
        pixels[i] = pixels[other]
    return slice(None)


def _scaled(mean: Sequence[float], std: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and std (3, 1, 1) for pixels from 0 to 255."""
    scaled = [255 * torch.tensor(values, device=device).view(-1, 1, 1) for values in (mean, std)]
    return scaled[0], scaled[1]


@dataclass
class Batches:
    """One pass over a `Resident`. Like a `Loader` it has a length and a `set_epoch`."""

    data: Resident
    batch: int
    train: bool
    seed: int
    epoch: int
    how: Augment
    dtype: torch.dtype
    part: tuple[int, int] = (0, 1)
    compiled: bool = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        n, (rank, world) = len(self.data), self.part
        if self.train and n >= self.batch * world:
            return n // (self.batch * world)
        return -(-len(range(rank, n, world)) // self.batch)

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data, n, device, how = self.data, len(self.data), self.data.images.device, self.how
        mean, std = _scaled(how.mean, how.std, device)
        # Drawn on the CPU, so that every device gets the same numbers, and all at once, so that no batch waits for a
        # copy.
        generator = generator_of(self.seed, self.epoch)
        order = self._own(torch.randperm(n, generator=generator) if self.train else torch.arange(n))
        u = self._own(draws(n, generator)).to(device) if self.train else None
        with ThreadPoolExecutor(_threads()) as pool:
            augment = self._augment(mean, std, pool)
            for at in range(0, len(self) * self.batch, self.batch):
                indices = order[at : at + self.batch]
                rows = indices.to(device)
                x = data.images[rows].float()
                if u is None:
                    yield normalised(data.crop(x), mean, std, self.dtype), data.labels[rows]
                else:
                    yield augment(x, u[at : at + self.batch], indices.tolist()), data.labels[rows]

    def _augment(self, mean: Tensor, std: Tensor, pool: ThreadPoolExecutor) -> Callable[..., Tensor]:
        """The function that augments a batch, given its pixels, its draws and the images' indices."""
        how, data = self.how, self.data
        field = noise(how.size, str(mean.device)) if how.erase else mean
        finish = Finish(how.jitter, how.erase, mean, std, self.dtype, field)
        crop_and_finish = _compiled_augment() if self.compiled else _augment

        def augment(x: Tensor, u: Tensor, indices: list[int]) -> Tensor:
            if how.randaugment is None:
                return crop_and_finish(data, x, u, how.min_scale, how.flip, finish)
            plans = [how.plan(self.seed, self.epoch, i) for i in indices]
            return finished(_applied(plans, data.random_crop(x, u, how.min_scale, how.flip), pool), u, finish)

        return augment

    def _own(self, rows: Tensor) -> Tensor:
        """This process's rows: in training its part of every joint batch, in evaluation every world-th row."""
        rank, world = self.part
        if not self.train:
            return rows[rank::world]
        joint = rows[: len(rows) // (self.batch * world) * self.batch * world]
        if not len(joint):
            return rows
        return joint.unflatten(0, (-1, world, self.batch))[:, rank].flatten(0, 1)


def _applied(plans: Sequence[Any], x: Tensor, pool: ThreadPoolExecutor) -> Tensor:
    """Images (B, 3, S, S) from 0 to 255 after RandAugment, which runs on the host, in Pillow."""
    pixels = x.round().byte().permute(0, 2, 3, 1).cpu().numpy()
    augmented = pool.map(lambda plan, one: np.asarray(applied(plan, Image.fromarray(one))), plans, pixels)
    return torch.from_numpy(np.stack(list(augmented))).to(x.device).permute(0, 3, 1, 2).float()


def _augment(data: Resident, x: Tensor, u: Tensor, min_scale: float, flip: bool, finish: Finish) -> Tensor:
    """Random crops of stored images x, then the rest of the augmentation. u: (B, DRAWS) uniform draws."""
    return finished(data.random_crop(x, u, min_scale, flip), u, finish)


@cache
def _compiled_augment() -> Callable[..., Tensor]:
    return torch.compile(_augment, dynamic=False)
