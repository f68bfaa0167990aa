"""Labelled images, and parts of them. opening.py opens them by name, images.py decodes, batches.py makes batches."""

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
    """Decode the i-th of these files. paths: encoded names, relative to the folder."""
    return load_image(folder / os.fsdecode(paths[i]))


class Images(Dataset):
    """A map-style data set: `images[i]` is (RGB image or `transform` of it, label).

    split: which of the data's `splits` these are; None where it has none. where: the same in words.
    match: how their classes were matched to a model's.
    skip: whether reading in batches skips corrupt images; None: no, and the user has no option to choose it.
    corrupt: the corrupt images found so far: reason by row in the source.
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
        """As JSON: which images these are, and how their classes were matched."""
        on = f"{self.where}: {len(self) - len(self.corrupt):,} images"
        broken = {"corrupt": len(self.corrupt)} if self.corrupt else {}
        return {"on": on} | broken | (self.match.about() if self.match else {})

    def summary(self) -> str:
        """The same in sentences."""
        broken = f" {len(self.corrupt)} corrupt ones are skipped." if self.corrupt else ""
        return f"{self.about()['on']}.{broken}" + (f" {self.match.summary()}" if self.match else "")

    def row(self, i: int) -> int:
        """The row of image i in the source."""
        return int(self.rows[i])

    def image(self, i: int) -> Image.Image:
        """The decoded image, before `transform`."""
        return self.source(self.row(i))

    def file(self, i: int) -> str | None:
        """The file name of image i, if it has one."""
        return self.file_of(self.row(i))

    def file_of(self, row: int) -> str | None:
        """The file name of the image in this row of the source, if it has one."""
        if isinstance(self.source, partial) and self.source.func is from_file:
            return shown(os.fsdecode(self.source.args[1][row]))
        return self.source.path(row) if isinstance(self.source, Parquet) else None

    def sample(self) -> Image.Image:
        """The first image that can be read. Raises the first image's error where corrupt ones are not skipped."""
        for i in range(len(self)):
            try:
                return self.image(i)
            except CorruptImage as error:
                self.corrupt |= self.skipped(i, error)
        raise CorruptImage(f"None of the images of '{self.name}' can be read; give others.")

    def skipped(self, i: int, error: CorruptImage) -> dict[int, str]:
        """{row: reason} for the corrupt image i; raises the error where corrupt images are not skipped."""
        if self.skip is not True:
            hint = "" if self.skip is None else "; --skip-corrupt (--set skip_corrupt=true) goes on without it"
            raise CorruptImage(f"{str(error).removesuffix('.')}{hint}.") from error
        return {self.row(i): str(error)}

    def corrupt_files(self) -> list[tuple[str, str]]:
        """(file name or row, reason) of each corrupt image found so far."""
        return [(self.file_of(row) or f"row {row}", why) for row, why in sorted(self.corrupt.items())]

    def instead_of(self, i: int) -> Iterator[int]:
        """Image i, then the others of its class: those after it, then those before it."""
        yield i
        same_class = np.flatnonzero(self.labels == self.labels[i])
        at = int(np.searchsorted(same_class, i))
        yield from (int(j) for j in (*same_class[at + 1 :], *same_class[:at]))

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image = self.image(i)
        return (self.transform(image) if self.transform else image), int(self.labels[i])

    @property
    def streams(self) -> bool:
        """Whether the images are too many to hold in memory, so that the order of reading matters."""
        return isinstance(self.source, Parquet) and not self.source.fits(self.rows)

    def warm(self) -> None:
        """Read the images' encoded bytes now, if they fit in memory, so that threads and forked workers share them."""
        if isinstance(self.source, Parquet) and not self.streams:
            self.source.warm(self.rows)

    def share_memory(self, workers: int) -> None:
        """Called in a worker: limit it to its part of the memory, but not below the rows that are shuffled together."""
        if isinstance(self.source, Parquet) and self.streams:
            self.source.room = max(self.source.memory // workers, self.source.window)

    def shuffled(self, generator: torch.Generator) -> np.ndarray:
        """Every index once, in random order; where images stream, one window of row groups after another."""
        order = torch.randperm(len(self), generator=generator).numpy()
        if isinstance(self.source, Parquet) and self.streams:
            order = order[np.argsort(self.source.windows(self.rows, generator)[order], kind="stable")]
        return order

    def with_transform(self, transform: Transform) -> Self:
        """The same images with this transform. Both share the record of corrupt images."""
        images = copy.copy(self)
        images.transform = transform
        return images

    def select(self, indices: np.ndarray | slice) -> Self:
        """A view of some of the images, with the classes of the whole."""
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
    """Split off a share of the images: (the rest, the share). The share is the same of each class, within one image."""
    n = len(images)
    if not 0 < share < 1 or n < 2:
        raise DwindleError(
            f"Cannot hold out {share} of the {n} images of '{images.name}'; give a share between 0 and 1."
        )
    rng = np.random.default_rng(seed)
    by_class = np.lexsort((rng.permutation(n), images.labels))
    count = min(max(round(share * n), 1), n - 1)
    # Evenly spaced along the images sorted by class, so that classes of one image are sampled fairly too.
    held = np.zeros(n, dtype=bool)
    held[by_class[((np.arange(count) + rng.random()) * n / count).astype(np.int64)]] = True
    parts = images.select(np.flatnonzero(~held)), images.select(np.flatnonzero(held))
    whole = images.where.removeprefix("all of ")
    parts[0].where, parts[1].where = f"the rest of {whole}", f"{100 * share:g}% held out of {whole} by seed {seed}"
    return parts


def matched(images: Images, names: list[str] | None, count: int, owner: str = "the model") -> Images:
    """The images whose classes a model has, labelled by the model's numbers.

    names, count: the model's class names, or None, and how many classes it has. owner: what errors call the model.
    """
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
            f"'{images.name}' has no image of a class that {owner} has too ({found.summary()}); give other images."
        )
    part.classes, part.num_classes = names or (images.classes if found.same else None), count
    part.match = dataclasses.replace(found, left_out=len(images) - len(part))
    return part


def relabelled(images: Images, found: Match) -> Images:
    """All images, labelled by the numbers of a match; -1 where their class has no number."""
    part = images.select(slice(None))
    part.labels = np.where(images.labels < 0, -1, found.numbers[images.labels])
    return part


def in_order(images: Images, names: list[str]) -> Images:
    """The images, relabelled to the order of these names. Images without class names get these names, unchanged."""
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
