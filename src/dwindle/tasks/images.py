"""The base class of tasks on images: opens them, numbers their classes as the head does, and makes batches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import processes as ranks
from ..errors import DwindleError
from ..files import write_text
from ..io.augment import Augment
from ..io.batches import loader
from ..io.checkpoint import find, shipped
from ..io.classes import by_name, imagenet_names
from ..io.config import read_config
from ..io.datasets import Images, check_labels, in_order, matched
from ..io.datasets import limit as first
from ..io.draws import mix, seeded
from ..io.images import Preprocess
from ..io.resident import CROP_PCT, RESAMPLED, Resident
from ..io.sets import evaluation_images, training_and_evaluation
from .base import Source, Task

CORRUPT = "corrupt.jsonl"
LARGE = 10_000  # training images; a model overfits to fewer
EVALUATED = 128  # images of a batch in evaluation
DECODED = 100_000  # the most images that are decoded onto the device


class ImageTask(Task):
    """Images and their targets, which are the images' labels unless a task overrides `targets`. A user's task derives
    from this class, or from `Classify` where its targets are classes.

    `fit(preprocess)` is called once the model's size is known.
    """

    train_images: Images
    eval_images: Images
    preprocess: Preprocess
    resident: dict[str, Resident] | None = None
    mixup: Any = None
    prefix = 0  # the number of the model's tokens before its patches
    compiled = False  # whether augmentation on the device is compiled

    def __init_subclass__(cls, name: str | None = None, **others: Any) -> None:
        super().__init_subclass__(name, **others)
        if "targets" in vars(cls) and "evaluation_data" not in vars(cls):
            cls.evaluation_data = classmethod(Task.evaluation_data.__func__)  # type: ignore[attr-defined,assignment]

    def __init__(self, recipe: Any, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        self.halves = recipe.halves(device)
        self.data: dict[str, Any] = {"train": source.data, "eval": source.eval_data or source.data}
        self.head_fits = True  # whether the weights' head has the data's classes
        self._open()

    def _open(self) -> None:
        """Open the images. Where the weights' head has the same classes, they are numbered as in the head."""
        recipe, data, eval_data = self.recipe, self.data["train"], self.source.eval_data
        if self.source.opened is not None:
            train, held = self.source.opened
        else:
            train, held, self.holdout = training_and_evaluation(data, eval_data, recipe.holdout)
        check_labels(train.labels, train.num_classes)
        if held.classes != train.classes or (eval_data not in (None, data) and train.classes is None):
            held = matched(held, train.classes, train.num_classes, "the training data")
        check_labels(held.labels, train.num_classes)
        known = weights_classes(recipe.weights, train)
        self.head_fits = known is None or train.classes is None or by_name(train.classes, known).both == len(known)
        if known is not None and self.head_fits:
            train, held = in_order(train, known), in_order(held, known)
        for images in (train, held):
            images.skip = recipe.skip_corrupt
        limit = self.source.limit
        parts = (train, held) if limit is None else (first(train, limit), first(held, limit))
        self.train_images, self.eval_images = parts

    @property
    def images(self) -> tuple[Images, Images]:
        return self.train_images, self.eval_images

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return self.train_images.num_classes

    def targets(self, x: Tensor, y: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """The images and targets of a batch, from its images and labels. draw: a generator with the same state for the
        same epoch, and for every evaluation."""
        return x, y

    @classmethod
    def evaluation_data(cls, model: Any, data: str, count: int | None = None, holdout: float | None = None) -> Images:
        return evaluation_images(model, data, count, holdout=holdout)

    def fit(self, preprocess: Preprocess) -> None:
        """Prepare images as the model takes them, decode them if they are kept on the device, and count the steps."""
        self.preprocess = whole_if_small(preprocess, self.train_images)
        self.resident = self.source.resident or self._decoded()
        for images, store in zip(self.images, (self.resident or {}).values()):
            images.corrupt |= store.corrupt
        self._count_steps(pairs=bool(self.recipe.mixup or self.recipe.cutmix))
        if self.recipe.mixup or self.recipe.cutmix:
            from timm.data import Mixup

            # The loss smooths labels, so that smoothing is the same with and without mixing.
            options: dict[str, Any] = {"label_smoothing": 0.0, "num_classes": self.outputs}
            self.mixup = Mixup(self.recipe.mixup, self.recipe.cutmix, prob=self.recipe.mix_prob, **options)

    def _count_steps(self, pairs: bool = False) -> None:
        recipe, count = self.recipe, len(self.train_images)
        self.batch = min(recipe.share(ranks.world()), count // ranks.world())
        if pairs:  # images are mixed in pairs
            self.batch -= self.batch % 2
        if not self.batch:
            least = ranks.world() * (2 if pairs else 1)
            raise DwindleError(
                f"{count} training images are too few for {ranks.world()} processes; give at least {least}."
            )
        self.steps_per_epoch = count // (self.batch * ranks.world())
        self.steps = recipe.steps or recipe.epochs * self.steps_per_epoch
        self.eval_every, self.save_every = recipe.eval_every, recipe.save_every

    def _decoded(self) -> dict[str, Resident] | None:
        recipe, pre = self.recipe, self.preprocess
        small = len(self.train_images) + len(self.eval_images) <= DECODED
        wanted = recipe.resident if recipe.resident is not None else self.device.type == "cuda" and small
        if not wanted or (recipe.resident is None and pre.interpolation not in RESAMPLED):
            return None
        settings: dict[str, Any] = {"crop_pct": pre.crop_pct, "interpolation": pre.interpolation}
        return {
            "train": Resident(self.train_images, pre.size, self.device, **settings, replace=True),
            "eval": Resident(self.eval_images, pre.size, self.device, **settings),
        }

    def batches(self, train: bool, epoch: int = 0, alike: bool = False) -> Iterable[tuple[Tensor, Tensor]]:
        """This process's batches. alike: every process gets the joint batches of all."""
        labelled = self._labelled(train, epoch, alike)
        return labelled if type(self).targets is ImageTask.targets else self._with_targets(labelled, train, epoch)

    def _with_targets(self, labelled: Iterable[Any], train: bool, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(mix(self.recipe.seed, epoch + 1) if train else 0)
        for x, y in labelled:
            yield self.targets(x, y, draw)

    def _labelled(self, train: bool, epoch: int, alike: bool) -> Iterable[tuple[Tensor, Tensor]]:
        """Batches of images and their labels, from the device or from workers."""
        recipe, pre = self.recipe, self.preprocess
        images = self.train_images if train else self.eval_images
        batch, part = self._share(train, alike)
        how: dict[str, Any] = {"min_scale": recipe.min_scale, "jitter": recipe.jitter, "erase": recipe.erase}
        how["randaugment"] = recipe.augment
        if self.resident:
            store = self.resident["train" if train else "eval"]
            dtype = torch.bfloat16 if self.halves and train else torch.float32
            how |= {"dtype": dtype, "part": part, "compiled": self.compiled}
            return store.batches(batch, train, recipe.seed, epoch, pre.mean, pre.std, **how)
        batches = loader(
            self._as_evaluated(images), batch, train, recipe.workers, recipe.seed, *part, Augment.of(pre, **how)
        )
        batches.set_epoch(epoch)
        return batches

    def _share(self, train: bool, alike: bool) -> tuple[int, tuple[int, int]]:
        """Images of a batch, and (rank, world) of this process."""
        batch = self.batch if train else EVALUATED
        return (batch * ranks.world(), (0, 1)) if alike else (batch, (ranks.rank(), ranks.world()))

    def mix_batch(self, x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
        if self.mixup is None:
            return x, y
        with seeded(self.recipe.seed, step):
            x, y = self.mixup(x, y)
        return x, y.to(x.device)

    def some(self, count: int, batch: int) -> Tensor:
        """Training images prepared as in evaluation, on the CPU; the same for every process."""
        return torch.cat(
            [x for x, _ in loader(self._as_evaluated(self.train_images.select(self._drawn(count))), batch)]
        )

    def _as_evaluated(self, images: Images) -> Images:
        return images.with_transform(self.preprocess.eval_transform())

    def _drawn(self, count: int) -> np.ndarray:
        return np.random.default_rng(self.recipe.seed).permutation(len(self.train_images))[:count]

    def typical(self, count: int | None = None) -> Tensor:
        """Training images whose cost is like that of unseen images, to set a budget on; the same for every process.

        They are prepared as in evaluation. A model overfits to a small data set, whose images then cost less than
        unseen ones; augmented they cost more, so half are augmented.
        """
        count = count or (1024 if self.device.type == "cuda" else 128)
        clean = count if len(self.train_images) >= LARGE else (count + 1) // 2
        if self.resident:
            rows, pre = torch.from_numpy(self._drawn(clean)), self.preprocess
            views = self.resident["train"].view(rows, pre.mean, pre.std)
        else:
            views = self.some(clean, self.batch).to(self.device)
        return torch.cat([views, *self._augmented(count - clean)])

    def _augmented(self, count: int) -> Iterator[Tensor]:
        """Batches of `count` augmented training images in all; a small data set is passed over several times."""
        draw = 0
        while count > 0:
            for x, _ in self.batches(train=True, epoch=self.epochs + draw, alike=True):
                yield x[:count].to(self.device)
                count -= len(x)
                if count <= 0:
                    break
            draw += 1

    def about(self) -> dict[str, Any]:
        return self.eval_images.about()

    def evaluated_on(self) -> str | None:
        return self.eval_images.summary()

    def extra_metrics(self) -> dict[str, Any]:
        return {"corrupt_training": len(self.train_images.corrupt)} if self.train_images.corrupt else {}

    def extra(self) -> dict[str, Any]:
        return super().extra() | {
            "preprocess": self.preprocess.to_dict(),
            "classes": self.train_images.classes,
            "data": self.data,
            "holdout": self.holdout,
        }

    def gather(self) -> None:
        for images in self.images:
            for found in ranks.gathered(images.corrupt):
                images.corrupt |= found

    def write(self, out: Path) -> None:
        if skipped := {why: name for images in self.images for name, why in images.corrupt_files()}:
            note_corrupt(out, skipped)

    def state(self) -> dict[str, Any]:
        return {"classes": self.train_images.classes}

    def check_state(self, state: dict[str, Any], out: Path) -> None:
        if state.get("classes", self.train_images.classes) != self.train_images.classes:
            raise DwindleError(f"The classes of the data are not those {out} began with; resume with these.")


def is_checkpoint(weights: str | None) -> bool:
    return weights is not None and (Path(weights).is_dir() or weights in shipped())


def weights_classes(weights: str | None, images: Images) -> list[str] | None:
    """The class names of these weights' head, if it has as many classes as the images, else None. Weights that store no
    names get ImageNet's."""
    names = None
    if weights is not None and is_checkpoint(weights):
        names = read_config(find(weights)).get("extra", {}).get("classes")
    if not names and images.classes and weights is not None:
        names = imagenet_names(images.num_classes)
    return names if names and len(names) == images.num_classes else None


def whole_if_small(wanted: Preprocess, images: Images) -> Preprocess:
    """The preprocessing, without its crop for images below the model's size, which are enlarged whole."""
    small = min(images.sample().size) < wanted.size
    return dataclasses.replace(wanted, crop_pct=1.0 if small else CROP_PCT)


def note_corrupt(out: Path, found: dict[str, str]) -> None:
    """Write corrupt.jsonl, the skipped images, with those it holds from before the run was resumed. found: the images'
    names by the reason."""
    path = out / CORRUPT
    if path.exists():
        before = map(json.loads, path.read_text("utf-8").splitlines())
        found = {line["reason"]: line["image"] for line in before} | found
    lines = (json.dumps({"image": found[reason], "reason": reason}) + "\n" for reason in sorted(found))
    write_text(path, "".join(lines))
