"""Images without labels for the commands on encoders, from a folder or any data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DwindleError
from ..io.batches import loader
from ..io.classes import known_classes
from ..io.datasets import Images, limit, matched
from ..io.folders import NoSplit
from ..io.images import preprocess_of
from ..io.opening import open_data
from ..io.sets import open_images

AT_ONCE = 16  # images per batch
CALIBRATED = 500  # images at most, since the static features of all of them are kept in memory


def unlabelled(model: Any, data: str, count: int | None = None) -> Images:
    """The images of a data set, with the model's transform: its evaluation split, else its training split.

    Images that cannot be read are skipped, and listed by `corrupt_files`. count: so many, drawn at random; None: all.
    """
    try:
        images = open_images(data)
    except NoSplit:
        images = open_data(data, "train")
    images = images if count is None else limit(images, count, 0)
    if len(images) < 2:
        raise DwindleError(f"'{data}' holds {len(images)} images; give at least two, to compare them.")
    images.transform, images.skip = preprocess_of(model).eval_transform(), True
    return images


def tensors(images: Images, batch: int, workers: int = 0) -> Iterator[Tensor]:
    """Batches (B, C, height, width) of the images, transformed for the model; empty batches are left out."""
    for x, _ in loader(images, batch, workers=workers):
        if len(x):
            yield x


def halves(images: Images) -> tuple[Images, Images]:
    """Two random parts, the same at every call: one to calibrate on, and one to hold out."""
    order = np.random.default_rng(0).permutation(len(images))
    middle = min((len(order) + 1) // 2, CALIBRATED)
    return images.select(np.sort(order[:middle])), images.select(np.sort(order[middle:]))


def compared_images(model: Any, data: str, count: int) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """`count` images in one tensor, their labels, and a description of the data.

    The labels are None where the model has no head, or does not know the data's classes.
    """
    images, labelled = unlabelled(model, data, count), False
    if model.classes and model.dense_head is None and (images.labels >= 0).all():
        with suppress(DwindleError):  # the model does not know these classes
            images = matched(images, known_classes(model), model.classes)
            labelled = True
    batches = list(loader(images, AT_ONCE))
    x = torch.cat([x for x, _ in batches])
    y = torch.cat([y for _, y in batches]) if labelled else None
    return x, y, images.about()
