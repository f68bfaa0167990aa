"""Serving images in batches: through workers (`loader`), or out of device memory (`Resident`) when they fit there.

Either way the order and the augmentation are a pure function of (seed, epoch), so that a resumed run sees what an
uninterrupted one would have seen. B images of a batch, S side they are stored with.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from ..errors import DwindleError
from ..images import resized_middle

if TYPE_CHECKING:
    from .data import Images

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_PCT = 0.875


def mix(*key: int) -> int:
    """One seed out of several numbers."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Every CPU generator as a function of `key`, and as it was before on leaving."""
    outer = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = mix(*key)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reset the GPU's generator too
    try:
        yield
    finally:
        random.setstate(outer[0])
        np.random.set_state(outer[1])
        torch.set_rng_state(outer[2])


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(mix(seed, epoch))


class _Order(Sampler):
    """Yields (epoch, index): the epoch travels with the index, so persistent workers see it change.

    In training all ranks together draw the batch of world * batch images that one process would, in rank order. In
    evaluation rank r takes every world-th image from the r-th on.
    """

    def __init__(self, images: Images, batch: int, train: bool, seed: int, rank: int, world: int):
        self.images, self.batch, self.train, self.seed = images, batch, train, seed
        self.rank, self.world, self.epoch = rank, world, 0

    def __len__(self) -> int:
        n = len(self.images)
        if not self.train:
            return len(range(self.rank, n, self.world))
        return n // (self.world * self.batch) * self.batch or n

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch, n = self.epoch, len(self.images)
        if self.train:
            order = self.images.shuffled(_generator(self.seed, epoch))
            steps = n // (self.world * self.batch)
            if steps:  # else fewer than a batch, all of which are drawn
                joint = order[: steps * self.world * self.batch].reshape(steps, self.world, self.batch)
                order = joint[:, self.rank].ravel()
        else:
            order = np.arange(self.rank, n, self.world)
        return ((epoch, i) for i in order.tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class _Seeded(Dataset):
    """Makes augmentation a function of (seed, epoch, index), whichever worker runs it."""

    def __init__(self, images: Images, seed: int):
        self.images, self.seed = images, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Any, int]:
        epoch, i = key
        with seeded(self.seed, epoch, i):
            return self.images[i]


class Loader(DataLoader):
    """A DataLoader that can be told the epoch, and whose workers' errors read as if they had happened here."""

    def __iter__(self) -> Any:
        try:
            yield from super().__iter__()
        except DwindleError as error:  # torch puts the worker's traceback into the message
            raise DwindleError(str(error).rpartition("DwindleError: ")[2].strip()) from error

    def set_epoch(self, epoch: int) -> None:
        cast(_Order, self.sampler).set_epoch(epoch)


def _in_worker(_: int) -> None:
    info = cast(Any, get_worker_info())
    info.dataset.images.share_memory(info.num_workers)


def loader(
    images: Images, batch: int, train: bool = False, workers: int = 0, seed: int = 0, rank: int = 0, world: int = 1
) -> Loader:
    """Batches of `images`; call `set_epoch` before each pass. Training shuffles and drops the last partial batch.

    Of `world` processes each gives its `rank`, and gets its share of the images, `batch` at a time.
    """
    if images.transform is None:
        raise DwindleError(f"'{images.name}' has no transform to make tensors with; set images.transform first.")
    if workers < 0:
        raise DwindleError(f"workers = {workers}: it must be at least 0.")
    if batch < 1:
        raise DwindleError(f"batch = {batch}: it must be at least 1.")
    if not 0 <= rank < world:
        raise DwindleError(f"rank = {rank}: of {world} processes it must lie between 0 and {world - 1}.")
    if train and world > 1 and len(images) < world * batch:
        joint = f"a joint batch of {world} x {batch}"
        raise DwindleError(f"'{images.name}' has {len(images)} images, too few for {joint}; lower batch.")
    if workers:
        images.warm()
    return Loader(
        _Seeded(images, seed),
        batch,
        sampler=_Order(images, batch, train, seed, rank, world),
        num_workers=workers,
        worker_init_fn=_in_worker,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # else each pass draws a number from the caller's
    )


class Resident:
    """A small data set decoded once into one uint8 tensor (n, 3, S, S), augmented in batch where it lies.

    S is `store`; by default the native side when all images are square, alike and below `size`, else size / 0.875.
    """

    def __init__(
        self,
        images: Images,
        size: int = 224,
        device: str | torch.device = "cpu",
        store: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        threads: int | None = None,
    ):
        if not len(images):
            raise DwindleError(f"'{images.name}' has no images to keep resident; choose another split or limit.")
        images.warm()
        self.size, self.edge, self.num_classes = size, round(size / CROP_PCT), images.num_classes
        width, height = images.image(0).size
        native = store is None and width == height < size
        side = store or (width if native else self.edge)
        pixels = _decode(images, side, native, progress, threads)
        if pixels is None:  # a small square came first, but not all are like it
            pixels = _decode(images, self.edge, False, progress, threads)
        self.images = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).contiguous()  # (n, 3, S, S)
        self.labels = torch.from_numpy(images.labels).to(device)

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
        dtype: torch.dtype = torch.float32,
        part: tuple[int, int] = (0, 1),
        compiled: bool = False,
    ) -> Batches:
        """(images (B, 3, size, size) normalised, labels (B,)); the rest as in `loader`, part = (rank, world)."""
        how = (tuple(mean), tuple(std), min_scale, flip, jitter, dtype, part, compiled)
        return Batches(self, batch, train, seed, epoch, *how)

    def view(self, rows: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
        """Some images as in evaluation, normalised."""
        device = self.images.device
        mean_, std_ = (255 * torch.tensor(v, device=device).view(3, 1, 1) for v in (mean, std))
        return _colour(self.crop(self.images[rows.to(device)].float()), None, mean_, std_, torch.float32)

    def crop(self, x: Tensor) -> Tensor:
        """The evaluation view of stored images (B, 3, S, S) in 0..255: resampled only where S asks for it."""
        side = x.shape[-1]
        target = self.size if side < self.size else min(side, self.edge)
        if target != side:
            x = F.interpolate(x, size=(target, target), mode="bicubic", antialias=True).clamp(0, 255)
        at = round((target - self.size) / 2)
        return x[..., at : at + self.size, at : at + self.size]

    def random_crop(self, x: Tensor, u: Tensor, min_scale: float, flip: bool) -> Tensor:
        """Random resized crop and flip in one resampling; u (B, 5) uniform draws decide.

        A box too wide or too high for the image is clamped, where torchvision draws again.
        """
        area = min_scale + (1 - min_scale) * u[:, 0]
        aspect = (4 / 3) ** (2 * u[:, 1] - 1)
        width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
        # Coordinates run from -1 to 1 over the image, edge to edge; the centre may lie within 1 - extent of 0.
        cx, cy = (1 - width) * (2 * u[:, 2] - 1), (1 - height) * (2 * u[:, 3] - 1)
        if flip:
            width = torch.where(u[:, 4] < 0.5, -width, width)
        line = (torch.arange(self.size, device=x.device) * 2 + 1) / self.size - 1
        at_x, at_y = cx[:, None] + width[:, None] * line, cy[:, None] + height[:, None] * line  # (B, size)
        if x.shape[-1] < self.size:  # few pixels become many: two small matrix products, several times as fast
            x, side = F.pad(x, (2, 2, 2, 2), mode="replicate"), x.shape[-1]
            return (_cubic(at_y, side) @ x @ _cubic(at_x, side).mT).clamp(0, 255)
        # By hand and not by affine_grid, whose matrix product loses pixels to TF32.
        gx, gy = at_x[:, None, :].expand(-1, self.size, -1), at_y[:, :, None].expand(-1, -1, self.size)
        grid = torch.stack((gx, gy), dim=-1)  # (B, size, size, 2)
        return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False).clamp(0, 255)


def _cubic(at: Tensor, side: int) -> Tensor:
    """(B, 1, size, side + 4): weights of a line of pixels, two more on either end, for cubic convolution at places
    (B, size) that run from -1 to 1 over the line."""
    pixel = ((at + 1) * side - 1) / 2
    far = (pixel[..., None] - torch.arange(-2, side + 2, device=at.device)).abs()
    a = -0.75  # Keys's parameter, as grid_sample and resizing in torch have it
    near = ((a + 2) * far - (a + 3)) * far**2 + 1
    next_to = a * (((far - 5) * far + 8) * far - 4)
    return torch.where(far <= 1, near, torch.where(far < 2, next_to, 0.0))[:, None]


def _decode(
    images: Images, side: int, strict: bool, progress: Callable[[int, int], None] | None, threads: int | None
) -> np.ndarray | None:
    """All images as (n, side, side, 3) uint8; None when `strict` and one is not of that size already."""
    n = len(images)
    out = np.empty((n, side, side, 3), dtype=np.uint8)

    def put(rows: range) -> bool:
        for i in rows:
            image = images.image(i)
            if strict and image.size != (side, side):
                return False
            out[i] = np.asarray(resized_middle(image, side, side, Image.Resampling.BICUBIC))
        return True

    parts = [range(at, min(at + 32, n)) for at in range(0, n, 32)]  # a task costs as much as a small image
    with ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1)) as pool:
        for rows, fits in zip(parts, pool.map(put, parts)):
            if not fits:
                pool.shutdown(cancel_futures=True)
                return None
            if progress:
                progress(rows.stop, n)
    return out


@dataclass
class Batches:
    """One pass over a Resident; like a Loader it has a length and can be told the epoch."""

    data: Resident
    batch: int
    train: bool
    seed: int
    epoch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min_scale: float
    flip: bool
    jitter: float
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
        data, n, device = self.data, len(self.data), self.data.images.device
        mean, std = (255 * torch.tensor(v, device=device).view(3, 1, 1) for v in (self.mean, self.std))
        # Drawn on the CPU, so that every device sees the same, and at once, so that no batch waits for a copy.
        generator = _generator(self.seed, self.epoch)
        order = (torch.randperm(n, generator=generator) if self.train else torch.arange(n)).to(device)
        draws = torch.rand(n, 8, generator=generator).to(device)
        order, draws = self._own(order), self._own(draws)
        augment = _compiled_augment() if self.compiled else _augment
        for at in range(0, len(self) * self.batch, self.batch):
            rows, u = order[at : at + self.batch], draws[at : at + self.batch]
            x = data.images[rows].float()
            if self.train:
                x = augment(data, x, u, self.min_scale, self.flip, self.jitter, mean, std, self.dtype)
            else:
                x = _colour(data.crop(x), None, mean, std, self.dtype)
            yield x, data.labels[rows]

    def _own(self, rows: Tensor) -> Tensor:
        """This process's rows: its part of every joint batch in training, every world-th one else."""
        rank, world = self.part
        if not self.train:
            return rows[rank::world]
        joint = rows[: len(rows) // (self.batch * world) * self.batch * world]
        if not len(joint):
            return rows
        return joint.unflatten(0, (-1, world, self.batch))[:, rank].flatten(0, 1)


def _colour(x: Tensor, factors: Tensor | None, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    x = x if factors is None else _jitter(x, factors)
    return ((x - mean) / std).to(dtype, memory_format=torch.channels_last)


def _augment(
    data: Resident,
    x: Tensor,
    u: Tensor,
    min_scale: float,
    flip: bool,
    jitter: float,
    mean: Tensor,
    std: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """u: (B, 8) uniform draws decide."""
    x = data.random_crop(x, u, min_scale, flip)
    return _colour(x, 1 + jitter * (2 * u[:, 5:] - 1) if jitter else None, mean, std, dtype)


@cache
def _compiled_augment() -> Callable[..., Tensor]:
    return torch.compile(_augment, dynamic=False)


def _jitter(x: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast and saturation by factors (B, 3), each image by its own."""

    def grey(x: Tensor) -> Tensor:
        return (x * x.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(dim=1, keepdim=True)  # (B, 1, H, W)

    brightness, contrast, saturation = factors.view(-1, 3, 1, 1, 1).unbind(dim=1)
    x = (x * brightness).clamp(0, 255)
    level = grey(x).mean(dim=(2, 3), keepdim=True)
    x = (level + (x - level) * contrast).clamp(0, 255)
    level = grey(x)
    return (level + (x - level) * saturation).clamp(0, 255)
