"""Images with a target for each pixel: its class, or its depth.

The data is FOLDER/train and FOLDER/val, each with images/ and beside it masks/ (class numbers, 255 is left out) or
depths/ (16-bit PNG in millimetres, 0 is left out), matched by name. ADE20K's own layout (images/training,
annotations/training) is read too.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..errors import DwindleError
from .datasets import Images
from .folders import is_image
from .images import Preprocess, load_image, open_file

PLACES = {"segmentation": "masks", "depth": "depths"}  # the folder of each task's targets
IGNORED = 255  # the class of pixels that do not count
ADE = {"train": "training", "val": "validation"}


def _unchanged(image: Image.Image) -> Image.Image:
    return image


def _image(paths: list[Path], i: int) -> Image.Image:
    return load_image(paths[i])


class Scenes(Images):
    """`scenes[i]` is (image, target) after the same crop of both. target: (H, W) classes, or depths in metres."""

    def __init__(self, folder: str, split: str, task: str) -> None:
        images, targets, self.shift = _places(Path(folder), split, task)
        by_name = {path.stem: path for path in sorted(targets.iterdir()) if is_image(path.name)}
        found = [path for path in sorted(images.iterdir()) if is_image(path.name)]
        unmatched = next((path for path in found if path.stem not in by_name), None)
        if not found or unmatched is not None:
            what = f"{images} holds no images" if not found else f"{unmatched} has no target of its name in {targets}"
            raise DwindleError(f"{what}; every image needs one.")
        self.task, self.targets = task, [by_name[path.stem] for path in found]
        super().__init__(folder, partial(_image, found), np.zeros(len(found)), split=split)
        self.num_classes, self.train = 1, False
        self.known: int | None = None  # how many classes a mask may have
        self.farthest: float | None = None  # the largest depth in metres that a model can tell
        self.preprocess = Preprocess()
        self.transform = _unchanged  # `__getitem__` resizes an image with its target
        listed = Path(folder) / "classes.txt"
        if task == "segmentation" and listed.is_file():
            try:
                self.classes = [line.strip() for line in listed.read_text("utf-8").rstrip().splitlines()]
            except UnicodeDecodeError as error:
                raise DwindleError(f"{listed} is no UTF-8 ({error}); save it as UTF-8, a name a line.") from error

    def prepared(self, preprocess: Preprocess, train: bool = False) -> Self:
        """The same scenes, prepared for a model with this preprocessing. train: cropped and flipped at random."""
        scenes = copy.copy(self)
        scenes.preprocess, scenes.train = preprocess, train
        return scenes

    def count_classes(self) -> int:
        """The number of classes: of names in classes.txt, of ADE20K, or one more than the largest in any mask."""
        if self.classes:
            return len(self.classes)
        if self.shift:
            return 150
        largest = 0
        for i in range(len(self)):
            mask = self.target(i)
            largest = max(largest, int(mask[mask != IGNORED].max(initial=0)))
        return largest + 1

    def target(self, i: int) -> np.ndarray:
        """(H, W): the classes of image i, or its depths in metres."""
        path = self.targets[int(self.rows[i])]
        try:
            with open_file(path) as image:
                values = np.asarray(image)
        except Exception as error:  # damaged bytes may make a decoder raise anything
            raise DwindleError(f"Cannot decode the target {path}: {error}; replace it.") from error
        if values.ndim != 2:
            raise DwindleError(f"{path} has several channels, and a target one number a pixel; convert it.")
        if self.task == "depth":
            depths = values.astype(np.float32) / 1000
            if self.farthest is not None and float(depths.max(initial=0)) > self.farthest:
                raise DwindleError(
                    f"{path} has a depth of {float(depths.max()):.1f} m, and bins end at {self.farthest:g} m; give "
                    "method.classes=1, which has no bins."
                )
            return depths
        values = values.astype(np.int64)
        if self.shift:  # ADE20K: 0 is "other", which does not count
            values = np.where(values == 0, IGNORED, values - 1)
        largest = int(values[values != IGNORED].max(initial=0))
        if self.known is not None and largest >= self.known:
            raise DwindleError(
                f"{path} has the class {largest}, and known are 0 to {self.known - 1} ({IGNORED} is left out); mend "
                "the mask, or train with all classes named in classes.txt beside the splits."
            )
        return values

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        x, target = pixels(self.image(i)), torch.from_numpy(self.target(i))
        if x.shape[-2:] != target.shape:
            raise DwindleError(
                f"{self.targets[int(self.rows[i])]} is not as large as its image ({tuple(target.shape)}, not "
                f"{tuple(x.shape[-2:])}); every pixel needs a target, so resize it without blending."
            )
        y = target[None].double()
        if self.train:
            scale = 0.5 + 0.5 * float(torch.rand(()))
            height, width = (max(1, round(scale * side)) for side in x.shape[-2:])
            top = int(torch.randint(x.shape[-2] - height + 1, ()))
            left = int(torch.randint(x.shape[-1] - width + 1, ()))
            x, y = (v[:, top : top + height, left : left + width] for v in (x, y))
            if torch.rand(()) < 0.5:
                x, y = x.flip(-1), y.flip(-1)
        size = self.preprocess.size
        # The nearest pixel is taken: an average of classes, or of depths and 0 for unknown, would mean nothing.
        y = F.interpolate(y[None], size=(size, size), mode="nearest-exact")[0, 0]
        return squeezed(x, size, self.preprocess), y.float() if self.task == "depth" else y.long()


def pixels(photo: Image.Image) -> Tensor:
    """An image as (3, height, width), from 0 to 1."""
    return torch.from_numpy(np.asarray(photo).copy()).permute(2, 0, 1).float() / 255


def squeezed(x: Tensor, side: int, preprocess: Preprocess) -> Tensor:
    """A whole image, given as `pixels`, resized to a square without keeping its aspect ratio, and normalised."""
    x = F.interpolate(x[None], size=(side, side), mode="bilinear", antialias=True)[0]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (preprocess.mean, preprocess.std))
    return (x - mean) / std


def _places(folder: Path, split: str, task: str) -> tuple[Path, Path, bool]:
    """The folders of a split's images and of its targets, and whether they have ADE20K's layout and numbering."""
    plain = folder / split / "images", folder / split / PLACES[task]
    if all(place.is_dir() for place in plain):
        return *plain, False
    ade = folder / "images" / ADE[split], folder / "annotations" / ADE[split]
    if task == "segmentation" and all(place.is_dir() for place in ade):
        return *ade, True
    raise DwindleError(
        f"{folder} lacks {split}/images and {split}/{PLACES[task]}; lay the data out so, matched by name."
    )
