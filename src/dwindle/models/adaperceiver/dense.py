"""Dense prediction (C.6, D.3, D.4): an answer for each patch at the image's resolution, from as few latents as asked.

Data: FOLDER/train and FOLDER/val, each with images/ and beside it masks/ (class numbers, 255 is left out) or depths/
(16-bit PNG in millimetres, 0 is left out), matched by name. ADE20K's own layout (images/training, annotations/training)
is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ...errors import DwindleError, unknown
from ...io.batches import loader
from ...io.datasets import Images
from ...io.datasets import limit as first
from ...io.folders import is_image
from ...io.images import Preprocess, load_image, open_file, preprocess_of
from ...runtime.dtypes import dtype_of
from ...settings import Share
from ...tasks.classify import Classify
from ...train.learner import Learner
from .model import AdaPerceiver
from .recipe import AdaRecipe, Three
from .train import AdaLearner

TASKS = {"segmentation": "masks", "depth": "depths"}
IGNORED = 255
ADE = {"train": "training", "val": "validation"}


def maps(answers: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Answers of patches (..., P, K) as maps (..., K, height, width)."""
    square = answers.float().unflatten(-2, grid).movedim(-1, -3)
    flat = square.flatten(0, -4) if square.dim() > 4 else square
    return F.interpolate(flat, size=size, mode="bilinear").unflatten(0, square.shape[:-3])


def metres(logits: Tensor) -> Tensor:
    """The depth a network's one number per patch stands for: above 0."""
    return F.softplus(logits) + 1e-3


def _image(paths: list[Path], i: int) -> Image.Image:
    return load_image(paths[i])


class Scenes(Images):
    """`scenes[i]` is (image, target) after the same cut of both; target (H, W): classes, or metres."""

    def __init__(self, folder: str, split: str, task: str) -> None:
        images, targets, self.shift = _places(Path(folder), split, task)
        by_name = {path.stem: path for path in sorted(targets.iterdir()) if is_image(path.name)}
        found = [path for path in sorted(images.iterdir()) if is_image(path.name)]
        lone = next((path for path in found if path.stem not in by_name), None)
        if not found or lone is not None:
            what = f"{images} holds no images" if not found else f"{lone} has no target of its name in {targets}"
            raise DwindleError(f"{what}; every image needs one.")
        self.task, self.targets = task, [by_name[path.stem] for path in found]
        super().__init__(folder, partial(_image, found), np.zeros(len(found)), split=split)
        self.num_classes, self.size, self.train = 1, 224, False
        self.known: int | None = None  # how many classes a mask may have
        self.preprocess = Preprocess()
        listed = Path(folder) / "classes.txt"
        if task == "segmentation" and listed.is_file():
            try:
                self.classes = [line.strip() for line in listed.read_text("utf-8").rstrip().splitlines()]
            except UnicodeDecodeError as error:
                raise DwindleError(f"{listed} is no UTF-8 ({error}); save it as UTF-8, a name a line.") from error

    def count_classes(self) -> int:
        """From classes.txt, a name per line, or by looking at every mask."""
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
        path = self.targets[int(self.rows[i])]
        try:
            with open_file(path) as image:
                values = np.asarray(image)
        except Exception as error:  # damaged bytes may make a decoder raise anything
            raise DwindleError(f"Cannot decode the target {path}: {error}; replace it.") from error
        if values.ndim != 2:
            raise DwindleError(f"{path} has several channels, and a target one number a pixel; convert it.")
        if self.task == "depth":
            return values.astype(np.float32) / 1000
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
        # Classes and holes do not blend.
        y = F.interpolate(y[None], size=(self.size, self.size), mode="nearest-exact")[0, 0]
        return squeezed(x, self.size, self.preprocess), y.float() if self.task == "depth" else y.long()


def pixels(photo: Image.Image) -> Tensor:
    """(3, height, width) from 0 to 1."""
    return torch.from_numpy(np.asarray(photo).copy()).permute(2, 0, 1).float() / 255


def squeezed(x: Tensor, side: int, preprocess: Preprocess) -> Tensor:
    """An image's `pixels`, whole, as the square that a network takes."""
    x = F.interpolate(x[None], size=(side, side), mode="bilinear", antialias=True)[0]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (preprocess.mean, preprocess.std))
    return (x - mean) / std


def _places(folder: Path, split: str, task: str) -> tuple[Path, Path, bool]:
    plain = folder / split / "images", folder / split / TASKS[task]
    if all(place.is_dir() for place in plain):
        return *plain, False
    ade = folder / "images" / ADE[split], folder / "annotations" / ADE[split]
    if task == "segmentation" and all(place.is_dir() for place in ade):
        return *ade, True
    raise DwindleError(
        f"{folder} lacks {split}/images and {split}/{TASKS[task]}; lay the data out so, matched by name."
    )


class Dense(Classify):
    """Images and their targets, cut and flipped together."""

    def _open(self) -> None:
        kind, source = self.recipe.task, self.source
        train, held = Scenes(self.data["train"], "train", kind), Scenes(self.data["eval"], "val", kind)
        if source.limit is not None:
            train, held = first(train, source.limit), first(held, source.limit)  # type: ignore[assignment]
        if kind == "segmentation":
            train.num_classes = held.num_classes = self.recipe.method_options.get("classes") or train.count_classes()
            train.known = held.known = train.num_classes
        self.train_images, self.eval_images = train, held

    def _decoded(self) -> None:
        return None

    def batches(self, train: bool, epoch: int = 0, alike: bool = False) -> Any:
        scenes: Any = self.train_images if train else self.eval_images
        scenes.size, scenes.train, scenes.preprocess, scenes.transform = (
            self.preprocess.size,
            train,
            self.preprocess,
            True,
        )
        ready = loader(scenes, self.batch, train, self.recipe.workers, self.recipe.seed)
        ready.set_epoch(epoch)
        return ready


class Segmentation(Dense, name="segmentation"):
    pass


class DepthMaps(Dense, name="depth"):
    pass


@dataclass
class DenseRecipe(AdaRecipe):
    """Token loss only (D.3, D.4), on images cut and flipped together with their targets. task: 'segmentation', or
    'depth'."""

    task: Literal["segmentation", "depth"] = "segmentation"
    stages: Three = (1.0, 0.0, 0.0)
    augment: str | None = None
    erase: Share = 0.0

    def check(self) -> None:
        super().check()
        for name in ("augment", "min_scale", "jitter", "erase", "holdout", "skip_corrupt", "resident"):
            given = getattr(self, name)
            if given != getattr(DenseRecipe, name):
                raise DwindleError(f"{name} = {given}: it has no effect on dense prediction; leave it out.")
        if self.teacher is not None or self.mixup or self.cutmix:
            raise DwindleError("Dense prediction learns from its masks alone; leave teacher, mixup and cutmix out.")

    def learner(self) -> type[Learner]:
        return DenseLearner


class DenseLearner(AdaLearner):
    """As `AdaLearner`, with an answer for each patch."""

    recipe: DenseRecipe
    task: Any

    def _build(self, network: Any) -> AdaPerceiver:
        self.recipe.method_options = self.recipe.method_options | {"outputs": "dense"}
        return super()._build(network)

    def loss(self, answers: Tensor, y: Tensor, taught: Tensor | None) -> Tensor:
        grid, size = self.model.grid((self.model.image,) * 2), (y.shape[-2], y.shape[-1])
        return torch.stack([task_loss(maps(answer, grid, size), y, self.recipe.task) for answer in answers])

    @torch.no_grad()
    def evaluate(self, model: AdaPerceiver, **options: Any) -> dict[str, float]:
        """mIoU or RMSE with the most tokens and with the fewest."""
        training = model.training
        model.eval()
        scores = [Score(self.recipe.task, model.classes) for _ in model.tokens]
        for x, y in self.task.batches(train=False):
            answers = model.every(x.to(self.device), depths=[model.depth])[0]
            for score, answer in zip(scores, answers):
                score.add(maps(answer, model.grid((model.image,) * 2), (y.shape[-2], y.shape[-1])), y.to(self.device))
        model.train(training)
        name, found = scores[0].name, [round(score.value, 4) for score in scores]
        gmacs, images = round(model.static_macs() / 1e9, 4), len(self.task.eval_images)
        return {name: found[-1], f"{name}_fewest_tokens": found[0], "gmacs": gmacs, "images": images}


@torch.inference_mode()
def evaluate(
    model: AdaPerceiver,
    scenes: Any,
    *,
    batch: int = 16,
    workers: int = 2,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] = lambda images: None,
    **setting: Any,
) -> dict[str, Any]:
    """mIoU or RMSE of a trained network on `Scenes` at one setting, and its cost."""
    place = torch.device(device)
    fast = model.eval().to(place).prepare()
    scenes.size, scenes.preprocess, scenes.transform = model.image, preprocess_of(model), True
    score, macs, number = Score(scenes.task, model.classes), 0.0, dtype_of(model)
    for x, y in loader(scenes, batch, workers=workers):
        out = fast(x.to(place, number), **setting)
        score.add(maps(out.logits, model.grid((model.image,) * 2), (y.shape[-2], y.shape[-1])), y.to(place))
        macs += float(model.macs(out.trace).sum())
        progress(len(y))
    cost = {"gmacs": round(macs / len(scenes) / 1e9, 4), "gmacs_static": round(model.static_macs() / 1e9, 4)}
    return {score.name: round(score.value, 4), **cost, "images": len(scenes)}


def task_of(model: AdaPerceiver, source: str) -> str:
    """What a dense checkpoint was trained for."""
    task = model.extra.get("recipe", {}).get("task")
    if not isinstance(task, str) or task not in TASKS:
        raise DwindleError(
            f"{source} gives features of patches, no maps; train it for a task first (dwindle train ada_segment)."
        )
    return task


def task_loss(seen: Tensor, target: Tensor, task: str) -> Tensor:
    """Of maps (B, K, H, W): cross-entropy; for depth the log error, 0.85 of a common shift forgiven."""
    if task == "segmentation":
        if not (target != IGNORED).any():
            return seen.sum() * 0
        return F.cross_entropy(seen, target, ignore_index=IGNORED)
    known = target > 0
    if not known.any():
        return seen.sum() * 0
    error = metres(seen[:, 0])[known].log() - target[known].log()
    return ((error**2).mean() - 0.85 * error.mean() ** 2).clamp(min=1e-8).sqrt()


class Score:
    """mIoU (percent, over classes that occur) or RMSE (metres), gathered over batches."""

    def __init__(self, task: str, classes: int) -> None:
        self.name = "miou" if task == "segmentation" else "rmse"
        self.classes = classes
        self.pairs = torch.zeros(classes, classes, dtype=torch.float64)  # truth, answer
        self.square, self.count = 0.0, 0

    def add(self, seen: Tensor, target: Tensor) -> None:
        if self.name == "miou":
            known = target != IGNORED
            both = target[known] * self.classes + seen.argmax(1)[known]
            self.pairs += torch.bincount(both.cpu(), minlength=self.classes**2).view_as(self.pairs)
            return
        known = target > 0
        self.square += float(((metres(seen[:, 0]) - target)[known].double() ** 2).sum())
        self.count += int(known.sum())

    @property
    def value(self) -> float:
        if self.name == "rmse":
            return (self.square / max(self.count, 1)) ** 0.5
        hit = self.pairs.diagonal()
        union = self.pairs.sum(0) + self.pairs.sum(1) - hit
        return float(100 * (hit / union)[union > 0].mean()) if (union > 0).any() else 0.0


@torch.no_grad()
def predict(
    model: AdaPerceiver,
    images: Tensor,
    task: str = "segmentation",
    size: tuple[int, ...] | None = None,
    **setting: Any,
) -> Tensor:
    """(B, H, W) classes or metres, at the images' resolution, or at another `size`, whatever the number of latents."""
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if model.outputs != "dense":
        raise DwindleError("This network answers once for an image; maps need a dense network (outputs='dense').")
    (height, width), wanted = images.shape[-2:], size or images.shape[-2:]
    seen = maps(model(images, **setting).logits, model.grid((height, width)), (wanted[0], wanted[1]))
    return seen.argmax(1) if task == "segmentation" else metres(seen[:, 0])
