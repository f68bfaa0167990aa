"""Image classification: which class an image shows."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from ..core.losses import distill_loss, label_loss
from ..core.model import AdaptiveViT
from ..errors import DwindleError
from ..io.checkpoint import load_as
from .base import check_answers
from .images import ImageTask


class Classify(ImageTask, name="classify"):
    """The loss is cross-entropy with labels and a teacher's answers; the metric is accuracy."""

    answers = "classes"
    distils = True

    def __init_subclass__(cls, name: str | None = None, **others: Any) -> None:
        super().__init_subclass__(name, **others)
        own = [part for part in ("loss", "measure") if part in vars(cls)]
        if own and cls.answers == "classes":
            raise DwindleError(
                f"{cls.__name__} has a {own[0]} of its own, so its answers are no classes: derive it from ImageTask, "
                "with answers = 'numbers'."
            )

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        return label_loss(answers, targets, self.recipe.smoothing)

    def distill(self, answers: Tensor, teacher: Tensor) -> Tensor:
        return distill_loss(answers, teacher, self.recipe.distill, self.recipe.teacher_temperature)

    @staticmethod
    def measure(answers: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """In percent: whether the likeliest class is the right one, and whether one of the five likeliest is."""
        best = answers.topk(min(5, answers.shape[-1])).indices == targets[:, None]
        return {"top1": 100.0 * best[:, 0].double(), "top5": 100.0 * best.any(-1).double()}


def load_classifier(source: str | os.PathLike[str]) -> AdaptiveViT:
    """Load an adapted vision transformer whose answers are classes; other checkpoints are refused by their kind."""
    model = load_as(AdaptiveViT, source)
    check_answers(model, os.fspath(source), "classes")
    return model
