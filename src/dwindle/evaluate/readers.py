"""Images without labels, as commands for encoders read them: a folder of them, or any data set's."""

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

AT_ONCE = 16
CALIBRATED = 500  # images at most: their static features are held


def unlabelled(model: Any, data: str, count: int | None = None) -> Images:
    """As the model takes them; labels are not looked at. Those to evaluate on where there are some, else those to train
    on. Images that cannot be read are skipped, and listed by `corrupt_files`. count: so many, drawn at random.
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
    """Batches as the model takes them."""
    for x, _ in loader(images, batch, workers=workers):
        if len(x):
            yield x


def halves(images: Images) -> tuple[Images, Images]:
    """Two parts, drawn at random, the same every time: to calibrate on, and to hold out."""
    order = np.random.default_rng(0).permutation(len(images))
    middle = min((len(order) + 1) // 2, CALIBRATED)
    return images.select(np.sort(order[:middle])), images.select(np.sort(order[middle:]))


def compared_images(model: Any, data: str, count: int) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """So many images in one tensor, their labels where the model knows them, and what is said of them."""
    images, labels = unlabelled(model, data, count), None
    if model.classes and model.dense_head is None and (images.labels >= 0).all():
        with suppress(DwindleError):  # classes that the model does not know
            images = matched(images, known_classes(model), model.classes)
            labels = True
    batches = list(loader(images, AT_ONCE))
    x = torch.cat([x for x, _ in batches])
    y = torch.cat([y for _, y in batches]) if labels else None
    return x, y, images.about()
