"""Feature distillation: learn a teacher's features of images. No labels are needed; a folder of images is enough.

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

CLASS = 0.5  # weight of the prefix tokens' own loss beside that of all tokens


class Features(ImageTask, name="features"):
    """The loss is a cosine and a smooth L1 distance of each token's state to the teacher's; the metric is a cosine."""

    answers = "features"
    distils = needs_teacher = True
    unused = ("smoothing", "label_weight", "distill", "teacher_temperature")
    shown = ("total", "cost", "cosine", "gmacs")

    def _open(self) -> None:
        if self.source.opened is not None:
            train, held = self.source.opened
        else:
            data, eval_data = self.data["train"], self.source.eval_data
            train, held, self.holdout = unlabelled_parts(data, eval_data, self.recipe.holdout)
        limit, parts = self.source.limit, (train, held)
        for images in parts:
            images.skip = self.recipe.skip_corrupt
        self.train_images, self.eval_images = parts if limit is None else (first(train, limit), first(held, limit))

    def extra(self) -> dict[str, Any]:
        """Without the data's class names, because the model's answers are not classes."""
        return {name: value for name, value in super().extra().items() if name != "classes"}

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Zeros, because labels are not used."""
        return answers.new_zeros(answers.shape[:-2])

    def distill(self, answers: Tensor, teacher: Tensor) -> Tensor:
        """The loss of all tokens; prefix tokens, which are few, count once more."""
        all_tokens = feature_loss(answers, teacher)
        if not self.prefix:
            return all_tokens
        return all_tokens + CLASS * feature_loss(answers[..., : self.prefix, :], teacher[..., : self.prefix, :])

    @staticmethod
    def measure(answers: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The mean cosine over tokens. targets: the teacher's features (B, T, D)."""
        return {"cosine": F.cosine_similarity(answers.float(), targets.float(), dim=-1).mean(-1).double()}
