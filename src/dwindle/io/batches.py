"""Serving images in batches: through workers (`loader`), or out of device memory (`Resident`) when they fit there.

Either way the order and the augmentation are a pure function of (seed, epoch), so that a resumed run sees what an
uninterrupted one would have seen. B images of a batch, S side they are stored with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from ..errors import DwindleError
from ..settings import Batch, Workers, fitted
from .augment import DRAWS, Augment, applied, boxes, finished, noise, normalised
from .draws import generator_of, seeded
from .images import CorruptImage, resized_middle

if TYPE_CHECKING:
    from .datasets import Images

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_PCT = 0.875
RESAMPLED = ("bicubic", "bilinear")  # what is resident


def draws(n: int, generator: torch.Generator) -> Tensor:
    """(n, DRAWS): what an epoch's images are augmented by, in the order they are seen."""
    return torch.cat([torch.rand(n, DRAWS // 2, generator=generator) for _ in range(2)], dim=1)


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

    def __iter__(self) -> Iterator[tuple[int, int, list[float] | None]]:
        epoch, n = self.epoch, len(self.images)
        if not self.train:
            return ((epoch, i, None) for i in range(self.rank, n, self.world))
        generator = generator_of(self.seed, epoch)
        order = self.images.shuffled(generator)
        chance, places = draws(n, generator), np.arange(n)
        steps = n // (self.world * self.batch)
        if steps:  # else fewer than a batch, all of which are drawn
            joint = places[: steps * self.world * self.batch].reshape(steps, self.world, self.batch)
            places = joint[:, self.rank].ravel()
        return ((epoch, int(order[place]), chance[place].tolist()) for place in places)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class _Read(Dataset):
    """Images as a function of (seed, epoch, index), whichever worker reads them.

    A corrupt image, where those are skipped, is left out of an evaluation; in training the next one of its class takes
    its place, so that nothing else of the epoch changes. Each item comes with what was found corrupt on the way.
    """

    def __init__(self, images: Images, seed: int, train: bool, augment: Augment | None) -> None:
        self.images, self.seed, self.train, self.augment = images, seed, train, augment

    def __getitem__(self, key: tuple[int, int, list[float] | None]) -> Any:
        """(item or None, {row: why}), or an error: raised here, torch would put a traceback into its message."""
        try:
            return self._found(*key)
        except DwindleError as error:
            return error

    def _found(self, epoch: int, i: int, chance: list[float] | None) -> tuple[Any, dict[int, str]]:
        images, met = self.images, dict[int, str]()
        for j in images.instead_of(i) if self.train else (i,):
            row = images.row(j)
            try:
                if row not in images.corrupt:
                    return self._made((self.seed, epoch, i), j, chance), met
                met[row] = images.corrupt[row]
            except CorruptImage as error:
                met |= images.skipped(j, error)
                images.corrupt |= met
        if self.train:
            raise CorruptImage(f"None of the images like '{images.file(i)}' can be read; give others.")
        return None, met

    def _made(self, key: tuple[int, int, int], j: int, chance: list[float] | None) -> tuple[Any, int]:
        if self.augment is not None and chance is not None:
            return self.augment(self.images.image(j), torch.tensor(chance), *key), int(self.images.labels[j])
        with seeded(*key):
            return self.images[j]


def _collated(items: list[Any]) -> Any:
    """A batch of what could be read, None if that is nothing, and what could not; or an error."""
    if error := next((item for item in items if isinstance(item, DwindleError)), None):
        return error
    good = [item for item, _ in items if item is not None]
    corrupt = {row: why for _, found in items for row, why in found.items()}
    return default_collate(good) if good else None, corrupt


class Loader(DataLoader):
    """A DataLoader that can be told the epoch, raises what its workers met, and notes in its images what is corrupt."""

    def __iter__(self) -> Any:
        images = cast(_Read, self.dataset).images
        for found in super().__iter__():
            if isinstance(found, DwindleError):
                raise found
            batch, corrupt = found
            images.corrupt |= corrupt
            if batch is not None:
                yield batch

    def set_epoch(self, epoch: int) -> None:
        cast(_Order, self.sampler).set_epoch(epoch)


def _in_worker(_: int) -> None:
    info = cast(Any, get_worker_info())
    info.dataset.images.share_memory(info.num_workers)


def loader(
    images: Images,
    batch: int,
    train: bool = False,
    workers: int = 0,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    augment: Augment | None = None,
) -> Loader:
    """Batches of `images`; call `set_epoch` before each pass. Training shuffles and drops the last partial batch.

    Of `world` processes each gives its `rank`, and gets its share of the images, `batch` at a time. augment: what
    training makes of an image, in place of `images.transform`.
    """
    if images.transform is None and not (train and augment):
        raise DwindleError(f"'{images.name}' has no transform to make tensors with; set images.transform first.")
    batch = fitted(batch, Batch, "batch", "loader")
    workers = min(fitted(workers, Workers, "workers", "loader"), -(-len(images) // batch))  # more would have no work
    if not 0 <= rank < world:
        raise DwindleError(f"rank = {rank}: of {world} processes it must lie between 0 and {world - 1}.")
    if train and world > 1 and len(images) < world * batch:
        joint = f"a joint batch of {world} x {batch}"
        raise DwindleError(f"'{images.name}' has {len(images)} images, too few for {joint}; lower batch.")
    if workers:
        images.warm()
    return Loader(
        _Read(images, seed, train, augment),
        batch,
        collate_fn=_collated,
        sampler=_Order(images, batch, train, seed, rank, world),
        num_workers=workers,
        worker_init_fn=_in_worker,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # else each pass draws a number from the caller's
    )


class Resident:
    """A small data set decoded once into one uint8 tensor (n, 3, S, S), augmented in batch where it lies.

    S is `store`; by default the native side when all images are square, alike and below `size`, else size / crop_pct.
    Of others the middle is kept, and crops are taken of that: by cubic convolution of what is smaller than `size`, else
    bilinear. Corrupt images, where they are skipped, are left out, or replaced as in `loader`.
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
        """replace: corrupt images, rather than leave them out."""
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
        if pixels is None:  # a small square came first, but not all are like it
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
        """(images (B, 3, size, size) normalised, labels (B,)); the rest as in `Augment` and `loader`, part = (rank,
        world)."""
        look = (tuple(mean), tuple(std), self.interpolation)
        how = Augment(self.size, *look, min_scale, flip, jitter, randaugment, erase)
        return Batches(self, batch, train, seed, epoch, how, dtype, part, compiled)

    def view(self, rows: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
        """Some images as in evaluation, normalised."""
        device = self.images.device
        mean_, std_ = _scaled(mean, std, device)
        return normalised(self.crop(self.images[rows.to(device)].float()), mean_, std_, torch.float32)

    def crop(self, x: Tensor) -> Tensor:
        """The evaluation view of stored images (B, 3, S, S) in 0..255: resampled only where S asks for it."""
        side = x.shape[-1]
        target = self.size if side < self.size else min(side, self.edge)
        if target != side:
            x = F.interpolate(x, size=(target, target), mode=self.interpolation, antialias=True).clamp(0, 255)
        at = round((target - self.size) / 2)
        return x[..., at : at + self.size, at : at + self.size]

    def random_crop(self, x: Tensor, u: Tensor, min_scale: float, flip: bool) -> Tensor:
        """Random resized crop and flip in one resampling; u (B, 5) uniform draws decide."""
        (cx, cy), (width, height) = boxes(u, min_scale)
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
    images: Images,
    side: int,
    filter: Image.Resampling,
    strict: bool,
    progress: Callable[[int, int], None] | None,
    threads: int | None,
) -> np.ndarray | None:
    """All images as (n, side, side, 3) uint8; None when `strict` and one is not of that size already."""
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
    """Which were decoded; with `replace` all of them, the others' pixels exchanged."""
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
    """For pixels from 0 to 255."""
    scaled = [255 * torch.tensor(values, device=device).view(-1, 1, 1) for values in (mean, std)]
    return scaled[0], scaled[1]


@dataclass
class Batches:
    """One pass over a Resident; like a Loader it has a length and can be told the epoch."""

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
        # Drawn on the CPU, so that every device sees the same, and at once, so that no batch waits for a copy.
        generator = generator_of(self.seed, self.epoch)
        order = self._own(torch.randperm(n, generator=generator) if self.train else torch.arange(n))
        chance = self._own(draws(n, generator)).to(device) if self.train else None
        with ThreadPoolExecutor(_threads()) as pool:
            augment = self._augment(mean, std, pool)
            for at in range(0, len(self) * self.batch, self.batch):
                some = order[at : at + self.batch]
                rows = some.to(device)
                x = data.images[rows].float()
                if chance is None:
                    yield normalised(data.crop(x), mean, std, self.dtype), data.labels[rows]
                else:
                    yield augment(x, chance[at : at + self.batch], some.tolist()), data.labels[rows]

    def _augment(self, mean: Tensor, std: Tensor, pool: ThreadPoolExecutor) -> Callable[..., Tensor]:
        """Of a batch, its draws and which images they are."""
        how, data = self.how, self.data
        field = noise(how.size, str(mean.device)) if how.erase else mean
        whole = _compiled_augment() if self.compiled else _augment

        def augment(x: Tensor, u: Tensor, indices: list[int]) -> Tensor:
            if how.randaugment is None:
                settings = (how.min_scale, how.flip, how.jitter, how.erase)
                return whole(data, x, u, *settings, mean, std, self.dtype, field)
            plans = [how.plan(self.seed, self.epoch, i) for i in indices]
            x = _applied(plans, data.random_crop(x, u, how.min_scale, how.flip), pool)
            return finished(x, u, how.jitter, how.erase, mean, std, self.dtype, field)

        return augment

    def _own(self, rows: Tensor) -> Tensor:
        """This process's rows: its part of every joint batch in training, every world-th one else."""
        rank, world = self.part
        if not self.train:
            return rows[rank::world]
        joint = rows[: len(rows) // (self.batch * world) * self.batch * world]
        if not len(joint):
            return rows
        return joint.unflatten(0, (-1, world, self.batch))[:, rank].flatten(0, 1)


def _applied(plans: Sequence[Any], x: Tensor, pool: ThreadPoolExecutor) -> Tensor:
    """RandAugment on images (B, 3, S, S) from 0 to 255: timm's own, which are Pillow's, on the host."""
    pixels = x.round().byte().permute(0, 2, 3, 1).cpu().numpy()
    made = pool.map(lambda plan, one: np.asarray(applied(plan, Image.fromarray(one))), plans, pixels)
    return torch.from_numpy(np.stack(list(made))).to(x.device).permute(0, 3, 1, 2).float()


def _augment(
    data: Resident,
    x: Tensor,
    u: Tensor,
    min_scale: float,
    flip: bool,
    jitter: float,
    erase: float,
    mean: Tensor,
    std: Tensor,
    dtype: torch.dtype,
    field: Tensor,
) -> Tensor:
    """u: (B, DRAWS) uniform draws decide."""
    return finished(data.random_crop(x, u, min_scale, flip), u, jitter, erase, mean, std, dtype, field)


@cache
def _compiled_augment() -> Callable[..., Tensor]:
    return torch.compile(_augment, dynamic=False)
