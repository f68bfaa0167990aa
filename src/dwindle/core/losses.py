"""Losses that all models share, one number per answer. The caller weights and averages them.

B images, C classes, P patches, D width; `...` stands for several answers to one image, such as one per depth.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

DISTILLATIONS = ("soft", "hard", "token")
COSINE, MAGNITUDE = 0.9, 0.1  # weights of the two terms of `feature_loss` (AdaPerceiver, D.1)


def label_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """(..., B) cross-entropy of logits (..., B, C). labels: (B,) classes, or (B, C) probabilities."""
    lead = logits.shape[:-1]
    labels = labels if labels.is_floating_point() else labels.long()  # torch takes no other integer type
    each = labels.expand(*lead, *labels.shape[1:]).flatten(0, len(lead) - 1)
    return F.cross_entropy(logits.flatten(0, -2), each, label_smoothing=smoothing, reduction="none").view(lead)


def distill_loss(logits: Tensor, teacher_logits: Tensor, kind: str = "soft", temperature: float = 1.0) -> Tensor:
    """(..., B) distillation loss of logits (..., B, C) from a teacher's (B, C).

    kind: 'soft' is KL(teacher || student); 'hard' is the cross-entropy with the teacher's class, and so is 'token',
    whose logits come from the distillation token's own head.
    """
    if kind != "soft":
        return label_loss(logits, teacher_logits.argmax(-1))
    student = F.log_softmax(logits.float() / temperature, -1)
    teacher = F.log_softmax(teacher_logits.float() / temperature, -1).expand_as(student)
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1) * temperature**2


def feature_loss(features: Tensor, wanted: Tensor) -> Tensor:
    """(..., B) loss of features (..., B, P, D): 0.9 (1 - cosine) + 0.1 smooth L1, averaged over patches."""
    wanted = wanted.float().expand_as(features)
    cosine = 1 - F.cosine_similarity(features.float(), wanted, dim=-1)
    size = F.smooth_l1_loss(features.float(), wanted, reduction="none").mean(-1)
    return (COSINE * cosine + MAGNITUDE * size).mean(-1)
