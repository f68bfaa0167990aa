"""Dense prediction: the class of each pixel (segmentation), or its depth. Answers come from the image's patches.

Shapes: B images, P patches, K numbers of a patch, (H, W) the map.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..io.batches import loader
from ..io.datasets import limit as first
from ..io.images import preprocess_of
from ..io.scenes import IGNORED, Scenes
from .images import ImageTask


def maps(answers: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Answers of patches (..., P, K), interpolated to maps (..., K, height, width). grid: rows and columns of patches.
    size: (height, width)."""
    square = answers.float().unflatten(-2, grid).movedim(-1, -3)
    flat = square.flatten(0, -4) if square.dim() > 4 else square
    return F.interpolate(flat, size=size, mode="bilinear").unflatten(0, square.shape[:-3])


NEAREST, FARTHEST = 1e-3, 10.0  # metres: the first bin of depths and the last, as NYUv2's are
ALIKE = 0.85  # share of the squared mean error that is forgiven: a scale that is wrong alike everywhere
EDGES, SCALES = 0.5, (1, 2, 4, 8)  # weight of the gradient loss, and the steps in pixels of its four scales


def metres(numbers: Tensor) -> Tensor:
    """Depths in metres, above 0, of a network's outputs."""
    return F.softplus(numbers) + 1e-3


def of_bins(scores: Tensor) -> Tensor:
    """Depths in metres (..., 1) of scores (..., K) of K equally wide bins: the mean over bins, each weighted by
    ReLU(score) + 0.1, as DINOv2's heads for depth read it out (AdaPerceiver, D.4, has 256 bins)."""
    bins = torch.linspace(NEAREST, FARTHEST, scores.shape[-1], device=scores.device)
    weights = scores.float().relu() + 0.1
    return (weights * bins).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)


def depths(answers: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Depths in metres (..., height, width) of answers of patches (..., P, K): one number each, or scores of bins, of
    which the mean is taken before it is interpolated, as maps of all bins would not fit in memory."""
    if answers.shape[-1] == 1:
        return metres(maps(answers, grid, size)).squeeze(-3)
    return maps(of_bins(answers), grid, size).squeeze(-3)


def scale_loss(error: Tensor, known: Tensor) -> Tensor:
    """(...) scale-invariant losses (SigLoss; Eigen et al., 2014) of log errors (..., H, W), where `known`."""
    error, count = error * known, known.sum((-2, -1)).clamp_min(1)
    square, mean = (error**2).sum((-2, -1)) / count, error.sum((-2, -1)) / count
    return (square - ALIKE * mean**2).clamp(min=1e-8).sqrt()


def gradient_loss(error: Tensor, known: Tensor) -> Tensor:
    """(...) gradient losses (Li and Snavely, 2018) of log errors (..., H, W): how much the error differs between
    neighbours of which both are known, on each scale as a mean over the known pixels, summed over scales."""
    total = error.new_zeros(error.shape[:-2])
    for step in SCALES:
        part, there = error[..., ::step, ::step], known[..., ::step, ::step]
        down = ((part[..., 1:, :] - part[..., :-1, :]).abs() * there[..., 1:, :] * there[..., :-1, :]).sum((-2, -1))
        right = ((part[..., 1:] - part[..., :-1]).abs() * there[..., 1:] * there[..., :-1]).sum((-2, -1))
        total = total + (down + right) / there.sum((-2, -1)).clamp_min(1)
    return total


def _as_targets(targets: Tensor, answers: Tensor) -> tuple[Tensor, tuple[int, int], tuple[int, int]]:
    """What `maps` and `depths` take, for maps of the targets' size of the patches of square images."""
    side = isqrt(answers.shape[-2])
    return answers, (side, side), (targets.shape[-2], targets.shape[-1])


class Dense(ImageTask):
    """A task with targets (H, W), which are cropped and flipped together with their images."""

    answers = "maps"
    unused = (
        *("augment", "min_scale", "jitter", "erase", "mixup", "cutmix", "mix_prob", "smoothing"),
        *("holdout", "skip_corrupt", "resident", "teacher_weight", "teacher_temperature", "distill"),
    )
    train_images: Scenes
    eval_images: Scenes

    def _open(self) -> None:
        source = self.source
        train, held = Scenes(self.data["train"], "train", self.name), Scenes(self.data["eval"], "val", self.name)
        if source.limit is not None:
            train, held = first(train, source.limit), first(held, source.limit)
        self.head_fits = False  # the weights' head is for classes, never for maps
        self.train_images, self.eval_images = train, held

    def _decoded(self) -> None:
        return None

    def _as_evaluated(self, images: Any) -> Scenes:
        scenes: Scenes = images.prepared(self.preprocess)
        return scenes

    def _labelled(self, train: bool, epoch: int, alike: bool) -> Any:
        scenes = (self.train_images if train else self.eval_images).prepared(self.preprocess, train)
        batch, part = self._share(train, alike)
        ready = loader(scenes, batch, train, self.recipe.workers, self.recipe.seed, *part)
        ready.set_epoch(epoch)
        return ready

    @classmethod
    def evaluation_data(cls, model: Any, data: str, count: int | None = None, holdout: float | None = None) -> Scenes:
        scenes = Scenes(data, "val", cls.name)
        scenes.known = model.classes
        return (first(scenes, count) if count else scenes).prepared(preprocess_of(model))


class Segmentation(Dense, name="segmentation"):
    """The loss is the cross-entropy of each pixel's class; the metric is mIoU."""

    shown = ("total", "cost", "miou", "gmacs")

    def _open(self) -> None:
        super()._open()
        train = self.train_images
        count = self.recipe.method_options.get("classes") or train.count_classes()
        for scenes in (train, self.eval_images):
            scenes.num_classes = scenes.known = count

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """The mean over the pixels that are not ignored; 0 where all are."""
        logits = maps(*_as_targets(targets, answers))
        lead = logits.shape[:-3]  # (..., B)
        classes = targets.expand(*lead, *targets.shape[-2:]).flatten(0, len(lead) - 1)
        losses = F.cross_entropy(logits.flatten(0, -4), classes, ignore_index=IGNORED, reduction="none")
        counted = (classes != IGNORED).sum((1, 2)).clamp_min(1)
        return (losses.sum((1, 2)) / counted).view(lead)

    @staticmethod
    def measure(answers: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The confusion matrix of each image: (B, K, K) pixels by their class and the predicted class."""
        predicted, classes = maps(*_as_targets(targets, answers)).argmax(-3), answers.shape[-1]
        known = targets != IGNORED
        cells = torch.where(known, targets * classes + predicted, classes**2).flatten(1)
        counts = torch.zeros(len(cells), classes**2 + 1, dtype=torch.float64, device=cells.device)
        counts.scatter_add_(1, cells, torch.ones_like(cells, dtype=torch.float64))
        return {"pixels": counts[:, :-1].view(-1, classes, classes)}

    @staticmethod
    def summary(sums: Mapping[str, Tensor], images: int) -> dict[str, float]:
        """The mean IoU in percent, over the classes that occur or are predicted."""
        pixels = sums["pixels"]
        intersection = pixels.diagonal()
        union = pixels.sum(0) + pixels.sum(1) - intersection
        occurs = union > 0
        return {"miou": round(float(100 * (intersection / union)[occurs].mean()), 4) if occurs.any() else 0.0}


class Depth(Dense, name="depth"):
    """The depth of each pixel in metres. The loss is a log error and its gradient; the metric is RMSE."""

    shown = ("total", "cost", "rmse", "gmacs")
    outputs = 1  # type: ignore[assignment]

    def _open(self) -> None:
        super()._open()
        if self.recipe.method_options.get("classes", 1) > 1:
            self.train_images.farthest = FARTHEST

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """SigLoss and half the gradient loss, as DINOv2's heads for depth are trained (AdaPerceiver, D.4)."""
        known = (targets > 0).to(answers.dtype)
        error = depths(*_as_targets(targets, answers)).log() - targets.clamp_min(1e-9).log()
        return scale_loss(error, known) + EDGES * gradient_loss(error, known)

    @staticmethod
    def measure(answers: Tensor, targets: Tensor) -> dict[str, Tensor]:
        known = targets > 0
        told = depths(*_as_targets(targets, answers))
        square = torch.where(known, (told - targets).double() ** 2, 0.0)
        return {"square": square.sum((1, 2)), "pixels": known.sum((1, 2)).double()}

    @staticmethod
    def summary(sums: Mapping[str, Tensor], images: int) -> dict[str, float]:
        return {"rmse": round(float((sums["square"] / sums["pixels"].clamp_min(1)).sqrt()), 4)}
