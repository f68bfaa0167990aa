"""Labelled images, and parts of them. opening.py finds them by name, images.py decodes, batches.py serves them."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from ..errors import DwindleError
from ..files import shown
from .classes import Match, by_name, match
from .images import CorruptImage, Transform, load_image
from .parquet import Parquet

Source = Callable[[int], Image.Image]  # decodes row i; worker processes can copy it


def from_file(folder: Path, paths: np.ndarray, i: int) -> Image.Image:
    return load_image(folder / os.fsdecode(paths[i]))


class Images(Dataset):
    """A map-style data set: `images[i]` is (RGB image or `transform` of it, label).

    split: which one of the data's `splits` these are; None where it has none. where: the same for people.
    match: how their labels became a model's.
    skip: whether corrupt images are skipped, by whoever reads in batches; None: who asks for these cannot choose.
    corrupt: those met, by their rows in the source, and why.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        labels: np.ndarray,
        classes: list[str] | None = None,
        split: str | None = None,
        splits: Iterable[str] = (),
    ):
        self.name, self.source, self.classes, self.split = name, source, classes, split
        self.splits = tuple(splits)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.num_classes = len(classes) if classes else int(self.labels.max(initial=-1)) + 1
        self.transform: Transform | None = None
        self.rows = np.arange(len(self.labels))
        self.where = f"split {split} of {name}" if split else f"all of {name}"
        self.match: Match | None = None
        self.skip: bool | None = None
        self.corrupt: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def about(self) -> dict[str, Any]:
        """Which images these are, for JSON, and how their labels were found."""
        on = f"{self.where}: {len(self) - len(self.corrupt):,} images"
        broken = {"corrupt": len(self.corrupt)} if self.corrupt else {}
        return {"on": on} | broken | (self.match.about() if self.match else {})

    def told(self) -> str:
        """The same for people."""
        broken = f" {len(self.corrupt)} corrupt ones are skipped." if self.corrupt else ""
        return f"{self.about()['on']}.{broken}" + (f" {self.match.told()}" if self.match else "")

    def row(self, i: int) -> int:
        """Where the source has image i."""
        return int(self.rows[i])

    def image(self, i: int) -> Image.Image:
        """The decoded image, before `transform`."""
        return self.source(self.row(i))

    def file(self, i: int) -> str | None:
        """What image i is called, where it is."""
        return self.file_of(self.row(i))

    def file_of(self, row: int) -> str | None:
        if isinstance(self.source, partial) and self.source.func is from_file:
            return shown(os.fsdecode(self.source.args[1][row]))
        return self.source.path(row) if isinstance(self.source, Parquet) else None

    def sample(self) -> Image.Image:
        """The first image that can be read, or whatever is wrong with the first."""
        for i in range(len(self)):
            try:
                return self.image(i)
            except CorruptImage as error:
                self.corrupt |= self.skipped(i, error)
        raise CorruptImage(f"None of the images of '{self.name}' can be read; give others.")

    def skipped(self, i: int, error: CorruptImage) -> dict[int, str]:
        """Image i, noted as corrupt; the error itself where those are not skipped."""
        if self.skip is not True:
            hint = "" if self.skip is None else "; --skip-corrupt (--set skip_corrupt=true) goes on without it"
            raise CorruptImage(f"{str(error).removesuffix('.')}{hint}.") from error
        return {self.row(i): str(error)}

    def corrupt_files(self) -> list[tuple[str, str]]:
        """Those skipped: what they are called, and what is wrong."""
        return [(self.file_of(row) or f"row {row}", why) for row, why in sorted(self.corrupt.items())]

    def instead_of(self, i: int) -> Iterator[int]:
        """Image i, then the following ones of its class, round to those before it."""
        yield i
        like = np.flatnonzero(self.labels == self.labels[i])
        at = int(np.searchsorted(like, i))
        yield from (int(j) for j in (*like[at + 1 :], *like[:at]))

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image = self.image(i)
        return (self.transform(image) if self.transform else image), int(self.labels[i])

    @property
    def streams(self) -> bool:
        """Whether the images are too many to hold at once, so that the order they are read in matters."""
        return isinstance(self.source, Parquet) and not self.source.fits(self.rows)

    def warm(self) -> None:
        """Read what threads and forked workers can then share."""
        if isinstance(self.source, Parquet) and not self.streams:
            self.source.warm(self.rows)

    def share_memory(self, workers: int) -> None:
        """In a worker: hold a worker's part of the memory, yet never less than what is shuffled together."""
        if isinstance(self.source, Parquet) and self.streams:
            self.source.room = max(self.source.memory // workers, self.source.window)

    def shuffled(self, generator: torch.Generator) -> np.ndarray:
        """Every index once, in random order; where images stream, window after window of row groups."""
        order = torch.randperm(len(self), generator=generator).numpy()
        if isinstance(self.source, Parquet) and self.streams:
            order = order[np.argsort(self.source.windows(self.rows, generator)[order], kind="stable")]
        return order

    def with_transform(self, transform: Transform) -> Self:
        """The same images, transformed; corrupt ones are noted for both."""
        made = copy.copy(self)
        made.transform = transform
        return made

    def select(self, indices: np.ndarray | slice) -> Self:
        """A view on some of the images; classes stay those of the whole."""
        part = copy.copy(self)
        part.rows, part.labels, part.corrupt = self.rows[indices], self.labels[indices], {}
        return part


Some = TypeVar("Some", bound=Images)


def limit(images: Some, n: int, seed: int | None = None) -> Some:
    """The first n images, or n drawn at random with `seed`; all of them when there are fewer."""
    if n < 1:
        raise DwindleError(f"Cannot limit '{images.name}' to {n} images; give a positive number.")
    if n >= len(images) and seed is None:
        return images
    order = np.arange(len(images)) if seed is None else np.random.default_rng(seed).permutation(len(images))
    part = images.select(order[:n])
    part.where = f"{'the first' if seed is None else 'some'} {len(part)} images of {images.where}"
    return part


def hold_out(images: Images, share: float, seed: int = 0) -> tuple[Images, Images]:
    """The images without a share of them, and that share: of each class as large a part as of the whole, within one."""
    n = len(images)
    if not 0 < share < 1 or n < 2:
        raise DwindleError(
            f"Cannot hold out {share} of the {n} images of '{images.name}'; give a share between 0 and 1."
        )
    rng = np.random.default_rng(seed)
    by_class = np.lexsort((rng.permutation(n), images.labels))
    count = min(max(round(share * n), 1), n - 1)
    # Evenly spaced along the classes laid end to end, so that classes of one image are sampled fairly too.
    held = np.zeros(n, dtype=bool)
    held[by_class[((np.arange(count) + rng.random()) * n / count).astype(np.int64)]] = True
    parts = images.select(np.flatnonzero(~held)), images.select(np.flatnonzero(held))
    whole = images.where.removeprefix("all of ")
    parts[0].where, parts[1].where = f"the rest of {whole}", f"{100 * share:g}% held out of {whole} by seed {seed}"
    return parts


def matched(images: Images, names: list[str] | None, count: int, owner: str = "the model") -> Images:
    """The images of the classes that are among `count`, perhaps with names, of a model's; labelled by its numbers."""
    high = int(images.labels.max(initial=-1))
    check_labels(images.labels, high + 1)
    if high >= images.num_classes:
        raise DwindleError(
            f"'{images.name}' holds label {high}, but names {images.num_classes} classes; complete them."
        )
    found = match(images.classes, images.num_classes, names, count, named=images.name, owner=owner)
    part = relabelled(images, found)
    part = part.select(np.flatnonzero(part.labels >= 0))
    if len(images) and not len(part):
        raise DwindleError(
            f"'{images.name}' has no image of a class that {owner} has too ({found.told()}); give other images."
        )
    part.classes, part.num_classes = names or (images.classes if found.same else None), count
    part.match = dataclasses.replace(found, left_out=len(images) - len(part))
    return part


def relabelled(images: Images, found: Match) -> Images:
    """All of them; -1 labels those of classes that have no number."""
    part = images.select(slice(None))
    part.labels = np.where(images.labels < 0, -1, found.numbers[images.labels])
    return part


def in_order(images: Images, names: list[str]) -> Images:
    """Numbered as a head does whose classes have these names, in another order; without names of their own by these."""
    if images.classes is None:
        part = images.select(slice(None))
        part.classes = names
        return part
    found = by_name(images.classes, names)
    part = relabelled(images, found)
    part.classes = [images.classes[i] for i in np.argsort(found.numbers)]
    return part


def check_labels(labels: Any, num_classes: int) -> None:
    """Refuse labels beyond `num_classes`."""
    labels = np.asarray(labels)
    low, high = int(labels.min(initial=0)), int(labels.max(initial=0))
    if low < 0:
        raise DwindleError(f"The data holds label {low}; labels start at 0; use a split that is labelled.")
    if high >= num_classes:
        raise DwindleError(
            f"The highest label in the data is {high}, but the head has {num_classes} classes; "
            f"use a model with at least {high + 1} classes, or data whose labels the head covers."
        )
