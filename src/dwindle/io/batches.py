"""Images in batches, read by workers. `Resident` in resident.py has them in device memory when they fit there.

Either way the order and the augmentation are a pure function of (seed, epoch), so that a resumed run sees what an
uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from ..errors import DwindleError
from ..settings import Batch, Workers, fitted
from .augment import DRAWS, Augment
from .draws import generator_of, seeded
from .images import CorruptImage

if TYPE_CHECKING:
    from .datasets import Images


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

    def __len__(self) -> int:
        return len(self.images)

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
