"""The features of images as a teacher has them: no labels are asked for, and a folder of images will do.

Shapes: B images, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..core.losses import feature_loss
from ..io.datasets import limit as first
from ..io.sets import unlabelled_parts
from .images import ImageTask

CLASS = 0.5  # of the class token beside all tokens


class Features(ImageTask, name="features"):
    """A cosine and a smooth L1 loss of each token's state to the teacher's; their cosine."""

    answers = "features"
    distils = needs_teacher = True
    unused = ("mixup", "cutmix", "mix_prob", "smoothing", "label_weight", "distill", "teacher_temperature")
    shown = ("total", "cost", "cosine", "gmacs")

    def _open(self) -> None:
        if self.source.opened is not None:
            train, held = self.source.opened
        else:
            given = (self.data["train"], self.source.eval_data, self.recipe.holdout)
            train, held, self.holdout = unlabelled_parts(*given)
        limit, parts = self.source.limit, (train, held)
        for images in parts:
            images.skip = self.recipe.skip_corrupt
        self.train_images, self.eval_images = parts if limit is None else (first(train, limit), first(held, limit))

    def extra(self) -> dict[str, Any]:
        """What the data calls its classes says nothing of the model's answers."""
        return {name: value for name, value in super().extra().items() if name != "classes"}

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Labels are not looked at."""
        return answers.new_zeros(answers.shape[:-2])

    def distill(self, answers: Tensor, teacher: Tensor) -> Tensor:
        """Over all tokens; those that stand for the image count once more, as they are few."""
        whole = feature_loss(answers, teacher)
        if not self.prefix:
            return whole
        return whole + CLASS * feature_loss(answers[..., : self.prefix, :], teacher[..., : self.prefix, :])

    @staticmethod
    def measure(answers: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """targets: the teacher's features (B, T, D)."""
        return {"cosine": F.cosine_similarity(answers.float(), targets.float(), dim=-1).mean(-1).double()}
