"""Which images of a data set are for training and which for evaluation, with splits of its own and without."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DwindleError
from .classes import known_classes
from .datasets import Images, from_file, hold_out, limit, matched
from .folders import EVALUATION, NoSplit, image_files
from .images import preprocess_of
from .opening import open_data

SHARE = 0.1  # share of the training images that is held out where there are no others
SEED = 0  # the same for every run, so that no model, nor its teacher, was trained on another's evaluation images


def training_images(data: str, share: float) -> tuple[Images, Images | None, dict[str, Any]]:
    """(training images, images held out of them for evaluation, what was held out). The last two are None and {} if the
    data has an evaluation split. With a share of 0, evaluation uses the training images.
    """
    train = open_data(data, "train")
    if set(EVALUATION) & set(train.splits):
        return train, None, {}
    if not share:
        same = train.select(slice(None))
        same.where = f"{train.where}, which it was trained on"
        return train, same, {}
    if len(train) < 2:
        raise DwindleError(
            f"'{data}' has {len(train)} images and none to evaluate on; give --eval-data, or evaluate on the same with "
            "--holdout 0."
        )
    return _hold_out(train, share)


def _hold_out(train: Images, share: float) -> tuple[Images, Images, dict[str, Any]]:
    """(the rest, the share held out, its description for the checkpoint)."""
    return (*hold_out(train, share, SEED), {"share": share, "seed": SEED, "of": fingerprint(train)})


def is_flat(name: str) -> bool:
    """Whether a name is that of a folder with images directly in it, not only in subfolders."""
    folder = Path(name).expanduser()
    return folder.is_dir() and os.sep not in next(image_files(folder), os.sep)  # the folder's own images come first


def open_images(name: str) -> Images:
    """As `open_data` for the evaluation split; of a flat folder all images, also in subfolders, without labels (-1)."""
    if not is_flat(name):
        return open_data(name, "test")
    folder = Path(name).expanduser()
    paths = np.array([os.fsencode(path) for path in sorted(image_files(folder), key=Path)])
    return Images(name, partial(from_file, folder, paths), np.full(len(paths), -1))


def unlabelled_parts(data: str, eval_data: str | None, share: float) -> tuple[Images, Images, dict[str, Any]]:
    """As `training_and_evaluation`, for images whose labels are not used."""
    other = eval_data if eval_data not in (None, data) else None
    if not is_flat(data):
        if other is None or not is_flat(other):
            return training_and_evaluation(data, other, share)
        return open_data(data, "train"), open_images(other), {}
    train = open_images(data)
    if other is not None:
        return train, open_images(other), {}
    if not share or len(train) < 2:
        raise DwindleError(
            f"'{data}' has {len(train)} images and none to evaluate on; give more, --eval-data, or a share to hold out."
        )
    return _hold_out(train, share)


def training_and_evaluation(data: str, eval_data: str | None, share: float) -> tuple[Images, Images, dict[str, Any]]:
    """(training images, evaluation images, what was held out of the training images or {}).

    eval_data: another data set to evaluate on. share: of the training images to hold out where there are no others.
    """
    if eval_data not in (None, data):
        return open_data(data, "train"), open_data(str(eval_data), "test"), {}
    train, held, kept = training_images(data, share)
    return train, open_data(data, "test") if held is None else held, kept


def evaluation_images(
    model: Any,
    data: str,
    count: int | None = None,
    *,
    seed: int | None = None,
    labelled: bool = True,
    holdout: float | None = None,
) -> Images:
    """A data set's evaluation images as the model takes them, labelled by the model's classes: the first `count`, or
    `count` drawn with `seed`.

    labelled: False leaves the labels as they are.
    holdout: for data without splits, the share to evaluate on, 0 for all; None: what was held out when the model was
        trained on it, else all.
    """
    images = evaluation_part(model, data, holdout)
    if labelled:
        images = matched(images, known_classes(model), model.classes)
    images = images if count is None else limit(images, count, seed)
    images.transform = preprocess_of(model).eval_transform()
    return images


def splits_for(model: Any, data: str, eval_data: str | None = None) -> tuple[Images, Images]:
    """Training and evaluation images for a trained model, split as in its training and labelled by its classes."""
    share = _kept(model).get("share", SHARE)
    train, held, _ = training_and_evaluation(data, eval_data, share)
    names, count = known_classes(model), model.classes
    return matched(train, names, count), matched(held, names, count)


def evaluation_part(model: Any, data: str, holdout: float | None = None) -> Images:
    """The evaluation split; of data without splits what the model's training held out, else `holdout` of it, or all."""
    kept = _kept(model)
    try:
        images = open_data(data, "test")
    except NoSplit:
        images = open_data(data, "train")
        if holdout is None and kept.get("of") != fingerprint(images):
            raise
    if images.split not in (None, "train"):
        if holdout:
            raise DwindleError(f"--holdout {holdout}: '{data}' has a {images.split} split; leave it out.")
        return images
    seen = bool(kept) and kept.get("of") == fingerprint(images)
    if seen and holdout in (None, kept["share"]):
        return hold_out(images, kept["share"], kept["seed"])[1]
    part = hold_out(images, holdout, SEED)[1] if holdout else images
    if seen or _trained_on(model, data):
        part.where += ", images it was trained on among them"
    return part


def _kept(model: Any) -> dict[str, Any]:
    """The checkpoint's record of what was held out; {} if it has none that is valid."""
    kept = getattr(model, "extra", {}).get("holdout")
    if not isinstance(kept, dict):
        return {}
    share, seed = kept.get("share"), kept.get("seed")
    fits = isinstance(share, float) and 0 < share < 1 and isinstance(seed, int) and seed >= 0
    return kept if fits else {}


def _trained_on(model: Any, data: str) -> bool:
    """Whether the checkpoint names this folder as its training data, whatever the folder held at that time."""
    kept = getattr(model, "extra", {}).get("data")
    name = kept.get("train") if isinstance(kept, dict) else None
    return isinstance(name, str) and (
        name == data or Path(name).expanduser().resolve() == Path(data).expanduser().resolve()
    )


def fingerprint(images: Images) -> str:
    """A checksum of a whole data set: of its labels, and of its file names where it has files."""
    digest = hashlib.sha256(images.labels.tobytes())
    if isinstance(images.source, partial) and images.source.func is from_file:
        digest.update(images.source.args[1].tobytes())
    return digest.hexdigest()
