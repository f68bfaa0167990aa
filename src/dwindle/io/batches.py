"""Images in batches, read by workers. `Resident` in resident.py keeps them in device memory where they fit.

With either, order and augmentation are pure functions of (seed, epoch), so that a resumed run sees what an
uninterrupted run would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from ..errors import DwindleError
from ..settings import Batch, Workers, checked_value
from .augment import DRAWS, Augment
from .draws import generator_of, seeded
from .images import CorruptImage

if TYPE_CHECKING:
    from .datasets import Images


def draws(n: int, generator: torch.Generator) -> Tensor:
    """(n, DRAWS) uniform draws for the augmentation of an epoch's images, in the order in which they are seen."""
    return torch.cat([torch.rand(n, DRAWS // 2, generator=generator) for _ in range(2)], dim=1)


class _Order(Sampler):
    """Yields (epoch, index, draws). The epoch is part of each item, so that persistent workers see it change.

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
        u, places = draws(n, generator), np.arange(n)
        steps = n // (self.world * self.batch)
        if steps:  # else there are fewer images than a batch, and all are drawn
            joint = places[: steps * self.world * self.batch].reshape(steps, self.world, self.batch)
            places = joint[:, self.rank].ravel()
        return ((epoch, int(order[place]), u[place].tolist()) for place in places)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class _SeededImages(Dataset):
    """Images as a function of (seed, epoch, index), whichever worker reads them.

    A corrupt image that may be skipped is left out of an evaluation. In training the next image of its class takes its
    place, so that the rest of the epoch stays the same. Each item says which images were found corrupt on the way.
    """

    def __init__(self, images: Images, seed: int, train: bool, augment: Augment | None) -> None:
        self.images, self.seed, self.train, self.augment = images, seed, train, augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int, list[float] | None]) -> Any:
        """(item or None, {row: reason}), or an error, which is returned because torch would add a traceback to the
        message of a raised one."""
        try:
            return self._read(*key)
        except DwindleError as error:
            return error

    def _read(self, epoch: int, i: int, u: list[float] | None) -> tuple[Any, dict[int, str]]:
        images, corrupt = self.images, dict[int, str]()
        for j in images.instead_of(i) if self.train else (i,):
            row = images.row(j)
            try:
                if row not in images.corrupt:
                    return self._item((self.seed, epoch, i), j, u), corrupt
                corrupt[row] = images.corrupt[row]
            except CorruptImage as error:
                corrupt |= images.skipped(j, error)
                images.corrupt |= corrupt
        if self.train:
            raise CorruptImage(f"None of the images like '{images.file(i)}' can be read; give others.")
        return None, corrupt

    def _item(self, key: tuple[int, int, int], j: int, u: list[float] | None) -> tuple[Any, int]:
        if self.augment is not None and u is not None:
            return self.augment(self.images.image(j), torch.tensor(u), *key), int(self.images.labels[j])
        with seeded(*key):
            return self.images[j]


def _collated(items: list[Any]) -> Any:
    """(batch of the items that could be read or None, {row: reason} of the others); or an error."""
    if error := next((item for item in items if isinstance(item, DwindleError)), None):
        return error
    readable = [item for item, _ in items if item is not None]
    corrupt = {row: reason for _, found in items for row, reason in found.items()}
    return default_collate(readable) if readable else None, corrupt


class Loader(DataLoader):
    """A DataLoader with `set_epoch`. It raises its workers' errors, and records in its images which are corrupt."""

    def __iter__(self) -> Any:
        images = cast(_SeededImages, self.dataset).images
        for result in super().__iter__():
            if isinstance(result, DwindleError):
                raise result
            batch, corrupt = result
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

    Each of `world` processes passes its `rank`, and gets its share of the images, `batch` at a time. augment: what
    training applies to an image, in place of `images.transform`.
    """
    if images.transform is None and not (train and augment):
        raise DwindleError(f"'{images.name}' has no transform to make tensors with; set images.transform first.")
    batch = checked_value(batch, Batch, "batch", "loader")
    # More workers than batches would have no work.
    workers = min(checked_value(workers, Workers, "workers", "loader"), -(-len(images) // batch))
    if not 0 <= rank < world:
        raise DwindleError(f"rank = {rank}: of {world} processes it must lie between 0 and {world - 1}.")
    if train and world > 1 and len(images) < world * batch:
        joint = f"a joint batch of {world} x {batch}"
        raise DwindleError(f"'{images.name}' has {len(images)} images, too few for {joint}; lower batch.")
    if workers:
        images.warm()
    return Loader(
        _SeededImages(images, seed, train, augment),
        batch,
        collate_fn=_collated,
        sampler=_Order(images, batch, train, seed, rank, world),
        num_workers=workers,
        worker_init_fn=_in_worker,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # without one, each pass draws a number from torch's default generator
    )
