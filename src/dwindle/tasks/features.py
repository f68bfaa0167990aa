"""The features of images as a teacher has them: no labels are asked for.

Shapes: B images, T tokens, D width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..core.losses import feature_loss
from .images import ImageTask


class Features(ImageTask, name="features"):
    """A cosine and a smooth L1 loss of each token's state to the teacher's; their cosine."""

    answers = "features"
    distils = needs_teacher = True
    unused = ("mixup", "cutmix", "mix_prob", "smoothing", "label_weight", "distill", "teacher_temperature")
    shown = ("total", "cost", "cosine", "gmacs")

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Labels are not looked at."""
        return answers.new_zeros(answers.shape[:-2])

    def distill(self, answers: Tensor, teacher: Tensor) -> Tensor:
        return feature_loss(answers, teacher)

    @staticmethod
    def measure(answers: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """targets: the teacher's features (B, T, D)."""
        return {"cosine": F.cosine_similarity(answers.float(), targets.float(), dim=-1).mean(-1).double()}
